"""The target's hidden states of several layers, fused into one: what EAGLE-3 (arXiv 2503.01840) and DFlash (arXiv 2602.06036) read."""

from __future__ import annotations

import torch
from torch import nn

from kvshot_ds.drafters.layers import RMSNorm
from kvshot_ds.drafters.state import Start
from kvshot_ds.geometry import Geometry


def fusion_norms(g: Geometry, count: int) -> nn.ModuleList:
    """EAGLE-3.1 (arXiv 2605.09992): one RMSNorm for each of the fused hidden states."""
    return nn.ModuleList(RMSNorm(g.hidden_size, g.norm_eps) for _ in range(count))


def fuse(fc: nn.Linear, norms: nn.ModuleList | None, start: Start, layers: tuple[int, ...]) -> torch.Tensor:
    """W_fc [h^a; h^b; …] of the n positions of `start`: [n, d]. norms: applied to each before, if given."""
    states = [start.hidden[i] for i in layers]
    return fc(torch.cat(states if norms is None else [norm(h) for norm, h in zip(norms, states, strict=True)], -1))
