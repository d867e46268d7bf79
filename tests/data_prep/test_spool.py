"""What is kept does not depend on the order of the sources, is nested, and survives a kill."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.cleaning import Dropped, Outcome, make_cleaner
from data_prep.overlap import near_grams
from data_prep.parallel import Processes
from data_prep.sources import Conversation, Quarantined
from data_prep.spool import DUPLICATE, NEAR, Spool, mixture
from kvshot_ds.config import CleaningConfig
from kvshot_ds.errors import KvshotError

STABLE = settings(derandomize=True, deadline=None, max_examples=40, database=None)


def talk(text: str, line: int = 1, file: str = "f") -> Conversation:
    return Conversation(({"role": "user", "content": text}, {"role": "assistant", "content": "Yes."}), file, line)


def filled(path: Path, *sources: list[Conversation], near: float = 0.8, unique: bool = True) -> Spool:
    clean = make_cleaner(CleaningConfig(near_duplicates=near, exact_duplicates=unique), answers=True)
    spool = Spool(path).__enter__()
    with spool.stage("read"):
        for n, conversations in enumerate(sources):
            spool.add(clean(conversations), n, "read", unique)
    with spool.stage("near"):
        if near:
            spool.drop_near(near, "near")
    return spool


def kept(spool: Spool) -> list[str]:
    return [stored.id for stored in spool.in_order()]


def variants(draw: random.Random, count: int) -> list[str]:
    """Texts of which many are near duplicates of others."""
    bases = [" ".join(draw.choices([f"w{n}" for n in range(400)], k=60)) for _ in range(max(1, count // 4))]
    found = []
    for n in range(count):
        words = draw.choice(bases).split()
        for _ in range(draw.choice((0, 1, 1, 2, 20))):
            words[draw.randrange(len(words))] = f"x{n}"
        found.append(" ".join(words))
    return found


@STABLE
@given(seed=st.integers(0, 10_000), count=st.integers(1, 60), limit=st.integers(1, 40), parts=st.integers(1, 4))
def test_the_set_for_n_lies_in_the_set_for_2n_whatever_the_order_of_the_sources(seed: int, count: int, limit: int, parts: int) -> None:
    draw = random.Random(seed)
    talks = [talk(text, n) for n, text in enumerate(variants(draw, count))]
    found: list[list[str]] = []
    for wanted in (limit, 2 * limit, 2 * limit, None):
        draw.shuffle(talks)
        spool = filled(Path(":memory:"), *(talks[n::parts] for n in range(parts)))
        spool.select([None] * parts, wanted)
        found.append(kept(spool))
        assert sum(spool.sizes()) + sum(spool.rules().values()) == count
        spool.__exit__()
    small, large, again, whole = found
    assert large == again and small == large[:limit] and large == whole[: 2 * limit] and whole == sorted(whole)


def test_near_duplicates_are_those_of_a_slow_greedy_search(tmp_path: Path) -> None:
    talks = [talk(text, n) for n, text in enumerate(variants(random.Random(3), 200))]
    grams = {c.id: set(near_grams(m["content"] for m in c.messages).tolist()) for c in talks}
    slow: list[str] = []
    for id in sorted(grams):
        if all(len(grams[id] & grams[other]) / len(grams[id] | grams[other]) < 0.8 for other in slow):
            slow.append(id)
    spool = filled(tmp_path / "s.sqlite", talks)
    spool.select([None], None)
    found = kept(spool)
    assert len(slow) < 0.9 * len(grams)
    assert set(slow) <= set(found) and len(found) <= len(slow) + 2, "MinHash may miss a pair at the threshold, never invent one"
    rows = list(spool.dropped())
    assert {row["rule"] for row in rows} <= {NEAR, DUPLICATE}
    assert any(row["reason"].startswith("like f:") for row in rows)


def test_exact_duplicates_stay_with_the_first_source_or_get_an_id_of_their_own(tmp_path: Path) -> None:
    spool = filled(tmp_path / "a.sqlite", [talk("A", 1, "x")], [talk("A", 7, "y"), talk("B", 8, "y")])
    spool.select([None, None], None)
    assert [(s.conversation.file, s.conversation.line) for s in spool.in_order()] in ([("x", 1), ("y", 8)], [("y", 8), ("x", 1)])
    (dropped,) = spool.dropped()
    assert (dropped["rule"], dropped["file"], dropped["line"], dropped["reason"]) == (DUPLICATE, "y", 7, "the same messages as x:1")
    spool = filled(tmp_path / "b.sqlite", [talk("A", n) for n in range(5)], near=0, unique=False)
    spool.select([None], None)
    ids = kept(spool)
    assert len(set(ids)) == 5 and talk("A").id in ids and all(len(id) == 32 for id in ids)
    assert {s.conversation.id for s in spool.in_order()} == {talk("A").id}


@STABLE
@given(
    weights=st.lists(st.floats(0.05, 10), min_size=1, max_size=5),
    data=st.data(),
)
def test_mixtures_are_exact_nested_and_the_largest(weights: list[float], data: Any) -> None:
    available = data.draw(st.lists(st.integers(0, 300), min_size=len(weights), max_size=len(weights)))
    largest = mixture(weights, available, None)
    before = [0] * len(weights)
    for limit in range(sum(largest) + 1):
        now = mixture(weights, available, limit)
        assert sum(now) == limit and all(a <= b for a, b in zip(before, now, strict=True))
        before = now
    assert before == largest == mixture(weights, available, sum(available) + 1)
    assert all(n <= most for n, most in zip(largest, available, strict=True))
    total = sum(largest)
    for n, weight in zip(largest, weights, strict=True):
        assert abs(n - total * weight / sum(weights)) <= max(1.0, (len(weights) - 1) / 2), "to rounding"
    if 0 not in available:
        assert any(n == most for n, most in zip(largest, available, strict=True)) or not total


def test_a_mixture_takes_the_lowest_ids_of_each_source(tmp_path: Path) -> None:
    sources = [[talk(f"{name} {n}", n, name) for n in range(40)] for name in ("one", "two")]
    spool = filled(tmp_path / "s.sqlite", *sources)
    spool.select([3.0, 1.0], None)
    counts = Counter(s.conversation.file for s in spool.in_order())
    assert counts["one"] == 40 and counts["two"] in (13, 14)
    two = sorted(c.id for c in sources[1])[: counts["two"]]
    assert {s.id for s in spool.in_order() if s.conversation.file == "two"} == set(two)
    assert spool.sizes() == (sum(counts.values()), 80 - sum(counts.values()))


def test_order_and_answers(tmp_path: Path) -> None:
    talks = [talk("w" * n, n) for n in (3, 30, 7, 30)][:3]
    spool = filled(tmp_path / "s.sqlite", talks, near=0)
    spool.select([None], None)
    assert [len(c.messages[0]["content"]) for c in spool.longest_first()] == [30, 7, 3]
    spool.store_answers(0, [{"id": talks[1].id, "answers": [[1, 2]], "reason": "", "texts": []}])
    assert spool.done("answers") == {0}
    assert spool.answers_of([talks[1]])[0]["answers"] == [[1, 2]]
    assert {s.id: s.answered for s in spool.in_order() if s.answered} == {talks[1].id: {"id": talks[1].id, "answers": [[1, 2]], "reason": "", "texts": []}}
    spool.store_unit("prompts", 4, ["a\ud83d", None])
    assert spool.unit("prompts", 4) == ["a\ud83d", None] and spool.unit("prompts", 5) is None


def test_counts_and_what_is_left_out(tmp_path: Path) -> None:
    with Spool(tmp_path / "s.sqlite") as spool:
        outcomes = [Outcome(Quarantined("b", 2, "bad", "x")), Outcome(Quarantined("a", 9, "bad", "x")), Outcome(Dropped("a", 1, "languages", "fr", "x"))]
        spool.add([*outcomes, Outcome(talk("A"), ("html",))], 0, "read")
        assert spool.counts("read") == 4 and spool.counts_like("mended ") == {"html": 1}
        assert [(row["file"], row["line"]) for row in spool.quarantined()] == [("a", 9), ("b", 2)]
        assert [row["rule"] for row in spool.dropped()] == ["languages"] and spool.rules() == {"": 2, "languages": 1}
        spool.leave_out("encoded", Quarantined("c", 1, "long", "x"))
        spool.forget("encoded")
        assert spool.rules()[""] == 2


def test_a_stage_is_there_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    with Spool(tmp_path / "s.sqlite") as spool:
        with pytest.raises(ZeroDivisionError), spool.stage("read") as todo:
            spool.add([Outcome(talk("A"))], 0, "read")
            assert todo and 1 / 0
        assert spool.sizes() == (0, 0) and not spool.reached("read")
        with spool.stage("read") as todo:
            assert todo
            spool.add([Outcome(talk("A"))], 0, "read")
    with Spool(tmp_path / "s.sqlite") as spool, spool.stage("read") as todo:
        assert not todo and spool.sizes() == (0, 1)


KILLED = """
import sys
from pathlib import Path
from data_prep.cleaning import Outcome
from data_prep.sources import Conversation
from data_prep.spool import Spool

