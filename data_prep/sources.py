"""Records in any of the public layouts -> conversations, or quarantined records that say why. Nothing is skipped in silence."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from data_prep.readers import Record, place, records
from kvshot_ds.config import SourceConfig
from kvshot_ds.errors import ConfigError

_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "tool": "tool",
}
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")
_EXCERPT = 200


@dataclass(frozen=True)
class Conversation:
    """messages: {"role", "content"} in order, contents without outer blanks; where given also "reasoning_content", "tool_calls",
    "tool_call_id", "name". tools: what the assistant may call. file, line: where it came from (line: row of a table).

    id: sha256 over messages and tools, so it depends on neither file nor order.
    """

    messages: tuple[dict[str, Any], ...]
    file: str
    line: int
    tools: tuple[dict[str, Any], ...] = ()

    @cached_property
    def id(self) -> str:
        said: list[Any] = []
        for message in self.messages:
            more = {key: part for key, part in message.items() if key not in ("role", "content")}
            said.append([message["role"], message["content"], *([more] if more else [])])
        if self.tools:
            said.append(self.tools)
        return hashlib.sha256(json.dumps(said, ensure_ascii=False, sort_keys=True).encode()).hexdigest()[:32]

    @property
    def source(self) -> str:
        return f"{Path(self.file).name}:{self.line}"

    @property
    def uses_tools(self) -> bool:
        return bool(self.tools) or any(m["role"] == "tool" or "tool_calls" in m for m in self.messages)

    def excerpt(self) -> str:
        """Its first characters (<= 200), for a list of what was left out."""
        return _printable(" | ".join(m["content"] for m in self.messages))

    def quarantined(self, reason: str) -> Quarantined:
        """This conversation as a record that cannot be used after all."""
        return Quarantined(self.file, self.line, reason, self.excerpt())


@dataclass(frozen=True)
class Quarantined:
    """A record that cannot be used. line: 1-based line where it begins, or row; record: its first characters (<= 200)."""

    file: str
    line: int
    reason: str
    record: str


class BadRecord(Exception):
    """Text: the reason."""


def read(source: SourceConfig, passed: Callable[[int], object] | None = None) -> Iterator[Conversation | Quarantined]:
    """Every record of a source, in order, streamed. passed: told of the bytes of a file as they are read. Raises ConfigError at once if it cannot be read."""
    found = records(source) if passed is None else records(source, passed)
    return _conversations(place(source), found, source.format)


def _conversations(file: str, found: Iterator[Record], layout: str) -> Iterator[Conversation | Quarantined]:
    for record in found:
        try:
            if record.error:
                raise BadRecord(record.error)
            yield conversation(record.value, layout, file, record.line)
        except (BadRecord, RecursionError) as error:
            reason = str(error) if isinstance(error, BadRecord) else "nested too deeply"
            why = f"entry {record.entry}: {reason}" if record.entry else reason  # a list may stand on one line
            yield Quarantined(file, record.line, _printable(why, 500), _printable(record.raw or _shown(record.value)))


def conversation(value: Any, layout: str, file: str, line: int) -> Conversation:
    """One record in any of the layouts. Raises BadRecord."""
    if not isinstance(value, dict):
        raise BadRecord(f"expected a JSON object, found {type(value).__name__}")
    turns = _turns(value, layout)
    if not turns:
        raise BadRecord("empty conversation")
    messages = tuple(_message(turn, n) for n, turn in enumerate(turns, 1))
    tools = _objects(value.get("tools"), "'tools'", needs="")
    made = Conversation(messages, file, line, tools)
    try:
        _ = made.id
    except (UnicodeEncodeError, TypeError, ValueError):
        n = next((n for n, m in enumerate(messages, 1) if not _is_text(m)), None)
        raise BadRecord(f"turn {n}: not UTF-8" if n else "'tools': not JSON in UTF-8") from None
    return made


def evaluation_prompts(path: Path) -> Iterator[str]:
    """Every prompt of a file of evaluation prompts: {turns: [...]}, {question}, {prompt}, a line of text, or the user turns of a conversation.

    Raises ConfigError if the file cannot be read, or a record of it: what is not known cannot be kept out.
    """
    wanted = SourceConfig(path=path, format="auto")
    for record in records(wanted):
        value = record.value
        try:
            if record.error:
                raise BadRecord(record.error)
            # a whole conversation says more than its first prompt
            talk = isinstance(value, dict) and any(isinstance(value.get(key), list | dict) for key in ("conversations", "messages"))
            found = next((value[key] for key in ("turns", "question", "prompt") if not talk and isinstance(value, dict) and value.get(key)), None)
            if isinstance(found, str):
                yield found
            elif isinstance(found, list) and all(isinstance(turn, str) for turn in found):
                yield from found
            else:
                yield from (m["content"] for m in conversation(value, "auto", str(path), record.line).messages if m["role"] == "user")
        except (BadRecord, RecursionError) as reason:
            raise ConfigError(f"prep.cleaning.evaluation_sets: {path}, line {record.line}: no evaluation prompt can be read from it: {reason}") from None


def _turns(value: Mapping[str, Any], layout: str) -> list[Any]:
    """The turns of one record as mappings with the keys of OpenAI's messages."""
    known = ("conversations", "messages", "data", "prompt")
    keys = {"auto": known, "sharegpt": known[:1], "messages": known[1:2], "ultrachat": ("data", "messages"), "prompts": known[3:]}[layout]
    key = next((key for key in keys if value.get(key) is not None), next((key for key in keys if key in value), None))
    if key is None:
        raise BadRecord(f"expected {'the key' if len(keys) == 1 else 'one of the keys'} {', '.join(map(repr, keys))}")
    found = value[key]
    if key == "prompt" and (isinstance(found, str) or not isinstance(found, list)):
        return [{"role": "user", "content": found}]
    if isinstance(found, dict) and found and all(isinstance(column, list) for column in found.values()):
        # a data set's Sequence of structs comes as columns
        if len({len(column) for column in found.values()}) > 1:
            raise BadRecord(f"expected the columns of {key!r} to be of one length")
        found = [dict(zip(found, row, strict=True)) for row in zip(*found.values(), strict=True)]
    if key == "data" and isinstance(found, list) and not any(isinstance(turn, dict) for turn in found):
        return [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(found)]
    if not isinstance(found, list) or not all(isinstance(turn, dict) for turn in found):
        raise BadRecord(f"expected {key!r} to be a list of objects")
    if key == "conversations":
        return [{**turn, "role": turn.get("from", turn.get("role")), "content": turn.get("value", turn.get("content"))} for turn in found]
    return found


