"""Ways to decode, all told by the same clock: transformers' generate, prompt-lookup and assisted generation, our own loop, and our drafters.

A time is taken where the host has the tokens in hand, which on an accelerator is after it has waited for them; beyond that it waits for the device before
and after a prompt only.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from transformers.generation.streamers import BaseStreamer

from kvshot_ds.bench.latency import wait
from kvshot_ds.config import BenchConfig, DraftingConfig, Recipe, SamplingConfig, TargetConfig
from kvshot_ds.decoding.engine import Engine
from kvshot_ds.decoding.rounds import Round
from kvshot_ds.errors import ConfigError
from kvshot_ds.target import Target

GENERATE, LOOP, LOOKUP, ASSISTED = "generate", "own loop", "prompt lookup", "assisted"
Kind = Literal["baseline", "drafter"]


@dataclass(frozen=True)
class Step:
    """Tokens that came together, and the time since those before them (of the first step: since the call) [s]."""

    tokens: int
    seconds: float


@dataclass(frozen=True)
class Trace:
    """One prompt decoded once. tokens: new ones, a stop token included. seconds: from the call to its end, the device idle at both.

    steps: the first holds the prefill. rounds: of the engine, one for each step; None of transformers' methods, which do not tell them.
    """

    tokens: tuple[int, ...]
    seconds: float
    steps: tuple[Step, ...]
    rounds: tuple[Round, ...] | None

    @property
    def first(self) -> float:
        """Time to the first token [s]."""
        return self.steps[0].seconds

    @property
    def accepted(self) -> list[int]:
        """Tokens of each step after the first beyond the target's own: accepted drafts. A step that a stop token has cut may have none of the target's."""
        return [r.accepted for r in self.rounds[1:]] if self.rounds is not None else [s.tokens - 1 for s in self.steps[1:]]


class Method(Protocol):
    """name: unique in a run. kind: what it is compared as. weights: bytes of what it needs beside the target."""

    name: str
    kind: Kind
    weights: int

    def decode(self, prompt: Sequence[int], number: int, max_new_tokens: int, stop: Collection[int]) -> Trace:
        """number: names the prompt to the noise of sampling."""
        ...


class Ours:
    """The engine, with a drafter or, as our own loop, without."""

    def __init__(self, name: str, engine: Engine) -> None:
        self.name, self.engine = name, engine
        self.kind: Kind = "baseline" if engine.drafter is None else "drafter"
        self.weights = 0 if engine.drafter is None else sum(p.numel() * p.element_size() for p in engine.drafter.parameters())

    def decode(self, prompt: Sequence[int], number: int, max_new_tokens: int, stop: Collection[int]) -> Trace:
        device = self.engine.target.device
        rounds: list[Round] = []
        wait(device)
        begun = time.perf_counter()
        marks = [begun]
        for found in self.engine.generate([prompt], max_new_tokens, stop, [number]):
            marks.append(time.perf_counter())
            rounds.append(found[0])
        wait(device)
        seconds = time.perf_counter() - begun
        steps = tuple(Step(len(r.tokens), until - since) for r, since, until in zip(rounds, marks, marks[1:], strict=False))
        return Trace(tuple(token for r in rounds for token in r.tokens), seconds, steps, tuple(rounds))


class _Marks(BaseStreamer):
    """What `generate` hands over, and when: first the prompt, then tokens as they come."""

    def __init__(self) -> None:
        self.counts: list[int] = []
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())
        self.counts.append(value.numel())

    def end(self) -> None:
        pass


class Transformers:
    """transformers' own `generate`. more: fields of its GenerationConfig; assistant: a small model of the same tokenizer."""

    kind: Kind = "baseline"

    def __init__(self, name: str, target: Target, sampling: SamplingConfig, more: dict[str, Any] | None = None, assistant: Target | None = None) -> None:
        self.name, self.target, self.sampling, self.more, self.assistant = name, target, sampling, more or {}, assistant
        self.weights = 0 if assistant is None else sum(p.numel() * p.element_size() for p in assistant.model.parameters())

    def decode(self, prompt: Sequence[int], number: int, max_new_tokens: int, stop: Collection[int]) -> Trace:
        model, device = self.target.model, self.target.device
        ids, marks = torch.tensor([prompt], device=device), _Marks()
        config = self._config(max_new_tokens, stop)
        helper = {} if self.assistant is None else {"assistant_model": self.assistant.model}
        own, model.generation_config = model.generation_config, type(config)()  # its own would fill whatever `config` leaves open
        try:
            with torch.inference_mode(), torch.random.fork_rng(enabled=not self.sampling.greedy):
                if not self.sampling.greedy:
                    torch.manual_seed(self.sampling.seed + number)
                wait(device)
                begun = time.perf_counter()
                out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config, streamer=marks, **helper)
                wait(device)
                seconds = time.perf_counter() - begun
        finally:
            model.generation_config = own
        tokens = tuple(out[0, len(prompt) :].tolist())
        return Trace(tokens, seconds, _steps(marks, begun, len(tokens)), None)

    def _config(self, max_new_tokens: int, stop: Collection[int]) -> Any:
        from transformers import GenerationConfig

        s = self.sampling
        how: dict[str, Any] = {"do_sample": False} if s.greedy else {"do_sample": True, "temperature": s.temperature, "top_k": s.top_k, "top_p": s.top_p}
        how |= {"min_p": s.min_p} if s.min_p and not s.greedy else {}
        return GenerationConfig(max_new_tokens=max_new_tokens, eos_token_id=sorted(stop) or None, pad_token_id=min(stop, default=0), **how, **self.more)


def _steps(marks: _Marks, begun: float, tokens: int) -> tuple[Step, ...]:
    """Steps of what came after the prompt; no more than `tokens`, as a round may hand over some that are cut off in the end."""
    steps, last, left = [], begun, tokens
    for at, count in zip(marks.times[1:], marks.counts[1:], strict=True):
        if left:
            steps.append(Step(min(count, left), at - last))
            left -= steps[-1].tokens
            last = at
    return tuple(steps)


def baselines(recipe: Recipe, target: Target) -> list[Method]:
    """What drafters are compared with: always `generate` and our own loop; prompt-lookup and assisted generation as `recipe.bench` asks.

    Raises ConfigError if the assistant cannot be read or has another tokenizer.
    """
    options, sampling = recipe.bench, recipe.decode.sampling
    found: list[Method] = [Transformers(GENERATE, target, sampling), Ours(LOOP, Engine(target, None, DraftingConfig(), sampling))]
    if options.prompt_lookup:
        found.append(Transformers(LOOKUP, target, sampling, {"prompt_lookup_num_tokens": options.prompt_lookup_tokens}))
    if options.assistant is not None:
        found.append(Transformers(ASSISTED, target, sampling, assistant=_assistant(options, recipe.target, options.assistant, target)))
    return found


def _assistant(options: BenchConfig, how: TargetConfig, folder: Path, target: Target) -> Target:
    try:
        assistant = Target.load(how.model_copy(update={"path": folder, "dtype": options.dtype}))
        same = assistant.tokenizer.get_vocab() == target.tokenizer.get_vocab()
    except ConfigError as error:
        raise ConfigError(str(error).replace("target.path=", "bench.assistant=")) from None
    if not same or assistant.geometry.vocab_size != target.geometry.vocab_size:
        raise ConfigError(
            f"bench.assistant={folder}: its tokenizer is not the target's ({assistant.geometry.vocab_size:,} tokens, the target's has "
            f"{target.geometry.vocab_size:,}); name a smaller model of the target's family"
        )
    return assistant
