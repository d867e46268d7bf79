"""What a drafter remembers between steps, and which rows it is asked about. The same in training and in decoding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from kvshot_ds.drafters.attention import KV, Hidden, Span


@dataclass(frozen=True)
class Rows:
    """Query rows. positions [n] int64: the anchor position t of each row inside its document. spans: the keys they see.

    hidden_own, hidden_cross: of these, what diagnosis keeps from the self path and from the cross path.
    """

    positions: torch.Tensor
    spans: Sequence[Span]
    hidden_own: Hidden | None = None
    hidden_cross: Hidden | None = None


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


class Memory(NamedTuple):
    """What one attention of one draft layer reads: prefix [T, G, D], and one KV [N, G, D] of each draft step since the anchor.

    Immutable: a step that is recomputed in the backward pass reads what it read the first time.
    """

    prefix: KV | None = None
    steps: tuple[KV, ...] = ()

    def extended(self, new: KV) -> Memory:
        """With positions appended to the prefix."""
        old = self.prefix
        return self._replace(prefix=new if old is None else KV(torch.cat((old.k, new.k)), torch.cat((old.v, new.v))))

    def stepped(self, new: Sequence[KV]) -> Memory:
        """With the entries of a draft step."""
        return self._replace(steps=(*self.steps, *new))

    def selected(self, index: torch.Tensor) -> Memory:
        """With the step entries of the rows `index` only."""
        return self._replace(steps=tuple(KV(s.k[index], s.v[index]) for s in self.steps))

    def at_anchor(self) -> Memory:
        """Without the draft steps of the last round; the prefix stays."""
        return self._replace(steps=())


class Extras(NamedTuple):
    """What an objective asks of a step besides h. kv_branch: h of the KV branch alone; queries: those of the cross paths."""

    kv_branch: bool = False
    queries: bool = False


PLAIN = Extras()


@dataclass
class DraftState:
    """Memories of all layers (own path and cross path) and the hidden state carried to the next step [N, d].

    kv_branch [N, d] and queries (by layer, [N, A, D], not rotated): of the latest step, where `extras` asks for them.
    """

    own: list[Memory]
    cross: list[Memory]
    extras: Extras = PLAIN
    rows: Rows | None = None
    hidden: torch.Tensor | None = None
    kv_branch: torch.Tensor | None = None
    queries: tuple[torch.Tensor, ...] = ()

    @classmethod
    def empty(cls, depth: int, extras: Extras = PLAIN) -> DraftState:
        return cls([Memory()] * depth, [Memory()] * depth, extras)

    def anchor(self, rows: Rows) -> None:
        """Starts a round at `rows`: draft steps of the last one are dropped, the prefix stays."""
        self.rows, self.queries = rows, ()
        self.own, self.cross = [m.at_anchor() for m in self.own], [m.at_anchor() for m in self.cross]
