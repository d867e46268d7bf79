"""A thread beside the work of each rank that ends the rank when the run is stuck or a rank is gone, whatever the work is doing.

Each thread holds one connection to that of rank 0 and sends a sign every few seconds. A process that ends without a word closes its connection, which
is noticed at once. A run in which no rank has made progress for long is stuck: ranks that wait for one that works are not. What rank 0 settles, all
carry out; if rank 0 itself is gone or silent, each of the others sees that. Beside the assignments of `Pulse` the work pays nothing.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from types import FrameType
from typing import Any

from kvshot_ds.training import verdict
from kvshot_ds.training.verdict import Sign, Verdict

GRACE = 10.0  # for the work to end by itself once it has to; a launcher that ends its ranks gives 30 [s]
_TICK = 5.0  # between two signs, at most [s]
_STRANGER = 5  # for who connects to show that it knows the key [s]
_PATIENCE = 5.0  # for the reason of an error that may be another rank's doing [s]
_PACKAGE = str(Path(__file__).parents[1])
_REFUSED = (OSError, EOFError, AuthenticationError, ValueError)  # the last: a system that forbids the MD5 of Python 3.11's handshake
_DEBUGGERS = ("pdb", "bdb", "pydevd", "_pydevd", "debugpy")


class Pulse:
    """What the work notes for the thread to read."""

    def __init__(self) -> None:
        self.beats, self.phase, self.step = 0, "start", 0


@dataclass
class _Seen:
    """A rank's last sign, and when it came and when one brought news of progress, on the clock of the thread [s]."""

    sign: Sign
    heard: float
    moved: float


