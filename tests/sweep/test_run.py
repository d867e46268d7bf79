"""`kvshot sweep run`: real sweeps of tiny drafters, uninterrupted, killed, stopped and with trials that fail; and what the driver makes of errors."""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from ray.exceptions import OutOfMemoryError, RayActorError
from tqdm import tqdm

from kvshot_ds.config import Recipe, dump_recipe
from kvshot_ds.errors import ConfigError, KvshotError, Preempted
from kvshot_ds.files import read_json, sole_writer
from kvshot_ds.sweep import results, run
from kvshot_ds.sweep.claim import claim
from kvshot_ds.sweep.failure import judge, tail
from kvshot_ds.sweep.folder import SweepFolder
from kvshot_ds.sweep.grid import expand, trial_recipe
from kvshot_ds.sweep.halving import Halving
from kvshot_ds.training.verdict import AGAIN
from tests.training.runs import assert_same, rank_environment, weights

pytestmark = pytest.mark.timeout(1200)

PATIENCE = 400  # seconds that anything may take on a loaded machine
STEPS = 40  # so many that a trial outlasts the time from a look at it to a signal that reaches it
HID, KV = {"family": "hidden_only"}, {"family": "kv_only", "depth": 2}

Make = Callable[..., Recipe]


@pytest.fixture(scope="module")
def make(tiny_features: Path, tiny_target: Path) -> Make:
    """make(work, name, drafters, sweep options, ray options, train options) -> Recipe of a sweep whose one axis is `drafter`."""

    def recipe(work: Path, name: str, drafters: dict[str, Any], sweep: dict[str, Any], ray: dict[str, Any] | None = None, **train: Any) -> Recipe:
        small = {"draft_vocab_size": 100, "objective": {"steps": 3}, "conversations_per_step": 4, "checkpoint_every": 1, "data_workers": 0}
        options = {"log_every": 4, "epochs": 4, "max_steps": STEPS, **small, **train}
        data = {"shards": tiny_features, "target": {"path": tiny_target, "dtype": "fp32", "device": "cpu"}, "eval": {"bootstrap": 100}}
        axes = [{"drafter": drafters}]
        return Recipe.model_validate({"name": name, "work": work, **data, "train": options, "ray": ray or {}, "sweep": {"axes": axes, **sweep}})

    return recipe


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, make: Make) -> Recipe:
    """Two drafters, two seeds: a sweep that nobody disturbs."""
    recipe = make(tmp_path_factory.mktemp("sweep"), "base", {"hid": HID, "kv": KV}, {"seeds": [0, 1]})
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_ADDRESS", raising=False)
        assert run.run(recipe) == 0
    return recipe


def trained(recipe: Recipe) -> list[Recipe]:
    return [trial_recipe(recipe, trial) for trial in expand(recipe).trials]


def times(recipe: Recipe) -> dict[str, int]:
    """When each trial's drafter was written."""
    return {r.name: (r.run_dir / "drafter" / "model.safetensors").stat().st_mtime_ns for r in trained(recipe)}


def test_every_trial_is_trained_and_measured_and_has_a_row(base: Recipe) -> None:
    folder = SweepFolder.of(base)
    states, rows = folder.progress().trials, results.read(folder)
    assert [row["name"] for row in rows] == [trial.name for trial in folder.trials()] and len(rows) == 4
    assert {state.state for state in states.values()} == {"complete"} and not any(state.reused for state in states.values())
    for r in trained(base):
        assert set(states[r.name].seconds) == {"start", "train", "save", "eval"}
        assert f"{r.name}: {STEPS} steps" in (r.run_dir / "log.txt").read_text(), "what its ranks said"
        assert (r.run_dir / "eval_conversations.json").is_file() and not (r.run_dir / "checkpoints").exists()
        assert read_json(r.run_dir / "provenance.json")["command"][0] == "kvshot"


