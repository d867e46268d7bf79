"""`kvshot runs`: every state a run folder can be in, told from its files; texts and JSON; no torch."""

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
from kvshot_ds.errors import ConfigError, KvshotError, Preempted
from kvshot_ds.files import read_json, write_json
from kvshot_ds.training import status
from kvshot_ds.training.launch import run
from kvshot_ds.training.status import Status
from tests.training.runs import board, run_and_stop


def folder_of(recipe, name="run", **options) -> Path:
    r = recipe(name, "hybrid", **options)
    r.run_dir.mkdir(parents=True)
    (r.run_dir / "recipe.yaml").write_text(dump_recipe(r))
    return r.run_dir


def left(folder: Path, **changed) -> None:
    """A status.json of a run that was started long ago by a process that is gone."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    plain = Status("running", 7, 20, 2, 1e9, 1e9 + 60, socket.gethostname(), gone.pid, 1e9, scalars={"train/loss": 2.5, "train/mat": 1.25})
    write_json(folder / status.NAME, asdict(replace(plain, **changed)))


@pytest.mark.parametrize(
    ("changed", "state", "says"),
    [
        ({}, "gone", "no longer there"),
        ({"pid": os.getpid()}, "gone", "no longer there"),  # another process under its number
        ({"pid": os.getpid(), "began": status.began(os.getpid())}, "running", ""),
        ({"pid": os.getpid(), "began": status.began(os.getpid()), "state": "complete"}, "exporting", "being written"),
        ({"host": "elsewhere", "updated": time.time() + 3600}, "running", ""),
        ({"host": "elsewhere", "updated": time.time() - 3600}, "silent", "hang_minutes"),
        ({"state": "stopped", "reason": "run: stopped after step 7 of 20 (SIGTERM)"}, "stopped", "SIGTERM"),
        ({"state": "failed", "reason": "the loss is not finite"}, "failed", "not finite"),
    ],
)
def test_each_state_is_told_from_the_files(recipe, changed, state, says):
    folder = folder_of(recipe)
    left(folder, **changed)
    line = runs.read_line(folder)
    assert (line.state, line.step, line.steps, line.ranks, line.loss, line.mat, line.heldout) == (state, 7, 20, 2, 2.5, 1.25, False)
    assert says in line.reason and bool(says) == bool(line.reason)


def test_a_run_without_a_status_and_a_damaged_one_are_still_listed(recipe, tmp_path):
    old, damaged = folder_of(recipe, "old"), folder_of(recipe, "damaged")
    (old / "checkpoints").mkdir()
    (damaged / status.NAME).write_text("{")
    lines = {line.name: line for line in runs.list_runs(tmp_path)}
    assert lines.keys() == {"old", "damaged"} and {line.state for line in lines.values()} == {"unknown"}
    write_json(old / "train.json", {"steps": 5, "world_size": 4, "resumed_from": [{"step": 2, "world_size": 4}]})
    line = runs.read_line(old)
    assert (line.state, line.step, line.steps, line.ranks, line.resumed_from) == ("complete", 5, 5, 4, (2,))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("recipe.yaml", b": ["),
        ("recipe.yaml", b"\xff\xfe"),
        ("recipe.yaml", b"[1]"),
        ("recipe.yaml", b"name: x\ntrain: {drafter: {family: hybrid, depth: 1}, hang_minutes: long}"),
        ("status.json", b"[]"),
        (
            "status.json",
            b'{"state": "stopped", "step": 1, "steps": 2, "ranks": 1, "started": 1, "updated": 1, "host": "h", "pid": 1, "began": 1, "scalars": null}',
        ),
        ("status.json", b'{"state": "stopped", "step": 1, "steps": 2, "ranks": 1, "started": "x", "updated": 1, "host": "h", "pid": 1, "began": 1}'),
        ("train.json", b"[]"),
        ("train.json", b'{"steps": "x", "resumed_from": 5}'),
        ("heldout.json", b'{"x": {}}'),
        ("heldout.json", b'{"4": []}'),
        ("checkpoints/step-x/state.json", b"{}"),
        ("tensorboard", b""),
    ],
)
def test_one_file_that_is_something_else_hides_no_run(recipe, tmp_path, name, content):
    sound, odd = folder_of(recipe, "sound"), folder_of(recipe, "odd")
    left(sound)
    left(odd)
    (odd / name).parent.mkdir(parents=True, exist_ok=True)
    (odd / name).write_bytes(content)
    assert "\n".join(runs.table(runs.list_runs(tmp_path))).count("hybrid-1") >= 1
    assert {line.name for line in runs.list_runs(tmp_path)} == {"sound", "odd"}
    if name == "recipe.yaml":
        (line,) = (line for line in runs.list_runs(tmp_path) if line.name == "odd")
        assert line.state == "unknown" and "recipe.yaml: expected" in line.reason and "\n" not in line.reason
        with pytest.raises(ConfigError, match="expected the resolved recipe"):
            runs.read_page(odd)
    else:
        assert runs.page(runs.read_page(odd))


def test_real_runs_from_start_to_end(recipe, tmp_path, capsys):
    """Cut short, taken up again, complete; and the text of both commands."""
    r = recipe("first", "hybrid", eval_every=4)
    run_and_stop(r, 7)
    cut = runs.read_line(r.run_dir)
    assert (cut.state, cut.reason, cut.step, cut.steps) == ("failed", "Stopped", 6, 11)  # its last point was at step 6
    assert cut.started is not None and cut.updated is not None and time.time() - 600 < cut.started <= cut.updated <= time.time()
    run(r)
    done, logged = runs.read_page(r.run_dir), board(r)
    assert (done.line.state, done.line.step, done.line.ranks, done.line.resumed_from, done.line.started) == ("complete", 11, 1, (6,), cut.started)
    assert done.line.loss == pytest.approx(logged["train/loss"][-1]) and done.line.mat == pytest.approx(logged["heldout/mat"][-1]) and done.line.heldout
    assert list(done.points) == [6, 8, 9, 10, 11] and done.points[11]["train/mat"] == pytest.approx(logged["train/mat"][-1])
    assert list(done.heldout) == [4, 8, 11] and done.heldout[11]["heldout/mat"] == pytest.approx(done.line.mat)
    assert [c.step for c in done.checkpoints] == [6, 9] and [c.current for c in done.checkpoints] == [False, True]
    assert done.options["train.eval_every"] == 4 and "train.optim.betas" not in done.options

    shown = CliRunner().invoke(cli, ["runs", "show", str(r.run_dir)], standalone_mode=False).output
    for text in ("hybrid-1, complete", "step 11 of 11, 1 rank(s)", "continued from step 6", "train.eval_every = 4", "tensorboard --logdir", "kvshot eval"):
        assert text in shown
    other = recipe("second", "kv_only", optim={"lr": 1e30, "clip": 1e30}, log_every=1, checkpoint_every=1000)
    with pytest.raises(KvshotError):
        run(other)
    listed = CliRunner().invoke(cli, ["runs", "list", str(tmp_path)], standalone_mode=False).output.splitlines()
    assert listed[1].split()[:5] == ["first", "hybrid-1", "complete", "11/11", f"{done.line.loss:.3f}"] and "held-out" in listed[1] and "1×" in listed[1]
    assert listed[2].split()[:3] == ["second", "kv_only-2", "failed"] and listed[3].startswith("second: failed: the ") and "not finite" in listed[3]


def test_a_run_that_was_asked_to_stop_says_so_and_how_to_go_on(recipe):
    r = recipe(max_minutes=1e-6)
    with pytest.raises(Preempted):
        run(r)
    line = runs.read_line(r.run_dir)
    assert line.state == "stopped" and "max_minutes" in line.reason
    assert f"continue: kvshot train {r.run_dir / 'recipe.yaml'}" in "\n".join(runs.page(runs.read_page(r.run_dir)))


def test_json_is_the_same_as_the_text(recipe, tmp_path):
    left(folder_of(recipe), state="stopped", reason="asked to")
    (line,) = json.loads(CliRunner().invoke(cli, ["runs", "list", str(tmp_path), "--json"], standalone_mode=False).output)
    page = json.loads(CliRunner().invoke(cli, ["runs", "show", line["folder"], "--json"], standalone_mode=False).output)
    assert page["line"] == line and line["state"] == "stopped" and line["drafter"] == "hybrid-1" and page["options"]["train.drafter.family"] == "hybrid"


def test_folders_that_are_none_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="no such folder"):
        runs.list_runs(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="is no run folder"):
        runs.read_page(tmp_path)
    (tmp_path / "recipe.yaml").write_text("name: x\n")
    with pytest.raises(ConfigError, match="expected the resolved recipe of a run"):
        runs.read_page(tmp_path)
    assert runs.list_runs(tmp_path) == []  # a recipe alone is no run


def test_it_starts_without_torch(recipe, tmp_path):
    left(folder_of(recipe))
    code = f"import sys; from kvshot_ds.cli import cli; cli(['runs', 'list', {str(tmp_path)!r}], standalone_mode=False); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_status_keeps_the_first_start_and_no_number_that_is_none(tmp_path):
    first = status.StatusFile(tmp_path, 0, 9, 1, ())
    first.scalars({"train/loss": 1.0, "train/grad_norm": float("inf")}, 2)
    again = status.StatusFile(tmp_path, 2, 9, 2, (2,))
    found = status.read(tmp_path)
    assert found is not None and (found.started, found.ranks, found.resumed_from) == (first.status.started, 2, (2,)) and again.status == found
    assert read_json(tmp_path / status.NAME)["scalars"] == {"train/loss": 1.0, "train/grad_norm": None}
    assert status.StatusFile(tmp_path, 0, 9, 1, ()).status.scalars == {}  # begun anew under the same name
