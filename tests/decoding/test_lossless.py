"""Whatever is drafted, by whom and how: greedy text is the target's own `generate`, and a coupled sample the target's alone with that seed.

The drafters are random, with their hidden states bent towards the right token now and then, so that every number of drafts
is accepted somewhere. 200 prompts go through each family and strategy, three through each variant of a drafter, alone and together.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from functools import cache

import pytest
import torch
from transformers import GenerationConfig

from kvshot_ds.config import DraftingConfig, SamplingConfig
from kvshot_ds.decoding.engine import Engine
from kvshot_ds.decoding.prompts import reference
from kvshot_ds.decoding.rounds import Decoded
from kvshot_ds.drafters.base import Drafter
from kvshot_ds.drafters.block import BlockDrafter
from kvshot_ds.target import Target
from tests import toys
from tests.decoding.models import FAMILIES, bound_drafter, hf_target, prompt

LENGTH, SHORT, BATCHES = 20, 12, 4
PROMPTS = [prompt(1 + i % 13, i) for i in range(200)]
STRATEGIES = {
    "chain": DraftingConfig(length=4),
    "adaptive": DraftingConfig(length=6, min_confidence=0.3),
    "static": DraftingConfig(strategy="static_tree", branching=(3, 2, 2, 1)),
    "dynamic": DraftingConfig(strategy="dynamic_tree", length=4, top_k=4, nodes=14),
    "paper": DraftingConfig(strategy="paper_tree"),
}
ONE_OF_EACH = ("hidden_only-1", "kv_only-2", "hybrid-2", "dflash-2", "kv_block-2", "hybrid_block-2")


@cache
def target_of(family: str, dtype: torch.dtype = torch.float32) -> Target:
    return hf_target(family, dtype)


@cache
def own_text(family: str, dtype: torch.dtype = torch.float32) -> list[list[int]]:
    """LENGTH tokens of the target's greedy `generate` after each of PROMPTS; prompts of a length go through it together."""
    target, out = target_of(family, dtype), [[0]] * len(PROMPTS)
    plain = GenerationConfig(max_new_tokens=LENGTH, do_sample=False, eos_token_id=None, pad_token_id=0)
    for length in {len(p) for p in PROMPTS}:
        at = [i for i, p in enumerate(PROMPTS) if len(p) == length]
        ids = torch.tensor([PROMPTS[i] for i in at])
        for i, row in zip(at, target.model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=plain), strict=True):
            out[i] = row[length:].tolist()
    return out


def bent(drafter: Drafter, texts: Sequence[Sequence[int]], share: float, seed: int = 0) -> Drafter:
    """Hidden states that come out of `drafter` are bent towards the true next token of `texts`, with probability `share` each level and sequence.

    What it carries from step to step stays its own. A sequence is known by the position and the bonus token of a round.
    """
    after = {(i, token): text[i + 1 :] for text in texts for i, token in enumerate(text)}
    rng, rounds, can = random.Random(seed), [[[0]]], drafter.t2d.tolist()

    def towards(h: torch.Tensor, level: int) -> torch.Tensor:
        right = [following[level] if len(following) > level and rng.random() < share else None for following in rounds[0]]
        known = torch.tensor([token is not None and bool(can[token]) for token in right])
        rows = drafter.head_weight[torch.searchsorted(drafter.draft_ids, torch.tensor([token or 0 for token in right])).clamp_max(len(drafter.d2t) - 1)]
        by_sequence = h.unflatten(0, (len(right), -1))
        size = 40 * h.norm(dim=-1).max() / rows.norm(dim=-1, keepdim=True) * known.unsqueeze(1)
        return (by_sequence + (size * rows / drafter.norm.weight).unsqueeze(1)).flatten(0, 1)

    def anchored(start):
        at = zip((start.rows.positions + 1).tolist(), start.tokens[start.select].tolist(), strict=True)
        rounds[0] = [list(after.get(key, ())) for key in at]

    if isinstance(drafter, BlockDrafter):
        slots = drafter.slots

        def bent_slots(state, start):
            anchored(start)
            h = slots(state, start)
            return torch.stack([h[0], *(towards(one, level) for level, one in enumerate(h[1:]))])

        drafter.slots = bent_slots  # type: ignore[method-assign]
        return drafter
    begin, step = drafter.begin, drafter.forward_step

    def bent_begin(state, start):
        anchored(start)
        return towards(begin(state, start), 0)

    def bent_step(state, tokens, k):
        h = step(state, tokens, k)
        return towards(h, k) if k else h  # step 0 of a KV-only drafter goes through here, too

    drafter.begin, drafter.forward_step = bent_begin, bent_step  # type: ignore[method-assign]
    return drafter


