"""The cells of sweeps side by side: means over seeds with intervals, and differences from a baseline, paired by seed and by conversation."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from kvshot_ds.config import EvalConfig, Recipe
from kvshot_ds.errors import ConfigError, KvshotError
from kvshot_ds.files import read_object
from kvshot_ds.metrics import Spread, Statistic, StepCounts, alpha_at, mat_joint_of, mat_of, over_seeds_all, paired_over_seeds_all, retention_of
from kvshot_ds.provenance import digest
from kvshot_ds.sweep import axes, results
from kvshot_ds.sweep.folder import SweepFolder, Trial, TrialState

SIZES = ("steps", "tokens", "supervised_rows")


@dataclass(frozen=True)
class Missing:
    """A seed of a cell that has no numbers, and why."""

    seed: int
    why: str


@dataclass(frozen=True)
class Difference:
    """A cell's statistic minus the baseline's over `spread.seeds` common seeds. excludes: the interval excludes 0."""

    spread: Spread

    @property
    def excludes(self) -> bool:
        low, high = self.spread.low, self.spread.high
        return low is not None and high is not None and not low <= 0 <= high


@dataclass(frozen=True)
class Row:
    """One cell. labels: axis -> value. seeds: those with numbers. parameters and FLOPs [of a token trained on, of a proposed token]: of the drafter.

    sizes: by SIZES, the mean over seeds; unequal: those of them that are not the baseline's of the same seeds. values: by statistic (alpha_0 .., mat,
    mat_joint, retention). differences: by statistic (mat, mat_joint, alpha_0 ..), over the first `common_steps` draft steps; empty for the
    baseline, and where there is no common seed. warm: it starts from another drafter, whose training is not counted.
    """

    sweep: str
    name: str
    labels: Mapping[str, str]
    control: str
    warm: bool
    seeds: tuple[int, ...]
    missing: tuple[Missing, ...]
    parameters: int | None
    train_flops: float | None
    draft_flops: float | None
    sizes: Mapping[str, float | None]
    unequal: frozenset[str]
    steps: int
    values: Mapping[str, Spread]
    differences: Mapping[str, Difference] = field(default_factory=dict)
    common_steps: int = 0


@dataclass(frozen=True)
class Table:
    """rows: in the order of the sweeps. baseline: number of its row. axes: in the order of the columns. digest: of what was compared."""

    command: str
    digest: str
    target: str
    conversations: int | None
    confidence: float
    sweeps: tuple[str, ...]
    axes: tuple[str, ...]
    rows: tuple[Row, ...]
    baseline: int


@dataclass(frozen=True)
class _Measured:
    """A complete trial with its row of results.jsonl. keys, counts [C, K]: of eval_conversations.json."""

    sweep: str
    trial: Trial
    row: Mapping[str, Any]
    keys: tuple[str, ...]
    counts: StepCounts


@dataclass(frozen=True)
class _Known:
    """A trial as its sweep knows it. row: of results.jsonl, None where there is none."""

    folder: SweepFolder
    trial: Trial
    state: TrialState
    row: Mapping[str, Any] | None


@dataclass
class _Cell:
    """trials: of the cell by name, from all sweeps that have it. wanted: seeds that it should have."""

    sweep: str
    trials: dict[str, _Known]
    wanted: dict[int, None]

    @property
    def first(self) -> Trial:
        return next(iter(self.trials.values())).trial

    @cached_property
    def measured(self) -> dict[int, _Measured]:
        """By seed, in ascending order."""
        among = sorted(self.trials.values(), key=lambda known: known.trial.seed)
        return {known.trial.seed: found for known in among if (found := _measured(known))}

    @property
    def missing(self) -> tuple[Missing, ...]:
        states = {known.trial.seed: known.state for known in self.trials.values()}
        return tuple(Missing(seed, _why(states.get(seed))) for seed in self.wanted if seed not in self.measured)


def compare(folders: Sequence[Path], baseline: str | None = None) -> Table:
    """The table of the sweeps in `folders`. baseline: axis=value ..., names one cell; None: the first sweep's own, or its first cell.

    The options of the bootstrap are those of the first sweep's recipe (eval). Raises ConfigError: no folder of a sweep; sweeps of different targets or
    held-out conversations, which it names; a baseline that means no cell or several. KvshotError for a damaged file.
    """
    sweeps = [SweepFolder(Path(folder)) for folder in folders]
    recipe = sweeps[0].recipe()
    cells = _cells(sweeps)
    measured = [one for cell in cells for one in cell.measured.values()]
    _check_alike(measured)
    first = _baseline(cells, recipe, baseline)
    rows = tuple(_row(cell, cells[first], recipe.eval) for cell in cells)
    command = " ".join(["kvshot sweep table", *map(str, folders), *([f"--baseline '{baseline}'"] if baseline else [])])
    return Table(
        command, digest(*sorted({name for cell in cells for name in cell.trials})), measured[0].row["data"]["target"] if measured else "not known yet",
        len(measured[0].keys) if measured else None, recipe.eval.confidence, tuple(sweep.path.name for sweep in sweeps),
        tuple(dict.fromkeys(axis for row in rows for axis in row.labels)), rows, first,
    )  # fmt: skip


def _cells(sweeps: Iterable[SweepFolder]) -> list[_Cell]:
    """By label within a sweep; a cell that shares a trial with one of an earlier sweep is the same cell."""
    found: list[_Cell] = []
    for sweep in sweeps:
        states, wanted = sweep.progress().trials, dict.fromkeys(sweep.recipe().sweep.seeds)
        rows = {row["name"]: row for row in results.read(sweep)}
        cells: dict[str, _Cell] = {}
        for trial in sweep.trials():
            cell = cells.setdefault(trial.cell, _Cell(sweep.path.name, {}, dict(wanted)))
            cell.trials[trial.name] = _Known(sweep, trial, states.get(trial.name, TrialState()), rows.get(trial.name))
        for cell in cells.values():
            same = next((other for other in found if other.trials.keys() & cell.trials.keys()), None)
            if same is None:
                found.append(cell)
                continue
            for name, known in cell.trials.items():
                if name not in same.trials or same.trials[name].state.state != "complete":
                    same.trials[name] = known
            same.wanted.update(cell.wanted)
    return found


def _measured(known: _Known) -> _Measured | None:
    """None for a trial without numbers. Raises KvshotError if a file of it is damaged."""
    run = known.folder.run_dir(known.trial)
    path = run / "eval_conversations.json"
    if known.state.state != "complete" or not path.is_file():
        return None
    found = read_object(path)
    try:
        counts = StepCounts(*(found[name] for name in ("den", "top1", "joint", "prob")))
        keys = tuple(found["keys"])
        if counts.den.shape[:-1] != (len(keys),):
            raise ValueError(f"{len(keys)} keys, counts {counts.den.shape}")
    except (KeyError, TypeError, ValueError) as error:
        what = f"{path}: not what this version writes ({type(error).__name__}: {error})"
        raise KvshotError(f"{what}; delete it and eval.json, and run `kvshot eval {run / 'recipe.yaml'}`") from None
    return _Measured(known.folder.path.name, known.trial, known.row or results.row(known.folder, known.trial, known.state), keys, counts)


def _why(state: TrialState | None) -> str:
    if state is None:
        return "no trial of this seed"
    if state.state == "complete":
        return "complete, but eval_conversations.json is gone"
    return f"{state.state}: {' '.join(state.reason.split())}" if state.reason else state.state


def _check_alike(measured: Sequence[_Measured]) -> None:
    """Raises ConfigError, naming two sweeps, unless all trials are of one target and were measured on the same rows."""
    for one in measured[1:]:
        first = measured[0]
        there, here = (f"{m.trial.name} of sweep {m.sweep}" for m in (first, one))
        targets = [m.row["data"] for m in (first, one)]
        if targets[0]["target_digest"] != targets[1]["target_digest"]:
            names = [f"{t['target']} ({str(t['target_digest'])[:12]})" for t in targets]
            raise ConfigError(f"{there} has target {names[0]}, {here} has target {names[1]}: their numbers do not compare; make a table of each")
        steps = min(m.counts.den.shape[-1] for m in (first, one))
        if first.keys != one.keys or (first.counts.den[:, :steps] != one.counts.den[:, :steps]).any():
            sizes = [f"{len(m.keys)} conversations, {m.counts.den[:, 0].sum():.0f} rows" for m in (first, one)]
            raise ConfigError(
                f"{there} was measured on other held-out rows ({sizes[0]}) than {here} ({sizes[1]}): their numbers do not compare; "
                "measure them alike (kvshot eval), or make a table of each"
            )


def _baseline(cells: Sequence[_Cell], recipe: Recipe, named: str | None) -> int:
    """Number of the baseline's cell."""
    among = [axes.Cell(cell.first.labels, cell.first.options, cell.first.control) for cell in cells]
    if named is None and recipe.sweep.baseline is None:
        return 0
    if exact := [i for i, cell in enumerate(among) if cell.name == named]:
        return exact[0]
    where = "--baseline" if named is not None else "sweep.baseline"
    wanted: Mapping[str, Any] = recipe.sweep.baseline or {} if named is None else dict(re.findall(r"(\S+?)=(.*?)(?=\s+\S+=|\s*$)", named))
    known = "; ".join(cell.name for cell in among)
    if not wanted:
        raise ConfigError(f"{where} {named!r}: expected axis=value [axis=value ...]; cells: {known}")
    found = [i for i, cell in enumerate(among) if cell in axes.select(among, wanted, where)]
    found = [i for i in found if not among[i].control] or found
    if len(found) > 1 and named is not None:
        raise ConfigError(f"{where} {named!r} means {len(found)} cells: {'; '.join(among[i].name for i in found)}; name more of their values")
    if not found:
        raise ConfigError(f"{where} {named or wanted}: no cell has these values; cells: {known}")
    return found[0]


