"""The held-out split looked at during training: the numbers of `kvshot eval`, over all ranks, without a trace in the training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tqdm import tqdm

from kvshot_ds import metrics
from kvshot_ds.config import Recipe
from kvshot_ds.errors import ConfigError, KvshotError
from kvshot_ds.evaluation import conversation_sums, measurable, measuring
from kvshot_ds.features.batch import collate
from kvshot_ds.features.shard import ShardSet
from kvshot_ds.files import read_object, write_json
from kvshot_ds.metrics import StepCounts
from kvshot_ds.objectives.alignment import plan_rows
from kvshot_ds.objectives.objective import Objective
from kvshot_ds.training.control import Control
from kvshot_ds.training.diagnosis import Diagnosis
from kvshot_ds.training.engine import World
from kvshot_ds.training.verification import faults, told_by_first
from kvshot_ds.typed import parse

NAME = "heldout.json"  # in the run folder: step -> what was measured there


class Heldout:
    """Measures the first `train.eval_conversations` held-out conversations, grouped as `kvshot eval` groups them, each group by one rank.

    In the precision of the training; in fp32 the numbers are those of `kvshot eval` to the bit.
    """

    def __init__(self, recipe: Recipe, world: World, engine: Any, objective: Objective, start: int, beat: Callable[[], None]):
        """start: steps already made. beat: called as it gets on. All ranks call it.

        Raises ConfigError if nothing is held out, KvshotError for a damaged shard (train.verify_shards).
        """
        self.recipe, self.world, self.engine, self.objective = recipe, world, engine, objective
        self.shards = ShardSet.open(recipe.shards_dir, "heldout")
        if not any(sample.rows for sample in self.shards.samples):
            raise ConfigError(f"train.eval_every={recipe.train.eval_every}, but {recipe.shards_dir} holds out no supervised rows; set it to 0")
        if recipe.train.verify_shards and (found := faults(self.shards, world, every_byte=True, seen=beat)):
            raise KvshotError("; ".join(found.values()))
        self.steps = recipe.train.objective.steps
        self.options = measuring(recipe, self.steps, recipe.train.drafter)
        told_by_first(world, lambda: _forget(recipe.run_dir, start))
        self.wanted = ("tokens", "turn", *self.shards.manifest.spec.serving(objective.drafter.required_features()))
        self.diagnosis = Diagnosis(recipe, world, engine, objective, self.shards) if recipe.train.diagnose_conversations else None
        for note in self.diagnosis.notes if self.diagnosis is not None and world.rank == 0 else ():
            print(f"{recipe.name}: {note}")

    def due(self, step: int, last: bool) -> bool:
        return last or step % self.recipe.train.eval_every == 0

    def owed(self, step: int, last: bool) -> bool:
        """Whether the start before this one stopped at `step` before it had looked, though it was due. All ranks call it."""
        return self.due(step, last) and told_by_first(self.world, lambda: str(step) not in measured(self.recipe.run_dir))

    def look(self, step: int, control: Control) -> dict[str, float] | str:
        """heldout/… after `step` optimizer steps, and what the diagnostics show, the same on all ranks; or why the run is to stop. All ranks call it.

        heldout/loss is the objective's default (soft cross-entropy, steps weighted .8^k) a supervised row, whatever the run optimises.
        """
        with self._measuring():
            sums = self._sums(control)
            shown = {} if self.diagnosis is None or isinstance(sums, str) else self.diagnosis.look(control)
        if isinstance(sums, str) or isinstance(shown, str):
            return sums if isinstance(sums, str) else shown
        counts, weighted = StepCounts.unstack(sums[:4]).total(), sums[4].sum()
        found = {"heldout/loss": float(weighted / counts.den[0]), "heldout/conversations": float(sums.shape[1])} | metrics.points(counts, "heldout") | shown
        if self.world.rank == 0:
            try:
                _remember(self.recipe.run_dir, step, found)
            except OSError as error:  # as with every other point: training matters more
                tqdm.write(f"{self.recipe.name}: {NAME} does not take what was measured after step {step} ({error}); training goes on")
        return found

    def _sums(self, control: Control) -> Any:
        """[5, C, K] fp64 of all conversations, as `conversation_sums`; or why all ranks agreed to stop. A rank without a group repeats the first."""
        together, device = self.recipe.eval.conversations_per_micro_batch, self.world.device
        chosen = measurable(self.shards, self.recipe.train.eval_conversations)
        starts = range(0, len(chosen), together)
        total = torch.zeros(5, len(chosen), self.steps, dtype=torch.float64, device=device)
        for turn in range(-(-len(starts) // self.world.size)):
            if why := control.agreed():
                return why
            number = turn * self.world.size + self.world.rank
            at = starts[number] if number < len(starts) else 0
            batch = collate([self.shards.read_packed(i, self.wanted) for i in chosen[at : at + together]])
            plan = plan_rows(batch, self.options.steps)
            sums = conversation_sums(self.engine, batch, plan, self.steps, device, self.objective.drafter.norm.weight.dtype)
            if number < len(starts):
                total[:, at : at + together] = sums
        dist.all_reduce(total)  # each place was filled by one rank: nothing is rounded
        return total.cpu().numpy()

    @contextmanager
    def _measuring(self) -> Iterator[None]:
        """The engine's module as it is used rather than trained: the options of measuring, gates without a schedule, no gradients."""
        before = self.objective.config
        self.objective.config = self.options
        self.objective.drafter.at_step(1 << 62)  # every schedule is over; the next step of training sets its own
        self.engine.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self.engine.train()
            self.objective.config = before


def measured(folder: Path) -> dict[str, dict[str, float]]:
    """Step -> what was measured there, in the run `folder`. Raises KvshotError if the file holds something else."""
    path = folder / NAME
    found = read_object(path) if path.is_file() else {}
    try:
        parse(dict[int, dict[str, float]], found)
    except ValueError as error:
        raise KvshotError(f"{path}: {error}; delete it: what comes is measured as before") from None
    return found


def _remember(folder: Path, step: int, found: dict[str, float]) -> None:
    write_json(folder / NAME, measured(folder) | {str(step): found})


def _forget(folder: Path, start: int) -> None:
    """What a start that was lost measured after step `start` is measured again."""
    found = measured(folder)
    kept = {step: values for step, values in found.items() if int(step) <= start}
    if kept != found:
        write_json(folder / NAME, kept)
