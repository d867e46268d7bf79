"""Cells of an experiment: runs that differ in their seed alone, taken together, and intervals over their seeds."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from kvshot_ds.config import EvalConfig, Recipe, load_recipe
from kvshot_ds.metrics import Spread, Statistic, StepCounts, over_seeds_all, paired_over_seeds
from kvshot_ds.report.families import Drafter, rank, styles
from kvshot_ds.report.gather import Conversations, Run
from kvshot_ds.typed import dotted


@dataclass(frozen=True, eq=False)
class Group:
    """A cell. runs: at least one, one for each seed, by seed. style: index of its colour, marker and dash."""

    name: str
    runs: tuple[Run, ...]
    style: int = 0

    @cached_property
    def options(self) -> dict[str, Any]:
        """Dotted option of training -> value, of all that shapes the weights but the seed; empty without a recipe."""
        return shaping(self.runs[0].recipe) if self.runs[0].recipe else {}

    @property
    def place(self) -> tuple[str, ...]:
        """The features and the target that it was trained on; without a recipe its own name, as nothing is known to be the same."""
        return _place(self.runs[0])

    @property
    def drafter(self) -> Drafter | None:
        return self.runs[0].drafter

    @property
    def seeds(self) -> tuple[int | None, ...]:
        return tuple(run.seed for run in self.runs)


@dataclass(frozen=True)
class Paired:
    """A difference over the seeds that both cells have. spread None: it could not be taken, for `missing`; alone: seeds that only one of them has."""

    spread: Spread | None
    missing: str = ""
    alone: tuple[int, ...] = ()


def grouped(runs: Sequence[Run]) -> tuple[Group, ...]:
    """The cells, in the order of the page. A run without a recipe is a cell of its own, as is a second run of a seed that its cell has."""
    found: dict[str, list[tuple[Run, dict[str, Any]]]] = {}
    for run in runs:
        options = shaping(run.recipe) if run.recipe else {}
        key = json.dumps([options, *_place(run)], sort_keys=True)
        while any(other.seed == run.seed for other, _ in found.get(key, ())):
            key += "+"
        found.setdefault(key, []).append((run, options))
    cells = [(tuple(sorted((run for run, _ in members), key=lambda run: run.seed or 0)), members[0][1]) for members in found.values()]
    cells.sort(key=lambda cell: (*rank(cell[0][0].drafter), cell[0][0].name))
    return tuple(Group(name, cell[0], cell[0][0].style) for name, cell in zip(_names(cells), cells, strict=True))


def _place(run: Run) -> tuple[str, ...]:
    return (str(run.recipe.shards_dir), str(run.recipe.target.path)) if run.recipe else (run.name,)


def page_styles(groups: Sequence[Group]) -> dict[Group, int]:
    """The style that each cell has everywhere on the page; new ones where cells of several sweeps stand in one figure and share one."""
    if len({group.style for group in groups}) == len(groups):
        return {group: group.style for group in groups}
    return fresh_styles(groups)


def fresh_styles(groups: Sequence[Group]) -> dict[Group, int]:
    """A style for each: by family, or, if they are all of one family, one after the other."""
    drafters = [group.drafter for group in groups]
    several = len({d.family for d in drafters if d}) > 1
    return dict(zip(groups, styles(drafters) if several else range(len(groups)), strict=True))


def shaping(recipe: Recipe) -> dict[str, Any]:
    """Dotted options of training that shape the weights, without the seed. A warm start counts by what its source was trained with, where that is on record."""
    options = dotted(recipe.train.shaping())
    options.pop("seed", None)
    source = recipe.train.init.warm_start
    if source and (Path(source) / "recipe.yaml").is_file():
        options["init.warm_start"] = shaping(load_recipe(Path(source) / "recipe.yaml"))
    return options


def _names(cells: Sequence[tuple[tuple[Run, ...], dict[str, Any]]]) -> list[str]:
    """Trials of a sweep by its axes, a lone run by its folder's name, several seeds by what the drafter is; and by the options in which cells of one
    such name differ."""
    first = [_name(runs) for runs, _ in cells]
    out = []
    for name, (_, options) in zip(first, cells, strict=True):
        alike = [other for label, (_, other) in zip(first, cells, strict=True) if label == name]
        differs = [key for key in options if any(other.get(key) != options[key] for other in alike) and not isinstance(options[key], dict)]
        out.append(" · ".join([name, *(f"{key.rpartition('.')[2]} {options[key]}" for key in differs)]))
    twice = {name for name in out if out.count(name) > 1}
    return [f"{name} ({runs[0].name})" if name in twice else name for name, (runs, _) in zip(out, cells, strict=True)]


def _name(runs: Sequence[Run]) -> str:
    if runs[0].labels and all(run.labels == runs[0].labels for run in runs):
        return " ".join(f"{axis}={value}" for axis, value in runs[0].labels.items())
    return runs[0].name if len(runs) == 1 else runs[0].label or runs[0].name


def shared(conversations: Sequence[Conversations]) -> list[StepCounts]:
    """The counts [C, K] of each on the conversations and draft steps that all have, in one order; [] of none."""
    if not conversations:
        return []
    common = set.intersection(*(set(c.keys) for c in conversations))
    keys, steps = [key for key in conversations[0].keys if key in common], min(c.counts.den.shape[-1] for c in conversations)
    out = []
    for c in conversations:
        at = {key: i for i, key in enumerate(c.keys)}
        out.append(StepCounts.unstack(c.counts.stack()[:, np.array([at[key] for key in keys], dtype=int), :steps]))
    return out


def spreads(group: Group, statistics: Sequence[Statistic], options: EvalConfig, confidence: float) -> list[Spread]:
    """Each of the statistics of the cell over its measured seeds; [] if none is measured."""
    counts = shared([run.conversations for run in group.runs if run.conversations])
    return over_seeds_all(counts, statistics, options.bootstrap, confidence, options.seed) if counts else []


def difference(first: Group, second: Group, statistic: Statistic, options: EvalConfig, confidence: float) -> Paired:
    """`statistic` of the first cell minus that of the second, seed by seed, on the conversations that all their runs were measured on."""
    sides = [{run.seed: run.conversations for run in group.runs if run.conversations} for group in (first, second)]
    if unmeasured := [group.name for group, side in zip((first, second), sides, strict=True) if not side]:
        return Paired(None, f"held-out acceptance of {' and of '.join(unmeasured)} (kvshot eval)")
    seeds = [seed for seed in sides[0] if seed in sides[1]]
    alone = tuple(sorted(seed for seed in sides[0].keys() ^ sides[1].keys() if seed is not None))
    if not seeds:
        return Paired(None, f"a seed that both {first.name} and {second.name} were trained with", alone)
    counts = shared([side[seed] for side in sides for seed in seeds])
    if not len(counts[0].den):
        return Paired(None, f"held-out conversations that both {first.name} and {second.name} were measured on", alone)
    half = len(seeds)
    return Paired(paired_over_seeds(counts[:half], counts[half:], statistic, options.bootstrap, confidence, options.seed), "", alone)


def of_values(values: Iterable[float], confidence: float) -> Spread:
    """Mean of one number a seed, and Student's t interval: for what is no rate over conversations. One seed has no interval."""
    numbers = np.array(list(values), dtype=np.float64)
    value, n = float(numbers.mean()), len(numbers)
    if n < 2:
        return Spread(value, None, None, n, None)
    sd = float(numbers.std(ddof=1))
    half = float(stats.t.ppf(0.5 + confidence / 2, n - 1)) * sd / math.sqrt(n)
    return Spread(value, value - half, value + half, n, sd)


def mean(values: Iterable[float | None]) -> float | None:
    """Of those that are there; None of none."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
