"""What makes the cells of a sweep unequal beside what is compared."""

from __future__ import annotations

from kvshot_ds.config import ALIASES, Recipe
from kvshot_ds.sweep.axes import Cell, text
from kvshot_ds.sweep.contents import CELL, Data, resolved, sources, starts_from, unlike

_SHOWN = 3  # cells named for a value


def unequal(recipe: Recipe, among: tuple[Cell, ...], data: Data) -> tuple[str, ...]:
    """A line for each thing that differs between cells although no axis is about it alone; and what cannot be equal."""
    facts: dict[str, dict[str, list[str]]] = {}
    passes: dict[str, list[str]] = {}
    for cell in among:
        one = resolved(recipe, cell.options, recipe.sweep.seeds[0], cell.name)
        t, length = one.train, data.length(one)
        o = t.objective
        weights = {"geometric": f"geometric {o.step_decay:g}", "exponential": f"exponential {o.gamma:g}", "dpace": f"dpace {o.dpace_alpha:g}"}[o.weights]
        found = {
            "optimizer steps": (text(length.steps) if length else "unknown", ""),
            "conversations of a step": (text(t.conversations_per_step), "train.conversations_per_step"),
            "draft steps in training": (text(o.steps), "train.objective.steps"),
            "weights of the draft steps": (weights, "train.objective.weights"),
            "shares of supervised rows": (text(o.row_fraction), "train.objective.row_fraction"),
            "rows drawn of a conversation": (text(o.anchors), "train.objective.anchors"),
            "draft vocabularies": (text(t.draft_vocab_size), "train.draft_vocab_size"),
            "starts of the layers": (t.init.layers, "train.init.layers"),
            "starts of the head": (t.init.head, "train.init.head"),
            "learning rates": (f"{t.optim.lr:g}", "train.optim.lr"),
        }
        compared = {ALIASES.get(name, name) for name in cell.labels}
        for what, (value, option) in found.items():
            if option not in compared:
                facts.setdefault(what, {}).setdefault(value, []).append(cell.name)
        if length:
            passes.setdefault(f"{length.passes:.3g}", []).append(cell.name)
    lines = [f"{what} differ: {_spread(values)}" for what, values in facts.items() if len(values) > 1]
    if len(passes) > 1:
        lines.append(f"passes over the data differ: {_spread(passes)}")
    for i, j in sources(recipe, among).items():
        start = starts_from(recipe, among[i])
        other = [f"{axis}={among[i].labels.get(axis)}" for axis in unlike(among[i], among[j], start)]
        if other and not among[i].control:
            lines.append(f"{among[i].name} starts from {among[j].name}, as no {start.removeprefix(CELL)} has {' '.join(other)}")
    if warm := [cell.name for cell in among if starts_from(recipe, cell)]:
        lines.append(f"training before the warm start is not counted in steps and tokens: {_named(warm)}")
    return tuple(lines)


def _spread(values: dict[str, list[str]]) -> str:
    """The commonest value by itself, the others with their cells."""
    most = max(values, key=lambda value: len(values[value]))
    others = [f"{value} ({_named(cells)})" for value, cells in values.items() if value != most]
    return f"{most}, but {'; '.join(others)}"


def _named(cells: list[str]) -> str:
    return ", ".join(cells[:_SHOWN]) + (f" and {len(cells) - _SHOWN} more" if len(cells) > _SHOWN else "")
