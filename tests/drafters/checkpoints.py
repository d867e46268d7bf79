"""Random checkpoints in the layouts in which drafters are published, written without the package."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

L, D, V, VD = 7, 32, 40, 24  # the target of tests.decoding.models: layers, width, vocabulary; VD: of the reduced draft vocabulary
IDS = "eagle_aux_hidden_state_layer_ids"
Tensors = dict[str, torch.Tensor]

EAGLE3: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_act": "silu", "hidden_size": D, "intermediate_size": 56,
    "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 10, "num_hidden_layers": 1, "rms_norm_eps": 1e-5, "rope_theta": 50.0, "rope_scaling": None,
    "attention_bias": False, "mlp_bias": False, "max_position_embeddings": 64, "tie_word_embeddings": False, "vocab_size": V, "draft_vocab_size": VD,
    "pad_token_id": 0, "torch_dtype": "float16", "eagle_config": {IDS: [1, 3, 5], "use_aux_hidden_state": True}, IDS: [2, 4, 6],
}  # fmt: skip

# As speculators writes it: the decoder's config nested, the ids counted from the embeddings.
SPECULATORS: dict[str, Any] = {
    "architectures": ["Eagle3Speculator"], "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"}, "speculators_model_type": "eagle3",
    "speculators_version": "0.5.0", "draft_vocab_size": VD, "norm_before_residual": True, "norm_before_fc": False, "embed_requires_grad": False,
    "target_hidden_size": None, "eagle_aux_hidden_state_layer_ids": [2, 4, 6], "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "has_no_defaults_at_init": False,
    "speculators_config": {
        "algorithm": "eagle3", "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1, "accept_tolerance": 0.0}],
        "verifier": {"name_or_path": "someone/small", "architectures": ["Qwen3ForCausalLM"]},
    },
    "transformer_layer_config": {
        "model_type": "llama", "hidden_act": "silu", "hidden_size": D, "intermediate_size": 56, "num_attention_heads": 6, "num_key_value_heads": 3,
        "head_dim": 10, "num_hidden_layers": 1, "rms_norm_eps": 1e-5, "rope_theta": 50.0, "rope_scaling": None, "attention_bias": False, "mlp_bias": False,
        "max_position_embeddings": 64, "vocab_size": V, "tie_word_embeddings": False, "use_cache": True, "initializer_range": 0.02, "pretraining_tp": 1,
    },
}  # fmt: skip

# As AngelSlim's configurations have it: no layer ids.
ANGELSLIM: dict[str, Any] = {
    "architectures": ["Eagle3LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16", "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 1, "eos_token_id": 2, "head_dim": 10, "hidden_act": "silu", "hidden_size": D, "initializer_range": 0.02, "intermediate_size": 56,
    "max_position_embeddings": 96, "max_window_layers": L, "num_attention_heads": 6, "num_hidden_layers": 1, "num_key_value_heads": 3, "rms_norm_eps": 1e-6,
    "rope_scaling": None, "rope_theta": 50.0, "sliding_window": None, "tie_word_embeddings": False, "use_cache": True, "use_sliding_window": False,
    "vocab_size": V, "draft_vocab_size": VD,
}  # fmt: skip

# As the EAGLE repository trains it: the architecture of a plain Llama, no rope_theta, no head_dim, no layer ids.
EAGLE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "hidden_size": D, "initializer_range": 0.02,
    "intermediate_size": 56, "max_position_embeddings": 64, "model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1,
    "pad_token_id": 0, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "torch_dtype": "float16", "use_cache": True, "vocab_size": V, "draft_vocab_size": VD,
}  # fmt: skip

DFLASH: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "hidden_act": "silu", "hidden_size": D, "intermediate_size": 56, "num_attention_heads": 6,
    "num_key_value_heads": 3, "head_dim": 10, "num_hidden_layers": 3, "rms_norm_eps": 1e-6, "rope_theta": 60.0, "rope_scaling": None, "attention_bias": False,
    "max_position_embeddings": 64, "tie_word_embeddings": True, "vocab_size": V, "num_target_layers": L, "layer_types": ["full_attention"] * 3,
    "sliding_window": None, "use_sliding_window": False, "block_size": 6,
    "dflash_config": {"mask_token_id": 38, "target_layer_ids": [1, 2, 4, 5], "block_size": 6},
}  # fmt: skip


def tensors(shapes: dict[str, tuple[int, ...]]) -> Tensors:
    """Random values, large enough that every path matters: norms around 1, biases around 0."""
    r = torch.Generator().manual_seed(11)
    out = {}
    for name, shape in shapes.items():
        x = torch.randn(shape, generator=r)
        out[name] = x * 1.5 / shape[-1] ** 0.5 if len(shape) == 2 else x * 0.3 + ("norm" in name)
    return out


def layer_shapes(prefix: str, c: dict[str, Any], width: int, qk_norm: bool) -> dict[str, tuple[int, ...]]:
    q, kv, f = c["num_attention_heads"] * c["head_dim"], c["num_key_value_heads"] * c["head_dim"], c["intermediate_size"]
    heads = {"q_proj": (q, width), "k_proj": (kv, width), "v_proj": (kv, width), "o_proj": (D, q)}
    out: dict[str, tuple[int, ...]] = {f"{prefix}self_attn.{name}.weight": shape for name, shape in heads.items()}
    if c.get("attention_bias"):
        out |= {f"{prefix}self_attn.{name}.bias": shape[:1] for name, shape in heads.items()}
    if qk_norm:
        out |= {f"{prefix}self_attn.{name}_norm.weight": (c["head_dim"],) for name in "qk"}
    out |= {f"{prefix}mlp.{name}_proj.weight": (f, D) for name in ("gate", "up")} | {f"{prefix}mlp.down_proj.weight": (D, f)}
    if c.get("mlp_bias"):
        out |= {f"{prefix}mlp.{name}_proj.bias": (f,) for name in ("gate", "up")} | {f"{prefix}mlp.down_proj.bias": (D,)}
    return out | {f"{prefix}{name}_layernorm.weight": (D,) for name in ("input", "post_attention")}


def eagle3(layout: str = "midlayer.", base: dict[str, Any] = EAGLE3, **changes: Any) -> tuple[dict[str, Any], Tensors]:
    """Config and weights as published. layout: name of the first layer; a change to None takes the key away."""
    c = {name: value for name, value in (base | changes).items() if value is not None}
    return c, eagle3_weights(layout, c)


def eagle3_weights(layout: str, c: dict[str, Any]) -> Tensors:
    """Weights that the flat config `c` describes; three layers are fused where it names none."""
    c = {"head_dim": c["hidden_size"] // c["num_attention_heads"]} | c
    ids = c.get(IDS) or [0, 0, 0]
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (D, len(ids) * D), "norm.weight": (D,), "lm_head.weight": (c.get("draft_vocab_size", V), D)}
    shapes |= layer_shapes(layout, c, 2 * D, c["model_type"] == "qwen3") | {f"{layout}hidden_norm.weight": (D,)}
    if layout != "midlayer.":
        for i in range(1, c["num_hidden_layers"]):
            shapes |= layer_shapes(f"layers.{i}.", c, D, c["model_type"] == "qwen3")
    if c.get("fc_norm"):
        shapes |= {f"fc_norm.{i}.weight": (D,) for i in range(len(ids))}
    weights = tensors(shapes)
    if c.get("draft_vocab_size", V) < V:
        known = torch.randperm(V, generator=torch.Generator().manual_seed(3))[:VD].sort().values
        weights |= {"d2t": known - torch.arange(VD), "t2d": torch.zeros(V, dtype=torch.bool).index_fill(0, known, True)}
    return weights


def speculators(layer: dict[str, Any] | None = None, **changes: Any) -> tuple[dict[str, Any], Tensors]:
    """As speculators saves it, with a token embedding. layer: changes to the decoder's config; a change to None takes the key away."""
    inner = {name: value for name, value in (SPECULATORS["transformer_layer_config"] | (layer or {})).items() if value is not None}
    c = {name: value for name, value in (SPECULATORS | {"transformer_layer_config": inner} | changes).items() if value is not None}
    return c, eagle3_weights("layers.0.", flat(c)) | {"embed_tokens.weight": tensors({"embed_tokens.weight": (V, D)})["embed_tokens.weight"]}


def flat(c: dict[str, Any]) -> dict[str, Any]:
    """What a reader of the flat layouts would have to be given in place of a speculators config."""
    switches = ("norm_before_residual", "fc_norm", "norm_output", "draft_vocab_size", IDS)
    return c.get("transformer_layer_config", c) | {name: c[name] for name in switches if name in c}


def dflash(**changes: Any) -> tuple[dict[str, Any], Tensors]:
    c = {name: value for name, value in (DFLASH | changes).items() if value is not None}
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (D, len(DFLASH["dflash_config"]["target_layer_ids"]) * D),
        "hidden_norm.weight": (D,),
        "norm.weight": (D,),
    }
    for i in range(c["num_hidden_layers"]):
        shapes |= layer_shapes(f"layers.{i}.", c, D, qk_norm=True)
    return c, tensors(shapes)


def write(folder: Path, config: dict[str, Any], weights: Tensors) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors")
    return folder
