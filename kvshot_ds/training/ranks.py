"""The environment of a rank that Slurm's srun has started itself, in the variables that torch.distributed reads."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping

from kvshot_ds.errors import ConfigError


def from_slurm(env: Mapping[str, str]) -> dict[str, str]:
    """RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT of this task of a step; empty where there is nothing to tell.

    That is: outside of a step of several tasks (in a batch script or a shell too), and where a launcher has set RANK. MASTER_ADDR and
    MASTER_PORT stay as they are if they are set. Raises ConfigError if the step's nodes cannot be told.
    """
    tasks = int(env.get("SLURM_STEP_NUM_TASKS", "1"))
    if "RANK" in env or tasks < 2:
        return {}
    out = {"RANK": env["SLURM_PROCID"], "WORLD_SIZE": str(tasks), "LOCAL_RANK": env["SLURM_LOCALID"]}
    # a fixed function of the job, so that jobs which share a node do not meet
    out["MASTER_PORT"] = env.get("MASTER_PORT", str(20000 + int(env["SLURM_JOB_ID"]) % 20000))
    out["MASTER_ADDR"] = env.get("MASTER_ADDR") or ("127.0.0.1" if env.get("SLURM_STEP_NUM_NODES") == "1" else _first(env["SLURM_STEP_NODELIST"]))
    return out


def _first(nodes: str) -> str:
    """Name of the first of Slurm's `nodes`, such as gpu[03-10]."""
    try:
        return subprocess.run(["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, check=True, timeout=60).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError) as error:
        raise ConfigError(f"scontrol cannot tell the nodes {nodes} ({error}); set MASTER_ADDR to the address of the first of them") from None
