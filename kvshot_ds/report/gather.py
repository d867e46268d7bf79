"""Reads a work folder: whatever commands have left there, typed; what is not there is None and stays unsaid or is named."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter

from kvshot_ds.config import DrafterConfig, Recipe, load_recipe
from kvshot_ds.errors import ConfigError, KvshotError
from kvshot_ds.features.manifest import worker_seconds
from kvshot_ds.files import AnyPath, exists, read_json
from kvshot_ds.metrics import Interval, StepCounts
from kvshot_ds.report.decoded import Decoding, ServingCheck, read_decoding, read_serving_check
from kvshot_ds.report.families import UNKNOWN, Drafter, drafter_of, rank, styles
from kvshot_ds.sweep import results
from kvshot_ds.sweep.folder import SweepFolder, Trial, TrialState

# Points a training curve keeps; longer logs are averaged down to it
_CURVE_POINTS = 300
T = TypeVar("T")


@dataclass(frozen=True)
class Rate:
    """One measured share at draft step k: num of den rows, and its interval."""

    k: int
    num: float
    den: float
    interval: Interval


@dataclass(frozen=True)
class Evaluation:
    """eval.json. bigram: the bigram table's top-1 share on the same rows; against: differences, by (baseline, metric)."""

    drafter: Drafter
    target: str
    target_digest: str
    conversations: int
    confidence: float
    alpha: tuple[Rate, ...]
    accept_prob: tuple[Rate, ...]
    joint: tuple[Rate, ...]
    mat: Interval
    mat_joint: Interval
    retention: Interval
    bigram: Interval | None
    bigram_tokens: int | None
    against: dict[tuple[str, str], Interval]
    seconds: float | None


@dataclass(frozen=True)
class Conversations:
    """eval_conversations.json: counts [C, K] in the order of `keys`; bigram [C]: the bigram table's hits at step 0, () where they are not on record."""

    keys: tuple[str, ...]
    counts: StepCounts
    bigram: tuple[int, ...] = ()


@dataclass(frozen=True)
class Run:
    """One trained drafter's folder. scalars: TensorBoard tag -> ((step, value), ...) in ascending steps. origins: command,
    versions and commit of each stage that left them. style: index of its colour, marker and dash everywhere on the page.
    diagnostics: diagnostics.json. serving: serving_check.json. looks: heldout.json, step -> tag -> value. labels: axis -> value, of a trial of a sweep.
    checkpoint_bytes: of the checkpoints that are kept."""

    name: str
    folder: Path
    recipe: Recipe | None
    train: dict[str, Any] | None
    evaluation: Evaluation | None
    conversations: Conversations | None
    decoding: Decoding | None
    scalars: dict[str, tuple[tuple[float, float], ...]]
    origins: tuple[tuple[str, dict[str, Any]], ...]
    style: int = 0
    diagnostics: dict[str, Any] | None = None
    looks: dict[int, dict[str, float]] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    checkpoint_bytes: int = 0
    serving: ServingCheck | None = None

    @property
    def drafter(self) -> Drafter | None:
        """As measured, with what only the recipe tells."""
        trained = drafter_of(self.recipe) if self.recipe else None
        if self.evaluation is None:
            return trained
        measured = self.evaluation.drafter
        same = trained is not None and (trained.family, trained.depth, trained.injection) == (measured.family, measured.depth, measured.injection)
        return replace(measured, config=trained.config, offline=trained.offline) if trained and same else measured

    @property
    def label(self) -> str:
        """What its drafter is, in a few words; empty if that is not known."""
        return self.drafter.label if self.drafter else ""

    @property
    def seed(self) -> int | None:
        return self.recipe.train.seed if self.recipe else None


@dataclass(frozen=True)
class Work:
    """Everything found. runs: all of them, each once, the trials of `sweeps` among them. `provenance` by stage (prep, capture)."""

    folder: Path
    prepared: dict[str, Any] | None
    manifest: dict[str, Any] | None
    capture_seconds: float | None
    timings: dict[str, float] | None
    runs: tuple[Run, ...]
    provenance: dict[str, dict[str, Any]]
    sweeps: tuple[Sweep, ...] = ()

    @property
    def alone(self) -> tuple[Run, ...]:
        """The runs that belong to no sweep."""
        swept = {t.run.folder for sweep in self.sweeps for t in sweep.trials if t.run}
        return tuple(run for run in self.runs if run.folder not in swept)


