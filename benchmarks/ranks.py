"""The trainer's ranks as processes of their own, for benchmarks: `python -m MODULE --case '{...}'` on each prints one JSON line."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[1]


def run(module: str, case: dict[str, Any], ranks: int) -> list[dict[str, Any]]:
    """What each of `ranks` ranks prints last, with one CPU thread each; glibc gives back what is freed at once.

    Raises RuntimeError with the output of a rank that fails; the others are ended.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    env |= {"MALLOC_MMAP_THRESHOLD_": str(1 << 16)} if case.get("give_back") else {}
    command = [sys.executable, "-m", module, "--case", json.dumps(case)]
    started = [
        subprocess.Popen(
            command, cwd=_ROOT, env=env | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for rank in range(ranks)
    ]  # fmt: skip
    try:
        found = []
        for rank, process in enumerate(started):
            out, errors = process.communicate(timeout=3600)
            if process.returncode:
                raise RuntimeError(f"{module} {case}: rank {rank} ended with {process.returncode}:\n{errors[-3000:]}")
            found.append(json.loads(out.splitlines()[-1]))
        return found
    finally:
        for process in started:
            process.kill()
            process.wait()
