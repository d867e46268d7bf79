"""Shards -> batches. The order is a function of (seed, epoch, step) alone: any world size sees the same optimizer steps, and
a resumed run goes on at its step. Every conversation is seen exactly once per epoch."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from threading import Barrier

import numpy as np
import torch

from kvshot_ds.config import ObjectiveConfig
from kvshot_ds.errors import ConfigError, KvshotError
from kvshot_ds.features.batch import Batch, collate
from kvshot_ds.features.dataset import lowest
from kvshot_ds.features.shard import ShardSet
from kvshot_ds.objectives.alignment import RowPlan, plan_rows

_AHEAD = 4  # steps that a thread reads ahead


@dataclass(frozen=True)
class MicroBatch:
    """One forward of one rank. counted is False for a stand-in: a rank with fewer conversations than the others repeats one
    so that all ranks make the same number of forwards; its loss and metrics are multiplied by zero."""

    batch: Batch
    plan: RowPlan
    counted: bool


@dataclass(frozen=True)
class StepPlan:
    """Which samples each rank reads in each micro-step of one optimizer step: slots[rank][micro] -> sample numbers."""

    slots: tuple[tuple[tuple[int, ...], ...], ...]


def chosen(keys: Sequence[str], most: int) -> list[int]:
    """Numbers of the samples that `train.max_conversations`=most means. Raises ConfigError if there are fewer.

    Those with the lowest keys, as `kvshot data subset` takes them: keys are hashes, and a captured folder lies in their order, a merged one need not.
    """
    if most > len(keys):
        raise ConfigError(f"train.max_conversations={most}, but the train split holds {len(keys)} conversations; 0 takes all of them")
    return lowest(keys, most or len(keys))


class Schedule:
    """The optimizer steps of a run. sizes: (tokens, supervised rows) of the train split. among: numbers of the samples trained on (None: all);
    those without rows are left out."""

    def __init__(
        self, sizes: list[tuple[int, int]], per_step: int, per_micro: int, world: int, epochs: int, max_steps: int, seed: int,
        among: Collection[int] | None = None,
    ):  # fmt: skip
        if per_step % (per_micro * world):
            raise ConfigError(
                f"train.conversations_per_step={per_step} cannot be split evenly: it must be a multiple of "
                f"train.conversations_per_micro_batch={per_micro} x {world} rank(s)"
            )
        self.sizes, self.per_step, self.world, self.per_micro, self.seed = sizes, per_step, world, per_micro, seed
        self.among = range(len(sizes)) if among is None else among
        self.usable = np.array([i for i in self.among if sizes[i][1]], dtype=np.int64)
        if not len(self.usable):
            raise ConfigError("the train split holds no supervised rows: nothing to train on")
        self.steps_per_epoch = -(-len(self.usable) // per_step)
        total = self.steps_per_epoch * epochs
        self.steps = min(total, max_steps) if max_steps else total
        self.accumulation = per_step // (per_micro * world)

    def step(self, number: int) -> StepPlan:
        """Plan of optimizer step `number` (0-based). Conversations are dealt longest first to the lightest slot, so that ranks finish together."""
        epoch, at = divmod(number, self.steps_per_epoch)
        order = np.random.default_rng((self.seed, epoch)).permutation(self.usable)
        mine = sorted(order[at * self.per_step : (at + 1) * self.per_step].tolist(), key=lambda i: (-self.sizes[i][0], i))
        slots: list[list[int]] = [[] for _ in range(self.world * self.accumulation)]
        load = [0] * len(slots)
        for i in mine:
            free = [s for s in range(len(slots)) if len(slots[s]) < self.per_micro]
            slot = min(free, key=lambda s: (load[s], s))
            slots[slot].append(i)
            load[slot] += self.sizes[i][0]
        # Slots are sorted by load before they are dealt to the ranks in turn: the ranks of one micro-step weigh about the same.
        slots = [slots[s] for s in sorted(range(len(slots)), key=lambda s: (-load[s], s))]
        return StepPlan(tuple(tuple(tuple(slots[m * self.world + rank]) for m in range(self.accumulation)) for rank in range(self.world)))


class _Steps:
    """Item n is the list of micro-batches of optimizer step n for one rank."""

    def __init__(self, shards: ShardSet, keys: Collection[str], schedule: Schedule, rank: int, objective: ObjectiveConfig, pin: bool):
        self.shards, self.keys, self.schedule, self.rank = shards, keys, schedule, rank
        self.objective, self.pin = objective, pin

    def __getitem__(self, number: int) -> list[MicroBatch]:
        plan = self.schedule.step(number)
        stand_in = next(slot for rank in plan.slots for slot in rank if slot)
        out = []
        seed = self.schedule.seed * 1_000_003 + number
        for slot in plan.slots[self.rank]:
            batch = collate([self.shards.read_packed(i, self.keys) for i in slot or stand_in[:1]])
            o = self.objective
            rows = plan_rows(batch, o.steps, o.row_fraction, seed, o.anchors, o.drift == "offline")
            out.append(MicroBatch(_pinned(batch), _pinned(rows), bool(slot)) if self.pin else MicroBatch(batch, rows, bool(slot)))
        return out


def step_batches(
    shards: ShardSet, keys: Collection[str], schedule: Schedule, rank: int, objective: ObjectiveConfig, first: int, workers: int, pin: bool
) -> Generator[list[MicroBatch]]:
    """Micro-batches of this rank for the optimizer steps first, first + 1, …; read ahead by `workers` threads (0: as they are asked for).

    Threads, not processes: reading, the search for NaN, decoding and joining leave the interpreter free, and a process would have to hand
    over a copy of every tensor, which costs more than all of them together.
    """
    data = _Steps(shards, keys, schedule, rank, objective, pin)
    if not workers:
        yield from (data[number] for number in range(first, schedule.steps))
        return
    pool = _one_thread_each(workers)
    try:
        ahead: deque[Future[list[MicroBatch]]] = deque()
        for number in range(first, schedule.steps):
            ahead.append(pool.submit(data.__getitem__, number))
            if len(ahead) > _AHEAD * workers:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _one_thread_each(workers: int) -> ThreadPoolExecutor:
    """`workers` running threads in each of which torch computes with one thread, as it does nowhere else. Raises KvshotError if the system has no more."""
    before = torch.get_num_threads()
    running = Barrier(workers + 1)
    pool = ThreadPoolExecutor(workers, "kvshot-loader", _one_thread)
    try:
        for _ in range(workers):
            pool.submit(running.wait)
    except RuntimeError as error:
        running.abort()  # those that were started would wait for the others for ever
        pool.shutdown(cancel_futures=True)
        raise KvshotError(f"train.data_workers={workers}: {error}; lower it, or raise the limit of processes and threads (ulimit -u)") from None
    running.wait()
    torch.set_num_threads(before)  # a part of what it sets is of the whole process
    return pool


def _one_thread() -> None:
    torch.get_num_threads()  # a thread that has not asked yet would take over the process's number later
    torch.set_num_threads(1)


def _pinned(value):
    """Tensors of a batch or a plan moved to pinned memory, for copies that overlap with compute."""

    def pin(x):
        return {k: v.pin_memory() for k, v in x.items()} if isinstance(x, dict) else x.pin_memory() if isinstance(x, torch.Tensor) else x

    return replace(value, **{f.name: pin(getattr(value, f.name)) for f in fields(value)})
