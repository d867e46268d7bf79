"""The own format: a drafter folder with everything that is known of it, loadable by one line of Python. For every family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from kvshot_ds.drafters.base import Drafter
from kvshot_ds.drafters.build import DrafterInfo, load_drafter, save_drafter
from kvshot_ds.export.parts import dtype_fields, stored
from kvshot_ds.export.source import Source, stored_dtype


def write(folder: Path, source: Source, facts: Mapping[str, Any], dtype: torch.dtype) -> None:
    """model.safetensors and config.json: as a training run leaves them, and under `exported` where the drafter came from."""
    tensors = stored(source.tensors, dtype, source.folder)
    extra = {**source.info.extra, "architectures": [type(source.drafter).__name__], "model_type": "kvshot", **dtype_fields(dtype), "exported": dict(facts)}
    info: DrafterInfo = replace(source.info, extra=extra)
    save_drafter(folder, source.drafter, info, dtype, tensors)


def load(folder: Path | str, device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> Drafter:
    """The drafter of an export, a drafter folder or a run, in evaluation mode. dtype: null keeps the stored one.

    Before it drafts, `bind` lends it the target's embedding and head. Raises KvshotError if the folder holds no drafter.
    """
    place = Path(folder)
    return load_drafter(place, device, stored_dtype(place) if dtype is None else dtype)[0]
