"""Held-out acceptance: the curves, the main table, the paired comparisons."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from kvshot_ds.metrics import Interval
from kvshot_ds.report import blocks as b
from kvshot_ds.report.blocks import NONE, Block, Cell, Figure, LegendItem, Panel, Row, Table, Text
from kvshot_ds.report.compare import BLOCK_RULE, RULE, Comparison
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
    if len({e.bigram for _, e in measured if e.bigram}) > 1:
        text = "The runs have different bigram tables or held-out rows: line and row show the first run's, each comparison uses the run's own."
        blocks.append(Text(text, "note"))
    return [*blocks, _figure(measured), _main_table(measured)]


def alpha_panels(measured: list[tuple[Run, Evaluation]]) -> tuple[Panel, ...]:
    """alpha_k over k with intervals: one panel for the step-by-step drafters and one for the block-wise ones, on one scale. The bigram table
    is a line."""
    bigram = next((e.bigram.value for _, e in measured if e.bigram), None)
    halves = [(title, [m for m in measured if m[1].drafter.blockwise is block]) for title, block in (("step by step", False), ("block by block", True))]
    panels = [(title, tuple(_series(*m) for m in half)) for title, half in halves if half]
    edges = [v for _, series in panels for s in series for v in (*s.y, *s.low, *s.high) if v is not None] + ([] if bigram is None else [bigram])
    margin = 0.04 * (max(edges) - min(edges)) or 0.01
    y_range = (min(edges) - margin, max(edges) + margin)
    out = []
    for title, series in panels:
        text = f"Step-wise acceptance on held-out rows by draft step, for {len(series)} drafter{'s' if len(series) > 1 else ''} working {title}."
        out.append(Panel(title if len(panels) > 1 else "", Chart("draft step k", "step-wise acceptance αₖ", series, text, bigram, True, y_range)))
    return tuple(out)


def _series(run: Run, e: Evaluation) -> Series:
    values: list[Interval] = [r.interval for r in e.alpha]
    y, low, high = (tuple(getattr(v, part) for v in values) for part in ("value", "low", "high"))
    return Series(run.name, run.style, tuple(r.k for r in e.alpha), y, low, high)


def _figure(measured: list[tuple[Run, Evaluation]]) -> Figure:
    """The curves, and the table of their counts."""
    rows = []
    for run, e in measured:
        for r, joint, prob in zip(e.alpha, e.joint, e.accept_prob, strict=True):
            v, both = r.interval, (b.shown(joint.interval.value), b.shown(prob.interval.value))
            cells = (Cell(run.name), b.counted(r.k), b.shown(v.value), b.shown(v.low), b.shown(v.high), b.counted(r.num), b.counted(r.den), *both)
            rows.append(Row(cells, style=run.style))
    legend = tuple(LegendItem(f"{run.name}: {run.label}", run.style) for run, _ in measured)
    bigram = next((e.bigram.value for _, e in measured if e.bigram), None)
    if bigram is not None:
        legend += (LegendItem(f"bigram table at k = 0: {b.number(bigram)}", dotted=True),)
    data = Table("Step-wise acceptance with its counts", ("drafter", "k", "αₖ", "low", "high", "right", "rows", "jointₖ", "under sampling"), tuple(rows))
    panels = alpha_panels(measured)
    caption = f"Step-wise acceptance αₖ on held-out rows, with {measured[0][1].confidence:.0%} intervals."
    if len(panels) > 1:
        caption += " A step-by-step drafter is given the true tokens before step k; a block-wise one makes all its proposals from the token at t + 1 alone."
    return Figure("alpha", caption, panels, legend, data)


def _main_table(measured: list[tuple[Run, Evaluation]]) -> Table:
    steps = max(len(e.alpha) for _, e in measured)
    rows = []
    for run, e in measured:
        start = Cell(f"layers: {e.drafter.init_layers}", f"head: {e.drafter.init_head}" + ("; warm start" if e.drafter.warm_start else ""))
        size = replace(b.millions(e.drafter.parameters), sub="target's head, frozen" if e.drafter.blockwise else "with its own head")
        words = (Cell(run.name, run.label), start, size)
        alphas = b.padded([b.measured(r.interval, of="α") for r in e.alpha], steps)
        totals = (b.measured(e.mat, 2, "MAT"), b.measured(e.mat_joint, 2, "MAT"), b.measured(e.retention, of="retention"))
        rows.append(Row((*words, *alphas, *totals), style=run.style))
    bigram = next(((e.bigram, e.bigram_tokens) for _, e in measured if e.bigram), None)
    if bigram:
        tokens = f"counted on {b.integer(bigram[1])} training tokens" if bigram[1] is not None else ""
        rows.append(Row((Cell("bigram table", tokens), NONE, NONE, b.measured(bigram[0], of="α"), *[NONE] * (steps + 2))))
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
    rules = [Text(RULE)] + ([Text(BLOCK_RULE)] if any(c.metric == "joint MAT" for c in comparisons) else [])
    return [*rules, *table, *gaps]
