"""Which drafters are compared with which, in what, and what is said of how they were trained."""

from __future__ import annotations

import pytest

from kvshot_ds import metrics
from kvshot_ds.report.compare import BIGRAM, comparisons, unlike
from kvshot_ds.report.gather import gather, read_run

from .conftest import HOW, KV, MANY, recipe_for, write_run


def pairs(work):
    recipe = recipe_for(work)
    runs = gather(recipe).runs
    found: dict[tuple[str, str], list[str]] = {}
    for c in comparisons(runs, recipe.eval, {run.name: f"kvshot eval {run.name}" for run in runs}):
        if c.difference is not None and c.second != BIGRAM:
            found.setdefault((c.first, c.second), []).append(c.metric)
    return found


def test_every_pair_of_the_eight_drafters(many):
    ends, block = ["α₀", "α₆", "MAT"], ["α₀", "joint MAT"]
    assert pairs(many) == {
        ("kv_only", "kv_none"): ["α₀", "MAT"],
        ("mtp", "hidden_only"): ends,
        ("kv_only", "hidden_only"): ends,
        ("hybrid", "hidden_only"): ends,
        ("kv_block", "dflash"): ends,
        ("hybrid_block", "dflash"): ends,
        ("dflash", "hidden_only"): block,
        ("kv_block", "kv_only"): block,
        ("hybrid_block", "hybrid"): block,
    }


def test_every_run_is_compared_with_the_bigram_table(many):
    recipe = recipe_for(many)
    runs = gather(recipe).runs
    found = [c for c in comparisons(runs, recipe.eval, dict.fromkeys(MANY, "")) if c.second == BIGRAM]
    assert [c.first for c in found] == list(MANY) and all(c.difference and c.metric == "α₀" for c in found)


def test_the_difference_in_joint_mat_is_the_paired_one(many):
    recipe = recipe_for(many)
    runs = gather(recipe).runs
    c = next(c for c in comparisons(runs, recipe.eval, {}.fromkeys(MANY, "")) if (c.first, c.metric) == ("kv_block", "joint MAT"))
    block, step = (next(r for r in runs if r.name == name).conversations.counts for name in ("kv_block", "kv_only"))
    assert c.difference == metrics.paired_difference(block, step, metrics.mat_joint_of, **HOW)


def test_controls_leave_out_one_thing_more(tmp_path):
    for name, drafter, options in (
        ("kv_only", MANY["kv_only"], {}),
        ("kv_none", MANY["kv_none"], {}),
        ("kv_offline", MANY["kv_only"], {"objective": {"drift": "offline"}}),
        ("kv_none_offline", MANY["kv_none"], {"objective": {"drift": "offline"}}),
        ("kv_hidden", {"family": "kv_only", "depth": 2, "kv": {"injection": "hidden_to_kv"}}, {}),
        ("kv_none_depth1", {"family": "kv_only", "depth": 1, "kv": {"injection": "none"}}, {}),
        ("hybrid", {"family": "hybrid", **KV}, {}),
        ("hybrid_cross", {"family": "hybrid", "depth": 1, **KV, "cross_only": True}, {}),
        ("kv_block", MANY["kv_block"], {}),
        ("kv_block_none", MANY["kv_none"] | {"family": "kv_block", "block_size": 8}, {}),
    ):
        write_run(tmp_path, name, {"depth": 1, **drafter}, options=options)
    assert {pair for pair, names in pairs(tmp_path).items() if names == ["α₀", "MAT"]} == {
        ("kv_only", "kv_hidden"),
        ("kv_only", "kv_none"),
        ("kv_only", "kv_offline"),
        ("kv_offline", "kv_none_offline"),
        ("kv_none", "kv_none_offline"),
        ("hybrid", "hybrid_cross"),
        ("kv_block", "kv_block_none"),
    }
    assert {pair for pair, names in pairs(tmp_path).items() if "joint MAT" in names} == {("kv_block", "kv_only"), ("kv_block_none", "kv_none")}


def test_only_the_last_layer_is_read_where_nothing_else_is(tmp_path):
    for name in ("mtp", "kv_only", "kv_none", "dflash"):
        write_run(tmp_path, name, MANY[name])
    assert set(pairs(tmp_path)) == {("kv_only", "kv_none"), ("kv_only", "mtp"), ("dflash", "mtp")}


def test_the_counterpart_of_the_same_injection_is_taken(tmp_path):
    for name, injection in (("kv_only", "linear_rope"), ("kv_linear", "linear")):
        write_run(tmp_path, name, {"family": "kv_only", "depth": 2, "kv": {"injection": injection}})
    write_run(tmp_path, "kv_block", MANY["kv_block"])
    assert ("kv_block", "kv_only") in pairs(tmp_path) and ("kv_block", "kv_linear") not in pairs(tmp_path)


def test_what_was_not_trained_alike_is_named(many):
    block, step = read_run(many / "runs" / "dflash"), read_run(many / "runs" / "hidden_only")
    assert unlike(block, step) == "not trained alike: objective.anchors 48 and 0; objective.weights exponential and geometric"
    assert unlike(step, read_run(many / "runs" / "kv_none")) == ""


@pytest.mark.parametrize(
    ("option", "said"), [("warm_start", "initialisation random, target, x and random, target"), ("betas", "optim.betas 0.9, 0.8 and 0.9, 0.95")]
)
def test_starts_and_optimizers_are_compared(many, option, said):
    path = many / "runs" / "hybrid" / ("eval.json" if option == "warm_start" else "recipe.yaml")
    text = path.read_text(encoding="utf-8")
    old, new = {"warm_start": ('"head": "target"', '"head": "target", "warm_start": "x"'), "betas": ("- 0.95", "- 0.8")}[option]
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")
    assert unlike(read_run(path.parent), read_run(many / "runs" / "hidden_only")) == f"not trained alike: {said}"
