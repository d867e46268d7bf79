"""The target's side of one sequence being decoded: its cache, and what a drafter is told of it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from transformers.cache_utils import Cache

from kvshot_ds.drafters.state import Start
from kvshot_ds.features.spec import FeatureSpec
from kvshot_ds.objectives.alignment import decoding_start
from kvshot_ds.target import Target


def last_logits(target: Target, tokens: torch.Tensor, cache: Cache | None = None) -> torch.Tensor:
    """Logits [V] after the last of `tokens` [n]; only that position reaches the LM head.

    The cache is the fourth positional argument of every family's forward: its name changes between versions of transformers.
    """
    return target.model(tokens[None], None, None, cache, use_cache=cache is not None, logits_to_keep=1).logits[0, -1]


class Sequence:
    """One sequence (batch 1) in the target. A forward is followed by `commit`, which settles how much of it stays.

    outputs: the dict that an open `target.watch` of the needed layers fills. length: committed positions.
    """

    def __init__(self, target: Target, needs: FeatureSpec, outputs: Mapping[int, torch.Tensor]):
        self.target, self.needs, self._outputs = target, needs, outputs
        self._cache = target.new_cache()
        self._latest: dict[int, torch.Tensor] = {}
        self.length = 0

    def prefill(self, prompt: torch.Tensor) -> torch.Tensor:
        """The target's first forward. prompt [S] -> the token after each position [S]: the prompt's own, then the target's arg-max."""
        best = last_logits(self.target, prompt, self._cache).argmax(-1, keepdim=True)
        self._latest = dict(self._outputs)  # another sequence may use the target before this one commits
        return torch.cat((prompt[1:], best))

    def verify(self, tokens: torch.Tensor) -> torch.Tensor:
        """One forward over the bonus token and the drafts [1 + K] -> the target's arg-max after each [1 + K]."""
        best = self.target.forward(tokens[None], self._cache)[0].argmax(-1)
        self._latest = dict(self._outputs)
        return best

    def commit(self, following: torch.Tensor) -> Start:
        """Keeps the first n positions of the latest forward and drops the rest from the cache. following [n]: the token after each.

        Returns what the drafter is told: the target's states at these n positions only, as views. Nothing of them is copied here.
        """
        first, n = self.length, len(following)
        self._cache.crop(first + n - self._cache.get_seq_length())
        self.length = first + n
        hidden = {layer: self._latest[layer][0, :n] for layer in self.needs.hidden_layers}
        kept = {layer: self._cache.layers[layer] for layer in self.needs.kv_layers}
        keys = {layer: kv.keys[0, :, first:].transpose(0, 1) for layer, kv in kept.items()}
        values = {layer: kv.values[0, :, first:].transpose(0, 1) for layer, kv in kept.items()}
        return decoding_start(following, first, hidden, keys, values, self.target.device)
