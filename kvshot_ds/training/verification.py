"""What is settled before the first step by ranks that share the work: each looks at its part of the shards; what rank 0 finds out is told to all."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import torch.distributed as dist

from kvshot_ds.config import TrainConfig
from kvshot_ds.errors import KvshotError
from kvshot_ds.features.shard import ShardReader, ShardSet
from kvshot_ds.training.engine import World

T = TypeVar("T")
_JOBS = 4  # shards that a rank reads at a time


def told_by_first(world: World, call: Callable[[], T]) -> T:
    """`call()` of rank 0, on every rank; what it raises there is raised everywhere. All ranks call it. For what every rank would read the same files for."""
    outcome: list[Any] = [None, None]
    if world.rank == 0:
        try:
            outcome[0] = call()
        except KvshotError as error:
            outcome[1] = error
        except Exception as error:  # the others would wait for this rank
            dist.broadcast_object_list([None, KvshotError(f"rank 0: {type(error).__name__}: {error}")], src=0)
            raise
    dist.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def faults(shards: ShardSet, world: World, every_byte: bool, seen: Callable[[], object] = lambda: None) -> dict[int, str]:
    """What is wrong with shards, by their number; the same on every rank. All ranks call it; each looks at its share of the shards.

    every_byte: compare each with its checksum; else only whether it is there and as long as its index says. seen: called after each shard.
    """

    def fault(number: int) -> str:
        try:
            (ShardReader.check_bytes if every_byte else ShardReader.check_size)(shards.readers[number])
        except KvshotError as error:
            return str(error)
        return ""

    mine: dict[int, str] = {}
    numbers = range(world.rank, len(shards.readers), world.size)
    with ThreadPoolExecutor(_JOBS) as pool:
        for number, what in zip(numbers, pool.map(fault, numbers), strict=True):
            seen()
            if what:
                mine[number] = what
    parts: list[Any] = [None] * world.size
    dist.all_gather_object(parts, mine)
    return dict(sorted(item for part in parts for item in part.items()))


def left_out(shards: ShardSet, config: TrainConfig, world: World, seen: Callable[[], object] = lambda: None) -> frozenset[int] | None:
    """Numbers of the samples that `train.on_bad_data`=skip leaves out, with one message that names their shards; None if nothing may be left out.

    All ranks call it. Raises KvshotError, the same on each, naming every bad or missing shard, with on_bad_data=stop; with skip, if nothing is left.
    """
    found = faults(shards, world, config.verify_shards, seen)
    named = "".join(f"\n  {what}" for what in found.values()) if len(found) > 1 else next(iter(found.values()), "")
    if config.on_bad_data == "stop":
        if found:
            head = f"{len(found)} of {len(shards.readers)} shards cannot be used:" if len(found) > 1 else ""
            raise KvshotError(f"{head}{named}; train.on_bad_data=skip leaves their conversations out")
        return None
    numbers = frozenset(np.flatnonzero(np.isin(shards.shard_of, list(found))).tolist())
    if len(numbers) == len(shards):
        raise KvshotError(f"no shard can be used: {named}")
    if found and world.rank == 0:
        print(f"left out: {len(numbers)} of {len(shards)} conversations, in {len(found)} of {len(shards.readers)} shards: {named}", flush=True)
    return numbers
