"""Entry of `kvshot train`: one rank. Started alone, or once per rank by the deepspeed launcher, torchrun, Slurm's srun or Ray."""

from __future__ import annotations

import os
from typing import Any

from kvshot_ds.config import Recipe
from kvshot_ds.training.control import Control
from kvshot_ds.training.ranks import from_slurm


def run(recipe: Recipe, spent: dict[str, float] | None = None) -> dict[str, Any]:
    """Trains on this rank. May be called again in the same process. spent: gets the seconds of each phase.

    An error ends the rank, and the watchdogs of the others end them. Raises Preempted when asked to stop: the process is then deaf to SIGTERM and SIGUSR1.
    """
    os.environ.update(from_slurm(os.environ))
    with Control(recipe.train, spent) as control:  # first of all: what follows imports for seconds
        import torch

        os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
        from kvshot_ds.training.trainer import finished, train

        done = finished(recipe)
        if done is not None:
            if os.environ.get("RANK", "0") == "0":
                print(f"{recipe.name}: already trained ({done['steps']} steps) -> {recipe.run_dir / 'drafter'}")
            return done
        return train(recipe, control)
