"""The tables of sweeps: the four forms, and that nothing missing or unequal passes unseen."""

from __future__ import annotations

import csv
import io
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvshot_ds import metrics
from kvshot_ds.errors import ConfigError, KvshotError
from kvshot_ds.files import read_json, write_json
from kvshot_ds.metrics import Spread, StepCounts
from kvshot_ds.sweep import results
from kvshot_ds.sweep.compare import Difference, Missing, Row, Table, compare
from kvshot_ds.sweep.early import Early, Look, early
from kvshot_ds.sweep.folder import Progress, SweepFolder, TrialState
from kvshot_ds.sweep.table import Form, rendered
from tests.sweep.made import CELLS, HIDDEN_ONLY, HYBRID, KV_ONLY, Cell, make_sweep

FAILED = TrialState("failed", 2, 10.0, 12.0, {"start": 1.0}, False, "out of memory")


def spread(value: float, half: float, seeds: int = 3) -> Spread:
    return Spread(value, value - half, value + half, seeds, half / 2)


SIZES: dict[str, Any] = {"steps": 60, "tokens": 960_000, "supervised_rows": 660_500}
BASE = Row(
    "demo", "family=hidden_only x=a_b", {"family": "hidden_only", "x": "a_b"}, "", False, (0, 1, 2), (), 1_234_567, 2.5e9, 3e6, SIZES, frozenset(), 2,
    {"alpha_0": spread(0.4, 0.01), "alpha_1": spread(0.3, 0.02), "mat": spread(1.5, 0.03), "mat_joint": spread(1.7, 0.04), "retention": spread(0.75, 0.05)},
)  # fmt: skip
OTHER = replace(
    BASE, name="family=kv_only x=50%", labels={"family": "kv_only", "x": "50%"}, control="scratch of family=hybrid", seeds=(0, 2),
    missing=(Missing(1, "failed: no memory"),), sizes=SIZES | {"steps": 90}, unequal=frozenset({"steps"}),
    differences={
        "mat": Difference(spread(0.1, 0.04, 2)), "mat_joint": Difference(spread(-0.2, 0.3, 2)), "alpha_0": Difference(spread(-0.05, 0.01, 2)),
        "alpha_1": Difference(Spread(0.01, None, None, 2, 0.1)),
    },
    common_steps=2,
)  # fmt: skip
EMPTY = replace(
    BASE, name="family=hybrid x=c", labels={"family": "hybrid", "x": "c"}, seeds=(), parameters=None, train_flops=None, draft_flops=None,
    missing=(Missing(0, "waiting"), Missing(1, "running"), Missing(2, "waiting")), sizes=dict.fromkeys(SIZES), steps=0, values={},
)  # fmt: skip
TABLE = Table("kvshot sweep table W/sweeps/demo", "0123456789abcdef", "Target_1", 24, 0.95, ("demo",), ("family", "x"), (BASE, OTHER, EMPTY), 0)

GOLDEN = {"text": "table.txt", "markdown": "table.md", "latex": "table.tex", "csv": "table.csv"}


@pytest.fixture(autouse=True)
def commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvshot_ds.sweep.table.git_commit", lambda: "abc123")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> SweepFolder:
    """Three cells of three seeds; one trial has failed, and one seed is no trial at all."""
    cells = (HIDDEN_ONLY, replace(KV_ONLY, states={1: FAILED}), replace(HYBRID, absent=[2]))
    return make_sweep(tmp_path_factory.mktemp("work"), cells)


def by_family(table: Table) -> dict[str, Row]:
    return {row.labels["family"]: row for row in table.rows}


def counts_of(folder: SweepFolder, family: str, seed: int) -> StepCounts:
    trial = next(t for t in folder.trials() if (t.labels["family"], t.seed) == (family, seed))
    found = read_json(folder.run_dir(trial) / "eval_conversations.json")
    return StepCounts(*(found[name] for name in ("den", "top1", "joint", "prob")))


