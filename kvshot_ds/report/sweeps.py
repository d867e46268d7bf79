"""A sweep: what was varied, the cells over their seeds, which seeds are missing and why, and what was not alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from kvshot_ds.report import blocks as b
from kvshot_ds.report.baseline import name_of
from kvshot_ds.report.blocks import Block, Cell, Code, Details, Facts, Row, Table, Text
from kvshot_ds.report.bounds import cut
from kvshot_ds.report.bycell import Measure, Plot, Scope, axis_words, cell_name, heading, plotted
from kvshot_ds.report.cells import Group
from kvshot_ds.report.gather import Sweep, SweepCell
from kvshot_ds.report.numbers import Numbers
from kvshot_ds.sweep import compare

_RULE = (
    "Values are means over seeds. Intervals hold the noise of seeds (Student's t) and that of the held-out conversations, which all seeds share; a cell of one "
    "seed has the latter alone. A seed that is missing is listed, not averaged away."
)
_ALIKE = ("steps", "tokens")


def sweep_blocks(scope: Scope, numbers: Mapping[Group, Numbers], differences: Sequence[Block] = ()) -> list[Block]:
    """Everything of one sweep but its axes, training, diagnostics and cost. differences: from its baseline, for the place below the main table."""
    assert scope.sweep
    return [
        Facts(_facts(scope.sweep)),
        *_absent(scope.sweep),
        *_unequal(scope),
        *(
            _alpha(scope, numbers)
            if scope.groups
            else [b.missing(f"held-out acceptance of any trial of sweep {scope.sweep.name}", "sweep run", scope.sweep.folder)]
        ),
        *([_table(scope, numbers), Text(_rule(numbers)), *differences, _trials(scope.sweep)] if scope.groups else []),
    ]


def _rule(numbers: Mapping[Group, Numbers]) -> str:
    """How the intervals are made, and what few seeds do to them."""
    seeds = {n.mat.seeds for n in numbers.values()}
    few = " Where a cell has two seeds its interval is wide because two seeds say little of others, not because of the conversations." if 2 in seeds else ""
    return f"{_RULE}{few}"


def summary(scope: Scope, numbers: Mapping[Group, Numbers], against: compare.Table | str) -> list[str]:
    """Sentences for the top of the page: how much there is, the baseline, which cell has the highest value of each number, and whether it is told apart
    from the baseline."""
    sweep = scope.sweep
    assert sweep
    missing = [t for t in sweep.trials if t.missing]
    done = f"{len(sweep.trials) - len(missing)} of {len(sweep.trials)} trials are measured, in {len(scope.groups)} of {len(sweep.cells)} cells"
    items = [f"{scope.title}: {done}."]
    if not scope.groups:
        return items
    base = None if isinstance(against, str) else against.rows[against.baseline]
    if base:
        items.append(f"The baseline is {name_of(scope, base)}.")
    last = min(len(n.alpha) for n in numbers.values()) - 1
    of = {"MAT": lambda n: n.mat, "joint MAT": lambda n: n.mat_joint, b.alpha_name(0): lambda n: n.alpha[0], b.alpha_name(last): lambda n: n.alpha[last]}
    for name, get in {**of, "retention": lambda n: n.retention}.items():
        known = [g for g in scope.groups if get(numbers[g]).value is not None]
        if known:
            best = max(known, key=lambda g: get(numbers[g]).value or 0.0)
            value, digits = get(numbers[best]), 2 if "MAT" in name else 3
            seeds, ends = value.seeds, b.bounds(cut(value, name), digits)
            items.append(
                f"Highest {name}, by value: {best.name}, {b.number(value.value, digits)} ({numbers[best].confidence:.0%} interval {ends}, "
                f"{seeds} seed{'s' if seeds > 1 else ''}){_standing(scope, against, best.name, name, last)}."
            )
    return items


def _standing(scope: Scope, against: compare.Table | str, best: str, name: str, last: int) -> str:
    """How the best cell stands to the baseline in the number called `name`; "" where that difference is not taken."""
    statistic = {"MAT": "mat", "joint MAT": "mat_joint", b.alpha_name(0): "alpha_0", b.alpha_name(last): f"alpha_{last}"}.get(name)
    if isinstance(against, str) or statistic is None:
        return ""
    row = next((row for row in against.rows if name_of(scope, row) == best), None)
    if row is None or row is against.rows[against.baseline]:
        return "" if row is None else ", the baseline itself"
    if statistic not in row.differences:
        return "; no difference from the baseline is known"
    difference = row.differences[statistic]
    found = difference.spread
    few = {1: "one seed alone, so it says nothing of other seeds", 2: "2 seeds, which make it wide"}
    seeds = few.get(found.seeds, f"{found.seeds} seeds")
    excludes = "excludes" if difference.excludes else "does not exclude"
    return f"; less the baseline {b.signed(found.value)}, interval {b.bounds(found)}, which {excludes} 0 ({seeds})"


def _facts(sweep: Sweep) -> tuple[tuple[str, str], ...]:
    axes: dict[str, dict[str, None]] = {}
    for cell in sweep.cells:
        for axis, value in cell.labels.items():
            axes.setdefault(axis_words(axis), {})[value] = None
    options = sweep.recipe.sweep
    match = "equal steps: smaller data is passed over more often" if options.match == "steps" else "equal epochs: steps differ with the data"
    seeds = ", ".join(map(str, dict.fromkeys(t.trial.seed for t in sweep.trials)))
    controls = {t.trial.name: t.trial.control for t in sweep.trials if t.trial.control}
    return (
        *((axis, ", ".join(values)) for axis, values in axes.items()),
        ("seeds", seeds),
        ("trials", f"{len(sweep.trials)}, of {len(sweep.cells)} cells; {sum(t.state.reused for t in sweep.trials)} of them trained before and taken over"),
        ("trained alike", match),
        *((("controls", "; ".join(dict.fromkeys(controls.values()))),) if controls else ()),
    )


def _lost(cell: SweepCell, sweep: Sweep) -> dict[int, str]:
    """The seeds of the sweep that the cell has no result of, and why."""
    lost = {t.trial.seed: t.missing for t in cell.trials if t.missing}
    return lost | {seed: "no trial of this sweep" for seed in sweep.recipe.sweep.seeds if seed not in {t.trial.seed for t in cell.trials}}


def _absent(sweep: Sweep) -> list[Block]:
    """Every seed without a result, with its reason, and the ends of the logs."""
    names = {(cell.label, t.trial.seed): t.trial.name for cell in sweep.cells for t in cell.trials}
    lost = [(cell, seed, why) for cell in sweep.cells for seed, why in sorted(_lost(cell, sweep).items())]
    if not lost:
        return []
    rows = [Row((Cell(cell_name(cell, sweep), names.get((cell.label, seed), "")), Cell(str(seed), value=seed), Cell(why))) for cell, seed, why in lost]
    command = b.missing(f"{len(lost)} seed{'s' if len(lost) > 1 else ''} of cells of sweep {sweep.name}", "sweep run", sweep.folder)
    logs = [Details(f"End of the log of {t.trial.name}", (Code(t.state.log),)) for t in sweep.trials if t.missing and t.state.log]
    return [command, Table("Seeds without a result", ("cell", "seed", "why"), tuple(rows), words=3), *logs]


def _unequal(scope: Scope) -> list[Block]:
    """Cells whose steps or tokens are not those of most."""
    said = []
    for key in _ALIKE:
        values = {g: _trained(g, key) for g in scope.groups}
        common = _common(list(values.values()))
        odd = [f"{g.name} ({', '.join(map(b.integer, v))})" for g, v in values.items() if v != common]
        if odd and common:
            said.append(f"{key}: most cells {', '.join(map(b.integer, common))}; {'; '.join(odd)}")
    if len({_init(g) for g in scope.groups}) > 1:
        said.append("initialisation, named with each cell")
    if any(len({run.conversations.keys for run in g.runs if run.conversations}) > 1 for g in scope.groups):
        said.append("held-out conversations of the seeds of a cell: those that all have count")
    return [Text(f"Not alike in this sweep: {'. '.join(f'{s[0].upper()}{s[1:]}' for s in said)}.", "note")] if said else []


def _trained(group: Group, key: str) -> tuple[float, ...]:
    """A count of train.json: its values over the seeds, ascending."""
    return tuple(sorted({run.train[key] for run in group.runs if run.train and run.train.get(key) is not None}))


def _init(group: Group) -> str:
    return heading(group).sub


def _common(values: list[tuple[float, ...]]) -> tuple[float, ...]:
    return Counter(values).most_common(1)[0][0] if values else ()


def _alpha(scope: Scope, numbers: Mapping[Group, Numbers]) -> list[Block]:
    confidence = next(iter(numbers.values())).confidence
    caption = f"Step-wise acceptance αₖ on held-out rows, mean over seeds, with {confidence:.0%} intervals over seeds and conversations."
    if len({bool(g.drafter and g.drafter.blockwise) for g in scope.groups}) > 1:
        caption += " A step-by-step drafter is given the true tokens before step k; a block-wise one makes all its proposals from the token at t + 1 alone."
    alpha = Measure("αₖ", "step-wise acceptance αₖ", lambda g: tuple((k, s) for k, s in enumerate(numbers[g].alpha)))
    return list(plotted(Plot("alpha-cells", caption, "draft step k", (alpha,), integer_x=True), scope))


def _table(scope: Scope, numbers: Mapping[Group, Numbers]) -> Table:
    """The main table: a row for each cell, those without any seed included."""
    assert scope.sweep
    steps = max(len(n.alpha) for n in numbers.values())
    groups = {g.name: g for g in scope.groups}
    common = {key: _common([_trained(g, key) for g in scope.groups]) for key in _ALIKE}
    rows = []
    for cell in scope.sweep.cells:
        name = cell_name(cell, scope.sweep)
        absent, count = sorted(_lost(cell, scope.sweep)), len(cell.runs)
        seeds = Cell(f"{count} of {count + len(absent)}" if absent else str(count), f"without {', '.join(map(str, absent))}" if absent else "")
        if name not in groups:
            rows.append(Row((Cell(name, "nothing measured"), *b.padded([seeds], steps + 8))))
            continue
        g = groups[name]
        n = numbers[g]
        trained = [_count(_trained(g, key), common[key]) for key in _ALIKE]
        size = b.millions(g.drafter.parameters if g.drafter else None)
        alphas = b.padded([b.measured(s, of="α") for s in n.alpha], steps)
        totals = (b.measured(n.mat, 2, "MAT"), b.measured(n.mat_joint, 2, "MAT"), b.measured(n.retention, of="retention"))
        rows.append(Row((heading(g), replace(seeds, value=len(g.runs)), *alphas, *totals, size, *trained, b.counted(n.conversations)), style=g.style))
    head = ("cell", "seeds", *map(b.alpha_name, range(steps)), "MAT", "joint MAT", "retention", "parameters", "steps", "tokens", "conversations")
    return Table("Cells, held-out: mean over seeds above, interval below", head, tuple(rows))


def _count(values: tuple[float, ...], common: tuple[float, ...]) -> Cell:
    """A count of training, marked where it is not that of most cells."""
    text = " to ".join(b.integer(v) for v in dict.fromkeys((values[0], values[-1]))) if values else "–"
    return Cell(text, "not as most" if values != common else "", values[0] if len(values) == 1 else None)


def _trials(sweep: Sweep) -> Details:
    """Each trial as `kvshot eval` has it, its interval over conversations."""
    steps = max((len(run.evaluation.alpha) for cell in sweep.cells for run in cell.runs if run.evaluation), default=0)
    rows = []
    for cell in sweep.cells:
        for t in cell.trials:
            e = t.run.evaluation if t.run else None
            start = (Cell(cell_name(cell, sweep), t.trial.name), Cell(str(t.trial.seed), value=t.trial.seed))
            if e is None:
                rows.append(Row((*start, *b.padded([], steps + 3))))
                continue
            alphas = b.padded([b.measured(r.interval, of="α") for r in e.alpha], steps)
            rows.append(Row((*start, *alphas, b.measured(e.mat, 2, "MAT"), b.measured(e.mat_joint, 2, "MAT"), b.measured(e.retention, of="retention"))))
    head = ("cell", "seed", *map(b.alpha_name, range(steps)), "MAT", "joint MAT", "retention")
    return Details(f"Every trial of sweep {sweep.name}", (Table("Trials: value above, interval over held-out conversations below", head, tuple(rows)),))
