"""Alignment: rows by the written rule, no leak, training rows equal to what the decoder feeds."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from kvshot_ds.drafters.attention import KV
from kvshot_ds.drafters.state import DraftState
from kvshot_ds.features.batch import collate
from kvshot_ds.objectives.alignment import decoding_start, plan_rows, supervised_rows, training_start
from tests import toys

STEPS = 4


def by_the_rule(turn, k):
    """Anchors t such that tokens t+1 .. t+2+k all lie in one assistant turn, by enumeration."""
    return [t for t in range(len(turn)) if t + 2 + k < len(turn) and len({turn[j] for j in range(t + 1, t + 3 + k)}) == 1 and turn[t + 1] > 0]


@pytest.mark.parametrize("turn", [*toys.TURNS, [1] * 6, [0] * 5, [0, 1], [0, 0, 1, 1], [1, 1, 2, 2, 2, 2]])
def test_rows_are_those_of_the_written_rule(turn):
    g = toys.geometry()
    batch = toys.batch(g, [turn, toys.TURNS[0], turn])
    plan = plan_rows(batch, STEPS)
    offsets = np.concatenate(([0], np.cumsum(batch.lengths)))
    for k in range(STEPS):
        want = [offsets[c] + t for c, one in enumerate([turn, toys.TURNS[0], turn]) for t in by_the_rule(one, k)]
        assert plan.anchors[plan.valid[k]].tolist() == want
        rows = plan.anchors[plan.valid[k]]
        assert torch.equal(plan.tokens[k][plan.valid[k]], batch.tokens[rows + 1 + k])


def test_first_row_is_the_last_prompt_token_and_last_label_the_last_token():
    turn = np.array([0, 0, 0, 1, 1, 1, 0])
    assert supervised_rows(turn).tolist() == [2, 3]  # bonus at 3, labels at 4 and 5


def test_teacher_rows_belong_to_position_t_plus_1_plus_k():
    batch = toys.batch(toys.geometry())
    plan = plan_rows(batch, STEPS)
    n = plan.supervised
    assert len(plan.picks) == int(plan.valid.sum())
    for pick, teacher, k in zip(plan.picks.tolist(), plan.teacher_of.tolist(), plan.steps_of.tolist(), strict=True):
        assert pick // n == k
        assert batch.teacher_index[plan.anchors[pick % n] + 1 + k] == teacher >= 0
    for r in range(len(batch.teacher_argmax)):
        assert (plan.teacher_of[plan.teacher_bounds[r] : plan.teacher_bounds[r + 1]] == r).all()


def test_no_supervised_row_at_all():
    plan = plan_rows(toys.batch(toys.geometry(), [[0] * 5]), STEPS)
    assert plan.supervised == 0 and len(plan.picks) == 0


def test_subsampled_rows_are_rows_of_the_whole_plan_and_equally_likely():
    batch = toys.batch(toys.geometry(), [[0] * 3 + [1] * 22])
    whole = plan_rows(batch, 3)
    seen = torch.zeros(len(batch.tokens))
    for seed in range(600):
        part = plan_rows(batch, 3, fraction=0.4, seed=seed)
        assert part.supervised == round(0.4 * whole.supervised)
        assert set(part.anchors.tolist()) <= set(whole.anchors.tolist())
        assert sum(s.count for s in part.spans_rows) == part.supervised
        seen[part.anchors] += 1
    assert (seen[whole.anchors] / 600 - 0.4).abs().max() < 0.08


@pytest.mark.parametrize("chosen", [{"fraction": 0.4}, {"anchors": 3}])
def test_drawn_rows_do_not_depend_on_how_conversations_are_grouped(chosen):
    g = toys.geometry()
    samples = [(f"c{i}", toys.sample([0] * 3 + [1] * (9 + i), g, i)) for i in range(4)]
    together = plan_rows(collate(samples), 3, seed=5, **chosen)
    for c, sample in enumerate(samples):
        alone = plan_rows(collate([sample]), 3, seed=5, **chosen)
        offset = sum(len(s["tokens"]) for _, s in samples[:c])
        assert (together.anchors[together.conversation == c] - offset).tolist() == alone.anchors.tolist()
    assert plan_rows(collate(samples), 3, seed=6, **chosen).anchors.tolist() != together.anchors.tolist()


def test_random_anchors_are_supervised_rows_each_once():
    batch = toys.batch(toys.geometry(), [[0] * 3 + [1] * 22, [0] * 2 + [1] * 3])
    whole = plan_rows(batch, 3)
    seen = torch.zeros(len(batch.tokens))
    for seed in range(400):
        part = plan_rows(batch, 3, seed=seed, anchors=8)
        assert torch.bincount(part.conversation).tolist() == [8, 2]  # the second conversation has no more
        assert set(part.anchors.tolist()) <= set(whole.anchors.tolist()) and (part.anchors.diff() > 0).all()
        seen[part.anchors] += 1
    first = whole.anchors[whole.conversation == 0]
    assert (seen[first] / 400 - 8 / len(first)).abs().max() < 0.09


def unroll(drafter, batch, plan):
    return drafter.unroll(training_start(batch, plan), plan.tokens).h


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen2"])
@pytest.mark.parametrize("name", toys.FAMILIES)
def test_training_rows_equal_what_the_decoder_computes(name, family):
    """A conversation walked the way serving does (rounds of committed tokens, one row drafting) gives every training row."""
    g = toys.geometry(family)
    drafter, batch = toys.drafter(name, g), toys.batch(g).to("cpu", torch.float64)
    plan = plan_rows(batch, STEPS)
    want = unroll(drafter, batch, plan)
    offsets = np.concatenate(([0], np.cumsum(batch.lengths)))
    checked = 0
    for c, (lo, hi) in enumerate(pairwise(offsets)):
        state, known = DraftState.empty(drafter.depth), 0
        mine = (plan.conversation == c).nonzero().flatten().tolist()
        for row in mine:
            t = int(plan.anchors[row]) - lo
            if row != mine[0] and row % 2:  # several positions are committed at once, as after accepted drafts
                continue
            new = slice(lo + known, lo + t + 1)
            hidden, cache = {i: x[new] for i, x in batch.hidden.items()}, {}
            for i in batch.keys_of:  # beyond what is committed, the cache holds anything
                known_only = [F.pad(x[lo : new.stop], (0, 0, 0, 0, 0, int(hi) - new.stop), value=float("nan")) for x in (batch.keys_of[i], batch.values_of[i])]
                cache[i] = KV(*known_only)
            start = decoding_start(batch.tokens[new.start + 1 : new.stop + 1], [known], [t + 1 - known], int(hi - lo), hidden, cache)
            known = t + 1
            block = drafter.slots(state, start)[1:] if name in toys.BLOCK_FAMILIES else None
            h = block[0] if block is not None else drafter.begin(state, start)
            for k in range(STEPS):
                if k:
                    h = block[k] if block is not None else drafter.forward_step(state, batch.tokens[lo + t + 1 + k : lo + t + 2 + k], k)
                if plan.valid[k, row]:
                    torch.testing.assert_close(h[0], want[k, row], rtol=0, atol=1e-10)
                    checked += 1
                if lo + t + 2 + k >= hi:
                    break
    assert checked > 20


@pytest.mark.parametrize("name", toys.FAMILIES)
def test_no_row_sees_target_states_after_its_anchor_nor_tokens_after_its_step(name):
    g = toys.geometry()
    drafter, clean = toys.drafter(name, g), toys.batch(g).to("cpu", torch.float64)
    plan = plan_rows(clean, STEPS)
    want = unroll(drafter, clean, plan)
    t = int(plan.anchors[3])
    dirty = toys.batch(g).to("cpu", torch.float64)
    for tensors in (dirty.hidden, dirty.keys_of, dirty.values_of):
        for x in tensors.values():
            x[t + 1 :] = torch.randn_like(x[t + 1 :])
    got = unroll(drafter, dirty, plan)
    before = (plan.anchors <= t).nonzero().flatten()
    assert torch.equal(got[:, before], want[:, before])
    if not name.endswith("-none"):
        after = (plan.anchors > t + 1).nonzero().flatten()
        assert not torch.equal(got[:, after], want[:, after])
    # Tokens: step k of row t reads tokens up to t+1+k, and nothing later.
    for k in range(STEPS):
        dirty = toys.batch(g).to("cpu", torch.float64)
        dirty.tokens[t + 2 + k :] = (dirty.tokens[t + 2 + k :] + 1) % g.vocab_size
        got = unroll(drafter, dirty, plan_rows(dirty, STEPS))
        assert torch.equal(got[: k + 1, 3], want[: k + 1, 3])


@pytest.mark.parametrize("name", toys.FAMILIES)
def test_packed_conversations_equal_separate_ones(name):
    g = toys.geometry()
    drafter, together = toys.drafter(name, g), toys.batch(g).to("cpu", torch.float64)
    plan = plan_rows(together, STEPS)
    want = unroll(drafter, together, plan)
    for c, turn in enumerate(toys.TURNS):
        alone = collate([("x", toys.sample(turn, g, c))]).to("cpu", torch.float64)
        one = plan_rows(alone, STEPS)
        got = unroll(drafter, alone, one)
        torch.testing.assert_close(got, want[:, plan.conversation == c], rtol=0, atol=1e-10)
