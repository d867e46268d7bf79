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
from typing import Any, Literal, NamedTuple

import torch
from torch.autograd.function import once_differentiable

_KEY_CHUNK = 512  # keys scored at once by the portable kernel
_LONG_RUN = 32  # consecutive rows worth a causal call
_REACH = 128  # keys over which the anchors of scattered rows may lie apart to share their calls
_TINY = 400  # multiplications below which torch does a batched product in a plain loop, slower than element-wise


@dataclass(frozen=True)
class Span:
    """Rows [row, row + count) of the query tensor, anchored at keys anchor, anchor + 1, … of a document starting at key `start`.

    Row row + i sees the keys [start, anchor + i], or all rows see [start, anchor] if they are `together`: the nodes of a
    draft tree. All numbers are flat indices on the host.
    """

    row: int
    count: int
    start: int
    anchor: int
    together: bool = False


@dataclass(frozen=True)
class Hidden:
    """Prefix keys that are kept from a row, for diagnosis: those that stand least, least + 1, … most before its anchor (most None: and all before)."""

    least: int
    most: int | None = None


class KV(NamedTuple):
    """Keys and values, each [n, G, D]."""

    k: torch.Tensor
    v: torch.Tensor


class _Block(NamedTuple):
    """One kernel call: `rows` against `keys`. first: nothing to merge with yet. A row lies in few blocks, each prefix key of it in one."""

    rows: slice
    keys: slice
    mask: Literal["none", "causal", "anchors"]
    first: bool


def _blocks(spans: Sequence[Span], b: int, square: int) -> Iterator[_Block]:
    """Kernel calls of `spans` with b queries a row: long runs of single queries use the kernel's own causality, other rows a mask."""
    near: list[Span] = []
    for s in spans:
        if s.together:
            yield _Block(slice(s.row, s.row + s.count), slice(s.start, s.anchor + 1), "none", True)
            continue
        if b == 1 and s.count > _LONG_RUN:
            yield from _run(s, square)
            continue
        for i in range(0, s.count, _REACH):
            piece = Span(s.row + i, min(_REACH, s.count - i), s.start, s.anchor + i)
            if near and not _joins(near, piece):
                yield from _scattered(near)
                near = []
            near.append(piece)
    if near:
        yield from _scattered(near)


def _joins(near: list[Span], piece: Span) -> bool:
    """Whether the rows of `piece` follow those of `near` in the same document, further on but in reach."""
    first, last = near[0], near[-1]
    follows = piece.start == last.start and piece.row == last.row + last.count and piece.anchor >= last.anchor + last.count
    return follows and piece.anchor + piece.count <= first.anchor + _REACH


def _scattered(near: list[Span]) -> Iterator[_Block]:
    """The keys that all rows see, then the others, each row up to its anchor. The first row sees nothing beyond the shared keys."""
    first, last = near[0], near[-1]
    end = last.row + last.count
    yield _Block(slice(first.row, end), slice(first.start, first.anchor + 1), "none", True)
    if end - first.row > 1:
        yield _Block(slice(first.row + 1, end), slice(first.anchor + 1, last.anchor + last.count), "anchors", False)


def _run(s: Span, square: int) -> Iterator[_Block]:
    """The same for a run of rows, without a mask."""
    shared = s.anchor > s.start
    if shared:
        yield _Block(slice(s.row, s.row + s.count), slice(s.start, s.anchor + 1), "none", True)
    yield from _triangle(s.row + shared, s.anchor + shared, s.count - shared, square, not shared)


