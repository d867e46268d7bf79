"""The gradients of one optimizer step, here or as one rank of several: `python -m tests.training.one_step OUT RECIPE:STEP ...`"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from kvshot_ds.config import Recipe, load_recipe
from kvshot_ds.training.engine import connect
from kvshot_ds.training.loader import step_batches
from kvshot_ds.training.trainer import optimizer_step, prepare
from kvshot_ds.training.watch import Meter


def gradients(recipe: Recipe, step: int) -> dict[str, torch.Tensor]:
    """By parameter, as the optimizer is about to use them (before clipping) in optimizer step `step` (0-based) from the starting weights."""
    from deepspeed.utils import safe_get_full_grad

    world = connect(1, patience=30)
    s = prepare(recipe, world)
    keys = ("tokens", "turn", *s.shards.manifest.spec.serving(s.objective.required_features()))
    micro_batches = next(step_batches(s.shards, keys, s.schedule, world.rank, recipe.train.objective, step, 0, pin=False))
    found: dict[str, torch.Tensor] = {}
    plain = s.engine.step

    def engine_step() -> None:
        if s.engine.is_gradient_accumulation_boundary():
            found.update({name: safe_get_full_grad(p).clone() for name, p in s.drafter.named_parameters()})
        plain()

    s.engine.step = engine_step
    meter = Meter(recipe.train.objective.steps, world.device)
    optimizer_step(s, micro_batches, meter, 1)
    found["loss"] = meter.read()[0][5].sum()
    return found


def main(out: str, *wanted: str) -> None:
    from torch import distributed

    found: dict[str, torch.Tensor] = {}
    for name in wanted:
        file, step = name.rsplit(":", 1)
        found |= {f"{name}/{key}": value.contiguous() for key, value in gradients(load_recipe(Path(file)), int(step)).items()}
    if distributed.get_rank() == 0:
        save_file(found, out)
    distributed.barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
