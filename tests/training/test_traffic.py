"""Bytes that a rank sends in a step, as computed and as the collectives of two real ranks carry them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import ds_configs
from benchmarks.memory import TOY, options_of, recipe_of
from benchmarks.synthetic import write_target
from kvshot_ds.config import Recipe, dump_recipe
from kvshot_ds.training.traffic import bytes_per_step
from tests.training.runs import free_port, rank_environment, zero3


@pytest.mark.timeout(900)
def test_the_counted_volume_is_the_computed_one(tmp_path: Path) -> None:
    """Every stage and both precisions, in one pair of processes; ZeRO-3 with small parameters kept whole, with all shared, with the frozen ones too."""
    shared = zero3(tmp_path)
    configs = ["zero0_fp32", "zero1_fp32", "zero2_fp32", "zero3_fp32", "zero0_bf16", "zero1_bf16", "zero2_bf16", shared, shared]
    target = write_target(tmp_path / "target", TOY)
    made = recipe_of(tmp_path, target, TOY, options_of("hidden_only", 1, "zero0_fp32", 64), 24).model_dump(mode="json")
    files = []
    for number, name in enumerate(configs):
        train = {**made["train"], "ds_config": name, "conversations_per_step": 6, "shard_frozen": number == len(configs) - 1, "optim": {"weight_decay": 0.1}}
        files.append(str(tmp_path / f"{number}.yaml"))
        Path(files[-1]).write_text(dump_recipe(Recipe.model_validate({**made, "name": f"run{number}", "train": train})))
    env = rank_environment() | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, "-m", "tests.training.counted", *files]
    ranks = [
        subprocess.Popen(command, env=env | {"RANK": str(r), "LOCAL_RANK": str(r)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for r in range(2)
    ]
    try:
        texts = [process.communicate(timeout=500)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    assert [process.returncode for process in ranks] == [0, 0], "\n".join(texts)
    for text in texts:
        found = [json.loads(line) for line in text.splitlines() if line.startswith('{"sent"')]
        assert len(found) == len(configs)
        for name, counted in zip(configs, found, strict=True):
            wanted = bytes_per_step(ds_configs.load(name), counted["trainable"], 2, 3, counted["frozen"])
            assert counted["sent"] == pytest.approx(wanted, rel=0.05), name


def test_one_rank_sends_nothing() -> None:
    assert bytes_per_step(ds_configs.load("zero3_bf16"), [10, 20], 1, 4, [7]) == 0


def test_by_hand() -> None:
    """Of n bytes, 4 ranks send 3/4 n in an all-gather or a reduce-scatter, and twice that in an all-reduce."""
    n = 1_000_000

    def sent(options: dict, micro_batches: int, frozen: tuple[int, ...] = ()) -> float:
        return bytes_per_step(options, [n], 4, micro_batches, frozen) / (n * 3 / 4)

    zero = "zero_optimization"
    assert sent({zero: {"stage": 0}}, 5) == pytest.approx(2 * 4, rel=1e-3)
    assert sent({zero: {"stage": 1}, "bf16": {"enabled": True}}, 5) == pytest.approx(2 * 2 + 2, rel=1e-3)
    assert sent({zero: {"stage": 2}, "bf16": {"enabled": True}}, 5) == pytest.approx(5 * 2 * 2 + 2, rel=1e-3)
    assert sent({zero: {"stage": 2, "use_multi_rank_bucket_allreduce": False}}, 5) == pytest.approx(5 * 4 + 4, rel=1e-3)
    assert sent({zero: {"stage": 2}, "communication_data_type": "fp32", "bf16": {"enabled": True}}, 5) == pytest.approx(5 * 2 * 4 + 2, rel=1e-3)
    assert sent({zero: {"stage": 3}}, 5, (n,)) == pytest.approx(5 * (4 + 4 + 4), rel=1e-3)
    assert sent({zero: {"stage": 3, "stage3_max_reuse_distance": n}}, 5) == pytest.approx(5 * (2 * 4 + 4), rel=1e-3)
    assert sent({zero: {"stage": 3, "stage3_param_persistence_threshold": 2 * n}}, 5) == pytest.approx(5 * 4 + 4, rel=1e-3)
