"""Which drafts are kept: a walk down the tree against a slow one, and draws against the probabilities they must have."""

from __future__ import annotations

import pytest
import torch
from scipy import stats

from kvshot_ds.config import SamplingConfig
from kvshot_ds.decoding.draft import Draft
from kvshot_ds.decoding.sampling import Sampler, pick
from kvshot_ds.decoding.verify import Verdict, match, reject, settle_draws

VOCAB, IDS = 6, torch.tensor([0, 2, 3, 5])


def random_trees(batch: int, nodes: int, seed: int) -> Draft:
    """Trees of random shapes over a vocabulary of 5, so that siblings often are what the target chose."""
    r = torch.Generator().manual_seed(seed)
    tokens, parents, depths = (torch.zeros(batch, nodes, dtype=torch.long) for _ in range(3))
    for b in range(batch):
        taken: set[tuple[int, int]] = set()
        for i in range(nodes):
            while True:
                parent, token = int(torch.randint(i + 1, (), generator=r)), int(torch.randint(5, (), generator=r))
                if (parent, token) not in taken:
                    break
            taken.add((parent, token))
            tokens[b, i], parents[b, i] = token, parent
            depths[b, i] = 1 + (depths[b, parent - 1] if parent else 0)
    return Draft(tokens, parents, depths, int(depths.max()), False)


def walked(draft: Draft, chosen: torch.Tensor, b: int) -> tuple[list[int], int]:
    """Nodes kept, from 1, and the target's own token, one sequence in plain Python."""
    at, path = 0, []
    while True:
        want = int(chosen[b, at])
        children = [i + 1 for i in range(draft.tokens.shape[1]) if draft.parents[b, i] == at and draft.tokens[b, i] == want]
        if not children:
            return path, want
        (at,) = children
        path.append(at)


@pytest.mark.parametrize("nodes", [1, 6, 25])
def test_match_walks_down_while_a_child_is_what_the_target_chose(nodes):
    draft = random_trees(60, nodes, nodes)
    chosen = torch.randint(5, (60, nodes + 1), generator=torch.Generator().manual_seed(0))
    verdict = match(draft, chosen)
    lengths = set()
    for b in range(60):
        path, own = walked(draft, chosen, b)
        assert verdict.path[b, : verdict.accepted[b]].tolist() == path and verdict.own[b] == own
        lengths.add(len(path))
    assert len(lengths) > (3 if nodes == 25 else 1)


def test_match_of_a_chain_is_that_of_a_tree_and_nothing_drafted_is_a_chain():
    r = torch.Generator().manual_seed(0)
    tokens, chosen = torch.randint(2, (200, 4), generator=r), torch.randint(2, (200, 5), generator=r)
    chain = Draft.in_line(tokens)
    a, b = match(chain, chosen), match(Draft(chain.tokens, chain.parents, chain.depths, 4, False), chosen)
    assert torch.equal(a.accepted, b.accepted) and torch.equal(a.own, b.own) and a.accepted.unique().tolist() == [0, 1, 2, 3, 4]
    for row in range(200):
        assert torch.equal(a.path[row, : a.accepted[row]], b.path[row, : b.accepted[row]])
    none = match(Draft.in_line(tokens[:, :0]), chosen[:, :1])
    assert none.accepted.sum() == 0 and none.path.shape == (200, 0) and torch.equal(none.own, chosen[:, 0])


