"""From traces to numbers: pure functions. Every ratio is a ratio of sums over prompts; its interval comes from drawing prompts with replacement."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import numpy.typing as npt

from kvshot_ds import metrics
from kvshot_ds.bench.measure import Measured
from kvshot_ds.bench.methods import Trace
from kvshot_ds.bench.predict import Resampling
from kvshot_ds.bench.questions import Question
from kvshot_ds.decoding.acceptance import conditional_counts, decoding_counts
from kvshot_ds.decoding.rounds import Decoded, Round
from kvshot_ds.metrics import Interval, StepCounts

Array = npt.NDArray[np.float64]


def of_method(measured: Measured, questions: Sequence[Question], others: Sequence[Measured], how: Resampling) -> dict[str, Any]:
    """Everything of one method that follows from the traces; docs/bench.md explains the fields. others: what it is compared with."""
    traces = measured.traces
    sources = list(dict.fromkeys(q.source for q in questions))
    whole = _section(measured, others, range(len(questions)), how)
    return {
        "name": measured.method.name,
        "kind": measured.method.kind,
        **whole,
        "time_per_token": percentiles(times_per_token(traces)),
        "first_token": percentiles([(t.first, 1) for t in traces]),
        "repeat_spread": float(np.median(measured.spread)),
        "round": split([t.rounds for t in traces], traces),
        **acceptance(traces, how),
        "memory": None if measured.peak is None else asdict(measured.peak),
        "weights_bytes": measured.method.weights,
        "by_source": {s: _section(measured, others, [i for i, q in enumerate(questions) if q.source == s], how) for s in sources},
        "each": [{"question": q.name, "tokens": len(t.tokens), "seconds": t.seconds, "first": t.first} for q, t in zip(questions, traces, strict=True)],
    }


def _section(measured: Measured, others: Sequence[Measured], chosen: Sequence[int], how: Resampling) -> dict[str, Any]:
    """The numbers that are told of all prompts and of each source: speed, tau, speed-ups."""
    traces = [measured.traces[i] for i in chosen]
    tokens, seconds = sum(len(t.tokens) for t in traces), sum(t.seconds for t in traces)
    committed = StepCounts.ratio([sum(s.tokens for s in t.steps[1:]) for t in traces], [len(t.steps) - 1 for t in traces])
    against = {o.method.name: [o.traces[i] for i in chosen] for o in others}
    return {
        "prompts": len(traces),
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "tau": metrics.bootstrap(committed, metrics.alpha_at(0), how.resamples, how.confidence, how.seed).to_json(),
        "speedup": {name: speedup(traces, other, how).to_json() for name, other in against.items()},
        "speedup_after_first": {name: speedup(traces, other, how, after_first=True).to_json() for name, other in against.items()},
    }


def speedup(ours: Sequence[Trace], other: Sequence[Trace], how: Resampling, after_first: bool = False) -> Interval:
    """Tokens a second over those of `other`, both over the same prompts in the same order; each draw of prompts is applied to both.

    after_first: of what follows the first step alone, the prefill left out. Undefined where nothing follows.
    """
    skip = 1 if after_first else 0

    def sums(trace: Trace) -> tuple[float, float]:
        steps = trace.steps[skip:]
        return float(sum(s.tokens for s in steps)), sum(s.seconds for s in steps) if after_first else trace.seconds

    pairs = np.array([[sums(a), sums(b)] for a, b in zip(ours, other, strict=True)], dtype=np.float64).reshape(-1, 2, 2)
    tokens, seconds = pairs[..., 0], pairs[..., 1]  # [prompts, 2]: ours as step 0 of a count, the other's as step 1
    counts = StepCounts(seconds, tokens, tokens, np.full_like(tokens, np.nan))

    def ratio(c: StepCounts) -> Array:
        own, theirs = metrics.alpha_at(0)(c), metrics.alpha_at(1)(c)
        return np.divide(own, theirs, out=np.full(np.shape(own), np.nan), where=theirs > 0)

    return metrics.bootstrap(counts, ratio, how.resamples, how.confidence, how.seed)


def times_per_token(traces: Iterable[Trace]) -> list[tuple[float, int]]:
    """(seconds of a token, so many such tokens) of each step after the first: a step that committed n tokens in t seconds gives n tokens of t / n each.

    The first step, which holds the prefill, is the time to first token and stands aside.
    """
    return [(s.seconds / s.tokens, s.tokens) for t in traces for s in t.steps[1:] if s.tokens]


def percentiles(weighted: Sequence[tuple[float, int]]) -> dict[str, float | None]:
    """p50 and p95 of (value, count) pairs: the smallest value that at least so many of all do not exceed. None of nothing."""
    if not weighted:
        return {"p50": None, "p95": None}
    values, counts = (np.array(column, dtype=np.float64) for column in zip(*sorted(weighted), strict=True))
    below = np.cumsum(counts) / counts.sum()
    return {f"p{p}": float(values[np.searchsorted(below, p / 100 - 1e-12)]) for p in (50, 95)}


def split(rounds: Sequence[tuple[Round, ...] | None], traces: Sequence[Trace]) -> dict[str, Any] | None:
    """Mean seconds of a verification round, and the shares spent in the drafter, in the target and in neither. The prefill stands aside.

    None of transformers' methods, which do not tell, and where there was no round.
    """
    pairs = [(r, s) for found, t in zip(rounds, traces, strict=True) if found is not None for r, s in zip(found[1:], t.steps[1:], strict=True)]
    if not pairs:
        return None
    draft, verify = sum(r.draft_seconds for r, _ in pairs), sum(r.verify_seconds for r, _ in pairs)
    whole = sum(s.seconds for _, s in pairs)
    shares = {"draft": draft / whole, "verify": verify / whole, "other": (whole - draft - verify) / whole}
    return {"count": len(pairs), "seconds": whole / len(pairs), **shares, "nodes": sum(r.nodes for r, _ in pairs) / len(pairs)}


def acceptance(traces: Sequence[Trace], how: Resampling) -> dict[str, Any]:
    """levels: the most that a round proposed (of transformers' methods, accepted). histogram: steps after the first by accepted drafts, 0 to `levels`.

    joint: rounds accepted down to level k + 1; conditional: the same of those accepted down to the level before; by the rules of decoding/acceptance.py.
    Both are None of transformers' methods, which do not tell what they proposed.
    """
    accepted = [a for t in traces for a in t.accepted]
    decoded = [Decoded(t.rounds, t.seconds) for t in traces if t.rounds is not None]
    levels = max([r.drafted for d in decoded for r in d.verifications] if decoded else accepted, default=0)
    found: dict[str, Any] = {"levels": levels, "histogram": np.bincount(np.array(accepted, dtype=np.int64).clip(0), minlength=levels + 1).tolist()}
    if not decoded or not levels:
        return {**found, "joint": None, "conditional": None}
    counts = decoding_counts(decoded, levels)
    total = counts.total()
    rates = metrics.bootstrap_all(counts, [metrics.joint_at(k) for k in range(levels)], how.resamples, how.confidence, how.seed)
    joint = [{"k": k, "num": int(total.joint[k]), "den": int(total.den[k]), **rate.to_json()} for k, rate in enumerate(rates)]
    conditional = [right / reached if reached else None for right, reached in zip(*conditional_counts(decoded, levels), strict=True)]
    return {**found, "joint": joint, "conditional": conditional}
