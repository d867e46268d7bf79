"""What was measured against each axis of a sweep: lines over an axis of numbers, rows of dots over one of names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from kvshot_ds.config.sweep import ALIASES
from kvshot_ds.metrics import Interval
from kvshot_ds.report import blocks as b
from kvshot_ds.report.blocks import Block, Cell, Figure, LegendItem, Panel, Row, Table, Text
from kvshot_ds.report.bycell import MOST, Points, Scope, axis_words, heading, is_variant, label_words, series, y_range
from kvshot_ds.report.cells import Group
from kvshot_ds.report.families import styles
from kvshot_ds.report.figures import Chart, Dot, Dots
from kvshot_ds.report.numbers import Numbers

CONTROL = "control"  # the label of a cell that a sweep added as a control: no axis
# A span of more than this is drawn on a logarithmic axis.
_LOG_SPAN = 8
_DEPTH, _DATA, _GATE = ALIASES["depth"], ALIASES["conversations"], ALIASES["gate"]


@dataclass(frozen=True)
class Axis:
    """value: of each cell, a number or a name; line: what else the cell is, in words. by_family: whether colours
    are those of families, as they are where a sweep has several."""

    name: str
    title: str
    value: Mapping[Group, float | str]
    line: Mapping[Group, str]
    by_family: bool

    @property
    def numbers(self) -> dict[Group, float]:
        """The values, if all of them are numbers; {} otherwise."""
        found = {g: v for g, v in self.value.items() if isinstance(v, float)}
        return found if len(found) == len(self.value) else {}

    @property
    def log(self) -> bool:
        """Whether the axis is logarithmic: data always, other numbers where they span much."""
        found = self.numbers.values()
        return min(found) > 0 and (ALIASES.get(self.name, self.name) == _DATA or max(found) / min(found) >= _LOG_SPAN)


def axes_of(scope: Scope) -> list[Axis]:
    """The axes of a sweep with two values or more; where its variants have names, depth, data and gate of what they stand for too."""
    names = [n for n in dict.fromkeys(n for g in scope.groups for n in _labels(g)) if n != CONTROL and _count(_labels(g).get(n) for g in scope.groups) > 1]
    found = []
    for name in names:
        members = [g for g in scope.groups if name in _labels(g)]
        line = {g: _words(g, [n for n in (*names, CONTROL) if n != name]) for g in members}
        found.append(_axis(scope, name, {g: _labels(g)[name] for g in members}, line))
    if any(map(is_variant, names)):
        found += [axis for option in (_DEPTH, _DATA, _GATE) if option not in [ALIASES.get(n, n) for n in names] and (axis := _hidden(scope, option, names))]
    return found


def _hidden(scope: Scope, option: str, names: Sequence[str]) -> Axis | None:
    """An option that differs between the variants of a sweep, as an axis of its own: of the variants that differ in little else, told apart by the rest
    of what the drafters are."""
    values: dict[Group, str] = {}
    for g in scope.groups:
        label = g.drafter.label.split(" · ") if g.drafter else []
        gate = next((part for part in label if part.startswith(("gate ", "no gate"))), None)
        value = gate if option == _GATE else g.options.get(option.removeprefix("train."))
        if value is not None:
            values[g] = str(value)
    if _count(values.values()) < 2:
        return None
    rest = [n for n in (*names, CONTROL) if not is_variant(n)]
    line: dict[Group, str] = {}
    taken: set[tuple[str, str]] = set()
    for g, value in values.items():
        own = [part for part in (g.drafter.label.split(" · ") if g.drafter else []) if not _says(part, option)]
        words = " · ".join(filter(None, [*own, _words(g, rest)]))
        line[g] = g.name if (words, value) in taken else words  # variants that differ in something else too
        taken.add((words, value))
    long = [g for g in values if _count(values[other] for other in values if line[other] == line[g]) > 1]
    return _axis(scope, option, {g: values[g] for g in long}, {g: line[g] for g in long}) if long else None


def _says(part: str, option: str) -> bool:
    """Whether a part of a drafter's label is about the option."""
    return part.startswith({_DEPTH: ("depth ",), _GATE: ("gate ", "no gate"), _DATA: ("\0",)}[option])


def _axis(scope: Scope, name: str, texts: Mapping[Group, str], line: Mapping[Group, str]) -> Axis:
    """Numbers where all values are; data in tokens where the features are there to tell."""
    values: dict[Group, float | str]
    by_family = _count(g.drafter.family for g in scope.groups if g.drafter) > 1
    try:
        values = {g: float(text) for g, text in texts.items()}
    except ValueError:
        return Axis(name, _title(name), dict(texts), line, by_family)
    if ALIASES.get(name, name) != _DATA:
        return Axis(name, _title(name), values, line, by_family)
    train = ((scope.sweep.manifest if scope.sweep else None) or {}).get("splits", {}).get("train", {})
    samples, tokens = train.get("samples"), train.get("tokens")
    if not samples or not tokens:
        return Axis(name, "training conversations", values, line, by_family)
    return Axis(name, "tokens of training data", {g: (min(float(v), samples) or samples) * tokens / samples for g, v in values.items()}, line, by_family)


def _title(name: str) -> str:
    """An option by its short name, where it has one."""
    return axis_words({option: short for short, option in ALIASES.items()}.get(name, name))


