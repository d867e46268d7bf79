"""The gate that joins a drafter's own path with the target's KV."""

from __future__ import annotations

import torch
from torch import nn

from kvshot_ds.config import GateConfig
from kvshot_ds.errors import ConfigError
from kvshot_ds.geometry import Geometry


class GatedDelta(nn.Module):
    """h = n + g * W_delta (o - n), g = sigmoid(W_g [n; o; o - n] + b_g) (arXiv 2604.26412).

    kind: one gate for each channel, for each of A groups of d/A channels, for all channels, or none (g = 1).
    floor: f in g' = f + (1 - f) g, set by `at_step`; 0 once the schedule is over, and whenever the drafter is used.
    """

    floor: torch.Tensor

    def __init__(self, g: Geometry, config: GateConfig):
        super().__init__()
        self.config, width = config, g.hidden_size
        if config.kind == "per_head" and width % g.heads:
            raise ConfigError(f"train.drafter.gate.kind=per_head: a width of {width} cannot be shared by {g.heads} heads; use elementwise or scalar")
        gates = {"elementwise": width, "per_head": g.heads, "scalar": 1, "none": 0}[config.kind]
        self.gate_proj = nn.Linear(3 * width, gates) if gates else None
        self.delta_proj = nn.Linear(width, width, bias=False)
        self.register_buffer("floor", torch.zeros(()), persistent=False)
        self.last_gate: torch.Tensor | None = None  # [N, gates], read by the trainer for its gate statistics

    def reset(self) -> None:
        """Starting weights, after the drafter's general initialisation (N(0, 0.02), zero bias)."""
        init = self.config.init
        with torch.no_grad():
            if self.gate_proj is not None and init.startswith("bias:"):
                self.gate_proj.weight.zero_()
                self.gate_proj.bias.fill_(float(init.removeprefix("bias:")))
            elif init == "zero_delta":
                self.delta_proj.weight.zero_()
            elif init == "identity_delta":
                self.delta_proj.weight.copy_(torch.eye(len(self.delta_proj.weight)))

    def at_step(self, step: int) -> None:
        """Sets the floor of optimizer step `step` (0-based), without waiting for the device."""
        self.floor.fill_(self.config.floor_at(step))

    def forward(self, n: torch.Tensor, o: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """n, o [N, d]: outputs of the self path and of the cross path -> h [N, d], and the gate [N, gates]."""
        delta = o - n
        moved = self.delta_proj(delta)
        if self.gate_proj is None:
            return n + moved, None
        gate = torch.sigmoid(self.gate_proj(torch.cat((n, o, delta), -1)))
        gate = self.floor + (1 - self.floor) * gate
        if self.config.kind == "per_head":
            return n + (gate.unsqueeze(-1) * moved.unflatten(-1, (gate.shape[-1], -1))).flatten(-2), gate
        return n + gate * moved, gate
