"""Shapes and rotary settings of a target, without its weights: what a drafter is built from."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from kvshot_ds.errors import ConfigError
from kvshot_ds.typed import parse

# family -> (q/k norm, bias of q,k,v, bias of o); a name: the field of the config that says it
_FAMILIES: dict[str, tuple[bool | str, bool | str, bool | str]] = {
    "llama": (False, "attention_bias", "attention_bias"),
    "mistral": (False, False, False),
    "qwen2": (False, True, False),
    "qwen3": (True, "attention_bias", "attention_bias"),
    "stablelm": ("qk_layernorm", "use_qkv_bias", False),
}
_ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")
_SUPPORTED = f"decoder-only text models of the families {', '.join(_FAMILIES)} with full attention and rope_type {', '.join(_ROPE_TYPES)}"


@dataclass(frozen=True)
class Geometry:
    """Dimensions of a decoder-only target: L layers, width d, A query heads, G key/value heads of size D, V tokens.

    qk_norm: whether queries and keys are normed before they are rotated, by whichever norm. rope: Hugging Face `rope_parameters`
    (rope_type, rope_theta, partial_rotary_factor, …). Built by `from_hf`; stored with every drafter.
    """

    family: str
    num_layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    norm_eps: float
    qk_norm: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    hidden_act: str
    max_positions: int
    rope: dict[str, Any]

    @classmethod
    def from_hf(cls, config: Any) -> Geometry:
        """From a transformers config. Raises ConfigError naming everything about the target that is not supported."""
        if reasons := _obstacles(config):
            raise ConfigError(f"the target cannot be used: {'; '.join(reasons)}. Supported: {_SUPPORTED}")
        kind = config.model_type
        qk_norm, qkv_bias, o_bias = (bool(getattr(config, said, False)) if isinstance(said, str) else said for said in _FAMILIES[kind])
        return cls(
            family=kind,
            num_layers=config.num_hidden_layers,
            hidden_size=config.hidden_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            intermediate_size=config.intermediate_size,
            vocab_size=config.vocab_size,
            norm_eps=config.layer_norm_eps if kind == "stablelm" else config.rms_norm_eps,
            qk_norm=qk_norm,
            qkv_bias=qkv_bias,
            o_bias=o_bias,
            mlp_bias=bool(getattr(config, "mlp_bias", False)),
            hidden_act=config.hidden_act,
            max_positions=config.max_position_embeddings,
            rope={name: value for name, value in config.rope_parameters.items() if value is not None},
        )

    @property
    def layer_norm(self) -> bool:
        """Whether the target's norms are LayerNorms (mean and bias; for queries and keys one norm for each head), not RMSNorms."""
        return self.family == "stablelm"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Any) -> Geometry:
        """Raises ValueError naming the field that is missing, unknown or of a wrong type."""
        return parse(cls, value)

    def rotary(self) -> tuple[torch.Tensor, float]:
        """Inverse frequencies [D_rot/2] fp32 and the factor on cos and sin, exactly as the target computes them up to `max_positions`.

        The first D_rot = D·partial_rotary_factor dimensions of a head are turned, the others are left as they are.
        """
        from transformers import PreTrainedConfig
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        kind = self.rope.get("rope_type", "default")
        if kind == "default":
            turned = int(self.head_dim * self.rope.get("partial_rotary_factor", 1.0))
            even = torch.arange(0, turned, 2, device="cpu").float()
            return 1.0 / (self.rope["rope_theta"] ** (even / turned)), 1.0
        config = PreTrainedConfig(
            hidden_size=self.hidden_size, num_attention_heads=self.heads, head_dim=self.head_dim, max_position_embeddings=self.max_positions
        )
        config.rope_parameters = {"factor": None, **self.rope}  # yarn takes an absent factor from the lengths, but only if it is there as None
        with torch.device("cpu"):  # drafters are built on the meta device too
            inv_freq, scaling = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
        return inv_freq.float(), float(scaling)


def _obstacles(config: Any) -> list[str]:
    """What keeps a drafter from reading this target, by the names of its configuration; empty if nothing does."""
    found = []
    if getattr(config, "is_encoder_decoder", False):
        found.append("it is an encoder-decoder")
    if parts := [name for name in ("text_config", "vision_config", "audio_config") if getattr(config, name, None) is not None]:
        found.append(f"it is multimodal ({', '.join(parts)})")
    if rank := getattr(config, "kv_lora_rank", None):
        found.append(f"it uses multi-head latent attention (kv_lora_rank={rank}), whose cache holds no keys and values of heads")
    known = config.model_type in _FAMILIES
    if not known:
        found.append(f"its architecture {config.model_type!r} is not supported")
    return found + _window_obstacles(config) + _rope_obstacles(config, known) + _partial_obstacles(config, known)


def _window_obstacles(config: Any) -> list[str]:
    types = set(getattr(config, "layer_types", None) or ())
    window, context = getattr(config, "sliding_window", None), getattr(config, "max_position_embeddings", None)
    found = [f"it has layers of type {name}" for name in sorted(types - {"full_attention", "sliding_attention"})]
    sliding = "sliding_attention" in types or (config.model_type == "mistral" and bool(window))
    if sliding and not (window and context and window >= context):  # a window as long as the context leaves nothing out
        found.append(f"it uses sliding-window attention (sliding_window={window} of max_position_embeddings={context})")
    return found


def _rope_obstacles(config: Any, known: bool) -> list[str]:
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_theta") is None:  # nested by layer type, or no RoPE at all
        return ["its rope_parameters hold no rope_theta"] if known else []
    found, kind = [], rope.get("rope_type", "default")
    if kind not in _ROPE_TYPES:
        found.append(f"it uses rope_type={kind}")
    original = rope.get("original_max_position_embeddings", getattr(config, "original_max_position_embeddings", None))
    if kind == "dynamic" and original not in (None, config.max_position_embeddings):
        # within max_position_embeddings the frequencies are the default ones, unless they are meant to change from here on
        found.append(
            f"it uses rope_type=dynamic with original_max_position_embeddings={original}, not max_position_embeddings={config.max_position_embeddings}"
        )
    return found


def _partial_obstacles(config: Any, known: bool) -> list[str]:
    partial = (getattr(config, "rope_parameters", None) or {}).get("partial_rotary_factor")
    if config.model_type != "stablelm":  # transformers leaves it out of account with rope_type=default and fails with the others
        return [f"its partial_rotary_factor={partial} is not defined for {config.model_type}"] if known and partial not in (None, 1) else []
    width, heads, head_dim = config.hidden_size, config.num_attention_heads, getattr(config, "head_dim", None)
    if not heads or width % heads or head_dim not in (None, width // heads):  # transformers finds out only when it builds or runs the model
        return [f"its hidden_size={width} is not num_attention_heads={heads} times the size of a head"]
    turned = int(width // heads * partial) if isinstance(partial, int | float) else 0
    if turned % 2 or not 0 < turned <= width // heads:
        return [f"its partial_rotary_factor={partial} turns {turned} of a head's {width // heads} dimensions, which must be an even number of them"]
    return []
