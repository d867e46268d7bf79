"""KV-only drafter (KVShot, arXiv 2604.26412): token embeddings in, the target's KV cache read by cross-attention."""

from __future__ import annotations

import torch
from torch import nn

from kvshot_ds.config import KVOnlyConfig
from kvshot_ds.drafters.base import StepDrafter
from kvshot_ds.drafters.layer import DraftLayer
from kvshot_ds.drafters.projector import KVSource
from kvshot_ds.drafters.state import DraftState, Start
from kvshot_ds.geometry import Geometry


class KVOnlyDrafter(StepDrafter):
    """Memory of a row: target KV of j <= t, and the drafter's own KV of steps 0..k at their true positions t + 1 + i.

    No hidden state is carried from step to step: what a step knows of the others, it reads from their KV.
    """

    family = "kv_only"

    def __init__(self, g: Geometry, config: KVOnlyConfig, draft_vocab_size: int):
        super().__init__(g, config.depth, draft_vocab_size)
        self.source = source = KVSource(g, config.kv, config.depth)
        self.layers = nn.ModuleList(DraftLayer(g, cross=True, projector=source.projector(i), qk_norm=config.kv.qk_norm) for i in range(config.depth))

    def begin(self, state: DraftState, start: Start) -> torch.Tensor:
        state.anchor(start)
        self.read_cache(state, start)
        return self.forward_step(state, start.tokens[start.select], 0)
