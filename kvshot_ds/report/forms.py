"""The report in other forms, from the same blocks: Markdown, each figure as an SVG file, the data of each figure and table as CSV."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import Any

from kvshot_ds.report import figures
from kvshot_ds.report.blocks import Block, Bullets, Code, Details, Facts, Figure, LegendItem, Section, Table, Text
from kvshot_ds.report.figures import LIGHT, Dots

_WIDTH, _HEIGHT, _COLUMNS = 400, 300, 3  # px of a panel; panels side by side
_LEGEND, _LINE = 70, 17  # characters that fit side by side in a panel's width of legend, and the height of its lines [px]


def markdown(title: str, sections: Sequence[Section], made: str, names: Names) -> str:
    """All of the page. Figures are links to figures/, the data of figures and tables to data/."""
    parts = [f"# {_text(title)}", made, *(f"- [{_text(s.title)}](#{_anchor(s.title)})" for s in sections)]
    lines = ["\n\n".join(parts[:2]), "\n".join(parts[2:])]
    for section in sections:
        lines += [f"## {_text(section.title)}", *(_block(block, names) for block in section.blocks)]
    return "\n\n".join(lines) + "\n"


def _anchor(title: str) -> str:
    """As GitHub makes it of a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def _block(block: Block, names: Names) -> str:
    """One block; a blank line stands between the pieces of one."""
    match block:
        case Table():
            return f"**{_text(block.caption)}** ([CSV]({names.data[id(block)]}))\n\n{_table(block)}"
        case Text(tone="missing"):
            return f"> **Not measured:** {_text(block.text)}. Run `{block.command}`"
        case Text():
            return {"note": "> {}", "alarm": "> **{}**"}.get(block.tone, "{}").format(_text(block.text))
        case Bullets():
            return "\n".join(f"- {_text(item)}" for item in block.items)
        case Facts():
            return "\n".join(f"- **{_text(name)}**: {_text(value)}" for name, value in block.items)
        case Code():
            fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", block.text)), default=0))
            return f"{fence}\n{block.text.rstrip()}\n{fence}"
        case Details():
            inner = "\n\n".join(_block(inner, names) for inner in block.blocks)
            return f"<details><summary>{escape(block.summary)}</summary>\n\n{inner}\n\n</details>"
        case Figure():
            what = " ".join(panel.chart.description for panel in block.panels)
            picture = f"![{_text(what)}]({names.drawing[id(block)]}) ([points as CSV]({names.points[id(block)]}))"
            data = f"<details><summary>The numbers behind this figure</summary>\n\n{_block(block.data, names)}\n\n</details>"
            return f"{picture}\n\n{_text(block.caption)}\n\n{data}"


def _table(table: Table) -> str:
    rules = ["---" if i < table.words else "--:" for i in range(len(table.head))]
    rows = [[_text(cell.text) + (f"<br>{_text(cell.sub)}" if cell.sub else "") for cell in row.cells] for row in table.rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in [[_text(head) for head in table.head], rules, *rows])


def _text(text: str) -> str:
    """Plain text that Markdown must not read: no HTML, no marks of its own, one line. An underscore within a word is no mark."""
    flat = re.sub(r"([\\`*\[\]|$~])", r"\\\1", escape(" ".join(text.split()), quote=False))
    return re.sub(r"(?<!\w)_|_(?!\w)", r"\\_", re.sub(r"^(#|>|[-+] |\d+\. )", r"\\\1", flat))


class Names:
    """File names of what a report holds, each once: by the identity of figures and tables."""

    def __init__(self, sections: Sequence[Section]):
        self.drawing: dict[int, str] = {}
        self.points: dict[int, str] = {}
        self.data: dict[int, str] = {}
        self.figures: list[Figure] = []
        self.tables: list[Table] = []
        self._taken: set[str] = set()
        for section in sections:
            for block in section.blocks:
                self._take(section.ident, block)

    def _take(self, section: str, block: Block) -> None:
        match block:
            case Figure():
                self.figures.append(block)
                name = _slug(block.ident)
                self.drawing[id(block)] = self._once(f"figures/{name}", "svg")
                self.points[id(block)] = self._once(f"data/fig-{name}", "csv")
                self._table(block.data, f"fig-{name}-table")
            case Table():
                self._table(block, f"{section}-{_slug(block.ident or block.caption)}")
            case Details():
                for inner in block.blocks:
                    self._take(section, inner)

    def _table(self, table: Table, name: str) -> None:
        if id(table) in self.data:
            return
        self.tables.append(table)
        self.data[id(table)] = self._once(f"data/{name}", "csv")

    def _once(self, name: str, kind: str) -> str:
        """`name`, numbered if it is taken."""
        path, count = f"{name}.{kind}", 2
        while path in self._taken:
            path, count = f"{name}-{count}.{kind}", count + 1
        self._taken.add(path)
        return path

    def files(self) -> Iterator[tuple[str, str]]:
        """Name and content of every figure and data file."""
        for figure in self.figures:
            yield self.drawing[id(figure)], drawing(figure)
            yield self.points[id(figure)], points(figure)
        for table in self.tables:
            yield self.data[id(table)], data(table)