class Watchdog:
    """Watches the thread that makes it, from `start` to `close`, and other ranks once it is linked. hang: a time without progress that is too long [s]."""

    def __init__(self, pulse: Pulse, hang: float):
        self.pulse, self.hang, self.tick = pulse, hang, min(_TICK, hang / 6)
        self.rank, self._work = int(os.environ.get("RANK", "0")), threading.get_ident()
        self.verdict: Verdict | None = None
        self.linked, self.settled, self._left = threading.Event(), threading.Event(), threading.Event()
        self._closing: list[Verdict | None] = []  # what the work ended with, once it has
        self._joined: list[Connection] = []  # to rank 0, so far
        self._links: dict[Connection, int] = {}  # to whom; -1: not known yet
        self._seen: dict[int, _Seen] = {}
        self._dialled: tuple[str, int, bytes, int] | None = None
        self._now = self._due = 0.0
        self._signalled: tuple[str, float] | None = None  # which one, and by when the work should have heard it
        self._debugged = 0
        self._ear, self.bell = socket.socketpair()
        self._ear.setblocking(False)
        self.bell.setblocking(False)  # signal.set_wakeup_fd wants it
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def listen(self, host: str, others: int, key: bytes) -> int:
        """Rank 0: waits, in the background, for so many ranks that know `key`. Returns the port."""
        listener = Listener((host, 0), backlog=others, authkey=key)
        # What it accepts inherits this on Linux: a stranger who says nothing does not keep the ranks out.
        _patience(listener._listener._socket.fileno(), _STRANGER)  # type: ignore[attr-defined]

        def accept() -> None:
            with listener:
                left = others
                while left:
                    with suppress(*_REFUSED):  # a stranger, or nobody for a while
                        link = listener.accept()
                        _patience(link.fileno(), 0)
                        self._joined.append(link)
                        left -= 1
                        self._ring()
                self.linked.set()

        threading.Thread(target=accept, name="watchdog-accept", daemon=True).start()
        return int(listener.address[1])

    def dial(self, host: str, port: int, key: bytes, pid: int) -> None:
        """Other ranks: connects, in the background, to rank 0, which is process `pid` on `host`."""
        self._dialled = (host, port, key, pid)
        self._ring()

    def close(self, error: BaseException | None, doubtful: bool) -> Verdict | None:
        """The work has ended, with `error`. Returns what was settled for all ranks: the first of their errors, or what the watchdogs saw.

        doubtful: the error may be the doing of another rank, of which the watchdogs know more in a moment.
        """
        if self._left.is_set():
            return self.verdict
        self._left.set()
        if doubtful and self._links:
            self.settled.wait(_PATIENCE)
        self._closing.append(verdict.of_error(self._sign(), error) if error is not None else None)
        self._ring()
        if error is not None:
            self.settled.wait(_PATIENCE)
        self._thread.join(_PATIENCE)
        if not self._thread.is_alive():
            self._ear.close()
            self.bell.close()
        return self.verdict

    def _ring(self) -> None:
        with suppress(BlockingIOError):  # so many bytes wake it anyway
            self.bell.send(b"\0")

    # From here on: the thread.

    def _run(self) -> None:
        self._due, clock = 0.0, time.monotonic()
        while self.verdict is None and not (self._closing and self._leave()):
            ready = wait([self._ear, *self._links], self.tick)
            # Time goes on by no more than two ticks a turn: a process that was suspended, or a laptop put to sleep, has missed nothing.
            elapsed, clock = time.monotonic() - clock, time.monotonic()
            self._now += min(elapsed, 2 * self.tick)
            for one in ready:
                if one is self._ear:
                    self._woken()
                elif one in self._links:
                    self._hear(one)
            if self._now >= self._due and self.verdict is None:
                self._due = self._now + self.tick
                self._look()
        if self.verdict is not None:
            self._carry_out(self.verdict)

    def _woken(self) -> None:
        numbers = set(self._ear.recv(4096)) - {0}
        if numbers and self._signalled is None and self.pulse.phase == "start":
            self._signalled = signal.Signals(min(numbers)).name, self._now + GRACE
        if self._dialled:
            (host, port, key, pid), self._dialled = self._dialled, None
            self._note(Sign(0, host, pid))
            try:
                self._links[Client((host, port), authkey=key)] = 0
            except _REFUSED as error:
                _say(f"no connection to the watchdog of rank 0 at {host}:{port} ({error}): a rank that hangs is noticed by the limits of collectives only")
            self.linked.set()
        while self._joined:
            self._links[self._joined.pop()] = -1
        self._due = 0.0

    def _look(self) -> None:
        """Every tick: a sign to rank 0, and judgement."""
        mine = self._sign()
        self._note(mine)
        if self.rank:
            for link in list(self._links):
                self._send(link, {"sign": asdict(mine)})
        if self._signalled and self.pulse.phase == "start" and self._now >= self._signalled[1]:
            self._settle(verdict.of_stop(mine, self._signalled[0]))
            return
        signs = [seen.sign for seen in self._seen.values()]
        if self.rank == 0:
            silent = [seen.sign for seen in self._seen.values() if self._now - seen.heard > self.hang / 2]
            if (still := self._now - max(seen.moved for seen in self._seen.values())) > self.hang:
                self._settle(verdict.of_hang(signs, silent, still))
        elif self._links and (still := self._now - self._seen[0].heard) > 1.5 * self.hang:  # later than rank 0 would say it
            self._settle(verdict.of_hang(signs, [self._seen[0].sign], still))

    def _hear(self, link: Connection) -> None:
        try:
            message: dict[str, Any] = json.loads(link.recv_bytes(1 << 16))
        except (EOFError, OSError):
            self._lost(link)
            return
        if "verdict" in message:
            found = message["verdict"]
            self._settle(Verdict(**{**found, "ranks": tuple(found["ranks"])}))
        elif "sign" in message:
            sign = Sign(**message["sign"])
            self._links[link] = sign.rank
            self._note(sign)
            if self.rank == 0:
                self._send(link, {"sign": asdict(self._sign())})
        else:  # it has ended, and all is well
            self._seen.pop(self._links.pop(link), None)

    def _note(self, sign: Sign) -> None:
        before = self._seen.get(sign.rank)
        moved = before.moved if before and before.sign.beats == sign.beats else self._now
        self._seen[sign.rank] = _Seen(sign, self._now, moved)

    def _lost(self, link: Connection) -> None:
        seen = self._seen.get(self._links.pop(link, -1))
        if seen and self.verdict is None:
            self._settle(verdict.of_end(seen.sign))

    def _send(self, link: Connection, message: dict[str, Any]) -> None:
        with suppress(OSError):  # it is gone; what it had to say can still be read, then its end
            link.send_bytes(json.dumps(message).encode())

    def _leave(self) -> bool:
        """The work has ended: tells the others. True if there is nothing left to do."""
        if self._joined or self._dialled:
            return False  # first things first
        mine = self._closing[0]
        if mine is None:
            for link in self._links:
                self._send(link, {})
            return True
        if self.rank == 0 or not self._links:
            self._settle(mine)
            return True
        if len(self._closing) == 1:  # once; rank 0 settles it and says so
            self._closing.append(None)
            for link in self._links:
                self._send(link, {"verdict": asdict(mine)})
        return False

    def _settle(self, found: Verdict) -> None:
        self.verdict = found
        if self.rank == 0:
            for link in self._links:
                self._send(link, {"verdict": asdict(found)})
        self.settled.set()

    def _carry_out(self, found: Verdict) -> None:
        """Ends the process, unless the work ends by itself (and then says why)."""
        if self._left.wait(0 if found.stuck else GRACE):
            return
        text = found.elsewhere
        if found.stuck and self.rank in found.ranks:
            text += "\n" + "".join(traceback.format_stack(sys._current_frames().get(self._work)))
        _say(text)
        os._exit(found.status)

    def _sign(self) -> Sign:
        frames = list(_frames(sys._current_frames().get(self._work)))
        inner = list(itertools.takewhile(lambda frame: _collective(frame) or not frame.f_code.co_filename.startswith(_PACKAGE), frames))
        place = frames[len(inner)] if len(inner) < len(frames) else None
        where = f"{Path(place.f_code.co_filename).name}:{place.f_lineno} ({place.f_code.co_name})" if place else ""
        if any(_module(frame).startswith(_DEBUGGERS) for frame in frames):
            self._debugged += 1  # someone is looking: as good as progress
        pulse, waiting = self.pulse, any(map(_collective, inner))
        return Sign(self.rank, socket.gethostname(), os.getpid(), pulse.beats + self._debugged, pulse.phase, pulse.step, where, waiting)


def _patience(socket_file: int, seconds: int) -> None:
    """Lets reading from a socket fail after so long; 0: never."""
    with socket.socket(fileno=os.dup(socket_file)) as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", seconds, 0))


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    """From the innermost outwards."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def _collective(frame: FrameType) -> bool:
    """Whether the frame belongs to a collective. Those that DeepSpeed only waits for show by the stopwatch around each."""
    own = (f"{__package__}.timing", "call"), (f"{__package__}.control", "_answer")
    return _module(frame).startswith(("torch.distributed", "deepspeed.comm")) or (_module(frame), frame.f_code.co_name) in own


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _say(text: str) -> None:
    """In one write, on a line of its own, past Python's buffers, whose locks the stuck work may hold."""
    rank, ranks = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    os.write(2, f"\nkvshot{f' [rank {rank} of {ranks}]' if ranks != '1' else ''}: {text}\n".encode())
