"""Answers go turn by turn, prompts out of an open user turn; what ends a conversation early; units and accounts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from data_prep.chat import ChatTemplate
from data_prep.generate import Ask, Generator, Sampling
from data_prep.sources import Conversation
from data_prep.targets import _TINY_TEMPLATE
from data_prep.writer import Accounts, Answered, Unit, Writer, answer, synthesise, unit_size, units_of
from kvshot_ds.config import PrepConfig, TargetConfig, TemplateConfig
from kvshot_ds.errors import KvshotError
from kvshot_ds.target import Target


@pytest.fixture(scope="module")
def generator(tiny_target: Path) -> Generator:
    return Generator(Target.load(TargetConfig(path=tiny_target, dtype="fp32", device="cpu")))


def ask(*questions: str, line: int = 1) -> Conversation:
    return Conversation(tuple({"role": "user", "content": q} for q in questions), "q.txt", line)


def options(max_length: int = 2048, batch_size: int = 2, **regenerate: object) -> PrepConfig:
    return PrepConfig.model_validate({"regenerate": {"max_new_tokens": 10, **regenerate}, "batch_size": batch_size, "max_length": max_length})


def test_later_turns_answer_in_the_context_of_earlier_answers(generator: Generator) -> None:
    both = ask("Hi", "And now?")
    (single, double) = answer(generator, [ask("zzz"), both], options())
    assert len(single.answers) == 1 and len(double.answers) == 2
    text = generator.template.text(double.answers[0])
    history = [both.messages[0], {"role": "assistant", "content": text}, both.messages[1]]
    (expected,) = generator.answers([generator.template.prompt(history)], 10)
    assert double.answers[1] == expected
    without = generator.answers([generator.template.prompt([both.messages[1]])], 10)
    assert without != [expected], "the context matters"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_do_not_depend_on_unit_order_or_batch_size(generator: Generator, temperature: float) -> None:
    conversations = [ask("Hi", "And now?"), ask("zzz"), ask("Tell me a story.", "Why?", "How?"), ask("What is 2 + 2?"), ask("x", "y")]
    whole = {a.id: a for a in answer(generator, conversations, options(batch_size=8, temperature=temperature))}
    assert [a.id for a in whole.values()] == [c.id for c in conversations]
    parts = [answer(generator, part, options(batch_size=2, temperature=temperature)) for part in (conversations[3:], conversations[2::-1])]
    assert {a.id: a for part in parts for a in part} == whole
    if temperature:
        seeded = options(batch_size=8, temperature=1.0).model_copy(update={"seed": 1})
        assert {a.id: a for a in answer(generator, conversations, seeded)} != whole
        again = [replace(ask("Hi", "And now?"), line=9), ask("zzz")]  # a conversation is its words, not its place
        assert answer(generator, again, options(temperature=1.0))[0] == whole[again[0].id]


class Scripted:
    """A generator that answers from a table: the words of the last question -> the reply; notes what it was asked."""

    def __init__(self, template: ChatTemplate, **script: str) -> None:
        self.template, self.script, self.asked, self.limits = template, script, list[str](), list[int]()

    def write(self, asks: Iterable[Ask], done: Callable[[Ask, list[int]], Ask | None], sampling: Sampling, batch_size: int) -> None:
        waiting = list(asks)
        while waiting:
            one = waiting.pop(0)
            self.asked.append(self.template.tokenizer.decode(one.tokens))
            self.limits.append(one.limit)
            question = self.asked[-1].rpartition("user\n")[2].partition("<|im_end|>")[0]
            reply = self.template.tokenizer(self.script[question]).input_ids
            following = done(one, [*reply, self.template.end_id])
            waiting += [following] if following else []


def test_a_conversation_ends_where_an_answer_is_empty_or_the_context_too_long(generator: Generator) -> None:
    scripted = Scripted(generator.template, a="yes", b="", mute="", c="y" * 90, e="ok", f="fine")
    conversations = [ask("a", "b"), ask("mute"), ask("c", "d"), ask("e", "f", "g" * 60), ask("q" * 200), ask("<|im_end|>"), Conversation((), "q.txt", 1)]
    found = answer(scripted, conversations, options(max_length=100, max_new_tokens=95))  # type: ignore[arg-type]
    text = [[generator.template.text(t) for t in a.answers] for a in found]
    # the third turn of the fourth conversation does not fit any more
    assert text == [["yes"], [], ["y" * 90], ["ok", "fine"], [], [], []]
    assert [a.reason for a in found[:4]] == ["", "the target answers nothing", "", ""]
    assert found[4].reason.startswith("over-long: the prompt alone has ")
    assert "special token" in found[5].reason
    assert found[6].reason == "no question"
    assert "<|im_start|>assistant\nok<|im_end|>\n<|im_start|>user\nf<|im_end|>" in scripted.asked[-1]
    lengths = [len(generator.template.tokenizer(text).input_ids) for text in scripted.asked]
    assert scripted.limits == [min(95, 100 - n) for n in lengths], "no answer is written beyond max_length"


def test_a_thinking_target_is_asked_in_its_mode_and_its_history_holds_what_the_template_keeps(generator: Generator, tmp_path: Path) -> None:
    shown = "{% if message['role'] == 'assistant' and message.reasoning_content %}{% endif %}"  # an earlier turn's thoughts are left out
    ending = "{{ '<|im_start|>assistant\n' }}{% if enable_thinking is defined and not enable_thinking %}{{ '<think></think>' }}{% endif %}"
    jinja = _TINY_TEMPLATE.replace("{{ '<|im_start|>assistant\n' }}", ending).replace("{% for message in messages %}", "{% for message in messages %}" + shown)
    (tmp_path / "t.jinja").write_text(jinja)
    tokenizer = generator.template.tokenizer
    for thinking in (None, True, False):
        template = ChatTemplate(tokenizer, TemplateConfig(jinja=tmp_path / "t.jinja", thinking=thinking))
        scripted = Scripted(template, a="<think>Hm.</think>yes", b="<think>never ending", c="!")
        (found,) = answer(scripted, [ask("a", "b", "c")], options())  # type: ignore[arg-type]
        assert len(found.answers) == 2 and not found.reason, "an answer that is all thought is the last one"
        assert template.parse_answer(found.answers[0]) == {"role": "assistant", "content": "yes", "reasoning_content": "Hm."}
        assert scripted.asked[0].endswith("<think></think>" if thinking is False else "assistant\n")
        assert "<|im_start|>assistant\nyes<|im_end|>" in scripted.asked[1] and "Hm." not in scripted.asked[1]


def test_synthesised_prompts_continue_an_open_user_turn(generator: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    end, replies, asked = generator.template.end_id, ["How are you? ", "", " "], list[list[int]]()

    def answers(prompts: list[list[int]], limit: int, sampling: Sampling, seed: int, batch_size: int) -> list[list[int]]:
        asked.extend(prompts)
        return [[*generator.template.tokenizer(r).input_ids, end] for r in replies]

    with monkeypatch.context() as patch:
        patch.setattr(generator, "answers", answers)
        assert synthesise(generator, 3, PrepConfig(), seed=0) == ["How are you?", "", ""]
    assert [generator.template.tokenizer.decode(a) for a in asked] == ["<|im_start|>user\n"] * 3
    wanted = PrepConfig.model_validate({"synthesis": {"max_new_tokens": 48}})
    real = synthesise(generator, 16, wanted, seed=0)
    assert None in real, "unfinished ones are told apart"
    assert any(text for text in real)
    assert synthesise(generator, 4, wanted.model_copy(update={"batch_size": 3}), seed=0) == real[:4]
    assert synthesise(generator, 16, wanted, seed=1) != real


def test_units_keep_order_and_size() -> None:
    conversations = [ask(str(n)) for n in range(7)]
    units = list(units_of(iter(conversations), 3))
    assert [(u.index, len(u.conversations)) for u in units] == [(0, 3), (1, 3), (2, 1)]
    assert [c for u in units for c in u.conversations] == conversations
    assert list(units_of([], 3)) == []
    assert [unit_size(n, PrepConfig(batch_size=4, workers=2)) for n in (0, 1, 5, 40, 10_000)] == [1, 1, 2, 10, 32]


def test_accounts_add_up_over_resumes_or_say_so() -> None:
    rows = [Answered("a", [[1]]), Answered("b", reason="over-long"), Answered("c", reason="the server ...", failed=True), Answered("d", texts=[{}])]
    first, second = Accounts(input=4), Accounts(input=5)
    first.add(rows)
    first.check()
    assert (first.done, first.failed, first.skipped) == (2, 1, 1)
    second.add(rows, before=True)
    with pytest.raises(KvshotError, match=r"0 done \+ 1 failed \+ 3 skipped of 5 conversations"):
        second.check()
    second.add([Answered("e", [[1]])])
    second.check()
    assert (second.done, second.failed, second.skipped, second.before) == (1, 1, 3, 4)


def test_the_worker_takes_both_kinds_of_unit(tiny_target: Path) -> None:
    threads = torch.get_num_threads()
    try:
        wanted = PrepConfig.model_validate({"cpus_per_worker": 0.5, "regenerate": {"max_new_tokens": 4}, "template": {"system": "Be brief."}})
        writer = Writer(TargetConfig(path=tiny_target, dtype="fp32", device="cpu"), wanted)
        assert writer.generator is None, "nothing is loaded before the first unit"
        assert len(writer.work(Unit(0, 1, count=3))) == 3
        assert torch.get_num_threads() == 1
        (found,) = writer.work(Unit(0, conversations=(ask("Hi"),)))
        assert isinstance(found, Answered) and found.id == ask("Hi").id
        system = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
        assert writer.generator is not None
        assert [found.answers[0]] == writer.generator.answers([writer.generator.template.prompt(system)], 4)
    finally:
        torch.set_num_threads(threads)