def test_a_second_start_trains_nothing(base: Recipe, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    before = times(base)
    monkeypatch.setattr(run, "session", lambda *_, **__: pytest.fail("Ray was started for nothing"))
    assert run.run(base) == 0
    assert times(base) == before and not any(state.reused for state in SweepFolder.of(base).progress().trials.values()), "this sweep has trained them"
    assert "4 complete, 4 of which reused, 0 failed, 0 halved" in capsys.readouterr().out


def test_a_trial_whose_files_are_damaged_when_it_ends_fails_alone(base: Recipe, tmp_path: Path) -> None:
    shutil.copytree(base.work, tmp_path / "work")
    recipe = base.model_copy(update={"work": tmp_path / "work"})
    grid = expand(recipe)
    driver = run._Driver(recipe, grid, SweepFolder.of(recipe))
    assert not driver.open()
    first, last = grid.trials[0].name, grid.trials[-1].name
    (driver.recipes[first].run_dir / "eval.json").write_text('{"alpha": []}')
    for name in (first, last):
        driver._over(name, "complete")
    rows = {row["name"]: row for row in results.read(SweepFolder.of(recipe))}
    assert rows[first]["state"] == "failed" and "eval.json: not what this version writes" in rows[first]["reason"] and rows[first]["heldout"] is None
    assert rows[last]["state"] == "complete" and rows[last]["heldout"] and driver.close() == 1


def test_a_fresh_process_trains_the_same_weights_as_one_that_has_trained_others(base: Recipe, tmp_path: Path) -> None:
    last = max(trained(base), key=lambda r: SweepFolder.of(base).progress().trials[r.name].started or 0)
    alone = last.model_copy(update={"runs": tmp_path / "runs"})
    command = [sys.executable, "-m", "kvshot_ds.cli", "train", str(last.run_dir / "recipe.yaml"), f"runs={tmp_path / 'runs'}"]
    subprocess.run(command, env=rank_environment(), check=True, capture_output=True, timeout=PATIENCE)
    assert_same(weights(last), weights(alone))


def others_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody has all of the cluster until the driver says that it waits."""
    import ray

    plain, say, held = run.session, run._Driver._why_waiting, []

    @contextmanager
    def crowded(*args: Any, **options: Any) -> Iterator[Any]:
        with plain(*args, **options) as stop:

            class Other:
                def here(self) -> None:
                    return

            held.append(ray.remote(num_cpus=ray.cluster_resources()["CPU"])(Other).remote())
            ray.get(held[0].here.remote())
            yield stop

    def said(driver: Any, ready: list[str]) -> str:
        text = say(driver, ready)
        if held:
            ray.kill(held.pop())
        return text

    monkeypatch.setattr(run, "session", crowded)
    monkeypatch.setattr(run._Driver, "_why_waiting", said)
    monkeypatch.setattr(run, "NOTICE", 1)


def test_another_sweep_waits_for_room_and_trains_what_is_new_to_it_a_warm_start_after_its_source(
    base: Recipe, make: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    others_first(monkeypatch)
    warm = {**HID, "train.init.warm_start": "cell:drafter=hid"}
    other = make(base.work, "other", {"warm": warm, "hid": HID, "long": {**HID, "depth": 2}}, {"seeds": [1, 5], "exclude": [{"drafter": "long"}]})
    before = times(base)
    assert run.run(other) == 0
    states = {(trial.cell, trial.seed): SweepFolder.of(other).progress().trials[trial.name] for trial in SweepFolder.of(other).trials()}
    assert {key for key, state in states.items() if state.reused} == {("drafter=hid", 1)} and times(base) == before
    source, taker = states["drafter=hid", 5], states["drafter=warm", 5]
    assert (source.ended or 0) <= (taker.started or 0), "the source first"
    assert re.search(r"waiting for room: a trial wants 1 rank\(s\) of 1 CPU; the cluster has \d+ CPU \(0 free\)", capsys.readouterr().out)


def test_the_folder_of_another_sweep_is_refused_and_so_is_a_second_driver(base: Recipe, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"holds another sweep \(.*sweep\.axes: there .*'kv'.*now .*'deep'"):
        run.run(make(base.work, "base", {"hid": HID, "deep": {**HID, "depth": 2}}, {"seeds": [0]}))
    with pytest.raises(ConfigError, match=r"train\.draft_vocab_size: there 100, now 90"):
        run.run(make(base.work, "base", {"hid": HID, "kv": KV}, {"seeds": [0, 1]}, draft_vocab_size=90))
    copy = SweepFolder(shutil.copytree(SweepFolder.of(base).path, tmp_path / "sweeps" / "base"))
    more = make(base.work, "base", {"hid": HID, "kv": KV}, {"seeds": [1, 2], "retries": 3}, {"ranks": 2}, log_every=7)
    claim(copy, more, expand(more).trials)
    assert {trial.seed for trial in copy.trials()} == {1, 2}
    monkeypatch.setattr(run, "_ENDING", 0)
    with sole_writer(SweepFolder.of(base).path, "sweep"), pytest.raises(ConfigError, match="another sweep is writing there"):
        run.run(base)


def test_a_trial_that_never_fits_is_refused_at_once(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ConfigError, match=r"ray\.cpus_per_rank=1000 need 2000 CPUs, this machine has"):
        run.run(make(tmp_path, "large", {"hid": HID}, {}, {"ranks": 2, "cpus_per_rank": 1000}))


def test_the_bar_shows_percentages_and_whole_trials() -> None:
    shown = tqdm.format_meter(0.1 + 0.2, 4, 5.0, prefix="s", bar_format=run._BAR, postfix="0 of 4 trials ended")
    assert shown.startswith("s:   8%|") and "0 of 4 trials ended" in shown and "0.3" not in shown


def test_a_cluster_that_is_not_there_is_said_at_once(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # nobody listens
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{unused.getsockname()[1]}")
        with pytest.raises(ConfigError, match=r"RAY_ADDRESS=127\.0\.0\.1:\d+: nobody answers there; start Ray"):
            run.run(make(tmp_path, "nowhere", {"hid": HID}, {}))
    monkeypatch.setenv("RAY_ADDRESS", "nonsense")
    with pytest.raises(ConfigError, match=r"RAY_ADDRESS=nonsense: .*expected HOST:PORT"):
        run.run(make(tmp_path, "nowhere", {"hid": HID}, {}))


def test_a_full_disk_is_called_so(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "state.json")

    monkeypatch.setattr(run, "claim", full)
    with pytest.raises(KvshotError, match=r"sweeps/full: no space left .*make room there and run the command again"):
        run.run(make(tmp_path, "full", {"hid": HID}, {}))


def test_another_target_is_refused_before_any_trial_could_fail_of_it(make: Make, tiny_target: Path, tmp_path: Path) -> None:
    recipe = make(tmp_path, "target", {"hid": HID}, {})
    other = shutil.copytree(tiny_target, tmp_path / "other")
    (other / "config.json").write_text((other / "config.json").read_text() + " ")
    for path, said in ((other, "captured from another target"), (tmp_path / "nowhere", "nowhere")):
        with pytest.raises(ConfigError, match=said):
            run.run(recipe.model_copy(update={"target": recipe.target.model_copy(update={"path": path})}))
    assert not SweepFolder.of(recipe).path.exists()


def workers(of: int) -> list[psutil.Process]:
    """Ray's workers that train, below the process `of`."""
    return [p for p in psutil.Process(of).children(recursive=True) if "Trainer.run" in " ".join(p.cmdline())]


def until(condition: Callable[[], Any], process: subprocess.Popen[str] | None = None) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline and (process is None or process.poll() is None), process and process.communicate()
        time.sleep(0.02)


def states_of(recipe: Recipe) -> dict[str, str]:
    return {name: state.state for name, state in SweepFolder.of(recipe).progress().trials.items()}


def mid_trial(recipe: Recipe, complete: int) -> bool:
    """Some trials are complete, and the one that runs has a checkpoint."""
    found = states_of(recipe)
    running = [r for r in trained(recipe) if found.get(r.name) == "running"]
    return list(found.values()).count("complete") >= complete and any((r.run_dir / "checkpoints" / "latest").is_file() for r in running)


def cut_short(recipe: Recipe) -> set[str]:
    """Trials with a checkpoint and no end, once no rank trains them any more."""
    found = set()
    for r in trained(recipe):
        if (r.run_dir / "checkpoints" / "latest").is_file():
            with sole_writer(r.run_dir, "training", PATIENCE):
                found |= set() if (r.run_dir / "train.json").is_file() else {r.name}
    return found


def start(recipe: Recipe, folder: Path) -> subprocess.Popen[str]:
    (folder / "sweep.yaml").write_text(dump_recipe(recipe))
    env = {k: v for k, v in rank_environment().items() if k != "RAY_ADDRESS"} | {"RAY_USAGE_STATS_ENABLED": "0"}
    command = [sys.executable, "-m", "kvshot_ds.cli", "sweep", "run", "sweep.yaml"]
    return subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_a_killed_driver_goes_on_where_it_was_and_a_stopped_one_too(base: Recipe, make: Make, tmp_path: Path) -> None:
    recipe = make(tmp_path / "work", "base", {"hid": HID, "kv": KV}, {"seeds": [0, 1], "parallel": 1})
    killed = start(recipe, tmp_path)
    until(lambda: mid_trial(recipe, 1), killed)
    killed.kill()
    killed.communicate(timeout=PATIENCE)
    first = [name for name, state in states_of(recipe).items() if state == "complete"]
    cut = cut_short(recipe)
    written = {r.name: (r.run_dir / "train.json").stat().st_mtime_ns for r in trained(recipe) if r.name in first}

    stopped = start(recipe, tmp_path)
    until(lambda: mid_trial(recipe, 2), stopped)
    stopped.send_signal(signal.SIGTERM)
    said = stopped.communicate(timeout=PATIENCE)[0]
    assert stopped.returncode == Preempted.STATUS and "base: stopped (SIGTERM), " in said, said
    assert "running" not in states_of(recipe).values() and "waiting" in states_of(recipe).values()
    cut |= cut_short(recipe)

    again = start(recipe, tmp_path)
    said = again.communicate(timeout=PATIENCE)[0]
    assert again.returncode == 0 and "4 complete" in said, said
    for mine, its in zip(trained(recipe), trained(base), strict=True):
        assert mine.name == its.name
        assert_same(weights(mine), weights(its))
    assert all((r.run_dir / "train.json").stat().st_mtime_ns == written[r.name] for r in trained(recipe) if r.name in first), "not trained again"
    assert cut == {r.name for r in trained(recipe) if read_json(r.run_dir / "train.json")["resumed_from"]} != set(), "those that were cut short continued"


def test_trials_that_fail_die_or_fall_behind_leave_the_others_alone(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(run, "_LOOK", 0.1)
    drafters = {
        "bad": {"family": "hybrid", "gate_floor": 0.5, "gate_floor_steps": 1000},
        "heir": {**HID, "train.init.warm_start": "cell:drafter=bad"},
        "good": HID,
        "late": {**KV, "train.max_steps": 0, "train.epochs": 300},
    }
    recipe = make(
        tmp_path, "mixed", drafters, {"match": "epochs", "controls": "off", "halving": {"enabled": True}}, {"ranks": 2, "cpus_per_rank": 0.5}, eval_every=4
    )
    trials = {trial.labels["drafter"]: trial for trial in expand(recipe).trials}

    def behind(_: Halving, trial: str, reached: dict[str, dict[int, float]]) -> str | None:
        return "behind" if trial == trials["late"].name and reached[trial] else None

    monkeypatch.setattr(Halving, "stop", behind)
    good = trial_recipe(recipe, trials["good"])

    def kill_one() -> None:
        until(lambda: (good.run_dir / "checkpoints" / "latest").is_file())
        pid = read_json(good.run_dir / "status.json")["pid"]
        os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill_one)
    killer.start()
    assert run.run(recipe) == 2
    killer.join()
    states = SweepFolder.of(recipe).progress().trials
    bad, heir, good_state, late = (states[trials[label].name] for label in ("bad", "heir", "good", "late"))
    assert bad.state == "failed" and bad.tries == 1 and "leaves nothing of the run" in bad.reason and "leaves nothing of the run" in bad.log
    assert heir.state == "failed" and heir.tries == 0 and "drafter=bad" in heir.reason
    assert (good_state.state, good_state.tries) == ("complete", 2)
    assert read_json(good.run_dir / "train.json")["world_size"] == 2 and read_json(good.run_dir / "train.json")["resumed_from"]
    assert (late.state, late.reason) == ("halved", "behind")
    assert {row["name"]: row["state"] for row in results.read(SweepFolder.of(recipe))} == {name: state.state for name, state in states.items()}


def test_which_errors_are_tried_again() -> None:
    def found(*errors: Exception, last: bool = False) -> tuple[str, bool]:
        failure = judge(list(errors), last, lambda: "it needs 3 GB")
        return failure.reason, failure.again

    assert found(ConfigError("no such layer")) == ("no such layer", False)
    assert found(KvshotError(f"no progress; {AGAIN}"))[1]
    assert found(RuntimeError("connection closed")) == ("RuntimeError: connection closed", True)
    death = RayActorError(error_msg="gone")
    assert found(death) == ("a worker died (gone)", True)
    assert "probably out of memory" in found(death, last=True)[0] and "it needs 3 GB" in found(death, last=True)[0]
    for error in (
        torch.OutOfMemoryError("CUDA out of memory"),
        MemoryError(),
        OutOfMemoryError("node ran low"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
    ):
        reason, again = found(death, error)
        assert reason.startswith("out of memory") and reason.endswith("it needs 3 GB") and not again
    assert judge([Preempted("stopped")], False, str).asked


def test_the_end_of_a_log_shows_progress_bars_once(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("".join(f"line {i}\n" for i in range(50)) + "\r 1/2\r 2/2\nlast words")
    assert tail(tmp_path / "log").splitlines()[-3:] == ["line 49", " 2/2", "last words"] and len(tail(tmp_path / "log").splitlines()) == 30
    assert tail(tmp_path / "none") == ""
