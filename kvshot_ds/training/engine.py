"""DeepSpeed, in one place: process group, configuration, engine."""

from __future__ import annotations

import atexit
import os
import socket
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from pydantic import ValidationError

from ds_configs import faults
from kvshot_ds.config import OptimConfig, TrainConfig
from kvshot_ds.errors import ConfigError
from kvshot_ds.objectives.objective import Objective
from kvshot_ds.training.optim import lr_curve, parameter_groups

# DeepSpeed's classes of configuration sections, by the names that pydantic gives them in its errors.
_SECTIONS = {
    "DeepSpeedZeroConfig": "zero_optimization",
    "DeepSpeedZeroOffloadOptimizerConfig": "zero_optimization.offload_optimizer",
    "DeepSpeedZeroOffloadParamConfig": "zero_optimization.offload_param",
    "DeepSpeedBF16Config": "bf16",
    "DeepSpeedFP16Config": "fp16",
}


_side: dict[str, tuple[Any, Any]] = {}  # purpose -> (the group of all ranks that it was made from, the group)


@dataclass(frozen=True)
class World:
    """This process among the ranks. device: where it computes."""

    rank: int
    size: int
    device: torch.device


def connect(threads: int, patience: float) -> World:
    """Joins the ranks started by the deepspeed launcher, torchrun, Ray Train or plain RANK/WORLD_SIZE/MASTER_* variables; alone without them.

    `threads`: CPU threads of this rank, 0 for torch's own choice. NCCL on CUDA, gloo on CPU. patience: how long a collective may wait for
    a rank [minutes]: longer than the watchdog, which knows more of why it waits. A process group of others keeps its own.
    """
    if threads:
        torch.set_num_threads(threads)
    joined = torch.distributed.is_initialized()
    if "RANK" not in os.environ and not joined:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    # DeepSpeed calls collectives by names that torch is renaming; nothing a user could do about it.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    needed = ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", *(("LOCAL_RANK",) if torch.cuda.is_available() else ()))
    if missing := [name for name in needed if name not in os.environ and not joined]:
        raise ConfigError(f"RANK is set but {', '.join(missing)} not: start the ranks with deepspeed or torchrun, or unset RANK for one rank")
    import deepspeed
    from deepspeed.utils import groups, logger

    logger.setLevel("WARNING")
    if not torch.cuda.is_available():
        _skip_shm_build()
    local = int(os.environ.setdefault("LOCAL_RANK", "0"))  # the device; without it DeepSpeed looks for MPI
    device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # Also where torch's process group exists: DeepSpeed has a table of its own, which this fills.
    limit = timedelta(minutes=patience)
    deepspeed.init_distributed("nccl" if device.type == "cuda" else "gloo", verbose=False, timeout=limit)
    # ZeRO's collectives run in a copy of the group, to which torch gives its own default: 10 minutes with NCCL.
    torch.distributed.distributed_c10d._set_pg_timeout(limit, groups._get_data_parallel_group())
    if not joined:
        # DeepSpeed remembers its groups, so the process keeps them until it ends.
        atexit.register(lambda: torch.distributed.is_initialized() and torch.distributed.destroy_process_group())
    return World(torch.distributed.get_rank(), torch.distributed.get_world_size(), device)


def side_group(purpose: str, patience: timedelta | None = None) -> Any:
    """A gloo group of all ranks beside the training's own, so that nothing in it waits in line behind the training. All ranks call it.

    One for each purpose in the life of a process, with its threads and connections: a process may train many times.
    """
    world = torch.distributed.group.WORLD
    if _side.get(purpose, (None, None))[0] is not world:
        _side[purpose] = world, torch.distributed.new_group(backend="gloo", timeout=patience)
    return _side[purpose][1]


def _skip_shm_build() -> None:
    """On CPU, init_distributed compiles a shared-memory collective (half a minute and a compiler) that training does not use."""
    try:
        import deepspeed.ops

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    except (ImportError, AttributeError, TypeError):
        return  # a private table: without it the build happens, nothing else changes


