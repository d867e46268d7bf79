"""Draft trees: several candidates for a position, verified in one forward of the target.

static: a given number of candidates after each node. dynamic (EAGLE-2, arXiv 2406.16858): at each level the most likely nodes
are expanded, and of all candidates the most likely ones are kept. best-first over a block's marginals (DDTree, arXiv 2604.12989):
the nodes with the highest product of marginals. "Likely" is by the drafter's joint probability at temperature 1.

The trees of a batch have the same number of nodes, so that nothing is padded: the number depends on the options, on how many
levels are asked for and on the draft vocabulary, never on what is drafted. Nothing here makes the host wait for the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from kvshot_ds.config import DraftingConfig
from kvshot_ds.decoding.draft import Draft
from kvshot_ds.drafters.base import Drafter, StepDrafter
from kvshot_ds.drafters.block import BlockDrafter
from kvshot_ds.drafters.state import DraftState, Start

PAPER = DraftingConfig(strategy="dynamic_tree", length=8, top_k=10, nodes=60)


@dataclass(frozen=True)
class Level:
    """Candidates of one depth. tokens [B, m]: draft ids; parents [B, m]: index within the level above; scores [B, m]: joint log-probability."""

    tokens: torch.Tensor
    parents: torch.Tensor
    scores: torch.Tensor


def propose(drafter: Drafter, state: DraftState, start: Start, drafting: DraftingConfig, length: int) -> Draft:
    """A tree of at most `length` levels at each selected row of `start`, as `drafting` says. length >= 1."""
    drafting = resolved(drafting)
    length = min(length, depth_limit(drafting))
    if isinstance(drafter, BlockDrafter):
        length = min(length, drafter.block_size - 1)
        marginals = _log_probs(drafter, drafter.slots(state, start)[1 : length + 1].transpose(0, 1))  # [B, L, V_d]
        if drafting.strategy == "static_tree":
            return assembled(spread(marginals, drafting.branching), drafter.draft_ids)
        return assembled(best_first(marginals, drafting.nodes), drafter.draft_ids, drafting.nodes)
    assert isinstance(drafter, StepDrafter)
    if drafting.strategy == "static_tree":
        return assembled(static(drafter, state, start, drafting.branching[:length]), drafter.draft_ids)
    return assembled(dynamic(drafter, state, start, drafting.top_k, drafting.nodes, length), drafter.draft_ids, drafting.nodes)


def resolved(drafting: DraftingConfig) -> DraftingConfig:
    """The preset `paper_tree` as the dynamic tree that it is."""
    return PAPER if drafting.strategy == "paper_tree" else drafting


def depth_limit(drafting: DraftingConfig) -> int:
    """The most levels of a tree that `drafting` describes."""
    drafting = resolved(drafting)
    return len(drafting.branching) if drafting.strategy == "static_tree" else min(drafting.length, drafting.nodes)


def most_nodes(drafting: DraftingConfig) -> int:
    """The most nodes of a tree that `drafting` describes."""
    drafting = resolved(drafting)
    return drafting.static_nodes if drafting.strategy == "static_tree" else drafting.nodes


def static(drafter: StepDrafter, state: DraftState, start: Start, branching: tuple[int, ...]) -> list[Level]:
    """The branching[l] most likely tokens after each node of level l, one level for each entry."""
    levels: list[Level] = []
    h = drafter.begin(state, start)
    for depth, branches in enumerate(branching):
        if depth:
            state, h = _expanded(drafter, state, levels[-1], None, depth)
        levels.append(_children(drafter, h, levels, None, branches))
    return levels


def dynamic(drafter: StepDrafter, state: DraftState, start: Start, top_k: int, nodes: int, length: int) -> list[Level]:
    """At each level the top_k most likely nodes are expanded, top_k candidates each: all candidates of `length` levels.

    Wider than `nodes` would change nothing: whatever ranks lower among its siblings or in its level is not among the
    `nodes` most likely in the end.
    """
    width = min(top_k, nodes)
    levels: list[Level] = []
    h = drafter.begin(state, start)
    chosen: torch.Tensor | None = None
    for depth in range(length):
        if depth:
            chosen = None if levels[-1].scores.shape[1] <= width else levels[-1].scores.topk(width).indices
            state, h = _expanded(drafter, state, levels[-1], chosen, depth)
        levels.append(_children(drafter, h, levels, chosen, width))
    return levels


def spread(marginals: torch.Tensor, branching: tuple[int, ...]) -> list[Level]:
    """A static tree from the marginals [B, L, V_d] of a block: all nodes of a level have the same candidates."""
    levels: list[Level] = []
    for depth in range(min(marginals.shape[1], len(branching))):
        levels.append(_grown(levels, None, marginals[:, depth].unsqueeze(1), branching[depth]))
    return levels


def best_first(marginals: torch.Tensor, nodes: int) -> list[Level]:
    """The `nodes` best prefixes of each length by the product of the marginals, given as logarithms [B, L, V_d]; the best of all are among them.

    A best prefix ends in one of the best prefixes one token shorter and in one of the best tokens. Of the i-th and the j-th, counted
    from 1, i * j are at least as good, so that only pairs with i * j <= nodes matter.
    """
    best, tokens = marginals.topk(min(nodes, marginals.shape[-1]))  # [B, L, k]
    levels = [Level(tokens[:, 0], torch.zeros_like(tokens[:, 0]), best[:, 0])]
    for depth in range(1, marginals.shape[1]):
        above = levels[-1].scores
        i, j = _pairs(above.shape[1], best.shape[-1], nodes, best.device)
        scores, order = (above[:, i] + best[:, depth, j]).sort(descending=True, stable=True)
        order = order[:, :nodes]
        levels.append(Level(tokens[:, depth].gather(1, j[order]), i[order], scores[:, :nodes]))
    return levels


@cache
def _pairs(rows: int, columns: int, most: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """All (i, j) of `rows` and `columns` with (i + 1) * (j + 1) <= most: [P] and [P]. Kept, as a copy to the device makes the host wait for it."""
    pairs = [(i, j) for i in range(rows) for j in range(columns) if (i + 1) * (j + 1) <= most]
    i, j = torch.tensor(pairs, device=device).T
    return i, j


def assembled(levels: list[Level], ids: torch.Tensor, nodes: int | None = None) -> Draft:
    """The tree of all candidates, or of the `nodes` most likely of them; ids [V_d]: the draft vocabulary.

    No candidate is more likely than its parent, and equal ones are kept in order of their depth: parents are kept with their children.
    """
    widths = [level.tokens.shape[1] for level in levels]
    firsts = [sum(widths[:i]) for i in range(len(widths))]
    # parents count from 1 over all candidates, 0 is the root
    parents = torch.cat([level.parents + (firsts[i - 1] + 1 if i else 0) for i, level in enumerate(levels)], 1)
    tokens, scores = torch.cat([level.tokens for level in levels], 1), torch.cat([level.scores for level in levels], 1)
    depths = torch.cat([torch.full_like(level.tokens, i + 1) for i, level in enumerate(levels)], 1)
    if nodes is not None and nodes < tokens.shape[1]:
        kept = scores.argsort(descending=True, stable=True)[:, :nodes].sort().values
        number = torch.zeros(len(kept), tokens.shape[1] + 1, dtype=torch.int64, device=tokens.device)
        number.scatter_(1, kept + 1, torch.arange(1, nodes + 1, device=tokens.device).expand_as(kept))
        tokens, depths, parents = tokens.gather(1, kept), depths.gather(1, kept), number.gather(1, parents.gather(1, kept))
    return Draft(ids[tokens], parents, depths, len(levels), all(width == 1 for width in widths))


def _children(drafter: Drafter, h: torch.Tensor, levels: list[Level], chosen: torch.Tensor | None, branches: int) -> Level:
    """The most likely tokens after the nodes `chosen` [B, m] of the last level (None: all, or the root), from their hidden states h [B * m, d]."""
    batch = len(h) if not levels else len(levels[-1].tokens)
    return _grown(levels, chosen, _log_probs(drafter, h).unflatten(0, (batch, -1)), branches)


def _grown(levels: list[Level], chosen: torch.Tensor | None, log_probs: torch.Tensor, branches: int) -> Level:
    """The same from log-probabilities [B, m, V_d], or [B, 1, V_d] for all nodes alike."""
    best, tokens = log_probs.topk(min(branches, log_probs.shape[-1]))  # [B, m, branches]
    if not levels:
        return Level(tokens[:, 0], torch.zeros_like(tokens[:, 0]), best[:, 0])
    above = levels[-1].scores
    if chosen is None:
        chosen = torch.arange(above.shape[1], device=above.device).expand_as(above)
    scores = above.gather(1, chosen).unsqueeze(2) + best
    return Level(tokens.expand_as(scores).flatten(1), chosen.unsqueeze(2).expand_as(scores).flatten(1), scores.flatten(1))


def _expanded(drafter: StepDrafter, state: DraftState, level: Level, chosen: torch.Tensor | None, depth: int) -> tuple[DraftState, torch.Tensor]:
    """Draft step k = depth after the nodes `chosen` [B, m] of `level`: the state of these B * m rows, and h [B * m, d].

    `state`: that of the nodes that were expanded to make `level`, of each as many candidates.
    """
    batch, width = level.tokens.shape
    assert state.rows is not None
    expanded = len(state.rows.positions) // batch
    if chosen is None:
        chosen = torch.arange(width, device=level.tokens.device).expand(batch, -1)
    parents = torch.arange(batch, device=chosen.device).unsqueeze(1) * expanded + chosen // (width // expanded)
    state = state.fork(parents.flatten(), [chosen.shape[1]] * batch)
    tokens = drafter.draft_ids[level.tokens.gather(1, chosen)]
    return state, drafter.forward_step(state, tokens.flatten(), depth)


def _log_probs(drafter: Drafter, h: torch.Tensor) -> torch.Tensor:
    """h [..., d] -> log-probabilities over the draft vocabulary [..., V_d] in fp32; a drafter that has gone astray (NaN) finds nothing likely."""
    return torch.nan_to_num(drafter.logits(h).float().log_softmax(-1), nan=float("-inf"), posinf=0.0, neginf=float("-inf"))
