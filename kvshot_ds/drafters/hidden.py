"""Hidden-only drafter: EAGLE-3 (arXiv 2503.01840), EAGLE-3.1 (arXiv 2605.09992); with the last layer's hidden alone, as MTP has it."""

from __future__ import annotations

import torch
from torch import nn

from kvshot_ds.config import HiddenOnlyConfig, HybridConfig
from kvshot_ds.drafters.base import StepDrafter
from kvshot_ds.drafters.fusion import fuse, fusion_norms
from kvshot_ds.drafters.layer import DraftLayer
from kvshot_ds.drafters.state import DraftState, Start
from kvshot_ds.features.spec import resolve_hidden
from kvshot_ds.geometry import Geometry


class HiddenOnlyDrafter(StepDrafter):
    """g_t = W_fc [h^a_t; h^b_t; h^c_t] is the hidden state of step 0; the drafter's own un-normed output that of step k + 1.

    Layer 0 reads [norm(embedding); norm(hidden)]; deeper layers are ordinary pre-norm layers.
    """

    family = "hidden_only"

    def __init__(self, g: Geometry, config: HiddenOnlyConfig | HybridConfig, draft_vocab_size: int):
        super().__init__(g, config.depth, draft_vocab_size)
        self.hidden_layers = resolve_hidden(config.hidden_layers, g.num_layers, "train.drafter.hidden_layers")
        self.fc = nn.Linear(len(self.hidden_layers) * g.hidden_size, g.hidden_size, bias=False)
        self.fc_norm = fusion_norms(g, len(self.hidden_layers)) if config.fc_norm else None
        self.norm_output, self.norm_before_residual = config.norm_output, config.norm_before_residual
        self.layers = nn.ModuleList(self.make_layer(i) for i in range(config.depth))

    @property
    def carries(self) -> bool:
        """Whether a step receives the hidden state of the one before."""
        return True

    def make_layer(self, i: int) -> DraftLayer:
        return DraftLayer(self.g, wide=i == 0, self_path=True, norm_before_residual=self.norm_before_residual)

    def carried(self, h: torch.Tensor) -> torch.Tensor:
        return self.norm(h) if self.norm_output else h

    def begin(self, state: DraftState, start: Start) -> torch.Tensor:
        state.anchor(start)
        fused = fuse(self.fc, self.fc_norm, start, self.hidden_layers)
        x = self.embed(start.tokens)
        rotations = self.rotations(start.all, 0)
        last = self.depth - 1
        self.read_cache(state, start)
        for i in range(self.depth):
            # Every position feeds the prefix of every layer; only the last layer can leave the other rows out.
            rows, select = (start.rows, start.select) if i == last else (start.all, None)
            x = self.run_layer(i, state, x, rows, rotations, fused, to_prefix=True, select=select)
            if i != last:
                state.cross[i] = state.cross[i].selected(start.select)
        if state.extras.queries and last:
            state.queries = (*(q[start.select] for q in state.queries[:-1]), state.queries[-1])
        state.hidden = self.carried(x)
        return x
