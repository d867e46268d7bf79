"""`python -m kvshot_ds.report.curves RUN ...`: what was measured of run folders, as one drawing and as tables inside a document.

In the document, `<!-- curves:NAME -->` opens the place of the run whose folder is called NAME and `<!-- curves -->` that of
the summary; `<!-- /curves -->` closes both. Only the text between is replaced. The same results give the same bytes.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from kvshot_ds.errors import ConfigError, KvshotError
from kvshot_ds.files import read_json, write_atomic
from kvshot_ds.metrics import Interval
from kvshot_ds.report import figures
from kvshot_ds.report.acceptance import alpha_panels
from kvshot_ds.report.blocks import alpha_name, bounds, integer, millions, number
from kvshot_ds.report.compare import BLOCK_RULE
from kvshot_ds.report.families import rank
from kvshot_ds.report.figures import LIGHT, Chart, Series
from kvshot_ds.report.gather import Evaluation, Run, evaluated, read_run, styled
from kvshot_ds.report.sections import init_words

END = "<!-- /curves -->"
_OPEN = re.compile(r"<!-- curves(?::(\S+))? -->")
# px: a panel with room for names right of its curves; least distance of two names
_WIDTH, _HEIGHT, _GAP = 460, 380, 14
_SIDE = 0.4  # draft steps left free on either side of the curves


def read_runs(folders: Sequence[Path]) -> tuple[Run, ...]:
    """The runs in the order of the report. Raises KvshotError: not measured, two of one name, measured against different targets."""
    runs = styled(sorted((read_run(folder) for folder in folders), key=lambda run: (*rank(run.drafter), run.name)))
    if missing := [run.folder for run in runs if run.evaluation is None]:
        raise KvshotError(f"no eval.json in {', '.join(map(str, missing))}; measure first: kvshot eval {missing[0] / 'recipe.yaml'}")
    if twice := sorted({run.name for run in runs if sum(other.name == run.name for other in runs) > 1}):
        raise KvshotError(f"two run folders are called {', '.join(twice)}; the document tells them apart by that name")
    if len({e.target_digest for _, e in evaluated(runs)}) > 1:
        raise KvshotError("the runs were measured against different targets; their curves do not belong into one figure")
    return runs


def run_table(run: Run, e: Evaluation) -> str:
    """One line of numbers: alpha by step, MAT, joint MAT, each with its interval; rows and conversations below."""
    head = ["`" + run.name + "`", *(alpha_name(r.k) for r in e.alpha), "MAT", "joint MAT"]
    cells = [f"{e.confidence:.0%} interval", *(_over(r.interval) for r in e.alpha), _over(e.mat, 2), _over(e.mat_joint, 2)]
    rows = f"{integer(e.alpha[0].den)} held-out rows at step 0, {integer(e.alpha[-1].den)} at step {e.alpha[-1].k}; {e.conversations} conversations."
    return f"{_table([head, cells])}\n\n{run.label}. {rows}"


def summary(runs: tuple[Run, ...], command: Sequence[str], made_by: str, image: str) -> str:
    """Picture, table of all runs, what they were trained and measured on, and the commands."""
    measured = evaluated(runs)
    last = max(e.alpha[-1].k for _, e in measured)
    head = ["run", "parameters", "α₀", f"α at step {last}", "MAT", "joint MAT", "τ", "trained rows", "seed", "recipe"]
    rows = [[f"`{run.name}`", millions(e.drafter.parameters).text, *_numbers(run, e, last), *_training(run)] for run, e in measured]
    starts = sorted({init_words(e.drafter) for _, e in measured})
    facts = [
        f"Target: {measured[0][1].target}. {_data(measured)}",
        f"Intervals are {measured[0][1].confidence:.0%}, over held-out conversations; α, MAT, joint MAT and τ are defined at the end of every report.",
        "Weights: " + "; or ".join(starts) + ".",
        "Parameters are those trained; a block-wise drafter uses the target's head, which is not counted.",
    ]
    if any(e.drafter.blockwise for _, e in measured):
        facts.append(BLOCK_RULE)
    commands = "\n".join([*([made_by] if made_by else []), shlex.join(command)])
    picture = [f"![αₖ by draft step of each drafter, with intervals]({image})"] if image else []
    return "\n\n".join([*picture, _table([head, *rows]), "\n".join(f"- {fact}" for fact in facts), f"```\n{commands}\n```"])


def _numbers(run: Run, e: Evaluation, last: int) -> list[str]:
    at_last = next((r.interval for r in e.alpha if r.k == last), None)
    return [_over(e.alpha[0].interval), _over(at_last), _over(e.mat, 2), _over(e.mat_joint, 2), _over(run.decoding.tau if run.decoding else None, 2)]


def _training(run: Run) -> list[str]:
    """Supervised rows, seed and recipe of a run, as far as they are on record."""
    command = next((map(str, p.get("command") or []) for stage, p in run.origins if stage == "train"), iter(()))
    recipe = next((f"`{word}`" for word in command if word.endswith(".yaml") and not Path(word).is_absolute()), "–")
    return [integer((run.train or {}).get("supervised_rows")), "–" if run.seed is None else str(run.seed), recipe]


def _data(measured: list[tuple[Run, Evaluation]]) -> str:
    """Conversations trained and measured on."""
    conversations = {n for run, _ in measured if (n := _train_conversations(run)) is not None}
    trained = f"Trained on {_range(conversations)} conversations. " if conversations else ""
    heldout, rows = {e.conversations for _, e in measured}, {int(e.alpha[0].den) for _, e in measured}
    return f"{trained}Measured on {_range(heldout)} held-out conversations, {_range(rows)} rows at step 0."


def _train_conversations(run: Run) -> int | None:
    path = run.recipe.shards_dir / "manifest.json" if run.recipe else None
    return read_json(path)["splits"]["train"]["samples"] if path and path.is_file() else None


def _range(values: set[int]) -> str:
    return " to ".join(dict.fromkeys(map(integer, (min(values), max(values)))))


def _over(interval: Interval | None, digits: int = 3) -> str:
    """Value over its interval, in one cell."""
    if interval is None or interval.value is None:
        return "–"
    return f"{number(interval.value, digits)}<br>{bounds(interval, digits)}"


def _table(rows: Sequence[Sequence[str]]) -> str:
    head, *body = ("| " + " | ".join(row) + " |" for row in rows)
    return "\n".join([head, "|" + "---|" * len(rows[0]), *body])


def filled(text: str, places: Mapping[str, str], where: str) -> str:
    """`text` with what stands between the markers of each place replaced ('' is the summary's). Raises ConfigError: a place has no marker
    or two, or is not closed."""
    for name, content in places.items():
        found = [m for m in _OPEN.finditer(text) if (m[1] or "") == name]
        opening = f"<!-- curves:{name} -->" if name else "<!-- curves -->"
        if len(found) != 1:
            raise ConfigError(f"{where}: {len(found)} places are marked {opening}, expected one; write it and {END} where the numbers belong")
        begin = found[0].end()
        end, following = text.find(END, begin), _OPEN.search(text, begin)
        if end < 0 or (following and following.start() < end):
            raise ConfigError(f"{where}: {opening} is not closed; write {END} behind it")
        text = f"{text[:begin]}\n{content}\n{text[end:]}"
    return text


def drawing(runs: tuple[Run, ...]) -> str:
    """The curves as an SVG file: step by step and block-wise beside each other, each curve named at its end."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    panels = alpha_panels(evaluated(runs))
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "curves", "font.size": 11, "axes.linewidth": 0.8}):
        figure = Figure(figsize=(_WIDTH * len(panels) / 72, _HEIGHT / 72), layout="constrained")
        for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
            figures.draw(axes, panel.chart, LIGHT)
            axes.set_title(panel.title, fontsize=11, color=LIGHT.ink, loc="left")
            if isinstance(panel.chart, Chart):
                _name_curves(axes, panel.chart)
        return figures.alone(figure, " ".join(p.chart.description for p in panels))