with Spool(Path(sys.argv[1])) as spool:
    with spool.stage("done"):
        spool.add([Outcome(Conversation(({"role": "user", "content": "first"},), "f", 1))], 0, "done")
    with spool.stage("read"):
        n = 0
        while True:
            n += 1
            spool.add([Outcome(Conversation(({"role": "user", "content": f"{n} " * 400},), "f", n))], 0, "read")
            if n % 1000 == 0:
                print(n, flush=True)
"""


def test_a_killed_stage_is_begun_again(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path / "s.sqlite")]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])
    assert child.stdout is not None and child.stdout.readline()
    child.send_signal(signal.SIGKILL)
    child.wait()
    with Spool(tmp_path / "s.sqlite") as spool:
        assert spool.reached("done") and not spool.reached("read")
        assert spool.counts("done") == 1 and spool.counts("read") == 0 and spool.sizes() == (0, 1)


def test_a_file_that_is_no_spool_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "s.sqlite").write_bytes(b"not a database" * 1000)
    with pytest.raises(KvshotError, match="damaged"), Spool(tmp_path / "s.sqlite"):
        pass


def test_a_database_that_fails_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(KvshotError, match=r"s\.sqlite: no such table: conversations; if the disk is full"), Spool(tmp_path / "s.sqlite") as spool:
        spool._db.execute("DROP TABLE conversations")
        spool.sizes()


class Squares:
    def __call__(self, block: list[int]) -> list[int]:
        if 13 in block:
            raise KvshotError("thirteen is not allowed")
        if 99 in block:
            os._exit(1)
        return [os.getpid(), *(n * n for n in block)]


def test_processes_keep_the_order_and_pass_errors_on() -> None:
    taken: list[int] = []

    def blocks() -> Any:
        for n in range(200, 240):
            taken.append(n)
            yield [n]

    with Processes[list[int], list[int]](Squares(), 2) as processes:
        first, *rest = processes.map(blocks())
        found = [first, *rest]
        assert [n for _, n in found] == [n * n for n in range(200, 240)]
        assert len({pid for pid, _ in found}) <= 2 and os.getpid() not in {pid for pid, _ in found}
        taken.clear()
        next(processes.map(blocks()))
        assert len(taken) <= 5, "blocks are taken as they are needed"
        with pytest.raises(KvshotError, match="thirteen"):
            list(processes.map([[1], [13], [2]]))
        with pytest.raises(KvshotError, match="a process of prep died"):
            list(processes.map([[1], [99], [2]]))
    with Processes[list[int], list[int]](Squares(), 1) as processes:
        assert list(processes.map([[3]])) == [[os.getpid(), 9]]


def test_processes_end_with_a_killed_parent(tmp_path: Path) -> None:
    code = f"""