def test_values_and_differences_are_those_of_the_one_rule(made: SweepFolder):
    table, how = compare([made.path]), (200, 0.95, 0)
    rows = by_family(table)
    hidden, hybrid = ([counts_of(made, family, seed) for seed in (0, 1)] for family in ("hidden_only", "hybrid"))
    assert rows["hybrid"].values["mat"] == metrics.over_seeds(hybrid, metrics.mat_of, *how)
    assert rows["hybrid"].values["alpha_3"] == metrics.over_seeds(hybrid, metrics.alpha_at(3), *how)
    for name, statistic in {
        "mat": metrics.mat_of,
        "mat_joint": metrics.mat_joint_of,
        "alpha_0": metrics.alpha_at(0),
        "alpha_3": metrics.alpha_at(3),
    }.items():
        assert rows["hybrid"].differences[name].spread == metrics.paired_over_seeds(hybrid, hidden, statistic, *how)
    assert not rows["hidden_only"].differences
    assert (table.baseline, table.conversations, table.target) == (0, 24, "toy")


def test_the_mark_is_that_zero_is_not_in_the_interval():
    for low, high, excludes in ((0.1, 0.2, True), (-0.2, -0.1, True), (-0.1, 0.1, False), (0.0, 0.1, False), (None, None, False)):
        assert Difference(Spread(0.1, low, high, 3, 0.1)).excludes is excludes


def test_a_seed_that_is_missing_is_named_and_a_difference_takes_the_common_ones(made: SweepFolder):
    rows = by_family(compare([made.path]))
    assert rows["kv_only"].seeds == (0, 2)
    assert rows["kv_only"].missing == (Missing(1, "failed: out of memory"),)
    assert rows["hybrid"].missing == (Missing(2, "no trial of this seed"),)
    assert rows["kv_only"].differences["mat"].spread.seeds == 2
    against_hybrid = by_family(compare([made.path], "family=hybrid"))
    assert against_hybrid["kv_only"].differences["mat"].spread.seeds == 1, "seed 0 alone is in both"
    assert against_hybrid["hidden_only"].differences["mat"].spread.seeds == 2
    text = rendered(compare([made.path]), "text")
    assert "2 of 3" in text
    assert "seed 1 is missing (failed: out of memory)" in text
    assert "seed 2 is missing (no trial of this seed)" in text


def test_a_sweep_of_which_nothing_has_ended(tmp_path: Path):
    waiting = {seed: TrialState() for seed in range(3)}
    folder = make_sweep(tmp_path, [replace(cell, states=waiting) for cell in CELLS])
    table = compare([folder.path])
    assert [row.seeds for row in table.rows] == [()] * 3
    assert table.rows[1].missing == tuple(Missing(seed, "waiting") for seed in range(3))
    text = rendered(table, "text")
    assert "nothing measured yet" in text
    assert "0 of 3" in text
    for form in ("markdown", "latex", "csv"):
        assert "seed 2 is missing (waiting)" in rendered(table, form) or form == "csv"
    with pytest.raises(ConfigError, match=r"no complete trial has a held-out look"):
        early([folder.path])


def test_a_difference_of_one_common_seed_is_called_so():
    difference = replace(OTHER.differences["mat"], spread=replace(OTHER.differences["mat"].spread, seeds=1))
    one = replace(TABLE, rows=(BASE, replace(OTHER, differences={**OTHER.differences, "mat": difference}), EMPTY))
    assert "Differences of one common seed alone, so their intervals and * know nothing of other seeds: family=" in rendered(one, "markdown").replace("\\", "")
    assert "Differences of one common seed" not in rendered(TABLE, "text")


def test_notes_of_one_seed_do_not_contradict_each_other(tmp_path: Path):
    notes = rendered(compare([make_sweep(tmp_path, seeds=(0,)).path]), "markdown")
    assert "Value of one seed ± half width of its 95% interval, for other conversations alone" in notes and "for other seeds" not in notes
    assert "so their intervals and * know nothing of other seeds: all differences".replace("*", r"\*") in notes
    assert "One seed alone, so the interval knows nothing of what another seed would give: all cells" in notes
    mixed = rendered(compare([make_sweep(tmp_path, (HIDDEN_ONLY, replace(KV_ONLY, absent=[1])), (0, 1), "mixed").path]), "text")
    assert "of a cell with one seed, for other conversations alone." in " ".join(mixed.split()) and "all cells" not in mixed


