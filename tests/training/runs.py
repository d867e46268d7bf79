"""What tests of training share: starting runs, cutting them short, reading what they leave."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ds_configs
from kvshot_ds.config import Recipe, dump_recipe
from kvshot_ds.training import trainer
from kvshot_ds.training.launch import run


def zero3(folder: Path) -> str:
    """train.ds_config: the shipped ZeRO-3, but for small parameters, which DeepSpeed leaves whole: a tiny drafter has no others."""
    config = ds_configs.load("zero3_fp32")
    config["zero_optimization"] |= {"stage3_param_persistence_threshold": 0}
    path = folder / "zero3_partitioned.json"
    path.write_text(json.dumps(config))
    return str(path)


def weights(recipe: Recipe) -> dict[str, torch.Tensor]:
    return load_file(recipe.run_dir / "drafter" / "model.safetensors")


def assert_same(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> None:
    """To the bit."""
    assert found.keys() == wanted.keys()
    different = [name for name, value in wanted.items() if not torch.equal(found[name], value)]
    assert not different


def assert_close(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor], rtol: float = 1e-4, atol: float = 2e-5) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=rtol, atol=atol, msg=f"{name}: {{}}".format)


def board(recipe: Recipe) -> dict[str, list[float]]:
    """The TensorBoard scalars of a run, in the order of its log points."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(recipe.run_dir / "tensorboard"))
    events.Reload()
    return {tag: [e.value for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def before_each_step(monkeypatch: pytest.MonkeyPatch, call: Callable[[trainer.Setup, list[Any], int], None]) -> None:
    """`call(setup, micro-batches, n)` before the n-th (0-based) optimizer step of this process from now on."""
    plain, made = trainer.optimizer_step, [0]

    def step(s: trainer.Setup, micro_batches: list[Any], meter: Any, number: int) -> None:
        call(s, micro_batches, made[0])
        made[0] += 1
        plain(s, micro_batches, meter, number)

    monkeypatch.setattr(trainer, "optimizer_step", step)


class Stopped(Exception):
    """Where a run was cut short."""


def run_and_stop(recipe: Recipe, steps: int) -> None:
    """A run that dies when it is about to make the step after `steps`."""

    def stop(_s: trainer.Setup, _m: list[Any], n: int) -> None:
        if n == steps:
            raise Stopped

    with pytest.MonkeyPatch.context() as patch:
        before_each_step(patch, stop)
        with pytest.raises(Stopped):
            run(recipe)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def rank_environment() -> dict[str, str]:
    """Of a rank in a process of its own: on CPU, one thread, importing this very tree."""
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")} | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    return env | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), env.get("PYTHONPATH", "")])}


def launch(recipe: Recipe, folder: Path, ranks: int = 2) -> subprocess.Popen[str]:
    """The deepspeed launcher, as the README has it, in a process group of its own."""
    file = folder / f"{recipe.name}.yaml"
    file.write_text(dump_recipe(recipe))
    launcher = [str(Path(sys.executable).with_name("deepspeed")), "--num_accelerators", str(ranks), "--master_port", str(free_port())]
    command = [*launcher, "--module", "kvshot_ds.cli", "train", str(file)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=rank_environment(), start_new_session=True)
