"""What a round proposes: a tree of tokens for each sequence, of which a chain is the thinnest."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Draft:
    """Proposals for B sequences: one tree each, all of n nodes, parents before their children, siblings different tokens.

    tokens [B, n] int64: target ids. parents [B, n] int64: 0 is the bonus token, the root; i + 1 is node i. depths [B, n]
    int64: 1 for children of the root. levels: the greatest depth that there may be. chain: each node is the child of the one
    before it.
    probs [B, n, V_d] fp32: the distribution over the draft vocabulary that each token was drawn from; None: not drawn,
    a point mass.
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    depths: torch.Tensor
    levels: int
    chain: bool
    probs: torch.Tensor | None = None

    @classmethod
    def in_line(cls, tokens: torch.Tensor, probs: torch.Tensor | None = None) -> Draft:
        """A chain. tokens [B, n]."""
        at = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        return cls(tokens, at, at + 1, tokens.shape[1], True, probs)

    def ancestors(self) -> torch.Tensor:
        """Which of the 1 + n inputs (root first) each of them sees: itself and its ancestors, [B, 1 + n, 1 + n] bool."""
        b, n = self.tokens.shape
        if self.chain:
            return torch.ones(n + 1, n + 1, dtype=torch.bool, device=self.tokens.device).tril().expand(b, -1, -1)
        sees = torch.eye(n + 1, dtype=torch.bool, device=self.tokens.device).repeat(b, 1, 1)
        parents = torch.nn.functional.pad(self.parents, (1, 0))
        up = parents
        for _ in range(self.levels):
            sees.scatter_(2, up.unsqueeze(2), True)
            up = parents.gather(1, up)
        return sees
