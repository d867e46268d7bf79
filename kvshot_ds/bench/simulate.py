"""`bench.simulate`: what drafters would gain on the accelerator of a latency table, from acceptance that was measured anywhere. Nothing is run.

Acceptance comes from eval.json (all rows of held-out answers, with an interval over conversations) and from decode.json (rounds of real decoding, chain or
tree), whichever lie beside a drafter; both are told where both are there. Rounds begin where a draft has failed, which are harder positions than the
mean row, so that held-out acceptance promises a little more than decoding keeps (docs/cost_model.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from kvshot_ds.bench.latency_table import DrafterLatency, LatencyTable, shape_of
from kvshot_ds.bench.predict import Acceptance, Prediction, Resampling, best, lengths, predict, shape_of_round
from kvshot_ds.config import DraftingConfig, Recipe, SamplingConfig
from kvshot_ds.drafters.build import drafters_for, read_info
from kvshot_ds.errors import ConfigError, KvshotError
from kvshot_ds.evaluation import COUNTS
from kvshot_ds.files import read_object
from kvshot_ds.metrics import Interval, StepCounts
from kvshot_ds.tables import aligned
from kvshot_ds.target import load_geometry


@dataclass(frozen=True)
class Simulated:
    """One drafter with the acceptance of one file. source: that file's name; predictions: chains of 1, 2, … drafts, or one tree. best: the fastest of them.

    drafter: as the table has it. notes: what could not be predicted, or differs from what will be decoded.
    """

    name: str
    source: str
    drafter: DrafterLatency
    predictions: tuple[Prediction, ...]
    notes: tuple[str, ...]

    @property
    def best(self) -> Prediction:
        return best(self.predictions)


def run(recipe: Recipe) -> list[Simulated]:
    """Predictions for the drafters of `recipe.bench` (this recipe's own run if none are named) from the table `recipe.bench.simulate`.

    Raises ConfigError if no table is named or it is of a target of other shapes; KvshotError if it is not there or none, holds no drafter of that
    shape, or a drafter has neither eval.json nor decode.json.
    """
    if recipe.bench.simulate is None:
        raise ConfigError("bench.simulate: expected the path of a latency table, found null; `kvshot bench RECIPE --latency TABLE` writes one")
    table = LatencyTable.load(recipe.bench.simulate)
    folders, _ = drafters_for(recipe.target.path, recipe.bench.drafters, recipe.run_dir, recipe.target.trust_remote_code)
    check_target(table, load_geometry(recipe.target.path, recipe.target.trust_remote_code).to_json(), recipe.bench.simulate)
    context = recipe.bench.simulate_context or table.forward.contexts[len(table.forward.contexts) // 2]
    return [found for folder in folders for found in of_drafter(recipe, folder, table, context)]


def check_target(table: LatencyTable, geometry: dict[str, Any], path: Path) -> None:
    """Raises ConfigError naming what of the target's shapes differs from the table's."""
    differ = [f"{name} {table.geometry.get(name)!r} instead of {value!r}" for name, value in geometry.items() if table.geometry.get(name) != value]
    if differ:
        raise ConfigError(f"{path}: measured with a target of other shapes ({table.target}): {', '.join(differ)}; measure with this target")


def of_drafter(recipe: Recipe, folder: Path, table: LatencyTable, context: float) -> list[Simulated]:
    """One for each file of acceptance beside the drafter. Raises KvshotError as `run` does."""
    place, info = folder.parent if folder.name == "drafter" else folder, read_info(folder)
    latency = table.drafter(shape_of(info.config.model_dump(mode="json"), info.draft_vocab_size, info.geometry.to_json()), place.name)
    how = Resampling(recipe.eval.bootstrap, recipe.eval.confidence, recipe.eval.seed)
    found, notes = [], list[str]()
    if (place / "eval.json").is_file():
        of_eval = [] if recipe.decode.sampling.greedy else ["held-out acceptance is that of greedy decoding: decode.sampling.temperature plays no part"]
        acceptance = from_eval(place)
        chains = [predict(shape, acceptance, table, latency, context, how) for shape in lengths(latency, acceptance, table, acceptance.levels)]
        if chains:
            found.append(Simulated(place.name, "eval.json", latency, tuple(chains), (*of_eval, *_doubtful(chains))))
    if (place / "decode.json").is_file():
        acceptance, drafting, sampling = from_decode(place)
        of_decode = list[str]()
        if drafting.min_confidence and drafting.strategy == "chain":
            of_decode.append("drafts stop early by drafting.min_confidence, which is not in the model")
        if not sampling.greedy:
            of_decode.append(f"this is the acceptance of samples at temperature {sampling.temperature:g}, held-out acceptance that of greedy decoding")
        try:
            shapes = [shape_of_round(drafting, latency.block_size)]
            if drafting.strategy == "chain":
                shapes = lengths(latency, acceptance, table, acceptance.levels)
            predictions = [predict(shape, acceptance, table, latency, context, how) for shape in shapes]
        except KvshotError as error:
            notes.append(f"decode.json ({drafting.strategy}) cannot be used: {error}")
        else:
            if predictions:
                found.append(Simulated(place.name, "decode.json", latency, tuple(predictions), (*of_decode, *_doubtful(predictions))))
    if not found:
        raise KvshotError(f"{place}: no acceptance to predict from{': ' + '; '.join(notes) if notes else ''}; run `kvshot eval` or `kvshot decode` first")
    return [Simulated(s.name, s.source, s.drafter, s.predictions, (*s.notes, *notes)) for s in found]


def _doubtful(predictions: Sequence[Prediction]) -> list[str]:
    """A round cannot gain more than the tokens it commits, unless a wider forward were faster than one of a single token."""
    if any(p.speedup.value is not None and p.tokens.value is not None and p.speedup.value > p.tokens.value for p in predictions):
        return ["impossible: more speed-up than tokens a round. The table has a wider forward faster than a narrow one; measure it again on a quiet machine"]
    return []


def from_eval(place: Path) -> Acceptance:
    """Held-out joint acceptance, by conversation where eval_conversations.json says it. Raises KvshotError if `kvshot eval` has not written the file."""
    file = place / COUNTS if (place / COUNTS).is_file() else place / "eval.json"
    data = read_object(file)
    try:
        by_conversation = file.name == COUNTS
        counts = StepCounts(data["den"], data["top1"], data["joint"], data["prob"]) if by_conversation else _totals(data["joint"])
        if counts.den.ndim != 2 or not counts.den.size:
            raise ValueError(f"expected counts of conversations by step, found shape {counts.den.shape}")
    except (KeyError, TypeError, ValueError) as error:
        raise KvshotError(f"{file}: expected acceptance as `kvshot eval` writes it, found {type(error).__name__}: {error}; evaluate again") from None
    return Acceptance(counts, "eval.json")


def from_decode(place: Path) -> tuple[Acceptance, DraftingConfig, SamplingConfig]:
    """Joint acceptance in real decoding, totals alone, how it was drafted and how tokens were chosen. Raises KvshotError if the file does not hold
    what `kvshot decode` writes."""
    file = place / "decode.json"
    data = read_object(file)
    try:
        drafting, sampling = DraftingConfig.model_validate(data["drafting"]), SamplingConfig.model_validate(data["sampling"])
        return Acceptance(_totals(data["joint"]), "decode.json"), drafting, sampling
    except (KeyError, TypeError, ValueError, ValidationError) as error:
        found = f"{type(error).__name__}: {error}".splitlines()[0]
        raise KvshotError(f"{file}: expected acceptance as `kvshot decode` writes it, found {found}; decode again") from None


def _totals(joint: Sequence[dict[str, Any]]) -> StepCounts:
    """[{num, den}, …] by step -> counts [1, K]."""
    right, den = (np.array([[float(step[name]) for step in joint]]) for name in ("num", "den"))
    return StepCounts(den, np.full_like(den, np.nan), right, np.full_like(den, np.nan))


def text(simulated: Sequence[Simulated], table: LatencyTable) -> str:
    """What a person wants to see: for each drafter and source a line for each shape of round."""
    lines = [f"predicted for {table.device} ({table.kind}, {table.dtype}) and {table.target}, from acceptance and the table's latencies; prefill left out"]
    for s in simulated:
        p = s.best
        about = f"context {p.context:g}{' (outside the table: its nearest context answers)' if p.outside else ''}"
        head = ("round", "tokens a round", "ms a round", "draft", "verify", "other", "speed-up over the target alone", "")
        rows = [head, *(_line(one, one is p) for one in s.predictions)]
        lines += ["", f"{s.name} ({s.drafter.family}, {s.drafter.parameters:,} parameters), acceptance of {s.source}, {about}"]
        lines += aligned(rows)
        lines += [f"note: {note}" for note in s.notes]
    return "\n".join(lines)


def _line(p: Prediction, chosen: bool) -> tuple[str, ...]:
    name = f"tree of {p.shape.nodes}, {p.shape.levels} levels" if p.shape.tree else f"{p.shape.levels} draft{'s' if p.shape.levels > 1 else ''}"
    parts = (f"{1e3 * seconds:.2f}" for seconds in (p.seconds, p.draft, p.verify, p.overhead))
    mark = "" if not chosen else "best" if p.speedup.value is not None and p.speedup.value > 1 else "best, yet slower than the target alone"
    return name, _text(p.tokens), *parts, _text(p.speedup), mark


def _text(interval: Interval) -> str:
    if interval.value is None:
        return "-"
    ends = f" [{interval.low:.2f}, {interval.high:.2f}]" if interval.low is not None and interval.high is not None else ""
    return f"{interval.value:.2f}{ends}"
