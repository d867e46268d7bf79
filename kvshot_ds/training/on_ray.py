"""`kvshot train --ray`: Ray places the ranks, each an actor that runs `launch.run`; when a worker dies, all start again from the newest checkpoint.

Not Ray Train: it runs a rank in a thread, where signals cannot be handled, and starts again after every exception, also one that comes again.
"""

from __future__ import annotations

import math
import time
from typing import Any

from kvshot_ds.config import RayConfig, Recipe
from kvshot_ds.errors import KvshotError, Preempted
from kvshot_ds.training.actors import NOTICE, Ranks, Stop, WorkerDied, room, session, verdict, wanted


def run(recipe: Recipe) -> dict[str, Any]:
    """Trains on `recipe.ray.ranks` ranks in the cluster of RAY_ADDRESS, or in a Ray of this process's own. Returns the run's summary.

    A signal (SIGTERM, SIGINT, SIGUSR1) goes on to the ranks. Raises Preempted when they stopped with a checkpoint, KvshotError when a worker has
    died once more than `ray.restarts` allows; what a rank raises is raised and not tried again.
    """
    config = recipe.ray
    wanted(config)
    with session(config, math.ceil(config.ranks * config.cpus_per_rank), echo=True) as stop:
        group = room(config)
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


def _await(group: Any, config: RayConfig, stop: Stop) -> None:
    """Waits until all ranks have room: after a node was lost, until another one has come."""
    said = time.monotonic()
    while not group.wait(1):
        if stop.name:
            raise _stopped_early(stop)
        if time.monotonic() - said > NOTICE:
            said = time.monotonic()
            print(f"Ray has no room yet for {config.ranks} ranks of {config.cpus_per_rank:g} CPU and {config.gpus_per_rank:g} GPU", flush=True)


def _stopped_early(stop: Stop) -> Preempted:
    return Preempted(f"{stop.name} before Ray had started the ranks; the same command continues from the newest checkpoint")


def _attempt(recipe: Recipe, group: Any, stop: Stop) -> dict[str, Any]:
    """One start of all ranks, to its end. Raises WorkerDied, Preempted or what a rank raised."""
    from ray.exceptions import RayActorError

    ranks, told = Ranks(recipe.ray, group), False
    try:
        while not ranks.started(1):
            if stop.name:
                raise _stopped_early(stop)
        ranks.run(recipe)
        while not ranks.ended(0.5):
            if stop.name and not told:
                told = True
                ranks.tell()
        if not ranks.errors:
            summary: dict[str, Any] = ranks.result()
            return summary
        errors = ranks.errors
    except RayActorError as error:  # before they ran
        errors = [error]
    finally:
        ranks.close()
    raise verdict(errors, stop.name)
