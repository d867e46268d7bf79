"""Fits against tokens: exact on exact data, refused where they would be guesses, and marked where they leave what was measured."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from kvshot_ds.metrics import Interval
from kvshot_ds.report import growth, scaling
from kvshot_ds.report.blocks import Figure
from kvshot_ds.report.cells import grouped
from kvshot_ds.report.families import drafter_of
from kvshot_ds.report.gather import Evaluation, Rate, gather_folders
from kvshot_ds.report.scaling import Curve, crossing, fit
from kvshot_ds.report.sections import build_sections

from .swept import STUDY, crossed, study
from .test_verdicts import KV, cell

SIZES = (1e4, 2e4, 4e4, 8e4)


def curve(*lines, sizes=SIZES, name="a"):
    return Curve(name, 0, "data", "MAT", sizes[: len(lines[0])], tuple(tuple(line) for line in lines))


def straight(slope, at_first=2.0):
    return [at_first + slope * i for i in range(4)]


def test_a_line_by_doublings_is_found_for_each_seed():
    found = fit(curve(straight(0.1), straight(0.2)), "log", 0.95)
    assert found.slope.value == pytest.approx(0.15) and found.slope.seeds == 2 and found.rms == pytest.approx(0, abs=1e-9)
    assert found.slope.high - found.slope.value == pytest.approx(12.7062 * 0.05, rel=1e-4), "Student's t of one degree of freedom"
    assert found.at(16e4, 0.95).value == pytest.approx(2 + 0.15 * 4) and found.extrapolated(16e4) and not found.extrapolated(8e4)


def test_what_the_line_leaves_over_is_told():
    assert fit(curve([1.0, 2.0, 1.0]), "log", 0.95).rms == pytest.approx(math.sqrt((2 * (1 / 3) ** 2 + (2 / 3) ** 2) / 3))


def test_a_saturating_power_law_is_found():
    x = np.array(SIZES)
    y = 3 - 0.8 * (x / x[0]) ** -0.5
    limit, amplitude, power = scaling.power_law(x, y)
    assert (limit, amplitude, power) == pytest.approx((3, 0.8, 0.5), rel=0.05)
    found = fit(curve(y, y), "power", 0.95)
    assert found.limit.value == pytest.approx(3, rel=0.01) and found.at(16e4, 0.95).value < 3


def test_a_line_has_no_limit():
    assert scaling.power_law(np.array(SIZES), np.array(straight(0.1))) is None, "it does not bend"
    assert scaling.power_law(np.array(SIZES), np.array([3.0, 2.5, 2.2, 2.1])) is None, "it falls"


def test_few_sizes_are_refused():
    assert fit(curve(straight(0.1)[:2]), "log", 0.95) is None
    assert fit(curve(straight(0.1)[:3]), "log", 0.95) is not None and fit(curve([1.0, 1.5, 1.75]), "power", 0.95) is None
    assert fit(curve(straight(0.1)), "log", 0.95).slope.low is None, "one seed has no interval"


@pytest.mark.parametrize(
    ("start", "slopes", "doublings", "extrapolated"),
    [
        (1.9, (0.1, 0.15), 2, False),  # within the range
        (1.8, (0.1, 0.15), 4, True),  # beyond it, within four times
        (1.7, (0.1, 0.15), None, None),  # beyond that
        (2.1, (0.1, 0.15), None, None),  # before the first size
        (1.9, (0.1, 0.1), None, None),  # never
    ],
)
def test_where_fits_cross(start, slopes, doublings, extrapolated):
    jitter = (-0.001, 0.0, 0.001)
    first = fit(curve(*(straight(slopes[0] + j) for j in jitter)), "log", 0.95)
    second = fit(curve(*(straight(slopes[1] + j, start) for j in reversed(jitter)), name="b"), "log", 0.95)
    found = crossing(first, second, 0.95)
    assert (found and found.extrapolated) == extrapolated
    if found:
        assert found.tokens == pytest.approx(SIZES[0] * 2**doublings, rel=0.01) and (found.first, found.second) == ("a", "b")


def test_a_crossing_within_the_noise_of_seeds_is_none():
    first = fit(curve(straight(0.0), straight(0.2)), "log", 0.95)
    assert crossing(first, fit(curve(straight(0.1, 1.9), straight(0.2, 1.9), name="b"), "log", 0.95), 0.95) is None


def test_a_crossing_is_of_the_seeds_that_the_slopes_are_of():
    jitter = (-0.001, 0.0, 0.001)
    first = fit(curve(*(straight(0.1 + j) for j in jitter)), "log", 0.95)
    more = (*(straight(0.15 + j, 1.9) for j in reversed(jitter)), straight(0.4, 0.5))
    found = crossing(first, fit(curve(*more, name="b"), "log", 0.95), 0.95)
    assert found and found.tokens == pytest.approx(SIZES[0] * 4, rel=0.01)


HALF = Interval(0.5, None, None)
RATES = (Rate(0, 1, 2, HALF),)
EVALUATION = Evaluation(drafter_of(cell(KV)[0].recipe), "x", "d", 9, 0.95, RATES, RATES, RATES, HALF, HALF, HALF, None, None, {}, None)


def sized(place, conversations, passes, steps):
    """A cell of two seeds over so many conversations of 100 tokens."""
    train = {"conversations_per_step": 1, "max_conversations": conversations, "epochs": passes}
    return [replace(run, train={"steps": steps, "tokens": 100 * steps}, evaluation=EVALUATION) for run in cell(KV, (0, 1), place, **train)]


@pytest.mark.parametrize(
    ("found", "sizes"),
    [
        ([(10, 1), (20, 1), (40, 1), (20, 4), (40, 4)], [(1000, 2000, 4000), (2000, 4000)]),  # equal epochs; how often they were passed over is no size
        ([(10, 4), (20, 2), (40, 1)], [(1000, 2000, 4000)]),  # equal steps
        ([(10, 1), (10, 2), (20, 3)], []),  # nothing that differs in data alone
    ],
)
def test_a_curve_over_data_is_of_cells_that_differ_in_data_alone(tmp_path, found, sizes):
    groups = grouped([run for conversations, passes in found for run in sized(tmp_path, conversations, passes, conversations * passes)])
    curves = [of[0].sizes for of in scaling.data_curves(groups)]
    assert sorted(curves, key=len, reverse=True) == sizes


def test_a_cell_that_is_not_yet_measured_does_not_hide_the_others(tmp_path):
    runs = [run for n in (10, 20, 40) for run in sized(tmp_path, n, 1, n)]
    waiting = [replace(run, evaluation=None) for run in sized(tmp_path, 80, 1, 80)]
    ((curve, *_),) = scaling.data_curves(grouped([*runs, *waiting]))
    assert curve.sizes == (1000, 2000, 4000)


def test_tokens_are_counted_once_however_often_they_are_passed_over(tmp_path):
    run = replace(cell(KV, (0,), tmp_path, max_conversations=50, conversations_per_step=8)[0], train={"steps": 25, "tokens": 20_000})
    (group,) = grouped([run])
    assert scaling.data_tokens(group) == 20_000 * 50 / 200
    (group,) = grouped([replace(run, train={"steps": 5, "tokens": 4_000})])
    assert scaling.data_tokens(group) == 4_000, "less than one pass"
    (group,) = grouped(cell(KV, (0,), tmp_path))
    assert scaling.data_tokens(group) is None


def looking(seed, place):
    points = {20 * i: {"heldout/mat": 1 + 0.1 * i, "heldout/accept_top1/0": 0.1 * i, "heldout/accept_top1/3": 0.05 * i} for i in (1, 2, 4)}
    return replace(cell(KV, (seed,), place)[0], looks=points, train={"steps": 80, "tokens": 800})


def test_looks_stand_in_where_the_size_of_the_data_was_not_varied(tmp_path):
    groups = grouped([looking(seed, tmp_path) for seed in (0, 1)])
    (curves,) = scaling.look_curves(groups)
    assert [c.metric for c in curves] == ["MAT", "α₀", "last α"] and curves[0].sizes == (200, 400, 800)
    assert curves[2].values == ((0.05, 0.1, 0.2), (0.05, 0.1, 0.2))
    text = " ".join(str(getattr(block, "text", "")) for block in growth.scaling_blocks(groups, groups[0].runs[0].recipe.eval))
    assert "these are looks during training" in text and "extrapolation" in text


def test_a_cell_looks_as_everywhere_on_the_page_and_stands_in_the_order_of_the_page(tmp_path):
    folder = study(tmp_path, (STUDY[6], STUDY[3], STUDY[0]), seeds=(0, 1), events=False, diagnosed=False)
    work, recipe = gather_folders([folder.path])
    sections = {section.ident: section for section in build_sections(work, recipe)}
    drawn, curves = (next(b for b in sections[ident].blocks if isinstance(b, Figure)) for ident in ("scaling", "sweep-0"))
    shown = [(item.label, item.style) for item in curves.legend]
    assert [label for label, _ in shown] == ["hybrid_open", "kv4", "hidden"] and [(i.label, i.style) for i in drawn.legend][:-1] == shown
    fits = [s for s in drawn.panels[0].chart.series if s.label.endswith(": fit")]
    assert [s.style for s in fits] == [style for _, style in shown]


def test_nothing_to_fit_is_said():
    (block,) = growth.scaling_blocks(grouped(cell(KV)), cell(KV)[0].recipe.eval)
    assert block.tone == "missing" and "three sizes" in block.text


def test_a_sweep_over_data_is_fitted_and_its_extrapolation_is_marked(tmp_path):
    work, recipe = gather_folders([crossed(tmp_path).path])
    found = growth.scaling_blocks(grouped(work.runs), recipe.eval)
    kinds = [block.kind for block in found]
    if "figure" not in kinds:
        pytest.fail(f"nothing was fitted: {found}")
    figure = next(block for block in found if block.kind == "figure")
    assert "dashed parts are extrapolations" in figure.panels[0].chart.description and figure.panels[0].chart.log_x
    ahead = [s for s in figure.panels[0].chart.series if s.label.endswith("extrapolation")]
    assert {s.label for s in ahead} == {f"depth {depth}: extrapolation" for depth in (1, 2, 4)}, "named by what cells of all sizes have in common"
    assert all(s.dashed and s.x[-1] == pytest.approx(4 * s.x[0]) for s in ahead)
    table = next(block for block in found if block.kind == "table")
    assert all(len(row.cells) == len(table.head) for row in table.rows) and any("extrapolated" in head for head in table.head)
