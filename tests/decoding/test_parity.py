"""Training and inference with a real target: captured features against what the decoder feeds and computes, tensor by tensor."""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass, replace

import pytest
import torch

from kvshot_ds.config import DraftingConfig
from kvshot_ds.decoding.engine import Engine
from kvshot_ds.decoding.run import reference
from kvshot_ds.decoding.state import Sequences
from kvshot_ds.drafters.base import Drafter
from kvshot_ds.features.batch import Batch, collate
from kvshot_ds.features.spec import Store
from kvshot_ds.objectives.alignment import plan_rows, training_start
from tests import toys
from tests.decoding.models import FAMILIES, Seen, bound_drafter, hf_target, prompt, script

LENGTH, K, SIZE = 20, 4, 9
SOME = ("hidden_only-1", "kv_only-2", "hybrid-2", "dflash-2", "hybrid_block-2")
PAIRS = [(family, name) for family in FAMILIES for name in toys.FAMILIES if family == "Qwen3" or name in SOME]


@dataclass
class Case:
    """A conversation (prompt and the target's greedy answer), captured, and the decoder's log of the same answer."""

    drafter: Drafter
    batch: Batch
    rounds: list[Seen]
    tokens: list[int]


def case(family: str, name: str) -> Case:
    # fp64, so that what remains is the difference of the norms, which transformers computes in fp32
    target = hf_target(family, torch.float64)
    p = prompt(SIZE, 2)
    answer = reference(target, p, LENGTH, ())
    drafter, rng = bound_drafter(name, target, scale=3.0), random.Random(3)
    spec = replace(drafter.required_features(), store=Store.all("fp32"))
    sample = target.features([p + answer], spec, [[0] * SIZE + [1] * LENGTH])[0]
    log = script(drafter, p + answer, lambda: rng.random() < 0.3)
    assert Engine(target, drafter, DraftingConfig(length=K)).decode([p], LENGTH)[0].tokens == answer
    return Case(drafter, collate([("c", sample)]).to("cpu", torch.float64), log, p + answer)


@torch.no_grad()
def unroll(drafter: Drafter, batch: Batch) -> tuple[list[int], torch.Tensor]:
    """Anchors [N] and the hidden states of all training steps [K, N, d]."""
    plan = plan_rows(batch, K)
    bare = copy.copy(drafter)  # without the script
    for name in ("begin", "slots", "propose"):
        bare.__dict__.pop(name, None)
    return plan.anchors.tolist(), bare.unroll(training_start(batch, plan), plan.tokens).h


@pytest.mark.parametrize(("family", "name"), PAIRS)
def test_decoder_feeds_and_computes_what_training_did(family, name):
    c = case(family, name)
    anchors, want = unroll(c.drafter, c.batch)
    assert anchors[0] == c.rounds[0].anchor == SIZE - 1, "training and serving start at the last prompt token"
    known, deep = 0, 0
    for seen in c.rounds:
        start, t = seen.start, seen.anchor
        assert start.all.positions.tolist() == list(range(known, t + 1))
        assert start.tokens.tolist() == c.tokens[known + 1 : t + 2]
        for ours, captured in ((start.hidden, c.batch.hidden), (start.keys, c.batch.keys_of), (start.values, c.batch.values_of)):
            assert ours.keys() == captured.keys()
            for layer in ours:
                torch.testing.assert_close(ours[layer], captured[layer][known : t + 1], rtol=1e-5, atol=1e-5)
        known = t + 1
        if t not in anchors:
            continue  # the last rounds have no label in training
        for k, h in enumerate(seen.h):
            if name not in toys.BLOCK_FAMILIES and seen.proposed[:k] != c.tokens[t + 2 : t + 2 + k]:
                break  # from here on the decoder follows its own wrong token, training the right one; a block reads none of them
            row = want[k, anchors.index(t)]
            torch.testing.assert_close(h[0], row, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(c.drafter.logits(h)[0], c.drafter.logits(row[None])[0], rtol=1e-4, atol=1e-4)
            deep = max(deep, k)
    assert deep == K - 1, "no round reached the last step on the right tokens"
    if c.batch.hidden or c.batch.keys_of:
        other = want[:, 1:] - want[:, :-1]
        assert other.abs().max() > 0.02, "rows so alike that a shift would go unseen"


@pytest.mark.parametrize("name", SOME)
def test_training_rows_ignore_target_states_after_their_anchor(name):
    c = case("Qwen3", name)
    anchors, clean = unroll(c.drafter, c.batch)
    for seen in c.rounds[:3]:
        for tensors in (c.batch.hidden, c.batch.keys_of, c.batch.values_of):
            for x in tensors.values():
                x[seen.anchor + 1 :].normal_()
        row = anchors.index(seen.anchor)
        _, dirty = unroll(c.drafter, c.batch)
        assert torch.equal(dirty[:, : row + 1], clean[:, : row + 1])
        assert not torch.equal(dirty[:, row + 1 :], clean[:, row + 1 :])
        c = case("Qwen3", name)


@pytest.mark.parametrize("name", SOME)
def test_rejected_positions_leave_no_trace_in_the_decoder(name, monkeypatch):
    """Everything the target computed beyond the committed positions is made NaN before it is dropped: nothing changes, bit for bit."""
    clean = case("Llama", name)
    commit, poisoned = Sequences.commit, 0

    def poison(self, kept, following):
        nonlocal poisoned
        for states in self._latest.values():
            states[:, len(kept[0]) :] = float("nan")
        start = commit(self, kept, following)
        beyond = self.cache.memory[..., self.lengths[0] :, :, :]
        poisoned += int(beyond[0, 0, 0].any(-1).any(-1).sum())
        beyond.fill_(float("nan"))
        return start

    monkeypatch.setattr(Sequences, "commit", poison)
    dirty = case("Llama", name)
    assert poisoned > 20
    assert len(clean.rounds) == len(dirty.rounds) and clean.tokens == dirty.tokens
    for a, b in zip(clean.rounds, dirty.rounds, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a.h, b.h, strict=True))
