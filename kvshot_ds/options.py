"""The option table of a pydantic model: command help, `kvshot config options` and error texts are made from it."""

from __future__ import annotations

import difflib
import json
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from upath import UPath

_BOUNDS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
_NAMES = {str: "text", Path: "path", UPath: "URL", type(None): "null"}


@dataclass(frozen=True)
class Option:
    """One leaf of a model. `name` is dotted, items of a list are `list[].field`; `when` is the choice it exists under, or ''."""

    name: str
    type: str
    default: str
    description: str
    when: str = ""


def walk(model: type[BaseModel], prefix: str = "", when: str = "") -> Iterator[Option]:
    """Every leaf option of `model`, in the order of its fields.

    Of a discriminated union: the choice itself as one option, then the options of each variant, `when` it is chosen.
    """
    for key, field in model.model_fields.items():
        name = f"{prefix}.{key}" if prefix else key
        variants = _sections(field.annotation)
        if get_origin(field.annotation) is tuple and variants:
            yield Option(name, "list of mappings", _default(field), field.description or "", when)
            yield from walk(variants[0], f"{name}[]", when)
        elif isinstance(choice := field.discriminator, str):
            tags = [get_args(variant.model_fields[choice].annotation)[0] for variant in variants]
            default = "required" if field.is_required() else getattr(field.get_default(call_default_factory=True), choice)
            yield Option(f"{name}.{choice}", "|".join(tags), default, field.description or "", when)
            for tag, variant in zip(tags, variants, strict=True):
                yield from (o for o in walk(variant, name, f"{name}.{choice}={tag}") if o.name != f"{name}.{choice}")
        elif variants:
            yield from walk(variants[0], name, when)
        else:
            yield Option(name, _type(field), _default(field), field.description or "", when)


def explain(error: ValidationError, model: type[BaseModel]) -> list[str]:
    """One line for each option that `error` is about: its dotted name, what is wrong, what was found."""
    table = list(walk(model))
    found: dict[str, list[str]] = {}
    for item in error.errors():
        name = _option_of(item["loc"], table)
        text = _unknown(name, table) if item["type"] == "extra_forbidden" else item["msg"].removeprefix("Value error, ")
        whole_section = isinstance(item["input"], dict) and not item["type"].endswith("_type")
        shown = "" if item["type"] == "missing" or whole_section else f" (found {repr(item['input'])[:80]})"
        found.setdefault(name, []).append(text + shown)
    return [f"{name}: {'; or '.join(dict.fromkeys(texts))}" for name, texts in found.items()]


def _option_of(loc: tuple[int | str, ...], table: list[Option]) -> str:
    """The dotted name that pydantic's location means: union tags, which are no part of it, left out."""
    parts = [option.name.split(".") for option in table]
    known = {".".join(p[:n]) for p in parts for n in range(1, len(p) + 1)} | {option.name.replace("[]", "") for option in table}
    shown = plain = ""
    for place, part in enumerate(loc):
        if isinstance(part, int):
            shown += f"[{part}]"
            continue
        candidate = f"{plain}.{part}".lstrip(".")
        if candidate in known or (place == len(loc) - 1 and part.isidentifier()):
            plain, shown = candidate, f"{shown}.{part}".lstrip(".")
    return shown or "recipe"


def _unknown(name: str, table: list[Option]) -> str:
    """What to say of an option that does not exist, or not under the choice made."""
    under = sorted({option.when for option in table if f"{option.name}.".startswith(f"{name}.") and option.when})
    if under:
        return f"exists only with {' or '.join(under)}"
    names = [option.name for option in table]
    leaf = name.rpartition(".")[2]
    close = [n for n in names if n.rpartition(".")[2] == leaf] or difflib.get_close_matches(name, names, n=1, cutoff=0.75)
    return "no such option" + (f"; did you mean {' or '.join(dict.fromkeys(close[:3]))}?" if close else "")


def _sections(annotation: Any) -> list[type[BaseModel]]:
    """Models that `annotation` is, or is a union or a list of."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [section for inner in get_args(annotation) for section in _sections(inner)]


def _type(field: FieldInfo) -> str:
    bounds = [f"{sign} {getattr(m, attr)}" for m in field.metadata for attr, sign in _BOUNDS.items() if getattr(m, attr, None) is not None]
    return " ".join([_name(field.annotation), ", ".join(bounds)]).strip()


def _name(annotation: Any) -> str:
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _name(args[0])
    if origin is Literal:
        return "|".join(str(a) for a in args)
    if origin in (Union, types.UnionType):
        return " or ".join(_name(a) for a in args)
    if origin is tuple:
        return f"list of {_name(args[0])}" if args[-1] is Ellipsis else f"[{', '.join(_name(a) for a in args)}]"
    return _NAMES.get(annotation, annotation.__name__)


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    return str(value) if isinstance(value, str | Path) else json.dumps(value, default=str)
