"""Shapes and rotary settings of a target, without its weights: what a drafter is built from."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from kvshot_ds.errors import ConfigError

# family -> (q/k norm, bias of q,k,v, bias of o); None: read from the config
_FAMILIES: dict[str, tuple[bool, bool | None, bool | None]] = {
    "llama": (False, None, None),
    "mistral": (False, False, False),
    "qwen2": (False, True, False),
    "qwen3": (True, None, None),
}


@dataclass(frozen=True)
class Geometry:
    """Dimensions of a decoder-only target: L layers, width d, A query heads, G key/value heads of size D, V tokens.

    rope: Hugging Face `rope_parameters` (rope_type, rope_theta, …). Built by `from_hf`; stored with every drafter.
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
        """From a transformers config. Raises ConfigError naming a family or feature that is not supported."""
        kind = config.model_type
        if kind not in _FAMILIES:
            raise ConfigError(f"target architecture {kind!r} is not supported; supported: {', '.join(_FAMILIES)}")
        layer_types = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
        window = getattr(config, "sliding_window", None)
        if layer_types or (kind == "mistral" and window and window < config.max_position_embeddings):
            raise ConfigError(f"target uses {', '.join(sorted(layer_types)) or 'sliding_window attention'}, which drafters do not support")
        rope = {k: v for k, v in dict(config.rope_parameters).items() if v is not None}
        if rope.get("rope_type", "default") not in ("default", "linear", "llama3", "yarn"):
            raise ConfigError(f"target uses rope_type {rope['rope_type']!r}; supported: default, linear, llama3, yarn")
        qk_norm, qkv_bias, o_bias = _FAMILIES[kind]
        bias = bool(getattr(config, "attention_bias", False))
        return cls(
            family=kind,
            num_layers=config.num_hidden_layers,
            hidden_size=config.hidden_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            intermediate_size=config.intermediate_size,
            vocab_size=config.vocab_size,
            norm_eps=config.rms_norm_eps,
            qk_norm=qk_norm,
            qkv_bias=bias if qkv_bias is None else qkv_bias,
            o_bias=bias if o_bias is None else o_bias,
            mlp_bias=bool(getattr(config, "mlp_bias", False)),
            hidden_act=config.hidden_act,
            max_positions=config.max_position_embeddings,
            rope=rope,
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Geometry:
        return cls(**value)

    def rotary(self) -> tuple[torch.Tensor, float]:
        """Inverse frequencies [D_rot/2] fp32 and the factor on cos and sin, exactly as the target computes them."""
        from transformers import PreTrainedConfig
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        kind = self.rope.get("rope_type", "default")
        if kind == "default":
            width = int(self.head_dim * self.rope.get("partial_rotary_factor", 1.0))
            return 1.0 / (self.rope["rope_theta"] ** (torch.arange(0, width, 2, dtype=torch.int64).float() / width)), 1.0
        config = PreTrainedConfig(
            hidden_size=self.hidden_size, num_attention_heads=self.heads, head_dim=self.head_dim, max_position_embeddings=self.max_positions
        )
        config.rope_parameters = dict(self.rope)
        inv_freq, scaling = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
        return inv_freq.float(), float(scaling)
