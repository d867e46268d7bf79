"""`kvshot train --ray`: Ray places the ranks, each an actor that runs `launch.run`; when a worker dies, all start again from the newest checkpoint.

Not Ray Train: it runs a rank in a thread, where signals cannot be handled, and starts again after every exception, also one that comes again.
"""

from __future__ import annotations

import math
import os
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
from kvshot_ds.training.verdict import AGAIN

_GRACE = 60.0  # seconds that the other ranks have to end by themselves once one has failed
_NOTICE = 60.0  # seconds between remarks while Ray has no room


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
        try:
            os.chdir(folder)
        except OSError as error:
            raise ConfigError(f"{folder}: a worker on {socket.gethostname()} cannot enter it ({error}); start from a folder that all nodes see") from None
        os.environ.update(variables)
        from kvshot_ds.training import launch

        return launch.run(recipe)


def run(recipe: Recipe) -> dict[str, Any]:
    """Trains on `recipe.ray.ranks` ranks in the cluster of RAY_ADDRESS, or in a Ray of this process's own. Returns the run's summary.

    A signal (SIGTERM, SIGINT, SIGUSR1) goes on to the ranks. Raises Preempted when they stopped with a checkpoint, KvshotError when a worker has
    died once more than `ray.restarts` allows; what a rank raises is raised and not tried again.
    """
    config = recipe.ray
    if 0 < config.gpus_per_rank < 1:
        raise ConfigError(f"ray.gpus_per_rank={config.gpus_per_rank:g}: ranks cannot share a GPU; give each a whole one, or 0 to train on CPU")
    with _session(config) as stop:
        group = _group(config)
        for attempt in range(config.restarts + 1):
            _await(group, config, stop)
            try:
                summary = _attempt(recipe, group, stop)
            except WorkerDied as death:
                if attempt == config.restarts:
                    raise KvshotError(
                        f"{recipe.name}: a worker died for the {attempt + 1}. time ({death}) and ray.restarts={config.restarts}; look into its node and "
                        f"its memory; the same command continues from the newest checkpoint"
                    ) from None
                print(f"{recipe.name}: a worker died ({death}); start {attempt + 2} of at most {config.restarts + 1} from the newest checkpoint", flush=True)
            else:
                print(f"{recipe.name}: {summary['steps']} steps on {config.ranks} rank(s) placed by Ray -> {recipe.run_dir / 'drafter'}")
                return summary
    raise AssertionError("unreachable")


class _Stop:
    """The signal by which this process was asked to stop, once there was one."""

    def __init__(self) -> None:
        self.name = ""

    def hear(self, number: int, frame: FrameType | None) -> None:
        self.name = self.name or signal.Signals(number).name


