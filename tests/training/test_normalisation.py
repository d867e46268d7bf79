"""Token-exact normalisation: the gradients of a step do not depend on how its conversations are shared by micro-steps and ranks."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from kvshot_ds.config import dump_recipe
from tests.training.one_step import gradients
from tests.training.runs import assert_close, free_port, rank_environment, zero3

FULL, UNEVEN = 0, 10  # steps of 4 conversations, and the epoch's last one, of 2: some micro-steps then hold stand-ins
BRANCHES = {"weights": "dpace", "loss": "lk_lambda", "kv_branch_weight": 0.5, "query_distill_weight": 0.1}
CASES = {
    "block": ("hybrid_block", {"objective": {"steps": 3, **BRANCHES}}),
    "chain": ("hybrid-per_head", {"objective": {"steps": 3, "loss": "kl", "kv_branch_weight": 0.5}}),
    "hard": ("kv_only", {"objective": {"steps": 3, "loss": "hard_ce", "weights": "exponential"}}),
    "anchors": ("dflash", {"objective": {"steps": 3, "anchors": 2, "loss": "lk_alpha"}}),
}


def assert_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert max(float(g.abs().max()) for g in wanted.values()) > 0.01
    assert_close(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("step", [FULL, UNEVEN])
@pytest.mark.parametrize("name", ["block", "chain", "hard"])
def test_micro_steps_equal_one_batch(recipe, name, step):
    """Rows that are drawn at random are left out: what is drawn depends on the batch they are drawn from."""
    drafter, options = CASES[name]
    one, two, four = (gradients(recipe(f"by{n}", drafter, conversations_per_micro_batch=n, **options), step) for n in (1, 2, 4))
    assert_equal(two, four)
    assert_equal(one, four)


def test_ranks_equal_micro_steps(recipe, tmp_path):
    """1 rank x 4 micro-steps = 2 ranks x 2, under ZeRO-2 and with every parameter partitioned under ZeRO-3."""
    recipes = {name: recipe(name, drafter, **options) for name, (drafter, options) in CASES.items()}
    drafter, options = CASES["block"]
    recipes["zero3"] = recipe("zero3", drafter, ds_config=zero3(tmp_path), **options)
    wanted = []
    for name, r in recipes.items():
        file = tmp_path / f"{name}.yaml"
        file.write_text(dump_recipe(r))
        wanted += [(f"{file}:{step}", recipes["block" if name == "zero3" else name], step) for step in (FULL, UNEVEN)]
    env = rank_environment() | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, "-m", "tests.training.one_step", str(tmp_path / "out.safetensors"), *(key for key, _, _ in wanted)]
    both = [
        subprocess.Popen(command, env=env | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for rank in range(2)
    ]
    said = [process.communicate(timeout=240)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], "\n".join(said)
    found = load_file(tmp_path / "out.safetensors")
    for key, r, step in wanted:
        alone = gradients(r.model_copy(update={"name": f"{r.name}-alone"}), step)
        assert_equal({name.removeprefix(f"{key}/"): value for name, value in found.items() if name.startswith(f"{key}/")}, alone)