def _triangle(row: int, key: int, count: int, square: int, first: bool) -> Iterator[_Block]:
    """Calls for `count` rows of which row + i sees the keys [key, key + i]: causal squares of at most `square` rows, and what lies below them."""
    if count <= square:
        yield _Block(slice(row, row + count), slice(key, key + count), "causal", first)
        return
    half = -(-count // (2 * square)) * square
    yield from _triangle(row, key, half, square, first)
    yield _Block(slice(row + half, row + count), slice(key, key + half), "none", first)
    yield from _triangle(row + half, key + half, count - half, square, False)


def _anchors(spans: Sequence[Span], rows: int, device: torch.device) -> torch.Tensor:
    """Last key of each row [N]."""
    anchors = [0] * rows
    for s in spans:
        anchors[s.row : s.row + s.count] = range(s.anchor, s.anchor + s.count)
    return torch.tensor(anchors).to(device, non_blocking=True)


def merged_attention(
    q: torch.Tensor, prefix: KV | None, steps: Sequence[KV], spans: Sequence[Span], scale: float, hidden: Hidden | None = None
) -> torch.Tensor:
    """Attention of N rows of b queries over their prefix and the entries of their own.

    q [N, b, A, D]; prefix [T, G, D] or None (no prefix at all); steps: entries of the rows, each [N, G, D] and visible to
    all b queries of its row; spans cover every row once if there is a prefix; A a multiple of G. Returns [N, b, A, D] in
    q's dtype. Differentiable in q, prefix and steps. Raises ValueError when there is nothing to attend to.
    hidden: a part of the prefix that no row sees; every row has to see something besides. Slower, as no kernel does it.
    """
    if prefix is None and not steps:
        raise ValueError("merged_attention: neither a prefix nor draft steps to attend to")
    if prefix is not None and hidden is not None:
        return _partly_hidden(q, prefix, steps, spans, scale, hidden)
    k, v = prefix if prefix is not None else (None, None)
    return _Merged.apply(q, k, v, _plan(q, spans if prefix is not None else (), scale), *(s.k for s in steps), *(s.v for s in steps))


def _partly_hidden(q: torch.Tensor, prefix: KV, steps: Sequence[KV], spans: Sequence[Span], scale: float, hidden: Hidden) -> torch.Tensor:
    """In plain operations, a few rows against all their keys at a time."""
    out, wide = [], torch.promote_types(q.dtype, torch.float32)
    for s in spans:
        for anchor in range(s.anchor, s.anchor + s.count, _REACH):
            end = min(anchor + _REACH, s.anchor + s.count)
            rows = slice(s.row + anchor - s.anchor, s.row + end - s.anchor)
            first = s.start if hidden.most is not None else min(max(s.start, anchor - hidden.least + 1), end)
            keys, values = (x[first:end].to(wide) for x in prefix)
            distance = torch.arange(anchor, end, device=q.device)[:, None] - torch.arange(first, end, device=q.device)
            withheld = distance >= hidden.least if hidden.most is None else (distance >= hidden.least) & (distance <= hidden.most)
            mine = _grouped(q[rows], keys.transpose(0, 1)[None])  # [n, G, b·A/G, D]
            scores = torch.einsum("nghd,mgd->nghm", mine, keys).mul(scale).masked_fill((withheld | (distance < 0))[:, None, None], float("-inf"))
            parts = [scores]
            if steps:
                own_keys, own_values = (torch.stack([x[rows] for x in part], 2).to(wide) for part in zip(*steps, strict=True))
                parts.append(mine @ own_keys.transpose(-1, -2) * scale)
            weights = torch.softmax(torch.cat(parts, -1), -1)
            found = torch.einsum("nghm,mgd->nghd", weights[..., : end - first], values)
            if steps:
                found = found + weights[..., end - first :] @ own_values
            out.append(_ungrouped(found, q[rows]))
    return torch.cat(out).to(q.dtype) if out else torch.empty_like(q)


class _Plan(NamedTuple):
    """How the prefix is attended to. anchors [N]: last key of each row, where a block's mask needs it."""

    blocks: list[_Block]
    anchors: torch.Tensor | None
    kernel: Any
    scale: float

    def call(self, at: _Block, q: torch.Tensor) -> tuple[Any, bool | torch.Tensor]:
        """Kernel of a block, and what is hidden from its rows: nothing, what causality hides, or a mask [n, m]."""
        if self.anchors is None or at.mask != "anchors":
            return self.kernel, at.mask == "causal"
        keys = torch.arange(at.keys.start, at.keys.stop, device=q.device)
        hidden = keys > self.anchors[at.rows].repeat_interleave(q.shape[1])[:, None]
        return self.kernel if self.kernel.masks else PortableKernel, hidden


def _plan(q: torch.Tensor, spans: Sequence[Span], scale: float) -> _Plan:
    kernel = _kernel_for(q)
    blocks = list(_blocks(spans, q.shape[1], kernel.square))
    masked = any(at.mask == "anchors" for at in blocks)
    return _Plan(blocks, _anchors(spans, len(q), q.device) if masked else None, kernel, scale)


class _Merged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, plan: _Plan, *own: torch.Tensor) -> torch.Tensor:
        q = q.contiguous()
        out = lse = None
        ctx.rest = ()
        if k is not None and v is not None:
            out, lse, ctx.rest = _prefix_forward(q, k, v, plan)
        if own:
            out, lse = _own_forward(q, own, out, lse, plan.scale)
        assert out is not None
        result = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, result, lse, *own)
        ctx.plan = plan
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse, *own = ctx.saved_tensors
        grad = grads[0].contiguous()
        dq = dk = dv = None
        if k is not None:
            dq, dk, dv = _prefix_backward(grad, q, k, v, out, lse, ctx)
        down: list[torch.Tensor] = []
        if own:
            dq, down = _own_backward(grad, q, own, out, lse, dq, ctx.plan.scale)
        assert dq is not None
        return dq.to(q.dtype), dk, dv, None, *down


