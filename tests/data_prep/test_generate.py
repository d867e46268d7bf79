"""The batch that stays full equals `model.generate` on single prompts, token for token; sampling equals transformers' warpers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.generation.logits_process import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from data_prep.generate import Ask, Generator, Sampling, _Store, draws_of, pick, warped
from kvshot_ds.config import TargetConfig
from kvshot_ds.target import Target

QUESTIONS = ("Hi", "What is 2 + 2, and why is that so?", "zzz", "Tell me a story.", "How?", "Name a bird.", "x", "Why is the sky blue, and the sea?" * 3)
OWN = {
    "Llama": {"tie_word_embeddings": True},
    "Qwen2": {},
    "Qwen3": {"head_dim": 24},
    "Mistral": {"head_dim": 24, "sliding_window": None},
    "StableLm": {"use_qkv_bias": True, "partial_rotary_factor": 0.5},
    "StableLm of 12B": {"qk_layernorm": True, "use_parallel_residual": True, "partial_rotary_factor": 0.5},
}


@pytest.fixture(scope="module")
def generator(tiny_target: Path) -> Generator:
    return Generator(Target.load(TargetConfig(path=tiny_target, dtype="fp32", device="cpu")))


def model_of(family: str, vocab: int) -> Any:
    config = getattr(transformers, f"{family.split()[0]}Config")(
        hidden_size=48, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, vocab_size=vocab,
        max_position_embeddings=256, initializer_range=0.3, bos_token_id=None, eos_token_id=2, pad_token_id=0, **{"tie_word_embeddings": False, **OWN[family]},
    )  # fmt: skip
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    for p in model.parameters():
        if p.ndim == 1:  # norms and biases that a mix-up would not leave alone
            p.data += 0.3 * torch.randn_like(p)
    return model


def of(generator: Generator, model: Any) -> Generator:
    """The same tokenizer before another model."""
    other = Generator.__new__(Generator)
    other.target = Target(model, generator.target.geometry, generator.target.folder)
    other.template, other.stops = generator.template, generator.stops
    return other


def ask(generator: Generator, *questions: str) -> list[list[int]]:
    return [generator.template.prompt([{"role": "user", "content": q}]) for q in questions]


def alone(generator: Generator, prompt: Sequence[int], limit: int) -> list[int]:
    """The answer by transformers' own generate."""
    config = transformers.GenerationConfig(max_new_tokens=limit, do_sample=False, eos_token_id=sorted(generator.stops), pad_token_id=0)
    out = generator.target.model.generate(torch.tensor([list(prompt)]), generation_config=config)[0, len(prompt) :].tolist()
    return out[:-1] if out[-1] in generator.stops and out[-1] != generator.template.end_id else out


@pytest.mark.parametrize("family", OWN)
def test_greedy_answers_equal_generate_of_each_prompt_alone(generator: Generator, family: str) -> None:
    other = of(generator, model_of(family, len(generator.target.tokenizer)))
    prompts = ask(generator, *QUESTIONS)
    expected = [alone(other, p, 20) for p in prompts]
    assert len({tuple(a) for a in expected}) > 4, "the prompts matter"
    for batch_size in (1, 3, 8):
        assert other.answers(prompts, 20, batch_size=batch_size) == expected
    assert other.answers(prompts[::-1], 20, batch_size=4) == expected[::-1]


@pytest.mark.smollm2
def test_greedy_answers_of_a_real_target_equal_generate(smollm2_target: Path) -> None:
    real = Generator(Target.load(TargetConfig(path=smollm2_target, dtype="fp32", device="cpu")))
    prompts = ask(real, *QUESTIONS[:3])
    assert real.answers(prompts, 8, batch_size=2) == [alone(real, p, 8) for p in prompts]


