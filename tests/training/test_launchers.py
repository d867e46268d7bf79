"""torchrun and Slurm's own variables start ranks as the deepspeed launcher does: the weights are those of one rank. Plain variables: test_trainer.py."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvshot_ds.config import Recipe, dump_recipe
from kvshot_ds.errors import ConfigError
from kvshot_ds.files import read_json
from kvshot_ds.training import ranks
from kvshot_ds.training.launch import run
from tests.training.runs import assert_close, free_port, rank_environment, weights

PATIENCE = 240
TRAIN = ["-m", "kvshot_ds.cli", "train"]


def same_as_alone(recipes: Callable[..., Recipe], r: Recipe, processes: list[subprocess.Popen[str]]) -> None:
    try:
        said = [process.communicate(timeout=PATIENCE)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * len(processes), said
    assert read_json(r.run_dir / "train.json")["world_size"] == 2
    alone = recipes("alone", "hybrid", max_steps=6)
    run(alone)
    assert_close(weights(r), weights(alone))


def start(command: list[str], folder: Path, **variables: str) -> subprocess.Popen[str]:
    env = rank_environment() | variables
    return subprocess.Popen([sys.executable, *command], cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_torchrun(recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    r = recipe("torchrun", "hybrid", max_steps=6)
    (tmp_path / "r.yaml").write_text(dump_recipe(r))
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}"]
    same_as_alone(recipe, r, [start([*launcher, *TRAIN, "r.yaml"], tmp_path)])


def test_the_variables_that_srun_gives_a_task(recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    r = recipe("slurm", "hybrid", max_steps=6)
    (tmp_path / "r.yaml").write_text(dump_recipe(r))
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}

    def own(rank: int) -> dict[str, str]:
        return {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_JOB_ID": "1", "SLURM_STEP_NODELIST": "n[1-2]"}

    same_as_alone(recipe, r, [start([*TRAIN, "r.yaml"], tmp_path, **shared, **own(rank)) for rank in range(2)])


STEP = {"SLURM_STEP_NUM_TASKS": "16", "SLURM_STEP_NUM_NODES": "2", "SLURM_PROCID": "9", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "20042",
        "SLURM_STEP_NODELIST": "gpu[03-04]"}  # fmt: skip


def test_a_task_of_slurm_knows_its_rank_and_the_first_node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "scontrol").write_text('#!/bin/sh\n[ "$*" = "show hostnames gpu[03-04]" ] && printf "gpu03\\ngpu04\\n"\n')
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    wanted = {"RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "MASTER_ADDR": "gpu03", "MASTER_PORT": "20042"}
    assert ranks.from_slurm(STEP) == wanted
    assert ranks.from_slurm(STEP | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "7"}) == wanted | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "7"}
    assert ranks.from_slurm(STEP | {"SLURM_STEP_NUM_NODES": "1"})["MASTER_ADDR"] == "127.0.0.1"
    (tmp_path / "scontrol").write_text("#!/bin/sh\nexit 1\n")
    with pytest.raises(ConfigError, match=r"nodes gpu\[03-04\].*set MASTER_ADDR"):
        ranks.from_slurm(STEP)


def test_there_is_nothing_to_tell_where_a_launcher_has_told_or_nobody_started_ranks() -> None:
    assert ranks.from_slurm({}) == ranks.from_slurm(STEP | {"RANK": "0"}) == {}
    assert ranks.from_slurm({"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "16"}) == {}, "a batch script"
    assert ranks.from_slurm(STEP | {"SLURM_STEP_NUM_TASKS": "1"}) == {}, "a shell by srun --pty, or one launcher a node"
