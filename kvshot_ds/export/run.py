"""`kvshot export`: a drafter as a folder that others load. The folder appears whole, in one step."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from kvshot_ds.config import ObjectiveConfig
from kvshot_ds.drafters.foreign import TARGET_DIGEST
from kvshot_ds.errors import ConfigError
from kvshot_ds.export import dflash, eagle3, own, speculators
from kvshot_ds.export.card import card
from kvshot_ds.export.facts import facts_of
from kvshot_ds.export.obstacles import Format, obstacles, servable
from kvshot_ds.export.parts import DTYPES, Converted, stored
from kvshot_ds.export.source import Source, TargetFacts, recipe_of, stored_dtype
from kvshot_ds.files import abandoned, aside, write_atomic, write_json


@dataclass(frozen=True)
class Exported:
    """What `export_drafter` wrote. tensors: their number; parameters: of the drafter itself, without a copied embedding; dtype: of the weights."""

    folder: Path
    format: Format
    tensors: int
    parameters: int
    dtype: str
    notes: tuple[str, ...]

    def lines(self) -> list[str]:
        """For the terminal."""
        head = f"{self.format}: {self.tensors} tensors, {self.parameters / 1e6:.1f} M parameters, {self.dtype} -> {self.folder}"
        return [head, *(f"note: {note}" for note in self.notes)]


def export_drafter(place: Path, out: Path, form: Format, target: Path | None = None, dtype: str | None = None, named: str | None = None) -> Exported:
    """Writes the drafter of the run or drafter folder `place` as the folder `out`.

    target: folder of the target; default: target.path of the run's recipe. dtype: bf16 or fp32; default: as stored. named: what the config calls the
    target. Raises ConfigError: `out` is there already, what the layout cannot hold, a target that is missing or another; KvshotError: no drafter there.
    """
    place, out = Path(place), Path(out)
    _check_new(out)
    source = Source.read(place)
    _check_servable(source, form)
    facts_target = _target(source, form, target, named)
    kind = stored_dtype(source.folder) if dtype is None else DTYPES[dtype]
    facts = facts_of(source, facts_target.folder if facts_target else None)
    beside = _staging(out)
    try:
        count, notes = _fill(beside, source, form, facts_target, facts, kind)
        _appear(beside, out)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    parameters = sum(p.numel() for p in source.drafter.parameters())
    return Exported(out, form, count, parameters, str(kind).removeprefix("torch."), tuple(notes))


def _check_new(out: Path) -> None:
    if out.is_dir() and not any(out.iterdir()):
        return
    if out.exists():
        what = "holds an export or a drafter already" if (out / "config.json").is_file() else "is there already and not an empty folder"
        raise ConfigError(f"{out}: {what}; name a new folder, or remove this one")


def _check_servable(source: Source, form: Format) -> None:
    """Raises ConfigError naming everything about the drafter that the layout does not hold, and the layouts that do."""
    described = (source.info.config, source.layers, source.info.geometry, source.info.draft_vocab_size)
    if found := obstacles(form, *described):
        others = " or ".join(f"--format {other}" for other in servable(*described))
        raise ConfigError(f"{source.folder}: not servable in the format {form}: {'; '.join(found)}. Export it with {others}")


def _target(source: Source, form: Format, given: Path | None, named: str | None) -> TargetFacts | None:
    """The target's facts; None where the own format is written and no target is at hand."""
    recipe = (recipe_of(source.folder).get("target") or {}).get("path")
    folder = given if given is not None else None if recipe is None else Path(recipe)
    if given is None and (folder is None or not folder.is_dir()):
        if form == "kvshot":
            return None
        found = "the drafter lies in no run whose recipe names it" if folder is None else f"target.path={folder} of its recipe is no folder here"
        raise ConfigError(f"{source.folder}: the format {form} describes the target too, and {found}; give its folder: --target DIR")
    assert folder is not None
    return TargetFacts.read(folder, source.info, named)


def _converted(source: Source, form: Format, target: TargetFacts, dtype: torch.dtype) -> Converted:
    if form == "eagle3":
        return eagle3.convert(source, target, dtype)
    if form == "dflash":
        return dflash.convert(source, target, dtype)
    objective = (recipe_of(source.folder).get("train") or {}).get("objective") or {}
    return speculators.convert(source, target, dtype, objective.get("steps", ObjectiveConfig().steps))


def _fill(folder: Path, source: Source, form: Format, target: TargetFacts | None, facts: Mapping[str, Any], dtype: torch.dtype) -> tuple[int, list[str]]:
    """Writes the files of the export; number of tensors, and notes."""
    count, notes = len(source.tensors), list[str]()
    if form == "kvshot":
        own.write(folder, source, facts, dtype)
    else:
        assert target is not None
        made = _converted(source, form, target, dtype)
        tensors = stored(made.tensors, dtype, source.folder)
        write_atomic(folder / "model.safetensors", save(tensors, metadata={"format": "pt", TARGET_DIGEST: source.info.target_digest}))
        write_json(folder / "config.json", made.config)
        count, notes = len(tensors), made.notes
    parameters = sum(p.numel() for p in source.drafter.parameters())
    named = None if target is None else target.named
    write_atomic(folder / "README.md", card(form, source.info, facts, parameters, str(dtype).removeprefix("torch."), named))
    return count, notes


def _staging(out: Path) -> Path:
    """A folder beside `out` to fill; what a killed export left there is removed."""
    out.parent.mkdir(parents=True, exist_ok=True)
    for left in out.parent.glob(f".{out.name}.*.tmp"):
        if left.is_dir() and abandoned(left):
            shutil.rmtree(left, ignore_errors=True)
    beside = aside(out.absolute())
    beside.mkdir()
    return beside


def _appear(beside: Path, out: Path) -> None:
    """Renames the whole folder to its place. Raises ConfigError if something has come there meanwhile."""
    try:
        beside.rename(out)
    except OSError as error:
        if out.exists():
            raise ConfigError(f"{out}: another program has written there meanwhile; name a new folder") from error
        raise
    folder = os.open(out.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
