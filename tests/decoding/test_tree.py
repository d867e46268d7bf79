"""Draft trees: every node computed as a chain along its path is, the right nodes kept, and always a tree."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from pydantic import ValidationError

from kvshot_ds.config import DraftingConfig
from kvshot_ds.decoding import tree
from kvshot_ds.decoding.draft import Draft
from kvshot_ds.drafters.attention import KV
from kvshot_ds.drafters.base import Drafter
from kvshot_ds.drafters.block import BlockDrafter
from kvshot_ds.drafters.state import DraftState, Start
from kvshot_ds.objectives.alignment import decoding_start
from tests import toys

LENGTHS, NEXT, ROOM = (5, 9, 1), (2, 1, 3), 14
Path = tuple[int, ...]


def start_of(sequences: tuple[int, ...], first: tuple[int, ...], counts: tuple[int, ...]) -> Start:
    """A decoding start of some of three sequences with random states of a target in fp64, the same ones in every call."""
    g, r = toys.geometry(), torch.Generator().manual_seed(1)
    three, at = len(LENGTHS), [(s, p) for s, f, n in zip(sequences, first, counts, strict=True) for p in range(f, f + n)]
    tokens = torch.randint(toys.VOCAB, (three, ROOM), generator=r)
    hidden = {layer: torch.randn(three, ROOM, g.hidden_size, generator=r, dtype=torch.float64) for layer in range(g.num_layers)}
    cache = {layer: [torch.randn(three, ROOM, g.kv_heads, g.head_dim, generator=r, dtype=torch.float64) for _ in "kv"] for layer in range(g.num_layers)}

    def these(x: torch.Tensor) -> torch.Tensor:
        return torch.stack([x[s, p] for s, p in at])

    own = {layer: KV(*(x[list(sequences)].flatten(0, 1) for x in kv)) for layer, kv in cache.items()}
    return decoding_start(these(tokens), first, counts, ROOM, {layer: these(x) for layer, x in hidden.items()}, own)


def first_start(*sequences: int) -> Start:
    chosen = sequences or (0, 1, 2)
    return start_of(chosen, (0,) * len(chosen), tuple(LENGTHS[s] for s in chosen))


def paths(draft: Draft, b: int) -> list[Path]:
    """The tokens from the root to each node."""
    found: list[Path] = [()]
    for token, parent in zip(draft.tokens[b].tolist(), draft.parents[b].tolist(), strict=True):
        found.append((*found[parent], token))
    return found[1:]


class Chains:
    """What a drafter computes for one sequence alone, token after token, without any tree."""

    def __init__(self, drafter: Drafter, sequence: int):
        self.drafter, self.sequence = drafter, sequence
        self._h: dict[Path, torch.Tensor] = {}
        self._block: torch.Tensor | None = None

    @torch.no_grad()
    def h(self, path: Path) -> torch.Tensor:
        """Hidden state [d] after `path`."""
        if isinstance(self.drafter, BlockDrafter):
            if self._block is None:
                self._block = self.drafter.slots(DraftState.empty(self.drafter.depth), first_start(self.sequence))[:, 0]
            return self._block[len(path) + 1]
        if path not in self._h:
            state = DraftState.empty(self.drafter.depth)
            h = self.drafter.begin(state, first_start(self.sequence))
            for k, token in enumerate(path, 1):
                h = self.drafter.forward_step(state, torch.tensor([token]), k)
            self._h[path] = h[0]
        return self._h[path]

    @torch.no_grad()
    def log_probs(self, path: Path) -> torch.Tensor:
        """Log-probabilities [V] of the token after `path`: -inf outside the draft vocabulary."""
        out = torch.full((toys.VOCAB,), float("-inf"), dtype=torch.float64)
        out[self.drafter.draft_ids] = self.drafter.logits(self.h(path)[None])[0].log_softmax(-1)
        return out

    def joint(self, path: Path) -> float:
        return sum(float(self.log_probs(path[:i])[token]) for i, token in enumerate(path))

    def children(self, path: Path, count: int) -> list[Path]:
        return [(*path, int(token)) for token in self.log_probs(path).topk(count).indices]


def by_hand(chains: Chains, drafting: DraftingConfig, levels: int) -> set[Path]:
    """The nodes that `drafting` asks for, from chains alone."""
    level: list[Path] = [()]
    found: list[Path] = []
    for depth in range(levels):
        if drafting.strategy == "static_tree":
            level = [child for path in level for child in chains.children(path, drafting.branching[depth])]
            found += level
        else:
            if depth:
                level = sorted(level, key=chains.joint, reverse=True)[: drafting.top_k]
            level = [child for path in level for child in chains.children(path, drafting.top_k)]
            found += level
    return set(found if drafting.strategy == "static_tree" else sorted(found, key=chains.joint, reverse=True)[: drafting.nodes])


def check(draft: Draft, drafter: Drafter, batch: int, nodes: int) -> None:
    """A tree: what `Draft` promises."""
    assert draft.tokens.shape == draft.parents.shape == draft.depths.shape == (batch, nodes)
    assert {x.dtype for x in (draft.tokens, draft.parents, draft.depths)} == {torch.int64} and draft.probs is None
    assert (draft.parents <= torch.arange(nodes)).all() and (draft.parents >= 0).all(), "parents before children"
    assert torch.equal(draft.depths, torch.nn.functional.pad(draft.depths, (1, 0)).gather(1, draft.parents) + 1)
    assert draft.depths.max() <= draft.levels
    assert drafter.t2d[draft.tokens].all(), "the drafter can only propose its own vocabulary"
    for b in range(batch):
        assert len(set(paths(draft, b))) == nodes, "siblings are different tokens"
    assert not draft.chain or torch.equal(draft.parents, torch.arange(nodes).expand(batch, -1))


STATIC = DraftingConfig(strategy="static_tree", branching=(3, 2, 2))
DYNAMIC = DraftingConfig(strategy="dynamic_tree", length=4, top_k=4, nodes=14)


def watched(drafter: Drafter, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[tuple[int, Path, torch.Tensor]]]:
    """Returns a function that lists (sequence, path, h) of every row that `drafter` went through since."""
    forks: list[list[int]] = []
    steps: list[tuple[list[int], torch.Tensor]] = []
    fork, begin, step = DraftState.fork, drafter.begin, drafter.forward_step
    monkeypatch.setattr(DraftState, "fork", lambda self, parents, counts: forks.append(parents.tolist()) or fork(self, parents, counts))

    def first(state, start):
        h = begin(state, start)
        steps[:] = [([], h)]  # step 0 of a KV-only drafter has gone through forward_step, too
        return h

    def later(state, tokens, k):
        h = step(state, tokens, k)
        steps.append((tokens.tolist(), h))
        return h

    monkeypatch.setattr(drafter, "begin", first)
    monkeypatch.setattr(drafter, "forward_step", later)

    def rows() -> list[tuple[int, Path, torch.Tensor]]:
        level: list[tuple[int, Path]] = [(b, ()) for b in range(len(steps[0][1]))]
        found = [(*at, h) for at, h in zip(level, steps[0][1], strict=True)]
        for parents, (tokens, h) in zip(forks, steps[1:], strict=True):
            level = [(level[parent][0], (*level[parent][1], token)) for parent, token in zip(parents, tokens, strict=True)]
            found += [(*at, one) for at, one in zip(level, h, strict=True)]
        return found

    return rows


@torch.no_grad()
@pytest.mark.parametrize("name", toys.STEP_FAMILIES)
@pytest.mark.parametrize("drafting", [STATIC, DYNAMIC], ids=["static", "dynamic"])
def test_every_node_is_what_a_chain_along_its_path_computes(name, drafting, monkeypatch):
    drafter = toys.drafter(name, scale=4.0)
    rows = watched(drafter, monkeypatch)
    draft = tree.propose(drafter, DraftState.empty(drafter.depth), first_start(), drafting, 9)
    seen = rows()
    assert len(seen) == 3 * (10 if drafting is STATIC else 13)
    monkeypatch.undo()
    chains = [Chains(drafter, b) for b in range(3)]
    spread = 0.0
    for b, path, h in seen:
        torch.testing.assert_close(h, chains[b].h(path), rtol=1e-9, atol=1e-9)
        spread = max(spread, float((h - chains[b].h(path[:-1])).abs().max()) if path else 0.0)
    assert spread > 1e-2, "rows so alike that a mix-up would go unseen"
    check(draft, drafter, 3, 21 if drafting is STATIC else 14)
    for b in range(3):
        assert set(paths(draft, b)) == by_hand(chains[b], drafting, 3 if drafting is STATIC else 4)


@torch.no_grad()
@pytest.mark.parametrize("name", toys.BLOCK_FAMILIES)
@pytest.mark.parametrize("drafting", [STATIC, DYNAMIC], ids=["static", "dynamic"])
def test_trees_of_a_block_come_from_its_marginals(name, drafting):
    drafter = toys.drafter(name, scale=1.0)
    assert isinstance(drafter, BlockDrafter)
    draft = tree.propose(drafter, DraftState.empty(drafter.depth), first_start(), drafting, 9)
    check(draft, drafter, 3, 21 if drafting is STATIC else 14)
    assert draft.levels == 3 if drafting is STATIC else min(4, drafter.block_size - 1)
    for b in range(3):
        chains = Chains(drafter, b)
        # the 14 best of all prefixes begin with 14 tokens at most, and go on with 14 at most
        wide = drafting if drafting is STATIC else drafting.model_copy(update={"top_k": 14})
        assert set(paths(draft, b)) == by_hand(chains, wide, draft.levels)


@pytest.mark.parametrize("nodes", [1, 2, 7, 40, 200, 1000])
@pytest.mark.parametrize("sharpness", [0.3, 3.0])
def test_best_first_is_exact(nodes, sharpness):
    """Against all prefixes of all lengths."""
    marginals = (sharpness * torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(nodes))).log_softmax(-1)
    draft = tree.assembled(tree.best_first(marginals, nodes), torch.arange(5) + 10, nodes)
    every = [prefix for length in range(1, 5) for prefix in product(range(5), repeat=length)]
    count = min(nodes, len(every))
    for b in range(2):
        score = {p: float(sum(marginals[b, i, token] for i, token in enumerate(p))) for p in every}
        best = sorted(every, key=score.__getitem__, reverse=True)[:count]
        assert {tuple(token - 10 for token in path) for path in paths(draft, b)} == set(best)
    assert draft.tokens.shape == (2, count)


def test_equal_scores_keep_parents_with_their_children():
    """Certain tokens leave a child as likely as its parent, a flat distribution all of a level, and a NaN nothing at all."""
    certain = torch.full((1, 6, 4), float("-inf"))
    certain[:, :, 2] = 0
    flat = torch.full((1, 3, 4), 0.25).log()
    for marginals in (certain, flat, torch.full((1, 5, 4), float("-inf"))):
        for nodes in (1, 3, 5, 9, 20):
            draft = tree.assembled(tree.best_first(marginals, nodes), torch.arange(4), nodes)
            assert (draft.parents <= torch.arange(draft.tokens.shape[1])).all()
            assert torch.equal(draft.depths, torch.nn.functional.pad(draft.depths, (1, 0)).gather(1, draft.parents) + 1)
            assert len(set(paths(draft, 0))) == draft.tokens.shape[1]
    draft = tree.assembled(tree.best_first(certain, 5), torch.arange(4), 5)
    assert paths(draft, 0)[:5] == [(2,) * depth for depth in range(1, 6)], "the whole chain of certain tokens, nothing beside it"


@torch.no_grad()
@pytest.mark.parametrize("name", ["hidden_only-1", "kv_only-2", "hybrid-2", "dflash-2", "hybrid_block-2"])
@pytest.mark.parametrize("fault", ["flat", "nan"])
def test_a_drafter_gone_astray_still_gives_a_tree(name, fault):
    drafter = toys.drafter(name)
    drafter.norm.weight.fill_(0 if fault == "flat" else float("nan"))
    for drafting, nodes in ((STATIC, 21), (DYNAMIC, 14), (DraftingConfig(strategy="paper_tree"), 60)):
        check(tree.propose(drafter, DraftState.empty(drafter.depth), first_start(), drafting, 9), drafter, 3, nodes)


SIZES = [
    (DraftingConfig(strategy="static_tree"), 9, (4 + 8 + 16 + 16 + 16, 5), (4 + 8 + 16 + 16, 4)),
    (DraftingConfig(strategy="static_tree"), 2, (12, 2), (12, 2)),
    (DraftingConfig(strategy="static_tree", branching=(60,)), 9, (24, 1), (24, 1)),
    (DraftingConfig(strategy="paper_tree"), 20, (60, 8), (60, 4)),
    (DraftingConfig(strategy="paper_tree", nodes=5, top_k=2, length=2), 3, (60, 3), (60, 3)),
    (DraftingConfig(strategy="dynamic_tree", length=3, top_k=2, nodes=60), 9, (2 + 4 + 4, 3), (60, 3)),
    (DraftingConfig(strategy="dynamic_tree", length=6, top_k=1, nodes=60), 9, (6, 6), (60, 4)),
    (DraftingConfig(strategy="dynamic_tree", length=8, top_k=10, nodes=3), 9, (3, 3), (3, 3)),
    (DraftingConfig(strategy="dynamic_tree", length=8, top_k=64, nodes=60), 1, (24, 1), (24, 1)),
]


@torch.no_grad()
@pytest.mark.parametrize(("drafting", "length", "steps", "block"), SIZES)
def test_sizes(drafting, length, steps, block):
    """Nodes and levels for a drafter that goes step by step, and for a block of 5 slots; the vocabulary has 24 tokens."""
    for name, (nodes, levels) in (("hybrid-1", steps), ("dflash-2", block)):
        drafter = toys.drafter(name)
        for sequences in ((0, 1, 2), (1,)):
            draft = tree.propose(drafter, DraftState.empty(drafter.depth), first_start(*sequences), drafting, length)
            check(draft, drafter, len(sequences), nodes)
            assert draft.levels == levels and nodes <= tree.most_nodes(drafting)


@torch.no_grad()
@pytest.mark.parametrize("name", ["hidden_only-3", "kv_only-2", "hybrid-scalar", "kv_block-2"])
def test_a_tree_as_thin_as_a_chain_is_the_chain(name):
    drafter = toys.drafter(name)
    want = drafter.draft(DraftState.empty(drafter.depth), first_start(), 4)
    for drafting in (DraftingConfig(strategy="dynamic_tree", length=4, top_k=1, nodes=4), DraftingConfig(strategy="static_tree", branching=(1, 1, 1, 1))):
        if drafting.strategy == "static_tree" or not isinstance(drafter, BlockDrafter):
            draft = tree.propose(drafter, DraftState.empty(drafter.depth), first_start(), drafting, 9)
            assert draft.chain and torch.equal(draft.tokens, want)


@torch.no_grad()
@pytest.mark.parametrize("name", toys.FAMILIES)
def test_a_tree_leaves_nothing_behind(name):
    """The next round computes what it would have computed without it, bit for bit."""
    drafter = toys.drafter(name)
    entry = drafter.slots if isinstance(drafter, BlockDrafter) else drafter.begin
    after = []
    for drafting in (None, STATIC, DYNAMIC):
        state = DraftState.empty(drafter.depth)
        if drafting is None:
            entry(state, first_start())
        else:
            tree.propose(drafter, state, first_start(), drafting, 9)
        after.append(entry(state, start_of((0, 1, 2), LENGTHS, NEXT)))
    assert torch.equal(after[0], after[1]) and torch.equal(after[0], after[2])


def test_a_tree_that_no_target_would_verify_is_refused():
    with pytest.raises(ValidationError, match=r"branching.*1110 nodes.*512"):
        DraftingConfig(strategy="static_tree", branching=(10, 10, 10))
