"""Public drafters as ours: EAGLE-3 checkpoints in the research layout, DFlash checkpoints in the original layout.

Nothing is guessed: a tensor too many or too few, and a setting that changes what is computed and that our drafters do not
have, is an error that names it.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import ValidationError

from kvshot_ds.config import DFlashConfig, HiddenOnlyConfig
from kvshot_ds.drafters.build import DrafterInfo, save_drafter
from kvshot_ds.drafters.cost import weightless
from kvshot_ds.drafters.foreign import file_digests, read_weights
from kvshot_ds.drafters.layer_ids import IDS, checked_ids, eagle3_outputs
from kvshot_ds.errors import ConfigError
from kvshot_ds.files import read_json
from kvshot_ds.geometry import Geometry
from kvshot_ds.target import load_geometry, load_parts, weights_digest

_EMBEDDING = "embed_tokens.weight"
_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_NEEDED = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers", "vocab_size", "rms_norm_eps")
_SHAPE = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size", "rms_norm_eps", "hidden_act"),
    *("attention_bias", "mlp_bias", "max_position_embeddings", "original_max_position_embeddings"),
    *("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor"),
)

# Setting -> (values under which it changes nothing, why any other is refused). Absent and null change nothing either.
_Neutral = dict[str, tuple[tuple[Any, ...], str]]
_ANY: _Neutral = {
    "speculators_model_type": ((), "this is the speculators format; import the original checkpoint it was made from"),
    "quantization_config": ((), "quantised weights are not read; import the checkpoint before quantisation"),
    "kv_lora_rank": ((), "multi-head latent attention (MLA) is not among our drafters"),
    "is_neox_style": ((True,), "interleaved rotary embedding is not among our drafters"),
    "rope_is_neox_style": ((True,), "interleaved rotary embedding is not among our drafters"),
    "logit_scale": ((1.0,), "scaled logits are not among our drafters"),
}
_EAGLE3: _Neutral = {
    "norm_before_fc": ((False,), "one norm over the joined hidden states before fc is not among our drafters (fc_norm, one norm each, is)"),
    "norm_before_residual": ((False,), "our drafters add the residual before the norm"),
    "use_aux_hidden_state": ((True,), "our drafters fuse hidden states of the target"),
    "use_input_layernorm_in_first_layer": ((True,), "our drafters norm the embedding"),
    "use_last_layernorm": ((True,), "our drafters norm before the head"),
    "use_mtp_layernorm": ((False,), "our drafters have no such norm"),
    "is_causal": ((True,), "our drafters attend causally"),
    "target_layer_ids": ((), f"which layer ids these are is not known here; expected {IDS}"),
    "aux_hidden_state_layer_ids": ((), f"which layer ids these are is not known here; expected {IDS}"),
}
_DFLASH: _Neutral = {
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
_DFLASH_OWN = ("mask_token_id", "target_layer_ids", "block_size", "num_target_layers")


@dataclass(frozen=True)
class Public:
    """A public checkpoint in our terms.

    geometry: the drafter's own heads, MLP, rotary embedding and norms; layers, width and vocabulary are the target's.
    tensors: all of the drafter's state under our names, as the checkpoint has them (d2t and t2d filled in where it has none).
    dtype: the narrowest that holds every tensor exactly. left_out: tensor of the checkpoint -> why it is not used.
    embedding: the checkpoint's own token embedding [V, d], if it has one (left out). notes: what a user should know.
    """

    format: Literal["eagle3", "dflash"]
    config: HiddenOnlyConfig | DFlashConfig
    geometry: Geometry
    draft_vocab_size: int
    tensors: dict[str, torch.Tensor]
    dtype: torch.dtype
    left_out: dict[str, str] = field(default_factory=dict)
    embedding: torch.Tensor | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Report:
    """What `import_drafter` did. folder: the drafter folder; parameters: number of weights; dtype: as stored."""

    folder: Path
    format: str
    parameters: int
    dtype: str
    draft_vocab_size: int
    left_out: dict[str, str]
    notes: tuple[str, ...]

    def lines(self) -> list[str]:
        """For the terminal: what was imported, then one line for each thing to know."""
        head = f"{self.format} drafter, {self.parameters / 1e6:.1f} M parameters, {self.dtype}, draft vocabulary of {self.draft_vocab_size} -> {self.folder}"
        return [head, *(f"left out {name}: {why}" for name, why in self.left_out.items()), *(f"note: {note}" for note in self.notes)]


def read_public(folder: Path, target: Geometry) -> Public:
    """The public drafter in `folder` (config.json and safetensors or pytorch_model.bin), made for a target of geometry `target`.

    Raises ConfigError: not a checkpoint, neither EAGLE-3 nor DFlash, made for another target, tensors missing, unexpected
    or of another shape, or settings that our drafters do not have.
    """
    folder = Path(folder)
    where = f"{folder}/config.json"
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder}: no config.json there; expected the folder of a public drafter: config.json and its weights")
    config = read_json(folder / "config.json")
    if not isinstance(config, dict):
        raise ConfigError(f"{where}: expected an object, found {type(config).__name__}")
    names = config.get("architectures") or []
    _refuse(config, _ANY, "eagle_config", where)
    weights = read_weights(folder)
    try:
        if "DFlashDraftModel" in names:
            return _dflash(config, weights, target, folder)
        if any("eagle3" in str(name).lower() for name in names) or any(name.startswith("midlayer.") for name in weights):
            return _eagle3(config, weights, target, folder)
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, e['loc']))}={_short(e['input'])}: {e['msg']}" for e in error.errors())
        raise ConfigError(f"{where}: {problems}") from None
    raise ConfigError(f"{where}: architectures={names}: neither EAGLE-3 (research layout, LlamaForCausalLMEagle3) nor DFlash (DFlashDraftModel)")


def import_drafter(source: Path, target_folder: Path, out: Path) -> Report:
    """Writes the public drafter in `source`, made for the target in `target_folder`, as a drafter folder `out` for eval and decode.

    Weights keep their dtype. Raises ConfigError as `read_public` and `load_geometry` do, and if `out` holds a config.json already.
    """
    source, target_folder, out = Path(source), Path(target_folder), Path(out)
    if (out / "config.json").exists():
        raise ConfigError(f"{out}: holds a config.json already; name a new folder")
    public = read_public(source, load_geometry(target_folder))
    if public.embedding is not None:
        public.left_out[_EMBEDDING] = _compared(public.embedding, target_folder)
    drafter = weightless(public.config, public.geometry, public.draft_vocab_size)
    drafter.load_state_dict(public.tensors, strict=True, assign=True)
    dtype = str(public.dtype).removeprefix("torch.")
    imported = {
        "format": public.format,
        "source": source.resolve().name,
        "sha256": file_digests(source),
        "dtype": dtype,
        "left_out": public.left_out,
        "notes": list(public.notes),
    }
    name, digest = target_folder.resolve().name, weights_digest(target_folder)
    save_drafter(out, drafter, DrafterInfo(public.config, public.geometry, public.draft_vocab_size, name, digest, {"imported": imported}), public.dtype)
    parameters = sum(p.numel() for p in drafter.parameters())
    return Report(out, public.format, parameters, dtype, public.draft_vocab_size, public.left_out, public.notes)


def _compared(own: torch.Tensor, target_folder: Path) -> str:
    """Why the checkpoint's embedding [V, d] is left out, after a look at the target's."""
    other = int((own != load_parts(target_folder, dtype=own.dtype).embedding).any(-1).sum())
    if not other:
        return "equal to the target's embedding, which is used"
    return f"{other} of {len(own)} rows differ from the target's embedding, which is used; an engine that keeps the drafter's own proposes otherwise"


def _refuse(config: Mapping[str, Any], table: _Neutral, section: str, where: str) -> None:
    """Raises ConfigError for a setting, at top level or in `section`, that changes what is computed."""
    nested = config.get(section)
    if nested is not None and not isinstance(nested, dict):
        raise ConfigError(f"{where}: {section}={nested!r}: expected an object")
    for prefix, settings in (("", config), (f"{section}.", nested or {})):
        for name, (neutral, why) in table.items():
            value = settings.get(name)
            if value is not None and value not in neutral:
                raise ConfigError(f"{where}: {prefix}{name}={_short(value)}: {why}")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _check_target(config: Mapping[str, Any], target: Geometry, where: str) -> None:
    """Raises ConfigError unless the drafter fits the target: width, vocabulary, number of layers; and on sliding windows."""
    if missing := [name for name in _NEEDED if config.get(name) is None]:
        raise ConfigError(f"{where}: {', '.join(missing)} not given; expected the config.json that came with the weights")
    wanted = {
        "hidden_size": target.hidden_size,
        "target_hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "num_target_layers": target.num_layers,
    }
    for name, value in wanted.items():
        if config.get(name) is not None and config[name] != value:
            raise ConfigError(f"{where}: {name}={config[name]}, but the target has {value}; name the target this drafter was made for")
    others = sorted({str(kind) for kind in config.get("layer_types") or ()} - {"full_attention"})
    if others or (config.get("sliding_window") is not None and config.get("use_sliding_window", True)):
        found = f"layer_types has {', '.join(others)}" if others else f"sliding_window={config['sliding_window']}"
        raise ConfigError(f"{where}: {found}: sliding-window attention is not among our drafters; all layers must be full_attention")


def _geometry(config: Mapping[str, Any], target: Geometry, kinds: tuple[str, ...], where: str) -> Geometry:
    """The drafter's own geometry over the target's layers. kinds: model_type values whose layers are ours."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import LlamaConfig, Qwen3Config
    from transformers.activations import ACT2FN

    kind = config.get("model_type")
    if kind not in kinds:
        raise ConfigError(f"{where}: model_type={kind!r}; expected {' or '.join(kinds)}")
    build: Callable[..., Any] = Qwen3Config if kind == "qwen3" else LlamaConfig
    own = copy.deepcopy({name: config[name] for name in _SHAPE if config.get(name) is not None})  # transformers writes into what it is given
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


