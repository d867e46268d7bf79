"""The paper's main table beside ours: another target, so ordering and shape may be compared and levels may not."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from scipy import stats

from kvshot_ds.report.blocks import Block, Cell, Figure, LegendItem, Panel, Row, Table, Text, alpha_name, number, padded, shown, signed
from kvshot_ds.report.cells import Group, mean, page_styles
from kvshot_ds.report.choice import denser, random_gate
from kvshot_ds.report.families import CROSS_ONLY, FAMILIES, NO_TARGET
from kvshot_ds.report.figures import Chart, Series

_NOTE = (
    "The paper's rows are Qwen3-8B, trained on about 70,000 ShareGPT conversations for 3 epochs, one seed. The rows here are another target trained on what is "
    "said above. Compare the order of the drafters and the shape of the curves; never the levels."
)


@dataclass(frozen=True)
class PaperRow:
    """One row of Table 5 of arXiv 2604.26412."""

    family: str
    depth: int
    variant: str
    alpha: tuple[float, ...]
    mat: float
    retention: float

    @property
    def label(self) -> str:
        name = FAMILIES[self.family].name if self.family in FAMILIES else self.family.replace("_", "-")
        return f"{name} · depth {self.depth} · {self.variant}"


@dataclass(frozen=True)
class Ours:
    """A measured cell: means over its seeds, of their values in eval.json. style: in this section."""

    group: Group
    style: int
    alpha: tuple[float | None, ...]
    mat: float | None
    retention: float | None

    @property
    def seeds(self) -> str:
        measured = [run for run in self.group.runs if run.evaluation]
        return f"mean of {len(measured)} seeds" if len(measured) > 1 else ""

    @property
    def label(self) -> str:
        """What it is, where its name does not say so."""
        words = self.group.runs[0].label
        return ", ".join(part for part in ("" if words == self.group.name else words, self.seeds) if part)


@dataclass(frozen=True)
class Matched:
    """A cell and the paper's row of its kind."""

    ours: Ours
    row: PaperRow


@cache
def paper_data() -> dict[str, Any]:
    """The paper's numbers, as they ship with the package. Not to be changed by who reads them."""
    data: dict[str, Any] = json.loads((resources.files(__package__) / "paper_results.json").read_text(encoding="utf-8"))
    return data


def paper_rows() -> tuple[PaperRow, ...]:
    """Table 5."""
    return tuple(PaperRow(r["family"], r["depth"], r["variant"], tuple(r["alpha"]), r["mat"], r["retention"]) for r in paper_data()["stepwise"])


def paper_row(family: str, depth: int, variant: str) -> PaperRow:
    """One row of Table 5. Raises LookupError if the paper has none such."""
    found = next((row for row in paper_rows() if (row.family, row.depth, row.variant) == (family, depth, variant)), None)
    if found is None:
        raise LookupError(f"Table 5 has no {family} of depth {depth}, {variant}")
    return found


def counterpart(group: Group, rows: tuple[PaperRow, ...]) -> PaperRow | None:
    """The paper's row of the same family, depth and injection, started alike (from scratch or warm); None for what the paper does not have:
    block-wise drafters, the last layer alone, other projectors, training without drift, other starts of the gate, a stronger signal for the KV branch."""
    drafter = group.drafter
    if drafter is None or drafter.last_hidden or drafter.controls - {NO_TARGET, CROSS_ONLY} or denser(group):
        return None
    kv = getattr(drafter.config, "kv", None)
    if kv is not None and (kv.projector != "linear" or kv.qk_norm):
        return None
    if drafter.family == "hybrid" and CROSS_ONLY not in drafter.controls and drafter.config and not random_gate(group):
        return None
    family = "cross_only" if CROSS_ONLY in drafter.controls else drafter.family
    started = "warm_start" if drafter.warm_start else "scratch"
    variant = {"hidden_only": "eagle3", "hybrid": started, "cross_only": started}.get(family, drafter.injection)
    return next((r for r in rows if (r.family, r.depth, r.variant) == (family, drafter.depth, variant)), None)


def measured_cells(groups: Sequence[Group]) -> list[Ours]:
    """The cells that were evaluated."""
    out, paint = [], page_styles(groups)
    for group in groups:
        if found := [run.evaluation for run in group.runs if run.evaluation and run.evaluation.alpha]:
            steps = min(len(e.alpha) for e in found)
            alpha = tuple(mean(e.alpha[k].interval.value for e in found) for k in range(steps))
            out.append(Ours(group, paint[group], alpha, mean(e.mat.value for e in found), mean(e.retention.value for e in found)))
    return out


