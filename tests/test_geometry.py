"""Geometry against the models of transformers: the rotary embedding bit for bit, and what is refused, by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from kvshot_ds.errors import ConfigError
from kvshot_ds.geometry import Geometry
from kvshot_ds.target import load_geometry

CONTEXT = 96
WHOLE = ("Llama", "Mistral", "Qwen2", "Qwen3")  # families that turn the whole head
FAMILIES = (*WHOLE, "StableLm")
DEFAULT = {"rope_type": "default", "rope_theta": 1e4}
ROPES: dict[str, dict[str, Any]] = {
    "default": DEFAULT,
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.7},
    "llama3": {
        "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 3.0, "original_max_position_embeddings": 32},
    "yarn without factor": {"rope_type": "yarn", "rope_theta": 1e4, "factor": None, "original_max_position_embeddings": 24},
    "yarn with mscale": {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 3.0, "original_max_position_embeddings": 32, "mscale": 0.7, "mscale_all_dim": 1.1,
        "beta_fast": 16, "beta_slow": 2, "truncate": False,
    },
    "longrope": {
        "rope_type": "longrope", "rope_theta": 1e4, "factor": 3.0, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 32
    },
}  # fmt: skip


def make(family: str = "Llama", rope: dict[str, Any] | None = None, **options: Any) -> Any:
    own = {"Mistral": {"sliding_window": None}, "StableLm": {"hidden_size": 64}}.get(family, {})
    return getattr(transformers, f"{family}Config")(
        **{
            "hidden_size": 48, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 31,
            "max_position_embeddings": CONTEXT, "head_dim": 16, "rope_parameters": dict(rope or DEFAULT), **own, **options,
        }
    )  # fmt: skip


def model_of(config: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return transformers.AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("rope", [name for name in ROPES if name != "longrope"])
@pytest.mark.parametrize("family", FAMILIES)
def test_rotary_is_the_models_own_up_to_its_whole_context(family: str, rope: str) -> None:
    config = make(family, ROPES[rope])
    module = model_of(config).model.rotary_emb
    inv_freq, scaling = Geometry.from_hf(config).rotary()
    angle = torch.cat([torch.arange(CONTEXT).float()[:, None] * inv_freq] * 2, -1)
    for length in (1, CONTEXT // 2, CONTEXT, 3):  # in this order: the module may change its frequencies by the lengths it has seen
        cos, sin = module(torch.zeros(1), torch.arange(length)[None])
        assert torch.equal(cos[0], angle[:length].cos() * scaling) and torch.equal(sin[0], angle[:length].sin() * scaling)
    assert inv_freq.dtype == torch.float32 and inv_freq.shape == (2 if family == "StableLm" else 8,)
    assert (scaling != 1) == rope.startswith("yarn")


@pytest.mark.parametrize("factor", [0.25, 0.3, 0.5, 1.0, 1])
@pytest.mark.parametrize("rope", ["default", "yarn"])
def test_a_part_of_the_head_is_turned_as_the_model_does(rope: str, factor: float) -> None:
    config = make("StableLm", {**ROPES[rope], "partial_rotary_factor": factor})
    model, g = model_of(config), Geometry.from_hf(config)
    inv_freq, scaling = g.rotary()
    assert torch.equal(inv_freq, model.model.rotary_emb.inv_freq) and scaling == model.model.rotary_emb.attention_scaling
    assert 2 * len(inv_freq) == model.model.layers[0].self_attn.rotary_ndims == int(g.head_dim * factor)
    assert Geometry.from_json(json.loads(json.dumps(g.to_json()))) == g


@pytest.mark.parametrize("factor", [1.0, 1.1, 2.7, 3.3, 17.3])
def test_dynamic_is_default_within_the_context_and_nowhere_else(factor: float) -> None:
    dynamic, default = (Geometry.from_hf(make(rope=rope)).rotary() for rope in ({**ROPES["dynamic"], "factor": factor}, DEFAULT))
    assert torch.equal(dynamic[0], default[0]) and dynamic[1] == default[1]
    one, other = model_of(make(rope={**ROPES["dynamic"], "factor": factor})), model_of(make())
    tokens = torch.randint(31, (1, CONTEXT + 1), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(one(tokens[:, :CONTEXT]).logits, other(tokens[:, :CONTEXT]).logits)
        assert not torch.equal(one(tokens).logits, other(tokens).logits), "one position more is another model, so longer sequences must stay refused"


@pytest.mark.parametrize("family", WHOLE)
def test_no_other_family_turns_a_part_of_the_head(family: str) -> None:
    """Why partial_rotary_factor is refused: transformers leaves it out of account with the default type and fails with every other."""
    whole, part = (model_of(make(family, {**DEFAULT, **extra})) for extra in ({}, {"partial_rotary_factor": 0.5}))
    assert torch.equal(whole.model.rotary_emb.inv_freq, part.model.rotary_emb.inv_freq)
    for rope in ("linear", "dynamic", "llama3", "yarn"):
        with pytest.raises(RuntimeError, match="size of tensor"):
            model_of(make(family, {**ROPES[rope], "partial_rotary_factor": 0.5}))(torch.arange(3)[None])
    for rope in ("default", "linear", "dynamic", "llama3", "yarn"):
        with pytest.raises(ConfigError, match=rf"partial_rotary_factor=0\.5 is not defined for {family.lower()}"):
            Geometry.from_hf(make(family, {**ROPES[rope], "partial_rotary_factor": 0.5}))
        assert Geometry.from_hf(make(family, {**ROPES[rope], "partial_rotary_factor": 1.0})).family == family.lower()


def dynamic(original: int, inside: bool) -> Any:
    key = {"original_max_position_embeddings": original}
    return make(rope={**ROPES["dynamic"], **(key if inside else {})}, **({} if inside else key))


def turning(factor: Any) -> Any:
    return make("StableLm", {**DEFAULT, "partial_rotary_factor": factor})


HF = transformers
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "t5": (lambda: HF.T5Config(), "it is an encoder-decoder"),
    "bart": (lambda: HF.BartConfig(), "it is an encoder-decoder"),
    "qwen2.5-vl": (lambda: HF.Qwen2_5_VLConfig(), r"it is multimodal \(text_config, vision_config\)"),
    "gemma3": (lambda: HF.Gemma3Config(), r"it is multimodal \(text_config, vision_config\)"),
    "deepseek v2": (lambda: HF.DeepseekV2Config(), r"multi-head latent attention \(kv_lora_rank=512\).*'deepseek_v2' is not supported"),
    "deepseek v3": (lambda: HF.DeepseekV3Config(), r"multi-head latent attention \(kv_lora_rank=512\).*'deepseek_v3' is not supported"),
    "minicpm3": (lambda: HF.MiniCPM3Config(), r"multi-head latent attention \(kv_lora_rank=256\).*'minicpm3' is not supported"),
    "kimi": (lambda: HF.KimiLinearConfig(), r"multi-head latent attention \(kv_lora_rank=512\).*layers of type linear_attention"),
    "gemma2": (lambda: HF.Gemma2Config(), r"'gemma2' is not supported; it uses sliding-window attention \(sliding_window=4096 of max_pos"),
    "gemma3 text": (lambda: HF.Gemma3TextConfig(), "'gemma3_text' is not supported; it uses sliding-window attention"),
    "gpt2": (lambda: HF.GPT2Config(), "architecture 'gpt2' is not supported"),
    "mixtral": (lambda: HF.MixtralConfig(), "architecture 'mixtral' is not supported"),
    "mistral, short window": (
        lambda: make("Mistral", sliding_window=CONTEXT - 1), r"sliding-window attention \(sliding_window=95 of max_position_embeddings=96\)"
    ),
    "qwen2, some layers": (
        lambda: make("Qwen2", use_sliding_window=True, sliding_window=CONTEXT - 1, max_window_layers=1), r"sliding-window attention \(sliding_window=95"
    ),
    "qwen3, all layers": (
        lambda: make("Qwen3", use_sliding_window=True, sliding_window=8, max_window_layers=0), r"sliding-window attention \(sliding_window=8"
    ),
    "window without length": (lambda: make("Qwen3", layer_types=["full_attention", "sliding_attention"]), r"sliding-window attention \(sliding_window=None"),
    "linear attention": (lambda: make("Qwen3", layer_types=["full_attention", "linear_attention"]), "layers of type linear_attention"),
    "longrope": (lambda: make(rope=ROPES["longrope"]), "rope_type=longrope"),
    "proportional": (lambda: make(rope={**DEFAULT, "rope_type": "proportional"}), "rope_type=proportional"),
    "rope by layer type": (lambda: make("Qwen2", rope={"full_attention": dict(DEFAULT)}), "rope_parameters hold no rope_theta"),
    **{
        f"stablelm, {factor} of the head": (partial(turning, factor), f"partial_rotary_factor={factor} turns {turned} of a head's 16")
        for factor, turned in ((0.2, 3), (0.0625, 1), (0, 0), (1.5, 24), (-0.5, -8), (None, 0), ("half", 0))
    },
    "stablelm, heads": (lambda: make("StableLm", num_attention_heads=5), "hidden_size=64 is not num_attention_heads=5 times"),
    "stablelm, no heads": (lambda: make("StableLm", num_attention_heads=0), "hidden_size=64 is not num_attention_heads=0 times"),
    "stablelm, head_dim": (lambda: make("StableLm", head_dim=8), "hidden_size=64 is not num_attention_heads=4 times"),
    "dynamic from 32": (lambda: dynamic(32, inside=True), "rope_type=dynamic with original_max_position_embeddings=32, not max_position_embeddings=96"),
    "dynamic from 32, outside": (lambda: dynamic(32, inside=False), "rope_type=dynamic with original_max_position_embeddings=32"),
}  # fmt: skip


@pytest.mark.parametrize("config, why", REFUSED.values(), ids=REFUSED)
def test_what_is_not_supported_is_refused_by_name(config: Callable[[], Any], why: str, tmp_path: Path) -> None:
    supported = (
        r"\. Supported: decoder-only text models of the families llama, mistral, qwen2, qwen3, stablelm with full attention and rope_type default, linear, dyn"
    )
    with pytest.raises(ConfigError, match=f"^the target cannot be used: .*{why}.*{supported}"):
        Geometry.from_hf(config())
    config().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=f"^target.path={tmp_path}: the target cannot be used: .*{why}"):
        load_geometry(tmp_path)


def test_reasons_are_said_only_where_they_are_true() -> None:
    with pytest.raises(ConfigError) as caught:
        Geometry.from_hf(HF.GlmConfig())  # a family that does turn a part of the head
    assert "architecture 'glm' is not supported. Supported" in str(caught.value)


def test_what_matters_not_is_not_refused() -> None:
    assert Geometry.from_hf(dynamic(CONTEXT, inside=True)).rope["rope_type"] == "dynamic"
    assert Geometry.from_hf(make("Mistral", sliding_window=CONTEXT)) == Geometry.from_hf(make("Mistral"))
    assert Geometry.from_hf(make("Qwen2", use_sliding_window=True, sliding_window=CONTEXT, max_window_layers=1)).num_layers == 2
    assert Geometry.from_hf(make("Qwen2", use_sliding_window=False, sliding_window=8)).num_layers == 2


BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "hidden_size": ({"hidden_size": "x"}, "'hidden_size' expected int"),
    "heads": ({"num_attention_heads": 5}, "not a multiple of the number of attention"),
    "no heads": ({"num_attention_heads": 0, "head_dim": None}, "config.json does not describe a model"),
    "model_type": ({"model_type": ["llama"]}, "config.json does not describe a model"),
    "rope": ({"rope_parameters": {"rope_type": "yarn"}}, "Missing required keys.*factor"),
    "remote": ({"model_type": "kimi_k2", "auto_map": {"AutoConfig": "configuration.Config"}}, "config.json does not describe a model"),
}


@pytest.mark.parametrize("change, why", BROKEN.values(), ids=BROKEN)
def test_a_config_that_transformers_does_not_take_is_one_line(change: dict[str, Any], why: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**make().to_dict(), **change}))
    with pytest.raises(ConfigError, match=why) as caught:
        load_geometry(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("rope", ["default", "yarn with mscale"])
def test_json_round_trip_and_its_refusals(rope: str) -> None:
    g = Geometry.from_hf(make(rope=ROPES[rope]))
    value = json.loads(json.dumps(g.to_json()))
    assert Geometry.from_json(value) == g
    for change, text in (({"head_dim": "16"}, "^head_dim: .*integer, found '16'$"), ({"qk_norm": 1}, "^qk_norm: .*boolean"), ({"extra": 1}, "^extra: ")):
        with pytest.raises(ValueError, match=text):
            Geometry.from_json({**value, **change})
    del value["heads"]
    with pytest.raises(ValueError, match=r"^heads: .*required"):
        Geometry.from_json(value)
    for value in (None, [], "x"):
        with pytest.raises(ValueError, match=r"^the whole: "):
            Geometry.from_json(value)


def test_fields_of_the_families() -> None:
    bias, stable = {"attention_bias": True}, {"use_qkv_bias": True, "attention_bias": True, "layer_norm_eps": 3e-4}
    configs = {
        "llama": make("Llama", **bias), "mistral": make("Mistral"), "qwen2": make("Qwen2"), "qwen3": make("Qwen3", **bias), "qwen3, none": make("Qwen3"),
        "stablelm": make("StableLm", **stable), "stablelm, norms": make("StableLm", qk_layernorm=True, use_parallel_residual=True),
    }  # fmt: skip
    found = {name: Geometry.from_hf(config) for name, config in configs.items()}
    assert {name: (g.qk_norm, g.qkv_bias, g.o_bias) for name, g in found.items()} == {
        "llama": (False, True, True), "mistral": (False, False, False), "qwen2": (False, True, False), "qwen3": (True, True, True),
        "qwen3, none": (True, False, False), "stablelm": (False, True, False), "stablelm, norms": (True, False, False),
    }  # fmt: skip
    for name, g in found.items():
        model = model_of(configs[name]).model
        layer, norm = model.layers[0].self_attn, model.norm
        normed = hasattr(layer, "q_layernorm" if g.layer_norm else "q_norm")
        assert (normed, layer.q_proj.bias is not None, layer.o_proj.bias is not None) == (g.qk_norm, g.qkv_bias, g.o_bias)
        assert layer.k_proj.weight.shape == (g.kv_heads * g.head_dim, g.hidden_size)
        assert g.layer_norm == isinstance(norm, torch.nn.LayerNorm) == (g.family == "stablelm")
        assert g.norm_eps == (norm.eps if g.layer_norm else norm.variance_epsilon)
    assert found["stablelm"].norm_eps == 3e-4


def test_geometry_written_before_partial_rotary_embeddings_still_loads() -> None:
    """No field was added, and rope without partial_rotary_factor turns the whole head."""
    old: dict[str, Any] = {
        "family": "llama", "num_layers": 2, "hidden_size": 48, "heads": 4, "kv_heads": 2, "head_dim": 16, "intermediate_size": 32, "vocab_size": 31,
        "norm_eps": 1e-6, "qk_norm": False, "qkv_bias": False, "o_bias": False, "mlp_bias": False, "hidden_act": "silu", "max_positions": 96, "rope": DEFAULT,
    }  # fmt: skip
    assert Geometry.from_json(old) == Geometry.from_hf(make()) and len(Geometry.from_json(old).rotary()[0]) == 8
