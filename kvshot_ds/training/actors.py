"""Ranks as actors of Ray: placed, started, followed, told to stop. For one training (on_ray.py), and for one after another in the same processes (sweeps)."""

from __future__ import annotations

import math
import os
import re
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from kvshot_ds.config import RayConfig, Recipe
from kvshot_ds.errors import ConfigError, KvshotError, Preempted
from kvshot_ds.probes import reachable
from kvshot_ds.training.verdict import AGAIN

_GRACE = 60.0  # seconds that the other ranks have to end by themselves once one has failed
NOTICE = 60.0  # seconds between remarks while Ray has no room


class WorkerDied(Exception):
    """A rank's process or its node is gone."""


@dataclass(frozen=True)
class Place:
    """Where an actor runs. address: of its node. gpus: ids of those that Ray gave it."""

    node: str
    address: str
    process: int
    gpus: tuple[str, ...]


class Rank:
    """An actor whose process is one rank; Ray calls its methods in the main thread, where signals arrive."""

    def place(self) -> Place:
        import ray

        return Place(ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), os.getpid(), tuple(map(str, ray.get_gpu_ids())))

    def free_port(self) -> int:
        with socket.socket() as probe:
            probe.bind(("", 0))
            port: int = probe.getsockname()[1]
            return port

    def run(self, recipe: Recipe, folder: str, variables: dict[str, str]) -> dict[str, Any]:
        enter(folder, variables)
        from kvshot_ds.training import launch

        return launch.run(recipe)


def enter(folder: str, variables: dict[str, str]) -> None:
    """Makes this process a rank that works in `folder`. Raises ConfigError if its node does not see the folder."""
    try:
        os.chdir(folder)
    except OSError as error:
        raise ConfigError(f"{folder}: a worker on {socket.gethostname()} cannot enter it ({error}); start from a folder that all nodes see") from None
    os.environ.update(variables)


class Stop:
    """The signal by which this process was asked to stop, once there was one."""

    def __init__(self) -> None:
        self.name = ""

    def hear(self, number: int, frame: FrameType | None) -> None:
        self.name = self.name or signal.Signals(number).name


