"""What every part of the diagnostics looks at: a trained drafter, and held-out conversations with their planned rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional as F
from tqdm import tqdm

from kvshot_ds import metrics
from kvshot_ds.config import DiagnoseConfig, ObjectiveConfig
from kvshot_ds.features.batch import Batch, collate
from kvshot_ds.features.shard import ShardSet
from kvshot_ds.metrics import StepCounts
from kvshot_ds.objectives.alignment import RowPlan, plan_rows
from kvshot_ds.objectives.objective import Objective
from kvshot_ds.target import TargetParts


class Piece(NamedTuple):
    """A few conversations and their planned rows, on the drafter's device; features in the drafter's dtype."""

    batch: Batch
    plan: RowPlan


@dataclass(frozen=True)
class Outcome:
    """What became of each row of a piece, on the host. valid, correct, joint [K, N] bool; prob [K, N]; conversation [N], `conversations` of them.

    Steps beyond what a block proposes are valid and not correct, as evaluation counts them.
    """

    valid: torch.Tensor
    correct: torch.Tensor
    joint: torch.Tensor
    prob: torch.Tensor
    conversation: torch.Tensor
    conversations: int

    def counts(self, chosen: torch.Tensor | None = None) -> npt.NDArray[np.float64]:
        """Sums by conversation [4, C, K] as StepCounts stacks them. chosen [K, N] bool: the (step, row) pairs that count, all without it."""
        parts = torch.stack([x.T.double() for x in (self.valid, self.correct, self.joint, self.prob)])
        if chosen is not None:
            parts = parts * chosen.T
        return parts.new_zeros(4, self.conversations, parts.shape[-1]).index_add_(1, self.conversation, parts).numpy()


@torch.inference_mode()
def outcome(objective: Objective, piece: Piece, steps: int) -> Outcome:
    """Of one forward over `piece`, K = `steps`."""
    plan, runs = piece.plan, len(piece.plan.valid)
    out = objective(piece.batch, plan, torch.ones((), device=plan.valid.device))
    valid = plan.valid if runs == steps else plan_rows(piece.batch.to("cpu"), steps).valid
    correct, joint, prob = (F.pad(x.cpu(), (0, 0, 0, steps - runs)) for x in (out.correct, out.joint, out.prob))
    return Outcome(valid.cpu(), correct, joint, prob, plan.conversation.cpu(), len(piece.batch.keys))


@dataclass
class Subject:
    """A trained drafter, and what it is looked at on.

    objective: as `kvshot eval` measures it (every supervised row, the drafter's own drift). training: the options it was trained with.
    steps: K asked for; a block runs `objective.config.steps` of them. chosen: numbers of the held-out conversations, `together` in one piece.
    label_counts [V]: how often each token is a label of the train split.
    """

    name: str
    objective: Objective
    training: ObjectiveConfig
    parts: TargetParts
    heldout: ShardSet
    chosen: list[int]
    together: int
    steps: int
    device: torch.device
    options: DiagnoseConfig
    label_counts: torch.Tensor

    @property
    def count(self) -> int:
        """C."""
        return len(self.chosen)

    @property
    def how(self) -> dict[str, Any]:
        """Arguments of `metrics.bootstrap`."""
        return {"resamples": self.options.bootstrap, "confidence": self.options.confidence, "seed": self.options.seed}

    @cached_property
    def outcomes(self) -> list[Outcome]:
        """Of each piece, as `kvshot eval` runs it."""
        return [outcome(self.objective, piece, self.steps) for piece in self.pieces("acceptance")]

    @cached_property
    def counts(self) -> StepCounts:
        """[C, K]: those of `kvshot eval`."""
        return StepCounts.unstack(np.concatenate([o.counts() for o in self.outcomes], axis=1))

    def alphas(self, counts: StepCounts) -> list[dict[str, Any]]:
        """alpha_k of counts [C, K] with intervals, as JSON."""
        total = counts.total()
        found = metrics.bootstrap_all(counts, [metrics.alpha_at(k) for k in range(self.steps)], **self.how)
        return [{"k": k, "num": int(total.top1[k]), "den": int(total.den[k]), **f.to_json()} for k, f in enumerate(found)]

    def mean(self, sums: torch.Tensor, rows: torch.Tensor) -> dict[str, float | None]:
        """Interval of sum / rows over all conversations, as JSON; sums, rows [C]."""
        return metrics.bootstrap(StepCounts.ratio(sums.cpu().numpy(), rows.cpu().numpy()), metrics.alpha_at(0), **self.how).to_json()

    def pieces(self, what: str) -> Iterator[Piece]:
        """All conversations once, read anew, with a bar that says `what`. Queries, and the keys and values of their layers, are there if captured."""
        spec = self.heldout.manifest.spec
        needs = self.objective.drafter.required_features()
        kv = sorted({*needs.kv_layers, *spec.query_layers} & set(spec.kv_layers))
        wanted = ("tokens", "turn", *spec.serving(replace(needs, kv_layers=tuple(kv), query_layers=spec.query_layers)))
        dtype = self.objective.drafter.norm.weight.dtype
        for at in tqdm(range(0, self.count, self.together), desc=f"{self.name}: {what}", unit="batch", mininterval=2):
            batch = collate([self.heldout.read_packed(i, wanted) for i in self.chosen[at : at + self.together]])
            plan = plan_rows(batch, self.objective.config.steps)
            yield Piece(batch.to(self.device, dtype), plan.to(self.device))
