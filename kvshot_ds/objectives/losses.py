"""The losses of a draft row through the draft head, in chunks, loss and gradient in one pass.

Logits over the draft vocabulary exist for one chunk of rows at a time: memory does not grow with rows x vocabulary x
steps. The teacher's distribution is computed once for each of its rows and serves all steps judged there. What is done
to the logits between the matrix products is done in tiles that stay in a CPU's cache.

In all formulas: z logits of the drafter, q = softmax(z); p = the target's full-vocabulary softmax, cut to the draft
vocabulary (and, if the teacher is the k best tokens, to those); share = sum p; p~ = p / share; a = sum min(p, q), the
probability that a draft token sampled from q is accepted (arXiv 2211.17192; q is 0 outside the draft vocabulary);
b = q where q < p, else 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, NamedTuple, assert_never

import numpy as np
import numpy.typing as npt
import torch
from torch.autograd.function import once_differentiable

LossName = Literal["soft_ce", "kl", "hard_ce", "lk_alpha", "lk_lambda"]

# Entries of one tile: a few of these fit the caches of a CPU core; elsewhere a tile only has to be worth a kernel launch.
_CPU_TILE, _OTHER_TILE = 1 << 18, 1 << 25


@dataclass(frozen=True)
class HeadInput:
    """The whole distribution: p = softmax(head of hidden), from hidden [R, d], the input of the target's head, head [V_d, d], the target's
    head rows of the draft vocabulary, and lse [R] fp32, the log-sum-exp over the full vocabulary."""

    hidden: torch.Tensor
    head: torch.Tensor
    lse: torch.Tensor


@dataclass(frozen=True)
class BestTokens:
    """The k best tokens of the full vocabulary, p being 0 elsewhere: index [R, k] int64, their draft indices (-1 outside of the draft
    vocabulary), logp [R, k] fp32, their log-probabilities."""

    index: torch.Tensor
    logp: torch.Tensor


@dataclass(frozen=True)
class Teacher:
    """The target's distribution at R rows, restricted to the draft vocabulary when used.

    signal: what gives it. argmax [R]: full-vocabulary arg-max (target ids).
    label [R] int64: draft index of the text's next token, -1 if it is outside of the draft vocabulary.
    """

    signal: HeadInput | BestTokens
    argmax: torch.Tensor
    label: torch.Tensor


@dataclass(frozen=True)
class HeadOutput:
    """loss: scalar, differentiable. row_loss [M], correct [M] bool, prob [M] (a): per row, unweighted, detached; fp32 at least."""

    loss: torch.Tensor
    row_loss: torch.Tensor
    correct: torch.Tensor
    prob: torch.Tensor


def head_loss(
    h: torch.Tensor,
    weight: torch.Tensor,
    teacher: Teacher,
    teacher_of: torch.Tensor,
    bounds: npt.NDArray[np.int64],
    row_weight: torch.Tensor,
    draft_ids: torch.Tensor,
    chunk: int,
    loss: LossName,
    eta: float,
) -> HeadOutput:
    """sum_m row_weight[m] * row_loss[m], the row's loss being one of

    - soft_ce: CE(p~, q)
    - kl: KL(p~ || q), the same gradient
    - hard_ce: -log q[label]
    - lk_alpha: -log a, a floored at the least normal number (arXiv 2602.23881)
    - lk_lambda: l KL(p~ || q) + (1 - l) (1 - a), l = exp(-eta a) of each row, held constant in the gradient (arXiv 2602.23881)

    h [M, d]: normed hidden states ordered by teacher row. weight [V_d, d]: draft head. teacher_of [M]: teacher row.
    bounds [R + 1], on the host: the rows of teacher row r are bounds[r] .. bounds[r + 1]; most may be empty.
    row_weight [M], no gradient. draft_ids [V_d]: target ids. chunk: most rows at once, but all rows of a teacher row stay together.
    Gradients reach h and weight, each only if it requires one. Where q = p exactly, a counts p: its gradient there is 0.
    Rows without a loss (hard_ce: label outside; those with p~: share underflows) have row_loss 0 and gradient 0.
    """
    on = torch.is_grad_enabled()  # requires_grad alone says nothing: evaluation runs with the same parameters
    need = (on and h.requires_grad, on and weight.requires_grad)
    task = _Task(teacher, teacher_of, _edges(bounds, len(h)), row_weight.detach(), draft_ids, chunk, loss, eta)
    return HeadOutput(*_HeadLoss.apply(h, weight, task, need))


@torch.no_grad()
def token_confidence(
    h: torch.Tensor, weight: torch.Tensor, teacher: Teacher, teacher_of: torch.Tensor, bounds: npt.NDArray[np.int64], chunk: int
) -> torch.Tensor:
    """q[label] of each row, 0 where the label is outside of the draft vocabulary: [M], fp32 at least, no gradient. Arguments as in head_loss."""
    edges = _edges(bounds, len(h))
    pieces = _chunks(edges, chunk)
    label = teacher.label[teacher_of]
    logits = h.new_empty(_widest(edges, pieces), len(weight))
    out = h.new_empty(len(h), dtype=_wide(h))
    for a, b in pieces:
        m = slice(int(edges[a]), int(edges[b]))
        z = torch.mm(h[m], weight.T, out=logits[: m.stop - m.start])
        for t in _tiles(z):
            out[m][t] = _at(torch.softmax(z[t], -1, dtype=out.dtype), label[m][t].clamp(min=0))
    return out.mul_(label >= 0)


@dataclass(frozen=True)
class _Task:
    """Arguments of head_loss that no gradient reaches. edges [U + 1]: as bounds, without the empty teacher rows."""

    teacher: Teacher
    teacher_of: torch.Tensor
    edges: npt.NDArray[np.int64]
    row_weight: torch.Tensor
    draft_ids: torch.Tensor
    chunk: int
    loss: LossName
    eta: float


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: torch.Tensor, weight: torch.Tensor, task: _Task, need: tuple[bool, bool]) -> tuple[torch.Tensor, ...]:
        rows, dh, dw = _one_pass(h, weight, task, need)
        ctx.save_for_backward(dh, dw)
        ctx.dtypes = h.dtype, weight.dtype
        ctx.mark_non_differentiable(rows.loss, rows.correct, rows.prob)
        return (rows.loss * task.row_weight).sum(), rows.loss, rows.correct, rows.prob

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        dh, dw = (None if x is None else (x * grads[0]).to(dtype) for x, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True))
        return dh, dw, None, None


class _Rows(NamedTuple):
    """Results per row [M]. scale: factor on the row's gradient with respect to its logits."""

    loss: torch.Tensor
    correct: torch.Tensor
    prob: torch.Tensor
    scale: torch.Tensor


