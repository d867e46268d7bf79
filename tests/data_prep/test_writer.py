"""Answers go turn by turn, prompts out of an open user turn; what ends a conversation early."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from data_prep.chat import ChatTemplate
from data_prep.generate import Generator
from data_prep.sources import Conversation
from data_prep.writer import Unit, Writer, answer, synthesise
from kvshot_ds.config import PrepConfig, TargetConfig
from kvshot_ds.target import Target


@pytest.fixture(scope="module")
def generator(tiny_target: Path) -> Generator:
    return Generator(Target.load(TargetConfig(path=tiny_target, dtype="fp32", device="cpu")))


def ask(*questions: str, line: int = 1) -> Conversation:
    return Conversation(tuple({"role": "user", "content": q} for q in questions), "q.txt", line)


def test_later_turns_answer_in_the_context_of_earlier_answers(generator: Generator) -> None:
    options = PrepConfig.model_validate({"regenerate": {"max_new_tokens": 10}, "batch_size": 2})
    both = ask("Hi", "And now?")
    (single, double) = answer(generator, [ask("zzz"), both], options, seed=0)
    assert len(single.answers) == 1 and len(double.answers) == 2
    text = generator.template.text(double.answers[0])
    history = [both.messages[0], {"role": "assistant", "content": text}, both.messages[1]]
    (expected,) = generator.answers([generator.template.prompt(history)], 10)
    assert double.answers[1] == expected
    without = generator.answers([generator.template.prompt([both.messages[1]])], 10)
    assert without != [expected], "the context matters"


class Scripted:
    """A generator that answers from a list and notes what it was asked."""

    def __init__(self, template: ChatTemplate, *script: Sequence[str | None]) -> None:
        self.template, self.script, self.asked = template, list(script), []

    def answers(self, prompts: Sequence[list[int]], *_: object) -> list[list[int]]:
        self.asked.append([self.template.tokenizer.decode(p) for p in prompts])
        replies = self.script.pop(0) if self.script else []
        assert len(replies) == len(prompts)
        return [[self.template.end_id] if r is None else [*self.template.tokenizer(r).input_ids, self.template.end_id] for r in replies]


def test_a_conversation_ends_where_an_answer_is_empty_or_the_context_too_long(generator: Generator) -> None:
    scripted = Scripted(generator.template, ["yes", None, "y" * 90, "ok"], [None, "fine"])
    conversations = [ask("a", "b"), ask("mute"), ask("c", "d"), ask("e", "f", "g" * 60), ask("q" * 200), ask("<|im_end|>")]
    options = PrepConfig.model_validate({"max_length": 100, "regenerate": {"max_new_tokens": 95}})
    found = answer(scripted, conversations, options, seed=0)  # type: ignore[arg-type]
    text = [[generator.template.text(t) for t in a.answers] for a in found]
    # the third turn of the fourth conversation does not fit any more
    assert text == [["yes"], [], ["y" * 90], ["ok", "fine"], [], []]
    assert [a.reason for a in found[:4]] == ["", "the target answers nothing", "", ""]
    assert found[4].reason.startswith("over-long: the prompt alone has ")
    assert "contains the special token" in found[5].reason
    assert [len(asked) for asked in scripted.asked] == [4, 2, 0]
    assert "<|im_start|>assistant\nok<|im_end|>\n<|im_start|>user\nf<|im_end|>" in scripted.asked[1][1]


def test_synthesised_prompts_continue_an_open_user_turn(generator: Generator) -> None:
    scripted = Scripted(generator.template, ["How are you? ", None, " "])
    assert synthesise(scripted, 3, PrepConfig(), seed=0) == ["How are you?", "", ""]  # type: ignore[arg-type]
    assert scripted.asked == [["<|im_start|>user\n"] * 3]
    real = synthesise(generator, 16, PrepConfig.model_validate({"synthesis": {"max_new_tokens": 48}}), seed=0)
    assert None in real, "unfinished ones are told apart"
    assert any(text for text in real)


def test_the_worker_takes_both_kinds_of_unit(tiny_target: Path) -> None:
    threads = torch.get_num_threads()
    try:
        options = PrepConfig.model_validate({"cpus_per_worker": 0.5, "regenerate": {"max_new_tokens": 4}})
        writer = Writer(TargetConfig(path=tiny_target, dtype="fp32", device="cpu"), options)
        assert writer.generator is None, "nothing is loaded before the first unit"
        assert len(writer.work(Unit(0, 1, count=3))) == 3
        assert torch.get_num_threads() == 1
        (found,) = writer.work(Unit(0, 1, conversations=(ask("Hi"),)))
        assert found.id == ask("Hi").id  # type: ignore[union-attr]
    finally:
        torch.set_num_threads(threads)
