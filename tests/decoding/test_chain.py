"""Greedy chain decoding: the target's own tokens for every drafter, at every acceptance, length and stop."""

from __future__ import annotations

import random

import pytest
import torch

from kvshot_ds.config import TargetConfig
from kvshot_ds.decoding.chain import agreeing, cut, decode, generate
from kvshot_ds.decoding.run import reference, stop_tokens
from kvshot_ds.decoding.state import Sequence
from kvshot_ds.drafters.build import build_drafter
from kvshot_ds.errors import KvshotError
from kvshot_ds.target import Target
from tests import toys
from tests.decoding.models import FAMILIES, bound_drafter, hf_target, prompt, script

LENGTH, K = 16, 3
SOME = ("hidden_only-1", "kv_only-2", "hybrid-2")
# every drafter on one target, and one of each family on the others
PAIRS = [(family, name) for family in FAMILIES for name in toys.FAMILIES if family == "Llama" or name in SOME] + [("StableLm", "hybrid-2")]
_targets: dict[str, Target] = {}


def target_of(family: str) -> Target:
    if family not in _targets:
        _targets[family] = hf_target(family)
    return _targets[family]


@pytest.fixture
def llama() -> Target:
    return target_of("Llama")


@pytest.mark.parametrize("family", [*FAMILIES, "StableLm"])
def test_the_targets_are_worth_decoding(family):
    """Continuations that loop at once, or do not depend on the prompt, would test little."""
    outputs = [reference(target_of(family), prompt(9, seed), LENGTH, ()) for seed in range(3)]
    assert min(len(set(out)) for out in outputs) >= 5
    assert len({tuple(out) for out in outputs}) == 3


@pytest.mark.parametrize(("family", "name"), PAIRS)
def test_random_drafters_change_nothing(family, name):
    target = target_of(family)
    drafter = bound_drafter(name, target)
    for seed, length in enumerate((1, 9)):
        p = prompt(length, seed)
        out = decode(target, drafter, p, LENGTH, K)
        assert out.tokens == reference(target, p, LENGTH, ())
        assert sum(a + 1 for a in out.accepted) == LENGTH - 1


