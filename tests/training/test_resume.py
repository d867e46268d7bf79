"""A killed run goes on as if nothing had happened: to the bit on as many ranks as before, within rounding on more or fewer."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

import ds_configs
from kvshot_ds.config import Recipe
from kvshot_ds.features.shard import ShardSet
from kvshot_ds.files import read_json
from tests.training import resumed
from tests.training.forked import Run
from tests.training.forked import train as trained
from tests.training.runs import assert_close, assert_same, board, weights, zero3

# Groups with settings of their own, one of them too small for every rank to hold a part of it.
GROUPS = {"groups": [{"tensors": ["*gate*bias*"], "lr_scale": 0.5, "weight_decay": 0.2}], "weight_decay": 0.1, "lr": 2e-3, "ema_decay": 0.9}
SCALAR = {"family": "hybrid", "gate": {"kind": "scalar", "init": "bias:-1"}}
CURVE = {"epochs": 2, "max_steps": 15, "log_every": 1, "checkpoint_every": 3}


@pytest.fixture
def stage(tmp_path: Path) -> Callable[[str], str]:
    return lambda name: zero3(tmp_path) if name == "zero3" else name


def killed_before(recipe: Recipe, step: int, ranks: int) -> None:
    assert Run(ranks, resumed.train, recipe, step).wait() == [None] * ranks


@pytest.mark.parametrize(("name", "ranks"), [("zero2_fp32", 2), ("zero3", 2), ("zero2_bf16", 1)])
def test_the_curve_after_a_kill_is_that_of_the_uninterrupted_run_to_the_bit(recipe, stage, name, ranks):
    options = {"ds_config": stage(name), "optim": GROUPS, **CURVE}
    whole, killed = recipe("whole", SCALAR, **options), recipe("killed", SCALAR, **options)
    trained(whole, ranks)
    killed_before(killed, 9, ranks)  # two steps after the checkpoint of step 6
    done = trained(killed, ranks)[0]
    assert done["resumed_from"] == [{"step": 6, "world_size": ranks}]
    for tag in ("train/loss", "train/grad_norm", "train/lr", "train/accept_top1/0"):
        assert board(killed)[tag] == board(whole)[tag], tag
    assert_same(weights(killed), weights(whole))
    assert_same(load_file(killed.run_dir / "drafter_ema" / "model.safetensors"), load_file(whole.run_dir / "drafter_ema" / "model.safetensors"))
    totals = [{k: read_json(r.run_dir / "train.json")[k] for k in ("tokens", "supervised_rows", "padding_share")} for r in (whole, killed)]
    assert totals[0] == totals[1]


def _resize(recipe: Callable[..., Recipe], ds_config: str, before: int, *afters: int) -> None:
    """Killed on `before` ranks, continued on each of `afters` with other micro-batches, and held against an uninterrupted run."""
    options = {"ds_config": ds_config, "optim": GROUPS, **CURVE}
    whole, killed = recipe(f"whole{before}", SCALAR, **options), recipe(f"killed{before}", SCALAR, **options)
    trained(whole, before)
    killed_before(killed, 9, before)
    for after in afters:
        moved = recipe(f"moved{before}{after}", SCALAR, **options, conversations_per_micro_batch=2 if after < 4 else 1)
        seen = moved.work / "seen" / moved.name
        shutil.copytree(killed.run_dir, moved.run_dir)
        shutil.copytree(moved.work / "seen" / killed.name, seen)
        done = Run(after, resumed.train, moved).wait()
        assert all(isinstance(summary, dict) for summary in done), done
        assert done[0]["resumed_from"] == [{"step": 6, "world_size": after}] and done[0]["world_size"] == after

        assert_same(load_file(seen / f"loaded-6-{after}.safetensors"), load_file(seen / "saved-6.safetensors"))
        assert json.loads((seen / f"loaded-6-{after}.json").read_text()) == json.loads((seen / "saved-6.json").read_text())

        assert_each_once(seen, before, after, moved)
        assert board(moved)["train/lr"] == board(whole)["train/lr"]
        exact = "bf16" not in ds_config  # sums of bf16 gradients depend on how many ranks share them, killed or not
        assert board(moved)["train/loss"] == pytest.approx(board(whole)["train/loss"], rel=1e-5 if exact else 1e-2)
        if exact:
            assert_close(weights(moved), weights(whole))
            assert_close(*(load_file(r.run_dir / "drafter_ema" / "model.safetensors") for r in (moved, whole)))


def assert_each_once(seen: Path, before: int, after: int, recipe: Recipe) -> None:
    """Steps 1-6 on `before` ranks and 7-15 on `after` took each conversation once in the first epoch (11 steps), and none twice in the second."""
    first: Counter[str] = Counter()
    second: Counter[str] = Counter()
    for ranks, kept in ((before, range(1, 7)), (after, range(7, 16))):
        for line in [json.loads(line) for file in seen.glob(f"{ranks}-*.jsonl") for line in file.read_text().splitlines()]:
            if line["step"] in kept:
                (first if line["step"] <= 11 else second).update(line["keys"])
    assert first == Counter(sample.key for sample in ShardSet.open(recipe.shards_dir, "train").samples)
    assert set(second.values()) == {1} and len(second) == 4 * 4


@pytest.mark.parametrize(("name", "before", "after"), [("zero2_fp32", 2, 1), ("zero3", 1, 2)])
def test_another_number_of_ranks_goes_on_with_every_value_and_every_conversation_once(recipe, stage, name, before, after):
    _resize(recipe, stage(name), before, after)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["zero3", *(n for n in ds_configs.names() if n not in ("zero1_bf16", "zero2_offload_bf16", "zero3_offload_bf16"))])
def test_another_number_of_ranks_at_every_stage(recipe, stage, name):
    _resize(recipe, stage(name), 2, 1, 4)
    _resize(recipe, stage(name), 1, 2)


def test_options_that_shape_nothing_may_change_between_starts_and_others_may_not(recipe):
    killed_before(recipe("run", **CURVE), 5, 1)
    other = {"log_every": 2, "checkpoint_every": 4, "keep_checkpoints": 1, "data_workers": 2, "conversations_per_micro_batch": 4, "on_bad_data": "skip"}
    (refused,) = Run(1, resumed.train, recipe("run", **{**CURVE, "seed": 1})).wait()
    assert "ConfigError" in refused and "train.seed: there 0, now 1" in refused
    done = trained(recipe("run", **{**CURVE, **other}))[0]
    assert done["steps"] == 15 and done["resumed_from"] == [{"step": 3, "world_size": 1}]
