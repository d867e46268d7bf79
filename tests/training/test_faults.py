"""What a rank does to a run of two, started without a launcher that would end the others: they end by themselves, in time, and say why."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvshot_ds.config import Recipe, dump_recipe
from kvshot_ds.training import checkpoint
from tests.training.acting import Act, End, Ranks
from tests.training.runs import free_port, rank_environment


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(rank_environment()) as started:
        yield started


def train(ranks: Ranks, recipe: Recipe, folder: Path, *acts: Act) -> list[End]:
    file = folder / f"{recipe.name}.yaml"
    file.write_text(dump_recipe(recipe))
    ends = ranks.train(file, list(acts), free_port())
    print(*(f"{'=' * 20} rank {n}: {end.status}\n{end.output}" for n, end in enumerate(ends)), sep="\n")
    return ends


def said(end: End) -> list[str]:
    """The lines in which a rank says why it ends."""
    return [line for line in end.output.splitlines() if line.startswith("kvshot [rank")]


@pytest.mark.parametrize("gone", [0, 1])
def test_ranks_whose_peer_is_killed_say_which_and_end(recipe, tmp_path, ranks, gone):
    r = recipe("killed", epochs=3)
    ends = train(ranks, r, tmp_path, Act(gone, "step", "SIGKILL", turn=5))
    assert ends[gone].status == -signal.SIGKILL
    other = ends[1 - gone]
    assert other.status == 2
    (line,) = said(other)
    assert f"rank {gone} (" in line and f"pid {ends[gone].pid}) is gone" in line and "Traceback" not in other.output
    assert checkpoint.exists(r.run_dir / "checkpoints")


def test_a_rank_that_hangs_is_named_with_its_stack_and_all_end(recipe, tmp_path, ranks):
    ends = train(ranks, recipe("hung", hang_minutes=0.4), tmp_path, Act(1, "step", "hang", turn=2))
    assert [end.status for end in ends] == [2, 2]
    for end in ends:
        (line,) = said(end)
        assert "no progress of rank 1 (" in line and f"pid {ends[1].pid}) in phase step, step 2" in line and "for which 1 other(s) wait" in line
    assert "in call\n    time.sleep(3600)" in ends[1].output and "time.sleep" not in ends[0].output


def test_an_error_of_one_rank_is_told_once_and_ends_both(recipe, tmp_path, ranks):
    ends = train(ranks, recipe("broken"), tmp_path, Act(1, "step", "error", turn=2))
    assert [end.status for end in ends] == [2, 1]
    assert "Traceback" in ends[1].output and "ValueError: broken on purpose" in ends[1].output
    (line,) = said(ends[0])
    assert "rank 1 (" in line and "failed in phase step, step 2: ValueError: broken on purpose" in line and "Traceback" not in ends[0].output


def test_a_wrong_feature_contract_ends_both_and_is_told_once(recipe, tmp_path, ranks):
    ends = train(ranks, recipe("contract", drafter={"family": "kv_only", "kv": {"layers": (0, 2)}}), tmp_path)
    assert [end.status for end in ends] == [2, 2]
    (line,) = said(ends[0]) + said(ends[1])
    assert "key.0" in line and "capture" in line


def test_weights_that_one_rank_spoils_end_both(recipe, tmp_path, ranks):
    r = recipe("spoiled", log_every=1)
    ends = train(ranks, r, tmp_path, Act(1, "step", "spoil", turn=2))
    assert [end.status for end in ends] == [2, 2]
    assert all("not finite" in line and "step 2" in line for end in ends for line in said(end)) and any(map(said, ends))
    assert not checkpoint.exists(r.run_dir / "checkpoints")


def test_a_rank_asked_to_stop_while_it_waits_for_another_at_the_start_ends_both(recipe, tmp_path, ranks):
    """Python hears a signal only after the collective in which the rank waits; the watchdog hears it."""
    r = recipe("waiting")
    ends = train(ranks, r, tmp_path, Act(0, "start", "SIGTERM later"), Act(1, "start", "hang"))
    assert [end.status for end in ends] == [75, 75]
    assert all("SIGTERM before the first step" in end.output for end in ends)
