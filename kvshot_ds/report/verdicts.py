"""The paper's predictions (KVShot, arXiv 2604.26412), each with a verdict by one rule on intervals over seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kvshot_ds.metrics import Spread
from kvshot_ds.report import blocks as b
from kvshot_ds.report.blocks import NONE, Block, Cell, Row, Table, Text

Verdict = Literal["holds", "does not hold", "not decidable here"]
Standing = Literal["as predicted", "the other way", "negligible", "open"]
SEEDS = 3  # fewer say nothing of what another seed would give

RULE = (
    "A prediction is a list of differences, each of which must lie on the predicted side of 0. It holds when the interval of every one of them does. It "
    "does not hold when the interval of one of them lies on the other side, or holds 0 and lies within the stated margin, so that the difference, if "
    "there is one, is too small to matter. Otherwise it is not decidable here, and what is missing is said: a cell, a diagnostic, seeds (fewer than 3), "
    "or narrower intervals. Intervals are over seeds, paired seed by seed and, where a rate over conversations is meant, conversation by conversation; "
    "those of a prediction hold together with the stated confidence (Bonferroni over all its differences, also those that were not measured). Nothing "
    "is corrected across predictions. A verdict is about this target, this data and this scale."
)


@dataclass(frozen=True)
class Need:
    """One difference that a prediction requires. what: in words; sign: the predicted side; margin: a difference smaller than this does not matter.

    spread: what was measured, at the prediction's confidence; None: not measured, for `missing`. alone: seeds that only one of the two sides has.
    """

    what: str
    sign: Literal[1, -1]
    margin: float
    spread: Spread | None
    missing: str = ""
    paper: str = ""
    alone: tuple[int, ...] = ()

    @property
    def standing(self) -> Standing:
        """By RULE; an end of the interval that is exactly 0 or exactly the margin decides nothing."""
        s = self.spread
        if s is None or s.seeds < SEEDS or s.low is None or s.high is None:
            return "open"
        if s.low > 0 or s.high < 0:
            return "as predicted" if (s.low > 0) == (self.sign > 0) else "the other way"
        return "negligible" if -self.margin < s.low and s.high < self.margin else "open"

    @property
    def gap(self) -> str:
        """What it takes to decide an open one."""
        s = self.spread
        if s is None:
            return self.missing
        if s.seeds < SEEDS:
            return f"seeds: {s.seeds} of at least {SEEDS}"
        return "no interval" if s.low is None else "its interval holds 0 and is wider than the margin"


@dataclass(frozen=True)
class Prediction:
    """What the paper says, and the differences it comes to here. name: short; text: the paper's words in ours; cells: how the cells were chosen."""

    name: str
    text: str
    cells: str
    needs: tuple[Need, ...]
    confidence: float

    @property
    def verdict(self) -> Verdict:
        return judge(self.needs)


def judge(needs: Sequence[Need]) -> Verdict:
    """RULE. Raises ValueError without anything to judge by."""
    if not needs:
        raise ValueError("a verdict without a single difference")
    standings = {need.standing for need in needs}
    if standings & {"the other way", "negligible"}:
        return "does not hold"
    return "not decidable here" if "open" in standings else "holds"


def each(confidence: float, needs: int) -> float:
    """Confidence of each of `needs` intervals that hold together with `confidence` (Bonferroni)."""
    return 1 - (1 - confidence) / needs


_TONES: dict[str, Literal["", "good", "bad"]] = {"holds": "good", "as predicted": "good", "does not hold": "bad", "the other way": "bad", "negligible": "bad"}


def blocks(predictions: Sequence[Prediction]) -> list[Block]:
    """The rule, the verdicts at a glance, and of each the differences it rests on."""
    rows = []
    for p in predictions:
        met = Cell(f"{sum(need.standing == 'as predicted' for need in p.needs)} of {len(p.needs)}")
        rows.append(Row((Cell(p.name), met, Cell(p.verdict), Cell(why(p))), _TONES.get(p.verdict, "")))
    head = ("prediction", "as predicted", "verdict", "because")
    out: list[Block] = [Text(RULE), Table("The paper's predictions, and whether they hold here", head, tuple(rows), words=4, ident="verdicts")]
    for p in predictions:
        out += [Text(f"{p.name}. {p.text} Cells: {p.cells}."), _needs(p)]
    return out


def why(p: Prediction) -> str:
    """What the verdict rests on, in words."""
    if p.verdict == "holds":
        return "every difference lies on the predicted side"
    if p.verdict == "does not hold":
        return "; ".join(f"{need.what}: {need.standing}" for need in p.needs if need.standing in ("the other way", "negligible"))
    return "; ".join(f"{need.what}: {need.gap}" for need in p.needs if need.standing == "open")


def _needs(p: Prediction) -> Table:
    rows = []
    for need in p.needs:
        s = need.spread
        words = (
            Cell(need.what),
            Cell("above 0" if need.sign > 0 else "below 0", f"matters from {need.margin:g}"),
            Cell(need.standing, _open(need)),
            Cell(need.paper),
        )
        measured = (NONE, NONE, NONE)
        if s is not None:
            alone = f"not of both: seed {', '.join(map(str, need.alone))}" if need.alone else ""
            measured = (Cell(b.signed(s.value), value=s.value, low=s.low, high=s.high), Cell(b.bounds(s)), Cell(str(s.seeds), alone, s.seeds))
        rows.append(Row((*words, *measured), _TONES.get(need.standing, "")))
    level = f"{100 * each(p.confidence, len(p.needs)):.4g}% interval"
    head = ("difference", "predicted", "found", "the paper (Qwen3-8B)", "value", level, "seeds")
    caption = f"{p.name}: {p.verdict}. {'The interval holds' if len(p.needs) == 1 else f'All {len(p.needs)} intervals hold together'} with {p.confidence:.0%}"
    return Table(caption, head, tuple(rows), words=4, ident=p.name)


def _open(need: Need) -> str:
    return need.gap if need.standing == "open" else ""
