"""The benchmarks of the trainer run on tiny shapes: trainer and bare loop end in the same weights, ranks are started and counted."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

from benchmarks import memory, ranks, train

TINY = ["--width", "32", "--length", "40", "--draft-vocab", "64", "--steps", "2", "--rounds", "1"]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("only", "printed"), [("bare", r"^trainer / bare loop: \d+\.\d{3}$"), ("scaling", r"^weak scaling 1 -> 2 ranks: \d+\.\d{3}, by round: ")]
)
def test_it_compares_and_prints(only: str, printed: str) -> None:
    done = CliRunner().invoke(train.main, [*TINY, "--clock", "cpu", "--only", only])
    assert done.exit_code == 0, done.output
    assert re.search(printed, done.output, re.MULTILINE)


def test_contenders_that_end_in_other_weights_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    recipe = train.prepared(tmp_path, {"family": "hidden_only"}, {"draft_vocab_size": 64}, 40, 2, 32)
    name, folder = "norm.weight", tmp_path / "runs" / "round0" / "drafter"
    folder.mkdir(parents=True)
    save_file({name: torch.ones(32)}, folder / "model.safetensors")
    monkeypatch.setattr(train, "by_trainer", lambda *_: 1.0)
    monkeypatch.setattr(train, "bare", lambda *_: (1.0, {name: torch.ones(32) * 1.01}))
    with pytest.raises(RuntimeError, match=r"norm\.weight differs by 0\.0[01]"):
        train.against_bare(recipe, "cpu", 1)


@pytest.mark.timeout(900)
def test_a_rank_that_fails_is_named() -> None:
    with pytest.raises(RuntimeError, match="rank 0 ended with 1"):
        ranks.run("benchmarks.memory", {"toy": {}}, 1)


@pytest.mark.timeout(900)
def test_memory_is_compared_in_fresh_processes() -> None:
    planned, measured = memory.compare("hidden_only", 1, "zero2_fp32", 1, 64, 64, memory.TOY)
    assert len(measured) == 1 and planned > 1e5  # a toy is too small for the process to be like the plan
