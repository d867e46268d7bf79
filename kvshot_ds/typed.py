"""What was read from JSON as the dataclass it should be, or one line that names the field; and nested options by dotted names."""

from __future__ import annotations

import json
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

T = TypeVar("T")


def parse(kind: type[T], value: Any) -> T:
    """The JSON value as dataclass `kind`: no field missing, none unknown, each of its declared type, nothing converted but list to tuple.

    Raises ValueError with one line for the first field that is not.
    """
    try:
        # strict JSON mode: a number is no text and no truth value, but an array is a tuple
        return TypeAdapter(kind).validate_json(json.dumps(value), strict=True, extra="forbid")
    except ValidationError as error:
        first = error.errors()[0]
        place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).removeprefix(".")
        found = "" if first["type"] == "missing" else f", found {repr(first['input'])[:80]}"
        raise ValueError(f"{place or 'the whole'}: {first['msg'][0].lower()}{first['msg'][1:]}{found}") from None


def dotted(value: Any, name: str = "") -> dict[str, Any]:
    """Nested mappings as dotted names below `name`; an empty mapping is a value."""
    if isinstance(value, dict) and value:
        return {k: v for key, inner in value.items() for k, v in dotted(inner, f"{name}.{key}".lstrip(".")).items()}
    return {name: value}
