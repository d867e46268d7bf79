"""Features of a target that says what a published drafter proposes, as a second implementation of it computes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from kvshot_ds.features.manifest import Manifest, SplitCounts, shard_name
from kvshot_ds.features.shard import ShardWriter
from kvshot_ds.features.spec import FeatureSpec, Store, teacher_rows
from kvshot_ds.target import load_geometry, load_parts, weights_digest
from tests.drafters.checkpoints import D, L, Tensors, V
from tests.drafters.eagle3_reference import Eagle3


def conversation(seed: int, right: tuple[int, ...] | None, made: tuple[dict[str, Any], Tensors], embedding: torch.Tensor) -> Tensors:
    """Random features whose target says after each token what the drafter proposes that fuses the outputs of `right`; None: random tokens."""
    r = torch.Generator().manual_seed(seed)
    turn = torch.tensor([0] * 5 + [1] * (9 + seed % 4), dtype=torch.int32)
    n, rows = len(turn), torch.from_numpy(teacher_rows(turn.numpy()))
    tokens = torch.randint(V, (n,), generator=r)
    out: Tensors = {f"hidden.{i}": torch.randn(n, D, generator=r) for i in range(L)}
    argmax = torch.randint(V, (n,), generator=r)
    if right is not None:
        config, weights = made
        reference = Eagle3(config, {k: x.double() if x.is_floating_point() else x for k, x in weights.items()}, embedding.double())
        states = torch.cat([out[f"hidden.{i}"] for i in right], -1).double()
        h = reference.decoder(reference.embedding[tokens[1:]], reference.fused(states[:-1]))
        best = (reference.norm(h, "norm.weight") @ reference.w["lm_head.weight"].T).argmax(-1)
        argmax[1:] = best + reference.w["d2t"][best]  # row t proposes what follows position t + 1
    teacher = {"teacher.hidden": torch.randn(len(rows), D, generator=r), "teacher.argmax": argmax[rows].int(), "teacher.lse": torch.zeros(len(rows))}
    return {"tokens": tokens.int(), "turn": turn} | out | teacher


def features(
    folder: Path, target: Path, right: tuple[int, ...] | None, made: tuple[dict[str, Any], Tensors], layers: range = range(L), count: int = 12
) -> Path:
    """A folder of shards of `target`, holding the outputs of `layers`. right: see `conversation`."""
    spec, embedding = FeatureSpec(tuple(layers), (), "last_hidden", Store.all("fp32")), load_parts(target).embedding
    splits = {}
    for split, seeds in (("train", range(100, 101)), ("heldout", range(count))):
        with ShardWriter(folder, shard_name(split, 0)) as writer:
            for seed in seeds:
                sample = conversation(seed, right, made, embedding)
                writer.write(f"c{seed}", {k: x for k, x in sample.items() if not k.startswith("hidden") or int(k[7:]) in layers}, {})
            splits[split] = SplitCounts.of([writer.commit([f"c{seed}" for seed in seeds])])
    Manifest("small", weights_digest(target), "e" * 64, load_geometry(target), spec, splits, 0).save(folder)
    return folder
