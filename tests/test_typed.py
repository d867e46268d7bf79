"""`parse` builds what JSON says and nothing else."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

import pytest

from kvshot_ds.typed import parse


@dataclass(frozen=True)
class Inner:
    count: int
    share: float = 0.5


@dataclass(frozen=True)
class Outer:
    name: str
    parts: tuple[Inner, ...]
    sizes: dict[Literal["a", "b"], tuple[int, ...]]
    on: bool = False


GOOD: dict[str, Any] = {"name": "x", "parts": [{"count": 1, "share": 2}], "sizes": {"a": [3, 4]}}


def test_lists_become_tuples_and_defaults_fill_in() -> None:
    assert parse(Outer, GOOD) == Outer("x", (Inner(1, 2.0),), {"a": (3, 4)})


@pytest.mark.parametrize(
    "change, text",
    [
        ({"name": 1}, "name: input should be a valid string, found 1"),
        ({"parts": [{"count": 1}, {"count": "1"}]}, "parts[1].count: input should be a valid integer, found '1'"),
        ({"parts": [{"count": 1.5}]}, "parts[0].count: input should be a valid integer, found 1.5"),
        ({"parts": [{"count": True}]}, "parts[0].count: input should be a valid integer, found True"),
        ({"parts": [{}]}, "parts[0].count: field required"),
        ({"on": 1}, "on: input should be a valid boolean, found 1"),
        ({"on": None}, "on: input should be a valid boolean, found None"),
        ({"name": "\ud800"}, "the whole: invalid JSON"),
    ],
    ids=str,
)
def test_the_field_is_named_in_one_line(change: dict[str, Any], text: str) -> None:
    value = json.loads(json.dumps({**GOOD, **change}))
    with pytest.raises(ValueError) as caught:
        parse(Outer, value)
    assert str(caught.value).startswith(text) and len(str(caught.value)) < 200 and "\n" not in str(caught.value)


def test_what_is_not_known_is_named() -> None:
    for change, place in (({"more": 1}, "more: "), ({"parts": [{"count": 1, "more": 1}]}, "parts[0].more: "), ({"sizes": {"c": []}}, "sizes.c.[key]: ")):
        with pytest.raises(ValueError) as caught:
            parse(Outer, {**GOOD, **change})
        assert str(caught.value).startswith(place)
