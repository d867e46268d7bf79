"""config.json of a public drafter: what it says that our drafters do not do is an error that names it; the rest becomes a geometry."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from kvshot_ds.drafters.layer_ids import IDS
from kvshot_ds.errors import ConfigError
from kvshot_ds.geometry import Geometry

_NEEDED = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers", "vocab_size", "rms_norm_eps")
SHAPE = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size", "rms_norm_eps", "hidden_act"),
    *("attention_bias", "mlp_bias", "max_position_embeddings", "original_max_position_embeddings"),
    *("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor"),
)

# Setting -> (values under which it changes nothing, why any other is refused). Absent and null change nothing either.
Neutral = dict[str, tuple[tuple[Any, ...], str]]
ANY: Neutral = {
    "quantization_config": ((), "quantised weights are not read; import the checkpoint before quantisation"),
    "kv_lora_rank": ((), "multi-head latent attention (MLA) is not among our drafters"),
    "is_neox_style": ((True,), "interleaved rotary embedding is not among our drafters"),
    "rope_is_neox_style": ((True,), "interleaved rotary embedding is not among our drafters"),
    "logit_scale": ((1.0,), "scaled logits are not among our drafters"),
}
EAGLE3: Neutral = {
    "norm_before_fc": ((False,), "one norm over the joined hidden states before fc is not among our drafters (fc_norm, one norm each, is)"),
    "use_aux_hidden_state": ((True,), "our drafters fuse hidden states of the target"),
    "use_input_layernorm_in_first_layer": ((True,), "our drafters norm the embedding"),
    "use_last_layernorm": ((True,), "our drafters norm before the head"),
    "use_mtp_layernorm": ((False,), "our drafters have no such norm"),
    "is_causal": ((True,), "our drafters attend causally"),
    "target_layer_ids": ((), f"which layer ids these are is not known here; expected {IDS}"),
    "aux_hidden_state_layer_ids": ((), f"which layer ids these are is not known here; expected {IDS}"),
}
SWITCHES = ("fc_norm", "norm_output", "norm_before_residual")  # of EAGLE-3, which our drafters have
DFLASH: Neutral = {
    "is_causal": ((False,), "causal blocks are not among our drafters"),
    "causal": ((False,), "causal blocks are not among our drafters"),
    "use_swa": ((False,), "sliding-window attention is not among our drafters"),
    "attention_sink_bias": ((False,), "attention sinks are not among our drafters"),
    "add_swa_attention_sink_bias": ((False,), "attention sinks are not among our drafters"),
    "use_aux_hidden_state": ((True,), "our drafters fuse hidden states of the target"),
    "final_logit_softcapping": ((0,), "capped logits are not among our drafters"),
    "output_multiplier": ((1,), "scaled logits are not among our drafters"),
    "input_embedding_scale": ((1,), "scaled embeddings are not among our drafters"),
    "projector_type": (("dflash",), "only plain DFlash is among our drafters"),
    "attention_mode": (("gqa", "mha"), "only grouped-query attention is among our drafters"),
}


def short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def refuse(config: Mapping[str, Any], table: Neutral, section: str, where: str) -> None:
    """Raises ConfigError for a setting, at top level or in `section`, that changes what is computed."""
    for prefix, settings in (("", config), (f"{section}.", part(config, section, where))):
        for name, (neutral, why) in table.items():
            value = settings.get(name)
            if value is not None and value not in neutral:
                raise ConfigError(f"{where}: {prefix}{name}={short(value)}: {why}")


def refuse_norms(config: Mapping[str, Any], section: str, where: str) -> None:
    """Raises ConfigError for a switch about norms that is on and not known here: it may need no tensor that would give it away."""
    for prefix, settings in (("", config), (f"{section}.", part(config, section, where))):
        for name, value in settings.items():
            if "norm" in name and value is True and name not in EAGLE3 and name not in SWITCHES:
                raise ConfigError(f"{where}: {prefix}{name}=True: a norm that is not known here; known are {', '.join(SWITCHES)}")


def part(config: Mapping[str, Any], section: str, where: str) -> Mapping[str, Any]:
    """A nested section, empty if it is not there. Raises ConfigError if it is no object."""
    nested = config.get(section)
    if nested is not None and not isinstance(nested, dict):
        raise ConfigError(f"{where}: {section}={nested!r}: expected an object")
    return nested or {}


def flag(config: Mapping[str, Any], name: str, where: str) -> bool:
    """A switch that stands at top level or in eagle_config. Raises ConfigError if it is none or stands there twice and differs."""
    found = [value for value in (config.get(name), (config.get("eagle_config") or {}).get(name)) if value is not None]
    if not all(isinstance(value, bool) for value in found) or len(set(found)) > 1:
        raise ConfigError(f"{where}: {name}={found}: expected true or false, the same at top level and in eagle_config")
    return bool(found and found[0])


def check_target(config: Mapping[str, Any], target: Geometry, where: str) -> None:
    """Raises ConfigError unless the drafter fits the target: width, vocabulary, number of layers; and on sliding windows."""
    if missing := [name for name in _NEEDED if config.get(name) is None]:
        raise ConfigError(f"{where}: {', '.join(missing)} not given; expected the config.json that came with the weights")
    wanted = {
        "hidden_size": target.hidden_size,
        "target_hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "target_vocab_size": target.vocab_size,
        "num_target_layers": target.num_layers,
    }
    for name, value in wanted.items():
        if config.get(name) is not None and config[name] != value:
            raise ConfigError(f"{where}: {name}={config[name]}, but the target has {value}; name the target this drafter was made for")
    others = sorted({str(kind) for kind in config.get("layer_types") or ()} - {"full_attention"})
    if others or (config.get("sliding_window") is not None and config.get("use_sliding_window", True)):
        found = f"layer_types has {', '.join(others)}" if others else f"sliding_window={config['sliding_window']}"
        raise ConfigError(f"{where}: {found}: sliding-window attention is not among our drafters; all layers must be full_attention")


def geometry_of(config: Mapping[str, Any], target: Geometry, kinds: tuple[str, ...], where: str) -> Geometry:
    """The drafter's own geometry over the target's layers. kinds: model_type values whose layers are ours. Raises ConfigError."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import LlamaConfig, Qwen3Config
    from transformers.activations import ACT2FN

    kind = config.get("model_type")
    if kind not in kinds:
        raise ConfigError(f"{where}: model_type={kind!r}; expected {' or '.join(kinds)}")
    build: Callable[..., Any] = Qwen3Config if kind == "qwen3" else LlamaConfig
    own = copy.deepcopy({name: config[name] for name in SHAPE if config.get(name) is not None})  # transformers writes into what it is given
    try:
        if "head_dim" in own:  # else transformers refuses a width that is no multiple of the heads, which need not be one
            own["hidden_size"] = own["num_attention_heads"] * own["head_dim"]
        geometry = replace(Geometry.from_hf(build(**own)), num_layers=target.num_layers, hidden_size=target.hidden_size)
    except (StrictDataclassError, ConfigError, ValueError, TypeError, KeyError) as error:
        reason = str(error).splitlines()[-1].strip().replace("the target is not supported", "the drafter is not supported")
        raise ConfigError(f"{where}: {reason}") from None
    if geometry.hidden_act not in ACT2FN:
        raise ConfigError(f"{where}: hidden_act={geometry.hidden_act!r} is none that transformers knows")
    if geometry.rope["rope_type"] == "dynamic" and geometry.max_positions < target.max_positions:
        found = f"max_position_embeddings={geometry.max_positions} with rope_type=dynamic, whose frequencies change beyond it"
        raise ConfigError(f"{where}: {found}; the target's {target.max_positions} positions need a drafter of as many")
    if geometry.heads % geometry.kv_heads:
        raise ConfigError(f"{where}: num_attention_heads={geometry.heads} is no multiple of num_key_value_heads={geometry.kv_heads}")
    return geometry


