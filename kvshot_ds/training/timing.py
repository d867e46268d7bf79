"""Where the time of a run goes: parts of a step, rates, use of the device. Nothing here waits for the device between two readings."""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal

import torch
import torch.distributed as dist

from kvshot_ds.training.checkpoint import Progress
from kvshot_ds.training.loader import MicroBatch

Part = Literal["data", "forward", "backward", "optimizer", "communication"]
PARTS: tuple[Part, ...] = ("data", "forward", "backward", "optimizer", "communication")

# Dense bf16 peaks from the vendors' data sheets [TFLOP/s]; the first name whose words stand in the device's own decides (GH200 and GB200: their GPU).
PEAKS = {
    "B200": 2250, "H200": 989, "H100 PCIe": 756, "H100 NVL": 835, "H100": 989, "H20": 148, "A100": 312, "L40S": 362, "L40": 181,
    "A10G": 70, "A10": 125, "L4": 121, "RTX 5090": 209, "RTX 4090": 165, "MI300X": 1307,
}  # fmt: skip

# Methods of a process group through which every collective of torch and DeepSpeed goes.
_COLLECTIVES = (
    "allreduce", "allreduce_coalesced", "allgather", "allgather_coalesced", "allgather_into_tensor_coalesced", "_allgather_base", "all_gather_single",
    "all_gather_single_coalesced", "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced", "reduce_scatter_single",
    "reduce_scatter_single_coalesced", "broadcast", "reduce", "alltoall", "alltoall_base", "all_to_all_single", "barrier", "gather", "scatter",
)  # fmt: skip


def peak_flops(tflops: float, device: torch.device) -> float | None:
    """Peak of one device [FLOP/s]: `tflops` if given, else of a known accelerator by its name; None where neither is known."""
    if tflops:
        return tflops * 1e12
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak * 1e12 for part, peak in PEAKS.items() if re.search(rf"\bG?{part}\b", name)), None)


