"""What ranks tell of themselves, and the sentence that is passed on all of them when one is gone, stuck or failed."""

from __future__ import annotations

from dataclasses import dataclass

from kvshot_ds.errors import KvshotError, Preempted

_NAMED = 4  # ranks that one line names
AGAIN = "the same command continues from the newest checkpoint"


@dataclass(frozen=True)
class Sign:
    """A rank of itself. beats: how often it made progress; where: the line of this package that runs; waiting: inside a collective, for other ranks."""

    rank: int
    host: str
    pid: int
    beats: int = 0
    phase: str = "start"
    step: int = 0
    where: str = ""
    waiting: bool = False

    @property
    def name(self) -> str:
        return f"rank {self.rank} ({self.host}, pid {self.pid})"

    @property
    def place(self) -> str:
        return f"in phase {self.phase}{f', step {self.step}' if self.step else ''}"


@dataclass(frozen=True)
class Verdict:
    """Why all ranks end, and with which exit status. rank: the cause, or one of `ranks` of them.

    stuck: the work of the ranks will not end by itself. told: the cause tells its users itself.
    """

    text: str
    status: int
    ranks: tuple[int, ...]
    stuck: bool = False
    told: bool = False

    @property
    def elsewhere(self) -> str:
        """What the ranks say that are not the cause."""
        return f"stops with rank {self.ranks[0]}, which says: {self.text.partition(chr(10))[0][:200]}" if self.told else self.text


def of_end(sign: Sign) -> Verdict:
    """A process that ended without a word."""
    text = (
        f"{sign.name} is gone: its process ended without a word (killed, or out of memory: the log of its host says more), last heard of {sign.place}; {AGAIN}"
    )
    return Verdict(text, 2, (sign.rank,))


def of_hang(signs: list[Sign], silent: list[Sign], seconds: float) -> Verdict:
    """A run without progress for so long. silent: ranks of which nothing is heard any more, not even by their watchdogs."""
    named = silent or [s for s in signs if not s.waiting] or signs
    state = "no sign of life from" if silent else "no progress of"
    each = "; ".join(f"{s.name} {s.place}{f', at {s.where}' if s.where else ''}" for s in named[:_NAMED])
    more = f" and {len(named) - _NAMED} more" if len(named) > _NAMED else ""
    others = f", for which {len(signs) - len(named)} other(s) wait" if len(signs) > len(named) else ""
    text = f"for {_span(seconds)} {state} {each}{more}{others}; {AGAIN} (train.hang_minutes sets the time)"
    return Verdict(text, 2, tuple(s.rank for s in named), stuck=True)


def of_error(sign: Sign, error: BaseException) -> Verdict:
    """A rank whose work ends by an error; the text of one meant for users is kept word for word."""
    if isinstance(error, KvshotError):
        return Verdict(str(error), Preempted.STATUS if isinstance(error, Preempted) else 2, (sign.rank,), told=True)
    if isinstance(error, KeyboardInterrupt):
        return Verdict(f"{sign.name} was interrupted {sign.place}", 130, (sign.rank,))
    return Verdict(f"{sign.name} failed {sign.place}: {type(error).__name__}: {str(error).partition(chr(10))[0][:200]}; {AGAIN}", 1, (sign.rank,))


def of_stop(sign: Sign, reason: str) -> Verdict:
    """A rank asked to stop before the first step, whose work does not hear it."""
    return Verdict(f"{sign.name}: {reason} before the first step; the same command starts again", Preempted.STATUS, (sign.rank,), stuck=True)


def _span(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
