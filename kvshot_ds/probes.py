"""Questions to the machine, the network and the storage; `kvshot_ds.doctor` judges the answers."""

from __future__ import annotations

import fcntl
import importlib.metadata
import os
import socket
import subprocess
import time
import uuid
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path


def said(command: list[str]) -> str:
    """What a program prints; "" if it is not there, fails or takes longer than some seconds."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=8).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def version_of(package: str) -> str | None:
    """Its version, None where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def driver_version() -> str:
    """Of the NVIDIA driver; "" without one."""
    return said(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]).partition("\n")[0]


def own_address() -> str:
    """What this machine's name stands for; "" if nothing."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return ""


def reachable(address: str) -> bool:
    """Whether something listens at host:port. Addresses of another form are taken as they are."""
    host, _, port = address.rpartition("//")[2].rpartition(":")
    if not host or not port.isdigit():
        return True
    try:
        socket.create_connection((host, int(port)), timeout=3).close()
    except (OSError, OverflowError):  # the latter of a number that no port has
        return False
    return True


def ray_clocks(address: str) -> dict[str, float]:
    """Each node's clock against this one's [s], as far as the nodes answer within some seconds."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ray.init(address=address, logging_level="ERROR", log_to_driver=False)
    try:
        clock = ray.remote(num_cpus=0, max_retries=0)(lambda: time.time())
        nodes = {node["NodeID"]: node["NodeManagerHostname"] for node in ray.nodes() if node["Alive"]}

        def ask() -> dict[str, float]:
            calls = {clock.options(scheduling_strategy=NodeAffinitySchedulingStrategy(n, soft=False)).remote(): name for n, name in nodes.items()}
            done, _ = ray.wait(list(calls), num_returns=len(calls), timeout=10)
            return {calls[call]: ray.get(call) for call in done}

        ask()  # starts the workers
        began = time.time()
        return {name: there - (began + time.time()) / 2 for name, there in ask().items()}
    finally:
        ray.shutdown()


def storage_lacks(folder: Path) -> list[str]:
    """Which of fsync, rename, hard links and locks the folder's file system refuses. Raises OSError if nothing can be written."""
    first, second = (folder / f".doctor-{uuid.uuid4().hex[:8]}" for _ in range(2))
    try:
        first.write_text("first")
        second.write_text("second")
        return [name for name, works in _OPERATIONS.items() if not _works(works, first, second)]
    finally:
        first.unlink(missing_ok=True)
        second.unlink(missing_ok=True)


def _works(operation: Callable[[Path, Path], bool], first: Path, second: Path) -> bool:
    try:
        return operation(first, second)
    except OSError:
        return False


def _fsync(first: Path, _second: Path) -> bool:
    for path in (first, first.parent):
        file = os.open(path, os.O_RDONLY)
        try:
            os.fsync(file)
        finally:
            os.close(file)
    return True


def _lock(first: Path, _second: Path) -> bool:
    with open(first, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return True


def _link(first: Path, _second: Path) -> bool:
    linked = first.with_name(f"{first.name}.link")
    try:
        os.link(first, linked)
        return linked.samefile(first)
    finally:
        linked.unlink(missing_ok=True)


def _rename(first: Path, second: Path) -> bool:
    os.replace(first, second)
    return second.read_text() == "first" and not first.exists()


_OPERATIONS: dict[str, Callable[[Path, Path], bool]] = {"fsync": _fsync, "locks": _lock, "hard links": _link, "rename": _rename}


def rank_clocks(env: Mapping[str, str]) -> list[tuple[str, float]]:
    """(host, time) of each rank, taken at the same moment. Raises what torch raises if they do not meet within half a minute."""
    import torch.distributed as dist

    store = f"tcp://{env['MASTER_ADDR']}:{env['MASTER_PORT']}"
    dist.init_process_group("gloo", init_method=store, rank=int(env["RANK"]), world_size=int(env["WORLD_SIZE"]), timeout=timedelta(seconds=30))
    try:
        found: list[tuple[str, float]] = [("", 0.0)] * dist.get_world_size()
        dist.barrier()
        dist.all_gather_object(found, (socket.gethostname(), time.time()))
        return found
    finally:
        dist.destroy_process_group()
