"""Merged attention over a shared prefix and a row's own entries: the shape that makes draft training fast (arXiv 2503.01840, 2602.06036).

A row is anchored at position t. Its b queries (test-time training: one; a block: its slots) see the prefix keys j <= t of
its own document and a handful of entries of its own: one of each draft step so far, or those of its block. Only the prefix
needs large matrix products. They run on a fused kernel that returns the log-sum-exp; the own entries are small batched
products; all parts are merged by log-sum-exp. The kernel's own backward, given the *merged* output and log-sum-exp, yields
the exact prefix gradients. No S x S matrix exists in either pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

_KEY_CHUNK = 512  # keys scored at once by the portable kernel
_TINY = 400  # multiplications below which torch does a batched product in a plain loop, slower than element-wise
_ALL = slice(None)


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
    """One kernel call: the queries [rows, slots] against `keys`, square and causal or fully visible. first: nothing to merge with yet."""

    rows: slice
    slots: slice
    keys: slice
    causal: bool
    first: bool


def _blocks(spans: Sequence[Span], b: int, square: int) -> Iterator[_Block]:
    """Kernel calls of `spans` with b queries a row: the keys all rows of a span see, then the causal rest; few rows of many queries one by one."""
    for s in spans:
        shared = s.anchor > s.start
        if s.count <= shared + b:
            for i in range(s.count):
                yield _Block(slice(s.row + i, s.row + i + 1), _ALL, slice(s.start, s.anchor + i + 1), False, True)
            continue
        if shared:
            yield _Block(slice(s.row, s.row + s.count), _ALL, slice(s.start, s.anchor + 1), False, True)
        # The first row sees nothing beyond the shared keys.
        yield from _triangle(s.row + shared, s.anchor + shared, s.count - shared, b, square, not shared)


def _triangle(row: int, key: int, count: int, b: int, square: int, first: bool) -> Iterator[_Block]:
    """Calls for `count` rows of which row + i sees the keys [key, key + i]: causal squares of at most `square` rows, and what lies below them."""
    if count <= square:
        for j in range(b):
            yield _Block(slice(row, row + count), slice(j, j + 1), slice(key, key + count), True, first)
        return
    half = -(-count // (2 * square)) * square
    yield from _triangle(row, key, half, b, square, first)
    yield _Block(slice(row + half, row + count), _ALL, slice(key, key + half), False, first)
    yield from _triangle(row + half, key + half, count - half, b, square, False)


def merged_attention(q: torch.Tensor, prefix: KV | None, steps: Sequence[KV], spans: Sequence[Span], scale: float) -> torch.Tensor:
    """Attention of N rows of b queries over their prefix and the entries of their own.

    q [N, b, A, D]; prefix [T, G, D] or None (no prefix at all); steps: entries of the rows, each [N, G, D] and visible to
    all b queries of its row; spans cover every row once if there is a prefix; A a multiple of G. Returns [N, b, A, D] in
    q's dtype. Differentiable in q, prefix and steps. Raises ValueError when there is nothing to attend to.
    """
    if prefix is None and not steps:
        raise ValueError("merged_attention: neither a prefix nor draft steps to attend to")
    kernel = _kernel_for(q)
    blocks = list(_blocks(spans, q.shape[1], kernel.square)) if prefix is not None else []
    k, v = prefix if prefix is not None else (None, None)
    return _Merged.apply(q, k, v, blocks, kernel, scale, *(s.k for s in steps), *(s.v for s in steps))


class _Merged(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, blocks: list[_Block], kernel: Any, scale: float, *own: torch.Tensor
    ) -> torch.Tensor:
        q = q.contiguous()
        out = lse = None
        rest: tuple[Any, ...] = ()
        if k is not None and v is not None:
            out, lse, rest = _prefix_forward(q, k, v, blocks, kernel, scale)
        if own:
            out, lse = _own_forward(q, own, out, lse, scale)
        assert out is not None
        result = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, result, lse, *own)
        ctx.blocks, ctx.kernel, ctx.scale, ctx.rest = blocks, kernel, scale, rest
        return result

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse, *own = ctx.saved_tensors
        grad = grads[0].contiguous()
        dq, dk, dv, down = None, None, None, [None] * len(own)
        if k is not None:
            dq, dk, dv = _prefix_backward(grad, q, k, v, out, lse, ctx)
        if own:
            dq, down = _own_backward(grad, q, own, out, lse, dq, ctx.scale)
        return dq.to(q.dtype), dk, dv, None, None, None, *down


def _prefix_forward(q, k, v, blocks, kernel, scale):
    """Output [N, b, A, D] and log-sum-exp [N, b, A] over the prefix alone, and what the kernel wants back."""
    wide = torch.promote_types(q.dtype, torch.float32)
    out, lse = q.new_empty(q.shape, dtype=wide), q.new_empty(q.shape[:-1], dtype=wide)
    rest: tuple[Any, ...] = ()
    for at in blocks:
        here = at.rows, at.slots
        o, part, rest = kernel.forward(_by_head(q[here], k), k[at.keys].transpose(0, 1), v[at.keys].transpose(0, 1), at.causal, scale)
        o, part = o.permute(2, 0, 1, 3).reshape(out[here].shape), part.permute(2, 0, 1).reshape(lse[here].shape)
        if at.first:
            out[here], lse[here] = o, part
        else:
            total = torch.logaddexp(lse[here], part)
            out[here].mul_((lse[here] - total).exp_().unsqueeze(-1)).addcmul_(o.to(wide), (part - total).exp_().unsqueeze(-1))
            lse[here] = total
    return out, lse, rest


def _prefix_backward(grad, q, k, v, out, lse, ctx):
    """Gradients of q (in fp32 at least) and of the prefix, from the merged output and log-sum-exp."""
    dq = torch.empty_like(q, dtype=lse.dtype)
    dk, dv = (torch.zeros_like(t, dtype=lse.dtype) if need else None for t, need in ((k, ctx.needs_input_grad[1]), (v, ctx.needs_input_grad[2])))
    for at in ctx.blocks:
        here = at.rows, at.slots
        rows = [_by_head(t[here], k) for t in (grad, q, out, lse.unsqueeze(-1))]
        gq, gk, gv = ctx.kernel.backward(*rows, k[at.keys].transpose(0, 1), v[at.keys].transpose(0, 1), at.causal, ctx.scale, ctx.rest)
        gq = gq.permute(2, 0, 1, 3).reshape(dq[here].shape)
        if at.first:
            dq[here] = gq
        else:
            dq[here] += gq
        if dk is not None:
            dk[at.keys] += gk.transpose(0, 1)
        if dv is not None:
            dv[at.keys] += gv.transpose(0, 1)
    return dq, None if dk is None else dk.to(k.dtype), None if dv is None else dv.to(v.dtype)


def _own_forward(q, own, out, lse, scale):
    """Adds the rows' own entries to out [N, b, A, D], lse [N, b, A] (in place), or starts them if None."""
    rows, keys, values = _own(q, own)
    scores = _product(rows, keys.transpose(-1, -2)).mul_(scale)  # [N, G, b·A/G, I]
    total = torch.logsumexp(scores, -1)
    if lse is not None:
        lse = _grouped(lse.unsqueeze(-1), keys).squeeze(-1)
        total = torch.logaddexp(lse, total)
    added = _ungrouped(_product(scores.sub_(total.unsqueeze(-1)).exp_(), values), q)
    if out is not None and lse is not None:
        added = out.mul_(_ungrouped((lse - total).exp_().unsqueeze(-1), q)).add_(added)
    return added, _ungrouped(total.unsqueeze(-1), q).squeeze(-1)