def _name_curves(axes: Any, chart: Chart) -> None:
    """Writes each curve's name right of its last point, as near as the other names leave room."""
    low, high = axes.get_ylim()
    steps = max(x for s in chart.series for x in s.x)
    unit = (steps + 1) / 7  # of the horizontal axis: as wide as a draft step where there are seven
    edge = steps + (_SIDE + 0.2) * unit
    ends = [(s.y[i] or 0.0, s.x[i] + shift, s.label, LIGHT.series[s.style % len(LIGHT.series)]) for s, shift, i in _lasts(chart)]
    ends += [] if chart.reference is None else [(chart.reference, steps + _SIDE, "bigram table", LIGHT.muted)]
    ends.sort()
    places = spread([y for y, *_ in ends], (high - low) * _GAP / (0.8 * _HEIGHT))
    for (y, x, name, paint), place in zip(ends, places, strict=True):
        axes.plot([x, edge, edge + 0.15 * unit], [y, place, place], color=paint, linewidth=0.8, clip_on=False)
        behind = {"facecolor": LIGHT.page, "edgecolor": "none", "pad": 0.6}
        axes.text(edge + 0.25 * unit, place, name, color=LIGHT.ink, fontsize=10, va="center", parse_math=False, clip_on=False, bbox=behind)
    axes.set_xlim(-_SIDE, edge + (0.2 + 0.17 * max(len(name) for _, _, name, _ in ends)) * unit)
    axes.spines["bottom"].set_bounds(-_SIDE, steps + _SIDE)


