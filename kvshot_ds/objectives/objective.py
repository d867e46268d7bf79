"""What is optimised: the drafter's steps at the planned rows, one pass of the head over all of them, and what is added to its loss."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import nn

from kvshot_ds.config import ObjectiveConfig
from kvshot_ds.drafters.base import Drafter, Unrolled
from kvshot_ds.drafters.state import Extras
from kvshot_ds.features.batch import Batch
from kvshot_ds.features.spec import FeatureSpec
from kvshot_ds.objectives.alignment import RowPlan, training_start
from kvshot_ds.objectives.frozen import Frozen
from kvshot_ds.objectives.losses import BestTokens, HeadInput, HeadOutput, Teacher, head_loss, token_confidence
from kvshot_ds.objectives.weights import step_weights
from kvshot_ds.target import TargetParts


@dataclass(frozen=True)
class StepSums:
    """Per-step sums over the rows of a batch, on the device [K] fp32. den: valid rows; joint: right at all steps <= k.

    loss: of a row, before its weight; weighted: what the step adds to the objective, before it is normalised.
    """

    den: torch.Tensor
    loss: torch.Tensor
    top1: torch.Tensor
    joint: torch.Tensor
    prob: torch.Tensor
    weighted: torch.Tensor


class Output(NamedTuple):
    """loss: scalar. correct, joint [K, N] bool and prob, row_loss, weighted [K, N]: at the valid (step, row) pairs, 0 elsewhere.

    kv_branch, query: what the auxiliary losses add to `loss`, scalars (0 without them).
    A tuple, because the hooks by which ZeRO-3 gathers parameters for the backward pass look for tensors in tuples only.
    """

    loss: torch.Tensor
    correct: torch.Tensor
    joint: torch.Tensor
    prob: torch.Tensor
    row_loss: torch.Tensor
    weighted: torch.Tensor
    kv_branch: torch.Tensor
    query: torch.Tensor

    def sums(self, plan: RowPlan) -> StepSums:
        """Summed over rows, without a host synchronisation."""
        rows = (plan.valid, self.row_loss, self.correct, self.joint, self.prob, self.weighted)
        return StepSums(*(x.sum(1, dtype=torch.float32) for x in rows))


class Objective(nn.Module):
    """The objective as a module, so that one engine forward is one unroll. Owns the drafter; the target's parts are lent."""

    def __init__(self, drafter: Drafter, config: ObjectiveConfig, target_head: torch.Tensor | None, target_norm: torch.Tensor | None = None):
        """target_head [V, d]: the target's LM head, whose rows of the draft vocabulary define a teacher given as hidden states; None with
        one given as the best tokens. target_norm [d]: weight of the target's final norm, for hidden states captured before it."""
        super().__init__()
        self.drafter, self.config = drafter, config
        self._draft_index = [torch.where(drafter.t2d, drafter.t2d.cumsum(0) - 1, -1)]  # target id -> draft id, -1 outside
        # Lent, not owned: neither a parameter nor saved with the drafter.
        self._target_norm = [target_norm]
        self._teacher_head: list[torch.Tensor] = []
        self.frozen: Frozen | None = None
        if drafter.lm_head is None:
            self._teacher_head.append(drafter.head_weight)
        elif target_head is not None:
            whole = len(drafter.d2t) == len(target_head)
            self._teacher_head.append(target_head if whole else target_head[drafter.draft_ids].contiguous())

    def share_frozen(self) -> None:
        """Makes the target's parts frozen parameters of this module, before a ZeRO-3 engine is made of it; see Frozen."""
        lent, heads = self.drafter.lent, self._teacher_head
        self.frozen = Frozen(list({id(t): t for t in (*lent, *heads)}.values()))
        as_parameter = dict(zip(dict.fromkeys(map(id, (*lent, *heads))), self.frozen, strict=True))
        for tensors in (lent, heads):
            tensors[:] = [as_parameter[id(t)] for t in tensors]

    @contextmanager
    def _embedding(self, plan: RowPlan) -> Iterator[None]:
        """Within, the drafter embeds the plan's tokens."""
        with ExitStack() as stack:
            if self.frozen is not None:
                with self.frozen.whole(self.drafter.lent[0]):
                    stack.enter_context(self.drafter.copied_embedding(torch.cat((plan.next_tokens, plan.tokens.flatten()))))
            yield

    def _heads(self) -> AbstractContextManager[None]:
        """Within, the target's head rows are there."""
        heads = (*self.drafter.lent[1:], *self._teacher_head)
        return self.frozen.whole(*heads) if self.frozen is not None and heads else nullcontext()

    def required_features(self) -> FeatureSpec:
        """What the drafter needs, and what the objective needs besides."""
        return required_features(self.drafter, self.config)

    def unroll(self, batch: Batch, plan: RowPlan) -> Unrolled:
        """All steps at the planned rows. Offline, step k of row t is step 0 of row t + k: what the target gave it, not the drafter."""
        start, extras = training_start(batch, plan), Extras(self.config.kv_branch_weight > 0, self.config.query_distill_weight > 0)
        with self._embedding(plan):
            first = self.drafter.unroll(start, plan.tokens if plan.shifted is None else plan.tokens[:1], extras)
        if plan.shifted is None:
            return first

        def spread(x: torch.Tensor) -> torch.Tensor:
            return x[0][plan.shifted]

        return Unrolled(spread(first.h), None if first.kv_branch is None else spread(first.kv_branch), tuple(map(spread, first.queries)))

    def forward(self, batch: Batch, plan: RowPlan, normaliser: torch.Tensor) -> Output:
        """loss = sum over steps and rows of weight * loss / normaliser (scalar tensor: supervised rows over all ranks and micro-steps)."""
        unrolled = self.unroll(batch, plan)
        with self._heads():
            return self._judged(unrolled, batch, plan, normaliser)

    def _judged(self, unrolled: Unrolled, batch: Batch, plan: RowPlan, normaliser: torch.Tensor) -> Output:
        d, config = self.drafter, self.config
        teacher = Teacher(self._signal(batch), batch.teacher_argmax, self._draft_index[0][plan.labels])
        judged = teacher.label >= 0 if config.loss == "hard_ce" else d.t2d[batch.teacher_argmax]
        normed = self._at_picks(unrolled.h, plan)

        def confidence() -> torch.Tensor:
            return token_confidence(normed, d.head_weight, teacher, plan.teacher_of, plan.teacher_bounds, config.head_chunk)

        def spread(values: torch.Tensor) -> torch.Tensor:
            return values.new_zeros(plan.valid.numel()).index_put_((plan.picks,), values).view_as(plan.valid)

        weight = step_weights(config, plan.steps_of, plan.picks, plan.valid, confidence) * judged[plan.teacher_of]
        share = weight / normaliser
        out = self._head(normed, teacher, plan, share)
        zero = out.loss.new_zeros(())
        branch = query = zero
        if unrolled.kv_branch is not None:
            branch = config.kv_branch_weight * self._head(self._at_picks(unrolled.kv_branch, plan), teacher, plan, share).loss
        if unrolled.queries:
            query = config.query_distill_weight * self._query_error(unrolled.queries, batch, plan, share)
        correct = spread(out.correct)
        joint = correct.cumprod(0).bool() & plan.valid
        losses = out.row_loss * judged[plan.teacher_of]
        return Output(
            out.loss + branch + query, correct, joint, spread(out.prob), spread(losses), spread(out.row_loss * weight), branch.detach(), query.detach()
        )

    def _signal(self, batch: Batch) -> HeadInput | BestTokens:
        """The teacher's distribution as the batch carries it."""
        if batch.topk_ids.ndim == 2:
            return BestTokens(self._draft_index[0][batch.topk_ids], batch.topk_logp)
        hidden = batch.teacher_hidden
        if not batch.teacher_normed:
            weight = self._target_norm[0]
            if weight is None:
                raise ValueError("this teacher was captured before the target's final norm: the objective needs target_norm")
            hidden = rms_norm(hidden, weight, self.drafter.g.norm_eps)
        if not self._teacher_head:
            raise ValueError("a teacher given as hidden states needs target_head")
        return HeadInput(hidden, self._teacher_head[0], batch.teacher_lse)

    def _at_picks(self, h: torch.Tensor, plan: RowPlan) -> torch.Tensor:
        """What the head reads at the valid (step, row) pairs: [K, N, d] -> [M, d]."""
        return self.drafter.norm(h.flatten(0, 1)[plan.picks])

    def _head(self, normed: torch.Tensor, teacher: Teacher, plan: RowPlan, weight: torch.Tensor) -> HeadOutput:
        d, c = self.drafter, self.config
        return head_loss(normed, d.head_weight, teacher, plan.teacher_of, plan.teacher_bounds, weight, d.draft_ids, c.head_chunk, c.loss, c.lk_eta)

    def _query_error(self, queries: tuple[torch.Tensor, ...], batch: Batch, plan: RowPlan, weight: torch.Tensor) -> torch.Tensor:
        """sum_m weight_m * mean over draft layers and heads of |q - q*|^2 / |q*|^2, q* the target's query at the very position and layer."""
        total = weight.new_zeros(())
        for mine, layer in zip(queries, self.drafter.draft_layers, strict=True):
            assert layer.projector is not None
            asked = torch.cat([batch.queries_of[i] for i in layer.projector.query_layers], 1)[plan.teacher_of].float()  # [M, A, D]
            error = (mine.flatten(0, 1)[plan.picks].float() - asked).square().sum(-1) / asked.square().sum(-1).clamp_min(1e-12)
            total = total + (error.mean(-1) * weight).sum()
        return total / len(queries)


def objective_for(drafter: Drafter, config: ObjectiveConfig, captured: FeatureSpec, parts: TargetParts) -> Objective:
    """The objective over features of the kind `captured`: the target's head is kept only where the teacher is made from hidden states."""
    return Objective(drafter, config, None if captured.teacher == "top_k" else parts.head, parts.norm_weight)


def required_features(drafter: Drafter, config: ObjectiveConfig) -> FeatureSpec:
    """What must have been captured to train `drafter` with the objective `config`."""
    needs = drafter.required_features()
    if not config.query_distill_weight:
        return needs
    layers = {i for layer in drafter.draft_layers if layer.projector is not None for i in layer.projector.query_layers}
    return replace(needs, query_layers=tuple(sorted(layers)))


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [R, d] / sqrt(mean x^2 + eps) * weight [d], computed in fp32 at least, in the dtype of `weight`, as the target's own final norm does it."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(weight.dtype)
