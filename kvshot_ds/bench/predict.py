"""The cost model: from acceptance and latencies to tokens a round, seconds a round, and speed-up. Pure functions.

A round drafts, lets the target verify, and commits the accepted drafts and one token of the target's own. With joint_k the probability that drafts
0 .. k are all accepted, a round of L levels commits E[tau] = 1 + sum_{k<L} joint_k tokens (arXiv 2211.17192) and takes

    T = E[first(n)] + sum of its other draft steps + forward(1 + nodes) + overhead

where n, the positions that the drafter takes in, is what the round before committed: P(n = j + 1) = joint_{j-1} - joint_j. The target alone takes
forward(1) + its own overhead for a token, so that the speed-up is (forward(1) + alone) E[tau] / T. Prefill, and the last round that a
text's end cuts short, are left out of both. Latencies are those of one context; where they grow linearly with it, that of the mean context is the mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

import numpy as np
import numpy.typing as npt

from kvshot_ds.bench.latency_table import DrafterLatency, LatencyTable
from kvshot_ds.config import DraftingConfig
from kvshot_ds.errors import KvshotError
from kvshot_ds.metrics import Interval, StepCounts, bootstrap_all, joint

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class RoundShape:
    """What a round does, whatever is accepted.

    levels: the most drafts that can be accepted. nodes: tokens that the target verifies besides the bonus token.
    steps: rows of each draft step k >= 1; none of a block-wise drafter, whose first forward proposes all. tree: or a chain.
    """

    levels: int
    nodes: int
    steps: tuple[int, ...]
    tree: bool = False


def chain(length: int) -> RoundShape:
    """One proposal a step: the first comes from step 0."""
    return RoundShape(length, length, (1,) * (length - 1))


def block(length: int) -> RoundShape:
    """`length` of a block's proposals, as a chain."""
    return RoundShape(length, length, ())


def static_tree(branching: Sequence[int], stepwise: bool = True) -> RoundShape:
    """branching[i] candidates after each node of level i. All nodes of a level but the last are rows of the next step."""
    levels = tuple(accumulate(branching, mul))
    return RoundShape(len(levels), sum(levels), levels[:-1] if stepwise else (), True)


def dynamic_tree(depth: int, top_k: int, nodes: int, stepwise: bool = True) -> RoundShape:
    """The best `nodes` of a tree in which `top_k` nodes of each level are expanded to `top_k` candidates each (arXiv 2406.16858)."""
    depth, width = min(depth, nodes), min(top_k, nodes)
    if not stepwise:
        return RoundShape(depth, nodes, (), True)
    return RoundShape(depth, min(nodes, width + (depth - 1) * width**2), (width,) * (depth - 1), True)


def shape_of_round(drafting: DraftingConfig, block_size: int | None) -> RoundShape:
    """What a round with these options does; a block-wise drafter proposes at most block_size - 1 levels. min_confidence is not in the model."""
    stepwise, longest = block_size is None, drafting.length if block_size is None else block_size - 1
    match drafting.strategy:
        case "chain":
            return (chain if stepwise else block)(min(drafting.length, longest))
        case "static_tree":
            return static_tree(drafting.branching[:longest] if not stepwise else drafting.branching, stepwise)
        case "dynamic_tree":
            return dynamic_tree(min(drafting.length, longest), drafting.top_k, drafting.nodes, stepwise)
        case "paper_tree":
            return dynamic_tree(8 if stepwise else min(8, longest), 10, 60, stepwise)


def monotone(joints: Array) -> Array:
    """Joint acceptance [..., K] as probabilities of nested events: none above the one before. Measured ones may rise where their denominators differ."""
    return np.minimum.accumulate(np.clip(joints, 0, 1), axis=-1)


def tokens_per_round(joints: Array) -> Array:
    """E[tau] = 1 + sum_k joint_k, [..., L] -> [...]."""
    return np.asarray(1 + joints.sum(axis=-1))


def committed(joints: Array) -> Array:
    """P(a round commits j + 1 tokens) for j = 0 .. L accepted drafts, [..., L] -> [..., L + 1]; `joints` monotone."""
    ends = np.ones((*joints.shape[:-1], 1))
    return np.asarray(-np.diff(np.concatenate([ends, joints, 0 * ends], axis=-1), axis=-1))


@dataclass(frozen=True)
class RoundCost:
    """Seconds of a round of one shape at one context.

    first [L + 1]: draft step 0 after a round that committed 1 .. L + 1 tokens. steps: all other draft steps. verify: the target's forward. overhead:
    outside both. alone: a token of the target alone, overhead included. outside: the context was not measured; the nearest answered.
    """

    first: Array
    steps: float
    verify: float
    overhead: float
    alone: float
    outside: bool

    def seconds(self, joints: Array) -> Array:
        """E[T] of a round [...], from joint acceptance [..., L]."""
        return np.asarray(committed(joints) @ self.first + self.steps + self.verify + self.overhead)

    def speedup(self, joints: Array) -> Array:
        """Tokens a second over those of the target alone [...], from joint acceptance [..., L]."""
        return np.asarray(self.alone * tokens_per_round(joints) / self.seconds(joints))