def _message(turn: Mapping[str, Any], n: int) -> dict[str, Any]:
    """One message: a known role, its text, and what else OpenAI's messages may carry. Raises BadRecord."""
    name = turn.get("role")
    role = _ROLES.get(name.strip().lower()) if isinstance(name, str) else None
    if role is None:
        raise BadRecord(f"turn {n}: unknown role {_printable(repr(name))}; known: {', '.join(_ROLES)}")
    if turn.get("function_call"):
        raise BadRecord(f"turn {n}: function_call is not supported; expected tool_calls")
    calls = _objects(turn.get("tool_calls"), f"turn {n}: 'tool_calls'", needs="function") if role == "assistant" else ()
    content = turn.get("content")
    message: dict[str, Any] = {"role": role, "content": "" if content is None and calls else _text(content, n)}
    if role == "assistant":
        thought = next((turn[key] for key in _THOUGHTS if turn.get(key)), None)
        if thought is not None:
            message["reasoning_content"] = _text(thought, n)
    if calls:
        message["tool_calls"] = list(calls)
    for key in ("tool_call_id", "name") if role == "tool" else ():
        if turn.get(key) is not None:
            if not isinstance(turn[key], str):
                raise BadRecord(f"turn {n}: expected {key!r} to be text, found {type(turn[key]).__name__}")
            message[key] = turn[key]
    return message


def _objects(found: Any, what: str, needs: str) -> tuple[dict[str, Any], ...]:
    """A list of JSON objects, as it is or as JSON text (data sets store tools so). Nulls, with which tables fill up structs, are left out."""
    if isinstance(found, str) and found.strip():
        try:
            found = json.loads(found)
        except ValueError as error:
            raise BadRecord(f"{what}: not readable as JSON: {error}") from None
    if not found:
        return ()
    if not isinstance(found, list) or not all(isinstance(part, dict) and (not needs or isinstance(part.get(needs), dict)) for part in found):
        raise BadRecord(f"{what}: expected a list of objects" + (f" with {needs!r}" if needs else ""))
    return tuple(_without_nulls(part) for part in found)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(part) for key, part in value.items() if part is not None}
    return [_without_nulls(part) for part in value] if isinstance(value, list) else value


def _text(content: Any, n: int) -> str:
    """The text of one turn, without outer blanks: a string, or OpenAI's list of text parts. Raises BadRecord."""
    if isinstance(content, list):
        for part in content:
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            if kind != "text" or not isinstance(part.get("text"), str):
                raise BadRecord(f"turn {n}: expected text parts only, found {_printable(str(kind))}")
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise BadRecord(f"turn {n}: expected text, found {type(content).__name__}")
    return content.strip()


def _is_text(message: Mapping[str, Any]) -> bool:
    try:
        json.dumps(message, ensure_ascii=False).encode()
    except (UnicodeEncodeError, TypeError, ValueError):
        return False
    return True


def _shown(value: Any) -> str:
    try:
        return "" if value is None else json.dumps(value, ensure_ascii=False, default=str)
    except (ValueError, TypeError, RecursionError):
        return type(value).__name__


def _printable(text: str, limit: int = _EXCERPT) -> str:
    """The beginning of `text`, in characters that can be written as UTF-8."""
    return text[:limit].encode("utf-8", "replace").decode()
