"""The latency table: seconds of everything that a round of speculative decoding is made of, on one device; JSON, so that it answers elsewhere.

`kvshot bench --latency TABLE` writes it on the device that is asked about (latency.py), predict.py and simulate.py read it. Shapes decide, not weights:
a table made with random weights serves every target and drafter of the same shapes. Between the measured contexts and sizes seconds are interpolated linearly.
A context outside the measured ones is answered by the nearest, and the answer says so; a size outside is refused, for a
forward becomes bound by arithmetic at some width, and a line drawn from below it would flatter long drafts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvshot_ds.errors import KvshotError
from kvshot_ds.files import read_object, write_json
from kvshot_ds.provenance import digest
from kvshot_ds.typed import parse

FORMAT = "kvshot-latency/1"
_TRAINING_ONLY = ("init", "projector_init", "open_steps", "floor", "floor_steps")  # starting weights and schedules


@dataclass(frozen=True)
class Timing:
    """Seconds: the median of the repeats, and their quartiles."""

    seconds: float
    low: float
    high: float

    @classmethod
    def of(cls, repeats: Sequence[float]) -> Timing:
        """From the seconds of each repeat; at least one."""
        low, median, high = (float(q) for q in np.quantile(repeats, (0.25, 0.5, 0.75)))
        return cls(median, low, high)

    def fault(self) -> str | None:
        """What is wrong with it, or None."""
        if not all(math.isfinite(x) and x >= 0 for x in (self.seconds, self.low, self.high)):
            return "expected finite seconds, none negative"
        return None if self.low <= self.seconds <= self.high else "expected low <= seconds <= high"


@dataclass(frozen=True)
class Point(Timing):
    """A timing at `context` positions before and `size` new tokens, positions or rows."""

    context: int
    size: int


@dataclass(frozen=True)
class Reading:
    """Interpolated seconds. outside: the context lies outside the measured ones, and the nearest of them answered."""

    seconds: float
    outside: bool


@dataclass(frozen=True)
class Surface:
    """Points of a full grid: every context with every size."""

    points: tuple[Point, ...]

    @property
    def contexts(self) -> list[int]:
        return sorted({p.context for p in self.points})

    @property
    def sizes(self) -> list[int]:
        return sorted({p.size for p in self.points})

    def fault(self) -> str | None:
        """What is wrong with it, or None."""
        for p in self.points:
            if p.context < 1 or p.size < 1:
                return f"expected context and size of at least 1, found context {p.context}, size {p.size}"
            if (wrong := p.fault()) or not p.seconds:
                return f"context {p.context}, size {p.size}: {wrong or 'expected more than 0 seconds'}"
        at = {(p.context, p.size) for p in self.points}
        if absent := [(c, s) for c in self.contexts for s in self.sizes if (c, s) not in at]:
            return f"expected every context with every size; context {absent[0][0]}, size {absent[0][1]} is missing"
        if not self.points or len(at) < len(self.points):
            return "expected points, no two of the same context and size"
        return None

    def at(self, context: float, sizes: npt.ArrayLike) -> tuple[npt.NDArray[np.float64], bool]:
        """Seconds at `context` and each of `sizes`, in their shape; whether the context lies outside. Linear in both.

        Raises KvshotError for a size outside the measured ones.
        """
        known, asked = self.sizes, np.asarray(sizes, dtype=np.float64)
        if asked.size and (asked.min() < known[0] or asked.max() > known[-1]):
            raise KvshotError(f"the latency table has sizes {known[0]} to {known[-1]}, asked for {asked.min():g} to {asked.max():g}: measure these too")
        seconds = {(p.context, p.size): p.seconds for p in self.points}
        lines = np.array([[seconds[c, s] for s in known] for c in self.contexts])  # [contexts, sizes]
        of_size = np.array([np.interp(context, self.contexts, column) for column in lines.T])  # constant beyond the ends
        return np.interp(asked, known, of_size), not self.contexts[0] <= context <= self.contexts[-1]


@dataclass(frozen=True)
class DrafterLatency:
    """A drafter's latencies.

    name, family: for people. shape: `shape_of` its configuration; what a table is searched by. parameters: of its own. block_size: of a block-wise
    drafter, None of others.
    first: draft step 0 or a block's one forward, size = positions taken in since the last round; with the choice of the proposals.
    step: one draft step k >= 1, size = rows (1 in a chain, the expanded nodes in a tree); None of a block-wise drafter.
    overhead: what a round spends outside the two models, by strategy: "chain" and, where measured, "tree".
    """

    name: str
    family: str
    shape: str
    parameters: int
    block_size: int | None
    first: Surface
    step: Surface | None
    overhead: dict[str, Timing]

    def fault(self) -> str | None:
        for part, surface in (("first", self.first), ("step", self.step)):
            if surface is not None and (wrong := surface.fault()):
                return f"{part}: {wrong}"
        if (self.step is None) != (self.block_size is not None):
            return "expected either a block_size or the latencies of a step"
        if "chain" not in self.overhead or not self.overhead.keys() <= {"chain", "tree"}:
            return f"overhead: expected chain, and perhaps tree, found {sorted(self.overhead)}"
        return next((f"overhead.{name}: {wrong}" for name, t in self.overhead.items() if (wrong := t.fault())), None)


@dataclass(frozen=True)
class LatencyTable:
    """Everything measured on one device, for one target.

    device: its name. kind: cpu or cuda. threads: CPU threads of torch. dtype: of target and drafters. target, geometry: its name and shapes.
    repeats: timings of each point. forward: the target's forward over a cache, size = new tokens; with the choice of the next tokens.
    alone: what the target alone, decoded by the same loop, spends outside its forward for each token.
    """

    device: str
    kind: str
    threads: int
    dtype: str
    target: str
    geometry: dict[str, Any]
    repeats: int
    forward: Surface
    alone: Timing
    drafters: tuple[DrafterLatency, ...]
    format: str = FORMAT
    provenance: dict[str, Any] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        write_json(path, asdict(self))

    @classmethod
    def load(cls, path: Path) -> LatencyTable:
        """Raises KvshotError if there is no such file, or it is no latency table: what was expected, found, and where."""
        if not path.is_file():
            raise KvshotError(f"{path}: no such latency table; `kvshot bench RECIPE --latency {path.name}` writes one on the device that is asked about")
        data = read_object(path)
        if data.get("format") != FORMAT:
            raise KvshotError(
                f"{path}: expected a latency table of format {FORMAT!r}, found {data.get('format')!r}; write it again by `kvshot bench --latency`"
            )
        try:
            table = parse(cls, data)
        except ValueError as error:
            raise KvshotError(f"{path}: not a latency table: {error}; write it again by `kvshot bench --latency`") from None
        if wrong := table.fault():
            raise KvshotError(f"{path}: a latency table that cannot be used: {wrong}; `kvshot bench --latency` writes one")
        return table

    def fault(self) -> str | None:
        """What is wrong with it, or None."""
        if wrong := self.forward.fault():
            return f"forward: {wrong}"
        if self.forward.sizes[0] != 1:
            return f"forward: expected size 1 among the measured ones (the target alone), found {self.forward.sizes}"
        if wrong := self.alone.fault():
            return f"alone: {wrong}"
        return next((f"drafters[{i}] ({d.name}): {wrong}" for i, d in enumerate(self.drafters) if (wrong := d.fault())), None)

    def drafter(self, shape: str, name: str) -> DrafterLatency:
        """Of the drafter with that `shape_of`. name: what an error calls it. Raises KvshotError if it was not measured."""
        found = next((d for d in self.drafters if d.shape == shape), None)
        if found is None:
            there = ", ".join(f"{d.name} ({d.family}, {d.parameters:,} parameters)" for d in self.drafters) or "none"
            raise KvshotError(f"{name}: the latency table has no drafter of its shape; it has {there}; measure with this drafter, weights do not matter")
        return found


def shape_of(config: Mapping[str, Any], draft_vocab_size: int, geometry: Mapping[str, Any]) -> str:
    """What decides a drafter's latencies: its configuration as JSON (without what only trains it), its draft vocabulary and its geometry, as one digest."""
    return digest(json.dumps([_lasting(config), draft_vocab_size, geometry], sort_keys=True, default=str))


def _lasting(value: Any) -> Any:
    """Without the options of nested mappings that are over once the drafter is trained."""
    if not isinstance(value, Mapping):
        return value
    return {name: _lasting(inner) for name, inner in value.items() if name not in _TRAINING_ONLY}
