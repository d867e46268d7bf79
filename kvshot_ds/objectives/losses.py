"""Soft cross-entropy through the draft head, in chunks, loss and gradient in one pass.

Logits over the draft vocabulary exist for one chunk of rows at a time, in neither pass for all of them: memory does
not grow with rows x vocabulary x steps. The teacher's distribution is computed once for each of its rows and serves
all steps whose label falls there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch


@dataclass(frozen=True)
class Teacher:
    """The target's distribution at R rows, restricted to the draft vocabulary when used.

    hidden [R, d]: input of the target's head. head [V_d, d]: the target's head rows of the draft vocabulary.
    argmax [R]: full-vocabulary arg-max (target ids). lse [R] fp32: full-vocabulary log-sum-exp.
    """

    hidden: torch.Tensor
    head: torch.Tensor
    argmax: torch.Tensor
    lse: torch.Tensor


@dataclass(frozen=True)
class HeadOutput:
    """loss: scalar, differentiable. row_loss [M], correct [M] bool, prob [M] (sum of min(p, q)): per row, detached."""

    loss: torch.Tensor
    row_loss: torch.Tensor
    correct: torch.Tensor
    prob: torch.Tensor


def soft_cross_entropy(
    h: torch.Tensor,
    weight: torch.Tensor,
    teacher: Teacher,
    teacher_of: torch.Tensor,
    bounds: npt.NDArray[np.int64],
    row_weight: torch.Tensor,
    draft_ids: torch.Tensor,
    chunk: int,
) -> HeadOutput:
    """sum_m row_weight[m] * CE(p_{teacher_of[m]} renormalised over the draft vocabulary, softmax(h_m W^T)).

    h [M, d]: normed hidden states ordered by teacher row. weight [V_d, d]: draft head. bounds [R + 1], on the host: the
    rows of teacher row r are bounds[r] .. bounds[r + 1]. row_weight [M]. draft_ids [V_d]. chunk: most rows at once.
    prob is the exact acceptance probability under sampling (arXiv 2211.17192): q is 0 outside the draft vocabulary.
    """
    loss, row_loss, correct, prob = _SoftCrossEntropy.apply(h, weight, teacher, teacher_of, bounds, row_weight, draft_ids, chunk)
    return HeadOutput(loss, row_loss, correct, prob)


def _chunks(bounds: npt.NDArray[np.int64], chunk: int) -> list[tuple[int, int]]:
    """Teacher-row ranges [a, b) whose draft rows number at most `chunk` (at least one teacher row each)."""
    out, a, rows = [], 0, len(bounds) - 1
    while a < rows:
        b = max(a + 1, int(np.searchsorted(bounds, bounds[a] + chunk, side="right")) - 1)
        out.append((a, min(b, rows)))
        a = out[-1][1]
    return out


class _SoftCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        h: torch.Tensor,
        weight: torch.Tensor,
        teacher: Teacher,
        teacher_of: torch.Tensor,
        bounds: npt.NDArray[np.int64],
        row_weight: torch.Tensor,
        draft_ids: torch.Tensor,
        chunk: int,
    ) -> tuple[torch.Tensor, ...]:
        need_h, need_w = ctx.needs_input_grad[:2]
        rows, wide = len(h), torch.promote_types(h.dtype, torch.float32)
        row_loss, prob = h.new_zeros(rows, dtype=wide), h.new_zeros(rows, dtype=wide)
        correct = torch.zeros(rows, dtype=torch.bool, device=h.device)
        dh = torch.empty_like(h) if need_h else None
        dw = torch.zeros_like(weight, dtype=wide) if need_w else None
        for a, b in _chunks(bounds, chunk):
            m = slice(int(bounds[a]), int(bounds[b]))
            if m.start == m.stop:
                continue
            z = (teacher.hidden[a:b].to(teacher.head.dtype) @ teacher.head.T).to(wide)
            inside = torch.logsumexp(z, -1, keepdim=True)
            p = (z - inside).exp_()  # renormalised over the draft vocabulary
            share = (inside.squeeze(-1) - teacher.lse[a:b]).exp_()  # mass of the draft vocabulary under the full softmax
            of = teacher_of[m] - a
            target = p[of]
            logits = (h[m] @ weight.T).to(wide)
            lse = torch.logsumexp(logits, -1, keepdim=True)
            row_loss[m] = lse.squeeze(-1) - torch.linalg.vecdot(target, logits)
            best = logits.argmax(-1)
            correct[m] = draft_ids[best] == teacher.argmax[a:b][of]
            q = logits.sub_(lse).exp_()
            prob[m] = torch.minimum(target * share[of].unsqueeze(-1), q).sum(-1)
            if dh is not None or dw is not None:
                dz = q.sub_(target).mul_(row_weight[m].unsqueeze(-1)).to(h.dtype)
                if dh is not None:
                    dh[m] = dz @ weight
                if dw is not None:
                    dw.addmm_(dz.T.to(wide), h[m].to(wide))
        ctx.save_for_backward(dh, dw)
        ctx.weight_dtype = weight.dtype
        ctx.mark_non_differentiable(row_loss, correct, prob)
        return (row_loss * row_weight).sum(), row_loss, correct, prob

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        dh, dw = ctx.saved_tensors
        g = grads[0]
        return (None if dh is None else dh * g.to(dh.dtype), None if dw is None else (dw * g).to(ctx.weight_dtype), None, None, None, None, None, None)