def _row(cell: _Cell, baseline: _Cell, options: EvalConfig) -> Row:
    measured = cell.measured
    rows = [one.row for one in measured.values()]
    steps = {one.counts.den.shape[-1] for one in measured.values()}
    if len(steps) > 1:
        raise ConfigError(
            f"{cell.first.cell}: its seeds were measured at {' and '.join(map(str, sorted(steps)))} draft steps; measure them alike (kvshot eval)"
        )
    length = steps.pop() if steps else 0
    among: dict[str, Statistic] = {f"alpha_{k}": alpha_at(k) for k in range(length)}
    among |= {"mat": mat_of, "mat_joint": mat_joint_of, "retention": retention_of} if length else {}
    spreads = over_seeds_all([one.counts for one in measured.values()], among.values(), options.bootstrap, options.confidence, options.seed)
    common = [seed for seed in measured if seed in baseline.measured] if cell is not baseline else []
    differences, common_steps = _differences([(measured[seed].counts, baseline.measured[seed].counts) for seed in common], options)
    drafter = next((row["drafter"] for row in rows if row["drafter"]), None) or {}
    flops = drafter.get("flops") or {}
    return Row(
        sweep=cell.sweep,
        name=cell.first.cell,
        labels=cell.first.labels,
        control=cell.first.control,
        warm=bool(drafter.get("warm_start")),
        seeds=tuple(measured),
        missing=cell.missing,
        parameters=drafter.get("parameters"),
        train_flops=flops.get("train_per_token"),
        draft_flops=flops.get("draft_per_step"),
        sizes={size: _mean([row["train"][size] for row in rows]) for size in SIZES},
        unequal=frozenset(size for size in SIZES if any(_size(measured, seed, size) != _size(baseline.measured, seed, size) for seed in common)),
        steps=length,
        values=dict(zip(among, spreads, strict=True)),
        differences=differences,
        common_steps=common_steps,
    )


def _differences(pairs: Sequence[tuple[StepCounts, StepCounts]], options: EvalConfig) -> tuple[dict[str, Difference], int]:
    """Over the draft steps that both sides have, and their number."""
    if not pairs:
        return {}, 0
    steps = min(c.den.shape[-1] for pair in pairs for c in pair)
    first, second = ([StepCounts.unstack(pair[side].stack()[..., :steps]) for pair in pairs] for side in (0, 1))
    among: dict[str, Statistic] = {"mat": mat_of, "mat_joint": mat_joint_of, **{f"alpha_{k}": alpha_at(k) for k in range(steps)}}
    found = paired_over_seeds_all(first, second, among.values(), options.bootstrap, options.confidence, options.seed)
    return {name: Difference(spread) for name, spread in zip(among, found, strict=True)}, steps


def _size(measured: Mapping[int, _Measured], seed: int, size: str) -> Any:
    return measured[seed].row["train"][size]


def _mean(values: Sequence[float | None]) -> float | None:
    """A whole number where all are the same one."""
    known = [value for value in values if value is not None]
    return (known[0] if len(set(known)) == 1 else sum(known) / len(known)) if known else None
