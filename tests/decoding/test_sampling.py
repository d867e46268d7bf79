"""Filters against transformers' own, noise against a reference in Python integers, and what both schemes promise."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from transformers.generation import logits_process as hf

from kvshot_ds.config import SamplingConfig
from kvshot_ds.decoding.sampling import Sampler, Use, gumbel, keys, log_probs, mixed, perturbed_best, pick, uniform, warp

WORD = (1 << 64) - 1


def scores(rows: int = 40, vocab: int = 60, seed: int = 0, ties: bool = False) -> torch.Tensor:
    x = 3 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))
    return x.round() if ties else x


def processed(x: torch.Tensor, c: SamplingConfig) -> torch.Tensor:
    """What `generate` of transformers does, in its order."""
    steps = [hf.TemperatureLogitsWarper(c.temperature)] if c.temperature != 1 else []
    steps += [hf.TopKLogitsWarper(c.top_k)] if c.top_k else []
    steps += [hf.TopPLogitsWarper(c.top_p)] if c.top_p < 1 else []
    steps += [hf.MinPLogitsWarper(c.min_p)] if c.min_p else []
    for step in steps:
        x = step(torch.zeros(len(x), 1, dtype=torch.long), x)
    return x


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(("temperature", "top_k", "top_p", "min_p"), list(product((0.6, 1.0, 1.7), (0, 1, 7, 99), (1.0, 0.9, 0.3, 1e-6), (0.0, 0.1, 1.0))))
def test_filters_are_those_of_transformers(temperature, top_k, top_p, min_p, ties):
    c = SamplingConfig(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    x = scores(ties=ties)
    want, found = processed(x, c), warp(x, c)
    if ties and top_p < 1:  # which of equal tokens falls away is left to chance there: its sort is not stable
        assert torch.equal(found.sort().values, want.sort().values)
    else:
        assert torch.equal(found, want)
        torch.testing.assert_close(log_probs(x, c), want.log_softmax(-1), rtol=0, atol=0)
    assert torch.equal(warp(x.view(8, 5, -1), c).view_as(found), found), "leading dimensions do not matter"
    assert torch.equal(torch.cat([warp(row[None], c) for row in x]), found), "nor do other rows"


def test_the_order_of_filters_and_the_side_of_ties_matter_in_these_cases():
    """Otherwise the comparison above would show nothing."""
    x = scores(ties=True)
    a = SamplingConfig(temperature=1.0, top_k=7, top_p=0.3)
    other = hf.TopKLogitsWarper(7)(None, hf.TopPLogitsWarper(0.3)(None, x))
    assert not torch.equal(warp(x, a), other)
    kept = warp(x, SamplingConfig(temperature=1.0, top_p=0.3)) > float("-inf")
    split = 0
    for row, k in zip(x, kept, strict=True):
        equal = (row == row[k].min()).nonzero().flatten()
        split += not k[equal].all()
        assert k[equal].tolist() == sorted(k[equal].tolist()), "of equal tokens the smaller ids go first"
    assert split > 5 and (kept.sum(-1) > 1).any()


def test_log_probs_are_fp32_and_normalised():
    found = log_probs(scores().bfloat16(), SamplingConfig(temperature=0.7, top_k=5))
    assert found.dtype == torch.float32 and torch.allclose(found.exp().sum(-1), torch.ones(40))
    assert ((found > float("-inf")).sum(-1) >= 5).all()


def splitmix(x: int) -> int:
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> shift)) * factor & WORD
    return x ^ (x >> 31)


def test_noise_is_splitmix64_counted_from_a_mixed_key():
    numbers = [0, 1, -1, 12345678901234567, -(1 << 63), (1 << 63) - 1]
    assert [x & WORD for x in mixed(torch.tensor(numbers)).tolist()] == [splitmix(x & WORD) for x in numbers]
    seed, use, golden = (1 << 63) - 25, Use.ACCEPT, 0x9E3779B97F4A7C15
    found = keys(seed, use, torch.tensor([[3], [4]]), torch.tensor([[0, 70], [1, 9]]))
    first = seed * 0xBF58476D1CE4E5B9 + use * 0x94D049BB133111EB
    want = [[splitmix((splitmix((s * golden + first) & WORD) + p * golden) & WORD) for p in row] for s, row in ((3, (0, 70)), (4, (1, 9)))]
    assert [[x & WORD for x in row] for row in found.tolist()] == want
    g = gumbel(found[0], torch.tensor([0, 5]))
    for row, key in zip(g.tolist(), want[0], strict=True):
        for value, token in zip(row, (0, 5), strict=True):
            u = ((splitmix((key + (token + 1) * golden) & WORD) >> 16) + 0.5) * 2.0**-48
            assert value == pytest.approx(-math.log(-math.log(u)), rel=1e-12)


def test_uniform_numbers_are_uniform_independent_and_inside():
    ends = uniform(torch.tensor([0, -1]))
    assert 0 < ends[0] < 1e-14 and 1 - 1e-14 < ends[1] < 1
    sampler = Sampler(SamplingConfig(temperature=1.0, seed=7))
    by_use = [sampler.uniform(torch.arange(500), torch.arange(40).unsqueeze(1), use).flatten() for use in Use]
    streams = [*by_use, Sampler(SamplingConfig(temperature=1.0, seed=8)).uniform(torch.arange(500), torch.arange(40).unsqueeze(1), Use.CHOOSE).flatten()]
    streams += [by_use[0].view(40, 500).roll(1, dims).flatten() for dims in (0, 1)]  # the next sequence, the next position
    n = len(streams[0])
    for u in streams:
        counts = torch.histc(u.float(), 50, 0, 1)
        assert ((counts - n / 50) ** 2 / (n / 50)).sum() < 100  # chi-square with 49 degrees of freedom: p = 2e-5
    correlation = torch.corrcoef(torch.stack(streams)) - torch.eye(len(streams))
    assert correlation.abs().max() < 5 / n**0.5


def test_gumbel_max_draws_from_the_distribution():
    p = torch.tensor([0.5, 0.3, 0.15, 0.04, 0.01, 0.0])
    n = 50_000
    key = keys(3, Use.CHOOSE, torch.zeros(n, dtype=torch.long), torch.arange(n))
    counts = torch.bincount(perturbed_best(p.log().expand(n, -1), key, torch.arange(6)), minlength=6)
    assert counts[5] == 0
    assert ((counts - n * p) ** 2 / (n * p))[:5].sum() < 25  # 4 degrees of freedom: p = 5e-5


def test_a_certain_token_is_chosen_whatever_its_noise():
    one = torch.full((3000, 5), float("-inf"))
    one[:, 3] = 0
    key = keys(0, Use.CHOOSE, torch.zeros(3000, dtype=torch.long), torch.arange(3000))
    assert (perturbed_best(one, key, torch.arange(5)) == 3).all()


def test_pick_follows_the_weights_and_never_takes_what_has_none():
    weights = torch.tensor([[0.0, 2.0, 0.0, 6.0, 0.0]])
    u = torch.tensor([2.0**-49, 0.2499, 0.2501, 1 - 2.0**-49], dtype=torch.float64)
    assert pick(weights.expand(4, -1), u).tolist() == [1, 1, 3, 3]
    awkward = torch.rand(2000, 300, generator=torch.Generator().manual_seed(0)) * (torch.arange(300) % 3 == 1)
    for at in (2.0**-49, 1 - 2.0**-49):
        found = pick(awkward, torch.full((2000,), at, dtype=torch.float64))
        assert (awkward.gather(1, found.unsqueeze(1)) > 0).all()


def test_choice_depends_on_seed_sequence_and_position_alone():
    c = SamplingConfig(temperature=1.3, top_p=0.9, seed=5, scheme="coupled")
    logits = scores(12).view(3, 4, -1)
    positions, sequences = torch.arange(12).view(3, 4) % 7, torch.tensor([4, 0, 9])
    whole = Sampler(c).choose(logits, positions, sequences)
    for b, n in product(range(3), range(4)):
        alone = Sampler(c).choose(logits[b : b + 1, n : n + 1], positions[b : b + 1, n : n + 1], sequences[b : b + 1])
        assert alone == whole[b, n], "batch and round do not matter"
    same = logits[:1, :1].expand(60, 40, -1)
    at, who = torch.arange(40).expand(60, -1), torch.arange(60)
    base = Sampler(c).choose(same, at, who)
    others = [Sampler(c.model_copy(update={"seed": 6})).choose(same, at, who), base.roll(1, 0), base.roll(1, 1)]
    p = log_probs(logits[0, 0], c).exp()
    for other in others:
        agree = (base == other).float().mean()
        assert abs(agree - (p**2).sum()) < 0.06, "independent noise agrees by chance only"


def test_greedy_is_the_arg_max():
    logits = scores(12).bfloat16().view(3, 4, -1)
    sampler = Sampler(SamplingConfig())
    assert sampler.greedy and not sampler.draws
    assert torch.equal(sampler.choose(logits, torch.zeros(3, 4).long(), torch.zeros(3).long()), logits.argmax(-1))
    drawn = sampler.draw(logits[:, 0], torch.arange(60) * 2, torch.zeros(3).long(), torch.zeros(3).long())
    assert torch.equal(drawn.tokens, 2 * logits[:, 0].argmax(-1)) and drawn.probs is None


def test_a_large_vocabulary_is_worked_on_in_pieces(monkeypatch):
    from kvshot_ds.decoding import sampling

    c, x = SamplingConfig(temperature=1.0), scores(40)
    args = x.view(4, 10, -1), torch.arange(40).view(4, 10), torch.arange(4)
    want = Sampler(c).choose(*args)
    monkeypatch.setattr(sampling, "_AT_ONCE", 150)
    assert torch.equal(Sampler(c).choose(*args), want)


@pytest.mark.parametrize("scheme", ["coupled", "rejection"])
def test_drafts_are_drawn_from_the_warped_distribution_over_the_draft_vocabulary(scheme):
    c = SamplingConfig(temperature=0.8, top_k=4, scheme=scheme, seed=2)
    logits, ids = scores(1, 9), torch.tensor([1, 3, 4, 8, 20, 21, 22, 30, 39])
    n = 30_000
    drawn = Sampler(c).draw(logits.expand(n, -1), ids, torch.arange(n), torch.zeros(n, dtype=torch.long))
    p = log_probs(logits[0], c).exp()
    assert (drawn.probs is None) == (scheme == "coupled")
    if drawn.probs is not None:
        torch.testing.assert_close(drawn.probs, p.expand(n, -1))
    counts = torch.bincount(drawn.tokens, minlength=40)[ids]
    assert counts[p == 0].sum() == 0 and counts.sum() == n
    assert ((counts - n * p) ** 2 / (n * p))[p > 0].sum() < 25  # 3 degrees of freedom


def coupled_agreement(p: torch.Tensor, q: torch.Tensor) -> float:
    """P[same token] of two Gumbel-max samples with common noise: sum over i of 1 / sum over j of max(p_j / p_i, q_j / q_i) (arXiv 2408.07978)."""
    both = (p > 0) & (q > 0)
    ratios = torch.maximum(p / p[both, None], q / q[both, None])
    return float((1 / ratios.sum(1)).sum())


def test_coupled_drafts_agree_with_the_target_as_often_as_their_common_noise_makes_them():
    c = SamplingConfig(temperature=1.0, seed=4, scheme="coupled")
    n, ids = 20_000, torch.tensor([0, 2, 3, 5, 6, 7])
    x = scores(1, 8, seed=3)
    y = x[:, ids] + scores(1, 6, seed=4) / 3
    at, who = torch.arange(n), torch.zeros(n, dtype=torch.long)
    chosen = Sampler(c).choose(x.expand(1, n, -1), at.unsqueeze(0), who[:1])[0]
    agree = (Sampler(c).draw(y.expand(n, -1), ids, at, who).tokens == chosen).double().mean()
    q = torch.zeros(8).scatter(0, ids, y[0].softmax(-1))
    want = coupled_agreement(x[0].softmax(-1), q)
    assert abs(agree - want) < 4 * (want * (1 - want) / n) ** 0.5
    assert want > 1.3 * float((x[0].softmax(-1) * q).sum()), "independent draws would agree much less"


@pytest.mark.parametrize("noise", [0.0, 0.5, 1.5])
@pytest.mark.parametrize("filters", [{"top_p": 0.8}, {"top_k": 5}, {"min_p": 0.2}])
def test_filters_on_the_drafter_too_make_more_drafts_acceptable(noise, filters):
    """Why q is filtered as p is: sum of min(p, q), and agreement under common noise, for a drafter that is the target up to noise."""
    c, plain = SamplingConfig(temperature=1.0, **filters), SamplingConfig(temperature=1.0)
    x = scores(100)
    p, y = log_probs(x, c).exp().double(), x + noise * scores(100, seed=1) / 3
    q_plain, q = (log_probs(y, how).exp().double() for how in (plain, c))
    by_rejection = [torch.minimum(p, one).sum(-1).mean() for one in (q_plain, q)]
    coupled = [sum(map(coupled_agreement, p, one)) / 100 for one in (q_plain, q)]
    assert by_rejection[1] > by_rejection[0] and coupled[1] > coupled[0]
    if noise == 0:
        assert by_rejection[1] == pytest.approx(1) and coupled[1] == pytest.approx(1)
