"""Where the points of a run go: TensorBoard's event files always, wandb and mlflow if asked for. One small interface; each is opened on rank 0 alone."""

from __future__ import annotations

import importlib.util
import os
import socket
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from kvshot_ds.config import Recipe, TrainConfig, dump_recipe
from kvshot_ds.errors import ConfigError
from kvshot_ds.files import read_object, write_json
from kvshot_ds.training.status import State
from kvshot_ds.typed import dotted

Value = bool | int | float | str


@dataclass(frozen=True)
class Histogram:
    """counts of values in equal bins over [0, 1]; total and squares: sums over the values and their squares."""

    counts: list[float]
    low: float
    high: float
    total: float
    squares: float


class Tracker(Protocol):
    """Receives what is seen of a run. faults: what it raises when it cannot take something."""

    faults: tuple[type[Exception], ...]

    def scalars(self, values: Mapping[str, float], step: int) -> None: ...

    def histogram(self, tag: str, values: Histogram, step: int) -> None: ...

    def close(self, state: State, reason: str) -> None:
        """state: complete (all steps are made), stopped (will be continued) or failed."""


def options(config: TrainConfig) -> dict[str, Value]:
    """What shapes the weights, flat, as trackers compare runs by it."""
    return {name: value if isinstance(value, Value) else str(value) for name, value in dotted(config.shaping()).items()}


def require(names: tuple[str, ...]) -> None:
    """Raises ConfigError, naming the package, for a tracker that is not installed."""
    for name in names:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:  # a mere folder of that name, as wandb leaves one where it runs, is no package
            raise ConfigError(f"train.trackers names {name}, which is not installed: pip install {name}, or leave it out (TensorBoard is always written)")


