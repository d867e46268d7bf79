"""Sweeps on the page: every number is its source's, bands are the rule's, and what is missing is said."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from kvshot_ds import metrics
from kvshot_ds.config import load_recipe
from kvshot_ds.errors import ConfigError
from kvshot_ds.report import blocks as b
from kvshot_ds.report import figures
from kvshot_ds.report.against import axes_of
from kvshot_ds.report.blocks import Block, Details, Figure, Section, Table, Text
from kvshot_ds.report.bounds import cut
from kvshot_ds.report.bycell import MOST, parts, scopes
from kvshot_ds.report.cells import Group
from kvshot_ds.report.gather import gather, gather_folders
from kvshot_ds.report.sections import build_sections
from kvshot_ds.sweep.compare import compare
from kvshot_ds.sweep.folder import SweepFolder
from tests.sweep.made import HIDDEN_ONLY, make_sweep

from .conftest import MANY, read, recipe_for, write_run
from .swept import FAILED, STUDY, crossed, study

CELLS = (STUDY[0], STUDY[1], STUDY[2], STUDY[4], STUDY[6])  # hidden, kv1, kv2, hybrid, hybrid_open (of which seed 2 failed)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> SweepFolder:
    return study(tmp_path_factory.mktemp("study"), CELLS, events=False)


@pytest.fixture(scope="module")
def page(folder: SweepFolder) -> dict[str, Section]:
    recipe = load_recipe(folder.path / "recipe.yaml")
    return {section.title: section for section in build_sections(gather(recipe), recipe)}


def within(blocks: tuple[Block, ...] | list[Block]) -> list[Block]:
    """All blocks, those folded away too."""
    return [inner for block in blocks for inner in (block, *(within(list(block.blocks)) if isinstance(block, Details) else ()))]


def table(section: Section, caption: str) -> Table:
    found = [block for block in within(list(section.blocks)) if isinstance(block, Table) and block.caption.startswith(caption)]
    assert len(found) == 1, f"{len(found)} tables {caption!r}"
    return found[0]


def figure(section: Section, ident: str) -> Figure:
    found = [block for block in within(list(section.blocks)) if isinstance(block, Figure) and block.ident.startswith(ident)]
    assert found, f"no figure {ident!r} among {[f.ident for f in within(list(section.blocks)) if isinstance(f, Figure)]}"
    return found[0]


def spread(folder: SweepFolder, drafter: str, statistic: metrics.Statistic) -> metrics.Spread:
    """By the rule, straight from the files."""
    counts = []
    for trial in folder.trials():
        path = folder.run_dir(trial) / "eval_conversations.json"
        if trial.labels["drafter"] == drafter and path.is_file():
            lines = read(path)
            counts.append(metrics.StepCounts(lines["den"], lines["top1"], lines["joint"], lines["prob"]))
    options = load_recipe(folder.path / "recipe.yaml").eval
    return metrics.over_seeds(counts, statistic, options.bootstrap, options.confidence, options.seed)


def test_numbers_of_a_cell_are_those_of_the_rule(folder, page):
    main = table(page["Sweep study"], "Cells, held-out")
    assert [row.cells[0].text for row in main.rows] == ["hidden", "kv1", "kv2", "hybrid", "hybrid_open"]
    assert all(row.cells[0].sub == "layers random, head target" for row in main.rows)
    at = {name: i for i, name in enumerate(main.head)}
    for row in main.rows:
        for name, statistic, digits in (
            ("α₀", metrics.alpha_at(0), 3),
            ("α₆", metrics.alpha_at(6), 3),
            ("MAT", metrics.mat_of, 2),
            ("joint MAT", metrics.mat_joint_of, 2),
            ("retention", metrics.retention_of, 3),
        ):
            want, cell = spread(folder, row.cells[0].text, statistic), row.cells[at[name]]
            assert cell.value == want.value and cell.text == f"{want.value:.{digits}f}"
            assert (cell.low, cell.high) == (want.low, want.high) and cell.sub == b.bounds(cut(want, name), digits)


def test_bands_of_the_curves_are_the_rule_s(folder, page):
    panels = figure(page["Sweep study"], "alpha-cells").panels
    lines = {s.label: s for panel in panels for s in panel.chart.series}
    assert set(lines) == {"hidden", "kv1", "kv2", "hybrid", "hybrid_open"}
    for name, line in lines.items():
        for k in range(7):
            want = spread(folder, name, metrics.alpha_at(k))
            assert (line.y[k], line.low[k], line.high[k]) == (want.value, want.low, want.high)


def test_a_missing_seed_is_shown_not_averaged_away(page):
    section = page["Sweep study"]
    lost = table(section, "Seeds without a result")
    assert [[cell.text for cell in row.cells] for row in lost.rows] == [["hybrid_open", "2", "failed: the loss is not finite at step 12"]]
    row = table(section, "Cells, held-out").rows[-1]
    assert (row.cells[1].text, row.cells[1].sub) == ("2 of 3", "without 2")
    assert any(isinstance(block, b.Code) and "KvshotError: the loss is not finite" in block.text for block in within(list(section.blocks)))
    said = [block for block in section.blocks if isinstance(block, Text) and block.tone == "missing"]
    assert said[0].text == "1 seed of cells of sweep study" and said[0].command.startswith("kvshot sweep run ")
    assert "14 of 15 trials are measured, in 5 of 5 cells" in page["At a glance"].blocks[0].items[0]


def test_a_seed_that_is_no_trial_is_missing_too(tmp_path):
    folder = study(tmp_path, (STUDY[0], replace(STUDY[1], absent=(1,))), seeds=(0, 1), events=False, diagnosed=False)
    recipe = load_recipe(folder.path / "recipe.yaml")
    section = next(s for s in build_sections(gather(recipe), recipe) if s.title == "Sweep study")
    lost = table(section, "Seeds without a result")
    assert [[cell.text for cell in row.cells] for row in lost.rows] == [["kv1", "1", "no trial of this sweep"]]
    assert table(section, "Cells, held-out").rows[1].cells[1].text == "1 of 2"


def test_a_cell_without_any_seed_has_its_row_and_the_report_its_files(tmp_path, build_page):
    folder = study(tmp_path, (STUDY[0], replace(STUDY[6], states={0: FAILED})), seeds=(0,), events=False, diagnosed=False)
    recipe = load_recipe(folder.path / "recipe.yaml")
    sections = build_sections(gather(recipe), recipe)
    cells = table(next(s for s in sections if s.title == "Sweep study"), "Cells, held-out")
    assert [cell.text for cell in cells.rows[1].cells[:3]] == ["hybrid_open", "0 of 1", "–"]
    for found in (block for section in sections for block in within(list(section.blocks)) if isinstance(block, Table)):
        assert {len(row.cells) for row in found.rows} <= {len(found.head)}, found.caption
    assert "hybrid_open" in build_page(recipe).text


def test_differences_from_the_baseline_are_those_of_the_sweep_table(folder, page):
    found = compare([folder.path])
    shown = table(page["Sweep study"], "Differences from the baseline, hidden")
    assert [row.cells[0].text for row in shown.rows] == ["kv1", "kv2", "hybrid", "hybrid_open"] and shown.head[2:] == (
        "MAT",
        "joint MAT",
        *("α₀", "α₁", "α₂", "α₃", "α₄", "α₅", "α₆"),
    )
    for row, want in zip(shown.rows, found.rows[1:], strict=True):
        assert row.cells[1].text == ("0, 1" if row.cells[0].text == "hybrid_open" else "0, 1, 2")
        for cell, name in zip(row.cells[2:], ("mat", "mat_joint", *(f"alpha_{k}" for k in range(7))), strict=True):
            spread = want.differences[name].spread
            assert (cell.value, cell.low, cell.high) == (spread.value, spread.low, spread.high)
            assert cell.text.endswith(" *") is want.differences[name].excludes
    said = " ".join(block.text for block in page["Sweep study"].blocks if isinstance(block, Text))
    assert f"the numbers are those of kvshot sweep table {folder.path}." in said and "of one seed:" not in said
    items = page["At a glance"].blocks[0].items
    assert items[1] == "The baseline is hidden."
    best = next(item for item in items if item.startswith("Highest MAT"))
    row = next(row for row in found.rows if row.name.endswith(best.split(": ")[1].split(",")[0]))
    if row is found.rows[0]:
        assert best.endswith(", the baseline itself.")
    else:
        assert f"which {'excludes' if row.differences['mat'].excludes else 'does not exclude'} 0 (" in best


def test_the_bigram_table_stands_beside_each_cell_paired_by_seed(folder, page):
    shown = table(page["Sweep study"], "α₀ beside the bigram table's")
    mine = [read(folder.run_dir(t) / "eval_conversations.json") for t in folder.trials() if t.labels["drafter"] == "kv1"]
    first = [metrics.StepCounts.unstack(metrics.StepCounts(d["den"], d["top1"], d["joint"], d["prob"]).stack()[..., :1]) for d in mine]
    bigram = [metrics.StepCounts.ratio(d["bigram"], [den[0] for den in d["den"]]) for d in mine]
    options = load_recipe(folder.path / "recipe.yaml").eval
    want = metrics.paired_over_seeds(first, bigram, metrics.alpha_at(0), options.bootstrap, options.confidence, options.seed)
    cells = shown.rows[1].cells
    assert (cells[0].text, cells[1].text, cells[4].value, cells[4].low, cells[4].high) == ("kv1", "0, 1, 2", want.value, want.low, want.high)
    assert cells[4].value == pytest.approx(cells[2].value - cells[3].value)


def test_differences_of_one_seed_say_so_and_looks_are_not_promised_of_finished_trials(tmp_path):
    folder = study(tmp_path, CELLS[:2], seeds=(0,), events=False, diagnosed=False)
    for trial in folder.trials():
        (folder.run_dir(trial) / "heldout.json").unlink()
    recipe = load_recipe(folder.path / "recipe.yaml")
    sections = {section.title: section for section in build_sections(gather(recipe), recipe)}
    said = " ".join(block.text for block in sections["Sweep study"].blocks if isinstance(block, Text))
    assert "interval and * are then over conversations alone and know nothing of what another seed would give" in said
    assert any("one seed alone, so it says nothing of other seeds" in item or "the baseline itself" in item for item in sections["At a glance"].blocks[0].items)
    looks = next(block for block in sections["Training"].blocks if isinstance(block, Text) and "in the course of training" in block.text)
    assert "looks are taken during training only, and finished trials are not trained again" in looks.text
    assert looks.command == (
        f"kvshot sweep run {folder.path}/recipe.yaml work={tmp_path}-looks prepared={tmp_path}/prepared shards={tmp_path}/features train.eval_every=6"
    )


def test_what_is_asked_for_is_the_last_step_there_is(tmp_path):
    recipe = load_recipe(make_sweep(tmp_path, (HIDDEN_ONLY,), (0,)).path / "recipe.yaml")
    section = next(s for s in build_sections(gather(recipe), recipe) if s.ident == "verdicts")
    said = [cell.text for block in within(list(section.blocks)) if isinstance(block, Table) for row in block.rows for cell in row.cells]
    assert any("α₃, KV-only less hidden-only" in text for text in said) and not any("α₆, KV-only" in text for text in said)


def test_sweeps_that_do_not_compare_are_still_shown(tmp_path):
    folder = study(tmp_path, CELLS[:2], seeds=(0,), events=False, diagnosed=False)
    path = folder.run_dir(folder.trials()[1]) / "eval_conversations.json"
    counts = read(path)
    path.write_text(json.dumps({name: values[:-1] for name, values in counts.items()}), encoding="utf-8")
    recipe = load_recipe(folder.path / "recipe.yaml")
    section = next(s for s in build_sections(gather(recipe), recipe) if s.title == "Sweep study")
    assert any(isinstance(block, Text) and block.text.startswith("No differences from a baseline: ") for block in section.blocks)


def test_every_trial_is_there_folded(folder, page):
    trials = table(page["Sweep study"], "Trials: value above")
    assert len(trials.rows) == 15
    for row in trials.rows:
        path = folder.path.parent.parent / "trials" / row.cells[0].sub / "eval.json"
        if path.is_file():
            assert row.cells[2].value == read(path)["alpha"][0]["value"]
        else:
            assert row.cells[2].text == "–"


def test_what_was_not_diagnosed_is_said(tmp_path):
    folder = study(tmp_path, CELLS[:3], seeds=(0, 1), events=False, diagnosed=False)
    recipe = load_recipe(folder.path / "recipe.yaml")
    section = next(s for s in build_sections(gather(recipe), recipe) if s.title == "Diagnostics")
    assert [block.text for block in section.blocks] == ["diagnostics of 6 runs: sweep study"]
    assert section.blocks[0].command == f"for recipe in {tmp_path}/trials/*/recipe.yaml; do kvshot diagnose $recipe; done"


def test_diagnostics_are_the_seeds_mean(folder, page):
    section = page["Diagnostics"]
    shown = figure(section, "queries").panels[0].chart
    assert {s.label for s in shown.series} == {"kv1", "kv2", "hybrid", "hybrid_open"}
    line = next(s for s in shown.series if s.label == "kv1")
    values = [
        read(folder.run_dir(t) / "diagnostics.json")["parts"]["queries"]["layers"][0]["steps"][3]["cosine"]["value"]
        for t in folder.trials()
        if t.labels["drafter"] == "kv1"
    ]
    assert line.y[3] == pytest.approx(sum(values) / 3) and line.low[3] < min(values) and line.high[3] > max(values)
    gates = {row.cells[0].text for row in table(section, "Gates by layer").rows}
    assert gates == {"hybrid", "hybrid_open"}
    why = [item for block in within(list(section.blocks)) if isinstance(block, b.Bullets) for item in block.items]
    assert "query estimation: no cross path (hidden)" in why and "gate: no gate (hidden, kv1, kv2)" in why
    context = figure(section, "context")
    assert [dot.label for dot in context.panels[0].chart.rows] == ["nothing masked", "far positions masked", "near positions masked", "all positions masked"]
    bounds = [[cell.text for cell in row.cells[1:3]] for row in table(section, "Classes of rows").rows]
    assert bounds[0] == ["1", "0 – 0"] and bounds[3] == ["4", "16 and more"] and bounds[8] == ["2", "0.50 – 1.25"]


def test_one_seed_keeps_its_own_interval(folder):
    work, _ = gather_folders([run for run in (folder.path.parent.parent / "trials").iterdir() if run.name.startswith("kv_only-1")][:1])
    recipe = load_recipe(work.runs[0].folder / "recipe.yaml")
    section = next(s for s in build_sections(work, recipe) if s.title == "Diagnostics")
    line = figure(section, "queries").panels[0].chart.series[0]
    found = work.runs[0].diagnostics["parts"]["queries"]["layers"][0]["steps"]
    assert line.low == tuple(step["cosine"]["low"] for step in found)


def test_depth_and_data_are_axes(tmp_path):
    recipe = load_recipe(crossed(tmp_path, seeds=(0,)).path / "recipe.yaml")
    scope = scopes(gather(recipe))[0]
    depth, data = axes_of(scope)
    assert depth.title == "depth" and sorted(set(depth.numbers.values())) == [1, 2, 4] and not depth.log
    assert data.title == "tokens of training data"
    train = read(tmp_path / "features" / "manifest.json")["splits"]["train"]
    assert data.log
    assert sorted(set(data.numbers.values())) == [n * train["tokens"] / train["samples"] for n in (1, 2, 4)]
    section = next(s for s in build_sections(gather(recipe), recipe) if s.title == "Sweep scale")
    drawn = figure(section, "axis-0")
    assert [p.title for p in drawn.panels] == ["MAT", "joint MAT", "retention", "α₀", "α₆"]
    assert [s.label for s in drawn.panels[0].chart.series] == ["conversations 1", "conversations 2", "conversations 4"]
    assert all(s.x == (1, 2, 4) for s in drawn.panels[0].chart.series) and drawn.panels[0].chart.x_ticks == (1, 2, 4)
    assert len(drawn.data.rows) == 9 and all(row.cells[0].sub for row in drawn.data.rows)


def test_what_variants_stand_for_is_an_axis_too(folder):
    scope = scopes(gather(load_recipe(folder.path / "recipe.yaml")))[0]
    variants, depth, gate = axes_of(scope)
    assert variants.title == "drafter" and not variants.numbers and len(variants.value) == 5
    assert depth.title == "depth" and set(depth.line.values()) == {"KV-only · linear_rope"}, "what has one depth alone is no line"
    assert set(depth.numbers.values()) == {1, 2} and gate.title == "gate"
    assert sorted(gate.value.values()) == ["gate elementwise, bias:2", "gate elementwise, random"]


def test_cells_of_one_figure_are_few_and_none_is_lost(many):
    groups = tuple(Group(run.name, (run,), i) for i, run in enumerate(gather(recipe_for(many)).runs))
    assert parts(groups[:MOST]) == [("", groups[:MOST])]
    divided = parts(groups)
    assert sorted(g.name for _, members in divided for g in members) == sorted(MANY)
    assert all(len(members) <= MOST for _, members in divided)
    for _, members in divided:
        assert len({g.drafter.blockwise for g in members}) == 1
    assert [len(members) for _, members in parts(groups[:1] * 14)] == [6, 6, 2]


def test_a_trial_of_two_sweeps_is_one_run(tmp_path):
    first = study(tmp_path, CELLS[:2], seeds=(0,), events=False, diagnosed=False)
    again = SweepFolder(first.path.parent / "again")
    (again.path).mkdir()
    for name in ("recipe.yaml", "trials.json", "state.json"):
        (again.path / name).write_bytes((first.path / name).read_bytes())
    write_run(tmp_path, "alone", MANY["hidden_only"])
    work = gather(load_recipe(first.path / "recipe.yaml"))
    assert [sweep.name for sweep in work.sweeps] == ["again", "study"] and len(work.runs) == 3
    assert [run.name for run in work.alone] == ["alone"]
    assert [scope.title for scope in scopes(work)] == ["Sweep again", "Sweep study", "Runs of no sweep"]


def test_folders_of_sweeps_and_of_runs_are_shown_by_the_sweep_s_recipe(folder, tmp_path):
    alone = write_run(tmp_path, "alone", MANY["hidden_only"])
    work, recipe = gather_folders([alone, folder.path])
    assert recipe.report.title == "Sweep study on toy"
    assert recipe.name == "study" and recipe.report.runs == (alone, folder.path) and len(work.runs) == 15
    with pytest.raises(ConfigError, match="no folder of a run or of a sweep"):
        gather_folders([tmp_path])


def test_cells_of_unequal_steps_are_marked(tmp_path):
    folder = study(tmp_path, CELLS[:3], seeds=(0,), events=False, diagnosed=False)
    place = folder.run_dir(folder.trials()[1])
    text = (place / "train.json").read_text(encoding="utf-8")
    assert text.count('"steps": 60') == 1
    (place / "train.json").write_text(text.replace('"steps": 60', '"steps": 40'), encoding="utf-8")
    recipe = load_recipe(folder.path / "recipe.yaml")
    section = next(s for s in build_sections(gather(recipe), recipe) if s.title == "Sweep study")
    assert any(isinstance(block, Text) and "Steps: most cells 60; kv1 (40)" in block.text for block in section.blocks)
    main = table(section, "Cells, held-out")
    steps = {row.cells[0].text: row.cells[main.head.index("steps")] for row in main.rows}
    assert steps["kv1"].sub == "not as most" and steps["kv1"].value == 40 and steps["hidden"].sub == ""


def test_costs_are_those_of_the_rows(folder, page):
    costs = table(page["Cost"], "Cost of sweep study")
    rows = {}
    for line in (folder.path / "results.jsonl").read_text(encoding="utf-8").splitlines():
        found = json.loads(line)
        rows.setdefault(found["labels"]["drafter"], []).append(found)
    at = {name: i for i, name in enumerate(costs.head)}
    for row in costs.rows:
        mine = [r for r in rows[row.cells[0].text] if r["state"] == "complete"]
        for name, get in (
            ("FLOPs of training", lambda r: r["train"]["flops"]),
            ("device hours", lambda r: r["cost"]["device_hours"]),
            ("features", lambda r: r["cost"]["feature_bytes"]),
            ("tokens", lambda r: r["train"]["tokens"]),
        ):
            values = [v for r in mine if (v := get(r)) is not None]
            assert row.cells[at[name]].value == (pytest.approx(sum(values) / len(values)) if values else None), name
        assert row.cells[0].sub == "layers random, head target"


def test_device_hours_are_summed_by_part(folder, page):
    totals = {row.cells[0].text: row.cells[1].value for row in table(page["Cost"], "Device hours of all trials").rows}
    rows = [json.loads(line)["cost"] for line in (folder.path / "results.jsonl").read_text(encoding="utf-8").splitlines()]
    assert totals["total"] == pytest.approx(sum(cost["device_hours"] for cost in rows if cost["device_hours"]))
    assert totals["total"] == pytest.approx(sum(hours for part, hours in totals.items() if part != "total")) and {"train", "eval"} <= totals.keys()


def test_the_course_of_training_by_cell(tmp_path):
    folder = study(tmp_path, (STUDY[4],), seeds=(0, 1), diagnosed=False)
    recipe = load_recipe(folder.path / "recipe.yaml")
    section = next(s for s in build_sections(gather(recipe), recipe) if s.title == "Training")
    trend = figure(section, "trend").panels[0].chart.series[0]
    looks = [read(folder.run_dir(t) / "heldout.json") for t in folder.trials()]
    assert trend.x == (320, 640, 960), "16 tokens a step"
    first = [look["20"]["heldout/mat"] for look in looks]
    assert trend.y[0] == pytest.approx(sum(first) / 2) and (trend.low[0], trend.high[0]) == (min(first), max(first))
    for ident, panels in (("curves", ["training loss", "α₀ on training rows"]), ("gates", ["mean gate", "share of gates below 0.05"])):
        assert [p.title for p in figure(section, ident).panels] == panels
    assert [p.title for p in figure(section, "grad-norm").panels][:2] == ["KV path", "K and V projections of the KV path"]
    assert [p.title for p in figure(section, "gate-steps").panels] == [
        "mean gate, draft step 0",
        "mean gate, draft step 6",
        "gates below 0.05, draft step 0",
        "gates below 0.05, draft step 6",
    ]


def test_a_sweep_without_results_is_said_to_have_none(tmp_path, build_page):
    folder = study(tmp_path, CELLS[:1], seeds=(0,), events=False, diagnosed=False)
    for path in folder.run_dir(folder.trials()[0]).iterdir():
        path.unlink()
    folder.run_dir(folder.trials()[0]).rmdir()
    text = build_page(load_recipe(folder.path / "recipe.yaml")).text
    assert (
        "Sweep study: 0 of 1 trials are measured, in 0 of 1 cells." in text and "held-out acceptance of any trial of sweep study. Run kvshot sweep run" in text
    )


def test_the_page_of_a_sweep(tmp_path, build_page):
    recipe = load_recipe(study(tmp_path, (STUDY[6],), seeds=(0, 1), events=False).path / "recipe.yaml")
    page = build_page(recipe)
    drawings = [attrs for tag, attrs in page.tags if tag == "svg" and attrs.get("role") == "img"]
    assert drawings and all(attrs["aria-label"] for attrs in drawings)
    ids = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    html = (Path(recipe.work) / "report" / "index.html").read_text(encoding="utf-8")
    assert html.count("Resolved recipe of sweep study") == 1 and "Resolved recipe of hybrid" not in html
    assert "Commands of 4 stages of trials" in page.text


def test_dots_are_text_with_their_intervals():
    rows = (figures.Dot("one & <two>", 0, 0.4, 0.3, 0.5), figures.Dot("none", 7, None))
    chart = figures.Dots("MAT", rows, "MAT of <cells>", reference=0.4)
    svg = figures.lines(chart, "dots", 350, 1)
    assert f'viewBox="0 0 350 {chart.height}"' in svg and 'aria-label="MAT of &lt;cells&gt;"' in svg
    assert "one &amp; &lt;two&gt;" in svg and "not measured" in svg and {"var(--c0)", "var(--ink)"} <= set(re.findall(r"var\([^)]*\)", svg))


def test_measured_places_of_an_axis_are_its_ticks_and_what_stands_behind_is_grey():
    line = figures.Series("a", 0, (1000.0, 4000.0), (0.1, 0.2), (0.05, 0.15), (0.15, 0.25))
    svg = figures.lines(figures.Chart("tokens", "MAT", (line,), "", log_x=True, x_ticks=(1000, 4000), behind=(line,)), "axis", 350, 260)
    assert ">1 k<" in svg and ">4 k<" in svg and ">2 k<" not in svg
    assert "stroke-opacity: 0.75" in svg and "fill-opacity: 0.16" not in svg, "bars, not bands"
    assert svg.count("stroke: var(--grid); stroke-width: 1.3") == 1
