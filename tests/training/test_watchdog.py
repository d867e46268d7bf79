"""When a run is taken to hang and when it is not; what the watchdogs of several ranks settle between them."""

from __future__ import annotations

import socket
import threading

import pytest

from kvshot_ds.errors import ConfigError, KvshotError, Preempted
from kvshot_ds.training import watchdog
from kvshot_ds.training.verdict import Sign, of_hang
from kvshot_ds.training.watchdog import Pulse, Watchdog

HANG = 60.0


class Hub:
    """Rank 0's watchdog, looked through by hand: no thread, and a clock of the test's own."""

    def __init__(self) -> None:
        self.pulse = Pulse()
        self.dog = Watchdog(self.pulse, HANG)
        self.beats: dict[int, int] = {}

    def hear(self, rank: int, progress: bool, waiting: bool = False) -> None:
        self.beats[rank] = self.beats.get(rank, 0) + progress
        self.dog._note(Sign(rank, f"node{rank}", 100 + rank, self.beats[rank], "step", 7, "trainer.py:1 (run_steps)", waiting))

    def after(self, seconds: float) -> str:
        self.dog._now += seconds
        self.dog._look()
        return self.dog.verdict.text if self.dog.verdict else ""


@pytest.fixture
def hub() -> Hub:
    return Hub()


def test_ranks_that_wait_for_one_that_works_do_not_hang(hub):
    """Rank 1 looks through shards for hours; the others wait for it."""
    for _ in range(100):
        hub.hear(1, progress=True)
        hub.hear(2, progress=False, waiting=True)
        assert not hub.after(HANG * 0.9)


def test_the_one_that_does_not_wait_is_named_when_nobody_gets_on(hub):
    for seconds in (0.0, *[HANG / 4] * 5):
        for rank in (1, 2, 3):
            hub.hear(rank, progress=False, waiting=rank != 2)
        text = hub.after(seconds)
    assert text.startswith("for 75 s no progress of ") and "rank 2 (node2, pid 102) in phase step, step 7, at trainer.py:1 (run_steps)" in text
    assert "rank 1 (" not in text and "rank 3 (" not in text and hub.dog.verdict.stuck
    assert 2 in hub.dog.verdict.ranks


def test_a_rank_of_which_nothing_is_heard_is_named_before_those_that_are(hub):
    for seconds in (0.0, *[HANG / 4] * 5):
        hub.hear(1, progress=False)
        if not seconds:
            hub.hear(2, progress=False, waiting=True)
        text = hub.after(seconds)
    assert text.startswith("for 75 s no sign of life from rank 2 (node2, pid 102)") and hub.dog.verdict.ranks == (2,)


def test_many_ranks_make_one_line():
    signs = [Sign(rank, "node", rank) for rank in range(64)]
    text = of_hang(signs, [], 1800.0).text
    assert "rank 3 (node, pid 3)" in text and "rank 4 (" not in text and "and 60 more" in text and "for 30 min" in text


def test_a_debugger_at_work_is_progress(hub):
    hub.after(0)
    space = {"__name__": "pdb", "look": lambda: hub.after(HANG * 0.9)}
    for _ in range(5):
        assert not eval("look()", space)  # a frame of the module pdb


def test_time_in_which_the_process_was_suspended_does_not_count(monkeypatch):
    """Ctrl-Z, a closed lid, a paused machine: the clock of the watchdog's thread goes on by two ticks at most."""
    clock = [0.0]
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: clock[0])
    dog = Watchdog(Pulse(), HANG)
    turns = []

    def wait(objects: object, timeout: float) -> list[object]:
        turns.append(timeout)
        clock[0] += 10 * HANG
        if len(turns) == 3:
            dog._closing.append(None)
        return []

    monkeypatch.setattr(watchdog, "wait", wait)
    dog._run()
    assert len(turns) == 3 and dog.verdict is None and dog._now == pytest.approx(6 * dog.tick)


def test_a_rank_hears_nothing_of_rank_0_any_more(monkeypatch):
    dog = Watchdog(Pulse(), HANG)
    dog.rank, dog._links = 1, {object(): 0}  # type: ignore[dict-item]
    monkeypatch.setattr(dog, "_send", lambda link, message: None)
    dog._note(Sign(0, "node0", 100))
    dog._now = HANG
    dog._look()
    assert dog.verdict is None
    dog._now = 2 * HANG
    dog._look()
    assert dog.verdict is not None and "no sign of life from rank 0 (node0, pid 100)" in dog.verdict.text


@pytest.fixture
def linked(monkeypatch):
    """Watchdogs of three ranks, with threads, in this process; none ends it."""
    monkeypatch.setattr(watchdog, "GRACE", 1e6)
    monkeypatch.setattr(watchdog, "_STRANGER", 1)
    dogs = [Watchdog(Pulse(), 3600.0) for _ in range(3)]
    for rank, dog in enumerate(dogs):
        dog.rank = rank
        dog.start()
    port = dogs[0].listen("127.0.0.1", 2, b"secret")
    with socket.create_connection(("127.0.0.1", port)):
        pass  # a stranger
    with socket.create_connection(("127.0.0.1", port)):  # one that stays, and says nothing
        for dog in dogs[1:]:
            dog.dial("127.0.0.1", port, b"secret", 100)
        assert all(dog.linked.wait(120) for dog in dogs)
    yield dogs
    for dog in dogs:
        dog.close(None, False)


def test_the_first_error_is_settled_for_all(linked):
    found = linked[1].close(ConfigError("what was wrong"), False)
    assert found is not None and (found.text, found.status, found.ranks, found.told) == ("what was wrong", 2, (1,), True)
    for dog in linked:
        assert dog.settled.wait(120) and dog.verdict == found
    assert linked[2].close(KvshotError("another"), False) == found


def test_a_collective_that_fails_waits_for_the_reason(linked):
    linked[1].pulse.step = 5
    late = threading.Timer(0.5, linked[1].close, (Preempted("asked"), False))
    late.start()
    found = linked[2].close(RuntimeError("Connection closed by peer"), True)
    assert found is not None and found.text == "asked" and found.status == Preempted.STATUS
    late.join()
