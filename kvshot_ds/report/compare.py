"""Paired comparisons and the rule that turns an interval into words."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

import numpy as np

from kvshot_ds.config import EvalConfig
from kvshot_ds.metrics import Interval, Statistic, StepCounts, alpha_at, mat_of, paired_difference
from kvshot_ds.report.gather import Conversations, Run

RULE = (
    "A difference is called higher or lower when its interval excludes 0, otherwise not told apart. Both sides are measured on the same held-out "
    "conversations, and each bootstrap draw of conversations is applied to both. No correction is made for the number of comparisons."
)

BIGRAM = "bigram table"
_SUBSCRIPTS = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")


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


def against_bigram(run: Run, command: str) -> Comparison:
    """alpha_0 of the run minus the bigram table's, as eval.json has it."""
    evaluation = run.evaluation
    difference = evaluation.against.get(("bigram", "alpha_0")) if evaluation else None
    if evaluation is None or difference is None:
        return Comparison(run.name, BIGRAM, "α₀", None, reason="no paired difference in eval.json" if evaluation else "no eval.json", command=command)
    return Comparison(run.name, BIGRAM, "α₀", difference, evaluation.confidence, evaluation.conversations)


def against_control(run: Run, runs: tuple[Run, ...], options: EvalConfig, commands: dict[str, str]) -> list[Comparison]:
    """alpha_0 and MAT of a KV-only run minus its control's: KV-only of the same depth and `none` injection,
    of the same seed where there is one. [] for other runs."""
    drafter = run.drafter
    if drafter is None or drafter.family != "kv_only" or drafter.injection == "none":
        return []
    controls = [r for r in runs if (c := r.drafter) and (c.family, c.depth, c.injection) == ("kv_only", drafter.depth, "none")]
    if not controls:
        reason = f"no control among the runs: a KV-only drafter of depth {drafter.depth} trained with train.drafter.kv.injection=none"
        command = f"kvshot train {shlex.quote(str(run.folder / 'recipe.yaml'))} name={run.name}-none train.drafter.kv.injection=none"
        return [Comparison(run.name, "its none control", "α₀ and MAT", None, reason=reason, command=command)]
    alike = [r for r in controls if r.seed == run.seed] or controls
    return [c for control in alike for c in _between(run, control, [("α₀", alpha_at(0)), ("MAT", mat_of)], options, commands)]


def against_hidden(run: Run, runs: tuple[Run, ...], options: EvalConfig, commands: dict[str, str]) -> list[Comparison]:
    """First and last alpha and MAT of a run that reads the target's KV minus those of hidden-only runs, of the same seed where
    there is one: the paper's question. [] for other runs."""
    drafter = run.drafter
    if drafter is None or drafter.family == "hidden_only" or drafter.injection == "none":
        return []
    anchors = [r for r in runs if r.drafter and r.drafter.family == "hidden_only" and r.evaluation]
    if not anchors or run.evaluation is None:
        return []
    last = min(len(r.evaluation.alpha) for r in (run, *anchors) if r.evaluation) - 1
    metrics = [("α₀", alpha_at(0)), (f"α{str(last).translate(_SUBSCRIPTS)}", alpha_at(last)), ("MAT", mat_of)]
    alike = [r for r in anchors if r.seed == run.seed] or anchors
    return [c for anchor in alike for c in _between(run, anchor, metrics, options, commands)]


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
    ]
    different = [f"{name} {a} and {b}" for name, a, b in facts if a != b]
    return f"not trained alike: {'; '.join(different)}" if different else ""


def _train(run: Run, key: str) -> object:
    return run.train.get(key) if run.train else None


def _init(run: Run) -> tuple[str, str] | None:
    return (run.drafter.init_layers, run.drafter.init_head) if run.drafter else None
