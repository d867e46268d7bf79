"""Hand-counted cases, the paper's own table, and the coverage of the intervals."""

from __future__ import annotations

import json
import math
import time
from importlib import resources

import numpy as np
import pytest

from kvshot_ds import metrics as m

PAPER = json.loads((resources.files("kvshot_ds.report") / "paper_results.json").read_text(encoding="utf-8"))["stepwise"]


def counts(right: list[list[int]], supervised: list[int]) -> m.StepCounts:
    """Counted row by row, the slow way: right[r] flags of one row per step, supervised[r] steps of it that count."""
    steps = len(right[0])
    out = np.zeros((4, steps))
    for flags, depth in zip(right, supervised, strict=True):
        for k in range(depth):
            out[:, k] += [1, flags[k], all(flags[: k + 1]), 0.5 * flags[k]]
    return m.StepCounts.unstack(out)


def test_hand_counted_rates():
    c = counts([[1, 1, 0], [1, 0, 1], [0, 1, 1], [1, 1, 1]], [3, 3, 2, 1])
    assert c.den.tolist() == [4, 3, 2]
    assert m.alpha(c) == [3 / 4, 2 / 3, 1 / 2]
    assert m.joint(c) == [3 / 4, 1 / 3, 0]
    assert m.accept_prob(c) == [3 / 8, 1 / 3, 1 / 4]
    assert m.mat(m.alpha(c)) == pytest.approx(1 + 3 / 4 + 3 / 4 * 2 / 3 + 3 / 4 * 2 / 3 / 2)
    assert m.mat_joint(m.joint(c)) == pytest.approx(1 + 3 / 4 + 1 / 3)
    assert m.retention(m.alpha(c)) == pytest.approx(2 / 3)


def test_mat_joint_differs_from_mat_when_steps_depend_on_each_other():
    c = counts([[1, 1], [0, 0]], [2, 2])
    assert m.mat(m.alpha(c)) == 1.75
    assert m.mat_joint(m.joint(c)) == 2.0


@pytest.mark.parametrize("row", PAPER, ids=lambda r: f"{r['family']}-{r['depth']}-{r['variant']}")
def test_paper_mat_and_retention_follow_from_its_alphas(row):
    # the table rounds alpha to .001 and MAT to .01, so MAT must lie in a band of that width
    low, high = (m.mat([a + half for a in row["alpha"]]) for half in (-0.0005, 0.0005))
    assert low - 0.005 <= row["mat"] <= high + 0.005
    assert abs(m.mat(row["alpha"]) - row["mat"]) < 0.0055
    assert m.retention(row["alpha"]) == pytest.approx(row["retention"], abs=0.001 + 1e-9)


def test_zero_denominators_are_none():
    c = counts([[0, 1], [0, 1]], [1, 1])
    assert m.alpha(c) == [0.0, None]
    assert m.mat(m.alpha(c)) is None
    assert m.mat_joint(m.joint(c)) is None
    assert m.retention([0.0, 0.3]) is None
    assert m.bootstrap(m.StepCounts.unstack(np.zeros((4, 3, 2))), m.mat_of, 10, 0.95, 0) == m.Interval(None, None, None)


def test_sums_and_stacking():
    a, b = counts([[1, 0]], [2]), counts([[1, 1]], [1])
    both = a + b
    assert both.den.tolist() == [2, 1] and both.top1.tolist() == [2, 0]
    pair = m.StepCounts.unstack(np.stack([a.stack(), b.stack()], axis=1))
    assert pair.den.shape == (2, 2)
    assert np.array_equal(pair.total().stack(), both.stack())
    with pytest.raises(ValueError, match="cannot be added"):
        _ = a + m.StepCounts.zeros(1)
    with pytest.raises(ValueError, match="one shape"):
        m.StepCounts(np.zeros(2), np.zeros(2), np.zeros(3), np.zeros(2))


def test_ratio_of_sums_not_mean_of_ratios():
    c = m.StepCounts.ratio([1, 0], [1, 9])
    assert m.bootstrap(c, m.alpha_at(0), 50, 0.95, 0).value == 0.1
    assert m.accept_prob(c.total()) == [None]


