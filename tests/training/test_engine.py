"""The configuration that DeepSpeed gets, what it refuses in the user's words, and process groups that others made."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import ds_configs
from kvshot_ds.config import Recipe
from kvshot_ds.errors import ConfigError
from kvshot_ds.files import read_json
from kvshot_ds.training import trainer
from kvshot_ds.training.launch import run
from tests.training import forked
from tests.training.runs import assert_close, before_each_step, board, free_port, weights


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ({"zero_optimization": {"stage": 4}}, r"zero_optimization\.stage: .*found 4"),
        ({"zero_optimization": {"stage": "2"}}, r"zero_optimization\.stage: .*found '2'"),
        ({"zero_optimization": 2}, r"zero_optimization: .*found 2"),
        ({"zero_optimisation": {"stage": 2}}, r"unknown section zero_optimisation; did you mean zero_optimization\?"),
        ({"torch_autocast": {"enabled": True}}, r"unknown section torch_autocast; known are "),
        ({"zero_optimization": {"stage": 2, "reduce_bucket_sise": 5}}, r"zero_optimization\.reduce_bucket_sise: .*found 5"),
        ({"zero_optimization": {"stage": 2, "reduce_bucket_size": "many"}}, r"zero_optimization\.reduce_bucket_size: .*found 'many'"),
        ({"zero_optimization": {"stage": 2, "reduce_bucket_size": -1}}, r"zero_optimization\.reduce_bucket_size: .*found -1"),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "disk"}}}, r"zero_optimization\.offload_optimizer\.device: .*found 'disk'"),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pinned": 1}}}, r"zero_optimization\.offload_optimizer\.pinned: .*found 1"),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, r"zero_optimization: offload_optimizer needs stage 1, 2 or 3"),
        ({"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}, r"zero_optimization: offload_param needs stage 3"),
        ({"zero_optimization": {"stage": 2, "cpu_offload": True}}, r"zero_optimization: cpu_offload: use offload_optimizer"),
        ({"zero_optimization": {"stage": 3, "mics_shard_size": 1}}, r"zero_optimization: mics_shard_size: checkpoints and weight averages"),
        ({"bf16": {"enabled": "false"}}, r"bf16\.enabled: .*found 'false'"),
        ({"bf16": {"enabled": True, "precise": 1}}, r"bf16\.precise: .*found 1"),
        ({"bf16": True}, r"bf16: .*found True"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, r"fp16\.enabled: .*use bf16 or fp32"),
        ({"fp16": {"enabled": True}}, r"fp16\.enabled: .*use bf16 or fp32"),
        ({"data_types": {"grad_accum_dtype": "int8"}}, r"data_types\.grad_accum_dtype: .*found 'int8'"),
        ({"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}, r"DeepSpeed refuses it \(NotImplementedError: unsupported mix"),
        ({"checkpoint": {"load_universal": True}}, r"sets what the recipe decides: checkpoint"),
        ({"train_batch_size": 8, "gradient_clipping": 1}, r"train_batch_size \(set train\.conversations_per_step\), gradient_clipping"),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme"}}}, r"zero_optimization\.offload_optimizer\.device: .*found 'nvme'"),
        ([], r"expected a JSON object, found list"),
    ],
)  # fmt: skip
def test_nonsense_is_one_error_that_names_file_and_field(recipe, tmp_path, config, complaint):
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=rf"train\.ds_config=\S*mine\.json.*{complaint}") as error:
        run(recipe(max_steps=1, ds_config=str(file)))
    assert "\n" not in str(error.value)


def test_what_does_not_change_a_step_may_be_set(recipe, tmp_path):
    file = tmp_path / "mine.json"
    monitor = {"tensorboard": {"enabled": True, "output_path": str(tmp_path / "monitor"), "job_name": "own"}}
    file.write_text(json.dumps(ds_configs.load("zero1_bf16") | monitor | {"data_types": {"grad_accum_dtype": "fp32"}, "communication_data_type": "fp32"}))
    assert run(recipe(max_steps=2, ds_config=str(file)))["steps"] == 2
    assert list((tmp_path / "monitor").rglob("events*"))


@pytest.mark.parametrize("name", ds_configs.names())
def test_every_shipped_configuration_trains_and_shows_its_gradient_norm(recipe, monkeypatch, name):
    r = recipe(max_steps=2, log_every=1, ds_config=name)
    seen = []
    before_each_step(monkeypatch, lambda s, _m, _n: seen.append((s.engine.zero_optimization_stage(), s.drafter.norm.weight.dtype, s.engine.zero_cpu_offload())))
    run(r)
    assert set(seen) == {(int(name[4]), torch.bfloat16 if name.endswith("bf16") else torch.float32, "offload" in name)}
    norms = board(r)["train/grad_norm"]
    assert len(norms) == 2 and min(norms) > 0.01


def test_an_update_that_deepspeed_leaves_out_stops_the_run(recipe, monkeypatch):
    """In bf16 it passes over gradients that are not finite, without a word; the schedule would fall behind the steps."""

    def spoil(s, _micro, n):
        if n == 1:
            s.drafter.norm.weight.register_hook(lambda grad: grad * float("inf"))

    before_each_step(monkeypatch, spoil)
    with pytest.raises(trainer.KvshotError, match=r"gradient is not finite at step 2 .*train"):
        run(recipe(ds_config="zero2_bf16", log_every=100))


def _patience(recipe: Recipe, joined: bool, port: int) -> list[float]:
    """Minutes that the process group itself waits, and the one that ZeRO uses, after a run in a process without any of the launchers' variables."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    if joined:
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1, timeout=timedelta(minutes=7))
    run(recipe)
    from deepspeed.utils import groups

    return [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() / 60 for group in (dist.group.WORLD, groups._get_data_parallel_group())]


@pytest.mark.parametrize(("joined", "patience"), [("joined", 7), ("alone", 90)])
def test_a_process_group_of_others_is_used_and_ones_own_outlasts_the_watchdog(recipe, joined, patience):
    """As under Ray Train, which joins the ranks before it calls; here without any of the launchers' variables."""
    r, here = recipe(joined, max_steps=2, hang_minutes=45), recipe("here", max_steps=2)
    (found,) = forked.Run(1, _patience, r, joined == "joined", free_port()).wait()
    assert found == [patience, 90.0]
    run(here)
    assert_close(weights(r), weights(here))
    assert read_json(r.run_dir / "train.json")["world_size"] == 1


@pytest.mark.parametrize("stage", ["zero0_bf16", "zero2_fp32", "zero3_fp32"])
def test_nothing_keeps_the_engine_of_a_training_that_is_over(recipe: Callable[..., Recipe], stage: str) -> None:
    from deepspeed.runtime.engine import DeepSpeedEngine

    def engines() -> int:
        gc.collect()
        return sum(type(thing) is DeepSpeedEngine for thing in gc.get_objects())

    before = engines()
    run(recipe("once", "hybrid", ds_config=stage, max_steps=2))
    assert engines() == before
