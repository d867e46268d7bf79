"""In bf16 every ZeRO stage trains fp32 master weights: updates that bf16 cannot show one by one add up, and a checkpoint keeps them."""

from __future__ import annotations

import json

import pytest
import torch

import ds_configs
from kvshot_ds.drafters.build import load_drafter
from kvshot_ds.training import export
from kvshot_ds.training.launch import run
from tests.training.runs import assert_same, before_each_step, run_and_stop, weights

STEPS = 24
# The same four conversations at every step, so that an update goes the way of the one before.
TINY_STEPS = {
    "max_conversations": 4, "epochs": STEPS, "conversations_per_micro_batch": 4, "checkpoint_every": 1000,
    "optim": {"lr": 8e-6, "schedule": "constant", "warmup_fraction": 0, "clip": 100.0},
}  # fmt: skip


@pytest.fixture
def config(tmp_path):
    """config(name) -> train.ds_config: a shipped one with every parameter partitioned under ZeRO-3; `name+sums` adds up gradients in fp32."""

    def make(name: str) -> str:
        made = ds_configs.load(name.removesuffix("+sums"))
        if name.endswith("+sums"):
            made["data_types"] = {"grad_accum_dtype": "fp32"}
        if made["zero_optimization"]["stage"] == 3:
            made["zero_optimization"]["stage3_param_persistence_threshold"] = 0
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(made))
        return str(path)

    return make


def moved(recipe, monkeypatch, forget: bool = False) -> tuple[float, float]:
    """Of the weights so large that one update is under a quarter of their last place: the shares that moved in the first two steps, and in all.

    forget: before each step the master weights are made from the module's anew.
    """
    seen: list[torch.Tensor] = []

    def look(s, _m, n):
        if n in (0, 2):
            with export.whole(s.drafter):
                seen.append(s.drafter.get_parameter("fc.weight").detach().clone())
        if forget:
            s.engine.optimizer.refresh_fp32_params()

    with monkeypatch.context() as patch:
        before_each_step(patch, look)
        run(recipe)
    start, soon = seen
    end = load_drafter(recipe.run_dir, "cpu", torch.bfloat16)[0].get_parameter("fc.weight")
    large = start.abs() > 0.016  # last place 2^-13, one update of Adam at most about 1e-5
    assert large.sum() > 100
    return float((soon != start)[large].float().mean()), float((end != start)[large].float().mean())


CONFIGS = [*(name for name in ds_configs.names() if name.endswith("bf16")), *(f"zero{stage}_bf16+sums" for stage in (1, 2, 3))]


@pytest.mark.parametrize("name", CONFIGS)
def test_small_updates_add_up(recipe, monkeypatch, config, name):
    soon, late = moved(recipe(drafter="hidden_only", ds_config=config(name), **TINY_STEPS), monkeypatch)
    assert soon < 0.01 and late > 0.3


def test_without_master_weights_they_would_be_lost(recipe, monkeypatch, config):
    soon, late = moved(recipe(drafter="hidden_only", ds_config="zero0_bf16", **TINY_STEPS), monkeypatch, forget=True)
    assert soon < 0.01 and late < 0.01


@pytest.mark.parametrize("name", CONFIGS)
def test_a_checkpoint_keeps_them(recipe, config, name):
    options = {**TINY_STEPS, "max_steps": 12, "checkpoint_every": 5, "ds_config": config(name)}
    whole, broken = recipe("whole", "hidden_only", **options), recipe("broken", "hidden_only", **options)
    run(whole)
    run_and_stop(broken, 6)
    assert run(broken)["resumed_from"] == [{"step": 5, "world_size": 1}]
    assert_same(weights(broken), weights(whole))


def test_zero0_makes_the_steps_of_zero2(recipe, config):
    """DeepSpeed's trial step at ZeRO-0 in bf16, which decays weights and counts for Adam, is undone: Adam starts with a step of the same length."""
    options = {"max_steps": 1, "optim": {"lr": 0.05, "weight_decay": 1.0, "warmup_fraction": 0}}
    found = {stage: recipe(f"stage{stage}", "hidden_only", ds_config=f"zero{stage}_bf16", **options) for stage in (0, 2)}
    for r in found.values():
        run(r)
    zero, two = (weights(r)["fc.weight"].float() for r in found.values())
    assert float((zero - two).abs().max()) < 0.002  # the trial step alone: a decay of 5% of the weights, and 10 times that in Adam
