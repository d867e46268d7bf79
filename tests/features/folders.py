"""Whole data sets of random features, as a capture leaves them: for tests of what is done with folders."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from kvshot_ds.features.codec import CODES, SCALE, encode
from kvshot_ds.features.manifest import SPLITS, Manifest, Rejected, Split, SplitCounts, save_token_counts, shard_name
from kvshot_ds.features.shard import ShardWriter
from kvshot_ds.features.spec import FeatureSpec, scale_group, teacher_rows
from kvshot_ds.files import AnyPath, write_atomic, write_json
from tests.features.shards import GEOMETRY, SPEC, make_sample

TRAIN, HELDOUT = (range(3), range(3, 5)), (range(5, 7),)  # seeds of the samples of each shard
LEFT_OUT = Rejected("train.jsonl", 4, "2100 tokens, the target's context is 64; prep.max_length cuts", "ü")


def key_of(seed: int) -> str:
    return f"c-{seed:04d}"


def stored_sample(seed: int, spec: FeatureSpec) -> dict[str, torch.Tensor]:
    """`make_sample`, stored as `spec` says."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in make_sample(seed, spec).items():
        storage = spec.store.of(name)
        if storage not in CODES:
            found[name] = tensor
            continue
        data, scale = encode(tensor, storage, scale_group(name, GEOMETRY))
        assert scale is not None
        found |= {name: data, f"{name}{SCALE}": scale}
    return found


def make_folder(
    folder: AnyPath, train: Sequence[range] = TRAIN, heldout: Sequence[range] = HELDOUT, spec: FeatureSpec = SPEC, rejected: tuple[Rejected, ...] = (LEFT_OUT,)
) -> Manifest:
    """A data set whose samples have the given seeds. rejected: of the first train shard."""
    seeds: Mapping[Split, Sequence[range]] = {"train": train, "heldout": heldout}
    splits: dict[Split, SplitCounts] = {}
    counts = torch.zeros(GEOMETRY.vocab_size, dtype=torch.int64)
    for split in SPLITS:
        indexes = []
        for number, chosen in enumerate(seeds[split]):
            with ShardWriter(folder, shard_name(split, number)) as writer:
                for seed in reversed(chosen):  # the order in the tar is not the order of the index
                    writer.write(key_of(seed), stored_sample(seed, spec), {"id": f"ü {seed}"})
                indexes.append(writer.commit([key_of(seed) for seed in chosen], rejected if (split, number) == ("train", 0) else ()))
        splits[split] = SplitCounts.of(indexes)
    for sample in (make_sample(seed) for chosen in train for seed in chosen):
        for j in teacher_rows(sample["turn"].numpy()):
            counts[sample["tokens"][j + 1]] += 1
    save_token_counts(folder, counts)
    write_atomic(folder / "quarantine.jsonl", "".join(json.dumps(asdict(r), ensure_ascii=False) + "\n" for r in rejected))
    write_json(folder / "provenance.json", {"command": ["kvshot", "capture"], "versions": {}, "git_commit": None, "configuration": {"target": "d" * 64}})
    manifest = Manifest("toy", "d" * 64, "e" * 64, GEOMETRY, spec, splits, len(rejected))
    manifest.save(folder)
    return manifest


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of the folder that is part of the data set."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file() and not path.name.startswith(".")}