def helped(name: str, target: Target, texts: Sequence[Sequence[int]], share: float = 0.85) -> Drafter:
    return bent(bound_drafter(name, target), texts, share)


@pytest.mark.parametrize("family", FAMILIES)
def test_references_are_those_of_single_prompts(family):
    target = target_of(family)
    for i in (0, 17, 100, 199):
        assert own_text(family)[i] == reference(target, PROMPTS[i], LENGTH, ())
    assert len({tuple(text) for text in own_text(family)}) > 150 and sum(len(set(text)) for text in own_text(family)) / 200 > 5


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_greedy_text_of_200_prompts_is_the_targets_own(name, strategy):
    """50 prompts of different lengths together, each decoded to several lengths."""
    target, want = target_of("Llama"), own_text("Llama")
    accepted: Counter[int] = Counter()
    for batch in range(BATCHES):
        mine = slice(batch, None, BATCHES)
        drafter = helped(name, target, [p + w for p, w in zip(PROMPTS[mine], want[mine], strict=True)])
        engine = Engine(target, drafter, STRATEGIES[strategy])
        for length in (LENGTH, 5 + batch):
            out = engine.decode(PROMPTS[mine], length)
            assert [d.tokens for d in out] == [w[:length] for w in want[mine]]
            accepted.update(n for d in out for n in d.accepted)
    most = 4 if name in toys.BLOCK_FAMILIES or strategy not in ("adaptive", "paper") else 6
    assert all(accepted[n] for n in range(most + 1)), f"some number of accepted drafts never came up: {accepted}"


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("family", "name"), [("Llama", n) for n in toys.FAMILIES if n not in ONE_OF_EACH] + [(f, n) for f in FAMILIES[1:] for n in ONE_OF_EACH]
)
def test_greedy_text_of_every_variant_alone_and_together(family, name, strategy):
    target, chosen, length = target_of(family), (31, 12, 44), 12
    prompts, want = [PROMPTS[i] for i in chosen], [own_text(family)[i][:length] for i in chosen]
    drafter = helped(name, target, [p + w for p, w in zip(prompts, want, strict=True)])
    engine = Engine(target, drafter, STRATEGIES[strategy])
    together, alone = engine.decode(prompts, length), engine.decode(prompts[:1], length)
    assert [d.tokens for d in together] == want and [d.tokens for d in alone] == want[:1]
    assert sum(sum(d.accepted) for d in together + alone) > 0


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", ["hybrid-1", "hybrid_block-2"])
def test_a_stop_token_ends_each_sequence_in_its_place(name, strategy):
    target, want = target_of("Llama"), own_text("Llama")
    texts = [p + w for p, w in zip(PROMPTS, want, strict=True)]
    stop = {5, 21}
    ended = [w[: next((i + 1 for i, token in enumerate(w) if token in stop), LENGTH)] for w in want]
    assert 20 < sum(len(e) < LENGTH for e in ended) < 190
    out = Engine(target, helped(name, target, texts), STRATEGIES[strategy]).decode(PROMPTS[:40], LENGTH, stop)
    assert [d.tokens for d in out] == ended[:40]


@cache
def wide_target() -> Target:
    """The bf16 target of `target_of` with its very weights, calculating in fp32."""
    wide = hf_target("Qwen3")
    wide.model.load_state_dict({key: value.float() for key, value in target_of("Qwen3", torch.bfloat16).model.state_dict().items()})
    return wide


