"""What the target writes: answers to conversations, turn by turn, and prompts out of an empty user turn. Runs in Ray actors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from data_prep.chat import ChatError
from data_prep.generate import Generator
from data_prep.sources import Conversation
from kvshot_ds.config import PrepConfig, TargetConfig
from kvshot_ds.target import Target


@dataclass(frozen=True)
class Answered:
    """answers: the tokens of each answer, as `Generator.answers` gives them; fewer than the user turns where the
    conversation ended early. reason: why there is none at all, or ''."""

    id: str
    answers: list[list[int]]
    reason: str = ""


def answer(generator: Generator, conversations: Sequence[Conversation], options: PrepConfig, seed: int) -> list[Answered]:
    """Has every user turn answered, turn by turn, each in the context of the target's own earlier answers.

    A conversation ends early where its context outgrows `max_length` or an answer comes out empty.
    """
    wanted, template = options.regenerate, generator.template
    history: list[list[dict[str, str]]] = [[] for _ in conversations]
    answers: list[list[list[int]]] = [[] for _ in conversations]
    reasons = [""] * len(conversations)
    waiting = {n: iter(c.messages) for n, c in enumerate(conversations)}  # the messages still to come
    turn = 0
    while waiting:
        prompts: dict[int, list[int]] = {}
        for n, rest in list(waiting.items()):
            if not _next_question(rest, history[n]):
                del waiting[n]
                continue
            try:
                prompt = template.prompt(history[n])
                if len(prompt) + 2 > options.max_length:
                    raise ChatError(f"over-long: the prompt alone has {len(prompt)} tokens, prep.max_length={options.max_length}")
                prompts[n] = prompt
            except ChatError as reason:
                reasons[n] = str(reason)
                del waiting[n]
        written = generator.answers(list(prompts.values()), wanted.max_new_tokens, wanted.temperature, wanted.top_p, seed + turn, options.batch_size)
        for n, tokens in zip(prompts, written, strict=True):
            text = template.text(tokens)
            if not text:
                reasons[n] = "the target answers nothing"
                del waiting[n]
                continue
            answers[n].append(tokens)
            history[n].append({"role": "assistant", "content": text})
        turn += 1
    return [Answered(c.id, answers[n], "" if answers[n] else reasons[n]) for n, c in enumerate(conversations)]


def _next_question(rest: Iterator[dict[str, str]], history: list[dict[str, str]]) -> bool:
    """Moves messages from `rest` to `history` up to and including the next user turn; False if there is none."""
    for message in rest:
        history.append(message)
        if message["role"] == "user":
            return True
    return False


def synthesise(generator: Generator, count: int, options: PrepConfig, seed: int) -> list[str | None]:
    """`count` prompts sampled by the target as a user's turn (Magpie, arXiv 2406.08464): '' for an empty one, None for one that
    the target had not finished after `max_new_tokens`."""
    wanted, template = options.synthesis, generator.template
    start = template.open_user_turn()
    written = generator.answers([start] * count, wanted.max_new_tokens, wanted.temperature, wanted.top_p, seed, options.batch_size)
    return [template.text(tokens) if tokens[-1:] == [template.end_id] else None if tokens else "" for tokens in written]


@dataclass(frozen=True)
class Unit:
    """One batch of work. index: its number among its kind; count: prompts to synthesise, or 0: conversations to answer."""

    index: int
    seed: int
    count: int = 0
    conversations: tuple[Conversation, ...] = ()

    def __str__(self) -> str:
        return f"{'prompts' if self.count else 'answers'} unit {self.index}"


class Writer:
    """Ray actor of prep: one process holding the target."""

    def __init__(self, target: TargetConfig, options: PrepConfig) -> None:
        self.target, self.options = target, options
        self.generator: Generator | None = None

    def work(self, unit: Unit) -> list[Answered] | list[str | None]:
        # loaded here, not in __init__, so that an error reaches the driver as what it is
        if self.generator is None:
            torch.set_num_threads(max(1, int(self.options.cpus_per_worker)))
            self.generator = Generator(Target.load(self.target))
        if unit.count:
            return synthesise(self.generator, unit.count, self.options, unit.seed)
        return answer(self.generator, unit.conversations, self.options, unit.seed)
