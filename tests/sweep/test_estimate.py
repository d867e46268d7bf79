"""What a dry run tells, against what was counted otherwise."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from click.testing import CliRunner

from kvshot_ds.cli import cli
from kvshot_ds.config import Recipe, dump_recipe
from kvshot_ds.drafters.build import build_drafter
from kvshot_ds.errors import ConfigError
from kvshot_ds.features.plan import Guess
from kvshot_ds.sweep import estimate
from kvshot_ds.sweep.estimate import checkpoint_bytes, dry_run, planned, train_memory
from kvshot_ds.sweep.grid import Data, expand, trial_recipe
from kvshot_ds.training.launch import run
from kvshot_ds.training.plan import Plan
from tests.sweep.plans import TINY, data, recipe_of, write_shards

AXES = [{"family": ["hidden_only", "kv_only"]}]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No Ray, and no account of the memory, which takes seconds."""

    def started(*_: Any, **__: Any) -> None:
        pytest.fail("a dry run starts Ray")

    monkeypatch.setattr(ray, "init", started)
    monkeypatch.setattr(Plan, "account", SimpleNamespace(bytes=1 << 20, peak={"weights": (1 << 20, 0)}, on_cpu=True))


@pytest.fixture
def captured(tmp_path: Path) -> Callable[..., Recipe]:
    """captured(sweep options, train options): a recipe over shards of 20 conversations, of which only the index is there."""
    write_shards(tmp_path / "features", data())
    return lambda sweep=None, **train: recipe_of(tmp_path, {"axes": AXES, **(sweep or {})}, **train)


def table(lines: list[str]) -> list[list[str]]:
    """Cells of the table, without its head."""
    rows = [re.split(r"  +", line) for line in lines]
    head = next(i for i, row in enumerate(rows) if row[0] == "cell")
    return rows[head + 1 : rows.index([""], head)]


def complete(recipe: Recipe, trial: int, seconds: float) -> None:
    """Leaves what is looked at of a trained trial."""
    one = trial_recipe(recipe, expand(recipe).trials[trial])
    one.run_dir.mkdir(parents=True)
    (one.run_dir / "recipe.yaml").write_text(dump_recipe(one))
    (one.run_dir / "train.json").write_text(json.dumps({"seconds": seconds, "world_size": 1}))


def test_trials_with_parameters_steps_and_tokens(captured: Callable[..., Recipe]) -> None:
    recipe = captured({"seeds": [0, 4]}, epochs=3)
    lines = dry_run(recipe)
    assert lines[0] == "sweep mine: 4 trials: 2 cells, seeds 0, 4; compared with family=hidden_only"
    rows = table(lines)
    grid = expand(recipe)
    tokens = 3 * sum(tokens for tokens, _ in data().sizes)
    for row, trial in zip(rows, grid.trials, strict=True):
        train = trial_recipe(recipe, trial).train
        size = sum(p.numel() for p in build_drafter(train.drafter, TINY, train.draft_vocab_size).parameters()) / 1e6
        drafter = f"{train.drafter.family}, depth {train.drafter.depth}"
        assert row[:6] == [trial.cell, str(trial.seed), drafter, f"{size:.2f}", "15", f"{tokens:,}"] and row[-2:] == ["-", trial.name]
    assert f"{4 * tokens:,} tokens, " in "\n".join(lines)


def test_what_is_trained_already_is_not_counted(captured: Callable[..., Recipe]) -> None:
    recipe = captured()
    complete(recipe, 1, 10)
    lines = dry_run(recipe)
    assert [row[-2] for row in table(lines)] == ["-", "trained"] and "1 trial is trained already, 1 is to be trained" in lines
    assert any(line.startswith(f"{sum(tokens for tokens, _ in data().sizes):,} tokens") for line in lines)


def hours(lines: list[str]) -> str:
    [line] = [line for line in lines if "device-hours" in line]
    return line


def test_hours_from_the_same_drafter_then_from_others_then_from_the_peak(captured: Callable[..., Recipe]) -> None:
    recipe = captured({"seeds": [0, 1]})
    assert hours(dry_run(recipe)).startswith("device-hours: not known; train.peak_tflops")
    stated = hours(dry_run(captured({"seeds": [0, 1]}, peak_tflops=1e-6)))
    assert "reckoned from 30% of the 1e-06 TFLOP/s of train.peak_tflops;" in stated and not stated.startswith("0 ")
    complete(recipe, 0, 3600.0)
    mixed = hours(dry_run(recipe))
    assert "what trials of the same drafter have reached here" in mixed and "what trials of other drafters have reached here" in mixed
    complete(recipe, 1, 7200.0)
    assert hours(dry_run(recipe)).startswith("3 device-hours of training, reckoned from what trials of the same drafter have reached here;"), (
        "one of each is left"
    )


def test_how_many_fit(captured: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimate.os, "sched_getaffinity", lambda _: set(range(6)))
    one = captured()
    two = one.model_copy(update={"ray": one.ray.model_copy(update={"ranks": 2})})
    capped = captured({"parallel": 1})
    for recipe, room in ((one, 6), (two, 3), (capped, 1)):
        assert any(f") {room} at once; on a cluster" in line for line in dry_run(recipe)), room


def test_disk_that_is_too_small_is_said(captured: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch) -> None:
    def disk(**sweep: Any) -> str:
        return next(line for line in dry_run(captured(sweep)) if line.startswith("disk at its most"))

    assert "NOT ENOUGH" not in disk() and "checkpoints of all" in disk(keep_checkpoints=True)
    monkeypatch.setattr(estimate.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1000})())
    assert disk().endswith("NOT ENOUGH")


