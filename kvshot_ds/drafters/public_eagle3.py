"""EAGLE-3 checkpoints (arXiv 2503.01840, 2605.09992) as ours, in the layouts in which they are published.

Names and conventions were read off the trainers' sources:

- research: SpecForge, ModelOpt and others; LlamaForCausalLMEagle3, config flat, first layer `midlayer.` or `layers.0.`.
- EAGLE: the original repository; LlamaForCausalLM, config flat and often without rope_theta (10000), `midlayer.`, a pickled pytorch_model.bin.
- AngelSlim: Eagle3LlamaForCausalLM, config flat, `midlayer.`, with the target's embedding.
- speculators: Eagle3Speculator, the layer's config nested in transformer_layer_config, `layers.i.` of any depth, with the target's embedding;
  layer ids at top level count from the embeddings.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from kvshot_ds.config import HiddenOnlyConfig
from kvshot_ds.drafters import public_config as settings
from kvshot_ds.drafters.build import vocabulary
from kvshot_ds.drafters.layer_ids import IDS
from kvshot_ds.drafters.public_parts import EMBEDDING, MadeFor, Public, fitted, narrowest, order_notes
from kvshot_ds.drafters.readings import Readings, eagle3_readings
from kvshot_ds.errors import ConfigError
from kvshot_ds.geometry import Geometry

_ANGELSLIM = ("Eagle3LlamaForCausalLM", "Eagle3LLamaforCausalLM")
_VERIFIER = "verifier_"  # tensors of the target that speculators holds while it trains
_AIDS = "aux_hidden_state_layer_ids"  # a newer name of IDS in speculators


def is_speculators(config: Mapping[str, Any]) -> bool:
    return any(config.get(name) is not None for name in ("speculators_model_type", "speculators_config", "transformer_layer_config"))


def layout_of(config: Mapping[str, Any], weights: Mapping[str, torch.Tensor]) -> str | None:
    """Whose layout of EAGLE-3 this is; None if it is none."""
    names = [str(name) for name in config.get("architectures") or ()]
    if is_speculators(config):
        return "speculators"
    if any(name in _ANGELSLIM for name in names):
        return "AngelSlim"
    if any("eagle3" in name.lower() for name in names):
        return "research"
    return "EAGLE" if any(name.startswith("midlayer.") for name in weights) else None


def read_eagle3(layout: str, config: dict[str, Any], weights: dict[str, torch.Tensor], target: Geometry, folder: Path) -> Public:
    """The checkpoint of `layout_of` as ours. Raises ConfigError: settings that our drafters do not have, another target, tensors that do not fit."""
    where = f"{folder}/config.json"
    made_for = MadeFor()
    if layout == "speculators":
        config, made_for = _flat(config, where), _verifier(config, where)
    settings.refuse(config, settings.ANY | settings.EAGLE3, "eagle_config", where)
    settings.refuse_norms(config, "eagle_config", where)
    settings.check_target(config, target, where)
    names = _Names.of(config, weights, folder)
    tensors = {names.ours(name): tensor for name, tensor in weights.items() if not name.startswith(_VERIFIER)}
    left_out = {name: "the target's own, of use in training only" for name in weights if name.startswith(_VERIFIER)}
    embedding = tensors.pop(EMBEDDING, None)
    if embedding is not None:
        _check_embedding(embedding, target, folder)
        left_out[EMBEDDING] = "the drafter reads the target's embedding"
    readings, own = _drafter(config, names.depth, target, where)
    dtype = narrowest(tensors, folder)
    size = config.get("draft_vocab_size") or target.vocab_size
    tensors |= vocabulary(tensors, size, target.vocab_size, folder)
    geometry = settings.geometry_of(config, target, ("llama", "qwen3"), where)
    notes = (*names.notes, *order_notes(own.hidden_layers), *_trainer_notes(layout, geometry), *settings.rotary_notes(geometry, target))
    trained = settings.flag(config, "embed_requires_grad", where)
    public = Public("eagle3", layout, own, geometry, size, tensors, dtype, readings, left_out, embedding, trained, made_for, notes)
    return fitted(public, names.theirs, folder)


def _drafter(config: Mapping[str, Any], depth: int, target: Geometry, where: str) -> tuple[Readings, HiddenOnlyConfig]:
    readings = eagle3_readings(config, target.num_layers, where)
    layers = readings.possible[0].layers if readings.chosen is None else readings.chosen or "eagle3"
    switches = {name: settings.flag(config, name, where) for name in settings.SWITCHES}
    return readings, HiddenOnlyConfig.model_validate({"depth": depth, "hidden_layers": layers, **switches})


class _Names:
    """The checkpoint's names of the layers, and ours. depth: number of layers; notes: what the config says otherwise."""

    def __init__(self, single: bool, depth: int, notes: tuple[str, ...]) -> None:
        self.single, self.depth, self.notes = single, depth, notes

    @classmethod
    def of(cls, config: Mapping[str, Any], weights: Mapping[str, torch.Tensor], folder: Path) -> _Names:
        """Raises ConfigError for layers in an order that is not known."""
        single = any(name.startswith("midlayer.") for name in weights)
        more = sorted(name for name in weights if re.match(r"(additional_)?layers\." if single else r"additional_layers\.", name))
        if more:
            known = "expected midlayer. alone, or layers.0. and on"
            raise ConfigError(f"{folder}: layers in a layout that is not known here ({more[0]} and {len(more) - 1} more beside midlayer.); {known}")
        depth: int = config["num_hidden_layers"]
        if single and depth != 1:  # seen where the config was copied from a target
            return cls(single, 1, (f"config.json says num_hidden_layers={depth}; midlayer is a single layer, which was imported",))
        return cls(single, depth, ())

    def ours(self, name: str) -> str:
        return re.sub(r"^midlayer\.", "layers.0.", name)

    def theirs(self, name: str) -> str:
        return re.sub(r"^layers\.0\.", "midlayer.", name) if self.single else name


