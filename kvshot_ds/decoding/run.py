"""`kvshot decode`: speculative decoding on held-out prompts, compared token for token with the target's own `generate`."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from kvshot_ds.config import DecodeConfig, Recipe
from kvshot_ds.decoding.chain import Decoded, decode
from kvshot_ds.decoding.state import last_logits
from kvshot_ds.drafters.base import Drafter
from kvshot_ds.drafters.build import drafters_for, load_drafter
from kvshot_ds.errors import ConfigError, KvshotError
from kvshot_ds.features.spec import DTYPES
from kvshot_ds.files import read_json, write_json
from kvshot_ds.metrics import StepCounts, alpha_at, bootstrap
from kvshot_ds.provenance import digest, origin
from kvshot_ds.target import Target, load_geometry, weights_digest

_WARM_UP = 8  # tokens decoded both ways before the first prompt is timed
_TIE = 1e-2  # logit margin that two orders of summation can overturn in fp32; a difference at a larger one is a fault


@dataclass(frozen=True)
class Prompt:
    """What stands before the first answer of one held-out conversation. id: the conversation's."""

    id: str
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Compared:
    """One prompt decoded both ways. generated: tokens of the target's `generate`, which took generate_seconds."""

    prompt: Prompt
    drafted: Decoded
    generated: list[int]
    generate_seconds: float


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
    faults = [f"{r['name']}: {c['id']} (margin {c['margin']:.3g})" for r in results.values() for c in r["lossless"]["cases"] if c["margin"] > _TIE]
    if faults and recipe.decode.dtype == "fp32":
        raise KvshotError(f"decoding is not lossless: the output differs from the target's where its choice is no tie: {'; '.join(faults)}")
    return results


def _stamp(recipe: Recipe, folder: Path, target_digest: str, prompts: Sequence[Prompt]) -> str:
    """Digest of everything that decode.json depends on, the machine excepted."""
    options, interval = recipe.decode.model_copy(update={"drafters": ()}), recipe.eval
    stops = Path(recipe.target.path) / "generation_config.json"  # names the stop tokens
    data = repr(([(p.id, p.tokens) for p in prompts], stops.read_text(encoding="utf-8") if stops.is_file() else None))
    return digest(options, repr((interval.bootstrap, interval.confidence, interval.seed)), recipe.target.device, target_digest, weights_digest(folder), data)


def read_prompts(path: Path, options: DecodeConfig, context: int) -> tuple[list[Prompt], list[dict[str, str]]]:
    """The first `max_prompts` usable prompts of `path` in file order, and those passed over before them: {id, reason}.

    Raises ConfigError if the file is missing or holds no usable prompt, KvshotError on a line that `kvshot prep` has not written.
    """
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; run `kvshot prep` first")
    prompts: list[Prompt] = []
    skipped: list[dict[str, str]] = []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if len(prompts) == options.max_prompts:
                break
            try:
                record = json.loads(line)
                name, tokens, turn = str(record["id"]), record["tokens"], record["turn"]
                if not all(type(n) is int and n >= 0 for part in (tokens, turn) for n in part):
                    raise ValueError("tokens and turn must be lists of numbers")
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                found = f"{type(error).__name__}: {error}"
                raise KvshotError(f"{path}:{number}: expected a conversation as `kvshot prep` writes it, found {found}; prepare again") from None
            first = next((i for i, n in enumerate(turn) if n), None)
            if not first:
                skipped.append({"id": name, "reason": "it has no assistant turn" if first is None else "nothing stands before its first answer"})
            elif first + options.max_new_tokens > context:
                reason = f"a prompt of {first} tokens and decode.max_new_tokens={options.max_new_tokens} exceed the target's context of {context}"
                skipped.append({"id": name, "reason": reason})
            else:
                prompts.append(Prompt(name, tuple(tokens[:first])))
    if prompts:
        return prompts, skipped
    if skipped:
        raise ConfigError(f"{path}: none of the {len(skipped)} held-out conversations gives a prompt; the first: {skipped[0]['reason']}")
    raise ConfigError(f"{path}: no held-out conversations; prepare with prep.heldout_fraction > 0")


