"""The merged attention against a dense reference written independently of it."""

import pytest
import torch

from kvshot_ds.drafters import attention
from kvshot_ds.drafters.attention import KV, PortableKernel, Span, merged_attention


def dense(q, prefix, steps, spans, scale):
    """Row by row, key by key: softmax over the visible prefix keys and the row's own step keys."""
    heads = q.shape[1]
    out = torch.zeros_like(q)
    rows = {s.row + i: (s.start, s.anchor + i + 1) for s in spans for i in range(s.count)}
    for n in range(q.shape[0]):
        lo, hi = rows.get(n, (0, 0))
        for a in range(heads):
            keys, values = [], []
            if prefix is not None:
                g = a // (heads // prefix.k.shape[1])
                keys += list(prefix.k[lo:hi, g])
                values += list(prefix.v[lo:hi, g])
            for s in steps:
                g = a // (heads // s.k.shape[1])
                keys.append(s.k[n, g])
                values.append(s.v[n, g])
            w = torch.softmax(torch.stack(keys) @ q[n, a] * scale, 0)
            out[n, a] = w @ torch.stack(values)
    return out


SPANS = {
    "all rows of two documents": [Span(0, 5, 0, 0), Span(5, 4, 5, 5)],
    "supervised runs": [Span(0, 3, 0, 2), Span(3, 1, 0, 8), Span(4, 5, 9, 12)],
    "one row, as in decoding": [Span(0, 1, 0, 11)],
    "first row of a document": [Span(0, 2, 3, 3)],
}


def case(spans, steps, dtype=torch.float64, heads=(4, 2), width=8, keys=20):
    torch.manual_seed(0)
    rows = sum(s.count for s in spans)

    def make(*shape):
        return torch.randn(*shape, dtype=dtype).requires_grad_()

    prefix = KV(make(keys, heads[1], width), make(keys, heads[1], width))
    return make(rows, heads[0], width), prefix, [KV(make(rows, heads[1], width), make(rows, heads[1], width)) for _ in range(steps)]


def leaves(q, prefix, steps):
    return [q, *(prefix or ()), *(t for s in steps for t in s)]


@pytest.mark.parametrize("kernel", ["fused", "portable"])
@pytest.mark.parametrize("steps", [0, 1, 6])
@pytest.mark.parametrize("name", SPANS)
def test_equals_dense_in_output_and_all_gradients(name, steps, kernel, monkeypatch):
    if kernel == "portable":
        monkeypatch.setattr(attention, "_kernel_for", lambda q: PortableKernel)
        monkeypatch.setattr(attention, "_KEY_CHUNK", 3)
    spans = SPANS[name]
    q, prefix, own = case(spans, steps)
    want, got = dense(q, prefix, own, spans, 0.3), merged_attention(q, prefix, own, spans, 0.3)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    weight = torch.randn_like(want)
    for a, b in zip(
        torch.autograd.grad((got * weight).sum(), leaves(q, prefix, own)), torch.autograd.grad((want * weight).sum(), leaves(q, prefix, own)), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


def test_gradcheck_float64():
    spans = SPANS["supervised runs"]
    q, prefix, own = case(spans, 2, width=4, keys=18)

    def run(q, pk, pv, k0, v0, k1, v1):
        return merged_attention(q, KV(pk, pv), [KV(k0, v0), KV(k1, v1)], spans, 0.5)

    assert torch.autograd.gradcheck(run, leaves(q, prefix, own))


def test_without_a_prefix():
    q, _, own = case([Span(0, 6, 0, 0)], 3)
    got = merged_attention(q, None, own, [], 0.3)
    torch.testing.assert_close(got, dense(q, None, own, [], 0.3))
    with pytest.raises(ValueError, match="neither a prefix"):
        merged_attention(q, None, [], [], 0.3)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("length", [64, 257, 1024])
def test_lengths_and_dtypes(length, dtype, tolerance):
    """Against torch's own attention over the concatenated keys with an explicit mask, forward and backward."""
    spans = [Span(0, length - 10, 0, 10)]
    q, prefix, own = case(spans, 3, dtype=dtype, heads=(6, 3), width=16, keys=length)
    rows = len(q)
    k = torch.cat([prefix.k, *(s.k for s in own)]).transpose(0, 1).repeat_interleave(2, 0)
    v = torch.cat([prefix.v, *(s.v for s in own)]).transpose(0, 1).repeat_interleave(2, 0)
    seen = torch.arange(length) <= torch.arange(10, length)[:, None]
    mask = torch.cat([seen, *(torch.eye(rows, dtype=torch.bool) for _ in own)], 1)
    want = torch.nn.functional.scaled_dot_product_attention(q.transpose(0, 1).double(), k.double(), v.double(), mask, scale=0.25).transpose(0, 1)
    got = merged_attention(q, prefix, own, spans, 0.25)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), want, rtol=0, atol=tolerance)
    weight = torch.randn_like(want)
    for a, b in zip(
        torch.autograd.grad((got.double() * weight).sum(), leaves(q, prefix, own)),
        torch.autograd.grad((want * weight).sum(), leaves(q, prefix, own)),
        strict=True,
    ):
        torch.testing.assert_close(a.double(), b.double(), rtol=tolerance, atol=tolerance * 10)


def test_no_square_matrix_is_allocated():
    """Peak of live tensor storage stays linear: doubling S about doubles it."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        size = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for t in out if isinstance(out, tuple | list) else (out,):
                if isinstance(t, torch.Tensor):
                    self.size = max(self.size, t.numel())
            return out

    def largest(length):
        spans = [Span(0, length, 0, 0)]
        q, prefix, own = case(spans, 2, dtype=torch.float32, heads=(2, 1), keys=length)
        with Largest() as seen:
            merged_attention(q, prefix, own, spans, 0.3).sum().backward()
        return seen.size

    assert largest(2048) <= 2.2 * largest(1024) < 1024 * 1024
