"""Sampled text has the target's distribution: chi-square over pairs of tokens, on a target of six tokens whose distribution is known exactly.

For each way of drafting, 4000 texts of four tokens after one prompt with fixed seeds; the pairs of the second and third token and of the
third and fourth, 36 cells each, against the probabilities of all 6^4 texts. The threshold is that of one false alarm in 100 runs of
everything (Bonferroni). A rule that is off by .02 in the sum of (p' - p)^2 / p, such as one that misplaces 7% of the texts evenly, is
found with probability .99; the wrong rules at the end are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from scipy import stats

from kvshot_ds.config import DraftingConfig, SamplingConfig
from kvshot_ds.decoding import chain, engine, sampling, verify
from kvshot_ds.decoding.engine import Engine
from kvshot_ds.drafters.base import Drafter
from kvshot_ds.drafters.block import BlockDrafter
from kvshot_ds.drafters.build import build_drafter
from kvshot_ds.drafters.state import DraftState
from kvshot_ds.geometry import Geometry
from kvshot_ds.target import Target
from tests import toys
from tests.decoding.test_tree import first_start

VOCAB, TOKENS, TEXTS, AT_ONCE = 6, 4, 4000, 2000
PROMPT = [1, 4, 2]
Rule = Callable[..., verify.Verdict]


@dataclass(frozen=True)
class Way:
    """drafter: no family reads less of the target than these two, which makes thousands of sequences cheap; the rules do not know of families."""

    drafter: str
    drafting: DraftingConfig
    sampling: SamplingConfig


PLAIN, COUPLED = SamplingConfig(temperature=1.0, seed=1), SamplingConfig(temperature=1.0, seed=1, scheme="coupled")
FILTERED = SamplingConfig(temperature=1.3, top_k=5, top_p=0.93, seed=1)
STATIC = DraftingConfig(strategy="static_tree", branching=(2, 2, 1))
DYNAMIC = DraftingConfig(strategy="dynamic_tree", length=3, top_k=3, nodes=8)
WAYS = {
    "chain, rejection": Way("kv_only-none", DraftingConfig(length=3), PLAIN),
    "chain, rejection, filters": Way("kv_only-none", DraftingConfig(length=3), FILTERED),
    "chain, coupled": Way("kv_only-none", DraftingConfig(length=3), COUPLED),
    "chain, coupled, filters": Way("kv_only-none", DraftingConfig(length=3), FILTERED.model_copy(update={"scheme": "coupled"})),
    "static tree": Way("kv_only-none", STATIC, PLAIN),
    "dynamic tree": Way("kv_only-none", DYNAMIC, COUPLED),
    "dynamic tree, filters": Way("kv_only-none", DYNAMIC, FILTERED),
    "block, rejection": Way("kv_block-none", DraftingConfig(length=3), PLAIN),
    "block, coupled": Way("kv_block-none", DraftingConfig(length=3), COUPLED),
    "block, best-first": Way("kv_block-none", DYNAMIC, PLAIN),
}
THRESHOLD = 0.01 / (2 * len(WAYS))


@cache
def target() -> Target:
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=7, num_attention_heads=4, num_key_value_heads=2, vocab_size=VOCAB,
        max_position_embeddings=32, initializer_range=0.3, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        model = transformers.AutoModelForCausalLM.from_config(config)
    return Target(model, Geometry.from_hf(config), Path("six"))


@cache
def drafter(name: str) -> Drafter:
    """It cannot propose token 3, and knows nothing of the target: p and q overlap by about two thirds."""
    made = build_drafter(toys.FAMILIES[name], target().geometry, VOCAB - 1)
    made.reset(seed=3)
    made.set_vocab(torch.tensor([0, 1, 2, 4, 5]))
    with torch.no_grad():
        for p in made.parameters():
            p.mul_(8 if p.ndim == 2 else 1)
    made.bind(target().model.get_input_embeddings().weight, target().model.get_output_embeddings().weight)
    return made.eval().requires_grad_(False)


@cache
def exact(temperature: float, top_k: int, top_p: float) -> torch.Tensor:
    """Probability of each text [6, 6, 6, 6], from the target's plain forward."""
    config = SamplingConfig(temperature=temperature, top_k=top_k, top_p=top_p)
    texts = torch.tensor([[*PROMPT, *text] for text in product(range(VOCAB), repeat=TOKENS - 1)])
    p = sampling.log_probs(target().forward(texts)[:, len(PROMPT) - 1 :].double(), config).exp().double()
    p = p.view(*[VOCAB] * (TOKENS - 1), TOKENS, VOCAB)  # the tokens before, how many of them count, the token itself
    return p[:, 0, 0, 0][0][:, None, None, None] * p[:, 0, 0, 1][:, :, None, None] * p[:, :, 0, 2][..., None] * p[..., 3, :]


@dataclass(frozen=True)
class Fit:
    """p_values: of the pairs of tokens 2 and 3, and 3 and 4; 0 if a text came up that the target never makes. accepted: drafts a text."""

    p_values: tuple[float, ...]
    accepted: float


