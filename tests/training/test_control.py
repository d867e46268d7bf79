"""A run asked to stop, in each of its phases, alone, on two ranks, and through the deepspeed launcher: it leaves a state that resumes, and status 75."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvshot_ds import cli
from kvshot_ds.config import Recipe, dump_recipe
from kvshot_ds.errors import Preempted
from kvshot_ds.training import checkpoint, export, heldout, rng, trainer
from kvshot_ds.training.launch import run
from tests.training.acting import Act, Ranks
from tests.training.runs import assert_same, free_port, rank_environment, run_and_stop, weights


@pytest.fixture(autouse=True)
def hearing() -> Iterator[None]:
    """A run that was asked to stop leaves its process deaf, which is not meant for the tests that follow."""
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def saved(recipe: Recipe) -> list[int]:
    """Steps of the checkpoints of a run."""
    return sorted(int(path.name.removeprefix("step-")) for path in (recipe.run_dir / "checkpoints").glob("step-*"))


def strike(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, number: int, turn: int = 1) -> None:
    """Sends `number` to this process when `owner.name` is about to be called for the `turn`-th time."""
    plain, turns = getattr(owner, name), []

    def call(*args: Any, **named: Any) -> Any:
        turns.append(1)
        if len(turns) == turn:
            os.kill(os.getpid(), number)
        return plain(*args, **named)

    monkeypatch.setattr(owner, name, call)


@pytest.fixture
def undisturbed(recipe) -> dict[str, Any]:
    r = measured(recipe("undisturbed"))
    run(r)
    return weights(r)


def measured(r: Recipe) -> Recipe:
    """Looks at the held-out split after steps 4 and 8, in many batches; checkpoints after 3, 6 and 9; 11 steps."""
    options = r.model_dump() | {"eval": {"conversations_per_micro_batch": 1}}
    options["train"] |= {"eval_every": 4, "keep_checkpoints": 9}
    return Recipe.model_validate(options)


def test_a_stop_in_each_phase_of_one_rank_resumes_to_the_same_weights(recipe, undisturbed, capsys):
    r = measured(recipe("asked"))

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Preempted, match="SIGTERM before the first step"):
        strike(patch, trainer, "load_parts", signal.SIGTERM)
        run(r)
    assert saved(r) == []
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN  # launchers send it again while the rank ends

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Preempted, match=r"after step 2 of 11 \(SIGUSR1 to rank 0\)"):
        strike(patch, trainer, "optimizer_step", signal.SIGUSR1)
        run(r)
    assert saved(r) == [2]

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Preempted, match="after step 4 of 11"):
        strike(patch, heldout, "conversation_sums", signal.SIGTERM, turn=3)
        run(r)
    assert saved(r) == [2, 3, 4] and "4" not in heldout.measured(r.run_dir)  # the look was left

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Preempted, match="after step 6 of 11"):
        strike(patch, checkpoint.Checkpoints, "save", signal.SIGTERM)
        run(r)
    assert saved(r) == [2, 3, 4, 6] and "4" in heldout.measured(r.run_dir)  # that save is the last one; the look was made up for

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):  # a second Ctrl-C does not wait
        strike(patch, trainer, "optimizer_step", signal.SIGINT)
        patch.setattr("kvshot_ds.training.control._AGAIN", 0.0)
        strike(patch, trainer, "log_point", signal.SIGINT)
        run(r)
    assert saved(r)[-1] == 6

    with pytest.MonkeyPatch.context() as patch:
        strike(patch, export, "save_drafter", signal.SIGTERM)
        assert cli.guarded(lambda: run(r)) == 0  # the export is finished
    assert_same(weights(r), undisturbed)
    assert "Ctrl-C again" not in capsys.readouterr().out
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize(("owner", "name"), [(checkpoint, "read_state"), (rng, "restore")])
def test_a_stop_while_a_checkpoint_is_looked_for_or_loaded_is_a_stop_and_costs_nothing(recipe, capsys, owner, name):
    r = recipe("loading")
    run_and_stop(r, 7)
    with pytest.MonkeyPatch.context() as patch:
        strike(patch, owner, name, signal.SIGTERM)
        assert cli.guarded(lambda: run(r)) == Preempted.STATUS
    assert "SIGTERM before the first step" in capsys.readouterr().err and saved(r) == [3, 6]


def test_the_time_limit_stops_with_a_checkpoint_and_the_status_of_a_requeue(recipe, capsys):
    r = recipe("limited", max_minutes=1e-6)
    assert cli.guarded(lambda: run(r)) == Preempted.STATUS
    assert "after step 2 of 11 (the limit of train.max_minutes=1e-06)" in capsys.readouterr().err and saved(r) == [2]
    rest = r.model_copy(update={"train": r.train.model_copy(update={"max_minutes": 0})})
    assert run(rest)["steps"] == 11


def test_a_time_limit_too_short_for_the_look_that_is_owed_is_an_error_and_no_endless_requeue(recipe, capsys):
    r = recipe("owing", max_minutes=1e-6, eval_every=2)
    assert cli.guarded(lambda: run(r)) == Preempted.STATUS
    assert cli.guarded(lambda: run(r)) == 2
    assert "train.max_minutes=1e-06 is over before the look at the held-out split that step 2 owes" in capsys.readouterr().err


def launched(recipe: Recipe, folder: Path, deaf: bool) -> subprocess.Popen[str]:
    """Two ranks by the deepspeed launcher, which, if `deaf`, and its own child too, ignores SIGUSR1, as cluster/slurm/train.sbatch has it."""
    file = folder / f"{recipe.name}.yaml"
    file.write_text(dump_recipe(recipe))
    command = [str(Path(sys.executable).with_name("deepspeed")), "--num_accelerators", "2", "--master_port", str(free_port())]
    command += ["--module", "kvshot_ds.cli", "train", str(file)]
    if deaf:
        command = ["sh", "-c", 'trap "" USR1; exec "$@"', "sh", *command]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=rank_environment(), start_new_session=True)


def ended(process: subprocess.Popen[str]) -> str:
    """All that a launcher and its ranks printed."""
    try:
        return process.communicate(timeout=280)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_two_ranks_stop_together_whichever_is_asked_and_resume_to_the_same_weights(recipe, tmp_path):
    calm, r = measured(recipe("calm")), measured(recipe("asked"))
    asked = [
        (Act(1, "start", "SIGTERM"), "SIGTERM before the first step", []),
        (Act(1, "step", "SIGUSR1"), "after step 2 of 11 (SIGUSR1 to rank 1)", [2]),
        (Act(0, "evaluation", "SIGTERM", turn=2), "after step 4 of 11 (SIGTERM to rank 0)", [2, 3, 4]),
        (Act(1, "save", "SIGTERM"), "after step 6 of 11 (SIGTERM to rank 1)", [2, 3, 4, 6]),
    ]
    with Ranks(rank_environment()) as ranks:

        def trained(one: Recipe, *acts: Act) -> tuple[list[int], str]:
            """The status of each rank, and what they printed."""
            (file := tmp_path / f"{one.name}.yaml").write_text(dump_recipe(one))
            ends = ranks.train(file, list(acts), free_port())
            return [end.status for end in ends], "".join(end.output for end in ends)

        statuses, output = trained(calm)
        assert statuses == [0, 0] and "calm: 11 steps" in output, output
        for act, why, steps in asked:
            statuses, output = trained(r, act)
            assert statuses == [Preempted.STATUS] * 2 and output.count(why) == 1, output
            assert saved(r) == steps
        statuses, output = trained(r, Act(0, "export", "SIGTERM"))
        assert statuses == [0, 0], output
    assert_same(weights(r), weights(calm))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_to_the_launcher_and_all_ends_with_a_checkpoint(recipe, tmp_path, number):
    """As a terminal or Slurm sends it, to the whole group. Of SIGTERM and SIGINT the launcher itself dies; to SIGUSR1 it can be made deaf."""
    r = recipe("all", epochs=400, checkpoint_every=10_000)
    process = launched(r, tmp_path, deaf=number == signal.SIGUSR1)
    assert process.stdout
    for line in process.stdout:
        if "steps of 4 conversations" in line:
            break
    status = r.run_dir / "status.json"
    while not (status.is_file() and json.loads(status.read_text())["step"]):
        assert process.poll() is None
        time.sleep(0.05)
    os.killpg(process.pid, number)
    output = ended(process)
    assert "stopped after step" in output and f"({number.name} to rank" in output, output
    assert len(saved(r)) == 1
    assert process.returncode == (Preempted.STATUS if number == signal.SIGUSR1 else -number)