def _labels(group: Group) -> dict[str, str]:
    return group.runs[0].labels


def _words(group: Group, axes: Sequence[str]) -> str:
    labels = _labels(group)
    return " · ".join(label_words(axis, labels[axis]) for axis in axes if axis in labels)


def _count(values: Iterable[object]) -> int:
    """Different values that are known."""
    return len({v for v in values if v is not None})


def axis_blocks(scope: Scope, numbers: Mapping[Group, Numbers]) -> list[Block]:
    """A figure for each axis, of MAT, joint MAT, retention, and alpha at the first and the last step."""
    blocks: list[Block] = []
    for n, axis in enumerate(axes_of(scope)):
        draw = _over_numbers if axis.numbers else _over_names
        blocks += draw(f"axis-{n}{scope.ident}", scope.said(f"Against {axis.title}"), axis, numbers)
        if axis.title == "tokens of training data":
            blocks.append(Text("Tokens of training data: conversations times the mean length of the training split. Subsets are nested."))
    return blocks


def _measures(numbers: Mapping[Group, Numbers]) -> list[tuple[str, int, Callable[[Group], Interval]]]:
    last = min(len(found.alpha) for found in numbers.values()) - 1
    return [
        ("MAT", 2, lambda g: numbers[g].mat),
        ("joint MAT", 2, lambda g: numbers[g].mat_joint),
        ("retention", 3, lambda g: numbers[g].retention),
        (b.alpha_name(0), 3, lambda g: numbers[g].alpha[0]),
        (b.alpha_name(last), 3, lambda g: numbers[g].alpha[last]),
    ]


def _lines(axis: Axis) -> dict[str, list[Group]]:
    """The cells of each line, ascending, or in the order of the sweep where values are names."""
    out: dict[str, list[Group]] = {}
    for g in axis.value:
        out.setdefault(axis.line[g], []).append(g)
    return {line: sorted(members, key=lambda g: axis.numbers.get(g, 0.0)) for line, members in out.items()}


def _over_numbers(ident: str, caption: str, axis: Axis, numbers: Mapping[Group, Numbers]) -> list[Figure]:
    """Lines, a figure for every MOST of them, all on one scale."""
    lines = list(_lines(axis).items())
    drafters = [members[0].drafter for _, members in lines]
    chosen = styles(drafters) if axis.by_family else list(range(len(lines)))
    ticks = tuple(sorted(set(axis.numbers.values())))
    figures = []
    for start in range(0, len(lines), MOST):
        shown = list(zip(lines, chosen, strict=True))[start : start + MOST]
        panels = []
        for title, _, of in _measures(numbers):
            every: list[Points] = [tuple((axis.numbers[g], of(g)) for g in members) for _, members in lines]
            drawn = tuple(series(line or title, style, every[lines.index((line, members))]) for (line, members), style in shown)
            text = f"{title} against {axis.title}, at {', '.join(f'{t:,.6g}' for t in ticks)}: {', '.join(line or 'one line' for (line, _), _ in shown)}."
            panels.append(Panel(title, Chart(axis.title, title, drawn, text, y_range=y_range(every), log_x=axis.log, x_ticks=ticks)))
        legend = tuple(LegendItem(line, style) for (line, _), style in shown if line)
        data = _table(axis, [members for (_, members), _ in shown], [style for _, style in shown], numbers)
        said = caption + (", on a logarithmic axis" if axis.log else "") + ", with intervals."
        figures.append(Figure(ident + (f"-{start}" if start else ""), said, tuple(panels), legend, data))
    return figures


def _over_names(ident: str, caption: str, axis: Axis, numbers: Mapping[Group, Numbers]) -> list[Figure]:
    """Rows of dots, by line and then by value, coloured as the cells are."""
    members = [g for group in _lines(axis).values() for g in group]
    several = len(_lines(axis)) > 1
    panels = []
    for title, _, of in _measures(numbers):
        rows = []
        for g in members:
            value, label = of(g), axis.value[g] if isinstance(axis.value[g], str) else f"{axis.value[g]:g}"
            rows.append(Dot(f"{label} · {axis.line[g]}" if several and axis.line[g] else str(label), g.style, value.value, value.low, value.high))
        panels.append(Panel(title, Dots(title, tuple(rows), f"{title} by {axis.title}: {', '.join(row.label for row in rows)}.")))
    return [Figure(ident, f"{caption}, with intervals.", tuple(panels), (), _table(axis, [[g] for g in members], [g.style for g in members], numbers))]


def _table(axis: Axis, lines: Sequence[Sequence[Group]], chosen: Sequence[int], numbers: Mapping[Group, Numbers]) -> Table:
    rows = []
    for members, style in zip(lines, chosen, strict=True):
        for g in members:
            value = axis.value[g]
            shown = Cell(value) if isinstance(value, str) else Cell(f"{value:,.6g}", value=value)
            cells = [b.measured(of(g), digits, title) for title, digits, of in _measures(numbers)]
            rows.append(Row((replace(heading(g)), shown, b.counted(numbers[g].mat.seeds), *cells), style=style))
    head = ("cell", axis.title, "seeds", *(title for title, _, _ in _measures(numbers)))
    return Table("What the charts show", head, tuple(rows), words=1 if axis.numbers else 2)