def _check_embedding(embedding: torch.Tensor, target: Geometry, folder: Path) -> None:
    found, wanted = tuple(embedding.shape), (target.vocab_size, target.hidden_size)
    if found != wanted:
        raise ConfigError(f"{folder}: {EMBEDDING} is {found}, the target's is {wanted}; name the target this drafter was made for")


def _trainer_notes(layout: str, geometry: Geometry) -> tuple[str, ...]:
    theta = geometry.rope["rope_theta"]
    if layout != "AngelSlim" or theta == 10000:
        return ()
    return (f"AngelSlim's trainer takes rotary base 10000 whatever config.json says; rope_theta={theta:g} was taken from it, as serving engines do",)


# speculators


def _flat(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A speculators config as the research layout would have it. Raises ConfigError."""
    kind = config.get("speculators_model_type")
    if kind not in (None, "eagle3"):
        raise ConfigError(
            f"{where}: speculators_model_type={kind!r}: of the speculators layout only eagle3 is read; import the checkpoint in its original layout"
        )
    layer = settings.part(config, "transformer_layer_config", where)
    if not layer:
        raise ConfigError(f"{where}: no transformer_layer_config; expected the config of the decoder layers there, as speculators writes it")
    if differ := [name for name in settings.SHAPE if None not in (config.get(name), layer.get(name)) and config[name] != layer[name]]:
        name = differ[0]
        raise ConfigError(
            f"{where}: {name}={settings.short(config[name])} and {settings.short(layer[name])} at top level and in transformer_layer_config: expected one value"
        )
    if config.get("norm_before_residual") is None:
        raise ConfigError(
            f"{where}: norm_before_residual not given; readers take its absence for true or for false, so add the one the drafter was trained with"
        )
    if config.get("draft_vocab_size") is None:
        raise ConfigError(f"{where}: draft_vocab_size not given; expected the number of rows of lm_head.weight")
    nested = ("transformer_layer_config", "speculators_config", _AIDS)
    outside = {name: value for name, value in config.items() if value is not None and name not in nested}
    return {**layer, **outside, "model_type": layer.get("model_type"), IDS: _ids(config, where)}


def _ids(config: Mapping[str, Any], where: str) -> Any:
    """The layer ids under either of their names."""
    found = [config[name] for name in (IDS, _AIDS) if config.get(name) is not None]
    if found and found[0] != found[-1]:
        raise ConfigError(f"{where}: {IDS}={found[0]} and {_AIDS}={found[1]}: expected one of them, or both alike")
    return found[0] if found else None


def _verifier(config: Mapping[str, Any], where: str) -> MadeFor:
    """The target that speculators_config names."""
    verifier = settings.part(settings.part(config, "speculators_config", where), "verifier", where)
    name, architectures = verifier.get("name_or_path"), verifier.get("architectures")
    return MadeFor(name if isinstance(name, str) else None, tuple(map(str, architectures)) if isinstance(architectures, list) else ())
