"""Shards -> batches: the conversations of each optimizer step (schedule.py) read, joined and planned, ahead of the step that takes them."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from itertools import chain, islice
from threading import Barrier
from typing import Any, TypeVar

import torch
from tqdm import tqdm

from kvshot_ds.config import ObjectiveConfig
from kvshot_ds.errors import ConfigError, KvshotError
from kvshot_ds.features.batch import Batch, collate
from kvshot_ds.features.codec import Stored
from kvshot_ds.features.shard import ShardSet
from kvshot_ds.objectives.alignment import RowPlan, plan_rows
from kvshot_ds.training.schedule import Schedule, StepPlan

AHEAD = 4  # steps that a thread reads ahead
_ATTEMPTS = 100  # conversations tried as a stand-in

T = TypeVar("T", Batch, RowPlan)
Read = tuple[str, dict[str, torch.Tensor | Stored]]


@dataclass(frozen=True)
class MicroBatch:
    """One forward of one rank. counted is False for a stand-in: a rank with fewer conversations than the others reads another one
    so that all ranks make the same number of forwards; its loss and metrics are multiplied by zero. skipped: keys of the conversations that
    belong here and were left out because they cannot be read."""

    batch: Batch
    plan: RowPlan
    counted: bool
    skipped: tuple[str, ...] = ()


class _Steps:
    """Item n is the list of micro-batches of optimizer step n for one rank. Threads share it."""

    def __init__(
        self, shards: ShardSet, keys: Collection[str], schedule: Schedule, rank: int, objective: ObjectiveConfig, pin: bool, left_out: Collection[int] | None
    ):
        self.shards, self.keys, self.schedule, self.rank = shards, keys, schedule, rank
        self.objective, self.pin, self.left_out = objective, pin, left_out
        self.named: dict[int, object] = {}  # shards of which a conversation was found that cannot be read

    def __getitem__(self, number: int) -> list[MicroBatch]:
        plan = self.schedule.step(number)
        out = []
        seed = self.schedule.seed * 1_000_003 + number
        for slot in plan.slots[self.rank]:
            read = {i: self._read(i) for i in slot}
            samples = [sample for sample in read.values() if sample]
            batch = collate(samples or [self._stand_in(plan, number)])
            o = self.objective
            rows = plan_rows(batch, o.steps, o.row_fraction, seed, o.anchors, o.drift == "offline")
            if self.pin:
                batch, rows = _pinned(batch), _pinned(rows)
            out.append(MicroBatch(batch, rows, bool(samples), tuple(self.shards.samples[i].key for i, sample in read.items() if not sample)))
        return out

    def _read(self, i: int) -> Read | None:
        """Sample `i`; None if it is left out. Raises KvshotError if it cannot be read and is not to be left out."""
        if self.left_out and i in self.left_out:
            return None
        try:
            return self.shards.read_packed(i, self.keys)
        except ConfigError:
            raise
        except KvshotError as error:
            if self.left_out is None:
                raise KvshotError(f"{error}; train.on_bad_data=skip leaves out what cannot be read") from None
            me = object()
            if self.named.setdefault(int(self.shards.shard_of[i]), me) is me:  # of several threads at once, one
                tqdm.write(f"left out: {error}. Further conversations of this shard that cannot be read are left out without a line; all are counted")
            return None

    def _stand_in(self, plan: StepPlan, number: int) -> Read:
        """A conversation that can be read, of this step (the shortest) or else of those after it in the epoch; each rank finds its own.

        Raises KvshotError after many attempts.
        """
        s = self.schedule
        epoch, at = divmod(number, s.steps_per_epoch)
        here = sorted((i for rank in plan.slots for slot in rank for i in slot), key=lambda i: s.sizes[i])
        others = (int(i) for part in (s.order(epoch)[(at + 1) * s.per_step :], s.order(epoch)) for i in part)
        left_out = self.left_out or ()
        for i in islice((i for i in chain(here, others) if i not in left_out), _ATTEMPTS):
            if sample := self._read(i):
                return sample
        raise KvshotError(
            f"{self.shards.readers[0].folder}: none of {_ATTEMPTS} conversations of step {number + 1} and after it can be read; "
            f"is the storage there? kvshot data verify {self.shards.readers[0].folder} says what is wrong"
        )


def step_batches(
    shards: ShardSet, keys: Collection[str], schedule: Schedule, rank: int, objective: ObjectiveConfig, first: int, workers: int, pin: bool,
    left_out: Collection[int] | None = None,
) -> Generator[list[MicroBatch]]:  # fmt: skip
    """Micro-batches of this rank for the optimizer steps first, first + 1, …; read ahead by `workers` threads (0: as they are asked for).

    left_out: numbers of samples that are not read; what cannot be read is then left out too and named in `MicroBatch.skipped`. None: it is a KvshotError
    that names shard and sample. The order of the others is the same either way.

    Threads, not processes: reading, the search for NaN, decoding and joining leave the interpreter free, and a process would have to hand
    over a copy of every tensor, which costs more than all of them together.
    """
    data = _Steps(shards, keys, schedule, rank, objective, pin, left_out)
    if not workers:
        yield from (data[number] for number in range(first, schedule.steps))
        return
    pool = _one_thread_each(workers, torch.cuda.current_device() if pin else None)
    try:
        ahead: deque[Future[list[MicroBatch]]] = deque()
        for number in range(first, schedule.steps):
            ahead.append(pool.submit(data.__getitem__, number))
            if len(ahead) > AHEAD * workers:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _one_thread_each(workers: int, device: int | None) -> ThreadPoolExecutor:
    """`workers` running threads in each of which torch computes with one thread, as it does nowhere else. Raises KvshotError if the system has no more.

    device: the CUDA device of this process, for threads that pin memory: a thread starts on device 0, and the ranks of a node would all take memory there.
    """
    before = torch.get_num_threads()
    running = Barrier(workers + 1)
    pool = ThreadPoolExecutor(workers, "kvshot-loader", _one_thread, (device,))
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


def _one_thread(device: int | None) -> None:
    if device is not None:
        torch.cuda.set_device(device)
    torch.get_num_threads()  # a thread that has not asked yet would take over the process's number later
    torch.set_num_threads(1)


def _pinned(value: T) -> T:
    """Tensors of a batch (packed ones too) or a plan moved to pinned memory, for copies that overlap with compute.

    They may be dropped while such a copy is under way: torch notes the stream of a copy with the pinned block and hands the block out again only
    when the stream has passed it.
    """

    def pin(x: Any) -> Any:
        return {k: v.pin_memory() for k, v in x.items()} if isinstance(x, dict) else x.pin_memory() if isinstance(x, torch.Tensor) else x

    return replace(value, **{f.name: pin(getattr(value, f.name)) for f in fields(value)})
