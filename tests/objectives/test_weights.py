"""Step weights against plain loops."""

import math

import pytest
import torch

from kvshot_ds.config import ObjectiveConfig
from kvshot_ds.objectives.weights import dpace, exponential, geometric, step_weights

STEPS, ROWS = 5, 40


def loops(q, valid, alpha):
    """D-PACE of one row after the other, over its valid steps alone."""
    out = torch.zeros(len(q), len(q[0]), dtype=torch.float64)
    for n in range(len(q[0])):
        steps = [k for k in range(len(q)) if valid[k][n]]
        for k in steps:
            for m in (m for m in steps if m >= k):
                product = 1.0
                for j in (j for j in steps if j <= m):
                    product *= (1 - alpha) * float(q[j, n]) + alpha
                out[k, n] += product
    return out


def random_case(seed=0):
    g = torch.Generator().manual_seed(seed)
    q = torch.rand(STEPS, ROWS, generator=g, dtype=torch.float64)
    q[1, :5] = 0  # labels outside of the draft vocabulary
    valid = torch.rand(STEPS, ROWS, generator=g) < 0.7
    valid[:, 0], valid[:, 1] = False, True
    return q, valid


@pytest.mark.parametrize("alpha", [0.1, 0.5, 1.0])
def test_dpace(alpha):
    q, valid = random_case()
    torch.testing.assert_close(dpace(q, valid, alpha), loops(q, valid, alpha), rtol=1e-12, atol=1e-12)


def test_dpace_by_hand():
    """q = 1: nothing stops, w_k = K - k. alpha = 1 gives the same, whatever q. q = 0, alpha = 1/2: s = 1/2."""
    valid = torch.ones(3, 1, dtype=torch.bool)
    assert dpace(torch.ones(3, 1), valid, 0.5).flatten().tolist() == [3, 2, 1]
    assert dpace(torch.rand(3, 1), valid, 1.0).flatten().tolist() == [3, 2, 1]
    assert dpace(torch.zeros(3, 1), valid, 0.5).flatten().tolist() == [0.875, 0.375, 0.125]


def test_dpace_reads_no_invalid_step_and_passes_no_gradient():
    q, valid = random_case()
    want = dpace(q, valid, 0.5)
    got = dpace(torch.where(valid, q, torch.nan).requires_grad_(), valid, 0.5)
    assert torch.equal(got, want) and not got.requires_grad


def test_fixed_weights():
    steps = torch.tensor([0, 0, 3, 1])
    torch.testing.assert_close(geometric(steps, 0.8), torch.tensor([1, 1, 0.512, 0.8]))
    torch.testing.assert_close(exponential(steps, 4.0), torch.tensor([1, 1, math.exp(-0.75), math.exp(-0.25)]))


def test_the_configured_weights_of_the_judged_pairs():
    q, valid = random_case()
    picks = valid.flatten().nonzero().flatten()
    picks = picks[torch.randperm(len(picks), generator=torch.Generator().manual_seed(1))]
    steps_of = picks // ROWS
    asked = []

    def confidence():
        asked.append(1)
        return q.flatten()[picks].requires_grad_()

    def weights(**options):
        return step_weights(ObjectiveConfig(**options), steps_of, picks, valid, confidence)

    assert torch.equal(weights(), geometric(steps_of, 0.8))
    assert torch.equal(weights(weights="geometric", step_decay=0.5), geometric(steps_of, 0.5))
    assert torch.equal(weights(weights="exponential", gamma=7.0), exponential(steps_of, 7.0))
    assert not asked, "a pass of the head for nothing"
    got = weights(weights="dpace", dpace_alpha=0.3)
    assert asked == [1] and not got.requires_grad
    torch.testing.assert_close(got, loops(q, valid, 0.3).flatten()[picks], rtol=1e-12, atol=1e-12)
