"""The engine with greedy chains: the target's own tokens for every drafter, at every acceptance, length and stop."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

import pytest
import torch

from kvshot_ds.config import DraftingConfig, TargetConfig
from kvshot_ds.decoding.cache import RaggedCache
from kvshot_ds.decoding.draft import Draft
from kvshot_ds.decoding.engine import Engine, cut
from kvshot_ds.decoding.rounds import Decoded, Round
from kvshot_ds.decoding.run import reference, stop_tokens
from kvshot_ds.decoding.state import Sequences
from kvshot_ds.drafters.base import Drafter
from kvshot_ds.drafters.build import build_drafter
from kvshot_ds.errors import KvshotError
from kvshot_ds.features.spec import Store
from kvshot_ds.target import Target
from tests import toys
from tests.decoding.models import FAMILIES, bound_drafter, hf_target, prompt, script

LENGTH, K = 16, 3
SOME = ("hidden_only-1", "kv_only-2", "hybrid-2")
# every drafter on one target, and one of each family on the others
PAIRS = [(family, name) for family in FAMILIES for name in toys.FAMILIES if family == "Llama" or name in SOME] + [("StableLm", "hybrid-2")]
_targets: dict[str, Target] = {}


def decode(target: Target, drafter: Drafter | None, p: Sequence[int], length: int, k: int, stop: Collection[int] = ()) -> Decoded:
    return Engine(target, drafter, DraftingConfig(length=k)).decode([p], length, stop)[0]


def generate(target: Target, drafter: Drafter, p: Sequence[int], length: int, k: int, stop: Collection[int] = ()) -> Iterator[Round]:
    for rounds in Engine(target, drafter, DraftingConfig(length=k)).generate([p], length, stop):
        yield rounds[0]


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


def test_a_sequence_at_the_end_of_its_context_leaves_the_one_beside_it_alone(monkeypatch):
    """Sequence 1 has room for long drafts, which for sequence 0 reach beyond a context after which a dynamic RoPE turns everything."""
    target = hf_target("Llama", rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 100.0})
    prompts, new = [prompt(75, 1), prompt(9, 2)], 21
    texts = [reference(target, p, new, ()) for p in prompts]
    fed: list[int] = []
    plain = Target.last_hidden

    def forward(self, tokens, cache, positions, mask=None):
        fed.append(int(positions.max()))
        return plain(self, tokens, cache, positions, mask)

    def propose(drafter, memory, start, drafting, length, sampler, numbers):
        rows = []
        for at, number in zip(start.rows.positions.tolist(), numbers.tolist(), strict=True):
            known = at + 2 - len(prompts[number])
            rows.append([(t + number) % toys.VOCAB for t in (*texts[number][known:], *[0] * length)[:length]])  # of sequence 1 all wrong
        return Draft.in_line(torch.tensor(rows))

    monkeypatch.setattr("kvshot_ds.decoding.engine.chain.propose", propose)
    monkeypatch.setattr(Target, "last_hidden", forward)
    decoded = Engine(target, bound_drafter("kv_only-2", target), DraftingConfig(length=7)).decode(prompts, new)
    assert [d.tokens for d in decoded] == texts and max(decoded[0].accepted) == 7 and not any(decoded[1].accepted)
    assert max(fed) == target.geometry.max_positions - 1


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


def test_the_target_alone_makes_a_token_a_round(llama):
    p = prompt(9, 2)
    out = decode(llama, None, p, LENGTH, K)
    assert out.tokens == reference(llama, p, LENGTH, ())
    assert [len(r.tokens) for r in out.rounds] == [1] * LENGTH and not any(r.drafted or r.draft_seconds > 1e-3 for r in out.rounds)


def test_commit_keeps_the_committed_positions_only(llama):
    """Two sequences of different lengths, one of which keeps a branch of a tree: everything equals a plain forward over what was kept."""
    drafter = bound_drafter("hybrid-1", llama)
    needs = drafter.required_features()
    prompts = [prompt(9, 2), prompt(4, 3)]
    tree = Draft(
        torch.tensor([[3, 4, 5, 6], [7, 8, 9, 1]]), torch.tensor([[0, 0, 2, 3], [0, 0, 2, 3]]), torch.tensor([[1, 1, 2, 3]] * 2), levels=3, chain=False
    )
    with llama.watch(needs.hidden_layers) as outputs:
        batch = Sequences(llama, needs, outputs, 2, 30)
        best = batch.prefill(prompts)[:, 0].argmax(-1).tolist()
        start = batch.commit([range(9), range(4)], [[*p[1:], b] for p, b in zip(prompts, best, strict=True)])
        assert start.all.positions.tolist() == [*range(9), *range(4)] and start.select.tolist() == [8, 12]
        batch.verify(torch.tensor(best), tree)
        start = batch.commit([[0, 2, 3], [0]], [[4, 5, 11], [12]])
    assert start.all.positions.tolist() == [9, 10, 11, 4] and start.rows.positions.tolist() == [11, 4] and batch.lengths == [12, 5]
    texts = [prompts[0] + [best[0], 4, 5], prompts[1] + [best[1]]]
    spec = replace(needs, store=Store.all("fp32"))
    want = [llama.features([t], spec, [[0] * len(t)])[0] for t in texts]
    for layer in needs.hidden_layers:
        torch.testing.assert_close(start.hidden[layer], torch.cat((want[0][f"hidden.{layer}"][9:], want[1][f"hidden.{layer}"][4:])), rtol=1e-4, atol=1e-5)
    for layer in needs.kv_layers:
        held = batch.cache.layer(layer)
        for name, whole, new in (("key", held.k, start.keys[layer]), ("value", held.v, start.values[layer])):
            mine = [w[f"{name}.{layer}"] for w in want]
            torch.testing.assert_close(torch.cat((whole[:12], whole[30:35])), torch.cat(mine), rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(new, torch.cat((mine[0][9:], mine[1][4:])), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["kv_only-per_layer", "hybrid-2"])
def test_the_prefix_is_not_copied_from_round_to_round(llama, name, monkeypatch):
    """Memories stay where they are; per_layer reads the target's cache itself."""
    drafter, places = bound_drafter(name, llama), []
    run_layer = drafter.run_layer

    def watched(i, state, *args, **options):
        h = run_layer(i, state, *args, **options)
        places.append([m.prefix.k.data_ptr() for m in (*state.own, *state.cross) if m.prefix is not None])
        return h

    monkeypatch.setattr(drafter, "run_layer", watched)
    caches = []
    layer = RaggedCache.layer
    monkeypatch.setattr(RaggedCache, "layer", lambda cache, i: caches.append(layer(cache, i).k.data_ptr()) or layer(cache, i))
    decode(llama, drafter, prompt(9, 2), LENGTH, K)
    last = places[-drafter.depth :]
    assert len(places) > 4 * drafter.depth and all(p == last[-1] for p in places[drafter.depth :])
    assert (set(last[-1]) <= set(caches)) is (name == "kv_only-per_layer")


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
