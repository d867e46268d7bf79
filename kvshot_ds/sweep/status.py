"""`kvshot sweep status`: how far the trials of a sweep are, whether its driver lives, and how long it will take. Reads files alone; imports no torch."""

from __future__ import annotations

import json
import socket
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal

from kvshot_ds.files import glimpse
from kvshot_ds.sweep.folder import Driver, Progress, SweepFolder, Trial, TrialState
from kvshot_ds.training import status

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

# what a trial does now: of those that the driver calls running, more exactly
Shown = Literal["starting", "running", "measuring", "interrupted", "failed", "waiting", "halved", "complete"]
DriverState = Literal["not started", "running", "silent", "gone", "ended"]
_ORDER: tuple[Shown, ...] = ("starting", "running", "measuring", "interrupted", "failed", "waiting", "halved", "complete")
_STYLE: Mapping[str, str] = {"running": "bold", "measuring": "bold", "starting": "bold", "failed": "red", "gone": "red", "silent": "red", "interrupted": "red"}
_MEANING: Mapping[DriverState, str] = {
    "not started": "it has not begun; kvshot sweep run RECIPE starts it",
    "running": "",
    "silent": "no sign of life for longer than two minutes, from a machine that is not this one",
    "gone": "its process is no longer there; the same kvshot sweep run goes on where it stopped",
    "ended": "",
}
_QUIET = 120.0  # a driver writes several times a minute [s]
_EVERY = 1.0  # between looks [s]
_LOG = 5  # lines shown of a failed trial's log


@dataclass(frozen=True)
class TrialLine:
    """One trial. mat: as `measured` says. seconds: since its start, or that it took. rate: of its newest point [tokens/s]. None: not known (yet)."""

    name: str
    cell: str
    seed: int
    state: Shown
    step: int | None
    steps: int | None
    mat: float | None
    measured: Literal["eval", "held-out", "train"] | None
    tries: int
    seconds: float | None
    rate: float | None
    left: float | None
    reused: bool
    control: str
    reason: str
    log: str
    folder: str


@dataclass(frozen=True)
class SweepPage:
    """A sweep. left: seconds until its end, at the pace so far; None: nothing to tell it from, or nothing runs.

    updated: the driver's last sign of life [s since 1970].
    """

    folder: str
    driver: DriverState
    meaning: str
    host: str
    pid: int | None
    updated: float | None
    counts: dict[Shown, int]
    left: float | None
    trials: tuple[TrialLine, ...]


def show(folder: Path, follow: bool, as_json: bool) -> None:
    """Prints the sweep in `folder`; with `follow` again and again until its driver has ended: in place on a terminal, else a line for each change.

    With as_json, one JSON object, or one on a line for each change. Raises ConfigError if this is no folder of a sweep.
    """
    from rich.console import Console
    from rich.live import Live

    sweep = SweepFolder(folder)
    found = read(sweep)
    terminal = Console(highlight=False)
    # what is piped is not cut to the width of a terminal that is not there
    console = terminal if terminal.is_terminal else Console(width=10_000, highlight=False)
    if follow and console.is_terminal and not as_json:
        with Live(_shown(found, first=_ORDER), console=console, auto_refresh=False) as live:
            while not over(found):
                _pause()
                found = read(sweep)
                live.update(_shown(found, first=_ORDER), refresh=True)
        return
    _print(found, console, None if follow else 1, as_json)
    while follow and not over(found):
        _pause()
        before, found = found, read(sweep)
        for line in changes(before, found):
            if not as_json:
                console.print(line, soft_wrap=True, markup=False)
        if as_json and _lasting(found) != _lasting(before):
            _print(found, console, None, as_json)


def over(page: SweepPage) -> bool:
    """Whether the driver has ended, as far as can be told; one that is silent may come back, one that has not started may start."""
    return page.driver in ("gone", "ended")


