"""Files of conversations or prompts -> conversations, or quarantined records that say why. Nothing is skipped in silence."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvshot_ds.config import SourceConfig
from kvshot_ds.errors import ConfigError

_ROLES = {"system": "system", "user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant"}
_AFTER = {"system": ("",), "user": ("", "system", "assistant"), "assistant": ("user",)}  # role -> the roles it may follow
_EXCERPT = 200


@dataclass(frozen=True)
class Conversation:
    """messages: {"role", "content"} in order, contents without outer blanks. file, line: where it came from.

    id: sha256 over the messages, so it depends on neither file nor order.
    """

    messages: tuple[dict[str, str], ...]
    file: str
    line: int

    @property
    def id(self) -> str:
        text = json.dumps([[m["role"], m["content"]] for m in self.messages], ensure_ascii=False)
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    @property
    def source(self) -> str:
        return f"{Path(self.file).name}:{self.line}"

    def quarantined(self, reason: str) -> Quarantined:
        """This conversation as a record that cannot be used after all."""
        return Quarantined(self.file, self.line, reason, " | ".join(m["content"] for m in self.messages)[:_EXCERPT])


@dataclass(frozen=True)
class Quarantined:
    """A record that cannot be used. line: 1-based line where it begins; record: its first characters (<= 200)."""

    file: str
    line: int
    reason: str
    record: str


class _BadRecord(Exception):
    """Text: the reason."""


@dataclass(frozen=True)
class _Record:
    """One piece of a file. value: its JSON value; error: why there is none; entry: its 1-based place in a JSON list, or 0."""

    line: int
    raw: str
    value: Any = None
    error: str | None = None
    entry: int = 0


def read(source: SourceConfig, questions_only: bool) -> Iterator[Conversation | Quarantined]:
    """Every record of a file, in order. JSONL and prompt files are streamed.

    questions_only: the target will write the answers, so assistant turns are dropped (ids do not depend on them either)
    and a conversation without one is welcome; otherwise a conversation is kept up to its last assistant turn.
    Raises ConfigError if the file cannot be read.
    """
    path = Path(source.path).expanduser()
    try:
        with open(path, "rb") as file:
            head = file.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n")[:1]
    except OSError as error:
        raise ConfigError(f"prep.sources: {path} cannot be read ({error.strerror}); expected a file of conversations or prompts") from None
    structured = path.suffix.lower() in (".json", ".jsonl", ".ndjson") or (source.format == "auto" and head in (b"{", b"["))
    if not structured and source.format in ("auto", "prompts"):
        records = _lines(path, parse=False)
    elif head == b"[" and path.suffix.lower() not in (".jsonl", ".ndjson"):
        records = _json_list(path)
    else:
        records = _lines(path, parse=True)
    return _conversations(path, records, source.format, questions_only)


def _conversations(path: Path, records: Iterator[_Record], layout: str, questions_only: bool) -> Iterator[Conversation | Quarantined]:
    for record in records:
        try:
            if record.error:
                raise _BadRecord(record.error)
            messages = _normalise(_turns(record.value, layout), questions_only)
            yield Conversation(messages, str(path), record.line)
        except _BadRecord as reason:
            why = f"entry {record.entry}: {reason}" if record.entry else str(reason)  # a list may stand on one line
            yield Quarantined(str(path), record.line, why, record.raw.encode("utf-8", "replace").decode()[:_EXCERPT])


def _lines(path: Path, parse: bool) -> Iterator[_Record]:
    """One record a line, blank lines left out. Bytes that are no UTF-8 become lone surrogates, which `_text` refuses."""
    with open(path, encoding="utf-8", errors="surrogateescape", newline="\n") as file:
        for number, line in enumerate(file, 1):
            raw = line.strip().removeprefix("\ufeff")
            if not raw:
                continue
            if not parse:
                yield _Record(number, raw, {"prompt": raw})
                continue
            try:
                yield _Record(number, raw, json.loads(raw))
            except (ValueError, RecursionError) as error:
                yield _Record(number, raw, error=f"not readable as JSON: {error}")


def _json_list(path: Path) -> Iterator[_Record]:
    """The elements of a JSON list, one by one, so that a damaged or cut end costs only what it hits."""
    text = path.read_text(encoding="utf-8", errors="surrogateescape")
    decoder, at, line, counted, entry = json.JSONDecoder(), text.index("[") + 1, 1, 0, 0
    while True:
        while at < len(text) and text[at] in " \t\r\n,":
            at += 1
        line, counted = line + text.count("\n", counted, at), at
        rest = text[at : at + _EXCERPT]
        if rest.startswith("]"):
            if rest[1:].strip():
                yield _Record(line, rest, error="text after the end of the list; a file of one record a line is named .jsonl")
            return
        try:
            value, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            why = f"not readable as JSON from here to the end of the file: {error}" if rest else "the list is not closed: the file is cut off"
            yield _Record(line, rest, error=why)
            return
        entry += 1
        yield _Record(line, text[at : min(end, at + _EXCERPT)], value, entry=entry)
        at = end


def _turns(value: Any, layout: str) -> list[tuple[Any, Any]]:
    """(role, content) of each turn of one record, in any of the layouts."""
    if not isinstance(value, dict):
        raise _BadRecord(f"expected a JSON object, found {type(value).__name__}")
    if layout == "auto":
        layout = next((name for key, name in (("conversations", "sharegpt"), ("messages", "messages"), ("prompt", "prompts")) if key in value), "")
    key, role, content = {
        "sharegpt": ("conversations", "from", "value"),
        "messages": ("messages", "role", "content"),
        "prompts": ("prompt", "", ""),
    }.get(layout, ("", "", ""))
    if key not in value:
        raise _BadRecord(f"expected the key {key!r}" if key else "expected one of the keys 'conversations', 'messages', 'prompt'")
    if layout == "prompts":
        return [("user", value[key])]
    if not isinstance(value[key], list) or not all(isinstance(turn, dict) for turn in value[key]):
        raise _BadRecord(f"expected {key!r} to be a list of objects")
    if any(turn.get("tool_calls") for turn in value[key]):
        raise _BadRecord("tool calls are not supported")
    return [(turn.get(role), turn.get(content)) for turn in value[key]]


def _normalise(turns: list[tuple[Any, Any]], questions_only: bool) -> tuple[dict[str, str], ...]:
    """Known roles that alternate, real text; assistant turns dropped, or everything after the last one."""
    if not turns:
        raise _BadRecord("empty conversation")
    messages: list[dict[str, str]] = []
    previous = ""
    for n, (name, content) in enumerate(turns, 1):
        role = _ROLES.get(name) if isinstance(name, str) else None
        if role is None:
            raise _BadRecord(f"turn {n}: unknown role {name!r}; known: {', '.join(_ROLES)}")
        if previous not in _AFTER[role]:
            raise _BadRecord(f"turn {n}: {role} cannot follow {previous}" if previous else f"turn {n}: a conversation cannot begin with {role}")
        previous = role
        if role == "assistant" and questions_only:
            continue
        messages.append({"role": role, "content": _text(content, n)})
    if questions_only:
        if messages[-1]["role"] == "system":
            raise _BadRecord("no user turn")
        return tuple(messages)
    last = max((i for i, m in enumerate(messages) if m["role"] == "assistant"), default=None)
    if last is None:
        raise _BadRecord("no assistant turn; prep.regenerate.enabled=true has the target write one")
    return tuple(messages[: last + 1])


def _text(content: Any, n: int) -> str:
    """The text of one turn: a string, or OpenAI's list of text parts."""
    if isinstance(content, list):
        if not all(isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in content):
            raise _BadRecord(f"turn {n}: expected text parts only")
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise _BadRecord(f"turn {n}: expected text, found {type(content).__name__}")
    content = content.strip()
    if not content:
        raise _BadRecord(f"turn {n}: empty")
    try:
        content.encode()
    except UnicodeEncodeError:
        raise _BadRecord(f"turn {n}: not UTF-8") from None
    return content
