"""Decoding in a thread of its own: one answer at a time, in the order of the requests."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from kvshot_ds.config import SamplingConfig
from kvshot_ds.decoding.rounds import Round
from kvshot_ds.errors import KvshotError
from kvshot_ds.serve.answers import Reason
from kvshot_ds.serve.protocol import ApiError, bad
from kvshot_ds.serve.statistics import Statistics
from kvshot_ds.serve.text import AnswerText


class Decoder(Protocol):
    """What the worker needs of `kvshot_ds.decoding.engine.Engine`."""

    def generate(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, stop: Collection[int] = ()) -> Iterator[dict[int, Round]]: ...


@dataclass(frozen=True)
class Piece:
    """More text of an answer."""

    text: str


@dataclass(frozen=True)
class Finished:
    """The end of an answer. seconds: wall time of its decoding."""

    reason: Reason
    statistics: Statistics
    seconds: float


@dataclass(frozen=True)
class Failed:
    """The end of an answer that did not come about."""

    error: ApiError


Event = Piece | Finished | Failed


@dataclass(eq=False)
class Job:
    """One answer to decode. alone: by the target without the drafter. post: gets its events, in the worker's thread; after a
    `Finished` or `Failed` none follows, and after the job was withdrawn none is of use."""

    prompt: list[int]
    max_new_tokens: int
    sampling: SamplingConfig
    stops: tuple[str, ...]
    alone: bool
    post: Callable[[Event], None]
    withdrawn: threading.Event = field(default_factory=threading.Event)


@dataclass
class Counts:
    """Answers since the start. abandoned: their client went away, or they took too long."""

    answered: int = 0
    abandoned: int = 0
    failed: int = 0


class Worker(threading.Thread):
    """Decodes jobs until it is closed.

    engine(alone, sampling) -> what decodes; decode(tokens) -> text; stop: tokens that end an answer. max_waiting: jobs that
    may wait while one is decoded. current: the job being decoded. A job that fails never ends the worker: what is no KvshotError is
    printed with its traceback.
    """

    def __init__(self, engine: Callable[[bool, SamplingConfig], Decoder], decode: Callable[[list[int]], str], stop: Collection[int], max_waiting: int) -> None:
        super().__init__(name="kvshot-serve", daemon=True)
        self._engine, self._decode, self._stop_tokens, self._max_waiting = engine, decode, stop, max_waiting
        self._changed = threading.Condition()  # its lock may be taken twice by one thread
        self._waiting: deque[Job] = deque()
        self.current: Job | None = None
        self._closed = self.aborted = False
        self.counts = Counts()

    @property
    def load(self) -> tuple[int, int]:
        """Answers being decoded (0 or 1), and those that wait."""
        with self._changed:
            return int(self.current is not None), len(self._waiting)

    def submit(self, job: Job) -> None:
        """Puts a job at the end of the line. Raises ApiError: 429 if too many wait, 503 if the worker is closed."""
        with self._changed:
            if self._closed:
                raise stopping()
            if len(self._waiting) >= self._max_waiting + (self.current is None):
                raise ApiError(
                    429, f"{len(self._waiting)} requests wait already, and no more may (serve.max_waiting); try again later", None, "rate_limit_exceeded"
                )
            self._waiting.append(job)
            self._changed.notify()

    def withdraw(self, job: Job) -> None:
        """Nobody waits for this job any more: it leaves the line, or its decoding stops after the round it is in."""
        job.withdrawn.set()
        with self._changed:
            if job in self._waiting:
                self._waiting.remove(job)
                self._count("abandoned")

    def close(self) -> None:
        """Takes no more jobs; the thread ends once those that it has are through."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def abort(self) -> None:
        """Closes, and ends all jobs at once: the one being decoded after the round it is in."""
        with self._changed:
            self._closed = self.aborted = True
            self._changed.notify()

    def run(self) -> None:
        while (job := self._next()) is not None:
            try:
                self._answer(job)
            except KvshotError as error:  # the engine's view of the limits, which requests are checked against before
                self._fail(job, bad(str(error)))
            except Exception:  # noqa: BLE001 - one answer must not end the server
                traceback.print_exc(file=sys.stderr)
                self._fail(job, ApiError(500, "the decoding failed; the server's own output says why"))
            with self._changed:
                self.current = None

    def _next(self) -> Job | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            if self.aborted:
                for job in self._waiting:
                    self._fail(job, stopping())
                self._waiting.clear()
            self.current = self._waiting.popleft() if self._waiting else None
            return self.current

    def _count(self, what: Literal["answered", "abandoned", "failed"]) -> None:
        with self._changed:
            setattr(self.counts, what, getattr(self.counts, what) + 1)

    def _fail(self, job: Job, error: ApiError) -> None:
        self._count("failed")
        job.post(Failed(error))

    def _answer(self, job: Job) -> None:
        began = time.perf_counter()
        text, found, ended = AnswerText(self._decode, job.stops), Statistics(len(job.prompt)), False
        rounds = self._engine(job.alone, job.sampling).generate([job.prompt], job.max_new_tokens, self._stop_tokens)
        try:
            for committed in rounds:
                if job.withdrawn.is_set():
                    self._count("abandoned")
                    return
                if self.aborted:
                    self._fail(job, stopping())
                    return
                kept, piece, ended = self._take(text, committed[0].tokens)
                found.add(committed[0], kept)
                if piece:
                    job.post(Piece(piece))
                if ended:
                    break
        finally:
            if (close := getattr(rounds, "close", None)) is not None:  # what the engine has hung on the target must go before the next job
                close()
        if rest := text.flush():
            job.post(Piece(rest))
        seconds = time.perf_counter() - began
        reason: Reason = "stop" if ended or text.stopped else "length"
        self._count("answered")
        job.post(Finished(reason, found, seconds))
        print(_line(found, reason, seconds), flush=True)

    def _take(self, text: AnswerText, tokens: Sequence[int]) -> tuple[int, str, bool]:
        """Tokens of a round that belong to the answer, their text, and whether they end it."""
        pieces: list[str] = []
        for number, token in enumerate(tokens, 1):
            if token in self._stop_tokens:  # no text, even where the tokenizer does not take it for a special token
                return number, "".join(pieces), True
            pieces.append(text.push(token))
            if text.stopped:
                return number, "".join(pieces), True
        return len(tokens), "".join(pieces), False


def stopping() -> ApiError:
    return ApiError(503, "the server is being stopped", None, "server_stopping")


def _line(s: Statistics, reason: str, seconds: float) -> str:
    """What the server prints of an answer."""
    tau = "" if s.tau is None else f", {s.tau:.2f} a verification, accepted {s.accepted} of {s.drafted} drafted"
    return f"answered: {s.prompt} + {s.tokens} tokens in {seconds:.2f} s ({s.tokens / seconds:.1f} tokens/s{tau}), {reason}"
