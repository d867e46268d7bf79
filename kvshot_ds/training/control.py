"""Stopping a run in good order: signals and a time limit, agreed on by all ranks; and the watchdog's reason when a rank is gone, stuck or failed.

Light to import: it hears signals while torch and DeepSpeed are still being imported.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Literal

from kvshot_ds.config import TrainConfig
from kvshot_ds.errors import KvshotError, Preempted
from kvshot_ds.training.watchdog import Pulse, Watchdog

if TYPE_CHECKING:
    from kvshot_ds.training.engine import World

Phase = Literal["start", "step", "evaluation", "save", "export"]

_AGAIN = 1.0  # a Ctrl-C so long after the first is a second one; launchers repeat the first [s]
_LINK = 30.0  # for the watchdogs to reach each other, before the run goes on without [s]
_LIMIT = 99  # what ranks agree on in place of a signal's number: train.max_minutes is over


class Control:
    """What may end a run early. A context for the whole of one rank, entered before anything else; signals are heard in the main thread only.

    SIGTERM, SIGUSR1, a first Ctrl-C and the time limit raise a flag, and `agreed` tells all ranks at the same step that one of them has it raised.
    In the phase "start" nothing can be lost: the signal ends it on the spot, by Preempted. A second Ctrl-C ends any phase, by KeyboardInterrupt.
    After Preempted the process stays deaf to SIGTERM and SIGUSR1, with which launchers follow up.
    """

    def __init__(self, config: TrainConfig, spent: dict[str, float] | None = None):
        """spent: gets the seconds of each phase, without those of the phases within it."""
        self.config, self.spent = config, {} if spent is None else spent
        self.heard = 0  # number of the first signal
        self.stopping, self.out_of_time = "", False  # why, once all ranks have agreed to stop; whether it is the time limit
        self._began = self._heard_at = self._turned = time.monotonic()
        self._pulse = Pulse()
        self._before: dict[int, Any] = {}
        self._leaving = False
        self._asked: tuple[Any, Any] | None = None  # (work or None, flag) of the last question

    def __enter__(self) -> Control:
        self._watchdog = Watchdog(self._pulse, self.config.hang_minutes * 60)
        if threading.current_thread() is threading.main_thread():
            self._waker = signal.set_wakeup_fd(self._watchdog.bell.fileno(), warn_on_full_buffer=False)
            for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
                if number != signal.SIGINT or signal.getsignal(number) is signal.default_int_handler:  # else someone handles, or ignores, Ctrl-C
                    self._before[number] = signal.signal(number, self._signalled)
        self._watchdog.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._leaving = True
        self._turn(self._pulse.phase)
        if error is None:
            self._answer()
        if self._before:
            signal.set_wakeup_fd(self._waker)
        found = self._watchdog.close(error, doubtful(error))
        for number, handler in self._before.items():
            deaf = isinstance(error, Preempted) and number != signal.SIGINT
            signal.signal(number, signal.SIG_IGN if deaf else handler)
        if error is None or found is None or self._watchdog.rank in found.ranks:
            return
        if doubtful(error):
            ended = Preempted(found.text) if found.status == Preempted.STATUS else KvshotError(found.elsewhere)
            ended.told = found.told and isinstance(ended, Preempted)
            raise ended from None
        if isinstance(error, KvshotError):
            error.told = str(error) == found.text

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._leaving:
            return
        if number == signal.SIGINT and (self._pulse.phase == "start" or (self.heard == number and now - self._heard_at > _AGAIN)):
            raise KeyboardInterrupt
        if self.heard:
            return
        self.heard, self._heard_at = number, now
        if self._pulse.phase == "start":
            raise self._nothing_lost()
        if number == signal.SIGINT:
            os.write(2, b"\nkvshot: stops after this step, with a checkpoint; Ctrl-C again stops at once\n")

    def _nothing_lost(self) -> Preempted:
        return Preempted(f"{signal.Signals(self.heard).name} before the first step; the same command starts again")

    def join(self, world: World) -> None:
        """Makes the ranks known to each other's watchdogs. All ranks call it once they are connected."""
        import torch.distributed as dist

        from kvshot_ds.training.engine import side_group

        self.group = side_group("control", timedelta(days=30))  # it may wait as long as the watchdog lets it
        self._watchdog.rank = world.rank
        if world.size == 1:
            return
        line: list[Any] = [None]
        if world.rank == 0:
            host, key = os.environ.get("MASTER_ADDR") or socket.gethostname(), os.urandom(32)
            here = host == "localhost" or host.startswith("127.")
            line = [(host, self._watchdog.listen("127.0.0.1" if here else "", world.size - 1, key), key, os.getpid())]
        dist.broadcast_object_list(line, 0, group=self.group)
        if world.rank:
            self._watchdog.dial(*line[0])
        self._watchdog.linked.wait(_LINK)

    def beat(self, step: int | None = None) -> None:
        """The rank has made progress (and works on `step`): without one for train.hang_minutes on any rank, the run is taken to hang."""
        self._pulse.beats += 1
        if step is not None:
            self._pulse.step = step

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Names what the rank is doing, until an error leaves it. Raises Preempted if what ran in the phase "start" swallowed a signal."""
        before = self._pulse.phase
        if before == "start" and self.heard:
            raise self._nothing_lost()
        self._turn(phase)
        self.beat()
        yield
        self.beat()
        if before != "start":  # which is over for good
            self._turn(before)

    def _turn(self, phase: str) -> None:
        now, old = time.monotonic(), self._pulse.phase
        self.spent[old] = self.spent.get(old, 0.0) + now - self._turned
        self._pulse.phase, self._turned = phase, now

    def agreed(self, now: bool = False) -> str:
        """Why all ranks stop, or "". All ranks call it equally often.

        The answer is that to the call before, so that nobody waits for it; with `now` it is waited for.
        """
        import torch
        import torch.distributed as dist

        self.beat()
        self._answer()
        if self.stopping:
            return self.stopping
        number = self.heard or (_LIMIT if 0 < self.config.max_minutes * 60 <= time.monotonic() - self._began else 0)
        flag = torch.tensor(number and (self._watchdog.rank + 1) * 100 + number)  # of several, that of the highest rank is named
        self._asked = (dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self.group, async_op=True), flag)
        if now:
            self._answer()
        return self.stopping

    def _answer(self) -> None:
        if self._asked is None:
            return
        (work, flag), self._asked = self._asked, None
        if work is not None:
            work.wait()
        if code := int(flag):
            rank, number = divmod(code, 100)
            limit, self.out_of_time = f"the limit of train.max_minutes={self.config.max_minutes:g}", number == _LIMIT
            self.stopping = limit if self.out_of_time else f"{signal.Signals(number).name} to rank {rank - 1}"


def doubtful(error: BaseException | None) -> bool:
    """Whether it may be the doing of another rank: collectives report that as a RuntimeError, which others may have put into words of theirs."""
    return error is not None and (isinstance(error, RuntimeError) or doubtful(error.__cause__ or error.__context__))
