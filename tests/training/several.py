"""Several runs, one after the other, as one rank of several in one process group, and what starts them."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvshot_ds.config import Recipe, dump_recipe, load_recipe
from kvshot_ds.files import write_json
from kvshot_ds.training import trainer
from kvshot_ds.training.launch import run
from tests.training.forked import Run
from tests.training.runs import before_each_step, run_and_stop

TOLD = 3  # micro-steps that DeepSpeed is told of in an uneven run
WAIT = 800  # seconds for all runs of one start, on a busy machine


@dataclass(frozen=True)
class Item:
    """recipe: its file. uneven: steps have more and fewer micro-steps than DeepSpeed was told of. stop: first cut short before this step (0: not).

    shares: each rank leaves in its run folder what it holds of the target's frozen parts between steps.
    """

    recipe: str
    uneven: bool = False
    stop: int = 0
    shares: bool = False


def train_all(items: Sequence[Item]) -> None:
    for item in items:
        with pytest.MonkeyPatch.context() as patch:
            if item.uneven:
                _make_uneven(patch)
            if item.shares:
                before_each_step(patch, _write_shares)
            recipe = load_recipe(Path(item.recipe))
            if item.stop:
                run_and_stop(recipe, item.stop)
            run(recipe)


def _write_shares(s: trainer.Setup, _micro: object, _number: int) -> None:
    held = [{"here": p.numel(), "share": p.ds_tensor.numel(), "whole": p.ds_numel} for p in s.objective.frozen or ()]
    write_json(s.recipe.run_dir / f"frozen{s.world.rank}.json", held)


def _make_uneven(patch: pytest.MonkeyPatch) -> None:
    """Adds 0, 1 or 2 stand-ins, which count for nothing, by step, before and after what counts."""
    make_engine, optimizer_step = trainer.make_engine, trainer.optimizer_step

    def engine(objective, config, ds_config, accumulation, steps):
        return make_engine(objective, config, ds_config, TOLD, steps)

    def step(s, micro_batches, meter, number):
        idle = trainer.MicroBatch(micro_batches[0].batch, micro_batches[0].plan, False)
        before, after = divmod(number % 3, 2)
        optimizer_step(s, [*[idle] * before, *micro_batches, *[idle] * after], meter, number)

    patch.setattr(trainer, "make_engine", engine)
    patch.setattr(trainer, "optimizer_step", step)


def item(recipe: Recipe, folder: Path, **options: object) -> Item:
    """The recipe written out for `start`."""
    file = folder / f"{recipe.name}.yaml"
    file.write_text(dump_recipe(recipe))
    return Item(str(file), **options)


def start(items: Sequence[Item], folder: Path, ranks: int) -> None:
    """All of them on so many ranks, in processes of their own, in turn; fails with what they said, which each rank leaves in FOLDER/rankR.RANKS.log."""
    done = Run(ranks, _logged, list(items), folder).wait(WAIT)
    assert done == ["done"] * ranks, "\n".join([*map(str, done), *(log.read_text()[-4000:] for log in sorted(folder.glob(f"rank*.{ranks}.log")))])


def _logged(items: Sequence[Item], folder: Path) -> str:
    with (folder / f"rank{os.environ['RANK']}.{os.environ['WORLD_SIZE']}.log").open("w") as log:
        for number in (1, 2):
            os.dup2(log.fileno(), number)
    try:
        train_all(items)
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    return "done"
