"""Merged prefix + diagonal attention: the shape that makes test-time training fast (algorithms of arXiv 2503.01840, 2604.26412).

At step k a query row anchored at position t sees the prefix keys j <= t of its own document and one key of each
draft step i <= k, at its own row. Only the prefix needs a matrix product. It runs on a fused kernel that returns the
log-sum-exp; the few diagonal scores are element-wise; both are merged by log-sum-exp. The kernel's own backward,
given the *merged* output and log-sum-exp, yields the exact prefix gradients. No S x S matrix exists in either pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

_KEY_CHUNK = 512  # keys scored at once by the portable kernel


@dataclass(frozen=True)
class Span:
    """Rows [row, row + count) of the query tensor, anchored at keys anchor, anchor + 1, … of a document starting at key `start`.

    Row row + i sees the keys [start, anchor + i]. All numbers are flat indices on the host.
    """

    row: int
    count: int
    start: int
    anchor: int


class KV(NamedTuple):
    """Keys and values, each [n, G, D]."""

    k: torch.Tensor
    v: torch.Tensor


class _Block(NamedTuple):
    """One kernel call: rows [q0, q1) against keys [k0, k1), square and causal or fully visible."""

    q0: int
    q1: int
    k0: int
    k1: int
    causal: bool


def _blocks(spans: Sequence[Span]) -> list[_Block]:
    """Kernel calls of `spans`. A row lies in at most two blocks: the keys all rows of its span see, and a causal square."""
    out = []
    for s in spans:
        if s.anchor == s.start:
            out.append(_Block(s.row, s.row + s.count, s.start, s.start + s.count, True))
            continue
        out.append(_Block(s.row, s.row + s.count, s.start, s.anchor + 1, False))
        if s.count > 1:
            out.append(_Block(s.row + 1, s.row + s.count, s.anchor + 1, s.anchor + s.count, True))
    return out


def merged_attention(q: torch.Tensor, prefix: KV | None, steps: Sequence[KV], spans: Sequence[Span], scale: float) -> torch.Tensor:
    """Attention of N rows over their prefix and their own draft steps.

    q [N, A, D]; prefix [T, G, D] or None (no prefix at all); steps: KV of draft steps, each [N, G, D]; spans cover
    every row once if there is a prefix; A a multiple of G. Returns [N, A, D] in q's dtype. Differentiable in q, prefix and steps.
    Raises ValueError when there is nothing to attend to.
    """
    if prefix is None and not steps:
        raise ValueError("merged_attention: neither a prefix nor draft steps to attend to")
    none = q.new_empty(0, *q.shape[1:])
    pk, pv = prefix if prefix is not None else (none, none)
    sk = torch.stack([s.k for s in steps]) if steps else none
    sv = torch.stack([s.v for s in steps]) if steps else none
    return _Merged.apply(q, pk, pv, sk, sv, _blocks(spans) if prefix is not None else [], scale)


class _Merged(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, pk: torch.Tensor, pv: torch.Tensor, sk: torch.Tensor, sv: torch.Tensor, blocks: list[_Block], scale: float
    ) -> torch.Tensor:
        wide = torch.promote_types(q.dtype, torch.float32)
        out = q.new_zeros(q.shape, dtype=wide)
        lse = q.new_full(q.shape[:2], float("-inf"), dtype=wide)
        kernel = _kernel_for(q)
        saved = []
        for b in blocks:
            o, part, rest = kernel.forward(q[b.q0 : b.q1], pk[b.k0 : b.k1], pv[b.k0 : b.k1], b.causal, scale)
            saved.append(rest)
            _merge(out[b.q0 : b.q1], lse[b.q0 : b.q1], o, part)
        if sk.numel():
            scores = _grouped_scores(q, sk, scale)  # [I, N, A]
            total = torch.logaddexp(lse, torch.logsumexp(scores, 0))
            out.mul_((lse - total).exp_().unsqueeze(-1))
            weights = (scores - total).exp_()
            groups = _groups(out, sv.shape[-2])
            for weight, value in zip(weights, sv, strict=True):
                groups.addcmul_(_groups(weight.unsqueeze(-1), sv.shape[-2]), value.unsqueeze(2).to(wide))
            lse = total
        result = out.to(q.dtype)
        ctx.save_for_backward(q, pk, pv, sk, sv, result, lse)
        ctx.blocks, ctx.scale, ctx.kernel, ctx.rest = blocks, scale, kernel, saved
        return result

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, pk, pv, sk, sv, out, lse = ctx.saved_tensors
        grad = grads[0].contiguous()
        wide = lse.dtype
        dq = torch.zeros_like(q, dtype=wide)
        dpk, dpv = torch.zeros_like(pk, dtype=wide), torch.zeros_like(pv, dtype=wide)
        for b, rest in zip(ctx.blocks, ctx.rest, strict=True):
            rows, keys = slice(b.q0, b.q1), slice(b.k0, b.k1)
            gq, gk, gv = ctx.kernel.backward(grad[rows], q[rows], pk[keys], pv[keys], out[rows], lse[rows], b.causal, ctx.scale, rest)
            dq[rows] += gq
            dpk[keys] += gk
            dpv[keys] += gv
        dsk = dsv = None
        if sk.numel():
            heads = sk.shape[-2]
            weights = (_grouped_scores(q, sk, ctx.scale) - lse).exp_()  # [I, N, A]
            g = grad.to(wide)
            delta = (g * out.to(wide)).sum(-1)
            dsk, dsv = torch.empty_like(sk), torch.empty_like(sv)
            g_groups, q_groups, dq_groups = _groups(g, heads), _groups(q.to(wide), heads), _groups(dq, heads)
            for i, weight in enumerate(weights):
                value, key = sv[i].unsqueeze(2).to(wide), sk[i].unsqueeze(2).to(wide)
                w = _groups(weight.unsqueeze(-1), heads)  # [N, G, A/G, 1]
                ds = w * ((g_groups * value).sum(-1, keepdim=True) - _groups(delta.unsqueeze(-1), heads)) * ctx.scale
                dsv[i] = (w * g_groups).sum(2)
                dsk[i] = (ds * q_groups).sum(2)
                dq_groups.addcmul_(ds, key)
        return dq.to(q.dtype), dpk.to(pk.dtype), dpv.to(pv.dtype), dsk, dsv, None, None


def _groups(x: torch.Tensor, heads: int) -> torch.Tensor:
    """[N, A, D] viewed as [N, G, A/G, D]."""
    return x.view(x.shape[0], heads, -1, x.shape[-1])


def _grouped_scores(q: torch.Tensor, sk: torch.Tensor, scale: float) -> torch.Tensor:
    """Scores of every row against its own key of each step: q [N, A, D], sk [I, N, G, D] -> [I, N, A]."""
    wide = torch.promote_types(q.dtype, torch.float32)
    groups = _groups(q.to(wide), sk.shape[-2])
    return torch.stack([(groups * k.unsqueeze(2).to(wide)).sum(-1).flatten(1) for k in sk]) * scale


def _merge(out: torch.Tensor, lse: torch.Tensor, o: torch.Tensor, part: torch.Tensor) -> None:
    """Folds a partial result (o [n, A, D], part [n, A]) into out, lse in place."""
    total = torch.logaddexp(lse, part)
    out.mul_((lse - total).exp_().unsqueeze(-1)).add_(o * (part - total).exp_().unsqueeze(-1))
    lse.copy_(total)


class _CpuKernel:
    """torch's fused CPU attention (fp32, fp64, bf16)."""

    @staticmethod
    def forward(q, k, v, causal, scale):
        o, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*_heads_first(q, *_expand(q, k, v)), 0.0, causal, scale=scale)
        return o[0].transpose(0, 1), lse[0].transpose(0, 1), ()

    @staticmethod
    def backward(grad, q, k, v, out, lse, causal, scale, rest):
        hq, hk, hv = _heads_first(q, *_expand(q, k, v))
        hg, ho = _heads_first(grad, out)
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            hg, hq, hk, hv, ho, lse.transpose(0, 1)[None].contiguous(), 0.0, causal, scale=scale
        )
        return dq[0].transpose(0, 1), _shrink(dk, k), _shrink(dv, v)


