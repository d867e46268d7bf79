"""cluster/slurm/train.sbatch and seeds.sbatch: what they start, with everything around them played; and trained under a real Slurm of two nodes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvshot_ds.config import Recipe, dump_recipe
from kvshot_ds.files import read_json
from kvshot_ds.training.launch import run
from tests.training.runs import assert_close, rank_environment, weights

ROOT = Path(__file__).resolve().parents[2]
TRAIN, SEEDS = (ROOT / "cluster" / "slurm" / f"{name}.sbatch" for name in ("train", "seeds"))
PATIENCE = 300  # seconds that a job may take on a loaded machine

# Each player notes its name and its arguments; srun then runs what it was given, without its own options.
PLAYER = """#!/usr/bin/env bash
printf '%s|%s|%s\\n' "$(basename "$0")" "${OMP_NUM_THREADS:-}" "$*" >> "$NOTES"
"""
ROLES = {"srun": 'while [ "${1#--}" != "$1" ]; do shift; done\nexec "$@"', "scontrol": '[ "$1" = requeue ] || printf "node%s\\n" 1 2',
         "scancel": "exit 1", "deepspeed": 'cat .hosts-* >> "$NOTES.hosts"; exit "${STATUS:-0}"', "kvshot": "echo name: hybrid"}  # fmt: skip


def play(folder: Path, script: Path, *arguments: str, wanted: int = 0, **variables: str) -> list[list[str]]:
    """Runs the script among players; what they noted, as [name, threads, arguments]."""
    bin_folder = folder / ".venv" / "bin"
    bin_folder.mkdir(parents=True)
    (folder / "cluster").symlink_to(ROOT / "cluster")
    for name, does in ROLES.items():
        (bin_folder / name).write_text(PLAYER + does + "\n")
        (bin_folder / name).chmod(0o755)
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "CUDA_", "OMP_", "MASTER_"))}
    environment |= {"NOTES": str(folder / "notes"), "SLURM_SUBMIT_DIR": str(folder), "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_ID": "42"}
    environment |= {"SLURM_JOB_NUM_NODES": "1", "SLURM_NODEID": "0", "SLURM_CPUS_ON_NODE": "16", **variables}
    done = subprocess.run(["bash", script, *arguments], env=environment, cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == wanted, done.stdout + done.stderr
    assert not list(folder.glob(".hosts-*")), "the list of hosts goes with the job"
    return [line.split("|") for line in (folder / "notes").read_text().splitlines()]


def test_on_several_nodes_each_launcher_knows_all_of_them_and_itself(tmp_path: Path) -> None:
    notes = play(
        tmp_path, TRAIN, "my recipe.yaml", "train.seed=1", SLURM_JOB_NUM_NODES="2", SLURM_NODEID="1", SLURM_GPUS_ON_NODE="8", CUDA_VISIBLE_DEVICES="0,1"
    )
    (launched,) = [n for n in notes if n[0] == "deepspeed"]
    assert "--no_ssh --node_rank 1 --master_addr node1 --master_port 20042 --module kvshot_ds.cli train my recipe.yaml train.seed=1" in launched[2]
    assert (tmp_path / "notes.hosts").read_text() == "node1 slots=8\nnode2 slots=8\n" and launched[1] == "2"
    (step,) = [n[2] for n in notes if n[0] == "srun"]
    assert "--ntasks-per-node=1 --cpus-per-task=16 --kill-on-bad-exit=1" in step


@pytest.mark.parametrize(
    ("variables", "flags", "threads"),
    [
        ({"CUDA_VISIBLE_DEVICES": "2,5"}, "-q --master_port", "8"),  # the launcher reads the variable itself
        ({"RANKS": "4"}, "-q --num_accelerators 4 --master_port", "4"),
        ({"OMP_NUM_THREADS": "3"}, "-q --num_accelerators 1 --master_port", "3"),
    ],
)
def test_on_one_node_it_takes_what_was_granted(variables: dict[str, str], flags: str, threads: str, tmp_path: Path) -> None:
    (launched,) = [n for n in play(tmp_path, TRAIN, "r.yaml", **variables) if n[0] == "deepspeed"]
    assert launched[2].startswith(flags) and launched[1] == threads


@pytest.mark.parametrize(("status", "requeued"), [(75, True), (1, False), (137, False)])
def test_only_a_run_that_goes_on_from_its_checkpoint_is_requeued(status: int, requeued: bool, tmp_path: Path) -> None:
    notes = play(tmp_path, TRAIN, "r.yaml", wanted=status, STATUS=str(status))
    assert [n[2] for n in notes if n[0] == "scontrol" and "requeue" in n[2]] == (["requeue 42"] if requeued else [])


def test_a_task_of_an_array_has_its_seed_and_speaks_for_itself_alone(tmp_path: Path) -> None:
    notes = play(tmp_path, SEEDS, "r.yaml", "train.epochs=2", wanted=75, STATUS="75", SLURM_ARRAY_JOB_ID="42", SLURM_ARRAY_TASK_ID="3")
    (launched,) = [n for n in notes if n[0] == "deepspeed"]
    assert launched[2].endswith("train r.yaml train.epochs=2 name=hybrid-seed3 train.seed=3")
    assert [n[2] for n in notes if n[0] == "scontrol" and "requeue" in n[2]] == ["requeue 42_3"]


@pytest.mark.parametrize("script", [TRAIN, SEEDS], ids=lambda p: p.stem)
def test_the_scripts_say_how_they_are_used(script: Path) -> None:
    done = subprocess.run(["bash", script], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stderr.startswith(f"usage: sbatch cluster/slurm/{script.name} RECIPE")


class Jobs:
    """Jobs of a folder that stands for the repository: with its .venv, the scripts, and the logs."""

    def __init__(self, slurm: dict[str, str], folder: Path):
        self.folder = folder
        # node names are no names of the network here
        self.environment = {**rank_environment(), **{k: v for k, v in slurm.items() if k.startswith("SLURM_")}, "MASTER_ADDR": "127.0.0.1"}
        if not (folder / ".venv").exists():
            (folder / ".venv").symlink_to(Path(sys.executable).parent.parent)
        (folder / "cluster").symlink_to(ROOT / "cluster")

    def ask(self, *command: str) -> str:
        done = subprocess.run(command, env=self.environment, cwd=self.folder, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, (command, done.stderr)
        return done.stdout.strip()

    def submit(self, script: Path, recipe: Recipe, *flags: str) -> str:
        (self.folder / f"{recipe.name}.yaml").write_text(dump_recipe(recipe))
        return self.ask("sbatch", "--parsable", "--time=20", *flags, str(script), f"{recipe.name}.yaml")

    def state(self, job: str) -> set[str]:
        """States of the job (of all its tasks)."""
        return set(re.findall(r"JobState=(\w+)", self.ask("scontrol", "show", "job", job)))

    def wait(self, job: str, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not done():
            states = self.state(job)
            if time.monotonic() > deadline or states & {"FAILED", "TIMEOUT", "NODE_FAIL"}:
                self.ask("scancel", job)
                pytest.fail(f"job {job} is {states}\n{self.logs()}")
            time.sleep(0.2)

    def logs(self) -> str:
        return "\n".join(f"{path.name}:\n{path.read_text(errors='replace')}" for path in sorted(self.folder.glob("*.log")))


@pytest.fixture
def jobs(slurm: dict[str, str], tmp_path: Path) -> Jobs:
    return Jobs(slurm, tmp_path)


RANK = """#!{python}
import os, pathlib, signal, sys, time
signal.signal(signal.SIGUSR1, lambda *_: os._exit(75))
task = os.environ["SLURM_ARRAY_TASK_ID"]
pathlib.Path(f"told-{{task}}").write_text(" ".join(sys.argv))
with open(f"starts-{{task}}", "a") as file:
    file.write(os.environ["SLURM_JOB_ID"] + "\\n")
