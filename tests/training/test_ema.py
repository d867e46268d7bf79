"""The average of the weights: a plain loop over the weights of every step, at every stage, on one and two ranks, and its pieces on any number."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from safetensors.torch import load_file

from kvshot_ds.config import Recipe
from kvshot_ds.drafters.build import load_drafter, read_info
from kvshot_ds.errors import KvshotError
from kvshot_ds.files import read_json
from kvshot_ds.training import export, trainer
from kvshot_ds.training.ema import Average
from kvshot_ds.training.engine import World
from kvshot_ds.training.launch import run
from tests import toys
from tests.training.runs import assert_close, assert_same, before_each_step, run_and_stop, weights, zero3
from tests.training.several import item, start

DECAY = 0.7
OPTIONS = {"max_steps": 5, "checkpoint_every": 100, "optim": {"lr": 5e-3, "ema_decay": DECAY}}


def averaged(recipe: Recipe) -> dict[str, torch.Tensor]:
    return load_file(recipe.run_dir / "drafter_ema" / "model.safetensors")


@pytest.mark.parametrize("ds_config", ["zero0_fp32", "zero2_fp32", "zero2_bf16", "zero3", "zero3_fp32"])
def test_it_is_what_a_plain_loop_makes_of_the_weights_of_every_step(recipe, tmp_path, monkeypatch, ds_config):
    r = recipe(drafter="hybrid", ds_config=zero3(tmp_path) if ds_config == "zero3" else ds_config, **OPTIONS)
    wanted: dict[str, torch.Tensor] = {}

    def follow(drafter) -> None:
        with export.whole(drafter):
            for name, p in drafter.named_parameters():
                before = wanted.get(name)
                wanted[name] = p.detach().double().clone() if before is None else DECAY * before + (1 - DECAY) * p.detach().double()

    before_each_step(monkeypatch, lambda s, _m, _n: follow(s.drafter))  # the start, then what each step left
    plain = trainer.finish

    def finish(s, *rest):
        follow(s.drafter)
        assert all(piece.dtype == torch.float32 for piece in s.ema.state().values())
        found = s.ema.whole()
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            torch.testing.assert_close(found[name].double(), value, rtol=1e-6, atol=1e-7)
        return plain(s, *rest)

    monkeypatch.setattr(trainer, "finish", finish)
    run(r)
    drafter, info = load_drafter(r.run_dir / "drafter_ema", "cpu", torch.float32)
    assert info == read_info(r.run_dir / "drafter")
    dtype = torch.bfloat16 if ds_config.endswith("bf16") else torch.float32
    for name, p in drafter.named_parameters():
        torch.testing.assert_close(p, wanted[name].to(dtype).float(), rtol=1e-6 if dtype == torch.float32 else 2**-8, atol=1e-7)
    assert not torch.equal(averaged(r)["fc.weight"], weights(r)["fc.weight"])
    assert torch.equal(averaged(r)["d2t"], weights(r)["d2t"])


def test_two_ranks_make_the_average_of_one(recipe, tmp_path):
    alone = recipe("alone", "hybrid", **OPTIONS)
    run(alone)
    pairs = [recipe(f"pair{n}", "hybrid", ds_config=config, **OPTIONS) for n, config in enumerate(("zero2_fp32", zero3(tmp_path), "zero3_fp32"))]
    start([item(r, tmp_path) for r in pairs], tmp_path, ranks=2)
    for r in pairs:
        assert_close(averaged(r), averaged(alone))
    for r in pairs:
        with pytest.raises(AssertionError):
            assert_close(averaged(r), weights(alone))  # the tolerance tells an average from weights


def ranks_of(world: int) -> list[Average]:
    """The averages of every rank of `world` over the same weights, with some that are smaller than the world."""
    drafter = toys.drafter("hybrid-scalar", dtype=torch.float32)
    assert min(p.numel() for p in drafter.parameters()) < 4
    return [Average(drafter, 0.5, World(rank, world, torch.device("cpu"))) for rank in range(world)]


def joined(ranks: list[Average]) -> Mapping[str, torch.Tensor]:
    return {name: torch.cat([r.state()[name] for r in ranks]) for name in ranks[0].state()}


@pytest.mark.parametrize(("before", "after"), [(1, 1), (1, 2), (2, 1), (2, 4), (4, 3)])
def test_pieces_load_into_any_number_of_ranks(before, after):
    old, new = ranks_of(before), ranks_of(after)
    for r in old:
        for piece in r.state().values():
            piece.copy_(torch.arange(len(piece)) + 1000 * r.world.rank)
    wanted = {name: value.clone() for name, value in joined(old).items()}
    for r in new:
        r.load([other.state() for other in old])
    assert_same(joined(new), wanted)
    assert {name: len(value) for name, value in wanted.items()} == {name: p.numel() for name, p in old[0].weights.items()}


def test_pieces_of_another_drafter_are_refused():
    one, two = ranks_of(2)
    with pytest.raises(KvshotError, match="average of"):
        one.load([one.state()])
    with pytest.raises(KvshotError, match="in 1 of 2 files"):
        two.load([one.state(), {}])


def test_a_resume_keeps_it_on_the_same_and_on_another_number_of_ranks(recipe, tmp_path):
    options = OPTIONS | {"checkpoint_every": 2}
    whole, same, other = (recipe(name, "hybrid", ds_config=zero3(tmp_path), shard_frozen=name == "other", **options) for name in ("whole", "same", "other"))
    run(whole)
    run_and_stop(same, 3)
    run(same)
    assert_same(averaged(same), averaged(whole))
    run_and_stop(other, 3)
    start([item(other, tmp_path)], tmp_path, ranks=2)
    assert read_json(other.run_dir / "train.json")["resumed_from"][0]["step"] == 2
    assert_close(averaged(other), averaged(whole))
    assert_close(weights(other), weights(whole))
