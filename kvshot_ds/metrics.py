"""Acceptance metrics: one definition each, numerator and denominator kept apart until the last reduction.

A row is an anchor t; it is supervised at step k when tokens t+1 .. t+2+k lie in one assistant turn, so `den` never
grows with k. Rates are ratios of sums: sum over conversations (ranks, micro-steps) first, divide last.
Step-wise acceptance, MAT and retention follow KVShot (arXiv 2604.26412). A rate whose denominator is 0 is None.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class StepCounts:
    """Sums per draft step, fp64; the last axis of each array is the step, [..., K].

    den: supervised rows. top1: rows whose draft arg-max is the target's full-vocabulary arg-max. joint: rows right at
    all steps <= k, among the rows supervised at k. prob: sum over rows of sum_v min(p_v, q_v). A leading axis [C, K]
    holds one line per conversation. Raises ValueError when the shapes differ.
    """

    den: Array
    top1: Array
    joint: Array
    prob: Array

    def __post_init__(self) -> None:
        for name in ("den", "top1", "joint", "prob"):
            object.__setattr__(self, name, np.asarray(getattr(self, name), dtype=np.float64))
        shapes = {a.shape for a in self.stacked_parts()}
        if len(shapes) != 1 or self.den.ndim == 0:
            raise ValueError(f"den, top1, joint, prob must have one shape [..., K]; found {[a.shape for a in self.stacked_parts()]}")

    @classmethod
    def zeros(cls, steps: int) -> StepCounts:
        """Nothing counted yet, [K]."""
        return cls.unstack(np.zeros((4, steps)))

    @classmethod
    def ratio(cls, num: npt.ArrayLike, den: npt.ArrayLike) -> StepCounts:
        """A plain ratio of sums as step 0 of a K = 1 count: `num`, `den` [C] -> arrays [C, 1]; alpha_0 = sum num / sum den.

        For anything that has no steps: a bigram table's hits, tokens per target forward. `prob` is undefined (NaN).
        """
        top, rows = np.asarray(num, dtype=np.float64)[..., None], np.asarray(den, dtype=np.float64)[..., None]
        return cls(rows, top, top, np.full_like(rows, np.nan))

    def stacked_parts(self) -> tuple[Array, Array, Array, Array]:
        return self.den, self.top1, self.joint, self.prob

    def stack(self) -> Array:
        """One array [4, ..., K] in the order den, top1, joint, prob: what is summed over ranks."""
        return np.stack(self.stacked_parts())

    @classmethod
    def unstack(cls, parts: npt.ArrayLike) -> StepCounts:
        """Inverse of `stack`."""
        den, top1, joint, prob = np.asarray(parts, dtype=np.float64)
        return cls(den, top1, joint, prob)

    def __add__(self, other: StepCounts) -> StepCounts:
        if self.den.shape != other.den.shape:
            raise ValueError(f"counts of shapes {self.den.shape} and {other.den.shape} cannot be added")
        return StepCounts.unstack(self.stack() + other.stack())

    def total(self) -> StepCounts:
        """Summed over all leading axes, [K]."""
        return StepCounts.unstack(self.stack().reshape(4, -1, self.den.shape[-1]).sum(axis=1))


@dataclass(frozen=True)
class Interval:
    """A value and the ends of its confidence interval; None where it is undefined (zero denominator)."""

    value: float | None
    low: float | None
    high: float | None

    def to_json(self) -> dict[str, float | None]:
        return asdict(self)


# Maps counts [..., K] to values [...], NaN where undefined.
Statistic = Callable[[StepCounts], Array]


def _ratio(num: Array, den: Array) -> Array:
    return np.divide(num, den, out=np.full(np.broadcast(num, den).shape, np.nan), where=den != 0)


def _plain(values: Array) -> list[float | None]:
    return [None if np.isnan(v) else float(v) for v in values]


def _one(value: Array) -> float | None:
    return None if np.isnan(value) else float(value)


def alpha(counts: StepCounts) -> list[float | None]:
    """Step-wise acceptance alpha_k = top1_k / den_k, K values (arXiv 2604.26412). `counts` are totals [K]."""
    return _plain(_ratio(counts.top1, counts.den))


def accept_prob(counts: StepCounts) -> list[float | None]:
    """prob_k / den_k: mean of sum_v min(p_v, q_v), the acceptance probability under sampling (arXiv 2211.17192)."""
    return _plain(_ratio(counts.prob, counts.den))


def joint(counts: StepCounts) -> list[float | None]:
    """joint_k / den_k: share of the rows supervised at step k that are right at all steps <= k."""
    return _plain(_ratio(counts.joint, counts.den))


def mat(alphas: Sequence[float | None]) -> float | None:
    """Mean accepted tokens of a round, 1 + sum_k prod_{j<=k} alpha_j: treats steps as independent (arXiv 2604.26412)."""
    return _one(_mat(np.array(alphas, dtype=np.float64)))


def mat_joint(joints: Sequence[float | None]) -> float | None:
    """1 + sum_k joint_k: mean accepted tokens without the independence assumption. Never mix it with `mat`."""
    return _one(_mat_joint(np.array(joints, dtype=np.float64)))


def retention(alphas: Sequence[float | None]) -> float | None:
    """alpha_{K-1} / alpha_0: how much of the first step's acceptance is left at the last (arXiv 2604.26412)."""
    return _one(_retention(np.array(alphas, dtype=np.float64)))


