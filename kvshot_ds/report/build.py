"""`kvshot report`: all that was measured in a work folder, or in folders of runs and sweeps, as one self-contained HTML page and in other forms beside it."""

from __future__ import annotations

import datetime
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from kvshot_ds import __version__
from kvshot_ds.config import Recipe
from kvshot_ds.files import read_object, write_atomic, write_json
from kvshot_ds.report import figures
from kvshot_ds.report.blocks import Cell, Figure, LegendItem, Panel, Section
from kvshot_ds.report.forms import Names, markdown
from kvshot_ds.report.gather import Work, gather, gather_folders
from kvshot_ds.report.sections import build_sections
from kvshot_ds.sweep.folder import SweepFolder

_INTRODUCTION = "Drafters for speculative decoding, measured on held-out conversations."
_LIST = "files.json"  # of figures and data beside the page
# CSS pixels: a lone chart is drawn twice, for wide and for narrow screens, so that its text is never scaled away
_WIDE, _NARROW, _PANEL = (760, 380), (350, 300), (350, 260)


@dataclass(frozen=True)
class ReportSummary:
    """Where the page is, which runs it shows, and how many things it says were not measured."""

    path: Path
    runs: tuple[str, ...]
    missing: int


def run(recipe: Recipe, out: Path | None = None) -> ReportSummary:
    """Builds the report of whatever lies below `recipe.work` in the folder `out` (work/report), and prints the page's path last.

    What was not measured is said on the page with the command that measures it. Raises KvshotError on a file that
    cannot be understood and on a folder of `report.runs` that does not exist.
    """
    return _write(gather(recipe), recipe, out or recipe.work / "report")


def run_folders(folders: Sequence[Path], out: Path | None = None) -> ReportSummary:
    """The same of folders of runs and of sweeps. Beside the sweep, if it is one; otherwise in work/report of the first. Raises KvshotError as
    `gather_folders`."""
    work, recipe = gather_folders(folders)
    alone = len(folders) == 1 and SweepFolder.is_one(folders[0])
    return _write(work, recipe, out or (folders[0] if alone else recipe.work) / "report")


def _write(work: Work, recipe: Recipe, folder: Path) -> ReportSummary:
    """Page, Markdown, figures and data, each atomically. Files that an earlier report has left there and this one does not write are removed: those alone
    that it had put into its list."""
    sections = build_sections(work, recipe)
    made, names, path = datetime.datetime.now(datetime.UTC), Names(sections), folder / "index.html"
    text = f"{_INTRODUCTION} Made {_when(made)} by kvshot-ds {__version__}."
    files = dict(names.files()) | {"report.md": markdown(recipe.report.title, sections, text, names)}
    before = _listed(folder / _LIST)
    write_json(folder / _LIST, {"files": sorted({*before, *files})})
    for name, content in files.items():
        write_atomic(folder / name, content)
    write_atomic(path, render(recipe.report.title, sections, made))
    for name in before - files.keys():
        (folder / name).unlink(missing_ok=True)
    write_json(folder / _LIST, {"files": sorted(files)})
    missing = sum(getattr(block, "tone", "") == "missing" for section in sections for block in section.blocks)
    print(f"report: {len(work.runs)} run(s) shown, {missing} thing(s) said to be not measured; beside the page report.md, figures/ and data/")
    print(path.resolve())
    return ReportSummary(path, tuple(r.name for r in work.runs), missing)


def _listed(path: Path) -> set[str]:
    """What an earlier report wrote beside its page. What is no plain name below figures/ or data/ is nothing that a report has written."""
    try:
        found = read_object(path)["files"] if path.is_file() else []
        return {name for name in found if re.fullmatch(r"(figures|data)/[\w-][\w.-]*", name)}
    except (ValueError, KeyError, TypeError):
        return set()


def _when(made: datetime.datetime) -> str:
    return made.strftime("%Y-%m-%d %H:%M UTC")


def render(title: str, sections: list[Section], made: datetime.datetime) -> str:
    """The page as HTML: no script, nothing loaded. Every text is escaped; only the drawings of `figures` are markup."""
    env = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    env.globals.update(panels=_panels, swatch=_swatch, bars=_bars, colour=figures.colour)
    template = env.from_string((resources.files(__package__) / "page.html.j2").read_text(encoding="utf-8"))
    return template.render(title=title, sections=sections, introduction=_INTRODUCTION, made=_when(made), version=__version__)


def _panels(figure: Figure) -> list[tuple[str, Panel, Markup]]:
    """(CSS class, panel, drawing), wide and narrow."""
    out = []
    for i, panel in enumerate(figure.panels):
        sizes = {"wide": _WIDE, "narrow": _NARROW} if len(figure.panels) == 1 else {"panel": _PANEL}
        out += [(kind, panel, Markup(figures.lines(panel.chart, f"{figure.ident}-{i}-{kind}", *size))) for kind, size in sizes.items()]
    return out


def _swatch(item: LegendItem) -> Markup:
    return Markup(figures.swatch(item.style, item.dashed, item.plain, item.dotted))


def _bars(cell: Cell) -> Markup:
    counts = ", ".join(f"{n} rounds with {i}" for i, n in enumerate(cell.bars))
    return Markup(figures.bars(cell.bars, cell.style, f"Rounds by accepted tokens: {counts}"))
