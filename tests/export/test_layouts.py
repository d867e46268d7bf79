"""What stands in an export: names, shapes, dtypes, vocabulary and layer ids, each against the published layout, written down here once more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvshot_ds.config import DFlashConfig, HiddenOnlyConfig
from kvshot_ds.export.run import export_drafter
from tests.drafters.checkpoints import layer_shapes
from tests.export.made import VD, D, L, Tensors, V, read, trained

IDS = "eagle_aux_hidden_state_layer_ids"
RESEARCH = {
    "fc.weight", "midlayer.hidden_norm.weight", "midlayer.input_layernorm.weight", "midlayer.post_attention_layernorm.weight",
    "midlayer.self_attn.q_proj.weight", "midlayer.self_attn.k_proj.weight", "midlayer.self_attn.v_proj.weight", "midlayer.self_attn.o_proj.weight",
    "midlayer.mlp.gate_proj.weight", "midlayer.mlp.up_proj.weight", "midlayer.mlp.down_proj.weight", "norm.weight", "lm_head.weight", "d2t", "t2d",
}  # fmt: skip
RESEARCH_CONFIG = {
    "architectures", "model_type", "bos_token_id", "eos_token_id", "pad_token_id", "hidden_act", "hidden_size", "initializer_range", "intermediate_size",
    "max_position_embeddings", "num_attention_heads", "num_key_value_heads", "num_hidden_layers", "head_dim", "rms_norm_eps", "rope_theta", "rope_scaling",
    "attention_bias", "attention_dropout", "mlp_bias", "pretraining_tp", "tie_word_embeddings", "torch_dtype", "transformers_version", "use_cache",
    "vocab_size", "draft_vocab_size", "eagle_config", IDS,
}  # fmt: skip


def exported(tmp_path: Path, form: Any, config: Any, target: Path, size: int = VD, **options: Any) -> tuple[dict[str, Any], Tensors]:
    export_drafter(trained(tmp_path / "own", config, target, size), tmp_path / "out", form, target, **options)
    return read(tmp_path / "out")


def check_vocabulary(tensors: Tensors, size: int) -> None:
    d2t, t2d = tensors["d2t"], tensors["t2d"]
    assert (d2t.dtype, d2t.shape, t2d.dtype, t2d.shape) == (torch.int64, (size,), torch.bool, (V,))
    ids = torch.arange(size) + d2t
    assert bool((ids.diff() > 0).all()) and int(ids[0]) >= 0 and int(ids[-1]) < V and torch.equal(ids, t2d.nonzero()[:, 0])


def check_floats(tensors: Tensors, dtype: torch.dtype) -> None:
    floats = {name: x for name, x in tensors.items() if name not in ("d2t", "t2d")}
    assert {x.dtype for x in floats.values()} == {dtype} and all(bool(x.isfinite().all()) for x in floats.values())


def expected(c: dict[str, Any], prefix: str, depth: int, size: int, layers: int, qk_norm: bool) -> dict[str, tuple[int, ...]]:
    """Shapes of an EAGLE-3 checkpoint from its config."""
    out: dict[str, tuple[int, ...]] = {"fc.weight": (D, layers * D), "norm.weight": (D,), "lm_head.weight": (size, D)}
    out |= layer_shapes(prefix, c, 2 * D, qk_norm) | {f"{prefix}hidden_norm.weight": (D,)}
    for i in range(1, depth):
        out |= layer_shapes(f"layers.{i}.", c, D, qk_norm)
    return out


@pytest.mark.parametrize(("size", "dtype"), [(VD, "fp32"), (VD, "bf16"), (V, None)])
def test_research_layout(size, dtype, tmp_path, targets):
    config, tensors = exported(tmp_path, "eagle3", HiddenOnlyConfig(), targets["Llama"], size, dtype=dtype)
    assert tensors.keys() == RESEARCH and config.keys() == RESEARCH_CONFIG
    assert {name: tuple(x.shape) for name, x in tensors.items() if name not in ("d2t", "t2d")} == expected(config, "midlayer.", 1, size, 3, False)
    check_vocabulary(tensors, size)
    kind = torch.bfloat16 if dtype == "bf16" else torch.float32
    check_floats(tensors, kind)
    assert config["torch_dtype"] == str(kind).removeprefix("torch.")
    assert (config["architectures"], config["model_type"], config["num_hidden_layers"]) == (["LlamaForCausalLMEagle3"], "llama", 1)
    assert (config["vocab_size"], config["draft_vocab_size"], config["tie_word_embeddings"]) == (V, size, False)
    assert (config["max_position_embeddings"], config["rope_theta"], config["rope_scaling"]) == (96, 100.0, None)


def test_layer_ids_stand_in_both_conventions(tmp_path, targets):
    config, _ = exported(tmp_path, "eagle3", HiddenOnlyConfig(hidden_layers=(0, 2, 5)), targets["Llama"])
    assert config["eagle_config"] == {IDS: [0, 2, 5], "use_aux_hidden_state": True}  # layers whose output is meant
    assert config[IDS] == [1, 3, 6]  # indices of hidden_states, where 0 is the embeddings


def test_fused_layers_are_put_into_the_order_in_which_engines_hand_them_out(tmp_path, targets):
    config, tensors = exported(tmp_path, "eagle3", HiddenOnlyConfig(hidden_layers=(5, 0, 2)), targets["Llama"])
    _, own = read(tmp_path / "own")
    a, b, c = own["fc.weight"].chunk(3, -1)
    assert config["eagle_config"][IDS] == [0, 2, 5] and config[IDS] == [1, 3, 6]
    assert torch.equal(tensors["fc.weight"], torch.cat((b, c, a), -1))


@pytest.mark.parametrize(
    ("family", "depth", "size", "switches"),
    [("Llama", 1, VD, {}), ("Qwen3", 3, VD, {"fc_norm": True, "norm_output": True}), ("Llama", 2, V, {"norm_before_residual": True})],
)
def test_speculators_layout(family, depth, size, switches, tmp_path, targets):
    config, tensors = exported(tmp_path, "speculators", HiddenOnlyConfig(depth=depth, hidden_layers=(0, 2, 5), **switches), targets[family], size)
    layer, normed = config["transformer_layer_config"], family == "Qwen3"
    shapes = expected(layer, "layers.0.", depth, size, 3, normed) | {"embed_tokens.weight": (V, D)}
    shapes |= {f"fc_norm.{i}.weight": (D,) for i in range(3)} if switches.get("fc_norm") else {}
    mapped = {"d2t", "t2d"} if size < V else set()
    assert tensors.keys() == shapes.keys() | mapped and all(tuple(tensors[name].shape) == shape for name, shape in shapes.items())
    if mapped:
        check_vocabulary(tensors, size)
    check_floats(tensors, torch.float32)
    _, target = read(targets[family])
    assert torch.equal(tensors["embed_tokens.weight"], target["model.embed_tokens.weight"])
    flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "embed_requires_grad", "tie_word_embeddings")
    assert {name: config[name] for name in flags} == dict.fromkeys(flags, False) | switches
    assert (config["architectures"], config["speculators_model_type"], config["draft_vocab_size"]) == (["Eagle3Speculator"], "eagle3", size)
    assert config[IDS] == [1, 3, 6] and config["target_hidden_size"] == D and config["speculators_version"] == "0.9.0"
    assert config["speculators_config"] == {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 7, "verifier_accept_k": 1, "accept_tolerance": 0.0}],
        "verifier": {"name_or_path": str(targets[family]), "architectures": [f"{family}ForCausalLM"]},
    }
    assert (layer["model_type"], layer["num_hidden_layers"], layer["vocab_size"]) == (family.lower(), depth, V)


def test_biases_of_some_projections_become_zeros_on_the_others(tmp_path, targets):
    config, tensors = exported(tmp_path, "speculators", HiddenOnlyConfig(depth=2), targets["Qwen2"])
    assert config["transformer_layer_config"]["attention_bias"]
    for i in range(2):
        assert not tensors[f"layers.{i}.self_attn.o_proj.bias"].any()
        assert all(tensors[f"layers.{i}.self_attn.{part}_proj.bias"].any() for part in "qkv")


@pytest.mark.parametrize("depth", [1, 3])
def test_dflash_layout(depth, tmp_path, targets):
    own = DFlashConfig(depth=depth, block_size=5, mask_token_id=3, hidden_layers=(1, 2, 4, 5))
    config, tensors = exported(tmp_path, "dflash", own, targets["Qwen3"], V, dtype="bf16")
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (D, 4 * D), "hidden_norm.weight": (D,), "norm.weight": (D,)}
    for i in range(depth):
        shapes |= layer_shapes(f"layers.{i}.", config, D, qk_norm=True)
    assert {name: tuple(x.shape) for name, x in tensors.items()} == shapes and len(tensors) == 11 * depth + 3
    check_floats(tensors, torch.bfloat16)
    assert config["dflash_config"] == {"mask_token_id": 3, "target_layer_ids": [1, 2, 4, 5], "block_size": 5}
    assert (config["architectures"], config["model_type"], config["block_size"], config["num_target_layers"]) == (["DFlashDraftModel"], "qwen3", 5, L)
    assert (config["layer_types"], config["sliding_window"], config["hidden_act"]) == (["full_attention"] * depth, None, "silu")
    assert (config["rope_theta"], config["num_hidden_layers"], config["vocab_size"]) == (100.0, depth, V)


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    ("rope", "scaling"),
    [
        (LLAMA3, LLAMA3),
        ({"rope_type": "linear", "factor": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        ({"rope_type": "yarn", "original_max_position_embeddings": 48}, {"rope_type": "yarn", "original_max_position_embeddings": 48, "factor": 2.0}),
    ],
    ids=["llama3", "linear", "yarn whose factor follows from the lengths"],
)
def test_rotary_settings(rope, scaling, tmp_path, targets):
    source = trained(tmp_path / "own", HiddenOnlyConfig(), targets["Llama"], rope=rope | {"rope_theta": 50.0})
    export_drafter(source, tmp_path / "out", "eagle3", targets["Llama"])
    config, _ = read(tmp_path / "out")
    assert (config["rope_theta"], config["rope_scaling"]) == (50.0, scaling)
    export_drafter(source, tmp_path / "spec", "speculators", targets["Llama"])
    layer = read(tmp_path / "spec")[0]["transformer_layer_config"]
    assert layer["rope_parameters"] == scaling | {"rope_theta": 50.0} and (layer["rope_theta"], layer["rope_scaling"]) == (50.0, scaling)


def test_the_context_is_at_least_the_targets(tmp_path, targets):
    source = trained(tmp_path / "own", HiddenOnlyConfig(), targets["Llama"], max_positions=64)
    export_drafter(source, tmp_path / "out", "eagle3", targets["Llama"])
    assert read(tmp_path / "out")[0]["max_position_embeddings"] == 96
