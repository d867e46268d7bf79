"""Which drafts the target keeps: losslessly, and without making the host wait."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvshot_ds.decoding.draft import Draft
from kvshot_ds.decoding.sampling import Sampler, Use, pick


@dataclass(frozen=True)
class Verdict:
    """accepted [B] int64: nodes kept, a path from the root. path [B, levels] int64: the kept node of each level, as node i + 1;
    anything beyond `accepted`. own [B] int64: the target's token after them."""

    accepted: torch.Tensor
    path: torch.Tensor
    own: torch.Tensor


def match(draft: Draft, chosen: torch.Tensor) -> Verdict:
    """Goes down the tree while a child is the token that the target chose. chosen [B, 1 + n]: its token after the root and each node.

    The committed text is the target's own choice at every position, whatever is proposed: arg-max, or a sample drawn
    before looking at the drafts. For drafts that are not drawn (point masses) that is also what trying siblings in order
    and renormalising the residual comes to (arXiv 2211.17192).
    """
    b, n = draft.tokens.shape
    agrees = draft.tokens == chosen.gather(1, draft.parents)
    if draft.chain:
        accepted = agrees.long().cumprod(1).sum(1)
        return Verdict(accepted, torch.arange(1, n + 1, device=chosen.device).expand(b, -1), chosen.gather(1, accepted.unsqueeze(1)).squeeze(1))
    kept = torch.zeros(b, n + 1, dtype=torch.bool, device=chosen.device)
    kept[:, 0] = True
    path = []
    for level in range(1, draft.levels + 1):
        here = agrees & (draft.depths == level) & kept.gather(1, draft.parents)
        kept[:, 1:] |= here
        path.append(here.long().argmax(1) + 1)  # siblings differ, so at most one is kept
    accepted = kept.sum(1) - 1
    paths = torch.stack(path, 1) if path else accepted.new_empty(b, 0)
    last = torch.nn.functional.pad(paths, (1, 0)).gather(1, accepted.unsqueeze(1))
    return Verdict(accepted, paths, chosen.gather(1, last).squeeze(1))


def reject(draft: Draft, logits: torch.Tensor, ids: torch.Tensor, sampler: Sampler, positions: torch.Tensor, sequences: torch.Tensor) -> Verdict:
    """`settle_draws` by what the target makes of the inputs: logits [B, 1 + n, V], the positions [B, 1 + n] of the tokens they are about."""
    accept = sampler.uniform(positions[:, :-1], sequences.unsqueeze(1), Use.ACCEPT)
    own = sampler.uniform(positions, sequences.unsqueeze(1), Use.OWN)
    return settle_draws(draft, sampler.log_probs(logits).exp_(), ids, accept, own)


def settle_draws(draft: Draft, p: torch.Tensor, ids: torch.Tensor, accept: torch.Tensor, own: torch.Tensor) -> Verdict:
    """A chain whose tokens were drawn (arXiv 2211.17192): accepts x ~ q with probability min(1, p(x) / q(x)), until the first refusal.

    The target's own token is drawn from norm(max(0, p - q)) where a draft was refused, from p after the last one. p
    [B, 1 + n, V]: the target's distribution after the root and after each node. q, `draft.probs`, is over the draft
    vocabulary `ids` [V_d], ascending; 0 elsewhere. accept [B, n], own [B, 1 + n]: uniform numbers.
    """
    assert draft.chain and draft.probs is not None
    b, n = draft.tokens.shape
    q = draft.probs.gather(2, torch.searchsorted(ids, draft.tokens).unsqueeze(2)).squeeze(2)
    accepted = (accept * q < p[:, :n].gather(2, draft.tokens.unsqueeze(2)).squeeze(2)).long().cumprod(1).sum(1)
    row = torch.arange(b, device=p.device)
    whole = p[row, accepted]
    refused = draft.probs[row, accepted.clamp_max(n - 1)] * (accepted < n).unsqueeze(1)
    residual = whole.index_add(1, ids, -refused).clamp_min_(0)
    # A draft that was refused although p = q up to rounding leaves nothing over; p is as good.
    weights = torch.where(residual.sum(1, keepdim=True) > 0, residual, whole)
    path = torch.arange(1, n + 1, device=p.device).expand(b, -1)
    return Verdict(accepted, path, pick(weights, own.gather(1, accepted.unsqueeze(1)).squeeze(1)))