@dataclass(frozen=True)
class TrialRun:
    """A trial as its sweep knows it. run: None where nothing was trained. row: of results.jsonl, {} where there is none."""

    trial: Trial
    state: TrialState
    run: Run | None
    row: dict[str, Any]

    @property
    def missing(self) -> str:
        """Why it has no held-out acceptance; "" if it has."""
        if self.run and self.run.evaluation and self.run.conversations:
            return ""
        trained = self.run is not None and self.run.train is not None
        said = "trained, but not evaluated" if trained and self.state.state != "failed" else self.state.state
        return f"{said}: {self.state.reason}" if self.state.reason else said


@dataclass(frozen=True)
class SweepCell:
    """Trials that differ in their seed alone, in the order of the sweep's seeds."""

    label: str
    labels: dict[str, str]
    trials: tuple[TrialRun, ...]

    @property
    def runs(self) -> tuple[Run, ...]:
        """Those with held-out acceptance."""
        return tuple(t.run for t in self.trials if t.run and not t.missing)


@dataclass(frozen=True)
class Sweep:
    """A sweep and its cells, in its own order. manifest: of the features its trials are trained on."""

    name: str
    folder: Path
    recipe: Recipe
    cells: tuple[SweepCell, ...]
    manifest: dict[str, Any] | None

    @property
    def trials(self) -> tuple[TrialRun, ...]:
        return tuple(t for cell in self.cells for t in cell.trials)


def gather(recipe: Recipe) -> Work:
    """What lies in the recipe's folders. Raises KvshotError on a file that cannot be read, naming the command that rewrites it."""
    folders = recipe.report.runs or (*_below(recipe.runs or recipe.work / "runs"), *filter(SweepFolder.is_one, _below(recipe.work / "sweeps")))
    missing = [str(p) for p in folders if not p.is_dir()]
    if missing:
        raise KvshotError(
            f"report.runs: no such run folder: {', '.join(missing)}; give run folders that `kvshot train` has made, or folders of sweeps, "
            "or leave report.runs empty"
        )
    sweeps = [_read_sweep(SweepFolder(p)) for p in folders if SweepFolder.is_one(p)]
    found = {run.folder: run for run in (*(t.run for s in sweeps for t in s.trials if t.run), *(read_run(p) for p in folders if not SweepFolder.is_one(p)))}
    runs = {run.folder: run for run in styled(sorted(found.values(), key=lambda run: (*rank(run.drafter), run.name)))}
    stages = {"prep": recipe.prepared_dir, "capture": recipe.shards_dir}
    return Work(
        folder=recipe.work,
        prepared=_read(recipe.prepared_dir / "summary.json", "kvshot prep", dict),
        manifest=_read(recipe.shards_dir / "manifest.json", "kvshot capture", dict),
        capture_seconds=worker_seconds(recipe.shards_dir),
        timings=_read(recipe.work / "timings.json", "the commands", _timings),
        runs=tuple(runs.values()),
        provenance={stage: read for stage, folder in stages.items() if (read := _read(folder / "provenance.json", f"kvshot {stage}", dict)) is not None},
        sweeps=tuple(_with_runs(sweep, runs) for sweep in sweeps),
    )


