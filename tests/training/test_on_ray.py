"""`kvshot train --ray`: what Ray's ranks are told, what becomes of their failures, and real runs that are killed, stopped and refused."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from ray.exceptions import RayActorError

from kvshot_ds.config import Recipe, dump_recipe
from kvshot_ds.errors import ConfigError, KvshotError, Preempted
from kvshot_ds.files import read_json
from kvshot_ds.training import on_ray
from kvshot_ds.training.actors import Place, WorkerDied, by_node, environments, verdict
from kvshot_ds.training.launch import run
from kvshot_ds.training.verdict import Sign, of_end
from tests.training.runs import assert_close, rank_environment, weights

PATIENCE = 240


def test_ranks_of_one_node_follow_each_other_and_share_its_gpus() -> None:
    places = [Place("b", "10.0.0.2", 1, ("3", "5")), Place("a", "10.0.0.1", 2, ("0",)), Place("b", "10.0.0.2", 3, ("7",))]
    assert by_node(places) == [0, 2, 1]
    first, second, third = environments([places[i] for i in by_node(places)], 29500)
    assert {first["MASTER_ADDR"], second["MASTER_ADDR"], third["MASTER_ADDR"]} == {"10.0.0.2"} and third["MASTER_PORT"] == "29500"
    assert [(e["RANK"], e["LOCAL_RANK"], e["WORLD_SIZE"]) for e in (first, second, third)] == [("0", "0", "3"), ("1", "1", "3"), ("2", "0", "3")]
    assert [e["CUDA_VISIBLE_DEVICES"] for e in (first, second, third)] == ["3,7", "3,7", "0"]
    assert "CUDA_VISIBLE_DEVICES" not in environments([Place("a", "10.0.0.1", 1, ())], 1)[0]


def test_only_a_death_is_followed_by_another_start() -> None:
    death, fault = RayActorError(), RuntimeError("connection closed by peer")
    assert isinstance(verdict([fault, death], ""), WorkerDied)
    assert verdict([fault], "") is fault
    mine = KvshotError("the loss is not finite")
    assert verdict([fault, mine], "") is mine
    assert verdict([death, mine], "") is mine, "the watchdogs of the others end their processes"
    gone = KvshotError(of_end(Sign(1, "host", 7)).text)
    assert isinstance(verdict([gone, death], ""), WorkerDied), "so do the others when one is gone"
    assert isinstance(verdict([death, Preempted("stopped")], ""), Preempted)
    assert isinstance(verdict([death], "SIGTERM"), Preempted), "a rank that did not listen yet"


def test_ranks_that_would_share_a_gpu_are_refused(recipe: Callable[..., Recipe]) -> None:
    shared = recipe().model_copy(update={"ray": recipe().ray.model_copy(update={"gpus_per_rank": 0.5})})
    with pytest.raises(ConfigError, match=r"ray\.gpus_per_rank=0\.5: ranks cannot share a GPU"):
        on_ray.run(shared)


def start(recipe: Recipe, folder: Path, *overrides: str) -> subprocess.Popen[str]:
    (folder / f"{recipe.name}.yaml").write_text(dump_recipe(recipe))
    environment = {k: v for k, v in rank_environment().items() if k != "RAY_ADDRESS"} | {"RAY_DEDUP_LOGS": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    command = [sys.executable, "-m", "kvshot_ds.cli", "train", "--ray", f"{recipe.name}.yaml", "ray.ranks=2", "ray.cpus_per_rank=0.5", *overrides]
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def ranks_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """Ray's workers that run a rank, below the process's own Ray."""
    return [p for p in psutil.Process(process.pid).children(recursive=True) if "Rank.run" in " ".join(p.cmdline())]


def after_a_checkpoint(process: subprocess.Popen[str], recipe: Recipe) -> None:
    deadline = time.monotonic() + PATIENCE
    while not (recipe.run_dir / "checkpoints" / "latest").is_file():
        assert time.monotonic() < deadline and process.poll() is None, process.communicate()[0]
        time.sleep(0.02)


def end(process: subprocess.Popen[str]) -> str:
    try:
        return process.communicate(timeout=PATIENCE)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        raise


@pytest.mark.slow
@pytest.mark.timeout(700)
def test_a_killed_rank_starts_all_again_from_the_newest_checkpoint(recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    alone, r = (recipe(name, "hybrid", epochs=4, checkpoint_every=1) for name in ("alone", "killed"))
    process = start(r, tmp_path)
    after_a_checkpoint(process, r)
    ranks = ranks_of(process)
    assert len(ranks) == 2
    os.kill(ranks[-1].pid, signal.SIGKILL)
    said = end(process)
    assert process.returncode == 0, said
    assert "killed: a worker died" in said and "start 2 of at most 4 from the newest checkpoint" in said and "continuing after step" in said
    summary = read_json(r.run_dir / "train.json")
    assert summary["world_size"] == 2 and len(summary["resumed_from"]) == 1
    run(alone)
    assert_close(weights(r), weights(alone))


@pytest.mark.slow
@pytest.mark.timeout(700)
def test_a_signal_ends_it_with_a_checkpoint_and_a_status_of_its_own(recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    r = recipe("stopped", epochs=4, checkpoint_every=1)
    process = start(r, tmp_path)
    after_a_checkpoint(process, r)
    process.send_signal(signal.SIGTERM)
    said = end(process)
    assert process.returncode == Preempted.STATUS, said
    assert re.search(r"stopped: stopped after step \d+ of 44", said) and "a worker died" not in said
    again = start(r, tmp_path)
    said = end(again)
    assert again.returncode == 0 and "continuing after step" in said, said


@pytest.mark.slow
def test_what_would_fail_again_is_not_started_again_and_deaths_are_counted(recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    said = end(refused := start(recipe("refused", draft_vocab_size=10_000), tmp_path))
    assert refused.returncode == 2 and "larger than the target's vocabulary" in said and "a worker died" not in said, said
    r = recipe("dying", epochs=4, checkpoint_every=1)
    process = start(r, tmp_path, "ray.restarts=0")
    after_a_checkpoint(process, r)
    os.kill(ranks_of(process)[0].pid, signal.SIGKILL)
    said = end(process)
    assert process.returncode == 2 and "a worker died for the 1. time" in said and "ray.restarts=0" in said, said
