"""Batched generation equals `model.generate` on single prompts; sampling is the nucleus; answers go turn by turn."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.logits_process import TopPLogitsWarper

from data_prep.chat import ChatTemplate
from data_prep.generate import Generator, Nucleus, Unit, Writer, answer, synthesise
from data_prep.sources import Conversation
from kvshot_ds.config import PrepConfig, TargetConfig
from kvshot_ds.target import Target


@pytest.fixture(scope="module")
def generator(tiny_target: Path) -> Generator:
    return Generator(Target.load(TargetConfig(path=tiny_target, dtype="fp32", device="cpu")))


def ask(*questions: str, line: int = 1) -> Conversation:
    return Conversation(tuple({"role": "user", "content": q} for q in questions), "q.txt", line)


QUESTIONS = ("Hi", "What is 2 + 2, and why is that so?", "zzz", "Tell me a story.", "How?", "Name a bird.", "x")


def test_greedy_batches_equal_single_generate(generator: Generator, tiny_target: Path) -> None:
    prompts = [generator.template.prompt(ask(q).messages) for q in QUESTIONS]
    model = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32)
    found = generator.answers(prompts, max_new_tokens=24, batch_size=3)
    for prompt, got in zip(prompts, found, strict=True):
        out = model.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)
        assert got == out[0, len(prompt) :].tolist()
    lengths = {len(a) for a in found}
    assert 24 in lengths and len(lengths) > 1, "some answers end by themselves, some at the limit"
    assert all(a[-1] == generator.template.end_id for a in found if len(a) < 24)
    assert generator.answers([], 5) == []


def test_the_folders_generation_defaults_do_not_bend_the_distribution(generator: Generator, tiny_target: Path) -> None:
    prompts = [generator.template.prompt(ask(q).messages) for q in QUESTIONS[:3]]
    target = Target.load(TargetConfig(path=tiny_target, dtype="fp32", device="cpu"))
    target.model.generation_config = GenerationConfig(repetition_penalty=5.0, top_k=1, do_sample=True, temperature=0.01, eos_token_id=2, suppress_tokens=[60])
    assert Generator(target).answers(prompts, 24) == generator.answers(prompts, 24)
    sampled = generator.answers(prompts * 4, 24, temperature=1.0, seed=3)
    assert Generator(target).answers(prompts * 4, 24, temperature=1.0, seed=3) == sampled


def test_answers_stop_at_any_special_token(generator: Generator) -> None:
    end = generator.template.end_id
    assert generator._ended([5, 6, end, 7]) == [5, 6, end]
    assert generator._ended([5, 6, 0, end]) == [5, 6], "another special token does not belong to the answer"
    assert generator._ended([5, 6]) == [5, 6]


def test_sampling_repeats_with_the_seed_and_leaves_the_global_generator_alone(generator: Generator) -> None:
    prompts = [generator.template.prompt(ask(q).messages) for q in QUESTIONS]
    torch.manual_seed(5)
    one = generator.answers(prompts, 12, temperature=1.0, top_p=0.9, seed=1)
    after = torch.rand(1)
    torch.manual_seed(5)
    assert torch.equal(after, torch.rand(1))
    assert generator.answers(prompts, 12, temperature=1.0, top_p=0.9, seed=1) == one
    assert generator.answers(prompts, 12, temperature=1.0, top_p=0.9, seed=2) != one


@pytest.mark.parametrize("top_p", [0.1, 0.6, 0.95, 1.0])
@pytest.mark.parametrize("scale", [0.5, 6.0])
def test_nucleus_equals_transformers(top_p: float, scale: float) -> None:
    scores = torch.randn(4, 300, generator=torch.Generator().manual_seed(0)) * scale
    expected = scores / 0.7 if top_p == 1 else TopPLogitsWarper(top_p)(None, scores / 0.7)  # type: ignore[arg-type]
    for width in (4, 300):
        assert torch.allclose(Nucleus(0.7, top_p, width)(torch.empty(0), scores), expected)


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