def _dtype(tensors: Mapping[str, torch.Tensor], folder: Path) -> torch.dtype:
    """The narrowest dtype that holds all floating-point tensors exactly."""
    floats = {name: tensor.dtype for name, tensor in tensors.items() if name not in ("d2t", "t2d")}
    if wrong := sorted(f"{name} ({dtype})" for name, dtype in floats.items() if dtype not in _FLOATS):
        raise ConfigError(f"{folder}: expected fp16, bf16, fp32 or fp64 weights, found {', '.join(wrong[:5])}; import the checkpoint before quantisation")
    return reduce(torch.promote_types, floats.values())


def _fit(public: Public, theirs: Callable[[str], str], folder: Path) -> Public:
    """`public` if its tensors are exactly those of the drafter; else raises ConfigError. theirs: our name -> the checkpoint's."""
    wanted = {name: tensor.shape for name, tensor in weightless(public.config, public.geometry, public.draft_vocab_size).state_dict().items()}
    wrong = [
        f"{theirs(name)} {tuple(public.tensors[name].shape)} instead of {tuple(shape)}"
        for name, shape in wanted.items()
        if name in public.tensors and public.tensors[name].shape != shape
    ]
    missing = sorted(theirs(name) for name in wanted.keys() - public.tensors.keys())
    unexpected = sorted(theirs(name) for name in public.tensors.keys() - wanted.keys())
    problems = [f"{what} {', '.join(found)}" for what, found in (("missing", missing), ("unexpected", unexpected), ("other shape:", wrong)) if found]
    if problems:
        raise ConfigError(f"{folder}: the weights do not fit config.json: {'; '.join(problems)}")
    return public


