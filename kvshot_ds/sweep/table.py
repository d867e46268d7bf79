"""`kvshot sweep table`: what sweeps have found, as text for a terminal, Markdown, LaTeX or CSV."""

from __future__ import annotations

import csv
import io
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvshot_ds.features.plan import aligned
from kvshot_ds.metrics import Spread
from kvshot_ds.provenance import git_commit
from kvshot_ds.sweep.compare import SIZES, Difference, Row, Table, compare
from kvshot_ds.sweep.early import Early, early

__all__ = ["Early", "Form", "Table", "compare", "early", "rendered"]

Form = Literal["text", "markdown", "csv", "latex"]
_STEPS = 7  # draft steps side by side
_WIDTH = 160  # of a terminal
_LONGEST = 24  # characters of a label on a terminal
_SUBSCRIPTS = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")
_LATEX = {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", **{c: f"\\{c}" for c in "&%$#_{}"}, "<": r"$<$", ">": r"$>$",
    "[": "{[}", "*": "{*}",  # which \\ before them would take for its own
    "α": r"$\alpha$", "τ": r"$\tau$", "±": r"$\pm$", "≠": r"$\neq$", "†": r"\dag{}", "·": r"$\cdot$",
    **{s: rf"\textsubscript{{{d}}}" for d, s in enumerate("₀₁₂₃₄₅₆₇₈₉")},
}  # fmt: skip


@dataclass(frozen=True)
class _Block:
    """One table: the first row is its head, the first `keys` columns say what a row is about."""

    title: str
    keys: int
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class _Page:
    """origin: one line by which the numbers can be traced."""

    origin: str
    heading: str
    blocks: tuple[_Block, ...]
    notes: tuple[str, ...]


def rendered(found: Table | Early, form: Form) -> str:
    """`found` in one of the forms, without a final line break. CSV has every number of each cell in columns of their own; the others have the same as
    mean ± half width, and first say which command made them of what."""
    if form == "csv":
        return _csv(_records(found) if isinstance(found, Table) else _early_records(found))
    page = _page(found, form) if isinstance(found, Table) else _early_page(found, form)
    return {"text": _text, "markdown": _markdown, "latex": _latex}[form](page)


def _page(table: Table, form: Form) -> _Page:
    rows, base = table.rows, table.rows[table.baseline]
    varied = [axis for axis in table.axes if len({row.labels.get(axis) for row in rows}) > 1]
    alike = " ".join(f"{axis}={base.labels[axis]}" for axis in table.axes if axis not in varied)
    several = len({row.sweep for row in rows}) > 1
    head = (*(["sweep"] if several else []), *(varied or ["cell"]))
    longest = _LONGEST if form == "text" else None

    def named(row: Row) -> tuple[str, ...]:
        """What tells the cell from the others; † for a control."""
        labels = [_cut(row.labels.get(axis, "-"), longest) for axis in varied] or [row.name]
        labels[0] += " †" if row.control else ""
        return (*([row.sweep] if several else []), *labels)

    sizes = ("seeds", "parameters", "FLOPs/token", "tokens", "steps", "rows", "MAT", "joint MAT", "retention")
    first = ((*named(row), *_sizes(row), *(_spread(row.values.get(s)) for s in ("mat", "mat_joint", "retention"))) for row in rows)
    blocks = [_Block("Cells", len(head), ((*head, *sizes), *first))]
    most = max(row.steps for row in rows)
    for at in range(0, most, _STEPS):
        steps = range(at, min(at + _STEPS, most))
        acceptance = ((*named(row), *(_spread(row.values.get(f"alpha_{k}")) for k in steps)) for row in rows)
        blocks.append(_Block("Step-wise acceptance", len(head), ((*head, *(_alpha(k) for k in steps)), *acceptance)))
    others = [row for row in rows if row.differences]
    if others:
        together = ((*named(row), str(row.differences["mat"].spread.seeds), *(_difference(row.differences[s]) for s in ("mat", "mat_joint"))) for row in others)
        blocks.append(_Block(f"Differences from {base.name}", len(head), ((*head, "common seeds", "MAT", "joint MAT"), *together)))
        most = max(row.common_steps for row in others)
        for at in range(0, most, _STEPS):
            steps = range(at, min(at + _STEPS, most))
            by_step = ((*named(row), *(_difference(row.differences.get(f"alpha_{k}")) for k in steps)) for row in others)
            blocks.append(_Block(f"Differences in step-wise acceptance from {base.name}", len(head), ((*head, *(_alpha(k) for k in steps)), *by_step)))
    held = f"{table.conversations} held-out conversations" if table.conversations else "nothing measured yet"
    heading = f"Sweep {', '.join(table.sweeps)} on {table.target}: {len(rows)} cells, {held}" + (f"; all cells: {alike}" if alike else "")
    return _Page(_origin(table.command, form, table.digest), heading, tuple(blocks), tuple(_notes(table)))


