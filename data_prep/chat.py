"""Chat template -> tokens and turns: which token belongs to which answer, read off the template's own rendering.

Nothing here knows a template. The start of an answer is where the rendering of everything before it, with the
generation prompt, ends: exactly what inference feeds, so the first supervised token is the first one the model writes.
The end is the template's own end-of-turn token. Templates for which this does not hold are refused, conversation by
conversation (`ChatError`), never guessed at.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import jinja2

from kvshot_ds.errors import ConfigError

Message = Mapping[str, str]

_PROBE = "kvshotprobe"


class ChatError(Exception):
    """This conversation cannot be rendered exactly; the text is the reason for its quarantine."""


@dataclass(frozen=True)
class Encoded:
    """tokens [S] int; turn [S] int: 0 = not supervised, n >= 1 = token of the n-th assistant turn (its end token included)."""

    tokens: list[int]
    turn: list[int]

    def trimmed(self) -> Encoded:
        """Without what follows the last supervised token: it teaches nothing."""
        stop = next((i + 1 for i in reversed(range(len(self.turn))) if self.turn[i]), 0)
        return Encoded(self.tokens[:stop], self.turn[:stop])

    def cut(self, max_length: int) -> Encoded | None:
        """The first `max_length` tokens, trimmed; None if no turn keeps two tokens, the least that gives a supervised row."""
        short = Encoded(self.tokens[:max_length], self.turn[:max_length]).trimmed()
        supervised = any(a and a == b for a, b in pairwise(short.turn))
        return short if supervised else None


class ChatTemplate:
    """The chat template of one tokenizer. end_id: the token that closes an assistant turn; special_ids: all special tokens.

    Raises ConfigError if the tokenizer has no template, or one that marks no end of an assistant turn.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        try:
            template = tokenizer.get_chat_template()
        except ValueError:
            raise ConfigError(
                f"the tokenizer of {tokenizer.name_or_path} has no chat template; expected an instruct model, or a chat_template.jinja in its folder"
            ) from None
        self._marked = re.search(r"\{%-?\s*generation\s*-?%\}", template) is not None
        self._special = {token.content: id for id, token in tokenizer.added_tokens_decoder.items() if token.special}
        self.special_ids = frozenset(self._special.values())
        self.end_id = self._find_end()

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Tokens fed to the model to have `messages` answered: rendered with the generation prompt. Raises ChatError."""
        self._check(messages)
        return self._ids(self._render(messages, prompt=True))

    def open_user_turn(self) -> list[int]:
        """Tokens up to where a user's first words would stand (Magpie, arXiv 2406.08464). Raises ConfigError if a template rewrites them."""
        text, probe, _ = self._render([{"role": "user", "content": _PROBE}], prompt=False).partition(_PROBE)
        if not probe:
            raise ConfigError("the chat template does not show a user's words as they stand; prompt synthesis is not possible (prep.synthesis.count=0)")
        return self._ids(text)

    def text(self, answer: Sequence[int]) -> str:
        """The words of a generated answer, without special tokens and outer blanks; a character cut in two at its end is dropped."""
        return self.tokenizer.decode(answer, skip_special_tokens=True, clean_up_tokenization_spaces=False).rstrip("\ufffd").strip()

    def encode(self, messages: Sequence[Message]) -> Encoded:
        """A finished conversation, up to its last assistant turn. Raises ChatError if the rendering cannot be split exactly."""
        last = max((i for i, m in enumerate(messages) if m["role"] == "assistant"), default=-1)
        if last < 0:
            raise ChatError("no assistant turn")
        messages = messages[: last + 1]
        self._check(messages)
        return self._encode(messages, self._render(messages, prompt=False), ()).trimmed()

    def encode_answered(self, messages: Sequence[Message], answer: Sequence[int], unfinished: Collection[int] = ()) -> Encoded:
        """A conversation whose last answer is given as the tokens the target wrote, so they stand exactly as it wrote them.

        messages: everything before that answer. unfinished: earlier turns (1-based) that were cut at the token limit; the
        end token their rendering adds is not the target's and stays unsupervised. Raises ChatError.
        """
        self._check(messages)
        head = self._encode(messages, self._render(messages, prompt=True), unfinished)
        turn = 1 + sum(m["role"] == "assistant" for m in messages)
        return Encoded([*head.tokens, *answer], [*head.turn, *[turn] * len(answer)])

    def _encode(self, messages: Sequence[Message], text: str, unfinished: Collection[int]) -> Encoded:
        """Tokens of `text`, the rendering of `messages`, with the turn of each."""
        tokens = self._ids(text)
        marks = self._marks(messages, tokens) if self._marked else None
        starts = [self._start(messages[:i], tokens, text) for i, m in enumerate(messages) if m["role"] == "assistant"]
        turn = [0] * len(tokens)
        for n, (start, limit) in enumerate(pairwise([*starts, len(tokens)]), 1):
            try:
                end = tokens.index(self.end_id, start, limit)
            except ValueError:
                raise ChatError(f"the template does not close assistant turn {n}") from None
            # a template that marks its answers knows better which parts of a turn the model wrote
            inside = [i for i in range(start, end) if marks is None or marks[i]]
            if marks is not None and not inside:
                continue
            if inside and inside[0] != start:
                raise ChatError(f"the template's marks of assistant turn {n} do not begin where the generation prompt ends")
            for i in inside if n in unfinished else [*inside, end]:
                turn[i] = n
        return Encoded(tokens, turn)

    def _start(self, before: Sequence[Message], tokens: list[int], text: str) -> int:
        """Index of the first token of the answer to `before`; checks that inference would feed exactly what stands before it."""
        prompt = self._render(before, prompt=True)
        if not text.startswith(prompt):
            raise ChatError(f"the template renders message {len(before) + 1} otherwise than its generation prompt begins it")
        ids = self._ids(prompt)
        if tokens[: len(ids)] != ids:
            raise ChatError(f"a token straddles the start of message {len(before) + 1}, so inference would never see these tokens")
        return len(ids)

    def _marks(self, messages: Sequence[Message], tokens: list[int]) -> list[int]:
        """1 for each token inside the template's `{% generation %}` marks. [S]"""
        prompt = messages[-1]["role"] != "assistant"
        out = self.tokenizer.apply_chat_template([dict(m) for m in messages], add_generation_prompt=prompt, return_dict=True, return_assistant_tokens_mask=True)
        if out["input_ids"] != tokens:
            raise ChatError("the template renders differently from one time to the next")
        return out["assistant_masks"]

    def _check(self, messages: Sequence[Message]) -> None:
        """Refuses text that would become a special token: it could open or close a turn."""
        for n, message in enumerate(messages, 1):
            for special in self._special:
                if special in message["content"]:
                    raise ChatError(f"message {n} contains the special token {special!r} as text")

    def _render(self, messages: Sequence[Message], prompt: bool) -> str:
        try:
            return self.tokenizer.apply_chat_template([dict(m) for m in messages], tokenize=False, add_generation_prompt=prompt)
        except (jinja2.TemplateError, ValueError, TypeError) as error:
            raise ChatError(f"the chat template refuses it: {error}") from None

    def _ids(self, text: str) -> list[int]:
        # templates write their own beginning-of-text token
        return self.tokenizer(text, add_special_tokens=False).input_ids

    def _find_end(self) -> int:
        """The first special token after an assistant's words."""
        try:
            text = self._render([{"role": "user", "content": "?"}, {"role": "assistant", "content": _PROBE}], prompt=False)
        except ChatError as error:
            raise ConfigError(f"the chat template does not render a question and an answer: {error}") from None
        end = next((token for token in self._ids(text.partition(_PROBE)[2]) if token in self.special_ids), None)
        if end is None:
            raise ConfigError("the chat template closes an assistant turn with no special token; such templates are not supported")
        return end
