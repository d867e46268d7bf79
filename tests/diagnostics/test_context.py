"""Context use: what each mask hides, against drafters that never had it; nothing masked is nothing changed."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from kvshot_ds.config import KVOnlyConfig, ObjectiveConfig
from kvshot_ds.diagnostics.context import hidden_keys, measure_context
from kvshot_ds.diagnostics.subject import Piece, outcome
from kvshot_ds.drafters.attention import KV, Hidden, Span, merged_attention
from kvshot_ds.drafters.base import StepDrafter
from kvshot_ds.drafters.build import build_drafter
from kvshot_ds.drafters.state import DraftState, Rows, Start
from kvshot_ds.objectives.alignment import plan_rows
from kvshot_ds.objectives.objective import Objective
from tests import toys

NEAR, STEPS = 3, 3
TURNS = [[0] * 4 + [1] * 3, [0] * 5 + [1] * 3 + [0] + [2] * 3]
ONE_DEEP = [
    "hidden_only-1",
    "kv_only-1",
    "kv_only-2",
    "kv_only-per_layer",
    "kv_only-hidden_to_kv",
    "hybrid-1",
    "hybrid-per_head",
    "dflash-2",
    "kv_block-2",
    "hybrid_block-2",
]


def made(name: str):
    """Objective, batch and plan in fp64."""
    drafter = toys.drafter(name)
    head = torch.randn(toys.VOCAB, drafter.g.hidden_size, generator=torch.Generator().manual_seed(7)).double()
    batch = toys.batch(drafter.g, TURNS).to("cpu", torch.float64)
    return Objective(drafter, ObjectiveConfig(steps=STEPS), head), batch, plan_rows(batch, STEPS)


def masked(objective, batch, plan, mask, near=NEAR):
    """h [K, N, d] of all steps."""
    with torch.no_grad():
        return objective.unroll(batch, replace(plan, hidden=hidden_keys(mask, near, objective.drafter))).h


def alone(objective, batch, plan, row, first):
    """h [K, d] of one row whose drafter knows of its document from position `first` on only."""
    starts = torch.tensor([0, *batch.lengths]).cumsum(0)
    lo = int(starts[plan.conversation[row]])
    t = int(plan.anchors[row])
    at = slice(lo + first, t + 1)
    parts = [{layer: x[at] for layer, x in of.items()} for of in (batch.hidden, batch.keys_of, batch.values_of)]
    n, positions = t + 1 - lo - first, torch.arange(first, t + 1 - lo)
    everything, last = Rows(positions, (Span(0, n, 0, 0),)), Rows(positions[-1:], (Span(0, 1, 0, n - 1),))
    start = Start(plan.next_tokens[at], *parts, everything, last, torch.tensor([n - 1]))
    with torch.no_grad():
        return objective.drafter.unroll(start, plan.tokens[:, row : row + 1]).h[:, 0]


@pytest.mark.parametrize("block", [1, 3])
@pytest.mark.parametrize("hidden", [Hidden(4), Hidden(1), Hidden(0, 3), Hidden(1, 3), Hidden(0), Hidden(500)])
def test_attention_leaves_out_what_is_hidden_and_nothing_else(hidden, block):
    r = torch.Generator().manual_seed(1)
    keys, lengths, groups, heads, width = 400, (250, 150), 2, 4, 8
    spans = (Span(0, 160, 0, 60), Span(160, 5, 250, 250), Span(165, 1, 250, 390))
    anchors, firsts = [*range(60, 220), *range(250, 255), 390], [0] * 160 + [250] * 6
    assert sum(lengths) == keys
    q = torch.randn(166, block, heads, width, generator=r, dtype=torch.float64)
    prefix = KV(*(torch.randn(keys, groups, width, generator=r, dtype=torch.float64) for _ in range(2)))
    steps = [KV(*(torch.randn(166, groups, width, generator=r, dtype=torch.float64) for _ in range(2))) for _ in range(2)]
    found = merged_attention(q, prefix, steps, spans, 0.3, hidden)
    for row in range(0, 166, 23):
        seen = [j for j in range(firsts[row], anchors[row] + 1) if not hidden.least <= anchors[row] - j <= (10**9 if hidden.most is None else hidden.most)]
        k, v = (torch.cat((x[seen], torch.stack([getattr(s, name)[row] for s in steps]))).repeat_interleave(2, 1) for x, name in zip(prefix, "kv", strict=True))
        weights = torch.softmax(torch.einsum("bad,mad->bam", q[row], k) * 0.3, -1)
        torch.testing.assert_close(found[row], torch.einsum("bam,mad->bad", weights, v))


@pytest.mark.parametrize("name", ONE_DEEP)
def test_without_far_context_a_drafter_is_one_that_began_near_the_anchor(name):
    objective, batch, plan = made(name)
    found = masked(objective, batch, plan, "far")
    for row, position in enumerate(plan.positions[plan.anchors].tolist()):
        torch.testing.assert_close(found[:, row], alone(objective, batch, plan, row, max(0, position - NEAR)))


@pytest.mark.parametrize("name", ["hidden_only-1", "hidden_only-3", "mtp", "eagle31"])
def test_a_hidden_only_drafter_with_all_masked_knows_its_anchor_alone(name):
    objective, batch, plan = made(name)
    found = masked(objective, batch, plan, "all")
    for row, position in enumerate(plan.positions[plan.anchors].tolist()):
        torch.testing.assert_close(found[:, row], alone(objective, batch, plan, row, position))


@pytest.mark.parametrize("name", ["kv_only-1", "kv_only-2", "kv_only-linear", "kv_only-per_layer", "kv_only-head_concat", "kv_only-hidden_to_kv"])
def test_a_kv_only_drafter_with_all_masked_is_one_without_a_prefix(name):
    objective, batch, plan = made(name)
    drafter, state = objective.drafter, DraftState.empty(objective.drafter.depth)
    state.rows = Rows(plan.positions[plan.anchors], ())
    with torch.no_grad():
        slow = torch.stack([drafter.forward_step(state, plan.tokens[k], k) for k in range(STEPS)])
    torch.testing.assert_close(masked(objective, batch, plan, "all"), slow)


@pytest.mark.parametrize("name", ONE_DEEP)
def test_what_is_masked_has_no_influence_and_what_is_not_has(name):
    """Of the last row: other states of the target at masked positions leave it bit-equal, at any other one they do not."""
    objective, batch, plan = made(name)
    row = len(plan.anchors) - 1
    t, position = int(plan.anchors[row]), int(plan.positions[plan.anchors[row]])
    own = isinstance(objective.drafter, StepDrafter) and bool(objective.drafter.hidden_layers)  # reads the target at its anchor itself
    for mask, hidden in (("far", {j for j in range(position + 1) if j > NEAR}), ("near", set(range(NEAR + 1))), ("all", set(range(position + 1)))):
        plain = masked(objective, batch, plan, mask)[:, row]
        for distance in (0, 1, NEAR, NEAR + 1, position):
            at = t - distance
            changed = {name: {layer: x.clone() for layer, x in getattr(batch, name).items()} for name in ("hidden", "keys_of", "values_of")}
            for of in changed.values():
                for x in of.values():
                    x[at] += 1
            same = torch.equal(masked(objective, replace(batch, **changed), plan, mask)[:, row], plain)
            assert same == (distance in hidden and not (own and distance == 0)), (mask, distance)


@pytest.mark.parametrize("name", ["kv_only-none", "kv_block-none"])
def test_a_drafter_that_reads_nothing_of_the_target_loses_nothing(name):
    objective, batch, plan = made(name)
    for mask in ("far", "near", "all"):
        assert torch.equal(masked(objective, batch, plan, mask), masked(objective, batch, plan, "none"))


def test_a_drafter_that_looks_near_only_does_not_miss_far_context():
    g = toys.geometry("qwen2")  # whose queries have a bias
    drafter = build_drafter(KVOnlyConfig(depth=1, kv={"injection": "per_layer", "layers": (2,)}), g, toys.DRAFT_VOCAB)
    drafter.reset(1)
    drafter.set_vocab(torch.arange(toys.DRAFT_VOCAB))
    drafter.bind(*(torch.randn(toys.VOCAB, g.hidden_size, dtype=torch.float64) for _ in range(2)))
    drafter = drafter.double()
    turns = [[0] * 12 + [1] * 2]  # one row, anchored at 11
    batch = toys.batch(g, turns).to("cpu", torch.float64)
    plan = plan_rows(batch, 1)
    assert plan.anchors.tolist() == [11]
    direction = torch.zeros(g.head_dim, dtype=torch.float64)
    direction[g.head_dim // 2 - 1] = 1  # the slowest rotation: hardly turned over so few positions
    with torch.no_grad():
        attention = drafter.layers[0].cross_attn
        attention.q_proj.weight.zero_()
        attention.q_proj.bias.copy_((1000 * direction).repeat(g.heads))
        attention.k_proj.weight.zero_()
        attention.k_proj.bias.zero_()
    batch.keys_of[2].zero_()
    batch.keys_of[2][: 11 - NEAR] = -1000 * direction  # what is far gets no weight
    objective = Objective(drafter, ObjectiveConfig(steps=1), torch.randn(toys.VOCAB, g.hidden_size, dtype=torch.float64))
    plain = masked(objective, batch, plan, "none")
    torch.testing.assert_close(masked(objective, batch, plan, "far"), plain, rtol=0, atol=1e-12)
    assert not torch.allclose(masked(objective, batch, plan, "far", NEAR - 1), plain) and not torch.allclose(masked(objective, batch, plan, "near"), plain)


@pytest.mark.parametrize("name", ["hidden_only-1", "kv_only-2", "dflash-2"])
def test_nothing_masked_is_the_plain_forward_to_the_bit_and_conversations_keep_their_order(name):
    objective, batch, plan = made(name)
    whole = objective(batch, plan, torch.ones(()))
    counts = measure_context(objective, [Piece(batch, plan)] * 2, STEPS, NEAR)
    assert list(counts) == ["none", "far", "near", "all"]
    assert counts["none"].den.shape == (2 * len(batch.keys), STEPS)
    assert counts["none"].total().prob.tolist() == pytest.approx((2 * whole.prob.sum(1)).tolist(), abs=0, rel=1e-14)
    assert torch.equal(outcome(objective, Piece(batch, plan), STEPS).correct, whole.correct)
    for c, (lo, hi) in enumerate(pairwise([0, *torch.tensor(batch.lengths).cumsum(0).tolist()])):
        rows = (plan.anchors >= lo) & (plan.anchors < hi)
        for at in (c, c + len(batch.keys)):
            assert counts["none"].top1[at].tolist() == whole.correct[:, rows].sum(1).tolist()
            assert counts["all"].den[at].tolist() == plan.valid[:, rows].sum(1).tolist()
