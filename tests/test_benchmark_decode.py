"""The benchmark of decoding runs on a tiny target; what it compares agrees, and its clocks see what they say."""

from __future__ import annotations

import re

import pytest
import torch
from click.testing import CliRunner

from benchmarks import decode
from kvshot_ds.config import HiddenOnlyConfig, HybridConfig
from kvshot_ds.decoding.rounds import Clock
from kvshot_ds.drafters import layer
from tests.decoding.models import hf_target

TINY = ["--repeats", "1", "--new", "12", "--context", "40", "--contexts", "16", "--widths", "1,5", "--draft-vocabs", "20,40", "--clock", "cpu"]


@pytest.mark.parametrize(
    ("only", "printed"),
    [
        ("overhead", [r"^ *engine, dflash( +[\d.]+){4} +[\d.]+%$", r"^share of a round outside the two models, at most [\d.]+%; goal at most 8%: "]),
        (
            "step",
            [r"^draft vocabulary 20, 40 positions before", r"^ *cross attention +0\.000 +[\d.]+$", r"^hybrid / hidden-only: parameters [\d.]+, step 0 [\d.]+"],
        ),
        ("verify", [r"^ *16 +5 +[\d.]+ +[\d.]+ +[\d.]+$"]),
    ],
)
def test_it_prints_its_tables(only, printed, tiny_target):
    done = CliRunner().invoke(decode.main, ["--target", str(tiny_target), "--only", only, *TINY])
    assert done.exit_code == 0, (done.output, done.exception)
    for pattern in printed:
        assert re.search(pattern, done.output, re.MULTILINE), done.output


def test_numbers_that_are_none_are_refused(tiny_target):
    for text in ("1,x", "0,3"):
        done = CliRunner().invoke(decode.main, ["--target", str(tiny_target), "--widths", text])
        assert done.exit_code == 2 and "expected numbers" in done.output


def test_forwards_that_disagree_are_not_timed():
    logits = torch.randn(1, 3, 10)
    decode.agree(logits, logits + 1e-5)
    for other in (logits + 0.5, logits * float("nan")):
        with pytest.raises(RuntimeError, match="they are not timed"):
            decode.agree(logits, other)


@torch.inference_mode()
@pytest.mark.parametrize(("config", "parts"), [(HiddenOnlyConfig(), 5), (HybridConfig(), 8)])
def test_every_part_of_a_step_has_a_clock_and_loses_it_again(config, parts):
    target, attend = hf_target("Llama"), layer._attend
    one = decode.Stepping(target, config, 30, 20)
    before = one.step_drafter.forward_step(one.memory, one.tokens[:1], 1)
    found = decode.in_parts(one, 1, "wall", target.device)
    assert len(found) == parts and all(seconds > 0 for seconds in found.values())
    assert layer._attend is attend
    one.h = one.begin(one.context, decode.COMMITTED)
    assert torch.equal(one.step_drafter.forward_step(one.memory, one.tokens[:1], 1), before)
    with decode.watched(one.drafter, "wall", target.device) as parts_seen:
        pass
    one.later()
    assert not parts_seen


def test_repeats_begin_at_the_same_place():
    """Step 0 proposes from the same memory each time: nothing of the later steps is left."""
    target = hf_target("Llama")
    with torch.inference_mode():
        one = decode.Stepping(target, HybridConfig(), 30, 20)
        first = one.h
        one.later()
        one.first()
        assert torch.equal(one.h, first)


def test_contenders_take_turns():
    calls = []
    decode.in_turn({name: lambda name=name: calls.append(name) for name in "ab"}, 2)
    assert "".join(calls) == "ab" + "ab" + "ba"


def test_the_engines_marks_are_its_own_again():
    mark = Clock.mark
    with decode.marked_by("cpu"):
        assert Clock.mark is not mark and Clock(torch.device("cpu")).mark() > 0
    assert Clock.mark is mark
