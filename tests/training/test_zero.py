"""ZeRO 0-3, with and without offload, on 1, 2 and 4 ranks: the same losses at every step, the same weights, whatever the number of forwards in a step."""

from __future__ import annotations

import pytest

from kvshot_ds.config import Recipe
from kvshot_ds.training.launch import run
from tests.training.runs import assert_close, board, weights, zero3
from tests.training.several import item, start, train_all

CONFIGS = ("zero0_fp32", "zero1_fp32", "zero2_fp32", "zero3", "zero2_offload_fp32", "zero3_offload_fp32")
CLIP = 0.05  # so small that it acts at every step: each rank must see the norm of the whole gradient
LONG = {"epochs": 2, "max_steps": 20, "log_every": 1, "checkpoint_every": 1000, "optim": {"lr": 1e-3, "clip": CLIP, "weight_decay": 0.1}}


def assert_same_course(found: Recipe, wanted: Recipe) -> None:
    a, b = board(found), board(wanted)
    for tag in ("train/loss", "train/grad_norm"):
        assert len(a[tag]) == len(b[tag]) == found.train.max_steps
        assert a[tag] == pytest.approx(b[tag], rel=1e-5), (found.name, tag)
    assert min(a["train/grad_norm"]) > CLIP
    assert_close(weights(found), weights(wanted), rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_losses_agree_over_stages_ranks_and_uneven_steps(recipe, tmp_path, ranks):
    """uneven: more and fewer forwards than DeepSpeed was told of, by step; packed: as many as the conversations' lengths make."""

    def made(name: str, config: str, **options: object) -> Recipe:
        return recipe(name, "hybrid", ds_config=zero3(tmp_path) if config == "zero3" else config, **LONG, **options)

    wanted = made("wanted", "zero0_fp32")
    run(wanted)
    even = [made(name, name) for name in CONFIGS]
    uneven = [made(f"{name}-uneven", name) for name in CONFIGS] if ranks < 4 else []
    packed = [made(f"{name}-packed", name, tokens_per_micro_batch=30) for name in ("zero1_fp32", "zero2_fp32", "zero3")]
    items = [item(r, tmp_path, uneven=r in uneven) for r in (*even, *uneven, *packed)]
    if ranks == 1:
        train_all(items)
    else:
        start(items, tmp_path, ranks)
    for r in (*even, *uneven, *packed):
        assert_same_course(r, wanted)
