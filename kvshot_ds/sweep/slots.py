"""Where trials are trained: each slot is one placement group of Ray with a process a rank, which trains one trial after another.

Staying in the same processes, a trial pays for neither imports nor the target's parts nor checksums of shards that are as they were. A training that
fails takes its processes with it: the next one starts in fresh ones.
"""

from __future__ import annotations

import gc
import os
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvshot_ds.config import RayConfig, Recipe
from kvshot_ds.errors import KvshotError
from kvshot_ds.training.actors import Rank, Ranks, enter, room

LOG = "log.txt"  # in the run folder of a trial: what its ranks print
_PHASES = {"start": "start", "step": "train", "evaluation": "look", "save": "save", "export": "save"}  # of a training -> part of TrialState.seconds
_STARTS = 3  # of the processes of a slot, in a row, that fail


class Trainer(Rank):
    """A rank that trains trial after trial; rank 0 measures each."""

    def run(self, recipe: Recipe, folder: str, variables: dict[str, str], diagnose: bool = False, command: tuple[str, ...] = ()) -> dict[str, Any]:
        """Trains and measures a trial. Returns the seconds of its parts. diagnose: take diagnostics too. command: of the sweep, for provenance."""
        enter(folder, variables)
        sys.argv = list(command) or sys.argv
        with _logged(recipe.run_dir / LOG):
            return _train(recipe, diagnose)


def _train(recipe: Recipe, diagnose: bool) -> dict[str, Any]:
    from kvshot_ds.training import launch

    phases: dict[str, float] = {}
    seconds: dict[str, float] = {}

    def measured(part: str, call: Any) -> None:
        began = time.monotonic()
        call(recipe)
        seconds[part] = time.monotonic() - began

    try:
        launch.run(recipe, phases)
        if os.environ.get("RANK", "0") == "0":
            from kvshot_ds import evaluation

            measured("eval", evaluation.run)
            if diagnose:
                from kvshot_ds.diagnostics import run as diagnostics

                measured("diagnose", diagnostics.run)
    except KvshotError as error:
        print(f"kvshot: {error}", flush=True)
        raise
    except Exception:
        traceback.print_exc()
        raise
    finally:
        _free()
    for phase, spent in phases.items():
        seconds[_PHASES[phase]] = seconds.get(_PHASES[phase], 0.0) + spent
    return seconds


def _free() -> None:
    """What the training held: an engine and its module refer to each other."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@contextmanager
def _logged(path: Path) -> Iterator[None]:
    """What this process prints, also from below Python, goes to the end of the file `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    kept = [os.dup(number) for number in (1, 2)]
    try:
        for number in (1, 2):
            os.dup2(log, number)
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, old in zip((1, 2), kept, strict=True):
            os.dup2(old, number)
        for number in (log, *kept):
            os.close(number)


class Slot:
    """Room for one training at a time. trial: the name of that which runs, or ""."""

    def __init__(self, config: RayConfig, group: Any):
        self.config, self.group, self.trial, self.told = config, group, "", False
        self._failed = 0
        self.ranks = Ranks(config, group, Trainer)

    def free(self) -> bool:
        """Whether it could begin a trial now. Raises KvshotError if its processes do not come up, several times."""
        from ray.exceptions import RayActorError

        if self.trial:
            return False
        try:
            up = self.ranks.started(0)
        except RayActorError as error:
            self._failed += 1
            if self._failed == _STARTS:
                raise KvshotError(f"Ray's worker processes end as they start, {_STARTS} times in a row: {str(error).strip()}") from None
            self.again()
            return False
        self._failed = 0 if up else self._failed
        return up

    def begin(self, recipe: Recipe, diagnose: bool, command: tuple[str, ...]) -> None:
        self.trial, self.told = recipe.name, False
        self.ranks.run(recipe, diagnose, command)

    def end(self) -> dict[str, float] | list[Exception] | None:
        """None while the trial runs; then the seconds of its parts, or what its ranks raised, and the slot is free again."""
        if not self.ranks.ended(0):
            return None
        self.trial, errors = "", list(self.ranks.errors)
        if not errors:
            seconds: dict[str, float] = self.ranks.result()
            return seconds
        self.again()
        return errors

    def tell(self) -> None:
        """Asks the trial to stop with a checkpoint, once."""
        if not self.told:
            self.told = True
            self.ranks.tell()

    def again(self) -> None:
        """Fresh processes, in the same place."""
        self.ranks.close()
        self.ranks = Ranks(self.config, self.group, Trainer)

    def close(self) -> None:
        from ray.util.placement_group import remove_placement_group

        self.ranks.close()
        remove_placement_group(self.group)


class Slots:
    """As many as there is room for. One group more than there are slots is asked of Ray, which places it where room comes up, and an autoscaler makes some."""

    def __init__(self, config: RayConfig, most: int):
        """most: slots at once; 0: no limit."""
        self.config, self.most = config, most
        self.open: list[Slot] = []
        self._asked: Any = None

    def fit(self, now: int, later: int) -> None:
        """Opens slots for `now` trials, where there is room, and closes free ones beyond `later` trials that will need one."""
        from ray.util.placement_group import remove_placement_group

        limit = min(now, self.most or now)
        if self._asked is None and len(self.open) < limit:
            self._asked = room(self.config)
        if self._asked is not None and self._asked.wait(0):
            self.open.append(Slot(self.config, self._asked))
            self._asked = None
        elif self._asked is not None and len(self.open) >= limit:
            remove_placement_group(self._asked)
            self._asked = None
        for slot in [slot for slot in self.open if not slot.trial][: max(0, len(self.open) - later)]:
            self.open.remove(slot)
            slot.close()

    def wait(self, seconds: float) -> None:
        """Until something may have ended, at most so long."""
        import ray

        calls = [call for slot in self.open for call in slot.ranks.pending]
        if calls:
            ray.wait(calls, timeout=seconds)
        else:
            time.sleep(seconds)

    def close(self) -> None:
        for slot in self.open:
            slot.close()
