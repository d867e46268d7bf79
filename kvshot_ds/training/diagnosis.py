"""What the diagnostics show of a drafter while it is trained: with each look at the held-out split, over all ranks, without a trace in the training."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from kvshot_ds.config import Recipe
from kvshot_ds.diagnostics import drift, gate, queries
from kvshot_ds.evaluation import measurable
from kvshot_ds.features.batch import collate
from kvshot_ds.features.shard import ShardSet
from kvshot_ds.objectives.alignment import plan_rows
from kvshot_ds.objectives.objective import Objective
from kvshot_ds.training.control import Control
from kvshot_ds.training.engine import World

_SHOWN = ("cosine", "output_error", "map_kl")


class Diagnosis:
    """Looks at the first `train.diagnose_conversations` held-out conversations, grouped as `kvshot eval` groups them, each group by one rank.

    notes: a line for each part that is left out although the drafter has what it is about.
    """

    def __init__(self, recipe: Recipe, world: World, engine: Any, objective: Objective, heldout: ShardSet):
        self.recipe, self.world, self.engine, self.objective, self.shards = recipe, world, engine, objective, heldout
        drafter, manifest, self.notes = objective.drafter, heldout.manifest, []
        no_queries = queries.why_not(drafter, manifest)
        self.queries, self.gate = no_queries is None, gate.why_not(drafter) is None
        if no_queries and drafter.source is not None and drafter.source.kv_layers:
            self.notes.append(f"no query estimation during training: {no_queries}")
        no_drift = drift.why_not(drafter, manifest.spec, objective.config.steps)
        self.drift = no_drift is None
        if no_drift and objective.config.steps > 1:
            self.notes.append(f"no drift of hidden states during training: {no_drift}")
        needs = queries.needed(drafter) if self.queries else drafter.required_features()
        self.wanted = ("tokens", "turn", *manifest.spec.serving(needs))

    def look(self, control: Control) -> dict[str, float] | str:
        """The diagnostics' tags, the same on all ranks; or why all ranks agreed to stop. Within Heldout's measuring. All ranks call it."""
        together = self.recipe.eval.conversations_per_micro_batch
        chosen = measurable(self.shards, self.recipe.train.diagnose_conversations)
        starts = range(0, len(chosen), together)
        total: list[torch.Tensor] = []
        for turn in range(-(-len(starts) // self.world.size)):
            if why := control.agreed():
                return why
            number = turn * self.world.size + self.world.rank
            at = starts[number] if number < len(starts) else 0  # a rank without a group repeats the first, for the sake of the others
            found = self._sums(chosen[at : at + together])
            if number >= len(starts):
                found = [torch.zeros_like(x) for x in found]
            total = [a + b for a, b in zip(total, found, strict=True)] if total else found
        for sums in total:
            dist.all_reduce(sums)
        return self._scalars([sums.cpu() for sums in total])

    def _sums(self, numbers: list[int]) -> list[torch.Tensor]:
        """Of queries [L, 4, K]; of gates [L, 3, K] and their histogram [1000]; of drift [2, S]: those that are measured, fp64 on the device."""
        batch = collate([self.shards.read_packed(i, self.wanted) for i in numbers])
        plan = plan_rows(batch, self.objective.config.steps).to(self.world.device)
        batch = batch.to(self.world.device, self.objective.drafter.norm.weight.dtype)
        found = []
        if self.queries:
            layers = queries.measure_queries(self.objective, batch, plan, self.engine)
            found.append(torch.stack([torch.stack([getattr(s, name).sum(0) for name in ("rows", *_SHOWN)]) for s in layers]))
        if self.gate:
            gates = gate.measure_gate(self.objective, batch, plan, self.engine)
            found.append(torch.stack([torch.stack((s.rows, s.mean, s.below)).sum(1) for s in gates]))
            found.append(torch.stack([s.histogram for s in gates]).sum((0, 1)))
        if self.drift:
            d = drift.measure_drift(self.objective, batch, plan, self.engine, self.objective._target_norm[0])
            found.append(torch.stack((d.rows, d.cosine)).sum(1))
        return found

    def _scalars(self, total: list[torch.Tensor]) -> dict[str, float]:
        """Tags of the sums over all ranks; what no row reached is left out."""
        out: dict[str, float] = {}
        if self.queries:
            for i, (rows, *sums) in enumerate(total.pop(0).unbind()):
                for name, values in zip(_SHOWN, sums, strict=True):
                    out |= _rates(f"query/{name}/layer_{i}/{{}}", values, rows)
        if self.gate:
            rows, mean, below = total.pop(0).sum(0).unbind()
            out |= _rates("gate/step_{}/mean", mean, rows) | _rates("gate/step_{}/share_below_0.05", below, rows)
            found = gate.quantiles(total.pop(0), torch.zeros(()), torch.ones(()))
            out |= {f"gate/quantile_{q}": value for q, value in zip(gate.QUANTILES, found.tolist(), strict=True) if value == value}
        if self.drift:
            rows, cosine = total.pop(0).unbind()
            out |= _rates("drift/cosine/{}", cosine, rows, self.objective.config.steps - len(rows))  # a chain has none before it begins
        return out


def _rates(tag: str, sums: torch.Tensor, rows: torch.Tensor, first: int = 0) -> dict[str, float]:
    """sums / rows [K] by step, in `tag`."""
    return {tag.format(k): value / count for k, (value, count) in enumerate(zip(sums.tolist(), rows.tolist(), strict=True), first) if count}
