"""Configuration -> drafter, and drafter folder <-> drafter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as save_tensors

from kvshot_ds.config import AnyDrafterConfig, DrafterConfig, HiddenOnlyConfig, HybridConfig, KVOnlyConfig
from kvshot_ds.drafters.base import Drafter
from kvshot_ds.drafters.block import BlockDrafter
from kvshot_ds.drafters.hidden import HiddenOnlyDrafter
from kvshot_ds.drafters.hybrid import HybridDrafter
from kvshot_ds.drafters.kv import KVOnlyDrafter
from kvshot_ds.errors import ConfigError, KvshotError
from kvshot_ds.files import read_json, write_atomic, write_json
from kvshot_ds.geometry import Geometry
from kvshot_ds.target import load_geometry, weights_digest

FORMAT = "kvshot-drafter/1"


def build_drafter(config: AnyDrafterConfig, g: Geometry, draft_vocab_size: int) -> Drafter:
    """The drafter that `config` describes, weights uninitialised (call `reset`). Raises ConfigError if the target cannot serve it."""
    if draft_vocab_size > g.vocab_size:
        raise ConfigError(f"train.draft_vocab_size={draft_vocab_size} is larger than the target's vocabulary of {g.vocab_size}")
    if isinstance(config, HiddenOnlyConfig):
        return HiddenOnlyDrafter(g, config, draft_vocab_size)
    if isinstance(config, HybridConfig):
        return HybridDrafter(g, config, draft_vocab_size)
    if isinstance(config, KVOnlyConfig):
        return KVOnlyDrafter(g, config, draft_vocab_size)
    return BlockDrafter(g, config, draft_vocab_size)


@dataclass(frozen=True)
class DrafterInfo:
    """What a drafter folder says of itself. target: name and digest; extra: init and training facts."""

    config: AnyDrafterConfig
    geometry: Geometry
    draft_vocab_size: int
    target_name: str
    target_digest: str
    extra: dict[str, Any]


def save_drafter(folder: Path, drafter: Drafter, info: DrafterInfo, dtype: torch.dtype, instead: Mapping[str, torch.Tensor] | None = None) -> None:
    """Writes model.safetensors and, last, config.json: a folder with a config.json is whole. instead: tensors that take the place of the drafter's own."""
    own = {**drafter.state_dict(), **(instead or {})}
    tensors = {k: (v.to(dtype) if v.is_floating_point() else v).contiguous().cpu() for k, v in own.items()}
    write_atomic(folder / "model.safetensors", save_tensors(tensors))
    write_json(
        folder / "config.json",
        {
            "format": FORMAT,
            "drafter": info.config.model_dump(mode="json"),
            "draft_vocab_size": info.draft_vocab_size,
            "target": {"name": info.target_name, "digest": info.target_digest, "geometry": info.geometry.to_json()},
            **info.extra,
        },
    )


def find_drafter(folder: Path) -> Path:
    """The drafter folder: `folder` itself, or `folder/drafter` of a run. Raises KvshotError if there is none."""
    for place in (folder, folder / "drafter"):
        if (place / "config.json").is_file():
            if not (place / "model.safetensors").is_file():
                raise KvshotError(f"{place}: config.json without model.safetensors; copy the whole folder, or train again")
            return place
    if (folder / "train.json").is_file():
        raise KvshotError(f"{folder}: no trained drafter here, although its train.json says that it was trained; delete the whole folder and train it again")
    raise KvshotError(f"{folder}: no trained drafter here (neither config.json nor drafter/config.json); has `kvshot train` finished?")


def drafters_for(target: Path, named: Sequence[Path], own: Path, trust_remote_code: bool = False) -> tuple[list[Path], str]:
    """Drafter folders of the runs `named` (`own` if there are none), all trained against the target in `target`; the target's digest.

    Raises ConfigError if the target cannot be read as one or a drafter belongs to another, KvshotError if a run has no drafter.
    """
    folders = [find_drafter(Path(p)) for p in named or (own,)]
    load_geometry(target, trust_remote_code)  # says what is wrong with the folder, if anything is
    digest = weights_digest(target)
    for folder in folders:
        info = read_info(folder)
        if info.target_digest != digest:
            raise ConfigError(
                f"{folder} was trained against the target {info.target_name!r} (digest {info.target_digest[:12]}), not the one in "
                f"target.path={target} (digest {digest[:12]}); name that target, or train a drafter for this one"
            )
    return folders, digest


def read_info(folder: Path) -> DrafterInfo:
    """config.json of a drafter folder. Raises KvshotError if it is of another format."""
    data = read_json(folder / "config.json")
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise KvshotError(f"{folder}/config.json: expected format {FORMAT!r}, found {data.get('format') if isinstance(data, dict) else type(data).__name__!r}")
    known = {"format", "drafter", "draft_vocab_size", "target"}
    try:
        config: Any = TypeAdapter(DrafterConfig).validate_python(data["drafter"])
        target = data["target"]
        extra = {k: v for k, v in data.items() if k not in known}
        return DrafterInfo(config, Geometry.from_json(target["geometry"]), int(data["draft_vocab_size"]), target["name"], target["digest"], extra)
    except (ValueError, KeyError, TypeError) as error:
        raise KvshotError(f"{folder}/config.json: not the description of a drafter ({type(error).__name__}: {error}); export or train it again") from None


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a drafter folder by name. Raises KvshotError if they are not readable."""
    file = folder / "model.safetensors"
    try:
        with safe_open(file, framework="pt") as opened:
            return {key: opened.get_tensor(key) for key in opened.keys()}
    except SafetensorError as error:
        raise KvshotError(f"{file}: not readable as safetensors: {error}; copy the drafter again") from None


def load_drafter(folder: Path, device: torch.device | str, dtype: torch.dtype) -> tuple[Drafter, DrafterInfo]:
    """A trained drafter, in evaluation mode. Raises KvshotError naming missing and unexpected tensors, and a draft vocabulary that is none."""
    folder = find_drafter(folder)
    info = read_info(folder)
    drafter = build_drafter(info.config, info.geometry, info.draft_vocab_size)
    tensors = read_tensors(folder)
    wanted = drafter.state_dict()
    missing, unexpected = sorted(wanted.keys() - tensors.keys()), sorted(tensors.keys() - wanted.keys())
    wrong = [f"{k} {tuple(tensors[k].shape)} instead of {tuple(v.shape)}" for k, v in wanted.items() if k in tensors and tensors[k].shape != v.shape]
    if missing or unexpected or wrong:
        raise KvshotError(f"{folder}/model.safetensors does not fit its config.json: missing {missing}, unexpected {unexpected}, other shape {wrong}")
    if "d2t" in tensors:
        vocabulary(tensors, info.draft_vocab_size, info.geometry.vocab_size, folder)
    drafter.load_state_dict(tensors)
    return drafter.to(device, dtype).eval().requires_grad_(False), info


def vocabulary(tensors: Mapping[str, torch.Tensor], size: Any, vocab: int, folder: Path) -> dict[str, torch.Tensor]:
    """d2t int64 [V_d] and t2d bool [V] of a draft vocabulary of `size` ids, as the checkpoint has them or as they follow. Raises ConfigError."""
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