def _prefix_forward(q, k, v, plan):
    """Output [N, b, A, D] and log-sum-exp [N, b, A] over the prefix alone, and what the fused kernel wants back."""
    wide = torch.promote_types(q.dtype, torch.float32)
    out, lse = q.new_empty(q.shape, dtype=wide), q.new_empty(q.shape[:-1], dtype=wide)
    rest: tuple[Any, ...] = ()
    for at in plan.blocks:
        kernel, hidden = plan.call(at, q)
        o, part, new = kernel.forward(_by_head(q, at, k), k[at.keys].transpose(0, 1), v[at.keys].transpose(0, 1), hidden, plan.scale)
        rest = new or rest
        o_at, lse_at = _by_head(out, at, k), _by_head(lse, at, k)
        if at.first:
            o_at.copy_(o)
            lse_at.copy_(part)
        else:
            total = torch.logaddexp(lse_at, part)
            o_at.mul_((lse_at - total).exp_().unsqueeze(-1)).addcmul_(o.to(wide), (part - total).exp_().unsqueeze(-1))
            lse_at.copy_(total)
    return out, lse, rest


def _prefix_backward(grad, q, k, v, out, lse, ctx):
    """Gradients of q (in fp32 at least) and of the prefix, from the merged output and log-sum-exp."""
    dq = torch.empty_like(q, dtype=lse.dtype)
    dk, dv = (torch.zeros_like(t, dtype=lse.dtype) if need else None for t, need in ((k, ctx.needs_input_grad[1]), (v, ctx.needs_input_grad[2])))
    for at in ctx.plan.blocks:
        kernel, hidden = ctx.plan.call(at, q)
        rows = [_by_head(t, at, k) for t in (grad, q, out, lse)]
        gq, gk, gv = kernel.backward(*rows, k[at.keys].transpose(0, 1), v[at.keys].transpose(0, 1), hidden, ctx.plan.scale, ctx.rest)
        dq_at = _by_head(dq, at, k)
        if at.first:
            dq_at.copy_(gq)
        else:
            dq_at.add_(gq)
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


def _by_head(x: torch.Tensor, at: _Block, k: torch.Tensor) -> torch.Tensor:
    """What a call takes of x [N, b, A, ...], laid out as the kernels have it: a view [G, A/G, n, ...], n queries; k is [T, G, D]."""
    return x[at.rows].flatten(0, 1).unflatten(1, (k.shape[1], -1)).movedim(0, 2)


class _CpuKernel:
    """torch's fused CPU attention (fp32, fp64, bf16)."""

    # It leaves out hidden keys in steps of 512, so that small squares with rectangles below them cost less than a large one.
    square, masks = 128, True

    @staticmethod
    def forward(q, k, v, hidden, scale):
        (rows,), k, v, mask = _CpuKernel._batch((q,), k, v, hidden)
        o, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(rows, k, v, 0.0, hidden is True, attn_mask=mask, scale=scale)
        return o.view(q.shape) if hidden is False else o, lse.view(q.shape[:-1]), ()

    @staticmethod
    def backward(grad, q, out, lse, k, v, hidden, scale, rest):
        (grad, rows, out, lse), k, v, mask = _CpuKernel._batch((grad, q, out, lse.unsqueeze(-1)), k, v, hidden)
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, rows, k, v, out, lse.squeeze(-1).contiguous(), 0.0, hidden is True, attn_mask=mask, scale=scale
        )
        return dq.view(q.shape) if hidden is False else dq, dk.sum(1), dv.sum(1)

    @staticmethod
    def _batch(rows, k, v, hidden):
        """Rows [G, A/G, n, D] and keys [G, m, D] as the kernel wants them, with as many heads of each; a mask is added to the scores.

        Where nothing is hidden, the heads of a group are just more rows: keys are read once, and their gradient comes
        summed. Otherwise the keys are shown to each head, without a copy.
        """
        if hidden is False:
            return [x.flatten(1, 2).unsqueeze(1) for x in rows], k.unsqueeze(1), v.unsqueeze(1), None
        shape = rows[0].shape[:2]
        k, v = (x.unsqueeze(1).expand(-1, shape[1], -1, -1) for x in (k, v))
        return rows, k, v, None if hidden is True else k.new_zeros(hidden.shape).masked_fill_(hidden, float("-inf")).expand(*shape, -1, -1)


