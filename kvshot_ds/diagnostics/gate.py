"""How far the gate between the self path and the target's KV is open (arXiv 2604.26412): by draft layer and draft step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvshot_ds.diagnostics.record import LayerStep, Run, by_conversation, recorded
from kvshot_ds.drafters.base import Drafter
from kvshot_ds.features.batch import Batch
from kvshot_ds.objectives.alignment import RowPlan
from kvshot_ds.objectives.objective import Objective

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
LOW = 0.05  # a gate below it is closed
_BINS = 1000
_AT_ONCE = 1 << 23  # gates counted by one histc, which counts in fp32: beyond 2^24 in a bin it stands still


@dataclass(frozen=True)
class GateSums:
    """One draft layer, over the supervised rows, on the device. A row's gate is the mean over its channels, or over what else is gated.

    By conversation and draft step, [C, K] fp64: rows, their number; mean, the sum of the rows' gates; below, the sum of each row's share of channels
    below .05. By step, over all rows and channels: histogram [K, 1000] over [0, 1], low, high [K]: the least and the greatest gate.
    """

    layer: int
    rows: torch.Tensor
    mean: torch.Tensor
    below: torch.Tensor
    histogram: torch.Tensor
    low: torch.Tensor
    high: torch.Tensor

    @classmethod
    def joined(cls, parts: Sequence[GateSums]) -> GateSums:
        """The conversations of several batches, one after the other."""
        rows, mean, below = (torch.cat([getattr(p, name) for p in parts]) for name in ("rows", "mean", "below"))
        histogram = torch.stack([p.histogram for p in parts]).sum(0)
        return cls(parts[0].layer, rows, mean, below, histogram, torch.stack([p.low for p in parts]).amin(0), torch.stack([p.high for p in parts]).amax(0))


def quantiles(histogram: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """QUANTILES of the gates in the bins of histogram [..., 1000] that lie between low and high [...]: [..., 5], to a bin's width; NaN without any."""
    count = histogram.sum(-1, keepdim=True)
    reached = (histogram.cumsum(-1) / count).unsqueeze(-2) >= torch.tensor(QUANTILES, device=histogram.device, dtype=histogram.dtype).unsqueeze(-1)
    middle = (reached.to(torch.int8).argmax(-1) + 0.5) / _BINS
    return torch.where(count > 0, middle.clamp(low.unsqueeze(-1), high.unsqueeze(-1)), torch.nan)


def why_not(drafter: Drafter) -> str | None:
    """Why `drafter` shows no gate; None if it has one."""
    mixes = [layer.mix for layer in drafter.draft_layers]
    if all(mix is None for mix in mixes):
        return f"this {drafter.family} drafter does not join two paths: it has no gate"
    return "its paths are joined without a gate (train.drafter.gate.kind=none)" if all(mix is None or mix.gate_proj is None for mix in mixes) else None


@torch.no_grad()
def measure_gate(objective: Objective, batch: Batch, plan: RowPlan, run: Run | None = None) -> list[GateSums]:
    """Of each draft layer that has a gate. batch, plan: on the drafter's device, features in its dtype. run: an engine's forward in place of `objective`."""
    with recorded(objective) as seen:
        (run or objective)(batch, plan, torch.ones((), device=plan.valid.device))
    gated = [i for i, layer in enumerate(objective.drafter.draft_layers) if layer.mix is not None and layer.mix.gate_proj is not None]
    return [_of_layer(i, seen.steps(i, plan), plan, len(batch.keys)) for i in gated]


def _of_layer(i: int, steps: list[LayerStep], plan: RowPlan, conversations: int) -> GateSums:
    columns, shapes = [], []
    for k, step in enumerate(steps):
        assert step.gate is not None
        gate = step.gate[plan.valid[k]].float()
        of_rows = (torch.ones(len(gate), device=gate.device), gate.mean(1), (gate < LOW).float().mean(1))
        columns.append(torch.stack([by_conversation(plan, k, x, conversations) for x in of_rows]))
        low, high = gate.aminmax() if len(gate) else (gate.new_tensor(torch.inf), gate.new_tensor(-torch.inf))
        shapes.append((_histogram(gate), low.double(), high.double()))
    histogram, low, high = (torch.stack(x) for x in zip(*shapes, strict=True))
    rows, mean, below = torch.stack(columns, -1).unbind()
    return GateSums(i, rows, mean, below, histogram, low, high)


def _histogram(gate: torch.Tensor) -> torch.Tensor:
    """Gates [n, gates] in equal bins of [0, 1]: [1000] fp64."""
    parts = gate.flatten().split(_AT_ONCE)
    return torch.stack([torch.histc(part, _BINS, 0, 1).double() for part in parts]).sum(0)
