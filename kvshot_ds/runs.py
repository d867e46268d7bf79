"""`kvshot runs list | show`: what run folders tell of themselves. Reads their files alone; imports no torch."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import yaml

from kvshot_ds.errors import ConfigError
from kvshot_ds.files import glimpse
from kvshot_ds.tables import aligned
from kvshot_ds.training import status
from kvshot_ds.training.status import Status
from kvshot_ds.typed import dotted, parse

State = Literal["running", "exporting", "complete", "stopped", "failed", "gone", "silent", "unknown"]
MEANING: dict[State, str] = {
    "running": "",
    "exporting": "all steps are made, the drafter is being written",
    "complete": "",
    "stopped": "in good order; the same command continues",
    "failed": "",
    "gone": "its process is no longer there (killed, or the machine failed)",
    "silent": "no sign of life for longer than train.hang_minutes",
    "unknown": "no status.json that this version can read, and not complete",
}
_LAST = 5  # points shown
_TAGS = ("train/loss", "train/mat", "train/accept_top1/0", "train/tokens_per_s")


@dataclass(frozen=True)
class RunLine:
    """One run, as `list` shows it. None: not known. started, updated [s since 1970]. heldout: whether mat was measured on held-out conversations."""

    folder: str
    name: str
    drafter: str
    state: State
    step: int | None
    steps: int | None
    loss: float | None
    mat: float | None
    heldout: bool
    ranks: int | None
    started: float | None
    updated: float | None
    resumed_from: tuple[int, ...]
    reason: str


@dataclass(frozen=True)
class _Done:
    """Of train.json, which a complete run has."""

    steps: int | None
    ranks: int | None
    resumed_from: tuple[int, ...]


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint folder that is whole. current: the one a start continues from."""

    folder: str
    step: int
    current: bool


@dataclass(frozen=True)
class RunPage:
    """One run, as `show` shows it. points: step -> scalars of the last points. heldout: step -> scalars. options: what differs from the defaults."""

    line: RunLine
    options: dict[str, Any]
    points: dict[int, dict[str, float]]
    heldout: dict[int, dict[str, float]]
    checkpoints: tuple[Checkpoint, ...]


def find(work: Path) -> list[Path]:
    """Run folders at, or up to three levels below, `work`, by name. Raises ConfigError if there is no such folder."""
    if not work.is_dir():
        raise ConfigError(f"{work}: no such folder; give the work folder of a recipe, or one above it")
    made = {path.parent for depth in ("", "*/", "*/*/", "*/*/*/") for path in work.glob(f"{depth}recipe.yaml")}
    return sorted(folder for folder in made if any((folder / name).exists() for name in (status.NAME, "train.json", "checkpoints")))


def _line(folder: Path) -> RunLine:
    """As `read_line`; of a folder that cannot be read, that it cannot, so that one such run does not hide the others."""
    try:
        return read_line(folder)
    except ConfigError as error:
        return RunLine(str(folder), folder.name, "–", "unknown", None, None, None, None, False, None, None, None, (), str(error))


def read_line(folder: Path) -> RunLine:
    """What `list` shows of the run in `folder`. Raises ConfigError if it is none."""
    recipe, done, found = _recipe(folder), _done(folder), status.read(folder)
    drafter, scalars = recipe["train"]["drafter"], found.scalars if found else {}
    heldout = scalars.get("heldout/mat") is not None
    state, reason = _state(folder, recipe, found)
    return RunLine(
        folder=str(folder),
        name=str(recipe["name"]),
        drafter=f"{drafter['family']}-{drafter['depth']}",
        state=state,
        step=found.step if found else done.steps,
        steps=found.steps if found else done.steps,
        loss=scalars.get("train/loss"),
        mat=scalars.get("heldout/mat" if heldout else "train/mat"),
        heldout=heldout,
        ranks=found.ranks if found else done.ranks,
        started=found.started if found else None,
        updated=found.updated if found else _written(folder),
        resumed_from=done.resumed_from or (found.resumed_from if found else ()),
        reason=reason,
    )


