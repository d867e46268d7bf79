"""The target's KV cache -> the memory of a draft layer: every injection variant of KVShot (arXiv 2604.26412) and its controls."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.nn import functional as F

from kvshot_ds.config import KVSourceConfig
from kvshot_ds.drafters.attention import KV
from kvshot_ds.drafters.layers import RMSNorm, Rotation, rotate, unrotate
from kvshot_ds.drafters.state import Start
from kvshot_ds.errors import ConfigError
from kvshot_ds.features.spec import resolve_hidden, resolve_kv
from kvshot_ds.geometry import Geometry


class ResidualMLP(nn.Module):
    """W2 silu(W1 x), W1 applied to RMSNorm(x) if `norm`: what a projector adds to its linear map. x [n, width] -> [n, out]."""

    def __init__(self, width: int, out: int, norm: bool, eps: float):
        super().__init__()
        self.norm = RMSNorm(width, eps) if norm else nn.Identity()
        self.up_proj = nn.Linear(width, width, bias=False)
        self.down_proj = nn.Linear(width, out, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.up_proj(self.norm(x))))


class KVProjector(nn.Module):
    """The target's KV of m layers -> the memory of one draft layer.

    linear: K = W_K [K^1; …; K^m] on rotated keys, V likewise, W [G·D, m·G·D]. linear_rope: keys are un-rotated at
    their absolute positions (fp32), projected, rotated again. hidden_to_kv: K and V from the m hidden states, each normed.
    head_concat: the layers' heads side by side, [T, m·G, D]. per_layer: one layer's KV as it is.
    passes: index of the one of the m layers that W passes through at the start; None starts W at random, N(0, 0.02).
    """

    def __init__(self, g: Geometry, config: KVSourceConfig, layers: tuple[int, ...], passes: int | None):
        super().__init__()
        self.layers, self.injection, self.passes = layers, config.injection, passes
        self.shape = (g.kv_heads, g.head_dim)
        if not config.projects:
            return
        out, hidden = g.kv_heads * g.head_dim, config.injection == "hidden_to_kv"
        width = len(layers) * (g.hidden_size if hidden else out)
        bias = g.qkv_bias and hidden  # then the projections are those of an attention, and may start from the target's
        self.k_proj, self.v_proj = nn.Linear(width, out, bias=bias), nn.Linear(width, out, bias=bias)
        self.norms = nn.ModuleList(RMSNorm(g.hidden_size, g.norm_eps) for _ in layers if hidden)
        self.k_norm = RMSNorm(g.head_dim, g.norm_eps) if config.qk_norm or (hidden and g.qk_norm) else nn.Identity()
        if config.projector != "linear":
            self.k_mlp, self.v_mlp = (ResidualMLP(width, out, config.projector == "mlp_norm", g.norm_eps) for _ in "kv")

    @property
    def copies(self) -> int:
        """How many times the target's heads stand in the memory."""
        return len(self.layers) if self.injection == "head_concat" else 1

    @property
    def query_layers(self) -> tuple[int, ...]:
        """Target layers whose queries belong to this memory, one for each copy of the heads."""
        if self.injection in ("head_concat", "per_layer"):
            return self.layers
        return (self.layers[len(self.layers) // 2 if self.passes is None else self.passes],)

    def reset(self) -> None:
        """Starting weights, after the drafter's general initialisation."""
        if self.passes is None or self.injection not in ("linear", "linear_rope"):
            return
        width = self.k_proj.out_features
        with torch.no_grad():
            for proj in (self.k_proj, self.v_proj):
                proj.weight.zero_()
                proj.weight[:, self.passes * width : (self.passes + 1) * width] = torch.eye(width)
            if hasattr(self, "k_mlp"):
                self.k_mlp.down_proj.weight.zero_()
                self.v_mlp.down_proj.weight.zero_()

    def forward(self, start: Start, r: Rotation) -> KV:
        """KV [T, copies·G, D] of the T positions of `start`; r at their absolute positions."""
        if self.injection == "per_layer":
            return KV(start.keys[self.layers[0]], start.values[self.layers[0]])
        if self.injection == "head_concat":
            return KV(torch.cat([start.keys[i] for i in self.layers], 1), torch.cat([start.values[i] for i in self.layers], 1))
        k_in, v_in = self._inputs(start, r)
        k, v = self.k_proj(k_in), self.v_proj(v_in)
        if hasattr(self, "k_mlp"):
            k, v = k + self.k_mlp(k_in), v + self.v_mlp(v_in)
        k, v = self.k_norm(k.unflatten(-1, self.shape)), v.unflatten(-1, self.shape)
        return KV(k if self.injection == "linear" else rotate(k, r), v)

    def _inputs(self, start: Start, r: Rotation) -> tuple[torch.Tensor, torch.Tensor]:
        """What the key and the value projection read."""
        if self.injection == "hidden_to_kv":
            x = torch.cat([norm(start.hidden[i]) for norm, i in zip(self.norms, self.layers, strict=True)], -1)
            return x, x
        keys = {i: start.keys[i] if self.injection == "linear" else unrotate(start.keys[i], r) for i in self.layers}
        return _side_by_side(keys, self.layers).to(self.k_proj.weight.dtype), _side_by_side(start.values, self.layers)


def _side_by_side(tensors: Mapping[int, torch.Tensor], layers: tuple[int, ...]) -> torch.Tensor:
    """[T, G, D] of each layer -> [T, m·G·D]."""
    return torch.cat([tensors[i].flatten(1) for i in layers], -1)


class KVSource:
    """The target layers a drafter of `depth` layers reads, and the projector of each of its layers.

    layers: of the KV cache (or of the hidden states, with hidden_to_kv); () without target information. Raises
    ConfigError if they are out of range, or if per_layer does not name one for each draft layer.
    """

    def __init__(self, g: Geometry, config: KVSourceConfig, depth: int):
        self.g, self.config, self.depth = g, config, depth
        self.layers: tuple[int, ...] = ()
        if config.injection != "none":
            resolve = resolve_hidden if config.injection == "hidden_to_kv" else resolve_kv
            self.layers = resolve(config.layers, g.num_layers, "train.drafter.kv.layers")
        if config.injection == "per_layer" and len(self.layers) != depth:
            raise ConfigError(
                f"train.drafter.kv.injection=per_layer needs one target layer for each of the {depth} draft layers; "
                f"train.drafter.kv.layers has {len(self.layers)}"
            )

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        return self.layers if self.config.injection == "hidden_to_kv" else ()

    @property
    def kv_layers(self) -> tuple[int, ...]:
        return () if self.config.injection == "hidden_to_kv" else self.layers

    def projector(self, i: int) -> KVProjector | None:
        """Of draft layer i; None for the control without target information."""
        if self.config.injection == "none":
            return None
        if self.config.injection == "per_layer":
            return KVProjector(self.g, self.config, (self.layers[i],), 0)
        count = len(self.layers)
        passes = {"random": None, "identity_middle": count // 2, "identity_last": max(0, count - self.depth + i)}
        return KVProjector(self.g, self.config, self.layers, passes[self.config.projector_init])
