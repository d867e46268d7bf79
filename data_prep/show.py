"""`kvshot prep show`: prepared conversations as the drafter will see them, token by token: what is supervised, in which turn, what was cut.

Supervised tokens stand in ⟦ ⟧ and their lines have the number of the turn in the margin, so nothing depends on colour.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.text import Text

from data_prep.chat import ChatError, ChatTemplate, Encoded
from kvshot_ds.config import Recipe
from kvshot_ds.errors import ConfigError
from kvshot_ds.target import load_tokenizer

_STYLES = {"supervised": "bold green", "plain": "", "special": "magenta", "margin": "cyan", "note": "yellow"}
_OPEN, _CLOSE, _BREAK = "⟦", "⟧", "⏎"
_MARGIN = 5  # characters
_HALF = "\ufffd"  # what a decoder makes of a part of a character


@dataclass(frozen=True)
class Selection:
    """Which conversations. line: 1-based line of the split file; id: the first characters will do; source: FILE or FILE:LINE; count: at most so many."""

    split: Literal["train", "heldout"] = "train"
    line: int | None = None
    id: str | None = None
    source: str | None = None
    count: int = 3

    def __str__(self) -> str:
        asked = {"line": self.line, "id": self.id, "source": self.source}
        return ", ".join(f"{name} {value}" for name, value in asked.items() if value is not None)


@dataclass(frozen=True)
class Piece:
    """Whole characters of the text. turn: 0 = not supervised. special: a special token."""

    text: str
    turn: int
    special: bool


@dataclass(frozen=True)
class Shown:
    """A conversation to print. title: where it is from; notes: what a reader must know; why: the reason if it has no tokens."""

    title: str
    encoded: Encoded | None
    notes: tuple[str, ...] = ()
    why: str = ""


def run(recipe: Recipe, selection: Selection, console: Console | None = None) -> None:
    """Prints the selected conversations of `recipe.prepared_dir`, or of the recipe's sources if nothing is prepared yet.

    Colours only on a terminal and without NO_COLOR. Raises ConfigError if nothing fits, or the tokenizer has no template.
    """
    console = console or Console(file=sys.stdout, highlight=False)
    template = ChatTemplate(load_tokenizer(recipe.target.path, recipe.target.trust_remote_code), recipe.prep.template)
    path = recipe.prepared_dir / f"{selection.split}.jsonl"
    prepared = path.is_file()
    found = _prepared(recipe, template, path, selection) if prepared else _unprepared(recipe, template, selection)
    any_shown = False
    for conversation in found:
        print_conversation(console, template, conversation)
        any_shown = True
    if not any_shown:
        where = path if prepared else "prep.sources"
        raise ConfigError(f"{where}: no conversation{f' with {selection}' if str(selection) else ''}; kvshot prep show RECIPE shows the first ones")
    legend = f"{_OPEN}supervised{_CLOSE}, with the turn's number in the margin", f"{_BREAK} line break", "special tokens by their names"
    styles = _STYLES["supervised"], _STYLES["margin"], _STYLES["special"]
    console.print(Text("  ·  ").join(Text(words, style) for words, style in zip(legend, styles, strict=True)), soft_wrap=True)


def print_conversation(console: Console, template: ChatTemplate, shown: Shown) -> None:
    console.print(Text(shown.title, "bold"), soft_wrap=True)
    if shown.encoded is None:
        console.print(Text(f"  left out: {shown.why}", _STYLES["note"]), soft_wrap=True)
    else:
        tokens, turns = shown.encoded.tokens, shown.encoded.turn
        supervised = sum(turn > 0 for turn in turns)
        counts = f"  {len(tokens)} tokens, {supervised} supervised ({supervised / max(1, len(tokens)):.1%}) in {len(set(turns) - {0})} turns"
        console.print(Text(counts), soft_wrap=True)
        for number, line in lines(pieces(template.tokenizer, template.special_ids, tokens, turns)):
            # a pipe gets every line whole
            rows = line.wrap(console, max(20, console.width - _MARGIN)) if console.is_terminal else [line]
            for row in rows:
                mark = f"{number or '':>3}" + ("▌ " if number else "│ ")
                console.print(Text.assemble((mark, _STYLES["margin"]), row), soft_wrap=True)
    for note in shown.notes:
        console.print(Text(f"  ! {note}", _STYLES["note"]), soft_wrap=True)
    console.print()


def pieces(tokenizer: Any, special: frozenset[int], tokens: Sequence[int], turns: Sequence[int]) -> list[Piece]:
    """The text of `tokens` in whole characters, which may take several tokens; joined, they are the decoded text.

    Each piece is what it adds to the piece before it, as some decoders drop the blank of a text's first word.
    """

    def decode(part: Sequence[int]) -> str:
        return tokenizer.decode(part, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    out: list[Piece] = []
    before: list[int] = []  # tokens of the last piece
    at = 0
    while at < len(tokens):
        begun = len(decode(before))
        ahead = range(1, min(4, len(tokens) - at) + 1)  # a character has at most four bytes
        texts = {size: decode([*before, *tokens[at : at + size]])[begun:] for size in ahead[:1]}
        if texts[1].endswith(_HALF):
            texts |= {size: decode([*before, *tokens[at : at + size]])[begun:] for size in ahead[1:]}
        # else bytes that are no character, or the character that stands for such bytes
        whole = next((size for size, text in texts.items() if not text.endswith(_HALF)), None)
        size = whole or max((size for size, text in texts.items() if text == _HALF), default=1)
        before = list(tokens[at : at + size])
        out.append(Piece(texts[size], max(turns[at : at + size]), before[0] in special))
        at += size
    return out


def lines(found: Sequence[Piece]) -> Iterator[tuple[int, Text]]:
    """(turn in the margin or 0, line) for every line of the text; supervised runs in brackets, line breaks shown."""
    line, number = Text(), 0
    for turn, run in groupby(found, key=lambda piece: piece.turn):
        style = _STYLES["supervised"] if turn else _STYLES["plain"]
        if turn:
            if number:  # a template may put all turns on one line; the margin has room for one
                yield number, line
                line = Text()
            line.append(_OPEN, style)
            number = turn
        for piece in run:
            for n, words in enumerate(piece.text.split("\n")):
                if n:
                    line.append(_BREAK, _STYLES["margin"])
                    yield number, line
                    line, number = Text(), turn
                line.append(words, f"{style} {_STYLES['special']}".strip() if piece.special else style)
        if turn:
            line.append(_CLOSE, style)
    if line.plain:
        yield number, line


def _prepared(recipe: Recipe, template: ChatTemplate, path: Path, selection: Selection) -> Iterator[Shown]:
    with open(path, encoding="utf-8") as file:
        yield from islice(_lines(recipe, template, file, path, selection), selection.count)


def _lines(recipe: Recipe, template: ChatTemplate, file: Any, path: Path, selection: Selection) -> Iterator[Shown]:
    for number, text in enumerate(file, 1):
        if selection.line is not None and number != selection.line:
            continue
        if not all(part in text for part in (selection.id, selection.source and Path(selection.source).name) if part):
            continue  # cheaper than reading it
        try:
            line = json.loads(text)
            encoded = Encoded(line["tokens"], line["turn"])
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path}:{number}: not a prepared conversation ({error!r}); run kvshot prep again") from None
        id, source = str(line.get("id", "")), str(line.get("source", ""))
        if id.startswith(selection.id or "") and _from(source, selection.source):
            yield Shown(f"{id or '(no id)'}  {path.name}:{number}  from {source or 'unknown'}", encoded, _notes(recipe, template, line, encoded))


def _notes(recipe: Recipe, template: ChatTemplate, line: dict[str, Any], kept: Encoded) -> tuple[str, ...]:
    """What the tokens alone do not tell, found by rendering the messages again."""
    notes: list[str] = []
    try:
        whole = template.encode(line.get("messages") or [], line.get("tools") or ())
    except (ChatError, KeyError, TypeError):
        whole = None
    more = whole.tokens[len(kept.tokens) :] if whole is not None and whole.tokens[: len(kept.tokens)] == kept.tokens else []
    if more and more != [template.end_id]:  # that one the target did not write
        notes.append(f"cut here: {len(more)} more tokens are not used (prep.max_length={recipe.prep.max_length})")
    elif kept.tokens and kept.tokens[-1] not in template.special_ids:
        notes.append("the last answer is not finished: cut at prep.max_length or prep.regenerate.max_new_tokens")
    if whole is not None and whole.left_out:
        notes.append(_left_out(whole.left_out))
    return tuple(notes)


def _left_out(count: int) -> str:
    return f"assistant turns not supervised, as the template rewrites them once they are history: {count}"


def _unprepared(recipe: Recipe, template: ChatTemplate, selection: Selection) -> Iterator[Shown]:
    """The first records of the sources, as they stand there."""
    from data_prep.sources import Conversation, read

    kept = [source for source in recipe.prep.sources if not selection.source or _from(str(source.path or source.dataset), selection.source.partition(":")[0])]
    found = (item for source in kept for item in read(source))
    for item in islice(filter(_wanted(selection), found), selection.count):
        title = f"{item.id if isinstance(item, Conversation) else '(no id)'}  not prepared, as it stands in {item.file}:{item.line}"
        yield _raw(recipe, template, title, item) if isinstance(item, Conversation) else Shown(title, None, why=item.reason)


def _wanted(selection: Selection) -> Callable[[Any], bool]:
    _, colon, line = (selection.source or "").rpartition(":")
    number = selection.line or (int(line) if colon and line.isdigit() else None)
    return lambda item: (number is None or item.line == number) and getattr(item, "id", "").startswith(selection.id or "")


def _raw(recipe: Recipe, template: ChatTemplate, title: str, conversation: Any) -> Shown:
    messages, tools = conversation.messages, conversation.tools
    notes = ["before cleaning" + (", with the answers of the source: the target will write its own" if recipe.prep.regenerate.enabled else "")]
    try:
        if recipe.prep.regenerate.enabled and not any(message["role"] == "assistant" for message in messages):
            prompt = template.prompt(messages, tools)
            return Shown(title, Encoded(prompt, [0] * len(prompt)), ("before cleaning; the target will write the answer that follows",))
        whole = template.encode(messages, tools)
    except ChatError as reason:
        return Shown(title, None, why=str(reason))
    short = whole.cut(recipe.prep.max_length)
    if short is None:
        return Shown(title, None, why=f"nothing to learn from in the first {recipe.prep.max_length} of {len(whole.tokens)} tokens")
    if len(short.tokens) < len(whole.tokens):
        notes.append(f"cut here: {len(whole.tokens) - len(short.tokens)} more tokens are not used (prep.max_length={recipe.prep.max_length})")
    if whole.left_out:
        notes.append(_left_out(whole.left_out))
    return Shown(title, short, tuple(notes))


def _from(source: str, wanted: str | None) -> bool:
    """Whether `source` (FILE or FILE:LINE) is `wanted`, given as a path or a name, with or without the line."""
    name, place = Path(source).name, Path(wanted or "").name
    return not wanted or name == place or name.rpartition(":")[0] == place
