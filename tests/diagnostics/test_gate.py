"""Gate statistics by layer and step, against values known from the gate's start and against the module's own outputs."""

from __future__ import annotations

import pytest
import torch

from kvshot_ds.config import HybridBlockConfig, HybridConfig
from kvshot_ds.diagnostics.gate import QUANTILES, GateSums, _histogram, measure_gate, quantiles, why_not
from kvshot_ds.features.batch import collate
from kvshot_ds.objectives.alignment import plan_rows
from tests import toys
from tests.diagnostics.made import STEPS, made


@pytest.mark.parametrize("config", [HybridConfig, HybridBlockConfig])
@pytest.mark.parametrize("kind", ["elementwise", "per_head", "scalar"])
@pytest.mark.parametrize("bias", [-4.0, -1.0, 0.5])
def test_a_bias_alone_gives_its_sigmoid(config, kind, bias):
    block = {"block_size": STEPS + 1} if config is HybridBlockConfig else {}
    objective, batch, plan = made(config(depth=2, gate={"kind": kind}, **block))
    for layer in objective.drafter.layers:
        layer.mix.gate_proj.weight.data.zero_()
        layer.mix.gate_proj.bias.data.fill_(bias)
    value = float(torch.sigmoid(torch.tensor(bias)))
    found = measure_gate(objective, batch, plan)
    assert [s.layer for s in found] == [0, 1]
    for sums in found:
        assert torch.equal(sums.rows.sum(0), plan.valid.sum(1).double())
        torch.testing.assert_close(sums.mean, sums.rows * value, rtol=1e-6, atol=0)
        assert torch.equal(sums.below, sums.rows * (value < 0.05))
        torch.testing.assert_close(quantiles(sums.histogram, sums.low, sums.high), torch.full((STEPS, 5), value).double(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ["hybrid-1", "hybrid-2", "hybrid-per_head", "hybrid-scalar", "hybrid_block-2"])
def test_against_the_gates_own_outputs(name):
    objective, batch, plan = made(name)
    drafter, block = objective.drafter, getattr(objective.drafter, "block_size", 1)
    for layer in drafter.layers:  # one that starts with a bias alone would be the same everywhere
        layer.mix.gate_proj.weight.data.normal_(0, 0.2, generator=torch.Generator().manual_seed(len(layer.mix.gate_proj.bias)))
    heard = [[] for _ in drafter.layers]
    handles = [layer.mix.register_forward_hook(lambda _m, _i, out, to=to: to.append(out[1].detach())) for layer, to in zip(drafter.layers, heard, strict=True)]
    found = measure_gate(objective, batch, plan)
    for handle in handles:
        handle.remove()
    for sums, calls in zip(found, heard, strict=True):
        for k in range(STEPS):
            gate = calls[0].unflatten(0, (-1, block))[:, k + 1] if block > 1 else calls[k]
            gate = gate[plan.anchors] if len(gate) == len(batch.tokens) else gate
            owner = plan.conversation
            for c in range(len(batch.keys)):
                rows = gate[plan.valid[k] & (owner == c)]
                assert int(sums.rows[c, k]) == len(rows)
                assert float(sums.mean[c, k]) == pytest.approx(float(rows.mean(1).sum()), rel=1e-5)
                assert float(sums.below[c, k]) == pytest.approx(float((rows < 0.05).double().mean(1).sum()), rel=1e-5)
            every = gate[plan.valid[k]].flatten()
            assert int(sums.histogram[k].sum()) == len(every)
            assert (float(sums.low[k]), float(sums.high[k])) == pytest.approx((float(every.min()), float(every.max())), rel=1e-5)
            # the least value that so many do not exceed, to the width of a bin
            want = torch.quantile(every, torch.tensor(QUANTILES).double(), interpolation="higher")
            near = torch.quantile(every, torch.tensor(QUANTILES).double(), interpolation="lower")
            shown = quantiles(sums.histogram, sums.low, sums.high)[k]
            assert bool((shown >= near - 1e-3).all()) and bool((shown <= want + 1e-3).all())
    assert len({round(float(s.mean[0, k] / s.rows[0, k]), 6) for s in found for k in range(STEPS)}) == STEPS * len(found)  # no step or layer is another


def test_conversations_measured_apart_are_those_measured_together():
    objective, batch, plan = made("hybrid-2")
    pieces = []
    for i, turn in enumerate(toys.TURNS):
        one = collate([(f"c{i}", toys.sample(turn, objective.drafter.g, i))]).to("cpu", torch.float64)
        pieces.append(measure_gate(objective, one, plan_rows(one, STEPS)))
    for together, *apart in zip(measure_gate(objective, batch, plan), *pieces, strict=True):
        joined = GateSums.joined(apart)
        for name in ("rows", "mean", "below", "histogram", "low", "high"):
            torch.testing.assert_close(getattr(joined, name), getattr(together, name), rtol=1e-9, atol=0)


def test_a_step_that_no_row_reaches_has_no_quantiles():
    objective, batch, plan = made("hybrid-1", [[0] * 3 + [1] * 2])
    (sums,) = measure_gate(objective, batch, plan)
    assert sums.rows.sum(0).tolist() == [1, 0, 0, 0]
    shown = quantiles(sums.histogram, sums.low, sums.high)
    assert bool(shown[0].isfinite().all()) and bool(shown[1:].isnan().all())


@pytest.mark.parametrize(
    ("name", "words"),
    [("hybrid-2", None), ("hybrid_block-2", None), ("hidden_only-1", "no gate"), ("kv_only-2", "no gate"), ("hybrid-cross_only", "no gate"),
     ("hybrid-no_gate", "without a gate")],
)  # fmt: skip
def test_why_there_is_no_gate(name, words):
    objective, batch, plan = made(name)
    why = why_not(objective.drafter)
    assert why is None if words is None else words in why
    assert bool(measure_gate(objective, batch, plan)) is (words is None)


def test_many_gates_in_one_bin_are_all_counted():
    count = (1 << 24) + 1000  # more than fp32 can count by ones
    found = _histogram(torch.full((1, 1), 0.0101).expand(count // 8, 8))
    assert found[10] == found.sum() == count
    assert _histogram(torch.empty(0, 4)).tolist() == [0.0] * 1000