def stop_tokens(target: Target) -> frozenset[int]:
    """End tokens of the target's generation_config.json, or its tokenizer's if that names none."""
    found = target.model.generation_config.eos_token_id
    if found is None:
        found = target.tokenizer.eos_token_id
    return frozenset(() if found is None else [found] if isinstance(found, int) else found)


def reference(target: Target, prompt: Sequence[int], max_new_tokens: int, stop: Collection[int]) -> list[int]:
    """The target's own greedy `generate`: new tokens, a stop token included.

    The arg-max of its plain logits: a repetition penalty or the like in its generation_config.json is left out.
    """
    from transformers import GenerationConfig

    model, ids = target.model, torch.tensor([prompt], device=target.device)
    plain = GenerationConfig(max_new_tokens=max_new_tokens, do_sample=False, eos_token_id=sorted(stop) or None, pad_token_id=min(stop, default=0))
    own, model.generation_config = model.generation_config, GenerationConfig()  # its own would fill whatever `plain` leaves open
    try:
        return model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=plain)[0, len(prompt) :].tolist()
    finally:
        model.generation_config = own


def compare(target: Target, drafter: Drafter, prompts: Sequence[Prompt], options: DecodeConfig, name: str) -> list[Compared]:
    """Every prompt decoded both ways. Which way comes first alternates, so that neither always finds warm caches."""
    stop = stop_tokens(target)

    def drafted(prompt: Prompt, length: int) -> Decoded:
        return decode(target, drafter, prompt.tokens, length, options.draft_length, stop)

    def generated(prompt: Prompt, length: int) -> tuple[list[int], float]:
        started = time.perf_counter()
        tokens = reference(target, prompt.tokens, length, stop)
        return tokens, time.perf_counter() - started

    warm_up = min(_WARM_UP, options.max_new_tokens)
    drafted(prompts[0], warm_up)
    generated(prompts[0], warm_up)
    out = []
    for i, prompt in enumerate(tqdm(prompts, desc=f"decode {name}", unit="prompt", mininterval=2)):
        if i % 2:
            own = generated(prompt, options.max_new_tokens)
            ours = drafted(prompt, options.max_new_tokens)
        else:
            ours = drafted(prompt, options.max_new_tokens)
            own = generated(prompt, options.max_new_tokens)
        out.append(Compared(prompt, ours, *own))
    return out


@torch.inference_mode()
def difference(target: Target, c: Compared) -> dict[str, Any] | None:
    """Where the two outputs part, or None: position among the new tokens, both tokens (None: ended), and the margin.

    margin: top-1 minus top-2 logit there, from one forward over everything before. A margin at the level of rounding
    means a tie, which two orders of summation may settle differently; a larger one means a fault.
    """
    ours, own = c.drafted.tokens, c.generated
    if ours == own:
        return None
    at = next((i for i, (a, b) in enumerate(zip(ours, own, strict=False)) if a != b), min(len(ours), len(own)))
    before = torch.tensor([*c.prompt.tokens, *own[:at]], device=target.device)
    first, second = last_logits(target, before).float().topk(2).values.tolist()
    ends = {"drafted": ours[at] if at < len(ours) else None, "generate": own[at] if at < len(own) else None}
    return {"id": c.prompt.id, "position": at, **ends, "margin": first - second}


