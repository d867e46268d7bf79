"""Losses through the draft head against the formulas written out with full logits and plain autograd, in float64."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvshot_ds.objectives import losses
from kvshot_ds.objectives.losses import BestTokens, HeadInput, Teacher, head_loss, token_confidence

LOSSES = ["soft_ce", "kl", "hard_ce", "lk_alpha", "lk_lambda"]
ETA = 3.0
TARGET_VOCAB, VOCAB, HIDDEN = 29, 17, 6


@dataclass
class Case:
    h: torch.Tensor
    weight: torch.Tensor
    teacher: Teacher
    teacher_of: torch.Tensor
    bounds: np.ndarray
    row_weight: torch.Tensor
    ids: torch.Tensor
    full_head: torch.Tensor
    hidden: torch.Tensor
    best: int

    def run(self, loss, chunk=64, **changed):
        c = replace(self, **changed)
        return head_loss(c.h, c.weight, c.teacher, c.teacher_of, c.bounds, c.row_weight, c.ids, chunk, loss, ETA)

    def confidence(self, chunk=64):
        return token_confidence(self.h, self.weight, self.teacher, self.teacher_of, self.bounds, chunk)


def make(counts=(3, 0, 0, 5, 1, 0, 2, 4, 0), seed=0, dtype=torch.float64, sharp=1.0, best=0):
    """counts: draft rows of each teacher row. best: the teacher is the so many best tokens, 0: hidden states."""
    g = torch.Generator().manual_seed(seed)

    def rand(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    full_head, hidden = rand(TARGET_VOCAB, HIDDEN) * sharp, rand(len(counts), HIDDEN)
    ids = torch.randperm(TARGET_VOCAB, generator=g)[:VOCAB].sort().values
    logits = hidden @ full_head.T
    label = torch.randint(VOCAB, (len(counts),), generator=g)
    label[3] = -1
    signal = HeadInput(hidden.to(dtype), full_head[ids].to(dtype), logits.logsumexp(-1))
    if best:
        tokens = [sorted(range(TARGET_VOCAB), key=lambda v, row=row: (-row[v], v))[:best] for row in logits.tolist()]
        index = [[ids.tolist().index(v) if v in ids.tolist() else -1 for v in row] for row in tokens]
        signal = BestTokens(torch.tensor(index), torch.log_softmax(logits, -1).gather(1, torch.tensor(tokens)))
    teacher = Teacher(signal, logits.argmax(-1), label)
    bounds = np.concatenate(([0], np.cumsum(counts)))
    rows = int(bounds[-1])
    return Case(
        h=rand(rows, HIDDEN).to(dtype).requires_grad_(),
        weight=rand(VOCAB, HIDDEN).to(dtype).requires_grad_(),
        teacher=teacher,
        teacher_of=torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts)),
        bounds=bounds,
        row_weight=torch.rand(rows, generator=g, dtype=torch.float64),
        ids=ids,
        full_head=full_head,
        hidden=hidden.to(dtype),
        best=best,
    )


def probabilities(c: Case) -> torch.Tensor:
    """The target's distribution [M, V] of each draft row, 0 beyond the best tokens if the teacher is those."""
    full = torch.softmax(c.hidden.double() @ c.full_head.T, -1)
    if c.best:
        for row in full:
            row[torch.argsort(row, descending=True)[c.best :]] = 0
    return full[c.teacher_of]


def reference(c: Case, loss: str):
    """(row losses [M] on the graph of c.h and c.weight, a [M], correct [M]), with full logits. hard_ce: 0 where there is no label."""
    full = probabilities(c)
    p = full[:, c.ids]
    tilde = p / p.sum(-1, keepdim=True)
    log_q = torch.log_softmax(c.h.double() @ c.weight.double().T, -1)
    a = torch.minimum(p, log_q.exp()).sum(-1)
    kl = (torch.xlogy(tilde, tilde) - tilde * log_q).sum(-1)
    label = c.teacher.label[c.teacher_of]
    part = torch.exp(-ETA * a.detach())
    rows = {
        "soft_ce": -(tilde * log_q).sum(-1),
        "kl": kl,
        "hard_ce": -log_q[torch.arange(len(label)), label.clamp(min=0)] * (label >= 0),
        "lk_alpha": -a.log(),
        "lk_lambda": part * kl + (1 - part) * (1 - a),
    }[loss]
    return rows, a.detach(), c.ids[log_q.argmax(-1)] == full.argmax(-1)


