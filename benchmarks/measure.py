"""Seconds and peak memory of a case, each in a fresh process: `python -m benchmarks.X --case '{...}'` prints one JSON line.

Memory is the growth of the process's resident high-water mark while the case runs once, after the imports
and after its inputs (parameters and features, the same for every contender) were made. It is taken in a process of its
own, in which glibc returns what is freed at once; seconds are taken with the allocator as it is, of the second of two
runs. Contenders take turns, repeat by repeat, so that a slow minute of the machine hits them alike; medians are printed.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch

_ROOT = Path(__file__).parents[1]
MIB = 1 << 20
_STATUS = Path("/proc/self/status")
# cpu: of all threads together; with one thread it is what an idle machine would take, whoever else is at work on it.
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def child_options(command: Callable[..., None]) -> Callable[..., None]:
    """The options of every benchmark that say how its cases are run."""
    clock = "cpu: of all threads together, for a machine that is shared"
    for option in (
        click.option("--case", hidden=True, help="run one case in this process"),
        click.option("--repeats", default=3, show_default=True, help="processes for each case; medians are printed"),
        click.option("--clock", type=click.Choice(sorted(CLOCKS)), default="wall", show_default=True, help=clock),
        click.option("--threads", default=1, show_default=True, help="CPU threads"),
    ):
        command = option(command)
    return command


@dataclass(frozen=True)
class Measured:
    """seconds: of a timed run, or 0; peak: bytes above the start; value: a number the contenders must agree on."""

    seconds: float
    peak: float
    value: float


@dataclass(frozen=True)
class Mode:
    """How a child runs its case: CPU threads; one of CLOCKS, or None to look at the memory alone."""

    threads: int
    clock: str | None


@dataclass(frozen=True)
class Options:
    """How cases are run: CPU threads, which of CLOCKS, processes for each case."""

    threads: int
    clock: str
    repeats: int

    def __str__(self) -> str:
        return f"{self.threads} thread(s), {self.clock} clock, median of {self.repeats}"


def high_water() -> int:
    """Most bytes this program has held. On Linux not `ru_maxrss`, which starts at what the parent held."""
    if _STATUS.is_file():
        return _status("VmHWM")
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def resident() -> int:
    """Bytes that this program holds now. On Linux alone."""
    return _status("VmRSS")


def _status(field: str) -> int:
    return next(int(line.split()[1]) for line in _STATUS.read_text(encoding="utf-8").splitlines() if line.startswith(field)) * 1024


def measure(run: Callable[[], float], mode: Mode) -> Measured:
    """In the child: `run` does the work of the case and returns its value."""
    torch.set_num_threads(mode.threads)
    start = high_water()
    value = run()
    peak = high_water() - start
    if mode.clock is None:
        return Measured(0.0, peak, value)
    now = CLOCKS[mode.clock]
    begin = now()
    run()
    return Measured(now() - begin, peak, value)


def asked(case: str) -> tuple[dict[str, Any], Mode]:
    """In the child: what `contend` asks for."""
    found = json.loads(case)
    return found["case"], Mode(**found["mode"])


def report(measured: Measured) -> None:
    """In the child: the line that `contend` reads."""
    print(json.dumps(asdict(measured)))


def contend(module: str, cases: Sequence[dict[str, Any]], options: Options) -> list[Measured]:
    """In the parent: memory and median seconds of each case, run in turn.

    Raises RuntimeError with the output of a case that fails, or, before anything is timed, if the values differ by more than 1e-4.
    """
    memory = [_child(module, case, Mode(options.threads, None)) for case in cases]
    for case, other in zip(cases, memory, strict=True):
        if not abs(other.value - memory[0].value) <= 1e-4 * abs(memory[0].value):
            raise RuntimeError(f"{module} {cases[0]} gives {memory[0].value}, {case} gives {other.value}; they must agree to 1e-4")
    rounds = [[_child(module, case, Mode(options.threads, options.clock)) for case in cases] for _ in range(options.repeats)]
    seconds = [statistics.median(m.seconds for m in found) for found in zip(*rounds, strict=True)]
    return [replace(m, seconds=s) for m, s in zip(memory, seconds, strict=True)]


def _child(module: str, case: dict[str, Any], mode: Mode) -> Measured:
    command = [sys.executable, "-m", module, "--case", json.dumps({"case": case, "mode": asdict(mode)})]
    env = {**os.environ, "OMP_NUM_THREADS": str(mode.threads)}
    if mode.clock is None:
        env["MALLOC_MMAP_THRESHOLD_"] = str(1 << 16)
    done = subprocess.run(command, cwd=_ROOT, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{module} {case} ended with {done.returncode} (-9: out of memory):\n{done.stderr[-2000:]}")
    return Measured(**json.loads(done.stdout.splitlines()[-1]))


def available_memory() -> int:
    """Bytes that can be taken without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def linear_fit(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Slope of y over x by least squares, and R^2 (1 if y is constant)."""
    slope, offset = np.polyfit(x, y, 1)
    left = np.asarray(y) - (slope * np.asarray(x) + offset)
    spread = float(np.var(y))
    return float(slope), 1 - float(left.var()) / spread if spread else 1.0


def ratio(a: float, b: float) -> str:
    """a / b for a table; a process too small to grow has no memory to compare."""
    return f"{a / b:.2f}" if b else "-"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns aligned to the right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    return "\n".join("  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in (header, *rows))