def test_remarks(captured: Callable[..., Recipe]) -> None:
    cells = {"a": {}, "b": {}, "out": {"depth": 2}, "warm": {"family": "hybrid", "warm_start": "cell:a", "lr": 0.5}}
    text = "\n".join(dry_run(captured({"axes": [{"drafter": cells}], "exclude": [{"depth": 2}]})))
    assert "1 cell is left out by sweep.exclude: drafter=out\n" in text and "drafter=b is the same training as drafter=a" in text
    assert "learning rates differ: 0.001, but 0.5 (drafter=warm)" in text
    assert "scratch for drafter=warm: " in text and "continued for drafter=warm: " in text and text.endswith("  sweep:\n    controls: add")
    assert "warm starts, each from the trial of its own seed:\n  drafter=warm from drafter=a\n" in text


def test_controls_and_what_they_start_from(captured: Callable[..., Recipe]) -> None:
    cells = {"a": {}, "warm": {"family": "hybrid", "warm_start": "cell:a"}, "cold": {"family": "hybrid"}}
    text = "\n".join(dry_run(captured({"axes": [{"drafter": cells}], "controls": "add"})))
    assert "\n  drafter=warm control=continued from drafter=a\n" in text
    assert text.split("matched controls:\n")[1].splitlines()[:2] == [
        "  scratch of drafter=warm is the cell drafter=cold",
        "  continued of drafter=warm is the cell drafter=warm control=continued",
    ]


def test_tokens_of_broken_passes_are_told_as_reckoned(captured: Callable[..., Recipe]) -> None:
    lines = dry_run(captured(max_steps=7, epochs=2))
    assert table(lines)[0][4:6] == ["7", "about 1,386"] and any(line.startswith("about 2,772 tokens, about ") for line in lines)


def test_diagnostics_that_are_to_be_taken_are_told_as_a_cost(captured: Callable[..., Recipe]) -> None:
    assert not any("sweep.diagnose" in line for line in dry_run(captured()))
    recipe = captured({"diagnose": True})
    for left in (2, 1, 0):
        said = [line for line in dry_run(recipe) if line.startswith("sweep.diagnose=true looks at 64 held-out conversations with each drafter")]
        assert len(said) == bool(left) and all(f"({left} to do)" in line for line in said)
        if left:
            complete(recipe, left - 1, 1.0)
            (trial_recipe(recipe, expand(recipe).trials[left - 1]).run_dir / "diagnostics.json").write_text("{}")


@pytest.mark.parametrize(
    ("sweep", "more", "said"), [({"halving": {"enabled": True}}, {}, "sweep.halving.enabled"), ({}, {"gpus_per_rank": 0.5}, "ranks cannot share a GPU")]
)
def test_what_the_run_would_refuse_it_refuses_too(captured: Callable[..., Recipe], sweep: dict[str, Any], more: dict[str, Any], said: str) -> None:
    recipe = captured(sweep)
    with pytest.raises(ConfigError, match=said):
        dry_run(recipe.model_copy(update={"ray": recipe.ray.model_copy(update=more)}))


def test_before_anything_is_captured_or_prepared(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, {"axes": AXES}, draft_vocab_size=1000)
    unknown = dry_run(recipe, "smollm2-135m")
    assert any("--conversations and --tokens-per-conversation give them" in line for line in unknown)
    assert [row[4:7] for row in table(unknown)] == [["?"] * 3] * 2 and float(table(unknown)[0][3]) > 1
    told = dry_run(recipe, "smollm2-135m", Guess(100, 200, 0.5))
    assert [row[4:6] for row in table(told)] == [["25", "20,000"]] * 2 and any("depend on the data and will bear other names" in line for line in told)
    (tmp_path / "prepared").mkdir()
    record = {"id": "x", "source": "s", "tokens": [1] * 10, "turn": [0] * 4 + [1] * 6}
    (tmp_path / "prepared" / "train.jsonl").write_text(f"{json.dumps(record)}\n" * 12)
    assert [row[4:6] for row in table(dry_run(recipe, "smollm2-135m"))] == [["3", "120"]] * 2
    with pytest.raises(ConfigError, match=r"targets/none: no such folder.*--target-shape"):
        dry_run(recipe)


def test_a_known_target_that_is_not_there_is_known_by_its_name(tmp_path: Path) -> None:
    done = CliRunner().invoke(
        cli, ["sweep", "run", "recipes/qwen3_8b/sweep_table5.yaml", f"work={tmp_path}", "sweep.seeds=[0]", "--dry-run", "--conversations", "800"]
    )
    assert done.exit_code == 0, done.output
    rows = table(done.output.splitlines())
    assert len(rows) == 12 and {row[4] for row in rows} == {"300"} and list(tmp_path.iterdir()) == []


def test_memory_of_a_trial(captured: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    recipe = captured()
    line = train_memory(trial_recipe(recipe, expand(recipe).trials[0]))
    assert "\n" not in line and re.match(r"hidden_only, depth 1: about \d+ MiB of the CPU for each rank \(", line)


@pytest.mark.parametrize("ds_config", ["zero0_fp32", "zero2_bf16"])
def test_a_checkpoint_is_as_large_as_told(recipe: Callable[..., Recipe], ds_config: str) -> None:
    one = recipe(max_steps=2, checkpoint_every=1, ds_config=ds_config)
    run(one)
    [folder] = one.run_dir.glob("checkpoints/*/")
    found = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    assert 0.9 < checkpoint_bytes(planned(one, Data.of(one))) / found < 1.01


def test_the_data_of_a_plan_is_that_of_its_shards(captured: Callable[..., Recipe]) -> None:
    found = Data.of(captured())
    assert (found.keys, found.sizes) == (data().keys, data().sizes) and found.digest
