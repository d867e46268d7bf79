"""What real decoding left in a run's folder, typed: decode.json and serving_check.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvshot_ds.metrics import Interval


@dataclass(frozen=True)
class Decoding:
    """decode.json. against: what the outputs were compared with, "" where they could not be, for `why`; identical, different: outputs.
    tau: tokens committed per target forward; histogram: rounds by accepted drafts; joint, conditional: acceptance by step or level; nodes: tokens
    verified a round; skipped: prompts left out."""

    prompts: int
    max_new_tokens: int
    strategy: str
    levels: int
    batch: int
    temperature: float
    dtype: str
    against: str
    why: str
    identical: int
    different: int
    cases: tuple[Any, ...]
    tau: Interval
    histogram: tuple[int, ...]
    joint: tuple[Interval, ...]
    conditional: tuple[float | None, ...]
    nodes: float | None
    tokens: int
    target_forwards: int
    seconds: dict[str, float]
    tokens_per_second: dict[str, float | None]
    device: str
    skipped: int

    @property
    def drafted_by(self) -> str:
        """Strategy and width in words."""
        words = {"chain": "chain", "static_tree": "static tree", "dynamic_tree": "dynamic tree", "paper_tree": "the paper's tree"}
        return f"{words.get(self.strategy, self.strategy)} of {self.levels}"

    @property
    def sampled(self) -> str:
        """ "" of greedy decoding."""
        return f"sampled at temperature {self.temperature:g}" if self.temperature else ""


@dataclass(frozen=True)
class ServingCheck:
    """serving_check.json. joint_mat: by rung, from held-out rows to real decoding; joint: by rung and step; differences: between neighbouring rungs;
    judged: the differences that must vanish. steps: draft steps that joint MAT sums over. agreeing: of `tokens` decoded, those before the first that is not the
    held-out answer's."""

    passed: bool
    faults: tuple[str, ...]
    conversations: int
    steps: int
    max_new_tokens: int
    dtype: str
    confidence: float
    tolerance: float
    joint_mat: dict[str, Interval]
    joint: dict[str, tuple[float | None, ...]]
    differences: dict[str, Interval]
    judged: frozenset[str]
    rounds: int
    rounds_different: int
    tau: Interval
    tokens: int
    agreeing: int
    seconds: float


def read_decoding(data: Mapping[str, Any]) -> Decoding:
    """Raises KeyError, TypeError or ValueError on what is no decode.json of this version."""
    lossless = data["lossless"]
    return Decoding(
        prompts=data["prompts"],
        max_new_tokens=data["max_new_tokens"],
        strategy=data["strategy"],
        levels=data["levels"],
        batch=data["batch"],
        temperature=data["sampling"]["temperature"],
        dtype=data["dtype"],
        against=lossless["against"] or "",
        why=lossless["why"],
        identical=lossless["identical"],
        different=lossless["different"],
        cases=tuple(lossless["cases"]),
        tau=_interval(data["tau"]),
        histogram=tuple(data["histogram"]),
        joint=tuple(map(_interval, data["joint"])),
        conditional=tuple(rate["value"] for rate in data["conditional"]),
        nodes=data["nodes"],
        tokens=data["tokens"],
        target_forwards=data["target_forwards"],
        seconds=dict(data["seconds"]),
        tokens_per_second=dict(data["tokens_per_second"]),
        device=data["device"],
        skipped=len(data["skipped"]),
    )


def read_serving_check(data: Mapping[str, Any]) -> ServingCheck:
    """Raises KeyError, TypeError or ValueError on what is no serving_check.json of this version."""
    plain = (
        "passed", "conversations", "steps", "max_new_tokens", "dtype", "confidence", "tolerance", "rounds", "rounds_different", "tokens", "agreeing", "seconds",
    )  # fmt: skip
    return ServingCheck(
        **{name: data[name] for name in plain},
        faults=tuple(data["faults"]),
        joint_mat={name: _interval(value) for name, value in data["joint_mat"].items()},
        joint={name: tuple(rate["value"] for rate in rates) for name, rates in data["joint"].items()},
        differences={name: _interval(value) for name, value in data["differences"].items()},
        judged=frozenset(name for name, value in data["differences"].items() if value["judged"]),
        tau=_interval(data["tau"]),
    )


def _interval(value: Mapping[str, Any]) -> Interval:
    return Interval(value["value"], value["low"], value["high"])
