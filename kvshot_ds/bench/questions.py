"""What is asked: MT-Bench, HumanEval, GSM8K, IFBench, any JSONL of prompts, held-out conversations; rendered as the target is asked in chat.

A question that cannot be asked (empty, too long, a special token as text) is listed with its place and the reason; a file of another layout is an error.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvshot_ds.config import BenchConfig, Recipe
from kvshot_ds.config.preparation import TemplateConfig
from kvshot_ds.decoding.chat import Chat
from kvshot_ds.decoding.prompts import Prepared, opening
from kvshot_ds.errors import ConfigError, KvshotError

Message = Mapping[str, str]


@dataclass(frozen=True)
class Question:
    """One prompt. id: its own name in its source. source: the option or file it is of. place: FILE:LINE. asked: the user's turns; tokens: all that is fed."""

    id: str
    source: str
    place: str
    asked: tuple[str, ...]
    tokens: tuple[int, ...]

    @property
    def name(self) -> str:
        return f"{self.source}/{self.id}"


@dataclass(frozen=True)
class Skipped:
    """A question that is not asked, and why."""

    id: str
    source: str
    place: str
    reason: str


@dataclass(frozen=True)
class Questions:
    """asked: in the order of sources and files. skipped: those passed over on the way to `bench.max_prompts` of each source."""

    asked: tuple[Question, ...]
    skipped: tuple[Skipped, ...]


@dataclass(frozen=True)
class Layout:
    """What a line of a question file holds. id: keys of its name; text: keys of the question, the first that is there counts; marks: further keys, one of
    which is there, so that one set is not taken for another; shown: how an error puts it."""

    id: tuple[str, ...]
    text: tuple[str, ...]
    marks: tuple[str, ...]
    shown: str


LAYOUTS = {
    "mt_bench": Layout(("question_id",), ("turns",), ("category",), '{"question_id", "category", "turns": [text, ...]}'),
    "humaneval": Layout(("task_id",), ("prompt",), ("entry_point",), '{"task_id", "prompt", "entry_point"}'),
    "gsm8k": Layout(("id",), ("question", "prompt"), ("answer", "expected"), '{"question", "answer"} or {"id", "prompt", "expected"}'),
    "ifbench": Layout(("key",), ("prompt",), ("instruction_id_list",), '{"key", "prompt", "instruction_id_list"}'),
    "prompts": Layout(("id", "key"), ("messages", "prompt"), (), '{"prompt": text} or {"messages": [{"role", "content"}, ...]}'),
}


class Renderer:
    """The target's chat template under the options of prep.template, or plain text where the tokenizer has none."""

    def __init__(self, tokenizer: Any, options: TemplateConfig) -> None:
        self._chat = Chat(tokenizer, options)
        self._special = [token for token in tokenizer.all_special_tokens if token]

    def __call__(self, messages: Sequence[Message]) -> list[int]:
        """Tokens up to where the answer begins. Raises ValueError with the reason if these messages cannot be rendered."""
        for text in (m["content"] for m in messages):
            text.encode()  # half a character, as JSON can hold it: UnicodeEncodeError is a ValueError
            if found := next((special for special in self._special if special in text), None):
                raise ValueError(f"it contains the special token {found!r} as text")
        if self._chat.templated:
            return self._chat.tokens(messages)
        if len(messages) > 1:
            raise ValueError("it has several turns, and the target has no chat template")
        return self._chat.encode(messages[0]["content"])


def read(recipe: Recipe, tokenizer: Any, context: int) -> Questions:
    """The questions of `recipe.bench`, at most `max_prompts` of each source. context: positions that the target has.

    Raises ConfigError if no source is named or none of their questions can be asked, KvshotError naming file and line of another layout.
    """
    options = recipe.bench
    files = [(name, name, path) for name in ("mt_bench", "humaneval", "gsm8k", "ifbench") if (path := getattr(options, name)) is not None]
    alike = len({path.stem for path in options.prompts}) < len(options.prompts)
    files += [("prompts", str(path) if alike else path.stem, path) for path in options.prompts]
    if not files and not options.heldout:
        raise ConfigError("bench: no questions: name a file in bench.mt_bench, humaneval, gsm8k, ifbench or prompts, or set bench.heldout=true")
    render = Renderer(tokenizer, recipe.prep.template)
    asked: list[Question] = []
    skipped: list[Skipped] = []
    for layout, source, path in files:
        found = _file(path, layout, source, options, render, context)
        asked, skipped = asked + list(found.asked), skipped + list(found.skipped)
    if options.heldout:
        found = _heldout(recipe.prepared_dir / "heldout.jsonl", options, context)
        asked, skipped = asked + list(found.asked), skipped + list(found.skipped)
    if not asked:
        first = f"; the first, {skipped[0].place}: {skipped[0].reason}" if skipped else ""
        raise ConfigError(f"bench: none of the {len(skipped)} questions can be asked{first}")
    return Questions(tuple(asked), tuple(skipped))


