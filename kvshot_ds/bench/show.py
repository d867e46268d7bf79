"""WORK/bench/NAME.json as a person reads it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvshot_ds.bench.methods import GENERATE, LOOKUP, LOOP
from kvshot_ds.decoding.run import margin
from kvshot_ds.tables import aligned

_MIB = 1 << 20


def text(result: dict[str, Any]) -> str:
    """The tables of a result, and below them everything that limits what they say."""
    m, target = result["machine"], result["target"]
    lines = [
        f"{target['name']}, {target['dtype']}, {m['device']} ({m['threads']} of {m['cores']} cores), "
        f"{len(result['questions']['asked'])} prompts, up to {result['max_new_tokens']} new tokens, median of {result['repeats']}; "
        f"{result['confidence']:.0%} intervals over prompts",
        "",
        *aligned([_HEAD, *(_speed(one) for one in result["methods"])]),
        "",
        *aligned([_PARTS, *(_parts(one) for one in result["methods"])]),
        "",
        *(line for one in result["methods"] if one["joint"] for line in _acceptance(one)),
    ]
    sources = list(dict.fromkeys(q["source"] for q in result["questions"]["asked"]))
    if len(sources) > 1:
        rows = [("method", *sources)]
        rows += [(one["name"], *(_source(one["by_source"][s]) for s in sources)) for one in result["methods"]]
        lines += ["", f"tokens/s, x {GENERATE}, tau by source", *aligned(rows)]
    return "\n".join([*lines, *_notes(result)])


_HEAD = ("method", "tokens/s", f"x {GENERATE}", f"x {LOOP}", f"x {LOOKUP}", "tau", f"same as {GENERATE}", f"after the first token x {LOOP}", "predicted")
_PARTS = ("method", "ms/token p50", "p95", "first token ms p50", "p95", "round ms", "draft/verify/other", "peak MiB", "weights MiB")


def _speed(one: dict[str, Any]) -> tuple[str, ...]:
    against = [_interval(one["speedup"].get(name)) for name in (GENERATE, LOOP, LOOKUP)]
    same, prompts = one["lossless"], one["prompts"]
    identical = "-" if same["against"] is None else f"{same['identical']} of {prompts}{'' if same['against'] == GENERATE else ' (' + same['against'] + ')'}"
    predicted = (one["predicted"] or {}).get("decoding")
    guess = "" if predicted is None else "none" if "why" in predicted else _interval(predicted["speedup"])
    return one["name"], f"{one['tokens_per_second']:.1f}", *against, _interval(one["tau"]), identical, _interval(one["speedup_after_first"].get(LOOP)), guess


def _parts(one: dict[str, Any]) -> tuple[str, ...]:
    times = [_ms(one[part][p]) for part in ("time_per_token", "first_token") for p in ("p50", "p95")]
    r, memory = one["round"], one["memory"]
    shares = "-" if r is None else "/".join(f"{r[part]:.1%}" for part in ("draft", "verify", "other"))
    peak = "-" if memory is None else f"{memory['rise'] / _MIB:.1f}"
    return one["name"], *times, "-" if r is None else _ms(r["seconds"]), shares, peak, f"{one['weights_bytes'] / _MIB:.1f}"


def _acceptance(one: dict[str, Any]) -> list[str]:
    def rates(values: Sequence[float | None]) -> str:
        return " ".join("  - " if v is None else f"{v:.2f}" for v in values)

    nodes = f", {one['round']['nodes']:.1f} nodes a round" if one["round"] and one["round"]["nodes"] > one["levels"] else ""
    return [
        f"{one['name']}: accepted down to step {rates([j['value'] for j in one['joint']])}; given the one before {rates(one['conditional'])}; "
        f"rounds by accepted drafts {' '.join(map(str, one['histogram']))}{nodes}"
    ]


def _source(section: dict[str, Any]) -> str:
    gain = section["speedup"].get(GENERATE)
    faster = "" if gain is None or gain["value"] is None else f", x {gain['value']:.2f}"
    tau = section["tau"]["value"]
    return f"{section['tokens_per_second']:.1f}{faster}, {'-' if tau is None else f'{tau:.2f}'}"


def _notes(result: dict[str, Any]) -> list[str]:
    found, seen, m = [], result["overlap"], result["machine"]
    skipped = result["questions"]["skipped"]
    if skipped:
        found.append(f"{len(skipped)} questions were not asked:")
        found += [f"  {s['source']}/{s['id']} ({s['place']}): {s['reason']}" for s in skipped[:10]]
        found += [f"  and {len(skipped) - 10} more (in the JSON)"] if len(skipped) > 10 else []
    files = [f"{file} ({', '.join(names)})" for file, names in seen["files"].items()]
    if files and not seen["hits"]:
        found.append(f"no question stands in {', '.join(files)}")
    if seen["hits"] and seen["on_overlap"] == "warn":
        count = len({h["question"] for h in seen["hits"]})
        found.append(f"{count} questions stand in the training data, and their numbers are too good:")
        found += [f"  {h['question']} ({h['asked']}): {h['line']}, {h['share']:.0%} of it" for h in seen["hits"][:10]]
    found += [f"{name}: whether it was trained on these questions is not known: {why}" for name, why in seen["unseen"].items()]
    for one in result["methods"]:
        for case in one["lossless"]["cases"]:
            kind = "a fault" if case["fault"] else "a tie" if one["ours"] else f"of {one['name']}, not ours"
            found.append(f"{one['name']}: {case['question']} differs at new token {case['position']} ({margin(case)}, {kind})")
        for source, guess in (one["predicted"] or {}).items():
            found += [f"{one['name']}: no prediction from {source} acceptance: {guess['why']}"] if "why" in guess else []
            if "why" not in guess and source == "heldout":
                found.append(f"{one['name']}: predicted from held-out acceptance {_interval(guess['speedup'])}, tau {_interval(guess['tokens'])}")
    before = m["load_before"]
    if before and m["cores"] and before[0] + m["threads"] > m["cores"] + 0.5:
        found.append(
            f"the machine was busy: load {before[0]:.1f} before, {m['load_after'][0]:.1f} after, on {m['cores']} cores; ratios suffer less than speeds"
        )
    return ["", *found] if found else []


def _interval(found: dict[str, Any] | None) -> str:
    if found is None or found["value"] is None:
        return "-"
    ends = "" if found["low"] is None else f" [{found['low']:.2f}, {found['high']:.2f}]"
    return f"{found['value']:.2f}{ends}"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.1f}"
