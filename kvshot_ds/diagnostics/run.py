"""`kvshot diagnose`: what trained drafters do with what the target gives them, on held-out conversations. docs/diagnostics.md defines every number."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from kvshot_ds.config import ObjectiveConfig, Recipe, load_recipe
from kvshot_ds.diagnostics import classes, context, drift, joined
from kvshot_ds.diagnostics.subject import Subject
from kvshot_ds.drafters.build import DrafterInfo, drafters_for, load_drafter
from kvshot_ds.errors import ConfigError, KvshotError
from kvshot_ds.evaluation import measurable, measuring
from kvshot_ds.features.manifest import require
from kvshot_ds.features.shard import ShardSet, count_labels
from kvshot_ds.files import read_json, write_json
from kvshot_ds.objectives.objective import objective_for
from kvshot_ds.provenance import digest, origin
from kvshot_ds.target import load_parts, weights_digest

NAME = "diagnostics.json"
_FORMAT = "diagnostics/1"  # of what is measured and how: a new one measures again


def run(recipe: Recipe) -> list[dict[str, Any]]:
    """Diagnoses the drafters of `recipe.diagnose` (this recipe's own run if none are named); writes diagnostics.json beside each.

    Raises ConfigError if the shards are of another target or lack a feature, KvshotError for a damaged shard, or if nothing is held out.
    """
    folders, _ = drafters_for(recipe.target.path, recipe.diagnose.drafters, recipe.run_dir, recipe.target.trust_remote_code)
    train, heldout = _shards(recipe)
    labels: torch.Tensor | None = None
    results = []
    for folder in folders:
        place = _place(folder)
        stamp = _stamp(recipe, folder, train, heldout)
        old = read_json(place / NAME) if (place / NAME).is_file() else {}
        if old.get("digest") == stamp:
            print(f"{place.name}: already diagnosed -> {place / NAME}")
            results.append(old)
            continue
        if labels is None:
            heldout.check_bytes()
            labels = torch.stack([count_labels(reader) for reader in train.readers]).sum(0)
        results.append(_diagnose(recipe, folder, heldout, labels, stamp))
    for result in results:
        print("\n".join(table(result)))
    return results


def diagnosed(recipe: Recipe) -> bool:
    """Whether this recipe's own run has the diagnostics that `run` would write."""
    place = recipe.run_dir / NAME
    if not place.is_file():
        return False
    try:
        folders, _ = drafters_for(recipe.target.path, (), recipe.run_dir, recipe.target.trust_remote_code)
        return bool(read_json(place).get("digest") == _stamp(recipe, folders[0], *_shards(recipe)))
    except (KvshotError, OSError):
        return False


def _shards(recipe: Recipe) -> tuple[ShardSet, ShardSet]:
    """The train and the held-out split."""
    train, heldout = ShardSet.open(recipe.shards_dir, "train"), ShardSet.open(recipe.shards_dir, "heldout")
    if not len(heldout):
        raise ConfigError(f"{recipe.shards_dir}: the held-out split is empty; prepare more conversations, or with a larger prep.heldout_fraction")
    return train, heldout


def _place(folder: Path) -> Path:
    """Where the results of the drafter in `folder` go: into its run folder, if it lies in one."""
    return folder.parent if folder.name == "drafter" else folder


def _training(recipe: Recipe, place: Path) -> ObjectiveConfig:
    """The objective that the drafter of `place` was trained with: its run's, or this recipe's if it is no run."""
    own = place / "recipe.yaml"
    return (load_recipe(own) if own.is_file() else recipe).train.objective


def _steps(recipe: Recipe) -> int:
    """K, as in `kvshot eval`."""
    return recipe.eval.steps or recipe.train.objective.steps


def _stamp(recipe: Recipe, folder: Path, train: ShardSet, heldout: ShardSet) -> str:
    """Digest of what the result depends on: options, drafter files, data."""
    options = recipe.diagnose.model_copy(update={"drafters": ()})
    data = (heldout.manifest.target_digest, heldout.digest, train.digest)
    return digest(options, _training(recipe, _place(folder)), _FORMAT, str(_steps(recipe)), weights_digest(folder), *data)


def _subject(recipe: Recipe, folder: Path, heldout: ShardSet, labels: torch.Tensor) -> tuple[Subject, DrafterInfo]:
    device = torch.device("cuda" if recipe.target.device != "cpu" and torch.cuda.is_available() else "cpu")
    drafter, info = load_drafter(folder, device, torch.float32)
    require(heldout.manifest, drafter.required_features(), info.target_digest)
    parts = load_parts(recipe.target.path, device, torch.float32)
    drafter.bind(parts.embedding, parts.head)
    objective = objective_for(drafter, measuring(recipe, _steps(recipe), info.config), heldout.manifest.spec, parts)
    place = _place(folder)
    subject = Subject(
        name=place.name,
        objective=objective,
        training=_training(recipe, place),
        parts=parts,
        heldout=heldout,
        chosen=measurable(heldout, recipe.diagnose.conversations),
        together=recipe.eval.conversations_per_micro_batch,
        steps=_steps(recipe),
        device=device,
        options=recipe.diagnose,
        label_counts=labels,
    )
    return subject, info


def _diagnose(recipe: Recipe, folder: Path, heldout: ShardSet, labels: torch.Tensor, stamp: str) -> dict[str, Any]:
    """Diagnoses one drafter folder and writes the results."""
    started, place = time.monotonic(), _place(folder)
    subject, info = _subject(recipe, folder, heldout, labels)
    config = info.config
    parts = {
        "queries": joined.by_query(subject),
        "gradients": joined.by_gradient(subject),
        "gate": joined.by_gate(subject),
        "context": context.part(subject),
        **classes.parts(subject),
        "drift": drift.part(subject),
    }
    result = {
        "name": place.name,
        "digest": stamp,
        "drafter": {
            "family": config.family,
            "depth": config.depth,
            "injection": getattr(getattr(config, "kv", None), "injection", None),
            "parameters": sum(p.numel() for p in subject.objective.drafter.parameters()),
        },
        "target": {"name": info.target_name, "digest": info.target_digest},
        "data": {"split": "heldout", "conversations": subject.count, "rows": int(subject.counts.den[:, 0].sum())},
        "confidence": recipe.diagnose.confidence,
        "parts": parts,
        "seconds": time.monotonic() - started,
        "provenance": origin(options=recipe.diagnose.model_dump(mode="json")),
    }
    write_json(place / NAME, result)
    return result


def summary(diagnostics: dict[str, Any]) -> dict[str, float]:
    """The few numbers of diagnostics.json that stand in a sweep's row; first and last are draft steps. What does not apply is left out.

    query_cosine_layer_I_first, _last; gate_mean_first, _last, gate_share_below_0.05_first, _last (means over layers);
    grad_share_GROUP, grad_relative_GROUP, grad_norm_per_row_cross_kv; mat_none, mat_far, mat_near, mat_all (what is masked);
    drift_cosine_last, drift_norm_ratio_last, drift_rank_last.
    """
    parts, found = diagnostics["parts"], dict[str, float | None]()
    ends = (("first", 0), ("last", -1))
    for layer in parts["queries"].get("layers", ()):
        found |= {f"query_cosine_layer_{layer['layer']}_{end}": layer["steps"][i]["cosine"]["value"] for end, i in ends}
    if layers := parts["gate"].get("layers", ()):
        for end, i in ends:
            found |= {f"gate_{of}_{end}": _mean([layer["steps"][i][of] for layer in layers]) for of in ("mean", "share_below_0.05")}
    groups = parts["gradients"].get("groups", {})
    found |= {f"grad_{of}_{name}": group[of] for of in ("share", "relative") for name, group in groups.items()}
    if "cross_kv" in groups:
        found["grad_norm_per_row_cross_kv"] = groups["cross_kv"]["norm_per_row"]
    found |= {f"mat_{mask}": of["mat"]["value"] for mask, of in parts["context"].get("masks", {}).items()}
    if steps := parts["drift"].get("steps", ()):
        last = steps[-1]
        found |= {"drift_cosine_last": last["cosine"]["value"], "drift_norm_ratio_last": last["norm_ratio"]["value"], "drift_rank_last": last["rank"]}
    return {name: float(value) for name, value in found.items() if value is not None}


def _mean(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else None


def table(result: dict[str, Any]) -> list[str]:
    """The result as text, a few lines; '-' for what is undefined."""
    parts, drafter, data = result["parts"], result["drafter"], result["data"]
    out = [f"{result['name']}: {drafter['family']}, depth {drafter['depth']}, {data['conversations']} held-out conversations, {data['rows']} rows"]
    for name, found in parts.items():
        if "why" in found:
            out.append(f"  {name:<10} - {found['why']}")
        else:
            out += [f"  {name if i == 0 else '':<10} {line}" for i, line in enumerate(_LINES[name](found))]
    return out


def _queries(found: dict[str, Any]) -> list[str]:
    return [f"layer {layer['layer']}: cosine by step {_row(s['cosine']['value'] for s in layer['steps'])}" for layer in found["layers"]]


def _gradients(found: dict[str, Any]) -> list[str]:
    return ["share of the gradient's square " + ", ".join(f"{name} {g['share']:.2g}" for name, g in found["groups"].items())]


def _gate(found: dict[str, Any]) -> list[str]:
    def line(layer: dict[str, Any]) -> str:
        return f"mean by step {_row(s['mean'] for s in layer['steps'])} | share < .05 {_row(s['share_below_0.05'] for s in layer['steps'])}"

    return [f"layer {layer['layer']}: {line(layer)}" for layer in found["layers"]]


def _context(found: dict[str, Any]) -> list[str]:
    out = []
    for mask, of in found["masks"].items():
        difference = "" if mask == "none" else f" ({_interval(found['differences'][mask]['mat'])})"
        out.append(f"{mask:<4} masked: MAT {_text(of['mat']['value'])}{difference} | alpha {_row(a['value'] for a in of['alpha'])}")
    return out


def _by_class(found: dict[str, Any]) -> list[str]:
    def ends(c: dict[str, Any]) -> str:
        low, high = (x if x is None or isinstance(x, int) else f"{x:.2f}" for x in (c["from"], c["to"]))
        return f"{low}-{'' if high is None else high}"

    return [f"{ends(c):<16} {c['rows']:>7} rows | alpha {_row(a['value'] for a in c['alpha'])}" for c in found["classes"]]


def _drift(found: dict[str, Any]) -> list[str]:
    def line(s: dict[str, Any]) -> str:
        ranks = f"rank {s['rank']:.1f} (target {s['target_rank']:.1f})"
        return f"step {s['k']}: cosine {_text(s['cosine']['value'])}, norm ratio {_text(s['norm_ratio']['value'])}, {ranks}"

    return [line(s) for s in found["steps"]]


_LINES = {
    "queries": _queries,
    "gradients": _gradients,
    "gate": _gate,
    "context": _context,
    "position": _by_class,
    "frequency": _by_class,
    "entropy": _by_class,
    "drift": _drift,
}


def _row(values: Any) -> str:
    return " ".join(_text(v) for v in values)


def _text(value: float | None) -> str:
    return "  -  " if value is None else f"{value:.3f}"


def _interval(interval: dict[str, Any]) -> str:
    ends = f" [{interval['low']:+.3f}, {interval['high']:+.3f}]" if interval["low"] is not None else ""
    return "-" if interval["value"] is None else f"{interval['value']:+.3f}{ends}"
