"""Groups of tensors and learning rates, against closed forms and a plain AdamW; with the real engine, that they survive it."""

from __future__ import annotations

import math

import pytest
import torch

from kvshot_ds.config import OptimConfig
from kvshot_ds.drafters.build import load_drafter
from kvshot_ds.errors import ConfigError
from kvshot_ds.training import trainer
from kvshot_ds.training.launch import run
from kvshot_ds.training.optim import lr_curve, parameter_groups
from tests import toys
from tests.training.runs import assert_same, before_each_step, run_and_stop, weights, zero3


def curve(steps: int, **options: object) -> list[float]:
    factor = lr_curve(steps, OptimConfig.model_validate(options))
    return [factor(n) for n in range(steps)]


def test_every_schedule_is_its_closed_form():
    options = {"warmup_fraction": 0.1, "final_lr_fraction": 0.2, "decay_fraction": 0.25}
    warm = [(n + 1) / 4 for n in range(4)]
    assert curve(40, schedule="constant", **options) == pytest.approx([*warm, *[1.0] * 36])
    assert curve(40, schedule="linear", **options) == pytest.approx([*warm, *(1 - 0.8 * n / 36 for n in range(36))])
    assert curve(40, schedule="cosine", **options) == pytest.approx([*warm, *(0.2 + 0.4 * (1 + math.cos(math.pi * n / 36)) for n in range(36))])
    assert curve(40, schedule="wsd", **options) == pytest.approx([*warm, *[1.0] * 26, *(1 - 0.8 * n / 10 for n in range(10))])


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd", "constant"])
def test_short_runs_and_edges(schedule):
    assert curve(1, schedule=schedule) == [1.0]
    assert curve(10, schedule=schedule, warmup_fraction=0)[0] == 1.0
    assert lr_curve(10, OptimConfig(schedule=schedule))(10) == pytest.approx(1.0 if schedule == "constant" else 0.05)  # reached after the last step
    assert all(0.05 <= f <= 1 for f in curve(7, schedule=schedule, warmup_fraction=0.3, decay_fraction=0.7))


def groups_of(name: str, *groups: dict, **options: object) -> dict[str, tuple[float, float]]:
    """Learning rate and weight decay by tensor name."""
    drafter = toys.drafter(name, dtype=torch.float32)
    names = {id(p): n for n, p in drafter.named_parameters()}
    made = parameter_groups(drafter.named_parameters(), OptimConfig.model_validate({"lr": 0.1, "weight_decay": 0.3, "groups": groups, **options}))
    assert all(g["params"] for g in made)
    found = {names[id(p)]: (g["lr"], g["weight_decay"]) for g in made for p in g["params"]}
    assert found.keys() == set(names.values())
    return found


def test_matrices_decay_and_vectors_do_not():
    drafter = toys.drafter("hybrid-per_head", dtype=torch.float32)
    assert groups_of("hybrid-per_head") == {n: (0.1, 0.3 if p.ndim >= 2 else 0.0) for n, p in drafter.named_parameters()}


def test_the_first_group_that_matches_counts():
    found = groups_of(
        "hybrid-per_head",
        {"tensors": ["layers.*.cross_attn.q_proj.weight"], "lr_scale": 0},
        {"tensors": ["layers.*.cross_attn.*"], "lr_scale": 2, "weight_decay": 0.7},
        {"tensors": ["*norm*"], "lr_scale": 0.5},
    )
    for name, value in found.items():
        if ".cross_attn.q_proj" in name:
            assert value == (0.0, 0.3)
        elif ".cross_attn." in name:
            assert value == (0.2, 0.7)  # vectors included
        elif "norm" in name:
            assert value == (0.05, 0.0)
        else:
            assert value[0] == 0.1
    assert len(set(found.values())) >= 4


def test_a_pattern_that_matches_nothing_is_named():
    with pytest.raises(ConfigError, match=r"groups\[1\]\.tensors: layers\.\*\.croos\.\* matches no tensor"):
        groups_of("hybrid-per_head", {"tensors": ["fc.*"]}, {"tensors": ["norm.weight", "layers.*.croos.*"]})
    with pytest.raises(ConfigError, match=r"groups\[1\]\.tensors: what fc\.weight matches belongs to groups before it"):
        groups_of("hybrid-per_head", {"tensors": ["fc.*"]}, {"tensors": ["fc.weight"]})


HELD = {"tensors": ["layers.*.cross_attn.*", "norm.weight"], "lr_scale": 0, "weight_decay": 0.5}
OPTIM = {"lr": 5e-3, "weight_decay": 0.1, "schedule": "wsd", "decay_fraction": 0.5, "groups": [{"tensors": ["fc.weight"], "lr_scale": 0.25}, HELD]}


def start_of(recipe, monkeypatch) -> dict[str, torch.Tensor]:
    """The weights before the first step."""
    start: dict[str, torch.Tensor] = {}
    plain = trainer.make_engine

    def make(objective, *args):
        start.update({k: v.clone() for k, v in objective.drafter.state_dict().items()})
        return plain(objective, *args)

    with monkeypatch.context() as patch:
        patch.setattr(trainer, "make_engine", make)
        run(recipe)
    return start


@pytest.mark.parametrize("ds_config", ["zero0_bf16", "zero1_fp32", "zero2_bf16", "zero3"])
def test_tensors_with_scale_0_stay_to_the_bit_and_the_others_learn(recipe, tmp_path, monkeypatch, ds_config):
    r = recipe(drafter="hybrid", max_steps=4, optim=OPTIM, ds_config=zero3(tmp_path) if ds_config == "zero3" else ds_config)
    start, found = start_of(r, monkeypatch), load_drafter(r.run_dir, "cpu", torch.float32)[0].state_dict()
    held = {n for n in found if ".cross_attn." in n or n == "norm.weight"}
    assert held and all(torch.equal(found[n], start[n].float()) for n in held)
    assert not any(torch.equal(found[n], start[n].float()) for n in ("fc.weight", "lm_head.weight"))


@pytest.mark.parametrize("ds_config", ["zero0_fp32", "zero0_bf16", "zero1_bf16", "zero2_fp32", "zero3"])
def test_learning_rates_of_groups_follow_the_schedule_through_a_resume(recipe, tmp_path, monkeypatch, ds_config):
    options = {"max_steps": 6, "checkpoint_every": 3, "log_every": 1, "optim": OPTIM, "ds_config": zero3(tmp_path) if ds_config == "zero3" else ds_config}
    r, whole = recipe("broken", "hybrid", **options), recipe("whole", "hybrid", **options)
    run(whole)
    seen: list[list[float]] = []
    run_and_stop(r, 4)
    before_each_step(monkeypatch, lambda s, _m, _n: seen.append(s.engine.get_lr()))
    run(r)
    factor = lr_curve(6, r.train.optim)
    for step, rates in enumerate(seen, 3):
        # matrices; vectors; fc; what is held, matrices and vectors apart
        assert rates == pytest.approx([5e-3 * factor(step) * scale for scale in (1.0, 1.0, 0.25, 0.0, 0.0)])
    assert len(seen) == 3 and len({tuple(rates) for rates in seen}) > 1
    assert_same(weights(r), weights(whole))