def _state(folder: Path, recipe: dict[str, Any], found: Status | None) -> tuple[State, str]:
    """The state and what is to be said of it."""
    if (folder / "train.json").is_file():
        return "complete", ""
    if found is None:
        return "unknown", MEANING["unknown"]
    if found.state in ("stopped", "failed"):
        return found.state, found.reason or MEANING[found.state]
    alive: State = "exporting" if found.state == "complete" else "running"
    if found.host == socket.gethostname():
        # A process of that number that was started at another time is another one.
        now = status.began(found.pid)
        return (alive, MEANING[alive]) if now is not None and abs(now - found.began) < 2 else ("gone", MEANING["gone"])
    quiet = time.time() - found.updated > 60 * float(recipe["train"].get("hang_minutes", 30))
    return ("silent", MEANING["silent"]) if quiet else (alive, MEANING[alive])


def read_page(folder: Path) -> RunPage:
    """What `show` shows of the run in `folder`. Raises ConfigError if it is none."""
    line = read_line(folder)
    from kvshot_ds.config import TrainConfig

    recipe = _recipe(folder)
    family = recipe["train"]["drafter"]["family"]
    try:
        defaults = dotted(TrainConfig.model_validate({"drafter": {"family": family}}).model_dump(mode="json"))
    except ValueError:  # a family that this version does not know
        defaults = {}
    train = dotted(recipe["train"])
    options = {f"train.{name}": value for name, value in train.items() if name == "drafter.family" or name not in defaults or defaults[name] != value}
    return RunPage(line, options, points(folder / "tensorboard"), _heldout(folder / "heldout.json"), checkpoints(folder / "checkpoints"))


def points(folder: Path) -> dict[int, dict[str, float]]:
    """The last points of a run's event files: step -> scalars, ascending. What a later start replaced is not among them."""
    if not folder.is_dir():
        return {}
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 10 * _LAST, "tensors": 1, "histograms": 1})
    events.Reload()
    out: dict[int, dict[str, float]] = {}
    for tag in events.Tags()["scalars"]:
        for event in events.Scalars(tag)[-2 * _LAST :]:
            out.setdefault(event.step, {})[tag] = event.value
    return {step: out[step] for step in sorted(out)[-_LAST:]}


def _heldout(path: Path) -> dict[int, dict[str, float]]:
    try:
        return parse(dict[int, dict[str, float]], glimpse(path))
    except ValueError:
        return {}


def checkpoints(folder: Path) -> tuple[Checkpoint, ...]:
    """Ascending by step; half-written ones are not among them."""
    found = {int(path.name.removeprefix("step-")): path for path in folder.glob(f"step-{8 * '[0-9]'}") if (path / "state.json").is_file()}
    return tuple(Checkpoint(str(path), step, step == max(found)) for step, path in sorted(found.items()))


def _recipe(folder: Path) -> dict[str, Any]:
    path = folder / "recipe.yaml"
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
        found["name"], found["train"]["drafter"]["family"], found["train"]["drafter"]["depth"], float(found["train"].get("hang_minutes", 30))
    except OSError as error:
        raise ConfigError(f"{folder} is no run folder, such as work/smollm2/runs/hybrid ({error}); kvshot runs list WORK names those below WORK") from None
    except (yaml.YAMLError, KeyError, TypeError, AttributeError, ValueError) as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(f"{path}: expected the resolved recipe of a run, found something else ({why})") from None
    return dict(found)


def _done(folder: Path) -> _Done:
    """What train.json tells, as far as it can be read; older versions wrote the step of a later start alone."""
    found = glimpse(folder / "train.json")
    try:
        starts = [start["step"] if isinstance(start, dict) else start for start in found.get("resumed_from", ())]
        return parse(_Done, {"steps": found.get("steps"), "ranks": found.get("world_size"), "resumed_from": starts})
    except (ValueError, TypeError, KeyError):
        return _Done(None, None, ())


def _written(folder: Path) -> float | None:
    return max((path.stat().st_mtime for path in (folder / "tensorboard").glob("*")), default=None)


def to_json(value: RunLine | RunPage) -> dict[str, Any]:
    return asdict(value)


