"""What the cost model predicts for this run, from latencies measured in the same process at the run's mean context: beside what was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvshot_ds.bench import latency
from kvshot_ds.bench.latency_table import LatencyTable
from kvshot_ds.bench.methods import Trace
from kvshot_ds.bench.predict import Acceptance, Resampling, RoundShape, predict, shape_of_round
from kvshot_ds.config import BenchConfig, DraftingConfig
from kvshot_ds.decoding.acceptance import decoding_counts
from kvshot_ds.decoding.rounds import Decoded
from kvshot_ds.drafters.block import BlockDrafter
from kvshot_ds.errors import KvshotError
from kvshot_ds.target import Target


@dataclass(frozen=True)
class Subject:
    """A drafter, what it did, and its acceptance on held-out rows, or {"why"} there is none that holds for this run."""

    latency: latency.Measured
    traces: tuple[Trace, ...]
    heldout: Acceptance | dict[str, str]


def predictions(
    target: Target, subjects: Sequence[Subject], context: float, drafting: DraftingConfig, options: BenchConfig, how: Resampling
) -> tuple[dict[str, dict[str, Any]], LatencyTable | None]:
    """By drafter: the prediction from its acceptance in this run, and from that on held-out rows; and the table that both come from.

    Each is the fields of `Prediction`, or {"why"}: the reason for which there is none. context: mean positions before a round.
    """
    shapes = {s.latency.name: _shape(s, drafting) for s in subjects}
    config = _points(list(shapes.values()), round(context), target.geometry.max_positions, options)
    early = drafting.strategy == "chain" and drafting.min_confidence > 0
    if config is None or early:
        full = f"the target's context of {target.geometry.max_positions} leaves no room to measure latencies"
        why = "drafts stop early by decode.drafting.min_confidence, which is not in the model" if early else full
        return {s.latency.name: {"decoding": {"why": why}, "heldout": {"why": why}} for s in subjects}, None
    table = latency.measure(target, [s.latency for s in subjects], config, drafting)
    found = {}
    for s in subjects:
        shape = shapes[s.latency.name]
        decoded = [Decoded(t.rounds, t.seconds) for t in s.traces if t.rounds is not None]
        own = Acceptance(decoding_counts(decoded, shape.levels), "this run")
        found[s.latency.name] = {
            "decoding": _predicted(shape, own, table, s, context, how),
            "heldout": s.heldout if isinstance(s.heldout, dict) else _predicted(shape, s.heldout, table, s, context, how),
        }
    return found, table


def _shape(subject: Subject, drafting: DraftingConfig) -> RoundShape:
    drafter = subject.latency.drafter
    return shape_of_round(drafting, drafter.block_size if isinstance(drafter, BlockDrafter) else None)


def _points(shapes: Sequence[RoundShape], context: int, limit: int, options: BenchConfig) -> Any:
    """The sizes that these rounds need, at one context; None if they do not fit the target's."""
    widths = {1, *(1 + s.nodes for s in shapes)}
    most = max([s.levels + 1 for s in shapes], default=1)
    positions = {p for p in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48) if p < most} | {most}
    rows = {1, *(rows for s in shapes for rows in s.steps)}
    context = min(context, limit - max(*widths, *positions, latency.OVERHEAD_TOKENS))
    if context < 1:
        return None
    sizes: Mapping[str, Any] = {"contexts": (context,), "widths": tuple(sorted(widths)), "positions": tuple(sorted(positions)), "rows": tuple(sorted(rows))}
    return options.latency.model_copy(update=dict(sizes))


def _predicted(shape: RoundShape, acceptance: Acceptance, table: LatencyTable, subject: Subject, context: float, how: Resampling) -> dict[str, Any]:
    try:
        return asdict(predict(shape, acceptance, table, table.drafter(subject.latency.shape, subject.latency.name), context, how))
    except KvshotError as error:
        return {"why": str(error)}


def mean_context(traces: Sequence[Trace], prompts: Sequence[int]) -> float:
    """Mean positions before a verification round: of each prompt's length and the tokens committed before that round."""
    places = []
    for trace, length in zip(traces, prompts, strict=True):
        at = length
        for step in trace.steps[:-1]:
            at += step.tokens
            places.append(at)
    return sum(places) / len(places) if places else sum(prompts) / len(prompts)
