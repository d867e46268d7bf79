"""The target's KV cache of a batch whose sequences are of different lengths: one block of memory, written in place."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import DynamicCache

from kvshot_ds.drafters.attention import KV
from kvshot_ds.geometry import Geometry


class RaggedCache(DynamicCache):
    """Keys and values of all layers, [L, 2, B, room, G, D]; nothing is copied from forward to forward.

    Slot p of sequence b holds position p. Entries of a forward stand where `place` says, those that are not kept are
    written over by the next one. To transformers it always looks empty: positions and masks are given with each forward.
    """

    def __init__(self, g: Geometry, batch: int, room: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.room = room
        self.memory = torch.zeros(g.num_layers, 2, batch, room, g.kv_heads, g.head_dim, dtype=dtype, device=device)
        self._slots: slice | torch.Tensor = slice(0, 0)
        self._rows = torch.empty(0, dtype=torch.int64)
        self._seen: int | None = None

    @property
    def batch(self) -> int:
        return self.memory.shape[2]

    def place(self, slots: slice | torch.Tensor, seen: int | None) -> None:
        """Says where the next forward's N entries of each sequence go: the same slots [N] for all as a slice, or [B, N] int64,
        and how many slots its queries are shown (None: only what the forward itself brings, as in a prefill)."""
        self._slots, self._seen = slots, seen
        if isinstance(slots, torch.Tensor):
            self._rows = torch.arange(self.batch, device=slots.device).unsqueeze(1)

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        new = (key_states.transpose(1, 2), value_states.transpose(1, 2))  # [B, N, G, D]
        for there, x in zip(self.memory[layer_idx], new, strict=True):
            if isinstance(self._slots, slice):
                there[:, self._slots] = x
            else:
                there[self._rows, self._slots] = x
        if self._seen is None:
            return key_states, value_states
        keys, values = self.memory[layer_idx, :, :, : self._seen].transpose(2, 3)
        return keys, values

    def move(self, sequences: torch.Tensor, source: torch.Tensor, to: torch.Tensor) -> None:
        """Copies entries of all layers: from slots `source` [n] to slots `to` [n] of `sequences` [n]."""
        self.memory[:, :, sequences, to] = self.memory[:, :, sequences, source]

    def layer(self, layer: int) -> KV:
        """What layer `layer` holds, [B * room, G, D]: a view."""
        k, v = self.memory[layer].flatten(1, 2)
        return KV(k, v)

    def take(self, chosen: torch.Tensor) -> None:
        """Keeps the sequences `chosen` only."""
        self.memory = self.memory[:, :, chosen]
