"""Several runs, one after the other, as one rank of several in one process group: `python -m tests.training.several ITEM.json ...`, and what starts them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

from kvshot_ds.config import Recipe, dump_recipe, load_recipe
from kvshot_ds.files import write_json
from kvshot_ds.training import trainer
from kvshot_ds.training.launch import run
from tests.training.runs import before_each_step, free_port, rank_environment, run_and_stop

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
    """All of them on so many ranks, in processes of their own, in turn; fails with what they said."""
    files = []
    for one in items:
        files.append(folder / f"{Path(one.recipe).stem}.{ranks}.json")
        files[-1].write_text(json.dumps(asdict(one)))
    env = rank_environment() | {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, "-m", "tests.training.several", *map(str, files)]
    logs = [folder / f"rank{rank}.{ranks}.log" for rank in range(ranks)]
    running = []
    for rank, log in enumerate(logs):
        with log.open("w") as out:
            running.append(subprocess.Popen(command, env=env | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, stdout=out, stderr=subprocess.STDOUT))
    try:
        codes = [process.wait(timeout=WAIT) for process in running]
    finally:
        for process in running:
            process.kill()
    assert codes == [0] * ranks, "\n".join(log.read_text()[-4000:] for log in logs)


if __name__ == "__main__":
    train_all([Item(**json.loads(Path(file).read_text())) for file in sys.argv[1:]])
