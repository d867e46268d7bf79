"""The paper's three predictions and two contrasts, put to the cells that were measured: which cells, which differences."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from kvshot_ds.config import EvalConfig
from kvshot_ds.metrics import Statistic, alpha_at, mat_of, retention_of
from kvshot_ds.report.blocks import alpha_name, number, signed
from kvshot_ds.report.cells import Group, difference, of_values
from kvshot_ds.report.choice import Side, by_depth, by_gate, by_reading, by_signal, denser, plain
from kvshot_ds.report.gather import Run
from kvshot_ds.report.paper import paper_data, paper_row
from kvshot_ds.report.verdicts import Need, Prediction, each

# What is too small to matter: of acceptance, retention, MAT, cosine, mean gate [1], and of the ratio of two groups' gradients [octaves]
MARGINS = {"alpha": 0.005, "retention": 0.01, "mat": 0.02, "cosine": 0.02, "gate": 0.02, "octaves": 0.1}
EARLY = 0.25  # of the steps: by then a gate has closed, if it does
Values = Callable[[Run], float | None]


def predictions(groups: Sequence[Group], options: EvalConfig) -> tuple[Prediction, ...]:
    """All five, whatever was measured."""
    return tuple(make(groups, options) for make in (query_estimation, sparse_gradients, gate_starvation, first_step, long_range))


def query_estimation(groups: Sequence[Group], options: EvalConfig) -> Prediction:
    confidence, found = each(options.confidence, 2), by_depth(groups)
    lack = "KV-only cells of at least two depths, otherwise trained alike"
    shallow, deep = paper_row("kv_only", 1, "linear_rope"), paper_row("kv_only", 4, "linear_rope")
    paper = f"depth 4 less depth 1: MAT {number(deep.mat, 2)} − {number(shallow.mat, 2)} = {signed(deep.mat - shallow.mat, 2)}"
    if found is None:
        needs = (
            Need("cosine of the queries, deeper less shallower", 1, MARGINS["cosine"], None, lack, "not measured"),
            Need("MAT, deeper less shallower", 1, MARGINS["mat"], None, lack, paper),
        )
    else:
        cosine = _paired_values(
            found, query_cosine, "cosine of the queries", "query estimation of {} (capture with query layers, then kvshot diagnose)", confidence
        )
        needs = (
            _need(f"cosine of the queries, {_less(found)}", "cosine", cosine, "not measured"),
            _rate(found, "MAT", mat_of, "mat", options, confidence, paper),
        )
    cells = (
        "the deepest and the shallowest KV-only cell among those trained alike; cosine of the last draft layer's queries with the target's, mean over "
        "steps by rows"
    )
    text = "A shallow KV-only drafter cannot estimate the target's queries: with depth they come closer, and more tokens are accepted."
    return Prediction("Query estimation", text, cells, needs, options.confidence)


def sparse_gradients(groups: Sequence[Group], options: EvalConfig) -> Prediction:
    pairs = by_signal(groups)
    readers = [g for g in (*plain(groups, "kv_only"), *plain(groups, "hybrid")) if not denser(g)]
    measured = max(readers, key=lambda g: sum(gradient_octaves(run) is not None for run in g.runs), default=None)
    confidence = each(options.confidence, 1 + max(1, len(pairs)))
    what = "gradient per weight norm of the draft-side K and V projections over that of the self path or, without one, the MLP"
    if measured is None:
        first = Need(f"{what} [octaves]", -1, MARGINS["octaves"], None, "a KV-only or hybrid cell with kvshot diagnose", "not measured")
    else:
        values = _values(measured, gradient_octaves, f"gradient flow of {measured.name} (kvshot diagnose)", confidence)
        first = _need(f"{what}: {measured.name} [octaves]", "octaves", values, "not measured", -1)
    rows = {row["variant"]: row["mat"] for row in paper_data()["kv_only_depth2_ablations"]}
    scaled, offline = rows["offline TTT, KV-projection gradient x50"], rows["offline TTT"]
    paper = f"gradient × 50, offline: MAT {number(scaled, 2)} − {number(offline, 2)} = {signed(scaled - offline, 2)}"
    helps = [_rate(pair, "MAT", mat_of, "mat", options, confidence, paper) for pair in pairs]
    lack = "a cell with train.objective.kv_gradient_scale, kv_branch_weight or query_distill_weight, beside the same one without"
    helps = helps or [Need("MAT with the stronger signal less MAT without", 1, MARGINS["mat"], None, lack, paper)]
    cells = (
        "the KV-only or hybrid cell with the most diagnosed seeds; among those trained alike and with the most seeds every cell with a stronger signal for "
        "the KV branch, with the same cell without it"
    )
    text = "The draft-side K and V projections receive little gradient, so they stay behind; scaling their gradient or a denser signal helps."
    return Prediction("Sparse gradients", text, cells, (first, *helps), options.confidence)


def gate_starvation(groups: Sequence[Group], options: EvalConfig) -> Prediction:
    closed, pairs = by_gate(groups)
    confidence = each(options.confidence, 1 + max(1, len(pairs)))
    means = paper_data()["gate_mean"]
    paper = f"{means['start']:g} → {means['after_few_thousand_steps']:g} after a few thousand steps, then {means['at_60k_to_71k']:g}"
    what = f"mean gate after {EARLY:.0%} of the steps less at the first logged step"
    if closed is None:
        first = Need(what, -1, MARGINS["gate"], None, "a hybrid cell from scratch whose gate starts at random", paper)
    else:
        values = _values(closed, gate_change, f"gate/mean of {closed.name} at two points of its first quarter (train.log_every)", confidence)
        first = _need(f"{what}: {closed.name}", "gate", values, paper, -1)
    last = min((len(r.evaluation.alpha) for pair in pairs for g in (pair.first, pair.second) for r in g.runs if r.evaluation), default=7) - 1
    later = [_late(pair, alpha_name(last), alpha_at(last), "alpha", options, confidence, "not tried", last) for pair in pairs]
    lack = "a hybrid whose gate starts open (bias above 0), is held open or has a floor, trained like the one whose gate starts at random"
    later = later or [Need("last αₖ, opened gate less random gate", 1, MARGINS["alpha"], None, lack, "not tried")]
    cells = "the hybrid whose gate starts at random, and each one alike but for a gate that starts open, is held open for a while, or cannot close"
    text = (
        "From a random start the gate closes early in training and the KV branch starves: a gate that starts or is held open ends with higher late-"
        "step acceptance."
    )
    return Prediction("Gate starvation", text, cells, (first, *later), options.confidence)


def first_step(groups: Sequence[Group], options: EvalConfig) -> Prediction:
    hidden, kv = paper_row("hidden_only", 1, "eagle3"), paper_row("kv_only", 4, "linear_rope")
    paper = f"depth 1 less KV-only depth 4: {number(hidden.alpha[0])} − {number(kv.alpha[0])} = {signed(hidden.alpha[0] - kv.alpha[0])}"
    found, confidence = by_reading(groups), each(options.confidence, 1)
    need = (
        _rate(found, "α₀", alpha_at(0), "alpha", options, confidence, paper)
        if found
        else Need("α₀, hidden-only less KV-only", 1, MARGINS["alpha"], None, _READERS, paper)
    )
    return Prediction("First step", "Hidden-only is right more often at the first draft step than KV-only.", _READING, (need,), options.confidence)


def long_range(groups: Sequence[Group], options: EvalConfig) -> Prediction:
    hidden, kv = paper_row("hidden_only", 1, "eagle3"), paper_row("kv_only", 4, "linear_rope")
    papers = [
        f"KV-only depth 4 less hidden-only: {number(a)} − {number(b)} = {signed(a - b)}"
        for a, b in ((kv.retention, hidden.retention), (kv.alpha[-1], hidden.alpha[-1]))
    ]
    found, confidence = by_reading(groups), each(options.confidence, 2)
    if found is None:
        end = alpha_name(min((len(run.evaluation.alpha) for g in groups for run in g.runs if run.evaluation), default=7) - 1)
        missing = ("retention, KV-only less hidden-only", "retention"), (f"{end}, KV-only less hidden-only", "alpha")
        needs = tuple(Need(what, 1, MARGINS[kind], None, _READERS, paper) for (what, kind), paper in zip(missing, papers, strict=True))
    else:
        pair = Side(found.second, found.first)
        last = min((len(r.evaluation.alpha) for g in (pair.first, pair.second) for r in g.runs if r.evaluation), default=7) - 1
        needs = (
            _late(pair, "retention", retention_of, "retention", options, confidence, papers[0], last),
            _late(pair, alpha_name(last), alpha_at(last), "alpha", options, confidence, papers[1], last),
        )
    return Prediction(
        "Long range", "KV-only keeps more of its acceptance over the steps than hidden-only, and ends above it.", _READING, needs, options.confidence
    )


_READERS = "a hidden-only and a KV-only cell, otherwise trained alike"
_READING = "the shallowest hidden-only and the deepest KV-only cell among those trained alike: in the paper the contrast shows from depth 3 on"


def _less(pair: Side) -> str:
    return f"{pair.first.name} less {pair.second.name}"


def _rate(pair: Side, name: str, statistic: Statistic, kind: str, options: EvalConfig, confidence: float, paper: str) -> Need:
    """The difference of a statistic of acceptance."""
    found = difference(pair.first, pair.second, statistic, options, confidence)
    return Need(f"{name}, {_less(pair)}", 1, MARGINS[kind], found.spread, found.missing, paper, found.alone)


def _late(pair: Side, name: str, statistic: Statistic, kind: str, options: EvalConfig, confidence: float, paper: str, last: int) -> Need:
    """The same of what is said of late steps, `last` being the last one measured: a lone step is the first one, and retains itself."""
    found = _rate(pair, name, statistic, kind, options, confidence, paper)
    return found if last else replace(found, spread=None, missing="held-out acceptance at more than one draft step (eval.steps)")


@dataclass(frozen=True)
class Found:
    """Of numbers that are one a seed. missing: what to measure, if there are none."""

    values: tuple[float, ...]
    confidence: float
    missing: str
    alone: tuple[int, ...] = ()


def _need(what: str, kind: str, found: Found, paper: str, sign: Literal[1, -1] = 1) -> Need:
    spread = of_values(found.values, found.confidence) if found.values else None
    return Need(what, sign, MARGINS[kind], spread, "" if spread else found.missing, paper, found.alone)


def _values(group: Group, of: Values, missing: str, confidence: float) -> Found:
    """One number of each seed that has it."""
    values = [(run.seed, of(run)) for run in group.runs]
    alone = tuple(seed for seed, value in values if value is None and seed is not None)
    return Found(tuple(v for _, v in values if v is not None), confidence, missing, alone)


def _paired_values(pair: Side, of: Values, what: str, missing: str, confidence: float) -> Found:
    """Differences of one number of the diagnostics a seed, over the seeds that both cells have it for, taken of the same rows."""
    sides = [{run.seed: run for run in group.runs if of(run) is not None} for group in (pair.first, pair.second)]
    lacking = [group.name for group, side in zip((pair.first, pair.second), sides, strict=True) if not side]
    both = {seed: (run, sides[1][seed]) for seed, run in sides[0].items() if seed in sides[1]}
    seeds = [seed for seed, runs in both.items() if _rows(runs[0]) == _rows(runs[1])]
    alone = tuple(sorted(seed for seed in sides[0].keys() | sides[1].keys() if seed is not None and seed not in seeds))
    lack = missing.format(" and of ".join(lacking)) if lacking else f"{what} of a seed that both cells have{', on the same rows' if both else ''}"
    values = [(of(first), of(second)) for first, second in (both[seed] for seed in seeds)]
    return Found(tuple(a - b for a, b in values if a is not None and b is not None), confidence, lack, alone)


def _rows(run: Run) -> Any:
    """What the run was diagnosed on: conversations, rows, and the draft steps of the queries."""
    queries = part(run, "queries")
    return (run.diagnostics or {}).get("data"), [step["rows"] for step in queries["layers"][-1]["steps"]] if queries else []


def part(run: Run, name: str) -> dict[str, Any] | None:
    """A part of the run's diagnostics; None if it was not taken or does not apply."""
    found = ((run.diagnostics or {}).get("parts") or {}).get(name)
    return found if found and "why" not in found else None


