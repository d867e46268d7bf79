"""The rules a conversation has to pass before it is answered or rendered: pure functions, in the order of `RULES`.

html, empty_turns, leading_assistant, repeated_roles mend or refuse; then what cannot be used is left out: without a user turn or
an answer, with tools where the answers are written anew, in another language, known to an evaluation set. Exact and near
duplicates are found where all conversations lie (spool.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.overlap import EvaluationSets, band_keys, near_grams, rows_per_band
from data_prep.page import page_text
from data_prep.sources import BadRecord, Conversation, Quarantined, evaluation_prompts
from kvshot_ds.config import CleaningConfig
from kvshot_ds.errors import ConfigError

Messages = tuple[dict[str, Any], ...]


@dataclass(frozen=True)
class Mended:
    """What a rule makes of a conversation. found: what was wrong with it, '' if nothing."""

    messages: Messages
    found: str = ""


@dataclass(frozen=True)
class Dropped:
    """A conversation left out by a rule that drops. record: its first characters."""

    file: str
    line: int
    rule: str
    reason: str
    record: str


@dataclass(frozen=True)
class Outcome:
    """What became of a record. mended: the rules that changed it; bands: its keys in the search for near duplicates."""

    item: Conversation | Quarantined | Dropped
    mended: tuple[str, ...] = ()
    bands: tuple[int, ...] = ()


def html(messages: Messages, answers: bool) -> Mended:
    """A rendered page becomes its text."""
    texts = [page_text(m["content"]) if answers or m["role"] != "assistant" else None for m in messages]
    found = next((f"turn {n} is a rendered page" for n, text in enumerate(texts, 1) if text is not None), "")
    return Mended(tuple({**m, "content": text} if text is not None else m for m, text in zip(messages, texts, strict=True)), found)


def empty_turns(messages: Messages, answers: bool) -> Mended:
    """The conversation ends before the first turn without text. An empty system turn is left out, a tool may answer nothing."""
    kept: list[dict[str, Any]] = []
    found = ""
    for n, message in enumerate(messages, 1):
        role = message["role"]
        if message["content"].strip() or role == "tool" or message.get("tool_calls") or (role == "assistant" and not answers):
            kept.append(message)
            continue
        found = found or f"turn {n} is empty"
        if role != "system":
            break
    return Mended(tuple(kept), found)


def leading_assistant(messages: Messages, answers: bool) -> Mended:
    """Assistant turns before the first user turn, and the tools' answers to them, are dropped."""
    first = next((i for i, m in enumerate(messages) if m["role"] == "user"), len(messages))
    kept = tuple(m for m in messages[:first] if m["role"] == "system")
    n = next((i for i, m in enumerate(messages[:first], 1) if m["role"] != "system"), 0)
    return Mended((*kept, *messages[first:]), f"turn {n} is the assistant's, before any of the user's" if n else "")


def repeated_roles(messages: Messages, answers: bool) -> Mended:
    """Two turns of one role in a row become one. Tools may answer side by side, and calls are left as they are."""
    kept: list[dict[str, Any]] = []
    found = ""
    for n, message in enumerate(messages, 1):
        before = kept[-1] if kept else {"role": "tool"}
        if message["role"] != before["role"] or message["role"] == "tool" or "tool_calls" in message or "tool_calls" in before:
            kept.append(message)
            continue
        found = found or f"turn {n} is the {message['role']}'s again"
        parts = {key: [m[key] for m in (before, message) if m.get(key)] for key in ("content", "reasoning_content")}
        kept[-1] = {**before, **{key: "\n\n".join(texts) for key, texts in parts.items() if texts}}
    return Mended(tuple(kept), found)


RULES: tuple[tuple[str, Callable[[Messages, bool], Mended]], ...] = (
    ("html", html),
    ("empty_turns", empty_turns),
    ("leading_assistant", leading_assistant),
    ("repeated_roles", repeated_roles),
)


