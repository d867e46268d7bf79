"""Attention of test-time training with a dense S x (S + k) score matrix: what one writes first, and the yardstick."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def causal_mask(length: int) -> torch.Tensor:
    """[S, S] fp32: 0 where key j <= row t, -inf elsewhere; added to the scores."""
    return torch.full((length, length), float("-inf")).triu(1)


def dense_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, own: Sequence[tuple[torch.Tensor, torch.Tensor]], mask: torch.Tensor, scale: float
) -> torch.Tensor:
    """Every row over the prefix and its own entry of each draft step. q [S, A, D]; k, v and the entries [S, G, D]; mask [S, S] -> [S, A, D]."""
    length, repeat = len(q), q.shape[1] // k.shape[1]

    def heads(x: torch.Tensor) -> torch.Tensor:
        return x.repeat_interleave(repeat, 1).transpose(0, 1)  # [A, S, D]

    q = q.transpose(0, 1)
    scores = q @ heads(k).transpose(1, 2) * scale + mask
    diagonals = [(q * heads(key)).sum(-1, keepdim=True) * scale for key, _ in own]
    weights = torch.softmax(torch.cat([scores, *diagonals], -1), -1)  # [A, S, S + k]
    out = weights[..., :length] @ heads(v)
    for i, (_, value) in enumerate(own):
        out = out + weights[..., length + i : length + i + 1] * heads(value)
    return out.transpose(0, 1)