def test_one_conversation_has_no_interval():
    assert m.bootstrap(m.StepCounts.ratio([3], [4]), m.alpha_at(0), 50, 0.95, 0) == m.Interval(0.75, None, None)
    assert m.paired_difference(m.StepCounts.ratio([3], [4]), m.StepCounts.ratio([1], [4]), m.alpha_at(0), 50, 0.95, 0) == m.Interval(0.5, None, None)


def simulate(rng: np.random.Generator, conversations: int) -> tuple[m.StepCounts, m.StepCounts]:
    """Two K = 1 counts on the same conversations of unequal length and difficulty; true rates .4 and .35."""
    rows = rng.integers(20, 120, size=conversations)
    ease = rng.beta(8, 12, size=conversations)
    return m.StepCounts.ratio(rng.binomial(rows, ease), rows), m.StepCounts.ratio(rng.binomial(rows, ease * 0.875), rows)


def test_interval_coverage_on_simulated_conversations():
    rng = np.random.default_rng(7)
    hits = paired = 0
    for seed in range(300):
        first, second = simulate(rng, 80)
        a = m.bootstrap(first, m.alpha_at(0), 300, 0.9, seed)
        d = m.paired_difference(first, second, m.alpha_at(0), 300, 0.9, seed)
        hits += a.low <= 0.4 <= a.high
        paired += d.low <= 0.05 <= d.high
    assert 0.84 <= hits / 300 <= 0.95
    assert 0.84 <= paired / 300 <= 0.95


def test_pairing_narrows_the_interval_and_needs_the_same_conversations():
    first, second = simulate(np.random.default_rng(1), 200)
    d = m.paired_difference(first, second, m.alpha_at(0), 1000, 0.95, 0)
    widths = [i.high - i.low for i in (m.bootstrap(c, m.alpha_at(0), 1000, 0.95, 0) for c in (first, second))]
    assert d.high - d.low < 0.8 * math.hypot(*widths)
    assert d.value == pytest.approx(m.alpha(first.total())[0] - m.alpha(second.total())[0])
    with pytest.raises(ValueError, match="paired comparison"):
        m.paired_difference(first, simulate(np.random.default_rng(1), 20)[0], m.alpha_at(0), 100, 0.95, 0)


def test_bootstrap_all_equals_one_by_one_and_blocks_do_not_matter(monkeypatch):
    rng = np.random.default_rng(3)
    den = np.sort(rng.integers(5, 40, size=(30, 7)), axis=1)[:, ::-1].astype(float)
    top = rng.binomial(den.astype(int), 0.4)
    c = m.StepCounts(den, top, top * 0.5 ** np.arange(7), top * 0.9)
    stats = [m.alpha_at(2), m.accept_prob_at(1), m.joint_at(3), m.mat_of, m.mat_joint_of, m.retention_of]
    together = m.bootstrap_all(c, stats, 200, 0.95, 5)
    assert together == [m.bootstrap(c, s, 200, 0.95, 5) for s in stats]
    total = c.total()
    points = [m.alpha(total)[2], m.accept_prob(total)[1], m.joint(total)[3], m.mat(m.alpha(total)), m.mat_joint(m.joint(total)), m.retention(m.alpha(total))]
    assert [i.value for i in together] == pytest.approx(points)
    assert all(i.low < i.value < i.high for i in together)
    monkeypatch.setattr(m, "_BLOCK", 60)
    assert [i.low for i in m.bootstrap_all(c, stats, 200, 0.95, 5)] == pytest.approx([i.low for i in together])


def test_two_thousand_resamples_of_a_thousand_conversations_are_quick():
    rng = np.random.default_rng(0)
    den = rng.integers(50, 200, size=(1000, 7)).astype(float)
    c = m.StepCounts(den, den * 0.4, den * 0.3, den * 0.35)
    start = time.process_time()
    m.bootstrap_all(c, [m.alpha_at(k) for k in range(7)] + [m.mat_of], 2000, 0.95, 0)
    assert time.process_time() - start < 1.0
