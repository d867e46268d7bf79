"""What each cell cost: size, work, time and bytes, means over its seeds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvshot_ds.report import blocks as b
from kvshot_ds.report.blocks import Block, Cell, Row, Table, Text
from kvshot_ds.report.bycell import Scope, heading
from kvshot_ds.report.cells import Group
from kvshot_ds.report.figures import short
from kvshot_ds.report.gather import Run

_TEXT = (
    "Tokens and supervised rows count every pass. FLOPs are those of matrix products and attention, from shapes (kvshot drafter describe); a multiply-add is "
    "two. Device hours: ranks times the time of all that was done, from start to diagnostics, where a sweep counted it; otherwise of training. Features: bytes "
    "of tensors read from the captured features, as often as training passed over them. Checkpoints kept: bytes of the checkpoints that still lie in the run "
    "folders. Means over seeds; where seeds differ by more than a hundredth, the lowest and the highest stand below."
)


def cost_blocks(all_scopes: tuple[Scope, ...]) -> list[Block]:
    tables = [table for scope in all_scopes if any(run.train for g in scope.groups for run in g.runs) for table in (_table(scope), *_totals(scope))]
    return [Text(_TEXT), *tables] if tables else []


def _totals(scope: Scope) -> list[Block]:
    """Device hours of all trials of a sweep by part, those of unfinished trials too, and their sum; [] where no row counts them."""
    rows = [t.row for t in scope.sweep.trials] if scope.sweep else []
    parts: dict[str, float] = {}
    for row in rows:
        seconds, hours = (row.get("cost") or {}).get("seconds") or {}, _at(row, "cost", "device_hours")
        if hours is not None and (whole := sum(seconds.values())):
            for part, value in seconds.items():
                parts[part] = parts.get(part, 0.0) + hours * value / whole
    if not parts:
        return []
    counted = [*parts.items(), ("total", sum(parts.values()))]
    made = [Row((Cell(part), _cell([hours], _hours_text)), "ours" if part == "total" else "") for part, hours in counted]
    assert scope.sweep
    return [Table(f"Device hours of all trials of sweep {scope.sweep.name}, by part", ("part", "device hours"), tuple(made), ident="device-hours")]


def _table(scope: Scope) -> Table:
    rows = {t.run.folder: t.row for t in scope.sweep.trials if t.run} if scope.sweep else {}
    made = []
    for g in scope.groups:

        def each(get: Callable[[Run, Mapping[str, Any]], float | None], g: Group = g) -> list[float]:
            return [v for run in g.runs if (v := get(run, rows.get(run.folder, {}))) is not None]

        trained = [_cell(each(_trained(key)), b.integer) for key in ("tokens", "supervised_rows", "steps")]
        made.append(Row((
            heading(g),
            b.millions(_mean(each(lambda run, _: run.evaluation.drafter.parameters if run.evaluation else None))),
            *trained,
            _cell(each(lambda run, row: _at(row, "train", "flops")), _short),
            _cell(each(lambda run, row: _at(row, "drafter", "flops", "draft_per_step")), _short),
            _cell(each(_trained("seconds")), b.duration),
            _cell(each(lambda run, row: _hours(run, row)), _hours_text),
            _cell(each(lambda run, row: _at(row, "cost", "feature_bytes")), size),
            _cell(each(lambda run, _: run.checkpoint_bytes), size),
        ), style=g.style))  # fmt: skip
    head = (
        "cell", "parameters", "tokens", "supervised rows", "steps", "FLOPs of training", "FLOPs of a draft step", "training", "device hours",
        "features", "checkpoints kept",
    )  # fmt: skip
    return Table(f"Cost of {scope.title[0].lower()}{scope.title[1:]}" if scope.title else "Cost of each run", head, tuple(made))


def _trained(key: str) -> Callable[[Run, Mapping[str, Any]], float | None]:
    """A number of train.json."""
    return lambda run, _: (run.train or {}).get(key)


def _at(row: Mapping[str, Any], *path: str) -> float | None:
    """A number of results.jsonl; None where the row has none."""
    found: Any = row
    for key in path:
        found = found.get(key) if isinstance(found, Mapping) else None
    return found if isinstance(found, int | float) else None


def _hours(run: Run, row: Mapping[str, Any]) -> float | None:
    """As the sweep counted them; otherwise ranks times the time of training."""
    counted, train = _at(row, "cost", "device_hours"), run.train or {}
    if counted is not None:
        return counted
    return train["world_size"] * train["seconds"] / 3600 if train.get("world_size") and train.get("seconds") is not None else None


def _hours_text(value: float | None) -> str:
    return b.number(value, 2 if value and value >= 0.1 else 4)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _cell(values: Sequence[float], text: Callable[[float | None], str]) -> Cell:
    mean = _mean(values)
    wide = bool(values) and max(values) - min(values) > 0.01 * abs(mean or 0.0)
    return Cell(text(mean), f"{text(min(values))} to {text(max(values))}" if wide else "", mean)


def _short(value: float | None) -> str:
    return "–" if value is None else short(value)


def size(value: float | None) -> str:
    """Bytes, in powers of 1024."""
    if not value:
        return "–" if value is None else "0"
    power, name = next(((1024.0**p, n) for p, n in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")) if value >= 1024**p), (1.0, "B"))
    return f"{value / power:.3g} {name}"
