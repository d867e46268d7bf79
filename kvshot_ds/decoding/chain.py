"""A chain of proposals: one token after another, as many as fixed, or as long as the drafter is sure enough."""

from __future__ import annotations

import torch

from kvshot_ds.config import DraftingConfig
from kvshot_ds.decoding.draft import Draft
from kvshot_ds.decoding.sampling import Sampler
from kvshot_ds.drafters.base import Drafter
from kvshot_ds.drafters.state import DraftState, Start


def propose(
    drafter: Drafter,
    state: DraftState,
    start: Start,
    drafting: DraftingConfig,
    length: int,
    sampler: Sampler | None = None,
    sequences: torch.Tensor | None = None,
) -> Draft:
    """At most `length` tokens for each of the B sequences of `start`. Greedy, or drawn by `sampler`, whose noise is that of `sequences` [B].

    With drafting.min_confidence the batch stops where no sequence's joint draft probability of the next token reaches it;
    that costs a wait for the device each step.
    """
    if sampler is None and not drafting.min_confidence:
        return Draft.in_line(drafter.draft(state, start, length))
    drawn: list[torch.Tensor] = []
    joint: torch.Tensor | None = None

    def choose(logits: torch.Tensor, k: int) -> torch.Tensor | None:
        nonlocal joint
        if sampler is None:
            best = logits.argmax(-1)
            tokens = best + drafter.d2t[best]
        else:
            assert sequences is not None
            found = sampler.draw(logits, drafter.draft_ids, start.rows.positions + k + 2, sequences)
            tokens = found.tokens
            if found.probs is not None:
                drawn.append(found.probs)
        if drafting.min_confidence:
            p = torch.softmax(logits.float(), -1).amax(-1)
            joint = p if joint is None else joint * p
            if float(joint.max()) < drafting.min_confidence:
                return None
        return tokens

    tokens = drafter.draft(state, start, length, choose)
    return Draft.in_line(tokens, torch.stack(drawn[: tokens.shape[1]], 1) if drawn and tokens.shape[1] else None)
