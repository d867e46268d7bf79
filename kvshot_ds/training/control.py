"""Stopping a run in good order: signals and a time limit, agreed on by all ranks; a rank that hangs or died, noticed by the others."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Literal

import torch
import torch.distributed as dist

from kvshot_ds.config import TrainConfig
from kvshot_ds.errors import Preempted
from kvshot_ds.training.engine import World

Phase = Literal["start", "step", "evaluation", "save", "export"]


class Control:
    """What may end a run early. A context for the whole of it, entered before the ranks are joined.

    A signal (SIGTERM, SIGUSR1) or the time limit only raises a flag; once `join`ed, `agreed` tells all ranks at the same step that one of
    them has it raised. Before that, in the phase "start", nothing is lost and Preempted is raised on the spot.
    """

    def __init__(self, config: TrainConfig):
        self.config, self.phase = config, "start"
        self.reason = ""
        self._began = time.monotonic()
        self._before: dict[int, signal.Handlers | int | None] = {}
        self._asked: tuple[dist.Work | None, torch.Tensor] | None = None

    def __enter__(self) -> Control:
        for number in (signal.SIGTERM, signal.SIGUSR1):
            self._before[number] = signal.signal(number, self._signalled)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        self.reason = self.reason or signal.Signals(number).name
        if self.phase == "start":
            raise Preempted(f"{self.reason} before the first step; the same command starts again")

    def join(self, world: World) -> None:
        """All ranks call it once they are connected."""
        self.world, self.group = world, dist.new_group(backend="gloo")

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Names what the run is doing, for the watchdog's report."""
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before

    def agreed(self) -> str:
        """Why all ranks stop now, or "". All ranks call it equally often; the answer is that to the call before, so that nobody waits for it."""
        if not self.reason and 0 < self.config.max_minutes * 60 <= time.monotonic() - self._began:
            self.reason = f"the limit of train.max_minutes={self.config.max_minutes:g}"
        answer = False
        if self._asked is not None:
            work, flag = self._asked
            if work is not None:
                work.wait()
            answer = bool(flag)
        flag = torch.tensor(int(bool(self.reason)))
        self._asked = (dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self.group, async_op=True), flag)
        return (self.reason or "another rank was asked to stop") if answer else ""
