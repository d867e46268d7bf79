"""Classes of rows: what a row is classed by, by brute force; the classes add up to the whole."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from kvshot_ds.diagnostics import classes
from kvshot_ds.diagnostics.subject import Piece, outcome
from kvshot_ds.metrics import StepCounts
from kvshot_ds.objectives.alignment import plan_rows
from kvshot_ds.objectives.objective import rms_norm
from kvshot_ds.target import TargetParts
from tests import toys
from tests.diagnostics.made import STEPS, made

COUNTS = torch.arange(toys.VOCAB) ** 2


def parts_of(objective) -> TargetParts:
    d = objective.drafter.g.hidden_size
    r = torch.Generator().manual_seed(2)
    return TargetParts(Path(), torch.empty(0), torch.rand(d, generator=r).double(), torch.randn(toys.VOCAB, d, generator=r).double())


def true_entropy(hidden: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
    logp = torch.log_softmax(hidden @ head.T, -1)
    return -(logp.exp() * logp).sum(-1)


@pytest.mark.parametrize("steps", [STEPS, STEPS + 2])  # more than are run: a block may propose fewer
def test_a_pair_is_classed_by_its_place_its_label_and_what_the_target_thinks_there(steps):
    objective, batch, plan = made("kv_only-1")
    parts = parts_of(objective)
    found = classes.values(Piece(batch, plan), steps, COUNTS, parts, 1e-5)
    entropy = true_entropy(batch.teacher_hidden, parts.head)
    starts, seen = torch.tensor([0, *batch.lengths]).cumsum(0).tolist(), 0
    for row, t in enumerate(plan.anchors.tolist()):
        last = starts[int(plan.conversation[row]) + 1] - 1
        first = t + 1
        while first - 1 >= starts[int(plan.conversation[row])] and batch.turn[first - 1] == batch.turn[t + 1]:
            first -= 1
        for k in range(steps):
            if t + 2 + k <= last and batch.turn[t + 2 + k] == batch.turn[t + 1]:
                seen += 1
                assert found.position[k, row] == t + 1 - first
                assert found.frequency[k, row] == COUNTS[batch.tokens[t + 2 + k]]
                torch.testing.assert_close(found.entropy[k, row], entropy[batch.teacher_index[t + 1 + k]], rtol=1e-5, atol=1e-5)
    assert seen == int(plan_rows(batch, steps).valid.sum())


def test_adjoining_conversations_do_not_share_a_turn():
    objective, batch, plan = made("kv_only-1", [[1] * 6, [1] * 5])
    found = classes.values(Piece(batch, plan), STEPS, COUNTS, parts_of(objective), 1e-5)
    assert found.position[0].tolist() == [1, 2, 3, 4, 1, 2, 3]


def test_entropy_of_a_teacher_before_the_norm_and_of_the_best_tokens():
    objective, batch, _ = made("kv_only-1")
    parts = parts_of(objective)
    unnormed = replace(batch, teacher_normed=False)
    normed = rms_norm(batch.teacher_hidden, parts.norm_weight, 1e-5)
    torch.testing.assert_close(classes.entropies(unnormed, parts, 1e-5), true_entropy(normed, parts.head), rtol=1e-5, atol=1e-5)
    logp = torch.log_softmax(batch.teacher_hidden @ parts.head.T / 4, -1)
    exact = -(logp.exp() * logp).sum(-1)
    before = torch.zeros_like(exact)
    for k in (1, 3, 10, toys.VOCAB):
        best = logp.topk(k)
        bound = classes.entropies(replace(batch, topk_ids=best.indices, topk_logp=best.values.float()), parts, 1e-5)
        assert (bound <= exact + 1e-5).all() and (bound >= before - 1e-5).all()  # the more is known, the closer
        before = bound
    torch.testing.assert_close(before, exact, rtol=1e-5, atol=1e-5)
    p = torch.tensor([[0.5, *[0.1] * 5]])  # the rest as flat as it may be: nothing is lost with two known, and with one half of it is one token
    for k, wanted in ((2, -(p * p.log()).sum().item()), (1, math.log(2))):
        few = replace(batch, topk_ids=torch.arange(k)[None], topk_logp=p[:, :k].log())
        assert classes.entropies(few, parts, 1e-5).tolist() == pytest.approx([wanted], abs=1e-6)


def test_classes_hold_equally_many_rows_as_far_as_values_differ():
    _, batch, plan = made("kv_only-1")
    objective, *_ = made("kv_only-1")
    found = outcome(objective, Piece(batch, plan), STEPS)
    rows = len(plan.anchors)
    distinct = torch.randperm(STEPS * rows, generator=torch.Generator().manual_seed(0)).view(STEPS, rows)
    ends = classes.equal_classes([distinct], [found], 4)
    sizes = torch.bincount(torch.bucketize(distinct[0], ends), minlength=4)
    assert len(ends) == 3 and sizes.max() - sizes.min() <= 1
    assert len(classes.equal_classes([torch.ones_like(distinct)], [found], 4)) == 0  # one value, one class
    two = torch.where(torch.arange(rows) < rows // 3, 1, 2).expand(STEPS, -1)
    assert classes.equal_classes([two], [found], 4).tolist() == [1]


@pytest.mark.parametrize("name", ["hybrid-1", "dflash-2"])
def test_the_classes_add_up_to_the_whole_by_conversation(name):
    objective, batch, plan = made(name)
    pieces = [Piece(batch, plan)] * 2
    outcomes = [outcome(objective, piece, STEPS + 1) for piece in pieces]
    r = torch.Generator().manual_seed(4)
    of = [torch.randint(3, o.valid.shape, generator=r) for o in outcomes]
    whole = StepCounts.unstack(np.concatenate([o.counts() for o in outcomes], axis=1))
    found = classes.measure_classes(outcomes, of, 3)
    assert all(c.den.shape == (2 * len(batch.keys), STEPS + 1) for c in found) and min(c.den.sum() for c in found) > 0
    for name_ in ("den", "top1", "joint"):
        np.testing.assert_array_equal(sum(getattr(c, name_) for c in found), getattr(whole, name_))
    np.testing.assert_allclose(sum(c.prob for c in found), whole.prob, rtol=1e-12)
    steps = plan_rows(batch, STEPS + 1).valid.sum(1).tolist()
    assert whole.total().den.tolist() == [2.0 * n for n in steps]