def _one_pass(h: torch.Tensor, weight: torch.Tensor, task: _Task, need: tuple[bool, bool]) -> tuple[_Rows, torch.Tensor | None, torch.Tensor | None]:
    """Row results and the gradients of the weighted sum: dh [M, d] in h's dtype, dw [V_d, d] in fp32 at least, or None."""
    wide, edges = _wide(h), task.edges
    rows = _Rows(*(h.new_empty(len(h), dtype=t) for t in (wide, torch.bool, wide, wide)))
    dh = torch.empty_like(h) if need[0] else None
    dw = torch.zeros_like(weight, dtype=wide) if need[1] else None
    # Numbering of the teacher rows that are used, without asking the device how many: the host knows.
    slot = (torch.diff(task.teacher_of, prepend=task.teacher_of[:1]) != 0).cumsum(0)
    used = task.teacher_of.new_zeros(len(edges) - 1).scatter_(0, slot, task.teacher_of)
    pieces = _chunks(edges, task.chunk)
    logits = h.new_empty(_widest(edges, pieces), len(weight))
    scratch = _Scratch.empty(logits, wide)
    for a, b in pieces:
        m = slice(int(edges[a]), int(edges[b]))
        target = _target(task.teacher.signal, used[a:b], wide, weight.shape[0])
        z = torch.mm(h[m], weight.T, out=logits[: m.stop - m.start])
        for t in _tiles(z):
            g = slice(m.start + t.start, m.start + t.stop)
            judged = _judge(z[t], task, g, target, slot[g] - a, scratch, any(need))
            for kept, new in zip(rows, judged, strict=True):
                kept[g] = new
        # z now holds the unweighted gradient. The weights are applied where a row is d wide, not V_d.
        if dh is not None:
            torch.mm(z, weight, out=dh[m]).mul_(rows.scale[m, None])
        if dw is not None:
            _accumulate(dw, z, (h[m] * rows.scale[m, None]).to(h.dtype))
    return rows, dh, dw


def _accumulate(dw: torch.Tensor, z: torch.Tensor, h: torch.Tensor) -> None:
    """dw += z^T h. Half-precision products are made in their own dtype (sums inside are fp32) and added up in dw's."""
    if dw.dtype == h.dtype:
        dw.addmm_(z.T, h)
    else:
        dw.add_(z.T @ h)


