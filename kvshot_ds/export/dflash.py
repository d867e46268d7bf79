"""DFlash (arXiv 2602.06036) in its original layout, DFlashDraftModel, which vLLM and SGLang read."""

from __future__ import annotations

import torch

from kvshot_ds.config import DFlashConfig
from kvshot_ds.drafters.layer_ids import dflash_fields
from kvshot_ds.export.parts import Converted, ascending, dtype_fields, shape_fields, token_fields
from kvshot_ds.export.source import Source, TargetFacts


def convert(source: Source, target: TargetFacts, dtype: torch.dtype) -> Converted:
    """11 n + 3 tensors for n layers, under our own names, which are the layout's; fc.weight [d, m·d]. Embedding and head are the target's.

    Call `obstacles` before.
    """
    g, drafter = source.info.geometry, source.info.config
    assert isinstance(drafter, DFlashConfig)
    tensors, layers = ascending(source.tensors, source.layers)
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        **token_fields(target),
        **shape_fields(g, drafter.depth, target.max_positions),
        "tie_word_embeddings": False,
        "block_size": drafter.block_size,
        "num_target_layers": g.num_layers,
        "dflash_config": {"mask_token_id": drafter.mask_token_id, **dflash_fields(layers), "block_size": drafter.block_size},
        "layer_types": ["full_attention"] * drafter.depth,
        "sliding_window": None,
        "use_sliding_window": False,
        **dtype_fields(dtype),
    }
    return Converted(config, {name: x for name, x in tensors.items() if name not in ("d2t", "t2d")})
