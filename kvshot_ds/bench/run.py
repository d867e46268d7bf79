"""`kvshot bench`: what each drafter is worth against the target alone, prompt-lookup and assisted generation, measured in one process."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from kvshot_ds.bench import latency, overlap, predicted, questions, summary
from kvshot_ds.bench.latency_table import LatencyTable
from kvshot_ds.bench.measure import Measured, load, machine, measure
from kvshot_ds.bench.methods import ASSISTED, GENERATE, LOOKUP, LOOP, Method, Ours, baselines
from kvshot_ds.bench.predict import Acceptance, Resampling
from kvshot_ds.bench.questions import Question, Questions
from kvshot_ds.bench.show import text
from kvshot_ds.bench.simulate import from_eval
from kvshot_ds.config import Dtype, Recipe
from kvshot_ds.decoding.engine import Engine
from kvshot_ds.decoding.prompts import stop_tokens
from kvshot_ds.decoding.run import checked, difference, margin, tied
from kvshot_ds.drafters.build import drafters_for, load_drafter
from kvshot_ds.errors import ConfigError, KvshotError
from kvshot_ds.features.spec import DTYPES
from kvshot_ds.files import glimpse, read_object, write_json
from kvshot_ds.provenance import digest, origin, versions
from kvshot_ds.target import Target, load_geometry, load_tokenizer, weights_digest

FORMAT = "kvshot-bench/1"


@dataclass(frozen=True)
class _Asked:
    """What is asked, and what was found of it in training data. by_file: training file -> drafters trained on it; unseen: drafter -> why its was not read."""

    questions: Questions
    hits: tuple[overlap.Hit, ...]
    by_file: dict[str, list[str]]
    unseen: dict[str, str]

    def to_json(self, how: str) -> dict[str, Any]:
        rule = f"at least {overlap.SHARE:.0%} of its runs of {overlap.NGRAM} words in one conversation; a shorter one whole"
        return {"on_overlap": how, "rule": rule, "files": self.by_file, "unseen": self.unseen, "hits": [asdict(hit) for hit in self.hits]}


def run(recipe: Recipe, as_json: bool = False) -> dict[str, Any]:
    """Measures as `recipe.bench` says, writes WORK/bench/NAME.json and prints it, as a table or as JSON; docs/bench.md explains the fields.

    The same options, weights, questions and machine are not measured again. Raises ConfigError if there are no questions, a question
    stands in the training data of a drafter (bench.overlap) or a drafter belongs to another target; KvshotError (after writing) if our fp32 output differs from
    `generate` by more than a tie.
    """
    place = recipe.work / "bench" / f"{recipe.name}.json"
    folders, target_digest = drafters_for(recipe.target.path, recipe.bench.drafters, recipe.run_dir, recipe.target.trust_remote_code)
    if twice := [str(folder) for folder in dict.fromkeys(folders) if folders.count(folder) > 1]:
        raise ConfigError(f"bench.drafters: {', '.join(twice)} is named more than once")
    asked = ask(recipe, folders)
    before = torch.get_num_threads()
    torch.set_num_threads(recipe.bench.threads or before)
    try:
        stamp = _stamp(recipe, folders, target_digest, asked)
        result = glimpse(place)
        again = result.get("digest") != stamp
        if again:
            result = {"format": FORMAT, "name": recipe.name, "digest": stamp, **_measured(recipe, folders, asked)}
            write_json(place, result)
            result = read_object(place)  # the same values whether it was measured now or before
    finally:
        torch.set_num_threads(before)
    if as_json:
        print(json.dumps(result, indent=1, ensure_ascii=False))
    else:
        print(text(result))
        print(f"-> {place}" if again else f"already measured; delete {place} to measure again")
    faults = [f"{m['name']}: {c['question']} ({margin(c)})" for m in result["methods"] if m["ours"] for c in m["lossless"]["cases"] if c["fault"]]
    if faults:
        raise KvshotError(f"decoding is not lossless: the output differs from the target's where its choice is no tie: {'; '.join(faults)}")
    return result


def ask(recipe: Recipe, folders: Sequence[Path]) -> _Asked:
    """The questions, after they were looked for in what the drafters were trained on. Raises ConfigError as `run` does."""
    tokenizer = load_tokenizer(recipe.target.path, recipe.target.trust_remote_code)
    context = load_geometry(recipe.target.path, recipe.target.trust_remote_code).max_positions
    found = questions.read(recipe, tokenizer, context)
    by_file, unseen = overlap.training_data(recipe, folders, names(folders))
    hits = [hit for file in by_file for hit in overlap.find(found.asked, Path(file), tokenizer)]
    if hits and recipe.bench.overlap == "refuse":
        shown = "\n".join(f"  {h.question} ({h.asked}): {h.line}, {h.share:.0%} of it" for h in hits[:10])
        raise ConfigError(
            f"bench: {len({h.asked for h in hits})} of {len(found.asked)} questions stand in the training data, so that they measure memory\n{shown}\n"
            "use other questions, leave these out (bench.overlap=drop), or go on all the same (bench.overlap=warn)"
        )
    if hits and recipe.bench.overlap == "drop":
        known = {h.asked: h.line for h in hits}  # an id may stand in a file twice, a place cannot
        left = tuple(q for q in found.asked if q.place not in known)
        if not left:
            raise ConfigError(f"bench: all {len(known)} questions stand in the training data; the first: {hits[0].asked} in {hits[0].line}")
        out = (questions.Skipped(q.id, q.source, q.place, f"it stands in {known[q.place]}") for q in found.asked if q.place in known)
        found = Questions(left, (*found.skipped, *out))
    return _Asked(found, tuple(hits), by_file, unseen)


def names(folders: Sequence[Path]) -> list[str]:
    """What each drafter is called: its run, or run and folder; the whole path where two would be called alike, or as a baseline."""
    short = []
    for folder in (f.resolve() for f in folders):
        parent = folder.parent.name
        short.append(parent if folder.name == "drafter" else f"{parent}/{folder.name}" if folder.name.startswith("drafter_") else folder.name)
    taken = [*short, GENERATE, LOOP, LOOKUP, ASSISTED]
    return [name if taken.count(name) == 1 else str(folder) for name, folder in zip(short, folders, strict=True)]


def _measured(recipe: Recipe, folders: Sequence[Path], asked: _Asked) -> dict[str, Any]:
    """Everything of the file but its name and digest."""
    options, decode = recipe.bench, recipe.decode
    target = Target.load(recipe.target.model_copy(update={"dtype": options.dtype}))
    drafters = _drafters(folders, target, options.dtype)
    ours: list[Method] = [Ours(d.name, Engine(target, d.drafter, decode.drafting, decode.sampling)) for d in drafters]
    before, started = load(), time.monotonic()
    found = measure([*baselines(recipe, target), *ours], asked.questions.asked, options, stop_tokens(target), target.device)
    busy = {"load_before": before, "load_after": load(), "seconds": time.monotonic() - started}
    baseline = [m for m in found if m.method.kind == "baseline"]
    methods = []
    for one in found:
        others = [other for other in baseline if other is not one]
        same = _same(recipe, target, asked.questions.asked, one, found)
        own = {"ours": isinstance(one.method, Ours), "lossless": same}
        methods.append({**summary.of_method(one, asked.questions.asked, others, _how(recipe)), **own})
    predictions, table = _predictions(recipe, target, drafters, folders, found, asked.questions.asked) if options.predict else ({}, None)
    for method in methods:
        method["predicted"] = predictions.get(method["name"])
    return {
        "target": {"name": target.name, "digest": target.digest, "dtype": options.dtype, "device": target.device.type},
        "questions": {
            "asked": [{"question": q.name, "source": q.source, "place": q.place, "tokens": len(q.tokens)} for q in asked.questions.asked],
            "skipped": [asdict(s) for s in asked.questions.skipped],
        },
        "overlap": asked.to_json(options.overlap),
        "max_new_tokens": options.max_new_tokens,
        "repeats": options.repeats,
        "drafting": decode.drafting.model_dump(mode="json"),
        "sampling": decode.sampling.model_dump(mode="json"),
        "confidence": recipe.eval.confidence,
        "machine": {**machine(target.device), **busy},
        "methods": methods,
        "latency": None if table is None else asdict(table),
        "provenance": origin(options=options.model_dump(mode="json")),
    }


def _drafters(folders: Sequence[Path], target: Target, dtype: Dtype) -> list[latency.Measured]:
    """Loaded and bound to the target."""
    found = []
    for name, folder in zip(names(folders), folders, strict=True):
        drafter, info = load_drafter(folder, target.device, DTYPES[dtype])
        drafter.bind(target.model.get_input_embeddings().weight, target.model.get_output_embeddings().weight)
        found.append(latency.Measured(name, info.config, info.geometry, drafter))
    return found


def _same(recipe: Recipe, target: Target, asked: Sequence[Question], one: Measured, found: Sequence[Measured]) -> dict[str, Any]:
    """Whether a method's outputs are the target's: against `generate` if greedy, else against our own loop with the same seed where that can be.

    fault: of ours, in fp32, a difference that is no tie. margin: see `decoding.run.difference`.
    """
    decode, ours = recipe.decode, isinstance(one.method, Ours)
    against = GENERATE if decode.sampling.greedy else LOOP
    if one.method.name == against:
        return {"against": None, "why": "it is what the others are compared with", "identical": 0, "different": 0, "cases": []}
    if not decode.sampling.greedy and not (ours and checked(decode.drafting, decode.sampling)):
        why = "tokens are drawn anew, so that only their distribution is the target's"
        return {"against": None, "why": why, "identical": 0, "different": 0, "cases": []}
    reference = next(m for m in found if m.method.name == against)
    cases = []
    for i, (question, trace, own) in enumerate(zip(asked, one.traces, reference.traces, strict=True)):
        case = difference(target, question.tokens, trace.tokens, own.tokens, decode.sampling, i)
        if case is not None:
            cases.append({"question": question.name, **case, "fault": ours and recipe.bench.dtype == "fp32" and not tied(case)})
    return {"against": against, "why": "", "identical": len(asked) - len(cases), "different": len(cases), "cases": cases}


def _predictions(
    recipe: Recipe, target: Target, drafters: Sequence[latency.Measured], folders: Sequence[Path], found: Sequence[Measured], asked: Sequence[Question]
) -> tuple[dict[str, dict[str, Any]], LatencyTable | None]:
    """As `predicted.predictions`, for the rounds of this run."""
    traces = {m.method.name: m.traces for m in found}
    subjects = [predicted.Subject(d, traces[d.name], _heldout(recipe, folder)) for d, folder in zip(drafters, folders, strict=True)]
    context = predicted.mean_context(traces[LOOP], [len(q.tokens) for q in asked])
    return predicted.predictions(target, subjects, context, recipe.decode.drafting, recipe.bench, _how(recipe))


def _how(recipe: Recipe) -> Resampling:
    return Resampling(recipe.eval.bootstrap, recipe.eval.confidence, recipe.eval.seed)


def _heldout(recipe: Recipe, folder: Path) -> Acceptance | dict[str, str]:
    """What kvshot eval has measured; or {"why"} there is nothing that holds for this run."""
    place = latency.place_of(folder)
    if recipe.decode.drafting.strategy != "chain" or not recipe.decode.sampling.greedy:
        return {"why": "kvshot eval measures greedy chains alone"}
    if not (place / "eval.json").is_file():
        return {"why": f"no {place / 'eval.json'}; kvshot eval writes it"}
    return from_eval(place)


def _stamp(recipe: Recipe, folders: Sequence[Path], target_digest: str, asked: _Asked) -> str:
    """Digest of everything that the result depends on: also the machine, but for its load."""
    options, decode = recipe.bench.model_copy(update={"drafters": (), "simulate": None}), recipe.decode
    device = torch.device("cuda" if recipe.target.device != "cpu" and torch.cuda.is_available() else "cpu")
    stops = Path(recipe.target.path) / "generation_config.json"  # names the stop tokens
    data = repr(([(q.name, q.tokens) for q in asked.questions.asked], asked.hits, stops.read_text(encoding="utf-8") if stops.is_file() else None))
    interval = repr((recipe.eval.bootstrap, recipe.eval.confidence, recipe.eval.seed))
    weights = [f"{name} {weights_digest(folder)}" for name, folder in zip(names(folders), folders, strict=True)]
    weights += [weights_digest(options.assistant)] if options.assistant else []
    weights += [repr(glimpse(latency.place_of(folder) / "eval.json").get("digest")) for folder in folders]  # predictions take acceptance from it
    return digest(options, decode.drafting, decode.sampling, interval, repr((machine(device), versions())), target_digest, *weights, data)
