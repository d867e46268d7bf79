"""What a page is made of: plain values that know nothing of HTML, so that other renderings can be made from them."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from kvshot_ds.metrics import Interval
from kvshot_ds.report.bounds import cut
from kvshot_ds.report.figures import Chart, Dots, short


@dataclass(frozen=True)
class Cell:
    """One cell. sub: small second line. value: the number behind the text, unrounded; low, high: of its interval. bars: a histogram drawn in the cell."""

    text: str
    sub: str = ""
    value: float | int | None = None
    bars: tuple[int, ...] = ()
    style: int = 0
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Row:
    """The first cell is the row's heading. tone: good and bad colour the third cell, alarm the second; style: index of the series it belongs to."""

    cells: tuple[Cell, ...]
    tone: Literal["", "ours", "paper", "good", "bad", "alarm"] = ""
    style: int | None = None


@dataclass(frozen=True)
class Table:
    """Numbers right, words left: `words` counts the leading columns that hold words. ident: of its file of data, where the caption is no good name."""

    caption: str
    head: tuple[str, ...]
    rows: tuple[Row, ...]
    words: int = 1
    ident: str = ""
    kind: Literal["table"] = "table"


@dataclass(frozen=True)
class Text:
    """A paragraph. tone `note` sets it off, `alarm` more so; `missing` says what was not measured and which command measures it."""

    text: str
    tone: Literal["", "note", "missing", "alarm"] = ""
    command: str = ""
    kind: Literal["text"] = "text"


@dataclass(frozen=True)
class Bullets:
    items: tuple[str, ...]
    kind: Literal["bullets"] = "bullets"


@dataclass(frozen=True)
class Facts:
    """Name and value pairs."""

    items: tuple[tuple[str, str], ...]
    kind: Literal["facts"] = "facts"


@dataclass(frozen=True)
class LegendItem:
    """style None: in the colour of the text, without marker."""

    label: str
    style: int | None = None
    dashed: bool = False
    plain: bool = False
    dotted: bool = False


@dataclass(frozen=True)
class Panel:
    """legend: of this panel alone."""

    title: str
    chart: Chart | Dots
    legend: tuple[LegendItem, ...] = ()


@dataclass(frozen=True)
class Figure:
    """Charts side by side under one legend, and the table of what they show. One panel alone is drawn large."""

    ident: str
    caption: str
    panels: tuple[Panel, ...]
    legend: tuple[LegendItem, ...]
    data: Table
    kind: Literal["figure"] = "figure"


@dataclass(frozen=True)
class Details:
    """Blocks folded away under a summary line."""

    summary: str
    blocks: tuple[Block, ...]
    kind: Literal["details"] = "details"


@dataclass(frozen=True)
class Code:
    text: str
    kind: Literal["code"] = "code"


Block = Table | Text | Bullets | Facts | Figure | Details | Code


@dataclass(frozen=True)
class Section:
    ident: str
    title: str
    blocks: Sequence[Block] = field(default_factory=tuple)


NONE = Cell("–")


def number(value: float | None, digits: int = 3) -> str:
    """Fixed digits, a true minus sign, an en dash for what is undefined."""
    return "–" if value is None else f"{value:.{digits}f}".replace("-", "−")


def integer(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"


def millions(value: float | None) -> Cell:
    """A parameter count, written short."""
    return Cell("–" if value is None else short(value), value=value)


def signed(value: float | None, digits: int = 3) -> str:
    return "–" if value is None else f"{value:+.{digits}f}".replace("-", "−")


def bounds(interval: Interval, digits: int = 3) -> str:
    """`low–high`, with `to` between where a minus sign may stand, or that there is no interval."""
    if interval.low is None or interval.high is None:
        return "no interval"
    return f"{number(interval.low, digits)}{' to ' if interval.low < 0 else '–'}{number(interval.high, digits)}"


def alpha_name(k: int) -> str:
    """α with the step as a subscript."""
    return "α" + str(k).translate(str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉"))


def shown(value: float | None, digits: int = 3) -> Cell:
    """A value alone, keeping the unrounded one."""
    return Cell(number(value, digits), value=value)


def counted(value: float | None, sub: str = "") -> Cell:
    """A count, keeping the number behind it."""
    return Cell(integer(value), sub, value)


def padded(cells: Sequence[Cell], width: int) -> tuple[Cell, ...]:
    """`cells`, filled up with empty ones."""
    return (*cells, *[NONE] * (width - len(cells)))


def measured(interval: Interval | None, digits: int = 3, of: str = "") -> Cell:
    """Value over its interval. of: name of the quantity, at whose bounds the interval is shown cut; the cell's own ends stay whole."""
    if interval is None or interval.value is None:
        return NONE
    return Cell(number(interval.value, digits), bounds(cut(interval, of), digits), interval.value, low=interval.low, high=interval.high)


def duration(seconds: float | None) -> str:
    """`42 s`, `3 min 05 s` or `2 h 07 min`."""
    if seconds is None:
        return "–"
    if seconds < 59.5:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f}%"


def missing(what: str, stage: str, run: Path | None = None) -> Text:
    """That `what` is not measured, and the command that measures it; `run`: the run's folder."""
    where = shlex.quote(str(run / "recipe.yaml")) if run else "RUN/recipe.yaml" if stage in ("decode", "eval --serving-check") else "RECIPE"
    return Text(what, "missing", f"kvshot {stage} {where}")
