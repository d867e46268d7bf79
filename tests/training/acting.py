"""Ranks of `kvshot train` that do something to themselves at a moment of the run: a signal, an error, nothing any more.

`Ranks` starts several, with the variables of a plain start, as forks of one process that has everything imported.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Moment = Literal["start", "step", "evaluation", "save", "export"]


@dataclass(frozen=True)
class Act:
    """What `rank` does at the `turn`-th time (from 1) of `moment`: "hang", "error", "spoil" (its weights), or the name of a signal to itself,
    which comes a while later if it ends in "later"."""

    rank: int
    moment: Moment
    what: str
    turn: int = 1


def arm(acts: list[Act]) -> None:
    """Lets this process, the rank of RANK, do its part of `acts`."""
    from kvshot_ds.training import checkpoint, export, heldout, trainer

    places: dict[str, tuple[Any, str]] = {
        "start": (trainer, "prepare"),
        "step": (trainer, "optimizer_step"),
        "evaluation": (heldout, "conversation_sums"),
        "save": (checkpoint.Checkpoints, "save"),
        "export": (export, "save_drafter"),
    }
    for act in acts:
        if act.rank == int(os.environ.get("RANK", "0")):
            place, name = places[act.moment]
            setattr(place, name, _before(act, getattr(place, name)))


def _before(act: Act, plain: Callable[..., Any]) -> Callable[..., Any]:
    turns = 0

    def call(*args: Any, **named: Any) -> Any:
        nonlocal turns
        turns += 1
        if turns == act.turn:
            if act.what == "error":
                raise ValueError("broken on purpose")
            while act.what == "hang":
                time.sleep(3600)
            if act.what == "spoil":
                args[0].drafter.norm.weight.data.fill_(float("nan"))
            elif act.what.endswith(" later"):
                threading.Timer(3, os.kill, (os.getpid(), getattr(signal, act.what.removesuffix(" later")))).start()
            else:
                os.kill(os.getpid(), getattr(signal, act.what))
        return plain(*args, **named)

    return call


@dataclass(frozen=True)
class End:
    """How a rank ended: its exit status (minus the signal's number if it was killed), and what it printed."""

    status: int
    output: str
    pid: int


class Ranks:
    """A process that forks ranks on demand. A context."""

    def __init__(self, environment: dict[str, str]):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.training.acting"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait(60)

    def train(self, recipe: Path, acts: list[Act], port: int, ranks: int = 2) -> list[End]:
        """Starts the ranks and waits for all of them; those that still run after four minutes are killed."""
        assert self.process.stdin and self.process.stdout
        order = {"recipe": str(recipe), "acts": [vars(act) for act in acts], "port": port, "ranks": ranks, "output": str(recipe.with_suffix(""))}
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return [End(**end) for end in json.loads(self.process.stdout.readline())]


def _serve() -> None:
    import deepspeed  # noqa: F401
    import torch.utils.tensorboard  # noqa: F401

    import kvshot_ds.training.trainer  # noqa: F401

    for line in sys.stdin:
        print(json.dumps(_fork(json.loads(line))), flush=True)


def _fork(order: dict[str, Any]) -> list[dict[str, Any]]:
    pids = {}
    for rank in range(order["ranks"]):
        output = Path(f"{order['output']}.rank{rank}.log")
        pid = os.fork()
        if not pid:
            _child(order, rank, output)
        pids[pid] = (rank, output)
    ends: dict[int, dict[str, Any]] = {}
    deadline = time.monotonic() + 240
    while len(ends) < len(pids):
        for pid, (rank, output) in pids.items():
            if rank not in ends and (status := os.waitpid(pid, os.WNOHANG)) != (0, 0):
                ends[rank] = {"status": os.waitstatus_to_exitcode(status[1]), "output": output.read_text(), "pid": pid}
            elif rank not in ends and time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    return [ends[rank] for rank in sorted(ends)]


def _child(order: dict[str, Any], rank: int, output: Path) -> None:
    status = 1
    try:
        with open(output, "wb") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(order["ranks"]), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(order["port"]))
        sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
        arm([Act(**act) for act in order["acts"]])
        status = _main(["train", order["recipe"]])
    finally:
        sys.stdout.flush()
        os._exit(status)


def _main(args: list[str]) -> int:
    from kvshot_ds import cli

    sys.argv = ["kvshot", *args]
    return cli.main()


if __name__ == "__main__":
    _serve()
