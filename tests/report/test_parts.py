"""Figures, comparisons, gathering, and the paper's table, each alone."""

from __future__ import annotations

import re
import shutil
from html.parser import HTMLParser

import numpy as np
import pytest

from kvshot_ds import metrics
from kvshot_ds.metrics import Interval, StepCounts
from kvshot_ds.report import blocks, figures, gather
from kvshot_ds.report.compare import Comparison, against_bigram, against_controls, common
from kvshot_ds.report.gather import Conversations, read_run
from kvshot_ds.report.paper import counterpart, paper_rows

from .conftest import HOW, MANY, read, recipe_for, write_run


def chart(**changes):
    series = figures.Series("one", 1, (0, 1, 2), (0.4, None, 0.2), (0.3, None, 0.1), (0.5, None, 0.3))
    return figures.Chart(
        **{"x_label": "step <k>", "y_label": "α", "series": (series,), "description": 'of "one" & <b>', "reference": 0.3, "integer_x": True, **changes}
    )


def test_svg_is_inline_themed_text():
    svg = figures.lines(chart(), "fig-x", 350, 260)
    HTMLParser().feed(svg)
    assert svg.startswith('<svg role="img" aria-label="of &quot;one&quot; &amp; &lt;b&gt;" viewBox="0 0 350 260">')
    assert "<text" in svg and "step &lt;k&gt;" in svg and "xmlns" not in svg and "<style" not in svg and "<?xml" not in svg
    assert {"var(--ink)", "var(--muted)", "var(--grid)", "var(--c1)"} <= set(re.findall(r"var\([^)]*\)", svg))
    ids = re.findall(r' id="([^"]+)"', svg)
    assert ids and len(ids) == len(set(ids)) and all(i.startswith("fig-x-") for i in ids)
    assert set(re.findall(r'(?:href="|url\()#([^")]+)', svg)) == set(ids)
    assert svg == figures.lines(chart(), "fig-x", 350, 260)


def test_twenty_four_series_can_be_told_apart():
    drawn = {figures.swatch(i) for i in range(24)}
    assert len(drawn) == 24
    colourless = {re.sub(r"var\(--c\d\)", "", figures.swatch(i)) for i in range(24)}
    assert len(colourless) == 24, "without colour they still differ by marker and dash"


def test_intervals_are_bands_until_they_would_hide_each_other():
    def drawn(count, **changes):
        series = tuple(figures.Series(str(i), i, (0, 1), (0.4, 0.3), (0.3, 0.2), (0.5, 0.4)) for i in range(count))
        made = chart(series=series, **changes)
        return figures.lines(made, "f", 350, 260), figures.shifts(made)

    few, stay = drawn(3)
    many, moved = drawn(4)
    band, bar = "fill-opacity: 0.16", "stroke-opacity: 0.75"
    assert band in few and bar not in few and stay == [0, 0, 0]
    assert bar in many and band not in many
    assert moved == pytest.approx([-0.1875, -0.0625, 0.0625, 0.1875])
    assert drawn(4, integer_x=False)[1] == [0] * 4, "optimizer steps are not moved"


def test_bars_are_as_high_as_their_counts():
    svg = figures.bars((10, 5, 0), 0, "rounds")
    assert [float(h) for h in re.findall(r'height="([\d.]+)"', svg)] == [28, 14, 0]


@pytest.mark.parametrize(
    ("low", "high", "value", "verdict"),
    [
        (0.01, 0.2, 0.1, "higher"),
        (-0.2, -0.01, -0.1, "lower"),
        (-0.01, 0.2, 0.1, "not told apart"),
        (0.0, 0.2, 0.1, "not told apart"),
        (None, None, 0.1, "not told apart"),
    ],
)
def test_verdict_rule(low, high, value, verdict):
    assert Comparison("a", "b", "α₀", Interval(value, low, high)).verdict == verdict


def test_nothing_measured_has_no_verdict():
    assert Comparison("a", "b", "α₀", None).verdict == "not measured"
    assert Comparison("a", "b", "α₀", Interval(None, None, None)).verdict == "not measured"


def counts(top1):
    top1 = np.asarray(top1, dtype=float)
    return StepCounts(np.full_like(top1, 10), top1, top1, top1)


def test_conversations_are_paired_by_key_not_by_place():
    first, second = Conversations(("a", "b", "c"), counts([[1, 1], [2, 2], [3, 3]])), Conversations(("c", "x", "a"), counts([[30], [99], [10]]))
    one, two, shared = common(first, second)
    assert shared == 2
    assert one.top1.tolist() == [[1], [3]] and two.top1.tolist() == [[10], [30]]


def test_control_comparison_equals_the_paired_difference(work):
    runs = tuple(read_run(work / "runs" / name) for name in ("a_hidden", "b_kv", "c_none"))
    options, commands = recipe_for(work).eval, {run.name: "kvshot eval x" for run in runs}
    first, second = against_controls(runs[1], runs, options, commands)
    ours, control = (run.conversations.counts for run in runs[1:])
    assert first.difference == metrics.paired_difference(ours, control, metrics.alpha_at(0), **HOW)
    assert second.difference == metrics.paired_difference(ours, control, metrics.mat_of, **HOW)
    assert (first.verdict, second.metric, first.reason, first.conversations) == ("higher", "MAT", "", 24)
    assert against_controls(runs[0], runs, options, commands) == against_controls(runs[2], runs, options, commands) == []
    assert against_bigram(runs[0], "").difference.value == read(work / "runs" / "a_hidden" / "eval.json")["against"][0]["difference"]