while pathlib.Path(f"starts-{{task}}").read_text().count("\\n") == 1 and not pathlib.Path("go").exists():
    time.sleep(0.1)
"""


@pytest.mark.slow
def test_under_slurm_each_task_of_an_array_has_its_seed_and_a_signal_to_one_is_not_heard_by_the_others(
    slurm: dict[str, str], recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    """The ranks are played: one waits for the signal or for the file `go`, and ends at once when it is started again."""
    bin_folder = tmp_path / "root" / ".venv" / "bin"
    bin_folder.mkdir(parents=True)
    (bin_folder / "deepspeed").write_text(RANK.format(python=sys.executable))
    (bin_folder / "deepspeed").chmod(0o755)
    (bin_folder / "kvshot").symlink_to(Path(sys.executable).with_name("kvshot"))
    jobs = Jobs(slurm, tmp_path / "root")
    job = jobs.submit(SEEDS, recipe("many"), "--array=4-5")
    starts = [jobs.folder / f"starts-{task}" for task in (4, 5)]
    jobs.wait(job, lambda: all(path.is_file() and path.read_text() for path in starts))
    chosen = next(path for path in starts if path.read_text().strip() == job)  # the one whose own number is also that of the array
    (other,) = [path for path in starts if path != chosen]
    told = [(jobs.folder / f"told-{task}").read_text() for task in (4, 5)]
    assert [line.partition(" train ")[2] for line in told] == [f"many.yaml name=many-seed{task} train.seed={task}" for task in (4, 5)]
    jobs.ask("scancel", "--batch", "--signal=USR1", f"{job}_{chosen.name.removeprefix('starts-')}")
    jobs.wait(job, lambda: chosen.read_text().count("\n") == 2)
    assert other.read_text().count("\n") == 1
    (jobs.folder / "go").touch()
    jobs.wait(job, lambda: jobs.state(job) == {"COMPLETED"})
    assert other.read_text().count("\n") == 1


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_nodes_train_and_a_job_that_is_signalled_comes_back(jobs: Jobs, recipe: Callable[..., Recipe]) -> None:
    alone, r = (recipe(name, "hybrid", epochs=4, checkpoint_every=1) for name in ("alone", "nodes"))
    job = jobs.submit(TRAIN, r, "--nodes=2")
    jobs.wait(job, (r.run_dir / "checkpoints" / "latest").is_file)
    jobs.ask("scancel", "--batch", "--signal=USR1", job)  # as Slurm does before the time limit
    jobs.wait(job, lambda: "COMPLETED" in jobs.state(job))
    logs = jobs.logs()
    assert "Restarts=1" in jobs.ask("scontrol", "show", "job", job), logs
    assert re.search(r"stopped after step \d+ of 44 \(SIGUSR1 ", logs) and f"job {job}: stopped with a checkpoint; back into the queue" in logs
    assert "44 steps of 4 conversations on 2 rank(s)" in logs and "continuing after step" in logs
    summary = read_json(r.run_dir / "train.json")
    assert summary["world_size"] == 2 and len(summary["resumed_from"]) == 1
    run(alone)
    assert_close(weights(r), weights(alone))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_job_that_is_cancelled_leaves_a_checkpoint_from_which_the_next_one_goes_on(jobs: Jobs, recipe: Callable[..., Recipe]) -> None:
    r = recipe("cancelled", epochs=4, checkpoint_every=1)
    job = jobs.submit(TRAIN, r)
    jobs.wait(job, (r.run_dir / "checkpoints" / "latest").is_file)
    jobs.ask("scancel", job)
    jobs.wait(job, lambda: jobs.state(job) == {"CANCELLED"} and job not in jobs.ask("squeue", "--noheader"))
    stopped = re.search(r"stopped after step (\d+) of 44 \(SIGTERM ", jobs.logs())
    assert stopped, jobs.logs()
    again = jobs.submit(TRAIN, r)
    jobs.wait(again, lambda: "COMPLETED" in jobs.state(again))
    assert read_json(r.run_dir / "train.json")["resumed_from"] == [{"step": int(stopped[1]), "world_size": 1}]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_srun_may_start_the_ranks_itself(jobs: Jobs, recipe: Callable[..., Recipe]) -> None:
    alone, r = (recipe(name, "hybrid", max_steps=6) for name in ("alone", "direct"))
    (jobs.folder / "r.yaml").write_text(dump_recipe(r))
    step = subprocess.Popen(
        ["srun", "--nodes=2", "--ntasks=2", str(Path(sys.executable).with_name("kvshot")), "train", "r.yaml"],
        env=jobs.environment, cwd=jobs.folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        said = step.communicate(timeout=PATIENCE)[0]
    finally:
        if step.poll() is None:
            step.send_signal(signal.SIGTERM)
    assert step.returncode == 0 and "on 2 rank(s)" in said, said
    run(alone)
    assert_close(weights(r), weights(alone))