def _lasts(chart: Chart) -> list[tuple[Series, float, int]]:
    """Each series with its shift and the index of its last defined point."""
    moved = zip(chart.series, figures.shifts(chart), strict=True)
    return [(s, shift, max(defined)) for s, shift in moved if (defined := [i for i, y in enumerate(s.y) if y is not None])]


def spread(wanted: Sequence[float], gap: float) -> list[float]:
    """The places nearest to `wanted` (ascending; least squares) of which no two are closer than `gap`."""
    groups: list[tuple[float, int]] = []  # mean of `wanted` less i gaps, which must not descend; members
    for i, value in enumerate(wanted):
        mean, count = value - i * gap, 1
        while groups and groups[-1][0] > mean:
            other, members = groups.pop()
            mean, count = (mean * count + other * members) / (count + members), count + members
        groups.append((mean, count))
    return [mean + i * gap for i, mean in enumerate(mean for mean, count in groups for _ in range(count))]


def update(folders: Sequence[Path], markdown: Path | None, figure: Path | None, made_by: str = "") -> list[Path]:
    """Writes the figure and fills the places of the document. Returns what was written. Raises KvshotError as `read_runs` and `filled` do."""
    runs = read_runs(folders)
    files: list[tuple[Path, str]] = []
    if markdown:
        image = os.path.relpath(figure, markdown.parent) if figure else ""
        options = [("--markdown", markdown), ("--figure", figure)]
        given = [word for option, path in options if path for word in (option, _shown(path))]
        command = ["python", "-m", "kvshot_ds.report.curves", *(_shown(folder) for folder in folders), *given]
        places = {"": summary(runs, command, made_by, image)} | {run.name: run_table(run, e) for run, e in evaluated(runs)}
        files.append((markdown, filled(markdown.read_text(encoding="utf-8"), places, str(markdown))))
    if figure:
        files.append((figure, drawing(runs)))
    for path, text in files:
        write_atomic(path, text)
    return [path for path, _ in files]


def _shown(path: Path) -> str:
    """Relative to the current directory where that is possible: what is written into a document holds on other machines too."""
    here = path.resolve()
    return str(here.relative_to(Path.cwd())) if here.is_relative_to(Path.cwd()) else path.name


@click.command()
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--markdown", type=click.Path(path_type=Path, exists=True, dir_okay=False), help="document with markers, rewritten between them")
@click.option("--figure", type=click.Path(path_type=Path), help="SVG file of the curves")
@click.option("--made-by", default="", help="command that made the runs, printed in the summary")
def _command(runs: tuple[Path, ...], markdown: Path | None, figure: Path | None, made_by: str) -> None:
    """Write the measured curves of the run folders RUNS as a figure, and their numbers between the markers of a document."""
    for path in update(runs, markdown, figure, made_by):
        click.echo(path)


def main(args: Sequence[str] | None = None) -> int:
    """Exit status: 0; 2 with a text on stderr for what a user can mend."""
    try:
        _command.main(args, prog_name="python -m kvshot_ds.report.curves", standalone_mode=False)
    except KvshotError as error:
        click.echo(f"curves: {error}", err=True)
        return 2
    except click.ClickException as error:
        error.show()
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