def test_a_control_trained_otherwise_is_said_so(work):
    path = work / "runs" / "c_none" / "train.json"
    path.write_text(path.read_text(encoding="utf-8").replace('"steps": 60', '"steps": 50'), encoding="utf-8")
    runs = tuple(read_run(work / "runs" / name) for name in ("b_kv", "c_none"))
    found = against_controls(runs[0], runs, recipe_for(work).eval, {})
    assert found[0].reason == "not trained alike: steps 60 and 50"


def test_the_control_of_the_same_seed_is_taken(work):
    other = work / "runs" / "c_none_seed1"
    shutil.copytree(work / "runs" / "c_none", other)
    text = (other / "recipe.yaml").read_text(encoding="utf-8")
    assert text.count("  seed: 0\n") == 3  # prep, train, eval
    (other / "recipe.yaml").write_text(text.replace("  seed: 0\n", "  seed: 1\n"), encoding="utf-8")
    runs = tuple(read_run(work / "runs" / name) for name in ("b_kv", "c_none", "c_none_seed1"))
    options = recipe_for(work).eval
    assert {c.second for c in against_controls(runs[0], runs, options, {})} == {"c_none"}
    assert [c.reason for c in against_controls(runs[0], runs[::2], options, {})] == ["not trained alike: seed 0 and 1"] * 2


def test_after_a_resume_the_later_value_of_a_step_counts(tmp_path):
    from torch.utils.tensorboard import SummaryWriter

    for suffix, start, value in ((".a", 0, 1.0), (".b", 20, 2.0)):
        with SummaryWriter(str(tmp_path / "tensorboard"), filename_suffix=suffix) as writer:
            for step in range(start, 40, 10):
                writer.add_scalar("train/loss", value, step)
    assert read_run(tmp_path).scalars == {"train/loss": ((0, 1.0), (10, 1.0), (20, 2.0), (30, 2.0))}


def test_long_curves_are_averaged_down():
    thinned = gather._thin([(i, 2.0 * i) for i in range(1000)])
    assert len(thinned) == 250 and thinned[0] == (1.5, 3.0) and thinned[-1] == (997.5, 1995.0)


def test_timings_as_mapping_or_list():
    assert gather._timings({"prep": 1}) == gather._timings([{"stage": "prep", "seconds": 1.0}]) == {"prep": 1.0}


def test_a_drafter_of_unknown_start_is_read(work):
    path = work / "runs" / "a_hidden" / "eval.json"
    path.write_text(re.sub(r'"init": \{[^}]*\}', '"init": null', path.read_text(encoding="utf-8")), encoding="utf-8")
    assert read_run(path.parent).drafter.init_head == gather.UNKNOWN


def test_runs_find_their_rows_in_the_paper(work):
    rows = paper_rows()
    assert len(rows) == 12
    found = {name: counterpart(read_run(work / "runs" / name), rows) for name in ("a_hidden", "b_kv", "c_none", "d_hybrid")}
    assert found["c_none"] is None  # the paper's control has depth 1
    assert {name: row.mat for name, row in found.items() if row} == {"a_hidden": 2.37, "b_kv": 2.23, "d_hybrid": 2.44}


def test_only_what_the_paper_has_stands_beside_it(many):
    rows = paper_rows()
    found = {run.name: counterpart(run, rows) for run in gather.gather(recipe_for(many)).runs}
    assert {name: (row.family, row.variant) for name, row in found.items() if row} == {
        "hidden_only": ("hidden_only", "eagle3"),
        "kv_only": ("kv_only", "linear_rope"),
        "hybrid": ("hybrid", "scratch"),
    }
    for name, options, train, expected in (
        ("warm", MANY["hybrid"], {"init": {"warm_start": "x"}}, ("hybrid", "warm_start")),
        ("cross", MANY["hybrid"] | {"cross_only": True}, {}, ("cross_only", "scratch")),
        ("offline", MANY["kv_only"], {"objective": {"drift": "offline"}}, None),
        ("mlp", MANY["kv_only"] | {"kv": {"projector": "mlp"}}, {}, None),
        ("normed", MANY["kv_only"] | {"kv": {"qk_norm": True}}, {}, None),
        ("hidden_kv", MANY["kv_only"] | {"kv": {"injection": "hidden_to_kv"}}, {}, None),
    ):
        folder = write_run(many, name, options, options=train)
        path = folder / "eval.json"
        if "init" in train:
            path.write_text(path.read_text(encoding="utf-8").replace('"head": "target"', '"head": "target", "warm_start": "x"'), encoding="utf-8")
        row = counterpart(read_run(folder), rows)
        assert (row and (row.family, row.variant)) == expected, name


def test_numbers_are_written_plainly():
    assert blocks.number(-0.12345) == "−0.123" and blocks.number(None) == "–" and blocks.signed(0.1, 2) == "+0.10"
    assert blocks.bounds(Interval(0, -0.1, 0.1), 1) == "−0.1 to 0.1" and blocks.bounds(Interval(1, 0.5, 1.5), 1) == "0.5–1.5"
    assert [blocks.duration(s) for s in (0.5, 42, 185, 7620, None)] == ["0.5 s", "42 s", "3 min 05 s", "2 h 07 min", "–"]
    assert blocks.duration(59.7) == "1 min 00 s"


def test_every_dash_has_its_swatch():
    assert len(figures._DASHES) == len(figures._SWATCH_DASHES) and len(figures._MARKERS) == len(figures._SWATCHES) == figures.COLOURS
