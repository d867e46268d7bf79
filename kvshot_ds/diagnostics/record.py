"""What the draft layers do in one forward: their queries, the memory these meet, and their gates. Nothing of it stays behind."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from kvshot_ds.drafters.attention import Span
from kvshot_ds.drafters.layer import LayerOutput
from kvshot_ds.drafters.layers import Rotation
from kvshot_ds.drafters.state import Memory
from kvshot_ds.features.batch import Batch
from kvshot_ds.objectives.alignment import RowPlan
from kvshot_ds.objectives.objective import Objective, Output

# The objective, or an engine around it whose hooks gather what ZeRO-3 has spread.
Run = Callable[[Batch, RowPlan, torch.Tensor], Output]


class LayerStep(NamedTuple):
    """One draft layer at draft step k of N rows, of a block: at its slots.

    query [N, A, D], not rotated, at: its rotation: what is asked at position t + 1 + k (slot k), where queries are recorded. memory: what the
    query meets, its own entry among the step entries (of a block, those of all slots). gate [N, gates]: of what proposes the token
    at t + 2 + k (slot k + 1); None without one.
    """

    query: torch.Tensor | None
    at: Rotation
    memory: Memory
    gate: torch.Tensor | None


class _Call(NamedTuple):
    """One run of a layer, over `block` inputs of each row; whole: of all positions, not of the planned rows alone."""

    query: torch.Tensor | None
    at: Rotation
    memory: Memory
    gate: torch.Tensor | None
    block: int
    rows: int


class Recording:
    """The calls of each draft layer in their order."""

    def __init__(self, depth: int):
        self.calls: list[list[_Call]] = [[] for _ in range(depth)]

    def steps(self, layer: int, plan: RowPlan) -> list[LayerStep]:
        """Of draft layer `layer`: the K steps of `plan`, with which the forward was run."""
        calls, steps = self.calls[layer], len(plan.valid)
        if calls[0].block > 1:
            (call,) = calls
            return [_slot(call, k) for k in range(steps)]
        return [_of_rows(call, plan) for call in calls]


def _slot(call: _Call, k: int) -> LayerStep:
    def of(x: torch.Tensor, slot: int) -> torch.Tensor:
        return x.unflatten(0, (-1, call.block))[:, slot]

    at = Rotation(of(call.at.cos, k), of(call.at.sin, k), call.at.scaling)
    return LayerStep(None if call.query is None else of(call.query, k), at, call.memory, None if call.gate is None else of(call.gate, k + 1))


def _of_rows(call: _Call, plan: RowPlan) -> LayerStep:
    """Step 0 of a layer that others follow is run at all positions of the batch: there the planned rows are taken out."""
    if call.rows == len(plan.anchors):
        return LayerStep(call.query, call.at, call.memory, call.gate)
    index = plan.anchors
    query, gate = (None if x is None else x[index] for x in (call.query, call.gate))
    return LayerStep(query, call.at.select(index), call.memory.selected(index), gate)


@contextmanager
def recorded(objective: Objective, queries: bool = False) -> Iterator[Recording]:
    """Within, every forward of `objective`, or of an engine around it, is recorded; queries: also the queries, for which the batch must hold the target's.

    What the gates remember and the options of the objective are afterwards as they were before.
    """
    layers, config = objective.drafter.draft_layers, objective.config
    recording, gates = Recording(len(layers)), [layer.mix.last_gate if layer.mix is not None else None for layer in layers]

    def hook(calls: list[_Call]) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any], LayerOutput], None]:
        def heard(layer: Any, args: tuple[Any, ...], options: dict[str, Any], out: LayerOutput) -> None:
            rows, (_, at), select = args[4], args[5], options["select"]
            gate = None if layer.mix is None else layer.mix.last_gate
            calls.append(_Call(out.query, at if select is None else at.select(select), out.cross, gate, options["block"], len(rows.positions)))

        return heard

    handles = [layer.register_forward_hook(hook(calls), with_kwargs=True) for layer, calls in zip(layers, recording.calls, strict=True)]
    # The weight makes the drafter hand out its queries; the loss that it belongs to is not read.
    objective.config = config.model_copy(update={"query_distill_weight": float(queries)})
    try:
        yield recording
    finally:
        objective.config = config
        for handle in handles:
            handle.remove()
        for layer, gate in zip(layers, gates, strict=True):
            if layer.mix is not None:
                layer.mix.last_gate = gate


def only(plan: RowPlan, rows: torch.Tensor) -> RowPlan:
    """The plan of the rows `rows` of it alone: ascending numbers [n] int64, on the host.

    Rows of offline drift stand in for one another: there all of them stay in the plan, and those of `rows` alone are judged.
    """
    index = rows.to(plan.anchors.device)
    if plan.shifted is not None:
        chosen = torch.zeros_like(plan.valid[0]).index_fill_(0, index, True)
        kept = chosen[plan.picks % len(chosen)]
        picks, teacher_of, bounds = plan.picks[kept], plan.teacher_of[kept], np.arange(len(plan.teacher_bounds))
        return replace(
            plan, valid=plan.valid & chosen, picks=picks, teacher_of=teacher_of, steps_of=plan.steps_of[kept],
            teacher_bounds=np.searchsorted(teacher_of.cpu().numpy(), bounds),
        )  # fmt: skip
    teacher = plan.valid.new_zeros(plan.valid.numel(), dtype=torch.int64).index_put_((plan.picks,), plan.teacher_of)
    valid, teacher = plan.valid[:, index], teacher.view_as(plan.valid)[:, index].flatten()
    flat = valid.flatten().nonzero().flatten()
    order = flat[teacher[flat].argsort(stable=True)]
    starts = np.zeros(len(plan.anchors), np.int64)
    for span in plan.spans_rows:
        starts[span.row : span.row + span.count] = span.start
    anchors = plan.anchors[index]
    return replace(
        plan, anchors=anchors, tokens=plan.tokens[:, index], valid=valid, picks=order, teacher_of=teacher[order],
        steps_of=order // max(len(rows), 1), conversation=plan.conversation[index],
        spans_rows=tuple(Span(i, 1, int(starts[row]), anchor) for i, (row, anchor) in enumerate(zip(rows.tolist(), anchors.tolist(), strict=True))),
        teacher_bounds=np.searchsorted(teacher[order].cpu().numpy(), np.arange(len(plan.teacher_bounds))),
    )  # fmt: skip


def sampled(batch: Batch, plan: RowPlan, each: int, seed: int = 0) -> torch.Tensor:
    """Numbers of at most `each` rows of each conversation of `plan`, ascending [n], on the host: drawn by `seed` and the conversation's key."""
    owner, found = plan.conversation.cpu().numpy(), []
    for c, key in enumerate(batch.keys):
        rows = np.flatnonzero(owner == c)
        rng = np.random.default_rng((seed, zlib.crc32(key.encode())))
        found.append(np.sort(rng.choice(rows, min(each, len(rows)), replace=False)) if len(rows) else rows)
    return torch.from_numpy(np.concatenate(found))


def by_conversation(plan: RowPlan, k: int, values: torch.Tensor, conversations: int) -> torch.Tensor:
    """Sums by conversation [C] fp64 of values [n], one for each row that is valid at step `k`, ascending."""
    return values.new_zeros(conversations, dtype=torch.float64).index_add_(0, plan.conversation[plan.valid[k]], values.double())
