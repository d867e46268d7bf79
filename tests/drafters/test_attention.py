"""The merged attention against a dense reference written independently of it."""

import pytest
import torch

from kvshot_ds.drafters import attention
from kvshot_ds.drafters.attention import KV, PortableKernel, Span, merged_attention


def dense(q, prefix, steps, spans, scale):
    """Query by query, key by key: softmax over the visible prefix keys and the row's own entries."""
    heads = q.shape[2]
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
            for j in range(q.shape[1]):
                w = torch.softmax(torch.stack(keys) @ q[n, j, a] * scale, 0)
                out[n, j, a] = w @ torch.stack(values)
    return out


SPANS = {
    "all rows of two documents": [Span(0, 5, 0, 0), Span(5, 4, 5, 5)],
    "supervised runs": [Span(0, 3, 0, 2), Span(3, 1, 0, 8), Span(4, 5, 9, 12)],
    "a run longer than any block": [Span(0, 9, 0, 0), Span(9, 8, 9, 11)],
    "one row, as in decoding": [Span(0, 1, 0, 11)],
    "first row of a document": [Span(0, 2, 3, 3)],
    "scattered rows, near and far": [Span(i, 1, 0, a) for i, a in enumerate((0, 1, 4, 6, 7, 15))] + [Span(6, 2, 9, 11), Span(8, 1, 9, 14), Span(9, 4, 9, 16)],
    "spans in any order": [Span(3, 1, 0, 3), Span(0, 2, 0, 5), Span(2, 1, 0, 7), Span(4, 1, 0, 8)],
    "rows in any order": [Span(0, 1, 0, 7), Span(1, 1, 0, 0), Span(2, 1, 5, 19), Span(3, 1, 5, 5), Span(4, 1, 5, 6), Span(5, 1, 0, 3), Span(6, 1, 0, 3)],
}


def case(spans, steps, dtype=torch.float64, heads=(4, 2), width=8, keys=20, b=1):
    torch.manual_seed(0)
    rows = sum(s.count for s in spans)

    def make(*shape):
        return torch.randn(*shape, dtype=dtype).requires_grad_()

    prefix = KV(make(keys, heads[1], width), make(keys, heads[1], width))
    return make(rows, b, heads[0], width), prefix, [KV(make(rows, heads[1], width), make(rows, heads[1], width)) for _ in range(steps)]


def leaves(q, prefix, steps):
    return [q, *(prefix or ()), *(t for s in steps for t in s)]


def assert_same_gradients(got, want, inputs, atol):
    weight = torch.randn_like(want)
    for a, b in zip(torch.autograd.grad((got * weight).sum(), inputs), torch.autograd.grad((want * weight).sum(), inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=atol)


@pytest.fixture(params=["fused", "portable"])
def kernel(request, monkeypatch):
    """Each kernel, with limits small enough that spans are cut, rows share calls or not, and keys come in several chunks."""
    for limit, value in {"_KEY_CHUNK": 3, "_LONG_RUN": 3, "_REACH": 5}.items():
        monkeypatch.setattr(attention, limit, value)
    monkeypatch.setattr(attention._CpuKernel, "square", 4)
    monkeypatch.setattr(PortableKernel, "square", 4)
    if request.param == "portable":
        monkeypatch.setattr(attention, "_kernel_for", lambda q: PortableKernel)


@pytest.mark.parametrize("b", [1, 2, 5])
@pytest.mark.parametrize("steps", [0, 1, 6])
@pytest.mark.parametrize("name", SPANS)
def test_equals_dense_in_output_and_all_gradients(name, steps, b, kernel):
    spans = SPANS[name]
    q, prefix, own = case(spans, steps, b=b)
    want, got = dense(q, prefix, own, spans, 0.3), merged_attention(q, prefix, own, spans, 0.3)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    assert_same_gradients(got, want, leaves(q, prefix, own), 1e-11)


@pytest.mark.parametrize("heads", [(3, 3), (6, 1)])
def test_head_layouts(heads, kernel):
    spans = SPANS["supervised runs"]
    q, prefix, own = case(spans, 2, heads=heads, b=2)
    want, got = dense(q, prefix, own, spans, 0.3), merged_attention(q, prefix, own, spans, 0.3)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    assert_same_gradients(got, want, leaves(q, prefix, own), 1e-11)


def dense_at_once(q, prefix, anchors, start):
    """The reference without a loop, for more rows: q [N, b, A, D], one key/value head; row n sees the keys [start[n], anchors[n]]."""
    at = torch.arange(len(prefix.k))
    hidden = (at < start[:, None]) | (at > anchors[:, None])
    scores = torch.einsum("nbad,md->nbam", q, prefix.k[:, 0]).masked_fill(hidden[:, None, None], float("-inf"))
    return torch.einsum("nbam,md->nbad", scores.softmax(-1), prefix.v[:, 0])


@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("b", [1, 3])
@pytest.mark.parametrize("count", [2, 31, 32, 33, 127, 128, 129, 300])
def test_run_lengths_around_every_limit_in_use(count, b, portable, monkeypatch):
    if portable:
        monkeypatch.setattr(attention, "_kernel_for", lambda q: PortableKernel)
    spans = [Span(0, count, 2, 2), Span(count, count, 2, 7)]
    q, prefix, _ = case(spans, 0, keys=count + 12, heads=(2, 1), b=b)
    anchors = torch.cat([s.anchor + torch.arange(s.count) for s in spans])
    want, got = dense_at_once(q, prefix, anchors, torch.full_like(anchors, 2)), merged_attention(q, prefix, [], spans, 1.0)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    assert_same_gradients(got, want, leaves(q, prefix, []), 1e-10)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 1e-5), (torch.bfloat16, 5e-2)])
