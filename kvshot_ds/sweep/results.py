"""One row for each trial that has ended, with everything that is known of it: results.jsonl, and the same flattened in results.parquet.

A row is read together from the files of the trial's run folder and from the driver's state. What is not known is null: a trial that failed has its reason,
its options and its size, and no numbers.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

from kvshot_ds.config import Recipe, load_recipe
from kvshot_ds.diagnostics.run import summary
from kvshot_ds.drafters.cost import total, weightless
from kvshot_ds.errors import ConfigError, KvshotError
from kvshot_ds.features.codec import SCALE, stored_tensors
from kvshot_ds.files import read_object, write_atomic
from kvshot_ds.objectives.objective import required_features
from kvshot_ds.sweep.contents import Data
from kvshot_ds.sweep.estimate import planned
from kvshot_ds.sweep.folder import SweepFolder, Trial, TrialState
from kvshot_ds.sweep.grid import trial_recipe
from kvshot_ds.training import status
from kvshot_ds.training.plan import Plan

JSONL, PARQUET = "results.jsonl", "results.parquet"
_SECTIONS = (
    "sweep", "name", "cell", "labels", "seed", "state", "reason", "control", "reused", "digest", "options", "drafter", "data", "train", "cost", "heldout",
    "diagnostics", "provenance",
)  # fmt: skip
_RATES, _NUMBERS = ("alpha", "joint", "accept_prob"), ("mat", "mat_joint", "retention")


def row(folder: SweepFolder, trial: Trial, state: TrialState) -> dict[str, Any]:
    """The row of a trial: a JSON object of _SECTIONS.

    train: as it went, over all its starts, whichever sweep made them; flops: as cost.py counts them. cost.seconds: by part, of all that this trial took;
    device_hours: those seconds times its ranks. feature_bytes: tensors of the train split read from storage, as often as they were passed over.
    drafter.flops at a context of `context` tokens, the mean of the conversations trained on. Raises KvshotError if a file of a complete trial is damaged;
    another trial may have failed of just that, and its row goes without what the files would say.
    """
    try:
        return _row(folder, trial, state, folder.run_dir(trial))
    except KvshotError:
        if state.state == "complete":
            raise
        return _row(folder, trial, state, Path(os.devnull))


def _row(folder: SweepFolder, trial: Trial, state: TrialState, run: Path) -> dict[str, Any]:
    """run: folder of the files."""
    done, measured = _object(run / "train.json"), _object(run / "eval.json")
    made, diagnosed = _object(run / "provenance.json"), _object(run / "diagnostics.json")
    recipe = _recipe(folder, trial, run / "recipe.yaml")
    plan, data = _plan(recipe)
    seconds = _seconds(state, done, measured, diagnosed)
    with _writes(run, "train.json"):
        train = _train(run, plan, done)
    ranks = train["ranks"] or (recipe.ray.ranks if recipe else None)
    with _writes(run, "eval.json"):
        heldout = _heldout(measured)
    with _writes(run, "diagnostics.json"):
        diagnostics = summary(diagnosed) if diagnosed else None
    return {
        "sweep": folder.path.name,
        "name": trial.name,
        "cell": trial.cell,
        "labels": dict(trial.labels),
        "seed": trial.seed,
        "state": state.state,
        "reason": state.reason,
        "control": trial.control,
        "reused": state.reused,
        "digest": made.get("train_digest"),
        "options": recipe.train.model_dump(mode="json") if recipe else None,
        "drafter": _drafter(recipe, plan, done, train),
        "data": _data(data, plan, measured),
        "train": train,
        "cost": {
            "seconds": seconds,
            "device_hours": ranks * sum(seconds.values()) / 3600 if ranks and seconds else None,
            "feature_bytes": _feature_bytes(recipe, plan, train["steps"]),
            "memory": _memory(run),
        },
        "heldout": heldout,
        "diagnostics": diagnostics,
        "provenance": {name: made.get(name) for name in ("versions", "git_commit")},
    }


@contextmanager
def _writes(run: Path, name: str) -> Iterator[None]:
    """Errors of what `name` lacks name it. Raises KvshotError."""
    try:
        yield
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        found = f"{type(error).__name__}: {error}"
        raise KvshotError(f"{run / name}: not what this version writes ({found}); delete it and run the sweep again") from None


def write(folder: SweepFolder, rows: Sequence[Mapping[str, Any]]) -> None:
    """Replaces results.jsonl and results.parquet, each atomically. Columns stand in an order that does not depend on which trials there are."""
    import pyarrow as pa
    from pyarrow import parquet

    lines = "".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows)
    columns = _columns(rows)
    table = pa.table({name: _array(values) for name, values in columns.items()})
    raw = io.BytesIO()
    parquet.write_table(table, raw)
    write_atomic(folder.path / PARQUET, raw.getvalue())
    write_atomic(folder.path / JSONL, lines)


def read(folder: SweepFolder) -> list[dict[str, Any]]:
    """The rows of results.jsonl; none before the first trial has ended. Raises KvshotError naming the line if one is damaged."""
    path = folder.path / JSONL
    if not path.is_file():
        return []
    found = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            value = json.loads(line.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            raise _damaged(path, number, f"not readable as JSON ({error})") from None
        missing = [name for name in _SECTIONS if name not in value] if isinstance(value, dict) else list(_SECTIONS)
        if missing:
            raise _damaged(path, number, f"lacks {', '.join(missing)}")
        found.append(value)
    return found


def flat(value: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted name and value of everything in a row: `heldout.alpha.0.num`. A list of plain values stays one (as JSON text in Parquet)."""
    for name, inner in value.items():
        place = f"{before}{name}"
        if isinstance(inner, Mapping):
            yield from flat(inner, f"{place}.")
        elif isinstance(inner, list | tuple) and inner and all(isinstance(item, Mapping) for item in inner):
            yield from flat({str(i): item for i, item in enumerate(inner)}, f"{place}.")
        else:
            yield place, inner


