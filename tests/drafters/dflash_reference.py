"""DFlash (arXiv 2602.06036) as it is served: a second implementation that knows the published names only.

Written from the paper and the public layout; shares no code with the package. One block, one head, one query at a time.
"""

from __future__ import annotations

import cmath
from typing import Any

import torch


class DFlash:
    """weights: the checkpoint's tensors by their published names; embedding and head [V, d] of the target."""

    def __init__(self, config: dict[str, Any], weights: dict[str, torch.Tensor], embedding: torch.Tensor, head: torch.Tensor):
        self.c, self.w, self.embedding, self.head = config, weights, embedding, head
        self.own = config["dflash_config"]
        self.heads, self.kv_heads, self.dim = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]

    def logits(self, anchor: int, states: torch.Tensor) -> torch.Tensor:
        """anchor: the clean token, which follows the context; states [n, N*d]: the target's at context positions 0 … n - 1.

        Returns the logits [B - 1, V] of the tokens after the anchor.
        """
        n, size = len(states), self.own["block_size"]
        context = [self.norm(self.w["fc.weight"] @ s, "hidden_norm.weight") for s in states]
        block = [self.embedding[anchor]] + [self.embedding[self.own["mask_token_id"]]] * (size - 1)
        for i in range(self.c["num_hidden_layers"]):
            block = self.layer(f"layers.{i}.", context, block, n)
        return torch.stack([self.head @ self.norm(x, "norm.weight") for x in block[1:]])

    def layer(self, name: str, context: list[torch.Tensor], block: list[torch.Tensor], n: int) -> list[torch.Tensor]:
        """block [d] each, at absolute positions n, n + 1, …; the context, at 0 … n - 1, is the same for all layers."""
        normed = [self.norm(x, f"{name}input_layernorm.weight") for x in block]
        sources = context + normed
        keys = [self.parts(f"{name}self_attn.k_", x, self.kv_heads, position) for position, x in enumerate(sources)]
        values = [self.linear(f"{name}self_attn.v_proj", x).view(self.kv_heads, self.dim) for x in sources]
        out = []
        for slot, x in enumerate(block):
            queries = self.parts(f"{name}self_attn.q_", normed[slot], self.heads, n + slot)
            heads = []
            for a, q in enumerate(queries):
                g = a // (self.heads // self.kv_heads)
                weights = torch.softmax(torch.stack([q @ k[g] for k in keys]) / self.dim**0.5, 0)  # all of the context and of the block
                heads.append(sum(weight * v[g] for weight, v in zip(weights, values, strict=True)))
            h = x + self.linear(f"{name}self_attn.o_proj", torch.cat(heads))
            u = self.norm(h, f"{name}post_attention_layernorm.weight")
            gate = self.linear(f"{name}mlp.gate_proj", u)
            out.append(h + self.linear(f"{name}mlp.down_proj", gate / (1 + torch.exp(-gate)) * self.linear(f"{name}mlp.up_proj", u)))
        return out

    def parts(self, name: str, x: torch.Tensor, heads: int, position: int) -> list[torch.Tensor]:
        """Heads of one input, each normed and turned to its position."""
        return [self.turn(self.norm(part, f"{name}norm.weight"), position) for part in self.linear(f"{name}proj", x).view(heads, self.dim)]

    def turn(self, x: torch.Tensor, position: int) -> torch.Tensor:
        half = self.dim // 2
        factors = torch.tensor([cmath.exp(1j * position * self.c["rope_theta"] ** (-i / half)) for i in range(half)], dtype=torch.complex128)
        z = torch.complex(x[:half], x[half:]) * factors
        return torch.cat((z.real, z.imag))

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return self.w[f"{name}.weight"] @ x + self.w.get(f"{name}.bias", 0)

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x / torch.sqrt((x * x).mean() + self.c["rms_norm_eps"]) * self.w[name]
