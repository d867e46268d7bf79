"""Preparation as a whole: files, accounts, refusals, and a run killed in the middle that ends like an uninterrupted one."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from data_prep import prepare
from data_prep.chat import ChatTemplate
from data_prep.pool import Pool, sole_user
from kvshot_ds.config import Recipe, dump_recipe
from kvshot_ds.errors import ConfigError, KvshotError
from kvshot_ds.files import read_json
from kvshot_ds.target import load_tokenizer


def recipe(target: Path, work: Path, **prep: Any) -> Recipe:
    return Recipe.model_validate({"name": "t", "work": work, "target": {"path": target, "dtype": "fp32", "device": "cpu"}, "prep": prep})


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def conversations(count: int, start: int = 0) -> list[dict[str, Any]]:
    def one(n: int) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": f"Question {n}?"}, {"role": "assistant", "content": f"The answer is {n * n}."}]}

    return [one(n) for n in range(start, start + count)]


def source(path: Path, *records: Any) -> list[dict[str, str]]:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records), encoding="utf-8")
    return [{"path": str(path)}]


KEPT = {"regenerate": {"enabled": False}}


@pytest.fixture(scope="module")
def ray_here() -> Iterator[None]:
    """One Ray for the in-process runs of this file: starting it takes seconds."""
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR", object_store_memory=1 << 27)
    yield
    ray.shutdown()


def test_given_answers_are_kept_and_accounts_add_up(tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    long = {"messages": [{"role": "user", "content": "Go on."}, {"role": "assistant", "content": "a" * 400}]}
    lost = {"messages": [{"role": "user", "content": "b" * 400}, {"role": "assistant", "content": "x"}]}
    broken = {"messages": [{"role": "user", "content": "a<|im_end|>"}, {"role": "assistant", "content": "x"}]}
    files = source(tmp_path / "c.jsonl", *conversations(40), "{oops", long, lost, broken, *conversations(3), {"messages": []})
    found = prepare.run(recipe(tiny_target, tmp_path / "w", sources=files, max_length=120, heldout_fraction=0.25, **KEPT))
    assert (found.records, found.kept, found.duplicates, found.quarantined, found.cut) == (48, 41, 3, 4, 1)
    assert found.records + found.synthesised == found.kept + found.duplicates + found.quarantined
    folder = tmp_path / "w" / "prepared"
    train, heldout = rows(folder / "train.jsonl"), rows(folder / "heldout.jsonl")
    assert (len(train), len(heldout)) == (found.train.conversations, found.heldout.conversations)
    assert len(train) + len(heldout) == 41 and 3 <= len(heldout) <= 18
    template = ChatTemplate(load_tokenizer(tiny_target))
    for row in train + heldout:
        assert set(row) == {"id", "messages", "tokens", "turn", "source"}
        assert len(row["tokens"]) == len(row["turn"]) <= 120
        if len(row["tokens"]) < 120:
            whole = template.encode(row["messages"])
            assert (row["tokens"], row["turn"]) == (whole.tokens, whole.turn)
    reasons = {r["line"]: r["reason"] for r in rows(folder / "quarantine.jsonl")}
    assert sorted(reasons) == [41, 43, 44, 48]
    assert reasons[43].startswith("over-long: nothing to learn from in the first 120 of 4")
    assert "special token" in reasons[44]
    assert found.train.supervised == sum(t > 0 for row in train for t in row["turn"])
    assert read_json(folder / "summary.json")["status"] == "complete"
    assert read_json(folder / "provenance.json")["configuration"]["prep.max_length"] == 120
    assert (folder / "recipe.yaml").is_file() and not (folder / "parts").exists()
    printed = capsys.readouterr().out
    assert "41 kept, 3 duplicates dropped, 4 quarantined, 1 cut at max_length" in printed


def test_the_split_does_not_depend_on_order_or_company(tiny_target: Path, tmp_path: Path) -> None:
    records = conversations(30)
    shuffled = random.Random(0).sample(records, 30) + conversations(5, start=90)
    for name, files in (("a", source(tmp_path / "a.jsonl", *records)), ("b", source(tmp_path / "b.jsonl", *shuffled))):
        prepare.run(recipe(tiny_target, tmp_path / name, sources=files, heldout_fraction=0.3, **KEPT))
    first = {r["id"] for r in rows(tmp_path / "a/prepared/heldout.jsonl")}
    second = {r["id"] for r in rows(tmp_path / "b/prepared/heldout.jsonl")}
    everyone = {r["id"] for r in rows(tmp_path / "a/prepared/train.jsonl")} | first
    assert first and second & everyone == first


def test_a_complete_folder_returns_at_once_and_another_configuration_is_refused(tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = source(tmp_path / "c.jsonl", *conversations(10))
    first = prepare.run(recipe(tiny_target, tmp_path / "w", sources=files, **KEPT))
    before = (tmp_path / "w/prepared/train.jsonl").stat().st_mtime_ns
    assert prepare.run(recipe(tiny_target, tmp_path / "w", sources=files, workers=2, **KEPT)) == first
    assert "is complete already" in capsys.readouterr().out
    assert (tmp_path / "w/prepared/train.jsonl").stat().st_mtime_ns == before
    with pytest.raises(ConfigError, match=r"prep\.seed: there 0, now 1"):
        prepare.run(recipe(tiny_target, tmp_path / "w", sources=files, seed=1, **KEPT))
    files = source(tmp_path / "c.jsonl", *conversations(11))
    with pytest.raises(ConfigError, match=r"prep\.sources\[0\]\.path \(content\)"):
        prepare.run(recipe(tiny_target, tmp_path / "w", sources=files, **KEPT))
    with sole_user(tmp_path / "w/prepared", "kvshot prep"), pytest.raises(ConfigError, match="another kvshot prep is writing there"):
        prepare.run(recipe(tiny_target, tmp_path / "w", sources=files, **KEPT))


def test_contradictions_and_missing_things_are_found_first(tiny_target: Path, tmp_path: Path) -> None:
    prompts = [{"path": str(tmp_path / "p.txt"), "format": "prompts"}]
    (tmp_path / "p.txt").write_text("Hi\n")
    cases: list[tuple[Path, dict[str, Any], str]] = [
        (tiny_target, {}, "nothing to prepare"),
        (tiny_target, {"sources": [{"path": str(tmp_path / "absent.jsonl")}]}, "absent.jsonl cannot be read"),
        (tiny_target, {"sources": prompts, "max_length": 100_000}, "more than the 2048 positions"),
        (tmp_path / "nowhere", {"sources": prompts}, "no such folder"),
    ]
    for target, prep, text in cases:
        with pytest.raises(ConfigError, match=text):
            prepare.run(recipe(target, tmp_path / "w", **prep))
    assert not (tmp_path / "w").exists()


def test_a_target_without_template_is_refused(tiny_target: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for file in tiny_target.iterdir():
        if file.name != "chat_template.jinja":
            (bare / file.name).symlink_to(file)
    with pytest.raises(ConfigError, match="has no chat template"):
        prepare.run(recipe(bare, tmp_path / "w", sources=source(tmp_path / "c.jsonl", *conversations(2)), **KEPT))


def test_nothing_usable_is_an_error_that_lists_the_reasons(tiny_target: Path, tmp_path: Path) -> None:
    files = source(tmp_path / "c.jsonl", "{oops", {"messages": []}, {"messages": []})
    with pytest.raises(KvshotError, match=r"no conversation is left to train on(.|\n)*2 x empty conversation"):
        prepare.run(recipe(tiny_target, tmp_path / "w", sources=files, **KEPT))
    assert len(rows(tmp_path / "w/prepared/quarantine.jsonl")) == 3
    assert not (tmp_path / "w/prepared/summary.json").exists()


def generating(target: Path, work: Path, folder: Path, **more: Any) -> Recipe:
    """24 prompts, one conversation of two turns and 4 synthesised prompts: 15 units and more."""
    (folder / "p.txt").write_text("".join(f"Why is {n} a number?\n" for n in range(24)))
    two = [{"role": r, "content": c} for r, c in (("user", "Hello"), ("assistant", "old"), ("user", "And?"), ("assistant", "old"))]
    files = [{"path": str(folder / "p.txt")}, *source(folder / "m.jsonl", {"messages": two}, {"messages": []})]
    options = {"synthesis": {"count": 4, "max_new_tokens": 96}, "regenerate": {"max_new_tokens": 40}, "batch_size": 2, "max_length": 400}
    return recipe(target, work, sources=files, **options, **more)


@pytest.fixture(scope="module")
def uninterrupted(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory, ray_here: None) -> Path:
    """Prepared folder of `generating`, by two workers."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    found = prepare.run(generating(tiny_target, folder / "w", folder, workers=2))
    assert (found.records, found.synthesised, found.quarantined, found.kept) == (26, 4, 1, 29)
    return folder / "w" / "prepared"


