"""Gradient flow: constructed cases with known answers, and the gradient of a real training step."""

from __future__ import annotations

import math
from dataclasses import asdict

import pytest
import torch

from kvshot_ds.diagnostics import gradients
from kvshot_ds.diagnostics.gradients import measure_gradients
from kvshot_ds.diagnostics.record import only
from kvshot_ds.drafters import cost
from kvshot_ds.features.batch import collate
from kvshot_ds.objectives.alignment import plan_rows
from kvshot_ds.training.gradients import GROUPS
from kvshot_ds.training.launch import run
from tests import toys
from tests.diagnostics.made import STEPS, made
from tests.training.runs import before_each_step, board

ALL = 1000
SHORT = [[0] * 3 + [1] * 4 + [0] * 2 + [2] * 5, [0] * 2 + [1] * 6]
ONE = torch.ones(())


def whole(objective, batch, plan):
    """Gradient of the summed loss by parameter name, by plain backward."""
    objective(batch, plan, ONE).loss.backward()
    out = {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in objective.drafter.named_parameters()}
    objective.zero_grad()
    return out


def norm_of(values):
    return math.sqrt(sum(float(v.square().sum()) for v in values))


NAMES = ["hidden_only-3", "kv_only-head_concat", "hybrid-2", "dflash-2", "hybrid_block-2"]


@pytest.mark.parametrize("name", NAMES)
def test_by_group_against_plain_backward(name):
    objective, batch, plan = made(name)
    found, grads = measure_gradients(objective, [(batch, plan)], rows_each=1), whole(objective, batch, plan)
    weights = dict(objective.drafter.named_parameters())
    assert found.rows == plan.supervised and found.sampled == len(batch.keys)
    assert found.loss == pytest.approx(float(objective(batch, plan, ONE).loss.detach()) / found.rows, rel=1e-9)
    part = {"fc": "fusion", "self_attn": "self", "cross_attn": "cross", "projector": "projector", "mix": "gate", "mlp": "mlp", "lm_head": "head"}
    members: dict[str, list[str]] = {}
    for p in weights:
        group = "norms" if "norm" in p.split(".")[-2:][0] else next((part[x] for x in p.split(".") if x in part), "other")
        members.setdefault(group, []).append(p)
        if ".cross_attn.k_proj" in p or ".cross_attn.v_proj" in p:
            members.setdefault("cross_kv", []).append(p)
    assert found.groups.keys() == members.keys()
    everything = norm_of(grads.values())
    for group, names in members.items():
        g = found.groups[group]
        norm = norm_of(grads[p] for p in names)
        assert (g.parameters, g.norm) == (sum(weights[p].numel() for p in names), pytest.approx(norm, rel=1e-9))
        assert g.norm_per_row == pytest.approx(norm / plan.supervised, rel=1e-9) and g.share == pytest.approx(norm**2 / everything**2, rel=1e-9)
        assert g.weight_norm == pytest.approx(norm_of(weights[p].detach() for p in names), rel=1e-9)
        assert g.relative == pytest.approx(g.norm_per_row / g.weight_norm) and 0 < g.effective_rows <= found.rows
    assert sum(g.share for group, g in found.groups.items() if group != "cross_kv") == pytest.approx(1)
    assert all(p.grad is None and p.requires_grad for p in objective.parameters())


@pytest.mark.parametrize("name", NAMES)
def test_the_rows_one_by_one_add_up_to_the_whole_gradient(name):
    objective, batch, plan = made(name, SHORT)
    total = {p: torch.zeros_like(v) for p, v in objective.drafter.named_parameters()}
    for row in range(plan.supervised):
        for p, value in whole(objective, batch, only(plan, torch.tensor([row]))).items():
            total[p] += value
    for p, value in whole(objective, batch, plan).items():
        torch.testing.assert_close(total[p], value, rtol=1e-6, atol=1e-9 + 1e-6 * float(value.abs().max()), msg=f"{p}: {{}}".format)


@pytest.mark.parametrize("name", ["hidden_only-1", "kv_only-2", "hybrid-2"])
def test_rows_of_offline_drift_one_by_one_add_up_too(name):
    objective, batch, _ = made(name, SHORT)
    plan = plan_rows(batch, STEPS, offline=True)
    found, grads = measure_gradients(objective, [(batch, plan)], rows_each=ALL), whole(objective, batch, plan)
    assert found.sampled == found.rows == plan.supervised
    total = {p: torch.zeros_like(v) for p, v in grads.items()}
    for row in range(plan.supervised):
        for p, value in whole(objective, batch, only(plan, torch.tensor([row]))).items():
            total[p] += value
    for p, value in grads.items():
        torch.testing.assert_close(total[p], value, rtol=1e-6, atol=1e-9 + 1e-6 * float(value.abs().max()), msg=f"{p}: {{}}".format)


