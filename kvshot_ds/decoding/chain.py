"""Greedy chain speculative decoding: the drafter proposes K tokens, one forward of the target settles them (arXiv 2211.17192)."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import torch

from kvshot_ds.decoding.state import Sequence
from kvshot_ds.drafters.base import Drafter
from kvshot_ds.drafters.state import DraftState
from kvshot_ds.errors import KvshotError
from kvshot_ds.target import Target


@dataclass(frozen=True)
class Round:
    """What one forward of the target committed: the accepted drafts, then the target's own token.

    tokens: the committed ones; after a stop token nothing is committed, not even the target's own token. drafted:
    tokens proposed. accepted: how many of `tokens` are drafts. draft_seconds, verify_seconds: in the drafter and in the
    target. The first round of a sequence is the prefill: nothing drafted, one token committed.
    """

    tokens: tuple[int, ...]
    drafted: int
    accepted: int
    draft_seconds: float
    verify_seconds: float


@dataclass(frozen=True)
class Decoded:
    """A finished sequence. rounds[0] is the prefill, the others are verifications. seconds: wall time from first to last."""

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


def agreeing(drafts: SequenceOf[int], best: SequenceOf[int]) -> int:
    """Length of the longest prefix of `drafts` equal to the target's arg-max `best`."""
    return next((i for i, (draft, own) in enumerate(zip(drafts, best, strict=False)) if draft != own), len(drafts))


def cut(tokens: SequenceOf[int], stop: Collection[int]) -> tuple[int, ...]:
    """`tokens` up to and including the first stop token."""
    return tuple(tokens[: next((i + 1 for i, token in enumerate(tokens) if token in stop), len(tokens))])


@torch.inference_mode()
def generate(target: Target, drafter: Drafter, prompt: SequenceOf[int], max_new_tokens: int, draft_length: int, stop: Collection[int] = ()) -> Iterator[Round]:
    """Yields one `Round` per forward of the target, until a token of `stop` is committed or `max_new_tokens` are.

    The committed tokens are the target's own greedy continuation of `prompt`, whatever the drafter proposes, up to
    ties within rounding (a forward over 1 + K tokens adds up in another order than one over a single token). Batch 1.
    A round proposes K = `draft_length` tokens, fewer when `max_new_tokens` leaves less room. The host waits for the
    device once a round. The drafter must be bound to the target's embedding (`Drafter.bind`) and lie on its device in
    its dtype. Raises KvshotError on an empty prompt or one that does not fit the target's context together with
    `max_new_tokens`.
    """
    limit = target.geometry.max_positions
    if not prompt or max_new_tokens < 1 or len(prompt) + max_new_tokens > limit:
        found = f"a prompt of {len(prompt)} tokens and max_new_tokens={max_new_tokens}"
        raise KvshotError(f"{found}: expected at least 1 of each, and together at most the target's context of {limit}")
    clock, memory, needs = Clock(target.device), DraftState.empty(drafter.depth), drafter.required_features()
    with target.watch(needs.hidden_layers) as outputs:
        sequence = Sequence(target, needs, outputs)
        begun = clock.mark()
        following = sequence.prefill(torch.as_tensor(prompt, dtype=torch.int64, device=target.device))
        verified = clock.mark()
        new = tuple(following[-1:].tolist())
        yield Round(new, 0, 0, 0.0, clock.between(begun, verified))
        keep, room = len(prompt), max_new_tokens - 1
        while room and new[-1] not in stop:
            begun = clock.mark()
            start = sequence.commit(following[:keep])
            wanted = min(draft_length, room - 1)
            drafts = drafter.draft(memory, start, wanted) if wanted else following[:0]
            drafted = len(drafts)  # a block may hold fewer
            proposed = clock.mark()
            following = sequence.verify(torch.cat((following[keep - 1 : keep], drafts)))
            verified = clock.mark()
            both = torch.cat((drafts, following)).tolist()  # the only host synchronisation of the round
            keep = agreeing(both[:drafted], both[drafted:]) + 1
            new = cut(both[drafted : drafted + keep], stop)
            room -= len(new)
            yield Round(new, drafted, min(keep - 1, len(new)), clock.between(begun, proposed), clock.between(proposed, verified))


def decode(target: Target, drafter: Drafter, prompt: SequenceOf[int], max_new_tokens: int, draft_length: int, stop: Collection[int] = ()) -> Decoded:
    """`generate` to its end."""
    started = time.perf_counter()
    rounds = tuple(generate(target, drafter, prompt, max_new_tokens, draft_length, stop))
    return Decoded(rounds, time.perf_counter() - started)
