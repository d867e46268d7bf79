"""Held-out acceptance: the curves, the main table, the paired comparisons."""

from __future__ import annotations

from typing import Literal

from kvshot_ds.report import blocks as b
from kvshot_ds.report.blocks import NONE, Block, Cell, Figure, LegendItem, Panel, Row, Table, Text
from kvshot_ds.report.compare import RULE, Comparison
from kvshot_ds.report.figures import Chart, Series
from kvshot_ds.report.gather import Evaluation, Run, evaluated

INIT_HEAD = {"random": "random", "target": "the target's head rows"}
_TONES: dict[str, Literal["good", "bad"]] = {"higher": "good", "lower": "bad"}


def acceptance_blocks(runs: tuple[Run, ...]) -> list[Block]:
    """Held-out acceptance of every run: figure and main table; runs without it are named."""
    measured = evaluated(runs)
    blocks: list[Block] = [b.missing(f"held-out acceptance of {run.name}", "eval", run.folder) for run in runs if not run.evaluation]
    if not measured:
        return blocks or [b.missing("held-out acceptance", "eval")]
    if len({e.bigram for _, _, e in measured if e.bigram}) > 1:
        text = "The runs have different bigram tables or held-out rows: line and row show the first run's, each comparison uses the run's own."
        blocks.append(Text(text, "note"))
    return [*blocks, _figure(measured), _main_table(measured)]


def _figure(measured: list[tuple[int, Run, Evaluation]]) -> Figure:
    """alpha_k over k with bands, and the bigram table as a line."""
    series, rows = [], []
    for i, run, e in measured:
        values = [r.interval for r in e.alpha]
        y, low, high = (tuple(getattr(v, part) for v in values) for part in ("value", "low", "high"))
        series.append(Series(run.name, i, tuple(r.k for r in e.alpha), y, low, high))
        for r, joint, prob in zip(e.alpha, e.joint, e.accept_prob, strict=True):
            v = r.interval
            both = b.shown(joint.interval.value), b.shown(prob.interval.value)
            rows.append(
                Row((Cell(run.name), b.counted(r.k), b.shown(v.value), b.shown(v.low), b.shown(v.high), b.counted(r.num), b.counted(r.den), *both), style=i)
            )
    bigram = next((e.bigram.value for _, _, e in measured if e.bigram), None)
    text = f"Step-wise acceptance on held-out rows by draft step, for {len(series)} drafters."
    chart = Chart("draft step k", "step-wise acceptance αₖ", tuple(series), text, bigram, integer_x=True)
    legend = tuple(LegendItem(f"{run.name}: {e.drafter.label}", i) for i, run, e in measured)
    if bigram is not None:
        legend += (LegendItem(f"bigram table at k = 0: {b.number(bigram)}", dotted=True),)
    data = Table("Step-wise acceptance with its counts", ("drafter", "k", "αₖ", "low", "high", "right", "rows", "jointₖ", "under sampling"), tuple(rows))
    caption = f"Step-wise acceptance αₖ on held-out rows; bands are {measured[0][2].confidence:.0%} intervals."
    return Figure("alpha", caption, (Panel("", chart),), legend, data)


def _main_table(measured: list[tuple[int, Run, Evaluation]]) -> Table:
    steps = max(len(e.alpha) for _, _, e in measured)
    rows = []
    for i, run, e in measured:
        words = (Cell(run.name, e.drafter.label), Cell(f"layers: {e.drafter.init_layers}", f"head: {e.drafter.init_head}"), b.millions(e.drafter.parameters))
        alphas = b.padded([b.measured(r.interval) for r in e.alpha], steps)
        rows.append(Row((*words, *alphas, b.measured(e.mat, 2), b.measured(e.mat_joint, 2), b.measured(e.retention)), style=i))
    bigram = next(((e.bigram, e.bigram_tokens) for _, _, e in measured if e.bigram), None)
    if bigram:
        tokens = f"counted on {b.integer(bigram[1])} training tokens" if bigram[1] is not None else ""
        rows.append(Row((Cell("bigram table", tokens), NONE, NONE, b.measured(bigram[0]), *[NONE] * (steps + 2))))
    head = ("drafter", "initialised from", "parameters", *map(b.alpha_name, range(steps)), "MAT", "joint MAT", "retention")
    return Table("All drafters, held-out: value above, interval below", head, tuple(rows), words=2)


def comparison_blocks(comparisons: list[Comparison]) -> list[Block]:
    """The rule, the paired differences, and what could not be compared."""
    if not comparisons:
        return [b.missing("nothing to compare: no run was found", "train")]
    rows, levels = [], {c.confidence for c in comparisons if c.difference}
    for c in comparisons:
        if c.difference is not None:
            value = Cell(b.signed(c.difference.value), value=c.difference.value)
            interval = Cell(b.bounds(c.difference), f"{c.confidence:.0%}" if len(levels) > 1 else "")
            names = (Cell(f"{c.first} − {c.second}", c.reason), Cell(c.metric), Cell(c.verdict))
            rows.append(Row((*names, value, interval, b.counted(c.conversations)), _TONES.get(c.verdict, "")))
    head = ("difference", "of", "verdict", "value", f"{levels.pop():.0%} interval" if len(levels) == 1 else "interval", "conversations")
    table: list[Block] = [Table("Paired differences on the same held-out conversations", head, tuple(rows), words=3)] if rows else []
    gaps = [Text(f"{c.first} against {c.second} ({c.metric}): {c.reason}", "missing", c.command) for c in comparisons if c.difference is None]
    return [Text(RULE), *table, *gaps]
