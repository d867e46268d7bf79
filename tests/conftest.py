"""Fixtures shared by all tests."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvshot_ds.config import Recipe

# A shell that runs the tests in the background has them ignore Ctrl-C, and all that they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

_HANDLERS = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}


@pytest.fixture(autouse=True)
def hears_signals() -> None:
    """A training that was preempted leaves its process deaf, and what that process starts would be deaf too."""
    for number, handler in _HANDLERS.items():
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


# Files that take longest, which begin first: one that began last would keep one worker busy while the other has nothing left.
LONG = (
    "training/test_resume.py", "cluster/test_slurm_train.py", "data_prep/test_exactly_once.py", "cluster/test_ray_job.py", "training/test_kill_cycles.py",
    "training/test_checkpoint.py", "training/test_on_ray.py", "training/test_watch.py", "training/test_zero.py", "sweep/test_run.py",
    "training/test_control.py", "training/test_trainer.py", "training/test_memory.py", "data_prep/test_orchestrate.py", "data_prep/test_prepare.py",
    "training/test_launchers.py", "test_benchmarks.py", "cluster/test_slurm.py", "training/test_master.py", "training/test_frozen.py",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Under `--dist loadfile --no-loadscope-reorder`, which deals files out in their order, each to the worker that is free."""
    place = {Path(__file__).parent / name: number for number, name in enumerate(LONG)}
    items.sort(key=lambda item: place.get(item.path, len(LONG)))


# Every family, injection and gate at least once, as small as they come.
DRAFTERS: dict[str, dict[str, Any]] = {
    "hidden_only": {"family": "hidden_only"},
    "eagle31": {"family": "hidden_only", "depth": 2, "fc_norm": True, "norm_output": True, "hidden_layers": "all"},
    "mtp": {"family": "hidden_only", "hidden_layers": "last"},
    "kv_only": {"family": "kv_only", "depth": 2},
    "kv_only-none": {"family": "kv_only", "kv": {"injection": "none"}},
    "kv_only-head_concat": {"family": "kv_only", "kv": {"injection": "head_concat"}},
    "kv_only-linear": {"family": "kv_only", "kv": {"injection": "linear"}},
    "kv_only-per_layer": {"family": "kv_only", "kv": {"injection": "per_layer", "layers": (2, 4)}},
    "kv_only-hidden_to_kv": {"family": "kv_only", "kv": {"injection": "hidden_to_kv"}},
    "kv_only-mlp_norm": {"family": "kv_only", "depth": 1, "kv": {"projector": "mlp_norm", "qk_norm": True}},
    "hybrid": {"family": "hybrid"},
    "hybrid-per_head": {"family": "hybrid", "gate": {"kind": "per_head"}},
    "hybrid-scalar": {"family": "hybrid", "depth": 2, "gate": {"kind": "scalar", "init": "bias:-1"}},
    "hybrid-no_gate": {"family": "hybrid", "gate": {"kind": "none", "init": "zero_delta"}},
    "cross_only": {"family": "hybrid", "cross_only": True},
    "dflash": {"family": "dflash", "depth": 2, "block_size": 4, "mask_token_id": 3},
    "kv_block": {"family": "kv_block", "depth": 2, "block_size": 5},
    "hybrid_block": {"family": "hybrid_block", "depth": 2, "block_size": 4},
}


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the tiny random Qwen3, made once per session."""
    from data_prep.targets import fetch

    return fetch("tiny", tmp_path_factory.mktemp("targets") / "tiny")


@pytest.fixture(scope="session")
def smollm2_target() -> Path:
    """Folder of the converted SmolLM2; `make test` fetches it. Tests that use it carry `@pytest.mark.smollm2`."""
    folder = Path(os.environ.get("KVSHOT_SMOLLM2", "~/.cache/kvshot-ds/smollm2")).expanduser()
    if not (folder / "config.json").is_file():
        pytest.skip(f"{folder}: SmolLM2 is not there; `kvshot target smollm2 {folder}` makes it, KVSHOT_SMOLLM2 names another folder")
    return folder


@pytest.fixture(scope="session")
def tiny_features(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path) -> Path:
    """Feature shards of 42 + 9 short conversations with the tiny target: everything any drafter reads, but layer 0's KV and most queries."""
    from data_prep.orchestrate import run
    from data_prep.pool import Pool
    from kvshot_ds.target import load_geometry
    from tests.data_prep.captures import in_this_process

    g = load_geometry(tiny_target)
    work, rng = tmp_path_factory.mktemp("data"), random.Random(0)
    for split, count in (("train", 42), ("heldout", 9)):
        lines = []
        for i in range(count):
            prompt, answer = rng.randint(4, 9), rng.randint(4, 14)
            first = rng.randrange(3, g.vocab_size - 20)
            tokens = [rng.randrange(3, g.vocab_size) for _ in range(prompt)] + [first + j for j in range(answer)]
            lines.append(json.dumps({"id": f"{split}{i:03d}", "messages": [], "tokens": tokens, "turn": [0] * prompt + [1] * answer, "source": "test"}))
        (work / "prepared").mkdir(exist_ok=True)
        (work / "prepared" / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
    (work / "prepared" / "summary.json").write_text("{}")
    capture = {"conversations_per_shard": 16, "features": {"hidden_layers": "all", "kv_layers": [1, 2, 3, 4, 5], "query_layers": "eagle3"}}
    target = {"path": tiny_target, "dtype": "fp32", "device": "cpu"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pool, "map", in_this_process)  # test_orchestrate.py shows that Ray's workers write the same bytes
        run(Recipe.model_validate({"name": "data", "work": work, "target": target, "capture": capture}))
    return work / "features"


@pytest.fixture(scope="session")
def recipe_in(tiny_features: Path, tiny_target: Path) -> Callable[..., Recipe]:
    """recipe_in(folder, name, family, train options) -> Recipe with that work folder over the shared shards. For what several tests share."""

    def make(work: Path, name: str = "run", drafter: str | dict = "hidden_only", **train: object) -> Recipe:
        small = {"draft_vocab_size": 100, "objective": {"steps": 3}, "conversations_per_step": 4, "checkpoint_every": 3}
        here = {"data_workers": 0, "log_every": 2, "threads_per_rank": 1}
        options = {"drafter": DRAFTERS[drafter] if isinstance(drafter, str) else drafter, **small, **here, **train}
        target = {"path": tiny_target, "dtype": "fp32", "device": "cpu"}
        return Recipe.model_validate({"name": name, "work": work, "shards": tiny_features, "target": target, "train": options})

    return make


@pytest.fixture
def recipe(recipe_in: Callable[..., Recipe], tmp_path: Path, one_rank: None) -> Callable[..., Recipe]:
    """recipe(name, family, train options) -> Recipe with its own work folder over the shared shards."""
    return partial(recipe_in, tmp_path)


@pytest.fixture
def one_rank() -> Iterator[None]:
    with rank_forgotten():
        yield


@contextmanager
def rank_forgotten() -> Iterator[None]:
    """Training sets the rank's variables in os.environ; they must not outlive it."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "DS_ACCELERATOR"):
            patch.setenv(name, "x")
            patch.delenv(name)
        yield


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """disk(size): a folder that holds no more; called again, it grows."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def disk(size: str) -> Path:
        options = f"{'remount,' if folder.is_mount() else ''}size={size}"
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"mounting a small tmpfs is not allowed here: {done.stderr.strip()}")
        return folder

    yield disk
    if folder.is_mount():
        subprocess.run(["umount", folder], check=True)
