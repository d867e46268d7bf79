"""Training against serving: MAT, joint MAT and tau of each drafter side by side, and why they differ, one reason at a time."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from kvshot_ds.metrics import Interval
from kvshot_ds.report import blocks as b
from kvshot_ds.report.blocks import NONE, Block, Bullets, Cell, Row, Table, Text
from kvshot_ds.report.decoded import ServingCheck
from kvshot_ds.report.gather import Run

_RUNGS = ("same", "retaken", "text", "starts", "decoded")
_HEAD = (
    "drafter", "check", "MAT, held-out", "joint MAT, held-out", "of the decoded conversations", "features of now", "decoded texts, all rows",
    "rows where rounds began", "real decoding", "τ of the check", "τ of kvshot decode",
)  # fmt: skip
_HOW = (
    "Tokens a round, from what training promises to what serving gives. MAT and joint MAT are measured on held-out rows, teacher-forced; τ in real decoding. "
    "They differ by right: each column changes one thing, and the second table gives each difference its reason. Two differences must vanish, as the same rows "
    "are asked the same question twice: features stored and taken anew, rows teacher-forced and decoded. kvshot eval --serving-check judges those two, and "
    "fails a drafter that serving feeds otherwise than training did."
)
# difference -> what it is called, and its reason
_REASONS = {
    "joint": (
        "joint MAT − MAT",
        "MAT multiplies the shares of the steps, as if a row's steps were independent of each other, and at each step the drafter is given the true "
        "tokens, also where it has just been wrong. Joint MAT counts a row only as long as all its steps are right, where the true tokens are its own. "
        "Rows that are easy are easy at every step, so that joint MAT is mostly the higher one.",
    ),
    "steps": ("fewer draft steps", "The check sums over the steps at which all its answers have a token to judge by."),
    "conversations": ("other conversations", "Those that were decoded instead of all that are held out."),
    "features": (
        "features of now − stored",
        "The same rows. It must vanish: what is left is how features are stored and in which dtype the target runs.",
    ),
    "text": (
        "decoded texts − given answers",
        "The target's own greedy text, up to a given length, instead of the held-out answers: another text is easier or harder.",
    ),
    "starts": (
        "where rounds begin − all rows",
        "A long accepted run is one round but many rows, and a round begins where the one before has failed: decoding asks about hard positions more often.",
    ),
    "path": (
        "real decoding − the same rows, teacher-forced",
        "It must vanish: the decoder gives the drafter what training gave it, up to ties within rounding.",
    ),
    "ends": (
        "τ − joint MAT of decoding",
        "τ divides all tokens by all rounds. The last rounds of an answer have fewer tokens left to commit; joint MAT leaves such steps out of its "
        "denominators.",
    ),
    "decode": (
        "τ of kvshot decode − τ of the check",
        "Other prompts, lengths, another way of drafting, or samples in place of greedy text: kvshot decode does what the recipe's section decode says.",
    ),
}


@dataclass(frozen=True)
class Term:
    """One difference of a run. judged: it must vanish; note: what is special to this run."""

    reason: str
    difference: Interval
    judged: bool = False
    note: str = ""


def serving_blocks(runs: tuple[Run, ...]) -> list[Block]:
    """The two tables, what failed, and which runs were not checked; [] if nothing was measured on either side."""
    shown = [run for run in runs if run.serving or (run.evaluation and run.decoding)]
    gaps: list[Block] = [_unchecked(run) for run in runs if run.evaluation and not run.serving]
    if not shown:
        return gaps or [b.missing("training against serving", "eval --serving-check")]
    failed = [(run, run.serving) for run in shown if run.serving and not run.serving.passed]
    alarms: list[Block] = []
    if failed:
        alarms.append(Text("Real decoding and held-out evaluation do not agree: a drafter is served otherwise than it was trained.", "alarm"))
        alarms.append(Bullets(tuple(f"{run.name}: {fault}" for run, check in failed for fault in check.faults)))
    return [Text(_HOW), *alarms, *gaps, _side_by_side(shown), _reasons(shown)]


def _unchecked(run: Run) -> Text:
    return Text(f"serving check of {run.name}", "missing", f"kvshot eval {shlex.quote(str(run.folder / 'recipe.yaml'))} --serving-check")


def _side_by_side(runs: list[Run]) -> Table:
    rows = []
    for run in runs:
        e, check, d = run.evaluation, run.serving, run.decoding
        measured = (b.measured(e.mat, 2, "MAT"), b.measured(e.mat_joint, 2, "MAT")) if e else (NONE, NONE)
        rungs = [b.measured(check.joint_mat[rung], 2, "MAT") if check else NONE for rung in _RUNGS]
        tau = b.measured(check.tau, 2, "τ") if check else NONE
        decoded = b.measured(d.tau, 2, "τ") if d else NONE
        rows.append(
            Row((Cell(run.name, _setting(check)), _verdict(check), *measured, *rungs, tau, decoded), "alarm" if check and not check.passed else "", run.style)
        )
    return Table("From training's number to serving's: tokens a round, intervals below", _HEAD, tuple(rows), words=2)


def _setting(check: ServingCheck | None) -> str:
    return f"{check.conversations} conversations, {check.max_new_tokens} new tokens, {check.steps} steps, {check.dtype}" if check else ""


def _verdict(check: ServingCheck | None) -> Cell:
    if check is None:
        return NONE
    return Cell("passed" if check.passed else "FAILED", f"{check.rounds_different} of {b.integer(check.rounds)} rounds differ")


def _reasons(runs: list[Run]) -> Table:
    rows = []
    for run in runs:
        for term in terms(run):
            name, reason = _REASONS[term.reason]
            d = term.difference
            value = Cell(b.signed(d.value), b.bounds(d) if d.low is not None else "", d.value, low=d.low, high=d.high)
            rows.append(Row((Cell(run.name), Cell(name, "must vanish" if term.judged else ""), Cell(f"{reason} {term.note}".strip()), value), style=run.style))
    return Table("Why the numbers differ", ("drafter", "difference", "reason", "value"), tuple(rows), words=3)


def terms(run: Run) -> Iterator[Term]:
    """The differences of a run from MAT to the tau of kvshot decode, each where both of its sides are measured."""
    e, check, d = run.evaluation, run.serving, run.decoding
    if e:
        yield Term("joint", _plain(e.mat_joint.value, e.mat.value))
    if check:
        if e and check.steps < len(e.joint):
            yield Term("steps", _plain(check.joint_mat["heldout"].value, e.mat_joint.value), note=f"Here {check.steps} of {len(e.joint)}.")
        share = f"{check.agreeing / check.tokens:.0%}" if check.tokens else "none"
        notes = {"text": f"Of the decoded tokens {share} stand before the first that the held-out answer has not."}
        for name, difference in check.differences.items():
            yield Term(name, difference, name in check.judged, notes.get(name, ""))
        yield Term("ends", _plain(check.tau.value, check.joint_mat["decoded"].value))
    if check and d:
        yield Term(
            "decode",
            _plain(d.tau.value, check.tau.value),
            note=f"Here {d.prompts} prompts, {d.max_new_tokens} new tokens, a {d.drafted_by}{f', {d.sampled}; the check is greedy' if d.sampled else ''}.",
        )


def _plain(a: float | None, other: float | None) -> Interval:
    return Interval(None if a is None or other is None else a - other, None, None)