def test_looks_that_are_not_there_cannot_be_made_up_for(tmp_path: Path):
    folder = make_sweep(tmp_path, [replace(HIDDEN_ONLY, looks=())], (0,))
    with pytest.raises(ConfigError, match=r"looks are taken during training only.*set train\.eval_every to less than the steps, in a sweep under another work"):
        early([folder.path])


def test_a_complete_trial_whose_numbers_are_gone_is_missing(tmp_path: Path):
    folder = make_sweep(tmp_path, (HIDDEN_ONLY, KV_ONLY), (0, 1))
    (folder.run_dir(folder.trials()[0]) / "eval_conversations.json").unlink()
    row = compare([folder.path]).rows[0]
    assert row.seeds == (1,)
    assert row.missing == (Missing(0, "complete, but eval_conversations.json is gone"),)


def test_damaged_counts_are_named(tmp_path: Path):
    folder = make_sweep(tmp_path, (HIDDEN_ONLY,), (0,))
    path = folder.run_dir(folder.trials()[0]) / "eval_conversations.json"
    write_json(path, read_json(path) | {"keys": ["a"]})
    with pytest.raises(KvshotError, match=re.escape(f"{path}: not what this version writes (ValueError: 1 keys, counts (24, 4))")):
        compare([folder.path])


def test_a_row_that_is_lost_is_made_again(tmp_path: Path):
    folder = make_sweep(tmp_path, (HIDDEN_ONLY, KV_ONLY), (0,))
    before = rendered(compare([folder.path]), "csv")
    (folder.path / results.JSONL).unlink()
    assert rendered(compare([folder.path]), "csv") == before


def test_unequal_training_is_marked(tmp_path: Path):
    longer = replace(KV_ONLY, train={"max_steps": 90})
    table = compare([make_sweep(tmp_path, (HIDDEN_ONLY, longer, HYBRID), (0, 1)).path])
    assert [row.unequal for row in table.rows] == [frozenset(), {"steps", "tokens", "supervised_rows"}, frozenset()]
    text = rendered(table, "text")
    assert "90 ≠" in text
    assert "≠ other steps than family=hidden_only depth=1 with the same seed" in text


def test_other_draft_steps_are_compared_as_far_as_both_go(tmp_path: Path):
    shorter = replace(KV_ONLY, train={"objective.steps": 2})
    table = compare([make_sweep(tmp_path, (HIDDEN_ONLY, shorter), (0, 1)).path])
    assert [row.steps for row in table.rows] == [4, 2]
    assert table.rows[1].common_steps == 2
    cut = [
        [StepCounts.unstack(counts_of(SweepFolder(tmp_path / "sweeps/demo"), f, seed).stack()[..., :2]) for seed in (0, 1)] for f in ("kv_only", "hidden_only")
    ]
    assert table.rows[1].differences["alpha_1"].spread == metrics.paired_over_seeds(*cut, metrics.alpha_at(1), 200, 0.95, 0)
    assert "differences over the first 2 draft steps" in rendered(table, "text")


def test_baselines(made: SweepFolder, tmp_path: Path):
    assert compare([made.path], "depth=2").baseline == 1
    assert compare([made.path], "family=hybrid depth=1 gate=bias:2").baseline == 2
    with pytest.raises(ConfigError, match=r"--baseline 'depth=1' means 2 cells: family=hidden_only depth=1; family=hybrid depth=1 gate=bias:2"):
        compare([made.path], "depth=1")
    with pytest.raises(ConfigError, match=r"--baseline: no axis and no varied option is named 'famly'.*family"):
        compare([made.path], "famly=hybrid")
    with pytest.raises(ConfigError, match=r"no cell has these values; cells: family=hidden_only depth=1; "):
        compare([made.path], "family=dflash")
    with pytest.raises(ConfigError, match=r"expected axis=value"):
        compare([made.path], "hybrid")
    named = make_sweep(tmp_path, CELLS, (0,), sweep={"baseline": {"family": "kv_only"}})
    assert compare([named.path]).baseline == 1


