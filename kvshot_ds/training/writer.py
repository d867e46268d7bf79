"""How the files of a checkpoint reach the disk: at once, or by a thread beside the training.

DeepSpeed 0.19's own writers that work beside the training (`checkpoint.writer` in its configuration) are not used: their reader, torch.load as it is
by default since 2.6, refuses the optimizer files that they write; the fast one needs a compiled operator; and none waits for the disk.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from deepspeed.checkpoint.utils import clone_tensors_for_torch_save
from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine


class Writer(TorchCheckpointEngine):
    """Takes the place of a DeepSpeed engine's `checkpoint_engine`, its extension point for storage; other files are `put`.

    A failure is kept for `failure`, not raised: DeepSpeed passes barriers between its files, at which the other ranks would wait for ever. What counts
    as written is on the disk and not only in the system's memory. beside: files are copied in memory, and written by a thread.
    """

    def __init__(self, beside: bool):
        super().__init__()
        self._pool = ThreadPoolExecutor(1, "kvshot-checkpoint") if beside else None
        self._ahead: list[Future[None]] = []
        self._failure = ""

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        self._keep(lambda: Path(path).mkdir(parents=True, exist_ok=exist_ok))

    def save(self, state_dict: Any, path: str) -> None:
        """DeepSpeed's files. Under `beside`, `state_dict` may change as soon as this returns."""
        if self._pool is not None:
            state_dict = clone_tensors_for_torch_save(state_dict)
        self._write(Path(path), lambda file: torch.save(state_dict, file))

    def put(self, path: Path, data: bytes) -> None:
        self._write(path, lambda file: file.write(data))

    def failed(self, error: Exception) -> None:
        self._failure = self._failure or f"{type(error).__name__}: {error}".splitlines()[0]

    def done(self) -> bool:
        return all(future.done() for future in self._ahead)

    def failure(self) -> str:
        """Waits for all files; what went wrong since the last call, or ''."""
        for future in self._ahead:
            future.result()
        self._ahead.clear()
        failure, self._failure = self._failure, ""
        return failure

    def _write(self, path: Path, fill: Callable[[Any], object]) -> None:
        def write() -> None:
            with open(path, "wb") as file:
                fill(file)
                file.flush()
                os.fsync(file.fileno())

        if self._pool is None:
            self._keep(write)
        else:
            self._ahead.append(self._pool.submit(self._keep, write))

    def _keep(self, call: Callable[[], object]) -> None:
        try:
            call()
        except (OSError, RuntimeError) as error:  # torch's writer reports a full disk as a RuntimeError
            self.failed(error)