def close(got, want, tol=1e-12):
    torch.testing.assert_close(got.double(), want.double(), rtol=tol, atol=tol)


@pytest.fixture(params=[1 << 18, 2 * VOCAB, 1], ids=["one tile", "tiles of 2 rows", "tiles of 1 row"])
def tile(request, monkeypatch):
    monkeypatch.setattr(losses, "_CPU_TILE", request.param)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)


@pytest.mark.parametrize("chunk", [1, 4, 15, 64])
@pytest.mark.parametrize("best", [0, 13], ids=["whole teacher", "13 best tokens"])
@pytest.mark.parametrize("loss", LOSSES)
def test_values_and_gradients(loss, best, chunk, tile):
    c = make(best=best)
    rows, a, correct = reference(c, loss)
    want = (rows * c.row_weight).sum()
    out = c.run(loss, chunk)
    close(out.loss, want)
    close(out.row_loss, rows)
    close(out.prob, a)
    assert out.correct.tolist() == correct.tolist()
    assert not (out.row_loss.requires_grad or out.prob.requires_grad)
    for got, expected in zip(torch.autograd.grad(3 * out.loss, (c.h, c.weight)), torch.autograd.grad(3 * want, (c.h, c.weight)), strict=True):
        assert expected.abs().max() > 1e-3
        close(got, expected)


def test_some_rows_of_the_case_are_right_and_some_wrong():
    correct = torch.cat([make(seed=s).run("kl").correct for s in range(4)])
    assert 0 < correct.sum() < len(correct)


@pytest.mark.parametrize("best", [0, 9])
@pytest.mark.parametrize("loss", ["soft_ce", "kl", "hard_ce", "lk_alpha"])
def test_gradcheck(loss, best):
    """Not lk_lambda: the factor it holds constant is none to a difference quotient."""
    c = make(counts=(1, 0, 0, 2, 1), best=best)
    assert torch.autograd.gradcheck(lambda h, w: c.run(loss, 2, h=h, weight=w).loss, (c.h, c.weight))


@pytest.mark.parametrize("loss", LOSSES)
def test_gradient_only_where_one_is_required(loss):
    c = make()
    want = torch.autograd.grad(c.run(loss).loss, (c.h, c.weight))
    frozen = c.run(loss, weight=c.weight.detach())
    close(torch.autograd.grad(frozen.loss, c.h)[0], want[0], 0)
    fixed = c.run(loss, h=c.h.detach())
    close(torch.autograd.grad(fixed.loss, c.weight)[0], want[1], 0)