def _origin(command: str, form: Form, swept: str) -> str:
    return (
        f"{command} --format {form}; kvshot-ds at commit {git_commit() or 'unknown'}; trials {swept}"
        if swept
        else f"{command} --format {form}; commit {git_commit() or 'unknown'}"
    )


def _notes(table: Table) -> list[str]:
    """What a reader of the numbers must know."""
    rows, base = table.rows, table.rows[table.baseline]
    measured, others = [row for row in rows if row.seeds], [row for row in rows if row.differences]
    single, paired = [row for row in measured if len(row.seeds) == 1], [row for row in others if row.differences["mat"].spread.seeds == 1]
    notes = [_intervals(f"{table.confidence:.0%}", bool(single), len(single) < len(measured))]
    if others:
        notes.append("* the interval of the difference, paired by seed and conversation, excludes 0. No correction is made for the number of comparisons.")
    for row in rows:
        if row.missing:
            notes.append(f"{row.name}: {'; '.join(f'seed {m.seed} is missing ({m.why})' for m in row.missing)}")
        if row is not base and row.seeds and not row.differences:
            notes.append(f"{row.name}: no difference, as it has no seed in common with {base.name}")
        if row.differences and row.common_steps < max(row.steps, base.steps):
            notes.append(f"{row.name}: differences over the first {row.common_steps} draft steps, which both have")
    if paired:
        notes.append(f"Differences of one common seed alone, so their intervals and * know nothing of other seeds: {_which(paired, others, 'all differences')}")
    if single:
        notes.append(f"One seed alone, so the interval knows nothing of what another seed would give: {_which(single, measured, 'all cells')}")
    for size in SIZES:
        if unequal := [row for row in rows if size in row.unequal]:
            which = _which(unequal, others, "all other cells")
            notes.append(f"≠ other {size.replace('_', ' ')} than {base.name} with the same seed, so the comparison is not equal in them: {which}")
    notes += [f"† control: {row.control}" for row in rows if row.control]
    if warm := [row for row in rows if row.warm]:
        notes.append(f"Start from a trained drafter, whose training is not counted: {_which(warm, rows, 'all cells')}")
    return notes


def _intervals(level: str, one: bool, several: bool) -> str:
    """What the intervals are for. one, several: whether there are cells of one seed, and of more."""
    if one and not several:
        return f"Value of one seed ± half width of its {level} interval, for other conversations alone (kvshot_ds/metrics.py, over_seeds)."
    said = f"Mean over seeds ± half width of its {level} interval, for other seeds and other conversations (kvshot_ds/metrics.py, over_seeds)"
    return f"{said}; of a cell with one seed, for other conversations alone." if one else f"{said}."


def _which(some: Sequence[Row], among: Sequence[Row], every: str) -> str:
    """The names of some rows; `every` where they are all of several."""
    return every if len(some) == len(among) > 1 else ", ".join(row.name for row in some)