def distributions(steps: int, seed: int, sharpness: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """p [steps + 1, V] and q [steps, V_d]; the target knows tokens that the drafter does not, and the other way round."""
    r = torch.Generator().manual_seed(seed)
    p = (sharpness * torch.randn(steps + 1, VOCAB, generator=r)).softmax(-1)
    p[:, 3] = 0
    return p / p.sum(-1, keepdim=True), (sharpness * torch.randn(steps, len(IDS), generator=r)).softmax(-1)


def drawn(p: torch.Tensor, q: torch.Tensor, n: int, seed: int = 0) -> tuple[Draft, Verdict]:
    """n chains whose tokens do not depend on each other, settled."""
    r = torch.Generator().manual_seed(seed)
    steps = len(q)
    tokens = IDS[torch.stack([pick(row.expand(n, -1), torch.rand(n, generator=r, dtype=torch.float64)) for row in q], 1)]
    draft = Draft.in_line(tokens, q.expand(n, -1, -1))
    accept, own = (torch.rand(n, k, generator=r, dtype=torch.float64) for k in (steps, steps + 1))
    return draft, settle_draws(draft, p.expand(n, -1, -1), IDS, accept, own)


def fits(counts: torch.Tensor, p: torch.Tensor) -> float:
    """p-value of chi-square over the cells that can occur."""
    assert counts[p == 0].sum() == 0
    weights = p[p > 0].double()
    expected = weights / weights.sum() * counts.sum()
    return float(stats.chisquare(counts[p > 0].numpy(), expected.numpy()).pvalue)


@pytest.mark.parametrize("seed", range(4))
def test_what_is_committed_has_the_targets_distribution_at_every_place(seed):
    """200,000 chains of 3: token by token, whatever came before; and as many are accepted as the best coupling allows."""
    n, steps = 200_000, 3
    p, q = distributions(steps, seed)
    draft, verdict = drawn(p, q, n)
    whole = torch.zeros(steps, VOCAB).index_add(1, IDS, q)
    agree = torch.minimum(p[:steps], whole).sum(-1)
    reached = n
    for k in range(steps + 1):
        here = verdict.accepted >= k
        assert abs(int(here.sum()) - reached) < 5 * n**0.5
        drafted = draft.tokens[:, k] if k < steps else verdict.own
        token = torch.where(verdict.accepted > k, drafted, verdict.own)[here]
        assert fits(torch.bincount(token, minlength=VOCAB), p[k]) > 1e-4
        reached = int(here.sum() * agree[k]) if k < steps else 0
    assert 0.2 < float(agree.mean()) < 0.9


def test_a_draft_from_the_targets_own_distribution_is_always_accepted():
    p = torch.zeros(4, VOCAB)
    q = distributions(3, 0)[1]
    p[:3, IDS] = q
    p[3, 1] = 1
    _, verdict = drawn(p, q, 5000)
    assert (verdict.accepted == 3).all() and (verdict.own == 1).all()


def test_a_draft_that_the_target_never_makes_is_never_accepted():
    p = torch.zeros(2, VOCAB)
    p[:, 1], p[:, 4] = 0.25, 0.75
    _, verdict = drawn(p, torch.full((1, 4), 0.25), 5000)
    assert (verdict.accepted == 0).all() and fits(torch.bincount(verdict.own, minlength=VOCAB), p[0]) > 1e-4


def test_rounding_that_leaves_no_residual_takes_the_targets_distribution():
    """A refusal needs p < q somewhere, but sums of fp32 may hide where p > q."""
    p = torch.zeros(1, 2, VOCAB)
    p[0, 0, 2] = 1 - 2.0**-24
    draft = Draft.in_line(torch.tensor([[2]]), torch.tensor([[[0.0, 1.0, 0.0, 0.0]]]))
    almost = torch.tensor([[1 - 2.0**-49]], dtype=torch.float64)
    verdict = settle_draws(draft, p, IDS, almost, torch.full((1, 2), 0.5, dtype=torch.float64))
    assert verdict.accepted == 0 and verdict.own == 2


def test_reject_takes_logits_and_the_noise_of_positions():
    """The same rows in another batch and another round give the same verdict; acceptance and own token use noise of their own."""
    config = SamplingConfig(temperature=0.7, top_k=4, seed=1)
    sampler, n = Sampler(config), 400
    r = torch.Generator().manual_seed(0)
    logits, draft_logits = torch.randn(n, 3, VOCAB, generator=r), torch.randn(n, 2, len(IDS), generator=r)
    positions, numbers = torch.arange(3) + torch.arange(n).unsqueeze(1) % 11, torch.arange(n)
    made = [sampler.draw(draft_logits[:, k], IDS, positions[:, k], numbers) for k in range(2)]
    probs = torch.stack([m.probs for m in made if m.probs is not None], 1)
    tokens = torch.stack([m.tokens for m in made], 1)
    verdict = reject(Draft.in_line(tokens, probs), logits, IDS, sampler, positions, numbers)
    assert verdict.accepted.unique().tolist() == [0, 1, 2]
    some = torch.tensor([7, 300, 2])
    again = reject(Draft.in_line(tokens[some], probs[some]), logits[some], IDS, sampler, positions[some], numbers[some])
    assert torch.equal(again.accepted, verdict.accepted[some]) and torch.equal(again.own, verdict.own[some])
    p = sampler.log_probs(logits).exp()
    for b in range(n):
        at = int(verdict.accepted[b])
        assert p[b, at, verdict.own[b]] > 0
        if at < 2:
            q = torch.zeros(VOCAB).index_add(0, IDS, probs[b, at])
            assert p[b, at, verdict.own[b]] > q[verdict.own[b]], "the residual has nothing where q is larger"
