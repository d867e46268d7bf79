"""One capture worker: a slice of the prepared conversations in, one shard of features out, the same bytes every time."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from data_prep.pool import clear_leftovers
from kvshot_ds.config import TargetConfig
from kvshot_ds.errors import KvshotError
from kvshot_ds.features.manifest import KEY, Rejected, ShardIndex, Split, shard_name
from kvshot_ds.features.shard import ShardWriter, all_finite, written_in
from kvshot_ds.features.spec import FeatureSpec
from kvshot_ds.files import AnyPath, disk_full

if TYPE_CHECKING:
    from kvshot_ds.target import Target


@dataclass(frozen=True)
class Unit:
    """The work of one shard: `count` lines of `file` from byte `offset`, the first being line `first_line` (1-based)."""

    split: Split
    number: int
    file: Path
    offset: int
    first_line: int
    count: int

    @property
    def shard(self) -> str:
        return shard_name(self.split, self.number)

    def __str__(self) -> str:
        return f"{self.shard} (lines {self.first_line} to {self.first_line + self.count - 1} of {self.file})"


@dataclass(frozen=True)
class CaptureJob:
    """What every unit of a capture has in common. threads: CPU threads of one worker, fixed so that sums round the same way everywhere.
    spool: local folder of tars on their way to a URL; None: the system's temporary folder."""

    target: TargetConfig
    spec: FeatureSpec
    tokens_per_batch: int
    folder: AnyPath
    threads: int
    spool: Path | None = None


@dataclass(frozen=True)
class Captured:
    """A shard that was written. seconds: from the first line read to the index."""

    index: ShardIndex
    seconds: float


@dataclass(frozen=True)
class Prepared:
    """One prepared conversation. key names its sample: the conversation's id, or where that is no plain name, split and line. tokens: S ids.
    turn [S] int32, as in spec.py."""

    key: str
    line: int
    tokens: list[int]
    turn: npt.NDArray[np.int32]
    meta: dict[str, Any]


class CaptureWorker:
    """Holds the target and captures units; runs as a Ray actor, or directly. Called from two threads, it has the target work on one
    unit while the other is flushed to disk or sent to its URL."""

    def __init__(self, job: CaptureJob) -> None:
        self.job = job
        self._target: Target | None = None
        self._turn = Lock()

    def work(self, unit: Unit) -> Captured:
        """Writes the shard of `unit` and its index. Raises KvshotError: target not loadable, disk full, out of memory."""
        began = time.perf_counter()
        try:
            with self._turn:
                target = self._load()
            return Captured(capture_unit(target, self.job, unit, self._turn), round(time.perf_counter() - began, 3))
        except torch.OutOfMemoryError as error:
            text = f"{unit}: {str(error).splitlines()[0]}; lower capture.tokens_per_batch (now {self.job.tokens_per_batch})"
        except OSError as error:
            full = disk_full(error, written_in(self.job.folder, self.job.spool))
            text = f"{unit.shard}: {full}" if full else f"{unit}: {error}"
        raise KvshotError(text)

    def _load(self) -> Target:
        # here and not in __init__, so that a target that does not load is an error of the unit and not a dead actor
        if self._target is None:
            from transformers.utils import logging

            from kvshot_ds.target import Target

            logging.disable_progress_bar()
            clear_leftovers(written_in(self.job.folder, self.job.spool))
            torch.set_num_threads(self.job.threads)
            self._target = Target.load(self.job.target)
        return self._target


def capture_unit(target: Target, job: CaptureJob, unit: Unit, turn: AbstractContextManager[Any] | None = None) -> ShardIndex:
    """Target features of every usable conversation of `unit`, as one shard in `job.folder`.

    The tar holds them batch by batch, so that no more than two batches are in memory: one is written while the target works on the
    next. The index lists them in the order of the prepared file. turn: held while the target is used.
    """
    conversations, rejected = read_unit(unit, target.geometry.vocab_size, target.geometry.max_positions)
    with ShardWriter(job.folder, unit.shard, job.spool) as writer:
        with turn or nullcontext(), ThreadPoolExecutor(1) as background:
            writing: Future[list[Rejected]] | None = None
            for batch in batches(conversations, job.tokens_per_batch):
                samples = target.features([c.tokens for c in batch], job.spec, [c.turn for c in batch])
                if writing:
                    rejected += writing.result()
                writing = background.submit(_write, writer, unit, batch, samples)
            if writing:
                rejected += writing.result()
        left_out = {r.line for r in rejected}
        order = [c.key for c in conversations if c.line not in left_out]
        return writer.commit(order, sorted(rejected, key=lambda r: r.line))


