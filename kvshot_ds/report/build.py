"""`kvshot report`: everything measured below a work folder as one self-contained HTML page."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from kvshot_ds import __version__
from kvshot_ds.config import Recipe
from kvshot_ds.files import write_atomic
from kvshot_ds.report import figures
from kvshot_ds.report.blocks import Cell, Figure, LegendItem, Section
from kvshot_ds.report.gather import gather
from kvshot_ds.report.sections import build_sections

# CSS pixels: a lone chart is drawn twice, for wide and for narrow screens, so that its text is never scaled away
_WIDE, _NARROW, _PANEL = (760, 380), (350, 300), (350, 260)


@dataclass(frozen=True)
class ReportSummary:
    """Where the page is, which runs it shows, and how many things it says were not measured."""

    path: Path
    runs: tuple[str, ...]
    missing: int


def run(recipe: Recipe) -> ReportSummary:
    """Builds work/report/index.html from whatever lies below `recipe.work`, atomically, and prints its path last.

    What was not measured is said on the page with the command that measures it. Raises KvshotError on a file that
    cannot be understood and on a folder of `report.runs` that does not exist.
    """
    work = gather(recipe)
    sections = build_sections(work, recipe)
    path = recipe.work / "report" / "index.html"
    write_atomic(path, render(recipe.report.title, sections, datetime.datetime.now(datetime.UTC)))
    missing = sum(getattr(block, "tone", "") == "missing" for section in sections for block in section.blocks)
    print(f"report: {len(work.runs)} run(s) shown, {missing} thing(s) said to be not measured")
    print(path.resolve())
    return ReportSummary(path, tuple(r.name for r in work.runs), missing)


def render(title: str, sections: list[Section], made: datetime.datetime) -> str:
    """The page as HTML: no script, nothing loaded. Every text is escaped; only the drawings of `figures` are markup."""
    env = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    env.globals.update(panels=_panels, swatch=_swatch, bars=_bars, colour=figures.colour)
    template = env.from_string((resources.files(__package__) / "page.html.j2").read_text(encoding="utf-8"))
    return template.render(title=title, sections=sections, made=made.strftime("%Y-%m-%d %H:%M UTC"), version=__version__)


def _panels(figure: Figure) -> list[tuple[str, str, Markup]]:
    """(CSS class, title, drawing) of each panel."""
    out = []
    for i, panel in enumerate(figure.panels):
        sizes = {"wide": _WIDE, "narrow": _NARROW} if len(figure.panels) == 1 else {"panel": _PANEL}
        out += [(kind, panel.title, Markup(figures.lines(panel.chart, f"{figure.ident}-{i}-{kind}", *size))) for kind, size in sizes.items()]
    return out


def _swatch(item: LegendItem) -> Markup:
    return Markup(figures.swatch(item.style, item.dashed, item.plain, item.dotted))


def _bars(cell: Cell) -> Markup:
    counts = ", ".join(f"{n} rounds with {i}" for i, n in enumerate(cell.bars))
    return Markup(figures.bars(cell.bars, cell.style, f"Rounds by accepted tokens: {counts}"))
