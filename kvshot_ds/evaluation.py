"""Held-out step-wise acceptance of trained drafters, with intervals, beside a bigram table counted on the same training tokens."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tqdm import tqdm

from kvshot_ds import metrics
from kvshot_ds.config import AnyDrafterConfig, ObjectiveConfig, Recipe
from kvshot_ds.drafters.build import DrafterInfo, drafters_for, load_drafter
from kvshot_ds.errors import ConfigError, KvshotError
from kvshot_ds.features.batch import Batch, collate
from kvshot_ds.features.manifest import require
from kvshot_ds.features.shard import ShardSet
from kvshot_ds.features.spec import teacher_rows
from kvshot_ds.files import read_object, write_json
from kvshot_ds.metrics import StepCounts
from kvshot_ds.objectives.alignment import RowPlan, plan_rows
from kvshot_ds.objectives.objective import Objective, Output, objective_for
from kvshot_ds.provenance import digest, origin
from kvshot_ds.target import load_parts, weights_digest

COUNTS = "eval_conversations.json"


@dataclass(frozen=True)
class Bigram:
    """The most frequent follower of each token among the supervised tokens of the train split.

    follower [V] int64: most frequent next token; tokens never seen fall back to the most frequent one overall.
    tokens_counted: pairs counted.
    """

    follower: npt.NDArray[np.int64]
    tokens_counted: int

    @classmethod
    def count(cls, shards: ShardSet) -> Bigram:
        """Counts pairs (x_j, x_{j+1}) whose tokens belong to one assistant turn: the tokens the drafters are trained on. Once a process for the same shards."""
        if (known := _counted.get(shards.digest)) is not None:
            return known
        vocab = shards.manifest.geometry.vocab_size
        codes = []
        for i in range(len(shards)):
            _, tensors = shards.read(i, ("tokens", "turn"))
            tokens, rows = tensors["tokens"].numpy().astype(np.int64), teacher_rows(tensors["turn"].numpy())
            codes.append(tokens[rows] * vocab + tokens[rows + 1])
        pairs, counts = np.unique(np.concatenate(codes), return_counts=True)
        first, second = np.divmod(pairs, vocab)
        overall = np.bincount(second, weights=counts, minlength=vocab).argmax()
        follower = np.full(vocab, overall, dtype=np.int64)
        order = np.lexsort((-second, counts))  # ascending by count; of equal counts the smaller token is written last
        follower[first[order]] = second[order]
        _counted.clear()
        _counted[shards.digest] = found = cls(follower, int(counts.sum()))
        return found


_counted: dict[str, Bigram] = {}  # digest of the shards counted last -> their table


@dataclass(frozen=True)
class Held:
    """Counts on the held-out split: counts [C, K] per conversation in the order of keys; bigram [C]: its hits at step 0."""

    keys: tuple[str, ...]
    counts: StepCounts
    bigram: npt.NDArray[np.int64]


def run(recipe: Recipe) -> list[dict[str, Any]]:
    """Evaluates the drafters of `recipe.eval` (this recipe's own run if none are named); writes eval.json and
    eval_conversations.json beside each. Raises ConfigError if the shards are of another target or lack a feature."""
    folders, _ = drafters_for(recipe.target.path, recipe.eval.drafters, recipe.run_dir, recipe.target.trust_remote_code)
    train, heldout = ShardSet.open(recipe.shards_dir, "train"), ShardSet.open(recipe.shards_dir, "heldout")
    if not len(heldout):
        raise ConfigError(f"{recipe.shards_dir}: the held-out split is empty; prepare more conversations, or with a larger prep.heldout_fraction")
    heldout.check_bytes()
    bigram: Bigram | None = None
    results = []
    for folder in folders:
        place = folder.parent if folder.name == "drafter" else folder
        stamp = _stamp(recipe, folder, train, heldout)
        old = read_object(place / "eval.json") if (place / "eval.json").is_file() else {}
        if old.get("digest") == stamp and (place / COUNTS).is_file():
            print(f"{place.name}: already evaluated -> {place / 'eval.json'}")
            results.append(old)
            continue
        bigram = bigram or Bigram.count(train)
        results.append(evaluate(recipe, folder, place, heldout, bigram, stamp))
    _print_table(results)
    return results


def evaluated(recipe: Recipe) -> bool:
    """Whether this recipe's own run has the results that `run` would write."""
    place = recipe.run_dir / "eval.json"
    if not place.is_file() or not (recipe.run_dir / COUNTS).is_file():
        return False
    try:
        folders, _ = drafters_for(recipe.target.path, (), recipe.run_dir, recipe.target.trust_remote_code)
        shards = ShardSet.open(recipe.shards_dir, "train", look=False), ShardSet.open(recipe.shards_dir, "heldout", look=False)
        return bool(read_object(place).get("digest") == _stamp(recipe, folders[0], *shards))
    except (KvshotError, OSError):
        return False


def _stamp(recipe: Recipe, folder: Path, train: ShardSet, heldout: ShardSet) -> str:
    """Digest of what the result depends on: options, drafter files, held-out data."""
    options = recipe.eval.model_copy(update={"drafters": ()})
    return digest(options, repr(_steps(recipe)), weights_digest(folder), heldout.manifest.target_digest, heldout.digest, train.digest)


def _steps(recipe: Recipe) -> int:
    """K: the draft steps that are measured."""
    return recipe.eval.steps or recipe.train.objective.steps


def evaluate(recipe: Recipe, folder: Path, place: Path, heldout: ShardSet, bigram: Bigram, stamp: str) -> dict[str, Any]:
    """Evaluates one drafter folder and writes the results into `place`."""
    started = time.monotonic()
    device = torch.device("cuda" if recipe.target.device != "cpu" and torch.cuda.is_available() else "cpu")
    drafter, info = load_drafter(folder, device, torch.float32)
    require(heldout.manifest, drafter.required_features(), info.target_digest)
    parts = load_parts(recipe.target.path, device, torch.float32)
    drafter.bind(parts.embedding, parts.head)
    options = measuring(recipe, _steps(recipe), info.config)
    objective = objective_for(drafter, options, heldout.manifest.spec, parts)
    held = measure(objective, _steps(recipe), heldout, bigram, recipe.eval.conversations_per_micro_batch, recipe.eval.max_conversations, device, place.name)
    result = {
        "name": place.name,
        "digest": stamp,
        "weights": weights_digest(folder),
        **_summary(recipe, info, drafter, held, bigram),
        "seconds": time.monotonic() - started,
    }
    result["provenance"] = origin(options=recipe.eval.model_dump(mode="json"))
    c = held.counts
    write_json(
        place / COUNTS,
        {
            "keys": held.keys,
            "den": c.den.astype(int).tolist(),
            "top1": c.top1.astype(int).tolist(),
            "joint": c.joint.astype(int).tolist(),
            "prob": c.prob.tolist(),
            "bigram": held.bigram.tolist(),
        },
    )
    write_json(place / "eval.json", result)
    return result


def measuring(recipe: Recipe, steps: int, drafter: AnyDrafterConfig) -> ObjectiveConfig:
    """The objective that drafters are measured with: every supervised row, the drafter's own drift; losses and weights of training play no part.

    steps: K; a block may propose fewer, and then runs fewer.
    """
    proposes = min(steps, getattr(drafter, "block_size", steps + 1) - 1)
    return ObjectiveConfig(steps=proposes, head_chunk=recipe.train.objective.head_chunk)


def measurable(heldout: ShardSet, most: int) -> list[int]:
    """Numbers of the held-out conversations with supervised rows: the first `most`, 0 for all. Raises KvshotError if there are none."""
    found = [i for i, s in enumerate(heldout.samples) if s.rows][: most or None]
    if not found:
        raise KvshotError("the held-out split holds no supervised rows: nothing to measure")
    return found


@torch.inference_mode()
def measure(objective: Objective, steps: int, heldout: ShardSet, bigram: Bigram, together: int, most: int, device: torch.device, name: str = "") -> Held:
    """Counts of every held-out conversation with supervised rows (the first `most`, 0 for all), `together` in one forward, of K = `steps` draft steps."""
    chosen = measurable(heldout, most)
    keys: list[str] = []
    parts, hits = [], []
    wanted = ("tokens", "turn", *heldout.manifest.spec.serving(objective.drafter.required_features()))
    for at in tqdm(range(0, len(chosen), together), desc=f"eval {name}", unit="batch", mininterval=2):
        batch = collate([heldout.read_packed(i, wanted) for i in chosen[at : at + together]])
        plan = plan_rows(batch, objective.config.steps)
        hits.append(_bigram_hits(batch, plan, bigram))
        parts.append(conversation_sums(objective, batch, plan, steps, device, torch.float32)[:4].cpu().numpy())
        keys.extend(batch.keys)
    return Held(tuple(keys), StepCounts.unstack(np.concatenate(parts, axis=1)), np.concatenate(hits))


def conversation_sums(
    run: Callable[[Batch, RowPlan, torch.Tensor], Output], batch: Batch, plan: RowPlan, steps: int, device: torch.device, dtype: torch.dtype
) -> torch.Tensor:
    """Sums over the rows of each conversation [5, C, K], fp64 on the device: rows, top1, joint, prob, weighted loss.

    run: the objective's forward, in `dtype`. Of K = `steps` draft steps; those beyond what it runs count as not accepted, in the same denominators.
    """
    runs = len(plan.valid)
    valid = plan.valid if runs == steps else plan_rows(batch, steps).valid
    moved = plan.to(device)
    out = run(batch.to(device, dtype), moved, torch.ones((), device=device))
    values = torch.zeros(5, len(plan.anchors), steps, dtype=torch.float64, device=device)
    values[0] = valid.to(device).T
    values[1:, :, :runs] = torch.stack([x.T.double() for x in (out.correct, out.joint, out.prob, out.weighted)])
    return values.new_zeros(5, len(batch.keys), steps).index_add_(1, moved.conversation, values)


def _bigram_hits(batch: Batch, plan: RowPlan, bigram: Bigram) -> npt.NDArray[np.int64]:
    """Rows per conversation whose bonus token's most frequent follower is the target's arg-max: [C]."""
    bonus = plan.anchors + 1
    guess = torch.from_numpy(bigram.follower)[batch.tokens[bonus]]
    right = guess == batch.teacher_argmax[batch.teacher_index[bonus]]
    return torch.bincount(plan.conversation[right], minlength=len(batch.keys)).numpy()


def _summary(recipe: Recipe, info: DrafterInfo, drafter: torch.nn.Module, held: Held, bigram: Bigram) -> dict[str, Any]:
    """Everything of eval.json that follows from the counts."""
    options, c, steps = recipe.eval, held.counts, held.counts.den.shape[-1]
    how: dict[str, Any] = {"resamples": options.bootstrap, "confidence": options.confidence, "seed": options.seed}
    total = c.total()

    def table(num: npt.NDArray[np.float64], statistic: Any, whole: bool) -> list[dict[str, Any]]:
        found = metrics.bootstrap_all(c, [statistic(k) for k in range(steps)], **how)
        return [{"k": k, "num": int(num[k]) if whole else float(num[k]), "den": int(total.den[k]), **f.to_json()} for k, f in enumerate(found)]

    mat, mat_joint, retention = metrics.bootstrap_all(c, [metrics.mat_of, metrics.mat_joint_of, metrics.retention_of], **how)
    table_counts = StepCounts.ratio(held.bigram, c.den[:, 0])
    first = StepCounts.ratio(c.top1[:, 0], c.den[:, 0])
    difference = metrics.paired_difference(first, table_counts, metrics.alpha_at(0), **how)
    config = info.config
    return {
        "drafter": {
            "family": config.family,
            "depth": config.depth,
            "injection": getattr(getattr(config, "kv", None), "injection", None),
            "parameters": sum(p.numel() for p in drafter.parameters()),
            "config": config.model_dump(mode="json"),
            "init": info.extra.get("training", {}).get("init"),
        },
        "target": {"name": info.target_name, "digest": info.target_digest},
        "data": {"split": "heldout", "conversations": len(held.keys)},
        "confidence": options.confidence,
        "alpha": table(total.top1, metrics.alpha_at, True),
        "accept_prob": table(total.prob, metrics.accept_prob_at, False),
        "joint": table(total.joint, metrics.joint_at, True),
        "mat": mat.to_json(),
        "mat_joint": mat_joint.to_json(),
        "retention": retention.to_json(),
        "baselines": {
            "bigram": {
                "num": int(held.bigram.sum()),
                "den": int(total.den[0]),
                **metrics.bootstrap(table_counts, metrics.alpha_at(0), **how).to_json(),
                "tokens_counted": bigram.tokens_counted,
            }
        },
        "against": [{"name": "bigram", "metric": "alpha_0", "difference": difference.value, "low": difference.low, "high": difference.high}],
    }


def _print_table(results: list[dict[str, Any]]) -> None:
    for r in results:
        alphas = " ".join("  -  " if a["value"] is None else f"{a['value']:.3f}" for a in r["alpha"])
        print(
            f"{r['name']}: alpha_0..{len(r['alpha']) - 1} {alphas} | MAT {_text(r['mat'])} | joint MAT {_text(r['mat_joint'])} | "
            f"retention {_text(r['retention'])} | bigram alpha_0 {_text(r['baselines']['bigram'])} | "
            f"{r['data']['conversations']} held-out conversations, {r['alpha'][0]['den']} rows"
        )


def _text(interval: dict[str, Any]) -> str:
    if interval["value"] is None:
        return "-"
    ends = f" [{interval['low']:.3f}, {interval['high']:.3f}]" if interval["low"] is not None else ""
    return f"{interval['value']:.3f}{ends}"
