"""How far a capture has come: a bar on a terminal, a line a shard in a log, and the log of the shards' times."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

from tqdm import tqdm

from data_prep.capture import Captured, Unit
from kvshot_ds.files import AnyPath, append

if TYPE_CHECKING:
    from data_prep.orchestrate import Plan


class Progress:
    """Counts what the workers report. tokens, bytes: of the shards of this run, so far.

    Open as a context, it shows conversations, tokens/s, MB/s and the time left, and appends a line a shard to `captures.jsonl`
    (shard, seconds, tokens, bytes, ended): to a local folder at once, behind a URL when it is closed.
    """

    def __init__(self, plan: Plan, units: Sequence[Unit]) -> None:
        self.tokens = self.bytes = self.shards = self.conversations = 0
        self._all, self._units, self._wanted = len(plan.units), len(units), sum(unit.count for unit in units)
        self._before = sum(unit.count for unit in plan.units) - self._wanted
        self._log: AnyPath = plan.folder / "captures.jsonl"
        self._unsaved: list[str] = []
        self._began = time.perf_counter()
        self._bar: tqdm[Any] | None = None

    def __enter__(self) -> Self:
        self._began = time.perf_counter()
        self._bar = tqdm(
            total=self._before + self._wanted, initial=self._before, desc="capture", unit="conv", dynamic_ncols=True, disable=not sys.stderr.isatty()
        )
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
        self._save()

    def add(self, unit: Unit, captured: Captured) -> None:
        """A shard was written."""
        tokens = sum(sample.tokens for sample in captured.index.samples)
        self.tokens, self.bytes, self.shards = self.tokens + tokens, self.bytes + captured.index.bytes, self.shards + 1
        self.conversations += unit.count
        line = {"shard": unit.shard, "seconds": captured.seconds, "tokens": tokens, "bytes": captured.index.bytes, "ended": round(time.time(), 3)}
        self._unsaved.append(json.dumps(line) + "\n")
        if isinstance(self._log, os.PathLike):
            self._save()
        passed = max(1e-9, time.perf_counter() - self._began)
        speed = f"{self.tokens / passed:,.0f} tokens/s, {self.bytes / passed / 1e6:,.1f} MB/s"
        if self._bar is None or self._bar.disable:
            left = tqdm.format_interval(passed * (self._wanted - self.conversations) / max(1, self.conversations))
            done = self._all - self._units + self.shards
            print(f"capture: {unit.shard}: {unit.count} conversations, {tokens:,} tokens; {done} of {self._all} shards, {speed}, {left} left", flush=True)
        else:
            self._bar.set_postfix_str(speed, refresh=False)
            self._bar.update(unit.count)

    def _save(self) -> None:
        if self._unsaved:
            append(self._log, "".join(self._unsaved))
            self._unsaved.clear()
