"""cluster/slurm/capture.sbatch and sweep.sbatch: what they start, with everything around them played; the capture under a real Slurm, where there is one."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvshot_ds.config import dump_recipe
from kvshot_ds.features.manifest import Manifest
from tests.data_prep.captures import recipe, write_prepared

ROOT = Path(__file__).resolve().parents[2]
SCRIPT, SWEEP = (ROOT / "cluster" / "slurm" / f"{name}.sbatch" for name in ("capture", "sweep"))

# Each player notes its name, the job's token and its arguments; srun then runs what it was given, without its own options.
PLAYER = """#!/usr/bin/env bash
printf '%s|%s|%s|%s\\n' "$(basename "$0")" "${RAY_AUTH_TOKEN:-}" "${RAY_AUTH_MODE:-}" "$*" >> "$NOTES"
"""
SRUN = """while [ "${1#--}" != "$1" ]; do shift; done
"$@"
"""


ROLES = {"srun": SRUN, "scontrol": '[ "$1" = requeue ] || seq -f node%.0f 3', "hostname": "echo 10.0.0.7 fe80::1", "python": "cat > /dev/null", "ray": "",
         "kvshot": "sleep 0.3"}  # fmt: skip


def play(folder: Path, nodes: int, *arguments: str, script: Path = SCRIPT, kvshot: str = ROLES["kvshot"], wanted: int = 0, **variables: str) -> list[list[str]]:
    """Runs the script among players; what they noted."""
    bin_folder = folder / ".venv" / "bin"
    bin_folder.mkdir(parents=True)
    (folder / "cluster").symlink_to(ROOT / "cluster")
    for name, does in (ROLES | {"kvshot": kvshot}).items():
        (bin_folder / name).write_text(PLAYER + does + "\n")
        (bin_folder / name).chmod(0o755)
    environment = {**os.environ, "NOTES": str(folder / "notes"), "SLURM_SUBMIT_DIR": str(folder), "SLURM_JOB_NODELIST": "node[1-3]", "SLURM_JOB_ID": "42"}
    environment |= {"SLURM_JOB_NAME": "capture", "SLURM_JOB_NUM_NODES": str(nodes), "SLURM_CPUS_ON_NODE": "8", **variables}
    done = subprocess.run(["bash", script, *arguments], env=environment, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == wanted, done.stdout + done.stderr
    return [line.split("|") for line in (folder / "notes").read_text().splitlines()]


def test_ray_runs_on_every_node_behind_a_token_and_the_capture_on_the_first(tmp_path: Path) -> None:
    notes = play(tmp_path, 3, "my recipe.yaml", "capture.workers=16")
    heads = [n for n in notes if n[0] == "ray" and "--head" in n[3]]
    others = [n for n in notes if n[0] == "ray" and "--head" not in n[3]]
    assert len(heads) == 1 and others
    assert "--node-ip-address=10.0.0.7" in heads[0][3] and "--block" in heads[0][3] and "--num-cpus=8" in heads[0][3]
    port = re.search(r"--port=(\d+)", heads[0][3])
    assert port and all(f"--address=10.0.0.7:{port[1]}" in n[3] for n in others)
    steps = [n[3] for n in notes if n[0] == "srun" and " ray start" in n[3]]
    assert any("--nodes=1 --ntasks=1 --nodelist=node1" in s for s in steps) and any("--nodes=2 --ntasks=2 --exclude=node1" in s for s in steps)
    (capture,) = [n for n in notes if n[0] == "kvshot"]
    assert capture[3] == "capture my recipe.yaml capture.workers=16"
    tokens = {n[1] for n in (*heads, *others, capture)}
    assert len(tokens) == 1 and re.fullmatch(r"[0-9a-f]{64}", tokens.pop()) and {n[2] for n in (*heads, *others, capture)} == {"token"}


def test_one_node_has_no_others_and_the_stage_may_be_another(tmp_path: Path) -> None:
    notes = play(tmp_path, 1, "recipe.yaml", STAGE="prep")
    assert [n[3] for n in notes if n[0] == "kvshot"] == ["prep recipe.yaml"]
    assert sum(n[0] == "ray" for n in notes) == 1


# The players signal the batch script, which started them, as Slurm does, and then do as the driver does: stop with checkpoints, or not yet listen.
LISTENS = "trap 'exit 75' USR1 TERM; kill -{signal} $PPID; while true; do sleep 0.1; done"
DEAF = "kill -{signal} $PPID; exec sleep 60"


@pytest.mark.parametrize(
    ("kvshot", "wanted", "requeued"),
    [
        ("exit 0", 0, False),
        ("exit 1", 1, False),  # trials have failed: they would fail again
        ("exit 75", 75, False),  # somebody asked the driver itself
        (LISTENS.format(signal="USR1"), 75, True),
        (DEAF.format(signal="USR1"), 138, True),
        (LISTENS.format(signal="TERM"), 75, False),
    ],
)
def test_a_sweep_is_requeued_if_the_time_limit_has_stopped_it(kvshot: str, wanted: int, requeued: bool, tmp_path: Path) -> None:
    notes = play(tmp_path, 2, "my recipe.yaml", "ray.ranks=2", script=SWEEP, kvshot=kvshot, wanted=wanted)
    (driver,) = [n for n in notes if n[0] == "kvshot"]
    assert driver[3] == "sweep run my recipe.yaml ray.ranks=2" and re.fullmatch(r"[0-9a-f]{64}", driver[1])
    assert sum(n[0] == "ray" for n in notes) >= 2
    assert [n[3] for n in notes if n[0] == "scontrol" and "requeue" in n[3]] == (["requeue 42"] if requeued else [])


@pytest.mark.parametrize("script", [SCRIPT, SWEEP], ids=lambda p: p.stem)
def test_the_scripts_say_how_they_are_used(script: Path) -> None:
    done = subprocess.run(["bash", script], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stderr.startswith(f"usage: sbatch cluster/slurm/{script.name} RECIPE")


@pytest.mark.slow
def test_under_slurm_two_nodes_capture_together(slurm: dict[str, str], tiny_target: Path, tmp_path: Path) -> None:
    prepared = write_prepared(tmp_path / "prepared", 24, 3)
    (tmp_path / "recipe.yaml").write_text(dump_recipe(recipe(tiny_target, prepared, tmp_path / "features")))
    (tmp_path / ".venv").symlink_to(Path(sys.executable).parent.parent)
    (tmp_path / "cluster").symlink_to(ROOT / "cluster")
    command = ["sbatch", "--wait", "--nodes=2", "--ntasks-per-node=1", "--time=5", str(SCRIPT), "recipe.yaml", "capture.workers=2"]
    job = subprocess.Popen(command, cwd=tmp_path, env={**slurm, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        said = job.communicate(timeout=240)[0]
    except subprocess.TimeoutExpired:
        subprocess.run(["scancel", "--user=root"], env=slurm, check=False)
        job.send_signal(signal.SIGTERM)
        raise
    logs = "\n".join(path.read_text(errors="replace") for path in sorted(tmp_path.glob("*.log")))
    assert job.returncode == 0, said + logs
    assert "Ray runs on 2 node(s)" in logs and "capture: 27 conversations" in logs, logs
    assert Manifest.load(tmp_path / "features").splits["train"].samples == 24
