"""The target's side of the sequences being decoded: their cache, and what a drafter is told of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from kvshot_ds.decoding.cache import RaggedCache
from kvshot_ds.decoding.draft import Draft
from kvshot_ds.drafters.state import Start
from kvshot_ds.features.spec import FeatureSpec
from kvshot_ds.objectives.alignment import decoding_start
from kvshot_ds.target import Target


class Sequences:
    """B sequences in the target, each at its own length. A forward is followed by `commit`, which settles how much of it stays.

    outputs: the dict that an open `target.watch` of the needed layers fills. lengths: committed positions of each.
    """

    def __init__(self, target: Target, needs: FeatureSpec, outputs: Mapping[int, torch.Tensor], batch: int, room: int):
        self.target, self.needs, self._outputs = target, needs, outputs
        self.cache = RaggedCache(target.geometry, batch, room, target.dtype, target.device)
        self.lengths = [0] * batch
        self._latest: dict[int, torch.Tensor] = {}

    def prefill(self, prompts: Sequence[Sequence[int]]) -> torch.Tensor:
        """The target's first forward, prompts padded on the right, where causality hides the padding. Returns logits [B, 1, V] after each."""
        longest, device = max(map(len, prompts)), self.target.device
        tokens = torch.tensor([[*p, *[0] * (longest - len(p))] for p in prompts], device=device)
        positions = torch.arange(longest, device=device).expand_as(tokens)
        self.cache.place(slice(0, longest), None)
        states = self.target.last_hidden(tokens, self.cache, positions)
        self._latest = dict(self._outputs)  # another engine may use the target before this one commits
        last = torch.tensor([len(p) - 1 for p in prompts], device=device)
        return self.target.head(states[torch.arange(len(prompts), device=device), last].unsqueeze(1))

    def verify(self, bonus: torch.Tensor, draft: Draft) -> torch.Tensor:
        """One forward over the bonus tokens [B] and the drafts. Returns logits [B, 1 + n, V] after each."""
        tokens = torch.cat((bonus.unsqueeze(1), draft.tokens), 1)
        (b, n), device = tokens.shape, tokens.device
        seen = max(self.lengths) + n
        depths = torch.nn.functional.pad(draft.depths, (1, 0))
        if b == 1:
            length = self.lengths[0]
            positions = depths + length
            self.cache.place(slice(length, length + n), seen)
            mask = None if n == 1 else torch.nn.functional.pad(draft.ancestors(), (length, 0), value=True).unsqueeze(1)
        else:
            lengths = torch.tensor(self.lengths, device=device).unsqueeze(1)
            positions = depths + lengths
            slots = torch.arange(n, device=device) + lengths
            self.cache.place(slots, seen)
            mask = (torch.arange(seen, device=device) < lengths)[:, None, None].repeat(1, 1, n, 1)
            mask.scatter_(3, slots[:, None, None].expand(-1, 1, n, -1), draft.ancestors().unsqueeze(1))
        # Drafts that reach beyond the context of a sequence, because another one has more room, are never committed; but a RoPE that
        # follows the largest position would turn all sequences by it.
        states = self.target.last_hidden(tokens, self.cache, positions.clamp(max=self.target.geometry.max_positions - 1), mask)
        self._latest = dict(self._outputs)
        return self.target.head(states)

    def take(self, chosen: Sequence[int]) -> None:
        """Keeps the sequences `chosen` only."""
        at = torch.tensor(chosen, device=self.target.device)
        self.cache.take(at)
        self.lengths = [self.lengths[b] for b in chosen]
        self._latest = {layer: states[at] for layer, states in self._latest.items()}

    def commit(self, kept: Sequence[Sequence[int]], following: Sequence[Sequence[int]]) -> Start:
        """Keeps inputs of the latest forward and forgets the others. kept[b]: their indices, ascending; following[b]: the token after each.

        Returns what the drafter is told: the target's states at the kept positions only.
        """
        first, counts, device = self.lengths, [len(k) for k in kept], self.target.device
        moved = [(b, f + old, f + new) for b, (f, k) in enumerate(zip(first, kept, strict=True)) for new, old in enumerate(k) if old != new]
        if moved:
            self.cache.move(*torch.tensor(moved, device=device).unbind(1))
        self.lengths = [f + n for f, n in zip(first, counts, strict=True)]
        if len(kept) == 1 and not moved:
            hidden = {layer: self._latest[layer][0, : counts[0]] for layer in self.needs.hidden_layers}
        else:
            rows = torch.tensor([b for b, n in enumerate(counts) for _ in range(n)], device=device)
            inputs = torch.tensor([i for k in kept for i in k], device=device)
            hidden = {layer: self._latest[layer][rows, inputs] for layer in self.needs.hidden_layers}
        tokens = torch.tensor([token for f in following for token in f], device=device)
        return decoding_start(tokens, first, counts, self.cache.room, hidden, {layer: self.cache.layer(layer) for layer in self.needs.kv_layers})
