"""A target's shape without the target: random weights of the parts that drafters borrow, and random features of it, for benchmarks of training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from kvshot_ds.features.manifest import Manifest, SplitCounts, save_token_counts, shard_name
from kvshot_ds.features.shard import ShardWriter
from kvshot_ds.features.spec import FeatureSpec, teacher_rows
from kvshot_ds.files import write_json
from kvshot_ds.geometry import Geometry
from kvshot_ds.target import load_geometry, weights_digest

_PER_SHARD = 64


def write_target(folder: Path, g: Geometry) -> Path:
    """A folder with config.json, embedding (the head is tied to it) and last norm of a Llama of geometry `g`; its layers are not there."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": g.hidden_size, "num_hidden_layers": g.num_layers,
        "num_attention_heads": g.heads, "num_key_value_heads": g.kv_heads, "head_dim": g.head_dim, "intermediate_size": g.intermediate_size,
        "vocab_size": g.vocab_size, "rms_norm_eps": g.norm_eps, "max_position_embeddings": g.max_positions, "tie_word_embeddings": True,
        "rope_parameters": g.rope,
    }  # fmt: skip
    write_json(folder / "config.json", config)
    embedding = 0.05 * torch.randn(g.vocab_size, g.hidden_size, generator=torch.Generator().manual_seed(0))
    save_file({"model.embed_tokens.weight": embedding, "model.norm.weight": torch.ones(g.hidden_size)}, folder / "model.safetensors")
    return folder


def write_features(folder: Path, target: Path, spec: FeatureSpec, lengths: Sequence[int], supervised: float, heldout: Sequence[int] = ()) -> Path:
    """A train split of conversations of `lengths` tokens, of each the last share `supervised` an answer, and a held-out one where `heldout` has lengths.

    The values are random and alike in all.
    """
    g = load_geometry(target)
    random, counts, splits = torch.Generator().manual_seed(0), torch.zeros(g.vocab_size, dtype=torch.int64), dict[str, SplitCounts]()
    for split, of_split in {"train": lengths, **({"heldout": heldout} if heldout else {})}.items():
        indexes = []
        for number, first in enumerate(range(0, len(of_split), _PER_SHARD)):
            with ShardWriter(folder, shard_name(split, number)) as writer:
                keys = [f"{split[0]}-{i:06d}" for i in range(first, min(len(of_split), first + _PER_SHARD))]
                for key, length in zip(keys, of_split[first:], strict=False):
                    sample = _sample(spec, g, length, round(length * (1 - supervised)), random)
                    if split == "train":
                        counts += sample["tokens"].long().bincount(minlength=g.vocab_size)
                    writer.write(key, sample, {"id": key})
                indexes.append(writer.commit(keys))
        splits[split] = SplitCounts.of(indexes)
    save_token_counts(folder, counts)
    Manifest("synthetic", weights_digest(target), "0" * 64, g, spec, splits, 0).save(folder)
    return folder


def _sample(spec: FeatureSpec, g: Geometry, length: int, prompt: int, random: torch.Generator) -> dict[str, torch.Tensor]:
    turn = (torch.arange(length) >= prompt).int()
    rows = len(teacher_rows(turn.numpy()))
    found = {"tokens": torch.randint(g.vocab_size, (length,), generator=random, dtype=torch.int32), "turn": turn}
    for key, shape in spec.shapes(g, length, rows).items():
        if key not in found:
            found[key] = (
                torch.randn(shape, generator=random).to(spec.dtype(key)) if spec.dtype(key).is_floating_point else torch.zeros(shape, dtype=spec.dtype(key))
            )
    # About what the head makes of states like these, so that no row is without a loss.
    spread = 0.05 * g.hidden_size**0.5
    return found | {"teacher.argmax": found["tokens"][-rows:].clone(), "teacher.lse": torch.full((rows,), spread**2 / 2 + math.log(g.vocab_size))}
