"""Query estimation: how near a drafter's queries come to those the target itself makes at the same positions and layers (arXiv 2604.26412 argues it)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch.nn import functional as F

from kvshot_ds.config import ObjectiveConfig
from kvshot_ds.diagnostics.record import LayerStep, Run, by_conversation, only, recorded, sampled
from kvshot_ds.drafters.attention import KV
from kvshot_ds.drafters.base import Drafter
from kvshot_ds.drafters.layers import rotate
from kvshot_ds.errors import ConfigError
from kvshot_ds.features.batch import Batch
from kvshot_ds.features.manifest import Manifest, require
from kvshot_ds.features.spec import FeatureSpec
from kvshot_ds.objectives.alignment import RowPlan
from kvshot_ds.objectives.objective import Objective, required_features

ROWS = 64  # of a conversation: attention maps are made whole, so rows are sampled
_MAP = 1 << 22  # scores of one chunk of rows


@dataclass(frozen=True)
class QuerySums:
    """One draft layer: sums over the looked-at rows of each conversation and draft step, [C, K] fp64, on the device. rows: their number.

    q is the draft query at position t + 1 + k; q* the target's own at that position in the layers `targets`, one for each copy of the heads;
    both turned to that position, as they meet keys.

    cosine: of q and q*, mean over heads.
    output_error, map_kl: q and q* attend to the *same* memory, that of the cross path: the target's keys and values as the projector hands them
    on, then the drafter's own entries up to step k (of a block, of all slots). So what differs is the query alone. output_error =
    |o(q) - o(q*)| / |o(q*)|, the heads side by side; map_kl = KL(a(q*) || a(q)) of the attention maps, mean over heads [nats].
    cache_output_error, cache_map_kl: the same where both attend to the target's own cache of these layers at positions <= t + 1 + k: o(q*) is then
    what the target itself reads there, and o(q) what the drafter's query would have read in its place.

    Nothing of it is defined by the loss: a projector that has learned another basis for its keys takes queries in that basis, which need not be
    near the target's. With per_layer and head_concat, whose keys are the target's, the measures are what their names say.
    """

    layer: int
    targets: tuple[int, ...]
    rows: torch.Tensor
    cosine: torch.Tensor
    output_error: torch.Tensor
    map_kl: torch.Tensor
    cache_output_error: torch.Tensor
    cache_map_kl: torch.Tensor

    @classmethod
    def joined(cls, parts: Sequence[QuerySums]) -> QuerySums:
        """The conversations of several batches, one after the other."""
        names = [f.name for f in fields(cls)[2:]]
        return cls(parts[0].layer, parts[0].targets, **{name: torch.cat([getattr(p, name) for p in parts]) for name in names})


MEASURES = tuple(f.name for f in fields(QuerySums)[3:])


def needed(drafter: Drafter) -> FeatureSpec:
    """What must have been captured to measure the queries of `drafter`: what it reads, and the target's queries of the layers it asks."""
    return required_features(drafter, ObjectiveConfig(query_distill_weight=1))


def why_not(drafter: Drafter, manifest: Manifest) -> str | None:
    """Why the queries of `drafter` cannot be compared with the target's in the features of `manifest`; None if they can."""
    projectors = [layer.projector for layer in drafter.draft_layers]
    if not any(layer.cross_attn is not None for layer in drafter.draft_layers):
        return f"a {drafter.family} drafter has no cross path: it asks the target's cache nothing"
    if any(p is None or p.injection == "hidden_to_kv" for p in projectors):
        return "its cross path does not read the target's cache, so that no query of the target belongs to it"
    try:
        require(manifest, needed(drafter), manifest.target_digest)
    except ConfigError as error:
        return str(error)
    return None


@torch.no_grad()
def measure_queries(objective: Objective, batch: Batch, plan: RowPlan, run: Run | None = None, rows_each: int = ROWS, seed: int = 0) -> list[QuerySums]:
    """Of each draft layer, over at most `rows_each` rows of each conversation, drawn with `seed`.

    batch, plan: on the drafter's device, features in its dtype; batch holds what `needed` names. run: an engine's forward in place of `objective`.
    """
    plan = only(plan, sampled(batch, plan, rows_each, seed))
    with recorded(objective, queries=True) as seen:
        (run or objective)(batch, plan, torch.ones((), device=plan.valid.device))
    return [_of_layer(objective.drafter, i, seen.steps(i, plan), batch, plan) for i in range(objective.drafter.depth)]