class _Target(NamedTuple):
    """The teacher at u rows: p [u, V_d], share [u] (at least the least normal number), whether it is one [u], entropy of p~ [u]."""

    p: torch.Tensor
    share: torch.Tensor
    known: torch.Tensor
    entropy: torch.Tensor


def _target(signal: HeadInput | BestTokens, rows: torch.Tensor, wide: torch.dtype, vocab: int) -> _Target:
    return _from_best(signal, rows, wide, vocab) if isinstance(signal, BestTokens) else _from_head(signal, rows, wide)


def _from_best(best: BestTokens, rows: torch.Tensor, wide: torch.dtype, vocab: int) -> _Target:
    index, logp = best.index[rows], best.logp[rows].to(wide)
    known = logp.exp() * (index >= 0)
    # Tokens outside of the draft vocabulary are added as zeros at its first entry.
    p = logp.new_zeros(len(rows), vocab).scatter_add_(1, index.clamp(min=0), known)
    share, tiny = known.sum(-1), torch.finfo(wide).tiny
    at_least = share.clamp(min=tiny)
    # H(p~) = -sum p/share log(p/share). A share a little over 1, by the rounding of logp, does no harm.
    return _Target(p, at_least, ~(share < tiny), at_least.log() - (known * logp).sum(-1) / at_least)


def _from_head(teacher: HeadInput, rows: torch.Tensor, wide: torch.dtype) -> _Target:
    z = teacher.hidden[rows].to(teacher.head.dtype) @ teacher.head.T
    p = z if z.dtype == wide else torch.empty_like(z, dtype=wide)
    lse = teacher.lse[rows].to(wide)
    share, entropy = torch.empty_like(lse), torch.empty_like(lse)
    for t in _tiles(z):
        x = z[t].to(wide)
        inner = torch.softmax(x, -1)
        inside = x.amax(-1) - inner.amax(-1).log()
        share[t] = (inside - lse[t]).exp()
        entropy[t] = inside - x.mul_(inner).sum(-1)  # z[t] is not read again
        torch.mul(inner, share[t, None], out=p[t])
    tiny = torch.finfo(wide).tiny
    return _Target(p, share.clamp(min=tiny), ~(share < tiny), entropy)


class _Scratch(NamedTuple):
    """Room for one tile, in fp32 at least: q, p and b (before that p * z and min(p, q))."""

    q: torch.Tensor
    p: torch.Tensor
    b: torch.Tensor

    @classmethod
    def empty(cls, logits: torch.Tensor, wide: torch.dtype) -> _Scratch:
        tile = next(_tiles(logits), slice(0, 0))
        return cls(*(logits.new_empty(tile.stop, logits.shape[1], dtype=wide) for _ in range(3)))


class _Stats(NamedTuple):
    """What losses and slopes are made of, per row of a tile [n]. mean_z = E_p~[z]; z_label = z[label]; below = sum b."""

    lse: torch.Tensor
    mean_z: torch.Tensor
    entropy: torch.Tensor
    share: torch.Tensor
    a: torch.Tensor
    z_label: torch.Tensor
    below: torch.Tensor


def _judge(z: torch.Tensor, task: _Task, g: slice, target: _Target, of: torch.Tensor, scratch: _Scratch, slope: bool) -> _Rows:
    """Rows g of the whole, a tile of n. With `slope`, their logits z [n, V_d] become the unweighted gradient. of [n]: rows of `target`."""
    q, p, b = (x[: len(z)] for x in scratch)
    x, hard, uses_p, uses_b = z.to(q.dtype), task.loss == "hard_ce", task.loss in ("soft_ce", "kl", "lk_lambda"), task.loss in ("lk_alpha", "lk_lambda")
    index = task.teacher_of[g]
    label, share = task.teacher.label[index], target.share[of]
    first = label.clamp(min=0)
    top, best = x.max(-1)
    torch.index_select(target.p, 0, of, out=p)
    mean_z = torch.mul(p, x, out=b).sum(-1) / share if uses_p else top
    z_label = _at(x, first)
    torch.softmax(x, -1, out=q)
    lse = top - _at(q, best).log()  # from the arg-max's own probability: no second pass of exponentials
    a = torch.minimum(p, q, out=b).sum(-1)
    below = torch.lt(q, p, out=b).mul_(q).sum(-1) if uses_b and slope else a
    stats = _Stats(lse, mean_z, target.entropy[of], share, a, z_label, below)
    if slope:
        if hard:
            q.scatter_add_(1, first[:, None], -torch.ones_like(z_label)[:, None])
        _combine(_slope(task.loss, task.eta, stats), q, p, b, z)
    known = label >= 0 if hard else target.known[of] if uses_p else torch.ones_like(label, dtype=torch.bool)
    return _Rows(
        loss=torch.where(known, _value(task.loss, task.eta, stats), 0),
        correct=task.draft_ids[best] == task.teacher.argmax[index],
        prob=a,
        scale=task.row_weight[g] * known,
    )


