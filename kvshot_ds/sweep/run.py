"""`kvshot sweep run`: trains every trial of a sweep that is not complete, as many at once as fit, and measures each. Reads top to bottom.

Not Ray Tune: its trainables run in threads, which no signal reaches, so they cannot stop with a checkpoint; and it would run again what is there already.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from tqdm import tqdm

from kvshot_ds.config import Recipe
from kvshot_ds.diagnostics.run import diagnosed
from kvshot_ds.errors import ConfigError, KvshotError, Preempted
from kvshot_ds.evaluation import evaluated
from kvshot_ds.features.manifest import require
from kvshot_ds.files import disk_full, sole_writer
from kvshot_ds.sweep import results
from kvshot_ds.sweep.claim import claim
from kvshot_ds.sweep.estimate import train_memory
from kvshot_ds.sweep.failure import judge, tail
from kvshot_ds.sweep.folder import Driver, Progress, State, SweepFolder, TrialState
from kvshot_ds.sweep.grid import Data, Grid, expand, trial_recipe
from kvshot_ds.sweep.halving import Halving
from kvshot_ds.sweep.slots import LOG, Slot, Slots
from kvshot_ds.target import load_geometry, weights_digest
from kvshot_ds.training import status
from kvshot_ds.training.actors import NOTICE, Stop, session, wanted

_ENDING = 60.0  # for another driver of the sweep that is just ending, or whose node died [s]
_LOOK = 3.0  # between looks at the trials' progress [s]
_BEAT = 10.0  # between signs of life in state.json [s]
_BAR = "{desc}: {percentage:3.0f}%|{bar}| [{elapsed}<{remaining}{postfix}]"


def run(recipe: Recipe) -> int:
    """Trains and measures the trials of `recipe.sweep` in the cluster of RAY_ADDRESS, or in a Ray of this process's own. Returns how many have failed.

    A signal (SIGTERM, SIGINT, SIGUSR1) goes on to the ranks. Raises ConfigError for a sweep that cannot be, a target that is not that of the features, the
    folder of another sweep, and one that another process runs; Preempted when the trials stopped with checkpoints.
    """
    wanted(recipe.ray)
    data = Data.of(recipe)
    grid = expand(recipe, data)
    load_geometry(recipe.target.path, recipe.target.trust_remote_code)  # says what is wrong with the folder, if anything is
    require(data.manifest, data.manifest.spec, weights_digest(recipe.target.path))  # or every trial would fail of it
    folder = SweepFolder.of(recipe)
    try:
        with sole_writer(folder.path, "sweep", _ENDING):
            claim(folder, recipe, grid.trials)
            _note(recipe, grid)
            driver = _Driver(recipe, grid, folder)
            if driver.open():
                with session(recipe.ray, None, echo=False) as stop:
                    driver.work(stop)
            return driver.close()
    except OSError as error:
        if full := disk_full(error, folder.path):
            raise KvshotError(full) from None
        raise


def _note(recipe: Recipe, grid: Grid) -> None:
    """What the reader of the results should know."""
    for line in (*grid.merged, *grid.unequal, *(grid.there if recipe.sweep.controls == "add" else ())):
        print(f"{recipe.name}: {line}")
    if missing := sorted({p.cell for p in grid.proposals}):
        print(f"{recipe.name}: no matched control of {'; '.join(missing)}: kvshot sweep run --dry-run names them, sweep.controls=add trains them", flush=True)


class _Driver:
    """state: what state.json says of each trial, by name. halted: trials told to stop, and why."""

    def __init__(self, recipe: Recipe, grid: Grid, folder: SweepFolder):
        self.recipe, self.config, self.folder = recipe, recipe.sweep, folder
        self.trials = {trial.name: trial for trial in grid.trials}
        self.recipes = {trial.name: _on_slot(trial_recipe(recipe, trial)) for trial in grid.trials}
        self.sources = {trial.after for trial in grid.trials}
        self.halving = Halving.of(recipe, grid.trials, grid.baseline, max(grid.steps.values(), default=0)) if self.config.halving.enabled else None
        before = folder.progress().trials
        self.state = {name: self._found(name, before.get(name)) for name in self.trials}
        self.halted: dict[str, str] = {}
        self.rows: dict[str, dict[str, Any]] = {}
        self.new: list[str] = []  # trials completed by this start
        self.me = Driver(socket.gethostname(), os.getpid(), status.began(os.getpid()) or time.time(), time.time())
        often = 1 if sys.stderr.isatty() else NOTICE
        self.bar = tqdm(
            total=len(self.trials), desc=recipe.name, mininterval=often, miniters=0, initial=self._count("complete", "halved"), smoothing=0, bar_format=_BAR
        )

    def _found(self, name: str, before: TrialState | None) -> TrialState:
        """What there is of a trial as the driver starts."""
        recipe = self.recipes[name]
        if (recipe.run_dir / "train.json").is_file() and evaluated(recipe) and (not self.config.diagnose or diagnosed(recipe)):
            return before if before and before.state == "complete" else TrialState("complete", reused=True)
        return before if before and before.state == "halved" and self.halving else TrialState()

    def open(self) -> bool:
        """Writes how it stands. False if there is nothing to train."""
        for name, state in self.state.items():
            if state.state != "waiting":
                self.rows[name] = results.row(self.folder, self.trials[name], state)
        results.write(self.folder, list(self.rows.values()))
        self._write()
        return self._count("waiting") > 0

    def work(self, stop: Stop) -> None:
        """Until every trial has ended. Raises Preempted once those have stopped that a signal has asked to."""
        slots = Slots(self.recipe.ray, self.config.parallel)
        looked = said = time.monotonic()
        try:
            while self._count("running") or (self._count("waiting") and not stop.name):
                ready = [] if stop.name else list(self._ready())
                running = self._count("running")
                slots.fit(running + len(ready), running + self._count("waiting"))
                for slot in slots.open:
                    self._attend(slot, ready, stop)
                if self._count("running"):
                    said = time.monotonic()
                elif time.monotonic() - said > NOTICE:
                    said = time.monotonic()
                    self._say(self._why_waiting(ready))
                if time.monotonic() - looked > _LOOK:
                    looked = time.monotonic()
                    self._look(slots)
                slots.wait(0.5)
        finally:
            slots.close()
            self.bar.close()
        if stop.name:
            raise Preempted(
                f"{self.recipe.name}: stopped ({stop.name}), {self._count('complete')} of {len(self.trials)} trials complete; those that ran left checkpoints, "
                f"from which the same command continues"
            )

    def _ready(self) -> Iterator[str]:
        """Trials that could begin now, those first that others wait for. One whose source has failed fails here."""
        for name, trial in sorted(self.trials.items(), key=lambda item: item[0] not in self.sources):
            source = self.state[trial.after].state if trial.after in self.state else "complete"
            if self.state[name].state == "waiting" and source == "complete":
                yield name
            elif self.state[name].state == "waiting" and source in ("failed", "halved"):
                self._over(name, "failed", reason=f"its warm start takes the drafter of {self._called(trial.after)} ({trial.after}), which is {source}")

    def _attend(self, slot: Slot, ready: list[str], stop: Stop) -> None:
        name = slot.trial
        if not name:
            if ready and slot.free() and (name := self._unlocked(ready)):
                ready.remove(name)
                self._begin(slot, name)
            return
        if stop.name or name in self.halted:
            slot.tell()
        ended = slot.end()
        if isinstance(ended, list):
            self._stopped(name, ended, stop)
        elif ended is not None:
            self._complete(name, ended)

    def _unlocked(self, ready: list[str]) -> str:
        """The first of `ready` that nobody else trains: another sweep, or ranks that a killed driver left and that have not noticed yet. "" if none."""
        for name in ready:
            try:
                with sole_writer(self.recipes[name].run_dir, "training"):
                    return name
            except ConfigError:
                continue
        return ""

    def _begin(self, slot: Slot, name: str) -> None:
        state, recipe = self.state[name], self.recipes[name]
        trained = (recipe.run_dir / "train.json").is_file()
        self._set(name, state="running", tries=state.tries + 1, started=state.started or time.time(), reused=state.reused or (trained and not state.tries))
        slot.begin(recipe, self.config.diagnose, ("kvshot", *sys.argv[1:]))
        self._say(f"{self._called(name)}: {f'try {state.tries + 1}' if state.tries else 'started'} -> {recipe.run_dir}")

    def _complete(self, name: str, seconds: dict[str, float]) -> None:
        before = self.state[name].seconds
        self.new.append(name)
        if not self.config.keep_checkpoints:
            shutil.rmtree(self.recipes[name].run_dir / "checkpoints", ignore_errors=True)
        self._over(name, "complete", seconds={part: before.get(part, 0.0) + spent for part, spent in seconds.items()})

    def _stopped(self, name: str, errors: list[Exception], stop: Stop) -> None:
        """The ranks of a trial raised `errors`: it was asked to, or it is tried again, or it has failed."""
        state, recipe = self.state[name], self.recipes[name]
        trained = (recipe.run_dir / "train.json").is_file()
        last = state.tries > self.config.retries
        failure = judge(errors, last, lambda: train_memory(recipe))
        if name in self.halted and not trained:
            self._over(name, "halved", reason=self.halted.pop(name))
        elif stop.name or failure.asked or self.halted.pop(name, ""):  # of this driver, or of its cluster: no fault of the trial
            self._set(name, state="waiting", tries=state.tries - 1)
        elif failure.again and not last:
            self._set(name, state="waiting")
            self._say(f"{self._called(name)}: {failure.reason}; tried again from its newest checkpoint")
        else:
            self._over(name, "failed", reason=failure.reason, log=tail(recipe.run_dir / LOG))

    def _over(self, name: str, state: State, **known: Any) -> None:
        """The trial has ended: it gets its row."""
        self._set(name, state=state, ended=time.time(), **known)
        try:
            row = results.row(self.folder, self.trials[name], self.state[name])
        except KvshotError as error:  # a file of it is damaged: the others go on
            self._set(name, state="failed", reason=str(error))
            row = results.row(self.folder, self.trials[name], self.state[name])
        self.rows[name] = row
        results.write(self.folder, [self.rows[known] for known in self.trials if known in self.rows])
        mat = ((row.get("heldout") or {}).get("mat") or {}).get("value")
        why = self.state[name].reason
        self._say(f"{self._called(name)}: {row['state']}" + (f", MAT {mat:.3f}" if mat is not None else "") + (f": {why}" if why else ""))
        self._draw()

    def _look(self, slots: Slots) -> None:
        """How far the running trials are, for the bar and for early stopping; and a sign of life."""
        self._draw()
        if time.time() - self.me.updated > _BEAT:
            self._write()
        if self.halving:
            looks = {name: self.halving.looks(recipe.run_dir) for name, recipe in self.recipes.items()}
            for slot in slots.open:
                if slot.trial and slot.trial not in self.halted and (why := self.halving.stop(slot.trial, looks)):
                    self.halted[slot.trial] = why

    def close(self) -> int:
        """The last words. Returns how many trials have failed."""
        self.bar.close()
        reused = sum(state.reused or name not in self.new for name, state in self.state.items() if state.state == "complete")
        counts = {"complete": self._count("complete"), "of which reused": reused, "failed": self._count("failed"), "halved": self._count("halved")}
        print(f"{self.recipe.name}: {len(self.trials)} trials: {', '.join(f'{n} {what}' for what, n in counts.items())}")
        if times := [_overhead(self.state[name]) for name in self.new]:
            print(f"overhead of a trial (neither steps nor measuring): mean {sum(times) / len(times):.1f} s, largest {max(times):.1f} s")
        for name, state in self.state.items():
            if state.state == "failed":
                print(f"failed: {self._called(name)} ({name}): {state.reason}")
        print(f"kvshot sweep table {self.folder.path}")
        return counts["failed"]

    def _why_waiting(self, ready: list[str]) -> str:
        import ray

        config, has, free = self.recipe.ray, ray.cluster_resources(), ray.available_resources()
        kinds = wanted(config)
        each = " and ".join(f"{n:g} {kind}" for kind, n in kinds.items())
        there = ", ".join(f"{has.get(kind, 0):g} {kind} ({free.get(kind, 0):g} free)" for kind in kinds)
        return (
            f"{self.recipe.name}: waiting for room: a trial wants {config.ranks} rank(s) of {each}; the cluster has {there}. "
            f"{len(ready)} trial(s) could start; one that another process trains waits for it"
        )

    def _draw(self) -> None:
        """Trials that have ended, and the shares of those that run."""
        ended = self._count("complete", "halved", "failed")
        n = float(ended)
        for name, state in self.state.items():
            if state.state == "running" and (found := status.read(self.recipes[name].run_dir)) is not None:
                n += min(found.step / max(found.steps, 1), 0.99)
        self.bar.set_postfix_str(f"{ended} of {len(self.trials)} trials ended, {self._count('running')} running", refresh=False)
        self.bar.update(n - self.bar.n)

    def _count(self, *states: State) -> int:
        return sum(state.state in states for state in self.state.values())

    def _called(self, name: str) -> str:
        return f"{self.trials[name].cell}, seed {self.trials[name].seed}"

    def _say(self, text: str) -> None:
        self.bar.write(f"{time.strftime('%H:%M:%S')} {text}")

    def _set(self, name: str, **changed: Any) -> None:
        self.state[name] = replace(self.state[name], **changed)
        self._write()

    def _write(self) -> None:
        self.me = replace(self.me, updated=time.time())
        self.folder.write_progress(Progress(self.state, self.me))


def _on_slot(recipe: Recipe) -> Recipe:
    """Measured is the trial's own drafter. A rank on CPUs computes with as many threads as it has cores: other ranks have the rest."""
    train = recipe.train
    if not (train.threads_per_rank or recipe.ray.gpus_per_rank):
        train = train.model_copy(update={"threads_per_rank": max(1, int(recipe.ray.cpus_per_rank))})
    measured = {section: getattr(recipe, section).model_copy(update={"drafters": ()}) for section in ("eval", "diagnose")}
    return recipe.model_copy(update={"train": train, **measured})


def _overhead(state: TrialState) -> float:
    """Seconds of a trial that went neither into optimizer steps nor into measuring."""
    return (state.ended or 0.0) - (state.started or 0.0) - sum(state.seconds.get(part, 0.0) for part in ("train", "look", "eval", "diagnose"))
