"""How acceptance grows with tokens: fits over seeds, and what they say beyond what was measured, marked as such."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from kvshot_ds.files import read_json
from kvshot_ds.metrics import Spread
from kvshot_ds.report.bycell import label_words
from kvshot_ds.report.cells import Group, fresh_styles, of_values, page_styles
from kvshot_ds.report.choice import alike
from kvshot_ds.report.gather import Run

SIZES = 3  # fewer points are not fitted
SATURATING = 4  # from so many on a saturating power law is fitted too
AHEAD = (2, 4)  # times the largest size
Kind = Literal["data", "looks"]
Form = Literal["log", "power"]
Line = npt.NDArray[np.float64]
_BY_SIZE = ("max_conversations", "max_steps", "epochs")  # a sweep that makes steps equal passes over smaller data more often


@dataclass(frozen=True)
class Curve:
    """One metric of one cell over sizes [tokens], ascending; values [seeds][sizes]. kind: sizes of the training data, or looks during training."""

    name: str
    style: int
    kind: Kind
    metric: str
    sizes: tuple[float, ...]
    values: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Fit:
    """y = a + b log2(tokens), or y = c - a tokens^-b, fitted to each seed alone. slope: b, of a doubling; limit: c; rms: what is left, over all points."""

    curve: Curve
    form: Form
    lines: tuple[Callable[[float], float], ...]
    slope: Spread | None
    limit: Spread | None
    rms: float

    def at(self, tokens: float, confidence: float) -> Spread:
        """Mean of the seeds' lines there, with an interval over seeds: of the form's own error it knows nothing."""
        return of_values([line(tokens) for line in self.lines], confidence)

    def extrapolated(self, tokens: float) -> bool:
        return not self.curve.sizes[0] <= tokens <= self.curve.sizes[-1]


def data_curves(groups: Sequence[Group]) -> list[list[Curve]]:
    """Of cells that differ in the size of their data alone, where there are at least two sizes: α₀, the last α and MAT."""
    classes, place = [], {group: at for at, group in enumerate(groups)}
    evaluated = [group for group in groups if any(run.evaluation for run in group.runs)]
    for found in (part for cells in alike(evaluated, _BY_SIZE) for part in _by_length(cells)):
        sized = {tokens: group for group in found if (tokens := data_tokens(group)) is not None}
        measured = [{run.seed for run in g.runs if run.evaluation and run.seed is not None} for g in sized.values()]
        seeds = sorted(set.intersection(*measured)) if measured else []
        if len(sized) > 1 and seeds:
            classes.append((sized, seeds))
    classes.sort(key=lambda found: min(place[group] for group in found[0].values()))
    paint = fresh_styles([sized[max(sized)] for sized, _ in classes])  # a curve is a line of several cells, coloured as against the axis of data
    out = []
    for sized, seeds in classes:
        sizes, largest = sorted(sized), sized[max(sized)]
        runs = [[next(run for run in sized[size].runs if run.seed == seed) for size in sizes] for seed in seeds]
        out.append(_curves(_common_name([sized[size] for size in sizes]), paint[largest], "data", sizes, [[_measured(run) for run in line] for line in runs]))
    return out


def _by_length(groups: Sequence[Group]) -> list[list[Group]]:
    """Cells that differ in data and length, in parts of which data alone differs: those of equal steps, or those of equal epochs if that makes a longer
    part."""
    ways: list[list[list[Group]]] = []
    for length in (_steps, _epochs):
        parts: dict[tuple[Any, ...], list[Group]] = {}
        for group in groups:
            parts.setdefault(length(group), []).append(group)
        ways.append(list(parts.values()))
    return max(ways, key=lambda parts: max(map(len, parts)))


def _steps(group: Group) -> tuple[Any, ...]:
    return (frozenset((run.train or {}).get("steps") for run in group.runs if run.evaluation),)


def _epochs(group: Group) -> tuple[Any, ...]:
    return group.options.get("epochs"), group.options.get("max_steps")


def _common_name(groups: Sequence[Group]) -> str:
    """What cells of several sizes have in common: their labels, or the largest one's name."""
    labels = [group.runs[0].labels for group in groups]
    same = {axis: value for axis, value in labels[0].items() if all(other.get(axis) == value for other in labels)}
    return " · ".join(label_words(axis, value) for axis, value in same.items()) or groups[-1].name


def look_curves(groups: Sequence[Group]) -> list[list[Curve]]:
    """Of every cell that looked at the held-out split during training, over the tokens it had seen by then."""
    out, paint = [], page_styles(groups)
    for group in groups:
        runs = [run for run in group.runs if run.looks and (run.train or {}).get("steps") and (run.train or {}).get("tokens")]
        steps = sorted(step for step in set.intersection(*(set(run.looks) for run in runs)) if step > 0) if runs else []
        if len(steps) < 2 or len({run.train["steps"] for run in runs if run.train}) > 1:
            continue
        sizes = [float(np.mean([run.train["tokens"] * step / run.train["steps"] for run in runs if run.train])) for step in steps]
        out.append(_curves(group.name, paint[group], "looks", sizes, [[_looked(run.looks[step]) for step in steps] for run in runs]))
    return [curves for curves in out if curves]


def _curves(name: str, style: int, kind: Kind, sizes: Sequence[float], values: Sequence[Sequence[dict[str, float]]]) -> list[Curve]:
    """A curve for each metric that every point has."""
    known = set.intersection(*(set(point) for line in values for point in line))
    return [Curve(name, style, kind, m, tuple(sizes), tuple(tuple(p[m] for p in line) for line in values)) for m in METRICS if m in known]