def _of_layer(drafter: Drafter, i: int, steps: list[LayerStep], batch: Batch, plan: RowPlan) -> QuerySums:
    projector = drafter.draft_layers[i].projector
    assert projector is not None
    targets, count = projector.query_layers, len(batch.keys)
    cache = KV(*(torch.cat([kind[j] for j in targets], 1) for kind in (batch.keys_of, batch.values_of)))
    asked = torch.cat([batch.queries_of[j] for j in targets], 1)
    columns: list[dict[str, torch.Tensor]] = []
    for k, step in enumerate(steps):
        assert step.query is not None and step.memory.prefix is not None
        valid = plan.valid[k]
        anchors, entries = plan.anchors[valid], [KV(s.k[valid], s.v[valid]) for s in step.memory.steps]
        # The position by its definition, not by what the drafter or the plan made of it.
        here = anchors + 1 + k
        mine, true = step.query[valid], asked[batch.teacher_index[here]]
        cosine = F.cosine_similarity(mine.double(), true.double(), dim=-1).mean(-1)
        pair = rotate(mine, step.at.select(valid)), rotate(true, drafter.rotary(plan.positions[anchors] + 1 + k))
        owner = plan.conversation[valid]
        output_error, map_kl = _compared(pair, step.memory.prefix, entries, anchors, owner, batch.lengths)
        cache_error, cache_kl = _compared(pair, cache, [], here, owner, batch.lengths)
        found = (torch.ones_like(cosine), cosine, output_error, map_kl, cache_error, cache_kl)
        columns.append({name: by_conversation(plan, k, x, count) for name, x in zip(("rows", *MEASURES), found, strict=True)})
    return QuerySums(i, targets, **{name: torch.stack([c[name] for c in columns], 1) for name in ("rows", *MEASURES)})


def _compared(
    pair: tuple[torch.Tensor, torch.Tensor], prefix: KV, entries: Sequence[KV], last: torch.Tensor, owner: torch.Tensor, lengths: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Relative error of the attention output and KL of the maps, [n] each, of n rows: the first of `pair` against the second, both [n, A, D].

    Rows see the prefix of their conversation up to the flat index `last` [n], and `entries` of their own.
    """
    error, kl = (pair[0].new_zeros(len(last), dtype=torch.float64) for _ in range(2))
    start = 0
    for c, length in enumerate(lengths):
        rows, keys = (owner == c).nonzero().flatten(), slice(start, start + length)
        for some in rows.split(max(1, _MAP // (pair[0].shape[1] * length))):
            hidden = torch.arange(keys.start, keys.stop, device=last.device) > last[some, None]
            own = [KV(e.k[some], e.v[some]) for e in entries]
            (o, a), (o_true, a_true) = (_attended(q[some], KV(prefix.k[keys], prefix.v[keys]), own, hidden) for q in pair)
            error[some] = ((o - o_true).flatten(1).norm(dim=1) / o_true.flatten(1).norm(dim=1).clamp_min(1e-12)).double()
            # Hidden keys have probability 0 under both, log 0 - log 0 is no number.
            kl[some] = torch.where(a_true > -torch.inf, a_true.exp() * (a_true - a), 0).sum(-1).mean(-1).double()
        start += length
    return error, kl


def _attended(q: torch.Tensor, prefix: KV, own: Sequence[KV], hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [n, A, D] and log of the map [n, A, S + I] of queries q [n, A, D] over S keys, hidden [n, S], and I entries of each row; fp32 at least."""
    wide = torch.promote_types(q.dtype, torch.float32)
    n, heads, width = q.shape
    groups = prefix.k.shape[1]
    grouped = q.to(wide).view(n, groups, heads // groups, width)
    scores = [torch.einsum("ngad,sgd->ngas", grouped, prefix.k.to(wide)).masked_fill(hidden[:, None, None], -torch.inf)]
    scores += [torch.einsum("ngad,ngd->nga", grouped, e.k.to(wide)).unsqueeze(-1) for e in own]
    log = torch.log_softmax(torch.cat(scores, -1) * width**-0.5, -1)
    weights = log.exp()
    out = torch.einsum("ngas,sgd->ngad", weights[..., : len(prefix.k)], prefix.v.to(wide))
    for j, e in enumerate(own, len(prefix.k)):
        out += weights[..., j, None] * e.v.to(wide).unsqueeze(2)
    return out.reshape(n, heads, width), log.flatten(1, 2)