@pytest.mark.parametrize(("family", "name"), PAIRS)
@pytest.mark.parametrize("share", [0.0, 0.35])
def test_scripted_drafts_are_accepted_up_to_the_first_wrong_one(family, name, share):
    target, p = target_of(family), prompt(9, 2)
    want = reference(target, p, LENGTH, ())
    drafter, rng = bound_drafter(name, target), random.Random(7)
    log = script(drafter, p + want, lambda: rng.random() < share)
    out = decode(target, drafter, p, LENGTH, K)
    assert out.tokens == want
    known = [*p, want[0]]
    for seen, r in zip(log, out.verifications, strict=False):
        assert seen.anchor == len(known) - 2, "a round is anchored before the bonus token"
        right = [a == b for a, b in zip(seen.proposed, want[len(known) - 9 :], strict=False)]
        assert r.accepted == (right.index(False) if False in right else r.drafted) and r.drafted == len(seen.proposed)
        assert len(r.tokens) == r.accepted + 1
        known += r.tokens
    assert len(log) == sum(r.drafted > 0 for r in out.verifications)
    if share == 0:
        assert out.target_forwards == 1 + -(-(LENGTH - 1) // (K + 1))
    else:
        assert len(set(out.accepted)) > 1


def test_a_block_holds_fewer_than_asked_for(llama):
    p = prompt(9, 2)
    want = reference(llama, p, LENGTH, ())
    drafter = bound_drafter("dflash-2", llama)
    script(drafter, p + want + [0] * 9, lambda: False)
    out = decode(llama, drafter, p, LENGTH, 9)
    assert out.tokens == want and [r.drafted for r in out.verifications] == [4, 4, 4] and out.accepted == [4, 4, 4]


@pytest.mark.parametrize("order", [range(6), range(5, -1, -1)])
def test_every_number_of_accepted_drafts(llama, order):
    p = prompt(9, 2)
    want = reference(llama, p, 30, ())
    drafter, mistakes = bound_drafter("hybrid-1", llama), iter([i == right for right in order for i in range(5)])
    script(drafter, p + want, lambda: next(mistakes, False))
    out = decode(llama, drafter, p, 30, 5)
    assert out.tokens == want
    assert out.accepted[:6] == list(order)


@pytest.mark.parametrize("share", [0.0, 0.4])
def test_max_new_tokens_is_exact(llama, share):
    p = prompt(9, 2)
    want = reference(llama, p, LENGTH, ())
    for length in range(1, 10):
        for k in (1, 4, 20):
            drafter, rng = bound_drafter("kv_only-1", llama), random.Random(length)
            script(drafter, p + want, lambda: rng.random() < share)  # noqa: B023
            out = decode(llama, drafter, p, length, k)
            assert out.tokens == want[:length]
            assert all(0 <= r.accepted <= r.drafted <= k for r in out.rounds)


@pytest.mark.parametrize(("name", "share"), [("hidden_only-1", 0.0), ("kv_only-1", 0.4), ("hybrid-1", 0.0)])
def test_stops_at_the_first_stop_token_wherever_it_falls(llama, name, share):
    """With share 0 all drafts are accepted, so the stop token falls on every place of a round."""
    target, p = llama, prompt(9, 2)
    want = reference(target, p, LENGTH, ())
    places = set()
    for stop in sorted(set(want)):
        end = want.index(stop) + 1
        drafter, rng = bound_drafter(name, target), random.Random(stop)
        script(drafter, p + want, lambda: rng.random() < share)  # noqa: B023
        out = decode(target, drafter, p, LENGTH, K, {stop, -1})
        assert out.tokens == want[:end] == reference(target, p, LENGTH, {stop})
        assert all(r.accepted in (len(r.tokens) - 1, len(r.tokens)) for r in out.verifications)
        places.add((end - 2) % (K + 1))
    assert places == set(range(K + 1))


def test_no_token_beyond_the_stop_token_reaches_the_caller(llama):
    p = prompt(9, 2)
    want = reference(llama, p, LENGTH, ())
    stop = want[3]
    assert want.index(stop) == 3
    drafter = bound_drafter("hidden_only-1", llama)
    script(drafter, p + want, lambda: False)
    first, last = generate(llama, drafter, p, LENGTH, 5, {stop})
    assert first.tokens == (want[0],) and last.tokens == tuple(want[1:4])
    assert (last.drafted, last.accepted) == (5, 3), "the stop token itself was an accepted draft"


def test_rounds_stream_and_an_abandoned_one_leaves_no_hook(llama):
    drafter = bound_drafter("hybrid-1", llama)
    rounds = generate(llama, drafter, prompt(9, 2), LENGTH, K)
    assert len(next(rounds).tokens) == 1
    assert any(layer._forward_hooks for layer in llama.layers)
    next(rounds)
    rounds.close()
    assert not any(layer._forward_hooks for layer in llama.layers)


def test_two_sequences_decoded_in_turns_do_not_mix(llama):
    prompts = [prompt(9, 2), prompt(14, 3)]
    drafters = [bound_drafter("hybrid-1", llama) for _ in prompts]
    for drafter, p in zip(drafters, prompts, strict=True):
        script(drafter, p + reference(llama, p, LENGTH, ()), lambda: False)
    streams = [generate(llama, d, p, LENGTH, 2) for d, p in zip(drafters, prompts, strict=True)]
    together = list(zip(*streams, strict=True))
    for i, p in enumerate(prompts):
        assert [t for rounds in together for t in rounds[i].tokens] == reference(llama, p, LENGTH, ())


def test_only_the_last_prompt_position_reaches_the_head_and_forwards_are_counted(llama):
    rows = []
    handle = llama.model.get_output_embeddings().register_forward_pre_hook(lambda _m, args: rows.append(args[0].shape[1]))
    try:
        out = decode(llama, bound_drafter("hidden_only-1", llama), prompt(30, 2), LENGTH, K)
    finally:
        handle.remove()
    assert rows[0] == 1 and len(rows) == out.target_forwards
    assert rows[1:] == [r.drafted + 1 for r in out.verifications]
    assert min(out.draft_seconds, out.verify_seconds) > 0 and 0 <= out.other_seconds < out.seconds


@pytest.mark.parametrize("name", toys.FAMILIES)
def test_bf16_runs(name):
    target = hf_target("Qwen3", torch.bfloat16)
    out = decode(target, bound_drafter(name, target), prompt(9, 2), LENGTH, K)
    assert len(out.tokens) == LENGTH


def test_what_does_not_fit_is_refused(llama):
    drafter, limit = bound_drafter("kv_only-1", llama), llama.geometry.max_positions
    p = prompt(limit - 4, 0)
    assert decode(llama, drafter, p, 4, K).tokens == reference(llama, p, 4, ())
    for args in ((p, 5), ([], 4), (p, 0)):
        with pytest.raises(KvshotError, match=f"context of {limit}"):
            decode(llama, drafter, *args, K)


def test_commit_keeps_the_committed_positions_only(llama):
    needs = bound_drafter("hybrid-1", llama).required_features()
    p = prompt(9, 2)
    with llama.watch(needs.hidden_layers) as outputs:
        sequence = Sequence(llama, needs, outputs)
        following = sequence.prefill(torch.tensor(p))
        assert following[:-1].tolist() == p[1:]
        start = sequence.commit(following)
        assert start.all.positions.tolist() == list(range(9)) and start.select.tolist() == [8]
        best = sequence.verify(torch.tensor([following[-1], 3, 4, 5]))
        start = sequence.commit(best[:2])
        assert start.all.positions.tolist() == [9, 10] and start.rows.positions.tolist() == [10]
        assert {len(x) for part in (start.hidden, start.keys, start.values) for x in part.values()} == {2}
        assert sequence.length == sequence._cache.get_seq_length() == 11


@pytest.mark.parametrize(("drafts", "best", "count"), [([], [7], 0), ([7], [7, 8], 1), ([1, 2, 3], [1, 2, 4, 5], 2), ([2, 2], [1, 2, 3], 0)])
def test_agreeing(drafts, best, count):
    assert agreeing(drafts, best) == count


def test_cut():
    assert cut([5, 6, 7, 6], {6}) == (5, 6)
    assert cut([5, 6], ()) == (5, 6)
    assert cut([], {6}) == ()


@pytest.mark.smollm2
def test_smollm2_is_lossless(smollm2_target):
    real = Target.load(TargetConfig(path=smollm2_target, dtype="fp32", device="cpu"))
    drafter = build_drafter(toys.FAMILIES["hybrid-1"], real.geometry, 512)
    drafter.reset(0)
    drafter.set_vocab(torch.arange(512))
    drafter.bind(real.model.get_input_embeddings().weight, real.model.get_output_embeddings().weight)
    for number, text in enumerate(("Name three fruits.", "What is 2 + 2?")):
        message = real.tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False)
        p = real.tokenizer(message, add_special_tokens=False).input_ids
        want = reference(real, p, 12, stop_tokens(real))
        assert decode(real, drafter, p, 12, 4, stop_tokens(real)).tokens == want
        if number == 0:
            rng = random.Random(0)
            script(drafter, p + want + [0] * 4, lambda: rng.random() < 0.3)  # noqa: B023
            out = decode(real, drafter, p, 12, 4, stop_tokens(real))
            assert out.tokens == want and sum(out.accepted) >= 4
            del drafter.begin, drafter.propose
