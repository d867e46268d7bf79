"""Damaged or missing shards of a capture made again, and only those: `kvshot data repair`. What was damaged is moved aside, never deleted."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from data_prep.capture import Unit
from data_prep.orchestrate import Plan, capture_units, finish, make_plan
from data_prep.pool import clear_leftovers, same_configuration, sole_user
from kvshot_ds.config import Recipe
from kvshot_ds.errors import ConfigError, KvshotError
from kvshot_ds.features.check import Fault
from kvshot_ds.features.manifest import Manifest, ShardIndex
from kvshot_ds.features.verify import Survey, quarantine, strangers
from kvshot_ds.files import AnyPath, disk_full, exists, filesystem, read_bytes, remove, storage_errors

_JOBS = 4


@dataclass(frozen=True)
class Repaired:
    """faults: what was found. recaptured: shards made again. changed: those of them whose bytes are not those of before. aside: files moved
    into damaged/."""

    folder: AnyPath
    faults: tuple[Fault, ...]
    recaptured: tuple[str, ...]
    changed: tuple[str, ...]
    aside: tuple[str, ...]
    seconds: float

    def lines(self) -> list[str]:
        if not self.faults:
            return [f"repair: {self.folder}: nothing is damaged"]
        lines = [f"repair: {fault.file}{f': sample {fault.sample!r}' if fault.sample else ''}: {fault.what}" for fault in self.faults]
        lines += [f"repair: {shard}: not the bytes of before: captured on other hardware or with other versions than the rest" for shard in self.changed]
        moved = f", {len(self.aside)} damaged file(s) moved into {self.folder / 'damaged'}" if self.aside else ""
        return [*lines, f"repair: {len(self.recaptured)} shard(s) captured again{moved}, in {self.seconds:.1f} s"]


def run(recipe: Recipe) -> Repaired:
    """Reads all of `recipe.shards_dir`, captures again what is not as it was written, and writes anew what is derived from the shards.

    On the machine that captured it, with the versions of then, the data set is the same as before, byte for byte.
    Raises ConfigError: nothing was captured there, or with another configuration. Raises KvshotError as capture does.
    """
    began = time.perf_counter()
    plan = make_plan(recipe)
    try:
        with sole_user(plan.folder, "kvshot data repair"):
            done = _repair(recipe, plan, began)
    except OSError as error:
        full = disk_full(error, plan.folder) if isinstance(plan.folder, Path) else ""
        raise KvshotError(full or f"{plan.folder}: {error}") from None
    print("\n".join(done.lines()))
    return done


def _repair(recipe: Recipe, plan: Plan, began: float) -> Repaired:
    if not same_configuration(plan.folder, plan.configuration):
        raise ConfigError(f"{plan.folder}: no provenance.json there, so that nothing says what was captured; run kvshot capture")
    survey = Survey.of(plan.folder, [(unit.split, unit.shard) for unit in plan.units], plan.spec, plan.geometry, _JOBS)
    indexes = unaccounted(plan, survey)
    faults = [*survey.faults, *indexes]
    named = {fault.file for fault in faults}
    units = [unit for unit in plan.units if named & set(_files(unit))]
    stray, _ = strangers(plan.folder, {unit.shard for unit in plan.units})
    faults += [Fault(name, "", "is no part of this data set, yet named like one", "") for name in stray]
    faults += [fault for fault in derived_faults(plan, survey) if fault.file != "quarantine.jsonl" or not indexes]
    if not faults:
        return Repaired(plan.folder, (), (), (), (), time.perf_counter() - began)
    before = {index.shard: index.sha256 for _, index in survey.indexes if ShardIndex.path(plan.folder, index.shard).name not in named}
    derived = sorted({fault.file for fault in faults} & {"manifest.json", "quarantine.jsonl", "token_counts.safetensors"})
    # the manifest goes first: without it the folder counts as incomplete, and capture or repair goes on from here
    moved = [name for name in derived if name == "manifest.json" and set_aside(plan.folder, name)]
    remove(Manifest.path(plan.folder))
    moved += [name for name in (*derived, *stray, *(name for unit in units for name in _files(unit))) if set_aside(plan.folder, name)]
    capture_units(recipe, plan, units)
    clear_leftovers(plan.folder)
    finish(recipe, plan)
    changed = [unit.shard for unit in units if before.get(unit.shard) not in (None, ShardIndex.load(plan.folder, unit.shard).sha256)]
    return Repaired(plan.folder, tuple(faults), tuple(unit.shard for unit in units), tuple(changed), tuple(moved), time.perf_counter() - began)


def _files(unit: Unit) -> tuple[str, str]:
    return unit.shard, f"{unit.shard.removesuffix('.tar')}.index.json"


def unaccounted(plan: Plan, survey: Survey) -> list[Fault]:
    """Indexes that do not account for every conversation of their unit, or list one as left out that quarantine.jsonl does not know."""
    counts = {unit.shard: unit.count for unit in plan.units}
    path = plan.folder / "quarantine.jsonl"
    known = set(read_bytes(path).splitlines(keepends=True)) if exists(path) else None
    found = []
    for _, index in survey.indexes:
        name = ShardIndex.path(plan.folder, index.shard).name
        total = len(index.samples) + len(index.rejected)
        if total != counts[index.shard]:
            found.append(Fault(name, "", f"accounts for {total} of {counts[index.shard]} conversations", ""))
        elif known is not None and any(quarantine([r]) not in known for r in index.rejected):
            found.append(Fault(name, "", f"lists a conversation as left out that {path.name} does not list", ""))
    return found


def derived_faults(plan: Plan, survey: Survey) -> list[Fault]:
    """What is wrong with the files that are made from the shards."""
    path = Manifest.path(plan.folder)
    if not exists(path):
        return [Fault(path.name, "", "is not there", "")]
    try:
        found = Manifest.load(plan.folder)
    except KvshotError as error:
        return [Fault(path.name, "", str(error).removeprefix(f"{path}: "), "")]
    if (found.geometry, found.spec, found.target_digest) != (plan.geometry, plan.spec, plan.configuration["target"]):
        return [Fault(path.name, "", "names another target or other features than the recipe", "")]
    return survey.derived(plan.folder, found)


def set_aside(folder: AnyPath, name: str) -> bool:
    """Moves the file into `damaged/` below `folder`, under a name that is free there. False if there is none."""
    path = folder / name
    if not exists(path):
        return False
    number = 0
    while exists(to := folder / "damaged" / f"{name}.{number}"):
        number += 1
    if isinstance(path, Path):
        Path(str(to)).parent.mkdir(exist_ok=True)
        os.replace(path, str(to))
    else:
        with storage_errors(path):
            filesystem(path).mv(path.path, f"{path.path.removesuffix(name)}damaged/{to.name}")
    return True
