"""What is captured: the one contract between the writer (capture), the reader (loader) and the drafters.

Layer ids are 0-based and name the layer whose *output* (hidden) or *cache* (KV) is meant; nothing in this project
uses Hugging Face's `hidden_states` indices, where 0 is the embeddings (`hidden.{l}` is `hidden_states[l + 1]`).

One sample is one conversation of S tokens. Tensors, by key:

| key                 | shape      | stored as | what |
|---------------------|------------|-----------|------|
| tokens              | [S]        | int32     | token ids as the chat template renders them |
| turn                | [S]        | int32     | 0 = not supervised; n >= 1 = token of the n-th assistant turn (its end token included) |
| hidden.{l}          | [S, d]     | hidden    | output of target layer l |
| key.{l}             | [S, G, D]  | kv        | key of layer l as the cache holds it: after k-norm, after RoPE at the absolute position |
| value.{l}           | [S, G, D]  | kv        | value of layer l as the cache holds it |
| query.{l}           | [R, A, D]  | query     | query of layer l as its attention makes it, before RoPE (after q-norm, if any), at the teacher rows |
| teacher.hidden      | [R, d]     | teacher   | teacher=last_hidden: hidden state entering the LM head (after the final norm), at the teacher rows |
| teacher.unnormed    | [R, d]     | teacher   | teacher=last_hidden_unnormed: the same before the final norm |
| teacher.topk_ids    | [R, k]     | int32     | teacher=top_k: ids of the k best logits, best first, of equal ones the smaller id first |
| teacher.topk_logp   | [R, k]     | teacher   | teacher=top_k: their log-probabilities, logit - log-sum-exp over the full vocabulary |
| teacher.argmax      | [R]        | int32     | arg-max of the target's full-vocabulary logits, at the teacher rows |
| teacher.lse         | [R]        | fp32      | log-sum-exp of the target's full-vocabulary logits, at the teacher rows |

"stored as" names the field of `Store` that says how. What is stored as fp8 or int8 has its scales beside it, under
`<key>.scale`: one for each token and head (of a hidden state, each group of D channels); codec.py has the formats.

Teacher rows: positions j whose token and next token belong to the same assistant turn, ascending (`teacher_rows`).
The target's logits at j predict token j+1; a drafter is asked to predict token j+1 only when j >= t+1 lies in the
answer (token t+1, the bonus, comes from the target itself), so no other row ever needs a teacher. Queries are kept at
the same rows, with and without a teacher: turned to position j, they give the attention of the target's own forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from kvshot_ds.config import Dtype, FeatureConfig, Storage
from kvshot_ds.errors import ConfigError
from kvshot_ds.geometry import Geometry

DTYPES: dict[Dtype, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}
TeacherKind = Literal["last_hidden", "last_hidden_unnormed", "top_k", "none"]
_TEACHERS: dict[TeacherKind, tuple[str, ...]] = {
    "last_hidden": ("teacher.hidden",),
    "last_hidden_unnormed": ("teacher.unnormed",),
    "top_k": ("teacher.topk_ids", "teacher.topk_logp"),
    "none": (),
}


def eagle3_hidden_layers(num_layers: int) -> tuple[int, int, int]:
    """Outputs fused by EAGLE-3 (arXiv 2503.01840): 0-based layers (1, L//2 - 1, L - 4)."""
    return (1, num_layers // 2 - 1, num_layers - 4)


def eagle3_kv_layers(num_layers: int) -> tuple[int, int, int]:
    """The layers fed by the EAGLE-3 outputs (arXiv 2604.26412): (2, L//2, L - 3)."""
    return (2, num_layers // 2, num_layers - 3)


@dataclass(frozen=True)
class Store:
    """How each kind of feature is stored, as `StoreConfig`."""

    hidden: Storage
    kv: Storage
    query: Storage
    teacher: Dtype

    @classmethod
    def all(cls, dtype: Dtype) -> Store:
        return cls(dtype, dtype, dtype, dtype)

    def of(self, key: str) -> Storage | None:
        """Storage of the feature `key`, None for what always has the dtype of the table."""
        kind = key.split(".")[0]
        if kind == "teacher":
            return self.teacher if key in ("teacher.hidden", "teacher.unnormed", "teacher.topk_logp") else None
        kinds: dict[str, Storage] = {"hidden": self.hidden, "key": self.kv, "value": self.kv, "query": self.query}
        return kinds.get(kind)


@dataclass(frozen=True)
class FeatureSpec:
    """Which features exist in a data set, or which ones a drafter needs.

    hidden_layers, kv_layers, query_layers: ascending 0-based target layers. teacher: kind of teacher signal, teacher_k: logits
    kept by top_k (0 for the others). Of what a drafter needs, store does not count, and any kind of teacher stands for any other.
    """

    hidden_layers: tuple[int, ...]
    kv_layers: tuple[int, ...]
    teacher: TeacherKind
    store: Store
    query_layers: tuple[int, ...] = ()
    teacher_k: int = 0

    @classmethod
    def resolve(cls, config: FeatureConfig, g: Geometry) -> FeatureSpec:
        """The spec that `config` means for a target. Raises ConfigError on layers out of range, or a teacher that the target cannot give."""
        hidden = resolve_hidden(config.hidden_layers, g.num_layers, "capture.features.hidden_layers")
        kv = resolve_kv(config.kv_layers, g.num_layers, "capture.features.kv_layers")
        query = resolve_kv(config.query_layers, g.num_layers, "capture.features.query_layers")
        if config.teacher == "last_hidden_unnormed" and g.layer_norm:
            raise ConfigError(
                f"capture.features.teacher=last_hidden_unnormed: the final norm of a {g.family} target is a LayerNorm with a bias, which training "
                "does not apply; use last_hidden or top_k"
            )
        if config.teacher == "top_k" and config.teacher_k > g.vocab_size:
            raise ConfigError(f"capture.features.teacher_k={config.teacher_k}: the target has {g.vocab_size} tokens; use at most so many, or last_hidden")
        k, store = config.teacher_k if config.teacher == "top_k" else 0, config.store
        chosen = Store(store.hidden, store.kv, store.query, store.teacher)
        return cls(_ascending(hidden), _ascending(kv), config.teacher, chosen, _ascending(query), k)

    def keys(self) -> tuple[str, ...]:
        """Keys of the features, in the order of the table above; scales are not named."""
        teacher = (*_TEACHERS[self.teacher], "teacher.argmax", "teacher.lse") if self.teacher != "none" else ()
        kv = tuple(key for layer in self.kv_layers for key in (f"key.{layer}", f"value.{layer}"))
        return (*(f"hidden.{layer}" for layer in self.hidden_layers), *kv, *(f"query.{layer}" for layer in self.query_layers), *teacher)

    def missing(self, needed: FeatureSpec) -> tuple[str, ...]:
        """Keys that `needed` asks for and this spec does not hold; "a teacher" if it holds none, as any kind would do."""
        has = set(self.keys())
        lacks = tuple(key for key in needed.keys() if key not in has and not key.startswith("teacher."))
        return (*lacks, "a teacher") if self.teacher == "none" != needed.teacher else lacks

    def serving(self, needed: FeatureSpec) -> tuple[str, ...]:
        """Keys of this data set that what needs `needed` reads: its layers, and the teacher as it was captured."""
        wanted = set(needed.keys())
        return tuple(key for key in self.keys() if (needed.teacher != "none" if key.startswith("teacher.") else key in wanted))

    def shapes(self, g: Geometry, tokens: int, rows: int) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor of a sample of S = `tokens` tokens and R = `rows` teacher rows, without scales."""
        by_kind: dict[str, tuple[int, ...]] = {
            "hidden": (tokens, g.hidden_size),
            "key": (tokens, g.kv_heads, g.head_dim),
            "value": (tokens, g.kv_heads, g.head_dim),
            "query": (rows, g.heads, g.head_dim),
            "teacher.hidden": (rows, g.hidden_size),
            "teacher.unnormed": (rows, g.hidden_size),
            "teacher.topk_ids": (rows, self.teacher_k),
            "teacher.topk_logp": (rows, self.teacher_k),
            "teacher.argmax": (rows,),
            "teacher.lse": (rows,),
        }
        found: dict[str, tuple[int, ...]] = {"tokens": (tokens,), "turn": (tokens,)}
        return found | {key: by_kind[key if key in by_kind else key.split(".")[0]] for key in self.keys()}

    def dtype(self, key: str) -> torch.dtype:
        """dtype in which the reader returns the feature `key`: as stored, and bf16 for fp8 and int8."""
        storage = self.store.of(key)
        if storage is None:
            return torch.float32 if key == "teacher.lse" else torch.int32
        return torch.float32 if storage == "fp32" else torch.bfloat16


def scale_group(key: str, g: Geometry) -> int:
    """Channels under one scale of the feature `key`: the size of a head, or, of a hidden state, the largest part of it that divides d."""
    return gcd(g.hidden_size, g.head_dim) if key.startswith("hidden.") else g.head_dim


def dflash_hidden_layers(num_layers: int, depth: int) -> tuple[int, ...]:
    """Outputs fused by DFlash (arXiv 2602.06036) with `depth` draft layers: as many, evenly from 1 to L - 3; a single one: L//2."""
    return (num_layers // 2,) if depth == 1 else tuple(round(1 + i * (num_layers - 4) / (depth - 1)) for i in range(depth))


def resolve_hidden(layers: Sequence[int] | str, num_layers: int, option: str, depth: int | None = None) -> tuple[int, ...]:
    """Layers whose outputs are meant, in the order given: a list, or `eagle3`, `last`, `all`, `none`, `dflash` (with `depth` draft layers).

    On a shallow target layers of `eagle3` may coincide; they are then read twice, so that the shape of a drafter does not
    hang on the depth of its target. Raises ConfigError naming `option`: a layer does not exist, or `dflash` has fewer
    layers between 1 and L - 3 than draft layers.
    """
    names = {"eagle3": eagle3_hidden_layers(num_layers), "last": (num_layers - 1,)}
    if layers == "dflash" and depth is not None:
        if depth > max(1, num_layers - 3):
            raise ConfigError(
                f"{option}=dflash needs as many layers as draft layers: a target of {num_layers} has fewer than {depth} from 1 to {num_layers - 3}; "
                "lower drafter.depth, or name the layers"
            )
        names["dflash"] = dflash_hidden_layers(num_layers, depth)
    return _resolve(layers, names, num_layers, option)


def resolve_kv(layers: Sequence[int] | str, num_layers: int, option: str) -> tuple[int, ...]:
    """Layers whose keys and values (or queries) are meant, in the order given: a list, or `eagle3`, `all`, `none`.

    As with `resolve_hidden`, layers of `eagle3` may coincide. Raises ConfigError naming `option`: a layer does not exist.
    """
    return _resolve(layers, {"eagle3": eagle3_kv_layers(num_layers)}, num_layers, option)


def _resolve(layers: Sequence[int] | str, names: dict[str, tuple[int, ...]], num_layers: int, option: str) -> tuple[int, ...]:
    names = {"all": tuple(range(num_layers)), "none": (), **names}
    chosen = names[layers] if isinstance(layers, str) else tuple(layers)
    bad = [layer for layer in chosen if not 0 <= layer < num_layers]
    if bad:
        raise ConfigError(f"{option}={layers}: layer(s) {bad} do not exist in a target of {num_layers} layers (0 to {num_layers - 1})")
    return chosen


def _ascending(layers: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted(set(layers)))


def teacher_rows(turn: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
    """Positions j of one conversation with a teacher signal: turn[j] == turn[j + 1] != 0. `turn` [S] -> [R] ascending."""
    return np.flatnonzero((turn[:-1] > 0) & (turn[:-1] == turn[1:]))
