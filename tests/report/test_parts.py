"""Figures, comparisons, gathering, and the paper's table, each alone."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
from matplotlib.figure import Figure as Canvas

from kvshot_ds import metrics
from kvshot_ds.metrics import Interval, StepCounts
from kvshot_ds.report import blocks, bounds, figures, gather
from kvshot_ds.report.beside import beside_blocks, variant
from kvshot_ds.report.cells import Group, grouped
from kvshot_ds.report.compare import Comparison, against_bigram, against_controls, common
from kvshot_ds.report.gather import Conversations, Run, read_run
from kvshot_ds.report.paper import Matched, Ours, agreement, chosen, counterpart, measured_cells, paper_blocks, paper_data, paper_row, paper_rows

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
    assert text.count("  seed: 0\n") == 5  # prep, train, eval, diagnose, decode.sampling
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
    assert len(thinned) == 251 and thinned[1] == (2.5, 5.0) and thinned[-1] == (998.0, 1996.0)
    assert thinned[0] == (0, 0), "where a gate starts"
    assert [len(gather._thin([(i, 0.0) for i in range(n)])) for n in (0, 1, 300, 301)] == [0, 1, 300, 151]


def test_timings_as_mapping_or_list():
    assert gather._timings({"prep": 1}) == gather._timings([{"stage": "prep", "seconds": 1.0}]) == {"prep": 1.0}


def test_a_drafter_of_unknown_start_is_read(work):
    path = work / "runs" / "a_hidden" / "eval.json"
    path.write_text(re.sub(r'"init": \{[^}]*\}', '"init": null', path.read_text(encoding="utf-8")), encoding="utf-8")
    assert read_run(path.parent).drafter.init_head == gather.UNKNOWN


def alone(run):
    return Group(run.name, (run,))


def test_runs_find_their_rows_in_the_paper(work):
    rows = paper_rows()
    assert len(rows) == 12
    found = {name: counterpart(alone(read_run(work / "runs" / name)), rows) for name in ("a_hidden", "b_kv", "c_none", "d_hybrid")}
    assert found["c_none"] is None  # the paper's control has depth 1
    assert {name: row.mat for name, row in found.items() if row} == {"a_hidden": 2.37, "b_kv": 2.23, "d_hybrid": 2.44}


def test_only_what_the_paper_has_stands_beside_it(many):
    rows = paper_rows()
    found = {run.name: counterpart(alone(run), rows) for run in gather.gather(recipe_for(many)).runs}
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
        ("scaled", MANY["kv_only"], {"objective": {"kv_gradient_scale": 50}}, None),
        ("opened", MANY["hybrid"] | {"gate": {"init": "bias:2"}}, {}, None),
    ):
        folder = write_run(many, name, options, options=train)
        path = folder / "eval.json"
        if "init" in train:
            path.write_text(path.read_text(encoding="utf-8").replace('"head": "target"', '"head": "target", "warm_start": "x"'), encoding="utf-8")
        row = counterpart(alone(read_run(folder)), rows)
        assert (row and (row.family, row.variant)) == expected, name


def ours(row, mat, seeds=1):
    return Matched(Ours(Group("x", (None,) * seeds), 0, (), mat, None), row)


def test_orders_are_compared_by_kendalls_tau(monkeypatch):
    monkeypatch.setattr(Group, "options", {})
    rows = sorted(paper_rows()[:4], key=lambda row: row.mat)
    assert "τ_b = +1.00 (exact p = 0.083); 6 of 6 pairs" in agreement([ours(row, 1 + i) for i, row in enumerate(rows)])
    assert "τ_b = −1.00" in agreement([ours(row, 9 - i) for i, row in enumerate(rows)])
    several = [*(ours(row, 1 + i, 3) for i, row in enumerate(rows)), ours(rows[0], 99)]
    assert chosen(several) == several[:4] and chosen([several[4]]) == [several[4]], "of two the one of more seeds"
    assert agreement([ours(rows[0], 1)]) == "How well the two orders agree is not said of 1 common row: it takes three."


def test_variants_of_the_papers_second_table(tmp_path):
    kv = MANY["kv_only"]
    for name, drafter, objective in (
        ("baseline", kv, {}),
        ("MLP projector", kv | {"kv": {"projector": "mlp"}}, {}),
        ("MLP projector + LayerNorm", kv | {"kv": {"projector": "mlp_norm"}}, {}),
        ("4 KV layers", kv | {"kv": {"layers": [1, 2, 3, 4]}}, {}),
        ("hidden to KV", kv | {"kv": {"injection": "hidden_to_kv"}}, {}),
        ("QK-norm", kv | {"kv": {"qk_norm": True}}, {}),
        ("offline TTT", kv, {"drift": "offline"}),
        ("offline TTT, KV-projection gradient x50", kv, {"drift": "offline", "kv_gradient_scale": 50}),
        ("", kv | {"depth": 1}, {}),
        ("", kv, {"kv_gradient_scale": 50}),
        ("", kv | {"kv": {"layers": [1, 2]}}, {}),
        ("", MANY["hybrid"], {}),
    ):
        run = Run("x", tmp_path, recipe_for(tmp_path, "x", drafter, train={"objective": objective}), None, None, None, None, {}, ())
        assert (variant(alone(run)) or "") == name
    assert {line["variant"] for line in paper_data()["kv_only_depth2_ablations"]} == set(_variants())


def _variants():
    from kvshot_ds.report.beside import _VARIANTS

    return _VARIANTS.values()


def test_the_papers_tables_stand_beside_ours(work):
    groups = grouped([read_run(work / "runs" / name) for name in ("a_hidden", "b_kv", "c_none", "d_hybrid")])
    ablations, text, trees, gates = beside_blocks(groups, "Some-Target")
    assert len(ablations.rows) == 8 + 1 and ablations.rows[1].cells[0].text == "b_kv" and ablations.rows[1].cells[-1].value == 0
    assert ablations.rows[2].cells[-1].value == pytest.approx(2.24 - 2.23) and "tree of depth 8, top 10, 60 nodes" in text.text
    assert [row.cells[0].text for row in trees.rows if row.tone == "ours"] == ["a_hidden"] and trees.rows[2].cells[2].value == 1.684
    assert [row.cells[0].text for row in gates.rows] == ["hybrid", "d_hybrid"]
    assert [cell.value for cell in gates.rows[1].cells[2:]] == pytest.approx([0.48, 0.48, 0.48, 0.46, 0.44, 0.38]), "the last point by then"
    for table in (ablations, trees, gates):
        assert all("Qwen3-8B" in row.cells[1].text for row in table.rows if row.tone == "paper") and all(len(r.cells) == len(table.head) for r in table.rows)
    values = [read(run.folder / "eval.json")["mat"]["value"] for g in groups for run in g.runs]
    assert [cell.mat for cell in measured_cells(groups)] == values
    assert "over 3 common rows" in " ".join(getattr(block, "text", "") for block in paper_blocks(groups, "Some-Target"))


def test_a_variant_gains_over_the_baseline_that_was_trained_alike(work):
    (few,) = grouped([read_run(work / "runs" / "b_kv")])

    def found(mat, **train):
        options = few.runs[0].recipe.train.model_dump(mode="json")
        options["drafter"]["kv"]["projector"] = train.pop("projector", "linear")
        recipe = recipe_for(work, "x", options["drafter"], train={**options, **train})
        return replace(few.runs[0], recipe=recipe, evaluation=replace(few.runs[0].evaluation, mat=Interval(mat, None, None)))

    runs = [found(1.5), found(1.7, projector="mlp"), found(2.5, max_conversations=9), found(2.6, projector="mlp", max_conversations=9)]
    rows = beside_blocks(grouped([*runs, found(3.0, projector="mlp", max_conversations=5)]), "Some-Target")[0].rows
    gains = {row.cells[-2].value: row.cells[-1].value for row in rows if row.tone == "ours"}
    assert gains == {1.5: 0, 1.7: pytest.approx(0.2), 2.5: 0, 2.6: pytest.approx(0.1), 3.0: None}


def test_a_row_that_the_paper_does_not_have():
    with pytest.raises(LookupError, match="no kv_only of depth 9"):
        paper_row("kv_only", 9, "linear_rope")


def test_intervals_are_shown_cut_where_the_quantity_ends_and_kept_whole():
    wide = Interval(0.2, -0.3, 1.4)
    for name, shown in (("αₖ", "0.000–1.000"), ("joint MAT", "−0.300 to 1.400"), ("norm for a row", "0.000–1.400"), ("difference", "−0.300 to 1.400")):
        cell = blocks.measured(wide, of=name)
        assert cell.sub == shown and (cell.low, cell.high) == (-0.3, 1.4)
    assert blocks.measured(Interval(1.5, 0.2, 2.8), 2, "MAT").sub == "1.00–2.80"
    assert bounds.natural("MAT less the baseline's")[0] < -9 and bounds.natural("cosine") == (-1, 1) and bounds.natural("share of gates < 0.05") == (0, 1)


@pytest.mark.parametrize(("label", "low"), [("αₖ", 0.0), ("what has no bounds", -0.5)])
def test_bands_and_axes_end_where_the_quantity_does(label, low):
    line = figures.Series("a", 0, (0, 1), (0.2, 0.4), (-0.5, -0.1), (0.6, 0.8))
    chart = figures.Chart("k", label, (line,), "", y_range=(-0.5, 0.8))
    axes = Canvas().subplots()
    figures.draw(axes, chart, figures.LIGHT)
    assert axes.get_ylim() == (low, 0.8)
    assert min(y for path in axes.collections[0].get_paths() for _, y in path.vertices) == low
    assert chart.series[0].low == (-0.5, -0.1), "the data are whole"


def test_gradients_of_very_different_size_stand_on_a_logarithmic_axis():
    rows = (figures.Dot("small", 0, 1e-5, -1e-5, 3e-5), figures.Dot("large", 0, 0.1, 0.05, 0.2))
    axes = Canvas().subplots()
    figures.draw(axes, figures.Dots("gradient / weights", rows, "", x_range=(1e-6, 0.3), log=True), figures.LIGHT)
    assert axes.get_xscale() == "log" and axes.get_xlim() == (1e-6, 0.3)
    axes = Canvas().subplots()
    line = figures.Series("a", 0, (1, 2), (1e-4, 0.1))
    figures.draw(axes, figures.Chart("step", "norm", (line,), "", log_y=True), figures.LIGHT)
    assert axes.get_yscale() == "log" and len([t for t in axes.get_yticks() if axes.get_ylim()[0] <= t <= axes.get_ylim()[1]]) > 1


def test_numbers_are_written_plainly():
    assert blocks.number(-0.12345) == "−0.123" and blocks.number(None) == "–" and blocks.signed(0.1, 2) == "+0.10"
    assert blocks.bounds(Interval(0, -0.1, 0.1), 1) == "−0.1 to 0.1" and blocks.bounds(Interval(1, 0.5, 1.5), 1) == "0.5–1.5"
    assert [blocks.duration(s) for s in (0.5, 42, 185, 7620, None)] == ["0.5 s", "42 s", "3 min 05 s", "2 h 07 min", "–"]
    assert blocks.duration(59.7) == "1 min 00 s"


def test_every_dash_has_its_swatch():
    assert len(figures._DASHES) == len(figures._SWATCH_DASHES) and len(figures._MARKERS) == len(figures._SWATCHES) == figures.COLOURS
