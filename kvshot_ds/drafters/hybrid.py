"""Hybrid drafter: the EAGLE-3 path as anchor, the target's KV as a gated delta (arXiv 2604.26412)."""

from __future__ import annotations

import torch

from kvshot_ds.config import HybridConfig
from kvshot_ds.drafters.hidden import HiddenOnlyDrafter
from kvshot_ds.drafters.layer import DraftLayer
from kvshot_ds.drafters.projector import KVSource
from kvshot_ds.drafters.state import DraftState
from kvshot_ds.geometry import Geometry


class HybridDrafter(HiddenOnlyDrafter):
    """n = SelfAttn(x) as in EAGLE-3; o = CrossAttn(x, target KV of j <= t and the steps' own KV); h = n + g * W_delta (o - n).

    cross_only: h = o. carry=none: at step k >= 1 the embedding of x_{t+1+k} stands in the place of the hidden state; what the target's one says is
    read from the entries of step 0, and nothing is handed on that could drift.
    """

    family = "hybrid"
    source: KVSource

    def __init__(self, g: Geometry, config: HybridConfig, draft_vocab_size: int):
        self.config = config
        self.source = KVSource(g, config.kv, config.depth)
        super().__init__(g, config, draft_vocab_size)

    @property
    def carries(self) -> bool:
        return self.config.carry == "own"

    def run_layers(self, state: DraftState, x: torch.Tensor, k: int) -> torch.Tensor:
        if not self.carries:
            state.hidden = x
        return super().run_layers(state, x, k)

    def make_layer(self, i: int) -> DraftLayer:
        gate = None if self.config.cross_only else self.config.gate
        return DraftLayer(
            self.g,
            wide=i == 0,
            self_path=not self.config.cross_only,
            cross=True,
            projector=self.source.projector(i),
            qk_norm=self.config.kv.qk_norm,
            gate=gate,
            norm_before_residual=self.norm_before_residual,
        )
