"""Paired comparisons and the rule that turns an interval into words."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvshot_ds.config import EvalConfig
from kvshot_ds.metrics import Interval, Statistic, StepCounts, alpha_at, mat_joint_of, mat_of, paired_difference
from kvshot_ds.report.families import COUNTERPARTS, NO_TARGET, Drafter
from kvshot_ds.report.gather import Conversations, Run

RULE = (
    "A difference is called higher or lower when its interval excludes 0, otherwise not told apart. Both sides are measured on the same held-out "
    "conversations, and each bootstrap draw of conversations is applied to both. No correction is made for the number of comparisons."
)
BLOCK_RULE = (
    "A block-wise drafter is compared with its step-by-step counterpart by α₀ and joint MAT. At later steps αₖ asks them different questions: a step-by-step "
    "drafter is given the true tokens before step k, a block-wise one is given none of them. Joint acceptance asks both what a round of decoding asks: "
    "whether every proposal up to k is right."
)

BIGRAM = "bigram table"
_SUBSCRIPTS = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")
_FIRST, _MAT, _JOINT = ("α₀", alpha_at(0)), ("MAT", mat_of), ("joint MAT", mat_joint_of)
# Options that may differ without a word: one changes nothing that is learned, the other stands in the label.
_SILENT = {"head_chunk", "drift"}


@dataclass(frozen=True)
class Comparison:
    """`first` minus `second` in `metric`. difference None: not measured, for `reason`; `command` would measure it."""

    first: str
    second: str
    metric: str
    difference: Interval | None
    confidence: float = 0.95
    conversations: int | None = None
    reason: str = ""
    command: str = ""

    @property
    def verdict(self) -> str:
        """higher | lower | not told apart | not measured, by RULE."""
        d = self.difference
        if d is None or d.value is None:
            return "not measured"
        if d.low is None or d.high is None or d.low <= 0 <= d.high:
            return "not told apart"
        return "higher" if d.value > 0 else "lower"


def comparisons(runs: tuple[Run, ...], options: EvalConfig, commands: dict[str, str]) -> list[Comparison]:
    """Every comparison the page makes, each pair once: with the bigram table, with controls, of KV readers with readers of hidden
    states, of block-wise drafters with their step-by-step counterparts. commands: what evaluates a run, by its name."""
    found = [against_bigram(run, commands[run.name]) for run in runs]
    for against in (against_controls, against_hidden, against_counterpart):
        found += [c for run in runs for c in against(run, runs, options, commands)]
    return found


def against_bigram(run: Run, command: str) -> Comparison:
    """alpha_0 of the run minus the bigram table's, as eval.json has it."""
    evaluation = run.evaluation
    difference = evaluation.against.get(("bigram", "alpha_0")) if evaluation else None
    if evaluation is None or difference is None:
        return Comparison(run.name, BIGRAM, "α₀", None, reason="no paired difference in eval.json" if evaluation else "no eval.json", command=command)
    return Comparison(run.name, BIGRAM, "α₀", difference, evaluation.confidence, evaluation.conversations)


def against_controls(run: Run, runs: tuple[Run, ...], options: EvalConfig, commands: dict[str, str]) -> list[Comparison]:
    """alpha_0 and MAT of a run minus those of its controls: runs of the same family and depth that are a control in one thing more,
    of the same seed where there are some. That a KV-only run has none without target information is said."""
    drafter = run.drafter
    if drafter is None:
        return []
    more = {r.name: r.drafter.controls - drafter.controls for r in runs if r.drafter and _alike(drafter, r.drafter) and drafter.controls < r.drafter.controls}
    controls = [r for r in runs if len(more.get(r.name, ())) == 1]
    kinds = [[r for r in controls if more[r.name] == {kind}] for kind in sorted({kind for r in controls for kind in more[r.name]})]
    found = [c for kind in kinds for control in _of_seed(run, kind) for c in _between(run, control, [_FIRST, _MAT], options, commands)]
    if drafter.family == "kv_only" and not drafter.controls and not any(NO_TARGET in more[r.name] for r in controls):
        reason = f"no control among the runs: a KV-only drafter of depth {drafter.depth} trained with train.drafter.kv.injection=none"
        command = f"kvshot train {shlex.quote(str(run.folder / 'recipe.yaml'))} name={run.name}-none train.drafter.kv.injection=none"
        found.append(Comparison(run.name, "its none control", "α₀ and MAT", None, reason=reason, command=command))
    return found


def against_hidden(run: Run, runs: tuple[Run, ...], options: EvalConfig, commands: dict[str, str]) -> list[Comparison]:
    """First and last alpha and MAT of a run that reads the target's KV minus those of runs that read hidden states alone, in the same
    manner (step by step, block-wise): the paper's question. The same for what reads the last layer alone. [] for other runs."""
    drafter = run.drafter
    if drafter is None or run.evaluation is None or NO_TARGET in drafter.controls or (drafter.injection is None and not drafter.last_hidden):
        return []
    family = "dflash" if drafter.blockwise else "hidden_only"
    anchors = _plain(run, [r for r in runs if r.drafter and r.drafter.family == family and r.evaluation and r.name != run.name])
    if not anchors:
        return []
    last = min(len(r.evaluation.alpha) for r in (run, *anchors) if r.evaluation) - 1
    metrics = [_FIRST, (f"α{str(last).translate(_SUBSCRIPTS)}", alpha_at(last)), _MAT] if last else [_FIRST, _MAT]
    return [c for anchor in _of_seed(run, anchors) for c in _between(run, anchor, metrics, options, commands)]