@pytest.mark.parametrize("b", [1, 2, 5])
def test_random_rows_of_two_documents(b, dtype, tolerance):
    """Runs and single rows at random, as block-wise training draws them, with the limits in use."""
    r = torch.Generator().manual_seed(b)
    spans, row = [], 0
    for start, end in ((0, 500), (500, 800)):
        for anchor in sorted(set((start + torch.randint(end - start, (40,), generator=r)).tolist())):
            spans.append(Span(row, 1, start, anchor))
            row += 1
    spans += [Span(row, 60, 500, 620), Span(row + 60, 20, 500, 510)]
    q, prefix, _ = case(spans, 0, keys=800, heads=(2, 1), b=b, dtype=dtype)
    anchors = torch.cat([s.anchor + torch.arange(s.count) for s in spans])
    start = torch.cat([torch.full((s.count,), s.start) for s in spans])
    got = merged_attention(q, prefix, [], spans, 1.0)
    exact = [t.detach().double().requires_grad_() for t in leaves(q, prefix, [])]
    want = dense_at_once(exact[0], KV(*exact[1:]), anchors, start)
    torch.testing.assert_close(got.double(), want, rtol=0, atol=tolerance)
    weight = torch.randn(want.shape, dtype=torch.float64)
    grads = torch.autograd.grad((got.double() * weight).sum(), leaves(q, prefix, []))
    for a, e in zip(grads, torch.autograd.grad((want * weight).sum(), exact), strict=True):
        torch.testing.assert_close(a.double(), e, rtol=tolerance, atol=tolerance * 10)


@pytest.mark.parametrize("b", [1, 5])
def test_neighbouring_rows_share_their_calls(b):
    """512 rows drawn from 2,048 positions are not 512 kernel calls; nor does a run make more of them than its length asks for."""
    anchors = sorted(torch.randperm(2048, generator=torch.Generator().manual_seed(0))[:512].tolist())
    scattered = [Span(i, 1, 0, a) for i, a in enumerate(anchors)]
    for spans, most in ((scattered, 34), ([Span(0, 2048, 0, 0)], 32), ([Span(0, 1, 0, 900)], 1)):
        blocks = attention._plan(torch.zeros(2048, b, 1, 8), spans, 1.0).blocks
        assert len(blocks) <= most
        # What is scored and thrown away stays a small square.
        assert all(at.keys.stop - at.keys.start <= 128 for at in blocks if at.mask != "none")


def test_cuda_kernel_calls_fit_their_operators(monkeypatch):
    """Without a GPU: shapes and signatures, on tensors that have no data."""
    monkeypatch.setattr(attention, "_kernel_for", lambda q: attention._CudaFlashKernel)
    for b, spans in ((1, SPANS["supervised runs"]), (1, [Span(0, 60, 0, 7)]), (4, SPANS["supervised runs"])):
        q, prefix, own = case(spans, 2, dtype=torch.bfloat16, b=b, keys=80)
        q, *rest = (t.detach().to("meta").requires_grad_() for t in leaves(q, prefix, own))
        blocks = attention._plan(q, spans, 0.3).blocks
        out = merged_attention(q, KV(*rest[:2]), [KV(*rest[2:4]), KV(*rest[4:])], spans, 0.3)
        assert {at.mask for at in blocks} == ({"none", "causal"} if len(spans) == 1 else {"none", "anchors"})
        for t, g in zip((q, q, *rest), (out, *torch.autograd.grad(out.sum(), (q, *rest))), strict=True):
            assert (g.shape, g.dtype) == (t.shape, torch.bfloat16)