def table(lines: Sequence[RunLine]) -> list[str]:
    """The runs as text, a line each below a head; folders are told apart by `show`."""
    head = ("run", "drafter", "state", "step", "loss", "MAT", "ranks", "started", "updated", "resumed")
    rows = [head] + [
        (
            line.name,
            line.drafter,
            line.state,
            "–" if line.step is None else f"{line.step}/{line.steps}",
            _number(line.loss, 3),
            _number(line.mat, 3) + ("" if line.mat is None else " held-out" if line.heldout else " train"),
            "–" if line.ranks is None else str(line.ranks),
            _when(line.started),
            _when(line.updated),
            f"{len(line.resumed_from)}×" if line.resumed_from else "–",
        )
        for line in lines
    ]
    return aligned(rows) + [f"{line.name}: {line.state}: {line.reason}" for line in lines if line.reason]


def page(found: RunPage) -> list[str]:
    """One run as text."""
    line = found.line
    out = [
        f"{line.name}  {line.folder}",
        f"{line.drafter}, {line.state}" + (f": {line.reason}" if line.reason else ""),
        f"step {'–' if line.step is None else f'{line.step} of {line.steps}'}, {line.ranks or '–'} rank(s), started {_when(line.started)}, "
        f"last sign {_when(line.updated)}" + (f", continued from step {', '.join(map(str, line.resumed_from))}" if line.resumed_from else ""),
        "",
        "options that differ from the defaults",
        *(f"  {name} = {value}" for name, value in found.options.items()),
    ]
    if found.points:
        rows = [("step", *(tag.removeprefix("train/") for tag in _TAGS))]
        rows += [(str(step), *(_number(values.get(tag), 3) for tag in _TAGS)) for step, values in found.points.items() if _TAGS[0] in values]
        out += ["", "last points", *(f"  {text}" for text in aligned(rows))]
    if found.heldout:
        tags = ("loss", "mat", "mat_joint", "accept_top1/0", "retention", "conversations")
        rows = [("step", *tags)]
        rows += [(str(step), *(_number(values.get(f"heldout/{tag}"), 3) for tag in tags)) for step, values in sorted(found.heldout.items())[-_LAST:]]
        out += ["", "held-out", *(f"  {text}" for text in aligned(rows))]
    if found.checkpoints:
        best = glimpse(Path(line.folder) / "checkpoints" / "best.json")
        chosen = f"  (best: {best.get('metric')} {_number(best.get('value'), 3)})"
        notes = [("  (continues from here)" if c.current else "") + (chosen if c.step == best.get("step") else "") for c in found.checkpoints]
        out += ["", "checkpoints", *(f"  {c.folder}{note}" for c, note in zip(found.checkpoints, notes, strict=True))]
    out += ["", f"watch:    tensorboard --logdir {Path(line.folder) / 'tensorboard'}"]
    if line.state == "complete":
        more = [str(place) for place in (Path(line.folder) / "drafter_best", Path(line.folder) / "drafter_ema") if place.is_dir()]
        own = f" 'eval.drafters=[{','.join((line.folder, *more))}]'" if more else ""
        return [*out, f"measure:  kvshot eval {Path(line.folder) / 'recipe.yaml'}{own}"]
    if line.state not in ("running", "exporting"):
        out.append(f"continue: kvshot train {Path(line.folder) / 'recipe.yaml'}  (under the launcher, for several ranks)")
    return out


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _when(moment: float | None) -> str:
    return "–" if moment is None else datetime.fromtimestamp(moment).strftime("%Y-%m-%d %H:%M")


def list_runs(work: Path) -> list[RunLine]:
    """All runs at or below `work`; those started last come last."""
    lines = [_shorter(_line(folder), work) for folder in find(work)]
    return sorted(lines, key=lambda line: (line.started or line.updated or 0, line.name))


def _shorter(line: RunLine, work: Path) -> RunLine:
    """Its name with the folders between `work` and it, where several works are looked at."""
    between = [part for part in Path(line.folder).relative_to(work).parts[:-1] if part != "runs"]
    return replace(line, name="/".join((*between, line.name)))
