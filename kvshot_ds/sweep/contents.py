"""What a cell of a sweep comes to: the recipe of its trials, what they read, and the address of what they will have learned."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from pydantic import ValidationError

import ds_configs
from kvshot_ds.config import ALIASES, Recipe, SweepConfig, merge
from kvshot_ds.drafters.build import find_drafter
from kvshot_ds.errors import ConfigError
from kvshot_ds.features.manifest import Manifest
from kvshot_ds.features.shard import ShardSet
from kvshot_ds.features.spec import FeatureSpec
from kvshot_ds.files import file_sha256
from kvshot_ds.geometry import Geometry
from kvshot_ds.options import explain
from kvshot_ds.provenance import digest
from kvshot_ds.sweep.axes import Cell
from kvshot_ds.sweep.folder import Trial, trials_dir
from kvshot_ds.training.schedule import Schedule, chosen

CELL = "cell:"  # init.warm_start=cell:axis=value ...: the drafter of that cell's trial of the same seed


@dataclass(frozen=True)
class Length:
    """Optimizer steps of a training, and of one pass over its conversations."""

    steps: int
    of_a_pass: int

    @property
    def passes(self) -> float:
        return self.steps / self.of_a_pass


@dataclass(frozen=True)
class Data:
    """What all trials read. digest: of the shards, "" before they are captured. keys, sizes: (tokens, rows) of the train split; empty if not known yet."""

    manifest: Manifest
    digest: str
    keys: tuple[str, ...]
    sizes: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, recipe: Recipe) -> Data:
        """The captured features. Raises ConfigError if there are none."""
        shards = ShardSet.open(recipe.shards_dir, "train", look=False)
        keys, sizes = zip(*((s.key, (s.tokens, s.rows)) for s in shards.samples), strict=True) if shards.samples else ((), ())
        return cls(shards.manifest, shards.digest, keys, sizes)

    @classmethod
    def planned(cls, recipe: Recipe, name: str, g: Geometry, sizes: tuple[tuple[int, int], ...]) -> Data:
        """Of a capture that is yet to be made from the target `name`. Addresses over it are not those of the trials to come."""
        manifest = Manifest(name, "", "", g, FeatureSpec.resolve(recipe.capture.features, g), {}, 0)
        return cls(manifest, "", tuple(f"{i:012d}" for i in range(len(sizes))), sizes)

    def length(self, recipe: Recipe) -> Length | None:
        """Of a trial; None if the conversations are not known. Raises ConfigError if the options do not fit them."""
        t = recipe.train
        options = (t.conversations_per_step, t.conversations_per_micro_batch, recipe.ray.ranks, t.epochs, t.max_steps)
        key = (*options, t.max_conversations, t.tokens_per_micro_batch)
        if self.sizes and key not in self._lengths:
            s = Schedule(self.sizes, *options, t.seed, chosen(self.keys, t.max_conversations), budget=t.tokens_per_micro_batch)
            self._lengths[key] = Length(s.steps, s.steps_per_epoch)
        return self._lengths.get(key)

    @cached_property
    def _lengths(self) -> dict[tuple[int, ...], Length]:
        return {}


def trial_recipe(recipe: Recipe, trial: Trial) -> Recipe:
    """The recipe of the run folder of `trial`: that of the sweep, with the trial's options and seed laid on. Raises ConfigError naming the cell."""
    return _named(resolved(recipe, trial.options, trial.seed, trial.cell), trial.name)


def resolved(recipe: Recipe, options: Mapping[str, Any], seed: int, cell: str) -> Recipe:
    """`recipe` with dotted `options` laid on, and no sweep. Raises ConfigError, naming the cell and how to leave it out, if they do not fit together."""
    over: dict[str, Any] = {}
    for option, value in {**options, "train.seed": seed}.items():
        for field in reversed(option.split(".")):
            value = {field: value}
        over = merge(over, value)
    base = recipe.model_dump(mode="json", exclude={"sweep"})
    try:
        return Recipe.model_validate(merge(base, over))
    except ValidationError as error:
        raise ConfigError(f"cell {cell}: {'; '.join(explain(error, Recipe))}") from None


