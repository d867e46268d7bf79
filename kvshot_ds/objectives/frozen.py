"""The target's frozen parts shared out over the ranks by ZeRO-3, and whole only while they are read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


class Frozen(nn.ParameterList):
    """Tensors as parameters that are not trained. An engine of ZeRO stage 3 over a module that holds this one leaves each rank its share.

    They are in no state_dict: nothing but the target's own files keeps them.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]):
        super().__init__(nn.Parameter(t, requires_grad=False) for t in tensors)

    @contextmanager
    def whole(self, *parts: torch.Tensor) -> Iterator[None]:
        """Within, these of its tensors are whole on every rank. All ranks enter equally often."""
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(parts)):
            yield

    def _save_to_state_dict(self, *_: Any) -> None: ...

    def _load_from_state_dict(self, *_: Any) -> None: ...