def joint_counts(decoded: Decoded, draft_length: int) -> tuple[list[int], list[int]]:
    """Per step k: rounds whose first k + 1 drafts were all accepted, and rounds that count at step k; both [K].

    A round counts at step k iff it drafted more than k tokens and the token judged at step k, the (k + 1)-th after the
    round's bonus token, exists in the finished output. It is the rule of held-out rows (the label lies in the answer).
    Whether a round counts thus never depends on what it accepted: one near the end of the answer, or near
    `max_new_tokens`, leaves the same steps out when its drafts fail as when they are accepted.
    """
    right, counted = [0] * draft_length, [0] * draft_length
    known = len(decoded.rounds[0].tokens)
    for r in decoded.verifications:
        for k in range(min(r.drafted, len(decoded.tokens) - known)):
            counted[k] += 1
            right[k] += r.accepted > k
        known += len(r.tokens)
    return right, counted


def summary(recipe: Recipe, target: Target, compared: Sequence[Compared]) -> dict[str, Any]:
    """decode.json.

    tau: tokens committed per verification forward, ends of answers included; the prefill and its token stand aside.
    histogram: verifications by accepted drafts, 0..K. accept_joint: `joint_counts`. tokens, target_forwards: all of
    them, prefill included. seconds: drafted and generate are whole runs; draft and verify are the parts of drafted
    spent in the drafter and in the target (prefill included).
    """
    options, how = recipe.decode, recipe.eval
    cases = [case for c in compared if (case := difference(target, c)) is not None]
    ours = [c.drafted for c in compared]
    committed = [sum(len(r.tokens) for r in d.verifications) for d in ours]
    tau = bootstrap(StepCounts.ratio(committed, [len(d.verifications) for d in ours]), alpha_at(0), how.bootstrap, how.confidence, how.seed)
    histogram = [0] * (options.draft_length + 1)
    for accepted in (a for d in ours for a in d.accepted):
        histogram[accepted] += 1
    joints = [joint_counts(d, options.draft_length) for d in ours]
    right, counted = ([sum(column) for column in zip(*rows, strict=True)] for rows in zip(*joints, strict=True))
    tokens, own_tokens = sum(len(d.tokens) for d in ours), sum(len(c.generated) for c in compared)
    seconds = {
        "drafted": sum(d.seconds for d in ours),
        "generate": sum(c.generate_seconds for c in compared),
        "draft": sum(d.draft_seconds for d in ours),
        "verify": sum(d.verify_seconds for d in ours),
    }
    return {
        "prompts": len(compared),
        "max_new_tokens": options.max_new_tokens,
        "draft_length": options.draft_length,
        "dtype": options.dtype,
        "device": target.device.type,
        "lossless": {"identical": len(compared) - len(cases), "different": len(cases), "cases": cases},
        "tau": tau.to_json(),
        "confidence": how.confidence,
        "histogram": histogram,
        "accept_joint": [a / b if b else None for a, b in zip(right, counted, strict=True)],
        "tokens": tokens,
        "target_forwards": sum(d.target_forwards for d in ours),
        "seconds": seconds,
        "tokens_per_second": {"drafted": tokens / seconds["drafted"], "generate": own_tokens / seconds["generate"]},
    }


def table(results: Sequence[dict[str, Any]]) -> str:
    """What a person wants to see of each decode.json, one line for each drafter."""
    rows = [("drafter", "identical", "tau", "rounds by accepted drafts", "tokens/s drafted", "tokens/s generate", "skipped prompts")]
    for r in results:
        tau, speed = r["tau"], r["tokens_per_second"]
        ends = "" if tau["low"] is None else f" [{tau['low']:.2f}, {tau['high']:.2f}]"
        identical = f"{r['lossless']['identical']} of {r['prompts']}"
        value = "-" if tau["value"] is None else f"{tau['value']:.2f}{ends}"
        speeds = f"{speed['drafted']:.1f}", f"{speed['generate']:.1f}"
        rows.append((r["name"], identical, value, " ".join(map(str, r["histogram"])), *speeds, str(len(r["skipped"]))))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    for r in results:
        lines += [f"{r['name']}: {c['id']} differs at new token {c['position']} (logit margin {c['margin']:.2g})" for c in r["lossless"]["cases"]]
    return "\n".join(lines)