def test_sweeps_of_one_work_folder_share_their_cells(tmp_path: Path):
    first, second = make_sweep(tmp_path, (HIDDEN_ONLY, KV_ONLY), (0, 1)), make_sweep(tmp_path, (HIDDEN_ONLY, HYBRID), (0, 1, 2), name="more")
    table = compare([first.path, second.path])
    assert [row.labels["family"] for row in table.rows] == ["hidden_only", "kv_only", "hybrid"]
    assert table.rows[0].seeds == (0, 1, 2), "the cell that both have takes the seeds of both"
    assert table.rows[2].differences["mat"].spread.seeds == 3
    assert "more" in rendered(table, "text")
    assert table.digest != compare([first.path]).digest


def test_other_targets_and_other_held_out_rows_are_refused(tmp_path: Path):
    one = make_sweep(tmp_path / "a", (HIDDEN_ONLY,), (0,))
    fewer = make_sweep(tmp_path / "b", (HYBRID,), (0,), name="fewer", conversations=20)
    with pytest.raises(ConfigError, match=r"of sweep demo was measured on other held-out rows \(24 conversations, .* of sweep fewer \(20 conversations, "):
        compare([one.path, fewer.path])
    other = make_sweep(tmp_path / "c", (KV_ONLY,), (0,), name="other")
    rows = results.read(other)
    rows[0]["data"] |= {"target": "another", "target_digest": "f" * 64}
    results.write(other, rows)
    with pytest.raises(ConfigError, match=r"of sweep demo has target toy \(dddddddddddd\), .* of sweep other has target another \(ffffffffffff\)"):
        compare([one.path, other.path])
    with pytest.raises(ConfigError, match=r"is no folder of a sweep"):
        compare([tmp_path])


@pytest.mark.parametrize("form", GOLDEN)
def test_every_form_is_what_it_was(form: Form):
    assert rendered(TABLE, form) + "\n" == (Path(__file__).parent / "golden" / GOLDEN[form]).read_text(encoding="utf-8")


def test_csv_has_every_number_as_it_is(made: SweepFolder):
    table = compare([made.path])
    lines = list(csv.DictReader(io.StringIO(rendered(table, "csv"))))
    for row, line in zip(table.rows, lines, strict=True):
        assert line["cell"] == row.name
        assert [float(line[f"mat{end}"]) for end in ("", "_low", "_high", "_sd")] == [
            row.values["mat"].value,
            row.values["mat"].low,
            row.values["mat"].high,
            row.values["mat"].sd,
        ]
        assert line["steps"] == "60"
        assert line["difference_mat"] == ("" if row is table.rows[0] else str(row.differences["mat"].spread.value))
    assert lines[1]["seeds_missing"] == "1: failed: out of memory"


def test_no_line_of_text_is_wider_than_a_terminal():
    long = {"family": "hybrid_block_of_a_long_name_indeed", "warm_start": "cell:family=hidden_only depth=1 conversations=20000", "third": "x" * 30}
    row = replace(OTHER, labels=long, name=" ".join(f"{a}={v}" for a, v in long.items()), steps=16, values={f"alpha_{k}": spread(0.1, 0.01) for k in range(16)})
    base = replace(row, labels=dict.fromkeys(long, "b"), name="b", differences={}, control="")
    text = rendered(replace(TABLE, axes=tuple(long), rows=(base, row)), "text")
    assert max(map(len, text.splitlines())) <= 160
    assert all(f"α{s}" in text for s in ("₀", "₇", "₁₅"))


def test_latex_escapes_what_means_something_to_it():
    hostile = {"family": r"[1,3]\x{y}", "x": "*50%_a&b#c$d~e^f<g>"}
    rows = (replace(BASE, labels=hostile, name="n"), replace(BASE, labels={"family": "a", "x": "b"}, name="m"))
    line = next(line for line in rendered(replace(TABLE, rows=rows), "latex").splitlines() if "50" in line)
    assert line.startswith(r"{[}1,3]\textbackslash{}x\{y\} & {*}50\%\_a\&b\#c\$d\textasciitilde{}e\textasciicircum{}f$<$g$>$ & ")