class Recorder(TorchDispatchMode):
    """(operator name, numbers of entries of its tensor results, shapes of its tensor arguments), in order."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        results = [x for x in (out if isinstance(out, tuple | list) else [out]) if isinstance(x, torch.Tensor)]
        shapes = [tuple(x.shape) for x in args if isinstance(x, torch.Tensor)]
        self.seen.append((func.overloadpacket.__name__, max((x.numel() for x in results), default=0), shapes))
        return out

    def products(self):
        return [shapes for name, _, shapes in self.seen if name in ("mm", "addmm", "addmm_", "bmm")]


def record(call):
    with Recorder() as recorder:
        call()
    return recorder


@pytest.mark.parametrize("loss", LOSSES)
def test_no_matrix_product_serves_a_gradient_nobody_asked_for(loss):
    """15 rows, one chunk: teacher and logits, then one product for each gradient."""
    c = make()
    assert len(record(lambda: c.run(loss)).products()) == 4
    assert len(record(lambda: c.run(loss, weight=c.weight.detach())).products()) == 3
    assert len(record(lambda: c.run(loss, h=c.h.detach())).products()) == 3
    assert len(record(lambda: c.run(loss, h=c.h.detach(), weight=c.weight.detach())).products()) == 2
    with torch.no_grad():  # evaluation: the parameters still say that they require gradients
        quiet = record(lambda: c.run(loss))
        out = c.run(loss)
    assert len(quiet.products()) == 2 and not out.loss.requires_grad
    close(out.row_loss, c.run(loss).row_loss, 0)


@pytest.mark.parametrize("loss", LOSSES)
def test_memory_is_one_chunk_of_logits_and_the_rest_small_tiles(loss, monkeypatch):
    """2,000 teacher rows, one in five used, three draft rows each."""
    counts = [3 if r % 5 == 0 else 0 for r in range(2000)]
    c, chunk, tile = make(counts), 300, 4000
    monkeypatch.setattr(losses, "_CPU_TILE", tile)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    # Features and rows are as large as they are; nothing but them may exceed a chunk of logits.
    rows = sum(counts)
    assert tile < chunk * VOCAB < rows * HIDDEN < rows * VOCAB / 2
    seen = record(lambda: c.run(loss, chunk).loss.backward()).seen
    of_rows = {rows * HIDDEN}
    assert max(n for _, n, _ in seen if n not in of_rows) == chunk * VOCAB
    large = {name for name, n, _ in seen if n > tile and n not in of_rows}
    assert large <= {"mm", "new_empty", "empty", "slice", "t", "transpose", "permute", "detach", "addmm_"}, "a whole chunk passes through memory once more"


def test_the_teacher_is_computed_once_per_used_row():
    c = make()
    for chunk in (1, 4, 64):
        with torch.no_grad():
            shapes = record(lambda chunk=chunk: c.run("soft_ce", chunk)).products()
        assert sum(left[0] for left, _ in shapes[0::2]) == np.count_nonzero(np.diff(c.bounds))
        assert sum(left[0] for left, _ in shapes[1::2]) == len(c.h)


def test_no_supervised_rows():
    c = make(counts=(0,) * 9)
    for loss in LOSSES:
        out = c.run(loss)
        assert out.loss == 0 and out.row_loss.shape == out.correct.shape == out.prob.shape == (0,)
        out.loss.backward()
        assert c.h.grad.shape == (0, HIDDEN) and not c.weight.grad.any()
    assert c.confidence().shape == (0,)


def test_bounds_must_fit_the_rows():
    c = make()
    with pytest.raises(ValueError, match="0 to the 15 rows"):
        c.run("kl", bounds=c.bounds[:-2])


# Relations between the losses


@pytest.mark.parametrize("seed", range(3))
def test_kl_is_soft_ce_less_the_entropy_and_has_its_gradient(seed):
    c = make(seed=seed)
    soft, kl = c.run("soft_ce"), c.run("kl")
    full = probabilities(c)[:, c.ids]
    tilde = full / full.sum(-1, keepdim=True)
    close(kl.row_loss, soft.row_loss - torch.special.entr(tilde).sum(-1))
    assert (kl.row_loss >= 0).all()
    for a, b in zip(torch.autograd.grad(kl.loss, (c.h, c.weight)), torch.autograd.grad(soft.loss, (c.h, c.weight)), strict=True):
        close(a, b, 0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_drafter_equal_to_the_teacher(dtype):
    """q = p~ though the logits differ by a constant in each row: KL 0, no gradient of soft CE, a = the mass of the draft vocabulary."""
    c = make(dtype=dtype)
    c = replace(c, h=c.hidden[c.teacher_of].clone().requires_grad_(), weight=(c.teacher.signal.head + 1).requires_grad_())
    kl, lk = c.run("kl"), c.run("lk_alpha")
    full = probabilities(c)
    tol = 1e-12 if dtype == torch.float64 else 2e-6
    close(kl.row_loss, torch.zeros(15), tol)
    assert (kl.row_loss >= 0).all()
    close(torch.autograd.grad(kl.loss, c.h)[0], torch.zeros_like(c.h), tol)
    close(lk.prob, full[:, c.ids].sum(-1), tol)
    close(lk.row_loss, -lk.prob.log(), tol)


def test_lk_alpha_at_a_point_mass_is_hard_ce():
    """A teacher all of whose mass is at its arg-max; the text follows it."""
    c = make(sharp=200.0)
    arg = c.teacher.argmax
    inside = (c.ids == arg[:, None]).any(-1)
    label = torch.where(inside, (c.ids == arg[:, None]).int().argmax(-1), -1)
    assert 0 < inside[c.teacher_of].sum() < 15
    c.teacher = replace(c.teacher, label=label)
    c.row_weight = c.row_weight * inside[c.teacher_of]
    lk, hard = c.run("lk_alpha"), c.run("hard_ce")
    close(lk.row_loss[inside[c.teacher_of]], hard.row_loss[inside[c.teacher_of]], 1e-6)
    for a, b in zip(torch.autograd.grad(lk.loss, (c.h, c.weight)), torch.autograd.grad(hard.loss, (c.h, c.weight)), strict=True):
        close(a, b, 1e-6)


def test_lk_lambda_lies_between_its_parts():
    """eta = 0: l = 1, KL. eta large: l = 0, 1 - a."""
    c = make()

    def run(eta):
        return head_loss(c.h, c.weight, c.teacher, c.teacher_of, c.bounds, c.row_weight, c.ids, 64, "lk_lambda", eta)

    close(run(0.0).row_loss, c.run("kl").row_loss)
    close(run(1e6).row_loss, 1 - c.run("kl").prob)


# Rows at the edge of the numbers


def test_a_label_outside_of_the_draft_vocabulary_moves_nothing():
    c = make()
    outside = c.teacher.label[c.teacher_of] < 0
    assert outside.sum() == 5 and (c.row_weight[outside] > 0).all()
    out = c.run("hard_ce")
    assert (out.row_loss[outside] == 0).all() and (out.row_loss[~outside] > 0).all()
    dh, dw = torch.autograd.grad(out.loss, (c.h, c.weight))
    assert not dh[outside].any() and dh[~outside].any(-1).all()
    zeroed = c.run("hard_ce", row_weight=c.row_weight * ~outside)
    close(torch.autograd.grad(zeroed.loss, c.weight)[0], dw, 0)


@pytest.mark.parametrize("sharp", [20.0, 40.0], ids=["a is subnormal", "a is 0"])
@pytest.mark.parametrize("loss", LOSSES)
def test_finite_where_teacher_and_drafter_share_nothing(loss, sharp):
    """In fp32: teacher row 0 is judged against a drafter sure of its least likely token; row 3 has no mass in the draft vocabulary."""
    c = make(dtype=torch.float32, sharp=sharp)
    h, lse = c.h.detach() * 1, c.teacher.signal.lse.clone()
    h[:3] = -500 * c.hidden[0]
    lse[3] += 500
    c = replace(c, h=h.requires_grad_(), weight=c.teacher.signal.head.clone().requires_grad_())
    c.teacher = replace(c.teacher, signal=replace(c.teacher.signal, lse=lse))
    out = c.run(loss)
    assert out.prob[3:8].eq(0).all() and out.prob[:3].max() < 1e-38
    grads = torch.autograd.grad(out.loss, (c.h, c.weight))
    assert all(torch.isfinite(x).all() for x in (out.loss, out.row_loss, *grads))
    if loss in ("soft_ce", "kl", "lk_lambda"):  # there is no p~
        assert not out.row_loss[3:8].any() and not grads[0][3:8].any()
    if loss == "lk_alpha":
        assert out.row_loss[3:8].eq(-torch.tensor(torch.finfo(torch.float32).tiny).log()).all()


# Half precision


@pytest.mark.parametrize("chunk", [4, 64])
@pytest.mark.parametrize("loss", LOSSES)
def test_bf16(loss, chunk):
    """Against float64 on the same rounded numbers: results fp32, errors those of bf16 logits."""
    c = make(dtype=torch.bfloat16)
    rows, a, _ = reference(c, loss)
    want = torch.autograd.grad((rows * c.row_weight).sum(), (c.h, c.weight))
    out = c.run(loss, chunk)
    assert out.loss.dtype in (torch.float32, torch.float64) and out.row_loss.dtype == out.prob.dtype == torch.float32
    close(out.row_loss, rows, 0.06)
    close(out.prob, a, 0.02)
    got = torch.autograd.grad(out.loss, (c.h, c.weight))
    assert [x.dtype for x in got] == [torch.bfloat16, torch.bfloat16]
    for x, y in zip(got, want, strict=True):
        assert (x.double() - y).norm() < 0.03 * y.norm()


def test_bf16_gradients_add_up_in_fp32():
    """1,024 equal contributions in chunks of one row: a bf16 sum would stop growing at 256 of them."""
    c = make(counts=[1] * 1024, dtype=torch.bfloat16)
    same = torch.zeros(1024, dtype=torch.int64)
    signal = c.teacher.signal
    teacher = Teacher(HeadInput(signal.hidden[same], signal.head, signal.lse[same]), c.teacher.argmax[same], c.teacher.label[same])
    h = torch.ones_like(c.h)
    out = c.run("soft_ce", 1, h=h, teacher=teacher, row_weight=torch.ones(1024))
    one = c.run("soft_ce", 1, h=h[:1], teacher=teacher, teacher_of=same[:1], bounds=np.minimum(c.bounds, 1), row_weight=torch.ones(1))
    dw, single = (torch.autograd.grad(x.loss, c.weight)[0].double() for x in (out, one))
    assert (dw - 1024 * single).norm() < 0.01 * dw.norm()


# The drafter's confidence in the text


@pytest.mark.parametrize("chunk", [1, 4, 64])
def test_token_confidence(chunk, tile):
    c = make()
    q = torch.softmax(c.h @ c.weight.T, -1)
    label = c.teacher.label[c.teacher_of]
    want = q[torch.arange(15), label.clamp(min=0)] * (label >= 0)
    got = c.confidence(chunk)
    assert not got.requires_grad and (got == 0).sum() == 5
    close(got, want.detach())
    close(-got[label >= 0].log(), c.run("hard_ce").row_loss[label >= 0])
    assert len(record(lambda: c.confidence(15)).products()) == 1


@pytest.mark.parametrize("signal", ["hidden states", "best tokens"])
@pytest.mark.parametrize("loss", ["soft_ce", "kl", "lk_lambda", "lk_alpha"])
def test_a_damaged_teacher_shows_in_the_loss(loss, signal):
    """NaN is no teacher mass that happens to be small: it must not be masked."""
    r, first = torch.Generator().manual_seed(0), torch.zeros(1, dtype=torch.int64)
    h, weight, nothing = torch.randn(3, 4, generator=r), torch.randn(5, 4, generator=r), torch.full((1, 4), float("nan"))
    damaged = HeadInput(nothing, weight, torch.zeros(1)) if signal == "hidden states" else BestTokens(torch.tensor([[0, 3, -1, 1]]), nothing)
    teacher = Teacher(damaged, first, first)
    out = head_loss(h, weight, teacher, torch.zeros(3, dtype=torch.int64), np.array([0, 3]), torch.ones(3), torch.arange(5), 8, loss, 3.0)
    assert out.loss.isnan()


# The best tokens as the teacher


@pytest.mark.parametrize("loss", LOSSES)
def test_all_tokens_as_the_best_ones_are_the_whole_teacher(loss):
    whole, best = make(), make(best=TARGET_VOCAB)
    a, b = whole.run(loss), best.run(loss)
    close(a.row_loss, b.row_loss)
    close(a.prob, b.prob)
    for x, y in zip(torch.autograd.grad(a.loss, (whole.h, whole.weight)), torch.autograd.grad(b.loss, (best.h, best.weight)), strict=True):
        close(x, y)


@pytest.mark.parametrize("loss", LOSSES)
def test_best_tokens_need_no_product_with_the_target_head(loss):
    c = make(best=5)
    assert len(record(lambda: c.run(loss)).products()) == 3
    with torch.no_grad():
        assert len(record(lambda: c.run(loss)).products()) == 1


@pytest.mark.parametrize("loss", LOSSES)
def test_best_tokens_all_outside_of_the_draft_vocabulary_teach_nothing(loss):
    c = make(best=3)
    signal = c.teacher.signal
    c.teacher = replace(c.teacher, signal=replace(signal, index=torch.where(torch.arange(9)[:, None] == 3, -1, signal.index)))
    out = c.run(loss)
    dh, dw = torch.autograd.grad(out.loss, (c.h, c.weight))
    assert out.prob[3:8].eq(0).all() and all(torch.isfinite(x).all() for x in (out.loss, dh, dw))
    if loss in ("soft_ce", "kl", "lk_lambda"):
        assert not out.row_loss[3:8].any() and not dh[3:8].any()


@pytest.mark.parametrize("loss", LOSSES)
def test_best_tokens_in_bf16(loss):
    c = make(dtype=torch.bfloat16, best=13)
    signal = c.teacher.signal
    c.teacher = replace(c.teacher, signal=replace(signal, logp=signal.logp.bfloat16().float()))
    rows, a, _ = reference(replace(c, hidden=make(best=13).hidden), loss)
    out = c.run(loss)
    close(out.row_loss, rows, 0.06)
    close(out.prob, a, 0.02)
