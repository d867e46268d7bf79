"""The one batch class: it leaves the loader, enters the objective, and is what evaluation reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch

from kvshot_ds.features.codec import Stored, decode
from kvshot_ds.features.spec import teacher_rows

_FIELDS = {"hidden": "hidden", "key": "keys_of", "value": "values_of", "query": "queries_of"}


@dataclass(frozen=True)
class Batch:
    """Conversations laid end to end, without padding. T = sum of lengths, R = sum of teacher rows.

    keys, lengths: one entry per conversation, on the host. tokens, turn: [T] int64. hidden[l]: [T, d].
    keys_of[l], values_of[l]: [T, G, D]. queries_of[l]: [R, A, D], un-rotated. teacher_index: [T] int64, row of the
    queries and teacher tensors that belongs to a position, -1 where there is none. teacher_argmax [R] int64, teacher_lse [R] fp32.
    Of the teacher as it was captured, one is there: teacher_hidden [R, d] (teacher_normed: it has passed the target's final norm), or
    the k best tokens, topk_ids [R, k] int64 and topk_logp [R, k], their log-probabilities. What is not there is empty.
    packed: features that are stored in 8 bits, by their key in spec.py's table, until `to` puts them into their fields.
    """

    keys: tuple[str, ...]
    lengths: tuple[int, ...]
    tokens: torch.Tensor
    turn: torch.Tensor
    hidden: dict[int, torch.Tensor]
    keys_of: dict[int, torch.Tensor]
    values_of: dict[int, torch.Tensor]
    queries_of: dict[int, torch.Tensor]
    teacher_index: torch.Tensor
    teacher_hidden: torch.Tensor
    teacher_argmax: torch.Tensor
    teacher_lse: torch.Tensor
    topk_ids: torch.Tensor
    topk_logp: torch.Tensor
    teacher_normed: bool = True
    packed: dict[str, Stored] = field(default_factory=dict)

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> Batch:
        """Tensors on `device`; features (hidden, KV, queries, teacher_hidden; not topk_logp) also cast to `dtype` if given. What is
        packed is decoded there, to bf16 first, as `ShardReader.read` does it."""

        def move(name: str, value: Any) -> Any:
            if isinstance(value, dict):
                return {k: v.to(device, dtype, non_blocking=True) for k, v in value.items()}
            if isinstance(value, torch.Tensor):
                return value.to(device, dtype if name == "teacher_hidden" else None, non_blocking=True)
            return value

        moved = {f.name: move(f.name, getattr(self, f.name)) for f in fields(self) if f.name != "packed"}
        for key, part in self.packed.items():
            kind, layer = key.split(".")
            moved[_FIELDS[kind]][int(layer)] = decode(part.to(device), torch.bfloat16).to(dtype or torch.bfloat16)
        return replace(self, **moved, packed={})


def collate(samples: Sequence[tuple[str, Mapping[str, torch.Tensor | Stored]]]) -> Batch:
    """Joins (key, tensors) samples, as a shard reader yields them (spec.py), into one batch; what comes in 8 bits stays so until `Batch.to`."""
    first = samples[0][1]
    lengths = tuple(len(_tensor(t, "tokens")) for _, t in samples)

    def cat(key: str) -> torch.Tensor:
        return _joined([_tensor(t, key) for _, t in samples])

    def layers(kind: str) -> dict[int, torch.Tensor]:
        return {int(key.split(".")[1]): cat(key) for key in first if key.startswith(f"{kind}.") and key not in packed}

    packed = {key: _packed([t[key] for _, t in samples]) for key, part in first.items() if isinstance(part, Stored)}
    index, used = [], 0
    for _, tensors in samples:
        rows = teacher_rows(_tensor(tensors, "turn").numpy())
        at = np.full(len(_tensor(tensors, "turn")), -1, dtype=np.int64)
        at[rows] = used + np.arange(len(rows))
        used += len(rows)
        index.append(at)
    empty = torch.empty(0)
    state = next((key for key in ("teacher.hidden", "teacher.unnormed") if key in first), None)
    best = "teacher.topk_ids" in first
    has_teacher = state is not None or best
    return Batch(
        keys=tuple(key for key, _ in samples),
        lengths=lengths,
        tokens=cat("tokens").long(),
        turn=cat("turn").long(),
        hidden=layers("hidden"),
        keys_of=layers("key"),
        values_of=layers("value"),
        queries_of=layers("query"),
        teacher_index=torch.from_numpy(np.concatenate(index)),
        teacher_hidden=cat(state) if state else empty,
        teacher_argmax=cat("teacher.argmax").long() if has_teacher else empty.long(),
        teacher_lse=cat("teacher.lse") if has_teacher else empty,
        topk_ids=cat("teacher.topk_ids").long() if best else empty.long(),
        topk_logp=cat("teacher.topk_logp").float() if best else empty,
        teacher_normed=state != "teacher.unnormed",
        packed=packed,
    )


def _tensor(tensors: Mapping[str, torch.Tensor | Stored], key: str) -> torch.Tensor:
    found = tensors[key]
    assert isinstance(found, torch.Tensor), key
    return found


def _packed(parts: Sequence[torch.Tensor | Stored]) -> Stored:
    codes, scales = zip(*parts, strict=True)
    # not every operation knows 8-bit floats; their bytes are joined as well
    return Stored(_joined([c.view(torch.int8) for c in codes]).view(codes[0].dtype), _joined(scales))


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat(list(parts)) if len(parts) > 1 else parts[0]  # one conversation is not copied
