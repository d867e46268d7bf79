"""EAGLE-3 (arXiv 2503.01840) and 3.1 (arXiv 2605.09992) as they are served: a second implementation that knows the published names only.

Written from the papers and the public layout; shares no code with the package. Dense: every call works on the whole sequence.
Positions: the row of position t holds the target's states at t and the token of t + 1, and stands at rotary position t.
"""

from __future__ import annotations

from typing import Any

import torch

Tensors = dict[str, torch.Tensor]


class Eagle3:
    """One sequence. weights: the checkpoint's tensors by their published names; embedding [V, d] of the target."""

    def __init__(self, config: dict[str, Any], weights: Tensors, embedding: torch.Tensor):
        self.c, self.w, self.embedding = config, weights, embedding
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.dim = config.get("head_dim") or config["hidden_size"] // self.heads
        self.tokens = torch.empty(0, dtype=torch.int64)
        self.states = torch.empty(0, weights["fc.weight"].shape[1], dtype=embedding.dtype)

    def draft(self, tokens: torch.Tensor, states: torch.Tensor, steps: int) -> tuple[list[int], list[torch.Tensor]]:
        """A round. tokens [n]: those that follow the n newly committed positions; states [n, m*d]: the target's there, side by side.

        Returns `steps` greedy proposals (target ids) and the logits [V_d] behind them.
        """
        self.tokens, self.states = torch.cat((self.tokens, tokens)), torch.cat((self.states, states))
        # Rows of the draft steps are appended to those of the sequence: each sees all rows before it.
        embedded, hidden = self.embedding[self.tokens], self.fused(self.states)
        proposals: list[int] = []
        logits: list[torch.Tensor] = []
        for _ in range(steps):
            h = self.decoder(embedded, hidden)[-1]
            normed = self.norm(h, "norm.weight")
            logits.append(self.w["lm_head.weight"] @ normed)
            best = int(logits[-1].argmax())
            proposals.append(best + int(self.w["d2t"][best]) if "d2t" in self.w else best)
            embedded = torch.cat((embedded, self.embedding[proposals[-1]][None]))
            hidden = torch.cat((hidden, (normed if self.c.get("norm_output") else h)[None]))
        return proposals, logits

    def fused(self, states: torch.Tensor) -> torch.Tensor:
        if self.c.get("fc_norm"):
            parts = states.split(self.c["hidden_size"], -1)
            states = torch.cat([self.norm(part, f"fc_norm.{i}.weight") for i, part in enumerate(parts)], -1)
        return states @ self.w["fc.weight"].T

    def decoder(self, embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """All layers over all rows [n, d] -> [n, d]. The first reads [norm(embedding); norm(hidden)]; its residual is the hidden state."""
        first = "midlayer." if "midlayer.mlp.up_proj.weight" in self.w else "layers.0."
        normed = self.norm(hidden, f"{first}hidden_norm.weight")
        u = torch.cat((self.norm(embedded, f"{first}input_layernorm.weight"), normed), -1)
        x = self.block(first, u, normed if self.c.get("norm_before_residual") else hidden)
        depth = 1 if first == "midlayer." else self.c["num_hidden_layers"]
        for i in range(1, depth):
            x = self.block(f"layers.{i}.", self.norm(x, f"layers.{i}.input_layernorm.weight"), x)
        return x

    def block(self, layer: str, u: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        h = residual + self.attention(f"{layer}self_attn.", u)
        x = self.norm(h, f"{layer}post_attention_layernorm.weight")
        gate = self.linear(f"{layer}mlp.gate_proj", x)
        return h + self.linear(f"{layer}mlp.down_proj", gate * torch.sigmoid(gate) * self.linear(f"{layer}mlp.up_proj", x))

    def attention(self, name: str, u: torch.Tensor) -> torch.Tensor:
        n = len(u)
        q = self.split(f"{name}q_", u, self.heads)
        k = self.split(f"{name}k_", u, self.kv_heads).repeat_interleave(self.heads // self.kv_heads, 0)
        v = self.linear(f"{name}v_proj", u).view(n, self.kv_heads, self.dim).transpose(0, 1).repeat_interleave(self.heads // self.kv_heads, 0)
        scores = q @ k.transpose(1, 2) / self.dim**0.5
        scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), float("-inf"))
        return self.linear(f"{name}o_proj", (torch.softmax(scores, -1) @ v).transpose(0, 1).reshape(n, -1))

    def split(self, name: str, u: torch.Tensor, heads: int) -> torch.Tensor:
        """[n, width] -> heads [heads, n, D], normed where the checkpoint has a norm, turned to their rotary positions 0 … n - 1."""
        x = self.linear(f"{name}proj", u).view(len(u), heads, self.dim).transpose(0, 1)
        if f"{name}norm.weight" in self.w:
            x = self.norm(x, f"{name}norm.weight")
        return turn(x, torch.arange(len(u)), self.c)

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        y = x @ self.w[f"{name}.weight"].T
        return y + self.w[f"{name}.bias"] if f"{name}.bias" in self.w else y

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + self.c["rms_norm_eps"]).sqrt() * self.w[name]


def turn(x: torch.Tensor, positions: torch.Tensor, config: dict[str, Any]) -> torch.Tensor:
    """x [..., n, D] rotated to `positions` [n]: pairs (i, i + D/2) as complex numbers times exp(i * position * theta^(-2i/D))."""
    half = x.shape[-1] // 2
    theta, scaling = config.get("rope_theta", 10000.0), config.get("rope_scaling") or {}
    speed = theta ** (-torch.arange(half, dtype=torch.float64) / half) / scaling.get("factor", 1.0)  # scaling: linear only
    z = torch.complex(x[..., :half], x[..., half:]) * torch.exp(1j * positions[:, None] * speed)
    return torch.cat((z.real, z.imag), -1)
