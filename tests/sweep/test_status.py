"""`kvshot sweep status`: every state that files can tell of, followed until the driver has ended; no torch."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvshot_ds import runs
from kvshot_ds.cli import cli
from kvshot_ds.config import dump_recipe
from kvshot_ds.errors import ConfigError
from kvshot_ds.files import write_json
from kvshot_ds.sweep import status
from kvshot_ds.sweep.folder import Driver, Progress, SweepFolder, Trial, TrialState
from kvshot_ds.training.status import Status, began

START = time.time() - 1000


@pytest.fixture
def sweep(tmp_path: Path) -> SweepFolder:
    """Two cells with two seeds each and a control; nothing is done yet."""
    trials = [Trial(f"kv_only-{d}-{s}", {"family": "kv_only", "depth": str(d)}, s, {}) for d in (1, 2) for s in (0, 1)]
    folder = SweepFolder(tmp_path / "sweeps" / "depths")
    folder.path.mkdir(parents=True)
    folder.write_trials((*trials, Trial("kv_only-2-c", {"family": "kv_only", "depth": "2"}, 0, {}, control="kv_only-2-0 from scratch")))
    return folder


def here() -> Driver:
    return Driver(socket.gethostname(), os.getpid(), began(os.getpid()) or 0.0, time.time())


def elsewhere(quiet: float) -> Driver:
    return Driver("elsewhere", 1, START, time.time() - quiet)


def gone() -> Driver:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    return Driver(socket.gethostname(), ended.pid, START, time.time())


def trains(sweep: SweepFolder, name: str, step: int, **changed: object) -> None:
    """The run folder of a trial that is at `step` of 40, whose process was started long ago."""
    plain = Status("running", step, 40, 1, START, time.time(), "elsewhere", 1, START, scalars={"train/tokens_per_s": 1234.5, "train/mat": 1.1})
    folder = sweep.path.parent.parent / "trials" / name
    folder.mkdir(parents=True)
    write_json(folder / "status.json", asdict(replace(plain, **changed)))  # type: ignore[arg-type]


def trained(sweep: SweepFolder, name: str, **files: object) -> None:
    folder = sweep.path.parent.parent / "trials" / name
    folder.mkdir(parents=True)
    for file, content in {"train": {"steps": 40}, **files}.items():
        write_json(folder / f"{file}.json", content)  # type: ignore[arg-type]


def midway(sweep: SweepFolder, driver: Driver | None) -> status.SweepPage:
    """One trial complete, one in training, one that failed, one that has just been started and the control, which waits."""
    trained(sweep, "kv_only-1-0", eval={"mat": {"value": 1.5, "low": 1.4, "high": 1.6}}, heldout={"40": {"heldout/mat": 1.45}})
    trains(sweep, "kv_only-1-1", 20)
    sweep.write_progress(
        Progress(
            {
                "kv_only-1-0": TrialState("complete", 1, START, START + 400, {"train": 380.0}),
                "kv_only-1-1": TrialState("running", 2, time.time() - 200),
                "kv_only-2-0": TrialState("failed", 2, START, START + 10, reason="the loss is not finite", log="first\nlast [words]"),
                "kv_only-2-1": TrialState("running", 1, time.time()),
            },
            driver,
        )
    )
    return status.read(sweep)


def test_each_trial_is_told_from_its_files(sweep):
    page = midway(sweep, here())
    assert page.driver == "running" and page.counts == {"starting": 1, "running": 1, "failed": 1, "waiting": 1, "complete": 1}
    done, running, failed, starting, waiting = page.trials
    assert (done.state, done.step, done.steps, done.mat, done.measured, done.seconds, done.rate) == ("complete", 40, 40, 1.5, "eval", 400, None)
    assert (running.state, running.step, running.mat, running.measured, running.rate, running.tries) == ("running", 20, 1.1, "train", 1234.5, 2)
    assert (failed.state, failed.reason, failed.log, failed.step) == ("failed", "the loss is not finite", "first\nlast [words]", None)
    assert (starting.state, starting.tries, waiting.state, waiting.tries, waiting.control) == ("starting", 1, "waiting", 0, "kv_only-2-0 from scratch")


def test_the_newest_look_stands_in_for_an_evaluation_that_is_not_there_yet(sweep):
    trained(sweep, "kv_only-1-0", heldout={"9": {"heldout/mat": 1.7}, "40": {"heldout/mat": 1.45}})
    sweep.write_progress(Progress({"kv_only-1-0": TrialState("running", 1, START)}, here()))
    line = status.read(sweep).trials[0]
    assert (line.state, line.mat, line.measured) == ("measuring", 1.45, "held-out")


def test_what_an_earlier_start_left_is_not_taken_for_training(sweep):
    """The driver has started the trial again and its processes have not written yet."""
    trains(sweep, "kv_only-1-0", 20, updated=START)
    sweep.write_progress(Progress({"kv_only-1-0": TrialState("running", 2, START + 500)}, here()))
    assert status.read(sweep).trials[0].state == "starting"


def test_time_left_follows_from_trials_of_the_cell_and_from_the_pace_of_the_running_ones(sweep):
    """Two at once. Running: 20 of 40 steps in 200 s, 200 s to go. Starting and waiting, both of a cell of which nothing is known: (400 + 400) / 2 each."""
    page = midway(sweep, here())
    assert page.left == pytest.approx((200 + 400 + 400) / 2, rel=0.05)
    lines = page.trials
    assert status.time_left(lines[:2]) == pytest.approx(200, rel=0.05)
    assert status.time_left((lines[4],)) is None, "nothing has run"
    assert status.time_left((lines[0], lines[2])) is None, "nothing is left"
    assert status.time_left((replace(lines[0], reused=True), lines[4])) is None, "what was found done tells no pace"
    other = replace(lines[4], cell=lines[0].cell)
    assert status.time_left((lines[0], replace(lines[0], cell="family=hybrid", seconds=4000.0), other)) == 400, "of its own cell"


@pytest.mark.parametrize(("tries", "resumed", "left"), [(1, (20,), 100), (2, (20,), 100 / 3), (1, (), 100 / 3), (2, (10, 20), 50), (3, (20,), 100 / 3)])
def test_a_trial_that_was_continued_is_judged_by_the_steps_since_the_driver_first_began_it(sweep, tries, resumed, left):
    trains(sweep, "kv_only-1-0", 30, resumed_from=resumed)
    sweep.write_progress(Progress({"kv_only-1-0": TrialState("running", tries, time.time() - 100)}, here()))
    assert status.read(sweep).trials[0].left == pytest.approx(left, rel=0.05)


@pytest.mark.parametrize(
    ("driver", "state", "trial"),
    [
        (here, "running", "running"),
        (gone, "gone", "interrupted"),
        (lambda: replace(here(), began=START - 5000), "gone", "interrupted"),  # another process under its number
        (lambda: elsewhere(10), "running", "running"),
        (lambda: elsewhere(1000), "silent", "running"),
        (lambda: None, "gone", "interrupted"),
    ],
)
def test_the_driver_is_told_from_its_process_or_its_last_sign(sweep, driver, state, trial):
    page = midway(sweep, driver())
    assert (page.driver, page.trials[1].state) == (state, trial)
    assert (page.left is None) == (state != "running")
    assert status.over(page) == (state == "gone")


@pytest.mark.parametrize("driver", [gone, lambda: None, lambda: elsewhere(1000)])
def test_a_driver_that_has_left_nothing_to_do_has_ended(sweep, driver):
    states = ("complete", "complete", "failed", "halved", "complete")
    done = {trial.name: TrialState(state, 1, START, START + 1) for trial, state in zip(sweep.trials(), states, strict=True)}
    sweep.write_progress(Progress(done, driver()))
    assert status.read(sweep).driver == "ended"
    sweep.write_progress(Progress(done, here()))
    assert status.read(sweep).driver == "running", "it is about to"


def test_a_sweep_that_has_not_begun_and_a_folder_that_is_none(sweep, tmp_path):
    page = status.read(sweep)
    assert page.driver == "not started" and page.counts == {"waiting": 5} and page.left is None
    with pytest.raises(ConfigError, match="no folder of a sweep"):
        status.show(tmp_path, follow=False, as_json=False)


def test_the_table_says_it_all_even_where_there_is_no_terminal(sweep):
    midway(sweep, elsewhere(10))
    done = CliRunner().invoke(cli, ["sweep", "status", str(sweep.path)])
    assert done.exit_code == 0, done.output
    lines = [line.rstrip() for line in done.output.splitlines()]
    assert lines[0].startswith(f"{sweep.path}: 5 trials: 1 starting, 1 running, 1 failed, 1 waiting, 1 complete; about 0:0")
    assert lines[1] == "driver: running, process 1 on elsewhere"
    assert lines[2].split() == ["cell", "seed", "state", "step", "MAT", "tries", "time", "tok/s"]
    assert lines[3].split() == ["family=kv_only", "depth=1", "0", "complete", "40/40", "1.500", "eval", "1", "0:06:40", "–"]
    assert lines[4].split()[:7] == ["family=kv_only", "depth=1", "1", "running", "20/40", "1.100", "train"] and lines[4].endswith("1,234")
    assert lines[8:] == ["family=kv_only depth=2 seed 0: failed: the loss is not finite", "    first", "    last [words]"]


def test_as_json_it_is_one_object(sweep):
    page = midway(sweep, elsewhere(10))
    done = CliRunner().invoke(cli, ["sweep", "status", str(sweep.path), "--json"])
    found = json.loads(done.stdout)
    assert found["driver"] == "running" and found["counts"] == page.counts
    assert [line["name"] for line in found["trials"]] == [line.name for line in page.trials] and found["trials"][0]["mat"] == 1.5


def step_by_step(monkeypatch: pytest.MonkeyPatch, *events: object) -> None:
    """In place of the pauses, one of `events` each: what the driver does meanwhile."""
    left = iter(events)
    monkeypatch.setattr(status, "_pause", lambda: next(left)())  # type: ignore[operator]


def test_followed_without_a_terminal_it_prints_what_changes_until_the_driver_has_ended(sweep, monkeypatch, capsys):
    names = [trial.name for trial in sweep.trials()]

    def now(driver: Driver, *states: str) -> None:
        found = {name: TrialState(state, 1, START, START + 5) for name, state in zip(names, states, strict=True)}  # type: ignore[arg-type]
        sweep.write_progress(Progress(found, driver))

    waiting = ("waiting",) * 4
    step_by_step(
        monkeypatch,
        lambda: now(here(), "running", *waiting),
        lambda: None,  # nothing has happened
        lambda: trained(sweep, names[0], eval={"mat": {"value": 1.5}}),
        lambda: now(here(), "complete", *waiting),
        lambda: now(gone(), "complete", "running", *waiting[1:]),
    )
    status.show(sweep.path, follow=True, as_json=False)
    said = capsys.readouterr().out.splitlines()
    cell = "family=kv_only depth=1"
    assert "not started" in said[1]
    assert [line for line in said[8:] if not line.startswith("driver")] == [
        f"{cell} seed 0: starting",
        f"{cell} seed 0: measuring, step 40/40, MAT 1.500 eval",
        f"{cell} seed 0: complete, step 40/40, MAT 1.500 eval",
        f"{cell} seed 1: interrupted",
    ]
    drivers = [line for line in said[8:] if line.startswith("driver")]
    assert len(drivers) == 2 and "running" in drivers[0] and "the same kvshot sweep run goes on" in drivers[1]


def test_followed_as_json_it_prints_a_line_for_each_change(sweep, monkeypatch, capsys):
    midway(sweep, here())
    step_by_step(monkeypatch, lambda: None, lambda: midway_over(sweep))
    status.show(sweep.path, follow=True, as_json=True)
    assert [json.loads(line)["driver"] for line in capsys.readouterr().out.splitlines()] == ["running", "gone"]


def midway_over(sweep: SweepFolder) -> None:
    sweep.write_progress(replace(sweep.progress(), driver=gone()))


def test_on_a_terminal_it_is_shown_in_place(sweep, monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    midway(sweep, here())
    step_by_step(monkeypatch, lambda: midway_over(sweep))
    status.show(sweep.path, follow=True, as_json=False)
    said = capsys.readouterr().out
    assert "\x1b[" in said and said.rindex("gone") > said.index("running")
    assert "interrupted" in said[said.rindex("driver") :]


def test_it_needs_no_torch(sweep):
    midway(sweep, here())
    code = f"import sys; from kvshot_ds.cli import cli; cli(['sweep', 'status', {str(sweep.path)!r}], standalone_mode=False); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines()[-1] == "False"


def test_runs_list_names_trials_as_such(sweep, recipe, tmp_path):
    """WORK/trials beside WORK/runs; the sweep's own folder, which has a recipe too, is no run."""
    r = recipe("run")
    for folder, name in ((r.run_dir, "run"), (tmp_path / "trials" / "hidden_only-1-0123456789ab", "hidden_only-1-0123456789ab")):
        folder.mkdir(parents=True)
        (folder / "recipe.yaml").write_text(dump_recipe(r.model_copy(update={"name": name})))
        write_json(folder / "train.json", {"steps": 5})
    (sweep.path / "recipe.yaml").write_text(dump_recipe(r))
    found = {line.name: line.state for line in runs.list_runs(tmp_path)}
    assert found == {"run": "complete", "trials/hidden_only-1-0123456789ab": "complete"}
    assert {line.name for line in runs.list_runs(tmp_path / "trials")} == {"hidden_only-1-0123456789ab"}
