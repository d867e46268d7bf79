"""Cell by cell: what a page shows together, and figures with a line for each cell, split where one chart could not be read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvshot_ds.config.sweep import ALIASES
from kvshot_ds.metrics import Interval
from kvshot_ds.report import blocks as b
from kvshot_ds.report.blocks import Cell, Details, Figure, LegendItem, Panel, Row, Table
from kvshot_ds.report.cells import Group
from kvshot_ds.report.families import FAMILIES, UNKNOWN, Drafter, styles
from kvshot_ds.report.figures import Chart, Series
from kvshot_ds.report.gather import Sweep, SweepCell, Work

# Lines of one chart; more are split by family. Rows of a table behind a long curve, per cell.
MOST, _ROWS = 6, 12
RANGE = "Bands reach from the lowest to the highest seed."
Points = tuple[tuple[float, Interval], ...]


@dataclass(frozen=True, eq=False)
class Scope:
    """Cells that stand in one figure: those of a sweep, or (sweep None) the runs that belong to none, each a cell of one seed. alone: the page's only
    one, which captions need not name."""

    ident: str
    title: str
    groups: tuple[Group, ...]
    sweep: Sweep | None = None
    alone: bool = False

    def said(self, caption: str) -> str:
        """A caption that tells which of several scopes it is about."""
        return caption if self.alone else f"{self.title}. {caption}"


@dataclass(frozen=True)
class Measure:
    """One panel: x and value of a cell, () where it was not measured. The value's ends are its band."""

    title: str
    label: str
    points: Callable[[Group], Points]
    digits: int = 3


@dataclass(frozen=True)
class Plot:
    """A figure for every scope. ident: unique on the page, completed by the scope's. folded: under which words it is folded away, if it is.
    log_y: a logarithmic axis of values."""

    ident: str
    caption: str
    x_label: str
    measures: tuple[Measure, ...]
    integer_x: bool = False
    plain: bool = False
    folded: str = ""
    log_y: bool = False


def scopes(work: Work) -> tuple[Scope, ...]:
    """The sweeps in their order, then what stands alone."""
    last = () if not work.alone else (Scope("", "Runs of no sweep" if work.sweeps else "", _alone(work), None, not work.sweeps),)
    return (*(Scope(f"-s{n}", f"Sweep {sweep.name}", _groups(sweep), sweep, not last and len(work.sweeps) == 1) for n, sweep in enumerate(work.sweeps)), *last)


def _alone(work: Work) -> tuple[Group, ...]:
    return tuple(Group(run.name, (run,), run.style) for run in work.alone)


def _groups(sweep: Sweep) -> tuple[Group, ...]:
    """The cells that have been measured with at least one seed; coloured by family, where there are several."""
    cells = [cell for cell in sweep.cells if cell.runs]
    drafters = [cell.runs[0].drafter for cell in cells]
    families = {d.family for d in drafters if d}
    chosen = styles(drafters) if len(families) > 1 else range(len(cells))
    return tuple(Group(cell_name(cell, sweep), cell.runs, style) for cell, style in zip(cells, chosen, strict=True))


def cell_name(cell: SweepCell, sweep: Sweep) -> str:
    """The values of the axes that vary, in the words of the page."""
    varied = {axis: value for axis, value in cell.labels.items() if len({c.labels.get(axis) for c in sweep.cells}) > 1} or cell.labels
    return " · ".join(label_words(axis, value) for axis, value in varied.items()) or (cell.runs[0].label if cell.runs else cell.label)


def label_words(axis: str, value: str) -> str:
    """One label. Of an axis that is no option, whose values are named variants, the value alone."""
    if axis in ("family", ALIASES["family"]):
        return FAMILIES[value].name if value in FAMILIES else value
    return value if is_variant(axis) else f"{axis_words(axis)} {value}"


def axis_words(axis: str) -> str:
    return axis.rpartition(".")[2].replace("_", " ")


def is_variant(axis: str) -> bool:
    return axis not in ALIASES and "." not in axis


def started(drafter: Drafter | None) -> str:
    """What the weights started from, in few words."""
    if drafter is None or drafter.init_layers == UNKNOWN:
        return "start not recorded"
    return f"layers {drafter.init_layers}, head {drafter.init_head}" + (", warm start" if drafter.warm_start else "")


def heading(group: Group) -> Cell:
    """The first cell of a row: which cell, and what its weights started from."""
    return Cell(group.name, started(group.drafter))


def over(values: Sequence[float | None]) -> Interval:
    """Mean over seeds, and the lowest and highest of several; None where none is defined."""
    known = [v for v in values if v is not None and v == v]
    if not known:
        return Interval(None, None, None)
    mean = sum(known) / len(known)
    return Interval(mean, min(known), max(known)) if len(known) > 1 else Interval(mean, None, None)


def curve(group: Group, tag: str) -> Points:
    """A TensorBoard tag over the steps that all seeds have it at."""
    columns = [dict(run.scalars[tag]) for run in group.runs if run.scalars.get(tag)]
    steps = sorted(set.intersection(*map(set, columns))) if columns else []
    return tuple((step, over([column[step] for column in columns])) for step in steps)


