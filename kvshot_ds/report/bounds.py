"""What a quantity can be at all, by its name on the page. Intervals and axes are shown cut there; files of data have them whole."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

from kvshot_ds.metrics import Interval

Bounds = tuple[float, float]
_ANY: Bounds = (-math.inf, math.inf)
# The first that is found in a name counts.
_NATURAL: tuple[tuple[str, Bounds], ...] = (
    (r"difference|\bless\b", _ANY),
    (r"\bMAT\b|τ", (1.0, math.inf)),
    (r"cosine", (-1.0, 1.0)),
    (r"retention|error|\bKL\b|norm|gradient|\brows\b|loss|effective|\brank\b", (0.0, math.inf)),
    (r"α|share|acceptance|\bgate\b|^mean$", (0.0, 1.0)),
)
SAID = (
    "shares and rates lie between 0 and 1, MAT is at least 1, norms and counts of rows are at least 0: an interval that reaches beyond that is shown cut at "
    "the bound, in tables and figures; in the files of data it is whole"
)


def natural(name: str) -> Bounds:
    """Lowest and highest value of what is called `name`."""
    return next((bounds for pattern, bounds in _NATURAL if re.search(pattern, name)), _ANY)


def cut(interval: Interval, name: str) -> Interval:
    """The interval within its bounds; as it is where the value itself lies outside, as an extrapolation may."""
    lowest, highest = natural(name)
    if interval.value is None or not lowest <= interval.value <= highest:
        return interval
    low, high = (None if end is None else min(max(end, lowest), highest) for end in (interval.low, interval.high))
    return Interval(interval.value, low, high)


def cut_axis(low: float, high: float, values: Iterable[float | None], name: str) -> tuple[float, float]:
    """The range of an axis within the bounds, but for values that lie outside."""
    lowest, highest = natural(name)
    known = [value for value in values if value is not None and value == value]
    start = low if any(value < lowest for value in known) else max(low, lowest)
    end = high if any(value > highest for value in known) else min(high, highest)
    return (start, end) if start < end else (low, high)
