"""Small random geometries, batches and drafters for numeric tests."""

from __future__ import annotations

import torch

from kvshot_ds.config import AnyDrafterConfig, BlockConfig, DFlashConfig, HiddenOnlyConfig, HybridBlockConfig, HybridConfig, KVBlockConfig, KVOnlyConfig
from kvshot_ds.drafters.base import Drafter
from kvshot_ds.drafters.build import build_drafter
from kvshot_ds.features.batch import Batch, collate
from kvshot_ds.features.spec import teacher_rows
from kvshot_ds.geometry import Geometry

VOCAB, DRAFT_VOCAB = 40, 24

GEOMETRIES = {
    "llama": dict(family="llama", qk_norm=False, qkv_bias=False, rope={"rope_type": "default", "rope_theta": 100.0}),
    "qwen3": dict(family="qwen3", qk_norm=True, qkv_bias=False, rope={"rope_type": "default", "rope_theta": 100.0}),
    "qwen2": dict(family="qwen2", qk_norm=False, qkv_bias=True, rope={"rope_type": "default", "rope_theta": 100.0}),
}

FAMILIES: dict[str, AnyDrafterConfig] = {
    "hidden_only-1": HiddenOnlyConfig(),
    "hidden_only-3": HiddenOnlyConfig(depth=3),
    "kv_only-1": KVOnlyConfig(depth=1),
    "kv_only-2": KVOnlyConfig(depth=2, kv={"projector_init": "random"}),
    "kv_only-none": KVOnlyConfig(depth=2, kv={"injection": "none"}),
    "kv_only-linear": KVOnlyConfig(depth=1, kv={"injection": "linear", "projector_init": "random"}),
    "kv_only-per_layer": KVOnlyConfig(depth=2, kv={"injection": "per_layer", "layers": (2, 3)}),
    "kv_only-head_concat": KVOnlyConfig(depth=2, kv={"injection": "head_concat"}),
    "kv_only-mlp": KVOnlyConfig(depth=1, kv={"projector": "mlp", "projector_init": "random", "qk_norm": True}),
    "kv_only-mlp_norm": KVOnlyConfig(depth=1, kv={"injection": "linear", "projector": "mlp_norm", "projector_init": "random", "layers": "all"}),
    "kv_only-hidden_to_kv": KVOnlyConfig(depth=2, kv={"injection": "hidden_to_kv", "projector_init": "random"}),
    "hybrid-1": HybridConfig(),
    "hybrid-2": HybridConfig(depth=2, gate={"init": "bias:-1"}, kv={"projector_init": "random"}),
    "hybrid-per_head": HybridConfig(gate={"kind": "per_head"}, kv={"injection": "head_concat"}),
    "hybrid-scalar": HybridConfig(depth=2, gate={"kind": "scalar"}, fc_norm=True, norm_output=True, norm_before_residual=True),
    "hybrid-no_gate": HybridConfig(gate={"kind": "none"}, kv={"injection": "hidden_to_kv", "projector_init": "random"}),
    "hybrid-cross_only": HybridConfig(depth=2, cross_only=True),
    "hybrid-anchored": HybridConfig(depth=2, carry="none", gate={"kind": "scalar"}, kv={"projector_init": "random"}),
    "mtp": HiddenOnlyConfig(hidden_layers="last"),
    "eagle31": HiddenOnlyConfig(depth=2, fc_norm=True, norm_output=True, hidden_layers=(0, 2, 4, 5)),
    "dflash-2": DFlashConfig(depth=2, block_size=5, mask_token_id=3),
    "kv_block-2": KVBlockConfig(depth=2, block_size=5, kv={"projector_init": "random"}),
    "kv_block-per_layer": KVBlockConfig(depth=3, block_size=6, kv={"injection": "per_layer", "layers": (1, 3, 5)}),
    "kv_block-none": KVBlockConfig(depth=1, block_size=5, kv={"injection": "none"}),
    "hybrid_block-2": HybridBlockConfig(depth=2, block_size=5, kv={"projector_init": "random"}),
}


def geometry(family: str = "llama") -> Geometry:
    return Geometry(
        num_layers=6, hidden_size=24, heads=4, kv_heads=2, head_dim=8, intermediate_size=40, vocab_size=VOCAB, norm_eps=1e-5,
        o_bias=False, mlp_bias=False, hidden_act="silu", max_positions=256, **GEOMETRIES[family],
    )  # fmt: skip


def sample(turn: list[int], g: Geometry, seed: int) -> dict[str, torch.Tensor]:
    """Random features of one conversation whose tokens belong to the given turns."""
    r = torch.Generator().manual_seed(seed)
    n = len(turn)
    rows = len(teacher_rows(torch.tensor(turn).numpy()))
    out = {"tokens": torch.randint(g.vocab_size, (n,), generator=r, dtype=torch.int32), "turn": torch.tensor(turn, dtype=torch.int32)}
    for i in range(g.num_layers):
        out[f"hidden.{i}"] = torch.randn(n, g.hidden_size, generator=r)
        out[f"key.{i}"] = torch.randn(n, g.kv_heads, g.head_dim, generator=r)
        out[f"value.{i}"] = torch.randn(n, g.kv_heads, g.head_dim, generator=r)
        out[f"query.{i}"] = torch.randn(rows, g.heads, g.head_dim, generator=r)
    logits = torch.randn(rows, g.vocab_size, generator=r)
    out["teacher.hidden"] = torch.randn(rows, g.hidden_size, generator=r)
    out["teacher.argmax"] = logits.argmax(-1).int()
    out["teacher.lse"] = logits.logsumexp(-1)
    return out


TURNS = [[0] * 4 + [1] * 7 + [0] * 3 + [2] * 5, [0] * 6 + [1] * 9 + [0], [0] * 3 + [1] * 2 + [0] * 2 + [2] * 4]


def batch(g: Geometry, turns: list[list[int]] | None = None) -> Batch:
    return collate([(f"c{i}", sample(t, g, i)) for i, t in enumerate(turns or TURNS)])


def drafter(name: str, g: Geometry | None = None, dtype: torch.dtype = torch.float64, scale: float = 8.0) -> Drafter:
    """A randomly initialised drafter with weights large enough that every path matters."""
    g = g or geometry()
    d = build_drafter(FAMILIES[name], g, DRAFT_VOCAB)
    d.reset(seed=3)
    with torch.no_grad():
        for p in d.parameters():
            if p.ndim == 2:
                p.mul_(scale)
            else:
                p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(len(p))) * 0.1)
    d.set_vocab(torch.randperm(VOCAB, generator=torch.Generator().manual_seed(5))[:DRAFT_VOCAB].sort().values)
    d.bind(*(torch.randn(VOCAB, g.hidden_size, generator=torch.Generator().manual_seed(seed)).to(dtype) for seed in (6, 7)))
    return d.to(dtype)


STEP_FAMILIES = [name for name in FAMILIES if not isinstance(FAMILIES[name], BlockConfig)]
BLOCK_FAMILIES = [name for name in FAMILIES if isinstance(FAMILIES[name], BlockConfig)]
