"""A Slurm of two nodes on this machine, where one can be started."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("slurm.sh")


@pytest.fixture(scope="session")
def slurm() -> Iterator[dict[str, str]]:
    """The environment of a Slurm cluster with two nodes on this machine."""
    lacking = [program for program in ("munged", "slurmctld", "slurmd", "sbatch", "sinfo") if not shutil.which(program)]
    if lacking or os.geteuid():
        pytest.skip(f"Slurm is not installed here ({', '.join(lacking)} not found)" if lacking else "a Slurm of our own needs root")
    folder = Path(f"/tmp/kvshot-slurm-{os.getpid()}")
    folder.mkdir()
    held = subprocess.Popen([SCRIPT, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert held.stdin and held.stdout
    try:
        ready = held.stdout.readline().strip()
        assert ready == "ready", "\n".join(f"{p.name}: {p.read_text(errors='replace')[-1500:]}" for p in (folder / "log").iterdir())
        yield {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
    finally:
        held.stdin.close()
        held.wait(timeout=60)
        shutil.rmtree(folder)
