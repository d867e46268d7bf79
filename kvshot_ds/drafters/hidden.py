"""Hidden-only drafter: EAGLE-3 (arXiv 2503.01840)."""

from __future__ import annotations

import torch
from torch import nn

from kvshot_ds.config import HiddenOnlyConfig
from kvshot_ds.drafters.base import Drafter
from kvshot_ds.drafters.layer import DraftLayer
from kvshot_ds.drafters.layers import KVProjector
from kvshot_ds.drafters.state import DraftState, Start
from kvshot_ds.features.spec import FeatureSpec, eagle3_hidden_layers, resolve_layers
from kvshot_ds.geometry import Geometry


class HiddenOnlyDrafter(Drafter):
    """g_t = W_fc [h^a_t; h^b_t; h^c_t] is the hidden state of step 0; the drafter's own un-normed output that of step k + 1.

    Layer 0 reads [norm(embedding); norm(hidden)]; deeper layers are ordinary pre-norm layers.
    """

    family = "hidden_only"

    def __init__(self, g: Geometry, config: HiddenOnlyConfig, draft_vocab_size: int):
        super().__init__(g, config.depth, draft_vocab_size)
        self.hidden_layers = resolve_layers(config.hidden_layers, eagle3_hidden_layers, g.num_layers, "train.drafter.hidden_layers")
        self.fc = nn.Linear(len(self.hidden_layers) * g.hidden_size, g.hidden_size, bias=False)
        self.layers = nn.ModuleList(self.make_layer(i) for i in range(config.depth))

    def make_layer(self, i: int) -> DraftLayer:
        return DraftLayer(self.g, wide=i == 0, self_path=True, cross=False)

    def required_features(self) -> FeatureSpec:
        return FeatureSpec(tuple(sorted(set(self.hidden_layers))), (), "last_hidden", "bf16")

    def begin(self, state: DraftState, start: Start) -> torch.Tensor:
        state.forget_steps()
        state.rows = start.rows
        fused = self.fc(torch.cat([start.hidden[i] for i in self.hidden_layers], -1))
        x = self.embed(start.tokens)
        rotations = self.rotations(start.all, 0)
        last = self.depth - 1
        for i, (layer, own, cross) in enumerate(zip(self.layers, state.own, state.cross, strict=True)):
            if isinstance(layer.projector, KVProjector):
                cross.extend(layer.projector(start.keys, start.values, self.rotary(start.all.positions)))
            # Every position feeds the prefix of every layer; only the last layer can leave the other rows out.
            select = start.select if i == last else None
            x = layer(x, fused, own, cross, start.rows if i == last else start.all, rotations, to_prefix=True, select=select)
            if i != last:
                cross.select(start.select)
        state.hidden = x
        return x
