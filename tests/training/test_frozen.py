"""The target's embedding and head shared out over the ranks: the same weights, each rank holds its share, nothing of them is saved."""

from __future__ import annotations

import json

import pytest
import torch

import ds_configs
from kvshot_ds.config import ObjectiveConfig
from kvshot_ds.drafters.build import build_drafter, load_drafter
from kvshot_ds.errors import ConfigError
from kvshot_ds.files import read_json
from kvshot_ds.objectives.alignment import plan_rows
from kvshot_ds.objectives.objective import Objective
from kvshot_ds.training.launch import run
from tests import toys
from tests.training.runs import assert_close, assert_same, before_each_step, run_and_stop, weights, zero3
from tests.training.several import item, start

DFLASH = {"family": "dflash", "depth": 2, "block_size": 4, "mask_token_id": 3}
CASES = {
    "hidden_only": ("hidden_only", {}),
    "hybrid": ("hybrid", {"recompute": True, "objective": {"steps": 3, "weights": "dpace", "kv_branch_weight": 0.5}}),
    "dflash": (DFLASH, {}),
    "offline": ("kv_only", {"objective": {"steps": 3, "drift": "offline"}}),
}
FEW = {"max_steps": 3, "checkpoint_every": 2}


@pytest.fixture
def pair(recipe, tmp_path):
    """pair(name) -> the same run with and without train.shard_frozen, every parameter partitioned."""

    def make(name: str):
        drafter, options = CASES[name]
        return [recipe(f"{name}_{shard}", drafter, ds_config=zero3(tmp_path), shard_frozen=shard, **FEW, **options) for shard in (False, True)]

    return make


def test_two_ranks_end_in_the_same_weights_and_hold_their_shares(pair, recipe, tmp_path):
    runs = [pair(name) for name in ("hidden_only", "hybrid", "dflash")]
    offload = recipe("offload", "hidden_only", ds_config="zero3_offload_fp32", shard_frozen=True, **FEW)
    start(
        [*(item(r, tmp_path, shares=r.train.shard_frozen, stop=2 * r.train.shard_frozen) for both in runs for r in both), item(offload, tmp_path)],
        tmp_path,
        ranks=2,
    )
    for lent, shared in runs:
        assert_same(weights(shared), weights(lent))
        held = [read_json(shared.run_dir / f"frozen{rank}.json") for rank in range(2)]
        assert held[0] == held[1] and len(held[0]) == 2  # embedding, head rows
        assert all(share["here"] == 0 and share["share"] * 2 == share["whole"] > 1000 for share in held[0])
    assert_close(weights(offload), weights(runs[0][0]))


@pytest.mark.parametrize("name", CASES)
def test_one_rank(pair, monkeypatch, name):
    lent, shared = pair(name)
    run(lent)
    # The option may change from start to start: the first part is trained without it.
    run_and_stop(shared.model_copy(update={"train": lent.train}), 2)
    before_each_step(monkeypatch, lambda s, _m, _n: [p.numel() for p in s.objective.frozen] == [0, 0] or pytest.fail("not shared"))
    run(shared)
    assert_same(weights(shared), weights(lent))
    drafter, _ = load_drafter(shared.run_dir, "cpu", torch.float32)
    assert all("frozen" not in name for name in drafter.state_dict())


def test_they_are_in_no_checkpoint(pair, recipe):
    lent, shared = pair("hidden_only")
    sizes = []
    for r in (lent, shared):
        run_and_stop(r, 2)
        sizes.append(sum(f.stat().st_size for f in (r.run_dir / "checkpoints").rglob("*") if f.is_file()))
    assert sizes[1] == pytest.approx(sizes[0], rel=0.05)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_other_stages_are_refused(recipe, tmp_path, stage):
    with pytest.raises(ConfigError, match=rf"shard_frozen=true needs ZeRO stage 3, train\.ds_config=.*zero{stage}.* is stage {stage}"):
        run(recipe(ds_config=f"zero{stage}_fp32", shard_frozen=True))
    plain = tmp_path / f"zero{stage}.json"
    plain.write_text(json.dumps(ds_configs.load(f"zero{stage}_bf16")))
    with pytest.raises(ConfigError, match="needs ZeRO stage 3"):
        run(recipe(ds_config=str(plain), shard_frozen=True))


@pytest.mark.parametrize("name", ["dflash-2", "eagle31"])
def test_a_head_that_is_the_embedding_is_shared_once(name):
    """Tied weights and the whole vocabulary; without an engine the parameters are whole, and the forward is the same."""
    drafter = build_drafter(toys.FAMILIES[name], toys.drafter(name).g, toys.VOCAB)
    drafter.set_vocab(torch.arange(toys.VOCAB))
    drafter.reset(0)
    embedding, config = torch.randn(toys.VOCAB, drafter.g.hidden_size), ObjectiveConfig(steps=2)
    batch = toys.batch(drafter.g, toys.TURNS[2:]).to("cpu", torch.float32)
    drafter.bind(embedding, embedding)
    objective, plan = Objective(drafter, config, embedding), plan_rows(batch, 2)
    before, names = objective(batch, plan, torch.ones(())), set(objective.state_dict())
    objective.share_frozen()
    after = objective(batch, plan, torch.ones(()))
    assert objective.frozen is not None and [p.requires_grad for p in objective.frozen] == [False]
    assert torch.equal(before.loss, after.loss) and torch.equal(before.prob, after.prob)
    assert set(objective.state_dict()) == names and objective.load_state_dict(objective.state_dict()).missing_keys == []
