"""The cells of a sweep against its baseline, with the numbers of `kvshot sweep table`, and against the bigram table."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from kvshot_ds.config import EvalConfig
from kvshot_ds.errors import ConfigError
from kvshot_ds.metrics import Spread, StepCounts, alpha_at, paired_over_seeds
from kvshot_ds.report import blocks as b
from kvshot_ds.report.blocks import NONE, Block, Cell, Row, Table, Text
from kvshot_ds.report.bycell import Scope, cell_name, heading
from kvshot_ds.report.cells import Group
from kvshot_ds.sweep import compare

_MARK = "* the interval excludes 0"


def compared(scope: Scope) -> compare.Table | str:
    """As `kvshot sweep table` of the sweep's folder compares its cells; why it does not, if it does not."""
    assert scope.sweep
    try:
        return compare.compare([scope.sweep.folder])
    except ConfigError as error:
        return str(error)


def name_of(scope: Scope, row: compare.Row) -> str:
    """A cell of the table in the words of the page."""
    assert scope.sweep
    return next((cell_name(cell, scope.sweep) for cell in scope.sweep.cells if cell.label == row.name), row.name)


def baseline_blocks(scope: Scope, found: compare.Table | str, options: EvalConfig) -> list[Block]:
    """Differences from the baseline and from the bigram table; [] of a sweep of which nothing is measured."""
    if not scope.groups:
        return []
    if isinstance(found, str):
        return [Text(f"No differences from a baseline: {found}", "note"), *_bigram(scope, options)]
    return [*_differences(scope, found), *_bigram(scope, options)]


def marked(spread: Spread) -> Cell:
    """A difference over its interval, with the mark of the rule."""
    if spread.value is None:
        return NONE
    star = " *" if compare.Difference(spread).excludes else ""
    return Cell(f"{b.signed(spread.value)}{star}", b.bounds(spread), spread.value, low=spread.low, high=spread.high)


def _differences(scope: Scope, found: compare.Table) -> list[Block]:
    assert scope.sweep
    base, groups = found.rows[found.baseline], {g.name: g for g in scope.groups}
    others = [row for row in found.rows if row.differences]
    name = name_of(scope, base)
    if not others:
        why = "nothing of it is measured" if not base.seeds else "no other cell has a seed in common with it"
        return [Text(f"The baseline is {name}. There are no differences from it: {why}.", "note")]
    steps = range(max(row.common_steps for row in others))
    rows = []
    for row in others:
        group, known = groups.get(name_of(scope, row)), row.differences
        seeds = [seed for seed in row.seeds if seed in base.seeds]
        cells = (marked(known[s].spread) if s in known else NONE for s in ("mat", "mat_joint", *(f"alpha_{k}" for k in steps)))
        first = heading(group) if group else Cell(name_of(scope, row))
        rows.append(Row((first, Cell(", ".join(map(str, seeds))), *cells), style=group.style if group else None))
    without = [name_of(scope, row) for row in found.rows if row is not base and row.seeds and not row.differences]
    text = (
        f"The baseline is {name}. Differences are the cell's value minus the baseline's, paired by seed and conversation, over the seeds that both have; "
        f"the numbers are those of kvshot sweep table {shlex.quote(str(scope.sweep.folder))}. {_MARK}. No correction is made for the number of comparisons."
    )
    if without:
        text += f" No seed in common with the baseline: {', '.join(without)}."
    if single := one_seed(others):
        text += f" {single}"
    head = ("cell", "seeds", "MAT", "joint MAT", *(b.alpha_name(k) for k in steps))
    caption = f"Differences from the baseline, {name}: cell minus baseline above, {found.confidence:.0%} interval below"
    return [Text(text), Table(caption, head, tuple(rows), words=2, ident="differences")]


def one_seed(others: Sequence[compare.Row]) -> str:
    """What the differences of one seed do not know; "" if there are none."""
    single = [row for row in others if row.differences["mat"].spread.seeds == 1]
    if not single:
        return ""
    which = "All differences" if len(single) == len(others) else f"{len(single)} of the {len(others)} rows of differences"
    return f"{which} are of one seed: interval and * are then over conversations alone and know nothing of what another seed would give."


def _bigram(scope: Scope, options: EvalConfig) -> list[Block]:
    """alpha_0 of each cell beside that of the table counted on the tokens it was trained on, by the same rule, over its seeds."""
    rows = [row for g in scope.groups if (row := _beside(g, options))]
    if not rows:
        return []
    head = ("cell", "seeds", b.alpha_name(0), "bigram table", "difference")
    caption = (
        f"{b.alpha_name(0)} beside the bigram table's: cell minus table, paired by seed and conversation, {options.confidence:.0%} intervals below; {_MARK}"
    )
    return [Table(caption, head, tuple(rows), words=2, ident="bigram")]


def _beside(group: Group, options: EvalConfig) -> Row | None:
    """None where the bigram table's hits of a run are not on record, or its seeds were measured on other conversations."""
    runs = [run for run in group.runs if run.conversations]
    found = [run.conversations for run in runs if run.conversations and run.conversations.bigram]
    if not found or len(found) < len(runs) or len({c.keys for c in found}) > 1:
        return None
    first = [StepCounts.unstack(c.counts.stack()[..., :1]) for c in found]
    table = [StepCounts.ratio(c.bigram, c.counts.den[:, 0]) for c in found]
    difference = paired_over_seeds(first, table, alpha_at(0), options.bootstrap, options.confidence, options.seed)
    values = [[e.alpha[0].interval.value, e.bigram.value if e.bigram else None] for run in runs if (e := run.evaluation)]
    means = [sum(known) / len(known) if (known := [v for v in column if v is not None]) else None for column in zip(*values, strict=True)]
    seeds = ", ".join(str(run.seed) for run in runs)
    return Row((heading(group), Cell(seeds), *(b.shown(v) for v in means), marked(difference)), style=group.style)
