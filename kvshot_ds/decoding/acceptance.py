"""Acceptance in real decoding, counted from the rounds of finished sequences."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvshot_ds.decoding.rounds import Decoded
from kvshot_ds.metrics import StepCounts


def joint_counts(decoded: Decoded, levels: int) -> tuple[list[int], list[int]]:
    """Per step (of a tree: level) k: rounds whose drafts were accepted down to level k + 1, and rounds that count at step k; both [levels].

    A round counts at step k iff it drafted more than k levels and the token judged at step k, the (k + 1)-th after the
    round's bonus token, exists in the finished output. It is the rule of held-out rows (the label lies in the answer).
    Whether a round counts thus never depends on what it accepted: one near the end of the answer, or near
    `max_new_tokens`, leaves the same steps out when its drafts fail as when they are accepted.
    """
    right, counted = [0] * levels, [0] * levels
    known = len(decoded.rounds[0].tokens)
    for r in decoded.verifications:
        for k in range(min(r.drafted, len(decoded.tokens) - known, levels)):
            counted[k] += 1
            right[k] += r.accepted > k
        known += len(r.tokens)
    return right, counted


def conditional_counts(decoded: Sequence[Decoded], levels: int) -> tuple[list[int], list[int]]:
    """Per step k: of the rounds that count there by the rule of `joint_counts` and accepted the k drafts before, those that accepted that one too,
    and all of them; both [levels]. Where the same rounds count at every step, their ratio is joint_k / joint_{k-1}."""
    right, reached = [0] * levels, [0] * levels
    for d in decoded:
        known = len(d.rounds[0].tokens)
        for r in d.verifications:
            for k in range(min(r.drafted, len(d.tokens) - known, levels, r.accepted + 1)):
                reached[k] += 1
                right[k] += r.accepted > k
            known += len(r.tokens)
    return right, reached


def decoding_counts(decoded: Sequence[Decoded], levels: int) -> StepCounts:
    """`joint_counts` of each sequence [C, levels]. top1 and prob are undefined (NaN): a round that has failed asks the target nothing further."""
    pairs = np.array([joint_counts(d, levels) for d in decoded], dtype=np.float64).reshape(len(decoded), 2, levels)
    unknown = np.full((len(pairs), levels), np.nan)
    return StepCounts(pairs[:, 1], unknown, pairs[:, 0], unknown)


def accepted_histogram(decoded: Sequence[Decoded], levels: int) -> list[int]:
    """Verifications by the number of accepted drafts, 0 to `levels`: [levels + 1]."""
    accepted = [a for d in decoded for a in d.accepted]
    return np.bincount(np.array(accepted, dtype=np.int64), minlength=levels + 1).tolist()


def committed_counts(decoded: Sequence[Decoded]) -> StepCounts:
    """Tokens committed by verifications over their number, of each sequence, as a plain ratio [C, 1]: its `alpha_0` is tau."""
    return StepCounts.ratio([sum(len(r.tokens) for r in d.verifications) for d in decoded], [len(d.verifications) for d in decoded])
