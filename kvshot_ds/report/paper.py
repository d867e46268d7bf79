"""The paper's table beside ours: another target, so ordering and shape may be compared and levels may not."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources

from kvshot_ds.report.blocks import Block, Cell, Figure, LegendItem, Panel, Row, Section, Table, Text, alpha_name, number, padded, shown
from kvshot_ds.report.families import CROSS_ONLY, FAMILIES, NO_TARGET
from kvshot_ds.report.figures import Chart, Series
from kvshot_ds.report.gather import Evaluation, Run, evaluated

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
class Matched:
    """A run and the paper's row of its kind."""

    run: Run
    ours: Evaluation
    row: PaperRow


def paper_rows() -> tuple[PaperRow, ...]:
    """Table 5, as it ships with the package."""
    data = json.loads((resources.files(__package__) / "paper_results.json").read_text(encoding="utf-8"))
    return tuple(PaperRow(r["family"], r["depth"], r["variant"], tuple(r["alpha"]), r["mat"], r["retention"]) for r in data["stepwise"])


def counterpart(run: Run, rows: tuple[PaperRow, ...]) -> PaperRow | None:
    """The paper's row of the same family, depth and injection, started alike (from scratch or warm); None for what the paper does not have:
    block-wise drafters, the last layer alone, other projectors, training without drift."""
    drafter = run.drafter
    if drafter is None or drafter.last_hidden or drafter.controls - {NO_TARGET, CROSS_ONLY}:
        return None
    kv = getattr(drafter.config, "kv", None)
    if kv is not None and (kv.projector != "linear" or kv.qk_norm):
        return None
    family = "cross_only" if CROSS_ONLY in drafter.controls else drafter.family
    started = "warm_start" if drafter.warm_start else "scratch"
    variant = {"hidden_only": "eagle3", "hybrid": started, "cross_only": started}.get(family, drafter.injection)
    return next((r for r in rows if (r.family, r.depth, r.variant) == (family, drafter.depth, variant)), None)


def paper_section(runs: tuple[Run, ...], target: str) -> Section:
    """Two charts, one table, and the two orders by MAT in words."""
    rows, ours = paper_rows(), evaluated(runs)
    matched = [Matched(run, e, row) for run, e in ours if (row := counterpart(run, rows))]
    blocks: list[Block] = [Text(_NOTE, "note")]
    if matched:
        blocks += [Text(_orders(matched)), _figure(matched, target)]
    return Section("paper", "Beside the paper (Qwen3-8B, another target)", [*blocks, _table(ours, rows, target)])


def _orders(matched: list[Matched]) -> str:
    paper = " > ".join(f"{m.row.label} ({number(m.row.mat, 2)})" for m in sorted(matched, key=lambda m: -m.row.mat))
    here = " > ".join(f"{m.run.name} ({number(m.ours.mat.value, 2)})" for m in sorted(matched, key=lambda m: -(m.ours.mat.value or 0)))
    return f"By MAT, of the drafters that both have. Paper: {paper}. Here: {here}. The order is by value alone; intervals stand in the sections above."


def _figure(matched: list[Matched], target: str) -> Figure:
    theirs = [Series(m.row.label, m.run.style, tuple(range(len(m.row.alpha))), m.row.alpha) for m in matched]
    ours = [Series(m.run.name, m.run.style, tuple(r.k for r in m.ours.alpha), tuple(r.interval.value for r in m.ours.alpha)) for m in matched]
    titled = (("Paper: Qwen3-8B", theirs), (f"Here: {target}", ours))
    charts = [Chart("draft step k", "αₖ", tuple(series), f"{title}: step-wise acceptance by draft step.", integer_x=True) for title, series in titled]
    panels = tuple(Panel(title, chart) for (title, _), chart in zip(titled, charts, strict=True))
    steps = max(len(s.y) for s in [*theirs, *ours])
    rows = tuple(Row((Cell(s.label), Cell(title), *padded([shown(y) for y in s.y], steps)), style=s.style) for title, series in titled for s in series)
    data = Table("Step-wise acceptance, paper and here", ("drafter", "where", *map(alpha_name, range(steps))), rows, words=2)
    legend = tuple(LegendItem(f"{m.run.name} (paper: {m.row.label})", m.run.style) for m in matched)
    return Figure("paper-alpha", "Shape of αₖ in the paper and here. The vertical axes differ.", panels, legend, data)


def _table(ours: list[tuple[Run, Evaluation]], rows: tuple[PaperRow, ...], target: str) -> Table:
    """The paper's rows, each followed by ours of the same kind; ours without a counterpart at the end."""
    steps = max(len(r) for r in [*(row.alpha for row in rows), *(e.alpha for _, e in ours)])
    out: list[Row] = []
    for row in (*rows, None):
        if row:
            alpha = padded([shown(a) for a in row.alpha], steps)
            out.append(Row((Cell(row.label), Cell("paper, Qwen3-8B"), *alpha, shown(row.mat, 2), shown(row.retention)), "paper"))
        for run, e in ours:
            if counterpart(run, rows) == row:
                cells = (Cell(run.name, run.label), Cell(f"here, {target}"), *padded([shown(r.interval.value) for r in e.alpha], steps))
                out.append(Row((*cells, shown(e.mat.value, 2), shown(e.retention.value)), "ours", run.style))
    head = ("drafter", "target", *map(alpha_name, range(steps)), "MAT", "retention")
    return Table("Table 5 of arXiv 2604.26412 and the drafters measured here", head, tuple(out), words=2)
