"""Context use: held-out acceptance when a part of the target's context is kept from the drafter.

Of the target's states at prefix positions j <= t of a row anchored at t, those with t - j > near are far, the others near.
What is masked, in every attention of the drafter:

- kv_only, kv_block: the entries of the cross path's memory made from the masked positions. Position t is one of them, and near: with `all`
  (and `near`) masked, nothing of the target is left at t either.
- hidden_only: the self path's keys made of the masked positions but the anchor's own, which is the row's step 0: it, and the hidden state
  g_t that goes in there, stay.
- hybrid: both, each as said.
- dflash, hybrid_block: the context entries of the self path made from the masked positions, t among them (the row's own input is the clean
  token, an entry of its block), and those of the cross path.

Entries of the row's own draft steps, or of its block, always stay, and so does what the row itself reads of the target at its anchor.
Every position of a drafter of several layers is masked alike: its deeper layers read near positions whose own view was as short. The
target's states at near positions hold what the target read of the far ones: `far` measures the use of far positions beyond that.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Literal, get_args

import numpy as np

from kvshot_ds import metrics
from kvshot_ds.diagnostics.subject import Piece, Subject, outcome
from kvshot_ds.drafters.attention import Hidden
from kvshot_ds.drafters.base import Drafter, StepDrafter
from kvshot_ds.metrics import StepCounts
from kvshot_ds.objectives.objective import Objective

Mask = Literal["none", "far", "near", "all"]


def hidden_keys(mask: Mask, near: int, drafter: Drafter) -> tuple[Hidden | None, Hidden | None]:
    """What `mask` hides from the self path and from the cross path of `drafter`, as the module's docstring defines it."""
    if mask == "none":
        return None, None
    least, most = (near + 1 if mask == "far" else 0), (near if mask == "near" else None)
    own = 1 if isinstance(drafter, StepDrafter) else 0  # there the anchor's own input is a key of the prefix
    return Hidden(max(least, own), most), Hidden(least, most)


def measure_context(objective: Objective, pieces: Iterable[Piece], steps: int, near: int, masks: Iterable[Mask] = get_args(Mask)) -> dict[Mask, StepCounts]:
    """Counts [C, K] of each mask, conversations in the order of `pieces`."""
    hidden = {mask: hidden_keys(mask, near, objective.drafter) for mask in masks}
    found: dict[Mask, list[Any]] = {mask: [] for mask in hidden}
    for batch, plan in pieces:
        for mask, keys in hidden.items():
            found[mask].append(outcome(objective, Piece(batch, replace(plan, hidden=keys)), steps).counts())
    return {mask: StepCounts.unstack(np.concatenate(parts, axis=1)) for mask, parts in found.items()}


def part(subject: Subject) -> dict[str, Any]:
    """`context` of diagnostics.json."""
    if not subject.objective.drafter.hidden_layers and not (subject.objective.drafter.source and subject.objective.drafter.source.layers):
        return {"why": "the drafter reads nothing of the target (train.drafter.kv.injection=none)"}
    plain: dict[Mask, StepCounts] = {"none": subject.counts}
    found = plain | measure_context(subject.objective, subject.pieces("context"), subject.steps, subject.options.near, ("far", "near", "all"))
    masks = {mask: {"alpha": subject.alphas(c), "mat": metrics.bootstrap(c, metrics.mat_of, **subject.how).to_json()} for mask, c in found.items()}

    def less(counts: StepCounts) -> dict[str, Any]:
        def difference(of: metrics.Statistic) -> dict[str, float | None]:
            return metrics.paired_difference(counts, subject.counts, of, **subject.how).to_json()

        alpha = [{"k": k, **difference(metrics.alpha_at(k))} for k in range(subject.steps)]
        return {"alpha": alpha, "mat": difference(metrics.mat_of)}

    return {"near": subject.options.near, "masks": masks, "differences": {mask: less(c) for mask, c in found.items() if mask != "none"}}
