"""WORK/sweeps/NAME: what a sweep consists of and how far it is. The trials themselves are run folders in WORK/trials, shared by all sweeps of WORK.

recipe.yaml      the resolved recipe of the sweep
trials.json      its trials, in order
state.json       what the driver knows of each
results.jsonl    one row for each trial that has ended; results.parquet holds the same
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from kvshot_ds.config import Recipe, load_recipe
from kvshot_ds.errors import ConfigError
from kvshot_ds.files import read_object, write_json
from kvshot_ds.typed import parse

State = Literal["waiting", "running", "complete", "failed", "halved"]


@dataclass(frozen=True)
class Trial:
    """One cell with one seed. name: of its run folder, made of the drafter and of the address of its contents. labels: axis -> value, as text.

    options: the recipe's options it sets, dotted. after: name of the trial whose drafter its warm start takes, or "".
    control: what it is a control of and in what, or "".
    """

    name: str
    labels: dict[str, str]
    seed: int
    options: dict[str, Any]
    after: str = ""
    control: str = ""

    @property
    def cell(self) -> str:
        """The trial's name in tables: equal for all its seeds."""
        return " ".join(f"{axis}={value}" for axis, value in self.labels.items()) or "recipe"


@dataclass(frozen=True)
class TrialState:
    """What the driver knows of a trial. started, ended [s since 1970]. seconds: of its parts (start, train, eval, diagnose, save), of this sweep's own work.

    reused: another sweep, or a start of this one that was cut off before it was measured, had trained it. reason: why it failed or was
    stopped. log: the end of its log, if it failed.
    """

    state: State = "waiting"
    tries: int = 0
    started: float | None = None
    ended: float | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    reused: bool = False
    reason: str = ""
    log: str = ""


@dataclass(frozen=True)
class Driver:
    """The process that runs the sweep; began: when that process started, by which another one of its number is told apart [s since 1970]."""

    host: str
    pid: int
    began: float
    updated: float


@dataclass(frozen=True)
class Progress:
    """state.json."""

    trials: dict[str, TrialState]
    driver: Driver | None = None


class SweepFolder:
    """The files of one sweep."""

    def __init__(self, path: Path):
        self.path = path

    @classmethod
    def of(cls, recipe: Recipe) -> SweepFolder:
        return cls(recipe.work / "sweeps" / recipe.name)

    @staticmethod
    def is_one(path: Path) -> bool:
        return (path / "trials.json").is_file()

    def recipe(self) -> Recipe:
        """Of the sweep. Raises ConfigError if this is no folder of one."""
        self._must_be_one()
        path = self.path / "recipe.yaml"
        if not path.is_file():
            raise ConfigError(f"{path}: not there; delete trials.json beside it and run the same kvshot sweep run again: complete trials are kept")
        return load_recipe(path)

    def trials(self) -> tuple[Trial, ...]:
        """Raises ConfigError if this is no folder of a sweep."""
        self._must_be_one()
        path = self.path / "trials.json"
        found = read_object(path)
        try:
            trials = parse(tuple[Trial, ...], found.get("trials"))
        except ValueError as error:
            raise _other(path, str(error)) from None
        if not trials:
            raise _other(path, "no trials")
        return trials

    def write_trials(self, trials: tuple[Trial, ...]) -> None:
        write_json(self.path / "trials.json", {"trials": [asdict(trial) for trial in trials]})

    def progress(self) -> Progress:
        """How far it is; empty before the driver has written it."""
        path = self.path / "state.json"
        if not path.is_file():
            return Progress({})
        found = read_object(path)
        try:
            return parse(Progress, found)
        except ValueError as error:
            raise _other(path, str(error)) from None

    def write_progress(self, progress: Progress) -> None:
        write_json(self.path / "state.json", asdict(progress))

    def run_dir(self, trial: Trial) -> Path:
        return trials_dir(self.path.parent.parent) / trial.name

    def _must_be_one(self) -> None:
        if not self.is_one(self.path):
            raise ConfigError(f"{self.path} is no folder of a sweep (no trials.json); kvshot sweep run RECIPE makes WORK/sweeps/NAME")


def _other(path: Path, what: str) -> ConfigError:
    return ConfigError(f"{path}: not what this version writes ({what}); delete it and run the same kvshot sweep run again: complete trials are kept")


def trials_dir(work: Path) -> Path:
    """Where the run folders of all sweeps of a work folder lie: a cell that two sweeps share is trained once."""
    return work / "trials"