class Stopwatch:
    """Seconds of the parts of a step on this rank. A context: while it is entered, collectives are timed too.

    On a CPU a part is the thread's time; on CUDA it is the computing stream's, between two events of it. Communication is what this
    thread or stream spent inside a collective or in waiting for one, during a part, which loses it: ranks that wait for a slower one show
    it there, and communication that runs beside computing (DeepSpeed's overlap_comm, on streams of its own) does not show.
    """

    def __init__(self, device: torch.device):
        self.cuda = device.type == "cuda"
        self.seconds: dict[str, float] = dict.fromkeys(PARTS, 0.0)
        self._open: Part | None = None
        self._pending: deque[tuple[Part, Part | None, Any, Any]] = deque()
        self._plain: list[tuple[type, str, Any]] = []
        self._stream = torch.cuda.current_stream(device) if self.cuda else None

    @contextmanager
    def part(self, name: Part) -> Iterator[None]:
        outer, self._open, begin = self._open, name, self._now()
        try:
            yield
        finally:
            self._open = outer
            if self.cuda:
                self._pending.append((name, outer, begin, self._now()))
            else:
                self._add(name, outer, self._now() - begin)

    def read(self) -> dict[str, float]:
        """Seconds by part since the last reading; waits for the device."""
        if self._stream is not None:
            self._stream.synchronize()
        self.collect()
        out, self.seconds = self.seconds, dict.fromkeys(PARTS, 0.0)
        return out

    def collect(self) -> None:
        """Counts what the device is through with, so that events do not pile up."""
        while self._pending and self._pending[0][3].query():
            name, outer, begin, end = self._pending.popleft()
            self._add(name, outer, begin.elapsed_time(end) / 1e3)

    def _add(self, name: Part, outer: Part | None, seconds: float) -> None:
        self.seconds[name] += seconds
        if outer is not None:
            self.seconds[outer] -= seconds

    def _now(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def __enter__(self) -> Stopwatch:
        for owner, names in ((dist.ProcessGroup, _COLLECTIVES), (dist.Work, ("wait",))):
            for name in names:
                if name in vars(owner):
                    self._plain.append((owner, name, vars(owner)[name]))  # as it lies in the class: looked up, it would no longer bind
                    setattr(owner, name, self._timed(getattr(owner, name)))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for owner, name, plain in self._plain:
            setattr(owner, name, plain)
        self._plain.clear()

    def _timed(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            beside = self._stream is not None and torch.cuda.current_stream() != self._stream
            if beside or self._open in (None, "communication"):
                return plain(*args, **options)
            with self.part("communication"):
                return plain(*args, **options)

        return call


@dataclass(frozen=True)
class Workload:
    """What a step asks of the machine. flops: of forward and backward over conversations of (tokens, supervised rows). sent: bytes that one rank
    sends in a step of so many micro-batches. peak: of one device [FLOP/s], None where unknown."""

    flops: Callable[[Sequence[int], Sequence[int]], float]
    sent: Callable[[float], float]
    peak: float | None


class Clock:
    """Time, tokens and rows of a run, on the host; summed over ranks when read."""

    def __init__(self, before: Progress, device: torch.device, workload: Workload | None = None):
        self.before, self.device, self.workload = before, device, workload
        self.watch = Stopwatch(device)
        self.started = self.point = time.monotonic()
        self.seen = torch.zeros(4, dtype=torch.int64)
        self.tokens_at_point = 0
        self._restart()

    def _restart(self) -> None:
        """What is counted from one reading to the next, on this rank."""
        self.stall = self.away = self.work = 0.0
        self.conversations = self.skipped = self.steps = self.micro_batches = 0

    def waiting(self, batches: Iterator[list[MicroBatch]]) -> list[MicroBatch]:
        """The next step's micro-batches; the time this takes counts as stall."""
        asked = time.monotonic()
        step = next(batches)
        self.stall += time.monotonic() - asked
        return step

    def count(self, micro_batches: list[MicroBatch]) -> None:
        self.steps += 1
        self.micro_batches += len(micro_batches)
        self.watch.collect()
        for m in micro_batches:
            tokens = sum(m.batch.lengths)
            self.seen += torch.tensor([tokens, m.plan.supervised, 0, len(m.skipped)] if m.counted else [0, 0, tokens, len(m.skipped)])
            self.skipped += len(m.skipped)
            if m.counted:
                self.conversations += len(m.batch.keys)
                if self.workload is not None:
                    rows = torch.bincount(m.plan.conversation, minlength=len(m.batch.lengths)).tolist()
                    self.work += self.workload.flops(m.batch.lengths, rows)

    @contextmanager
    def apart(self) -> Iterator[None]:
        """What is done here (evaluation, checkpoints) is no training: it stays out of rates and shares."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.away += time.monotonic() - began

    def reduced(self) -> list[int]:
        """[tokens, rows, padding tokens, conversations left out] of this start over all ranks. All ranks call it."""
        total = self.seen.to(self.device, copy=True)
        dist.all_reduce(total)
        return total.tolist()

    def rates(self) -> dict[str, float]:
        """Rates, shares and seconds of a step since the last reading. All ranks call it.

        Parts are means over ranks; the stall is that of the rank that waited longest, for which the others wait too.
        """
        parts = self.watch.read() | {"data": self.stall}
        now, tokens = time.monotonic(), self.reduced()[0]
        elapsed = max(now - self.point - self.away, 1e-9)
        mine = [*parts.values(), self.work, self.conversations, self.skipped]
        ranks = gathered(mine, self.device)
        work, conversations, skipped = ranks[:, len(parts) :].sum(0).tolist()
        steps = max(self.steps, 1)
        out = {
            "train/tokens_per_s": (tokens - self.tokens_at_point) / elapsed,
            "train/samples_per_s": conversations / elapsed,
            "train/data_stall_share": float(ranks[:, 0].max()) / elapsed,
            "data/skipped": skipped,
            "time/step": elapsed / steps,
            **{f"time/{name}": float(ranks[:, i].mean()) / steps for i, name in enumerate(parts)},
        }
        if self.workload is not None:
            out["comm/gigabytes_per_step"] = self.workload.sent(self.micro_batches / steps) / 1e9
            if self.workload.peak is not None:
                out["train/mfu"] = work / elapsed / (self.workload.peak * len(ranks))
        self.point, self.tokens_at_point = now, tokens
        self._restart()
        return out

    def progress(self, step: int) -> Progress:
        tokens, rows, padding, skipped = self.reduced()
        b = self.before
        seconds = b.seconds + time.monotonic() - self.started
        return Progress(step, seconds, b.tokens + tokens, b.supervised_rows + rows, b.padding + padding, b.resumed_from, b.skipped_conversations + skipped)


def gathered(mine: Sequence[float], device: torch.device) -> torch.Tensor:
    """The numbers of every rank, on the host [ranks, n] fp64. All ranks call it."""
    one = torch.tensor(mine, dtype=torch.float64, device=device)
    every = [torch.empty_like(one) for _ in range(dist.get_world_size())]
    dist.all_gather(every, one)
    return torch.stack(every).cpu()