def read(sweep: SweepFolder) -> SweepPage:
    """Raises ConfigError if this is no folder of a sweep."""
    trials, progress, now = sweep.trials(), sweep.progress(), time.time()
    driver = driver_state(progress, trials, now)
    lines = tuple(_line(sweep, trial, progress.trials.get(trial.name, TrialState()), driver, now) for trial in trials)
    by, counted = progress.driver, Counter(line.state for line in lines)
    return SweepPage(
        folder=str(sweep.path),
        driver=driver,
        meaning=_MEANING[driver],
        host=by.host if by else "",
        pid=by.pid if by else None,
        updated=by.updated if by else None,
        counts={state: counted[state] for state in _ORDER if counted[state]},
        left=time_left(lines) if driver == "running" else None,
        trials=lines,
    )


def driver_state(progress: Progress, trials: tuple[Trial, ...], now: float) -> DriverState:
    """A driver that has left nothing to do has ended, whatever has become of its process."""
    states = [progress.trials.get(trial.name, TrialState()).state for trial in trials]
    if progress.driver is not None and _lives(progress.driver):
        return "running"
    if progress.trials and not {"waiting", "running"} & set(states):
        return "ended"
    if progress.driver is None:
        return "gone" if progress.trials else "not started"
    if progress.driver.host == socket.gethostname():
        return "gone"
    return "silent" if now - progress.driver.updated > _QUIET else "running"


def _lives(driver: Driver) -> bool:
    """Its process is on this machine; one of that number that was started at another time is another one."""
    began = status.began(driver.pid) if driver.host == socket.gethostname() else None
    return began is not None and abs(began - driver.began) < 2


def _line(sweep: SweepFolder, trial: Trial, state: TrialState, driver: DriverState, now: float) -> TrialLine:
    folder = sweep.run_dir(trial)
    done = glimpse(folder / "train.json")
    run = None if done else status.read(folder)
    steps = (done.get("steps"),) * 2 if done else (run.step, run.steps) if run else (None, None)
    scalars: Mapping[str, float | None] = run.scalars if run else {}
    mat, measured = _mat(folder, scalars)
    shown = _state(state, driver, bool(done), run is not None and run.state == "running" and bool(state.started) and run.updated >= (state.started or 0))
    seconds = None if state.started is None else (state.ended or now) - state.started
    left = None
    if shown == "running" and run and seconds and (made := run.step - _first_step(run, state.tries)) > 0:
        left = seconds / made * (run.steps - run.step)
    return TrialLine(
        name=trial.name, cell=trial.cell, seed=trial.seed, state=shown, step=steps[0], steps=steps[1], mat=mat, measured=measured, tries=state.tries,
        seconds=None if shown == "interrupted" else seconds, rate=scalars.get("train/tokens_per_s") if shown == "running" else None, left=left,
        reused=state.reused, control=trial.control, reason=state.reason, log=state.log, folder=str(folder),
    )  # fmt: skip


def _first_step(run: status.Status, tries: int) -> int:
    """Steps that were made already when the first of this driver's `tries` began: TrialState.started tells its time."""
    starts = (0, *run.resumed_from)
    return starts[-min(max(1, tries), len(starts))]


def _state(state: TrialState, driver: DriverState, trained: bool, training: bool) -> Shown:
    """What the driver calls running may be before its first step, in training, or after its last; without a driver nobody runs it."""
    if state.state != "running":
        return state.state
    if driver not in ("running", "silent"):
        return "interrupted"
    return "measuring" if trained else "running" if training else "starting"


def _mat(folder: Path, scalars: Mapping[str, float | None]) -> tuple[float | None, Literal["eval", "held-out", "train"] | None]:
    """The best that is known: by `kvshot eval`, at the newest look during training, or on the conversations trained on."""
    evaluated = glimpse(folder / "eval.json").get("mat")
    if isinstance(evaluated, dict) and isinstance(evaluated.get("value"), float):
        return evaluated["value"], "eval"
    looks = glimpse(folder / "heldout.json")
    newest = looks[max(looks, key=int)] if looks and all(step.isdecimal() for step in looks) else {}
    if isinstance(newest, dict) and isinstance(newest.get("heldout/mat"), float):
        return newest["heldout/mat"], "held-out"
    training = scalars.get("train/mat")
    return training, None if training is None else "train"


