"""The timing itself: every method decodes every prompt in one process, in an order that rotates, after everything has been warmed up."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tqdm import tqdm

from kvshot_ds.bench.latency import device_name
from kvshot_ds.bench.memory import Peak, peak_of
from kvshot_ds.bench.methods import Method, Trace
from kvshot_ds.bench.questions import Question
from kvshot_ds.config import BenchConfig


@dataclass(frozen=True)
class Measured:
    """One method over all questions. traces: for each question the repeat with the median time. peak: of the longest question, decoded before anything is
    timed; None where the system does not tell. spread: of each question, slowest over fastest repeat."""

    method: Method
    traces: tuple[Trace, ...]
    peak: Peak | None
    spread: tuple[float, ...]


@torch.inference_mode()
def measure(methods: Sequence[Method], questions: Sequence[Question], options: BenchConfig, stop: Collection[int], device: torch.device) -> list[Measured]:
    """All methods over all questions. Each question is decoded by every method before the next one, and the method that begins moves on by one each
    time, so that a slow minute of the machine, and what a method leaves in its caches, hit all alike."""
    length = options.max_new_tokens
    longest = max(range(len(questions)), key=lambda i: len(questions[i].tokens))
    peaks = [peak_of(lambda m=m: m.decode(questions[longest].tokens, longest, length, stop), device) for m in methods]  # type: ignore[misc]
    for i in range(min(options.warm_up, len(questions))):
        for method in methods:
            method.decode(questions[i].tokens, i, length, stop)
    found: list[list[list[Trace]]] = [[[] for _ in questions] for _ in methods]
    turns = [(repeat, i) for repeat in range(options.repeats) for i in range(len(questions))]
    for turn, (_, i) in enumerate(tqdm(turns, desc="bench", unit="prompt", mininterval=2)):
        for number in order(len(methods), turn):
            found[number][i].append(methods[number].decode(questions[i].tokens, i, length, stop))
    return [
        Measured(m, tuple(median(repeats) for repeats in own), p, tuple(max(t.seconds for t in r) / min(t.seconds for t in r) for r in own))
        for m, own, p in zip(methods, found, peaks, strict=True)
    ]


def order(count: int, turn: int) -> list[int]:
    """Numbers of the methods in the order of this turn: each begins as often as the others."""
    return [(turn + i) % count for i in range(count)]


def median(repeats: Sequence[Trace]) -> Trace:
    """The repeat with the median time; of an even number the faster of the two in the middle."""
    return sorted(repeats, key=lambda t: t.seconds)[(len(repeats) - 1) // 2]


def machine(device: torch.device) -> dict[str, Any]:
    """What it ran on. cores: that this process may use."""
    return {
        "device": device_name(device),
        "kind": device.type,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def load() -> list[float] | None:
    """Processes that were running or waiting on this machine, averaged over 1, 5 and 15 minutes; None where the system does not tell."""
    try:
        return list(os.getloadavg())
    except (OSError, AttributeError):
        return None