def against_counterpart(run: Run, runs: tuple[Run, ...], options: EvalConfig, commands: dict[str, str]) -> list[Comparison]:
    """alpha_0 and joint MAT of a block-wise run minus those of the runs that read the same of the target step by step, by BLOCK_RULE; of the
    same injection, and then of the same depth, where there are some."""
    drafter = run.drafter
    if drafter is None or run.evaluation is None or not drafter.blockwise:
        return []
    others = [r for r in runs if r.drafter and r.drafter.family == COUNTERPARTS[drafter.family] and r.evaluation and r.drafter.controls == drafter.controls]
    for name in ("injection", "depth"):
        others = [r for r in others if getattr(r.drafter, name) == getattr(drafter, name)] or others
    return [c for other in _of_seed(run, _plain(run, others)) for c in _between(run, other, [_FIRST, _JOINT], options, commands)]


def _alike(first: Drafter, second: Drafter) -> bool:
    return (first.family, first.depth) == (second.family, second.depth)


def _plain(run: Run, others: list[Run]) -> list[Run]:
    """Of `others` those that are no control and read more than the last layer; where there are none, what there is (but what `run` is itself)."""
    plain = [r for r in others if r.drafter and not r.drafter.controls and not r.drafter.last_hidden]
    return plain or ([] if run.drafter and run.drafter.last_hidden else others)


def _of_seed(run: Run, others: list[Run]) -> list[Run]:
    """Those of the run's seed, where there are some."""
    return [r for r in others if r.seed == run.seed] or others


def _between(run: Run, control: Run, metrics: list[tuple[str, Statistic]], options: EvalConfig, commands: dict[str, str]) -> list[Comparison]:
    """The comparisons of one run with another."""
    for side in (run, control):
        if side.evaluation is None or side.conversations is None:
            reason = f"{side.name} has no eval.json with eval_conversations.json"
            return [Comparison(run.name, control.name, name, None, reason=reason, command=commands[side.name]) for name, _ in metrics]
    assert run.evaluation and run.conversations and control.conversations
    first, second, count = common(run.conversations, control.conversations)
    reason = unlike(run, control)
    confidence = run.evaluation.confidence
    return [
        Comparison(run.name, control.name, name, paired_difference(first, second, s, options.bootstrap, confidence, options.seed), confidence, count, reason)
        for name, s in metrics
    ]


def common(first: Conversations, second: Conversations) -> tuple[StepCounts, StepCounts, int]:
    """Both counts on the conversations and steps they share, in one order, and the number of those conversations."""
    at = {key: i for i, key in enumerate(second.keys)}
    pairs = np.array([(i, at[key]) for i, key in enumerate(first.keys) if key in at], dtype=int).reshape(-1, 2)
    steps = min(first.counts.den.shape[-1], second.counts.den.shape[-1])

    def pick(counts: StepCounts, rows: np.ndarray) -> StepCounts:
        return StepCounts.unstack(counts.stack()[:, rows, :steps])

    return pick(first.counts, pairs[:, 0]), pick(second.counts, pairs[:, 1]), len(pairs)


def unlike(run: Run, control: Run) -> str:
    """Names what was not trained alike, '' if everything known is equal."""
    facts = [
        ("steps", _train(run, "steps"), _train(control, "steps")),
        ("supervised rows", _train(run, "supervised_rows"), _train(control, "supervised_rows")),
        ("draft vocabulary", _train(run, "draft_vocab_size"), _train(control, "draft_vocab_size")),
        ("initialisation", _init(run), _init(control)),
        ("seed", run.seed, control.seed),
        *_options(run, control),
    ]
    different = [f"{name} {_words(a)} and {_words(b)}" for name, a, b in facts if a != b]
    return f"not trained alike: {'; '.join(different)}" if different else ""


def _options(run: Run, control: Run) -> Iterable[tuple[str, object, object]]:
    """Objective and optimizer, option by option, where both recipes are there."""
    if run.recipe and control.recipe:
        for part in ("objective", "optim"):
            first, second = getattr(run.recipe.train, part), getattr(control.recipe.train, part)
            yield from ((f"{part}.{name}", getattr(first, name), getattr(second, name)) for name in type(first).model_fields if name not in _SILENT)


def _words(value: Any) -> str:
    """Without the quotes and brackets of Python."""
    return ", ".join(str(v) for v in value if v is not None) if isinstance(value, tuple) else f"{value:,}" if type(value) is int else str(value)


def _train(run: Run, key: str) -> object:
    return run.train.get(key) if run.train else None


def _init(run: Run) -> tuple[str | None, ...] | None:
    return (run.drafter.init_layers, run.drafter.init_head, run.drafter.warm_start) if run.drafter else None
