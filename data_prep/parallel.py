"""Blocks of work over processes of this machine, in order, with a bounded number of blocks under way."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait
from typing import Any, Generic, Self, TypeVar

from kvshot_ds.errors import KvshotError

Block = TypeVar("Block")
Result = TypeVar("Result")

_work: Callable[[Any], Any]  # of this process, if it is one of `Processes`


class Processes(Generic[Block, Result]):
    """`work(block)` for each block, on `count` processes, or here if it is one. A context.

    work is sent to each process once, so it has to be picklable; what it loads for itself stays with its process.
    """

    def __init__(self, work: Callable[[Block], Result], count: int) -> None:
        self.work, self.count = work, count
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Self:
        if self.count > 1:
            # spawned: a fork of a process with threads (Ray, tokenizers) may hang
            self._pool = ProcessPoolExecutor(self.count, multiprocessing.get_context("spawn"), _begin, (self.work,))
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def map(self, blocks: Iterable[Block]) -> Iterator[Result]:
        """Results in the order of the blocks. Raises what `work` raises, KvshotError if a process dies."""
        if self._pool is None:
            yield from map(self.work, blocks)
            return
        under_way: deque[Future[Result]] = deque()
        try:
            for block in blocks:
                under_way.append(self._pool.submit(_do, block))
                if len(under_way) > 2 * self.count:
                    yield under_way.popleft().result()
            while under_way:
                yield under_way.popleft().result()
        except BrokenProcessPool:
            raise KvshotError("a process of prep died; if memory ran out, lower prep.tokenizer_processes, then run the command again") from None


def _begin(work: Callable[[Any], Any]) -> None:
    global _work
    _work = work
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes share the cores already
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A killed parent closes no pipe that its children would notice."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def _do(block: Any) -> Any:
    return _work(block)
