"""EAGLE-3 and 3.1 (arXiv 2503.01840, 2605.09992) of any depth in the layout of speculators, which vLLM reads. Written after its version 0.9.0."""

from __future__ import annotations

from typing import Any

import torch

from kvshot_ds.config import HiddenOnlyConfig
from kvshot_ds.drafters.layer_ids import speculators_fields
from kvshot_ds.export.parts import Converted, ascending, dtype_fields, rotary_fields, shape_fields, token_fields
from kvshot_ds.export.source import Source, TargetFacts
from kvshot_ds.geometry import Geometry
from kvshot_ds.target import load_parts

VERSION = "0.9.0"


def convert(source: Source, target: TargetFacts, dtype: torch.dtype, tokens: int) -> Converted:
    """Tensors under our own names, which are the layout's, and embed_tokens.weight [V, d], the target's.

    d2t and t2d only with a reduced vocabulary. tokens: proposals a round that readers take by default. Call `obstacles` before.
    """
    g, drafter = source.info.geometry, source.info.config
    assert isinstance(drafter, HiddenOnlyConfig)
    found, layers = ascending(source.tensors, source.layers)
    if source.info.draft_vocab_size == g.vocab_size:
        found = {name: x for name, x in found.items() if name not in ("d2t", "t2d")}
    zeros = _zero_biases(g, found, drafter.depth)
    tensors = {**found, **zeros, "embed_tokens.weight": load_parts(target.folder, dtype=dtype).embedding}
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": VERSION,
        "draft_vocab_size": source.info.draft_vocab_size,
        "norm_before_residual": drafter.norm_before_residual,
        "norm_before_fc": False,
        "fc_norm": drafter.fc_norm,
        "norm_output": drafter.norm_output,
        "embed_requires_grad": False,
        "target_hidden_size": g.hidden_size,
        **speculators_fields(layers),
        "tie_word_embeddings": False,
        "speculators_config": _speculators_config(target, tokens),
        "transformer_layer_config": _layer_config(g, drafter.depth, target),
        **dtype_fields(dtype),
    }
    notes = [f"{', '.join(sorted(zeros))}: zeros, as the layout's attention has biases everywhere or nowhere"] if zeros else []
    return Converted(config, tensors, notes)


def _speculators_config(target: TargetFacts, tokens: int) -> dict[str, Any]:
    method = {"proposal_type": "greedy", "speculative_tokens": tokens, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    return {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [method],
        "verifier": {"name_or_path": target.named, "architectures": target.architectures},
    }


def _layer_config(g: Geometry, depth: int, target: TargetFacts) -> dict[str, Any]:
    """The decoder layers as a llama config, or a qwen3 config where queries and keys are normed. vocab_size is the target's."""
    own = {"model_type": "qwen3"} if g.qk_norm else {"model_type": "llama", "mlp_bias": g.mlp_bias, "pretraining_tp": 1}
    rotary = rotary_fields(g)
    scaling = rotary["rope_scaling"] or {"rope_type": "default"}
    return {
        **own,
        **token_fields(target),
        **shape_fields(g, depth, target.max_positions),
        "tie_word_embeddings": False,
        "rope_parameters": {**scaling, "rope_theta": rotary["rope_theta"]},  # as transformers 5 has it; the flat fields are for readers before
    }


def _zero_biases(g: Geometry, tensors: dict[str, torch.Tensor], depth: int) -> dict[str, torch.Tensor]:
    """Biases of the attention that the layout has and the drafter has not: zeros, which change nothing."""
    if not (g.qkv_bias or g.o_bias):
        return {}
    names = [f"layers.{i}.self_attn.{part}_proj" for i in range(depth) for part in "qkvo"]
    missing = [name for name in names if f"{name}.bias" not in tensors]
    return {f"{name}.bias": torch.zeros(len(tensors[f"{name}.weight"]), dtype=tensors[f"{name}.weight"].dtype) for name in missing}
