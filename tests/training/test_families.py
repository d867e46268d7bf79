"""Every family, injection and gate, end to end: it trains, what is exported is what was trained, one command evaluates them all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvshot_ds import evaluation
from kvshot_ds.config import Recipe
from kvshot_ds.drafters.base import Drafter
from kvshot_ds.drafters.block import BlockDrafter
from kvshot_ds.drafters.build import load_drafter
from kvshot_ds.features.batch import collate
from kvshot_ds.features.shard import ShardSet
from kvshot_ds.files import read_json
from kvshot_ds.objectives.alignment import plan_rows
from kvshot_ds.objectives.objective import Objective
from kvshot_ds.target import load_parts
from kvshot_ds.training import trainer
from kvshot_ds.training.launch import run
from tests.conftest import DRAFTERS
from tests.training.runs import assert_close, assert_same, before_each_step, board, run_and_stop, weights, zero3

STEPS = 4
# A third of the conversations in one forward: few calls, and steps whose losses can be compared.
LARGE = {"max_steps": STEPS, "epochs": 2, "conversations_per_step": 14, "conversations_per_micro_batch": 14, "log_every": 1, "optim": {"lr": 5e-3}}


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


@pytest.fixture
def family(recipe, work):
    """family(name) -> a recipe in a work folder that the tests of this file share: each run is trained once."""

    def make(name: str) -> Recipe:
        return recipe(name, name, **LARGE).model_copy(update={"work": work})

    return make


def judged(drafter: Drafter, recipe: Recipe) -> torch.Tensor:
    """What the drafter gives the first held-out conversations: [K, N] acceptance probabilities."""
    heldout, parts = ShardSet.open(recipe.shards_dir, "heldout"), load_parts(recipe.target.path)
    batch = collate([heldout.read(i) for i in range(3)]).to("cpu", torch.float32)
    drafter.bind(parts.embedding, parts.head)
    objective = Objective(drafter, recipe.train.objective, parts.head)
    with torch.no_grad():
        return objective(batch, plan_rows(batch, recipe.train.objective.steps), torch.ones(())).prob


@pytest.mark.parametrize("name", DRAFTERS)
def test_it_trains_and_its_export_is_what_was_trained(family, name, monkeypatch):
    trained: dict[str, Any] = {}
    plain = trainer.finish

    def finish(s, progress):
        trained["tensors"] = {k: v.clone() for k, v in s.drafter.state_dict().items()}
        trained["judged"] = judged(s.drafter, s.recipe)
        return plain(s, progress)

    monkeypatch.setattr(trainer, "finish", finish)
    r = family(name)
    summary = run(r)
    losses = board(r)["train/loss"]
    assert summary["steps"] == len(losses) == STEPS
    assert losses[-1] < 0.95 * losses[0]
    assert ("gate/mean" in board(r)) == (name in ("hybrid", "hybrid-per_head", "hybrid-scalar", "hybrid_block"))
    drafter, info = load_drafter(r.run_dir, "cpu", torch.float32)
    assert info.config == r.train.drafter and info.extra["training"] == summary
    assert ("lm_head.weight" in drafter.state_dict()) == (not isinstance(drafter, BlockDrafter))
    assert_same(drafter.state_dict(), trained["tensors"])
    assert torch.equal(judged(drafter, r), trained["judged"])  # nothing it needs stayed behind


def test_one_command_evaluates_them_all(family, capsys):
    runs = [family(name) for name in DRAFTERS]
    for r in runs:
        run(r)
    data = runs[0].model_dump()
    data["eval"] |= {"drafters": tuple(r.run_dir for r in runs), "bootstrap": 100}
    results = evaluation.run(Recipe.model_validate(data))
    assert [x["name"] for x in results] == list(DRAFTERS)
    for r, result in zip(runs, results, strict=True):
        assert read_json(r.run_dir / "eval.json") == result
        kv = getattr(r.train.drafter, "kv", None)
        assert (result["drafter"]["family"], result["drafter"]["injection"]) == (r.train.drafter.family, kv and kv.injection)
        assert [a["den"] for a in result["alpha"]] == [a["den"] for a in results[0]["alpha"]]  # all are judged on the same rows
        assert result["drafter"]["parameters"] == read_json(r.run_dir / "train.json")["parameters"]["trainable"]
    table = capsys.readouterr().out
    assert all(f"\n{name}: alpha_0..2" in table for name in DRAFTERS)
    assert len({str(x["alpha"]) + str(x["accept_prob"]) for x in results}) == len(DRAFTERS)  # and each by its own weights


BRANCH = {"objective": {"steps": 3, "kv_branch_weight": 0.5, "query_distill_weight": 0.1, "weights": "dpace", "loss": "lk_lambda"}}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("eagle31", {}),
        ("kv_only-mlp_norm", {}),
        ("hybrid-per_head", BRANCH),
        ("hybrid-scalar", {"recompute": True}),
        ("hybrid_block", {}),
        ("hybrid_block", {"recompute": True, **BRANCH}),
    ],
)
def test_zero3_trains_to_the_same_weights(recipe, tmp_path, monkeypatch, name, options):
    """Weights that are used outside of their module, twice in a step, or again in the backward pass are there when they are needed."""
    few = {"max_steps": 2, "conversations_per_micro_batch": 2, **options}
    two, three = recipe("two", name, **few), recipe("three", name, ds_config=zero3(tmp_path), **few)
    run(two)

    def partitioned(s, _m, _n):
        assert all(p.numel() == 0 < p.ds_numel for p in s.drafter.parameters())

    before_each_step(monkeypatch, partitioned)
    run(three)
    assert_close(weights(three), weights(two))


@pytest.mark.parametrize("ds_config", ["zero2_bf16", "zero3"])
def test_a_resumed_run_ends_in_the_same_weights(recipe, tmp_path, ds_config):
    ds_config = zero3(tmp_path) if ds_config == "zero3" else ds_config
    options = {"max_steps": 4, "checkpoint_every": 2, "ds_config": ds_config, "conversations_per_micro_batch": 4}
    whole, broken = recipe("whole", "hybrid_block", **options), recipe("broken", "hybrid_block", **options)
    run(whole)
    run_and_stop(broken, 3)
    assert run(broken)["resumed_from"] == [{"step": 2, "world_size": 1}]
    assert_same(weights(broken), weights(whole))


@pytest.mark.parametrize("loss", ["soft_ce", "lk_lambda"])
@pytest.mark.parametrize("name", ["hidden_only", "kv_only-mlp_norm", "kv_only-hidden_to_kv", "hybrid-per_head", "dflash", "kv_block", "hybrid_block"])
def test_bf16_trains(recipe, name, loss):
    branch = name.startswith("hybrid")
    queries = branch or name in ("kv_only-mlp_norm", "kv_block")
    objective = {"steps": 3, "loss": loss, "weights": "dpace", "kv_branch_weight": float(branch), "query_distill_weight": 0.1 * queries}
    r = recipe(drafter=name, ds_config="zero2_bf16", objective=objective, **LARGE)
    run(r)
    floats = [value for value in weights(r).values() if value.is_floating_point()]
    assert {value.dtype for value in floats} == {torch.bfloat16} and all(value.isfinite().all() for value in floats)
    first_step = board(r)["train/loss_step/0"]  # the weighted sum may rise: dpace gives weight to what the drafter has learned
    assert first_step[-1] < 0.95 * first_step[0]