def read_unit(unit: Unit, vocab_size: int, max_positions: int) -> tuple[list[Prepared], list[Rejected]]:
    """The conversations of `unit`, and those that the target cannot take, each with its reason."""
    usable: list[Prepared] = []
    rejected: list[Rejected] = []
    lines: dict[str, int] = {}
    with open(unit.file, "rb") as file:
        file.seek(unit.offset)
        for line in range(unit.first_line, unit.first_line + unit.count):
            raw = file.readline()
            try:
                found = _parse(raw, unit, line, vocab_size, max_positions)
                if lines.setdefault(found.key, line) != line:
                    raise ValueError(f"its id {found.key} is that of line {lines[found.key]}")
                usable.append(found)
            except (ValueError, RecursionError) as error:
                rejected.append(_reject(unit, line, str(error), raw.decode("utf-8", "replace")))
    return usable, rejected


def _parse(raw: bytes, unit: Unit, line: int, vocab_size: int, max_positions: int) -> Prepared:
    """Raises ValueError saying why the line is of no use."""
    record = json.loads(raw)
    if not isinstance(record, dict) or not all(isinstance(record.get(k), list) and all(type(v) is int for v in record[k]) for k in ("tokens", "turn")):
        raise ValueError("no lists of integers 'tokens' and 'turn'")
    tokens, turn = record["tokens"], record["turn"]
    if not tokens or len(tokens) != len(turn):
        raise ValueError(f"{len(tokens)} tokens and {len(turn)} turn numbers")
    if len(tokens) > max_positions:
        raise ValueError(f"{len(tokens)} tokens, the target's context is {max_positions}; prep.max_length cuts")
    if min(tokens) < 0 or max(tokens) >= vocab_size:
        raise ValueError(f"token id {min(tokens) if min(tokens) < 0 else max(tokens)} is outside the target's vocabulary of {vocab_size}")
    if min(turn) < 0 or max(turn) > len(turn):
        raise ValueError("turn numbers out of range")
    meta: dict[str, Any] = {"id": record.get("id"), "source": record.get("source"), "file": unit.file.name, "line": line}
    try:
        json.dumps(meta, ensure_ascii=False).encode()
    except UnicodeEncodeError:  # half of a surrogate pair, as json may hold it
        raise ValueError("its id or source is no text that UTF-8 can hold") from None
    key = meta["id"] if isinstance(meta["id"], str) and KEY.fullmatch(meta["id"]) else f"{unit.split}-{line:08d}"
    return Prepared(key, line, tokens, np.asarray(turn, dtype=np.int32), meta)


def batches(conversations: Sequence[Prepared], tokens_per_batch: int) -> Iterator[list[Prepared]]:
    """Conversations of similar length together, at most `tokens_per_batch` tokens a batch with padding (a longer one goes alone)."""
    batch: list[Prepared] = []
    for conversation in sorted(conversations, key=lambda c: (len(c.tokens), c.line)):
        if batch and (len(batch) + 1) * len(conversation.tokens) > tokens_per_batch:
            yield batch
            batch = []
        batch.append(conversation)
    if batch:
        yield batch


def _write(writer: ShardWriter, unit: Unit, batch: list[Prepared], samples: list[dict[str, torch.Tensor]]) -> list[Rejected]:
    """Writes the samples with finite features; returns the others."""
    rejected = []
    for conversation, tensors in zip(batch, samples, strict=True):
        bad = [name for name, tensor in tensors.items() if not all_finite(tensor)]
        if bad:
            rejected.append(_reject(unit, conversation.line, f"NaN or infinity in {', '.join(bad)}", json.dumps(conversation.meta, ensure_ascii=False)))
        else:
            writer.write(conversation.key, tensors, conversation.meta)
    return rejected


def _reject(unit: Unit, line: int, reason: str, record: str) -> Rejected:
    return Rejected(unit.file.name, line, reason, record.strip()[:200])