# EAGLE-3 (arXiv 2503.01840), EAGLE-3.1 (arXiv 2605.09992)


def _eagle3(config: Mapping[str, Any], weights: dict[str, torch.Tensor], target: Geometry, folder: Path) -> Public:
    where = f"{folder}/config.json"
    _refuse(config, _EAGLE3, "eagle_config", where)
    _check_target(config, target, where)
    single = any(name.startswith("midlayer.") for name in weights)
    more = sorted(name for name in weights if re.match(r"(additional_)?layers\." if single else r"additional_layers\.", name))
    if more:
        known = "expected midlayer. alone, or layers.0. and on"
        raise ConfigError(f"{folder}: layers in a layout that is not known here ({more[0]} and {len(more) - 1} more beside midlayer.); {known}")
    depth: int = config["num_hidden_layers"]
    notes: tuple[str, ...] = ()
    if single and depth != 1:  # seen where the config was copied from a target
        notes = (f"config.json says num_hidden_layers={depth}; midlayer is a single layer, which was imported",)
        depth = 1
    tensors = {re.sub(r"^midlayer\.", "layers.0.", name): tensor for name, tensor in weights.items()}
    embedding, left_out = tensors.pop(_EMBEDDING, None), {}
    if embedding is not None:
        if embedding.shape != (target.vocab_size, target.hidden_size):
            found, wanted = tuple(embedding.shape), (target.vocab_size, target.hidden_size)
            raise ConfigError(f"{folder}: {_EMBEDDING} is {found}, the target's is {wanted}; name the target this drafter was made for")
        left_out[_EMBEDDING] = "the drafter reads the target's embedding"
    own = HiddenOnlyConfig(
        depth=depth,
        hidden_layers=eagle3_outputs(config, target.num_layers, where) or "eagle3",
        fc_norm=_flag(config, "fc_norm", where),
        norm_output=_flag(config, "norm_output", where),
    )
    dtype = _dtype(tensors, folder)
    size = config.get("draft_vocab_size") or target.vocab_size
    tensors |= _vocabulary(tensors, size, target.vocab_size, folder)
    geometry = _geometry(config, target, ("llama", "qwen3"), where)
    public = Public("eagle3", own, geometry, size, tensors, dtype, left_out, embedding, notes)
    return _fit(public, lambda name: re.sub(r"^layers\.0\.", "midlayer.", name) if single else name, folder)