def _damaged(path: Path, line: int, what: str) -> KvshotError:
    return KvshotError(f"{path}: line {line} is no row of a trial: {what}; delete the file and run `kvshot sweep run` again, which writes it anew")


def _columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Dotted name -> a value for each row. A section that is null in one row and has parts in another one has no column of its own."""
    flattened = [dict(flat(row)) for row in rows]
    names = sorted({name for found in flattened for name in found}, key=_place)
    parents = {name[:at] for name in names for at in range(len(name)) if name[at] == "."}
    columns = {name: [found.get(name) for found in flattened] for name in names}
    return {name: values for name, values in columns.items() if name not in parents or any(v is not None for v in values)}


def _place(name: str) -> tuple[int, list[tuple[int, str]]]:
    """Sections in their order, numbers in theirs, the rest by name."""
    first, *parts = name.split(".")
    section = _SECTIONS.index(first) if first in _SECTIONS else len(_SECTIONS)
    return section, [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]


def _array(values: Sequence[Any]) -> Any:
    """One type for each column: whole numbers stay whole, numbers of both kinds are floats, anything mixed or nested is JSON text."""
    import pyarrow as pa

    kinds = {type(v) for v in values if v is not None}
    if not kinds:
        return pa.nulls(len(values))
    if kinds == {int, float}:
        return pa.array(values, pa.float64())
    for kind, arrow in ((bool, pa.bool_()), (int, pa.int64()), (float, pa.float64()), (str, pa.string())):
        if kinds == {kind}:
            return pa.array(values, arrow)
    return pa.array([None if v is None else json.dumps(v, ensure_ascii=False) for v in values], pa.string())


def _object(path: Path) -> dict[str, Any]:
    """The JSON object in `path`, empty if there is no such file."""
    return read_object(path) if path.is_file() else {}


def _recipe(folder: SweepFolder, trial: Trial, own: Path) -> Recipe | None:
    """As the trial was trained; where it did not come so far, or another version wrote options that are no longer there, as it was to be, under the same
    digest; None if its options do not fit together."""
    if own.is_file():
        try:
            return load_recipe(own)
        except ConfigError:
            pass
    try:
        return trial_recipe(folder.recipe(), trial)
    except KvshotError:  # for which the trial has failed
        return None


def _plan(recipe: Recipe | None) -> tuple[Plan | None, Data | None]:
    """Shapes and schedule; None where the features or the options do not allow them, for which the trial has failed."""
    if recipe is None:
        return None, None
    try:
        data = Data.of(recipe)
    except (KvshotError, OSError):
        return None, None
    try:
        plan = planned(recipe, data)
        _ = plan.cost, plan.schedule
    except KvshotError:
        return None, data
    return plan, data


def _drafter(recipe: Recipe | None, plan: Plan | None, done: Mapping[str, Any], train: Mapping[str, Any]) -> dict[str, Any] | None:
    """What is trained, its size, and FLOPs: of training for each token trained on (forward, backward and teacher), of drafting for each token proposed."""
    if recipe is None:
        return None
    config, init = recipe.train.drafter, recipe.train.init
    gate = getattr(config, "gate", None)
    flops = None
    if plan is not None:
        context, steps = _context(plan), recipe.train.objective.steps
        work = total(plan.cost.drafting(steps, context))
        per_token = train["flops"] / train["tokens"] if train["flops"] and train["tokens"] else None
        flops = {"train_per_token": per_token, "draft_per_step": float(work.unit), "draft_per_position": float(work.position), "context": context}
    return {
        "family": config.family,
        "depth": config.depth,
        "injection": getattr(getattr(config, "kv", None), "injection", None),
        "gate": gate.model_dump(mode="json") if gate else None,
        "init_layers": init.layers,
        "init_head": init.head,
        "warm_start": str(init.warm_start) if init.warm_start else None,
        "parameters": done.get("parameters", {}).get("trainable", plan.cost.trainable if plan else None),
        "flops": flops,
    }


def _context(plan: Plan) -> int:
    """Mean length of the conversations that are trained on [tokens]."""
    return round(sum(plan.sizes[i][0] for i in plan.schedule.usable) / len(plan.schedule.usable))


def _data(data: Data | None, plan: Plan | None, measured: Mapping[str, Any]) -> dict[str, Any]:
    target = measured.get("target", {})
    return {
        "conversations": len(plan.schedule.usable) if plan else None,
        "heldout_conversations": measured.get("data", {}).get("conversations"),
        "target": target.get("name", data.manifest.target_name if data else None),
        "target_digest": target.get("digest", data.manifest.target_digest if data else None),
        "shards_digest": data.digest if data else None,
    }


def _train(run: Path, plan: Plan | None, done: Mapping[str, Any]) -> dict[str, Any]:
    """What was made, by train.json; of a trial that was stopped early, the steps it came to."""
    found = status.read(run)
    steps = done.get("steps", found.step if found else None)
    return {
        "steps": steps,
        "tokens": done.get("tokens"),
        "supervised_rows": done.get("supervised_rows"),
        "flops": plan.flops * steps / plan.schedule.steps if plan and steps is not None else None,
        "seconds": done.get("seconds"),
        "ranks": done.get("world_size", found.ranks if found else None),
        "starts": 1 + len(done["resumed_from"]) if done else None,
        "padding_share": done.get("padding_share"),
        "skipped_conversations": done.get("skipped_conversations"),
        "draft_vocab_coverage": done.get("draft_vocab_coverage"),
    }


def _seconds(state: TrialState, *parts: Mapping[str, Any]) -> dict[str, float]:
    """The driver's, under those that the parts themselves report: a trial that was reused, or went on from a checkpoint, took them elsewhere."""
    known = {name: part["seconds"] for name, part in zip(("train", "eval", "diagnose"), parts, strict=True) if part.get("seconds") is not None}
    return {**state.seconds, **known}


