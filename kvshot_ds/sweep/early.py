"""How far an early rank of cells is their last one: what stopping the cells that are behind would have cost."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvshot_ds.errors import ConfigError
from kvshot_ds.metrics import kendall
from kvshot_ds.provenance import digest
from kvshot_ds.sweep.folder import SweepFolder
from kvshot_ds.sweep.halving import rungs
from kvshot_ds.training.heldout import measured

LOOKS = (
    "looks are taken during training only, and finished trials are not trained again: before training, set train.eval_every to less than the steps, in a "
    "sweep under another work folder or after deleting the folders of its trials"
)


@dataclass(frozen=True)
class Look:
    """The cells of a sweep at one look during training, against the end. cells: those compared here. tau: Kendall's tau between their means over seeds now
    and at the end. best: the cell that is best at the end, of rank `rank` (1: best) now. kept: how many of the cells would go on. rung: a rung of
    sweep.halving as it is set."""

    sweep: str
    step: int
    cells: int
    seeds: tuple[int, ...]
    tau: float | None
    best: str
    rank: int
    kept: int
    rung: bool

    @property
    def survives(self) -> bool:
        """Whether halving at this look would have kept the cell that is best at the end."""
        return self.rank <= self.kept


@dataclass(frozen=True)
class Early:
    """looks: of each sweep in ascending steps, without the last one. metrics, reductions: of each sweep. left_out: cells and seeds that do not take part,
    and why. digest: of the sweeps' trials."""

    command: str
    digest: str
    metrics: Mapping[str, str]
    reductions: Mapping[str, float]
    looks: tuple[Look, ...]
    left_out: tuple[str, ...]


def early(folders: Sequence[Path]) -> Early:
    """Over the complete trials of the sweeps in `folders` and the seeds that all their compared cells have; the end is a trial's last look.

    A cell that was stopped early has no end: it is left out and named. Raises ConfigError: no folder of a sweep, or no looks before the last.
    """
    looks: list[Look] = []
    left_out: list[str] = []
    metrics, reductions, names = {}, {}, set[str]()
    for path in folders:
        folder = SweepFolder(Path(path))
        halving = folder.recipe().sweep.halving
        metrics[folder.path.name], reductions[folder.path.name] = halving.metric, halving.reduction
        names |= {trial.name for trial in folder.trials()}
        cells, without = _cells(folder, halving.metric)
        left_out += without
        looks += _looks(folder, cells)
    if not looks:
        why = f"; left out: {'; '.join(left_out)}" if left_out else ""
        raise ConfigError(f"{', '.join(map(str, folders))}: no complete trial has a held-out look before its last one; {LOOKS}{why}")
    return Early(" ".join(["kvshot sweep table --early", *map(str, folders)]), digest(*sorted(names)), metrics, reductions, tuple(looks), tuple(left_out))


# seed -> step -> held-out metric
_Cell = dict[int, dict[int, float]]


def _cells(folder: SweepFolder, metric: str) -> tuple[dict[str, _Cell], list[str]]:
    """Cells with what was measured, and those that are left out. Seeds that not all of the cells have are dropped; a cell with none is left out."""
    states, found = folder.progress().trials, dict[str, _Cell]()
    for trial in folder.trials():
        cell = found.setdefault(trial.cell, {})
        if trial.name in states and states[trial.name].state == "complete":
            looks = measured(folder.run_dir(trial))
            values = {int(step): of[f"heldout/{metric}"] for step, of in looks.items() if f"heldout/{metric}" in of}
            if values:
                cell[trial.seed] = values
    without = [f"{folder.path.name}: {name} (no complete trial with looks)" for name, cell in found.items() if not cell]
    kept = {name: cell for name, cell in found.items() if cell}
    common = set.intersection(*(set(cell) for cell in kept.values())) if kept else set()
    dropped = sorted({seed for cell in kept.values() for seed in cell} - common)
    if common and dropped:
        without.append(f"{folder.path.name}: seed {', '.join(map(str, dropped))} (not in every cell)")
    if not common and kept:
        without += [f"{folder.path.name}: {name} (no seed that all cells have)" for name in kept]
    return ({name: {seed: cell[seed] for seed in sorted(common)} for name, cell in kept.items()} if common else {}), without


def _looks(folder: SweepFolder, cells: Mapping[str, _Cell]) -> list[Look]:
    recipe = folder.recipe()
    halving, every = recipe.sweep.halving, recipe.train.eval_every
    ends = {name: [max(seed) for seed in cell.values()] for name, cell in cells.items()}
    last = max((step for steps in ends.values() for step in steps), default=0)
    marked = rungs(halving.first_rung, halving.reduction, last, every) if every and last else ()
    found = []
    for step in sorted({step for cell in cells.values() for seed in cell.values() for step in seed}):
        here = {name: cell for name, cell in cells.items() if all(step in seed for seed in cell.values()) and step < min(ends[name])}
        if len(here) < 2:
            continue
        now = {name: float(np.mean([seed[step] for seed in cell.values()])) for name, cell in here.items()}
        end = {name: float(np.mean([seed[max(seed)] for seed in cell.values()])) for name, cell in here.items()}
        best = max(end, key=lambda name: end[name])
        rank = 1 + sum(value > now[best] for value in now.values())
        kept = math.floor(len(here) / halving.reduction) or len(here)
        seeds = tuple(next(iter(here.values())))
        found.append(Look(folder.path.name, step, len(here), seeds, kendall(list(now.values()), list(end.values())), best, rank, kept, step in marked))
    return found