def fit(way: Way) -> Fit:
    """TEXTS samples against the exact distribution. Cells that expect fewer than 5 texts are counted together."""
    made = Engine(target(), drafter(way.drafter), way.drafting, way.sampling)
    samples = [d for first in range(0, TEXTS, AT_ONCE) for d in made.decode([PROMPT] * AT_ONCE, TOKENS, sequences=range(first, first + AT_ONCE))]
    found = torch.tensor([d.tokens for d in samples])
    p, out = exact(way.sampling.temperature, way.sampling.top_k, way.sampling.top_p), []
    for pair in ((1, 2), (2, 3)):
        want = p.sum([i for i in range(TOKENS) if i not in pair]).flatten()
        expected = TEXTS * want / want.sum()
        counts = torch.bincount(found[:, pair[0]] * VOCAB + found[:, pair[1]], minlength=VOCAB**2).double()
        few = expected < 5
        cells = [torch.cat((x[~few], x[few].sum()[None]))[: None if expected[few].sum() else -1] for x in (counts, expected)]
        assert len(cells[0]) > 10, "too few cells to see much"
        out.append(0.0 if counts[want == 0].any() else float(stats.chisquare(*(x.numpy() for x in cells)).pvalue))
    return Fit(tuple(out), sum(sum(d.accepted) for d in samples) / TEXTS)


def test_the_exact_distribution_is_one():
    p = exact(1.0, 0, 1.0)
    assert p.shape == (VOCAB,) * TOKENS and float(p.sum()) == pytest.approx(1, abs=1e-6)
    assert 0.05 < float(p.sum((1, 2, 3)).max()) < 0.9
    text = (3, 0, 5, 1)
    one = 1.0
    for i, token in enumerate(text):
        one *= float(target().forward(torch.tensor([[*PROMPT, *text[:i]]]))[0, -1].double().softmax(-1)[token])
    assert float(p[text]) == pytest.approx(one, rel=1e-5)


def test_the_power_is_what_is_stated():
    distance, df = 0.02, VOCAB**2 - 1
    assert stats.ncx2.sf(stats.chi2.isf(THRESHOLD, df), df, TEXTS * distance) > 0.99
    # 7% of the texts misplaced: each cell off by 14% of what it should be, up or down
    assert pytest.approx(0.14**2, rel=0.05) == distance


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_samples_have_the_targets_distribution(way):
    found = fit(way)
    assert min(found.p_values) > THRESHOLD, found
    assert found.accepted > 0.3, "hardly anything was accepted"


def without_residual(draft, logits, ids, sampler, positions, sequences) -> verify.Verdict:
    """The token after a refusal from p itself."""
    right = verify.reject(draft, logits, ids, sampler, positions, sequences)
    at = torch.arange(len(logits)), right.accepted
    u = sampler.uniform(positions, sequences.unsqueeze(1), sampling.Use.OWN)
    return replace(right, own=sampling.pick(sampler.log_probs(logits).exp()[at], u[at]))


def without_q(draft, logits, ids, sampler, positions, sequences) -> verify.Verdict:
    """Accepts with probability p(x)."""
    return verify.reject(replace(draft, probs=torch.ones_like(draft.probs)), logits, ids, sampler, positions, sequences)


def with_one_noise(draft, logits, ids, sampler, positions, sequences) -> verify.Verdict:
    """The number that refused a draft draws the token after it."""
    u = sampler.uniform(positions, sequences.unsqueeze(1), sampling.Use.ACCEPT)
    return verify.settle_draws(draft, sampler.log_probs(logits).exp(), ids, u[:, :-1], u)


def without_filters(draft, logits, ids, sampler, positions, sequences) -> verify.Verdict:
    """The target's distribution without its top_p."""
    plain = sampling.Sampler(sampler.config.model_copy(update={"top_p": 1.0}))
    return verify.reject(draft, logits, ids, plain, positions, sequences)


def own_of_the_root(draft, chosen) -> verify.Verdict:
    """The target's token from the wrong place of a tree."""
    return replace(verify.match(draft, chosen), own=chosen[:, 0])


def noise_of_the_sequence(seed, use, sequences, positions) -> torch.Tensor:
    """The same noise at each position."""
    return _keys(seed, use, sequences, torch.zeros_like(positions))


_keys = sampling.keys
WRONG: list[tuple[str, Any, str, Callable[..., Any]]] = [
    ("chain, rejection", engine, "reject", without_residual),
    ("block, rejection", engine, "reject", without_residual),
    ("chain, rejection", engine, "reject", without_q),
    ("chain, rejection", engine, "reject", with_one_noise),
    ("chain, rejection, filters", engine, "reject", without_filters),
    ("dynamic tree", engine, "match", own_of_the_root),
    ("chain, coupled", sampling, "keys", noise_of_the_sequence),
]


@pytest.mark.parametrize(("way", "module", "name", "rule"), WRONG, ids=[f"{way}: {rule.__name__}" for way, _, _, rule in WRONG])
def test_a_wrong_rule_is_found(way, module, name, rule, monkeypatch):
    monkeypatch.setattr(module, name, rule)
    assert min(fit(WAYS[way]).p_values) < THRESHOLD / 100


@torch.no_grad()
def test_where_an_adaptive_chain_stops_does_not_depend_on_the_token_drawn_there():
    """Otherwise only likely draws would be kept, and what is accepted would be no sample. A block's marginals are the same whatever is drawn."""
    block = toys.drafter("dflash-2", scale=1.0)
    assert isinstance(block, BlockDrafter)
    best = block.logits(block.slots(DraftState.empty(block.depth), first_start(1))[1:, 0]).softmax(-1).amax(-1).cumprod(0)  # joint, by level
    options, chains = DraftingConfig(length=4, min_confidence=float(best[1] * best[2]) ** 0.5), []
    for seed in range(30):
        sampler = sampling.Sampler(SamplingConfig(temperature=1.5, seed=seed))
        chains.append(chain.propose(block, DraftState.empty(block.depth), first_start(1), options, 4, sampler, torch.tensor([0])))
    assert [c.levels for c in chains] == [2] * 30
    assert len({tuple(c.tokens[0].tolist()) for c in chains}) > 5
