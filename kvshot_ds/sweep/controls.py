"""Matched controls of warm-started cells: what of their lead is the warm start's, and what is the further training's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvshot_ds.config import ALIASES, Recipe
from kvshot_ds.drafters.build import find_drafter, read_info
from kvshot_ds.drafters.cost import weightless
from kvshot_ds.errors import KvshotError
from kvshot_ds.geometry import Geometry
from kvshot_ds.sweep.axes import Cell
from kvshot_ds.sweep.contents import CELL, resolved, sources, starts_from

_WARM = ALIASES["warm_start"]
_PRACTICE = ("epochs", "max_steps", "max_conversations", "conversations_per_step")  # of the training, whatever is trained
_ADD = ("sweep:", "  controls: add")


@dataclass(frozen=True)
class Proposal:
    """A matched control that the sweep lacks. control: scratch or continued. lines: to add to the recipe; none if it cannot be made, as the reason says."""

    cell: str
    control: str
    reason: str
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Controls:
    """cells: the controls as cells; proposals: the same, and those that cannot be made, in words. there: those that a cell is already, in words."""

    cells: tuple[Cell, ...]
    proposals: tuple[Proposal, ...]
    there: tuple[str, ...]


def controls(recipe: Recipe, among: tuple[Cell, ...], g: Geometry) -> Controls:
    """Of each cell that is warm-started, those that no cell is yet: `scratch`, the same without its warm start, and `continued`, the drafter it starts
    from trained on for as many steps on the same data. One that several cells share is made once, as the control of them all."""
    source = sources(recipe, among)
    own = {_training(recipe, cell, source.get(i), g): cell.name for i, cell in reversed(list(enumerate(among)))}
    made_of: dict[str, tuple[Cell, str, str, list[str]]] = {}
    impossible, there = [], []
    for i, cell in enumerate(among):
        for control, reason, made in _of(recipe, among, i, source.get(i)):
            if isinstance(made, str):
                impossible.append(Proposal(cell.name, control, f"{reason}; but {made}", ()))
                continue
            training = _training(recipe, made, source.get(i) if control == "continued" else None, g)
            if training in own:
                there.append(f"{control} of {cell.name} is {'that cell itself' if own[training] == cell.name else f'the cell {own[training]}'}")
            else:
                made_of.setdefault(training, (made, control, reason, []))[3].append(cell.name)
    cells = tuple(replace(made, control=f"{kind} of {'; '.join(names)}") for made, kind, _, names in made_of.values())
    proposals = [Proposal("; ".join(names), kind, reason, _ADD) for _, kind, reason, names in made_of.values()]
    return Controls(cells, (*proposals, *impossible), tuple(there))


def _of(recipe: Recipe, among: tuple[Cell, ...], i: int, source: int | None) -> Iterator[tuple[str, str, Cell | str]]:
    """Kind, reason and cell of each control of cell i; instead of the cell, why it cannot be made."""
    cell, start = among[i], starts_from(recipe, among[i])
    if not start:
        return
    scratch = {**cell.options, _WARM: None, "train.init.tensors": ["*"]}
    yield "scratch", "what the warm start gives is the difference from the same drafter without it", _control(cell, "scratch", scratch)
    what = f"the drafter of {among[source].name}" if source is not None else f"the drafter in {start}"
    reason = f"{what}, trained on for as many steps: what it gains is no merit of the cell"
    try:
        options = _continued(recipe, cell, among[source].options if source is not None else _options_of(recipe, Path(start)), start)
    except KvshotError as error:
        yield "continued", reason, str(error)
        return
    yield "continued", reason, _control(cell, "continued", options)


def _control(cell: Cell, kind: str, options: dict[str, Any]) -> Cell:
    return Cell({**cell.labels, "control": kind}, options, f"{kind} of {cell.name}")


def _continued(recipe: Recipe, cell: Cell, source: dict[str, Any], start: str) -> dict[str, Any]:
    """The options of the source, trained as `cell` is: its data, steps and optimizer, but for groups of tensors, which the source need not have."""
    options = {**source, _WARM: start, "train.init.tensors": ["*"]}
    seed = recipe.sweep.seeds[0]
    theirs, own = resolved(recipe, cell.options, seed, cell.name).train, resolved(recipe, options, seed, f"{cell.name} control=continued").train
    wanted = {f"train.{name}": (getattr(theirs, name), getattr(own, name)) for name in _PRACTICE}
    optim = zip(theirs.optim.model_dump(mode="json", exclude={"groups"}).items(), own.optim.model_dump(mode="json", exclude={"groups"}).values(), strict=True)
    wanted |= {f"train.optim.{name}": (value, had) for (name, value), had in optim}
    return options | {option: value for option, (value, had) in wanted.items() if value != had}


def _options_of(recipe: Recipe, start: Path) -> dict[str, Any]:
    """The drafter in the folder `start` as an option. Raises KvshotError if there is none."""
    return {"train.drafter": read_info(find_drafter(start)).config.model_dump(mode="json")}


def _training(recipe: Recipe, cell: Cell, source: int | None, g: Geometry) -> str:
    """Equal for two cells that are the same training, layers named or numbered."""
    train = resolved(recipe, cell.options, recipe.sweep.seeds[0], cell.name).train
    drafter, shaping = weightless(train.drafter, g, train.draft_vocab_size), train.shaping()
    layers = {"hidden_layers": getattr(drafter, "hidden_layers", None), "kv": getattr(getattr(drafter, "source", None), "layers", None)}
    shaping["drafter"].pop("hidden_layers", None)
    shaping["drafter"].get("kv", {}).pop("layers", None)
    if source is not None:
        shaping["init"]["warm_start"] = f"{CELL}{source}"
    return json.dumps([shaping, layers], sort_keys=True)