def _sizes(row: Row) -> tuple[str, ...]:
    seeds = str(len(row.seeds)) + (f" of {len(row.seeds) + len(row.missing)}" if row.missing else "")
    steps, tokens, rows = (_count(row.sizes[size]) + (" ≠" if size in row.unequal else "") for size in SIZES)
    return seeds, _count(row.parameters), _count(row.train_flops), tokens, steps, rows


def _early_page(found: Early, form: Form) -> _Page:
    head = ("sweep", "step", "rung", "cells", "seeds", "τ", "best at the end", "its rank now", "go on", "it goes on")
    rows = [
        (
            look.sweep, f"{look.step:,}", "yes" if look.rung else "", str(look.cells), str(len(look.seeds)), "-" if look.tau is None else f"{look.tau:+.2f}",
            look.best, str(look.rank), str(look.kept), "yes" if look.survives else "NO",
        )
        for look in found.looks
    ]  # fmt: skip
    how = "; ".join(f"{sweep}: {metric}, reduction {found.reductions[sweep]:g}" for sweep, metric in found.metrics.items())
    notes = [
        f"τ: Kendall's rank correlation between the cells' means over seeds at this look and at their last one ({how}). "
        "It goes on: halving at this look would have kept the cell that is best at the end.",
        *(f"Left out: {what}" for what in found.left_out),
    ]
    blocks = (_Block("Rank of the cells at each look, against the end", 2, (head, *rows)),)
    return _Page(_origin(found.command, form, found.digest), f"Early rank, sweep {', '.join(found.metrics)}", blocks, tuple(notes))


def _text(page: _Page) -> str:
    blocks = ([block.title, *lines] for block in page.blocks for lines in _fitting(block))
    notes = (textwrap.fill(note, _WIDTH, subsequent_indent="  ") for note in page.notes)
    return "\n".join([page.heading, *(line for block in blocks for line in ("", *block)), "", *notes])


def _fitting(block: _Block) -> Iterator[list[str]]:
    """The lines of the table, or of several of fewer columns, so that each fits a terminal."""
    widths = [2 + max(map(len, column)) for column in zip(*block.rows, strict=True)]
    keys = range(block.keys)
    taken: list[int] = []
    for column in range(block.keys, len(widths)):
        if taken and sum(widths[i] for i in (*keys, *taken, column)) - 2 > _WIDTH:
            yield aligned([[row[i] for i in (*keys, *taken)] for row in block.rows])
            taken = []
        taken.append(column)
    yield aligned([[row[i] for i in (*keys, *taken)] for row in block.rows])


def _markdown(page: _Page) -> str:
    def plain(text: str) -> str:
        return re.sub(r"([\\|*_`<\[])", r"\\\1", text)

    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(map(plain, cells))} |"

    lines = [f"<!-- {page.origin} -->", "", plain(page.heading)]
    for block in page.blocks:
        head, *rows = block.rows
        lines += ["", f"**{plain(block.title)}**", "", line(head), "|" + " --- |" * len(head), *map(line, rows)]
    return "\n".join([*lines, "", *(f"- {plain(note)}" for note in page.notes)])


def _latex(page: _Page) -> str:
    """One table environment for each block; needs the booktabs package alone."""
    lines = [f"% {page.origin}", r"% \usepackage{booktabs}"]
    for block in page.blocks:
        head, *rows = ([_escaped(cell) for cell in row] for row in block.rows)
        lines += [r"\begin{table}[htbp]", r"\centering\footnotesize\setlength{\tabcolsep}{3pt}", rf"\caption{{{_escaped(f'{page.heading}. {block.title}.')}}}"]
        lines += [rf"\begin{{tabular}}{{l{'r' * (len(head) - 1)}}}", r"\toprule", " & ".join(head) + r" \\", r"\midrule"]
        lines += [*(" & ".join(row) + r" \\" for row in rows), r"\bottomrule", r"\end{tabular}", r"\end{table}"]
    return "\n".join([*lines, *(rf"\par\noindent{{\footnotesize {_escaped(note)}\par}}" for note in page.notes)])


