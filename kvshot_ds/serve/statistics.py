"""What one answer cost and how much of it was drafted: OpenAI's `usage`, and the extension `speculation`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvshot_ds.decoding.rounds import Round


@dataclass
class Statistics:
    """Sums over the rounds of one answer.

    prompt, tokens: of the prompt, and of the answer up to where it was cut, a stop token included. rounds: forwards of the
    target that verified drafts, the prefill left out. committed: tokens of these. drafted: levels proposed; nodes: tokens
    verified, all branches of a tree; accepted: drafts in the answer. histogram: rounds by accepted drafts, 0 first.
    prefill, draft, verify: seconds in the prefill, the drafter and the target's verifications.
    """

    prompt: int
    tokens: int = 0
    rounds: int = 0
    committed: int = 0
    drafted: int = 0
    nodes: int = 0
    accepted: int = 0
    histogram: list[int] = field(default_factory=list)
    prefill: float = 0.0
    draft: float = 0.0
    verify: float = 0.0

    def add(self, r: Round, kept: int) -> None:
        """Counts one round, of which the answer holds the first `kept` tokens. The first round of an answer is the prefill."""
        first = not self.tokens
        self.tokens += kept
        if first:
            self.prefill += r.verify_seconds
            return
        accepted = min(r.accepted, kept)
        self.rounds += 1
        self.committed += kept
        self.drafted += r.drafted
        self.nodes += r.nodes
        self.accepted += accepted
        self.histogram += [0] * (r.drafted + 1 - len(self.histogram))
        self.histogram[accepted] += 1
        self.draft += r.draft_seconds
        self.verify += r.verify_seconds

    @property
    def tau(self) -> float | None:
        """Tokens for each verification, the target's own included; None if there was none."""
        return self.committed / self.rounds if self.rounds else None

    def usage(self) -> dict[str, Any]:
        """OpenAI's object. Rejected are all verified drafts that the answer does not hold, those on other branches of a tree too."""
        details = {"accepted_prediction_tokens": self.accepted, "rejected_prediction_tokens": self.nodes - self.accepted}
        totals = {"prompt_tokens": self.prompt, "completion_tokens": self.tokens, "total_tokens": self.prompt + self.tokens}
        return {**totals, "completion_tokens_details": details}

    def speculation(self, seed: int | None, seconds: float) -> dict[str, Any]:
        """The extension. seed: that of the noise, None for a greedy answer. seconds: wall time of the decoding."""
        tau = self.tau
        return {
            "rounds": self.rounds,
            "drafted": self.drafted,
            "nodes": self.nodes,
            "accepted": self.accepted,
            "tau": None if tau is None else round(tau, 4),
            "histogram": self.histogram,
            "prefill_ms": _ms(self.prefill),
            "draft_ms": _ms(self.draft),
            "verify_ms": _ms(self.verify),
            "total_ms": _ms(seconds),
            "seed": seed,
        }


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