def parts(groups: Sequence[Group]) -> list[tuple[str, tuple[Group, ...]]]:
    """At most MOST cells together, with a title: families side by side as far as they fit, step-by-step and block-wise drafters apart."""
    if len(groups) <= MOST:
        return [("", tuple(groups))]
    by_family: dict[tuple[bool, str], list[Group]] = {}
    for group in groups:
        d = group.drafter
        by_family.setdefault((bool(d and d.blockwise), d.family_name if d else "unknown"), []).append(group)
    out: list[tuple[bool, list[str], list[Group]]] = []
    for (block, name), members in by_family.items():
        room = next((o for o in out if o[0] is block and len(o[2]) + len(members) <= MOST), None)
        if room:
            room[1].append(name)
            room[2].extend(members)
        else:
            pieces = [members[i : i + MOST] for i in range(0, len(members), MOST)]
            out += [(block, [name if len(pieces) == 1 else f"{name} ({n} of {len(pieces)})"], piece) for n, piece in enumerate(pieces, 1)]
    return [(", ".join(names), tuple(members)) for _, names, members in out]


def of_part(caption: str, title: str, n: int) -> str:
    """Of the n-th of several figures that differ in their cells alone."""
    return caption if not title else f"{caption} First: {title}." if not n else f"The same of {title}."


def plotted(plot: Plot, scope: Scope) -> list[Figure] | list[Details]:
    """The figure: of one measure, a panel for each part of the cells, the other cells in grey behind; of several, a figure for each part.

    [] if no cell has any of it.
    """
    figures = _figures(plot, scope)
    return [Details(scope.said(plot.folded), tuple(figures))] if plot.folded and figures else figures


def _figures(plot: Plot, scope: Scope) -> list[Figure]:
    found = [(m, {g: p for g in scope.groups if (p := m.points(g))}) for m in plot.measures]
    found = [(m, points) for m, points in found if points]
    shown = [g for g in scope.groups if any(g in points for _, points in found)]
    divided = parts(shown)
    if not shown:
        return []
    caption = scope.said(plot.caption)
    if len(found) == 1:
        (measure, points), several = found[0], len(divided) > 1
        panels = tuple(
            Panel(title, _chart(plot, measure, points, groups, behind=several), _legend(groups, plot.plain) if several else ()) for title, groups in divided
        )
        legend = (LegendItem("grey: the other cells"),) if several else _legend(shown, plot.plain)
        return [Figure(plot.ident + scope.ident, caption, panels, legend, _table(plot, found, shown))]
    out = []
    for n, (title, groups) in enumerate(divided):
        panels = tuple(Panel(m.title, _chart(plot, m, points, groups)) for m, points in found if any(g in points for g in groups))
        out.append(
            Figure(
                f"{plot.ident}{scope.ident}" + (f"-{n}" if n else ""),
                of_part(caption, title, n),
                panels,
                _legend(groups, plot.plain),
                _table(plot, found, groups),
            )
        )
    return out


def _legend(groups: Sequence[Group], plain: bool) -> tuple[LegendItem, ...]:
    return tuple(LegendItem(g.name, g.style, plain=plain) for g in groups)


def series(label: str, style: int, points: Points, plain: bool = False) -> Series:
    x, values = tuple(x for x, _ in points), [v for _, v in points]
    low, high = (tuple(getattr(v, end) for v in values) if any(v.low is not None for v in values) else () for end in ("low", "high"))
    return Series(label, style, x, tuple(v.value for v in values), low, high, plain=plain)


def _chart(plot: Plot, measure: Measure, points: dict[Group, Points], groups: Sequence[Group], behind: bool = False) -> Chart:
    """On one scale for all parts of the cells."""
    own = tuple(series(g.name, g.style, points[g], plot.plain) for g in groups if g in points)
    others = tuple(series(g.name, g.style, p) for g, p in points.items() if g not in groups) if behind else ()
    text = f"{measure.title}, by {plot.x_label}, of {len(own)} cell{'s' if len(own) > 1 else ''}: {', '.join(s.label for s in own)}."
    limits = y_range(points.values(), plot.log_y)
    return Chart(plot.x_label, measure.label, own, text, integer_x=plot.integer_x, y_range=limits, behind=others, log_y=plot.log_y)


def y_range(lines: Iterable[Points], log: bool = False) -> tuple[float, float] | None:
    """From the lowest to the highest end of all lines, with a margin. log: of what is above 0, for a logarithmic axis."""
    ends = [v for line in lines for _, i in line for v in (i.value, i.low, i.high) if v is not None and (v > 0 or not log)]
    if not ends:
        return None
    if log:
        return min(ends) / 1.2, max(ends) * 1.2
    margin = 0.05 * (max(ends) - min(ends)) or 0.02 * abs(max(ends)) or 0.01
    return min(ends) - margin, max(ends) + margin


def _table(plot: Plot, found: list[tuple[Measure, dict[Group, Points]]], groups: Sequence[Group]) -> Table:
    """What the charts show; of long curves some points, evenly spaced, the last included."""
    rows, thinned = [], False
    for g in groups:
        columns = [(m, dict(points.get(g, ()))) for m, points in found]
        xs = sorted({x for _, column in columns for x in column})
        every = 1 if plot.integer_x else max(1, -(-len(xs) // _ROWS))
        thinned |= every > 1
        for x in xs[::-every][::-1]:
            rows.append(Row((heading(g), b.counted(x), *(b.measured(column.get(x), m.digits, m.label) for m, column in columns)), style=g.style))
    head = ("cell", plot.x_label, *(m.title for m, _ in found))
    return Table("Evenly spaced points of each curve" if thinned else "What the charts show", head, tuple(rows))
