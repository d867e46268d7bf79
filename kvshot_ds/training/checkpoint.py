"""Checkpoints that a kill at any moment cannot spoil: written under a new tag, made current by one atomic rename."""

from __future__ import annotations

import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch.distributed as dist

from kvshot_ds.errors import KvshotError
from kvshot_ds.files import read_json, write_json

_CURRENT = "current.json"


@dataclass(frozen=True)
class Progress:
    """How far a run is and what it took, over all its starts. resumed_from: steps at which it was taken up again.

    padding: tokens computed that count for nothing (conversations are laid end to end, so only the stand-ins of uneven ranks).
    """

    step: int = 0
    seconds: float = 0.0
    tokens: int = 0
    supervised_rows: int = 0
    padding: int = 0
    resumed_from: tuple[int, ...] = ()

    @property
    def padding_share(self) -> float:
        return self.padding / max(1, self.padding + self.tokens)


def save(folder: Path, engine: Any, progress: Progress, rank: int, keep: int) -> None:
    """Engine state (weights, optimizer, schedule) after `progress.step` optimizer steps. All ranks call it; the newest `keep` stay."""
    tag = f"step-{progress.step:08d}"
    try:
        engine.save_checkpoint(str(folder), tag=tag, save_latest=False)
    except (OSError, RuntimeError) as error:  # torch's writer reports a full disk as a RuntimeError
        raise KvshotError(f"{folder / tag}: the checkpoint cannot be written ({error}); is the disk full? The one before it stays") from None
    dist.barrier()
    if rank == 0:
        write_json(folder / _CURRENT, {"tag": tag, "world_size": dist.get_world_size(), "progress": asdict(progress)})
        for old in sorted(folder.glob("step-*"))[:-keep]:
            shutil.rmtree(old)
    dist.barrier()


def load(folder: Path, engine: Any) -> Progress:
    """Restores the current checkpoint and returns its progress; a fresh one where there is none. Half-written ones are not looked at.

    Raises KvshotError if it was written by another number of ranks, or if DeepSpeed cannot read it.
    """
    if not exists(folder):
        return Progress()
    current = read_json(folder / _CURRENT)
    where = folder / current["tag"]
    progress = Progress(**{**current["progress"], "resumed_from": (*current["progress"]["resumed_from"], current["progress"]["step"])})
    if current["world_size"] != dist.get_world_size():
        raise KvshotError(
            f"{folder}: the checkpoint at step {progress.step} was written by {current['world_size']} rank(s), this run has {dist.get_world_size()}; "
            f"continue with {current['world_size']}, or give the run another name"
        )
    try:
        path, _ = engine.load_checkpoint(str(folder), tag=current["tag"])
    except (OSError, RuntimeError, AssertionError, EOFError, KeyError, UnpicklingError) as error:
        raise KvshotError(f"{where}: DeepSpeed cannot read this checkpoint ({error}); delete {folder} to start again") from None
    if path is None:
        raise KvshotError(f"{where}: DeepSpeed found no checkpoint there although {_CURRENT} names it; delete {folder} to start again")
    return progress


def exists(folder: Path) -> bool:
    """Whether there is a checkpoint to continue from."""
    return (folder / _CURRENT).is_file()


def sweep(folder: Path, step: int) -> list[str]:
    """Deletes tags newer than the current `step`, left half-written by a killed run. Returns their names."""
    stale = [p for p in folder.glob("step-*") if p.is_dir() and int(p.name.removeprefix("step-")) > step]
    for path in stale:
        shutil.rmtree(path)
    return sorted(p.name for p in stale)
