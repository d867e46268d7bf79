"""Drift and rank of the chain of hidden states: how far the drafter's states go from the target's as it drafts on its own, and how many directions they use.

What is compared, at the rows that are supervised at the step:

- families that hand their hidden state on (hidden_only, hybrid unless carry=none), at k >= 1: the state that goes into step k of the row anchored at t, against
  g_{t+k}, which step 0 would read there (the target's states fused by the drafter's own W_fc). t + k <= the row's last token of the turn.
- the others, at k >= 0: the last layer's state as it enters the head, after the drafter's final norm, against the target's as it enters its
  head, after its final norm, at position t + 1 + k, where both propose the token at t + 2 + k.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import nn

from kvshot_ds.diagnostics.record import Run
from kvshot_ds.diagnostics.subject import Subject
from kvshot_ds.drafters.base import Drafter
from kvshot_ds.drafters.hidden import HiddenOnlyDrafter
from kvshot_ds.features.batch import Batch
from kvshot_ds.features.spec import FeatureSpec
from kvshot_ds.objectives.alignment import RowPlan
from kvshot_ds.objectives.objective import Objective, rms_norm

CHAIN = "the hidden state that goes into step k, against the target's fused state that step 0 would read at that position"
HEAD = "the normed state that enters the drafter's head at step k, against the target's at that position"


class Compared(NamedTuple):
    """States of the drafter and of the target at step k: [n, d] each. conversation [n]: in the batch."""

    k: int
    mine: torch.Tensor
    target: torch.Tensor
    conversation: torch.Tensor


@dataclass(frozen=True)
class DriftSums:
    """By step k of `steps`, S of them. rows, cosine, norm_ratio: sums over the rows of each conversation [C, S] fp64, norm_ratio being |mine| / |target|.

    mine, target: X^T X of the states of all rows, [S, d, d] fp64; None where no rank was asked for. All on the device.
    """

    steps: tuple[int, ...]
    rows: torch.Tensor
    cosine: torch.Tensor
    norm_ratio: torch.Tensor
    mine: torch.Tensor | None
    target: torch.Tensor | None

    @classmethod
    def joined(cls, parts: Iterable[DriftSums]) -> DriftSums:
        """The conversations of several batches, one after the other; one batch at a time is held."""
        first, *_ = done = [next(it := iter(parts))]
        mine, target = first.mine, first.target
        for part in it:
            done.append(replace(part, mine=None, target=None))
            if mine is not None and target is not None and part.mine is not None and part.target is not None:
                mine, target = mine.add_(part.mine), target.add_(part.target)
        rows, cosine, ratio = (torch.cat([getattr(p, name) for p in done]) for name in ("rows", "cosine", "norm_ratio"))
        return cls(first.steps, rows, cosine, ratio, mine, target)


def _chained(drafter: Drafter) -> TypeGuard[HiddenOnlyDrafter]:
    return isinstance(drafter, HiddenOnlyDrafter) and drafter.carries


def compares(drafter: Drafter) -> str:
    """What is compared, in words."""
    return CHAIN if _chained(drafter) else HEAD


def why_not(drafter: Drafter, spec: FeatureSpec, steps: int) -> str | None:
    """Why nothing can be compared, K = `steps`, in features of the kind `spec`; None if it can."""
    if _chained(drafter):
        return "a single draft step hands nothing on" if steps < 2 else None
    return "the target's last hidden states were not captured; capture.features.teacher=last_hidden keeps them" if spec.teacher == "top_k" else None


def compared(objective: Objective, batch: Batch, plan: RowPlan, norm_weight: torch.Tensor | None = None, run: Run | None = None) -> list[Compared]:
    """The states of one batch, by step. norm_weight [d]: of the target's final norm, for teachers captured before it. run: an engine's forward.

    What is compared is taken from the forward as it happens, so that it may be that of an engine.
    """
    drafter, conversation = objective.drafter, plan.conversation
    fused: list[torch.Tensor] = []
    normed: list[torch.Tensor] = []
    layer: list[torch.Tensor] = []
    heard: list[tuple[nn.Module, list[torch.Tensor], Callable[[Any], torch.Tensor]]] = [
        (drafter.norm, normed, lambda out: out),
        (drafter.layers[-1], layer, lambda out: out.h),
    ]
    heard += [(drafter.fc, fused, lambda out: out)] if _chained(drafter) else []
    handles = [module.register_forward_hook(lambda _m, _a, out, to=to, of=of: to.append(of(out))) for module, to, of in heard]
    try:
        if run is not None:
            run(batch, plan, torch.ones((), device=plan.valid.device))
        else:
            drafter.norm(objective.unroll(batch, plan).h.flatten(0, 1)[plan.picks])
    finally:
        for handle in handles:
            handle.remove()
    if _chained(drafter):
        chain = normed if drafter.norm_output else layer
        at = [plan.valid[k] for k in range(len(plan.valid))]
        return [Compared(k, chain[k - 1][at[k]], fused[0][plan.anchors[at[k]] + k], conversation[at[k]]) for k in range(1, len(at))]
    target = batch.teacher_hidden
    if not batch.teacher_normed:
        assert norm_weight is not None
        target = rms_norm(target, norm_weight, drafter.g.norm_eps)
    owner, at = conversation[plan.picks % len(plan.anchors)], [plan.steps_of == k for k in range(len(plan.valid))]
    return [Compared(k, normed[0][rows], target[plan.teacher_of[rows]], owner[rows]) for k, rows in enumerate(at)]


@torch.no_grad()
def measure_drift(
    objective: Objective, batch: Batch, plan: RowPlan, run: Run | None = None, norm_weight: torch.Tensor | None = None, rank: bool = False
) -> DriftSums:
    """Of one batch, which, as `plan`, is on the drafter's device, features in its dtype. Arguments as in `compared`. rank: also X^T X."""
    found = compared(objective, batch, plan, norm_weight, run)
    sums = torch.zeros(len(found), 3, len(batch.keys), dtype=torch.float64, device=plan.valid.device)
    grams: list[torch.Tensor] = []
    for i, c in enumerate(found):
        mine, target = c.mine.double(), c.target.double()
        a, b = (x.norm(dim=-1).clamp(min=1e-30) for x in (mine, target))
        sums[i].index_add_(1, c.conversation, torch.stack((torch.ones_like(a), (mine * target).sum(-1) / (a * b), a / b)))
        grams += [mine.T @ mine, target.T @ target] if rank else []
    rows, cosine, ratio = sums.permute(1, 2, 0)
    grams_of = [torch.stack(grams[i::2]) if grams else None for i in range(2)]
    return DriftSums(tuple(c.k for c in found), rows, cosine, ratio, *grams_of)


