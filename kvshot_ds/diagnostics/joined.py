"""Queries, gradients and gate over all conversations, as they stand in diagnostics.json."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from kvshot_ds.diagnostics import gate, gradients, queries
from kvshot_ds.diagnostics.subject import Piece, Subject
from kvshot_ds.errors import ConfigError
from kvshot_ds.features.manifest import require
from kvshot_ds.objectives.alignment import plan_rows
from kvshot_ds.objectives.objective import Objective, required_features


def by_query(subject: Subject) -> dict[str, Any]:
    """`queries`: each layer's measures by draft step, means over the rows that were looked at."""
    if why := queries.why_not(subject.objective.drafter, subject.heldout.manifest):
        return {"why": why}
    layers = _by_layer(subject, "queries", queries.measure_queries, queries.QuerySums.joined)

    def step(sums: queries.QuerySums, k: int) -> dict[str, Any]:
        means = {name: subject.mean(getattr(sums, name)[:, k], sums.rows[:, k]) for name in queries.MEASURES}
        return {"k": k, "rows": int(sums.rows[:, k].sum()), **means}

    return {"layers": [{"layer": s.layer, "targets": list(s.targets), "steps": [step(s, k) for k in range(s.rows.shape[1])]} for s in layers]}


def by_gate(subject: Subject) -> dict[str, Any]:
    """`gate`: each layer's gates by draft step."""
    if why := gate.why_not(subject.objective.drafter):
        return {"why": why}
    layers = _by_layer(subject, "gate", gate.measure_gate, gate.GateSums.joined)

    def step(sums: gate.GateSums, k: int, quantiles: Sequence[float]) -> dict[str, Any]:
        rows = sums.rows[:, k].sum()
        named = {str(q): value for q, value in zip(gate.QUANTILES, quantiles, strict=True)} if rows else None
        mean, below = (float(x[:, k].sum() / rows) if rows else None for x in (sums.mean, sums.below))
        return {"k": k, "rows": int(rows), "mean": mean, "quantiles": named, "share_below_0.05": below}

    def layer(sums: gate.GateSums) -> dict[str, Any]:
        quantiles = gate.quantiles(sums.histogram, sums.low, sums.high).tolist()
        return {"layer": sums.layer, "steps": [step(sums, k, q) for k, q in enumerate(quantiles)]}

    return {"layers": [layer(sums) for sums in layers]}


def _by_layer(subject: Subject, what: str, measure: Callable[..., list[Any]], join: Callable[[Sequence[Any]], Any]) -> list[Any]:
    """Of every layer that `measure` finds, its sums over all pieces."""
    found = [measure(subject.objective, *piece) for piece in subject.pieces(what)]
    return [join(parts) for parts in zip(*found, strict=True)]


def by_gradient(subject: Subject) -> dict[str, Any]:
    """`gradients`: of the loss that the drafter was trained with, at all supervised rows."""
    objective, training, manifest = subject.objective, subject.training, subject.heldout.manifest
    plain = objective.config
    try:
        require(manifest, required_features(objective.drafter, training), manifest.target_digest)
    except ConfigError as error:  # the evaluation needs less than an auxiliary loss
        return {"why": str(error)}
    objective.config = training.model_copy(update={"steps": plain.steps, "head_chunk": plain.head_chunk})
    try:
        found = gradients.measure_gradients(objective, map(_planned(objective), subject.pieces("gradients")))
    finally:
        objective.config = plain
    return asdict(found)


def _planned(objective: Objective) -> Callable[[Piece], Piece]:
    """With the rows planned as in training where its drift is that of the target's states."""

    def planned(piece: Piece) -> Piece:
        if objective.config.drift != "offline":
            return piece
        plan = plan_rows(piece.batch.to("cpu"), objective.config.steps, offline=True)
        return Piece(piece.batch, plan.to(piece.plan.valid.device))

    return planned
