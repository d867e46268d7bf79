"""The benchmark of a sweep's overhead counts what is neither steps nor measuring; the commands that it times are played."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks import sweep
from kvshot_ds.config import load_recipe
from kvshot_ds.files import write_json
from kvshot_ds.sweep.folder import Progress, SweepFolder, Trial, TrialState
from kvshot_ds.sweep.grid import expand


def played(*command: str) -> float:
    """Trainings of 2 s of steps: a process takes 12 s, the first trial of each slot 8 s and every further one 5 s, of which 1 s is measuring."""
    recipe = load_recipe(Path(command[-1]))
    if command[0] == "train":
        write_json(recipe.run_dir / "train.json", {"seconds": 2.0})
        return 12.0
    assert command[:2] == ("sweep", "run")
    folder, trials = SweepFolder.of(recipe), expand(recipe).trials
    assert [trial.seed for trial in trials] == list(recipe.sweep.seeds)
    folder.write_trials(trials)

    def state(number: int, trial: Trial) -> TrialState:
        write_json(folder.run_dir(trial) / "train.json", {"seconds": 2.0})
        seconds = 8.0 if number < recipe.sweep.parallel else 5.0
        return TrialState("complete", 1, 100.0 + number, 100.0 + number + seconds, {"start": seconds - 3.5, "train": 2.0, "eval": 1.0, "save": 0.5})

    folder.write_progress(Progress({trial.name: state(number, trial) for number, trial in enumerate(trials)}))
    return 30.0 / recipe.sweep.parallel


def test_it_compares_trials_with_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "run", played)
    done = CliRunner().invoke(sweep.main, ["--trials", "4", "--width", "32", "--length", "40"])
    assert done.exit_code == 0, (done.output, done.exception)
    lines = done.output.splitlines()
    assert [line.split()[-5:] for line in lines[1:6]] == [
        ["4", "10.00", "10.00", "2.00", "48.0"],
        ["1", "5.00", "5.00", "2.00", "30.0"],
        ["others", "3", "2.00", "2.00", "2.00"],
        ["2", "5.00", "5.00", "2.00", "15.0"],
        ["others", "2", "2.00", "2.00", "2.00"],
    ]
    assert lines[6:] == [
        "of a trial, one at a time, not the first: eval 1.00 s, save 0.50 s, start 1.50 s, train 2.00 s",
        "overhead of a process / of a trial (not the first): 5.00",
        "wall of the processes / of the sweep, one at a time: 1.60; two at a time: 3.20",
        "mean overhead of a trial, the first one included: 2.75 s; goal at most 5 s: met",
    ]


def test_a_command_that_fails_is_shown() -> None:
    with pytest.raises(RuntimeError, match=r"kvshot train nowhere\.yaml ended with 2:\n.*nowhere"):
        sweep.run("train", "nowhere.yaml")
