"""The order of the clockwork: warm-up first, methods in rotation, the median repeat."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import torch

from kvshot_ds.bench.measure import measure, median, order
from kvshot_ds.bench.methods import Step, Trace
from kvshot_ds.bench.questions import Question
from kvshot_ds.config import BenchConfig

LOG: list[tuple[str, int]] = []


@dataclass
class Fake:
    """Takes the seconds it is told, one after the other."""

    name: str
    seconds: list[float] = field(default_factory=list)
    kind: str = "baseline"
    weights: int = 0

    def decode(self, prompt, number, max_new_tokens, stop):
        LOG.append((self.name, number))
        return trace(self.seconds.pop(0) if self.seconds else 1.0)


def trace(seconds: float) -> Trace:
    return Trace((1, 2), seconds, (Step(1, seconds / 2), Step(1, seconds / 2)), None)


def asked(*lengths: int) -> list[Question]:
    return [Question(str(i), "set", "", (), (1,) * length) for i, length in enumerate(lengths)]


def test_warm_up_then_each_method_begins_as_often():
    LOG.clear()
    methods = [Fake("a"), Fake("b"), Fake("c")]
    measure(methods, asked(3, 5, 4), BenchConfig(warm_up=2, repeats=2, max_new_tokens=2), (), torch.device("cpu"))
    head, timed = LOG[: 3 + 6], LOG[9:]
    assert head == [("a", 1), ("b", 1), ("c", 1), *[(name, i) for i in (0, 1) for name in "abc"]]  # the longest first, for memory
    assert len(timed) == 3 * 3 * 2 and Counter(timed) == {(name, i): 2 for name in "abc" for i in range(3)}
    turns = [timed[i : i + 3] for i in range(0, 18, 3)]
    assert [t[0][1] for t in turns] == [0, 1, 2, 0, 1, 2] and all(len({i for _, i in t}) == 1 for t in turns)
    assert Counter(t[0][0] for t in turns) == {"a": 2, "b": 2, "c": 2}


def test_the_median_repeat_of_each_question_counts():
    method = Fake("a", [9.0, 9.0, 5.0, 1.0, 2.0, 30.0, 3.0, 2.0])  # memory, warm-up, then 3 repeats of two questions in turn
    (found,) = measure([method], asked(2, 2), BenchConfig(warm_up=1, repeats=3, max_new_tokens=2), (), torch.device("cpu"))
    assert [t.seconds for t in found.traces] == [3.0, 2.0] and found.spread == (2.5, 30.0)
    assert median([trace(4.0), trace(1.0), trace(3.0), trace(2.0)]).seconds == 2.0
    assert order(3, 1) == [1, 2, 0]
