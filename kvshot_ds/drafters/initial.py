"""What a drafter starts from: random weights, or the target's own."""

from __future__ import annotations

import torch

from kvshot_ds.config import InitConfig
from kvshot_ds.drafters.base import Drafter
from kvshot_ds.drafters.layers import Projections, RMSNorm
from kvshot_ds.drafters.projector import KVProjector
from kvshot_ds.errors import ConfigError
from kvshot_ds.target import TargetParts


def choose_vocab(counts: torch.Tensor, size: int) -> torch.Tensor:
    """The `size` most frequent target ids, ascending. counts int64 [V]; ties go to the smaller id. Returns int64 [size]."""
    order = torch.sort(counts, descending=True, stable=True).indices
    return order[:size].sort().values


@torch.no_grad()
def initialise(drafter: Drafter, config: InitConfig, parts: TargetParts, seed: int) -> None:
    """Fills `drafter`'s weights. Its draft vocabulary must be set before (`set_vocab`).

    head=target: the draft head takes the target's rows of the draft vocabulary, the last norm the weight of the target's final
    norm. Where that is a LayerNorm (stablelm), its bias has no place in the drafter's RMSNorm, and the start is only near it.
    layers=target: see `_from_target`; raises ConfigError for a LayerNorm target.
    """
    if config.layers == "target" and drafter.g.layer_norm:
        raise ConfigError(
            f"train.init.layers=target: a {drafter.g.family} target has LayerNorms, whose mean and bias the drafter's RMSNorms cannot hold; "
            "use train.init.layers=random"
        )
    drafter.reset(seed)
    if config.layers == "target":
        _from_target(drafter, parts)
    if config.head == "target":
        if drafter.lm_head is not None:
            drafter.lm_head.weight.copy_(parts.head[drafter.draft_ids])
        drafter.norm.weight.copy_(parts.norm_weight)


def _from_target(drafter: Drafter, parts: TargetParts) -> None:
    """Layer n-1-i of the drafter takes the attention, MLP and norms of the target's layer L-1-i.

    The EAGLE-3 input layer reads twice the width: the target's q, k, v go to its hidden half, the embedding half stays
    random; fc passes the highest fused layer through. A cross path takes the attention of the very layer whose KV its
    projector passes through, so that its queries and the memory's keys belong together from the start.
    """
    depth, last = drafter.depth, drafter.g.num_layers - 1
    for i, layer in enumerate(drafter.draft_layers):
        source = read = parts.layer(max(0, last - (depth - 1 - i)))
        if layer.self_attn is not None:
            _copy_attention(layer.self_attn, [source])
        if layer.cross_attn is not None:
            given = [source]
            if isinstance(layer.projector, KVProjector) and (layer.projector.passes is not None or layer.projector.copies > 1):
                given = [parts.layer(j) for j in _cache_layers(layer.projector, drafter.g.num_layers)]
            _copy_attention(layer.cross_attn, given)
            read = given[len(given) // 2]
        if isinstance(layer.projector, KVProjector):
            _copy_hidden_to_kv(layer.projector, parts, last)
        for name, value in layer.mlp.named_parameters():
            value.copy_(source[f"mlp.{name}"])
        layer.post_attention_layernorm.weight.copy_(source["post_attention_layernorm.weight"])
        norm = layer.hidden_norm if layer.hidden_norm is not None else layer.input_layernorm
        norm.weight.copy_((read if layer.self_attn is None else source)["input_layernorm.weight"])
    fused: tuple[int, ...] = getattr(drafter, "hidden_layers", ())
    if fused:
        fc, width, highest = drafter.get_parameter("fc.weight"), drafter.g.hidden_size, max(range(len(fused)), key=fused.__getitem__)
        fc.zero_()
        fc[:, highest * width : (highest + 1) * width] = torch.eye(width)


def _cache_layers(projector: KVProjector, num_layers: int) -> tuple[int, ...]:
    """Target layers whose attention goes with the memory: the layer fed by an output, where hidden states are read."""
    if projector.injection != "hidden_to_kv":
        return projector.query_layers
    return tuple(min(i + 1, num_layers - 1) for i in projector.query_layers)


def _copy_attention(path: Projections, sources: list[dict[str, torch.Tensor]]) -> None:
    """The target's attention of each source, side by side; their outputs are averaged. Norms that the target lacks keep their start."""
    for name, value in path.named_parameters():
        given = [s[f"self_attn.{name}"] for s in sources if f"self_attn.{name}" in s]
        if not given:
            continue
        if name == "o_proj.weight":
            value.copy_(torch.cat(given, 1) / len(given))
        elif name.startswith(("o_proj", "q_norm", "k_norm")):
            value.copy_(torch.stack(given).mean(0))
        else:
            whole = torch.cat(given)
            value[..., -whole.shape[-1] :].copy_(whole)


def _copy_hidden_to_kv(projector: KVProjector, parts: TargetParts, last: int) -> None:
    """K and V of a hidden state as the target makes them: its norm and projections, so that the memory starts as the target's cache."""
    if projector.injection != "hidden_to_kv" or projector.passes is None or projector.layers[projector.passes] == last:
        return
    given = parts.layer(projector.layers[projector.passes] + 1)
    norm = projector.get_parameter(f"norms.{projector.passes}.weight")
    part = slice(projector.passes * len(norm), (projector.passes + 1) * len(norm))
    norm.copy_(given["input_layernorm.weight"])
    for name, proj in (("k_proj", projector.k_proj), ("v_proj", projector.v_proj)):
        proj.weight.zero_()
        proj.weight[:, part] = given[f"self_attn.{name}.weight"]
        if proj.bias is not None:
            proj.bias.copy_(given[f"self_attn.{name}.bias"])
    for mlp in ("k_mlp", "v_mlp"):
        if hasattr(projector, mlp):
            projector.get_parameter(f"{mlp}.down_proj.weight").zero_()
    if "self_attn.k_norm.weight" in given and isinstance(projector.k_norm, RMSNorm):
        projector.k_norm.weight.copy_(given["self_attn.k_norm.weight"])