def _own_backward(grad, q, own, out, lse, dq, scale):
    """Gradient of q, added to dq (in place) unless that is None, and of the entries in the order of `own`."""
    rows, keys, values = _own(q, own)
    g = _grouped(grad, keys)
    weights = _product(rows, keys.transpose(-1, -2)).mul_(scale).sub_(_grouped(lse.unsqueeze(-1), keys)).exp_()  # [N, G, b·A/G, I]
    delta = (g * _grouped(out, keys)).sum(-1, keepdim=True)
    ds = _product(g, values.transpose(-1, -2)).sub_(delta).mul_(weights).mul_(scale)
    from_own = _ungrouped(_product(ds, keys), q)
    dk, dv = (_product(s.transpose(-1, -2), x).to(own[0].dtype).unbind(2) for s, x in ((ds, rows), (weights, g)))
    return from_own if dq is None else dq.add_(from_own), [*dk, *dv]


def _own(q: torch.Tensor, own: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries [N, G, b·A/G, D] and the keys and values [N, G, I, D] of their own entries, in fp32 at least."""
    wide, half = torch.promote_types(q.dtype, torch.float32), len(own) // 2
    keys, values = (torch.stack(list(part), 2).to(wide) for part in (own[:half], own[half:]))
    return _grouped(q, keys), keys, values


def _grouped(x: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """[N, b, A, D] -> [N, G, b·A/G, D] in the dtype of keys [N, G, …]; a view if b is 1."""
    return x.unflatten(2, (keys.shape[1], -1)).transpose(1, 2).flatten(2, 3).to(keys.dtype)


def _ungrouped(x: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """[N, G, b·A/G, D] -> [N, b, A, D] as q has them."""
    return x.unflatten(2, (q.shape[1], -1)).transpose(1, 2).flatten(2, 3)


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a [N, G, n, i] @ b [N, G, i, m]."""
    if a.shape[-2] * a.shape[-1] * b.shape[-1] < _TINY:
        return (a.unsqueeze(-1) * b.unsqueeze(-3)).sum(-2)
    return a @ b


def _by_head(x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Queries [n, b, A, D] as the kernels take them: a view [G, A/G, n·b, D], k being [m, G, D]."""
    return x.flatten(0, 1).unflatten(1, (k.shape[1], -1)).permute(1, 2, 0, 3)


class _CpuKernel:
    """torch's fused CPU attention (fp32, fp64, bf16)."""

    # It leaves out hidden keys in steps of 512, so that small squares with rectangles below them cost less than a large one.
    square = 128

    @staticmethod
    def forward(q, k, v, causal, scale):
        o, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, _spread(k, q), _spread(v, q), 0.0, causal, scale=scale)
        return o, lse, ()

    @staticmethod
    def backward(grad, q, out, lse, k, v, causal, scale, rest):
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, _spread(k, q), _spread(v, q), out, lse.squeeze(-1).contiguous(), 0.0, causal, scale=scale
        )
        return dq, dk.sum(1), dv.sum(1)


