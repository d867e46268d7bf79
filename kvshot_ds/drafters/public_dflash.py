"""DFlash checkpoints (arXiv 2602.06036) in the original layout as ours."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from kvshot_ds.config import DFlashConfig
from kvshot_ds.drafters import public_config as settings
from kvshot_ds.drafters.build import vocabulary
from kvshot_ds.drafters.public_parts import Public, fitted, narrowest, order_notes
from kvshot_ds.drafters.readings import dflash_readings
from kvshot_ds.errors import ConfigError
from kvshot_ds.geometry import Geometry

_OWN = ("mask_token_id", "target_layer_ids", "block_size", "num_target_layers")


def read_dflash(config: dict[str, Any], weights: dict[str, torch.Tensor], target: Geometry, folder: Path) -> Public:
    """The checkpoint as ours. Raises ConfigError: settings that our drafters do not have, another target, tensors that do not fit."""
    where = f"{folder}/config.json"
    known = settings.ANY | settings.DFLASH
    settings.refuse(config, known, "dflash_config", where)
    settings.check_target(config, target, where)
    nested = settings.part(config, "dflash_config", where)
    if unknown := {name: value for name, value in nested.items() if name not in _OWN and name not in known and value not in (None, False)}:
        raise ConfigError(f"{where}: dflash_config has {settings.short(unknown)}, which is not known here and may change what is computed")
    layers, block_size, mask = (_either(config, nested, name, where) for name in ("target_layer_ids", "block_size", "mask_token_id"))
    if type(mask) is not int or not 0 <= mask < target.vocab_size:
        raise ConfigError(f"{where}: mask_token_id={mask!r}; expected a token of the target, 0 to {target.vocab_size - 1}")
    if not _theta(config):
        raise ConfigError(f"{where}: no rope_theta; engines disagree on its default, so add the one the drafter was trained with")
    readings = dflash_readings(layers, target.num_layers, f"{where}: target_layer_ids")
    size = config.get("draft_vocab_size") or target.vocab_size
    if size != target.vocab_size or weights.keys() & {"d2t", "t2d"}:
        raise ConfigError(
            f"{folder}: a draft vocabulary of its own (draft_vocab_size={size}, d2t or t2d) is read for EAGLE-3 only; expected all {target.vocab_size}"
        )
    own = DFlashConfig.model_validate({"depth": config["num_hidden_layers"], "block_size": block_size, "mask_token_id": mask, "hidden_layers": readings.chosen})
    geometry = settings.geometry_of(config, target, ("qwen3",), where)
    tensors = weights | vocabulary({}, size, target.vocab_size, folder)
    notes = (*order_notes(own.hidden_layers), *settings.rotary_notes(geometry, target))
    return fitted(Public("dflash", "original", own, geometry, size, tensors, narrowest(weights, folder), readings, notes=notes), lambda name: name, folder)


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
