"""What the target writes: answers to conversations, turn by turn, and prompts out of an empty user turn. Runs in Ray actors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch

from data_prep.chat import ChatError
from data_prep.generate import Ask, Generator, Sampling
from data_prep.sources import Conversation
from kvshot_ds.config import PrepConfig, TargetConfig
from kvshot_ds.errors import KvshotError
from kvshot_ds.target import Target


@dataclass(frozen=True)
class Answered:
    """What was answered to one conversation; fewer answers than user turns where it ended early.

    answers: the tokens of each answer, as `Generator.write` gives them. texts: with an endpoint, in their place, the
    assistant messages {"role", "content"[, "reasoning_content"], "finish_reason"}. reason: why there is no answer at all,
    or ''. failed: the reason is an endpoint that would not answer, not the conversation.
    """

    id: str
    answers: list[list[int]] = field(default_factory=list)
    reason: str = ""
    texts: list[dict[str, Any]] = field(default_factory=list)
    failed: bool = False


@dataclass
class Accounts:
    """Where the conversations of a run went: done + failed + skipped = input.

    done: answered in this run. failed: an endpoint would not answer. skipped: answered by an earlier run (`before`), or
    not to be answered: without a question, over-long, refused by the template.
    """

    input: int = 0
    done: int = 0
    failed: int = 0
    skipped: int = 0
    before: int = 0

    def add(self, answered: Iterable[Answered], before: bool = False) -> None:
        """Books the results of one unit. before: they come from an earlier run."""
        for one in answered:
            if before:
                self.before += 1
            if one.failed:
                self.failed += 1
            elif one.reason or before:
                self.skipped += 1
            else:
                self.done += 1

    def check(self) -> None:
        """Raises KvshotError unless every conversation is accounted for."""
        if self.done + self.failed + self.skipped != self.input:
            found = f"{self.done} done + {self.failed} failed + {self.skipped} skipped"
            raise KvshotError(f"the accounts of the answers do not add up: {found} of {self.input} conversations; this is a fault of kvshot prep")


@dataclass(frozen=True)
class Unit:
    """One piece of work, with the same result whoever does it. index: its number among its kind; count: prompts to
    synthesise from `seed`, or 0: conversations to answer (their random numbers follow from prep.seed and their ids)."""

    index: int
    seed: int = 0
    count: int = 0
    conversations: tuple[Conversation, ...] = ()

    def __str__(self) -> str:
        return f"{'prompts' if self.count else 'answers'} unit {self.index}"


def unit_size(conversations: int, options: PrepConfig) -> int:
    """Conversations in a unit: several batches, so that few rows stand empty while its last answers are written, but at
    least two units for each worker, and no more than a kill may cost."""
    return max(1, min(8 * options.batch_size, -(-conversations // (2 * options.workers))))


def units_of(conversations: Iterable[Conversation], size: int) -> Iterator[Unit]:
    """Units of `size` conversations in the order given: best of like length, the longest first, so that no worker is left with a long one at the end."""
    rest = iter(conversations)
    index = 0
    while part := tuple(islice(rest, size)):
        yield Unit(index, conversations=part)
        index += 1


@dataclass
class Talk:
    """A conversation on its way: what was said, what is still to be asked, what was answered."""

    conversation: Conversation
    history: list[dict[str, Any]] = field(default_factory=list)
    turn: int = 0

    def __post_init__(self) -> None:
        self.rest = iter(self.conversation.messages)

    def next_question(self) -> bool:
        """Moves messages to the history up to and including the next user turn; False if there is none."""
        for message in self.rest:
            self.history.append(message)
            if message["role"] == "user":
                self.turn += 1
                return True
        return False


class _Answering:
    """Hands the questions of many conversations to a generator, each in the context of the target's own earlier answers."""

    def __init__(self, generator: Generator, conversations: Sequence[Conversation], options: PrepConfig) -> None:
        self.template, self.options = generator.template, options
        self.talks = [Talk(c) for c in conversations]
        self.found = [Answered(c.id) for c in conversations]

    def first(self) -> list[Ask]:
        return [ask for n in range(len(self.talks)) if (ask := self._ask(n)) is not None]

    def heard(self, ask: Ask, tokens: list[int]) -> Ask | None:
        """Keeps an answer and gives the conversation's next question, if it has one that fits."""
        said = self.template.parse_answer(tokens)
        if not any(value for name, value in said.items() if name != "role"):
            self._end(ask.key, "the target answers nothing")
            return None
        self.found[ask.key].answers.append(tokens)
        if not said["content"] and not said.get("tool_calls"):
            return None  # cut while it was still thinking: there is nothing that a next turn could refer to
        self.talks[ask.key].history.append(said)
        return self._ask(ask.key)

    def _ask(self, n: int) -> Ask | None:
        talk, options = self.talks[n], self.options
        if not talk.next_question():
            self._end(n, "no question")
            return None
        try:
            prompt = self.template.prompt(talk.history, talk.conversation.tools)
        except ChatError as reason:
            self._end(n, str(reason))
            return None
        if len(prompt) + 2 > options.max_length:
            self._end(n, f"over-long: the prompt alone has {len(prompt)} tokens, prep.max_length={options.max_length}")
            return None
        limit = min(options.regenerate.max_new_tokens, options.max_length - len(prompt))  # what is longer would be cut
        return Ask(n, prompt, limit, f"{options.seed}/{talk.conversation.id}/{talk.turn}")

    def _end(self, n: int, reason: str) -> None:
        if not self.found[n].answers:
            self.found[n] = Answered(self.found[n].id, reason=reason)


def answer(generator: Generator, conversations: Sequence[Conversation], options: PrepConfig) -> list[Answered]:
    """Has every user turn answered, each in the context of the target's own earlier answers; as soon as one turn of a
    conversation is answered, its next one is asked.

    A conversation ends early where its context outgrows `max_length`, or an answer comes out empty or all thought.
    """
    wanted = options.regenerate
    task = _Answering(generator, conversations, options)
    sampling = Sampling(wanted.temperature, wanted.top_p, wanted.top_k, wanted.min_p)
    generator.write(task.first(), task.heard, sampling, options.batch_size)
    return task.found


def synthesise(generator: Generator, count: int, options: PrepConfig, seed: int) -> list[str | None]:
    """`count` prompts sampled by the target as a user's turn (Magpie, arXiv 2406.08464): '' for an empty one, None for one that
    the target had not finished after `max_new_tokens`."""
    wanted, template = options.synthesis, generator.template
    start = template.open_user_turn()
    sampling = Sampling(wanted.temperature, wanted.top_p)
    written = generator.answers([start] * count, wanted.max_new_tokens, sampling, seed, options.batch_size)
    return [template.text(tokens) if tokens[-1:] == [template.end_id] else None if tokens else "" for tokens in written]


class Writer:
    """Ray actor of prep: one process holding the target."""

    def __init__(self, target: TargetConfig, options: PrepConfig) -> None:
        self.target, self.options = target, options
        self.generator: Generator | None = None

    def work(self, unit: Unit) -> list[Answered] | list[str | None]:
        # loaded here, not in __init__, so that an error reaches the driver as what it is
        if self.generator is None:
            torch.set_num_threads(max(1, int(self.options.cpus_per_worker)))
            self.generator = Generator(Target.load(self.target), self.options.template)
        if unit.count:
            return synthesise(self.generator, unit.count, self.options, unit.seed)
        return answer(self.generator, unit.conversations, self.options)
