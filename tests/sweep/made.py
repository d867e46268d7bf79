"""Finished sweeps that nobody trained: every file a sweep leaves, from simulated counts, for tests of what reads them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kvshot_ds import evaluation
from kvshot_ds.config import Recipe, dump_recipe, merge
from kvshot_ds.drafters.build import DrafterInfo
from kvshot_ds.drafters.cost import weightless
from kvshot_ds.features.manifest import Manifest
from kvshot_ds.files import write_atomic, write_json
from kvshot_ds.metrics import StepCounts, points
from kvshot_ds.sweep.folder import Progress, SweepFolder, Trial, TrialState, trials_dir
from tests.features.folders import make_folder
from tests.features.shards import GEOMETRY

SECONDS = {"start": 1.5, "train": 30.0, "eval": 4.0, "save": 0.5}
COMMIT = "0123456789abcdef0123456789abcdef01234567"
KV = {"layers": [2]}  # of those that the made-up features hold
HIDDEN = [1, 3]


@dataclass(frozen=True)
class Cell:
    """One cell. drafter: options of train.drafter. level, keep: its true alpha_k is level · keep^k. looks: its level at each look, as a share of the last.

    states: seed -> how that trial ended, if not complete; absent: seeds that are no trials of the sweep. train: further options of training.
    """

    drafter: Mapping[str, Any]
    level: float = 0.4
    keep: float = 0.9
    labels: Mapping[str, str] | None = None
    looks: Sequence[float] = (0.5, 0.8, 1.0)
    states: Mapping[int, TrialState] = field(default_factory=dict)
    absent: Sequence[int] = ()
    train: Mapping[str, Any] = field(default_factory=dict)
    control: str = ""


HIDDEN_ONLY = Cell({"family": "hidden_only", "hidden_layers": HIDDEN}, 0.42, 0.84)
KV_ONLY = Cell({"family": "kv_only", "depth": 2, "kv": KV}, 0.34, 0.97)
HYBRID = Cell({"family": "hybrid", "hidden_layers": HIDDEN, "kv": KV, "gate": {"kind": "elementwise", "init": "bias:2"}}, 0.43, 0.9)
CELLS = (HIDDEN_ONLY, KV_ONLY, HYBRID)


def make_sweep(
    work: Path, cells: Sequence[Cell] = CELLS, seeds: Sequence[int] = (0, 1, 2), name: str = "demo", conversations: int = 24, steps: int = 4,
    sweep: Mapping[str, Any] | None = None, diagnostics: Mapping[str, Any] | None = None,
) -> SweepFolder:  # fmt: skip
    """WORK/sweeps/NAME with its trials in WORK/trials and small features in WORK/features. steps: K. sweep: further options of the section.

    diagnostics: diagnostics.json of every complete trial, by its family (see `make_trial`).
    """
    from kvshot_ds.sweep import results

    if not Manifest.path(work / "features").is_file():
        make_folder(work / "features")
    base = made_recipe(work, name, steps, {"seeds": list(seeds), **(sweep or {})})
    folder, trials, states = SweepFolder.of(base), [], {}
    write_atomic(folder.path / "recipe.yaml", dump_recipe(base))
    for cell in cells:
        for seed in (s for s in seeds if s not in cell.absent):
            trial = made_trial(cell, seed)
            state = cell.states.get(seed, TrialState("complete", 1, 1000.0, 1036.0, SECONDS))
            trials.append(trial)
            states[trial.name] = state
            if state.state == "complete":
                made = (diagnostics or {}).get(cell.drafter["family"])
                make_trial(trial_of(base, trial), cell, seed, conversations, made)
    folder.write_trials(tuple(trials))
    folder.write_progress(Progress(states))
    ended = [t for t in trials if states[t.name].state in ("complete", "failed", "halved")]
    results.write(folder, [results.row(folder, t, states[t.name]) for t in ended])
    return folder


def made_recipe(work: Path, name: str, steps: int, sweep: Mapping[str, Any]) -> Recipe:
    train = {"draft_vocab_size": 40, "objective": {"steps": steps}, "conversations_per_step": 2, "eval_every": 20, "drafter": dict(HIDDEN_ONLY.drafter)}
    return Recipe.model_validate(
        {"name": name, "work": work, "target": {"path": "/models/some-target"}, "train": train, "sweep": dict(sweep), "eval": {"bootstrap": 200}}
    )


def made_trial(cell: Cell, seed: int) -> Trial:
    """Its name as a sweep makes it: the drafter and an address."""
    drafter, labels = dict(cell.drafter), dict(cell.labels if cell.labels is not None else _labels(cell.drafter))
    options = {"train.drafter": drafter, **{f"train.{option}": value for option, value in cell.train.items()}}
    address = hashlib.sha256(json.dumps([options, seed, cell.control], sort_keys=True).encode()).hexdigest()[:12]
    return Trial(f"{drafter['family']}-{drafter.get('depth', 1)}-{address}", labels, seed, options, "", cell.control)


def _labels(drafter: Mapping[str, Any]) -> dict[str, str]:
    gate = {"gate": str(drafter["gate"]["init"])} if "gate" in drafter else {}
    return {"family": str(drafter["family"]), "depth": str(drafter.get("depth", 1))} | gate


def trial_of(base: Recipe, trial: Trial) -> Recipe:
    """The recipe of a trial's run folder."""
    data = base.model_dump(mode="json") | {"name": trial.name, "runs": str(trials_dir(base.work)), "sweep": {}}
    for option, value in {**trial.options, "train.seed": trial.seed}.items():
        *sections, last = option.split(".")
        laid: dict[str, Any] = {last: value}
        for section in reversed(sections):
            laid = {section: laid}
        data = merge(data, laid)
    return Recipe.model_validate(data)


