"""Loss, metrics and gradients of the TTT objective against a slow reference written from the formulas."""

import pytest
import torch

from kvshot_ds.config import ObjectiveConfig
from kvshot_ds.drafters.state import DraftState
from kvshot_ds.objectives.alignment import plan_rows, training_start
from kvshot_ds.objectives.ttt import TTT
from tests import toys

STEPS, DECAY = 4, 0.8


def setup(name="hybrid-1", chunk=1024):
    g = toys.geometry()
    drafter = toys.drafter(name, g)
    batch = toys.batch(g).to("cpu", torch.float64)
    head = torch.randn(toys.VOCAB, g.hidden_size, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    logits = batch.teacher_hidden @ head.T
    object.__setattr__(batch, "teacher_argmax", logits.argmax(-1))
    object.__setattr__(batch, "teacher_lse", logits.logsumexp(-1))
    return drafter, batch, head, TTT(drafter, ObjectiveConfig(steps=STEPS, step_decay=DECAY, head_chunk=chunk), head)


def reference(drafter, batch, head, normaliser):
    """Row by row, step by step; the teacher's softmax over the whole vocabulary, cut and renormalised."""
    plan = plan_rows(batch, STEPS)
    state = DraftState.empty(drafter.depth)
    h = drafter.begin(state, training_start(batch, plan))
    ids = torch.arange(toys.DRAFT_VOCAB) + drafter.d2t
    loss, stats = 0, {"correct": torch.zeros(STEPS, plan.supervised).double(), "prob": torch.zeros(STEPS, plan.supervised).double()}
    for k in range(STEPS):
        if k:
            h = drafter.forward_step(state, plan.tokens[k], k)
        logits = drafter.logits(h)
        for row in plan.valid[k].nonzero().flatten().tolist():
            r = batch.teacher_index[plan.anchors[row] + 1 + k]
            full = torch.softmax(batch.teacher_hidden[r] @ head.T, -1)
            q = torch.softmax(logits[row], -1)
            p = full[ids] / full[ids].sum()
            if int(full.argmax()) in ids.tolist():
                loss = loss - DECAY**k * (p * q.log()).sum() / normaliser
            wide = torch.zeros(toys.VOCAB, dtype=torch.float64)
            wide[ids] = q
            stats["prob"][k, row] = torch.minimum(full, wide).sum()
            stats["correct"][k, row] = float(ids[logits[row].argmax()] == full.argmax())
    return loss, stats, plan


@pytest.mark.parametrize("chunk", [1, 7, 1024])
@pytest.mark.parametrize("name", ["hidden_only-1", "kv_only-2", "hybrid-1"])
def test_loss_metrics_and_gradients(name, chunk):
    drafter, batch, head, objective = setup(name, chunk)
    want, stats, plan = reference(drafter, batch, head, 11.0)
    out = objective(batch, plan, torch.tensor(11.0, dtype=torch.float64))
    torch.testing.assert_close(out.loss, want, rtol=0, atol=1e-6)
    torch.testing.assert_close(out.correct.double(), stats["correct"])
    torch.testing.assert_close(out.prob, stats["prob"], rtol=0, atol=1e-7)
    joint = stats["correct"].cumprod(0) * plan.valid
    torch.testing.assert_close(out.joint.double(), joint)
    sums = out.sums(plan)
    assert sums.den.tolist() == plan.valid.sum(1).tolist()
    assert sums.top1.tolist() == stats["correct"].sum(1).tolist()
    params = [p for p in drafter.parameters() if p.requires_grad]
    for (key, _), a, b in zip(
        drafter.named_parameters(), torch.autograd.grad(out.loss, params, allow_unused=True), torch.autograd.grad(want, params, allow_unused=True), strict=True
    ):
        assert (a is None) == (b is None), key
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7, msg=lambda m, key=key: f"{key}: {m}")


def test_rows_whose_teacher_is_outside_the_draft_vocabulary_count_as_errors_and_carry_no_loss():
    drafter, batch, _head, objective = setup()
    plan = plan_rows(batch, STEPS)
    one = torch.tensor(1.0, dtype=torch.float64)
    out = objective(batch, plan, one)
    outside = ~drafter.t2d[batch.teacher_argmax]
    assert outside.any()
    hit = torch.zeros_like(plan.valid).view(-1).index_put((plan.picks,), outside[plan.teacher_of]).view_as(plan.valid)
    assert not out.correct[hit].any() and (out.row_loss[hit] == 0).all()
    assert out.sums(plan).den[0] == plan.supervised  # still in the denominator


def test_gradients_do_not_depend_on_how_conversations_are_grouped():
    """1 batch of 3 = 3 batches of 1, normalised by the supervised rows of all of them."""
    from kvshot_ds.features.batch import collate

    drafter, batch, head, objective = setup("hybrid-2")
    whole = plan_rows(batch, STEPS)
    norm = torch.tensor(float(whole.supervised), dtype=torch.float64)
    objective(batch, whole, norm).loss.backward()
    want = {k: p.grad.clone() for k, p in drafter.named_parameters() if p.grad is not None}
    drafter.zero_grad()
    for c, turn in enumerate(toys.TURNS):
        part = collate([("x", toys.sample(turn, toys.geometry(), c))]).to("cpu", torch.float64)
        logits = part.teacher_hidden @ head.T
        object.__setattr__(part, "teacher_argmax", logits.argmax(-1))
        object.__setattr__(part, "teacher_lse", logits.logsumexp(-1))
        objective(part, plan_rows(part, STEPS), norm).loss.backward()
    for key, grad in want.items():
        torch.testing.assert_close(dict(drafter.named_parameters())[key].grad, grad, rtol=1e-6, atol=1e-9)
