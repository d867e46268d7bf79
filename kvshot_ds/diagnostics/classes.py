"""Acceptance by class of (step, row) pair: position in the answer, frequency of the token, entropy of the target. By step in each class."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from kvshot_ds.diagnostics.subject import Outcome, Piece, Subject
from kvshot_ds.features.batch import Batch
from kvshot_ds.metrics import StepCounts
from kvshot_ds.objectives.alignment import RowPlan, plan_rows
from kvshot_ds.objectives.objective import rms_norm
from kvshot_ds.target import TargetParts

POSITIONS = (0, 8, 32, 128)  # first position of each class
_AT_ONCE = 1 << 25  # logits held at once: 128 MiB in fp32


@dataclass(frozen=True)
class Values:
    """What the (step, row) pairs of a piece are classed by, on the host: position, frequency [K, N] int64, entropy [K, N] fp64. Without meaning where
    a pair is not valid."""

    position: torch.Tensor
    frequency: torch.Tensor
    entropy: torch.Tensor


def values(piece: Piece, steps: int, label_counts: torch.Tensor, parts: TargetParts, eps: float) -> Values:
    """position: of the bonus token in its turn, 0 for the first row of an answer, the same at all steps of a row. frequency: how often the
    label is a label of the train split, by label_counts [V]. entropy [nats]: of the target's distribution where the label is its next token."""
    batch, plan = piece.batch, piece.plan
    full = plan if len(plan.valid) == steps else plan_rows(batch.to("cpu"), steps)
    full = full.to("cpu")
    position = positions(batch, full).repeat(steps, 1)
    entropy = entropies(batch, parts, eps).cpu()
    return Values(position, _spread(full, label_counts[full.labels]), _spread(full, entropy))


def positions(batch: Batch, plan: RowPlan) -> torch.Tensor:
    """Index of the bonus token t + 1 of each row in its turn, [N] int64."""
    turn, at = batch.turn.cpu(), torch.arange(len(batch.turn))
    begins = torch.ones(len(turn), dtype=torch.bool)
    begins[1:] = turn[1:] != turn[:-1]
    begins |= plan.positions == 0
    first = torch.where(begins, at, 0).cummax(0).values
    bonus = plan.anchors + 1
    return bonus - first[bonus]


@torch.inference_mode()
def entropies(batch: Batch, parts: TargetParts, eps: float) -> torch.Tensor:
    """Of the target's distribution over its full vocabulary at the teacher rows, [R] fp64, nats.

    Of a teacher of the k best tokens, the least that it can be: what is known, and the rest r = 1 - sum p spread over tokens none of which
    has more than min(r, p_k), the k-th best. eps: of the target's final norm, for states captured before it.
    """
    if batch.topk_ids.ndim == 2:
        logp = batch.topk_logp.double()
        p = logp.exp()
        rest = (1 - p.sum(-1)).clamp(min=0)
        most = torch.minimum(rest, p[:, -1]).clamp(min=torch.finfo(torch.float64).tiny)
        return -(p * logp).sum(-1) - rest * most.log()
    hidden = batch.teacher_hidden.to(parts.head.dtype)
    if not batch.teacher_normed:
        hidden = rms_norm(hidden, parts.norm_weight, eps)
    out = torch.empty(len(hidden), dtype=torch.float64, device=hidden.device)
    size = max(1, _AT_ONCE // len(parts.head))
    for a in range(0, len(hidden), size):
        z = (hidden[a : a + size] @ parts.head.T).float()
        lse = z.logsumexp(-1, keepdim=True)
        out[a : a + size] = lse[:, 0] - (torch.softmax(z, -1) * z).sum(-1)
    return out


def _spread(plan: RowPlan, of_teacher: torch.Tensor) -> torch.Tensor:
    """A value of each teacher row [R] at the (step, row) pairs [K, N] that it judges, 0 elsewhere."""
    return of_teacher.new_zeros(plan.valid.numel()).index_put_((plan.picks,), of_teacher[plan.teacher_of]).view(plan.valid.shape)


def equal_classes(values: Sequence[torch.Tensor], outcomes: Sequence[Outcome], bins: int) -> torch.Tensor:
    """Ascending upper ends of all classes but the last, [<= bins - 1]: as many rows of step 0 in each class as equal values allow."""
    first = torch.cat([v[0][o.valid[0]] for v, o in zip(values, outcomes, strict=True)]).numpy()
    ends = np.unique(np.quantile(first, np.arange(1, bins) / bins, method="inverted_cdf"))
    return torch.from_numpy(ends[ends < first.max()])


def measure_classes(outcomes: Sequence[Outcome], classes: Sequence[torch.Tensor], count: int) -> list[StepCounts]:
    """Counts [C, K] of each of `count` classes; classes: of the pairs of each piece [K, N] int64. They add up to the counts of all."""
    return [StepCounts.unstack(np.concatenate([o.counts(of == c) for o, of in zip(outcomes, classes, strict=True)], axis=1)) for c in range(count)]


def parts(subject: Subject) -> dict[str, dict[str, Any]]:
    """`position`, `frequency` and `entropy` of diagnostics.json."""
    found = [values(piece, subject.steps, subject.label_counts, subject.parts, subject.objective.drafter.g.norm_eps) for piece in subject.pieces("classes")]
    by_position = [torch.bucketize(v.position, torch.tensor(POSITIONS[1:]), right=True) for v in found]
    ranges = [*((a, b - 1) for a, b in pairwise(POSITIONS)), (POSITIONS[-1], None)]
    out = {"position": _classes(subject, by_position, ranges)}
    for name, of in (("frequency", [v.frequency for v in found]), ("entropy", [v.entropy for v in found])):
        ends = equal_classes(of, subject.outcomes, subject.options.bins)
        classes = [torch.bucketize(v, ends) for v in of]
        pairs = torch.cat([v[o.valid] for v, o in zip(of, subject.outcomes, strict=True)])
        at = torch.bucketize(pairs, ends)
        bounds = [(pairs[at == c].min().item(), pairs[at == c].max().item()) for c in range(len(ends) + 1)]
        out[name] = _classes(subject, classes, bounds)
    out["position"]["of"] = "index of the row's bonus token in its assistant turn"
    out["frequency"]["of"] = "occurrences of the label among the train split's supervised tokens"
    exact = subject.heldout.manifest.spec.teacher != "top_k"
    out["entropy"]["of"] = "entropy of the target's distribution [nats]" + ("" if exact else ": a lower bound, from the best tokens that were captured")
    out["entropy"]["exact"] = exact
    return out


def _classes(subject: Subject, classes: Sequence[torch.Tensor], bounds: Sequence[tuple[float, float | None]]) -> dict[str, Any]:
    counts = measure_classes(subject.outcomes, classes, len(bounds))
    lines = [{"from": low, "to": high, "rows": int(c.total().den[0]), "alpha": subject.alphas(c)} for (low, high), c in zip(bounds, counts, strict=True)]
    return {"classes": lines}
