"""Units of work over Ray actors, and the rules of an output folder that several runs may continue."""

from __future__ import annotations

import math
import os
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count, islice
from pathlib import Path
from typing import Any, Protocol, Self

from tqdm import tqdm

from kvshot_ds.errors import ConfigError, KvshotError
from kvshot_ds.files import AnyPath, abandoned, exists, read_json, sole_writer

TRIES = 3  # workers that one unit may lose before the command gives up
_NUMBERS = count()  # of the actors that this process has started
_PATIENCE = 60  # without any worker, before saying so [s]


class Resources(Protocol):
    """The options by which a section of the recipe asks for workers."""

    @property
    def workers(self) -> int: ...
    @property
    def cpus_per_worker(self) -> float: ...
    @property
    def gpus_per_worker(self) -> float: ...


@dataclass(eq=False)
class _Actor:
    """A worker in Ray. starting: what says that it runs, until it does. flights: its calls, with the number and the unit of each."""

    handle: Any
    starting: Any
    flights: dict[Any, tuple[int, Any]] = field(default_factory=dict)


class Pool:
    """Up to `resources.workers` actors of class `worker`, started when first needed and ended with the context.

    worker: a class with a method `work(unit)`; arguments: those of its constructor. section: names the options in error
    texts and the actors (`kvshot-<section>-<process>-<n>`). depth: units that one worker has at a time, in threads of its own: with two,
    a worker can finish one while it works on the next. In Ray's dashboard a call is named `str(unit)`, as far as the first bracket.
    """

    def __init__(self, section: str, resources: Resources, worker: type, *arguments: Any, depth: int = 1) -> None:
        self.section, self.resources, self.worker, self.arguments, self.depth = section, resources, worker, arguments, depth
        self._stack = ExitStack()
        self._actors: list[_Actor] = []
        self._class: Any = None
        self._failed_starts = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._actors:
            import ray

            for actor in self._actors:
                ray.kill(actor.handle)
        self._stack.close()

    def map(self, units: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
        """(unit, result) as they finish. A unit whose worker dies goes to another, and from then on has it alone, so that one that kills
        workers is found out. A worker that Ray finds no room for (a node was lost) is not waited for while others work.

        Raises the KvshotError a worker raised, ConfigError if Ray has too little room, KvshotError if a unit loses its
        worker three times.
        """
        import ray
        from ray.exceptions import OutOfMemoryError, RayActorError, RayTaskError, WorkerCrashedError

        source, waiting, deaths = enumerate(units), deque[tuple[int, Any]](), Counter[int]()
        while True:
            waiting.extend(islice(source, max(0, self.depth * self.resources.workers - len(waiting))))
            if not waiting and not any(actor.flights for actor in self._actors):
                return
            self._dispatch(waiting, deaths)
            actor, result = self._next(ray)
            try:
                value = ray.get(result)
            except RayTaskError as error:
                if isinstance(error.cause, KvshotError):
                    raise error.cause from None
                raise
            except (RayActorError, WorkerCrashedError, OutOfMemoryError) as error:
                self._actors.remove(actor)
                self._mourn(actor, deaths, (str(error).splitlines() or [type(error).__name__])[0])
                waiting.extendleft(reversed(actor.flights.values()))
                continue
            if result is actor.starting:
                actor.starting, self._failed_starts = None, 0
            else:
                yield actor.flights.pop(result)[1], value

    def _dispatch(self, waiting: deque[tuple[int, Any]], deaths: Counter[int]) -> None:
        """Hands waiting units to workers that have room, emptiest first, and starts workers for the rest."""
        ready = [actor for actor in self._actors if actor.starting is None]
        while waiting and ready:
            actor = min(ready, key=lambda a: len(a.flights))
            number, unit = waiting[0]
            alone = deaths[number] or any(deaths[other] for other, _ in actor.flights.values())
            if len(actor.flights) >= self.depth or (alone and actor.flights):
                break
            waiting.popleft()
            actor.flights[actor.handle.work.options(name=str(unit).partition(" (")[0]).remote(unit)] = (number, unit)
        busy = sum(bool(actor.flights) for actor in self._actors)
        while len(self._actors) < min(self.resources.workers, busy + len(waiting)):
            self._actors.append(self._start())

    def _next(self, ray: Any) -> tuple[_Actor, Any]:
        """The next call that came to an end, well or not, and its actor."""
        calls = {call: actor for actor in self._actors for call in (*actor.flights, *([actor.starting] if actor.starting else []))}
        while True:
            done, _ = ray.wait(list(calls), num_returns=1, timeout=_PATIENCE)
            if done:
                return calls[done[0]], done[0]
            if all(actor.starting for actor in self._actors):
                tqdm.write(f"{self.section}: no worker runs; waiting until the Ray cluster has room for one")

    def _mourn(self, actor: _Actor, deaths: Counter[int], why: str) -> None:
        """Counts a worker's death against what it worked on. Raises KvshotError when that was the third."""
        if actor.starting is not None:
            self._failed_starts += 1
            if self._failed_starts >= TRIES:
                raise KvshotError(f"{self.section}: {TRIES} workers in a row died before they ran ({why})")
        for number, unit in actor.flights.values():
            deaths[number] += 1
            if deaths[number] >= TRIES:
                raise KvshotError(f"{unit}: lost its worker {TRIES} times ({why}); if memory ran out, use smaller batches")
            tqdm.write(f"{self.section}: a worker died on {unit}; the unit goes to a fresh one")

    def _start(self) -> _Actor:
        import ray

        if self._class is None:
            self._stack.enter_context(ray_session(self.section, self.resources))
            wanted = {"num_cpus": self.resources.cpus_per_worker, "num_gpus": self.resources.gpus_per_worker, "max_concurrency": self.depth}
            self._class = ray.remote(**wanted)(self.worker)
        # the process id keeps two commands on one cluster apart, the number two pools of one process: a name is free only when its actor is gone
        handle = self._class.options(name=f"kvshot-{self.section}-{os.getpid()}-{next(_NUMBERS)}").remote(*self.arguments)
        return _Actor(handle, handle.__ray_ready__.remote())


@contextmanager
def ray_session(section: str, resources: Resources) -> Iterator[None]:
    """Ray with room for all workers: the connection there is, the cluster of RAY_ADDRESS, or a Ray of this process's own,
    which ends with it. Raises ConfigError if a cluster has less."""
    import ray

    own = not ray.is_initialized()
    if own:
        address = os.environ.get("RAY_ADDRESS", "local")
        cores = math.ceil(resources.workers * resources.cpus_per_worker)
        local: dict[str, Any] = {"num_cpus": cores, "include_dashboard": False, "object_store_memory": 1 << 27} if address == "local" else {}
        ray.init(address=address, logging_level="ERROR", log_to_driver=False, **local)
    try:
        room = ray.cluster_resources()
        for kind, each, option in (("CPU", resources.cpus_per_worker, "cpus_per_worker"), ("GPU", resources.gpus_per_worker, "gpus_per_worker")):
            need, has = resources.workers * each, room.get(kind, 0)
            if need > has:
                raise ConfigError(
                    f"{section}.workers={resources.workers} with {section}.{option}={each:g} need {need:g} {kind}s, Ray has {has:g}; lower one of them"
                )
        yield
    finally:
        if own:
            ray.shutdown()


@contextmanager
def sole_user(folder: AnyPath, command: str) -> Iterator[None]:
    """`files.sole_writer`, and clears what killed writers left.

    Behind a URL, and on network storage where locks do not work or do not reach, nothing is held: what commands write is the same whoever
    writes it, and appears whole, so that two of them waste time, no more.
    """
    if not isinstance(folder, Path):
        yield
        return
    with sole_writer(folder, command):
        clear_leftovers(folder)
        yield


def clear_leftovers(folder: AnyPath) -> None:
    """Removes what killed writers left beside the files they were writing; what a living process may still write stays (`files.abandoned`)."""
    for leftover in folder.rglob(".*.tmp") if isinstance(folder, Path) else ():
        if abandoned(leftover):
            leftover.unlink(missing_ok=True)


def same_configuration(folder: AnyPath, now: Mapping[str, Any]) -> bool:
    """False if nothing was made in `folder` yet, True if what is there was made with the configuration `now`.

    Raises ConfigError naming each value that differs. `now` is what `provenance.stamp(folder, recipe, configuration=now)` stored.
    """
    path = folder / "provenance.json"
    if not exists(path):
        return False
    try:
        before = read_json(path)["configuration"]
        changed = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path}: not readable as the provenance of this folder ({error}); use another folder, or delete it") from None
    if changed:
        lines = "\n".join(f"  {name}: there {_short(before.get(name))}, now {_short(now.get(name))}" for name in changed)
        raise ConfigError(f"{folder}: made with another configuration; use another folder, or delete it\n{lines}")
    return True


def _short(value: Any) -> str:
    """`value` for an error text, with digests cut."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {_short(part)}" for name, part in value.items())
    return f"{value[:12]}…" if isinstance(value, str) and len(value) == 64 else str(value)
