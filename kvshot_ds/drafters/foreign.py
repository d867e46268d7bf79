"""Weights that others saved: safetensors, whole or sharded, or a pickled dictionary of tensors, which is read without running anything."""

from __future__ import annotations

import pickle
from pathlib import Path

import torch

from kvshot_ds.errors import ConfigError
from kvshot_ds.files import file_sha256, read_json

TARGET_DIGEST = "kvshot_target_digest"  # in the header of safetensors files that we export: `target.weights_digest`; configs have no place for it


def _files(folder: Path) -> list[Path]:
    """The weight files: one safetensors file, the shards of an index, or one pytorch_model.bin."""
    single, index, pickled = folder / "model.safetensors", folder / "model.safetensors.index.json", folder / "pytorch_model.bin"
    if single.is_file():
        return [single]
    if index.is_file():
        data = read_json(index)
        listed = data.get("weight_map") if isinstance(data, dict) else None
        if not isinstance(listed, dict) or not all(isinstance(name, str) and Path(name).name == name for name in listed.values()):
            raise ConfigError(f"{index}: expected a weight_map of tensor names to files of this folder")
        shards = [folder / name for name in sorted(set(listed.values()))]
        if missing := [path.name for path in shards if not path.is_file()]:
            raise ConfigError(f"{index}: names {', '.join(missing)}, which is not there; the download is incomplete")
        return shards
    if pickled.is_file():
        return [pickled]
    raise ConfigError(f"{folder}: no weights there; expected {single.name}, {index.name} with its shards, or {pickled.name}")


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of the checkpoint in `folder` by name, on the CPU, without the prefix `model.` that some trainers write.

    Raises ConfigError: no weights, an incomplete download, files that do not load, a tensor that is there twice.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    found: dict[str, torch.Tensor] = {}
    for path in _files(folder):
        try:
            part = load_file(path) if path.suffix == ".safetensors" else torch.load(path, map_location="cpu", weights_only=True)
        except (SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError) as error:
            raise ConfigError(f"{path}: the weights do not load: {str(error).splitlines()[0]}") from None
        if not isinstance(part, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in part.values()):
            raise ConfigError(f"{path}: expected a dictionary of tensors")
        for name, tensor in part.items():
            bare = name.removeprefix("model.")
            if bare in found:
                raise ConfigError(f"{path}: tensor {bare} is there twice")
            found[bare] = tensor
    return found


def named_target(folder: Path) -> str | None:
    """The digest of the target that the weights in `folder` were made for, if their header names one. Raises ConfigError for unreadable files."""
    from safetensors import SafetensorError, safe_open

    for path in _files(folder):
        if path.suffix != ".safetensors":
            continue
        try:
            with safe_open(path, framework="pt") as opened:
                found = (opened.metadata() or {}).get(TARGET_DIGEST)
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{path}: the weights do not load: {str(error).splitlines()[0]}") from None
        if found is not None:
            return str(found)
    return None


def file_digests(folder: Path) -> dict[str, str]:
    """sha256 of config.json and the weight files, by file name."""
    return {path.name: file_sha256(path) for path in (folder / "config.json", *_files(folder))}