@contextmanager
def _session(config: RayConfig) -> Iterator[_Stop]:
    """A connection to Ray, and signals heard rather than died of."""
    import ray

    address = os.environ.get("RAY_ADDRESS", "local")
    cores = math.ceil(config.ranks * config.cpus_per_rank)
    local: dict[str, Any] = {"num_cpus": cores, "include_dashboard": False, "object_store_memory": 1 << 27} if address == "local" else {}
    ray.init(address=address, logging_level="ERROR", **local)
    stop, numbers = _Stop(), (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    before = {number: signal.signal(number, stop.hear) for number in numbers}  # after ray.init, which sets one of its own
    try:
        need, has = config.ranks * config.gpus_per_rank, ray.cluster_resources().get("GPU", 0)
        if address == "local" and need > has:
            raise ConfigError(
                f"ray.ranks={config.ranks} with ray.gpus_per_rank={config.gpus_per_rank:g} need {need:g} GPUs, this machine has {has:g}; set "
                f"RAY_ADDRESS to a cluster's, or lower one of them"
            )
        yield stop
    finally:
        ray.shutdown()
        for number, handler in before.items():
            signal.signal(number, handler)


def _group(config: RayConfig) -> Any:
    """Room for all ranks, as close together as Ray finds it."""
    from ray.util.placement_group import placement_group

    each = {"CPU": config.cpus_per_rank} | ({"GPU": config.gpus_per_rank} if config.gpus_per_rank else {})
    return placement_group([each] * config.ranks, strategy="PACK")


def _await(group: Any, config: RayConfig, stop: _Stop) -> None:
    """Waits until all ranks have room: after a node was lost, until another one has come."""
    said = time.monotonic()
    while not group.wait(1):
        if stop.name:
            raise _stopped_early(stop)
        if time.monotonic() - said > _NOTICE:
            said = time.monotonic()
            print(f"Ray has no room yet for {config.ranks} ranks of {config.cpus_per_rank:g} CPU and {config.gpus_per_rank:g} GPU", flush=True)


def _get(calls: list[Any], stop: _Stop) -> Any:
    """Results of `calls`, which may wait for room or for processes to start."""
    import ray

    while ray.wait(calls, num_returns=len(calls), timeout=1)[1]:
        if stop.name:
            raise _stopped_early(stop)
    return ray.get(calls)


def _stopped_early(stop: _Stop) -> Preempted:
    return Preempted(f"{stop.name} before Ray had started the ranks; the same command continues from the newest checkpoint")


def _attempt(recipe: Recipe, group: Any, stop: _Stop) -> dict[str, Any]:
    """One start of all ranks, to its end. Raises WorkerDied, Preempted or what a rank raised."""
    import ray
    from ray.exceptions import RayActorError
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    config = recipe.ray
    # GPUs are named in full by `environments`; Ray's own choice of variable would hide those of the other ranks
    actor = ray.remote(num_cpus=config.cpus_per_rank, num_gpus=config.gpus_per_rank, max_restarts=0)(Rank)
    ranks = [actor.options(scheduling_strategy=PlacementGroupSchedulingStrategy(group, number)).remote() for number in range(config.ranks)]
    try:
        places: list[Place] = _get([rank.place.remote() for rank in ranks], stop)
        order = by_node(places)
        ranks, places = [ranks[i] for i in order], [places[i] for i in order]
        variables = environments(places, ray.get(ranks[0].free_port.remote()))
        calls = [rank.run.remote(recipe, str(Path.cwd()), own) for rank, own in zip(ranks, variables, strict=True)]
        errors = _follow(calls, places, stop)
        if not errors:
            summary: dict[str, Any] = ray.get(calls[0])
            return summary
    except RayActorError as error:  # before they ran
        errors = [error]
    finally:
        for rank in ranks:
            ray.kill(rank)
    raise verdict(errors, stop.name)


def _follow(calls: list[Any], places: list[Place], stop: _Stop) -> list[Exception]:
    """Waits for the ranks and passes a signal on. What those raised that failed; ranks that outlast the first failure by _GRACE are left out."""
    import ray

    errors: list[Exception] = []
    pending, deadline, told = list(calls), math.inf, False
    while pending and time.monotonic() < deadline:
        done, pending = ray.wait(pending, timeout=0.5)
        for call in done:
            try:
                ray.get(call)
            except Exception as error:  # noqa: BLE001 - judged below, once all have ended
                errors.append(error)
                deadline = min(deadline, time.monotonic() + _GRACE)
        if stop.name and not told:
            told = True
            _signal(places)
    return errors


def _signal(places: list[Place]) -> None:
    """SIGTERM to the processes of all ranks, on their nodes. A rank that is gone already needs none."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    tell = ray.remote(num_cpus=0, max_retries=0)(lambda process: os.kill(process, signal.SIGTERM))
    calls = [tell.options(scheduling_strategy=NodeAffinitySchedulingStrategy(p.node, soft=False)).remote(p.process) for p in places]
    ray.wait(calls, num_returns=len(calls), timeout=_GRACE)


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
        return WorkerDied(str(deaths[0]).strip().splitlines()[0])
    return next((cause for cause in causes if isinstance(cause, KvshotError)), errors[0])


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