class TensorBoard:
    """Event files in `folder`, written by the calling thread: a full disk is an OSError where it happens, and a point is on disk once it is logged.

    (torch's SummaryWriter writes from a thread of its own, prints a traceback there and raises much later.)
    """

    faults: tuple[type[Exception], ...] = (OSError,)

    def __init__(self, folder: Path, recipe: Recipe, first_step: int):
        """first_step: what an earlier start logged from this step on is hidden by the viewer. Raises OSError."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter
        from torch.utils.tensorboard import summary

        self._event, self._summary = Event, summary
        folder.mkdir(parents=True, exist_ok=True)
        now = time.time()
        # TensorBoard reads files in the order of their names: this one comes after those of earlier starts, whatever clock they went by.
        second = max([int(now), *(int(file.name.split(".")[3]) + 1 for file in folder.glob("events.out.tfevents.[0-9]*.*"))])
        # Unbuffered: what did not fit on the disk is not tried again when the file is closed.
        self._file = (folder / f"events.out.tfevents.{second:010d}.{socket.gethostname()}.{os.getpid()}.{uuid.uuid4().hex[:6]}").open("wb", buffering=0)
        self._records = RecordWriter(self._file)
        self._write(Event(wall_time=now, file_version="brain.Event:2"))
        self._write(Event(wall_time=now, step=first_step, session_log=SessionLog(status=SessionLog.START)))
        self._add(summary.text("recipe", f"```\n{dump_recipe(recipe)}\n```"), 0)
        # HParams in this very file (torch's add_hparams makes a second run): the columns point at scalars of the run, the latest of which is shown.
        metrics = ["train/loss", "train/mat", "train/mat_joint", *(["heldout/mat", "heldout/mat_joint"] if recipe.train.eval_every else [])]
        experiment, start, self._end = summary.hparams(options(recipe.train), dict.fromkeys(metrics, 0.0))
        self._add(experiment, 0)
        self._add(start, 0)

    def _write(self, event: Any) -> None:
        self._records.write(event.SerializeToString())

    def _add(self, value: Any, step: int) -> None:
        self._write(self._event(wall_time=time.time(), step=step, summary=value))

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        for tag, value in values.items():
            self._add(self._summary.scalar(tag, value), step)

    def histogram(self, tag: str, values: Histogram, step: int) -> None:
        limits = [(i + 1) / len(values.counts) for i in range(len(values.counts))]
        v = values
        self._add(self._summary.histogram_raw(tag, v.low, v.high, sum(v.counts), v.total, v.squares, limits, v.counts), step)

    def close(self, state: State, reason: str) -> None:
        try:
            if state == "complete":
                self._add(self._end, 0)
        finally:
            self._file.close()


class Wandb:
    """A run of Weights & Biases, continued under its id. Project: WANDB_PROJECT, or kvshot-ds."""

    def __init__(self, folder: Path, recipe: Recipe):
        import wandb

        self.wandb, self.faults = wandb, self.raised()
        known = _known(folder, "wandb")
        name = known or uuid.uuid4().hex[:8]
        # config of a continued run: operational options may have changed
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "kvshot-ds"), name=recipe.name, id=name, resume="allow", dir=str(folder), config=options(recipe.train)
        )
        _remember(folder, "wandb", name)

    @staticmethod
    def raised() -> tuple[type[Exception], ...]:
        import wandb

        return OSError, wandb.Error

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        self.run.log(dict(values), step=step)

    def histogram(self, tag: str, values: Histogram, step: int) -> None:
        edges = [i / len(values.counts) for i in range(len(values.counts) + 1)]
        self.run.log({tag: self.wandb.Histogram(np_histogram=(values.counts, edges))}, step=step)

    def close(self, state: State, reason: str) -> None:
        self.run.finish(exit_code=0 if state == "complete" else 1)


class MLflow:
    """A run of MLflow, continued under its id. Server: MLFLOW_TRACKING_URI; experiment: MLFLOW_EXPERIMENT_NAME, or kvshot-ds. It takes no histograms."""

    def __init__(self, folder: Path, recipe: Recipe):
        import mlflow

        self.mlflow, self.faults = mlflow, self.raised()
        known = _known(folder, "mlflow")
        mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", "kvshot-ds"))
        self.run = mlflow.start_run(run_id=known) if known else mlflow.start_run(run_name=recipe.name)
        _remember(folder, "mlflow", self.run.info.run_id)
        if not known:
            mlflow.log_params(options(recipe.train))
            mlflow.log_text(dump_recipe(recipe), "recipe.yaml")

    @staticmethod
    def raised() -> tuple[type[Exception], ...]:
        import mlflow

        return OSError, mlflow.exceptions.MlflowException

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        self.mlflow.log_metrics(dict(values), step=step)

    def histogram(self, tag: str, values: Histogram, step: int) -> None:
        return

    def close(self, state: State, reason: str) -> None:
        self.mlflow.end_run(status={"complete": "FINISHED", "stopped": "KILLED"}.get(state, "FAILED"))


_KINDS: dict[str, type[Wandb] | type[MLflow]] = {"wandb": Wandb, "mlflow": MLflow}


def opened(name: str, folder: Path, recipe: Recipe) -> Tracker:
    """The tracker `name` of the run in `folder`. Raises ConfigError if it is not installed or cannot be reached."""
    require((name,))
    kind = _KINDS[name]
    faults: tuple[type[Exception], ...] = (ValueError, *kind.raised())
    try:
        return kind(folder, recipe)
    except faults as error:
        raise ConfigError(f"train.trackers: {name} cannot be opened ({type(error).__name__}: {error}); mend that, or leave it out") from error


def _known(folder: Path, name: str) -> str | None:
    """The id under which an earlier start of this run reported to `name`."""
    path = folder / "trackers.json"
    found = read_object(path).get(name) if path.is_file() else None
    return str(found) if found else None


def _remember(folder: Path, name: str, run_id: str) -> None:
    path = folder / "trackers.json"
    write_json(path, {**(read_object(path) if path.is_file() else {}), name: run_id})