def gather_folders(folders: Sequence[Path]) -> tuple[Work, Recipe]:
    """What lies in folders of runs and of sweeps, and the recipe that it is shown by: the first sweep's, without one the first run's.
    Its title is the sweeps' names and their target, if there are sweeps.

    Raises ConfigError if none of them has a recipe, KvshotError as `gather`.
    """
    first = next((p for p in sorted(folders, key=lambda p: not SweepFolder.is_one(p)) if (p / "recipe.yaml").is_file()), None)
    if first is None:
        raise ConfigError(f"{', '.join(map(str, folders))}: no folder of a run or of a sweep (no recipe.yaml), such as WORK/runs/NAME or WORK/sweeps/NAME")
    recipe = load_recipe(first / "recipe.yaml")
    work = gather(recipe.model_copy(update={"report": recipe.report.model_copy(update={"runs": tuple(folders)})}))
    changed: dict[str, Any] = {"runs": tuple(folders)}
    if work.sweeps:
        target = next((t.run.evaluation.target for t in work.sweeps[0].trials if t.run and t.run.evaluation), recipe.target.path.name)
        changed["title"] = f"Sweep{'s' if len(work.sweeps) > 1 else ''} {', '.join(sweep.name for sweep in work.sweeps)} on {target}"
    return work, recipe.model_copy(update={"report": recipe.report.model_copy(update=changed)})


def _below(folder: Path) -> list[Path]:
    return sorted(p for p in folder.glob("*") if p.is_dir() and not p.name.startswith("."))


def _read_sweep(folder: SweepFolder) -> Sweep:
    """A sweep with its trials, as far as they are. Raises ConfigError if its files cannot be read."""
    recipe, states = folder.recipe(), folder.progress().trials
    rows = {row["name"]: row for row in results.read(folder)}
    cells: dict[str, list[TrialRun]] = {}
    for trial in folder.trials():
        place = folder.run_dir(trial)
        run = replace(read_run(place), labels=trial.labels) if place.is_dir() else None
        cells.setdefault(trial.cell, []).append(TrialRun(trial, states.get(trial.name, TrialState()), run, rows.get(trial.name, {})))
    made = tuple(SweepCell(label, trials[0].trial.labels, tuple(trials)) for label, trials in cells.items())
    return Sweep(folder.path.resolve().name, folder.path, recipe, made, _read(recipe.shards_dir / "manifest.json", "kvshot capture", dict))


def _with_runs(sweep: Sweep, runs: Mapping[Path, Run]) -> Sweep:
    """The sweep with the runs as the page has them; what another sweep calls otherwise keeps this one's labels."""

    def of(t: TrialRun) -> TrialRun:
        return replace(t, run=replace(runs[t.run.folder], labels=t.trial.labels)) if t.run else t

    return replace(sweep, cells=tuple(replace(cell, trials=tuple(map(of, cell.trials))) for cell in sweep.cells))


def read_run(folder: Path) -> Run:
    """One run folder, complete or not."""
    resolved = folder / "recipe.yaml"
    return Run(
        name=folder.resolve().name,
        folder=folder,
        recipe=load_recipe(resolved) if resolved.is_file() else None,
        train=_read(folder / "train.json", "kvshot train", dict),
        evaluation=_read(folder / "eval.json", "kvshot eval", _evaluation),
        conversations=_read(folder / "eval_conversations.json", "kvshot eval", _conversations),
        decoding=_read(folder / "decode.json", "kvshot decode", read_decoding),
        serving=_read(folder / "serving_check.json", "kvshot eval --serving-check", read_serving_check),
        scalars=_scalars(folder / "tensorboard"),
        origins=tuple(_origins(folder)),
        diagnostics=_read(folder / "diagnostics.json", "kvshot diagnose", _diagnostics),
        looks=_read(folder / "heldout.json", "kvshot train", lambda data: {int(step): dict(values) for step, values in data.items()}) or {},
        checkpoint_bytes=sum(p.stat().st_size for p in (folder / "checkpoints").rglob("*") if p.is_file()),
    )


def _diagnostics(data: Any) -> dict[str, Any]:
    if not isinstance(data["parts"], dict):
        raise ValueError("parts is no mapping")
    return dict(data)


