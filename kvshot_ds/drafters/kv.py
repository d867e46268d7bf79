"""KV-only drafter (KVShot, arXiv 2604.26412): token embeddings in, the target's KV cache read by cross-attention; anchored, also a hidden state once."""

from __future__ import annotations

import torch
from torch import nn

from kvshot_ds.config import KVOnlyConfig
from kvshot_ds.drafters.base import StepDrafter
from kvshot_ds.drafters.fusion import fuse, fusion_norms
from kvshot_ds.drafters.layer import DraftLayer
from kvshot_ds.drafters.projector import KVSource
from kvshot_ds.drafters.state import DraftState, Start
from kvshot_ds.features.spec import resolve_hidden
from kvshot_ds.geometry import Geometry


class KVOnlyDrafter(StepDrafter):
    """Memory of a row: target KV of j <= t, and the drafter's own KV of steps 0..k at their true positions t + 1 + i.

    No hidden state is carried from step to step: what a step knows of the others, it reads from their KV.
    Anchored (config.hidden_layers): x = embedding + W_fc [norm(h^a_t); norm(h^b_t); …] at step 0. Later steps find what it says of the target in that
    step's KV, which is the target's own state and does not drift.
    """

    family = "kv_only"

    def __init__(self, g: Geometry, config: KVOnlyConfig, draft_vocab_size: int):
        super().__init__(g, config.depth, draft_vocab_size)
        self.source = source = KVSource(g, config.kv, config.depth)
        if config.hidden_layers is not None:
            self.hidden_layers = resolve_hidden(config.hidden_layers, g.num_layers, "train.drafter.hidden_layers")
            self.fc = nn.Linear(len(self.hidden_layers) * g.hidden_size, g.hidden_size, bias=False)
            self.fc_norm = fusion_norms(g, len(self.hidden_layers))
        self.layers = nn.ModuleList(DraftLayer(g, cross=True, projector=source.projector(i), qk_norm=config.kv.qk_norm) for i in range(config.depth))

    def begin(self, state: DraftState, start: Start) -> torch.Tensor:
        state.anchor(start)
        self.read_cache(state, start)
        x = self.embed(start.tokens[start.select])
        if self.hidden_layers:
            x = x + fuse(self.fc, self.fc_norm, start, self.hidden_layers, start.select)
        return self.run_layers(state, x, 0)
