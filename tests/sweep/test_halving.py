"""The rule of asynchronous successive halving: rungs, known cases, any order of arrival, against the paper's own definition; and how it can mislead."""

from __future__ import annotations

import itertools
import json
import math
import random

import pytest

from kvshot_ds.errors import ConfigError
from kvshot_ds.sweep.folder import Trial
from kvshot_ds.sweep.halving import Halving, rungs

HALVING = {"halving": {"enabled": True}}


def trial(name: str, seed: int = 0, control: str = "", after: str = "") -> Trial:
    return Trial(name, {"cell": name.partition("-")[0]}, seed, {}, after, control)


def rule(trials: list[Trial], *, reduction: float = 3, at: tuple[int, ...] = (10, 30, 90), spared: tuple[str, ...] = ()) -> Halving:
    return Halving(at, reduction, "mat", {t.name: t.seed for t in trials}, frozenset(spared))


@pytest.mark.parametrize(
    ("first", "reduction", "steps", "every", "found"),
    [
        (0.25, 3, 100, 25, (25, 75)),
        (0.25, 3, 100, 10, (30, 80)),  # rounded up to looks
        (0.1, 3, 1000, 100, (100, 300, 900)),  # 0.1 * 3 * 1000 is a little more than 300 in floating point
        (0.25, 2, 100, 40, (40, 80)),  # 25 and 50 would be 40 and 80
        (0.01, 2, 100, 50, (50,)),  # several rungs at one look are one
        (0.5, 4, 100, 50, (50,)),
        (0.25, 3, 100, 100, ()),
    ],
)
def test_rungs_are_looks_before_the_end(first, reduction, steps, every, found):
    assert rungs(first, reduction, steps, every) == found


@pytest.mark.parametrize("options", [{}, {"eval_every": 100}])
def test_it_needs_a_look_before_the_end(recipe, options):
    r = recipe(**options)
    r = r.model_copy(update={"sweep": r.sweep.model_validate(HALVING)})
    with pytest.raises(ConfigError, match=rf"train\.eval_every={options.get('eval_every', 0)} has no look .* 100 steps .* at most 25"):
        Halving.of(r, [trial("a")], "cell=a", 100)


def test_it_is_off_by_default_and_takes_its_rungs_from_the_recipe(recipe):
    r = recipe(eval_every=10)
    assert not r.sweep.halving.enabled
    trials = [trial("a"), trial("b", after="c"), trial("c"), trial("d", control="a from scratch"), trial("e"), trial("e-1", seed=1)]
    found = Halving.of(r, trials, "cell=a", 100)
    assert (found.rungs, found.reduction, found.metric) == ((30, 80), 3, "mat")
    assert found.spared == {"a", "c", "d"}, "the baseline, the source of a warm start, a control"
    assert found.seeds == {"a": 0, "b": 0, "c": 0, "d": 0, "e": 0, "e-1": 1}


def test_one_third_goes_on_and_the_others_are_told_why():
    trials = [trial(name) for name in "abcdef"]
    reached = {name: {5: 9.0, 10: value} for name, value in zip("abcdef", (1.0, 1.5, 1.2, 1.4, 1.1, 1.3), strict=True)}
    verdicts = {name: rule(trials).stop(name, reached) for name in "abcdef"}
    assert [name for name, why in verdicts.items() if why is None] == ["b", "d"]
    assert verdicts["a"] == ("behind at step 10: held-out mat 1 is number 6 of the 6 trials of seed 0 that have reached it, of which 2 go on (sweep.halving)")


def test_nobody_is_stopped_before_a_rung_nor_among_too_few():
    trials = [trial(name) for name in "abc"]
    assert rule(trials).stop("a", {}) is None
    assert rule(trials).stop("a", {"a": {9: 1.0}, "b": {10: 2.0}, "c": {10: 3.0}}) is None, "a look that is no rung"
    assert rule(trials).stop("a", {"a": {10: 1.0}, "b": {10: 2.0}}) is None, "of two, a third is nobody: the paper would wait"
    assert rule(trials).stop("a", {"a": {10: 1.0}, "b": {10: 2.0}, "c": {10: 3.0}})


def test_the_newest_rung_decides():
    """At the first one a is last, at the second one first of three, who may all have been stopped since."""
    trials = [trial(name) for name in "abcd"]
    reached = {"a": {10: 1.0, 30: 2.0}, "b": {10: 1.5, 30: 1.6}, "c": {10: 1.4, 30: 1.5}, "d": {10: 1.2}}
    assert rule(trials).stop("a", reached) is None
    assert "step 30" in (rule(trials).stop("b", reached) or "")
    assert "number 3 of the 4" in (rule(trials).stop("d", reached) or "")


def test_seeds_are_judged_apart():
    trials = [trial(f"{name}-{seed}", seed) for name in "abc" for seed in (0, 1)]
    reached = {"a-0": {10: 1.0}, "b-0": {10: 0.9}, "c-0": {10: 0.8}, "a-1": {10: 2.0}, "b-1": {10: 3.0}, "c-1": {10: 4.0}}
    assert [name for name in reached if rule(trials).stop(name, reached) is None] == ["a-0", "c-1"]


