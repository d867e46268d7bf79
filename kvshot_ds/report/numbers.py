"""The held-out numbers of a cell over its seeds, by the one rule for intervals over seeds (metrics.over_seeds)."""

from __future__ import annotations

from dataclasses import dataclass

from kvshot_ds.config import EvalConfig
from kvshot_ds.metrics import Spread, alpha_at, joint_at, mat_joint_of, mat_of, retention_of
from kvshot_ds.report.cells import Group, shared, spreads


@dataclass(frozen=True)
class Numbers:
    """alpha, joint: by draft step. conversations: those that all seeds were measured on; rows: supervised at step 0, of one seed. confidence: of the
    intervals."""

    alpha: tuple[Spread, ...]
    joint: tuple[Spread, ...]
    mat: Spread
    mat_joint: Spread
    retention: Spread
    conversations: int
    rows: int
    confidence: float


def numbers_of(group: Group, options: EvalConfig) -> Numbers:
    """Of a cell whose runs all are evaluated, intervals with the confidence of `options`."""
    counts = shared([run.conversations for run in group.runs if run.conversations])
    steps = range(counts[0].den.shape[-1])
    found = spreads(group, [*map(alpha_at, steps), *map(joint_at, steps), mat_of, mat_joint_of, retention_of], options, options.confidence)
    k, (mat, mat_joint, retention) = len(steps), found[-3:]
    rows = int(counts[0].total().den[0])
    return Numbers(tuple(found[:k]), tuple(found[k : 2 * k]), mat, mat_joint, retention, len(counts[0].den), rows, options.confidence)