def usable(messages: Messages, answers: bool) -> Messages:
    """The part that is trained on: up to the last answer, or the questions alone. Raises BadRecord if there is none."""
    if not any(m["role"] == "user" for m in messages):
        raise BadRecord("no user turn")
    if not answers:
        messages = tuple(m for m in messages if m["role"] != "assistant")
        return messages[: 1 + max(i for i, m in enumerate(messages) if m["role"] == "user")]
    last = max((i for i, m in enumerate(messages) if m["role"] == "assistant"), default=None)
    if last is None:
        raise BadRecord("no assistant turn; prep.regenerate.enabled=true has the target write one")
    return messages[: last + 1]


class Cleaner:
    """All rules that look at one conversation. May be sent to another process. answers: those given are kept."""

    def __init__(self, options: CleaningConfig, answers: bool, evaluation: EvaluationSets) -> None:
        self.options, self.answers, self.evaluation = options, answers, evaluation
        self.rows = rows_per_band(options.near_duplicates) if options.near_duplicates else 0
        self.mending = [(name, rule, getattr(options, name)) for name, rule in RULES if getattr(options, name) != "off"]

    def __call__(self, items: Sequence[Conversation | Quarantined]) -> list[Outcome]:
        return [self.outcome(item) for item in items]

    def outcome(self, item: Conversation | Quarantined) -> Outcome:
        if isinstance(item, Quarantined):
            return Outcome(item)
        mended: list[str] = []
        try:
            messages = self._mend(item.messages, mended)
            if not self.answers and item.uses_tools:
                raise BadRecord("tools: the tools' answers do not follow from answers written anew; prep.regenerate.enabled=false keeps those given")
            clean = replace(item, messages=usable(messages, self.answers))
        except BadRecord as reason:
            return Outcome(item.quarantined(f"{reason}{f' (after {mended[-1]})' if mended else ''}"))
        rule, why = self._unwanted(clean)
        if rule:
            return Outcome(Dropped(item.file, item.line, rule, why, clean.excerpt()))
        keys = band_keys(near_grams(m["content"] for m in clean.messages), self.rows) if self.rows else np.empty(0, np.int64)
        return Outcome(clean, tuple(mended), tuple(keys.tolist()))

    def _mend(self, messages: Messages, mended: list[str]) -> Messages:
        """Appends the rules that mended to `mended`. Raises BadRecord where a rule refuses."""
        for name, rule, how in self.mending:
            done = rule(messages, self.answers)
            if done.found and how == "refuse":
                raise BadRecord(f"{name}: {done.found}")
            if done.found:
                mended.append(name)
                messages = done.messages
        return messages

    def _unwanted(self, conversation: Conversation) -> tuple[str, str]:
        """The rule that drops it and why, or two empty texts."""
        if self.options.languages and (language := language_of(conversation.messages)) not in self.options.languages:
            return "languages", f"its language is {language}"
        name = self.evaluation.hit(conversation.messages) if self.evaluation.names else None
        return (f"evaluation: {name}", "shares words with an evaluation prompt") if name else ("", "")


def language_of(messages: Sequence[Mapping[str, Any]]) -> str:
    """ISO 639-1 code of the first 4,000 characters outside code blocks."""
    import py3langid

    text = "\n".join(part for m in messages for part in m["content"].split("```")[::2])
    return py3langid.classify(text[:4000])[0]


def make_cleaner(options: CleaningConfig, answers: bool) -> Cleaner:
    """Reads the evaluation sets. Raises ConfigError: one that cannot be read, a language that is not known."""
    if options.languages:
        import py3langid

        known = sorted(code for code, _ in py3langid.rank(""))
        unknown = [code for code in options.languages if code not in known]
        if unknown:
            raise ConfigError(f"prep.cleaning.languages: {', '.join(unknown)} not known; known: {', '.join(known)}")
    if not options.evaluation_ngram:
        return Cleaner(options, answers, EvaluationSets())
    paths = [path.expanduser() for path in options.evaluation_sets]
    alike = len({path.name for path in paths}) < len(paths)
    files = {str(path) if alike else path.name: evaluation_prompts(Path(path)) for path in paths}
    return Cleaner(options, answers, EvaluationSets.build(files, options.evaluation_ngram))