def test_the_spared_are_compared_with_and_never_stopped():
    trials = [trial(name) for name in "abc"]
    reached = {"a": {10: 1.0}, "b": {10: 2.0}, "c": {10: 3.0}}
    found = rule(trials, spared=("a", "c"))
    assert found.stop("a", reached) is None and "number 2 of the 3" in (found.stop("b", reached) or "")


def test_equal_ones_go_on_together_and_what_is_no_number_is_last():
    trials = [trial(name) for name in "abcd"]
    reached = {"a": {10: 1.0}, "b": {10: 1.0}, "c": {10: math.nan}, "d": {10: 0.5}}
    assert [name for name in "abcd" if rule(trials).stop(name, reached) is None] == ["a", "b"]
    alike = {name: {10: 1.0} for name in "abcd"}
    assert all(rule(trials).stop(name, alike) is None for name in "abcd")
    lost = {name: {10: math.nan} for name in "abc"}
    assert all(rule(trials).stop(name, lost) is None for name in "abc")


def promotable(values: dict[str, float], reduction: float) -> set[str]:
    """Algorithm 2 of arXiv 1810.05934, get_job: candidates = top_k(rung k, |rung k| / eta). All values differ."""
    return set(sorted(values, key=values.__getitem__, reverse=True)[: int(len(values) // reduction)])


@pytest.mark.parametrize("reduction", [2, 3, 4])
def test_at_every_moment_those_go_on_whom_the_paper_would_promote(reduction):
    """Trials arrive one by one in random order; where the paper promotes nobody, all go on."""
    rng = random.Random(reduction)
    trials = [trial(f"t{i}") for i in range(13)]
    for _ in range(20):
        values = {t.name: rng.random() for t in trials}
        arrived: dict[str, dict[int, float]] = {}
        for name in rng.sample(sorted(values), len(values)):
            arrived[name] = {10: values[name]}
            go_on = {other for other in arrived if rule(trials, reduction=reduction).stop(other, arrived) is None}
            assert go_on == (promotable({other: values[other] for other in arrived}, reduction) or set(arrived))


def simulate(curves: dict[str, dict[int, float]], order: tuple[str, ...], found: Halving) -> set[str]:
    """Trials one after another, each trained until it is stopped or done; those that were not stopped."""
    reached: dict[str, dict[int, float]] = {}
    stopped = set()
    for name in order:
        reached[name] = {}
        for step, value in curves[name].items():
            reached[name][step] = value
            if found.stop(name, reached):
                stopped.add(name)
                break
    return set(curves) - stopped


def test_the_best_one_survives_every_order_if_it_is_the_best_at_every_rung():
    trials = [trial(name) for name in "abcd"]
    curves = {name: {10: value, 30: value + 1, 90: value + 2, 100: value + 3} for name, value in zip("abcd", (0.4, 0.3, 0.2, 0.1), strict=True)}
    survivors = [simulate(curves, order, rule(trials)) for order in itertools.permutations("abcd")]
    assert all("a" in found for found in survivors)
    assert min(map(len, survivors)) < 4, "it does stop some"


def test_curves_that_cross_lose_the_best_trial_which_is_why_it_is_off_by_default():
    """Hidden-only learns fast and levels off; a deep KV drafter starts slowly and ends first: at the first rung it is the last of three, and is stopped."""
    trials = [trial(name) for name in ("hidden", "hybrid", "kv")]
    curves = {
        "hidden": {10: 1.30, 30: 1.40, 90: 1.45, 100: 1.46},
        "hybrid": {10: 1.20, 30: 1.35, 90: 1.50, 100: 1.52},
        "kv": {10: 1.10, 30: 1.30, 90: 1.60, 100: 1.65},
    }
    best = max(curves, key=lambda name: curves[name][100])
    kept = {name for name in curves if rule(trials).stop(name, {other: {10: curve[10]} for other, curve in curves.items()}) is None}
    assert best == "kv" and kept == {"hidden"}
    assert max(curves[name][100] for name in kept) < curves[best][100]


@pytest.mark.parametrize("text", ["", "[]", "{"])
def test_looks_that_cannot_be_read_are_none_yet(tmp_path, text):
    (tmp_path / "heldout.json").write_text(text)
    assert rule([trial("a")]).looks(tmp_path) == {}


def test_looks_are_read_from_what_a_trial_has_written(tmp_path):
    found = rule([trial("a")])
    assert found.looks(tmp_path) == {}
    (tmp_path / "heldout.json").write_text(json.dumps({"10": {"heldout/mat": 1.25, "heldout/loss": 3.0}, "20": {"heldout/mat": 1.5}, "30": {}}))
    assert found.looks(tmp_path) == {10: 1.25, 20: 1.5}
