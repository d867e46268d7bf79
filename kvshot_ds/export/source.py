"""What is exported: a trained or imported drafter with its weights as stored, and the target that it belongs to."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors import SafetensorError, safe_open

from kvshot_ds.drafters.base import Drafter
from kvshot_ds.drafters.build import DrafterInfo, find_drafter, load_drafter
from kvshot_ds.errors import ConfigError, KvshotError
from kvshot_ds.files import read_object
from kvshot_ds.target import load_geometry, weights_digest


@dataclass(frozen=True)
class Source:
    """A drafter to export. folder: its drafter folder; layers: the fused target layers by their outputs, in the order of fc.

    tensors: its state under our names, in the dtype in which it was stored.
    """

    folder: Path
    drafter: Drafter
    info: DrafterInfo
    tensors: dict[str, torch.Tensor]

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(self.drafter.hidden_layers)

    @classmethod
    def read(cls, folder: Path) -> Source:
        """The drafter of a run or a drafter folder. Raises KvshotError as `find_drafter` and `load_drafter` do."""
        folder = find_drafter(Path(folder))
        drafter, info = load_drafter(folder, "cpu", stored_dtype(folder))
        return cls(folder, drafter, info, dict(drafter.state_dict()))


@dataclass(frozen=True)
class TargetFacts:
    """What a served config says of the target. named: as others shall find it; max_positions: its context [tokens]."""

    folder: Path
    named: str
    architectures: list[str]
    tokens: dict[str, Any]  # bos_token_id, eos_token_id, pad_token_id
    max_positions: int

    @classmethod
    def read(cls, folder: Path, info: DrafterInfo, named: str | None = None) -> TargetFacts:
        """The target in `folder`. Raises ConfigError if it is no target or not the one that the drafter was trained for."""
        geometry = load_geometry(folder)
        digest = weights_digest(folder)
        if digest != info.target_digest:
            raise ConfigError(
                f"--target {folder}: holds weights {digest[:12]}, but the drafter belongs to the target {info.target_name!r} with weights "
                f"{info.target_digest[:12]}; name the folder of that target"
            )
        config = read_object(folder / "config.json")
        tokens = {name: config.get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        return cls(folder, named or str(folder), list(config.get("architectures") or []), tokens, geometry.max_positions)


def stored_dtype(folder: Path) -> torch.dtype:
    """The dtype of a drafter folder's weights. Raises KvshotError if they are not readable."""
    file = find_drafter(folder) / "model.safetensors"
    try:
        with safe_open(file, framework="pt") as opened:
            if "norm.weight" in opened.keys():
                dtype: torch.dtype = opened.get_tensor("norm.weight").dtype
                return dtype
    except SafetensorError as error:
        raise KvshotError(f"{file}: not readable as safetensors: {error}; copy the drafter again") from None
    raise KvshotError(f"{file}: no tensor norm.weight, which every drafter has; copy the drafter again")


def run_of(folder: Path) -> Path | None:
    """The run that the drafter in `folder` came from, if it lies in one: the folder with its recipe.yaml."""
    return next((place for place in (folder, folder.parent) if (place / "recipe.yaml").is_file()), None)


def recipe_of(folder: Path) -> dict[str, Any]:
    """The resolved recipe of the run that the drafter in `folder` came from, {} if it lies in none. Raises KvshotError if it is damaged."""
    run = run_of(folder)
    if run is None:
        return {}
    try:
        found = yaml.safe_load((run / "recipe.yaml").read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise KvshotError(f"{run}/recipe.yaml: not readable as YAML ({str(error).splitlines()[0]}); copy the run again") from None
    if not isinstance(found, dict):
        raise KvshotError(f"{run}/recipe.yaml: expected the resolved recipe, found {type(found).__name__}; copy the run again")
    return found
