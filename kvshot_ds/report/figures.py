"""Charts as inline SVG that follows the page's theme: drawn in sentinel colours, which become CSS variables.

The page's style sheet defines --ink, --muted, --grid and --c0 .. --c5 (Okabe-Ito) for light and dark. Series differ by
colour, marker and dash, so that none of the three alone has to carry the distinction. Text stays text. `draw` is the same
chart in any colours, for a drawing that stands alone.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Any

from kvshot_ds.metrics import Interval
from kvshot_ds.report.bounds import cut, cut_axis

# matplotlib dash, marker; without colours a series repeats only after 24, with them after 144
_DASHES: tuple[Any, ...] = ("-", (0, (5, 1.6)), (0, (1.5, 1.5)), (0, (6, 1.5, 1.5, 1.5)))
_MARKERS = ("o", "s", "^", "D", "v", "P")
COLOURS = 6
_SWATCHES = (
    '<circle cx="16" cy="6" r="3.4"/>',
    '<path d="M12.8 2.8h6.4v6.4h-6.4z"/>',
    '<path d="M16 2l4 7.4h-8z"/>',
    '<path d="M16 1.8l4.2 4.2-4.2 4.2-4.2-4.2z"/>',
    '<path d="M16 10l4-7.4h-8z"/>',
    '<path d="M14.7 2.2h2.6v2.5h2.5v2.6h-2.5v2.5h-2.6v-2.5h-2.5v-2.6h2.5z"/>',
)
_SWATCH_DASHES = ("", "5 2", "1.5 1.5", "6 1.5 1.5 1.5")
_SENTINELS = {"#010203": "--ink", "#010204": "--muted", "#010205": "--grid", "#010206": "--page", **{f"#5e000{i}": f"--c{i}" for i in range(COLOURS)}}
# Bands of more series than this cannot be told apart: their intervals become bars, drawn side by side.
_BANDS = 3
_SIDE_BY_SIDE = 0.5  # of the distance between two draft steps


@dataclass(frozen=True)
class Theme:
    """Colours of text, axes, grid, what lies behind, and series."""

    ink: str
    muted: str
    grid: str
    page: str
    series: tuple[str, ...]


_INK, _MUTED, _GRID, _BEHIND, *_SERIES = _SENTINELS
_PAGE = Theme(_INK, _MUTED, _GRID, _BEHIND, tuple(_SERIES))
LIGHT = Theme("#1b1f24", "#626a73", "#e3e6ea", "#ffffff", ("#0072b2", "#d55e00", "#009e73", "#56b4e9", "#e69f00", "#cc79a7"))


@dataclass(frozen=True)
class Series:
    """One line: y over x, None where undefined; low, high: band. style: index of colour, marker and dash; plain: without markers;
    points: markers with their intervals, not joined by a line."""

    label: str
    style: int
    x: tuple[float, ...]
    y: tuple[float | None, ...]
    low: tuple[float | None, ...] = ()
    high: tuple[float | None, ...] = ()
    dashed: bool = False
    plain: bool = False
    points: bool = False

    @property
    def dash(self) -> int:
        return 1 if self.dashed else (self.style // COLOURS) % len(_DASHES)

    @property
    def has_interval(self) -> bool:
        return any(v is not None for v in self.low)


@dataclass(frozen=True)
class Chart:
    """Lines over one pair of axes. reference: value of a dotted horizontal line. integer_x: tick at every x (draft steps). y_range: of the axis,
    None: as the series need it. behind: drawn first, in grey: what the others are to be seen against. log_x: a horizontal
    axis by doublings; log_y: a vertical one by tens. x_ticks: the measured places of an axis; where they are given, intervals are bars."""

    x_label: str
    y_label: str
    series: tuple[Series, ...]
    description: str
    reference: float | None = None
    integer_x: bool = False
    y_range: tuple[float, float] | None = None
    behind: tuple[Series, ...] = ()
    log_x: bool = False
    x_ticks: tuple[float, ...] = ()
    log_y: bool = False


@dataclass(frozen=True)
class Dot:
    """A value with its interval, None where undefined."""

    label: str
    style: int
    value: float | None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Dots:
    """Values with their intervals, one below the other, each under its label. reference: value of a dotted vertical line. x_range: of the axis,
    None: as the values need it. log: a logarithmic axis."""

    x_label: str
    rows: tuple[Dot, ...]
    description: str
    reference: float | None = None
    x_range: tuple[float, float] | None = None
    log: bool = False

    @property
    def height(self) -> int:
        """CSS pixels that it needs."""
        return 62 + 38 * len(self.rows)


def lines(chart: Chart | Dots, ident: str, width: int, height: int) -> str:
    """`chart` as an SVG element of `width` x `height` CSS pixels. `ident` prefixes the ids inside: unique on a page."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    height = chart.height if isinstance(chart, Dots) else height
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": ident, "font.size": 11, "axes.linewidth": 0.8}):
        figure = Figure(figsize=(width / 72, height / 72), layout="constrained")
        draw(figure.subplots(), chart, _PAGE)
        out = io.StringIO()
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return _inline(out.getvalue(), ident, chart.description)