def cost_of(shape: RoundShape, table: LatencyTable, drafter: DrafterLatency, context: float) -> RoundCost:
    """Raises KvshotError naming the part of which the table does not hold the size that the shape needs, or the strategy's overhead."""
    kind = "tree" if shape.tree else "chain"
    if kind not in drafter.overhead:
        raise KvshotError(
            f"{drafter.name}: the latency table holds no overhead of a {kind}; it has {', '.join(drafter.overhead)}; measure it again "
            f"(kvshot bench RECIPE --latency TABLE.json{' decode.drafting.strategy=paper_tree' if shape.tree else ''})"
        )
    try:
        (alone,), outside = table.forward.at(context, [1])
        (verify,), _ = table.forward.at(context, [1 + shape.nodes])
    except KvshotError as error:
        raise KvshotError(f"forward of {1 + shape.nodes} tokens: {error} (bench.latency.widths)") from None
    try:
        first, far = drafter.first.at(context, np.arange(1, shape.levels + 2))
    except KvshotError as error:
        raise KvshotError(f"{drafter.name}, step 0 after up to {shape.levels + 1} committed tokens: {error} (bench.latency.positions)") from None
    steps = 0.0
    if shape.steps:
        if drafter.step is None:
            raise KvshotError(f"{drafter.name}: a block-wise drafter makes no further draft steps, asked for {len(shape.steps)}")
        try:
            each, farther = drafter.step.at(context, shape.steps)
        except KvshotError as error:
            raise KvshotError(f"{drafter.name}, a draft step of {max(shape.steps)} rows: {error} (bench.latency.rows)") from None
        steps, far = float(each.sum()), far or farther
    overhead = drafter.overhead[kind].seconds
    return RoundCost(first, steps, float(verify), overhead, float(alone) + table.alone.seconds, outside or far)


@dataclass(frozen=True)
class Acceptance:
    """Joint acceptance by level: counts [C, K], a line for each conversation or prompt, or one line where only totals are known. source: where from."""

    counts: StepCounts
    source: str

    @classmethod
    def of_rates(cls, joints: Sequence[float], source: str) -> Acceptance:
        """From rates alone: no interval."""
        rates = np.asarray(joints, dtype=np.float64)[None]
        return cls(StepCounts(np.ones_like(rates), rates, rates, np.full_like(rates, np.nan)), source)

    @property
    def levels(self) -> int:
        """Levels of which acceptance is known: those with a denominator."""
        return next((k for k, rate in enumerate(self.joints) if rate is None), len(self.joints))

    @property
    def joints(self) -> list[float | None]:
        return joint(self.counts.total())


@dataclass(frozen=True)
class Resampling:
    """Of the interval over conversations: draws, confidence, seed."""

    resamples: int
    confidence: float
    seed: int


@dataclass(frozen=True)
class Prediction:
    """Of one shape of round.

    tokens: E[tau] with its interval over conversations; speedup: over the target alone, likewise. Latencies are taken as they are: the interval is of
    acceptance alone. Without conversations low and high are None. seconds: of a round, of which draft, verify and overhead are the parts.
    alone: seconds of a token of the target alone. outside: the context lies outside the measured ones.
    """

    shape: RoundShape
    context: float
    tokens: Interval
    speedup: Interval
    seconds: float
    draft: float
    verify: float
    overhead: float
    alone: float
    outside: bool


def predict(shape: RoundShape, acceptance: Acceptance, table: LatencyTable, drafter: DrafterLatency, context: float, how: Resampling) -> Prediction:
    """Raises KvshotError if acceptance of a level is not known, or a latency lies outside the table."""
    if shape.levels > acceptance.levels:
        raise KvshotError(
            f"{drafter.name}: {acceptance.source} holds acceptance of {acceptance.levels} draft steps, a round has {shape.levels}: "
            "use a smaller decode.drafting.length, or evaluate more steps (eval.steps)"
        )
    cost = cost_of(shape, table, drafter, context)

    def rates(counts: StepCounts) -> Array:
        den = counts.den[..., : shape.levels]
        undefined = np.full(den.shape, np.nan)  # a draw of conversations that are all too short
        return monotone(np.divide(counts.joint[..., : shape.levels], den, out=undefined, where=den > 0))

    statistics = (lambda c: tokens_per_round(rates(c)), lambda c: cost.speedup(rates(c)))
    tokens, speedup = bootstrap_all(acceptance.counts, statistics, how.resamples, how.confidence, how.seed)
    seconds = float(cost.seconds(rates(acceptance.counts.total())))
    draft = seconds - cost.verify - cost.overhead
    return Prediction(shape, context, tokens, speedup, seconds, draft, cost.verify, cost.overhead, cost.alone, cost.outside)


def lengths(drafter: DrafterLatency, acceptance: Acceptance, table: LatencyTable, longest: int) -> list[RoundShape]:
    """Chains of 1, 2, … proposals, as far as acceptance and table reach, at most `longest`."""
    most = min(longest, acceptance.levels, table.forward.sizes[-1] - 1, drafter.first.sizes[-1] - 1)
    if drafter.block_size is None:
        return [chain(length) for length in range(1, most + 1)]
    return [block(length) for length in range(1, min(most, drafter.block_size - 1) + 1)]


def best(predictions: Sequence[Prediction]) -> Prediction:
    """The fastest; of equals the one that drafts least. It is chosen by the same numbers that it is told by: a little optimistic. Raises ValueError on none."""
    if not predictions:
        raise ValueError("expected at least one prediction")
    return max(predictions, key=lambda p: (p.speedup.value if p.speedup.value is not None else -1.0, -p.shape.levels))