@contextmanager
def session(config: RayConfig, cores: int | None, echo: bool) -> Iterator[Stop]:
    """The cluster of RAY_ADDRESS, or a Ray of this process's own with so many CPU cores (None: the machine's); and signals heard rather than died of.

    echo: what the ranks print is printed here. Raises ConfigError if nobody answers there, or the machine can never hold the ranks of one training.
    """
    import ray

    address = os.environ.get("RAY_ADDRESS") or "local"
    if not reachable(address):  # of which Ray would take minutes to say so
        raise ConfigError(f"RAY_ADDRESS={address}: nobody answers there; start Ray on that head (ray start --head), or unset RAY_ADDRESS for a Ray of its own")
    local: dict[str, Any] = {"num_cpus": cores, "include_dashboard": False, "object_store_memory": 1 << 27} if address == "local" else {}
    try:
        ray.init(address=address, logging_level="ERROR", log_to_driver=echo, **local)
    except ValueError as error:
        raise ConfigError(f"RAY_ADDRESS={address}: {error}; expected HOST:PORT, or unset it for a Ray of its own") from None
    stop, numbers = Stop(), (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    before = {number: signal.signal(number, stop.hear) for number in numbers}  # after ray.init, which sets one of its own
    try:
        for kind, each in wanted(config).items() if address == "local" else ():
            need, has = config.ranks * each, ray.cluster_resources().get(kind, 0)
            if need > has:
                raise ConfigError(
                    f"ray.ranks={config.ranks} with ray.{kind.lower()}s_per_rank={each:g} need {need:g} {kind}s, this machine has {has:g}; set "
                    f"RAY_ADDRESS to a cluster's, or lower one of them"
                )
        yield stop
    finally:
        ray.shutdown()
        for number, handler in before.items():
            signal.signal(number, handler)


def wanted(config: RayConfig) -> dict[str, float]:
    """Resources of one rank. Raises ConfigError for a part of a GPU."""
    if 0 < config.gpus_per_rank < 1:
        raise ConfigError(f"ray.gpus_per_rank={config.gpus_per_rank:g}: ranks cannot share a GPU; give each a whole one, or 0 to train on CPU")
    return {"CPU": config.cpus_per_rank} | ({"GPU": config.gpus_per_rank} if config.gpus_per_rank else {})


def room(config: RayConfig) -> Any:
    """A placement group for all ranks, as close together as Ray finds it."""
    from ray.util.placement_group import placement_group

    return placement_group([wanted(config)] * config.ranks, strategy="PACK")


class Ranks:
    """One actor a rank, in a placement group. Their processes may run one training after another."""

    def __init__(self, config: RayConfig, group: Any, kind: type[Rank] = Rank):
        """kind: the actor's class."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        # GPUs are named in full by `environments`; Ray's own choice of variable would hide those of the other ranks
        actor = ray.remote(num_cpus=config.cpus_per_rank, num_gpus=config.gpus_per_rank, max_restarts=0)(kind)
        self._actors = [actor.options(scheduling_strategy=PlacementGroupSchedulingStrategy(group, number)).remote() for number in range(config.ranks)]
        self.pending: list[Any] = [one.place.remote() for one in self._actors]  # calls that have not ended
        self._calls = list(self.pending)
        self._places: list[Place] = []
        self._variables: list[dict[str, str]] = []
        self.errors: list[Exception] = []  # what the ranks of this training raised

    def started(self, seconds: float) -> bool:
        """Waits so long for the processes; True once all are there. Raises RayActorError if one is gone already."""
        import ray

        if self._variables:
            return True
        if ray.wait(self._calls, num_returns=len(self._calls), timeout=seconds)[1]:
            return False
        places: list[Place] = ray.get(self._calls)
        order = by_node(places)
        self._actors, self._places = [self._actors[i] for i in order], [places[i] for i in order]
        self._variables = environments(self._places, ray.get(self._actors[0].free_port.remote()))
        self.pending = []
        return True

    def run(self, recipe: Recipe, *more: Any) -> None:
        """Begins a training. more: further arguments of the actors' method."""
        folder = str(Path.cwd())
        self._calls = [one.run.remote(recipe, folder, own, *more) for one, own in zip(self._actors, self._variables, strict=True)]
        self.pending, self.errors, self._deadline = list(self._calls), [], math.inf

    def ended(self, seconds: float) -> bool:
        """Waits so long; True once all ranks have ended, or the time is over that they have after the first failure."""
        import ray

        done, self.pending = ray.wait(self.pending, timeout=seconds)
        for call in done:
            try:
                ray.get(call)
            except Exception as error:  # noqa: BLE001 - judged by the caller, once all have ended
                self.errors.append(error)
                self._deadline = min(self._deadline, time.monotonic() + _GRACE)
        return not self.pending or time.monotonic() >= self._deadline

    def result(self) -> Any:
        """What rank 0 returned."""
        import ray

        return ray.get(self._calls[0])

    def tell(self) -> None:
        """SIGTERM to the processes of all ranks, on their nodes. A rank that is gone already needs none."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        tell = ray.remote(num_cpus=0, max_retries=0)(lambda process: os.kill(process, signal.SIGTERM))
        calls = [tell.options(scheduling_strategy=NodeAffinitySchedulingStrategy(p.node, soft=False)).remote(p.process) for p in self._places]
        ray.wait(calls, num_returns=len(calls), timeout=_GRACE)

    def close(self) -> None:
        """Ends the processes."""
        import ray

        for one in self._actors:
            ray.kill(one)


def verdict(errors: list[Exception], stopped: str) -> Exception:
    """What becomes of a start that failed with `errors`, one of each rank that ended. stopped: name of the signal that was passed on, or ""."""
    from ray.exceptions import RayActorError

    causes = [getattr(error, "cause", None) or error for error in errors]
    for cause in causes:
        if isinstance(cause, Preempted):
            return Preempted(str(cause))
    own = [cause for cause in causes if isinstance(cause, KvshotError) and AGAIN not in str(cause)]
    if own:  # a rank's complaint about itself, of which the others' ends are the consequence
        return own[0]
    deaths = [error for error in errors if isinstance(error, RayActorError)]
    if stopped and deaths:
        return Preempted(f"{stopped} while the ranks were starting; the same command continues from the newest checkpoint")
    if deaths:  # of which what the other ranks say is the consequence
        return WorkerDied(_death(str(deaths[0]).strip()))
    return next((cause for cause in causes if isinstance(cause, KvshotError)), errors[0])


def _death(text: str) -> str:
    """What Ray says of an actor's end, in a line: of its guesses at causes, none."""
    process, host, detail = (re.search(pattern, text) for pattern in (r"pid: (\d+)", r"ip: (\S+)", r"Worker exit detail: (.*?)(?: Some common causes|$)"))
    where = f"process {process[1]} on {host[1]}: " if process and host else ""
    return where + (detail[1] if detail else text.partition("\n")[0])


def by_node(places: list[Place]) -> list[int]:
    """The actors' order as ranks: those of one node follow each other."""
    first = {place.node: i for i, place in reversed(list(enumerate(places)))}
    return sorted(range(len(places)), key=lambda i: (first[places[i].node], i))


def environments(places: list[Place], port: int) -> list[dict[str, str]]:
    """Variables of each rank, as a launcher sets them. Ranks of one node see its GPUs, one a rank, under the same numbers. port: free at rank 0."""
    out = []
    for rank, place in enumerate(places):
        together = [i for i, other in enumerate(places) if other.node == place.node]
        variables = {"RANK": str(rank), "WORLD_SIZE": str(len(places)), "LOCAL_RANK": str(together.index(rank))}
        variables |= {"MASTER_ADDR": places[0].address, "MASTER_PORT": str(port)}
        if place.gpus:
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(places[i].gpus[0] for i in together)
        out.append(variables)
    return out
