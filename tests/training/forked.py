"""Runs of several ranks as processes forked from one that has imported everything: a start takes a second, where that of a launcher takes ten."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as ended
from typing import Any

from kvshot_ds.config import Recipe
from kvshot_ds.training.launch import run
from tests.training.runs import free_port

_PRELOADED = ["torch", "deepspeed", "deepspeed.checkpoint.ds_to_universal", "safetensors.torch", "kvshot_ds.training.trainer", "tests.training.forked"]


class Run:
    """`call(*arguments)` in each of so many ranks, started at once."""

    def __init__(self, ranks: int, call: Callable[..., Any], *arguments: Any):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)
        port = free_port()
        self._ends, self._processes = [], []
        for rank in range(ranks):
            here, there = context.Pipe(duplex=False)
            process = context.Process(target=_rank, args=(there, rank, ranks, port, call, arguments), daemon=True)
            process.start()
            there.close()
            self._ends.append(here)
            self._processes.append(process)

    def kill(self) -> None:
        """As a node that fails: all at once, without a chance to say anything."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()

    def wait_for_a_death(self, seconds: float = 280) -> None:
        """Until the first of them has ended."""
        assert ended([process.sentinel for process in self._processes], seconds), "no rank ended"

    def wait(self, seconds: float = 280) -> list[Any]:
        """What each rank returned, or what it raised as text. None of one that ended without a word."""
        out = []
        for end in self._ends:
            try:
                out.append(end.recv() if end.poll(seconds) else "no answer")
            except EOFError:
                out.append(None)
        self.kill()
        return out


def train(recipe: Recipe, ranks: int = 1) -> list[dict[str, Any]]:
    """The summaries of a whole run; fails with what its ranks raised."""
    done = Run(ranks, run, recipe).wait()
    assert all(isinstance(summary, dict) for summary in done), done
    return done


def _rank(end: Connection, rank: int, ranks: int, port: int, call: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), DS_ACCELERATOR="cpu")
    try:
        end.send(call(*arguments))
    except BaseException as error:
        end.send(f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
        raise
