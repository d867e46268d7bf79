"""`kvshot decode`: speculative decoding on held-out prompts, compared token for token with what the target alone gives."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from tqdm import tqdm

from kvshot_ds import metrics
from kvshot_ds.config import DecodeConfig, DraftingConfig, EvalConfig, Recipe, SamplingConfig
from kvshot_ds.decoding.acceptance import accepted_histogram, committed_counts, conditional_counts, decoding_counts
from kvshot_ds.decoding.engine import Engine
from kvshot_ds.decoding.prompts import Prompt, read_prompts, reference, stop_tokens
from kvshot_ds.decoding.rounds import Decoded
from kvshot_ds.decoding.sampling import Use, gumbel, keys, warp
from kvshot_ds.drafters.base import Drafter
from kvshot_ds.drafters.build import drafters_for, load_drafter
from kvshot_ds.errors import KvshotError
from kvshot_ds.features.spec import DTYPES
from kvshot_ds.files import read_json, write_json
from kvshot_ds.provenance import digest, origin
from kvshot_ds.tables import aligned
from kvshot_ds.target import Target, load_geometry, weights_digest

__all__ = ["Compared", "Prompt", "compare", "difference", "read_prompts", "reference", "run", "stop_tokens", "summary", "table"]

_WARM_UP = 8  # tokens decoded both ways before the first prompt is timed
_TIE = 1e-2  # logit margin that two orders of summation can overturn in fp32
Against = Literal["generate", "own loop"]


@dataclass(frozen=True)
class Compared:
    """One prompt decoded both ways. number: names it to the noise of sampling. alone: tokens of the target alone."""

    prompt: Prompt
    number: int
    drafted: Decoded
    alone: list[int]


@dataclass(frozen=True)
class Comparison:
    """All prompts. seconds: wall time of all batches with the drafter, of this the time in the drafter and in the target (prefill included), and wall time
    of the target alone."""

    each: tuple[Compared, ...]
    drafted: float
    draft: float
    verify: float
    alone: float


def run(recipe: Recipe) -> dict[str, dict[str, Any]]:
    """Decodes with the drafters of `recipe.decode` (this recipe's own run if none are named); writes decode.json beside each.

    Returns run folder -> its decode.json. A drafter whose decode.json was made from the same options, weights and
    prompts is not decoded again. Raises ConfigError if there are no held-out prompts that fit, or a drafter belongs to
    another target, KvshotError (after writing) if fp32 output differs from the target's by more than a tie.
    """
    folders, target_digest = drafters_for(recipe.target.path, recipe.decode.drafters, recipe.run_dir, recipe.target.trust_remote_code)
    context = load_geometry(recipe.target.path, recipe.target.trust_remote_code).max_positions
    prompts, skipped = read_prompts(recipe.prepared_dir / "heldout.jsonl", recipe.decode, context)
    target: Target | None = None
    results = {}
    for folder in folders:
        place = folder.resolve().parent if folder.name == "drafter" else folder.resolve()
        stamp = _stamp(recipe, folder, target_digest, prompts)
        old = read_json(place / "decode.json") if (place / "decode.json").is_file() else {}
        if old.get("digest") == stamp:
            print(f"{place.name}: already decoded -> {place / 'decode.json'}")
            results[str(place)] = old
            continue
        target = target or Target.load(recipe.target.model_copy(update={"dtype": recipe.decode.dtype}))
        drafter, _ = load_drafter(folder, target.device, DTYPES[recipe.decode.dtype])
        drafter.bind(target.model.get_input_embeddings().weight, target.model.get_output_embeddings().weight)
        compared = compare(target, drafter, prompts, recipe.decode, place.name)
        result = {"name": place.name, "digest": stamp, **summary(recipe, target, compared), "skipped": skipped}
        result["provenance"] = origin(options=recipe.decode.model_dump(mode="json"))
        write_json(place / "decode.json", result)
        results[str(place)] = result
    print(table(list(results.values())))
    faults = [f"{r['name']}: {c['id']} ({margin(c)})" for r in results.values() for c in r["lossless"]["cases"] if not tied(c)]
    if faults and recipe.decode.dtype == "fp32":
        raise KvshotError(f"decoding is not lossless: the output differs from the target's where its choice is no tie: {'; '.join(faults)}")
    return results


def _stamp(recipe: Recipe, folder: Path, target_digest: str, prompts: Sequence[Prompt]) -> str:
    """Digest of everything that decode.json depends on, the machine excepted."""
    options, interval = recipe.decode.model_copy(update={"drafters": ()}), recipe.eval
    stops = Path(recipe.target.path) / "generation_config.json"  # names the stop tokens
    data = repr(([(p.id, p.tokens) for p in prompts], stops.read_text(encoding="utf-8") if stops.is_file() else None))
    return digest(options, repr((interval.bootstrap, interval.confidence, interval.seed)), recipe.target.device, target_digest, weights_digest(folder), data)


def checked(drafting: DraftingConfig, sampling: SamplingConfig) -> bool:
    """Whether the text is the target's alone, token for token: not where drafts are drawn, and settled by rejection; then only the distribution is."""
    return sampling.greedy or sampling.scheme == "coupled" or drafting.strategy != "chain"


def compare(target: Target, drafter: Drafter, prompts: Sequence[Prompt], options: DecodeConfig, name: str) -> Comparison:
    """Every batch of prompts decoded both ways. Which way comes first alternates, so that neither always finds warm caches.

    The target alone is its own greedy `generate`, one prompt after the other; with a temperature our own loop with the same seed and batch.
    """
    stop, plain = stop_tokens(target), SamplingConfig() if options.sampling.greedy else options.sampling
    engine, loop = Engine(target, drafter, options.drafting, options.sampling), Engine(target, None, options.drafting, plain)
    seconds = {"drafted": 0.0, "draft": 0.0, "verify": 0.0, "alone": 0.0}

    def drafted(batch: Sequence[Prompt], first: int, length: int) -> list[Decoded]:
        started = time.perf_counter()
        out = engine.decode([p.tokens for p in batch], length, stop, range(first, first + len(batch)))
        longest = max(out, key=lambda d: len(d.rounds))  # took part in every forward, each of which reports the time of the whole batch
        seconds["drafted"] += time.perf_counter() - started
        seconds["draft"] += longest.draft_seconds
        seconds["verify"] += longest.verify_seconds
        return out

    def alone(batch: Sequence[Prompt], first: int, length: int) -> list[list[int]]:
        started = time.perf_counter()
        if options.sampling.greedy:
            out = [reference(target, p.tokens, length, stop) for p in batch]
        else:
            out = [d.tokens for d in loop.decode([p.tokens for p in batch], length, stop, range(first, first + len(batch)))]
        seconds["alone"] += time.perf_counter() - started
        return out

    batches = [(prompts[at : at + options.batch], at) for at in range(0, len(prompts), options.batch)]
    for way in (drafted, alone):
        way(*batches[0], min(_WARM_UP, options.max_new_tokens))
    seconds = dict.fromkeys(seconds, 0.0)
    each = []
    for i, (batch, first) in enumerate(tqdm(batches, desc=f"decode {name}", unit="batch", mininterval=2)):
        if i % 2:
            own, ours = alone(batch, first, options.max_new_tokens), drafted(batch, first, options.max_new_tokens)
        else:
            ours, own = drafted(batch, first, options.max_new_tokens), alone(batch, first, options.max_new_tokens)
        each += [Compared(p, first + n, d, a) for n, (p, d, a) in enumerate(zip(batch, ours, own, strict=True))]
    return Comparison(tuple(each), **seconds)


@torch.inference_mode()
def difference(target: Target, prompt: Sequence[int], ours: Sequence[int], own: Sequence[int], sampling: SamplingConfig, number: int) -> dict[str, Any] | None:
    """Where two outputs part, or None: position among the new tokens, both tokens (None: ended), and the margin.

    ours, own: new tokens with a drafter and of the target alone. margin: how far the lesser of both lies below the best one there, in one forward over
    everything before: in logits, with a temperature in filtered log-probabilities and the noise of sequence `number`. A margin at the level of rounding means
    a tie, which two orders of summation may settle differently; a larger one means a fault. None: one text ended, which is no matter of rounding, or its
    token was filtered out.
    """
    if list(ours) == list(own):
        return None
    at = next((i for i, (a, b) in enumerate(zip(ours, own, strict=False)) if a != b), min(len(ours), len(own)))
    before = torch.tensor([[*prompt, *own[:at]]], device=target.device)
    scores = target.forward(before)[0, -1].float()
    if not sampling.greedy:
        place = torch.tensor([before.shape[1]], device=target.device)
        key = keys(sampling.seed, Use.CHOOSE, torch.tensor([number], device=target.device), place)
        scores = warp(scores, sampling) + gumbel(key, torch.arange(len(scores), device=target.device))[0]
    token, other = (tokens[at] if at < len(tokens) else None for tokens in (ours, own))
    below = math.inf if token is None or other is None else float(scores.max() - min(scores[token], scores[other]))
    return {"position": at, "drafted": token, "alone": other, "margin": below if math.isfinite(below) else None}


def tied(case: Mapping[str, Any]) -> bool:
    """Whether a `difference` in fp32 can be one of rounding."""
    return case["margin"] is not None and case["margin"] <= _TIE


def margin(case: Mapping[str, Any]) -> str:
    """Of a `difference`, as a person reads it."""
    if case["margin"] is not None:
        return f"margin {case['margin']:.2g}"
    return "one text ended" if case["drafted"] is None or case["alone"] is None else "a token that the filters leave out"


def lossless(target: Target, compared: Sequence[Compared], options: DecodeConfig) -> dict[str, Any]:
    """Of decode.json. against: what the outputs are compared with; None where none can be, and then neither number stands for anything."""
    if not checked(options.drafting, options.sampling):
        why = "drafts are drawn and settled by rejection: the distribution is the target's, the tokens are those of another draw"
        return {"against": None, "why": why, "identical": 0, "different": 0, "cases": []}
    found = [(c, difference(target, c.prompt.tokens, c.drafted.tokens, c.alone, options.sampling, c.number)) for c in compared]
    cases = [{"id": c.prompt.id, **case} for c, case in found if case is not None]
    against: Against = "generate" if options.sampling.greedy else "own loop"
    return {"against": against, "why": "", "identical": len(compared) - len(cases), "different": len(cases), "cases": cases}


def summary(recipe: Recipe, target: Target, compared: Comparison) -> dict[str, Any]:
    """decode.json.

    levels: the most that a round proposed. tau: tokens committed per verification forward of a sequence, ends of answers included; the prefill
    and its token stand aside. histogram: verifications by accepted drafts, 0 to `levels`. joint: rounds accepted down to step (level) k + 1, by the
    rule of `joint_counts`; conditional: the same of those that had accepted all before. nodes: tokens verified a round besides the bonus token.
    tokens, target_forwards: all of all sequences, prefill included. seconds: drafted and alone are whole runs; draft, verify and other
    are the parts of drafted in the drafter, in the target (prefill included) and in neither.
    """
    options, how = recipe.decode, recipe.eval
    ours = [c.drafted for c in compared.each]
    verifications = [r for d in ours for r in d.verifications]
    levels = max((r.drafted for r in verifications), default=0)
    tokens, own_tokens = sum(len(d.tokens) for d in ours), sum(len(c.alone) for c in compared.each)
    seconds = {"drafted": compared.drafted, "alone": compared.alone, "draft": compared.draft, "verify": compared.verify}
    return {
        "prompts": len(compared.each),
        "max_new_tokens": options.max_new_tokens,
        "strategy": options.drafting.strategy,
        "drafting": options.drafting.model_dump(mode="json"),
        "sampling": options.sampling.model_dump(mode="json"),
        "batch": options.batch,
        "levels": levels,
        "dtype": options.dtype,
        "device": target.device.type,
        "lossless": lossless(target, compared.each, options),
        "tau": metrics.bootstrap(committed_counts(ours), metrics.alpha_at(0), how.bootstrap, how.confidence, how.seed).to_json(),
        "confidence": how.confidence,
        "histogram": accepted_histogram(ours, levels),
        **by_step(ours, levels, how),
        "nodes": sum(r.nodes for r in verifications) / len(verifications) if verifications else None,
        "tokens": tokens,
        "target_forwards": sum(d.target_forwards for d in ours),
        "seconds": {**seconds, "other": compared.drafted - compared.draft - compared.verify},
        "tokens_per_second": {"drafted": tokens / seconds["drafted"], "alone": own_tokens / seconds["alone"]},
    }


def by_step(decoded: Sequence[Decoded], levels: int, options: EvalConfig) -> dict[str, list[dict[str, Any]]]:
    """Joint and conditional acceptance by step, with counts; joint with its interval over prompts."""
    if not levels:
        return {"joint": [], "conditional": []}
    counts = decoding_counts(decoded, levels)
    total, at = counts.total(), [metrics.joint_at(k) for k in range(levels)]
    joint = metrics.bootstrap_all(counts, at, options.bootstrap, options.confidence, options.seed)
    conditional = enumerate(zip(*conditional_counts(decoded, levels), strict=True))
    return {
        "joint": [{"k": k, "num": int(total.joint[k]), "den": int(total.den[k]), **rate.to_json()} for k, rate in enumerate(joint)],
        "conditional": [{"k": k, "num": right, "den": reached, "value": right / reached if reached else None} for k, (right, reached) in conditional],
    }


def table(results: Sequence[dict[str, Any]]) -> str:
    """What a person wants to see of each decode.json, one line for each drafter."""
    rows = [
        (
            "drafter",
            "drafted by",
            "identical",
            "tau",
            "rounds by accepted drafts",
            "tokens/s drafted",
            "tokens/s alone",
            "draft/verify/other",
            "skipped prompts",
        )
    ]
    for r in results:
        tau, speed, seconds = r["tau"], r["tokens_per_second"], r["seconds"]
        ends = "" if tau["low"] is None else f" [{tau['low']:.2f}, {tau['high']:.2f}]"
        identical = f"{r['lossless']['identical']} of {r['prompts']}" if r["lossless"]["against"] else "not comparable"
        value = "-" if tau["value"] is None else f"{tau['value']:.2f}{ends}"
        split = "/".join(f"{seconds[part] / seconds['drafted']:.0%}" for part in ("draft", "verify", "other"))
        speeds = f"{speed['drafted']:.1f}", f"{speed['alone']:.1f}", split
        rows.append((r["name"], r["strategy"], identical, value, " ".join(map(str, r["histogram"])), *speeds, str(len(r["skipped"]))))
    lines = aligned(rows)
    for r in results:
        lines += [f"{r['name']}: {c['id']} differs at new token {c['position']} ({margin(c)})" for c in r["lossless"]["cases"]]
        lines += [f"{r['name']}: not compared token for token: {r['lossless']['why']}"] if r["lossless"]["why"] else []
    return "\n".join(lines)