def test_answers_are_the_targets_own(uninterrupted: Path, tiny_target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32)
    found = rows(uninterrupted / "train.jsonl") + rows(uninterrupted / "heldout.jsonl")
    assert len({r["source"].split("-")[0].split(":")[0] for r in found}) == 3
    assert all(m["content"] != "old" for r in found for m in r["messages"])
    for row in found:
        last = max(row["turn"])
        start = row["turn"].index(last)
        out = model.generate(torch.tensor([row["tokens"][:start]]), max_new_tokens=40, do_sample=False)[0, start:].tolist()
        assert row["tokens"][start:] == out
        assert row["turn"][start:] == [last] * len(out)
    (two,) = [r for r in found if r["source"].startswith("m.jsonl")]
    assert set(two["turn"]) == {0, 1, 2}


def test_killed_and_run_again_ends_like_an_uninterrupted_run(
    uninterrupted: Path, tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ray_here: None
) -> None:
    wanted = generating(tiny_target, tmp_path / "w", tmp_path)
    (tmp_path / "r.yaml").write_text(dump_recipe(wanted))
    command = [sys.executable, "-m", "kvshot_ds.cli", "prep", str(tmp_path / "r.yaml")]
    environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    child = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    parts = tmp_path / "w/prepared/parts"
    deadline = time.monotonic() + 120
    while len(list(parts.glob("answers-*.json"))) < 3:
        assert child.poll() is None and time.monotonic() < deadline, "ended before it could be killed"
        time.sleep(0.01)
    family = [p for p in psutil.Process(child.pid).children(recursive=True) if "Agent" not in p.name()]  # Ray's agents take a minute to notice
    child.send_signal(signal.SIGKILL)
    child.wait()
    done = {p.name for p in parts.glob("*.json")}
    assert not (tmp_path / "w/prepared/summary.json").exists()
    assert len(done) < 15 + 2, "it was killed in the middle"
    # a unit whose part was being written, or that was lost
    (parts / ".answers-000014.json.77.tmp").write_text("[{")

    submitted: list[str] = []
    through = Pool.map

    def note(self: Pool, units: list[Any]) -> Any:
        submitted.extend(f"{'prompts' if u.count else 'answers'}-{u.index:06d}.json" for u in units)
        return through(self, units)

    monkeypatch.setattr(Pool, "map", note)
    prepare.run(wanted)
    assert submitted and not done & set(submitted), "finished units are not made again"
    for name in ("train.jsonl", "heldout.jsonl"):
        assert (tmp_path / "w/prepared" / name).read_text() == (uninterrupted / name).read_text()
    assert not list((tmp_path / "w/prepared").rglob("*.tmp"))
    _, alive = psutil.wait_procs(family, timeout=30)
    assert family and not alive, "a killed run leaves no worker behind"