class _CudaFlashKernel:
    """torch's CUDA flash attention (bf16, fp16)."""

    square = 1 << 62

    @staticmethod
    def forward(q, k, v, causal, scale):
        o, lse, _, _, _, _, seed, offset, _ = torch.ops.aten._scaled_dot_product_flash_attention(
            q, k.unsqueeze(1), v.unsqueeze(1), 0.0, causal, False, scale=scale
        )
        return o, lse, (seed, offset)

    @staticmethod
    def backward(grad, q, out, lse, k, v, causal, scale, rest):
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            grad, q, k.unsqueeze(1), v.unsqueeze(1), out, lse.squeeze(-1).contiguous(), None, None, q.shape[2], k.shape[1], 0.0, causal, *rest, scale=scale
        )
        return dq, dk.squeeze(1), dv.squeeze(1)


class PortableKernel:
    """Plain torch operations, one chunk of keys at a time: linear memory on any device and dtype."""

    square = 512

    @staticmethod
    def _scores(q, k, j, causal, scale):
        keys = k[:, None, j : j + _KEY_CHUNK].to(q.dtype)
        s = (q @ keys.transpose(-1, -2)).mul_(scale)
        if causal:
            hidden = torch.arange(j, j + keys.shape[2], device=q.device) > torch.arange(q.shape[2], device=q.device)[:, None]
            s.masked_fill_(hidden, float("-inf"))
        return s, keys

    @staticmethod
    def forward(q, k, v, causal, scale):
        q = q.to(torch.promote_types(q.dtype, torch.float32))
        out, lse = torch.zeros_like(q), q.new_full(q.shape[:-1], float("-inf"))
        for j in range(0, k.shape[1], _KEY_CHUNK):
            s, _ = PortableKernel._scores(q, k, j, causal, scale)
            total = torch.logaddexp(lse, s.logsumexp(-1))
            p = s.sub_(total.unsqueeze(-1)).exp_()
            out.mul_((lse - total).exp_().unsqueeze(-1)).add_(p @ v[:, None, j : j + _KEY_CHUNK].to(q.dtype))
            lse = total
        return out, lse, ()

    @staticmethod
    def backward(grad, q, out, lse, k, v, causal, scale, rest):
        grad, q, out = (t.to(lse.dtype) for t in (grad, q, out))
        dq = torch.zeros_like(q)
        dk, dv = (torch.empty_like(t, dtype=lse.dtype) for t in (k, v))
        delta = (grad * out).sum(-1, keepdim=True)
        for j in range(0, k.shape[1], _KEY_CHUNK):
            s, keys = PortableKernel._scores(q, k, j, causal, scale)
            p = s.sub_(lse).exp_()
            ds = (grad @ v[:, None, j : j + _KEY_CHUNK].to(q.dtype).transpose(-1, -2)).sub_(delta).mul_(p).mul_(scale)
            dv[:, j : j + _KEY_CHUNK] = (p.transpose(-1, -2) @ grad).sum(1)
            dk[:, j : j + _KEY_CHUNK] = (ds.transpose(-1, -2) @ q).sum(1)
            dq += ds @ keys
        return dq, dk, dv


def _kernel_for(q: torch.Tensor) -> Any:
    if q.device.type == "cpu" and q.dtype != torch.float16:
        return _CpuKernel
    if q.device.type == "cuda" and q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] % 8 == 0:
        return _CudaFlashKernel
    return PortableKernel


def _spread(k: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """[G, m, D] -> [G, A/G, m, D] without a copy: the heads of a group read the same keys."""
    return k.unsqueeze(1).expand(-1, q.shape[1], -1, -1)