def test_answers_end_by_themselves_or_at_the_limit_and_the_next_prompt_takes_the_row(generator: Generator) -> None:
    prompts = ask(generator, *QUESTIONS) * 3
    expected = [alone(generator, p, 24) for p in prompts]
    assert generator.answers(prompts, 24, batch_size=4) == expected
    lengths = {len(a) for a in expected}
    assert 24 in lengths and len(lengths) > 2, "the test is of answers that end at different times"
    assert all(a[-1] == generator.template.end_id for a in expected if len(a) < 24)
    assert generator.answers([], 5) == []
    limits = [1, 2, 24, 7, 3, 1, 9, 24]
    found: dict[int, list[int]] = {}
    generator.write(
        [Ask(n, p, limit) for n, (p, limit) in enumerate(zip(prompts, limits, strict=False))], lambda a, t: found.update({a.key: t}), Sampling(), batch_size=3
    )
    assert [found[n] for n in range(8)] == [e[:limit] for e, limit in zip(expected, limits, strict=False)], "each row has its own limit"


def test_what_is_asked_next_takes_part_at_once(generator: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """The forwards needed are those of a batch that stays full, not of one that waits for its longest answer."""
    sizes: list[int] = []
    forward = Generator._continue
    monkeypatch.setattr(Generator, "_continue", lambda self, rows, *rest: (sizes.append(len(rows)), forward(self, rows, *rest))[1])
    monkeypatch.setattr(generator, "stops", frozenset[int]())
    prompts, follow = ask(generator, *QUESTIONS), ask(generator, "And then?")[0]
    limits = [6, 6, 6, 6, 6, 6, 6, 40]  # the longest prompt is the first to be asked

    def next_turn(one: Ask, _answer: list[int]) -> Ask | None:
        return Ask(one.key + 100, [*one.tokens, *follow], 6) if one.key < 7 else None

    heard: list[int] = []
    generator.write([Ask(n, p, limits[n]) for n, p in enumerate(prompts)], lambda a, t: (heard.append(a.key), next_turn(a, t))[1], Sampling(), batch_size=3)
    assert sorted(heard) == [*range(8), *range(100, 107)]
    # seven conversations of two turns, 5 steps a turn after its first token, two at a time, beside the long answer of 39
    assert len(sizes) == 4 * 10 and sum(sizes) == 39 + 14 * 5


def test_the_folders_generation_defaults_do_not_bend_the_distribution(generator: Generator, tiny_target: Path) -> None:
    prompts = ask(generator, *QUESTIONS[:3])
    target = Target.load(TargetConfig(path=tiny_target, dtype="fp32", device="cpu"))
    target.model.generation_config = transformers.GenerationConfig(repetition_penalty=5.0, top_k=1, do_sample=True, temperature=0.01, eos_token_id=2)
    assert Generator(target).answers(prompts, 24) == generator.answers(prompts, 24)


def test_answers_stop_at_any_special_token(generator: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    end, script = generator.template.end_id, [7, 8, 0, 9]
    monkeypatch.setattr("data_prep.generate.pick", lambda logits, *_: torch.tensor([script.pop(0)]))
    (prompt,) = ask(generator, "Hi")
    assert generator.answers([prompt], 9) == [[7, 8]], "another special token does not belong to the answer"
    script[:] = [7, end, 9]
    assert generator.answers([prompt], 9) == [[7, end]]
    script[:] = [0]
    assert generator.answers([prompt], 9) == [[]]


@pytest.mark.parametrize("sampling", [Sampling(1.0), Sampling(0.8, top_p=0.9, top_k=40, min_p=0.02)], ids=["plain", "cut"])
def test_a_stream_gives_a_prompt_the_same_answer_in_any_company(generator: Generator, sampling: Sampling) -> None:
    prompts = ask(generator, *QUESTIONS)
    asks = [Ask(n, p, 16, f"7/conversation{n}/1") for n, p in enumerate(prompts)]

    def written(asks: list[Ask], batch_size: int) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        generator.write(asks, lambda a, t: found.update({a.key: t}), sampling, batch_size)
        return found

    torch.manual_seed(5)
    one = written(asks, 8)
    after = torch.rand(1)
    torch.manual_seed(5)
    assert torch.equal(after, torch.rand(1)), "the global generator is left alone"
    assert written(asks, 1) == written(asks[::-1], 3) == one
    assert written(asks[3:5], 2) == {n: one[n] for n in (3, 4)}
    others = written([Ask(a.key, a.tokens, a.limit, f"8{a.stream}") for a in asks], 8)
    assert all(others[n] != one[n] for n in one)


@pytest.mark.parametrize("scale", [0.5, 6.0])
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(0.7),
        Sampling(0.7, top_p=0.1),
        Sampling(1.3, top_p=0.6),
        Sampling(0.7, top_p=0.95),
        Sampling(0.7, top_k=1),
        Sampling(1.0, top_k=20),
        Sampling(1.0, top_k=900),
        Sampling(0.7, min_p=0.1),
        Sampling(0.9, top_p=0.8, top_k=30),
        Sampling(0.9, top_p=0.95, min_p=0.2),
        Sampling(1.1, top_p=0.7, top_k=25, min_p=0.05),
    ],
    ids=str,
)
def test_sampling_equals_transformers_warpers(sampling: Sampling, scale: float) -> None:
    scores = torch.randn(4, 300, generator=torch.Generator().manual_seed(0)) * scale
    chain: list[Any] = [TemperatureLogitsWarper(sampling.temperature)]
    chain += [TopKLogitsWarper(sampling.top_k)] if sampling.top_k else []
    chain += [TopPLogitsWarper(sampling.top_p)] if sampling.top_p < 1 else []
    chain += [MinPLogitsWarper(sampling.min_p)] if sampling.min_p else []
    expected = scores
    for warper in chain:
        expected = warper(None, expected)
    for width in (4, 300):
        assert torch.equal(warped(scores, sampling, width), expected)