@pytest.mark.parametrize("b", [1, 5])
def test_entries_may_be_strided_views_and_queries_too(b):
    """As a block has them: its b entries are one tensor [N, b, G, D], its queries a slice of a larger one."""
    spans = SPANS["rows in any order"]
    q, prefix, own = case(spans, b, b=b)
    k, v = (torch.stack([s[i] for s in own], 1).detach().requires_grad_() for i in (0, 1))
    wide = torch.cat((q, q), -1).detach().requires_grad_()
    got = merged_attention(wide[..., :8], prefix, [KV(*pair) for pair in zip(k.unbind(1), v.unbind(1), strict=True)], spans, 0.3)
    want = dense(q, prefix, own, spans, 0.3)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    weight = torch.randn_like(want)
    dq, dk, dv = torch.autograd.grad((got * weight).sum(), (wide, k, v))
    expected = torch.autograd.grad((want * weight).sum(), [q, *(t for s in own for t in s)])
    torch.testing.assert_close(dq[..., :8], expected[0], rtol=0, atol=1e-11)
    torch.testing.assert_close(dk, torch.stack(expected[1::2], 1), rtol=0, atol=1e-11)
    torch.testing.assert_close(dv, torch.stack(expected[2::2], 1), rtol=0, atol=1e-11)


@pytest.mark.parametrize("b", [1, 2])
def test_gradcheck_float64(b):
    spans = SPANS["supervised runs"]
    q, prefix, own = case(spans, 2, width=4, keys=18, b=b)

    def run(q, pk, pv, k0, v0, k1, v1):
        return merged_attention(q, KV(pk, pv), [KV(k0, v0), KV(k1, v1)], spans, 0.5)

    assert torch.autograd.gradcheck(run, leaves(q, prefix, own))


@pytest.mark.parametrize("b", [1, 3])
def test_without_a_prefix(b):
    q, _, own = case([Span(0, 6, 0, 0)], 3, b=b)
    got, want = merged_attention(q, None, own, [], 0.3), dense(q, None, own, [], 0.3)
    torch.testing.assert_close(got, want)
    assert_same_gradients(got, want, leaves(q, None, own), 1e-11)
    with pytest.raises(ValueError, match="neither a prefix"):
        merged_attention(q, None, [], [], 0.3)


def test_no_rows():
    q, prefix, own = case([], 2, b=2)
    got = merged_attention(q, prefix, own, [], 0.3)
    assert got.shape == (0, 2, 4, 8)
    assert all(g.shape == x.shape and not g.any() for g, x in zip(torch.autograd.grad(got.sum(), leaves(q, prefix, own)), leaves(q, prefix, own), strict=True))


@pytest.mark.parametrize("frozen", ["prefix", "keys", "queries", "entries"])
def test_what_needs_no_gradient_changes_nothing_else(frozen):
    """The target's own KV is a prefix without gradient."""
    spans = SPANS["supervised runs"]
    q, prefix, own = case(spans, 2)
    weight = torch.randn_like(q)
    full = torch.autograd.grad((merged_attention(q, prefix, own, spans, 0.3) * weight).sum(), leaves(q, prefix, own))
    still = {"prefix": prefix, "keys": [prefix.k], "queries": [q], "entries": [t for s in own for t in s]}[frozen]
    for t in still:
        t.requires_grad_(False)
    moving = [(t, g) for t, g in zip(leaves(q, prefix, own), full, strict=True) if t.requires_grad]
    assert len(moving) == len(full) - len(still)
    got = torch.autograd.grad((merged_attention(q, prefix, own, spans, 0.3) * weight).sum(), [t for t, _ in moving])
    assert all(torch.equal(a, g) for a, (_, g) in zip(got, moving, strict=True))


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
    want = torch.nn.functional.scaled_dot_product_attention(q[:, 0].transpose(0, 1).double(), k.double(), v.double(), mask, scale=0.25).transpose(0, 1)
    got = merged_attention(q, prefix, own, spans, 0.25)[:, 0]
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
                    self.size = max(self.size, t.untyped_storage().nbytes() // t.itemsize)
            return out

    def largest(length):
        spans = [Span(0, length, 0, 0)]
        q, prefix, own = case(spans, 2, dtype=torch.float32, heads=(2, 1), keys=length)
        with Largest() as seen:
            merged_attention(q, prefix, own, spans, 0.3).sum().backward()
        return seen.size

    assert largest(2048) <= 2.2 * largest(1024) < 1024 * 1024


@pytest.mark.parametrize("b", [1, 2])
def test_what_is_kept_for_the_backward_grows_linearly_with_the_steps(b):
    """A step keeps references to the entries of earlier steps, not copies of them."""
    spans = [Span(0, 64, 0, 0)]

    def kept(steps):
        q, prefix, own = case(spans, steps, dtype=torch.float32, keys=64, b=b)
        seen: dict[int, int] = {}

        def pack(t):
            seen[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            out = [merged_attention(q + k, prefix, own[:k], spans, 0.3) for k in range(steps)]
        assert len(out) == steps
        return sum(seen.values())

    assert kept(8) - kept(6) == kept(6) - kept(4)
