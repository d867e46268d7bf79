"""What a drafter remembers between steps, and which rows it is asked about. The same in training and in decoding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
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
    committed since the last round, of which only the last one of each sequence drafts. tokens [n]: x_{t+1}. hidden[l]
    [n, d]; keys[l], values[l] [n, G, D]. all: the n positions as rows; rows: the selected ones.
    keep: in decoding, where a memory keeps these positions. cache[l]: in decoding, the target's cache itself, [room, G, D].
    """

    tokens: torch.Tensor
    hidden: Mapping[int, torch.Tensor]
    keys: Mapping[int, torch.Tensor]
    values: Mapping[int, torch.Tensor]
    all: Rows
    rows: Rows
    select: torch.Tensor
    keep: Keep | None = None
    cache: Mapping[int, KV] = field(default_factory=dict)


class Keep(NamedTuple):
    """Where a memory keeps new positions: slots [n] int64 of the `room` that it has, one stretch for each sequence."""

    slots: torch.Tensor
    room: int


class Memory(NamedTuple):
    """What one attention of one draft layer reads: prefix [T, G, D], and one KV [N, G, D] of each draft step since the anchor.

    Immutable in training: a step that is recomputed in the backward pass reads what it read the first time. In decoding
    the prefix is room for all positions, of which spans show what is there; new ones are written into it, `keep` says where.
    """

    prefix: KV | None = None
    steps: tuple[KV, ...] = ()
    keep: Keep | None = None

    def extended(self, new: KV) -> Memory:
        """With new positions in the prefix."""
        if self.keep is None:
            return self._replace(prefix=new)
        whole = self.prefix or KV(*(x.new_empty(self.keep.room, *x.shape[1:]) for x in new))
        for there, x in zip(whole, new, strict=True):
            there[self.keep.slots] = x
        return self._replace(prefix=whole)

    def stepped(self, new: Sequence[KV]) -> Memory:
        """With the entries of a draft step."""
        return self._replace(steps=(*self.steps, *new))

    def selected(self, index: torch.Tensor) -> Memory:
        """With the step entries of the rows `index` only."""
        return self._replace(steps=tuple(KV(s.k[index], s.v[index]) for s in self.steps))

    def at_anchor(self, keep: Keep | None) -> Memory:
        """Without the draft steps of the last round; the prefix stays."""
        return self._replace(steps=(), keep=keep)

    def stretches(self, chosen: torch.Tensor, of: int) -> Memory:
        """With the stretches `chosen` of the `of` equal ones of the prefix only."""
        if self.prefix is None:
            return self
        k, v = (x.unflatten(0, (of, -1))[chosen].flatten(0, 1) for x in self.prefix)
        return self._replace(prefix=KV(k, v), keep=None)


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

    def anchor(self, start: Start) -> None:
        """Starts a round at the selected rows of `start`: draft steps of the last one are dropped, the prefix stays."""
        self.rows, self.queries = start.rows, ()
        self.own, self.cross = [m.at_anchor(start.keep) for m in self.own], [m.at_anchor(start.keep) for m in self.cross]

    def fork(self, parents: torch.Tensor, counts: Sequence[int]) -> DraftState:
        """The state of other rows, each a copy of a row of this one: the next level of a tree. This state stays as it is.

        parents [M]: row of this state each new row continues, ordered by sequence; counts: new rows of each of the B
        sequences, on the host. All rows of a sequence have the same anchor.
        """
        assert self.rows is not None
        anchors = {s.start: s for s in self.rows.spans}
        spans, row = [], 0
        for s, count in zip(anchors.values(), counts, strict=True):
            spans.append(Span(row, count, s.start, s.anchor, together=True))
            row += count
        rows = Rows(self.rows.positions[parents], tuple(spans))
        memories = ([m.selected(parents) for m in part] for part in (self.own, self.cross))
        return replace(self, own=next(memories), cross=next(memories), rows=rows, hidden=None if self.hidden is None else self.hidden[parents])

    def sequences(self, chosen: torch.Tensor, of: int) -> DraftState:
        """Between rounds: the state of the sequences `chosen` of the `of` that there are."""
        own, cross = ([m.at_anchor(None).stretches(chosen, of) for m in part] for part in (self.own, self.cross))
        return DraftState(own, cross, self.extras)
