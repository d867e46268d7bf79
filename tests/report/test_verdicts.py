"""The rule of the verdicts at its edges, the choice of cells, and the five predictions on a made-up study."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from kvshot_ds import metrics
from kvshot_ds.config import Recipe
from kvshot_ds.metrics import Spread
from kvshot_ds.report import choice, predictions, verdicts
from kvshot_ds.report.cells import Group, difference, grouped, of_values, shared
from kvshot_ds.report.families import drafter_of
from kvshot_ds.report.gather import Conversations, Run, gather_folders
from kvshot_ds.report.paper import paper_row
from kvshot_ds.report.verdicts import Need, judge

from .swept import STUDY, study
from .test_parts import counts

KV = {"family": "kv_only", "kv": {"injection": "linear_rope"}}


def need(low, high, sign=1, seeds=3, margin=0.01):
    return Need("x", sign, margin, Spread(None if low is None else (low + high) / 2, low, high, seeds, 0.1))


@pytest.mark.parametrize(
    ("found", "standing"),
    [
        (need(0.001, 0.2), "as predicted"),
        (need(-0.2, -0.001), "the other way"),
        (need(-0.2, -0.001, sign=-1), "as predicted"),
        (need(0.001, 0.2, sign=-1), "the other way"),
        (need(0.0, 0.2), "open"),  # an end on 0
        (need(-0.2, 0.0), "open"),
        (need(-0.009, 0.009), "negligible"),
        (need(-0.009, 0.01), "open"),  # an end on the margin
        (need(-0.01, 0.009), "open"),
        (need(0.001, 0.002), "as predicted"),  # small, but there
        (need(0.001, 0.2, seeds=2), "open"),
        (need(-0.2, -0.1, seeds=1), "open"),
        (need(None, None), "open"),
        (Need("x", 1, 0.01, None, "a cell"), "open"),
    ],
)
def test_one_difference(found, standing):
    assert found.standing == standing


def test_a_prediction_is_as_good_as_its_worst_difference():
    good, bad, small, unknown = need(0.1, 0.2), need(-0.2, -0.1), need(-0.001, 0.001), Need("x", 1, 0.01, None, "a cell")
    assert judge([good]) == judge([good, good]) == "holds"
    assert judge([good, bad]) == judge([bad, unknown]) == judge([good, small]) == "does not hold"
    assert judge([good, unknown]) == judge([unknown]) == "not decidable here"
    with pytest.raises(ValueError, match="without a single difference"):
        judge([])


def test_what_is_missing_is_said():
    assert need(0.1, 0.2, seeds=2).gap == "seeds: 2 of at least 3"
    assert need(-0.1, 0.2).gap == "its interval holds 0 and is wider than the margin"
    assert need(None, None).gap == "no interval" and Need("x", 1, 0.01, None, "a cell").gap == "a cell"


def test_intervals_of_a_prediction_hold_together():
    assert verdicts.each(0.95, 1) == pytest.approx(0.95) and verdicts.each(0.95, 4) == pytest.approx(0.9875)


def test_one_number_a_seed_has_students_interval():
    found = of_values([1.0, 2.0, 4.0], 0.95)
    half = 4.302653 * math.sqrt(7 / 3) / math.sqrt(3)
    assert (found.value, found.low, found.high) == pytest.approx((7 / 3, 7 / 3 - half, 7 / 3 + half)) and (found.seeds, found.sd) == (
        3,
        pytest.approx(math.sqrt(7 / 3)),
    )
    assert of_values([1.0], 0.95) == Spread(1.0, None, None, 1, None)


def cell(drafter, seeds=(0, 1, 2), place=Path("work"), **train):
    """A cell that was not measured."""
    runs = []
    for seed in seeds:
        options = {"drafter": drafter, "seed": seed, **train}
        recipe = Recipe.model_validate({"name": "run", "work": place, "target": {"path": "/models/x"}, "train": options})
        label = drafter_of(recipe).label
        runs.append(Run(f"{label} {train} {seed}", place / "runs" / f"{label} {seed}", recipe, None, None, None, None, {}, ()))
    return runs


def cells(*found):
    return grouped([run for runs in found for run in runs])


def gated(**gate):
    return {"family": "hybrid", "kv": {"injection": "linear_rope"}, "gate": gate}


def test_runs_of_a_cell_differ_in_their_seed_alone():
    found = cells(cell(KV | {"depth": 1}), cell(KV | {"depth": 2}, (1, 0)), cell(KV | {"depth": 2}, max_conversations=50), cell(KV | {"depth": 1}, (1,)))
    assert [(g.drafter.depth, g.seeds) for g in found] == [(1, (0, 1, 2)), (1, (1,)), (2, (0, 1, 2)), (2, (0, 1))], (
        "the second run of a seed is a cell of its own"
    )
    assert len({g.name for g in found}) == 4 and "max_conversations 50" in found[2].name and "max_conversations 0" in found[3].name


def test_a_warm_start_counts_by_what_its_source_was_trained_with(tmp_path):
    from kvshot_ds.config import dump_recipe
    from kvshot_ds.files import write_atomic

    runs = []
    for seed in (0, 1):
        source = tmp_path / f"source{seed}"
        write_atomic(source / "recipe.yaml", dump_recipe(cell({"family": "hidden_only"}, (seed,))[0].recipe))
        runs += cell(gated(), (seed,), init={"warm_start": source})
    other = cell(gated(), (2,), init={"warm_start": tmp_path / "elsewhere"})
    assert {g.seeds for g in grouped([*runs, *other])} == {(0, 1), (2,)}


def test_depths_are_compared_within_what_was_trained_alike():
    deep, shallow = KV | {"depth": 4}, KV | {"depth": 1}
    found = choice.by_depth(cells(cell(shallow), cell(KV | {"depth": 2}), cell(deep), cell(KV | {"depth": 8}, max_conversations=9)))
    assert (found.first.drafter.depth, found.second.drafter.depth) == (4, 1)
    assert choice.by_depth(cells(cell(shallow, max_conversations=9), cell(deep))) is None
    few = choice.by_depth(cells(cell(shallow, (0,)), cell(deep), cell(shallow, max_conversations=9), cell(KV | {"depth": 2}, max_conversations=9)))
    assert few.first.drafter.depth == 2, "the class of most seeds"


def test_other_features_or_another_target_are_nothing_alike():
    deep, shallow = KV | {"depth": 4}, KV | {"depth": 1}
    assert choice.by_depth(cells(cell(deep), cell(shallow, place=Path("elsewhere")))) is None
    other = [replace(run, recipe=run.recipe.model_copy(update={"target": run.recipe.target.model_copy(update={"path": "/models/y"})})) for run in cell(shallow)]
    assert choice.by_depth(cells(cell(deep), other)) is None and choice.by_depth(cells(cell(deep), cell(shallow))) is not None


def test_what_the_paper_does_not_have_is_not_chosen():
    odd = [KV | {"kv": {"projector": "mlp"}}, KV | {"kv": {"qk_norm": True}}, KV | {"kv": {"injection": "none"}}, KV | {"kv": {"injection": "hidden_to_kv"}}]
    found = cells(*(cell(drafter) for drafter in odd), cell(KV, objective={"drift": "offline"}), cell(KV, init={"warm_start": "x"}), cell(KV))
    assert [g.runs[0].recipe.train.init.warm_start for g in choice.plain(found, "kv_only")] == [None] and len(choice.plain(found, "kv_only")) == 1


def test_gates_that_cannot_close_stand_against_the_random_start():
    opened = [gated(init="bias:2"), gated(open_steps=5), gated(floor=0.2, floor_steps=9), gated(kind="none")]
    others = [gated(init="bias:-1"), gated(init="bias:0"), gated(init="zero_delta")]
    lone, pairs = choice.by_gate(cells(cell(gated()), *map(cell, opened), *map(cell, others)))
    assert choice.random_gate(lone) and {pair.first.drafter.label for pair in pairs} == {cell(drafter)[0].drafter.label for drafter in opened}
    assert all(pair.second is lone for pair in pairs)
    assert choice.by_gate(cells(cell(gated())))[1] == [] and choice.by_gate(cells(*map(cell, opened))) == (None, [])


def test_a_gate_is_compared_with_one_of_its_kind():
    found = cells(*map(cell, (gated(), gated(kind="scalar"), gated(kind="scalar", init="bias:2"), gated(init="zero_delta", open_steps=5))))
    lone, (pair,) = choice.by_gate(found)
    assert lone is pair.second and [g.drafter.config.gate.kind for g in (pair.first, pair.second)] == ["scalar", "scalar"]
    assert choice.by_gate([g for g in found if g is not pair.second])[1] == [], "another kind, another delta"


def test_a_stronger_signal_stands_against_the_same_cell_without():
    found = cells(cell(KV), cell(KV, objective={"kv_gradient_scale": 50}), cell(KV | {"depth": 1}, objective={"kv_gradient_scale": 50}))
    (pair,) = choice.by_signal(found)
    assert choice.denser(pair.first) and not choice.denser(pair.second) and pair.first.drafter.depth == pair.second.drafter.depth == 2
    assert choice.by_signal(found[:1]) == []
    weaker = cells(cell(KV), cell(KV, objective={"kv_gradient_scale": 0.1}))
    assert choice.by_signal(weaker) == [], "a factor below 1 is no stronger signal"


def test_readers_are_the_shallowest_hidden_only_and_the_deepest_kv_only():
    hidden = {"family": "hidden_only"}
    pair = choice.by_reading(cells(cell(hidden), cell(hidden | {"depth": 2}), cell(KV | {"depth": 1}), cell(KV | {"depth": 3})))
    assert (pair.first.drafter.family, pair.first.drafter.depth, pair.second.drafter.depth) == ("hidden_only", 1, 3)
    assert choice.by_reading(cells(cell(hidden), cell(KV, optim={"lr": 0.1}))) is None, "trained otherwise"


def measured(name, seeds, keys="ab"):
    runs = []
    for seed, top in seeds.items():
        run = cell({"family": "hidden_only"}, (seed,))[0]
        runs.append(replace(run, name=f"{name}{seed}", conversations=Conversations(tuple(keys), counts([[v + i] for i, v in enumerate(top)]))))
    return Group(name, tuple(runs))


def test_differences_are_of_the_seeds_and_conversations_that_both_have():
    from kvshot_ds.metrics import alpha_at

    options = cell({"family": "hidden_only"})[0].recipe.eval
    first, second = measured("a", {0: [5, 5], 1: [6, 6], 3: [1, 1]}), measured("b", {1: [3, 3], 0: [4, 4], 2: [9, 9]}, "ba")
    found = difference(first, second, alpha_at(0), options, 0.95)
    assert found.spread.value == pytest.approx((0.1 + 0.3) / 2) and found.spread.seeds == 2 and found.alone == (2, 3)
    assert difference(first, measured("c", {7: [1, 1]}), alpha_at(0), options, 0.95).missing == "a seed that both a and c were trained with"
    assert difference(first, Group("d", tuple(cell({"family": "hidden_only"}))), alpha_at(0), options, 0.95).missing == "held-out acceptance of d (kvshot eval)"
    other = difference(first, measured("e", {0: [1, 1]}, "xy"), alpha_at(0), options, 0.95)
    assert other.spread is None and "conversations that both" in other.missing
    assert shared([]) == []


def test_the_five_predictions_of_a_study(tmp_path):
    work, recipe = gather_folders([study(tmp_path, [STUDY[i] for i in (0, 1, 3, 4, 6, 7)]).path])
    found = {p.name: p for p in predictions.predictions(grouped(work.runs), recipe.eval)}
    assert list(found) == ["Query estimation", "Sparse gradients", "Gate starvation", "First step", "Long range"]
    assert all(p.verdict in ("holds", "does not hold", "not decidable here") for p in found.values())
    assert found["First step"].verdict == found["Long range"].verdict == "holds", [verdicts.why(p) for p in found.values()]
    assert "kv_gradient_scale" in found["Sparse gradients"].needs[1].gap and found["Sparse gradients"].verdict != "holds"
    gate = found["Gate starvation"]
    assert len(gate.needs) == 3, "the closing, the gate that starts open and the one that is held open"
    assert any(n.alone == (2,) for n in gate.needs), "a failed seed is said"
    mat = found["Query estimation"].needs[1].spread
    assert mat.seeds == 3 and mat.value > 0
    hidden, kv = paper_row("hidden_only", 1, "eagle3"), paper_row("kv_only", 4, "linear_rope")
    assert f"{hidden.alpha[0]:.3f} − {kv.alpha[0]:.3f}" in found["First step"].needs[0].paper
    tables = [block for block in verdicts.blocks(list(found.values())) if block.kind == "table"]
    assert len(tables) == 6 and all(len(row.cells) == len(t.head) for t in tables for row in t.rows)
    assert "98.33% interval" in tables[3].head, "three intervals hold together with 95%"


def test_one_draft_step_says_nothing_of_late_ones():
    """Its retention is 1 for every drafter, which is no difference too small to matter."""
    pair = choice.Side(measured("a", {0: [5, 6], 1: [6, 7], 2: [6, 5]}), measured("b", {0: [4, 3], 1: [3, 2], 2: [4, 4]}))
    options = cell({"family": "hidden_only"})[0].recipe.eval
    for last, verdict in ((0, "open"), (6, "negligible")):
        need = predictions._late(pair, "retention", metrics.retention_of, "retention", options, 0.95, "", last)
        assert need.standing == verdict and (last or "more than one draft step" in need.gap)


def test_nothing_measured_decides_nothing():
    options = cell(KV)[0].recipe.eval
    for p in predictions.predictions((), options):
        assert p.verdict == "not decidable here" and verdicts.why(p)


@pytest.mark.parametrize(
    ("groups", "octaves"),
    [
        ({"cross_kv": {"norm": 1, "weight_norm": 4}, "self": {"norm": 8, "weight_norm": 4}, "mlp": {"norm": 1, "weight_norm": 1}}, -3),
        ({"cross_kv": {"norm": 1, "weight_norm": 4}, "mlp": {"norm": 1, "weight_norm": 1}}, -2),
        ({"cross_kv": {"norm": 1, "parameters": 16}, "mlp": {"norm": 1, "parameters": 4}}, -1),
        ({"cross_kv": {"norm": 0, "weight_norm": 4}, "mlp": {"norm": 1, "weight_norm": 1}}, None),
        ({"mlp": {"norm": 1, "weight_norm": 1}}, None),
    ],
)
def test_gradients_are_compared_by_the_size_of_the_weights(groups, octaves):
    run = replace(cell(KV)[0], diagnostics={"parts": {"gradients": {"groups": groups}}})
    assert predictions.gradient_octaves(run) == octaves
    assert predictions.gradient_octaves(replace(run, diagnostics={"parts": {"gradients": {"why": "no"}}})) is None


def test_queries_count_by_their_rows_in_the_last_layer():
    steps = [{"k": 0, "rows": 3, "cosine": {"value": 0.2}}, {"k": 1, "rows": 1, "cosine": {"value": 0.6}}, {"k": 2, "rows": 0, "cosine": {"value": None}}]
    parts = {"queries": {"layers": [{"layer": 0, "steps": [{"k": 0, "rows": 1, "cosine": {"value": 0.9}}]}, {"layer": 1, "steps": steps}]}}
    assert predictions.query_cosine(replace(cell(KV)[0], diagnostics={"parts": parts})) == pytest.approx(0.3)
    assert predictions.query_cosine(cell(KV)[0]) is None


def test_queries_are_compared_where_they_were_taken_of_the_same_rows():
    def diagnosed(depth, value, conversations, rows=3):
        parts = {"queries": {"layers": [{"layer": 0, "steps": [{"k": 0, "rows": rows, "cosine": {"value": value}}]}]}}
        data = {"split": "heldout", "conversations": conversations, "rows": 9}
        return [replace(run, diagnostics={"data": data, "parts": parts}) for run in cell(KV | {"depth": depth})]

    def cosine(*groups):
        return predictions.query_estimation(cells(*groups), cell(KV)[0].recipe.eval).needs[0]

    found = cosine(diagnosed(4, 0.5, 64), diagnosed(1, 0.2, 64)).spread
    assert (found.value, found.seeds) == (pytest.approx(0.3), 3)
    for other in (diagnosed(1, 0.2, 16), diagnosed(1, 0.2, 64, rows=2)):
        need = cosine(diagnosed(4, 0.5, 64), other)
        assert need.standing == "open" and need.gap.endswith("on the same rows") and need.alone == (0, 1, 2)


def test_a_gate_closes_within_the_first_quarter():
    run = replace(cell(gated())[0], train={"steps": 100}, scalars={"gate/mean": ((5, 0.5), (20, 0.2), (30, 0.1), (100, 0.4))})
    assert predictions.gate_change(run) == pytest.approx(-0.3)
    assert predictions.gate_change(replace(run, train={"steps": 70})) is None, "one point in the first quarter"
    assert predictions.gate_change(replace(run, scalars={})) is None
