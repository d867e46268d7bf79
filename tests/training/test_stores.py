"""Whatever teacher was captured and however it is stored, training and evaluation read it: the loss of the first steps tells."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from data_prep.capture import CaptureJob, CaptureWorker
from data_prep.orchestrate import finish, make_plan
from kvshot_ds import evaluation
from kvshot_ds.config import Recipe
from kvshot_ds.errors import ConfigError
from kvshot_ds.features.batch import collate
from kvshot_ds.features.manifest import Manifest
from kvshot_ds.features.shard import ShardSet
from kvshot_ds.target import load_geometry
from kvshot_ds.training.launch import run
from tests.training.runs import board

FP32 = {"hidden": "fp32", "kv": "fp32", "query": "fp32", "teacher": "fp32"}
EIGHT = {"hidden": "fp8", "kv": "int8", "query": "fp8", "teacher": "bf16"}
FEATURES = {
    "whole": {"store": FP32},
    "unnormed": {"store": FP32, "teacher": "last_hidden_unnormed"},
    "all tokens": {"store": FP32, "teacher": "top_k"},
    "8 bits": {"store": EIGHT, "teacher": "top_k"},
    "no teacher": {"teacher": "none"},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path) -> dict[str, Path]:
    """The same 12 + 4 conversations, captured in every way, in this process."""
    work, rng, vocab = tmp_path_factory.mktemp("stores"), random.Random(1), load_geometry(tiny_target).vocab_size
    (work / "prepared").mkdir()
    for split, count in (("train", 12), ("heldout", 4)):
        lines = []
        for i in range(count):
            prompt, answer = rng.randint(4, 9), rng.randint(4, 14)
            tokens = [rng.randrange(3, vocab) for _ in range(prompt + answer)]
            lines.append(json.dumps({"id": f"{split}{i:03d}", "messages": [], "tokens": tokens, "turn": [0] * prompt + [1] * answer, "source": "test"}))
        (work / "prepared" / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
    (work / "prepared" / "summary.json").write_text("{}")
    made = {}
    for name, features in FEATURES.items():
        options = {"features": {"query_layers": "eagle3", "teacher_k": vocab, **features}}
        target = {"path": tiny_target, "dtype": "fp32", "device": "cpu"}
        shards = work / name.replace(" ", "_")
        plan = make_plan(recipe := Recipe.model_validate({"name": "d", "work": work, "shards": shards, "target": target, "capture": options}))
        worker = CaptureWorker(CaptureJob(recipe.target, plan.spec, 4096, shards, 1))
        for unit in plan.units:
            worker.work(unit)
        finish(recipe, plan)
        made[name] = shards
    return made


def losses(recipe: Callable[..., Recipe], folders: dict[str, Path], name: str, **train: object) -> tuple[list[float], Recipe]:
    r = recipe(name.replace(" ", "_"), "hybrid", max_steps=2, log_every=1, conversations_per_micro_batch=4, **train)
    r = r.model_copy(update={"shards": folders[name]})
    run(r)
    return board(r)["train/loss"], r


@pytest.mark.parametrize("loss", ["soft_ce", "lk_lambda"])
def test_every_teacher_teaches_the_same(recipe, folders, loss):
    objective = {"steps": 3, "loss": loss, "query_distill_weight": 0.1}
    whole, r = losses(recipe, folders, "whole", objective=objective)
    for name, near in (("unnormed", 1e-5), ("all tokens", 1e-5), ("8 bits", 0.03)):
        found, _ = losses(recipe, folders, name, objective=objective)
        assert found == pytest.approx(whole, rel=near) and (near < 1e-3 or found != pytest.approx(whole, rel=1e-6)), name
    spec = Manifest.load(folders["8 bits"]).spec
    assert (spec.teacher, spec.store.kv) == ("top_k", "int8") and spec.teacher_k == Manifest.load(folders["whole"]).geometry.vocab_size
    results = {}
    for name in ("whole", "unnormed", "all tokens", "8 bits"):
        (r.run_dir / "eval.json").unlink(missing_ok=True)
        results[name] = evaluation.run(r.model_copy(update={"shards": folders[name]}))[0]
    for name in ("unnormed", "all tokens"):
        assert results[name]["alpha"] == results["whole"]["alpha"]
        for one, other in zip(results[name]["accept_prob"], results["whole"]["accept_prob"], strict=True):
            assert one["num"] == pytest.approx(other["num"], rel=1e-4)
    assert [a["den"] for a in results["8 bits"]["alpha"]] == [a["den"] for a in results["whole"]["alpha"]]
    assert all(a["num"] <= b["num"] * 1.02 for a, b in zip(results["8 bits"]["accept_prob"], results["whole"]["accept_prob"], strict=True))


def test_without_a_teacher_the_run_says_which_would_do(recipe, folders):
    with pytest.raises(ConfigError, match=r"features lack a teacher, which this run reads; .*capture\.features\.teacher=last_hidden"):
        losses(recipe, folders, "no teacher")


def test_a_batch_in_8_bits_is_the_decoded_one_once_it_is_moved(folders: dict[str, Path]) -> None:
    shards = ShardSet.open(folders["8 bits"], "train")
    for dtype in (None, torch.bfloat16, torch.float32):
        for chosen in ((0, 1, 2, 3), (5,)):
            packed, plain = collate([shards.read_packed(i) for i in chosen]), collate([shards.read(i) for i in chosen])
            kinds = {key.split(".")[0] for key in packed.packed}
            assert kinds == {"hidden", "key", "value", "query"} and not packed.hidden and not plain.packed
            assert {part.data.dtype for part in packed.packed.values()} == {torch.float8_e4m3fn, torch.int8}
            packed, plain = packed.to("cpu", dtype), plain.to("cpu", dtype)
            assert not packed.packed
            for name in ("hidden", "keys_of", "values_of", "queries_of"):
                mine, other = getattr(packed, name), getattr(plain, name)
                assert list(mine) == list(other)
                assert all(mine[i].dtype == other[i].dtype and torch.equal(mine[i], other[i]) for i in other)
            for name in ("tokens", "turn", "teacher_index", "teacher_argmax", "teacher_lse", "topk_ids", "topk_logp"):
                assert torch.equal(getattr(packed, name), getattr(plain, name))
