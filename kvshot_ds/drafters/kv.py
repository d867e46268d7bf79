"""KV-only drafter (KVShot, arXiv 2604.26412): token embeddings in, the target's KV cache read by cross-attention."""

from __future__ import annotations

import torch
from torch import nn

from kvshot_ds.config import KVOnlyConfig, KVSourceConfig
from kvshot_ds.drafters.base import Drafter
from kvshot_ds.drafters.layer import DraftLayer
from kvshot_ds.drafters.layers import KVProjector
from kvshot_ds.drafters.state import DraftState, Start
from kvshot_ds.errors import ConfigError
from kvshot_ds.features.spec import FeatureSpec, eagle3_kv_layers, resolve_layers
from kvshot_ds.geometry import Geometry


def resolve_kv_layers(config: KVSourceConfig, g: Geometry, depth: int) -> tuple[int, ...]:
    """Target layers whose KV is read. Raises ConfigError if out of range, or if per_layer does not name one for each draft layer."""
    if config.injection == "none":
        return ()
    layers = resolve_layers(config.layers, eagle3_kv_layers, g.num_layers, "train.drafter.kv.layers")
    if config.injection == "per_layer" and len(layers) != depth:
        raise ConfigError(
            f"train.drafter.kv.injection=per_layer needs one target layer for each of the {depth} draft layers; train.drafter.kv.layers has {len(layers)}"
        )
    return layers


def make_projector(g: Geometry, config: KVSourceConfig, layers: tuple[int, ...], i: int, depth: int) -> KVProjector | None:
    """Projector of draft layer i of `depth`; None for the control without target information."""
    if config.injection == "none":
        return None
    if config.injection == "per_layer":
        return KVProjector(g, (layers[i],), config.injection, 0)
    passes = {"random": None, "identity_middle": len(layers) // 2, "identity_last": max(0, len(layers) - depth + i)}
    return KVProjector(g, layers, config.injection, passes[config.projector_init])


class KVOnlyDrafter(Drafter):
    """Memory of a row: target KV of j <= t, and the drafter's own KV of steps 0..k at their true positions t + 1 + i.

    No hidden state is carried from step to step: what a step knows of the others, it reads from their KV.
    """

    family = "kv_only"

    def __init__(self, g: Geometry, config: KVOnlyConfig, draft_vocab_size: int):
        super().__init__(g, config.depth, draft_vocab_size)
        self.kv_layers = resolve_kv_layers(config.kv, g, config.depth)
        self.layers = nn.ModuleList(
            DraftLayer(g, wide=False, self_path=False, cross=True, projector=make_projector(g, config.kv, self.kv_layers, i, config.depth))
            for i in range(config.depth)
        )

    def required_features(self) -> FeatureSpec:
        return FeatureSpec((), tuple(sorted(set(self.kv_layers))), "last_hidden", "bf16")

    def begin(self, state: DraftState, start: Start) -> torch.Tensor:
        state.forget_steps()
        state.rows = start.rows
        at = self.rotary(start.all.positions)
        for layer, cross in zip(self.layers, state.cross, strict=True):
            if isinstance(layer.projector, KVProjector):
                cross.extend(layer.projector(start.keys, start.values, at))
        return self.forward_step(state, start.tokens[start.select], 0)
