"""Why a trial failed: whether another try may help, and what to tell of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvshot_ds.errors import KvshotError, Preempted
from kvshot_ds.training.actors import WorkerDied, verdict
from kvshot_ds.training.verdict import AGAIN

_LINES = 30  # of a log that are shown
_READ = 1 << 16  # of its end [bytes]


@dataclass(frozen=True)
class Failure:
    """again: whether another try may go further. asked: the training stopped, with a checkpoint, because it was asked to."""

    reason: str
    again: bool
    asked: bool = False


def judge(errors: list[Exception], last: bool, memory: Callable[[], str]) -> Failure:
    """What the errors of a trial's ranks come to. last: it will not be tried again. memory: what the training needs by estimate, in a sentence.

    What a rank says of itself would come again (options, data, a loss that is not finite), and so would a lack of memory. A worker that died, a hang and
    errors of the program's surroundings may not.
    """
    if any(_no_memory(error) for error in errors):
        first = next(error for error in errors if _no_memory(error))
        return Failure(f"out of memory: {_line(first)}; {memory()}", again=False)
    found = verdict(errors, "")
    if isinstance(found, Preempted):
        return Failure(str(found), again=True, asked=True)
    if isinstance(found, WorkerDied):
        probably = f"; probably out of memory, if nobody killed it: {memory()}" if last else ""
        return Failure(f"a worker died ({found}){probably}", again=True)
    if isinstance(found, KvshotError):
        return Failure(str(found), again=AGAIN in str(found))
    return Failure(_line(found), again=True)


def _no_memory(error: Exception) -> bool:
    """torch's error on an accelerator or on the CPU, Python's, or Ray's for a process that it ended because its node ran low."""
    import torch
    from ray.exceptions import OutOfMemoryError

    cause = getattr(error, "cause", None) or error
    return isinstance(error, OutOfMemoryError) or isinstance(cause, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(cause)


def _line(error: Exception) -> str:
    cause = getattr(error, "cause", None) or error
    return f"{type(cause).__name__}: {str(cause).strip().partition(chr(10))[0][:300]}"


def tail(path: Path) -> str:
    """The last lines of a log; of a line that was drawn over and over (a progress bar), what it showed last. "" if there is no log."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, path.stat().st_size - _READ))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return ""
    lines = [line.rstrip("\r").rpartition("\r")[2].rstrip() for line in text.split("\n")]
    return "\n".join([line for line in lines if line][-_LINES:])
