"""A made-up work folder, written as the commands write it, and a reader of the page."""

from __future__ import annotations

import json
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvshot_ds import metrics
from kvshot_ds.config import Recipe, dump_recipe
from kvshot_ds.files import write_atomic, write_json

CONVERSATIONS, STEPS = 24, 7
HOW: dict[str, Any] = {"resamples": 200, "confidence": 0.95, "seed": 0}
RUNS: dict[str, dict[str, Any]] = {
    "a_hidden": {"family": "hidden_only", "depth": 1},
    "b_kv": {"family": "kv_only", "depth": 2, "kv": {"injection": "linear_rope"}},
    "c_none": {"family": "kv_only", "depth": 2, "kv": {"injection": "none"}},
    "d_hybrid": {"family": "hybrid", "depth": 1, "kv": {"injection": "linear_rope"}},
}
KV = {"kv": {"injection": "linear_rope"}}
MANY: dict[str, dict[str, Any]] = {
    "hidden_only": {"family": "hidden_only", "depth": 1},
    "mtp": {"family": "hidden_only", "depth": 1, "hidden_layers": "last"},
    "kv_only": {"family": "kv_only", "depth": 2, **KV},
    "kv_none": {"family": "kv_only", "depth": 2, "kv": {"injection": "none"}},
    "hybrid": {"family": "hybrid", "depth": 1, **KV},
    "dflash": {"family": "dflash", "depth": 2, "block_size": 8},
    "kv_block": {"family": "kv_block", "depth": 2, "block_size": 8, **KV},
    "hybrid_block": {"family": "hybrid_block", "depth": 2, "block_size": 8, **KV, "gate": {"kind": "scalar", "init": "bias:-1"}},
}
RATES = {"a_hidden": (0.40, 0.86), "b_kv": (0.36, 0.99), "c_none": (0.24, 1.0), "d_hybrid": (0.42, 0.9)}


def recipe_for(
    work: Path, name: str = "demo", drafter: dict[str, Any] | None = None, report: dict[str, Any] | None = None, train: dict[str, Any] | None = None
) -> Recipe:
    data: dict[str, Any] = {"name": name, "work": work, "target": {"path": "/models/some-target"}, "eval": {"bootstrap": 200}, "report": report or {}}
    if drafter:
        data["train"] = {"drafter": drafter, **(train or {})}
    return Recipe.model_validate(data)


def write_eval(folder: Path, name: str, drafter: dict[str, Any], target: str) -> None:
    """eval.json and eval_conversations.json of a simulated drafter; the same conversations for every name."""
    shared, rng = np.random.default_rng(5), np.random.default_rng(sum(map(ord, name)))
    rows, ease = shared.integers(40, 90, size=CONVERSATIONS), shared.normal(0, 0.04, size=CONVERSATIONS)
    bigram = shared.binomial(rows, 0.25 + ease)
    den = rows[:, None] - 2 * np.arange(STEPS)
    level, keep = RATES.get(name, (0.3, 0.9))
    top1 = rng.binomial(den, np.clip(level * keep ** np.arange(STEPS) + ease[:, None], 0, 1))
    joint = np.minimum.accumulate(np.minimum(top1, (top1 * 0.7 ** np.arange(STEPS)).astype(int)), axis=1)
    counts = metrics.StepCounts(den, top1, joint, top1 * 0.9)
    total = counts.total()

    def rates(at: Callable[[int], metrics.Statistic], num: np.ndarray) -> list[dict[str, Any]]:
        found = metrics.bootstrap_all(counts, [at(k) for k in range(STEPS)], **HOW)
        return [{"k": k, "num": float(num[k]), "den": int(total.den[k]), **f.to_json()} for k, f in enumerate(found)]

    table = metrics.StepCounts.ratio(bigram, den[:, 0])
    difference = metrics.paired_difference(counts, table, metrics.alpha_at(0), **HOW)
    mat, mat_joint, retention = metrics.bootstrap_all(counts, [metrics.mat_of, metrics.mat_joint_of, metrics.retention_of], **HOW)
    baseline = {"num": int(bigram.sum()), "den": int(rows.sum()), **metrics.bootstrap(table, metrics.alpha_at(0), **HOW).to_json(), "tokens_counted": 4321}
    shape = {"family": drafter["family"], "depth": drafter["depth"], "injection": drafter.get("kv", {}).get("injection"), "parameters": 1234567}
    result = {
        "name": name,
        "drafter": {**shape, "init": {"layers": "random", "head": "target"}},
        "target": {"name": target, "digest": "0a1b2c3d" * 8},
        "data": {"split": "heldout", "conversations": CONVERSATIONS},
        "confidence": 0.95,
        "alpha": rates(metrics.alpha_at, total.top1),
        "accept_prob": rates(metrics.accept_prob_at, total.prob),
        "joint": rates(metrics.joint_at, total.joint),
        "mat": mat.to_json(),
        "mat_joint": mat_joint.to_json(),
        "retention": retention.to_json(),
        "baselines": {"bigram": baseline},
        "against": [{"name": "bigram", "metric": "alpha_0", "difference": difference.value, "low": difference.low, "high": difference.high}],
        "seconds": 3.25,
    }
    write_json(folder / "eval.json", result)
    lines = {"den": den.tolist(), "top1": top1.tolist(), "joint": joint.tolist(), "prob": (top1 * 0.9).tolist(), "bigram": bigram.tolist()}
    write_json(folder / "eval_conversations.json", {"keys": [f"c{i}" for i in range(CONVERSATIONS)], **lines})


