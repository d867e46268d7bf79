"""A training step of the hidden-only drafter as one writes it first (the mathematics of arXiv 2503.01840).

Every step of test-time training runs over the whole sequence: attention with a dense score matrix, the LM head at every
position, the teacher's logits over its whole vocabulary. The logits of all steps are joined and autograd does the rest.
Parameters carry the drafter's names, so that both contenders start from one state dict. One conversation, no batching.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.dense import causal_mask, dense_attention
from kvshot_ds.geometry import Geometry


@dataclass(frozen=True)
class Conversation:
    """tokens [S]; answer [S] bool: tokens of the assistant's turn, up to the end. Of the target: fused [S, 3d], hidden states; last [S, d], head's input."""

    tokens: torch.Tensor
    answer: torch.Tensor
    fused: torch.Tensor
    last: torch.Tensor


class Norm(nn.Module):
    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class Attention(nn.Module):
    def __init__(self, g: Geometry):
        super().__init__()
        self.g = g
        self.q_proj = nn.Linear(2 * g.hidden_size, g.heads * g.head_dim, bias=False)
        self.k_proj = nn.Linear(2 * g.hidden_size, g.kv_heads * g.head_dim, bias=False)
        self.v_proj = nn.Linear(2 * g.hidden_size, g.kv_heads * g.head_dim, bias=False)
        self.o_proj = nn.Linear(g.heads * g.head_dim, g.hidden_size, bias=False)

    def forward(self, u: torch.Tensor, cache: list[tuple[torch.Tensor, torch.Tensor]], mask: torch.Tensor) -> torch.Tensor:
        """u [S, 2d]; cache: keys and values of the steps before, to which this step's are appended."""
        g, length = self.g, len(u)
        positions = torch.arange(length) + len(cache)
        q = rotate(self.q_proj(u).view(length, g.heads, g.head_dim), positions, g.rope["rope_theta"])
        k = rotate(self.k_proj(u).view(length, g.kv_heads, g.head_dim), positions, g.rope["rope_theta"])
        cache.append((k, self.v_proj(u).view(length, g.kv_heads, g.head_dim)))
        return self.o_proj(dense_attention(q, *cache[0], cache[1:], mask, g.head_dim**-0.5).flatten(1))


class MLP(nn.Module):
    def __init__(self, g: Geometry):
        super().__init__()
        self.gate_proj = nn.Linear(g.hidden_size, g.intermediate_size, bias=False)
        self.up_proj = nn.Linear(g.hidden_size, g.intermediate_size, bias=False)
        self.down_proj = nn.Linear(g.intermediate_size, g.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, g: Geometry):
        super().__init__()
        self.input_layernorm, self.hidden_norm = Norm(g.hidden_size, g.norm_eps), Norm(g.hidden_size, g.norm_eps)
        self.self_attn, self.mlp = Attention(g), MLP(g)
        self.post_attention_layernorm = Norm(g.hidden_size, g.norm_eps)

    def forward(self, x: torch.Tensor, hidden: torch.Tensor, cache: list[tuple[torch.Tensor, torch.Tensor]], mask: torch.Tensor) -> torch.Tensor:
        h = hidden + self.self_attn(torch.cat([self.input_layernorm(x), self.hidden_norm(hidden)], -1), cache, mask)
        return h + self.mlp(self.post_attention_layernorm(h))


class Straightforward(nn.Module):
    """embedding, head [V, d]: the target's. t2d [V] bool: the draft vocabulary."""

    def __init__(self, g: Geometry, embedding: torch.Tensor, head: torch.Tensor, t2d: torch.Tensor):
        super().__init__()
        self.fc = nn.Linear(3 * g.hidden_size, g.hidden_size, bias=False)
        self.layers = nn.ModuleList([Layer(g)])
        self.norm = Norm(g.hidden_size, g.norm_eps)
        self.lm_head = nn.Linear(g.hidden_size, int(t2d.sum()), bias=False)
        self.embedding, self.head, self.t2d = embedding, head, t2d

    def forward(self, c: Conversation, steps: int, decay: float) -> torch.Tensor:
        """Loss per supervised row: sum over steps of decay^k times the cross-entropy to the teacher, cut to the draft vocabulary."""
        hidden, mask = self.fc(c.fused), causal_mask(len(c.tokens))
        cache: list[tuple[torch.Tensor, torch.Tensor]] = []
        tokens, last, valid = shift(c.tokens), shift(c.last), shift(c.answer)
        all_logits, all_targets, all_weights = [], [], []
        rows = (valid & shift(valid)).sum()
        for k in range(steps):
            hidden = self.layers[0](F.embedding(tokens, self.embedding), hidden, cache, mask)
            all_logits.append(self.lm_head(self.norm(hidden)))
            valid = valid & shift(c.answer, k + 2)
            with torch.no_grad():
                teacher = last @ self.head.T
                reachable = self.t2d[teacher.argmax(-1)]
                all_targets.append(torch.softmax(teacher if self.t2d.all() else teacher[:, self.t2d], -1))
            all_weights.append(decay**k * (valid & reachable) / rows)
            tokens, last = shift(tokens), shift(last)
        logits, targets, weights = torch.cat(all_logits), torch.cat(all_targets), torch.cat(all_weights)
        del all_logits, all_targets
        return (F.cross_entropy(logits, targets, reduction="none") * weights).sum()


def shift(x: torch.Tensor, by: int = 1) -> torch.Tensor:
    """x [S, ...] with row t replaced by row t + by; zeros at the end."""
    return torch.cat([x[by:], torch.zeros_like(x[:by])])


def rotate(x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """Rotary embedding of x [S, heads, D], half-rotation layout."""
    half = x.shape[-1] // 2
    angle = positions[:, None].float() * theta ** (-torch.arange(half) / half)
    cos, sin = torch.cat([angle.cos()] * 2, -1)[:, None], torch.cat([angle.sin()] * 2, -1)[:, None]
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin
