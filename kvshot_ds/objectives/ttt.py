"""Test-time training (arXiv 2503.01840): the drafter unrolled over its own states for K steps, then one pass of the head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from kvshot_ds.config import ObjectiveConfig
from kvshot_ds.drafters.base import Drafter
from kvshot_ds.drafters.state import DraftState
from kvshot_ds.features.batch import Batch
from kvshot_ds.objectives.alignment import RowPlan, training_start
from kvshot_ds.objectives.losses import Teacher, soft_cross_entropy


@dataclass(frozen=True)
class StepSums:
    """Per-step sums over the rows of a batch, on the device [K] fp32. den: valid rows; joint: right at all steps <= k."""

    den: torch.Tensor
    loss: torch.Tensor
    top1: torch.Tensor
    joint: torch.Tensor
    prob: torch.Tensor


class TTTOutput(NamedTuple):
    """loss: scalar. correct, joint [K, N] bool and prob, row_loss [K, N]: at the valid (step, row) pairs, 0 elsewhere.

    A tuple, because the hooks by which ZeRO-3 gathers parameters for the backward pass look for tensors in tuples only.
    """

    loss: torch.Tensor
    correct: torch.Tensor
    joint: torch.Tensor
    prob: torch.Tensor
    row_loss: torch.Tensor

    def sums(self, plan: RowPlan) -> StepSums:
        """Summed over rows, without a host synchronisation."""
        return StepSums(plan.valid.sum(1).float(), self.row_loss.sum(1), self.correct.sum(1).float(), self.joint.sum(1).float(), self.prob.sum(1))


class TTT(nn.Module):
    """The objective as a module, so that one engine forward is one unroll. Owns the drafter; the target's parts are lent."""

    def __init__(self, drafter: Drafter, config: ObjectiveConfig, target_head: torch.Tensor):
        """target_head [V, d]: the target's LM head; its rows of the draft vocabulary define the teacher."""
        super().__init__()
        self.drafter, self.config = drafter, config
        # Lent, not owned: neither a parameter nor saved with the drafter.
        self._teacher_head = [target_head[drafter.draft_ids].contiguous()]

    def unroll(self, batch: Batch, plan: RowPlan) -> torch.Tensor:
        """Hidden states of all steps at the planned rows: [K, N, d]."""
        state = DraftState.empty(self.drafter.depth)
        steps = [self.drafter.begin(state, training_start(batch, plan))]
        for k in range(1, self.config.steps):
            steps.append(self.drafter.forward_step(state, plan.tokens[k], k))
        return torch.stack(steps)

    def forward(self, batch: Batch, plan: RowPlan, normaliser: torch.Tensor) -> TTTOutput:
        """loss = sum_k decay^k sum_rows CE / normaliser (scalar tensor: supervised rows over all ranks and micro-steps)."""
        d = self.drafter
        h = self.unroll(batch, plan)
        normed = d.norm(h.flatten(0, 1)[plan.picks])
        teacher = Teacher(batch.teacher_hidden, self._teacher_head[0], batch.teacher_argmax, batch.teacher_lse)
        reachable = d.t2d[batch.teacher_argmax][plan.teacher_of]
        weight = self.config.step_decay ** plan.steps_of.float() * reachable / normaliser
        out = soft_cross_entropy(normed, d.lm_head.weight, teacher, plan.teacher_of, plan.teacher_bounds, weight, d.draft_ids, self.config.head_chunk)

        def spread(values: torch.Tensor) -> torch.Tensor:
            return values.new_zeros(plan.valid.numel()).index_put_((plan.picks,), values).view_as(plan.valid)

        correct = spread(out.correct)
        joint = correct.cumprod(0).bool() & plan.valid
        return TTTOutput(out.loss, correct, joint, spread(out.prob), spread(out.row_loss * reachable))
