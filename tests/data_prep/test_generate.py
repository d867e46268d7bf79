"""Batched generation equals `model.generate` on single prompts, token for token; sampling is the nucleus."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.logits_process import TopPLogitsWarper

from data_prep.generate import Generator, Nucleus
from kvshot_ds.config import TargetConfig
from kvshot_ds.target import Target


@pytest.fixture(scope="module")
def generator(tiny_target: Path) -> Generator:
    return Generator(Target.load(TargetConfig(path=tiny_target, dtype="fp32", device="cpu")))


def ask(generator: Generator, *questions: str) -> list[list[int]]:
    return [generator.template.prompt([{"role": "user", "content": q}]) for q in questions]


QUESTIONS = ("Hi", "What is 2 + 2, and why is that so?", "zzz", "Tell me a story.", "How?", "Name a bird.", "x")


def test_greedy_batches_equal_single_generate(generator: Generator, tiny_target: Path) -> None:
    prompts = ask(generator, *QUESTIONS)
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
    prompts = ask(generator, *QUESTIONS[:3])
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
    prompts = ask(generator, *QUESTIONS)
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
