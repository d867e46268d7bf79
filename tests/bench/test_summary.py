"""Numbers from traces written by hand."""

from __future__ import annotations

import numpy as np
import pytest

from kvshot_ds.bench.methods import Step, Trace
from kvshot_ds.bench.predict import Resampling
from kvshot_ds.bench.predicted import mean_context
from kvshot_ds.bench.summary import acceptance, percentiles, speedup, split, times_per_token
from kvshot_ds.decoding.rounds import Round

HOW = Resampling(400, 0.95, 0)


def trace(*steps: tuple[int, float], extra: float = 0.0) -> Trace:
    """(tokens, seconds) of each step."""
    return Trace((7,) * sum(n for n, _ in steps), sum(s for _, s in steps) + extra, tuple(Step(n, s) for n, s in steps), None)


def drafted(*rounds: tuple[int, int, int, int]) -> Trace:
    """(tokens, drafted, nodes, accepted) of each verification, a second each, of which .25 in the drafter and .5 in the target."""
    made = (Round((7,), 0, 0, 0, 0.0, 0.5), *(Round((7,) * n, levels, nodes, right, 0.25, 0.5) for n, levels, nodes, right in rounds))
    return Trace((7,) * sum(len(r.tokens) for r in made), float(len(made)), tuple(Step(len(r.tokens), 1.0) for r in made), made)


def test_speedup_is_the_ratio_of_tokens_a_second_over_all_prompts():
    ours = [trace((1, 1.0), (3, 1.0)), trace((1, 1.0), (1, 1.0))]
    other = [trace((1, 1.0), (3, 5.0), extra=1.0), trace((1, 1.0), (1, 2.0))]
    found = speedup(ours, other, HOW)
    assert found.value == pytest.approx((6 / 4) / (6 / 10)) and found.low <= found.value <= found.high
    assert (found.low, found.high) == pytest.approx((1.5, 3.5))  # draws of one prompt alone
    later = speedup(ours, other, HOW, after_first=True)
    assert later.value == pytest.approx((4 / 2) / (4 / 7))
    assert speedup([trace((1, 1.0))], [trace((1, 2.0))], HOW, after_first=True).value is None
    same = speedup(other, other, HOW)
    assert (same.value, same.low, same.high) == pytest.approx((1, 1, 1))  # pairing: what makes a prompt slow cancels


def test_the_interval_is_paired_over_prompts():
    """Prompts that differ tenfold, a gain that is 2 of all: unpaired draws would spread widely."""
    rng = np.random.default_rng(0)
    base = [trace((1, 0.1), (9, float(s))) for s in 10 ** rng.uniform(-1, 1, 30)]
    ours = [trace((1, 0.05), (9, t.steps[1].seconds / 2)) for t in base]
    found = speedup(ours, base, HOW)
    assert (found.value, found.low, found.high) == pytest.approx((2, 2, 2))


def test_a_step_gives_each_of_its_tokens_an_equal_share():
    traces = [trace((1, 9.0), (4, 2.0), (1, 3.0)), trace((1, 9.0))]
    assert times_per_token(traces) == [(0.5, 4), (3.0, 1)]
    assert percentiles(times_per_token(traces)) == {"p50": 0.5, "p95": 3.0}
    assert percentiles([(float(i), 1) for i in range(1, 101)]) == {"p50": 50.0, "p95": 95.0}
    assert percentiles([]) == {"p50": None, "p95": None}


def test_shares_of_a_round_leave_the_prefill_out():
    one = drafted((3, 3, 3, 2), (1, 3, 5, 0))
    found = split([one.rounds], [one])
    assert found == {"count": 2, "seconds": 1.0, "draft": 0.25, "verify": 0.5, "other": 0.25, "nodes": 4.0}
    assert split([None], [trace((1, 1.0))]) is None and split([drafted().rounds], [drafted()]) is None


def test_acceptance_by_level():
    found = acceptance([drafted((4, 3, 3, 3), (2, 3, 3, 1), (1, 3, 3, 0), (3, 3, 3, 2), (9, 0, 0, 0))], HOW)
    assert found["levels"] == 3 and found["histogram"] == [2, 1, 1, 1]
    assert [(j["num"], j["den"], j["value"]) for j in found["joint"]] == [(3, 4, 0.75), (2, 4, 0.5), (1, 4, 0.25)]
    assert found["conditional"] == pytest.approx([0.75, 2 / 3, 0.5])
    shorter = acceptance([drafted((3, 2, 2, 2), (1, 2, 2, 0), (1, 1, 1, 0))], HOW)  # joint 1/3, 1/2: over other rounds
    assert shorter["conditional"] == pytest.approx([1 / 3, 1])
    told = acceptance([trace((1, 1.0), (3, 1.0), (1, 1.0))], HOW)
    assert told == {"levels": 2, "histogram": [1, 0, 1], "joint": None, "conditional": None}


def test_mean_context_is_that_of_the_rounds():
    # rounds begin after 10 + 1, + 3; and after 20 + 1
    assert mean_context([trace((1, 1.0), (3, 1.0), (2, 1.0)), trace((1, 1.0), (1, 1.0))], [10, 20]) == pytest.approx((11 + 14 + 21) / 3)
    assert mean_context([trace((1, 1.0))], [10]) == 10