def _slug(text: str) -> str:
    """At most 48 characters, of whole words where that is possible."""
    words = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "table"
    return words if len(words) <= 48 else words[:48].rpartition("-")[0] or words[:48]


def data(table: Table) -> str:
    """A table as CSV: unrounded numbers where there are such, each with the ends of its interval, and small second lines in columns of their own."""
    columns = list(zip(*(row.cells for row in table.rows), strict=True)) or [()] * len(table.head)
    out: list[list[Any]] = []
    for head, cells in zip(table.head, columns, strict=True):
        out.append([head, *(cell.text if cell.value is None else _plain(cell.value) for cell in cells)])
        if any(cell.low is not None or cell.high is not None for cell in cells):
            out += [[f"{head} {end}", *(_plain(getattr(cell, end)) for cell in cells)] for end in ("low", "high")]
        elif any(cell.sub for cell in cells):
            out.append([f"{head} (below)", *(cell.sub for cell in cells)])
    return _csv(zip(*out, strict=True))


def points(figure: Figure) -> str:
    """Everything that a figure draws, as CSV: a line for each point."""
    out: list[Sequence[Any]] = [("panel", "series", "x", "y", "low", "high")]
    for panel in figure.panels:
        if isinstance(panel.chart, Dots):
            out += [(panel.title, d.label, "", *map(_plain, (d.value, d.low, d.high))) for d in panel.chart.rows]
            continue
        for s in (*panel.chart.behind, *panel.chart.series):
            low, high = (ends or (None,) * len(s.x) for ends in (s.low, s.high))
            out += [(panel.title, s.label, *map(_plain, numbers)) for numbers in zip(s.x, s.y, low, high, strict=True)]
        if panel.chart.reference is not None:
            out.append((panel.title, "reference", "", _plain(panel.chart.reference), "", ""))
    return _csv(out)


def _csv(rows: Iterable[Sequence[Any]]) -> str:
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows(rows)
    return file.getvalue()


def _plain(value: float | None) -> str:
    return "" if value is None else repr(value if isinstance(value, int) else float(value))


def drawing(figure: Figure) -> str:
    """A figure as an SVG file that needs nothing else: its panels, their titles, its legend, dark on white."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure as Canvas

    columns = min(_COLUMNS, len(figure.panels))
    rows = -(-len(figure.panels) // columns)
    wide = columns * (1 if columns > 1 else 1.6)
    per_row = max(1, int(_LEGEND * wide / max((len(item.label) + 6 for item in figure.legend), default=1)))
    heights = [max([_HEIGHT, *(p.chart.height for p in figure.panels[i * columns : (i + 1) * columns] if isinstance(p.chart, Dots))]) for i in range(rows)]
    below = _LINE * (-(-len(figure.legend) // per_row) + 1)
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": figure.ident, "font.size": 11, "axes.linewidth": 0.8}):
        canvas = Canvas(figsize=(wide * _WIDTH / 72, (sum(heights) + below) / 72), layout="constrained")
        places = canvas.subplots(rows, columns, squeeze=False, height_ratios=heights).ravel()
        for axes, panel in zip(places, figure.panels, strict=False):
            figures.draw(axes, panel.chart, LIGHT)
            axes.set_title(panel.title, fontsize=11, color=LIGHT.ink, loc="left", parse_math=False)
            if panel.legend:
                _legend(axes, panel.legend, 1, loc="best", fontsize=8)
        for axes in places[len(figure.panels) :]:
            axes.set_visible(False)
        if figure.legend:
            _legend(canvas, figure.legend, per_row, loc="outside lower left", fontsize=10)
        return figures.alone(canvas, figure.caption)


def _legend(place: Any, items: Sequence[LegendItem], columns: int, loc: str, fontsize: int) -> None:
    """The legend of a whole figure or of one panel."""
    legend = place.legend(
        [figures.sample(i.style, i.dashed, i.plain, i.dotted) for i in items], [i.label for i in items], loc=loc, ncols=columns, fontsize=fontsize
    )
    legend.get_frame().set(edgecolor=LIGHT.grid, facecolor=LIGHT.page)
    for text in legend.get_texts():
        text.set(color=LIGHT.ink, parse_math=False)
