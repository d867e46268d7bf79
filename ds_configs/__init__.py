"""DeepSpeed configurations that ship with the package: ZeRO stage, precision and offload, and nothing a recipe decides."""

from __future__ import annotations

import json
from difflib import get_close_matches
from importlib import resources
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from kvshot_ds.errors import ConfigError

_OWNED = {
    "train_batch_size": "set train.conversations_per_step",
    "train_micro_batch_size_per_gpu": "set train.conversations_per_micro_batch",
    "gradient_accumulation_steps": "set train.conversations_per_step",
    "gradient_clipping": "set train.optim.clip",
    "optimizer": "set train.optim",
    "scheduler": "set train.optim",
    "steps_per_print": "set train.log_every",
    "wall_clock_breakdown": "the parts of a step are in TensorBoard",
    "checkpoint": "set train.checkpoint_writer; a checkpoint of another number of ranks is converted by itself",
    "zero_force_ds_cpu_optimizer": "AdamW for offload is chosen by what the machine can compile",
}


class _Section(BaseModel):
    """What is looked at before DeepSpeed sees it; the other fields of a section are DeepSpeed's to judge."""

    model_config = ConfigDict(extra="allow", strict=True)


class _Offload(_Section):
    device: Literal["none", "cpu"] = "none"


class _Zero(_Section):
    _SHARES_OTHERWISE: ClassVar[frozenset[str]] = frozenset({"mics_shard_size", "zero_hpz_partition_size"})
    stage: Literal[0, 1, 2, 3] = 0
    offload_optimizer: _Offload | None = None
    offload_param: _Offload | None = None

    @model_validator(mode="after")
    def _fits_the_stage(self) -> _Zero:
        if old := sorted(key for key in self.model_extra or {} if key.startswith("cpu_offload")):
            raise ValueError(f"{', '.join(old)}: use offload_optimizer and offload_param")
        if shared := sorted(self._SHARES_OTHERWISE & (self.model_extra or {}).keys()):
            raise ValueError(f"{', '.join(shared)}: checkpoints and weight averages take a rank's share to be one of as many as there are ranks")
        if self.offload_optimizer and self.stage == 0:
            raise ValueError("offload_optimizer needs stage 1, 2 or 3")
        if self.offload_param and self.stage != 3:
            raise ValueError("offload_param needs stage 3")
        return self


class _Precision(_Section):
    enabled: bool = False


class _DataTypes(_Section):
    model_config = ConfigDict(extra="forbid", strict=True)
    grad_accum_dtype: Literal["fp32", "bf16"] | None = None


class _File(BaseModel):
    """The sections that training has been made for. Others change what a step computes, and DeepSpeed passes over names it does not know."""

    model_config = ConfigDict(extra="forbid", strict=True)
    zero_optimization: _Zero = _Zero()
    bf16: _Precision = _Precision()
    fp16: _Precision = _Precision()
    data_types: _DataTypes = _DataTypes()
    communication_data_type: Literal["fp32", "bf16"] | None = None
    prescale_gradients: bool = False
    gradient_predivide_factor: float = 1.0
    memory_breakdown: bool = False
    dump_state: bool = False
    aio: dict[str, Any] = {}
    comms_logger: dict[str, Any] = {}
    flops_profiler: dict[str, Any] = {}
    tensorboard: dict[str, Any] = {}
    wandb: dict[str, Any] = {}
    csv_monitor: dict[str, Any] = {}
    comet: dict[str, Any] = {}

    @model_validator(mode="after")
    def _no_loss_scaling(self) -> _File:
        if self.fp16.enabled:
            raise ValueError("fp16.enabled: its loss scaling is not supported; use bf16 or fp32")
        return self


def names() -> list[str]:
    """Names of the configurations that ship, without `.json`."""
    return sorted(entry.name.removesuffix(".json") for entry in resources.files(__name__).iterdir() if entry.name.endswith(".json"))


def load(name: str) -> dict[str, Any]:
    """The configuration `name`: one of `names()`, or the path of a JSON file.

    Raises ConfigError if there is none, if it is not a JSON object, if it sets what the recipe decides, contradicts itself, or has a section
    that training does not know. Fields inside of a section that are left to DeepSpeed are checked when the engine is made.
    """
    source = resources.files(__name__) / f"{name}.json" if name in names() else Path(name)
    try:
        config = json.loads(source.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"train.ds_config={name}: neither a file nor one of {', '.join(names())}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"train.ds_config={name}: not readable as JSON: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"train.ds_config={name}: expected a JSON object, found {type(config).__name__}")
    if both := [f"{key} ({instead})" for key, instead in _OWNED.items() if key in config]:
        raise ConfigError(f"train.ds_config={name} sets what the recipe decides: {', '.join(both)}")
    if unknown := sorted(config.keys() - _File.model_fields.keys()):
        near = get_close_matches(unknown[0], _File.model_fields, 1)
        known = f"did you mean {near[0]}?" if near else f"known are {', '.join(_File.model_fields)}"
        raise ConfigError(f"train.ds_config={name}: unknown section {', '.join(unknown)}; {known}")
    try:
        _File.model_validate(config)
    except ValidationError as error:
        raise ConfigError(f"train.ds_config={name}: {faults(error)}") from None
    return config


def faults(error: ValidationError, section: str = "") -> str:
    """What pydantic found, one line: field, rule and value of each fault. `section` goes before the fields."""

    def one(fault: Any) -> str:
        where = ".".join(str(part) for part in (section, *fault["loc"]) if part != "")
        if fault["type"] == "value_error":
            return f"{where}: {fault['ctx']['error']}" if where else str(fault["ctx"]["error"])
        return f"{where}: {fault['msg']}, found {fault['input']!r}"

    return "; ".join(one(fault) for fault in error.errors())
