"""What every drafter is: draft layers over a state, a draft head over a draft vocabulary."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import nn
from torch.nn import functional as F

from kvshot_ds.drafters.layer import GatedDelta
from kvshot_ds.drafters.layers import KVProjector, RMSNorm, Rotary, Rotation
from kvshot_ds.drafters.state import DraftState, Rows, Start
from kvshot_ds.features.spec import FeatureSpec
from kvshot_ds.geometry import Geometry


class Drafter(nn.Module):
    """One draft step at a time, for many rows (training) or one (decoding).

    A row is anchored at position t: it knows target states at positions <= t and tokens <= t + 1. Step k reads the
    token at t + 1 + k and returns the un-normed hidden state h [N, d] from which `logits` proposes the token at
    t + 2 + k. Training, evaluation and decoding call the same two methods: `begin` (step 0) and `forward_step` (k >= 1).

    d2t [V_d] int64: draft id i proposes target id i + d2t[i]; t2d [V] bool: the target ids that can be proposed.
    """

    family: str
    layers: nn.ModuleList
    d2t: torch.Tensor
    t2d: torch.Tensor

    def __init__(self, g: Geometry, depth: int, draft_vocab_size: int):
        super().__init__()
        self.g, self.depth = g, depth
        self.rotary = Rotary(g)
        self.norm = RMSNorm(g.hidden_size, g.norm_eps)
        self.lm_head = nn.Linear(g.hidden_size, draft_vocab_size, bias=False)
        self.register_buffer("d2t", torch.zeros(draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(g.vocab_size, dtype=torch.bool))
        self._embedding: list[torch.Tensor] = []

    @abstractmethod
    def required_features(self) -> FeatureSpec:
        """What must have been captured to train this drafter."""

    @abstractmethod
    def begin(self, state: DraftState, start: Start) -> torch.Tensor:
        """Takes in the target's states at the n positions of `start` and runs step 0 at its selected rows: h [N, d]."""

    def forward_step(self, state: DraftState, tokens: torch.Tensor, k: int) -> torch.Tensor:
        """Step k >= 1 at the rows of the last `begin`. tokens [N]: x_{t+1+k}. Returns h [N, d]."""
        assert state.rows is not None
        rotations = self.rotations(state.rows, k)
        x = self.embed(tokens)
        for layer, own, cross in zip(self.layers, state.own, state.cross, strict=True):
            x = layer(x, state.hidden, own, cross, state.rows, rotations)
        state.hidden = x
        return x

    def rotations(self, rows: Rows, k: int) -> tuple[Rotation, Rotation]:
        """Rotations of the self path and of the cross path at step k of `rows`. The one place that settles positions.

        Self path: EAGLE-3 code bases put the token of t + 1 + k at rotary position t + k; kept, for weight compatibility.
        Cross path: the target's keys carry absolute positions, so a draft entry has its true one, t + 1 + k.
        """
        return self.rotary(rows.positions + k), self.rotary(rows.positions + k + 1)

    def logits(self, h: torch.Tensor) -> torch.Tensor:
        """h [N, d] -> logits over the draft vocabulary [N, V_d]."""
        return self.lm_head(self.norm(h))

    def propose(self, h: torch.Tensor) -> torch.Tensor:
        """Greedy proposal: h [N, d] -> target token ids [N]."""
        best = self.logits(h).argmax(-1)
        return best + self.d2t[best]

    @torch.no_grad()
    def draft(self, state: DraftState, start: Start, length: int) -> torch.Tensor:
        """Greedy chain of `length` tokens from the last position of `start` (one row): target ids [length]."""
        h = self.begin(state, start)
        tokens = [self.propose(h)]
        for k in range(1, length):
            tokens.append(self.propose(self.forward_step(state, tokens[-1], k)))
        return torch.cat(tokens)

    def bind(self, embedding: torch.Tensor) -> None:
        """Lends the target's frozen embedding [V, d]; it is no parameter of the drafter and never saved with it."""
        self._embedding = [embedding]

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens [n] -> [n, d] in the drafter's dtype."""
        return F.embedding(tokens, self._embedding[0]).to(self.norm.weight.dtype)

    def set_vocab(self, draft_ids: torch.Tensor) -> None:
        """Chooses the draft vocabulary: ascending target ids [V_d]."""
        self.d2t.copy_(draft_ids - torch.arange(len(draft_ids)))
        self.t2d.zero_()
        self.t2d[draft_ids] = True

    @property
    def draft_ids(self) -> torch.Tensor:
        """Target ids of the draft vocabulary [V_d], ascending."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def reset(self, seed: int) -> None:
        """Random start: matrices N(0, 0.02), norms 1, biases 0; then the gate's and the projectors' own."""
        generator = torch.Generator().manual_seed(seed)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                with torch.no_grad():
                    module.weight.normal_(0, 0.02, generator=generator)
                    if module.bias is not None:
                        module.bias.zero_()
            elif isinstance(module, RMSNorm):
                nn.init.ones_(module.weight)
        for module in self.modules():
            if isinstance(module, KVProjector | GatedDelta):
                module.reset()
