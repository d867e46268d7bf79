"""What a drafter starts from: random weights, or the target's own."""

from __future__ import annotations

import torch

from kvshot_ds.config import InitConfig
from kvshot_ds.drafters.base import Drafter
from kvshot_ds.drafters.hidden import HiddenOnlyDrafter
from kvshot_ds.drafters.layer import DraftLayer
from kvshot_ds.drafters.layers import KVProjector
from kvshot_ds.target import TargetParts


def choose_vocab(counts: torch.Tensor, size: int) -> torch.Tensor:
    """The `size` most frequent target ids, ascending. counts int64 [V]; ties go to the smaller id. Returns int64 [size]."""
    order = torch.sort(counts, descending=True, stable=True).indices
    return order[:size].sort().values


@torch.no_grad()
def initialise(drafter: Drafter, config: InitConfig, parts: TargetParts, seed: int) -> None:
    """Fills `drafter`'s weights. Its draft vocabulary must be set before (`set_vocab`).

    head=target: the draft head takes the target's rows of the draft vocabulary, the last norm the target's final norm.
    layers=target: see `_from_target`.
    """
    drafter.reset(seed)
    if config.layers == "target":
        _from_target(drafter, parts)
    if config.head == "target":
        drafter.lm_head.weight.copy_(parts.head[drafter.draft_ids])
        drafter.norm.weight.copy_(parts.norm_weight)


def _from_target(drafter: Drafter, parts: TargetParts) -> None:
    """Layer n-1-i of the drafter takes the attention, MLP and norms of the target's layer L-1-i.

    The EAGLE-3 input layer reads twice the width: the target's q, k, v go to its hidden half, the embedding half stays
    random; fc passes the highest fused layer through. A cross path takes the attention of the very layer whose KV its
    projector passes through, so that its queries and the memory's keys belong together from the start.
    """
    depth, last = drafter.depth, drafter.g.num_layers - 1
    for i, layer in enumerate(drafter.layers):
        assert isinstance(layer, DraftLayer)
        source = read = parts.layer(last - (depth - 1 - i))
        if isinstance(layer.projector, KVProjector) and layer.projector.passes is not None:
            read = parts.layer(layer.projector.layers[layer.projector.passes])
        for attention, origin in ((layer.self_attn, source), (layer.cross_attn, read)):
            if attention is None:
                continue
            for name, value in attention.named_parameters():
                given = origin[f"self_attn.{name}"]
                value[..., -given.shape[-1] :].copy_(given)
        for name, value in layer.mlp.named_parameters():
            value.copy_(source[f"mlp.{name}"])
        layer.post_attention_layernorm.weight.copy_(source["post_attention_layernorm.weight"])
        norm = layer.hidden_norm if layer.hidden_norm is not None else layer.input_layernorm
        norm.weight.copy_((read if layer.self_attn is None else source)["input_layernorm.weight"])
    if isinstance(drafter, HiddenOnlyDrafter):
        width, highest = drafter.g.hidden_size, max(range(len(drafter.hidden_layers)), key=drafter.hidden_layers.__getitem__)
        drafter.fc.weight.zero_()
        drafter.fc.weight[:, highest * width : (highest + 1) * width] = torch.eye(width)