METRICS = ("MAT", "α₀", "last α")


def _measured(run: Run) -> dict[str, float]:
    e = run.evaluation
    values = (e.mat.value, e.alpha[0].interval.value, e.alpha[-1].interval.value) if e else (None, None, None)
    return {name: value for name, value in zip(METRICS, values, strict=True) if value is not None}


def _looked(point: dict[str, float]) -> dict[str, float]:
    last = max((int(tag.rpartition("/")[2]) for tag in point if tag.startswith("heldout/accept_top1/")), default=0)
    tags = ("heldout/mat", "heldout/accept_top1/0", f"heldout/accept_top1/{last}")
    return {name: point[tag] for name, tag in zip(METRICS, tags, strict=True) if tag in point}


def data_tokens(group: Group) -> float | None:
    """Tokens of the training data, each counted once however often it was passed over; None if that is not on record. Mean over the seeds, of which
    each draws its last step's conversations by its own order."""
    values = [_tokens_once(run) for run in group.runs]
    known = [v for v in values if v is not None]
    return float(np.mean(known)) if known else None


def _tokens_once(run: Run) -> float | None:
    train, recipe = run.train or {}, run.recipe
    if recipe is None or not train.get("tokens") or not train.get("steps"):
        return None
    there = _conversations(recipe.shards_dir / "manifest.json") if isinstance(recipe.shards_dir, Path) else None
    sizes = [n for n in (recipe.train.max_conversations, there) if n]
    seen = train["steps"] * recipe.train.conversations_per_step
    return float(train["tokens"]) * min(1.0, min(sizes) / seen) if sizes else None


@cache
def _conversations(manifest: Path) -> int | None:
    """Of the train split."""
    found = read_json(manifest)["splits"]["train"]["samples"] if manifest.is_file() else None
    return int(found) if found is not None else None


def fit(curve: Curve, form: Form, confidence: float) -> Fit | None:
    """None with fewer than SIZES points (SATURATING for the power law), and where no power law of a growing curve fits better than a constant."""
    if len(curve.sizes) < (SIZES if form == "log" else SATURATING):
        return None
    x = np.array(curve.sizes)
    if form == "log":
        coefficients = [np.polyfit(np.log2(x), np.array(y), 1) for y in curve.values]
        lines: list[Callable[[float], float]] = [_log_line(*c) for c in coefficients]
        slope, limit = of_values([float(c[0]) for c in coefficients], confidence), None
    else:
        powers = [power_law(x, np.array(y)) for y in curve.values]
        if any(p is None for p in powers):
            return None
        lines = [_power_line(*p, x[0]) for p in powers if p is not None]
        slope, limit = None, of_values([p[0] for p in powers if p is not None], confidence)
    left = [line(size) - y for line, ys in zip(lines, curve.values, strict=True) for size, y in zip(curve.sizes, ys, strict=True)]
    return Fit(curve, form, tuple(lines), slope, limit, math.sqrt(float(np.mean(np.square(left)))))


def _log_line(slope: float, start: float) -> Callable[[float], float]:
    return lambda tokens: float(start + slope * math.log2(tokens))


def _power_line(limit: float, amplitude: float, power: float, unit: float) -> Callable[[float], float]:
    return lambda tokens: float(limit - amplitude * (tokens / unit) ** -power)


def power_law(x: Line, y: Line) -> tuple[float, float, float] | None:
    """(c, a, b) of y = c - a (x / x0)^-b by least squares, b on a grid of 0.02 to 4 in steps of 5%; None unless a > 0 and b lies inside the grid:
    at its ends the points do not bend enough, or too much, to tell a limit."""
    grid, best = 0.02 * 1.05 ** np.arange(110), (math.inf, 0.0, 0.0, -1)
    for i, b in enumerate(grid):
        columns = np.stack([np.ones_like(x), -((x / x[0]) ** -b)], axis=1)
        (c, a), *_ = np.linalg.lstsq(columns, y, rcond=None)
        error = float(np.sum((columns @ np.array([c, a]) - y) ** 2))
        if error < best[0]:
            best = (error, float(c), float(a), i)
    _, c, a, i = best
    return (c, a, float(grid[i])) if a > 0 and 0 < i < len(grid) - 1 else None


@dataclass(frozen=True)
class Crossing:
    """Where two log fits cross [tokens], low to high over seeds. extrapolated: beyond the range that both were measured in."""

    first: str
    second: str
    tokens: float
    extrapolated: bool


def crossing(first: Fit, second: Fit, confidence: float) -> Crossing | None:
    """None unless the slopes differ by more than their interval over seeds, and the fits cross at less than AHEAD's largest times what both were
    measured at."""
    seeds = min(len(first.lines), len(second.lines))
    lines = [f.lines[:seeds] for f in (first, second)]
    slopes = [[line(2.0) - line(1.0) for line in of] for of in lines]
    apart = of_values([a - b for a, b in zip(*slopes, strict=True)], confidence)
    if apart.low is None or apart.high is None or apart.low <= 0 <= apart.high:
        return None
    start = [float(np.mean([line(1.0) for line in of])) for of in lines]
    exponent = (start[1] - start[0]) / float(np.mean(slopes[0]) - np.mean(slopes[1]))
    low, high = (pick(f.curve.sizes[at] for f in (first, second)) for pick, at in ((max, 0), (min, -1)))
    if not math.log2(low) <= exponent <= math.log2(high * AHEAD[-1]):
        return None
    return Crossing(first.curve.name, second.curve.name, 2.0**exponent, exponent > math.log2(high))