def time_left(lines: tuple[TrialLine, ...]) -> float | None:
    """Seconds until all have ended, if as many run at once as now: what running ones need at their pace, and for each waiting one what trials of its cell
    took, or of any. None where that is not known of one of them."""
    took: dict[str, list[float]] = {}
    for line in lines:
        if line.seconds is not None and not line.reused and (line.state == "complete" or line.left is not None):
            took.setdefault(line.cell, []).append(line.seconds + (line.left or 0.0))
    every = [seconds for found in took.values() for seconds in found]
    needs = dict[str, float]()
    for line in lines:
        if line.state in ("waiting", "starting", "running", "measuring"):
            if line.left is None and not every:
                return None
            whole = fmean(took.get(line.cell, every)) if every else 0.0
            needs[line.name] = line.left if line.left is not None else max(0.0, whole - (line.seconds or 0.0))
    now = [line.name for line in lines if line.state in ("starting", "running", "measuring")]
    return max([sum(needs.values()) / max(1, len(now)), *(needs[name] for name in now)]) if needs else None


def changes(before: SweepPage, after: SweepPage) -> list[str]:
    """A line for each trial that is in another state now, and for the driver."""
    known = {line.name: line for line in before.trials}
    out = []
    for line in after.trials:
        if line.name not in known or known[line.name].state != line.state:
            parts = [f"{line.cell} seed {line.seed}: {line.state}"]
            parts += [f"step {line.step}/{line.steps}"] if line.step is not None else []
            parts += [f"MAT {_mat_text(line)}"] if line.mat is not None else []
            out.append(", ".join(parts + ([line.reason] if line.reason else [])))
    return out + ([f"driver: {_driver(after)}"] if after.driver != before.driver else [])


def _lasting(page: SweepPage) -> Any:
    """What makes it worth telling again: everything but the clock."""
    return page.driver, [(line.state, line.step, line.mat, line.tries) for line in page.trials]


def _print(page: SweepPage, console: Console, indent: int | None, as_json: bool) -> None:
    if as_json:
        print(json.dumps(asdict(page), indent=indent), flush=True)
    else:
        console.print(_shown(page))


def _shown(page: SweepPage, first: tuple[Shown, ...] = ()) -> RenderableType:
    """The page for a console. first: states in the order in which their trials come; else trials come in that of the sweep."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for name in ("cell", "seed", "state", "step", "MAT", "tries", "time", "tok/s"):
        table.add_column(name, justify="left" if name in ("cell", "state", "MAT") else "right", no_wrap=True)
    for line in sorted(page.trials, key=lambda line: first.index(line.state)) if first else page.trials:
        state = line.state + (" (reused)" if line.reused else "")
        table.add_row(
            Text(line.cell), str(line.seed), Text(state, _STYLE.get(line.state, "")), "–" if line.step is None else f"{line.step}/{line.steps}",
            _mat_text(line), str(line.tries), _duration(line.seconds), "–" if line.rate is None else f"{line.rate:,.0f}",
        )  # fmt: skip
    counts = ", ".join(f"{count} {state}" for state, count in page.counts.items())
    head = [
        f"{page.folder}: {len(page.trials)} trials: {counts}" + ("" if page.left is None else f"; about {_duration(page.left)} left"),
        f"driver: {_driver(page)}",
    ]
    tail = []
    for line in page.trials:
        if line.reason:
            tail.append(f"{line.cell} seed {line.seed}: {line.state}: {line.reason}")
            tail += [f"    {text}" for text in line.log.splitlines()[-_LOG:]]
    return Group(Text("\n".join(head)), table, *([Text("\n".join(tail))] if tail else []))


def _driver(page: SweepPage) -> str:
    place = f", process {page.pid} on {page.host}" if page.pid is not None and page.driver != "ended" else ""
    return page.driver + place + (f": {page.meaning}" if page.meaning else "")


def _mat_text(line: TrialLine) -> str:
    return "–" if line.mat is None else f"{line.mat:.3f} {line.measured}"


def _duration(seconds: float | None) -> str:
    """h:mm:ss"""
    return "–" if seconds is None else f"{int(seconds) // 3600}:{int(seconds) // 60 % 60:02d}:{int(seconds) % 60:02d}"


def _pause() -> None:
    time.sleep(_EVERY)
