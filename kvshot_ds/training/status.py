"""status.json of a run folder: how far the run is and whether it goes on, for `kvshot runs`. Light to import: no torch."""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from kvshot_ds.files import read_json, write_json
from kvshot_ds.typed import parse

NAME = "status.json"
State = Literal["running", "stopped", "failed", "complete"]


@dataclass(frozen=True)
class Status:
    """state: as rank 0 left it; a killed one leaves "running". began: of this very process, on host under pid; the three tell whether it lives.

    started: the run's first start; updated: the last sign of life [s since 1970]. resumed_from: steps of later starts. scalars: the last point of each tag.
    """

    state: State
    step: int
    steps: int
    ranks: int
    started: float
    updated: float
    host: str
    pid: int
    began: float
    reason: str = ""
    resumed_from: tuple[int, ...] = ()
    scalars: dict[str, float | None] = field(default_factory=dict)


def read(folder: Path) -> Status | None:
    """What stands in the run folder; None where nothing readable does."""
    try:
        return parse(Status, read_json(folder / NAME))
    except (OSError, ValueError):  # JsonError is one
        return None


def began(pid: int) -> float | None:
    """When the process `pid` of this machine was started; None if there is none [s since 1970]."""
    import psutil

    try:
        return psutil.Process(pid).create_time()
    except psutil.Error:
        return None


class StatusFile:
    """The tracker that writes it, once a point."""

    faults: tuple[type[Exception], ...] = (OSError,)

    def __init__(self, folder: Path, step: int, steps: int, ranks: int, resumed_from: tuple[int, ...]):
        now, before = time.time(), read(folder)
        pid = os.getpid()
        self.folder = folder
        self.status = Status(
            "running", step, steps, ranks, before.started if before and step else now, now, socket.gethostname(), pid, began(pid) or now, "", resumed_from,
            before.scalars if before and step else {},
        )  # fmt: skip
        self._write()

    def _write(self, **changed: Any) -> None:
        self.status = replace(self.status, updated=time.time(), **changed)
        write_json(self.folder / NAME, asdict(self.status))

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        plain = {tag: float(value) if math.isfinite(value) else None for tag, value in values.items()}
        self._write(step=step, scalars={**self.status.scalars, **plain})

    def histogram(self, tag: str, values: Any, step: int) -> None:
        return

    def close(self, state: State, reason: str) -> None:
        self._write(state=state, reason=reason)