def effective_rank(gram: torch.Tensor) -> float:
    """exp(-sum p log p) of the singular values' shares p_i = s_i / sum s of the states X [n, d] (Roy and Vetterli, EUSIPCO 2007); gram: X^T X [d, d] fp64.

    Between 1 (all states on one line through 0) and min(n, d). 0 without states.
    """
    s = torch.linalg.eigvalsh(gram).clamp(min=0).sqrt()
    # What the rounding of X^T X leaves of directions that are not there is none.
    s = torch.where(s > s.amax() * 1e-6, s, 0)
    if not s.any():
        return 0.0
    p = s / s.sum()
    return float(torch.exp(-torch.special.xlogy(p, p).sum()))


def part(subject: Subject) -> dict[str, Any]:
    """`drift` of diagnostics.json."""
    objective = subject.objective
    if why := why_not(objective.drafter, subject.heldout.manifest.spec, objective.config.steps):
        return {"why": why}
    norm = subject.parts.norm_weight
    found = DriftSums.joined(measure_drift(objective, *piece, norm_weight=norm, rank=True) for piece in subject.pieces("drift"))
    assert found.mine is not None and found.target is not None
    steps = [
        {
            "k": k,
            "rows": int(found.rows[:, i].sum()),
            "cosine": subject.mean(found.cosine[:, i], found.rows[:, i]),
            "norm_ratio": subject.mean(found.norm_ratio[:, i], found.rows[:, i]),
            "rank": effective_rank(found.mine[i]),
            "target_rank": effective_rank(found.target[i]),
        }
        for i, k in enumerate(found.steps)
    ]
    return {"compares": compares(objective.drafter), "steps": steps}