def points(counts: StepCounts, of: str) -> dict[str, float]:
    """All of these rates by the tags that they are logged under, which begin with `of`; what is undefined is left out. `counts` are totals [K]."""
    top1, joints = alpha(counts), joint(counts)
    found: dict[str, float | None] = {}
    for name, rates in (("accept_top1", top1), ("accept_prob", accept_prob(counts)), ("accept_joint", joints)):
        found |= {f"{of}/{name}/{k}": rate for k, rate in enumerate(rates)}
    found |= {f"{of}/mat": mat(top1), f"{of}/mat_joint": mat_joint(joints), f"{of}/retention": retention(top1)}
    return {tag: value for tag, value in found.items() if value is not None}


def _mat(rates: Array) -> Array:
    return np.asarray(1 + np.cumprod(rates, axis=-1).sum(axis=-1))


def _mat_joint(rates: Array) -> Array:
    return np.asarray(1 + rates.sum(axis=-1))


def _retention(rates: Array) -> Array:
    return _ratio(rates[..., -1], rates[..., 0])


def alpha_at(k: int) -> Statistic:
    """Statistic: alpha_k."""
    return lambda c: _ratio(c.top1[..., k], c.den[..., k])


def accept_prob_at(k: int) -> Statistic:
    """Statistic: accept_prob_k."""
    return lambda c: _ratio(c.prob[..., k], c.den[..., k])


def joint_at(k: int) -> Statistic:
    """Statistic: joint_k."""
    return lambda c: _ratio(c.joint[..., k], c.den[..., k])


def mat_of(counts: StepCounts) -> Array:
    """Statistic: `mat` of the alphas."""
    return _mat(_ratio(counts.top1, counts.den))


def mat_joint_of(counts: StepCounts) -> Array:
    """Statistic: `mat_joint` of the joint rates."""
    return _mat_joint(_ratio(counts.joint, counts.den))


def retention_of(counts: StepCounts) -> Array:
    """Statistic: `retention` of the alphas."""
    return _retention(_ratio(counts.top1, counts.den))


# Weights held at once: 4M fp64 numbers, 32 MB, whatever the number of conversations.
_BLOCK = 4_000_000


