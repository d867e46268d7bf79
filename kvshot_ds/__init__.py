"""kvshot-ds: train speculative-decoding drafters that reuse the target's hidden states and KV cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from kvshot_ds.drafters.base import Drafter

__version__ = "0.1.0"


def load_drafter(folder: str | Path, device: str | torch.device = "cpu", dtype: torch.dtype | None = None) -> Drafter:
    """The drafter in an export, a drafter folder or a run, in evaluation mode; dtype: None keeps the stored one.

    Before it drafts, `drafter.bind(embedding, head)` lends it those of its target. Raises KvshotError if the folder holds no drafter.
    """
    from kvshot_ds.export.own import load

    return load(folder, device, dtype)
