"""Entry of `kvshot train`: one rank. Started alone, or once per rank by the deepspeed launcher or torchrun."""

from __future__ import annotations

import os
from typing import Any

from kvshot_ds.config import Recipe


def run(recipe: Recipe) -> dict[str, Any]:
    """Trains on this rank. May be called again in the same process. An error ends the rank; the launcher then stops the others."""
    import torch

    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
    from kvshot_ds.training.trainer import finished, train

    done = finished(recipe)
    if done is not None:
        if os.environ.get("RANK", "0") == "0":
            print(f"{recipe.name}: already trained ({done['steps']} steps) -> {recipe.run_dir / 'drafter'}")
        return done
    return train(recipe)