@cache
def rounding_in_bf16() -> float:
    """The largest error of a logit in plain forwards of the bf16 target over 40 texts of its own."""
    errors = []
    for p, own in zip(PROMPTS[:40], own_text("Qwen3", torch.bfloat16), strict=False):
        text = torch.tensor([p + own])
        errors.append((target_of("Qwen3", torch.bfloat16).forward(text).float() - wide_target().forward(text)).abs().max())
    return float(torch.stack(errors).max())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_differences_in_bf16_are_ties_within_its_rounding(strategy):
    """Counted, and each shown: where two texts part, both tokens lie as close to the best logit in fp32 as the rounding of bf16 explains.

    A token that wins in bf16 lies below the best by at most twice the error of one logit. That is far less than what
    parts it from the median token, so that a real fault would not pass for rounding.
    """
    target, tolerance, different = target_of("Qwen3", torch.bfloat16), 2 * rounding_in_bf16(), 0
    want = own_text("Qwen3", torch.bfloat16)
    drafter = helped("hybrid-2", target, [p + w for p, w in zip(PROMPTS, want, strict=True)])
    apart = []
    for i, d in enumerate(Engine(target, drafter, STRATEGIES[strategy]).decode(PROMPTS[:60], LENGTH)):
        if d.tokens == want[i]:
            continue
        different += 1
        at = next(k for k, (a, b) in enumerate(zip(d.tokens, want[i], strict=True)) if a != b)
        logits = wide_target().forward(torch.tensor([PROMPTS[i] + want[i][:at]]))[0, -1]
        apart.append(float(logits.max() - logits.median()))
        for token in (d.tokens[at], want[i][at]):
            found = float(logits.max() - logits[token])
            assert found <= tolerance, f"prompt {i}, token {at}: {token} lies {found:.3g} below the best, rounding explains {tolerance:.3g}"
    assert 0 < different < 30, "without any difference nothing was shown"
    assert tolerance < sum(apart) / len(apart) / 3


SAMPLED = {
    "plain": SamplingConfig(temperature=1.0, seed=3, scheme="coupled"),
    "filtered": SamplingConfig(temperature=1.4, top_k=12, top_p=0.9, min_p=0.02, seed=(1 << 62) + 5, scheme="coupled"),
}


@cache
def sampled_text(how: str) -> list[list[int]]:
    """What the target alone makes of PROMPTS, 16 of them."""
    return [d.tokens for d in Engine(target_of("Llama"), None, STRATEGIES["chain"], SAMPLED[how]).decode(PROMPTS[:16], SHORT)]


@pytest.mark.parametrize("how", SAMPLED)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_a_coupled_sample_is_that_of_the_target_alone(name, strategy, how):
    target, want = target_of("Llama"), sampled_text(how)
    drafter = helped(name, target, [p + w for p, w in zip(PROMPTS, want, strict=False)])
    engine = Engine(target, drafter, STRATEGIES[strategy], SAMPLED[how])
    together = engine.decode(PROMPTS[:16], SHORT)
    assert [d.tokens for d in together] == want
    few = engine.decode([PROMPTS[i] for i in (9, 2)], SHORT, sequences=(9, 2))
    assert [d.tokens for d in few] == [want[9], want[2]], "a sequence keeps its noise in another batch"
    assert len({n for d in together for n in d.accepted}) > 2


def test_samples_differ_by_seed_and_sequence_and_a_tree_needs_no_scheme():
    target, want = target_of("Llama"), sampled_text("plain")
    alone = Engine(target, None, STRATEGIES["chain"], SAMPLED["plain"].model_copy(update={"seed": 4})).decode(PROMPTS[:10], SHORT)
    assert all(d.tokens != w for d, w in zip(alone, want, strict=False))
    same = Engine(target, None, STRATEGIES["chain"], SAMPLED["plain"]).decode([PROMPTS[5]] * 4, SHORT)
    assert len({tuple(d.tokens) for d in same}) == 4
    by_rejection = SAMPLED["plain"].model_copy(update={"scheme": "rejection"})
    tree = Engine(target, bound_drafter("hybrid-1", target), STRATEGIES["dynamic"], by_rejection).decode(PROMPTS[:10], SHORT)
    assert [d.tokens for d in tree] == want[:10]


def test_the_same_seed_gives_the_same_sample_by_rejection():
    target, sampling = target_of("Llama"), SamplingConfig(temperature=1.0, seed=3)
    runs: list[list[Decoded]] = []
    for seed in (3, 3, 4):
        engine = Engine(target, bound_drafter("hybrid-1", target), STRATEGIES["chain"], sampling.model_copy(update={"seed": seed}))
        runs.append(engine.decode(PROMPTS[:10], SHORT))
    a, b, c = ([d.tokens for d in run] for run in runs)
    assert a == b and all(x != y for x, y in zip(a, c, strict=True))
    assert sum(sum(d.accepted) for d in runs[0]) > 0
