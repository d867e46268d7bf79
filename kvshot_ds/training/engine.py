"""DeepSpeed, in one place: process group, configuration, engine."""

from __future__ import annotations

import atexit
import math
import os
import socket
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kvshot_ds.config import TrainConfig
from kvshot_ds.errors import ConfigError


@dataclass(frozen=True)
class World:
    """This process among the ranks. device: where it computes."""

    rank: int
    size: int
    device: torch.device


def connect(threads: int) -> World:
    """Joins the ranks started by the deepspeed launcher, torchrun or plain RANK/WORLD_SIZE/MASTER_* variables; alone without them.

    `threads`: CPU threads of this rank, 0 for torch's own choice. NCCL on CUDA, gloo on CPU.
    """
    if threads:
        torch.set_num_threads(threads)
    if "RANK" not in os.environ:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    # DeepSpeed calls collectives by names that torch is renaming; nothing a user could do about it.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    if missing := [name for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
        raise ConfigError(f"RANK is set but {', '.join(missing)} not: start the ranks with deepspeed or torchrun, or unset RANK for one rank")
    import deepspeed
    from deepspeed.utils import logger

    logger.setLevel("WARNING")
    if not torch.cuda.is_available():
        _skip_shm_build()
    if not torch.distributed.is_initialized():
        deepspeed.init_distributed(dist_backend="nccl" if torch.cuda.is_available() else "gloo", verbose=False)
        # DeepSpeed remembers its groups, so the process keeps them until it ends.
        atexit.register(lambda: torch.distributed.is_initialized() and torch.distributed.destroy_process_group())
    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return World(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), device)


def _skip_shm_build() -> None:
    """On CPU, init_distributed compiles a shared-memory collective (half a minute and a compiler) that training does not use."""
    try:
        import deepspeed.ops

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    except (ImportError, AttributeError, TypeError):
        return  # a private table: without it the build happens, nothing else changes


def precision(ds_config: dict[str, Any]) -> torch.dtype:
    """dtype of the trained module under a DeepSpeed configuration. Raises ConfigError for fp16, whose loss scaling is not supported."""
    if ds_config.get("fp16", {}).get("enabled"):
        raise ConfigError("train.ds_config enables fp16; use bf16 or fp32")
    return torch.bfloat16 if ds_config.get("bf16", {}).get("enabled") else torch.float32


def make_engine(module: torch.nn.Module, config: TrainConfig, ds_config: dict[str, Any], world: World, accumulation: int, steps: int) -> Any:
    """DeepSpeed engine over the trainable parameters of `module`, AdamW, warm-up and cosine over `steps` optimizer steps."""
    import deepspeed

    full = {
        **ds_config,
        "train_micro_batch_size_per_gpu": config.conversations_per_micro_batch,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": config.optim.clip,
        "steps_per_print": 10**9,
        "wall_clock_breakdown": False,
    }
    decay: list[torch.nn.Parameter] = []
    plain: list[torch.nn.Parameter] = []
    for parameter in module.parameters():
        if parameter.requires_grad:
            (decay if parameter.ndim >= 2 else plain).append(parameter)
    groups = [{"params": decay, "weight_decay": config.optim.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=config.optim.lr, betas=config.optim.betas)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_curve(steps, config.optim.warmup_fraction, config.optim.final_lr_fraction))
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, lr_scheduler=schedule, config=full, dist_init_required=False)
    return engine


def lr_curve(steps: int, warmup_fraction: float, final: float) -> Callable[[int], float]:
    """Factor on the peak learning rate by optimizer step: linear warm-up, then cosine to `final`."""
    warmup = max(1, round(steps * warmup_fraction))

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        done = (step - warmup) / max(1, steps - warmup)
        return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))

    return factor
