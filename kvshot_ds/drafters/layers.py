"""Norm, rotary embedding, MLP, projections: the plain parts a draft layer is made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

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
        angle = positions.to(inv_freq.dtype)[:, None] * inv_freq
        angle = torch.cat((angle, angle), -1)[:, None]
        return Rotation(angle.cos() * self.scaling, angle.sin() * self.scaling, self.scaling)


def rotate(x: torch.Tensor, r: Rotation) -> torch.Tensor:
    """x [n, heads, D] turned to its positions, computed in x's dtype as the target does."""
    return _turn(x, r.cos.to(x.dtype), r.sin.to(x.dtype))


def unrotate(x: torch.Tensor, r: Rotation) -> torch.Tensor:
    """Exact inverse of `rotate`, in fp32 at least: a rotation is orthogonal, its scaling is divided out. x [n, heads, D]."""
    inverse = r.scaling**2
    return _turn(x.to(torch.promote_types(x.dtype, torch.float32)), r.cos / inverse, -r.sin / inverse)


def _turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    width = cos.shape[-1]
    turned, rest = x[..., :width], x[..., width:]
    a, b = turned.chunk(2, -1)
    turned = turned * cos + torch.cat((-b, a), -1) * sin
    return torch.cat((turned, rest), -1) if rest.shape[-1] else turned


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0] * ctx.factor, None


def scale_gradient(x: torch.Tensor, factor: float) -> torch.Tensor:
    """x itself; its gradient times `factor`."""
    return x if factor == 1 else _ScaleGradient.apply(x, factor)


class Projections(nn.Module):
    """q, k, v, o projections (and q/k norms) of one attention, from inputs of `width`, with the target's head layout `copies` times side by side.

    kv_gradient_scale: factor on the gradient of the k and v projections' weights alone, not on what flows through them.
    """

    def __init__(self, g: Geometry, width: int, copies: int = 1, qk_norm: bool = False):
        super().__init__()
        self.head_dim, self.heads, self.kv_heads = g.head_dim, copies * g.heads, copies * g.kv_heads
        self.kv_gradient_scale = 1.0
        self.q_proj = nn.Linear(width, self.heads * g.head_dim, bias=g.qkv_bias)
        self.k_proj = nn.Linear(width, self.kv_heads * g.head_dim, bias=g.qkv_bias)
        self.v_proj = nn.Linear(width, self.kv_heads * g.head_dim, bias=g.qkv_bias)
        self.o_proj = nn.Linear(self.heads * g.head_dim, g.hidden_size, bias=g.o_bias)
        normed = g.qk_norm or qk_norm
        self.q_norm = RMSNorm(g.head_dim, g.norm_eps) if normed else nn.Identity()
        self.k_norm = RMSNorm(g.head_dim, g.norm_eps) if normed else nn.Identity()

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    def query(self, u: torch.Tensor) -> torch.Tensor:
        """u [n, width] -> [n, A, D], normed, not yet rotated."""
        return self.q_norm(self.q_proj(u).view(len(u), self.heads, self.head_dim))

    def key_value(self, u: torch.Tensor, r: Rotation) -> KV:
        """u [n, width] -> KV [n, G, D], keys normed and rotated."""
        shape, s = (len(u), self.kv_heads, self.head_dim), self.kv_gradient_scale
        u = scale_gradient(u, 1 / s)
        k, v = scale_gradient(self.k_proj(u), s), scale_gradient(self.v_proj(u), s)
        return KV(rotate(self.k_norm(k.view(shape)), r), v.view(shape))
