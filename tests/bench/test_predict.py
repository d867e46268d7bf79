"""The cost model against a simulation of events, and against numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from kvshot_ds.bench import predict as model
from kvshot_ds.bench.latency_table import DrafterLatency, LatencyTable, Point, Surface, Timing
from kvshot_ds.bench.predict import Acceptance, Resampling, RoundShape, block, chain, dynamic_tree, shape_of_round, static_tree
from kvshot_ds.config import DraftingConfig
from kvshot_ds.decoding import tree
from kvshot_ds.drafters.state import DraftState
from kvshot_ds.errors import KvshotError
from kvshot_ds.metrics import StepCounts
from kvshot_ds.objectives.alignment import decoding_start
from tests.decoding.models import bound_drafter, hf_target

HOW = Resampling(200, 0.95, 0)


def surface(seconds, contexts=(100, 500), sizes=(1, 2, 4, 8, 16, 32, 64)) -> Surface:
    return Surface(tuple(Point(s, s, s, c, n) for c in contexts for n in sizes for s in [seconds(c, n)]))


def exact(seconds: float) -> Timing:
    return Timing(seconds, seconds, seconds)


def stepwise(first=lambda c, n: 2e-3 + 1e-4 * n, step=lambda c, n: 1e-3 + 5e-5 * n) -> DrafterLatency:
    return DrafterLatency("toy", "hidden_only", "s", 1, None, surface(first), surface(step), {"chain": exact(4e-4), "tree": exact(9e-4)})


def table(forward=lambda c, n: 2e-2 + 1e-5 * c + 1e-3 * n, drafters: tuple[DrafterLatency, ...] = ()) -> LatencyTable:
    return LatencyTable("d", "cpu", 1, "float32", "t", {}, 3, surface(forward), exact(3e-4), drafters)


def events(shape: RoundShape, joints: list[float], cost, rounds: int, seed: int) -> tuple[float, float]:
    """Round after round on a clock: each draft is accepted or not by a coin, what was committed decides what the next round takes in."""
    rng = np.random.default_rng(seed)
    conditional = [j / before if before else 0.0 for before, j in zip([1.0, *joints], joints, strict=False)]
    clock, tokens, taken = 0.0, 0, 1
    for _ in range(rounds):
        accepted = 0
        while accepted < shape.levels and rng.random() < conditional[accepted]:
            accepted += 1
        clock += cost.first(taken) + sum(cost.step(rows) for rows in shape.steps) + cost.forward(1 + shape.nodes) + cost.overhead
        taken = accepted + 1
        tokens += taken
    return tokens / rounds, clock / rounds


class Clockwork:
    """The same latencies as `table()` and `stepwise()`, written down a second time, at context 300."""

    overhead = 4e-4

    @staticmethod
    def first(n):  # not linear in n, so that the mean of n is not enough
        return 2e-3 + 1e-3 * (n > 2)

    @staticmethod
    def step(rows):
        return 1e-3 + 5e-5 * rows

    @staticmethod
    def forward(n):
        return 2e-2 + 1e-5 * 300 + 1e-3 * n


@pytest.mark.parametrize("shape", [chain(1), chain(4), chain(7), block(5), static_tree((3, 2, 1)), dynamic_tree(4, 3, 12)])
def test_it_agrees_with_a_simulation_of_events(shape):
    joints = [0.71, 0.44, 0.3, 0.29, 0.11, 0.02, 0.0][: shape.levels]
    drafter = stepwise(first=lambda c, n: Clockwork.first(n))
    drafter = replace(drafter, first=surface(lambda c, n: Clockwork.first(n), sizes=range(1, 9)), overhead={"chain": exact(4e-4), "tree": exact(4e-4)})
    found = model.predict(shape, Acceptance.of_rates(joints, "x"), table(), drafter, 300, HOW)
    tokens, seconds = events(shape, joints, Clockwork, 40_000, 1)
    assert found.tokens.value == pytest.approx(tokens, rel=0.01)
    assert found.seconds == pytest.approx(seconds, rel=0.001)
    alone = Clockwork.forward(1) + 3e-4
    assert found.speedup.value == pytest.approx(alone * tokens / seconds, rel=0.01)
    assert found.seconds == pytest.approx(found.draft + found.verify + found.overhead)


def test_the_simulation_would_notice_a_wrong_model():
    """Taking in E[tau] positions instead of their distribution is off by more than the tolerance above."""
    joints = [0.71, 0.44, 0.3, 0.29]
    _, seconds = events(chain(4), joints, Clockwork, 40_000, 1)
    mean = 1 + sum(joints)
    wrong = Clockwork.first(mean) + 3 * Clockwork.step(1) + Clockwork.forward(5) + Clockwork.overhead
    assert wrong != pytest.approx(seconds, rel=0.001)


def test_committed_is_a_distribution_with_that_mean():
    joints = np.array([[0.7, 0.5, 0.5], [0.0, 0.0, 0.0], [1.0, 1.0, 1.0]])
    shares = model.committed(joints)
    np.testing.assert_allclose(shares, [[0.3, 0.2, 0, 0.5], [1, 0, 0, 0], [0, 0, 0, 1]], atol=1e-12)
    np.testing.assert_allclose(shares @ np.arange(1, 5), model.tokens_per_round(joints))


def test_rates_that_rise_by_their_denominators_count_as_level():
    np.testing.assert_allclose(model.monotone(np.array([0.5, 0.52, 0.3])), [0.5, 0.5, 0.3])


def test_the_best_length_weighs_tokens_against_time():
    """Steps as dear as a forward: one draft at most. Steps for nothing: all of them. A drafter that is never right: slower than none."""
    acceptance = Acceptance.of_rates([0.8, 0.6, 0.4, 0.2], "x")

    def best(step: float, width: float, rates=acceptance) -> model.Prediction:
        drafter = stepwise(first=lambda c, n: step, step=lambda c, n: step)
        known = table(lambda c, n: 1e-2 + width * n)
        return model.best([model.predict(s, rates, known, drafter, 100, HOW) for s in model.lengths(drafter, rates, known, 9)])

    assert best(1e-9, 1e-9).shape.levels == 4
    assert best(8e-3, 1e-9).shape.levels == 1
    middle = best(3e-3, 1e-9)
    assert middle.shape.levels == 2 and middle.speedup.value > 1
    assert best(1e-3, 0, Acceptance.of_rates([0.0, 0.0], "x")).speedup.value < 1


def test_equal_speedups_take_the_shorter_draft():
    drafter = stepwise(first=lambda c, n: 1e-3, step=lambda c, n: 1e-12)
    one = model.predict(chain(1), Acceptance.of_rates([0.5], "x"), table(), drafter, 100, HOW)
    longer = replace(one, shape=chain(2))
    assert model.best([longer, one]) is one is model.best([one, longer])
    with pytest.raises(ValueError, match="at least one"):
        model.best([])


def test_the_interval_comes_from_conversations():
    """Half of the conversations accept everything, half nothing; the more of them, the narrower."""

    def predicted(conversations: int) -> model.Prediction:
        joint = np.array([[10.0, 10.0], [0.0, 0.0]] * (conversations // 2))
        counts = StepCounts(np.full_like(joint, 10), joint, joint, joint)
        return model.predict(chain(2), Acceptance(counts, "x"), table(), stepwise(), 100, HOW)

    few, many = predicted(6), predicted(200)
    for found in (few, many):
        assert found.tokens.value == pytest.approx(2.0)
        assert found.speedup.low < found.speedup.value < found.speedup.high
    assert few.speedup.high - few.speedup.low > 3 * (many.speedup.high - many.speedup.low)
    one = model.predict(chain(1), Acceptance.of_rates([0.5], "x"), table(), stepwise(), 100, HOW)
    assert (one.speedup.low, one.speedup.high) == (None, None)


@pytest.mark.parametrize(
    ("drafting", "size", "shape"),
    [
        (DraftingConfig(length=5), None, RoundShape(5, 5, (1, 1, 1, 1))),
        (DraftingConfig(length=5), 4, RoundShape(3, 3, ())),
        (DraftingConfig(strategy="static_tree", branching=(4, 2, 1)), None, RoundShape(3, 20, (4, 8), True)),
        (DraftingConfig(strategy="static_tree", branching=(4, 2, 1)), 3, RoundShape(2, 12, (), True)),
        (DraftingConfig(strategy="dynamic_tree", length=3, top_k=3, nodes=50), None, RoundShape(3, 21, (3, 3), True)),
        (DraftingConfig(strategy="dynamic_tree", length=9, top_k=3, nodes=20), 5, RoundShape(4, 20, (), True)),
        (DraftingConfig(strategy="paper_tree"), None, RoundShape(8, 60, (10,) * 7, True)),
    ],
)
def test_what_a_round_does(drafting, size, shape):
    assert shape_of_round(drafting, size) == shape


@pytest.mark.parametrize("name", ["hidden_only-1", "dflash-2"])
@pytest.mark.parametrize(
    "options",
    [{"strategy": "static_tree", "branching": (3, 2, 1)}, {"strategy": "dynamic_tree", "length": 3, "top_k": 2, "nodes": 7}, {"strategy": "paper_tree"}],
)
@torch.no_grad()
def test_the_shape_of_a_tree_is_that_of_a_real_one(name, options):
    target, drafting = hf_target("Llama"), DraftingConfig(**options)
    drafter, g = bound_drafter(name, target), target.geometry
    hidden = {i: torch.randn(4, g.hidden_size) for i in range(g.num_layers)}
    start = decoding_start(torch.tensor([1, 2, 3, 4]), [0], [4], 80, hidden, {})
    rows = []
    if hasattr(drafter, "forward_step"):
        step = drafter.forward_step
        drafter.forward_step = lambda state, tokens, k: rows.append(len(tokens)) or step(state, tokens, k)
    draft = tree.propose(drafter, DraftState.empty(drafter.depth), start, drafting, 64)
    shape = shape_of_round(drafting, getattr(drafter, "block_size", None))
    assert (draft.levels, draft.tokens.shape[1], tuple(rows)) == (shape.levels, shape.nodes, shape.steps)


def test_what_the_table_does_not_cover_is_refused():
    acceptance = Acceptance.of_rates([0.5] * 70, "eval.json")
    with pytest.raises(KvshotError, match=r"forward of 66 tokens: .* sizes 1 to 64, asked for 66 to 66.*bench\.latency\.widths"):
        model.predict(chain(65), acceptance, table(), stepwise(), 100, HOW)
    with pytest.raises(KvshotError, match=r"toy, step 0 after up to 6 committed tokens: .*bench\.latency\.positions"):
        short = replace(stepwise(), first=surface(lambda c, n: 1e-3, sizes=(1, 4)))
        model.predict(chain(5), acceptance, table(), short, 100, HOW)
    with pytest.raises(KvshotError, match=r"toy, a draft step of 65 rows: .*bench\.latency\.rows"):
        model.predict(RoundShape(2, 20, (65,), True), acceptance, table(), stepwise(), 100, HOW)
    with pytest.raises(KvshotError, match="holds no overhead of a tree; it has chain"):
        model.predict(static_tree((2, 2)), acceptance, table(), replace(stepwise(), overhead={"chain": exact(0)}), 100, HOW)
    with pytest.raises(KvshotError, match=r"eval\.json holds acceptance of 2 draft steps, a round has 3"):
        model.predict(chain(3), Acceptance.of_rates([0.5, 0.2], "eval.json"), table(), stepwise(), 100, HOW)
    with pytest.raises(KvshotError, match="makes no further draft steps"):
        model.cost_of(chain(3), table(), replace(stepwise(), step=None, block_size=4), 100)


def test_steps_without_rows_are_not_known():
    counts = StepCounts([[5, 0]], [[3, 0]], [[3, 0]], [[3, 0]])
    assert Acceptance(counts, "x").levels == 1


def test_a_context_outside_is_marked():
    acceptance = Acceptance.of_rates([0.5], "x")
    inside, outside = (model.predict(chain(1), acceptance, table(), stepwise(), c, HOW) for c in (500, 900))
    assert not inside.outside and outside.outside
    assert outside.seconds == inside.seconds