class _CudaFlashKernel:
    """torch's CUDA flash attention (bf16, fp16)."""

    square, masks = 1 << 62, False

    @staticmethod
    def forward(q, k, v, causal, scale):
        o, lse, _, _, _, _, seed, offset, _ = torch.ops.aten._scaled_dot_product_flash_attention(
            q, k.unsqueeze(1), v.unsqueeze(1), 0.0, causal, False, scale=scale
        )
        return o, lse, (seed, offset)

    @staticmethod
    def backward(grad, q, out, lse, k, v, causal, scale, rest):
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            grad, q, k.unsqueeze(1), v.unsqueeze(1), out, lse.contiguous(), None, None, q.shape[2], k.shape[1], 0.0, causal, *rest, scale=scale
        )
        return dq, dk.squeeze(1), dv.squeeze(1)


class PortableKernel:
    """Plain torch operations, one chunk of keys at a time: linear memory on any device and dtype. Takes any mask [n, m] of hidden keys."""

    square, masks = 512, True

    @staticmethod
    def _scores(q, k, j, hidden, scale):
        """Scores [G, A/G, n, M] of a chunk of keys [G, M, D]; the first key of all is visible to every row."""
        keys = k[:, j : j + _KEY_CHUNK].to(q.dtype)
        s = (q.flatten(1, 2) @ keys.transpose(-1, -2)).mul_(scale).unflatten(1, q.shape[1:3])
        if hidden is True:
            hidden = torch.ones(q.shape[2], k.shape[1], dtype=torch.bool, device=q.device).triu_(1)
        return s if hidden is False else s.masked_fill_(hidden[:, j : j + _KEY_CHUNK], float("-inf")), keys

    @staticmethod
    def forward(q, k, v, hidden, scale):
        q = q.to(torch.promote_types(q.dtype, torch.float32))
        out, lse = torch.zeros_like(q), q.new_full(q.shape[:-1], float("-inf"))
        for j in range(0, k.shape[1], _KEY_CHUNK):
            s, _ = PortableKernel._scores(q, k, j, hidden, scale)
            total = torch.logaddexp(lse, s.logsumexp(-1))
            p = s.sub_(total.unsqueeze(-1)).exp_()
            o = p.flatten(1, 2) @ v[:, j : j + _KEY_CHUNK].to(q.dtype)
            out.mul_((lse - total).exp_().unsqueeze(-1)).add_(o.view(q.shape))
            lse = total
        return out, lse, ()

    @staticmethod
    def backward(grad, q, out, lse, k, v, hidden, scale, rest):
        grad, q, out = (t.to(lse.dtype) for t in (grad, q, out))
        delta = (grad * out).sum(-1, keepdim=True).flatten(1, 2)
        g, rows = grad.flatten(1, 2), q.flatten(1, 2)
        dq, (dk, dv) = torch.zeros_like(rows), (torch.empty_like(t, dtype=lse.dtype) for t in (k, v))
        for j in range(0, k.shape[1], _KEY_CHUNK):
            s, keys = PortableKernel._scores(q, k, j, hidden, scale)
            p = s.sub_(lse.unsqueeze(-1)).exp_().flatten(1, 2)
            ds = (g @ v[:, j : j + _KEY_CHUNK].to(g.dtype).transpose(-1, -2)).sub_(delta).mul_(p).mul_(scale)
            dv[:, j : j + _KEY_CHUNK] = p.transpose(-1, -2) @ g
            dk[:, j : j + _KEY_CHUNK] = ds.transpose(-1, -2) @ rows
            dq += ds @ keys
        return dq.view(q.shape), dk, dv


def _kernel_for(q: torch.Tensor) -> Any:
    if q.device.type == "cpu" and q.dtype != torch.float16:
        return _CpuKernel
    if q.device.type == "cuda" and q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256:
        return _CudaFlashKernel
    return PortableKernel
