"""What tests of resuming make of a rank: it dies on purpose, writes down what it trains on, and shows the inside of its engine."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import deepspeed
from deepspeed.utils import lazy_init_hp_params_optimizer_state, safe_get_full_fp32_param, safe_get_full_optimizer_state
from safetensors.torch import save_file

from kvshot_ds.config import Recipe
from kvshot_ds.training import trainer
from kvshot_ds.training.checkpoint import Checkpoints
from kvshot_ds.training.launch import run


def train(recipe: Recipe, dies_before: int = 0) -> dict[str, Any]:
    """Trains, with notes on each step and each state saved or loaded in `WORK/seen`. Kills itself when it is about to make the step `dies_before`."""
    seen = recipe.work / "seen" / recipe.name
    seen.mkdir(parents=True, exist_ok=True)
    rank, plain, save, load = os.environ["RANK"], trainer.optimizer_step, Checkpoints.save, Checkpoints.load

    def step(s: trainer.Setup, micro_batches: list[Any], meter: Any, number: int) -> None:
        if number == dies_before:
            os.kill(os.getpid(), signal.SIGKILL)
        with (seen / f"{s.world.size}-{rank}.jsonl").open("a") as file:
            keys = [key for m in micro_batches if m.counted for key in m.batch.keys]
            file.write(json.dumps({"step": number, "keys": keys}) + "\n")
        plain(s, micro_batches, meter, number)

    def saved(self: Checkpoints, progress: Any, best: bool = False) -> None:
        save(self, progress, best)
        _show(self.engine, seen / f"saved-{progress.step}")

    def loaded(self: Checkpoints, *arguments: Any) -> Any:
        progress = load(self, *arguments)
        if progress.step:
            _show(self.engine, seen / f"loaded-{progress.step}-{self.world.size}")
        return progress

    trainer.optimizer_step, Checkpoints.save, Checkpoints.load = step, saved, loaded
    return run(recipe)


def _show(engine: Any, file: Path) -> None:
    """Writes master weights, weights, Adam's moments, counts and settings of every group, the learning rates and the schedule, the same at every stage."""
    optimizer, tensors, stage = engine.optimizer, {}, engine.zero_optimization_stage()
    for lp, hp in zip(getattr(optimizer, "bit16_groups", ()), getattr(optimizer, "single_partition_of_fp32_groups", ()), strict=True):
        lazy_init_hp_params_optimizer_state(lp, hp, engine.basic_optimizer.state)  # DeepSpeed links the first group alone before its first load
    named = [(name, p) for name, p in engine.module.named_parameters() if p.requires_grad]
    masters = {}
    if hasattr(optimizer, "fp32_groups"):  # ZeRO-0 in bf16
        for pair in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
            masters.update(zip(*pair, strict=True))
    for name, p in named:
        for key in ("exp_avg", "exp_avg_sq"):
            tensors[f"{key} {name}"] = safe_get_full_optimizer_state(p, key) if stage else engine.basic_optimizer.state[masters.get(p, p)][key]
        tensors[f"master {name}"] = safe_get_full_fp32_param(p) if stage else masters.get(p, p)
    with deepspeed.zero.GatheredParameters([p for _, p in named], enabled=stage == 3):
        tensors |= {f"weight {name}": p for name, p in named}
        tensors = {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}
    counts = {float(state["step"]) for state in engine.basic_optimizer.state.values() if "step" in state}
    groups = [{k: v for k, v in group.items() if k != "params"} for group in engine.basic_optimizer.param_groups]
    schedule = {k: v for k, v in engine.lr_scheduler.state_dict().items() if k != "lr_lambdas"}
    if engine.global_rank == 0:
        save_file(tensors, file.with_suffix(".safetensors"))
        file.with_suffix(".json").write_text(json.dumps([sorted(counts), groups, schedule, engine.global_steps], sort_keys=True))
