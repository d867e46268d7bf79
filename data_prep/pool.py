"""Units of work over Ray actors, and the rules of an output folder that several runs may continue."""

from __future__ import annotations

import fcntl
import math
import os
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol, Self

from tqdm import tqdm

from kvshot_ds.errors import ConfigError, KvshotError
from kvshot_ds.files import read_json

TRIES = 3  # workers that one unit may lose before the command gives up


class Resources(Protocol):
    """The options by which a section of the recipe asks for workers."""

    @property
    def workers(self) -> int: ...
    @property
    def cpus_per_worker(self) -> float: ...
    @property
    def gpus_per_worker(self) -> float: ...


class Pool:
    """Up to `resources.workers` actors of class `worker`, started when first needed and ended with the context.

    worker: a class with a method `work(unit)`; arguments: those of its constructor. section: names the options in error
    texts and the actors (`kvshot-<section>-<n>`).
    """

    def __init__(self, section: str, resources: Resources, worker: type, *arguments: Any) -> None:
        self.section, self.resources, self.worker, self.arguments = section, resources, worker, arguments
        self._stack = ExitStack()
        self._actors: list[Any] = []
        self._idle: list[Any] = []
        self._class: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._actors:
            import ray

            for actor in self._actors:
                ray.kill(actor)
        self._stack.close()

    def map(self, units: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
        """(unit, result) as they finish. A unit whose worker dies goes to a fresh one.

        Raises the KvshotError a worker raised, ConfigError if Ray has too little room, KvshotError if a unit loses its
        worker three times.
        """
        import ray
        from ray.exceptions import OutOfMemoryError, RayActorError, RayTaskError, WorkerCrashedError

        waiting, deaths = deque(enumerate(units)), Counter[int]()
        in_flight: dict[Any, tuple[Any, int, Any]] = {}
        while waiting or in_flight:
            while waiting and len(in_flight) < self.resources.workers:
                actor = self._idle.pop() if self._idle else self._start()
                number, unit = waiting.popleft()
                in_flight[actor.work.remote(unit)] = (actor, number, unit)
            (result,), _rest = ray.wait(list(in_flight), num_returns=1)
            actor, number, unit = in_flight.pop(result)
            try:
                value = ray.get(result)
            except RayTaskError as error:
                if isinstance(error.cause, KvshotError):
                    raise error.cause from None
                raise
            except (RayActorError, WorkerCrashedError, OutOfMemoryError) as error:
                deaths[number] += 1
                if deaths[number] >= TRIES:
                    why = (str(error).splitlines() or [type(error).__name__])[0]
                    raise KvshotError(f"{unit}: lost its worker {TRIES} times ({why}); if memory ran out, use smaller batches") from None
                tqdm.write(f"{self.section}: a worker died on {unit}; the unit goes to a fresh one")
                waiting.appendleft((number, unit))
                continue
            self._idle.append(actor)
            yield unit, value

    def _start(self) -> Any:
        import ray

        if self._class is None:
            self._stack.enter_context(ray_session(self.section, self.resources))
            self._class = ray.remote(num_cpus=self.resources.cpus_per_worker, num_gpus=self.resources.gpus_per_worker)(self.worker)
        # the process id keeps two commands on one cluster apart
        name = f"kvshot-{self.section}-{os.getpid()}-{len(self._actors)}"
        self._actors.append(self._class.options(name=name).remote(*self.arguments))
        return self._actors[-1]


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
def sole_user(folder: Path, command: str) -> Iterator[None]:
    """Holds the folder's lock, which the system lets go whenever this process ends, and clears what killed writers left.
    Raises ConfigError if another process holds it."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"{folder}: another {command} is writing there; wait for it, or use another folder") from None
        clear_leftovers(folder)
        yield


def clear_leftovers(folder: Path) -> None:
    """Removes what killed writers left beside the files they were writing. Only under the folder's lock."""
    for leftover in folder.rglob(".*.tmp"):
        leftover.unlink(missing_ok=True)


def same_configuration(folder: Path, now: Mapping[str, Any]) -> bool:
    """False if nothing was made in `folder` yet, True if what is there was made with the configuration `now`.

    Raises ConfigError naming each value that differs. `now` is what `provenance.stamp(folder, recipe, configuration=now)` stored.
    """
    path = folder / "provenance.json"
    if not path.is_file():
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