import os, sys, time
sys.path[:0] = [{str(Path(__file__).parents[2])!r}]
from data_prep.parallel import Processes
from operator import itemgetter
if __name__ == "__main__":
    with Processes(itemgetter(0), 2) as processes:
        list(processes.map([[1], [2], [3]]))
        print(*processes._pool._processes, flush=True)
        time.sleep(60)
"""
    (tmp_path / "parent.py").write_text(code)
    parent = subprocess.Popen([sys.executable, str(tmp_path / "parent.py")], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    children = [int(pid) for pid in parent.stdout.readline().split()]
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    deadline = time.monotonic() + 20
    while alive := [pid for pid in children if Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2][:3]]:
        assert time.monotonic() < deadline, alive
        time.sleep(0.05)
    assert len(children) == 2


def test_bodies_come_back_as_they_were(tmp_path: Path) -> None:
    odd = Conversation(({"role": "user", "content": 'a\x00b\n"€𝄞\u2028'}, {"role": "assistant", "content": "x"}), "f\n", 3, ({"a": [1.5, None]},))
    spool = filled(tmp_path / "s.sqlite", [odd], near=0)
    spool.select([None], None)
    (stored,) = spool.in_order()
    assert stored.conversation == odd and stored.id == odd.id
    json.dumps(stored.conversation.messages).encode()
