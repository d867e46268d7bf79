"""The section on scaling: points, fits, and extrapolations that are called so."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvshot_ds.config import EvalConfig
from kvshot_ds.metrics import Spread
from kvshot_ds.report import blocks as b
from kvshot_ds.report.blocks import NONE, Block, Cell, Figure, LegendItem, Panel, Row, Table, Text
from kvshot_ds.report.bounds import cut
from kvshot_ds.report.cells import Group, of_values
from kvshot_ds.report.figures import COLOURS, Chart, Series, short
from kvshot_ds.report.scaling import AHEAD, METRICS, SATURATING, SIZES, Crossing, Fit, crossing, data_curves, fit, look_curves

_BANDS = 3  # of more extrapolations the intervals stand in the table alone
_FORMS = (
    f"Fitted to each seed alone: y = a + b log₂(tokens), from {SIZES} sizes on; and y = c − a·tokens^(−b), which has a limit c, from {SATURATING} sizes "
    "on. Values and intervals are over the seeds' fits (Student's t): they say how far seeds agree, not whether the form is right. The first form grows "
    f"without end, and every value beyond the largest size measured is an extrapolation, drawn dashed; beyond {AHEAD[-1]} times that size nothing is "
    "said."
)
_X = {
    "data": ("tokens of training data, each counted once", "Cells that differ in the size of their training data alone."),
    "looks": (
        "tokens trained on by then",
        "No three sizes of training data were measured, so these are looks during training, on the conversations of train.eval_conversations, with a "
        "learning rate that had not yet come down: what a training of that length would have reached is not this.",
    ),
}


def scaling_blocks(groups: Sequence[Group], options: EvalConfig) -> list[Block]:
    """Fits of MAT, the first and the last α against tokens, by size of data or, where that was not varied, by looks during training."""
    sized = data_curves(groups)
    enough = [curves for curves in sized if len(curves[0].sizes) >= SIZES]
    cells = enough or [curves for curves in look_curves(groups) if len(curves[0].sizes) >= SIZES]
    refused = [f"{curves[0].name}: {len(curves[0].sizes)} sizes of training data are not fitted, it takes {SIZES}." for curves in sized if curves not in enough]
    blocks: list[Block] = [Text(" ".join(refused), "note")] if refused else []
    if not cells:
        what = "growth with tokens: a sweep over `conversations` with three sizes at least, or looks during training (train.eval_every)"
        return [*blocks, b.missing(what, "sweep run")]
    axis, text = _X[cells[0][0].kind]
    level, fits = options.confidence, [f for curves in cells for c in curves if (f := fit(c, "log", options.confidence))]
    crossings = [
        found for i, one in enumerate(fits) for two in fits[:i] if one.curve.metric == two.curve.metric == METRICS[0] and (found := crossing(two, one, level))
    ]
    return [
        *blocks,
        Text(f"{text} {_FORMS}"),
        _figure(fits, axis, level),
        _table(fits, level),
        *([b.Bullets(tuple(map(_crosses, crossings)))] if crossings else []),
    ]


def _crosses(c: Crossing) -> str:
    where = "an extrapolation: beyond what both were measured at" if c.extrapolated else "within the range of both"
    return f"The log fits of MAT of {c.first} and of {c.second} cross at about {short(c.tokens)} tokens, {where}."


def _series(f: Fit, level: float, band: bool) -> list[Series]:
    """Points with intervals over seeds; the fit, dashed beyond what was measured. band: with the interval of the extrapolation."""
    c = f.curve
    points = [of_values(values, level) for values in zip(*c.values, strict=True)]
    low, high = tuple(p.low for p in points), tuple(p.high for p in points)
    measured = Series(c.name, c.style, c.sizes, tuple(p.value for p in points), low, high, points=True)
    paint, ahead = c.style % COLOURS, _between(c.sizes[-1], AHEAD[-1] * c.sizes[-1])
    within = _between(c.sizes[0], c.sizes[-1])
    beyond = [f.at(x, level) for x in ahead]
    fitted = Series(f"{c.name}: fit", c.style, within, tuple(f.at(x, level).value for x in within), plain=True)
    lows, highs = (tuple(getattr(s, end) for s in beyond) if band else () for end in ("low", "high"))
    return [measured, fitted, Series(f"{c.name}: extrapolation", paint, ahead, tuple(s.value for s in beyond), lows, highs, dashed=True, plain=True)]


def _between(low: float, high: float, count: int = 5) -> tuple[float, ...]:
    return tuple(low * (high / low) ** (i / (count - 1)) for i in range(count)) if high > low else (low,)


def _figure(fits: Sequence[Fit], axis: str, level: float) -> Figure:
    panels, rows = [], []
    for metric in METRICS:
        of_metric = [f for f in fits if f.curve.metric == metric]
        series = tuple(s for f in of_metric for s in _series(f, level, len(of_metric) <= _BANDS))
        if series:
            text = f"{metric} against {axis}: {len(of_metric)} cell(s), with fits; dashed parts are extrapolations."
            panels.append(Panel(metric, Chart(axis, metric, series, text, log_x=True)))
        for s in series:
            low, high = (part or (None,) * len(s.x) for part in (s.low, s.high))
            rows += [
                Row((Cell(s.label), Cell(metric), Cell(short(x), value=x), b.shown(y), b.shown(down), b.shown(up)), style=s.style)
                for x, y, down, up in zip(s.x, s.y, low, high, strict=True)
            ]
    names = dict.fromkeys((f.curve.name, f.curve.style) for f in fits)
    what = "extrapolation, with its interval over seeds" if len(names) <= _BANDS else "extrapolation"
    legend = (*(LegendItem(name, style) for name, style in names), LegendItem(what, dashed=True))
    data = Table("Points, fits and extrapolations", ("series", "metric", "tokens", "value", "low", "high"), tuple(rows), words=2)
    return Figure("scaling", f"Acceptance against {axis}, with fits a + b log₂(tokens). Each step of the axis is a doubling.", tuple(panels), legend, data)


def _table(fits: Sequence[Fit], level: float) -> Table:
    rows = []
    for f in fits:
        c, power = f.curve, fit(f.curve, "power", level)
        ends = [_over(f.at(times * c.sizes[-1], level), c.metric) for times in AHEAD]
        unknown = f"fewer than {SATURATING} sizes" if len(c.sizes) < SATURATING else "the points do not tell one"
        limit = _over(power.limit, c.metric) if power else Cell("–", unknown)
        sizes = Cell(f"{short(c.sizes[0])} to {short(c.sizes[-1])}", f"{len(c.sizes)} sizes, {len(c.values)} seed(s)")
        rows.append(Row((Cell(c.name), Cell(c.metric), sizes, _over(f.slope, "difference", signed=True), b.shown(f.rms, 4), *ends, limit), style=c.style))
    head = ("cell", "metric", "tokens", "b: a doubling adds", "left over (rms)", *(f"at × {times}, extrapolated" for times in AHEAD), "limit c, extrapolated")
    return Table(f"Fits against tokens: value above, {level:.0%} interval over seeds below", head, tuple(rows), words=2)


def _over(s: Spread | None, of: str, signed: bool = False) -> Cell:
    """of: name of the quantity, at whose bounds the interval is shown cut."""
    if s is None or s.value is None or not math.isfinite(s.value):
        return NONE
    text = b.signed(s.value) if signed else b.number(s.value)
    return Cell(text, b.bounds(cut(s, of)) if s.seeds > 1 else "one seed", s.value, low=s.low, high=s.high)
