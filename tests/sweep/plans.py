"""Recipes, targets and shards that exist by name alone: what planning a sweep takes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from kvshot_ds.config import FeatureConfig, Recipe
from kvshot_ds.describe import SHAPES
from kvshot_ds.features.manifest import Manifest, Sample, ShardIndex, SplitCounts
from kvshot_ds.features.spec import FeatureSpec
from kvshot_ds.geometry import Geometry
from kvshot_ds.sweep.contents import Data

TINY: Geometry = replace(
    SHAPES["qwen3-8b"], num_layers=8, hidden_size=32, heads=4, kv_heads=2, head_dim=8, intermediate_size=48, vocab_size=512, max_positions=1024
)


def recipe_of(work: Path, sweep: dict[str, Any], name: str = "mine", **train: Any) -> Recipe:
    """A recipe with a sweep over a target that is not there."""
    options = {"draft_vocab_size": 100, "conversations_per_step": 4, "objective": {"steps": 3}, **train}
    return Recipe.model_validate({"name": name, "work": work, "target": {"path": "targets/none", "device": "cpu"}, "train": options, "sweep": sweep})


def manifest(g: Geometry = TINY, digest: str = "target", **features: Any) -> Manifest:
    return Manifest("targets/none", digest, "tokenizer", g, FeatureSpec.resolve(FeatureConfig(**features), g), {}, 0)


def data(conversations: int = 20, digest: str = "shards", found: Manifest | None = None) -> Data:
    """Captured features, of which only the description is there; conversations of 40 to 59 tokens."""
    keys = tuple(f"{i:04d}" for i in range(conversations))
    return Data(found or manifest(), digest, keys, tuple((40 + i % 20, 10 + i % 5) for i in range(conversations)))


def write_shards(folder: Path, given: Data) -> None:
    """Manifest and index of `given` in `folder`, without the tar, which planning does not read."""
    samples = tuple(Sample(key, 4096 * i, 4096, *size) for i, (key, size) in enumerate(zip(given.keys, given.sizes, strict=True)))
    index = ShardIndex("train-000000.tar", 4096 * len(samples), "0" * 64, samples, ())
    folder.mkdir(parents=True)
    index.save(folder)
    replace(given.manifest, splits={"train": SplitCounts.of([index])}).save(folder)