def test_latex_is_well_formed(made: SweepFolder):
    text = rendered(compare([made.path]), "latex")
    body = [line for line in text.splitlines() if not line.startswith("%")]
    opened: list[str] = []
    for kind, name in re.findall(r"\\(begin|end)\{(\w+)\}", "\n".join(body)):
        if kind == "begin":
            opened.append(name)
        else:
            assert opened.pop() == name
    assert not opened
    plain = re.sub(r"\\[\\{}%&_$#]", "", "\n".join(body))
    assert plain.count("{") == plain.count("}")
    assert plain.count("$") % 2 == 0
    assert not re.search(r"[^\x00-\x7f]", plain), "no character that a plain LaTeX would not know"
    columns = 0
    for line in body:
        if found := re.match(r"\\begin\{tabular\}\{(\w+)\}", line):
            columns = len(found[1])
        elif line.endswith(r" \\"):
            assert len(re.findall(r"(?<!\\)&", line)) == columns - 1


def test_markdown_and_latex_begin_with_where_they_come_from(made: SweepFolder):
    table = compare([made.path], "depth=2")
    for form, begin, end in (("markdown", "<!-- ", " -->"), ("latex", "% ", "")):
        first = rendered(table, form).splitlines()[0]
        assert first == f"{begin}kvshot sweep table {made.path} --baseline 'depth=2' --format {form}; kvshot-ds at commit abc123; trials {table.digest}{end}"


def test_early_ranks(tmp_path: Path):
    """At step 20 the order of the cells is the last one's reversed, at 40 it is that order."""
    cells = [
        Cell(HIDDEN_ONLY.drafter, 0.3, 0.9, looks=(1.6, 1.0, 1.0)), Cell(KV_ONLY.drafter, 0.5, 0.9, looks=(0.7, 0.9, 1.0)),
        Cell(HYBRID.drafter, 0.7, 0.9, looks=(0.3, 0.9, 1.0)),
        Cell({"family": "hidden_only", "depth": 2}, states={seed: TrialState("halved", reason="behind") for seed in (0, 1)}),
    ]  # fmt: skip
    folder = make_sweep(tmp_path, cells, (0, 1))
    found = early([folder.path])
    assert [(look.step, look.cells, look.seeds, look.rung) for look in found.looks] == [(20, 3, (0, 1), True), (40, 3, (0, 1), False)]
    assert [look.tau for look in found.looks] == [pytest.approx(-1), pytest.approx(1)]
    assert {look.best for look in found.looks} == {"family=hybrid depth=1 gate=bias:2"}
    assert [(look.rank, look.kept, look.survives) for look in found.looks] == [(3, 1, False), (1, 1, True)]
    assert found.left_out == ("demo: family=hidden_only depth=2 (no complete trial with looks)",)
    text = rendered(found, "text")
    assert re.search(r"demo +20 +yes +3 +2 +-1\.00 .* 3 +1 +NO", text)
    assert "Left out: demo: family=hidden_only depth=2" in text


def test_early_takes_the_seeds_that_all_cells_have(tmp_path: Path):
    folder = make_sweep(tmp_path, (HIDDEN_ONLY, replace(KV_ONLY, states={1: FAILED})), (0, 1))
    found = early([folder.path])
    assert {look.seeds for look in found.looks} == {(0,)}
    assert found.left_out == ("demo: seed 1 (not in every cell)",)
    folder.write_progress(
        Progress({name: FAILED if name.startswith("hidden") and i == 0 else state for i, (name, state) in enumerate(folder.progress().trials.items())})
    )
    with pytest.raises(ConfigError, match=r"no seed that all cells have"):
        early([folder.path])


def test_early_by_hand():
    look = Look("demo", 20, 4, (0, 1, 2), None, "a=b", 2, 2, True)
    found = Early("kvshot sweep table --early W", "00ff", {"demo": "mat"}, {"demo": 2.0}, (look, replace(look, step=40, tau=0.5, rank=3, rung=False)), ())
    assert rendered(found, "csv").splitlines() == [
        "sweep,metric,reduction,step,rung,cells,seeds,kendall_tau,best_at_end,rank_now,kept,survives",
        "demo,mat,2.0,20,True,4,0 1 2,,a=b,2,2,True",
        "demo,mat,2.0,40,False,4,0 1 2,0.5,a=b,3,2,False",
    ]
    assert rendered(found, "markdown").splitlines()[0] == "<!-- kvshot sweep table --early W --format markdown; kvshot-ds at commit abc123; trials 00ff -->"
    assert r"$\tau$" in rendered(found, "latex")
