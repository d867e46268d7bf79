"""What decoding reports: one record for each forward of the target, and the time its parts took."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Round:
    """What one forward of the target committed for one sequence: the accepted drafts, then the target's own token.

    tokens: the committed ones; after a stop token nothing is committed, not even the target's own token. drafted: levels
    proposed, the most drafts that could have been accepted. nodes: tokens verified beside the bonus token, all branches of a
    tree. accepted: how many of `tokens` are drafts. draft_seconds, verify_seconds: of the whole batch, in the drafter and in
    the target. The first round of a sequence is the prefill: nothing drafted, one token committed.
    """

    tokens: tuple[int, ...]
    drafted: int
    nodes: int
    accepted: int
    draft_seconds: float
    verify_seconds: float


@dataclass(frozen=True)
class Decoded:
    """A finished sequence. rounds[0] is the prefill, the others are verifications. seconds: wall time of its batch from first to last."""

    rounds: tuple[Round, ...]
    seconds: float

    @property
    def tokens(self) -> list[int]:
        """The generated tokens, a stop token included."""
        return [token for r in self.rounds for token in r.tokens]

    @property
    def target_forwards(self) -> int:
        """Forwards of the target, the prefill included."""
        return len(self.rounds)

    @property
    def verifications(self) -> tuple[Round, ...]:
        """All rounds but the prefill."""
        return self.rounds[1:]

    @property
    def accepted(self) -> list[int]:
        """Accepted drafts of each verification."""
        return [r.accepted for r in self.verifications]

    @property
    def draft_seconds(self) -> float:
        return sum(r.draft_seconds for r in self.rounds)

    @property
    def verify_seconds(self) -> float:
        """Seconds in the target, the prefill included."""
        return sum(r.verify_seconds for r in self.rounds)

    @property
    def other_seconds(self) -> float:
        """Seconds in neither model."""
        return self.seconds - self.draft_seconds - self.verify_seconds


class Clock:
    """Marks moments without making the host wait: events of the device on an accelerator, wall time on a CPU."""

    def __init__(self, device: torch.device):
        self.device = device

    def mark(self) -> float | torch.Event:
        if self.device.type == "cpu":
            return time.perf_counter()
        event = torch.Event(self.device, enable_timing=True)
        event.record()
        return event

    @staticmethod
    def between(since: float | torch.Event, until: float | torch.Event) -> float:
        """Seconds. Both marks must have passed: call it after a host synchronisation that follows them."""
        if isinstance(since, torch.Event) and isinstance(until, torch.Event):
            return since.elapsed_time(until) / 1e3
        assert isinstance(since, float) and isinstance(until, float)
        return until - since
