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


class Made:
    """Runs that several tests start from, each made once: uninterrupted ones, and killed ones two steps after the checkpoint of step 6."""

    def __init__(self, recipe_in: Callable[..., Recipe], folder: Path):
        self.recipe_in, self.folder, self.done = recipe_in, folder, dict[str, Recipe]()

    def recipe(self, name: str, ds_config: str, **options: object) -> Recipe:
        stage = zero3(self.folder) if ds_config == "zero3" else ds_config
        return self.recipe_in(self.folder, f"{name}-{ds_config}", SCALAR, ds_config=stage, optim=GROUPS, **CURVE, **options)

    def whole(self, ds_config: str, ranks: int) -> Recipe:
        return self._once(self.recipe(f"whole{ranks}", ds_config), lambda r: trained(r, ranks))

    def killed(self, ds_config: str, ranks: int) -> Recipe:
        return self._once(self.recipe(f"killed{ranks}", ds_config), lambda r: killed_before(r, 9, ranks))

    def _once(self, recipe: Recipe, make: Callable[[Recipe], object]) -> Recipe:
        if recipe.name not in self.done:
            make(recipe)
            self.done[recipe.name] = recipe
        return recipe

    def moved(self, ds_config: str, before: int, after: int, **options: object) -> Recipe:
        """A copy of the one killed on `before` ranks, to go on on `after`."""
        killed, moved = self.killed(ds_config, before), self.recipe(f"moved{before}{after}", ds_config, **options)
        for place in (Path("runs"), Path("seen")):
            shutil.copytree(self.folder / place / killed.name, self.folder / place / moved.name)
        return moved


@pytest.fixture(scope="module")
def made(recipe_in: Callable[..., Recipe], tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(recipe_in, tmp_path_factory.mktemp("resumed"))


def killed_before(recipe: Recipe, step: int, ranks: int) -> None:
    assert Run(ranks, resumed.train, recipe, step).wait() == [None] * ranks


@pytest.mark.parametrize(("name", "ranks"), [("zero2_fp32", 2), ("zero3", 2), ("zero2_bf16", 1)])
def test_the_curve_after_a_kill_is_that_of_the_uninterrupted_run_to_the_bit(made, name, ranks):
    whole, killed = made.whole(name, ranks), made.moved(name, ranks, ranks)
    done = trained(killed, ranks)[0]
    assert done["resumed_from"] == [{"step": 6, "world_size": ranks}]
    for tag in ("train/loss", "train/grad_norm", "train/lr", "train/accept_top1/0"):
        assert board(killed)[tag] == board(whole)[tag], tag
    assert_same(weights(killed), weights(whole))
    assert_same(load_file(killed.run_dir / "drafter_ema" / "model.safetensors"), load_file(whole.run_dir / "drafter_ema" / "model.safetensors"))
    totals = [{k: read_json(r.run_dir / "train.json")[k] for k in ("tokens", "supervised_rows", "padding_share")} for r in (whole, killed)]
    assert totals[0] == totals[1]


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


QUICK = (("zero2_fp32", 2, 1), ("zero3", 1, 2))
CHANGES = {  # of ranks: all for a partitioned and an unpartitioned model; one for each of the others, which go the same way through the checkpoint
    "zero2_fp32": ((2, 1), (2, 4), (1, 2)), "zero3": ((2, 1), (2, 4), (1, 2)), "zero0_fp32": ((2, 4),), "zero0_bf16": ((2, 1),), "zero1_fp32": ((1, 2),),
    "zero2_bf16": ((2, 4),), "zero2_offload_fp32": ((2, 4),), "zero3_fp32": ((2, 4),), "zero3_bf16": ((2, 1),), "zero3_offload_fp32": ((1, 2),),
}  # fmt: skip
CASES = [(name, before, after) for name, changes in CHANGES.items() for before, after in changes]


def test_every_configuration_is_resumed_on_other_ranks():
    of_no_kind_of_its_own = {"zero1_bf16", "zero2_offload_bf16", "zero3_offload_bf16"}
    assert set(CHANGES) == {"zero3", *ds_configs.names()} - of_no_kind_of_its_own


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("name", "before", "after"), [case if case in QUICK else pytest.param(*case, marks=pytest.mark.slow) for case in CASES])
def test_another_number_of_ranks_goes_on_with_every_value_and_every_conversation_once(made, name, before, after):
    """Killed on `before` ranks, continued on `after` with other micro-batches, and held against an uninterrupted run, on two ranks."""
    whole, moved = made.whole(name, 2), made.moved(name, before, after, conversations_per_micro_batch=2 if after < 4 else 1)
    seen = moved.work / "seen" / moved.name
    done = Run(after, resumed.train, moved).wait()
    assert all(isinstance(summary, dict) for summary in done), done
    assert done[0]["resumed_from"] == [{"step": 6, "world_size": after}] and done[0]["world_size"] == after

    assert_same(load_file(seen / f"loaded-6-{after}.safetensors"), load_file(seen / "saved-6.safetensors"))
    assert json.loads((seen / f"loaded-6-{after}.json").read_text()) == json.loads((seen / "saved-6.json").read_text())

    assert_each_once(seen, before, after, moved)
    assert board(moved)["train/lr"] == board(whole)["train/lr"]
    exact = "bf16" not in name  # sums of bf16 gradients depend on how many ranks share them, killed or not
    assert board(moved)["train/loss"] == pytest.approx(board(whole)["train/loss"], rel=1e-5 if exact else 1e-2)
    if exact:
        assert_close(weights(moved), weights(whole))
        assert_close(*(load_file(r.run_dir / "drafter_ema" / "model.safetensors") for r in (moved, whole)))


def test_options_that_shape_nothing_may_change_between_starts_and_others_may_not(recipe):
    killed_before(recipe("run", **CURVE), 5, 1)
    other = {"log_every": 2, "checkpoint_every": 4, "keep_checkpoints": 1, "data_workers": 2, "conversations_per_micro_batch": 4, "on_bad_data": "skip"}
    (refused,) = Run(1, resumed.train, recipe("run", **{**CURVE, "seed": 1})).wait()
    assert "ConfigError" in refused and "train.seed: there 0, now 1" in refused
    done = trained(recipe("run", **{**CURVE, **other}))[0]
    assert done["steps"] == 15 and done["resumed_from"] == [{"step": 3, "world_size": 1}]