def write_decode(folder: Path, name: str, **changes: Any) -> None:
    """decode.json of a chain of 7."""
    right, counted = (53, 24, 13, 6, 3, 1, 0), (114, 112, 110, 108, 106, 104, 102)
    rates = [
        {"k": k, "num": a, "den": n, "value": a / n, "low": a / n - 0.01, "high": a / n + 0.01} for k, (a, n) in enumerate(zip(right, counted, strict=True))
    ]
    result = {
        "name": name,
        "prompts": 6,
        "max_new_tokens": 32,
        "strategy": "chain",
        "drafting": {"strategy": "chain", "length": 7},
        "sampling": {"temperature": 0.0, "scheme": "rejection"},
        "batch": 1,
        "levels": 7,
        "dtype": "fp32",
        "device": "cpu",
        "skipped": [{"id": "c9", "reason": "it has no assistant turn"}],
        "lossless": {"against": "generate", "why": "", "identical": 6, "different": 0, "cases": []},
        "tau": {"value": 1.684, "low": 1.512, "high": 1.871},
        "confidence": 0.95,
        "histogram": [61, 29, 11, 7, 3, 2, 1, 0],
        "joint": rates,
        "conditional": [{"k": k, "num": a, "den": n, "value": a / n} for k, (a, n) in enumerate(zip(right, (114, *right[:-1]), strict=True))],
        "nodes": 6.9,
        "tokens": 192,
        "target_forwards": 114,
        "seconds": {"drafted": 12.5, "alone": 10.0, "draft": 5.0, "verify": 7.0, "other": 0.5},
        "tokens_per_second": {"drafted": 15.36, "alone": 19.2},
    }
    write_json(folder / "decode.json", {**result, **changes})


def write_serving_check(folder: Path, name: str, **changes: Any) -> None:
    """serving_check.json of a drafter that is served as it was trained."""
    mats = {"heldout": 1.71, "same": 1.733, "retaken": 1.734, "text": 1.702, "starts": 1.655, "decoded": 1.655}
    pairs = {"conversations": ("same", "heldout"), "features": ("retaken", "same"), "text": ("text", "retaken"), "starts": ("starts", "text"), "path": ("decoded", "starts")}  # fmt: skip  # noqa: E501

    def ends(value: float, half: float) -> dict[str, float]:
        return {"value": value, "low": value - half, "high": value + half}

    differences = {key: {**ends(mats[a] - mats[b], 0.03125 if key in ("text", "starts") else 0.0), "judged": key in ("features", "path")} for key, (a, b) in pairs.items()}  # fmt: skip  # noqa: E501
    differences["conversations"] |= {"low": None, "high": None}
    result = {
        "name": name,
        "passed": True,
        "faults": [],
        "steps": 6,
        "dtype": "fp32",
        "confidence": 0.95,
        "tolerance": 0.02,
        "joint_mat": {rung: ends(value, 0.0625) for rung, value in mats.items()},
        "joint": {rung: [{"k": k, "num": 3, "den": 10, "value": 0.3} for k in range(6)] for rung in mats},
        "differences": differences,
        "rounds": 1234,
        "rounds_different": 0,
        "positions": 2345,
        "positions_different": 0,
        "tau": ends(1.639, 0.0625),
        "tokens": 2400,
        "agreeing": 1800,
        "conversations": 20,
        "skipped": [],
        "max_new_tokens": 128,
        "batch": 1,
        "device": "cpu",
        "seconds": 9.5,
    }
    write_json(folder / "serving_check.json", {**result, **changes})


