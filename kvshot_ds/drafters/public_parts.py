"""A public drafter in our terms, and the checks that all layouts share: its tensors, its dtype, the target it names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import Any, Literal

import torch

from kvshot_ds.config import DFlashConfig, HiddenOnlyConfig
from kvshot_ds.drafters.cost import weightless
from kvshot_ds.drafters.readings import Readings
from kvshot_ds.errors import ConfigError
from kvshot_ds.geometry import Geometry

EMBEDDING = "embed_tokens.weight"
_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class MadeFor:
    """The target that a checkpoint names, as far as it does. name: a path or the name of a repository; digest: `target.weights_digest`."""

    name: str | None = None
    architectures: tuple[str, ...] = ()
    digest: str | None = None


@dataclass(frozen=True)
class Public:
    """A public checkpoint in our terms.

    layout: whose names and conventions it follows. geometry: the drafter's own heads, MLP, rotary embedding and norms; layers, width and
    vocabulary are the target's. tensors: all of the drafter's state under our names, as the checkpoint has them (d2t and t2d filled in where
    it has none). dtype: the narrowest that holds every tensor exactly. readings: what its layer ids may mean; config holds what was chosen.
    left_out: tensor of the checkpoint -> why it is not used. embedding: the checkpoint's own token embedding [V, d], if it has one (left out);
    trained_embedding: it says that it was trained. notes: what a user should know. measured: how the layer ids were settled, if by measuring.
    """

    format: Literal["eagle3", "dflash"]
    layout: str
    config: HiddenOnlyConfig | DFlashConfig
    geometry: Geometry
    draft_vocab_size: int
    tensors: dict[str, torch.Tensor]
    dtype: torch.dtype
    readings: Readings
    left_out: dict[str, str] = field(default_factory=dict)
    embedding: torch.Tensor | None = None
    trained_embedding: bool = False
    made_for: MadeFor = MadeFor()
    notes: tuple[str, ...] = ()
    measured: dict[str, Any] | None = None

    def reading(self, layers: tuple[int, ...]) -> Public:
        """The same drafter, fusing the outputs of `layers`."""
        return replace(self, config=self.config.model_copy(update={"hidden_layers": layers}))


def order_notes(layers: Sequence[int] | str) -> tuple[str, ...]:
    """What a user should know of fused layers that are not in ascending order."""
    if isinstance(layers, str) or list(layers) == sorted(layers):
        return ()
    return (f"fused layers {list(layers)} are taken in the order given, as trainers do; engines hand them out in ascending order",)


def narrowest(tensors: Mapping[str, torch.Tensor], folder: Path) -> torch.dtype:
    """The narrowest dtype that holds all floating-point tensors exactly. Raises ConfigError for quantised ones."""
    floats = {name: tensor.dtype for name, tensor in tensors.items() if name not in ("d2t", "t2d")}
    if wrong := sorted(f"{name} ({dtype})" for name, dtype in floats.items() if dtype not in _FLOATS):
        raise ConfigError(f"{folder}: expected fp16, bf16, fp32 or fp64 weights, found {', '.join(wrong[:5])}; import the checkpoint before quantisation")
    return reduce(torch.promote_types, floats.values())


def fitted(public: Public, theirs: Callable[[str], str], folder: Path) -> Public:
    """`public` if its tensors are exactly those of the drafter; else raises ConfigError. theirs: our name -> the checkpoint's."""
    wanted = {name: tensor.shape for name, tensor in weightless(public.config, public.geometry, public.draft_vocab_size).state_dict().items()}
    wrong = [
        f"{theirs(name)} {tuple(public.tensors[name].shape)} instead of {tuple(shape)}"
        for name, shape in wanted.items()
        if name in public.tensors and public.tensors[name].shape != shape
    ]
    missing = sorted(theirs(name) for name in wanted.keys() - public.tensors.keys())
    unexpected = sorted(theirs(name) for name in public.tensors.keys() - wanted.keys())
    problems = [f"{what} {', '.join(found)}" for what, found in (("missing", missing), ("unexpected", unexpected), ("other shape:", wrong)) if found]
    if problems:
        raise ConfigError(f"{folder}: the weights do not fit config.json: {'; '.join(problems)}")
    return public