def make_trial(recipe: Recipe, cell: Cell, seed: int, conversations: int = 24, diagnostics: Mapping[str, Any] | None = None) -> Path:
    """A complete run folder of `recipe` without weights and event files: recipe, provenance, train, heldout, eval, eval_conversations, diagnostics.

    Conversations are the same for every cell and seed; a seed shifts the level, a conversation's ease is common to all.
    """
    folder = recipe.run_dir
    config, manifest = recipe.train, Manifest.load(recipe.shards_dir)
    training = {"init": config.init.model_dump(mode="json")}
    info = DrafterInfo(config.drafter, GEOMETRY, config.draft_vocab_size, manifest.target_name, manifest.target_digest, {"training": training})
    counts = simulated(cell, seed, conversations, config.objective.steps)
    bigram = evaluation.Bigram(np.zeros(GEOMETRY.vocab_size, dtype=np.int64), 4321)
    held = evaluation.Held(tuple(f"c{i:03d}" for i in range(conversations)), counts, (counts.den[:, 0] // 5).astype(np.int64))
    summary = evaluation._summary(recipe, info, weightless(config.drafter, GEOMETRY, config.draft_vocab_size), held, bigram)
    parameters = summary["drafter"]["parameters"]
    made = {"command": ["kvshot", "sweep", "run", "demo.yaml"], "versions": {"python": "3.11.7", "torch": "2.13.0"}, "git_commit": COMMIT}
    write_atomic(folder / "recipe.yaml", dump_recipe(recipe))
    write_json(folder / "provenance.json", {**made, "train_digest": hashlib.sha256(recipe.name.encode()).hexdigest()[:16], "warm_digest": ""})
    write_json(folder / "train.json", _train(recipe, parameters))
    write_json(folder / "heldout.json", _looks(cell, seed, conversations, config.objective.steps))
    lines = {name: getattr(counts, name).astype(int).tolist() for name in ("den", "top1", "joint")}
    write_json(folder / "eval_conversations.json", {"keys": held.keys, **lines, "prob": counts.prob.tolist(), "bigram": held.bigram.tolist()})
    write_json(folder / "eval.json", {"name": recipe.name, "digest": "e" * 16, **summary, "seconds": 4.0, "provenance": made})
    if diagnostics is not None:
        drafter = {key: summary["drafter"][key] for key in ("family", "depth", "injection", "parameters")}
        about = {"name": recipe.name, "digest": "d" * 16, "drafter": drafter, "target": summary["target"]}
        rows = int(counts.den[:, 0].sum())
        data = {"split": "heldout", "conversations": conversations, "rows": rows}
        write_json(folder / "diagnostics.json", {**about, "data": data, "confidence": 0.95, "parts": dict(diagnostics)})
    return folder


def _train(recipe: Recipe, parameters: int) -> dict[str, Any]:
    steps = recipe.train.max_steps or 60
    return {
        "status": "complete", "steps": steps, "seconds": 29.5, "tokens": 16 * steps, "supervised_rows": 11 * steps, "parameters": {"trainable": parameters},
        "draft_vocab_size": recipe.train.draft_vocab_size, "draft_vocab_coverage": 0.975, "init": recipe.train.init.model_dump(mode="json"),
        "warm_start": None, "padding_share": 0.01, "skipped_conversations": 0, "world_size": recipe.ray.ranks, "resumed_from": [],
    }  # fmt: skip


def _looks(cell: Cell, seed: int, conversations: int, steps: int) -> dict[str, dict[str, float]]:
    """heldout.json: a look every 20 steps."""
    found = {}
    for number, share in enumerate(cell.looks, 1):
        counts = simulated(cell, seed, conversations, steps, share).total()
        found[str(20 * number)] = {"heldout/loss": 9 / number, "heldout/conversations": float(conversations)} | points(counts, "heldout")
    return found


def simulated(cell: Cell, seed: int, conversations: int, steps: int, share: float = 1.0) -> StepCounts:
    """Counts [C, K] of a drafter whose rate is level · share · keep^k, shifted by seed (sd .01) and by conversation (sd .04)."""
    shared = np.random.default_rng(5)
    rows, ease = shared.integers(40, 90, size=conversations), shared.normal(0, 0.04, size=conversations)
    own = np.random.default_rng([seed, *json.dumps(dict(cell.drafter), sort_keys=True).encode()])
    den = rows[:, None] - 2 * np.arange(steps)
    rate = (cell.level * share + own.normal(0, 0.01)) * cell.keep ** np.arange(steps) + ease[:, None]
    top1 = own.binomial(den, np.clip(rate, 0.01, 0.99))
    joint = np.minimum.accumulate((top1 * 0.7 ** np.arange(steps)).astype(int), axis=1)
    return StepCounts(den, top1, joint, top1 * 0.9)
