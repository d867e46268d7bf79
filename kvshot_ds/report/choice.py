"""Which of the measured cells a prediction of the paper is about: as the paper has them, and trained alike but for what is asked."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvshot_ds.report.cells import Group

_DENSER = ("objective.kv_gradient_scale", "objective.kv_branch_weight", "objective.query_distill_weight")
_BY_DEPTH = ("drafter.depth",)


@dataclass(frozen=True)
class Side:
    """A pair of cells that differ in what is asked alone: `first` is predicted to be the higher one."""

    first: Group
    second: Group


def plain(groups: Iterable[Group], family: str) -> list[Group]:
    """Cells of a family as the paper has it: from scratch, no control, linear projector without QK-norm, and nothing that strengthens the KV branch's
    signal."""
    out = []
    for group in groups:
        d = group.drafter
        kv = getattr(d.config, "kv", None) if d else None
        ordinary = kv is None or (kv.projector == "linear" and not kv.qk_norm and kv.injection in ("linear_rope", "linear", "per_layer", "head_concat"))
        if d and d.family == family and ordinary and not d.controls and not d.last_hidden and not d.warm_start:
            out.append(group)
    return out


def denser(group: Group) -> bool:
    """Whether its objective changes the signal of the KV branch: strengthens it, but for a factor below 1."""
    options = group.options
    return options.get(_DENSER[0], 1.0) != 1.0 or any(options.get(name, 0.0) for name in _DENSER[1:])


def alike(groups: Iterable[Group], apart: Sequence[str]) -> list[list[Group]]:
    """The cells in classes that were trained alike, on the same features, but for the options whose names begin with one of `apart`: those with the most
    seeds, then the most conversations, then the most cells first."""
    classes: dict[str, list[Group]] = {}
    for group in groups:
        kept = {name: value for name, value in group.options.items() if not name.startswith(tuple(apart))}
        classes.setdefault(repr((group.place, sorted(kept.items(), key=lambda item: item[0]))), []).append(group)
    return sorted(classes.values(), key=lambda found: (-min(len(g.runs) for g in found), -_conversations(found[0]), -len(found)))


def _conversations(group: Group) -> float:
    return group.options.get("max_conversations") or math.inf


def by_depth(groups: Iterable[Group]) -> Side | None:
    """The deepest and the shallowest KV-only cell among those alike but for depth."""
    ordinary = [g for g in plain(groups, "kv_only") if not denser(g)]
    for found in alike(ordinary, _BY_DEPTH):
        ordered = sorted(found, key=_depth)
        if _depth(ordered[0]) < _depth(ordered[-1]):
            return Side(ordered[-1], ordered[0])
    return None


def by_signal(groups: Iterable[Group]) -> list[Side]:
    """Each cell with a stronger signal for its KV branch, and the same cell without."""
    candidates = [g for family in ("kv_only", "hybrid") for g in plain(groups, family)]
    for found in alike(candidates, _DENSER):
        if (usual := [g for g in found if not denser(g)]) and (strong := [g for g in found if denser(g) and g.options.get(_DENSER[0], 1.0) >= 1]):
            return [Side(g, usual[0]) for g in strong]
    return []


def by_gate(groups: Iterable[Group]) -> tuple[Group | None, list[Side]]:
    """The hybrid whose gate starts at random, and each hybrid alike but for a gate that starts open or is held open, with it."""
    hybrids = [g for g in plain(groups, "hybrid") if not denser(g)]
    lone = None
    for found in alike(hybrids, ("drafter.gate.",)):
        if usual := [g for g in found if random_gate(g)]:
            lone = lone or usual[0]
            pairs = [Side(g, same) for g in found if open_gate(g) and (same := next((u for u in usual if _same_gate(g, u)), None))]
            if pairs:
                return pairs[0].second, pairs
    return lone, []


def _same_gate(opened: Group, usual: Group) -> bool:
    """Whether the two differ in how far the gate is open alone: gates of one kind, or none, and the delta of the paper's start."""
    first, second = (getattr(group.drafter.config, "gate", None) if group.drafter else None for group in (opened, usual))
    return first is not None and second is not None and first.kind in ("none", second.kind) and not first.init.endswith("_delta")


def random_gate(group: Group) -> bool:
    """The paper's start."""
    gate = getattr(group.drafter.config, "gate", None) if group.drafter else None
    return gate is not None and gate.kind != "none" and gate.init == "random" and not gate.scheduled_steps


def open_gate(group: Group) -> bool:
    """Starts open (a positive bias), is held open for a while, or has no gate that could close."""
    gate = getattr(group.drafter.config, "gate", None) if group.drafter else None
    if gate is None:
        return False
    return gate.kind == "none" or gate.scheduled_steps > 0 or (gate.init.startswith("bias:") and float(gate.init.removeprefix("bias:")) > 0)


def by_reading(groups: Iterable[Group]) -> Side | None:
    """Hidden-only and the deepest KV-only cell that were trained alike; the shallowest hidden-only one and linear_rope, as in the paper."""
    candidates = [*plain(groups, "hidden_only"), *(g for g in plain(groups, "kv_only") if not denser(g))]
    for found in alike(candidates, ("drafter.",)):
        hidden, kv = ([g for g in found if g.drafter and g.drafter.family == family] for family in ("hidden_only", "kv_only"))
        if hidden and kv:
            return Side(min(hidden, key=_depth), max(kv, key=lambda g: (_depth(g), g.drafter is not None and g.drafter.injection == "linear_rope")))
    return None


def _depth(group: Group) -> int:
    return group.drafter.depth if group.drafter else 0