def _feature_bytes(recipe: Recipe | None, plan: Plan | None, steps: int | None) -> int | None:
    """Of the tensors that this drafter and objective read of the conversations trained on; headers and checksums are not counted."""
    if recipe is None or plan is None or steps is None:
        return None
    t, s = recipe.train, plan.schedule
    needed = required_features(weightless(t.drafter, plan.g, t.draft_vocab_size), t.objective)
    wanted = {"tokens", "turn", *plan.spec.serving(needed)}
    tokens, rows = (sum(plan.sizes[i][part] for i in s.usable) for part in (0, 1))  # every shape is linear in both
    stored = stored_tensors(plan.spec, plan.g, tokens, rows)
    once = sum(dtype.itemsize * prod(shape) for name, (dtype, shape) in stored.items() if name.removesuffix(SCALE) in wanted)
    return round(once * steps / s.steps_per_epoch)


def _memory(run: Path) -> dict[str, float | None]:
    """Of rank 0 as last logged [GiB]; cuda_peak: the most so far."""
    found = status.read(run)
    scalars = found.scalars if found else {}
    return {"host_gib": scalars.get("memory/host_gib"), "cuda_peak_gib": scalars.get("memory/cuda_peak_gib")}


def _heldout(measured: Mapping[str, Any]) -> dict[str, Any] | None:
    """eval.json's numbers with numerators, denominators and intervals over conversations; bigram: the table's share of step 0."""
    if not measured:
        return None
    return {
        **{name: measured[name] for name in (*_RATES, *_NUMBERS)},
        "confidence": measured["confidence"],
        "bigram": measured.get("baselines", {}).get("bigram"),
    }
