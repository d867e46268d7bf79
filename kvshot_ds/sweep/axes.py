"""The cells of a sweep: axes crossed and zipped, short names resolved, exclusions taken out. Knows neither data nor weights."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import yaml

from kvshot_ds.config import ALIASES, Recipe, SweepConfig
from kvshot_ds.config.training import OPERATIONAL
from kvshot_ds.errors import ConfigError
from kvshot_ds.options import walk

_OTHER_RECIPE = "a sweep compares drafters of one target on one set of features: write another recipe with a `work` of its own, and sweep that too"
_INSTEAD = {
    "target": _OTHER_RECIPE,
    "prep": _OTHER_RECIPE,
    "prepared": _OTHER_RECIPE,
    "capture": "capture once what any cell reads (kvshot capture); for features captured otherwise " + _OTHER_RECIPE,
    "shards": "capture once what any cell reads (kvshot capture); for other features " + _OTHER_RECIPE,
    "eval": "all trials are measured alike; kvshot eval WORK/trials/NAME/recipe.yaml eval.OPTION=VALUE measures one again",
    "ray": "it is where a trial runs, not what it is; set it for the whole sweep",
}


@dataclass(frozen=True)
class Cell:
    """One combination of values. labels: axis -> value, as text. options: dotted option -> value. control: as of a Trial."""

    labels: dict[str, str]
    options: dict[str, Any]
    control: str = ""

    @property
    def name(self) -> str:
        return " ".join(f"{axis}={value}" for axis, value in self.labels.items()) or "recipe"


@dataclass(frozen=True)
class Cells:
    """kept: in the order of the axes, the last one fastest. excluded: those that sweep.exclude takes out."""

    kept: tuple[Cell, ...]
    excluded: tuple[Cell, ...]


def cells(sweep: SweepConfig) -> Cells:
    """The cells that `sweep` asks for. Raises ConfigError: unknown names, options that cannot vary, one option set by two axes, an exclusion or a
    baseline that means no cell."""
    crossed = [_joined(rows) for rows in product(*(_zipped(axis) for axis in sweep.axes))]
    for item in sweep.exclude:
        if not item or not select(crossed, item, "sweep.exclude"):
            raise ConfigError(f"sweep.exclude: {item} excludes no cell; values there are: {_values(crossed)}")
    kept = [cell for cell in crossed if not any(_matches(cell, item) for item in sweep.exclude)]
    if not kept:
        raise ConfigError(f"sweep.exclude leaves none of the {len(crossed)} cells")
    if sweep.baseline is not None and len(found := select(kept, sweep.baseline, "sweep.baseline")) != 1:
        named = "; ".join(cell.name for cell in found[:4]) if found else f"values there are: {_values(kept)}"
        raise ConfigError(f"sweep.baseline: {sweep.baseline} means {len(found)} cells, expected one ({named})")
    return Cells(tuple(kept), tuple(cell for cell in crossed if cell not in kept))


def select(among: Sequence[Cell], wanted: Mapping[str, Any], where: str) -> list[Cell]:
    """The cells that have all the values of `wanted`: of an axis, or of an option that they set; a list means any of it. Raises ConfigError if no cell
    has such an axis or option."""
    for name in wanted:
        if not any(name in cell.labels or ALIASES.get(name, name) in cell.options for cell in among):
            names = {name for cell in among for name in (*cell.labels, *cell.options)}
            names |= {short for short, option in ALIASES.items() if option in names}
            raise ConfigError(f"{where}: no axis and no varied option is named {name!r}{_near(name, names)}")
    return [cell for cell in among if _matches(cell, wanted)]


def text(value: Any) -> str:
    """A value as tables show it."""
    return value if isinstance(value, str) else "none" if value is None else json.dumps(value, separators=(",", ":"), default=str)


def written(label: str) -> str:
    """`label` as a value in YAML that means it: `select` takes a list for any of its items, and a word for what it stands for."""
    plain = re.fullmatch(r"[\w.+:-]+", label) is not None and text(yaml.safe_load(label)) == label
    return label if plain else json.dumps(label, ensure_ascii=False)


def _matches(cell: Cell, wanted: Mapping[str, Any]) -> bool:
    return all(_has(cell, name, value if isinstance(value, list | tuple) else [value]) for name, value in wanted.items())


def _has(cell: Cell, name: str, values: Sequence[Any]) -> bool:
    option = ALIASES.get(name, name)
    found = {cell.labels.get(name)} | ({text(cell.options[option])} if option in cell.options else set())
    return any(text(value) in found for value in values)


def _zipped(axis: Mapping[str, Any]) -> list[list[tuple[str, str, dict[str, Any]]]]:
    """The rows of one item: for each name (axis, label, options)."""
    columns = [[(name, label, options) for label, options in _variants(name, values).items()] for name, values in axis.items()]
    for name, column in zip(axis, columns, strict=True):
        if len(column) < len(axis[name]):
            raise ConfigError(f"sweep.axes: axis {name} has a value twice: {axis[name]}")
    return [list(row) for row in zip(*columns, strict=True)]


def _variants(name: str, values: list[Any] | dict[Any, Any]) -> dict[str, dict[str, Any]]:
    """label -> options."""
    if isinstance(values, list):
        return {text(value): _flat(name, value, f"sweep.axes: axis {name}") for value in values}
    out = {}
    for variant, options in values.items():
        where = f"sweep.axes: {name}={variant}"
        if not isinstance(options, dict | None) or {*str(variant)} & {*" ="}:
            raise ConfigError(f"{where}: expected a variant's name without blanks and =, and a mapping from options to values, found {options!r}")
        out[text(variant)] = {leaf: value for option, given in (options or {}).items() for leaf, value in _flat(str(option), given, where).items()}
    return out


def _flat(name: str, value: Any, where: str) -> dict[str, Any]:
    """The options that `name`, a short or a dotted one or a section, sets. Raises ConfigError if there is none of that name or it cannot vary."""
    option = ALIASES.get(name, name)
    if isinstance(value, dict) and option in _sections():
        return {leaf: given for key, inner in value.items() for leaf, given in _flat(f"{option}.{key}", inner, where).items()}
    section, _, rest = option.partition(".")
    if section not in {known.partition(".")[0] for known in _options()} or (section == "train" and option not in _options()):
        sections = f"; {option} is a section: name its options" if option in _sections() else ""
        raise ConfigError(f"{where}: no such axis or option {name!r}{sections or _near(name, {*ALIASES, *_options()})}; short names: {', '.join(ALIASES)}")
    if section != "train":
        raise ConfigError(f"{where}: {option} cannot vary within a sweep; {_INSTEAD.get(section, 'only options below train. shape a drafter')}")
    if option == "train.seed":
        raise ConfigError(f"{where}: seeds are an axis of their own: name them in sweep.seeds")
    if rest in OPERATIONAL:
        raise ConfigError(f"{where}: {option} does not shape the weights, so its values would all train the same drafter; set it for the whole sweep")
    return {option: value}


def _joined(rows: Iterable[Iterable[tuple[str, str, dict[str, Any]]]]) -> Cell:
    labels: dict[str, str] = {}
    options: dict[str, Any] = {}
    for name, label, given in (one for row in rows for one in row):
        for option, value in given.items():
            before = options.setdefault(option, value)
            if before is not value and before != value:  # one that is no number differs from itself
                raise ConfigError(
                    f"sweep.axes: {name}={label} sets {option} to {text(value)}, another axis of the same cell to {text(options[option])}; "
                    f"let one axis of named variants set it: {{{name}: {{NAME: {{{option}: VALUE}}}}}}"
                )
        labels[name] = label
    return Cell(labels, options)


def _values(among: Sequence[Cell]) -> str:
    names = dict.fromkeys(name for cell in among for name in cell.labels)
    return "; ".join(f"{name}: {', '.join(dict.fromkeys(cell.labels[name] for cell in among if name in cell.labels))}" for name in names) or "none"


@cache
def _options() -> frozenset[str]:
    return frozenset(option.name for option in walk(Recipe) if "[]" not in option.name)


@cache
def _sections() -> frozenset[str]:
    parts = [option.split(".") for option in _options()]
    return frozenset(".".join(p[:n]) for p in parts for n in range(1, len(p))) - _options()


def _near(name: str, names: Iterable[str]) -> str:
    leaf = name.rpartition(".")[2]
    close = sorted(n for n in names if n.rpartition(".")[2] == leaf) or difflib.get_close_matches(name, sorted(names), n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(close[:3])}?" if close else ""
