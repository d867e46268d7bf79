"""A small folder of feature shards with random contents, for tests of readers."""

from __future__ import annotations

from pathlib import Path

import torch

from kvshot_ds.features.check import check_shard
from kvshot_ds.features.manifest import SPLITS, Manifest, ShardIndex, Split, SplitCounts, shard_name
from kvshot_ds.features.shard import ShardReader, ShardSet, ShardWriter
from kvshot_ds.features.spec import DTYPES, FeatureSpec, Store, teacher_rows
from kvshot_ds.geometry import Geometry

SPEC = FeatureSpec((1, 3), (2,), "last_hidden", Store.all("bf16"), (2, 4))
GEOMETRY = Geometry(
    family="qwen3", num_layers=6, hidden_size=8, heads=4, kv_heads=2, head_dim=4, intermediate_size=16, vocab_size=50, norm_eps=1e-6,
    qk_norm=True, qkv_bias=False, o_bias=False, mlp_bias=False, hidden_act="silu", max_positions=64, rope={"rope_type": "default", "rope_theta": 1e4},
)  # fmt: skip
COUNTS: dict[Split, tuple[int, ...]] = {"train": (3, 2), "heldout": (2,)}  # samples of each shard


def make_sample(seed: int, spec: FeatureSpec = SPEC) -> dict[str, torch.Tensor]:
    r = torch.Generator().manual_seed(seed)
    n = 5 + seed % 7
    turn = torch.tensor([0] * 2 + [1] * (n - 3) + [0], dtype=torch.int32)
    rows, dtype = len(teacher_rows(turn.numpy())), DTYPES[spec.store.teacher]
    found = {"tokens": torch.randint(50, (n,), generator=r, dtype=torch.int32), "turn": turn}
    found |= {f"hidden.{layer}": torch.randn(n, 8, generator=r).to(dtype) for layer in spec.hidden_layers}
    found |= {f"{kind}.{layer}": torch.randn(n, 2, 4, generator=r).to(dtype) for layer in spec.kv_layers for kind in ("key", "value")}
    found |= {f"query.{layer}": torch.randn(rows, 4, 4, generator=r).to(dtype) for layer in spec.query_layers}
    teacher = {"teacher.hidden": torch.randn(rows, 8, generator=r).to(dtype), "teacher.argmax": found["tokens"][:rows].clone()}
    return found | teacher | {"teacher.lse": torch.randn(rows, generator=r)}


def assert_whole(shards: ShardSet | ShardReader) -> None:
    """Every byte is as it was written, and every tensor can be read."""
    for reader in shards.readers if isinstance(shards, ShardSet) else (shards,):
        assert check_shard(reader).faults == ()


def write_shard(folder: Path, shard: str, seeds: range) -> ShardIndex:
    with ShardWriter(folder, shard) as writer:
        for seed in reversed(seeds):  # the order in the tar is not the order of the index
            writer.write(f"c-{seed:04d}", make_sample(seed), {"id": f"ü {seed}", "long": "x" * 37 * seed})
        return writer.commit([f"c-{seed:04d}" for seed in seeds])


def make_shards(folder: Path) -> Manifest:
    """Two splits; sample i over all shards (train first) is `make_sample(i)` under the key c-<i>."""
    splits: dict[Split, SplitCounts] = {}
    seed = 0
    for split in SPLITS:
        indexes = []
        for number, count in enumerate(COUNTS[split]):
            indexes.append(write_shard(folder, shard_name(split, number), range(seed, seed + count)))
            seed += count
        splits[split] = SplitCounts.of(indexes)
    manifest = Manifest("toy", "d" * 64, "e" * 64, GEOMETRY, SPEC, splits, 0)
    manifest.save(folder)
    return manifest