@pytest.mark.parametrize("name", ["kv_only-2", "hybrid-2", "dflash-2"])
def test_effective_rows_by_their_formula(name):
    objective, batch, plan = made(name, SHORT)
    found = measure_gradients(objective, [(batch, plan)], rows_each=ALL)
    assert found.sampled == found.rows
    rows = [whole(objective, batch, only(plan, torch.tensor([row]))) for row in range(plan.supervised)]
    for group in ("mlp", "norms"):
        mine = [norm_of(v for p, v in row.items() if group in {n: g for n, g, _ in cost.grouped(objective.drafter)}[p]) for row in rows]
        assert found.groups[group].effective_rows == pytest.approx(sum(mine) ** 2 / sum(x * x for x in mine), rel=1e-6)


def test_equal_contributions_count_as_many_and_a_single_one_as_one():
    objective, batch, plan = made("kv_only-2")
    alone = only(plan, torch.tensor([1]))
    one = measure_gradients(objective, [(batch, alone)], rows_each=ALL)
    assert one.rows == 1 and {g.effective_rows for g in one.groups.values()} == {1.0}
    same = measure_gradients(objective, [(batch, alone)] * 5, rows_each=ALL)
    assert same.rows == 5
    for group, g in same.groups.items():
        assert g.effective_rows == pytest.approx(5) and g.norm == pytest.approx(5 * one.groups[group].norm)
    norms = torch.tensor([[2.0, 0.0, 3.0], [2.0, 0.0, 0.0], [2.0, 0.0, 0.0], [2.0, 0.0, 0.0]])
    assert (gradients._participation(norms) * 4).tolist() == [4, 0, 1]


def test_a_conversation_that_is_there_twice_doubles_the_sum_and_not_the_norm_per_row():
    objective, *_ = made("hybrid-2")
    sample = toys.sample(toys.TURNS[0], objective.drafter.g, 0)
    one, two = (collate([(f"c{i}", sample) for i in range(n)]).to("cpu", torch.float64) for n in (1, 2))
    once, twice = (measure_gradients(objective, [(b, plan_rows(b, STEPS))], rows_each=ALL) for b in (one, two))
    assert (twice.rows, twice.loss) == (2 * once.rows, pytest.approx(once.loss))
    for group, g in once.groups.items():
        other = twice.groups[group]
        assert other.norm == pytest.approx(2 * g.norm) and other.norm_per_row == pytest.approx(g.norm_per_row) and other.share == pytest.approx(g.share)
        assert other.effective_rows == pytest.approx(2 * g.effective_rows)
    pieces = measure_gradients(objective, [(one, plan_rows(one, STEPS))] * 2, rows_each=ALL)
    assert asdict(pieces)["groups"] == {name: pytest.approx(group) for name, group in asdict(twice)["groups"].items()}


@pytest.mark.parametrize("name", ["hybrid-2", "hybrid_block-2"])
def test_a_closed_gate_gives_the_kv_branch_no_gradient(name):
    objective, batch, plan = made(name)
    opened = measure_gradients(objective, [(batch, plan)]).groups
    for layer in objective.drafter.layers:
        layer.mix.gate_proj.weight.data.zero_()
        layer.mix.gate_proj.bias.data.fill_(-1e4)
    closed = measure_gradients(objective, [(batch, plan)]).groups
    for group in ("cross", "cross_kv", "projector", "gate"):
        assert opened[group].norm > 1e-4
        assert (closed[group].norm, closed[group].share, closed[group].effective_rows) == (0, 0, 0)
    assert all(closed[group].norm > 1e-4 for group in ("self", "mlp", "norms"))


def test_a_delta_of_zero_starves_the_branch_and_not_itself():
    objective, batch, plan = made("hybrid-2")
    for layer in objective.drafter.layers:
        layer.mix.delta_proj.weight.data.zero_()
    found = measure_gradients(objective, [(batch, plan)]).groups
    assert found["cross"].norm == found["projector"].norm == 0 < found["gate"].norm


def test_a_drafter_that_was_loaded_without_gradients_is_left_so():
    objective, batch, plan = made("kv_only-2")
    wanted = measure_gradients(objective, [(batch, plan)])
    objective.drafter.requires_grad_(False)
    with torch.no_grad():
        assert measure_gradients(objective, [(batch, plan)]) == wanted
    assert not any(p.requires_grad or p.grad is not None for p in objective.parameters())


def test_the_norm_per_row_is_what_a_training_logs(recipe, monkeypatch):
    """grad_norm/GROUP of a step is that of the same weights and conversations, in other groups and in one."""
    taken = []

    def look(s, micro_batches, n):
        if n == 1:
            pieces = [(m.batch.to("cpu", torch.float32), m.plan) for m in micro_batches]
            taken.append(measure_gradients(s.objective, pieces))

    before_each_step(monkeypatch, look)
    r = recipe(drafter="hybrid", max_steps=2, optim={"lr": 1e-3, "clip": 0.01})
    run(r)
    logged, (found,) = board(r), taken
    for group in GROUPS:
        if group in found.groups and found.groups[group].norm:
            assert logged[f"grad_norm/{group}"][-1] == pytest.approx(found.groups[group].norm_per_row, rel=2e-5)
            assert logged[f"grad_norm_relative/{group}"][-1] == pytest.approx(found.groups[group].relative, rel=2e-5)
    assert found.rows > 10 and len(found.groups) >= 9
