"""Intervals over seeds: against a slow reference, and by their coverage in simulated experiments."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import special

from kvshot_ds import metrics as m

HOW = (100, 0.95, 0)


def experiment(rng: np.random.Generator, seeds: int, seed_sd: float, ease_sd: float, own_sd: float, mean: float = 0.4, size: int = 40) -> list[m.StepCounts]:
    """K = 1 counts of `seeds` drafters on the same conversations. A rate is mean + seed + conversation + what the two make of each other."""
    rows, ease = rng.integers(20, 120, size=size), rng.normal(0, ease_sd, size=size)
    rates = mean + rng.normal(0, seed_sd, size=(seeds, 1)) + ease + rng.normal(0, own_sd, size=(seeds, size))
    return [m.StepCounts.ratio(rng.binomial(rows, np.clip(rate, 0, 1)), rows) for rate in rates]


def several_steps(rng: np.random.Generator, seeds: int, size: int = 12) -> list[m.StepCounts]:
    den = np.sort(rng.integers(5, 40, size=(size, 3)), axis=1)[:, ::-1].astype(float)
    out = []
    for _ in range(seeds):
        top = rng.binomial(den.astype(int), rng.uniform(0.3, 0.5))
        out.append(m.StepCounts(den, top, np.minimum.accumulate(top // 2, axis=1), top * 0.9))
    return out


def slowly(values: list[float], draws: list[list[float]], conversations: int, confidence: float) -> tuple[float, float, float]:
    """The rule of `over_seeds`, number by number: value, half width, sd. draws[r][i]: of seed i over the r-th draw of conversations."""
    n, unbias = len(values), conversations / (conversations - 1)
    mean = sum(values) / n
    s2 = sum((v - mean) ** 2 for v in values) / (n - 1) if n > 1 else 0.0

    def variance(numbers: list[float]) -> float:
        middle = sum(numbers) / len(numbers)
        return unbias * sum((x - middle) ** 2 for x in numbers) / (len(numbers) - 1)

    means = [sum(draw) / n for draw in draws]
    own = sum(variance([draw[i] - mid for draw, mid in zip(draws, means, strict=True)]) for i in range(n)) / (n - 1) if n > 1 else 0.0
    shared = max(0.0, variance(means) - own / n)
    seeds, degrees = (s2, n - 1) if s2 > own else (own, conversations - 1)
    total = seeds / n + shared
    freedom = total**2 / ((seeds / n) ** 2 / max(1, degrees) + shared**2 / (conversations - 1))
    return mean, special.stdtrit(freedom, (1 + confidence) / 2) * math.sqrt(total), math.sqrt(s2)


@pytest.mark.parametrize("seeds", [1, 2, 3, 5])
def test_the_rule_is_what_a_slow_reference_says(seeds: int):
    rng = np.random.default_rng(seeds)
    first, second = several_steps(rng, seeds), several_steps(rng, seeds)
    second = [m.StepCounts(a.den, b.top1.clip(max=a.den), b.joint, b.prob) for a, b in zip(first, second, strict=True)]
    drawn = np.random.default_rng(3).integers(12, size=(60, 12))  # as metrics draws them

    def totals(c: m.StepCounts) -> list[m.StepCounts]:
        return [m.StepCounts.unstack(c.stack()[:, rows].sum(axis=1)) for rows in drawn]

    for statistic in (m.alpha_at(1), m.mat_of, m.mat_joint_of, m.retention_of):
        draws = [[float(statistic(t)) for t in per_seed] for per_seed in zip(*map(totals, first), strict=True)]
        mean, half, sd = slowly([float(statistic(c.total())) for c in first], draws, 12, 0.9)
        found = m.over_seeds(first, statistic, 60, 0.9, 3)
        assert (found.value, found.low, found.high) == pytest.approx((mean, mean - half, mean + half), rel=1e-9)
        assert (found.seeds, found.sd) == (seeds, None if seeds == 1 else pytest.approx(sd))

        other = [[float(statistic(t)) for t in per_seed] for per_seed in zip(*map(totals, second), strict=True)]
        apart = [[a - b for a, b in zip(x, y, strict=True)] for x, y in zip(draws, other, strict=True)]
        values = [float(statistic(a.total()) - statistic(b.total())) for a, b in zip(first, second, strict=True)]
        mean, half, sd = slowly(values, apart, 12, 0.9)
        paired = m.paired_over_seeds(first, second, statistic, 60, 0.9, 3)
        assert (paired.value, paired.low, paired.high) == pytest.approx((mean, mean - half, mean + half), rel=1e-9)
        assert paired.seeds == seeds


def covered(seeds: int, noise: tuple[float, float, float], experiments: int = 500) -> dict[str, float]:
    """Share of the experiments whose nominal 95% interval holds the true rate, by rule: the one of the product, and two that leave out a source of noise."""
    rng = np.random.default_rng(seeds)
    hits = dict.fromkeys(("rule", "seeds only", "conversations only"), 0)
    for number in range(experiments):
        counts = experiment(rng, seeds, *noise)
        found = m.over_seeds(counts, m.alpha_at(0), 100, 0.95, number)
        hits["rule"] += found.low <= 0.4 <= found.high
        hits["seeds only"] += abs(found.value - 0.4) <= special.stdtrit(seeds - 1, 0.975) * found.sd / seeds**0.5
        pooled = m.bootstrap(m.StepCounts.unstack(sum(c.stack() for c in counts)), m.alpha_at(0), 100, 0.95, number)
        hits["conversations only"] += pooled.low <= 0.4 <= pooled.high
    return {rule: count / experiments for rule, count in hits.items()}


@pytest.mark.parametrize("seeds", [3, 5])
def test_coverage_where_seeds_differ_most(seeds: int):
    found = covered(seeds, (0.03, 0.05, 0.0))
    assert 0.92 <= found["rule"] <= 0.99
    assert found["conversations only"] < 0.85, "the check can fail"


@pytest.mark.parametrize("seeds", [3, 5])
def test_coverage_where_conversations_differ_most(seeds: int):
    found = covered(seeds, (0.01, 0.1, 0.05))
    assert 0.92 <= found["rule"] <= 0.99
    assert found["seeds only"] < 0.87, "the check can fail"


@pytest.mark.parametrize("seeds", [3, 5])
def test_what_seeds_make_of_single_conversations_is_not_counted_twice(seeds: int):
    rng = np.random.default_rng(1)
    ratios, hits = [], 0
    for number in range(600):
        counts = experiment(rng, seeds, 0.0, 0.0, 0.15)
        found = m.over_seeds(counts, m.alpha_at(0), 100, 0.95, number)
        hits += found.low <= 0.4 <= found.high
        draws = np.stack([m.alpha_at(0)(d) for d in m._resample(counts, 100, number)])
        ratios.append((found.sd**2 / seeds, draws.mean(axis=0).var(ddof=1)))
    between, over_conversations = np.mean(ratios, axis=0)
    assert between == pytest.approx(over_conversations, rel=0.2), "either of the two is the whole variance here, so their sum would be twice that"
    assert 0.92 <= hits / 600 <= 0.99


@pytest.mark.parametrize("seeds", [3, 5])
def test_paired_coverage(seeds: int):
    """Two drafters on conversations whose ease they share, each seed with an effect of its own on either."""
    rng, hits, widths = np.random.default_rng(2), 0, []
    for number in range(400):
        rows, ease = rng.integers(20, 120, size=40), rng.normal(0, 0.1, size=40)
        sides = [
            [m.StepCounts.ratio(rng.binomial(rows, np.clip(level + rng.normal(0, 0.015) + ease, 0, 1)), rows) for _ in range(seeds)] for level in (0.45, 0.4)
        ]
        d = m.paired_over_seeds(*sides, m.alpha_at(0), 100, 0.95, number)
        hits += d.low <= 0.05 <= d.high
        alone = [m.over_seeds(side, m.alpha_at(0), 100, 0.95, number) for side in sides]
        widths.append((d.high - d.low, math.hypot(*(i.high - i.low for i in alone))))
    assert 0.92 <= hits / 400 <= 0.99
    paired, unpaired = np.mean(widths, axis=0)
    assert paired < 0.95 * unpaired


def test_one_seed_has_the_noise_of_conversations_alone():
    counts = experiment(np.random.default_rng(0), 1, 0.0, 0.1, 0.0)
    one = m.over_seeds(counts, m.alpha_at(0), 2000, 0.95, 0)
    percentile = m.bootstrap(counts[0], m.alpha_at(0), 2000, 0.95, 0)
    assert (one.seeds, one.sd, one.value) == (1, None, percentile.value)
    assert one.high - one.low == pytest.approx(percentile.high - percentile.low, rel=0.1)


def test_seeds_that_agree_leave_the_noise_of_conversations():
    one = experiment(np.random.default_rng(0), 1, 0.0, 0.1, 0.0)
    alone, thrice = m.over_seeds(one, m.alpha_at(0), *HOW), m.over_seeds(one * 3, m.alpha_at(0), *HOW)
    assert (thrice.low, thrice.high, thrice.sd) == (pytest.approx(alone.low), pytest.approx(alone.high), pytest.approx(0))
    same = m.paired_over_seeds(one * 3, one * 3, m.alpha_at(0), *HOW)
    assert (same.value, same.low, same.high) == (0, 0, 0)


def test_the_more_seeds_the_narrower():
    rng = np.random.default_rng(0)
    widths = []
    for seeds in (2, 3, 5, 10):
        found = [m.over_seeds(experiment(rng, seeds, 0.03, 0.05, 0.0), m.alpha_at(0), 50, 0.95, i) for i in range(60)]
        widths.append(np.median([f.high - f.low for f in found]))
    assert widths == sorted(widths, reverse=True)


def test_a_seed_whose_statistic_is_undefined_is_not_left_out():
    good, none = m.StepCounts.ratio([1, 2, 3], [4, 4, 4]), m.StepCounts.ratio([0, 0, 0], [0, 0, 0])
    assert m.over_seeds([good, none, good], m.alpha_at(0), *HOW) == m.Spread(None, None, None, 3, None)
    assert m.paired_over_seeds([good, good], [good, none], m.alpha_at(0), *HOW) == m.Spread(None, None, None, 2, None)


def test_too_few_of_anything():
    one = m.StepCounts.ratio([3], [4])
    assert m.over_seeds([one, one], m.alpha_at(0), *HOW) == m.Spread(0.75, None, None, 2, 0.0)
    assert m.over_seeds([], m.alpha_at(0), *HOW) == m.Spread(None, None, None, 0, None)
    assert m.paired_over_seeds([], [], m.alpha_at(0), *HOW) == m.Spread(None, None, None, 0, None)
    rare = m.StepCounts.ratio([1, 0, 0], [1, 0, 0])  # many draws have no row at all
    assert m.over_seeds([rare], m.alpha_at(0), *HOW) == m.Spread(1.0, 1.0, 1.0, 1, None)


def test_what_cannot_be_compared_is_refused():
    rng = np.random.default_rng(0)
    three, other = several_steps(rng, 2), several_steps(rng, 2, size=13)
    fewer_steps = [m.StepCounts.unstack(c.stack()[..., :2]) for c in three]
    with pytest.raises(ValueError, match="same conversations and steps"):
        m.over_seeds([three[0], other[0]], m.mat_of, *HOW)
    with pytest.raises(ValueError, match="same conversations and steps"):
        m.over_seeds([three[0], fewer_steps[1]], m.mat_of, *HOW)
    with pytest.raises(ValueError, match="same conversations and steps"):
        m.paired_over_seeds(three, fewer_steps, m.mat_of, *HOW)
    with pytest.raises(ValueError, match="2 and 1 seeds"):
        m.paired_over_seeds(three, three[:1], m.mat_of, *HOW)
    with pytest.raises(ValueError, match="same conversations and steps"):
        m.over_seeds([three[0].total()], m.mat_of, *HOW)


def test_several_statistics_over_the_same_draws_are_what_each_is_alone():
    counts = several_steps(np.random.default_rng(4), 3)
    among = [m.alpha_at(0), m.mat_of, m.retention_of]
    assert m.over_seeds_all(counts, among, *HOW) == [m.over_seeds(counts, s, *HOW) for s in among]
    assert m.paired_over_seeds_all(counts, counts[::-1], among, *HOW) == [m.paired_over_seeds(counts, counts[::-1], s, *HOW) for s in among]


def test_rank_correlations():
    assert m.kendall([1, 2, 3, 4], [10, 20, 30, 40]) == pytest.approx(1)
    assert m.kendall([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)
    assert m.kendall([1, 2, 3, 4], [1, 2, 4, 3]) == pytest.approx(4 / 6)  # 5 pairs agree, 1 does not
    assert m.spearman([1, 2, 3, 4], [1, 2, 4, 3]) == pytest.approx(0.8)
    assert m.kendall([1, 1], [1, 2]) is None
    assert m.kendall([1], [1]) is None
    assert m.spearman([1, 1], [1, 2]) is None
    assert m.spearman([], []) is None
