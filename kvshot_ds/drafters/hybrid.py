"""Hybrid drafter: the EAGLE-3 path as anchor, the target's KV as a gated delta (arXiv 2604.26412)."""

from __future__ import annotations

from kvshot_ds.config import HiddenOnlyConfig, HybridConfig
from kvshot_ds.drafters.hidden import HiddenOnlyDrafter
from kvshot_ds.drafters.kv import make_projector, resolve_kv_layers
from kvshot_ds.drafters.layer import DraftLayer
from kvshot_ds.features.spec import FeatureSpec
from kvshot_ds.geometry import Geometry


class HybridDrafter(HiddenOnlyDrafter):
    """n = SelfAttn(x) as in EAGLE-3; o = CrossAttn(x, target KV of j <= t and the steps' own KV); h = n + g * W_delta (o - n)."""

    family = "hybrid"

    def __init__(self, g: Geometry, config: HybridConfig, draft_vocab_size: int):
        self.config = config
        self.kv_layers = resolve_kv_layers(config.kv, g, config.depth)
        super().__init__(g, HiddenOnlyConfig(depth=config.depth, hidden_layers=config.hidden_layers), draft_vocab_size)

    def make_layer(self, i: int) -> DraftLayer:
        projector = make_projector(self.g, self.config.kv, self.kv_layers, i, self.config.depth)
        return DraftLayer(self.g, wide=i == 0, self_path=True, cross=True, projector=projector, gate=self.config.gate)

    def required_features(self) -> FeatureSpec:
        return FeatureSpec(tuple(sorted(set(self.hidden_layers))), tuple(sorted(set(self.kv_layers))), "last_hidden", "bf16")
