"""The page's sections, made of plain blocks from what was gathered. Nothing here knows HTML; nothing here is invented."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvshot_ds.config import EvalConfig, Recipe
from kvshot_ds.report import blocks as b
from kvshot_ds.report import verdicts
from kvshot_ds.report.acceptance import INIT_HEAD, acceptance_blocks, comparison_blocks
from kvshot_ds.report.against import axis_blocks
from kvshot_ds.report.baseline import baseline_blocks, compared
from kvshot_ds.report.beside import beside_blocks
from kvshot_ds.report.blocks import Block, Bullets, Cell, Code, Details, Facts, Row, Section, Table, Text
from kvshot_ds.report.bounds import SAID
from kvshot_ds.report.bycell import Scope, scopes
from kvshot_ds.report.cells import Group, grouped
from kvshot_ds.report.compare import BIGRAM, Comparison, comparisons
from kvshot_ds.report.costs import cost_blocks
from kvshot_ds.report.course import course_blocks
from kvshot_ds.report.diagnosed import diagnosed_blocks
from kvshot_ds.report.families import UNKNOWN, Drafter
from kvshot_ds.report.gather import Run, Work, evaluated
from kvshot_ds.report.growth import scaling_blocks
from kvshot_ds.report.numbers import Numbers, numbers_of
from kvshot_ds.report.paper import paper_blocks
from kvshot_ds.report.predictions import predictions
from kvshot_ds.report.running import decoding_blocks, training_blocks, training_table
from kvshot_ds.report.serving import serving_blocks
from kvshot_ds.report.sweeps import summary, sweep_blocks
from kvshot_ds.sweep.compare import Table as SweepTable

# below this many training conversations the page says that the run is small (the paper: about 70,000)
SMALL_RUN = 10_000
ONE_SEED = "One seed: intervals are over held-out conversations only, not over training seeds."
_SEEDS = "Intervals are over held-out conversations only, not over training seeds; runs that differ in their seed stand side by side."
_INIT_LAYERS = {"random": "at random, N(0, 0.02)", "target": "from the target's layers"}
_DEFINITIONS = (
    ("αₖ", "step-wise acceptance: share of the held-out rows supervised at draft step k whose draft arg-max is the target's; teacher-forced"),
    ("step by step", "one forward for each proposal, each given the token before it; αₖ is measured with the true tokens"),
    (
        "block-wise",
        "one forward for all proposals: of the tokens it is given only the one at t + 1, so αₖ is not the same question at k > 0; compare joint MAT and τ",
    ),
    ("jointₖ", "share of those rows that are right at all steps up to k"),
    ("under sampling", "mean Σ min(p, q): the probability that a sampled draft token is accepted (arXiv 2211.17192)"),
    ("MAT", "1 + Σₖ (α₀ · α₁ · … · αₖ): tokens per round if steps were independent (the paper's number, arXiv 2604.26412)"),
    ("joint MAT", "1 + Σₖ jointₖ: the same without assuming independence; never to be compared with MAT"),
    ("retention", "α at the last step over α₀"),
    ("τ", "tokens committed per target forward in real decoding: accepted + 1"),
    ("conditional", "in real decoding: of the rounds that accepted all drafts before this step, the share that accepted this one too"),
    ("serving check", "joint MAT in steps that change one thing each, from held-out rows to real decoding; two of the differences must vanish"),
    ("interval", "percentile bootstrap; whole conversations are drawn, ratios are of sums"),
    ("bounds", SAID),
    ("bigram table", "proposes the token that most often followed the current one in the training answers; knows nothing of the target's state"),
)


def build_sections(work: Work, recipe: Recipe) -> list[Section]:
    """All sections in reading order."""
    target = next((e.target for _, e in evaluated(work.runs)), recipe.target.path.name)
    commands = {run.name: f"kvshot eval {shlex.quote(str(run.folder / 'recipe.yaml'))}" for run in work.alone}
    everything = scopes(work)
    swept = [scope for scope in everything if scope.sweep]
    numbers = {g: numbers_of(g, recipe.eval) for scope in swept for g in scope.groups}
    against = {scope: compared(scope) for scope in swept if scope.groups}
    cells = _cells(work, everything)
    found = comparisons(work.alone, recipe.eval, commands)
    decoded = (*work.alone, *(run for run in work.runs if run not in work.alone and (run.decoding or run.serving)))
    return [
        Section("glance", "At a glance", _glance(work.alone, found, swept, numbers, against)),
        Section("what", "What was measured", _what(work, recipe, target, everything)),
        *(Section(f"sweep-{n}", scope.title, _swept(scope, numbers, against, recipe.eval)) for n, scope in enumerate(swept)),
        *([Section("acceptance", "Held-out acceptance", acceptance_blocks(work.alone))] if work.alone or not swept else []),
        *([Section("comparisons", "Comparisons", comparison_blocks(found))] if work.alone or not swept else []),
        Section("decoding", "Real speculative decoding", decoding_blocks(tuple(run for run in decoded if run in work.alone or run.decoding))),
        Section("serving", "Training against serving", serving_blocks(tuple(run for run in decoded if run.evaluation or run.serving))),
        Section("training", "Training", _training(work, everything)),
        Section("diagnostics", "Diagnostics", diagnosed_blocks(everything) or [b.missing("diagnostics", "diagnose")]),
        Section("verdicts", "The paper's predictions", verdicts.blocks(predictions(cells, recipe.eval))),
        Section("scaling", "Growth with tokens", scaling_blocks(_ordered(cells, everything), recipe.eval)),
        Section("paper", "Beside the paper (Qwen3-8B, another target)", [*paper_blocks(cells, target), *beside_blocks(cells, target)]),
        Section("cost", "Cost", cost_blocks(everything) or [b.missing("what training cost", "train")]),
        Section("time", "Time", _time(work)),
        Section("provenance", "How it was made", _provenance(work)),
        Section("definitions", "Definitions", [Facts(_DEFINITIONS)]),
    ]


def _cells(work: Work, everything: Sequence[Scope]) -> tuple[Group, ...]:
    """All runs by cell, each cell once, named and coloured as where it is first shown."""
    shown = {frozenset(run.folder for run in g.runs): g for scope in reversed(everything) for g in scope.groups}
    return tuple(shown.get(frozenset(run.folder for run in g.runs), g) for g in grouped(work.runs))


def _ordered(cells: Sequence[Group], everything: Sequence[Scope]) -> list[Group]:
    """The cells in the order in which the page first shows them."""
    shown = [g for scope in everything for g in scope.groups]
    return sorted(cells, key=lambda g: shown.index(g) if g in shown else len(shown))


def _of(scope: Scope, numbers: Mapping[Group, Numbers]) -> dict[Group, Numbers]:
    return {g: numbers[g] for g in scope.groups}


def _swept(scope: Scope, numbers: Mapping[Group, Numbers], against: Mapping[Scope, SweepTable | str], options: EvalConfig) -> list[Block]:
    differences = baseline_blocks(scope, against[scope], options) if scope in against else []
    return [*sweep_blocks(scope, _of(scope, numbers), differences), *_axes(scope, numbers)]


def _axes(scope: Scope, numbers: Mapping[Group, Numbers]) -> list[Block]:
    return axis_blocks(scope, _of(scope, numbers)) if scope.groups else []


def _training(work: Work, everything: tuple[Scope, ...]) -> list[Block]:
    """Of runs the table and what is missing, of trials the table folded; then the curves of all."""
    tables = [] if work.sweeps and not work.alone else training_blocks(work.alone)
    for sweep in work.sweeps:
        if runs := tuple(t.run for t in sweep.trials if t.run and t.run.train):
            tables.append(Details(f"Training runs of sweep {sweep.name}", (training_table(runs),)))
    return [*tables, *course_blocks(everything)]


def _glance(
    runs: tuple[Run, ...], found: list[Comparison], swept: Sequence[Scope], numbers: Mapping[Group, Numbers], against: Mapping[Scope, SweepTable | str]
) -> list[Block]:
    """The findings in sentences, each with its number."""
    items = [item for scope in swept for item in summary(scope, _of(scope, numbers), against.get(scope, ""))]
    for run, e in evaluated(runs):
        first, last = e.alpha[0], e.alpha[-1]
        shares = f"right on {b.percent(first.interval.value)} of the held-out rows at draft step 0, on {b.percent(last.interval.value)} at step {last.k}"
        items.append(f"{run.name} ({run.label}): {shares}; MAT {b.number(e.mat.value, 2)}, joint MAT {b.number(e.mat_joint.value, 2)}.")
    pairs: dict[tuple[str, str], list[Comparison]] = {}
    for c in found:
        if c.difference and c.verdict != "not measured":
            pairs.setdefault(("", BIGRAM) if c.second == BIGRAM else (c.first, c.second), []).append(c)
    for (name, other), group in pairs.items():
        opening = f"{name} against {other}" if name else f"α₀ against the {BIGRAM}"
        items.append(f"{opening}: {'; '.join(_verdict(c) for c in group)}.")
    decoded = [run.decoding for run in runs if run.decoding]
    same, different = sum(d.identical for d in decoded), sum(d.different for d in decoded)
    if same and not different:
        items.append(f"Decoding is lossless on every prompt tried: all {same} outputs are token for token the target's own.")
    blocks: list[Block] = (
        [Bullets(tuple(items)), *([Text(_seeds(runs), "note")] if runs else [])] if items else [b.missing("no drafter has been measured yet", "eval")]
    )
    if different:
        blocks.insert(0, Text(f"Decoding is NOT lossless: {different} of {same + different} outputs differ from the target's own.", "alarm"))
    return blocks


def _verdict(c: Comparison) -> str:
    """The verdict with its number; of a comparison with the bigram table whose it is, of others the metric."""
    assert c.difference
    numbers = f"{b.signed(c.difference.value)}, {c.confidence:.0%} interval {b.bounds(c.difference)}"
    return f"{c.first if c.second == BIGRAM else c.metric} {c.verdict} ({numbers})"


def _seeds(runs: tuple[Run, ...]) -> str:
    seeds = {run.seed for run in runs if run.seed is not None}
    labels = [run.label for run in runs if run.drafter]
    if len(set(labels)) < len(labels) and len(seeds) > 1:
        return _SEEDS
    return f"{ONE_SEED} Training seed: {seeds.pop()}." if len(seeds) == 1 else ONE_SEED


def init_words(drafter: Drafter) -> str:
    """What the weights started from, said in full."""
    if drafter.init_layers == UNKNOWN:
        return "what its weights started from is not recorded"
    layers, head = _INIT_LAYERS.get(drafter.init_layers, drafter.init_layers), INIT_HEAD.get(drafter.init_head, drafter.init_head)
    warm = f"; then tensors of {Path(drafter.warm_start).name} took their place" if drafter.warm_start else ""
    if drafter.blockwise:
        return f"layers start {layers}; the head is the target's, frozen; the final norm starts from the target's{warm}"
    said = f"draft head and final norm start from {head}" if drafter.init_head == "target" else f"draft head starts at {head}"
    return f"layers start {layers}; {said}{warm}"


def _what(work: Work, recipe: Recipe, target: str, everything: Sequence[Scope]) -> list[Block]:
    digests = {e.target_digest[:16] for _, e in evaluated(work.runs)}
    facts = [("target", f"{target}, weights digest {', '.join(sorted(digests))}" if digests else target), *_data_facts(work, recipe)]
    facts += [(run.name, _sentences(run.label, run.drafter.text, init_words(run.drafter))) for run in work.alone if run.drafter]
    blocks: list[Block] = [Text(recipe.report.note, "note")] if recipe.report.note else []
    blocks.append(Facts(tuple(facts)))
    for scope in everything:
        if scope.sweep and scope.groups:
            each = [(g.name, _sentences(g.drafter.label, g.drafter.text, init_words(g.drafter))) for g in scope.groups if g.drafter]
            blocks.append(Details(f"The drafters of sweep {scope.sweep.name}", (Facts(tuple(each)),)))
    conversations = split_counts(work, "train").get("samples")
    if conversations is not None and conversations < SMALL_RUN:
        size = f"This is a small run: {b.integer(conversations)} training conversations, where the paper has about 70,000."
        blocks.append(Text(f"{size} It shows that the way works from end to end, not what the method can do.", "note"))
    if len(digests) > 1:
        blocks.append(Text("The runs were measured against different targets: their numbers must not be compared with each other.", "note"))
    if work.prepared is None:
        blocks.append(b.missing("how the conversations were prepared", "prep"))
    else:
        blocks.append(Details("Everything kvshot prep counted", (Facts(tuple(_flat(work.prepared))),)))
    if work.manifest is None:
        blocks.append(b.missing("which features were captured", "capture"))
    else:
        blocks.append(Details("Manifest of the captured features", (Facts(tuple(_flat(work.manifest))),)))
    return blocks


def _sentences(label: str, *parts: str) -> str:
    return " ".join([f"{label}.", *(f"{part[0].upper()}{part[1:]}." for part in parts if part)])


def _data_facts(work: Work, recipe: Recipe) -> list[tuple[str, str]]:
    facts = []
    for split, name in (("train", "training data"), ("heldout", "held-out data")):
        if counts := split_counts(work, split):
            rows = f"{b.integer(counts.get('rows'))} rows where the target's answer is known"
            facts.append((name, f"{b.integer(counts.get('samples'))} conversations, {b.integer(counts.get('tokens'))} tokens, {rows}"))
    facts.append(("split", f"by conversation, {recipe.prep.heldout_fraction:.0%} held out, chosen by a stable hash of the conversation"))
    if trained := [run.train for run in work.runs if run.train]:
        tokens, rows = (_range(t.get(key) for t in trained) for key in ("tokens", "supervised_rows"))
        facts.append(("trained on", f"{tokens} tokens, {rows} supervised rows in each run, all passes counted"))
    if measured := evaluated(work.runs):
        conversations, rows = _range(e.conversations for _, e in measured), _range(e.alpha[0].den for _, e in measured)
        facts.append(("measured on", f"{conversations} held-out conversations, {rows} rows supervised at draft step 0"))
    return facts


def split_counts(work: Work, split: str) -> Mapping[str, Any]:
    """samples, tokens and rows of a split as the manifest counts them; empty before capture."""
    return ((work.manifest or {}).get("splits") or {}).get(split) or {}


def _range(values: Iterable[float | None]) -> str:
    known = sorted({v for v in values if v is not None})
    return " to ".join(b.integer(v) for v in dict.fromkeys((known[0], known[-1]))) if known else "–"


def _flat(value: Any, prefix: str = "") -> list[tuple[str, str]]:
    """Nested mappings as dotted names; lists of plain values on one line, lists of others by their length."""
    if isinstance(value, Mapping):
        return [pair for key, inner in value.items() for pair in _flat(inner, f"{prefix}.{key}" if prefix else str(key))]
    if isinstance(value, list):
        plain = not any(isinstance(v, Mapping | list) for v in value)
        return [(prefix, ", ".join(map(str, value)) if plain else f"{len(value)} entries")]
    return [(prefix, f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value))]


def _time(work: Work) -> list[Block]:
    """Wall time of whole commands where it was noted, beside the seconds that each result carries."""
    whole = work.timings or {}
    if not work.alone:  # trials are not among the commands whose time was noted
        whole = {stage: seconds for stage, seconds in whole.items() if stage in ("target", "prep", "capture")}
    inside: dict[str, tuple[float | None, str, int | None]] = {
        "prep": ((work.prepared or {}).get("seconds"), "", None),
        "capture": (work.capture_seconds, "summed over workers", None),
    }
    for run in work.alone:
        decode = run.decoding.seconds if run.decoding else {}
        inside[f"train {run.name}"] = ((run.train or {}).get("seconds"), "", run.style)
        inside[f"eval {run.name}"] = (run.evaluation.seconds if run.evaluation else None, "", run.style)
        inside[f"decode {run.name}"] = (decode.get("drafted"), f"the target alone: {b.duration(decode.get('alone'))}", run.style)
    rows = []
    for stage in dict.fromkeys([*whole, *inside]):
        seconds, sub, style = inside.get(stage, (None, "", None))
        if stage in whole or seconds is not None:
            times = Cell(b.duration(whole.get(stage)), value=whole.get(stage)), Cell(b.duration(seconds), sub if seconds is not None else "", seconds)
            rows.append(Row((Cell(stage), *times), style=style))
    if whole:
        rows.append(Row((Cell("all stages"), Cell(b.duration(sum(whole.values())), value=sum(whole.values())), Cell("")), "ours"))
    return [Table("Wall time", ("stage", "whole command", "work inside"), tuple(rows))] if rows else [b.missing("no stage has left a time", "prep")]


def _provenance(work: Work) -> list[Block]:
    trials = [(f"{stage} {run.name}", p) for run in work.runs if run not in work.alone for stage, p in run.origins]
    own = [*work.provenance.items(), *((f"{stage} {run.name}", p) for run in work.alone for stage, p in run.origins)]
    found = [*own, *trials]
    if not found:
        return [b.missing("no provenance.json was found", "prep")]
    commands: list[Block] = [_commands(own)] if own else []
    commands += [Details(f"Commands of {len(trials)} stages of trials", (_commands(trials),))] if trials else []
    versions: dict[str, dict[str, None]] = {}
    for _, p in found:
        for name, version in (p.get("versions") or {}).items():
            versions.setdefault(name, {})[str(version)] = None
    listed = Facts(tuple((name, ", ".join(v) + (" (stages differ)" if len(v) > 1 else "")) for name, v in versions.items()))
    recipes = [(f"sweep {s.name}", s.folder / "recipe.yaml") for s in work.sweeps] + [
        (run.name, run.folder / "recipe.yaml") for run in work.alone if run.recipe
    ]
    return [*commands, listed, *(Details(f"Resolved recipe of {name}", (Code(path.read_text(encoding="utf-8")),)) for name, path in recipes)]


def _commands(found: Iterable[tuple[str, Mapping[str, Any]]]) -> Table:
    rows = [(stage, shlex.join(map(str, p.get("command") or [])), str(p.get("git_commit") or "not in a checkout")) for stage, p in found]
    return Table("Commands", ("stage", "command", "git commit"), tuple(Row(tuple(map(Cell, row))) for row in rows), words=3)
