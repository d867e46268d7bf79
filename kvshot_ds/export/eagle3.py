"""EAGLE-3 (arXiv 2503.01840) in the research layout, LlamaForCausalLMEagle3, which SGLang and vLLM read."""

from __future__ import annotations

import re

import torch

from kvshot_ds.drafters.layer_ids import eagle3_fields
from kvshot_ds.export.parts import Converted, ascending, dtype_fields, shape_fields, token_fields
from kvshot_ds.export.source import Source, TargetFacts


def convert(source: Source, target: TargetFacts, dtype: torch.dtype) -> Converted:
    """15 tensors; fc.weight [d, 3d], lm_head.weight [V_d, d], d2t int64 [V_d], t2d bool [V]. The embedding is the target's and left out.

    The first layer is called `midlayer.`, as SGLang wants it. Call `obstacles` before.
    """
    g = source.info.geometry
    tensors, layers = ascending(source.tensors, source.layers)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **token_fields(target),
        **shape_fields(g, 1, target.max_positions),
        "mlp_bias": g.mlp_bias,
        "pretraining_tp": 1,
        "tie_word_embeddings": False,
        "draft_vocab_size": source.info.draft_vocab_size,
        **eagle3_fields(layers),
        **dtype_fields(dtype),
    }
    return Converted(config, {re.sub(r"^layers\.0\.", "midlayer.", name): x for name, x in tensors.items()})
