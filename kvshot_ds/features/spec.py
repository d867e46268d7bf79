"""What is captured: the one contract between the writer (capture), the reader (loader) and the drafters.

Layer ids are 0-based and name the layer whose *output* (hidden) or *cache* (KV) is meant; nothing in this project
uses Hugging Face's `hidden_states` indices, where 0 is the embeddings (`hidden.{l}` is `hidden_states[l + 1]`).

One sample is one conversation of S tokens. Tensors, by key:

| key             | shape      | dtype | what |
|-----------------|------------|-------|------|
| tokens          | [S]        | int32 | token ids as the chat template renders them |
| turn            | [S]        | int32 | 0 = not supervised; n >= 1 = token of the n-th assistant turn (its end token included) |
| hidden.{l}      | [S, d]     | spec  | output of target layer l |
| key.{l}         | [S, G, D]  | spec  | key of layer l as the cache holds it: after k-norm, after RoPE at the absolute position |
| value.{l}       | [S, G, D]  | spec  | value of layer l as the cache holds it |
| teacher.hidden  | [R, d]     | spec  | hidden state entering the LM head (after the final norm), at the teacher rows |
| teacher.argmax  | [R]        | int32 | arg-max of the target's full-vocabulary logits, at the teacher rows |
| teacher.lse     | [R]        | fp32  | log-sum-exp of the target's full-vocabulary logits, at the teacher rows |

Teacher rows: positions j whose token and next token belong to the same assistant turn, ascending (`teacher_rows`).
The target's logits at j predict token j+1; a drafter is asked to predict token j+1 only when j >= t+1 lies in the
answer (token t+1, the bonus, comes from the target itself), so no other row ever needs a teacher.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from kvshot_ds.config import Dtype, FeatureConfig
from kvshot_ds.errors import ConfigError

DTYPES: dict[Dtype, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}


def eagle3_hidden_layers(num_layers: int) -> tuple[int, int, int]:
    """Outputs fused by EAGLE-3 (arXiv 2503.01840): 0-based layers (1, L//2 - 1, L - 4)."""
    return (1, num_layers // 2 - 1, num_layers - 4)


def eagle3_kv_layers(num_layers: int) -> tuple[int, int, int]:
    """The layers fed by the EAGLE-3 outputs (arXiv 2604.26412): (2, L//2, L - 3)."""
    return (2, num_layers // 2, num_layers - 3)


@dataclass(frozen=True)
class FeatureSpec:
    """Which features exist in a data set, or which ones a drafter needs.

    hidden_layers, kv_layers: ascending 0-based target layers. teacher: kind of teacher signal. dtype: of the
    stored features (ignored when specs are compared: any dtype serves).
    """

    hidden_layers: tuple[int, ...]
    kv_layers: tuple[int, ...]
    teacher: Literal["last_hidden", "none"]
    dtype: Dtype

    @classmethod
    def resolve(cls, config: FeatureConfig, num_layers: int) -> FeatureSpec:
        """The spec that `config` means for a target of `num_layers` layers. Raises ConfigError on layers out of range."""
        hidden = resolve_layers(config.hidden_layers, eagle3_hidden_layers, num_layers, "capture.features.hidden_layers")
        kv = resolve_layers(config.kv_layers, eagle3_kv_layers, num_layers, "capture.features.kv_layers")
        return cls(tuple(sorted(set(hidden))), tuple(sorted(set(kv))), config.teacher, config.dtype)

    def keys(self) -> tuple[str, ...]:
        """Keys of the feature tensors, in the order of the table above."""
        teacher = ("teacher.hidden", "teacher.argmax", "teacher.lse") if self.teacher == "last_hidden" else ()
        kv = tuple(key for layer in self.kv_layers for key in (f"key.{layer}", f"value.{layer}"))
        return (*(f"hidden.{layer}" for layer in self.hidden_layers), *kv, *teacher)

    def missing(self, needed: FeatureSpec) -> tuple[str, ...]:
        """Keys that `needed` asks for and this spec does not hold."""
        return tuple(key for key in needed.keys() if key not in self.keys())


def resolve_layers(layers: tuple[int, ...] | str, default: Callable[[int], tuple[int, ...]], num_layers: int, option: str) -> tuple[int, ...]:
    """`layers` with the names `eagle3` and `none` replaced. Raises ConfigError naming `option` when out of range."""
    chosen: tuple[int, ...] = () if layers == "none" else default(num_layers) if isinstance(layers, str) else layers
    bad = [layer for layer in chosen if not 0 <= layer < num_layers]
    if bad:
        raise ConfigError(f"{option}={layers}: layer(s) {bad} do not exist in a target of {num_layers} layers (0 to {num_layers - 1})")
    return chosen


def teacher_rows(turn: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
    """Positions j of one conversation with a teacher signal: turn[j] == turn[j + 1] != 0. `turn` [S] -> [R] ascending."""
    return np.flatnonzero((turn[:-1] > 0) & (turn[:-1] == turn[1:]))