def write_run(work: Path, name: str, drafter: dict[str, Any], target: str = "Some-Target", options: dict[str, Any] | None = None) -> Path:
    """A complete run folder without event files. options: of training, besides the drafter."""
    folder = work / "runs" / name
    write_eval(folder, name, drafter, target)
    train = {"status": "complete", "steps": 60, "seconds": 61.5, "tokens": 5150, "supervised_rows": 4040, "parameters": {"trainable": 1200000}}
    more = {
        "draft_vocab_size": 512,
        "draft_vocab_coverage": 0.975,
        "init": {"layers": "random", "head": "target"},
        "world_size": 2,
        "resumed_from": [{"step": 20, "world_size": 2}],
    }
    write_json(folder / "train.json", {**train, **more})
    write_decode(folder, name)
    write_serving_check(folder, name)
    write_atomic(folder / "recipe.yaml", dump_recipe(recipe_for(work, "run", drafter, train=options)))
    write_json(
        folder / "provenance.json",
        {"command": ["kvshot", "train", f"recipes/{name}.yaml"], "versions": {"python": "3.11.2", "torch": "2.13.0"}, "git_commit": "abc123"},
    )
    return folder


def write_events(folder: Path, gate: bool) -> None:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder / "tensorboard")) as writer:
        for step in range(10, 61, 10):
            writer.add_scalar("train/loss", 8 - step / 20, step)
            writer.add_scalar("train/accept_top1/0", step / 200, step)
            if gate:
                writer.add_scalar("gate/mean", 0.5 - step / 500, step)


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """Everything that the commands leave, for four drafters."""
    folder = tmp_path / "work"
    for name, drafter in RUNS.items():
        write_events(write_run(folder, name, drafter), gate=drafter["family"] == "hybrid")
    splits = {
        name: {"shards": [f"{name}-000000.tar"], "samples": n, "tokens": 100 * n, "rows": 80 * n, "bytes": 9} for name, n in (("train", 216), ("heldout", 24))
    }
    write_json(folder / "features" / "manifest.json", {"format": "kvshot-features/1", "target_name": "Some-Target", "splits": splits})
    (folder / "features" / "captures.jsonl").write_text('{"seconds": 21.5}\n{"seconds": 11.5}\n')
    write_json(folder / "prepared" / "summary.json", {"read": 250, "kept": 240, "seconds": 120.0})
    for stage, command in (("prepared", "prep"), ("features", "capture")):
        write_json(folder / stage / "provenance.json", {"command": ["kvshot", command, "base.yaml"], "versions": {"torch": "2.12.0"}, "git_commit": None})
    write_json(folder / "timings.json", {"prep": 121.5, "capture": 34.0, "train a_hidden": 66.0})
    return folder


@pytest.fixture
def many(tmp_path: Path) -> Path:
    """A run of every recipe of the small target, without event files; three of them block-wise, with an objective of their own."""
    folder = tmp_path / "many"
    for name, drafter in MANY.items():
        objective = {"anchors": 48, "weights": "exponential"} if "block_size" in drafter else {}
        write_run(folder, name, drafter, options={"objective": objective})
    splits = {name: {"samples": n, "tokens": 100 * n, "rows": 80 * n} for name, n in (("train", 216), ("heldout", 24))}
    write_json(folder / "features" / "manifest.json", {"format": "kvshot-features/1", "target_name": "Some-Target", "splits": splits})
    return folder


class Page(HTMLParser):
    """Tags with attributes, visible text, and the machine-readable values beside their texts."""

    VOID = ("meta", "link", "br", "img", "input")

    def __init__(self, html: str):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.values: list[tuple[float, str]] = []
        self.texts: list[str] = []
        self.open: list[str] = []
        self.pending: float | None = None
        self.feed(html)
        self.close()
        assert self.open == [], "every element is closed"
        self.text = " ".join(" ".join(self.texts).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "data":
            self.pending = float(dict(attrs)["value"] or "nan")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> closes what was opened last"

    def handle_data(self, data: str) -> None:
        if self.pending is not None:
            self.values.append((self.pending, data))
            self.pending = None
        if self.open and self.open[-1] != "style":
            self.texts.append(data)


@pytest.fixture
def build_page(capsys: pytest.CaptureFixture[str]) -> Callable[[Recipe], Page]:
    """Builds the report and reads it back; checks that its path is the last line printed."""

    def build(recipe: Recipe) -> Page:
        from kvshot_ds.report import build as module

        summary = module.run(recipe)
        assert capsys.readouterr().out.splitlines()[-1] == str(summary.path.resolve())
        return Page(summary.path.read_text(encoding="utf-8"))

    return build


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))
