"""Entry of `kvshot train`: one rank. Started alone, or once per rank by the deepspeed launcher or torchrun."""

from __future__ import annotations

import os
from typing import Any

from kvshot_ds.config import Recipe


def run(recipe: Recipe) -> dict[str, Any]:
    """Trains on this rank. May be called again in the same process. An error ends the rank; the launcher then stops the others."""
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if _has_cuda() else "cpu")
    from kvshot_ds.training.trainer import finished, train

    done = finished(recipe)
    if done is not None:
        if os.environ.get("RANK", "0") == "0":
            print(f"{recipe.name}: already trained ({done['steps']} steps) -> {recipe.run_dir / 'drafter'}")
        return done
    return train(recipe)


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()
