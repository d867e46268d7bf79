"""Conversations with their answers -> lines of the prepared files: messages, tokens and masks. Runs in processes of prep."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from data_prep.chat import ChatError, ChatTemplate, Encoded
from data_prep.sources import Quarantined
from data_prep.spool import Stored
from kvshot_ds.config import PrepConfig, TargetConfig
from kvshot_ds.target import load_tokenizer

BLOCK = 512  # conversations tokenised in one call


@dataclass(frozen=True)
class Line:
    """A prepared conversation. text: its JSON line; heldout: its split; tokens, supervised, generated (by the target): counts;
    cut: it was longer than max_length; turns_left_out: assistant turns that the template rewrites, which teach nothing."""

    text: str
    heldout: bool
    tokens: int
    supervised: int
    generated: int
    cut: bool
    turns_left_out: int


@dataclass(frozen=True)
class _Spoken:
    """A conversation with its answers in their places. tokens: of the last answer, if the target wrote it here, which then is
    not in `before`; unfinished: turns (1-based) whose end token is not the target's."""

    messages: list[dict[str, Any]]
    before: list[dict[str, Any]]
    tokens: list[int] | None = None
    unfinished: frozenset[int] = frozenset()
    generated: int = 0


class Tokeniser:
    """Renders, tokenises and masks blocks of conversations. May be sent to another process, where it loads its tokenizer."""

    def __init__(self, target: TargetConfig, options: PrepConfig) -> None:
        self.target, self.options = target, options
        self._template: ChatTemplate | None = None

    @property
    def template(self) -> ChatTemplate:
        if self._template is None:
            self._template = ChatTemplate(load_tokenizer(self.target.path, self.target.trust_remote_code), self.options.template)
        return self._template

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_template": None}

    def __call__(self, block: Sequence[Stored]) -> list[Line | Quarantined]:
        spoken = [self._spoken(stored) for stored in block]
        found: dict[int, Encoded | ChatError] = {n: said for n, said in enumerate(spoken) if isinstance(said, ChatError)}
        given = {n: said for n, said in enumerate(spoken) if isinstance(said, _Spoken) and said.tokens is None}
        encoded = self.template.encode_many([(s.messages, block[n].conversation.tools) for n, s in given.items()])
        for (n, s), one in zip(given.items(), encoded, strict=True):
            found[n] = one if isinstance(one, ChatError) else self._unended(one, s.unfinished)
        found |= {n: self._answered(block[n], said) for n, said in enumerate(spoken) if isinstance(said, _Spoken) and said.tokens is not None}
        return [self._line(stored, said, found[n]) for n, (stored, said) in enumerate(zip(block, spoken, strict=True))]

    def _spoken(self, stored: Stored) -> _Spoken | ChatError:
        """What was said, by whom; the reason if nothing was answered."""
        given, answered = stored.conversation.messages, stored.answered
        if not self.options.regenerate.enabled:
            return _Spoken(list(given), [])
        if answered is None or answered["reason"]:
            return ChatError(answered["reason"] if answered else "it was not answered")
        tokens, texts = answered["answers"], answered["texts"]
        if texts and texts[-1].get("finish_reason") == "length" and not texts[-1]["content"] and not texts[-1].get("tool_calls"):
            texts = texts[:-1]  # the template would end a thought that the target did not end
            if not texts:
                return ChatError("the target was still thinking when it was cut; raise prep.regenerate.max_new_tokens")
        said = texts or [self.template.parse_answer(answer) for answer in tokens]
        messages: list[dict[str, Any]] = []
        turn = 0
        for message in given:
            messages.append(message)
            if message["role"] == "user":
                messages.append({key: part for key, part in said[turn].items() if key != "finish_reason"})
                turn += 1
                if turn == len(said):
                    break
        if texts:
            cut = frozenset(n for n, text in enumerate(texts, 1) if text.get("finish_reason") == "length")
            return _Spoken(messages, [], None, cut)
        cut = frozenset(n for n, answer in enumerate(tokens[:-1], 1) if answer[-1] != self.template.end_id)
        return _Spoken(messages, messages[:-1], tokens[-1], cut, sum(map(len, tokens)))

    def _answered(self, stored: Stored, spoken: _Spoken) -> Encoded | ChatError:
        try:
            return self.template.encode_answered(spoken.before, spoken.tokens or [], spoken.unfinished, stored.conversation.tools)
        except ChatError as reason:
            return reason

    def _unended(self, encoded: Encoded, unfinished: frozenset[int]) -> Encoded:
        """Turns that a server cut at the token limit end with a token that the template wrote, not the target."""
        turn = list(encoded.turn)
        for n in unfinished:
            last = max((i for i, t in enumerate(turn) if t == n), default=None)
            if last is not None and encoded.tokens[last] == self.template.end_id:
                turn[last] = 0
        return replace(encoded, turn=turn).trimmed() if unfinished else encoded

    def _line(self, stored: Stored, spoken: _Spoken | ChatError, whole: Encoded | ChatError) -> Line | Quarantined:
        conversation, limit = stored.conversation, self.options.max_length
        if isinstance(whole, ChatError) or isinstance(spoken, ChatError):
            return conversation.quarantined(str(whole))
        short = whole.cut(limit)
        if short is None:
            size = len(whole.tokens)
            why = f"over-long: nothing to learn from in the first {limit} of {size} tokens" if size > limit else "no answer of at least two tokens"
            return conversation.quarantined(why)
        line: dict[str, Any] = {"id": stored.id, "messages": self.template.with_system(spoken.messages)}
        if conversation.tools:
            line["tools"] = conversation.tools
        line |= {"tokens": short.tokens, "turn": short.turn, "source": conversation.source}
        supervised = len(short.turn) - short.turn.count(0)
        # a copy goes where its original goes
        heldout = share(conversation.id) < self.options.heldout_fraction
        generated = spoken.generated or supervised * bool(stored.answered)
        return Line(
            json.dumps(line, ensure_ascii=False), heldout, len(short.tokens), supervised, generated, len(short.tokens) < len(whole.tokens), whole.left_out
        )


def share(id: str) -> float:
    """A number in [0, 1) that depends on nothing but the id."""
    return int(hashlib.sha256(f"heldout/{id}".encode()).hexdigest()[:12], 16) / 16**12