def paper_blocks(groups: Sequence[Group], target: str) -> list[Block]:
    """Two charts, the table, and the two orders by MAT in words with how well they agree."""
    rows, ours = paper_rows(), measured_cells(groups)
    matched = chosen([Matched(cell, row) for cell in ours if (row := counterpart(cell.group, rows))])
    blocks: list[Block] = [Text(_NOTE, "note")]
    if matched:
        blocks += [Text(_orders(matched)), Text(agreement(matched)), _figure(matched, target)]
    return [*blocks, _table(ours, rows, target)]


def _orders(matched: list[Matched]) -> str:
    paper = " > ".join(f"{m.row.label} ({number(m.row.mat, 2)})" for m in sorted(matched, key=lambda m: -m.row.mat))
    here = " > ".join(f"{m.ours.group.name} ({number(m.ours.mat, 2)})" for m in sorted(matched, key=lambda m: -(m.ours.mat or 0)))
    which = "By MAT, of the drafters that both have (of several cells the one with the most seeds, then with the most data)."
    return f"{which} Paper: {paper}. Here: {here}. The order is by value alone; intervals stand in the sections above."


def chosen(matched: Sequence[Matched]) -> list[Matched]:
    """One cell for each row of the paper: of several the one with the most seeds, then the one with the most data."""
    best = {m.row: m for m in sorted(matched, key=lambda m: (len(m.ours.group.runs), m.ours.group.options.get("max_conversations") or math.inf))}
    return [m for m in matched if best[m.row] is m]


def agreement(matched: list[Matched]) -> str:
    """Kendall's tau-b between the two orders by MAT, over the rows of the paper that have a counterpart."""
    if len(matched) < 3:
        return f"How well the two orders agree is not said of {len(matched)} common row{'s' if len(matched) > 1 else ''}: it takes three."
    values = [(m.row.mat, m.ours.mat) for m in matched if m.ours.mat is not None]
    found = stats.kendalltau([a for a, _ in values], [b for _, b in values])
    pairs = [(a, b) for i, a in enumerate(values) for b in values[:i]]
    same = sum((a[0] - b[0]) * (a[1] - b[1]) > 0 for a, b in pairs)
    words = f"Agreement of the two orders over {len(values)} common rows: Kendall's τ_b = {signed(float(found.statistic), 2)} (exact p = {found.pvalue:.2g})"
    return f"{words}; {same} of {len(pairs)} pairs stand in the same order. Of levels nothing is said."


def _figure(matched: list[Matched], target: str) -> Figure:
    theirs = [Series(m.row.label, m.ours.style, tuple(range(len(m.row.alpha))), m.row.alpha) for m in matched]
    ours = [Series(m.ours.group.name, m.ours.style, tuple(range(len(m.ours.alpha))), m.ours.alpha) for m in matched]
    titled = (("Paper: Qwen3-8B", theirs), (f"Here: {target}", ours))
    charts = [Chart("draft step k", "αₖ", tuple(series), f"{title}: step-wise acceptance by draft step.", integer_x=True) for title, series in titled]
    panels = tuple(Panel(title, chart) for (title, _), chart in zip(titled, charts, strict=True))
    steps = max(len(s.y) for s in [*theirs, *ours])
    rows = tuple(Row((Cell(s.label), Cell(title), *padded([shown(y) for y in s.y], steps)), style=s.style) for title, series in titled for s in series)
    data = Table("Step-wise acceptance, paper and here", ("drafter", "where", *map(alpha_name, range(steps))), rows, words=2)
    legend = tuple(LegendItem(f"{m.ours.group.name} (paper: {m.row.label})", m.ours.style) for m in matched)
    return Figure("paper-alpha", "Shape of αₖ in the paper and here. The vertical axes differ.", panels, legend, data)


def _table(ours: list[Ours], rows: tuple[PaperRow, ...], target: str) -> Table:
    """The paper's rows, each followed by ours of the same kind; ours without a counterpart at the end."""
    steps = max(len(r) for r in [*(row.alpha for row in rows), *(cell.alpha for cell in ours)])
    out: list[Row] = []
    for row in (*rows, None):
        if row:
            alpha = padded([shown(a) for a in row.alpha], steps)
            out.append(Row((Cell(row.label), Cell("paper, Qwen3-8B"), *alpha, shown(row.mat, 2), shown(row.retention)), "paper"))
        for cell in ours:
            if counterpart(cell.group, rows) == row:
                cells = (Cell(cell.group.name, cell.label), Cell(f"here, {target}"), *padded([shown(a) for a in cell.alpha], steps))
                out.append(Row((*cells, shown(cell.mat, 2), shown(cell.retention)), "ours", cell.style))
    head = ("drafter", "target", *map(alpha_name, range(steps)), "MAT", "retention")
    return Table("Table 5 of arXiv 2604.26412 and the drafters measured here", head, tuple(out), words=2)
