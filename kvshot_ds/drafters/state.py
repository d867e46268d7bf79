"""What a drafter remembers between steps, and which rows it is asked about. The same in training and in decoding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from kvshot_ds.drafters.attention import KV, Span


@dataclass(frozen=True)
class Rows:
    """Query rows. positions [n] int64: the anchor position t of each row inside its document. spans: the keys they see."""

    positions: torch.Tensor
    spans: Sequence[Span]


@dataclass(frozen=True)
class Start:
    """Everything known to the drafter at its first step: the target's state at positions t, the token of t + 1.

    In training: all positions of the batch (n = T) of which `select` [N] are unrolled. In decoding: the positions
    committed since the last round, of which only the last one drafts. tokens [n]: x_{t+1}. hidden[l] [n, d];
    keys[l], values[l] [n, G, D]. all: the n positions as rows; rows: the selected ones.
    """

    tokens: torch.Tensor
    hidden: Mapping[int, torch.Tensor]
    keys: Mapping[int, torch.Tensor]
    values: Mapping[int, torch.Tensor]
    all: Rows
    rows: Rows
    select: torch.Tensor


@dataclass
class Memory:
    """What one attention of one draft layer reads: prefix [T, G, D], and one KV [N, G, D] of each draft step since the anchor."""

    prefix: KV | None = None
    steps: list[KV] = field(default_factory=list)

    def extend(self, new: KV) -> None:
        """Appends positions to the prefix."""
        old = self.prefix
        self.prefix = new if old is None else KV(torch.cat((old.k, new.k)), torch.cat((old.v, new.v)))

    def select(self, index: torch.Tensor) -> None:
        """Keeps the step entries of the rows `index` only."""
        self.steps = [KV(s.k[index], s.v[index]) for s in self.steps]


@dataclass
class DraftState:
    """Memories of all layers (own path and cross path) and the hidden state carried to the next step [N, d]."""

    own: list[Memory]
    cross: list[Memory]
    rows: Rows | None = None
    hidden: torch.Tensor | None = None

    @classmethod
    def empty(cls, depth: int) -> DraftState:
        return cls([Memory() for _ in range(depth)], [Memory() for _ in range(depth)])

    def forget_steps(self) -> None:
        """Drops the draft steps of the last round; the prefix stays."""
        for memory in (*self.own, *self.cross):
            memory.steps = []