class _CudaFlashKernel:
    """torch's CUDA flash attention (bf16, fp16)."""

    @staticmethod
    def forward(q, k, v, causal, scale):
        o, lse, cu_q, cu_k, max_q, max_k, seed, offset, _ = torch.ops.aten._scaled_dot_product_flash_attention(
            *_heads_first(q, *_expand(q, k, v)), 0.0, causal, False, scale=scale
        )
        return o[0].transpose(0, 1), lse[0].transpose(0, 1), (cu_q, cu_k, max_q, max_k, seed, offset)

    @staticmethod
    def backward(grad, q, k, v, out, lse, causal, scale, rest):
        cu_q, cu_k, max_q, max_k, seed, offset = rest
        hq, hk, hv = _heads_first(q, *_expand(q, k, v))
        hg, ho = _heads_first(grad, out)
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            hg, hq, hk, hv, ho, lse.transpose(0, 1)[None].contiguous(), cu_q, cu_k, max_q, max_k, 0.0, causal, seed, offset, scale=scale
        )
        return dq[0].transpose(0, 1), _shrink(dk, k), _shrink(dv, v)


class PortableKernel:
    """Plain torch operations, one chunk of keys at a time: linear memory on any device and dtype."""

    @staticmethod
    def _scores(q, k, j, causal, scale, wide):
        keys = k[j : j + _KEY_CHUNK].to(wide)
        s = torch.einsum("ngad,mgd->ngam", _groups(q.to(wide), k.shape[1]), keys) * scale
        if causal:
            hidden = torch.arange(j, j + len(keys), device=q.device) > torch.arange(len(q), device=q.device)[:, None]
            s = s.masked_fill(hidden[:, None, None], float("-inf"))
        return s, keys

    @staticmethod
    def forward(q, k, v, causal, scale):
        wide = torch.promote_types(q.dtype, torch.float32)
        out, lse = q.new_zeros(q.shape, dtype=wide), q.new_full(q.shape[:2], float("-inf"), dtype=wide)
        for j in range(0, len(k), _KEY_CHUNK):
            s, _ = PortableKernel._scores(q, k, j, causal, scale, wide)
            part = s.logsumexp(-1)
            p = (s - part.clamp_min(torch.finfo(wide).min).unsqueeze(-1)).exp_()
            o = torch.einsum("ngam,mgd->ngad", p, v[j : j + _KEY_CHUNK].to(wide)).reshape(q.shape)
            _merge(out, lse, o, part.flatten(1))
        return out, lse, ()

    @staticmethod
    def backward(grad, q, k, v, out, lse, causal, scale, rest):
        wide, heads = lse.dtype, k.shape[1]
        g, dq = _groups(grad.to(wide), heads), torch.zeros_like(q, dtype=wide)
        dk, dv = torch.empty_like(k, dtype=wide), torch.empty_like(v, dtype=wide)
        delta = (g * _groups(out.to(wide), heads)).sum(-1, keepdim=True)
        for j in range(0, len(k), _KEY_CHUNK):
            s, keys = PortableKernel._scores(q, k, j, causal, scale, wide)
            p = (s - _groups(lse.unsqueeze(-1), heads)).exp_()
            values = v[j : j + _KEY_CHUNK].to(wide)
            ds = p * (torch.einsum("ngad,mgd->ngam", g, values) - delta) * scale
            dv[j : j + _KEY_CHUNK] = torch.einsum("ngam,ngad->mgd", p, g)
            dk[j : j + _KEY_CHUNK] = torch.einsum("ngam,ngad->mgd", ds, _groups(q.to(wide), heads))
            dq += torch.einsum("ngam,mgd->ngad", ds, keys).reshape(q.shape)
        return dq, dk, dv


def _kernel_for(q: torch.Tensor) -> Any:
    if q.device.type == "cpu" and q.dtype != torch.float16:
        return _CpuKernel
    if q.device.type == "cuda" and q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] % 8 == 0:
        return _CudaFlashKernel
    return PortableKernel


def _heads_first(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """[n, A, D] -> [1, A, n, D], as the kernels want it."""
    return tuple(t.transpose(0, 1)[None] for t in tensors)


def _expand(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values repeated to q's head count."""
    repeat = q.shape[1] // k.shape[1]
    return (k, v) if repeat == 1 else (k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1))


def _shrink(grad: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Gradient [1, A, n, D] of repeated heads summed back to [n, G, D]."""
    n, heads, width = like.shape
    return grad[0].reshape(heads, -1, n, width).sum(1).transpose(0, 1)