def _origins(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    trained = _read(folder / "provenance.json", "kvshot train", dict)
    if trained:
        yield "train", trained
    for stage, name in (("eval", "eval"), ("eval --serving-check", "serving_check"), ("decode", "decode")):
        found = _read(folder / f"{name}.json", f"kvshot {stage}", lambda value: value.get("provenance"))
        if found:
            yield stage, found


def styled(runs: Sequence[Run]) -> tuple[Run, ...]:
    """The runs, each with a style that no other one has."""
    return tuple(replace(run, style=style) for run, style in zip(runs, styles([run.drafter for run in runs]), strict=True))


def evaluated(runs: tuple[Run, ...]) -> list[tuple[Run, Evaluation]]:
    """The runs with held-out acceptance."""
    return [(run, run.evaluation) for run in runs if run.evaluation and run.evaluation.alpha]


def _read(path: AnyPath, command: str, parse: Callable[[Any], T]) -> T | None:
    """`path` as `parse` understands it; None if there is no such file. Raises KvshotError if it is not what was expected."""
    if not exists(path):
        return None
    try:
        return parse(read_json(path))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        found = f"{type(error).__name__}: {error}"
        raise KvshotError(f"{path}: not what this version writes ({found}); delete it and run `{command}` again, or leave its run out by report.runs") from None


def _interval(value: Mapping[str, Any]) -> Interval:
    return Interval(value["value"], value["low"], value["high"])


def _rates(values: list[Mapping[str, Any]]) -> tuple[Rate, ...]:
    return tuple(Rate(v["k"], v["num"], v["den"], _interval(v)) for v in values)


def _evaluation(data: Mapping[str, Any]) -> Evaluation:
    drafter, bigram = data["drafter"], data.get("baselines", {}).get("bigram")
    if not len(data["alpha"]) == len(data["joint"]) == len(data["accept_prob"]) > 0:
        raise ValueError("alpha, joint and accept_prob must have one entry per draft step")
    init = drafter["init"] or {"layers": UNKNOWN, "head": UNKNOWN}  # a drafter folder that was not trained here records none
    return Evaluation(
        drafter=Drafter(
            drafter["family"],
            drafter["depth"],
            drafter["injection"],
            init["layers"],
            init["head"],
            drafter["parameters"],
            init.get("warm_start"),
            TypeAdapter(DrafterConfig).validate_python(drafter["config"]) if "config" in drafter else None,
        ),
        target=data["target"]["name"],
        target_digest=data["target"]["digest"],
        conversations=data["data"]["conversations"],
        confidence=data["confidence"],
        alpha=_rates(data["alpha"]),
        accept_prob=_rates(data["accept_prob"]),
        joint=_rates(data["joint"]),
        mat=_interval(data["mat"]),
        mat_joint=_interval(data["mat_joint"]),
        retention=_interval(data["retention"]),
        bigram=_interval(bigram) if bigram else None,
        bigram_tokens=bigram.get("tokens_counted") if bigram else None,
        against={(a["name"], a["metric"]): Interval(a["difference"], a["low"], a["high"]) for a in data.get("against", [])},
        seconds=data.get("seconds"),
    )


def _conversations(data: Mapping[str, Any]) -> Conversations:
    return Conversations(tuple(data["keys"]), StepCounts(data["den"], data["top1"], data["joint"], data["prob"]), tuple(data.get("bigram", ())))


def _timings(data: Any) -> dict[str, float]:
    """Wall seconds by stage, from {stage: seconds} or [{"stage", "seconds"}]."""
    pairs = data.items() if isinstance(data, dict) else ((entry["stage"], entry["seconds"]) for entry in data)
    return {str(stage): float(seconds) for stage, seconds in pairs}


def _scalars(folder: Path) -> dict[str, tuple[tuple[float, float], ...]]:
    """All scalars of the event files in `folder`. After a resume the later value of a step counts; long logs are averaged down."""
    if not folder.is_dir():
        return {}
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: _thin(sorted({e.step: (e.step, e.value) for e in events.Scalars(tag)}.values())) for tag in events.Tags()["scalars"]}


def _thin(points: list[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """The first point stays what it is: from there a gate closes."""
    if len(points) <= _CURVE_POINTS:
        return tuple(points)
    size = -(-(len(points) - 1) // (_CURVE_POINTS - 1))
    groups = [points[:1], *(points[i : i + size] for i in range(1, len(points), size))]
    return tuple((sum(s for s, _ in g) / len(g), sum(v for _, v in g) / len(g)) for g in groups)