def precision(ds_config: dict[str, Any]) -> torch.dtype:
    """dtype of the trained module under a DeepSpeed configuration."""
    return torch.bfloat16 if ds_config.get("bf16", {}).get("enabled") else torch.float32


def make_engine(objective: Objective, config: TrainConfig, ds_config: dict[str, Any], accumulation: int, steps: int) -> Any:
    """DeepSpeed engine over the trainable parameters of `objective`: AdamW by groups and the learning-rate schedule over `steps` optimizer steps.

    Raises ConfigError, naming file and field, for what DeepSpeed does not accept in `ds_config`.
    """
    import deepspeed

    full = {
        **ds_config,
        "train_micro_batch_size_per_gpu": config.conversations_per_micro_batch,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": config.optim.clip,
        "steps_per_print": 10**9,
        "wall_clock_breakdown": False,
    }
    groups = parameter_groups(objective.drafter.named_parameters(), config.optim)
    offloaded = (ds_config.get("zero_optimization", {}).get("offload_optimizer") or {}).get("device", "none") != "none"
    optimizer = _adamw(groups, config.optim, offloaded)
    if offloaded:
        full["zero_force_ds_cpu_optimizer"] = not isinstance(optimizer, torch.optim.AdamW)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_curve(steps, config.optim))
    with _refusals(config.ds_config):
        engine, *_ = deepspeed.initialize(model=objective, optimizer=optimizer, lr_scheduler=schedule, config=full, dist_init_required=False)
    _same_at_every_stage(engine)
    return engine


def release(engine: Any) -> None:
    """Undoes what would keep the engine and all its weights as long as the process lives: hooks on gradients; at ZeRO-3, modules listed and remembered."""
    from deepspeed.runtime.zero import parameter_offload
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator as Coordinator

    engine.destroy()
    parameter_offload.FWD_MODULE_STACK.clear()
    remembering = getattr(Coordinator, f"_{Coordinator.__name__}__params_to_release", None)  # a cached method: its cache holds every `self`
    for cell in getattr(remembering, "__closure__", None) or ():
        getattr(cell.cell_contents, "cache_clear", lambda: None)()


def _adamw(groups: list[dict[str, Any]], config: OptimConfig, offloaded: bool) -> torch.optim.Optimizer:
    """AdamW: DeepSpeed's for the CPU where the optimizer is offloaded from a GPU and it can be compiled, torch's elsewhere."""
    if offloaded and torch.cuda.is_available():
        from deepspeed.accelerator import get_accelerator
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        if get_accelerator().create_op_builder("CPUAdamBuilder").is_compatible():
            return DeepSpeedCPUAdam(groups, lr=config.lr, betas=config.betas)
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas)


def _same_at_every_stage(engine: Any) -> None:
    """Two things that DeepSpeed does otherwise at ZeRO-0 than at 1, 2 and 3.

    In bf16 it makes a trial step on zero gradients, which decays the weights and counts in Adam's bias correction: undone.
    In fp32 it forgets the gradient norm by which it clips: kept for `get_global_grad_norm`.
    """
    from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
    from deepspeed.runtime.utils import clip_grad_norm_

    if isinstance(engine.optimizer, FP16_UnfusedOptimizer):
        engine.optimizer.optimizer.state.clear()
        engine.optimizer.refresh_fp32_params()

    def clip() -> None:
        engine._global_grad_norm = clip_grad_norm_(engine.module.parameters(), engine.gradient_clipping())

    engine.clip_fp32_gradients = clip


@contextmanager
def _refusals(name: str) -> Iterator[None]:
    """Turns what DeepSpeed raises over a configuration into one ConfigError that names the file and the field."""
    from deepspeed.runtime.config import DeepSpeedConfigError
    from deepspeed.runtime.zero.utils import ZeRORuntimeException

    try:
        yield
    except ValidationError as error:
        raise ConfigError(f"train.ds_config={name}: {faults(error, _SECTIONS.get(error.title, error.title))}") from None
    except (ValueError, TypeError, KeyError, AssertionError, NotImplementedError, DeepSpeedConfigError, ZeRORuntimeException) as error:
        raise ConfigError(f"train.ds_config={name}: DeepSpeed refuses it ({type(error).__name__}: {error})") from error
