"""Checkpoints that a kill at any moment cannot spoil: written aside, on the disk before they get their name, named by `latest` last."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as save_tensors

from kvshot_ds.config import Recipe, dump_recipe
from kvshot_ds.errors import KvshotError, Preempted
from kvshot_ds.files import abandoned, read_object, write_atomic, write_json
from kvshot_ds.training import heldout, rng, universal
from kvshot_ds.training.ema import Average
from kvshot_ds.training.engine import World, side_group
from kvshot_ds.training.schedule import Schedule
from kvshot_ds.training.verification import told_by_first
from kvshot_ds.typed import parse

FORMAT = "kvshot-checkpoint/1"
_TAG = re.compile(r"step-\d{8}")
_MEASURE = {"mat": "heldout/mat", "mat_joint": "heldout/mat_joint", "alpha_0": "heldout/accept_top1/0", "loss": "heldout/loss"}


@dataclass(frozen=True)
class Resumed:
    """A later start of a run: after which step it went on, on how many ranks."""

    step: int
    world_size: int


@dataclass(frozen=True)
class Progress:
    """How far a run is and what it took, over all its starts.

    padding: tokens computed that count for nothing (conversations are laid end to end, so only the stand-ins of uneven ranks).
    skipped_conversations: left out because their data could not be read, each as often as its turn came.
    """

    step: int = 0
    seconds: float = 0.0
    tokens: int = 0
    supervised_rows: int = 0
    padding: int = 0
    resumed_from: tuple[Resumed, ...] = ()
    skipped_conversations: int = 0

    @property
    def padding_share(self) -> float:
        return self.padding / max(1, self.padding + self.tokens)


@dataclass(frozen=True)
class State:
    """state.json of a checkpoint. loader: `Schedule.state`; heldout: what was measured after this very step; files: bytes of each other file."""

    tag: str
    progress: Progress
    world_size: int
    zero_stage: int
    precision: str
    train_digest: str
    loader: dict[str, int | str]
    heldout: dict[str, float] | None
    files: dict[str, int]


@dataclass(frozen=True)
class Best:
    """best.json: the checkpoint that `keep_checkpoints` does not remove, and what it was chosen by. conversations: measured; values of other ones do not
    compare."""

    tag: str
    metric: str
    value: float
    step: int
    conversations: float


def read_state(folder: Path) -> State:
    """state.json of a whole checkpoint. Raises KvshotError, saying what is missing, if it is none."""
    try:
        found = read_object(folder / "state.json")
        if found.pop("format", None) != FORMAT:
            raise KvshotError(f"{folder / 'state.json'}: expected format {FORMAT!r}; it was written by another version of kvshot-ds")
        state = parse(State, found)
    except (OSError, ValueError) as error:
        raise KvshotError(f"{folder}: no readable state.json ({type(error).__name__}: {error})") from None
    if state.tag != folder.name:
        raise KvshotError(f"{folder}: its state.json is that of {state.tag}")
    for name, size in state.files.items():
        there = (folder / name).stat().st_size if (folder / name).is_file() else None
        if there != size:
            raise KvshotError(f"{folder}: {name} {'is missing' if there is None else f'has {there} bytes'}, expected {size} bytes")
    return state


def find(folder: Path) -> tuple[State | None, list[str]]:
    """The checkpoint to continue from, if there is any, and what is to be said about it: the one that `latest` names, or else the newest whole one.

    Raises KvshotError if there are checkpoints and none is whole.
    """
    named = (folder / "latest").read_text(encoding="utf-8", errors="replace").strip() if (folder / "latest").is_file() else ""
    tags = sorted((path.name for path in folder.glob("step-*") if _TAG.fullmatch(path.name)), reverse=True)
    if not tags and not named:
        return None, []
    faults = []
    for tag in dict.fromkeys([named, *tags] if _TAG.fullmatch(named) else tags):
        try:
            state = read_state(folder / tag)
        except Preempted:  # asked to stop just now: nothing is wrong with it
            raise
        except KvshotError as error:
            faults.append(str(error))
            continue
        return state, [f"{'; '.join(faults)}: continuing from {tag} instead"] if faults else []
    raise KvshotError(f"no checkpoint in {folder} is whole: {'; '.join(faults) or f'latest names {named!r}'}; delete {folder} to start again")


def exists(folder: Path) -> bool:
    """Whether there is a checkpoint, whole or not."""
    return (folder / "latest").is_file() or any(folder.glob("step-*"))


class Checkpoints:
    """Those of one run, in RUN/checkpoints. Every rank has one, and all ranks call its methods together.

    found: the checkpoint that this start continues from. notes: what rank 0 is to say about it.
    """

    engine: Any

    def __init__(self, recipe: Recipe, world: World, beat: Callable[[], None]):
        """Before the engine is made. beat: called as loading gets on. Raises KvshotError if there are checkpoints and none is whole."""
        from kvshot_ds.training.writer import Writer  # brings DeepSpeed, which `finished` does without

        self.recipe, self.world, self.beat, self.folder = recipe, world, beat, recipe.run_dir / "checkpoints"
        self.found, self.notes = told_by_first(world, lambda: find(self.folder))
        beside = recipe.train.checkpoint_writer == "async"
        self._writer = Writer(beside)
        self._group = side_group("checkpoints") if beside else None
        self._pending: tuple[State, Best | None] | None = None

    def options(self, ds_config: dict[str, Any]) -> dict[str, Any]:
        """The DeepSpeed configuration of an engine that can load the found one: a universal one, if ZeRO had shared it out to another number of ranks."""
        resized = self.found is not None and self.found.world_size != self.world.size and self.found.zero_stage > 0
        return {**ds_config, "checkpoint": {**ds_config.get("checkpoint", {}), **universal.OPTIONS}} if resized else ds_config

    def load(self, engine: Any, schedule: Schedule, ema: Average | None, train_digest: str) -> Progress:
        """Restores the found checkpoint, if any, into all of these, and removes what killed starts left.

        Raises KvshotError if it is of another run, stands elsewhere in the data, or cannot be read.
        """
        self.engine, self.schedule, self.ema, self.train_digest = engine, schedule, ema, train_digest
        engine.checkpoint_engine = self._writer
        progress = Progress()
        if self.found is not None:
            where, progress = self.folder / self.found.tag, self.found.progress
            if self.found.train_digest != train_digest:
                raise KvshotError(
                    f"{where} belongs to another drafter or run (its digest is {self.found.train_digest}, this run's {train_digest}); "
                    f"move it away, or give this run another name"
                )
            schedule.check(self.found.loader, progress.step)
            failed = ""
            try:
                self._restore(self.found, where)
            except Preempted:
                raise
            except KvshotError as error:
                failed = str(error)
            if failed := self._first(failed):  # also: no rank reads any more when `_clear` removes what was read
                raise KvshotError(failed)
            progress = replace(progress, resumed_from=(*progress.resumed_from, Resumed(progress.step, self.world.size)))
        self.notes += told_by_first(self.world, lambda: _clear(self.folder, self.found, self.recipe.train.keep_checkpoints))
        return progress

    def _restore(self, found: State, where: Path) -> None:
        engine, resized = self.engine, self.engine.load_universal_checkpoint()
        folder = self.folder / ".universal" if resized else self.folder
        if resized:
            told_by_first(self.world, lambda: universal.convert(where, folder / found.tag, self.beat))
            self.beat()
        try:
            with universal.loading(engine) if resized else nullcontext():
                path, _ = engine.load_checkpoint(str(folder), tag=found.tag)
        except (OSError, RuntimeError, AssertionError, EOFError, LookupError, ValueError, UnpicklingError) as error:
            raise KvshotError(f"{where}: DeepSpeed cannot read this checkpoint ({error}); delete it to continue from the one before it") from None
        if path is None or engine.global_steps != found.progress.step:
            raise KvshotError(f"{where}: not the checkpoint of step {found.progress.step} that its state.json describes; delete it")
        if found.world_size == self.world.size:
            rng.restore(where / f"rng-{self.world.rank:05d}.safetensors")
        if self.ema is not None:
            try:
                self.ema.load([load_file(where / f"ema-{rank:05d}.safetensors") for rank in range(found.world_size)])
            except (OSError, SafetensorError) as error:
                raise KvshotError(f"{where}: the average of the weights cannot be read ({error}); delete this checkpoint") from None

    def save(self, progress: Progress, best: bool = False) -> None:
        """Everything that the run needs to go on after `progress.step`. best: `better` said so.

        Raises KvshotError, on every rank, if any rank cannot write; the checkpoints before it stay. With checkpoint_writer=async the
        files are still being written on return, and `settle` says what came of it.
        """
        self.settle(wait=True)
        tag, rank = f"step-{progress.step:08d}", self.world.rank
        aside = self.folder / f".{tag}.partial"
        if rank == 0:
            shutil.rmtree(aside, ignore_errors=True)
        try:
            self.engine.save_checkpoint(str(self.folder), tag=aside.name, save_latest=False, exclude_frozen_parameters=True)
        except OSError as error:  # of rank 0, in copying DeepSpeed's recovery scripts: the others are in the barrier at its end
            self._writer.failed(error)
            dist.barrier()
        self._writer.put(aside / f"rng-{rank:05d}.safetensors", rng.state())
        if self.ema is not None:
            self._writer.put(aside / f"ema-{rank:05d}.safetensors", save_tensors(self.ema.state()))
        measured, loader = told_by_first(self.world, lambda: self._measured(progress.step)), self.schedule.state(progress.step)
        chosen = self._best_of(progress.step, measured) if best else None
        kind = self.engine.zero_optimization_stage(), "bfloat16" if self.engine.bfloat16_enabled() else "float32"
        self._pending = State(tag, progress, self.world.size, *kind, self.train_digest, loader, measured, {}), chosen
        if self._group is None:
            self.settle(wait=True)

    def settle(self, wait: bool = False) -> None:
        """Gives the checkpoint that `save` began its name once all ranks have written it, or, with `wait`, waits for that."""
        if self._pending is None:
            return
        if self._group is not None and not wait:
            done = torch.tensor(int(self._writer.done()))
            dist.all_reduce(done, op=dist.ReduceOp.MIN, group=self._group)
            if not bool(done):
                return
        failed = self._first(self._writer.failure())
        (state, best), self._pending = self._pending, None
        told_by_first(self.world, lambda: self._publish(state, best, failed))

    def _first(self, failure: str) -> str:
        """The failure of the first rank that has one, on all ranks."""
        every: list[str] = [""] * self.world.size
        dist.all_gather_object(every, failure)
        return next((text if self.world.size == 1 else f"rank {rank}: {text}" for rank, text in enumerate(every) if text), "")

    def _publish(self, state: State, best: Best | None, failed: str) -> None:
        aside, final = self.folder / f".{state.tag}.partial", self.folder / state.tag
        try:
            if failed:
                raise OSError(failed)
            write_atomic(aside / "recipe.yaml", dump_recipe(self.recipe))
            files = {path.name: path.stat().st_size for path in sorted(aside.iterdir())}
            write_json(aside / "state.json", {"format": FORMAT, **asdict(replace(state, files=files))})
            for path in (*aside.iterdir(), aside):
                _sync(path)
            shutil.rmtree(final, ignore_errors=True)  # of a start before this one that went further
            aside.rename(final)
            _sync(self.folder)
            write_atomic(self.folder / "latest", state.tag)
            if best is not None:
                write_json(self.folder / "best.json", asdict(best))
            _sync(self.folder)
            _prune(self.folder, self.recipe.train.keep_checkpoints)
        except OSError as error:
            free = shutil.disk_usage(self.folder).free / 1e6  # torch's own words for a full disk say nothing of one
            shutil.rmtree(aside, ignore_errors=True)
            raise KvshotError(
                f"{final}: the checkpoint cannot be written ({error}; {free:,.1f} MB were free there); the ones before it stay, none is half there: "
                f"make room, then run the command again"
            ) from None

    def better(self, step: int) -> bool:
        """Whether what was measured after `step` is the best so far by `train.keep_best`."""
        if self.recipe.train.keep_best == "none":
            return False
        self.settle(wait=True)

        def compare() -> bool:
            now, before = self._best_of(step, self._measured(step)), _read_best(self.folder)
            if now is None or before is None or (before.metric, before.conversations) != (now.metric, now.conversations):
                return now is not None
            return now.value < before.value if now.metric == "loss" else now.value > before.value

        return bool(told_by_first(self.world, compare))

    def found_is_best(self) -> None:
        """Notes that the checkpoint that this start continued from is the best."""
        step = self.found.progress.step if self.found is not None else 0
        best = self._best_of(step, told_by_first(self.world, lambda: self._measured(step)))
        if best is not None and self.world.rank == 0:
            write_json(self.folder / "best.json", asdict(best))
            _prune(self.folder, self.recipe.train.keep_checkpoints)

    def _measured(self, step: int) -> dict[str, float] | None:
        return heldout.measured(self.recipe.run_dir).get(str(step))

    def _best_of(self, step: int, measured: dict[str, float] | None) -> Best | None:
        metric = self.recipe.train.keep_best
        found = measured or {}
        value = found.get(_MEASURE.get(metric, ""))
        return None if value is None else Best(f"step-{step:08d}", metric, value, step, found.get("heldout/conversations", 0.0))


def _read_best(folder: Path) -> Best | None:
    path = folder / "best.json"
    try:
        return parse(Best, read_object(path)) if path.is_file() else None
    except ValueError as error:
        raise KvshotError(f"{path}: {error}; delete it: the best checkpoint is chosen anew") from None


def _tags(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("step-*") if _TAG.fullmatch(path.name))


def _prune(folder: Path, keep: int) -> None:
    """Removes all but the newest `keep` checkpoints and the best one. What cannot be removed (someone reads it) is tried again after the next one."""
    best = _read_best(folder)
    for path in _tags(folder)[:-keep]:
        if best is None or path.name != best.tag:
            shutil.rmtree(path, ignore_errors=True)


def _clear(folder: Path, found: State | None, keep: int) -> list[str]:
    """Removes what starts that were killed left, what lies beyond the checkpoint `found`, and all but `keep`: the disk may be too full for another.

    Returns what is to be said of it.
    """
    shutil.rmtree(folder / ".universal", ignore_errors=True)
    for unfinished in folder.parent.rglob(".*.tmp"):  # of drafters above all, which are large
        if abandoned(unfinished):
            unfinished.unlink(missing_ok=True)
    newer = [path for path in _tags(folder) if found is not None and path.name > found.tag]
    notes = []
    for path, why in _left(folder, newer):
        shutil.rmtree(path)
        notes.append(f"dropped {why} {path.name}")
    best = _read_best(folder)
    if best is not None and not (folder / best.tag).is_dir():
        (folder / "best.json").unlink()
    _prune(folder, keep)
    return notes


def _left(folder: Path, newer: list[Path]) -> Iterator[tuple[Path, str]]:
    yield from ((path, "the half-written checkpoint") for path in sorted(folder.glob(".step-*.partial")))
    yield from ((path, "a checkpoint beyond the one continued from:") for path in newer)


def _sync(path: Path) -> None:
    """Waits until a file or folder is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
