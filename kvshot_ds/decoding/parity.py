"""`kvshot eval --serving-check`: does the drafter accept in real decoding what held-out rows promise? Fails one that does not.

Held-out joint acceptance and real decoding measure different things: all rows of given answers, teacher-forced, from stored features; and
rounds, each begun where the last one ended, on the target's own greedy text, from states taken on the way. They may differ by right. The check goes
from one to the other in steps that change one thing each, on the same conversations:

    heldout   all rows of all held-out conversations, as eval.json has them
    same      of these, the conversations that are decoded
    retaken   the same rows, with features taken from the target now, in serving's dtype, instead of the shards'
    text      all rows of the decoded texts, teacher-forced with such features
    starts    of these, the rows at which a round of real decoding began, at the steps that it proposed
    decoded   the same rounds in real decoding, a greedy chain

`same` and `retaken`, and `starts` and `decoded`, are the same rows at the same steps. A row that is right at all steps before k was fed, by teacher
forcing, the very tokens that the decoder proposed there. So both agree row by row, on any text, up to ties within rounding: their differences must vanish.
`text` and `starts` ask about other rows: another text, and positions that follow a failure, which are harder ones. These differences
are explained, never judged.

The rule, on joint MAT = 1 + sum_k joint_k: a drafter fails if one of the two differences is beyond the interval (bootstrap over conversations, paired:
it does not hold 0) and beyond `eval.serving_tolerance`. In fp32, where ties are rare, it fails too if more than 1% of the rounds accept another number
than their rows, also where both have the same mean; or if the target, reading the decoded texts in one forward, prefers another token at more than 1% of
their positions.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvshot_ds import evaluation, metrics
from kvshot_ds.config import DraftingConfig, Dtype, EvalConfig, Recipe
from kvshot_ds.decoding.acceptance import committed_counts
from kvshot_ds.decoding.engine import Engine
from kvshot_ds.decoding.forced import Conversation, Measured, choose, measure
from kvshot_ds.decoding.prompts import stop_tokens
from kvshot_ds.drafters.build import drafters_for, load_drafter
from kvshot_ds.errors import KvshotError
from kvshot_ds.features.shard import ShardSet
from kvshot_ds.features.spec import DTYPES
from kvshot_ds.files import file_sha256, read_json, read_object, write_json
from kvshot_ds.metrics import StepCounts
from kvshot_ds.objectives.objective import Objective
from kvshot_ds.provenance import digest, origin, versions
from kvshot_ds.tables import aligned
from kvshot_ds.target import Target, weights_digest

RESULT = "serving_check.json"
RUNGS = ("heldout", "same", "retaken", "text", "starts", "decoded")
JUDGED = ("features", "path")
# difference -> the two rungs it lies between
DIFFERENCES = {
    "conversations": ("same", "heldout"),
    "features": ("retaken", "same"),
    "text": ("text", "retaken"),
    "starts": ("starts", "text"),
    "path": ("decoded", "starts"),
}
TIES = 0.01  # share of rounds, or of positions, that rounding may settle differently in fp32
_CAUSES = {
    "features": "features captured with another layer id or norm, from other weights, or stored too coarsely (capture.features.store)",
    "path": "a layer id off by one, a norm left out, rotary positions or a mask shifted, states of rejected tokens left in a cache",
    "target": "the target's own cache, mask or positions are wrong while it verifies drafts",
}


def run(recipe: Recipe) -> list[dict[str, Any]]:
    """Evaluates the drafters of `recipe.eval` as `kvshot eval` does, then checks each; writes serving_check.json beside its eval.json.

    Raises ConfigError if fewer than two held-out conversations can be decoded; KvshotError, after all are checked and written, if one fails.
    """
    evaluation.run(recipe)
    folders, target_digest = drafters_for(recipe.target.path, recipe.eval.drafters, recipe.run_dir, recipe.target.trust_remote_code)
    heldout = ShardSet.open(recipe.shards_dir, "heldout")
    target: Target | None = None
    results = []
    for folder in folders:
        place = folder.parent if folder.name == "drafter" else folder
        stamp = _stamp(recipe, folder, place, target_digest, heldout)
        old = read_object(place / RESULT) if (place / RESULT).is_file() else {}
        if old.get("digest") == stamp:
            print(f"{place.name}: already checked -> {place / RESULT}")
            results.append(old)
            continue
        target = target or Target.load(recipe.target.model_copy(update={"dtype": recipe.decode.dtype}))
        result = {"name": place.name, "digest": stamp, **_one(recipe, target, folder, place, heldout)}
        result["provenance"] = origin(options={"eval": recipe.eval.model_dump(mode="json"), "decode": recipe.decode.model_dump(mode="json")})
        write_json(place / RESULT, result)
        results.append(result)
    print(table(results))
    if faults := [f"{r['name']}: {fault}" for r in results for fault in r["faults"]]:
        raise KvshotError("serving check failed: real decoding and held-out evaluation do not agree\n" + "\n".join(faults))
    return results


def _stamp(recipe: Recipe, folder: Path, place: Path, target_digest: str, heldout: ShardSet) -> str:
    """Digest of everything that the result depends on, the machine excepted; also of the code, which is what is being checked."""
    decode, stops = recipe.decode, Path(recipe.target.path) / "generation_config.json"  # names the stop tokens
    options = repr((recipe.eval.model_copy(update={"drafters": ()}), decode.max_new_tokens, decode.dtype, decode.batch, recipe.target.device))
    data = repr((heldout.digest, read_object(place / "eval.json").get("digest"), stops.read_text(encoding="utf-8") if stops.is_file() else None))
    root = Path(__file__).parents[1]
    files = sorted(
        f for part in ("decoding", "drafters", "features", "objectives", "evaluation.py", "target.py") for f in (root / part, *(root / part).glob("*.py"))
    )
    code = "".join(file_sha256(f) for f in files if f.is_file())
    return digest(options, target_digest, weights_digest(folder), data, code, repr(versions()))


def _one(recipe: Recipe, target: Target, folder: Path, place: Path, heldout: ShardSet) -> dict[str, Any]:
    """serving_check.json of one drafter, without name and digest."""
    started, decode = time.monotonic(), recipe.decode
    drafter, info = load_drafter(folder, target.device, DTYPES[decode.dtype])
    drafter.bind(target.model.get_input_embeddings().weight, target.model.get_output_embeddings().weight)
    options = evaluation.measuring(recipe, recipe.eval.steps or recipe.train.objective.steps, info.config)
    chosen, skipped = choose(heldout, recipe.eval, decode.max_new_tokens, target.geometry.max_positions)
    engine, objective = Engine(target, drafter, DraftingConfig(length=options.steps)), Objective(drafter, options, target.model.get_output_embeddings().weight)
    measured = measure(engine, objective, chosen, decode.max_new_tokens, stop_tokens(target), decode.batch, place.name)
    result = summary(*stored(place / evaluation.COUNTS, chosen, options.steps), measured, recipe.eval, decode.dtype)
    how = {"conversations": len(chosen), "skipped": skipped, "max_new_tokens": decode.max_new_tokens, "batch": decode.batch, "device": target.device.type}
    return {**result, **how, "seconds": time.monotonic() - started}


def stored(path: Path, chosen: Sequence[Conversation], steps: int) -> tuple[StepCounts, StepCounts]:
    """Of eval_conversations.json: the counts [C, K] of all conversations and of those in `chosen`, in its order. Raises KvshotError if one is not there."""
    data = read_json(path)
    counts = StepCounts.unstack(np.array([data[name] for name in ("den", "top1", "joint", "prob")], dtype=np.float64)[..., :steps])
    at = {key: i for i, key in enumerate(data["keys"])}
    if absent := [c.key for c in chosen if c.key not in at]:
        raise KvshotError(f"{path}: no counts of the conversation {absent[0]}; delete it and run `kvshot eval` again")
    return counts, StepCounts.unstack(counts.stack()[:, [at[c.key] for c in chosen]])


def summary(everything: StepCounts, same: StepCounts, m: Measured, options: EvalConfig, dtype: Dtype) -> dict[str, Any]:
    """serving_check.json: joint MAT and joint acceptance of each rung, the differences between them, and what is wrong.

    steps: K, those at which the answers, given and decoded, have a token to judge a row by. tau: tokens committed per verification, ends of answers included.
    agreeing: decoded tokens before the first that is not the held-out answer's, of `tokens`.
    """
    how: dict[str, Any] = {"resamples": options.bootstrap, "confidence": options.confidence, "seed": options.seed}
    measured = {"heldout": everything, "same": same, **m.counts}
    steps = min(int((c.total().den > 0).sum()) for c in measured.values())
    if not steps:
        raise KvshotError("the serving check has no round to judge: every answer ends with its first tokens; raise decode.max_new_tokens")
    rungs = {name: StepCounts.unstack(c.stack()[..., :steps]) for name, c in measured.items()}
    mats = {name: metrics.bootstrap(rungs[name], metrics.mat_joint_of, **how) for name in RUNGS}
    differences = {}
    for name, (later, earlier) in DIFFERENCES.items():
        if name == "conversations":  # not the same ones, so nothing to pair
            a, b = mats[later].value, mats[earlier].value
            differences[name] = metrics.Interval(None if a is None or b is None else a - b, None, None)
        else:
            differences[name] = metrics.paired_difference(rungs[later], rungs[earlier], metrics.mat_joint_of, **how)
    agree = {"rounds": m.rounds, "rounds_different": m.different, "positions": m.positions, "positions_different": m.own}
    faults = _faults(mats, differences, agree, options.serving_tolerance, dtype)
    return {
        "passed": not faults,
        "faults": faults,
        "steps": steps,
        "dtype": dtype,
        "confidence": options.confidence,
        "tolerance": options.serving_tolerance,
        "joint_mat": {name: mat.to_json() for name, mat in mats.items()},
        "joint": {name: _by_step(counts.total()) for name, counts in rungs.items()},
        "differences": {name: {**d.to_json(), "judged": name in JUDGED} for name, d in differences.items()},
        **agree,
        "tau": metrics.bootstrap(committed_counts(m.outputs), metrics.alpha_at(0), **how).to_json(),
        "tokens": sum(len(out.tokens) for out in m.outputs),
        "agreeing": m.agreeing,
    }


def _by_step(total: StepCounts) -> list[dict[str, Any]]:
    """Joint acceptance by step; total [K]."""
    return [{"k": k, "num": int(total.joint[k]), "den": int(total.den[k]), "value": rate} for k, rate in enumerate(metrics.joint(total))]


def _faults(
    mats: Mapping[str, metrics.Interval], differences: Mapping[str, metrics.Interval], agree: Mapping[str, int], tolerance: float, dtype: Dtype
) -> list[str]:
    """What the rule of this module finds wrong, each with its size and likely causes."""
    found = []
    what = {
        "features": "held-out rows with features taken from the target now, against the stored ones",
        "path": "real decoding, against the same rounds teacher-forced",
    }
    for name in JUDGED:
        later, earlier, d = *(mats[rung].value for rung in DIFFERENCES[name]), differences[name]
        if beyond(d, tolerance):
            found.append(
                f"{what[name]}: joint MAT {later:.3f} against {earlier:.3f}, difference {_signed(d)}, where nothing but ties may differ. {_likely(name)}"
            )
    if dtype == "fp32":
        rounds, other, positions, own = (agree[key] for key in ("rounds", "rounds_different", "positions", "positions_different"))
        if other > max(1, TIES * rounds):
            found.append(f"{other} of {rounds} rounds accept another number of drafts than the same rows teacher-forced. {_likely('path')}")
        if own > max(1, TIES * positions):
            found.append(f"at {own} of {positions} decoded positions the target, reading the text in one forward, prefers another token. {_likely('target')}")
    return found


def beyond(difference: metrics.Interval, tolerance: float) -> bool:
    """Whether a difference that should be 0 is not: larger than the tolerance, and its interval does not hold 0."""
    d = difference
    return d.value is not None and d.low is not None and d.high is not None and abs(d.value) > tolerance and not d.low <= 0 <= d.high


def _likely(name: str) -> str:
    return f"Likely causes: {_CAUSES[name]}"


def _signed(d: metrics.Interval) -> str:
    return f"{d.value:+.3f} [{d.low:+.3f}, {d.high:+.3f}]"


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """The way from held-out joint MAT to tau, one line for each drafter, and the verdicts."""
    rows = [("drafter", "check", "joint MAT held-out", *RUNGS[1:], "tau", "rounds that differ")]
    for r in results:
        cells = [f"{mat['value']:.3f}" if (mat := r["joint_mat"][rung])["value"] is not None else "-" for rung in RUNGS]
        tau = "-" if r["tau"]["value"] is None else f"{r['tau']['value']:.3f}"
        rows.append((r["name"], "passed" if r["passed"] else "FAILED", *cells, tau, f"{r['rounds_different']} of {r['rounds']}"))
    return "\n".join(aligned(rows))
