"""What the layer ids of a public drafter mean, by measuring both readings on held-out data: the wrong one accepts less at step 0.

The rule: both readings draft the same rows of the same held-out conversations, teacher-forced; the difference of alpha_0 has a paired
bootstrap interval over conversations. If it excludes 0, the better reading is taken, unless the rule of layer_ids.py says otherwise, which is
an error, as a difference that shows nothing is where no rule settles it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvshot_ds.config import EvalConfig, ObjectiveConfig, load_recipe
from kvshot_ds.drafters.build import build_drafter
from kvshot_ds.drafters.public import Report, import_drafter
from kvshot_ds.drafters.public_parts import Public
from kvshot_ds.drafters.readings import Reading
from kvshot_ds.errors import ConfigError
from kvshot_ds.evaluation import conversation_sums, measurable
from kvshot_ds.features.batch import collate
from kvshot_ds.features.manifest import require
from kvshot_ds.features.shard import ShardSet
from kvshot_ds.features.spec import FeatureSpec, Store
from kvshot_ds.files import AnyPath, exists, location
from kvshot_ds.metrics import Interval, StepCounts, alpha, alpha_at, paired_difference
from kvshot_ds.objectives.alignment import plan_rows
from kvshot_ds.objectives.objective import Objective, objective_for
from kvshot_ds.target import TargetParts, load_parts, weights_digest


@dataclass(frozen=True)
class Measured:
    """alphas: step-0 acceptance of each reading; difference: first minus second; conversations: of the held-out split."""

    readings: Sequence[Reading]
    alphas: tuple[float, float]
    difference: Interval
    conversations: int
    confidence: float

    @property
    def better(self) -> Reading | None:
        """The reading that accepts more; None if the interval holds 0, or there is none."""
        low, high = self.difference.low, self.difference.high
        if low is None or high is None or low <= 0 <= high:
            return None
        return self.readings[0 if low > 0 else 1]

    def __str__(self) -> str:
        each = [f"{a:.3f} as {r.means} (outputs {', '.join(map(str, r.layers))})" for a, r in zip(self.alphas, self.readings, strict=True)]
        d = self.difference
        ends = f"{self.confidence:.0%} interval {d.low:.3f} to {d.high:.3f}" if d.low is not None and d.high is not None else "no interval"
        return f"step-0 acceptance is {' and '.join(each)}; difference {d.value or 0:.3f}, {ends}, over {self.conversations} held-out conversations"

    def to_json(self) -> dict[str, Any]:
        """For config.json of the drafter."""
        each = [{"means": r.means, "layers": list(r.layers), "alpha_0": a} for a, r in zip(self.alphas, self.readings, strict=True)]
        return {"readings": each, "difference": self.difference.to_json(), "confidence": self.confidence, "conversations": self.conversations}


def run(source: Path, target_folder: Path, out: Path, data: str) -> Report:
    """`import_drafter` with layer ids measured on held-out data. data: a recipe (its shards, its eval options), or a folder or URL of shards.

    Raises ConfigError as `import_drafter` does; if the shards are of another target, lack a layer of either reading or hold no conversation;
    if the measurement settles nothing, or contradicts the rule.
    """
    shards, options, device = _data(data)
    heldout = ShardSet.open(shards, "heldout")
    return import_drafter(source, target_folder, out, settling(heldout, Path(target_folder), options, device))


def _data(data: str) -> tuple[AnyPath, EvalConfig, str]:
    """Folder of the shards, options, target.device."""
    if data.endswith((".yaml", ".yml")):
        recipe = load_recipe(Path(data), ())
        return recipe.shards_dir, recipe.eval, recipe.target.device
    folder = location(data)
    if not exists(folder / "manifest.json"):
        raise ConfigError(f"--measure {data}: expected a recipe (.yaml) or a folder of feature shards with its manifest.json; run kvshot capture first")
    return folder, EvalConfig(), "auto"


def settling(heldout: ShardSet, target_folder: Path, options: EvalConfig, device: str = "auto") -> Callable[[Public], Public]:
    """What settles the layer ids of a drafter by measuring. device: target.device."""

    def settle(public: Public) -> Public:
        layers = {layer for reading in public.readings.possible for layer in reading.layers}
        require(heldout.manifest, FeatureSpec(tuple(sorted(layers)), (), "last_hidden", Store.all("bf16")), weights_digest(target_folder))
        place = torch.device("cuda" if device != "cpu" and torch.cuda.is_available() else "cpu")
        return _taken(public, measure(public, heldout, load_parts(target_folder, place), options, place))

    return settle


@torch.inference_mode()
def measure(public: Public, heldout: ShardSet, parts: TargetParts, options: EvalConfig, device: torch.device) -> Measured:
    """Both readings of `public` on the held-out conversations. Raises KvshotError if these have no supervised rows."""
    objectives = [_objective(public.reading(reading.layers), heldout, parts, device) for reading in public.readings.possible]
    chosen, together = measurable(heldout, options.max_conversations), options.conversations_per_micro_batch
    keys = sorted({key for o in objectives for key in heldout.manifest.spec.serving(o.drafter.required_features())})
    sums: list[list[Any]] = [[] for _ in objectives]
    for at in range(0, len(chosen), together):
        batch = collate([heldout.read_packed(i, ("tokens", "turn", *keys)) for i in chosen[at : at + together]])
        plan = plan_rows(batch, 1)
        for objective, found in zip(objectives, sums, strict=True):
            found.append(conversation_sums(objective, batch, plan, 1, device, torch.float32)[:4].cpu().numpy())
    first, second = (StepCounts.unstack(np.concatenate(found, axis=1)) for found in sums)
    difference = paired_difference(first, second, alpha_at(0), options.bootstrap, options.confidence, options.seed)
    alphas = (alpha(first.total())[0] or 0.0, alpha(second.total())[0] or 0.0)
    return Measured(public.readings.possible, alphas, difference, len(chosen), options.confidence)


def _objective(public: Public, heldout: ShardSet, parts: TargetParts, device: torch.device) -> Objective:
    drafter = build_drafter(public.config, public.geometry, public.draft_vocab_size)
    drafter.load_state_dict(public.tensors)
    drafter.to(device, torch.float32).eval().bind(parts.embedding, parts.head)
    return objective_for(drafter, ObjectiveConfig(steps=1), heldout.manifest.spec, parts)


def _taken(public: Public, measured: Measured) -> Public:
    """`public` with the reading that the measurement and the rule leave. Raises ConfigError where they leave none."""
    ids, rule, better = public.readings.ids, public.readings.chosen, measured.better
    if better is None and rule is None:
        raise ConfigError(
            f"{ids} may mean either of two things, and the data do not tell them apart: {measured}. Capture more held-out conversations "
            "(prep.heldout_fraction), ask whoever trained the drafter, or say it in config.json at both places"
        )
    if better is not None and rule is not None and better.layers != rule:
        raise ConfigError(
            f"{ids} means outputs {', '.join(map(str, rule))} by rule, but the data say otherwise: {measured}. Mend config.json, at both places, "
            "if the other reading is right; or the features are not those of this drafter's target"
        )
    layers = better.layers if better is not None else rule
    assert layers
    how = "taken by measuring" if rule is None else "as the rule says" if better is not None else "taken by rule, which the data neither confirm nor refute"
    note = f"{ids}: outputs {', '.join(map(str, layers))} {how}; {measured}"
    return replace(public.reading(layers), measured=measured.to_json(), notes=(*public.notes, note))