class InProcess:
    """A pool without Ray: one worker, here."""

    def __init__(self, _section: str, _resources: Any, worker: type, *arguments: Any) -> None:
        self.worker = worker(*arguments)

    def __enter__(self) -> InProcess:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def map(self, units: list[Any]) -> Iterator[tuple[Any, Any]]:
        return ((unit, self.worker.work(unit)) for unit in units)


def test_too_few_prompts_is_said_not_hidden(tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(prepare, "Pool", InProcess)
    options = {"synthesis": {"count": 6, "max_new_tokens": 4}, "regenerate": {"max_new_tokens": 4}}
    files = source(tmp_path / "c.jsonl", *conversations(4))
    found = prepare.run(recipe(tiny_target, tmp_path / "w", sources=files, **options))
    assert found.synthesised < 6
    assert found.synthesised + sum(found.unusable_prompts.values()) >= 18
    assert f"only {found.synthesised} of 6 prompts" in capsys.readouterr().out


class Falls:
    """A worker whose process dies on its first unit, in the first `times` processes."""

    def __init__(self, folder: Path, times: int) -> None:
        self.folder, self.times = folder, times

    def work(self, unit: int) -> int:
        fallen = len(list(self.folder.iterdir()))
        if fallen < self.times:
            (self.folder / f"{os.getpid()}").touch()
            os._exit(1)
        if unit == 3:
            raise ConfigError("three is not allowed")
        return unit * unit


def test_a_dead_worker_is_replaced_and_its_errors_arrive_as_they_are(tmp_path: Path, ray_here: None, monkeypatch: pytest.MonkeyPatch) -> None:
    options = recipe(tmp_path, tmp_path).prep
    (tmp_path / "a").mkdir()
    with Pool("prep", options, Falls, tmp_path / "a", 1) as pool:
        assert sorted(pool.map([1, 2, 4])) == [(1, 1), (2, 4), (4, 16)]
        with pytest.raises(ConfigError, match=r"^three is not allowed$"):
            list(pool.map([3]))
    (tmp_path / "b").mkdir()
    monkeypatch.setattr("data_prep.pool.TRIES", 1)
    with Pool("prep", options, Falls, tmp_path / "b", 9) as pool, pytest.raises(KvshotError, match="lost its worker 1 times"):
        list(pool.map([1]))
    with Pool("prep", options.model_copy(update={"workers": 99}), Falls, tmp_path / "b", 0) as pool, pytest.raises(ConfigError, match=r"prep\.workers=99"):
        list(pool.map([1]))