def _resample(per_conversation: Sequence[StepCounts], resamples: int, seed: int) -> list[StepCounts]:
    """Totals [resamples, K] of each count [C, K] over conversations drawn with replacement; all share the same draws."""
    count = per_conversation[0].den.shape[0]
    if any(c.den.ndim != 2 or c.den.shape[0] != count for c in per_conversation):
        raise ValueError(f"expected counts [C, K] of the same C conversations; found {[c.den.shape for c in per_conversation]}")
    rng = np.random.default_rng(seed)
    flat = np.concatenate([part for c in per_conversation for part in c.stacked_parts()], axis=1)
    blocks = []
    for start in range(0, resamples, step := max(1, _BLOCK // max(count, 1))):
        size = min(step, resamples - start)
        drawn = rng.integers(count, size=(size, count)) + count * np.arange(size)[:, None]
        blocks.append(np.bincount(drawn.ravel(), minlength=size * count).reshape(size, count).astype(np.float64) @ flat)
    totals = np.concatenate(blocks)
    widths = np.cumsum([c.den.shape[1] for c in per_conversation for _ in range(4)])
    parts = np.split(totals, widths[:-1], axis=1)
    return [StepCounts(*parts[4 * i : 4 * i + 4]) for i in range(len(per_conversation))]


def _interval(value: Array, draws: Array | None, confidence: float) -> Interval:
    known = draws[~np.isnan(draws)] if draws is not None else np.empty(0)
    if np.isnan(value) or not len(known):
        return Interval(_one(value), None, None)
    tail = (1 - confidence) / 2
    low, high = np.quantile(known, [tail, 1 - tail])
    return Interval(float(value), float(low), float(high))


def bootstrap_all(per_conversation: StepCounts, statistics: Iterable[Statistic], resamples: int, confidence: float, seed: int) -> list[Interval]:
    """Percentile-bootstrap intervals of several statistics over the same draws of conversations; counts [C, K].

    Rows of one conversation depend on each other, so whole conversations are drawn. Statistics are ratios of sums.
    Draws in which a statistic is undefined are left out; with fewer than 2 conversations low and high are None.
    """
    total = per_conversation.total()
    draws = _resample([per_conversation], resamples, seed)[0] if len(per_conversation.den) > 1 else None
    return [_interval(s(total), s(draws) if draws is not None else None, confidence) for s in statistics]


def bootstrap(per_conversation: StepCounts, statistic: Statistic, resamples: int, confidence: float, seed: int) -> Interval:
    """`bootstrap_all` for one statistic."""
    return bootstrap_all(per_conversation, [statistic], resamples, confidence, seed)[0]


def paired_difference(first: StepCounts, second: StepCounts, statistic: Statistic, resamples: int, confidence: float, seed: int) -> Interval:
    """Interval of statistic(first) - statistic(second), both [C, K] over the same conversations in the same order.

    Each draw of conversations is applied to both, so what makes a conversation easy for both cancels.
    Raises ValueError when the numbers of conversations differ.
    """
    value = statistic(first.total()) - statistic(second.total())
    if len(first.den) != len(second.den):
        raise ValueError(f"paired comparison of {len(first.den)} and {len(second.den)} conversations")
    if len(first.den) < 2:
        return _interval(value, None, confidence)
    a, b = _resample([first, second], resamples, seed)
    return _interval(value, statistic(a) - statistic(b), confidence)


@dataclass(frozen=True)
class Spread(Interval):
    """The mean over seeds and the ends of its confidence interval. seeds: their number; with one, the interval knows nothing of what another seed would
    give. sd: standard deviation between seeds, None with fewer than two."""

    seeds: int
    sd: float | None


def over_seeds_all(counts: Sequence[StepCounts], statistics: Iterable[Statistic], resamples: int, confidence: float, seed: int) -> list[Spread]:
    """`over_seeds` of several statistics over the same draws of conversations."""
    return _spreads(counts, statistics, resamples, confidence, seed, lambda statistic, each: np.stack([statistic(c) for c in each]))


def over_seeds(counts: Sequence[StepCounts], statistic: Statistic, resamples: int, confidence: float, seed: int) -> Spread:
    """The mean over seeds of a statistic, for other seeds and other conversations; counts [C, K] of each seed, over the same conversations in one order.

    variance of the mean = max(s^2, v) / n + c. s^2: variance between the n seeds; it holds what each seed makes of these conversations, but not what is
    easy for all of them. v: that same part alone, by a bootstrap over conversations, drawn alike for all seeds: the variance of a seed's draws about the mean
    of the seeds' draws; s^2 may come out below it by chance. c: what the seeds share, which is the variance of that mean less v / n. So no noise counts twice.
    The half width is Student's t with the degrees of freedom of Welch and Satterthwaite: n - 1 of s^2, C - 1 of v and c. One seed: c alone, and `seeds`
    says so. Where seeds differ more than conversations, 2 seeds of a nominal 95% cover about 88%, 3 about 92%: the degrees are themselves an estimate.

    A statistic that is undefined for one seed is undefined for the mean; no seed is left out. low and high are None with fewer than two conversations.
    Raises ValueError when the counts are of different shapes.
    """
    return over_seeds_all(counts, [statistic], resamples, confidence, seed)[0]


def paired_over_seeds_all(
    first: Sequence[StepCounts], second: Sequence[StepCounts], statistics: Iterable[Statistic], resamples: int, confidence: float, seed: int
) -> list[Spread]:
    """`paired_over_seeds` of several statistics over the same draws of conversations."""
    if len(first) != len(second):
        raise ValueError(f"paired comparison of {len(first)} and {len(second)} seeds: give the seeds that both have, in the same order")

    def differences(statistic: Statistic, each: Sequence[StepCounts]) -> Array:
        return np.stack([statistic(a) - statistic(b) for a, b in zip(each[: len(first)], each[len(first) :], strict=True)])

    return _spreads([*first, *second], statistics, resamples, confidence, seed, differences)


def paired_over_seeds(first: Sequence[StepCounts], second: Sequence[StepCounts], statistic: Statistic, resamples: int, confidence: float, seed: int) -> Spread:
    """The mean over seeds of statistic(first) - statistic(second), seed by seed: the rule of `over_seeds` for these differences.

    first, second: counts [C, K] of the same seeds in the same order, over the same conversations. Raises ValueError when they do not match.
    """
    return paired_over_seeds_all(first, second, [statistic], resamples, confidence, seed)[0]


def _spreads(
    counts: Sequence[StepCounts], statistics: Iterable[Statistic], resamples: int, confidence: float, seed: int,
    values: Callable[[Statistic, Sequence[StepCounts]], Array],
) -> list[Spread]:  # fmt: skip
    """values: a statistic and totals [..., K] of each count -> [n, ...], one value for each seed."""
    if len({c.den.shape for c in counts}) > 1 or any(c.den.ndim != 2 for c in counts):
        raise ValueError(f"expected counts [C, K] of the same conversations and steps; found {[c.den.shape for c in counts]}")
    if not counts:
        return [Spread(None, None, None, 0, None) for _ in statistics]
    conversations = len(counts[0].den)
    totals = [c.total() for c in counts]
    draws = _resample(counts, resamples, seed) if conversations > 1 else None
    return [_spread(values(s, totals), values(s, draws) if draws else None, conversations, confidence) for s in statistics]


def _spread(values: Array, draws: Array | None, conversations: int, confidence: float) -> Spread:
    """values [n] of the seeds; draws [n, resamples] of them over conversations, None for too few of these."""
    from scipy import special

    n = len(values)
    value, sd = _one(values.mean()), _one(values.std(ddof=1)) if n > 1 else None
    known = draws[:, ~np.isnan(draws).any(axis=0)] if draws is not None else np.empty((n, 0))
    if value is None or known.shape[1] < 2:
        return Spread(value, None, None, n, sd)
    unbias = conversations / (conversations - 1)  # resampling C of C conversations varies by the plug-in variance, whose divisor is C
    between, noise = (sd or 0.0) ** 2 / n, 0.0
    if n > 1:
        noise = float(unbias * (known - known.mean(axis=0)).var(axis=1, ddof=1).sum() / (n - 1) / n)
    common = max(0.0, float(unbias * known.mean(axis=0).var(ddof=1)) - noise)
    own, own_degrees = (between, n - 1) if between > noise else (noise, conversations - 1)
    variance = own + common
    if not variance:
        return Spread(value, value, value, n, sd)
    degrees = variance**2 / (own**2 / max(own_degrees, 1) + common**2 / (conversations - 1))
    half = float(special.stdtrit(degrees, (1 + confidence) / 2)) * variance**0.5
    return Spread(value, value - half, value + half, n, sd)


def kendall(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Kendall's tau-b between two lists of values of the same things: 1 same order, -1 reversed; None where one of them has no order."""
    from scipy import stats

    return _one(np.asarray(stats.kendalltau(first, second).statistic)) if len(first) > 1 else None


def spearman(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Spearman's rank correlation of two lists of values of the same things; None where one of them has no order."""
    from scipy import stats

    if len(set(first)) < 2 or len(set(second)) < 2:
        return None
    return _one(np.asarray(stats.spearmanr(first, second).statistic))
