"""The states of all random number generators of a rank, as tensors: a resumed run draws what the uninterrupted one would have drawn."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as save_tensors

from kvshot_ds.errors import KvshotError


def state() -> bytes:
    """Of torch (CPU, and this rank's CUDA device if there is one), numpy's global generator and Python's `random`, as a safetensors file."""
    version, words, gauss = random.getstate()
    own = np.random.get_state(legacy=False)
    tensors = {"torch": torch.get_rng_state(), "python": torch.tensor(words), "numpy": torch.from_numpy(own["state"]["key"].astype(np.int64))}
    if torch.cuda.is_available():
        tensors["cuda"] = torch.cuda.get_rng_state()
    rest = {"python": [version, gauss], "numpy": [own["bit_generator"], int(own["state"]["pos"]), int(own["has_gauss"]), float(own["gauss"])]}
    return save_tensors(tensors, {name: json.dumps(value) for name, value in rest.items()})


def restore(file: Path) -> None:
    """Sets them from a file that holds what `state` returned. Raises KvshotError if it does not."""
    try:
        with safe_open(file, "pt") as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}
            rest = {name: json.loads(value) for name, value in opened.metadata().items()}
        version, gauss = rest["python"]
        random.setstate((version, tuple(tensors["python"].tolist()), gauss))
        kind, position, has_gauss, normal = rest["numpy"]
        key = tensors["numpy"].numpy().astype(np.uint32)
        np.random.set_state({"bit_generator": kind, "state": {"key": key, "pos": position}, "has_gauss": has_gauss, "gauss": normal})
        torch.set_rng_state(tensors["torch"])
        if "cuda" in tensors and torch.cuda.is_available():
            torch.cuda.set_rng_state(tensors["cuda"])
    except (OSError, SafetensorError, KeyError, ValueError, TypeError, RuntimeError) as error:
        raise KvshotError(f"{file}: not the states of random number generators ({type(error).__name__}: {error}); remove this checkpoint's folder") from None