def test_draws_follow_the_distribution() -> None:
    scores = torch.tensor([[0.0, 1.0, 2.0, -1.0, 2.5]])
    sampling, count = Sampling(1.0, top_k=3), 20_000
    draws = torch.tensor(draws_of("a", count), dtype=torch.float64)
    found = Counter(pick(scores.expand(count, -1), sampling, draws).tolist())
    expected = warped(scores, sampling).softmax(-1)[0]
    assert set(found) == {1, 2, 4}
    assert all(abs(found[n] / count - float(expected[n])) < 0.015 for n in found)
    assert pick(scores, sampling, torch.tensor([0.0], dtype=torch.float64)).tolist() == [1], "never one outside the cut, though it stands first"
    assert pick(scores, sampling, torch.tensor([1.0 - 2.0**-53], dtype=torch.float64)).tolist() == [4]
    assert draws_of("a", 3) == draws_of("a", 5)[:3] != draws_of("b", 3)


def test_padding_and_old_rows_do_not_reach_an_answer(generator: Generator) -> None:
    """A store full of numbers that would show: what is masked has no part in a sum."""
    prompts = ask(generator, *QUESTIONS)
    expected = generator.answers(prompts, 12, batch_size=8)
    update = _Store.update

    def spoiled(self: _Store, keys: torch.Tensor, values: torch.Tensor, layer: int, **rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
        fresh = layer == len(self.store)
        found = update(self, keys, values, layer, **rest)
        if fresh:
            for kept, t in zip(self.store[layer], (keys, values), strict=True):
                kept[:, :, t.shape[2] :] = 1e4
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_Store, "update", spoiled)
        assert generator.answers(prompts, 12, batch_size=8) == expected


def test_the_host_reads_from_the_device_once_a_token(generator: Generator) -> None:
    """No operation of a step has a result whose size or value the host must know; the tokens themselves come in one copy."""

    class Reads(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.found: Counter[str] = Counter()

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.overloadpacket.__name__ in ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "_unique2"):
                self.found[func.overloadpacket.__name__] += 1
            return func(*args, **(kwargs or {}))

    prompts = ask(generator, *QUESTIONS)
    with Reads() as reads:
        generator.answers(prompts, 8, Sampling(1.0, top_k=5), batch_size=8)
    steps = sum(reads.found.values())
    # the lengths of a group of prompts are host tensors: at most one reading for each group
    assert steps <= len(prompts), reads.found


def test_bf16_runs(generator: Generator, tiny_target: Path) -> None:
    other = Generator(Target.load(TargetConfig(path=tiny_target, dtype="bf16", device="cpu")))
    found = other.answers(ask(generator, *QUESTIONS), 12, Sampling(1.0, top_p=0.9), batch_size=3)
    assert len(found) == len(QUESTIONS) and all(0 < len(a) <= 12 or a == [] for a in found)
