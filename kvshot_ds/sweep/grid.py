"""A recipe's sweep as trials: every cell with every seed, each named by its contents."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ds_configs
from kvshot_ds.config import ALIASES, Recipe
from kvshot_ds.drafters.build import find_drafter
from kvshot_ds.drafters.cost import weightless
from kvshot_ds.errors import ConfigError, KvshotError
from kvshot_ds.features.manifest import require
from kvshot_ds.objectives.objective import required_features
from kvshot_ds.sweep.axes import Cell, cells, select, written
from kvshot_ds.sweep.contents import CELL, Data, address, drafter_sha, resolved, sources, starts_from, trial_recipe
from kvshot_ds.sweep.controls import Proposal, controls
from kvshot_ds.sweep.fairness import unequal
from kvshot_ds.sweep.folder import Trial, trials_dir

__all__ = ["Data", "Grid", "Proposal", "address", "expand", "trial_recipe"]

_SHOWN = 5  # errors shown at once
_PLAIN = re.compile(r"[^\w.-]+")  # what the name of a variant is better without


@dataclass(frozen=True)
class Grid:
    """trials: in the order in which they are trained. excluded: names of the cells left out. merged: cells that are the same training as another one.
    proposals: controls that are missing. there: why others are not. unequal: what makes the comparison unequal. baseline: name of the cell the others are
    compared with. steps: optimizer steps of each trial, by name; empty if the conversations are not known yet."""

    trials: tuple[Trial, ...]
    excluded: tuple[str, ...]
    merged: tuple[str, ...]
    proposals: tuple[Proposal, ...]
    there: tuple[str, ...]
    unequal: tuple[str, ...]
    baseline: str
    steps: dict[str, int]


def expand(recipe: Recipe, data: Data | None = None) -> Grid:
    """The trials of `recipe.sweep` over the captured features (or over `data`): all cells of the first seed, then of the next, the source of a warm start
    before what it starts.

    Raises ConfigError, naming the cell: what `cells` refuses, options that do not fit together or the features, a warm start from a cell that is not
    there or that comes back to itself.
    """
    data = data or Data.of(recipe)
    found = cells(recipe.sweep)
    _check(recipe, found.kept, data)
    among = _equal_steps(recipe, found.kept, data) if recipe.sweep.match == "steps" else found.kept
    proposals: tuple[Proposal, ...] = ()
    there: tuple[str, ...] = ()
    if recipe.sweep.controls != "off":
        more = controls(recipe, among, data.manifest.geometry)
        proposals, there = more.proposals, more.there
        if recipe.sweep.controls == "add":
            _check(recipe, more.cells, data)
            if not more.cells:
                why = "as said here" if there or proposals else "as no cell is warm-started (train.init.warm_start)"
                there = (f"sweep.controls=add adds nothing, {why}", *there)
            among, proposals = (*among, *more.cells), tuple(p for p in proposals if not p.lines)
    merged: dict[str, None] = {}
    seeds = [_trials(recipe, among, data, seed, merged) for seed in recipe.sweep.seeds]
    trials = tuple(trial for made in seeds for trial in {t.name: t for t in made.values()}.values())
    lengths = {trial.name: data.length(trial_recipe(recipe, trial)) for trial in trials}
    first = select(among, recipe.sweep.baseline, "sweep.baseline")[0] if recipe.sweep.baseline is not None else among[0]
    return Grid(
        trials, tuple(cell.name for cell in found.excluded), tuple(merged), proposals, there, unequal(recipe, among, data), seeds[0][among.index(first)].cell,
        {name: length.steps for name, length in lengths.items() if length},
    )  # fmt: skip


def _check(recipe: Recipe, among: tuple[Cell, ...], data: Data) -> None:
    """Raises ConfigError, naming each cell, for all that a trial would only find out when it starts."""
    wrong, impossible = [], []
    for cell in among:
        labels = ", ".join(f"{name}: {written(label)}" for name, label in cell.labels.items())
        leave = f"\n    to leave it out: sweep.exclude: [{{{labels}}}]" if labels and not cell.control else ""
        try:
            one = resolved(recipe, cell.options, recipe.sweep.seeds[0], cell.name)
        except ConfigError as error:
            wrong.append(f"{error}{leave}")
            impossible.append(cell)
            continue
        try:
            t = one.train
            ds_configs.load(t.ds_config)
            drafter = weightless(t.drafter, data.manifest.geometry, t.draft_vocab_size)
            require(data.manifest, required_features(drafter, t.objective), data.manifest.target_digest)
            data.length(one)
            start = starts_from(recipe, cell)
            if start and not start.startswith(CELL) and data.digest:
                drafter_sha(find_drafter(Path(start)))
        except KvshotError as error:
            wrong.append(f"cell {cell.name}: {error}{leave}")
    if wrong:
        more = f"\n  and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise ConfigError(
            f"sweep: {len(wrong)} of {len(among)} cells cannot be trained\n  " + "\n  ".join(wrong[:_SHOWN]) + more + _as_variants(recipe, among, impossible)
        )


def _as_variants(recipe: Recipe, among: Sequence[Cell], impossible: Sequence[Cell]) -> str:
    """How to write cells of which a value would lose all though it can be by itself, such as a family without a gate crossed with gates: as one axis of named
    variants."""
    possible = [cell for cell in among if cell not in impossible]
    kept = {item for cell in possible for item in cell.labels.items()}
    variants: dict[str, dict[str, Any]] = {}
    lost = []
    for axis, label in dict.fromkeys(item for cell in impossible for item in cell.labels.items() if item not in kept):
        of_drafter = [_of_drafter(cell) for cell in impossible if cell.labels.get(axis) == label]
        own = ALIASES.get(axis, axis)
        options = {o: v for o, v in of_drafter[0].items() if o == own or (own not in of_drafter[0] and all(o in others for others in of_drafter))}
        try:
            resolved(recipe, options, recipe.sweep.seeds[0], label)
        except ConfigError:
            continue
        if options:
            lost.append(f"{axis}={label}")
            variants.setdefault(label, options)
    if not lost or not possible:
        return ""
    for cell in possible:
        variants.setdefault("_".join(map(str, _of_drafter(cell).values())), _of_drafter(cell))
    short = {option: name for name, option in ALIASES.items()}
    texts = {
        name: ", ".join(f"{short.get(o, o)}: {written(v) if isinstance(v, str) else json.dumps(v)}" for o, v in of.items()) for name, of in variants.items()
    }
    return (
        f"\n  leaving these out leaves no cell with {' or '.join(lost)}. Options that only some drafters have are written as the variants of one axis, "
        "in place of those axes (docs/sweeps.md, Options that not every family has):"
        "\n    - drafter: {" + ", ".join(f"{_PLAIN.sub('_', name)}: {{{of}}}" for name, of in texts.items()) + "}"
    )


def _of_drafter(cell: Cell) -> dict[str, Any]:
    """The options that `cell` sets, without those axes that are not of the drafter and can stay axes."""
    stay = {ALIASES.get(axis, axis) for axis in cell.labels if not ALIASES.get(axis, axis).startswith("train.drafter.")}
    return {option: value for option, value in cell.options.items() if option not in stay}


def _equal_steps(recipe: Recipe, among: tuple[Cell, ...], data: Data) -> tuple[Cell, ...]:
    """Every cell with as many steps as the longest; those that are as long already are left as they are."""
    lengths = [data.length(resolved(recipe, cell.options, recipe.sweep.seeds[0], cell.name)) for cell in among]
    most = max((length.steps for length in lengths if length), default=0)
    return tuple(
        replace(cell, options={**cell.options, "train.epochs": -(-most // length.of_a_pass), "train.max_steps": most})
        if length and length.steps < most
        else cell
        for cell, length in zip(among, lengths, strict=True)
    )


def _trials(recipe: Recipe, among: tuple[Cell, ...], data: Data, seed: int, merged: dict[str, None]) -> dict[int, Trial]:
    """Of one seed, by number of the cell, in the order in which they are trained. merged: gets a line for each cell that is the same training as another."""
    source = sources(recipe, among)
    made: dict[int, Trial] = {}
    kept: dict[str, Trial] = {}
    for i in _in_order(among, source):
        cell, after = among[i], made[source[i]].name if i in source else ""
        options = {**cell.options, ALIASES["warm_start"]: str(trials_dir(recipe.work) / after)} if after else cell.options
        one = resolved(recipe, options, seed, cell.name)
        drafter = one.train.drafter
        trial = Trial(f"{drafter.family}-{drafter.depth}-{address(one, data)}", cell.labels, seed, options, after, cell.control)
        made[i] = kept.setdefault(trial.name, trial)
        if made[i] is not trial:
            merged.setdefault(f"{cell.name} is the same training as {made[i].cell}")
    return made


def _in_order(among: tuple[Cell, ...], source: Mapping[int, int]) -> list[int]:
    """Cells in their order, but the source of a warm start first. Raises ConfigError on a circle."""
    order: dict[int, None] = {}

    def place(i: int, way: tuple[int, ...]) -> None:
        if i in way:
            raise ConfigError(f"sweep: warm starts go in a circle: {' <- '.join(among[j].name for j in (*way, i))}")
        if i in source and i not in order:
            place(source[i], (*way, i))
        order.setdefault(i)

    for i in range(len(among)):
        place(i, ())
    return list(order)
