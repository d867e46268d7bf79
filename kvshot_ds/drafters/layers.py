"""Norm, rotary embedding, MLP, projections: the plain parts a draft layer is made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from kvshot_ds.drafters.attention import KV
from kvshot_ds.geometry import Geometry


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, in fp32 at least."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class MLP(nn.Module):
    """down(act(gate(x)) * up(x))."""

    def __init__(self, g: Geometry):
        super().__init__()
        self.gate_proj = nn.Linear(g.hidden_size, g.intermediate_size, bias=g.mlp_bias)
        self.up_proj = nn.Linear(g.hidden_size, g.intermediate_size, bias=g.mlp_bias)
        self.down_proj = nn.Linear(g.intermediate_size, g.hidden_size, bias=g.mlp_bias)
        self.act = activation(g.hidden_act)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


def activation(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """The target's activation by its transformers name."""
    if name == "silu":
        return F.silu
    from transformers.activations import ACT2FN

    return ACT2FN[name]


class Rotation(NamedTuple):
    """cos and sin of the positions of n entries, each [n, 1, D_rot] fp32, and the factor they carry (yarn)."""

    cos: torch.Tensor
    sin: torch.Tensor
    scaling: float

    def select(self, index: torch.Tensor) -> Rotation:
        return Rotation(self.cos[index], self.sin[index], self.scaling)


class Rotary(nn.Module):
    """Rotary embedding with the target's frequencies, in the half-rotation layout transformers uses."""

    def __init__(self, g: Geometry):
        super().__init__()
        inv_freq, self.scaling = g.rotary()
        # Kept out of the module's buffers: casting the drafter to bf16 must not round the frequencies.
        self._inv_freq = {"cpu": inv_freq}

    def forward(self, positions: torch.Tensor) -> Rotation:
        """positions [n] int64 -> Rotation."""
        device = positions.device
        inv_freq = self._inv_freq.get(str(device))
        if inv_freq is None:
            inv_freq = self._inv_freq[str(device)] = self._inv_freq["cpu"].to(device)
        angle = positions.float()[:, None] * inv_freq
        angle = torch.cat((angle, angle), -1)[:, None]
        return Rotation(angle.cos() * self.scaling, angle.sin() * self.scaling, self.scaling)


def rotate(x: torch.Tensor, r: Rotation) -> torch.Tensor:
    """x [n, heads, D] turned to its positions, computed in x's dtype as the target does."""
    return _turn(x, r.cos.to(x.dtype), r.sin.to(x.dtype))


def unrotate(x: torch.Tensor, r: Rotation) -> torch.Tensor:
    """Exact inverse of `rotate`, in fp32: a rotation is orthogonal, its scaling is divided out. x [n, heads, D] -> fp32."""
    inverse = r.scaling**2
    return _turn(x.float(), r.cos / inverse, -r.sin / inverse)


def _turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    width = cos.shape[-1]
    turned, rest = x[..., :width], x[..., width:]
    a, b = turned.chunk(2, -1)
    turned = turned * cos + torch.cat((-b, a), -1) * sin
    return torch.cat((turned, rest), -1) if rest.shape[-1] else turned


class Projections(nn.Module):
    """q, k, v, o projections (and q/k norms) of one attention, from inputs of `width`, with the target's head layout."""

    def __init__(self, g: Geometry, width: int):
        super().__init__()
        self.g = g
        self.q_proj = nn.Linear(width, g.heads * g.head_dim, bias=g.qkv_bias)
        self.k_proj = nn.Linear(width, g.kv_heads * g.head_dim, bias=g.qkv_bias)
        self.v_proj = nn.Linear(width, g.kv_heads * g.head_dim, bias=g.qkv_bias)
        self.o_proj = nn.Linear(g.heads * g.head_dim, g.hidden_size, bias=g.o_bias)
        self.q_norm = RMSNorm(g.head_dim, g.norm_eps) if g.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(g.head_dim, g.norm_eps) if g.qk_norm else nn.Identity()

    @property
    def scale(self) -> float:
        return self.g.head_dim**-0.5

    def query(self, u: torch.Tensor, r: Rotation) -> torch.Tensor:
        """u [n, width] -> [n, A, D], normed and rotated."""
        return rotate(self.q_norm(self.q_proj(u).view(len(u), self.g.heads, self.g.head_dim)), r)

    def key_value(self, u: torch.Tensor, r: Rotation) -> KV:
        """u [n, width] -> KV [n, G, D], keys normed and rotated."""
        shape = (len(u), self.g.kv_heads, self.g.head_dim)
        return KV(rotate(self.k_norm(self.k_proj(u).view(shape)), r), self.v_proj(u).view(shape))


class KVProjector(nn.Module):
    """The target's KV of m layers -> the memory of one draft layer (arXiv 2604.26412).

    linear: K = W_K [K^1; …; K^m] on rotated keys, V likewise, W [G·D, m·G·D]. linear_rope: keys are un-rotated at
    their absolute positions (fp32), projected, rotated again. per_layer: one layer's KV as it is.
    passes: index of the one of the m layers that W passes through at the start; None starts W at random, N(0, 0.02).
    """

    def __init__(self, g: Geometry, layers: tuple[int, ...], injection: str, passes: int | None):
        super().__init__()
        self.layers, self.injection, self.passes = layers, injection, passes
        self.shape = (g.kv_heads, g.head_dim)
        if injection != "per_layer":
            width = g.kv_heads * g.head_dim
            self.k_proj = nn.Linear(len(layers) * width, width, bias=False)
            self.v_proj = nn.Linear(len(layers) * width, width, bias=False)

    def reset(self) -> None:
        """Starting weights, after the drafter's general initialisation."""
        if self.injection != "per_layer" and self.passes is not None:
            width = self.k_proj.out_features
            for proj in (self.k_proj, self.v_proj):
                with torch.no_grad():
                    proj.weight.zero_()
                    proj.weight[:, self.passes * width : (self.passes + 1) * width] = torch.eye(width)

    def forward(self, keys: dict[int, torch.Tensor], values: dict[int, torch.Tensor], r: Rotation) -> KV:
        """keys, values: target layer -> [T, G, D]; r at the absolute positions of the T entries."""
        if self.injection == "per_layer":
            return KV(keys[self.layers[0]], values[self.layers[0]])
        v = self.v_proj(torch.cat([values[i].flatten(1) for i in self.layers], -1)).unflatten(-1, self.shape)
        if self.injection == "linear":
            return KV(self.k_proj(torch.cat([keys[i].flatten(1) for i in self.layers], -1)).unflatten(-1, self.shape), v)
        plain = torch.cat([unrotate(keys[i], r).flatten(1) for i in self.layers], -1).to(v.dtype)
        return KV(rotate(self.k_proj(plain).unflatten(-1, self.shape), r), v)