def _flag(config: Mapping[str, Any], name: str, where: str) -> bool:
    """A switch that stands at top level or in eagle_config. Raises ConfigError if it is none or stands there twice and differs."""
    found = [value for value in (config.get(name), (config.get("eagle_config") or {}).get(name)) if value is not None]
    if not all(isinstance(value, bool) for value in found) or len(set(found)) > 1:
        raise ConfigError(f"{where}: {name}={found}: expected true or false, the same at top level and in eagle_config")
    return bool(found and found[0])


def _vocabulary(tensors: Mapping[str, torch.Tensor], size: int, vocab: int, folder: Path) -> dict[str, torch.Tensor]:
    """d2t int64 [V_d] and t2d bool [V] of a draft vocabulary of `size` ids, as the checkpoint has them or as they follow."""
    if type(size) is not int or not 0 < size <= vocab:
        raise ConfigError(f"{folder}/config.json: draft_vocab_size={size!r}; expected 1 to {vocab}, the target's vocabulary")
    d2t, t2d = tensors.get("d2t"), tensors.get("t2d")
    if d2t is None:
        if size != vocab:
            raise ConfigError(f"{folder}: missing d2t; draft_vocab_size={size} of {vocab} needs it to tell which target ids are meant")
        d2t = torch.zeros(size, dtype=torch.int64)
    if d2t.shape != (size,) or d2t.is_floating_point():
        raise ConfigError(f"{folder}: d2t is {d2t.dtype} {tuple(d2t.shape)}; expected integers ({size},), one offset for each draft id")
    ids = torch.arange(size) + d2t.long()
    if int(ids[0]) < 0 or int(ids[-1]) >= vocab or bool((ids.diff() < 1).any()):
        raise ConfigError(f"{folder}: d2t names target ids {int(ids.min())} to {int(ids.max())}; expected ascending ones, each once, below {vocab}")
    known = torch.zeros(vocab, dtype=torch.bool)
    known[ids] = True
    if t2d is not None and (t2d.shape != known.shape or not torch.equal(t2d.bool(), known)):
        raise ConfigError(f"{folder}: t2d {tuple(t2d.shape)} does not mark the target ids that d2t names; leave t2d out to have it derived")
    return {"d2t": d2t.long(), "t2d": known}


# DFlash (arXiv 2602.06036)


def _dflash(config: Mapping[str, Any], weights: dict[str, torch.Tensor], target: Geometry, folder: Path) -> Public:
    where = f"{folder}/config.json"
    _refuse(config, _DFLASH, "dflash_config", where)
    _check_target(config, target, where)
    nested = config.get("dflash_config") or {}
    if unknown := {name: value for name, value in nested.items() if name not in _DFLASH_OWN and name not in _ANY | _DFLASH and value not in (None, False)}:
        raise ConfigError(f"{where}: dflash_config has {_short(unknown)}, which is not known here and may change what is computed")
    layers, block_size, mask = (_either(config, nested, name, where) for name in ("target_layer_ids", "block_size", "mask_token_id"))
    if type(mask) is not int or not 0 <= mask < target.vocab_size:
        raise ConfigError(f"{where}: mask_token_id={mask!r}; expected a token of the target, 0 to {target.vocab_size - 1}")
    if not _theta(config):
        raise ConfigError(f"{where}: no rope_theta; engines disagree on its default, so add the one the drafter was trained with")
    own = DFlashConfig(
        depth=config["num_hidden_layers"],
        block_size=block_size,
        mask_token_id=mask,
        hidden_layers=checked_ids(layers, target.num_layers, f"{where}: target_layer_ids"),
    )
    size = config.get("draft_vocab_size") or target.vocab_size
    if size != target.vocab_size or weights.keys() & {"d2t", "t2d"}:
        raise ConfigError(
            f"{folder}: a draft vocabulary of its own (draft_vocab_size={size}, d2t or t2d) is read for EAGLE-3 only; expected all {target.vocab_size}"
        )
    tensors = weights | _vocabulary({}, size, target.vocab_size, folder)
    public = Public("dflash", own, _geometry(config, target, ("qwen3",), where), target.vocab_size, tensors, _dtype(weights, folder))
    return _fit(public, lambda name: name, folder)


def _either(config: Mapping[str, Any], nested: Mapping[str, Any], name: str, where: str) -> Any:
    """A setting that stands at top level, in dflash_config, or in both alike."""
    found = [value for value in (nested.get(name), config.get(name)) if value is not None]
    if not found or found[0] != found[-1]:
        raise ConfigError(f"{where}: {name} is {' and '.join(map(repr, found)) or 'not given'}; expected it once, or alike at top level and in dflash_config")
    return found[0]


def _theta(config: Mapping[str, Any]) -> Any:
    """The base of the rotary embedding, in any of the places where configs have it."""
    nested = [value for value in (config.get("rope_parameters"), config.get("rope_scaling")) if isinstance(value, dict)]
    return next((value["rope_theta"] for value in (config, *nested) if value.get("rope_theta")), None)
