"""Peak memory of one piece of work in this process, above what was held when it began."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class Peak:
    """rise: bytes at the peak above the start; total: bytes at the peak, weights and everything else included. measured: how."""

    rise: int
    total: int
    measured: str


def peak_of(work: Callable[[], object], device: torch.device) -> Peak | None:
    """Runs `work`. On CUDA of torch's allocator; on a CPU of the resident set, after what was freed before has gone back to the system.

    None where the system does not tell (no Linux, or a sandbox).
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        torch.cuda.synchronize(device)
        total = torch.cuda.max_memory_allocated(device)
        return Peak(total - before, total, "allocated on the device")
    with suppress(OSError, AttributeError):  # another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)
    try:
        _CLEAR.write_text("5")  # the high-water mark begins anew
        before = _status("VmRSS")
    except OSError:
        work()
        return None
    work()
    total = _status("VmHWM")
    return Peak(max(0, total - before), total, "resident set of the process")


def _status(field: str) -> int:
    """Bytes."""
    return next(int(line.split()[1]) for line in _STATUS.read_text(encoding="utf-8").splitlines() if line.startswith(field)) * 1024