def rotary_notes(own: Geometry, target: Geometry) -> tuple[str, ...]:
    """What a user should know where the drafter's rotary embedding is not the target's.

    Notes, not refusals: EAGLE-3 and DFlash attend to keys that they make and turn themselves, so theta and scaling need not be the target's, and
    of well-known drafters they are not. Where it would compute something else (dynamic frequencies, `geometry_of`), it is an error. Drafters that
    read the target's keys are none of the public formats; theirs hang on the target's digest, which covers its rotary settings.
    """
    there, here = ({k: v for k, v in g.rope.items() if (k, v) != ("partial_rotary_factor", 1.0)} for g in (own, target))
    notes = []
    if differ := [
        f"{name}={there.get(name)} (the target has {here.get(name)})" for name in sorted(there.keys() | here.keys()) if there.get(name) != here.get(name)
    ]:
        notes.append(
            f"rotary settings are not the target's: {', '.join(differ)}; kept, since the drafter attends to its own keys alone; it may also mean "
            "that the drafter was made for another target"
        )
    if own.max_positions < target.max_positions:
        notes.append(
            f"max_position_embeddings={own.max_positions}, the target has {target.max_positions}: beyond its own the drafter may not have been trained; "
            "it drafts there, and an engine may not"
        )
    return tuple(notes)