def query_cosine(run: Run) -> float | None:
    """Cosine of the last draft layer's queries with the target's, mean over steps by their rows."""
    if (found := part(run, "queries")) is None or not found["layers"]:
        return None
    steps = [step for step in found["layers"][-1]["steps"] if step["rows"] and step["cosine"]["value"] is not None]
    rows = sum(step["rows"] for step in steps)
    return sum(step["rows"] * step["cosine"]["value"] for step in steps) / rows if rows else None


def gradient_octaves(run: Run) -> float | None:
    """log2 of (gradient norm over weight norm) of the K and V projections, less that of the self path or, without one, of the MLP."""
    if (found := part(run, "gradients")) is None:
        return None
    groups = found["groups"]
    other = next((name for name in ("self", "mlp") if groups.get(name, {}).get("norm")), None)
    if other is None or not groups.get("cross_kv", {}).get("norm"):
        return None
    own, theirs = (groups[name]["norm"] / _weight(groups[name]) for name in ("cross_kv", other))
    return math.log2(own / theirs)


def _weight(group: dict[str, Any]) -> float:
    """Norm of the group's weights; of diagnostics that do not tell it the root of their number, as if all groups' weights were of one size."""
    return float(group.get("weight_norm") or math.sqrt(group["parameters"]))


def gate_change(run: Run) -> float | None:
    """Mean gate after EARLY of the steps less that at the first logged one; None if they are one point, or nothing was logged."""
    points = run.scalars.get("gate/mean", ())
    steps = (run.train or {}).get("steps") or (points[-1][0] if points else 0)
    early = [value for step, value in points if step <= EARLY * steps]
    return early[-1] - early[0] if len(early) > 1 else None