def draw(axes: Any, chart: Chart | Dots, theme: Theme) -> None:
    """`chart` on the axes of a matplotlib figure. Intervals are bands, or bars side by side where bands would hide each other;
    they and the axis end where the quantity does."""
    from matplotlib.ticker import MaxNLocator

    if isinstance(chart, Dots):
        _draw_dots(axes, chart, theme)
        return
    for series in chart.behind:
        axes.plot(series.x, _floats(series.y), color=theme.grid, linewidth=1.3, zorder=0.5)
    for series, shift in zip(chart.series, shifts(chart), strict=True):
        _draw(axes, _within(series, chart.y_label), theme, _has_bars(chart), shift)
    if chart.reference is not None:
        axes.axhline(chart.reference, color=theme.muted, linestyle=(0, (1, 2)), linewidth=1.4)
    axes.set_xlabel(chart.x_label, color=theme.ink, parse_math=False)
    axes.set_ylabel(chart.y_label, color=theme.ink, parse_math=False)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(theme.muted)
    axes.tick_params(colors=theme.muted, labelcolor=theme.ink, length=3)
    axes.grid(axis="y", color=theme.grid, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    if chart.log_x:
        _by_doublings(axes)
    if chart.integer_x:
        axes.set_xticks(sorted({x for s in chart.series for x in s.x}))
    if chart.x_ticks:
        axes.set_xticks(chart.x_ticks, [short(x) for x in chart.x_ticks])
        axes.margins(x=0.08)
    if chart.log_y:
        axes.set_yscale("log")
    low, high = chart.y_range or axes.get_ylim()
    axes.set_ylim(*cut_axis(low, high, (y for s in (*chart.behind, *chart.series) for y in s.y), chart.y_label))
    if chart.log_y:
        _by_tens(axes.yaxis, axes.get_ylim())


def _within(series: Series, name: str) -> Series:
    """The series with its intervals cut at the bounds of the quantity."""
    if not series.has_interval:
        return series
    ends = [cut(Interval(*point), name) for point in zip(series.y, series.low, series.high, strict=True)]
    return replace(series, low=tuple(i.low for i in ends), high=tuple(i.high for i in ends))


def shifts(chart: Chart) -> list[float]:
    """How far each series is moved sideways, so that bars stand side by side."""
    n = len(chart.series)
    return [_SIDE_BY_SIDE * ((i + 0.5) / n - 0.5) if _has_bars(chart) and not chart.x_ticks else 0.0 for i in range(n)]


def _has_bars(chart: Chart) -> bool:
    return bool(chart.x_ticks) or (chart.integer_x and sum(s.has_interval for s in chart.series) > _BANDS)


def marker(style: int) -> str:
    """matplotlib's name of a series' marker."""
    return _MARKERS[_marker(style)]


def hollow(style: int) -> bool:
    """Whether a series' marker is an outline: every second one of a colour."""
    return style // COLOURS % 2 == 1


def _marker(style: int) -> int:
    """Index of a series' marker: it moves on when all colours and dashes are used up."""
    return (style + style // (COLOURS * len(_DASHES))) % len(_MARKERS)


def _draw(axes: Any, series: Series, theme: Theme, bars: bool, shift: float) -> None:
    """One line with its intervals, moved sideways by `shift`; an undefined point leaves a gap."""
    x, paint = [v + shift for v in series.x], theme.series[series.style % COLOURS]
    shape, face = "" if series.plain and len(x) > 2 else marker(series.style), theme.page if hollow(series.style) else paint
    dash = "none" if series.points else _DASHES[series.dash]
    axes.plot(x, _floats(series.y), color=paint, marker=shape, markersize=5, markerfacecolor=face, linewidth=1.8, linestyle=dash)
    if series.has_interval and (bars or series.points):
        axes.vlines(x, _floats(series.low), _floats(series.high), color=paint, linewidth=1.1, alpha=0.75)
    elif series.has_interval:
        axes.fill_between(x, _floats(series.low), _floats(series.high), color=paint, alpha=0.16, linewidth=0)


def _by_doublings(axes: Any) -> None:
    """Ticks at powers of two times a round number, written short."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(LogLocator(base=2, numticks=6))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))


def _by_tens(axis: Any, limits: tuple[float, float]) -> None:
    """Ticks of a logarithmic axis: powers of ten, or round numbers where it spans less than two of them."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    axis.set_major_locator(LogLocator(numticks=6) if limits[1] >= 100 * limits[0] > 0 else MaxNLocator(6))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def short(value: float) -> str:
    """Three digits and k, M, G, T, P or E."""
    power = max((p for p in range(3, 21, 3) if abs(value) >= 10**p), default=0)
    return f"{value / 10**power:.3g}{['', ' k', ' M', ' G', ' T', ' P', ' E'][power // 3]}"


def _draw_dots(axes: Any, chart: Dots, theme: Theme) -> None:
    """A row for each value: its label, and below it dot and interval."""
    from matplotlib.ticker import MaxNLocator

    for y, dot in enumerate(chart.rows):
        paint = theme.series[dot.style % COLOURS]
        axes.text(0, y - 0.36, dot.label, transform=axes.get_yaxis_transform(), color=theme.ink, fontsize=10, va="center", parse_math=False)
        shown = cut(Interval(dot.value, dot.low, dot.high), chart.x_label)
        if shown.low is not None and shown.high is not None:
            start = max(shown.low, chart.x_range[0]) if chart.log and chart.x_range else shown.low  # 0 has no place on a logarithmic axis
            axes.hlines(y, start, shown.high, color=paint, linewidth=2, alpha=0.75)
        if dot.value is None:
            axes.text(0, y, "not measured", transform=axes.get_yaxis_transform(), color=theme.muted, fontsize=9, va="center")
        else:
            axes.plot([dot.value], [y], color=paint, marker=marker(dot.style), markersize=6, markerfacecolor=theme.page if hollow(dot.style) else paint)
    if chart.reference is not None:
        axes.axvline(chart.reference, color=theme.muted, linestyle=(0, (1, 2)), linewidth=1.4)
    axes.set_ylim(len(chart.rows) - 0.6, -0.8)
    axes.set_yticks([])
    axes.set_xlabel(chart.x_label, color=theme.ink, parse_math=False)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(theme.muted)
    axes.tick_params(colors=theme.muted, labelcolor=theme.ink, length=3)
    axes.grid(axis="x", color=theme.grid, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.margins(x=0.08)
    if chart.log:
        axes.set_xscale("log")
    low, high = chart.x_range or axes.get_xlim()
    axes.set_xlim(*cut_axis(low, high, (dot.value for dot in chart.rows), chart.x_label))
    if chart.log:
        _by_tens(axes.xaxis, axes.get_xlim())


def _floats(values: Sequence[float | None]) -> list[float]:
    return [float("nan") if v is None else v for v in values]


def alone(figure: Any, title: str) -> str:
    """A matplotlib figure as an SVG file on a white page: text stays text, in whatever sans-serif there is; the same figure gives the same bytes."""
    out = io.StringIO()
    figure.savefig(out, format="svg", facecolor=LIGHT.page, metadata={"Date": None, "Creator": None, "Title": title})
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", out.getvalue(), flags=re.DOTALL)
    svg = re.sub(r'(width|height)="([\d.]+)pt"', r'\1="\2"', svg[svg.index("<svg") :])
    svg = re.sub(r"'DejaVu Sans', [^;\"]*sans-serif", "sans-serif", svg)
    return re.sub(r"\s*\n\s*", "\n", svg)


def _inline(svg: str, ident: str, description: str) -> str:
    """The drawing without prologue, namespaces, own styles and fonts; ids prefixed; sentinels replaced by CSS variables."""
    body = svg[svg.index("<svg") :]
    view = re.search(r'viewBox="([^"]+)"', body)
    assert view, "matplotlib always writes a viewBox"
    body = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", body[body.index(">") + 1 :], flags=re.DOTALL)
    body = re.sub(r"\s*font-family: [^;\"]+;", "", body)
    used = set(re.findall(r'(?:href="|url\()#([^")]+)', body))
    body = re.sub(r' id="([^"]+)"', lambda m: f' id="{ident}-{m[1]}"' if m[1] in used else "", body)
    body = body.replace("url(#", f"url(#{ident}-").replace('xlink:href="#', f'href="#{ident}-')
    for sentinel, variable in _SENTINELS.items():
        body = body.replace(sentinel, f"var({variable})")
    label, body = escape(description), re.sub(r"\n\s*", " ", body).strip()
    return f'<svg role="img" aria-label="{label}" viewBox="{view[1]}"><title>{label}</title>{body}'


def colour(style: int) -> str:
    """CSS colour of a series."""
    return f"var(--c{style % COLOURS})"


def swatch(style: int | None, dashed: bool = False, plain: bool = False, dotted: bool = False) -> str:
    """The legend's sample of a series: a short line with its marker. style None: in the colour of the text, without marker."""
    dash = "1.5 3" if dotted else _SWATCH_DASHES[1 if dashed else ((style or 0) // COLOURS) % len(_SWATCH_DASHES)]
    shape = "" if plain or style is None else _SWATCHES[_marker(style)]
    paint = "var(--muted)" if style is None else colour(style)
    fill = "fill: var(--page); stroke-width: 1.3" if style is not None and hollow(style) else "stroke: none"
    return (
        f'<svg class="swatch" viewBox="0 0 32 12" aria-hidden="true" style="fill: {paint}; stroke: {paint}">'
        f'<path d="M0 6H32" style="fill: none; stroke-width: 2; stroke-dasharray: {dash or "none"}"/><g style="{fill}">{shape}</g></svg>'
    )


def sample(style: int | None, dashed: bool = False, plain: bool = False, dotted: bool = False) -> Any:
    """The same as a matplotlib line, in the colours of a page that stands alone."""
    from matplotlib.lines import Line2D

    paint = LIGHT.muted if style is None else LIGHT.series[style % COLOURS]
    dash = (0, (1, 2)) if dotted else _DASHES[1 if dashed else ((style or 0) // COLOURS) % len(_DASHES)]
    face = LIGHT.page if style is not None and hollow(style) else paint
    shape = "" if plain or style is None else marker(style)
    return Line2D([], [], color=paint, linestyle=dash, linewidth=1.8, marker=shape, markersize=5, markerfacecolor=face)


def bars(counts: Sequence[int], style: int, description: str) -> str:
    """A histogram small enough for a table cell, drawn by hand; the first bar is count 0."""
    top, label = max([*counts, 1]), escape(description)
    rects = "".join(
        f'<rect x="{12 * i + 1}" y="{30 - 28 * c / top:.2f}" width="10" height="{28 * c / top:.2f}"/><text x="{12 * i + 6}" y="39">{i}</text>'
        for i, c in enumerate(counts)
    )
    width = 12 * len(counts)
    return (
        f'<svg class="bars" role="img" aria-label="{label}" viewBox="0 0 {width} 40" style="width: {1.6 * width}px; fill: {colour(style)}">'
        f'<title>{label}</title>{rects}<path d="M0 30H{width}" style="stroke: var(--muted); stroke-width: .6"/></svg>'
    )