def _value(loss: LossName, eta: float, s: _Stats) -> torch.Tensor:
    """The loss of each row [n]."""
    match loss:
        case "soft_ce":
            return s.lse - s.mean_z
        case "kl":
            return (s.lse - s.mean_z - s.entropy).clamp_(min=0)  # rounding of the difference
        case "hard_ce":
            return s.lse - s.z_label
        case "lk_alpha":
            return -s.a.clamp(min=torch.finfo(s.a.dtype).tiny).log()
        case "lk_lambda":
            part = torch.exp(-eta * s.a)
            return part * _value("kl", eta, s) + (1 - part) * (1 - s.a)
    assert_never(loss)


class _Slope(NamedTuple):
    """d loss / dz = q * Q + p * P + b * B, with factors per row [n] (None: Q = 1, P = 0, B = 0)."""

    q: torch.Tensor | None = None
    p: torch.Tensor | None = None
    b: torch.Tensor | None = None


def _slope(loss: LossName, eta: float, s: _Stats) -> _Slope:
    """d a / dz_v = b_v - q_v sum b, because d q_u / dz_v = q_u ([u = v] - q_v) and only entries with q < p count."""
    match loss:
        case "soft_ce" | "kl":
            return _Slope(p=-1 / s.share)
        case "hard_ce":
            return _Slope()  # q - 1 at the label: the caller has subtracted it
        case "lk_alpha":
            inverse = 1 / s.a.clamp(min=torch.finfo(s.a.dtype).tiny)
            return _Slope(q=s.below * inverse, b=-inverse)
        case "lk_lambda":
            part = torch.exp(-eta * s.a)
            return _Slope(q=part + (1 - part) * s.below, p=-part / s.share, b=part - 1)
    assert_never(loss)


def _combine(slope: _Slope, q: torch.Tensor, p: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """out = q * Q + p * P + b * B; q is used up."""
    if slope.q is not None:
        q.mul_(slope.q[:, None])
    terms = [(x, factor[:, None]) for x, factor in ((p, slope.p), (b, slope.b)) if factor is not None]
    for x, factor in terms[:-1]:
        q.addcmul_(x, factor)
    if terms:
        torch.addcmul(q, *terms[-1], out=out)
    else:
        out.copy_(q)


def _wide(h: torch.Tensor) -> torch.dtype:
    """Dtype of everything between the matrix products."""
    return torch.promote_types(h.dtype, torch.float32)


def _at(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """x[i, index[i]]: [n, V_d], [n] -> [n]."""
    return x.gather(1, index[:, None]).squeeze(1)


def _edges(bounds: npt.NDArray[np.int64], rows: int) -> npt.NDArray[np.int64]:
    """Bounds of the teacher rows that have draft rows: [U + 1]."""
    if bounds[0] != 0 or bounds[-1] != rows:
        raise ValueError(f"bounds must run from 0 to the {rows} rows of h, they run from {bounds[0]} to {bounds[-1]}")
    return np.append(bounds[:-1][np.diff(bounds) > 0], rows)


def _chunks(edges: npt.NDArray[np.int64], chunk: int) -> list[tuple[int, int]]:
    """Ranges [a, b) of used teacher rows whose draft rows number at most `chunk` (at least one teacher row each)."""
    out, a, rows = [], 0, len(edges) - 1
    while a < rows:
        b = max(a + 1, int(np.searchsorted(edges, edges[a] + chunk, side="right")) - 1)
        out.append((a, b))
        a = b
    return out


def _widest(edges: npt.NDArray[np.int64], pieces: list[tuple[int, int]]) -> int:
    """Draft rows of the largest chunk."""
    return max((int(edges[b] - edges[a]) for a, b in pieces), default=0)


def _tiles(z: torch.Tensor) -> Iterator[slice]:
    """Rows of z [n, V_d] in tiles."""
    size = _CPU_TILE * torch.get_num_threads() if z.device.type == "cpu" else _OTHER_TILE
    step = max(1, size // z.shape[1])
    yield from (slice(a, b) for a, b in pairwise([*range(0, len(z), step), len(z)]))