def _escaped(text: str) -> str:
    return "".join(_LATEX.get(c, c) for c in text)


def _csv(records: Sequence[Mapping[str, Any]]) -> str:
    out = io.StringIO()
    columns = list(dict.fromkeys(name for record in records for name in record))
    writer = csv.DictWriter(out, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return out.getvalue().removesuffix("\n")


def _records(table: Table) -> list[dict[str, Any]]:
    """A cell each; every number as it is."""
    most = max(row.steps for row in table.rows)
    statistics = [*(f"alpha_{k}" for k in range(most)), "mat", "mat_joint", "retention"]
    found = []
    for row in table.rows:
        record: dict[str, Any] = {"sweep": row.sweep, "cell": row.name, **{f"axis.{axis}": row.labels.get(axis) for axis in table.axes}}
        record |= {"control": row.control, "warm_start": row.warm, "baseline": row is table.rows[table.baseline]}
        record |= {"seeds": len(row.seeds), "seeds_measured": " ".join(map(str, row.seeds))}
        record |= {"seeds_missing": "; ".join(f"{m.seed}: {m.why}" for m in row.missing), "draft_steps": row.steps}
        record |= {"parameters": row.parameters, "train_flops_per_token": row.train_flops, "draft_flops_per_step": row.draft_flops, **row.sizes}
        record |= {"unequal_to_baseline": " ".join(size for size in SIZES if size in row.unequal)}
        for name in statistics:
            record |= _columns(name, row.values.get(name))
        record |= {"difference_draft_steps": row.common_steps or None}
        for name in ("mat", "mat_joint", *(f"alpha_{k}" for k in range(max(row.common_steps for row in table.rows)))):
            difference = row.differences.get(name)
            record |= _columns(f"difference_{name}", difference.spread if difference else None)
            record |= {f"difference_{name}_seeds": difference.spread.seeds if difference else None}
            record |= {f"difference_{name}_excludes_0": difference.excludes if difference else None}
        found.append(record)
    return found


def _early_records(found: Early) -> list[dict[str, Any]]:
    return [
        {
            "sweep": look.sweep, "metric": found.metrics[look.sweep], "reduction": found.reductions[look.sweep], "step": look.step, "rung": look.rung,
            "cells": look.cells, "seeds": " ".join(map(str, look.seeds)), "kendall_tau": look.tau, "best_at_end": look.best, "rank_now": look.rank,
            "kept": look.kept, "survives": look.survives,
        }
        for look in found.looks
    ]  # fmt: skip


def _columns(name: str, spread: Spread | None) -> dict[str, float | None]:
    parts = (spread.value, spread.low, spread.high, spread.sd) if spread else (None,) * 4
    return dict(zip((name, f"{name}_low", f"{name}_high", f"{name}_sd"), parts, strict=True))


def _spread(found: Spread | None, sign: str = "") -> str:
    if found is None or found.value is None:
        return "-"
    half = f" ± {(found.high - found.low) / 2:.3f}" if found.low is not None and found.high is not None else ""
    return f"{found.value:{sign}.3f}{half}"


def _difference(found: Difference | None) -> str:
    """- where the cell has fewer draft steps."""
    if found is None:
        return "-"
    return _spread(found.spread, "+") + (" *" if found.excludes else "")


def _count(value: float | None) -> str:
    """Three digits and a unit."""
    if value is None:
        return "-"
    for size, unit in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if value >= size:
            return f"{value / (1e3 if unit == 'k' else size):.4g}{unit}"
    return f"{value:,.4g}"


def _alpha(k: int) -> str:
    return f"α{str(k).translate(_SUBSCRIPTS)}"


def _cut(text: str, longest: int | None) -> str:
    return text if longest is None or len(text) <= longest else f"{text[: longest - 1]}…"
