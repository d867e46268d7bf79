"""One draft layer. Its attention has a self path, a cross path, or both joined by a gate; the families differ in nothing else."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from kvshot_ds.config import GateConfig
from kvshot_ds.drafters.attention import KV, Hidden, merged_attention
from kvshot_ds.drafters.gate import GatedDelta
from kvshot_ds.drafters.layers import MLP, Projections, RMSNorm, Rotation, rotate
from kvshot_ds.drafters.projector import KVProjector
from kvshot_ds.drafters.state import PLAIN, Extras, Memory, Rows
from kvshot_ds.geometry import Geometry


class LayerOutput(NamedTuple):
    """h [n, d]. own, cross: the memories with what this step adds. kv_branch [n, d], query [n, A, D]: where asked for."""

    h: torch.Tensor
    own: Memory
    cross: Memory
    kv_branch: torch.Tensor | None
    query: torch.Tensor | None


class Finished(NamedTuple):
    """h [n, d], the gate [n, gates] and h of the KV branch alone [n, d], where there is one."""

    h: torch.Tensor
    gate: torch.Tensor | None
    kv_branch: torch.Tensor | None


class DraftLayer(nn.Module):
    """Pre-norm decoder layer over [n, d].

    wide: the EAGLE-3 input layer, whose attention reads [norm(embedding); norm(hidden)] of width 2d and whose
    residual is the hidden state, or norm(hidden) with norm_before_residual. projector: how the target's KV becomes the cross path's memory; None with
    cross=True means a cross path without target information. qk_norm: on the cross path.
    """

    def __init__(
        self,
        g: Geometry,
        *,
        wide: bool = False,
        self_path: bool = False,
        cross: bool = False,
        projector: KVProjector | None = None,
        qk_norm: bool = False,
        gate: GateConfig | None = None,
        norm_before_residual: bool = False,
    ):
        super().__init__()
        width = 2 * g.hidden_size if wide else g.hidden_size
        self.input_layernorm = RMSNorm(g.hidden_size, g.norm_eps)
        self.hidden_norm = RMSNorm(g.hidden_size, g.norm_eps) if wide else None
        self.norm_before_residual = norm_before_residual
        self.self_attn = Projections(g, width) if self_path else None
        self.cross_attn = Projections(g, width, projector.copies if projector else 1, qk_norm) if cross else None
        self.projector = projector
        self.mix = GatedDelta(g, gate) if gate else None
        self.post_attention_layernorm = RMSNorm(g.hidden_size, g.norm_eps)
        self.mlp = MLP(g)

    def normed(self, x: torch.Tensor, hidden: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention input and residual: x [n, d] is the embedding of the input layer, the layer's input otherwise."""
        if self.hidden_norm is None:
            return self.input_layernorm(x), x
        assert hidden is not None
        normed = self.hidden_norm(hidden)
        return torch.cat((self.input_layernorm(x), normed), -1), normed if self.norm_before_residual else hidden

    def forward(
        self,
        x: torch.Tensor,
        hidden: torch.Tensor | None,
        own: Memory,
        cross: Memory,
        rows: Rows,
        rotations: tuple[Rotation, Rotation],
        extras: Extras = PLAIN,
        *,
        to_prefix: bool = False,
        select: torch.Tensor | None = None,
        block: int = 1,
    ) -> LayerOutput:
        """One step of the layer at the given rows. x, hidden [n, d] -> h [N, d]; changes nothing but the gate it remembers.

        rotations: at the positions of the self path and of the cross path. to_prefix: the self path's KV become the
        prefix (first step) rather than step entries. select [N]: the inputs that are queried; all of them feed the prefix.
        block: inputs of one row (n = N * block), each of which sees the row's prefix and all inputs of the row.
        """
        u, residual = self.normed(x, hidden)
        at_self, at_cross = rotations
        if self.self_attn is not None:
            new = self.self_attn.key_value(u, at_self)
            own = own.extended(new) if to_prefix else own.stepped(_entries(new, block))
        if select is not None:
            u, residual, at_self, at_cross = u[select], residual[select], at_self.select(select), at_cross.select(select)
        n = o = query = None
        if self.self_attn is not None:
            n = _attend(self.self_attn, rotate(self.self_attn.query(u), at_self), own, rows, rows.hidden_own, block)
        if self.cross_attn is not None:
            cross = cross.stepped(_entries(self.cross_attn.key_value(u, at_cross), block))
            query = self.cross_attn.query(u)
            o = _attend(self.cross_attn, rotate(query, at_cross), cross, rows, rows.hidden_cross, block)
        done = self.finish(residual, n, o, extras.kv_branch)
        if self.mix is not None:
            self.mix.last_gate = None if done.gate is None else done.gate.detach()
        return LayerOutput(done.h, own, cross, done.kv_branch, query if extras.queries else None)

    def compile_parts(self, backend: str) -> None:
        """Compiles what is dense and row-wise: the parts around the attention."""
        for module, names in ((self, ("normed", "finish")), (self.self_attn, ("query", "key_value")), (self.cross_attn, ("query", "key_value"))):
            for name in names if module is not None else ():
                setattr(module, name, torch.compile(getattr(module, name), dynamic=True, backend=backend))

    def finish(self, residual: torch.Tensor, n: torch.Tensor | None, o: torch.Tensor | None, kv_branch: bool) -> Finished:
        """From the heads of the self path and of the cross path, [n, A·D], to the layer's output."""
        n = self.self_attn.o_proj(n) if self.self_attn is not None else None
        o = self.cross_attn.o_proj(o) if self.cross_attn is not None else None
        gate = None
        if self.mix is not None:
            joined, gate = self.mix(n, o)
        else:
            joined = n if n is not None else o
        assert joined is not None
        return Finished(self._fed(residual + joined), gate, self._fed(residual + o) if kv_branch and o is not None else None)

    def _fed(self, h: torch.Tensor) -> torch.Tensor:
        return h + self.mlp(self.post_attention_layernorm(h))


def _entries(kv: KV, block: int) -> list[KV]:
    """Step entries [N, G, D] of inputs [N * block, G, D]: one for each input of a row."""
    if block == 1:
        return [kv]
    return [KV(k, v) for k, v in zip(kv.k.unflatten(0, (-1, block)).unbind(1), kv.v.unflatten(0, (-1, block)).unbind(1), strict=True)]


def _attend(path: Projections, q: torch.Tensor, memory: Memory, rows: Rows, hidden: Hidden | None, block: int) -> torch.Tensor:
    """Heads of all inputs: q [N * block, A, D] -> [N * block, A·D]."""
    return merged_attention(q.unflatten(0, (-1, block)), memory.prefix, memory.steps, rows.spans, path.scale, hidden).flatten(0, 1).flatten(1)