def address(recipe: Recipe, data: Data) -> str:
    """12 hex digits over all that shapes the weights of the trial `recipe`: options, target, data, DeepSpeed configuration, and what it starts from: the
    trial whose drafter it takes, or the weights of another one. Raises KvshotError if there is no drafter at `train.init.warm_start`."""
    train, source = recipe.train.shaping(), ""
    if recipe.train.init.warm_start is not None:
        train["init"]["warm_start"], source = None, _source(recipe, data)
    return digest(json.dumps(train, sort_keys=True), data.manifest.target_digest, data.digest, repr(ds_configs.load(recipe.train.ds_config)), source)[:12]


def sources(recipe: Recipe, among: tuple[Cell, ...]) -> dict[int, int]:
    """Of each cell that starts from another cell's drafter, the number of that other cell. Raises ConfigError if it is not there or not one."""
    found = {}
    for i, cell in enumerate(among):
        start = starts_from(recipe, cell)
        if start.startswith(CELL):
            found[i] = _cell_meant(among, i, start)
    return found


def unlike(cell: Cell, source: Cell, start: str) -> dict[str, str]:
    """Axis -> value of `source`, where it is not that of `cell`, whose warm start `start` takes it without naming the axis."""
    words = _words(start)
    return {axis: label for axis, label in source.labels.items() if not _names(words, axis, label) and cell.labels.get(axis) not in (label, start)}


def starts_from(recipe: Recipe, cell: Cell) -> str:
    """train.init.warm_start of `cell` as it is written; "" without."""
    return str(cell.options.get(ALIASES["warm_start"], recipe.train.init.warm_start) or "")


def _named(recipe: Recipe, name: str) -> Recipe:
    return recipe.model_copy(update={"sweep": SweepConfig(), "runs": trials_dir(recipe.work), "name": name})


def _cell_meant(among: tuple[Cell, ...], i: int, start: str) -> int:
    """The cell that `start` of cell `i` means: that with the values named. On the other axes it has the values of cell `i`, or the one value there is."""
    words = _words(start)

    def has(cell: Cell) -> bool:
        return all(cell.labels.get(word) == value if sign else word in cell.labels.values() for word, sign, value in words)

    # Where the warm starts are an axis, the source is a cell that has not this one.
    found = [j for j, cell in enumerate(among) if words and not cell.control and has(cell) and start not in cell.labels.values()]
    found = [j for j in found if j != i] or found
    if not found:
        known = "; ".join(cell.name for cell in among[:6])
        raise ConfigError(f"cell {among[i].name}: init.warm_start={start} means no cell of this sweep; cells: {known}")
    several = {axis for axis in among[i].labels if len({among[j].labels.get(axis) for j in found}) > 1}
    alike = [j for j in found if not several & unlike(among[i], among[j], start).keys()]
    if len(alike) != 1:
        own = " ".join(f"{axis}={label}" for axis, label in among[i].labels.items() if axis in several)
        what = f"means {len(alike)} cells" if alike else f"means {len(found)} cells, of which none has this cell's own {own}"
        known = "; ".join(among[j].name for j in (alike or found)[:6])
        raise ConfigError(f"cell {among[i].name}: init.warm_start={start} {what}: {known}; name more of its values, with a space between: {CELL}A=1 B=2")
    return alike[0]


def _words(start: str) -> list[tuple[str, str, str]]:
    """What stands behind `cell:`, as (axis, "=", value) or (value, "", "")."""
    return [word.partition("=") for word in start.removeprefix(CELL).split()]


def _names(words: list[tuple[str, str, str]], axis: str, label: str) -> bool:
    return any(value == label if sign else word == label for word, sign, value in words if not sign or word == axis)


def _source(recipe: Recipe, data: Data) -> str:
    """The address of the trial that the warm start takes, or the digest of the drafter it takes."""
    start = recipe.train.init.warm_start
    assert start is not None
    if start.parent == trials_dir(recipe.work):
        return start.name.rpartition("-")[2]
    if not data.digest:
        return str(start)  # of a plan, whose drafter need not be there yet
    return drafter_sha(find_drafter(start))


def drafter_sha(folder: Path) -> str:
    """Digest of the weights of the drafter folder."""
    file = folder / "model.safetensors"
    return _sha(file, file.stat().st_mtime_ns)


@cache
def _sha(file: Path, _changed: int) -> str:
    return file_sha256(file)
