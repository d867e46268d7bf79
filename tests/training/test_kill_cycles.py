"""Many kills of one run, anywhere: it ends in the weights of a run that nobody disturbed."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from kvshot_ds.config import Recipe
from kvshot_ds.training import checkpoint, trainer
from kvshot_ds.training.launch import run
from kvshot_ds.training.writer import Writer
from tests.training.forked import Run
from tests.training.forked import train as trained
from tests.training.runs import assert_same, board, weights

CYCLES = 25


def _dies(recipe: Recipe, victim: int, event: int) -> None:
    """Trains until rank `victim` is about to begin or has just ended the `event`-th of what may matter: a step, a file, a sync, a rename's neighbours."""
    left = [event if int(os.environ["RANK"]) == victim else 1 << 62]

    def count() -> None:
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)

    def watched(owner: Any, name: str) -> None:
        plain: Callable[..., Any] = getattr(owner, name)

        def call(*arguments: Any, **options: Any) -> Any:
            count()
            found = plain(*arguments, **options)
            count()
            return found

        setattr(owner, name, call)

    watched(trainer, "optimizer_step")
    watched(Writer, "_keep")
    for name in ("_sync", "write_atomic", "write_json", "_prune", "_clear", "find"):
        watched(checkpoint, name)
    run(recipe)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_twenty_five_kills_leave_no_trace_in_the_weights(recipe):
    options = {"epochs": 6, "checkpoint_every": 2, "log_every": 1, "optim": {"ema_decay": 0.9}}
    whole, killed = recipe("whole", **options), recipe("killed", **options)
    trained(whole, 2)
    moments, deaths = random.Random(0), []
    for cycle in range(CYCLES):
        if cycle % 5 == 4:  # by the clock, wherever that is: most likely while the run starts
            attempt = Run(2, run, killed)
            time.sleep(moments.uniform(0, 3))
            attempt.kill()
        else:
            attempt = Run(2, _dies, killed, victim := moments.randrange(2), moments.randrange(1, 60 if victim == 0 else 25))
            attempt.wait_for_a_death()
            attempt.kill()
        assert not (killed.run_dir / "train.json").exists(), f"the run was over after {cycle} kills"
        latest = killed.run_dir / "checkpoints" / "latest"
        deaths.append(latest.read_text() if latest.is_file() else "")
    done = trained(killed, 2)[0]
    assert deaths == sorted(deaths) and len(set(deaths)) > 5, deaths  # the run went on between the kills, and never back
    assert len(done["resumed_from"]) > 5
    assert_same(weights(killed), weights(whole))
    assert board(killed)["train/loss"] == board(whole)["train/loss"]
