"""What the served layouts have in common: shapes and rotary settings as a config names them, tensors as a file holds them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

import torch

from kvshot_ds.errors import KvshotError
from kvshot_ds.export.source import TargetFacts
from kvshot_ds.geometry import Geometry

DTYPES: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class Converted:
    """A drafter in another layout. config: what config.json says; tensors: by the layout's names. notes: what a user should know."""

    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    notes: list[str] = field(default_factory=list)


def shape_fields(g: Geometry, depth: int, max_positions: int) -> dict[str, Any]:
    """The layers' dimensions under the names of transformers. max_positions: the context of the target [tokens]."""
    return {
        "hidden_act": g.hidden_act,
        "hidden_size": g.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": g.intermediate_size,
        "max_position_embeddings": max(g.max_positions, max_positions),
        "num_attention_heads": g.heads,
        "num_key_value_heads": g.kv_heads,
        "num_hidden_layers": depth,
        "head_dim": g.head_dim,
        "rms_norm_eps": g.norm_eps,
        "attention_bias": g.qkv_bias or g.o_bias,
        "attention_dropout": 0.0,
        "vocab_size": g.vocab_size,
        "use_cache": True,
        **rotary_fields(g),
    }


def rotary_fields(g: Geometry) -> dict[str, Any]:
    """rope_theta and rope_scaling. A yarn factor that follows from the lengths is written out, so that a longer context cannot change it."""
    rope = {name: value for name, value in g.rope.items() if name not in ("rope_theta", "partial_rotary_factor") and value is not None}
    if rope.get("rope_type") == "yarn" and "factor" not in rope:
        rope["factor"] = g.max_positions / rope["original_max_position_embeddings"]
    default = rope.get("rope_type", "default") == "default"
    return {"rope_theta": g.rope["rope_theta"], "rope_scaling": None if default else rope}


def dtype_fields(dtype: torch.dtype) -> dict[str, Any]:
    return {"torch_dtype": str(dtype).removeprefix("torch."), "transformers_version": metadata.version("transformers")}


def token_fields(target: TargetFacts) -> dict[str, Any]:
    return dict(target.tokens)


def ascending(tensors: Mapping[str, torch.Tensor], layers: tuple[int, ...]) -> tuple[dict[str, torch.Tensor], tuple[int, ...]]:
    """The tensors with the columns of fc (and its norms) in ascending order of the fused layers, and these. Engines hand states out so.

    fc.weight [d, m·d] has one block of d columns for each of the m layers.
    """
    order = sorted(range(len(layers)), key=lambda i: layers[i])
    out = dict(tensors)
    blocks = tensors["fc.weight"].chunk(len(layers), -1)
    out["fc.weight"] = torch.cat([blocks[i] for i in order], -1)
    for new, old in enumerate(order):
        if (norm := tensors.get(f"fc_norm.{old}.weight")) is not None:
            out[f"fc_norm.{new}.weight"] = norm
    return out, tuple(layers[i] for i in order)


def stored(tensors: Mapping[str, torch.Tensor], dtype: torch.dtype, source: Any) -> dict[str, torch.Tensor]:
    """The tensors as a file shall hold them: weights in `dtype`, whole numbers and marks as they are.

    Raises KvshotError naming tensors that are not finite: an engine would load them.
    """
    out = {name: (x.to(dtype) if x.is_floating_point() else x).contiguous() for name, x in tensors.items()}
    if wrong := sorted(name for name, x in out.items() if x.is_floating_point() and not bool(x.isfinite().all())):
        raise KvshotError(
            f"{source}: NaN or infinity in {', '.join(wrong[:5])}; its training diverged: export another checkpoint (drafter_best), or train again"
        )
    return out
