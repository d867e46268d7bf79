"""One draft layer. Its attention has a self path, a cross path, or both joined by a gate; the families differ in nothing else."""

from __future__ import annotations

import torch
from torch import nn

from kvshot_ds.config import GateConfig
from kvshot_ds.drafters.attention import merged_attention
from kvshot_ds.drafters.layers import MLP, KVProjector, Projections, RMSNorm, Rotation
from kvshot_ds.drafters.state import Memory, Rows
from kvshot_ds.geometry import Geometry


class GatedDelta(nn.Module):
    """h = n + g * W_delta (o - n), g = sigmoid(W_g [n; o; o - n] + b_g), element-wise (arXiv 2604.26412)."""

    def __init__(self, width: int, config: GateConfig):
        super().__init__()
        self.init = config.init
        self.gate_proj = nn.Linear(3 * width, width)
        self.delta_proj = nn.Linear(width, width, bias=False)
        self.last_gate: torch.Tensor | None = None  # read by the trainer for its gate statistics

    def reset(self) -> None:
        """Starting weights, after the drafter's general initialisation (N(0, 0.02), zero bias)."""
        with torch.no_grad():
            if self.init.startswith("bias:"):
                self.gate_proj.weight.zero_()
                self.gate_proj.bias.fill_(float(self.init.removeprefix("bias:")))
            elif self.init == "zero_delta":
                self.delta_proj.weight.zero_()
            elif self.init == "identity_delta":
                self.delta_proj.weight.copy_(torch.eye(len(self.delta_proj.weight)))

    def forward(self, n: torch.Tensor, o: torch.Tensor) -> torch.Tensor:
        """n, o [N, d]: outputs of the self path and of the cross path -> [N, d]."""
        delta = o - n
        gate = torch.sigmoid(self.gate_proj(torch.cat((n, o, delta), -1)))
        self.last_gate = gate.detach()
        return n + gate * self.delta_proj(delta)


class DraftLayer(nn.Module):
    """Pre-norm decoder layer over [n, d].

    wide: the EAGLE-3 input layer, whose attention reads [norm(embedding); norm(hidden)] of width 2d and whose
    residual is the hidden state. projector: how the target's KV becomes the cross path's memory; None with
    cross=True means a cross path without target information.
    """

    def __init__(self, g: Geometry, *, wide: bool, self_path: bool, cross: bool, projector: KVProjector | None = None, gate: GateConfig | None = None):
        super().__init__()
        width = 2 * g.hidden_size if wide else g.hidden_size
        self.input_layernorm = RMSNorm(g.hidden_size, g.norm_eps)
        self.hidden_norm = RMSNorm(g.hidden_size, g.norm_eps) if wide else None
        self.self_attn = Projections(g, width) if self_path else None
        self.cross_attn = Projections(g, width) if cross else None
        self.projector = projector
        self.mix = GatedDelta(g.hidden_size, gate) if gate else None
        self.post_attention_layernorm = RMSNorm(g.hidden_size, g.norm_eps)
        self.mlp = MLP(g)

    def normed(self, x: torch.Tensor, hidden: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention input and residual: x [n, d] is the embedding of the input layer, the layer's input otherwise."""
        if self.hidden_norm is None:
            return self.input_layernorm(x), x
        assert hidden is not None
        return torch.cat((self.input_layernorm(x), self.hidden_norm(hidden)), -1), hidden

    def forward(
        self,
        x: torch.Tensor,
        hidden: torch.Tensor | None,
        own: Memory,
        cross: Memory,
        rows: Rows,
        rotations: tuple[Rotation, Rotation],
        *,
        to_prefix: bool = False,
        select: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """One step of the layer at the given rows. x, hidden [n, d] -> [N, d].

        rotations: at the positions of the self path and of the cross path. to_prefix: the self path's KV become the
        prefix (first step) rather than step entries. select [N]: the inputs that are queried; all of them feed the prefix.
        """
        u, residual = self.normed(x, hidden)
        at_self, at_cross = rotations
        new = None
        if self.self_attn is not None:
            new = self.self_attn.key_value(u, at_self)
            if to_prefix:
                own.extend(new)
            else:
                own.steps.append(new)
        if select is not None:
            u, residual, at_self, at_cross = u[select], residual[select], at_self.select(select), at_cross.select(select)
        n: torch.Tensor | None = None
        o: torch.Tensor | None = None
        if self.self_attn is not None:
            attn = self.self_attn
            n = attn.o_proj(merged_attention(attn.query(u, at_self), own.prefix, own.steps, rows.spans, attn.scale).flatten(1))
        if self.cross_attn is not None:
            attn = self.cross_attn
            cross.steps.append(attn.key_value(u, at_cross))
            o = attn.o_proj(merged_attention(attn.query(u, at_cross), cross.prefix, cross.steps, rows.spans, attn.scale).flatten(1))
        h = residual + self._joined(n, o)
        return h + self.mlp(self.post_attention_layernorm(h))

    def _joined(self, n: torch.Tensor | None, o: torch.Tensor | None) -> torch.Tensor:
        """Output of the attention: both paths through the gate, or the one there is."""
        if n is not None and o is not None:
            assert self.mix is not None
            return self.mix(n, o)
        one = n if n is not None else o
        assert one is not None
        return one
