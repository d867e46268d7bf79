"""Drift of the hidden chain: which states are compared, and what constructed drafters show."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvshot_ds.diagnostics.drift import CHAIN, HEAD, DriftSums, compared, compares, effective_rank, measure_drift, why_not
from kvshot_ds.drafters.base import Unrolled
from kvshot_ds.drafters.layer import LayerOutput
from kvshot_ds.drafters.state import Memory
from kvshot_ds.features.spec import FeatureSpec, Store
from tests.diagnostics.made import STEPS, made

LONG = [[0] * 3 + [1] * 150, [1] * 150]


def saying(objective, states):
    """The hidden-only drafter's last layer says states[k] [N, d] at step k."""
    said = iter(states)
    objective.drafter.layers[-1].forward = lambda *_a, **_o: LayerOutput(next(said), Memory(), Memory(), None, None)


def fused(objective, batch):
    d = objective.drafter
    return d.fc(torch.cat([batch.hidden[i] for i in d.hidden_layers], -1)).detach()


def means(sums: DriftSums):
    rows = sums.rows.sum(0)
    return sums.cosine.sum(0) / rows, sums.norm_ratio.sum(0) / rows


@pytest.mark.parametrize("name", ["hidden_only-1", "hybrid-2", "eagle31", "kv_only-2", "dflash-2", "hybrid_block-2", "hybrid-anchored"])
def test_what_is_compared_lies_at_one_position_inside_the_turn(name):
    objective, batch, plan = made(name)
    with torch.no_grad():
        found = compared(objective, batch, plan)
        h = objective.unroll(batch, plan).h
    drafter = objective.drafter
    chain = compares(drafter) == CHAIN
    assert [c.k for c in found] == list(range(int(chain), STEPS))
    starts = torch.tensor([0, *batch.lengths]).cumsum(0).tolist()
    for c in found:
        rows = [
            row
            for row, t in enumerate(plan.anchors.tolist())
            if t + 2 + c.k < starts[int(plan.conversation[row]) + 1] and batch.turn[t + 1] == batch.turn[t + 2 + c.k] != 0
        ]
        at = plan.anchors[rows]
        if chain:
            norms = drafter.fc_norm or [torch.nn.Identity()] * len(drafter.hidden_layers)
            g = drafter.fc(torch.cat([norm(batch.hidden[i]) for norm, i in zip(norms, drafter.hidden_layers, strict=True)], -1))
            mine, target = drafter.carried(h[c.k - 1][rows]), g[at + c.k]
        else:
            mine, target = drafter.norm(h[c.k][rows]), batch.teacher_hidden[batch.teacher_index[at + 1 + c.k]]
        owner = plan.conversation[rows]
        order, wanted = (torch.argsort(x[:, 0]) for x in (c.target, target))  # rows in any order
        torch.testing.assert_close(c.target[order], target[wanted])
        torch.testing.assert_close(c.mine[order], mine[wanted])
        assert c.conversation[order].tolist() == owner[wanted].tolist()


def test_a_chain_of_the_targets_own_states_does_not_drift():
    objective, batch, plan = made("hidden_only-1")
    g = fused(objective, batch)
    own = [g[(plan.anchors + k).clamp(max=len(g) - 1)] for k in range(1, STEPS + 1)]
    for factor, cosine, ratio in ((1.0, 1.0, 1.0), (-3.0, -1.0, 3.0)):
        saying(objective, [factor * x for x in own])
        found = means(measure_drift(objective, batch, plan))
        torch.testing.assert_close(found[0], torch.full_like(found[0], cosine))
        torch.testing.assert_close(found[1], torch.full_like(found[1], ratio))


def test_a_head_fed_with_the_targets_own_states_does_not_drift():
    objective, batch, plan = made("kv_only-1")
    drafter, r = objective.drafter, torch.Generator().manual_seed(0)
    states = torch.randn(len(batch.teacher_argmax), drafter.g.hidden_size, generator=r, dtype=torch.float64)
    h = torch.zeros(STEPS * len(plan.anchors), drafter.g.hidden_size, dtype=torch.float64).index_put((plan.picks,), states[plan.teacher_of])
    drafter.unroll = lambda *_: Unrolled(h.view(STEPS, -1, drafter.g.hidden_size))
    with torch.no_grad():
        batch = replace(batch, teacher_hidden=drafter.norm(states))
    cosine, ratio = means(measure_drift(objective, batch, plan))
    torch.testing.assert_close((cosine, ratio), (torch.ones(STEPS).double(), torch.ones(STEPS).double()))


def test_random_states_have_nothing_to_do_with_the_targets_and_a_line_has_rank_one():
    objective, batch, plan = made("hidden_only-1", LONG)
    shape, r = (STEPS, len(plan.anchors), objective.drafter.g.hidden_size), torch.Generator().manual_seed(0)
    saying(objective, torch.randn(shape, generator=r).double())
    found = measure_drift(objective, batch, plan, rank=True)
    assert means(found)[0].abs().max() < 0.08  # of 290 rows in 24 dimensions: 0.012 is one standard error
    assert all(effective_rank(x) > 20 for x in found.mine)
    line = torch.randn(shape[-1], generator=r).double()
    saying(objective, torch.randn(*shape[:2], 1, generator=r).double() * line)
    found = measure_drift(objective, batch, plan, rank=True)
    assert [effective_rank(x) for x in found.mine] == pytest.approx([1.0] * (STEPS - 1), abs=1e-5)


def test_effective_rank_of_what_is_known():
    assert effective_rank(torch.eye(7).double()) == pytest.approx(7)
    assert effective_rank(torch.zeros(7, 7).double()) == 0.0
    s = torch.tensor([3.0, 1.0, 0.0]).double()
    p = s[:2] / 4
    assert effective_rank(torch.diag(s.square())) == pytest.approx(float(torch.exp(-(p * p.log()).sum())))
    x = torch.randn(50, 7, generator=torch.Generator().manual_seed(1))
    flat = (x @ torch.diag(torch.tensor([1.0] * 3 + [0.0] * 4))).double()
    assert 2 < effective_rank(flat.T @ flat) <= 3


def test_batches_are_joined_and_an_engine_may_make_the_forward():
    objective, batch, plan = made("hybrid-1")
    one = measure_drift(objective, batch, plan, rank=True)
    torch.testing.assert_close(measure_drift(objective, batch, plan, run=objective).cosine, one.cosine)
    mine = one.mine.clone()
    both = DriftSums.joined([one, measure_drift(objective, batch, plan, rank=True)])
    assert both.rows.shape == (2 * len(batch.keys), STEPS - 1) and torch.equal(both.mine, 2 * mine)
    assert both.rows.sum(0).tolist() == [2 * int(v.sum()) for v in plan.valid[1:]]
    assert not objective.drafter.norm._forward_hooks and not objective.drafter.layers[-1]._forward_hooks


def test_where_nothing_can_be_compared_it_is_said():
    top_k = FeatureSpec((), (2,), "top_k", Store.all("bf16"), (), 8)
    chain, head = (made(name)[0].drafter for name in ("hidden_only-1", "kv_only-1"))
    assert "last_hidden" in why_not(head, top_k, 3)
    assert why_not(chain, top_k, 3) is None and "single" in why_not(chain, top_k, 1)
    assert compares(head) == HEAD == compares(made("hybrid-anchored")[0].drafter)