def _file(path: Path, layout: str, source: str, options: BenchConfig, render: Renderer, context: int) -> Questions:
    """The first `max_prompts` of a file that can be asked."""
    option = f"bench.{layout}={path}"
    asked: list[Question] = []
    skipped: list[Skipped] = []
    number = 0
    for number, record in _records(path, option):
        if len(asked) == options.max_prompts:
            break
        messages = _messages(record, LAYOUTS[layout], f"{option}, line {number}")
        id = str(next((record[key] for key in LAYOUTS[layout].id if key in record), number))
        place = f"{path}:{number}"
        try:
            if not messages or not messages[-1]["content"].strip():
                raise ValueError("it is empty")
            tokens = render(messages)
            _fits(len(tokens), options.max_new_tokens, context)
        except ValueError as reason:
            skipped.append(Skipped(id, source, place, str(reason)))
            continue
        asked.append(Question(id, source, place, tuple(m["content"] for m in messages if m["role"] == "user"), tuple(tokens)))
    if not number:
        raise ConfigError(f"{option}: it is empty; expected a line of JSON for each question: {LAYOUTS[layout].shown}")
    return Questions(tuple(asked), tuple(skipped))


def _fits(length: int, max_new_tokens: int, context: int) -> None:
    """Raises ValueError with the reason if a prompt of `length` tokens leaves no room."""
    if not length:
        raise ValueError("it is empty")
    if length + max_new_tokens > context:
        raise ValueError(f"its {length} tokens and bench.max_new_tokens={max_new_tokens} exceed the target's context of {context}")


def lines(path: Path, option: str) -> Iterator[tuple[int, str]]:
    """(number, text) of each line that is not blank, of a plain or gzipped file. Raises ConfigError if it cannot be read."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, line
    except FileNotFoundError:
        raise ConfigError(f"{option}: no such file; docs/bench.md names the packages that carry the question files") from None
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ConfigError(f"{option}: not readable as lines of JSON: {error}") from None


def _records(path: Path, option: str) -> Iterator[tuple[int, dict[str, Any]]]:
    path = path.expanduser()
    for number, line in lines(path, option):
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise KvshotError(f"{option}, line {number}: expected a line of JSON for each question, found {line.strip()[:60]!r}: {error}") from None
        if not isinstance(value, dict):
            raise KvshotError(f"{option}, line {number}: expected a JSON object, found {type(value).__name__}")
        yield number, value


def _messages(record: dict[str, Any], layout: Layout, where: str) -> list[dict[str, str]]:
    """The turns up to the user's last one. Raises KvshotError naming what was expected and found."""
    key = next((key for key in layout.text if key in record), None)
    if key is None or (layout.marks and not any(mark in record for mark in layout.marks)):
        raise KvshotError(f"{where}: expected {layout.shown}, found the keys {', '.join(map(repr, record)) or 'of nothing'}; is it another set's file?")
    value = record[key]
    if key == "turns" and isinstance(value, list) and value:
        value = value[0]  # later ones ask about the answer to the first
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if key != "messages" or not isinstance(value, list) or not all(_is_message(m) for m in value):
        raise KvshotError(f"{where}: expected {layout.shown}, found {key!r} holding {json.dumps(value)[:80]}")
    last = max((i for i, m in enumerate(value) if m["role"] == "user"), default=-1)
    return [{"role": m["role"], "content": m["content"]} for m in value[: last + 1]]


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str) and isinstance(value.get("content"), str)


def _heldout(path: Path, options: BenchConfig, context: int) -> Questions:
    """What stands before the first answer of each held-out conversation, as `kvshot prep` has rendered it."""
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; run `kvshot prep` first, or set bench.heldout=false and name question files")
    asked: list[Question] = []
    skipped: list[Skipped] = []
    for number, line in lines(path, str(path)):
        if len(asked) == options.max_prompts:
            break
        place = f"{path}:{number}"
        there = Prepared.read(line, place)
        first, reason = opening(there.turn, options.max_new_tokens, context, "bench")
        if reason:
            skipped.append(Skipped(there.id, "heldout", place, reason))
        else:
            asked.append(Question(there.id, "heldout", place, there.users, there.tokens[:first]))
    if not asked and not skipped:
        raise ConfigError(f"{path}: no held-out conversations; prepare with prep.heldout_fraction > 0, or set bench.heldout=false")
    return Questions(tuple(asked), tuple(skipped))
