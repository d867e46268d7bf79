"""One of several ranks that look at shards together, and what starts them: `python -m tests.training.looking FOLDER OUT RANK SIZE`"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from kvshot_ds.config import TrainConfig
from kvshot_ds.errors import ConfigError
from kvshot_ds.features.shard import ShardReader, ShardSet
from kvshot_ds.training.engine import World
from kvshot_ds.training.verification import left_out, told_by_first
from tests.training.runs import rank_environment


def outcome(call: Callable[[], Any]) -> Any:
    """What `call` returns, or the kind and text of its error."""
    try:
        found = call()
    except Exception as error:  # noqa: BLE001 - whatever it is, it is what is tested
        return [type(error).__name__, str(error)]
    return sorted(found) if isinstance(found, frozenset) else found


def look(folder: Path, world: World) -> dict[str, Any]:
    """Every way to look at the train shards of `folder`, and what this rank read of them for it."""
    shards, read, calls, plain = ShardSet.open(folder, "train", look=False), [], [], ShardReader.check_bytes
    ShardReader.check_bytes = lambda reader: read.append(reader.index.shard) or plain(reader)
    found = {
        f"{on_bad_data} {verify}": outcome(
            lambda o=on_bad_data, v=verify: left_out(shards, TrainConfig(on_bad_data=o, verify_shards=v), world, lambda: calls.append(1))
        )
        for verify in (True, False)
        for on_bad_data in ("stop", "skip")
    }

    def fails(error: Exception) -> Callable[[], Any]:
        def call() -> None:
            raise error

        return call

    found["told"] = outcome(lambda: told_by_first(world, lambda: {"rank": world.rank}))
    found["error"] = outcome(lambda: told_by_first(world, fails(ConfigError("no such target"))))
    found["fault"] = outcome(lambda: told_by_first(world, fails(ValueError("17"))))
    found["afterwards"] = outcome(lambda: told_by_first(world, lambda: "in step"))
    return {**found, "read": sorted(read), "calls": len(calls)}


def ranks(folder: Path, out: Path, size: int) -> list[dict[str, Any]]:
    """`look` of each of `size` ranks."""
    out.mkdir()
    command = [sys.executable, "-m", "tests.training.looking", str(folder), str(out)]
    running = [
        subprocess.Popen([*command, str(rank), str(size)], env=rank_environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for rank in range(size)
    ]
    try:
        printed = [process.communicate(timeout=240)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    assert all(process.returncode == 0 for process in running), "\n".join(printed)
    return [{**json.loads((out / f"{rank}.json").read_text()), "printed": printed[rank]} for rank in range(size)]


def main(folder: str, out: str, rank: str, size: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{out}/meeting", rank=int(rank), world_size=int(size))
    found = look(Path(folder), World(int(rank), int(size), torch.device("cpu")))
    (Path(out) / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
