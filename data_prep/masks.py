"""Which token of a rendered conversation belongs to which assistant turn, found from renderings alone.

Three renderings say all there is to know of the assistant turn at message i: `prompt` = messages[:i] with the generation
prompt (what inference feeds), `own` = messages[:i+1] (the turn when it was the newest), `text` = the whole conversation.

- The turn starts where `prompt` ends; `own` has to begin with `prompt`, or the model never stood at that start.
- It ends with its end-of-turn token in `own`.
- It is supervised iff `text` begins with `own` up to there, so that every token before and inside the turn is the one
  inference saw. A template that rewrites a turn once it is history breaks this: Qwen3 drops the thinking of turns before
  the last question, and without thinking it drops the empty think block that its generation prompt wrote. Such a turn stays
  in the context as the template shows it (that is what the next turn is answered from) but teaches nothing: its tokens are
  not those the model would generate there. It is counted in `Encoded.left_out`.
- The newest turn has no later message to blame: if it does not continue its own prompt, the conversation is refused.

Tokens are checked against inference as well: those before a turn have to be those of `prompt` tokenised alone.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

Message = Mapping[str, Any]
Span = tuple[int, int]  # [begin, end)


class ChatError(Exception):
    """This conversation cannot be rendered exactly; the text is the reason for its quarantine."""


@dataclass(frozen=True)
class Encoded:
    """tokens [S] int; turn [S] int: 0 = not supervised, n >= 1 = token of the n-th assistant turn (its end token included).

    left_out: assistant turns that are not supervised because the template rewrote them once they were history.
    """

    tokens: list[int]
    turn: list[int]
    left_out: int = 0

    def trimmed(self) -> Encoded:
        """Without what follows the last supervised token: it teaches nothing."""
        stop = next((i + 1 for i in reversed(range(len(self.turn))) if self.turn[i]), 0)
        return Encoded(self.tokens[:stop], self.turn[:stop], self.left_out)

    def cut(self, max_length: int) -> Encoded | None:
        """The first `max_length` tokens, trimmed; None if no turn keeps two tokens, the least that gives a supervised row."""
        short = Encoded(self.tokens[:max_length], self.turn[:max_length], self.left_out).trimmed()
        supervised = any(a and a == b for a, b in pairwise(short.turn))
        return short if supervised else None


@dataclass(frozen=True)
class Turn:
    """One supervised assistant turn in characters of the text: words [start, close), end-of-turn token [close, stop).

    number: 1 for the first assistant turn. message: its 1-based place. ended: whether the end token is the model's own.
    """

    number: int
    message: int
    start: int
    close: int
    stop: int
    ended: bool = True


@dataclass(frozen=True)
class Rendered:
    """A conversation as text, with its supervised turns. marks: the template's own {% generation %} spans, None if it has none."""

    text: str
    turns: tuple[Turn, ...]
    marks: tuple[Span, ...] | None = None
    left_out: int = 0


def find_turns(
    messages: Sequence[Message],
    text: str,
    render: Callable[[Sequence[Message], bool], str],
    close: Callable[[str, int], Span | None],
    last_only: bool = False,
    unfinished: Collection[int] = (),
) -> tuple[tuple[Turn, ...], int]:
    """Supervised turns of `text`, the rendering of `messages`, and the number of those left out, by the rule above.

    render(messages, with generation prompt) -> text; close(text, from) -> characters of the end token of the turn that
    ends `text`. Raises ChatError if the newest turn (when it is the last message) does not continue its prompt, or a turn is not closed.
    """
    places = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    chosen = list(enumerate(places, 1))[-1:] if last_only else list(enumerate(places, 1))
    turns, left_out = [], 0
    for number, i in chosen:
        newest = i == len(messages) - 1
        prompt = render(messages[:i], True)
        own = text if newest else render(messages[: i + 1], False)
        if not own.startswith(prompt):
            if newest:
                raise ChatError(_why_not(own, prompt, render(messages[:i], False), i + 1))
            left_out += 1
            continue
        end = close(own, len(prompt))
        if end is None:
            raise ChatError(f"the template does not close assistant turn {number}")
        if not newest and not text.startswith(own[: end[1]]):
            left_out += 1
            continue
        turns.append(Turn(number, i + 1, len(prompt), *end, number not in unfinished))
    return tuple(turns), left_out


def _why_not(own: str, prompt: str, history: str, message: int) -> str:
    """Why `own` does not begin with `prompt`: the reason is in what was said before (`history` without generation prompt) or in the prompt."""
    same, kept = _shared(own, prompt), _shared(history, prompt)
    if same < kept:
        return f"the template renders what precedes message {message} otherwise once it is answered"
    return f"the template renders message {message} otherwise than its generation prompt begins it, which goes on with {prompt[same:]!r}"


def _shared(a: str, b: str) -> int:
    """Length of what two texts have in common at their start."""
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class Aligner:
    """Turns in characters -> turns in tokens, for one tokenizer.

    special: ids of all special tokens. hard: text of those that cut the text whatever stands beside them, so that the tokens
    before one do not depend on what follows. tokens_of(text) tokenises alone.
    """

    def __init__(self, special: frozenset[int], hard: Mapping[int, str], tokens_of: Callable[[str], list[int]]) -> None:
        self.special, self.hard, self.tokens_of = special, hard, tokens_of
        self._tails: dict[tuple[int | None, str], list[int]] = {}

    def encode(self, rendered: Rendered, tokens: list[int], encoding: Any) -> Encoded:
        """tokens [S] and encoding: `rendered.text` tokenised, and the fast tokenizer's record of it. Raises ChatError."""
        places = [(j, *encoding.token_to_chars(j)) for j, token in enumerate(tokens) if token in self.special]  # (token, begin, end)
        cuts = [(j, end) for j, _, end in places if tokens[j] in self.hard]
        turn = [0] * len(tokens)
        for t in rendered.turns:
            at = bisect_right(cuts, t.start, key=lambda cut: cut[1])
            first = self._first(rendered.text, tokens, cuts[at - 1] if at else None, t)
            last = next((j for j, begin, end in places if j >= first and begin <= t.close and end >= t.stop), None)
            if last is None:
                raise ChatError(f"the template does not close assistant turn {t.number} with a token of its own")
            # a template that marks its answers knows better which parts of a turn the model wrote
            inside = range(first, last + 1) if rendered.marks is None else _touched(rendered.marks, encoding.offsets, first, last + 1)
            if not inside:
                continue
            if inside[0] != first:
                raise ChatError(f"the template's marks of assistant turn {t.number} do not begin where the generation prompt ends")
            for j in inside:
                turn[j] = t.number
            turn[last] = t.number if t.ended else 0
        return Encoded(tokens, turn, rendered.left_out)

    def _first(self, text: str, tokens: list[int], cut: tuple[int, int] | None, turn: Turn) -> int:
        """Index of the first token of `turn`; checks that the tokens before it are those of the prompt alone.

        Only what stands between the last cut and the turn can differ; for most templates that is the same few words each
        time ("assistant\\n"), tokenised once.
        """
        after, begin = (cut[0] + 1, cut[1]) if cut else (0, 0)
        expected = self._tail(text[begin : turn.start], tokens[after - 1] if cut else None)
        first = after + len(expected)
        if tokens[after:first] != expected:
            raise ChatError(f"a token straddles the start of message {turn.message}, so inference would never see these tokens")
        return first

    def _tail(self, words: str, after: int | None) -> list[int]:
        """Tokens of `words` as they stand after the cut token `after`, or at the start of a text (None)."""
        if not words:
            return []
        found = self._tails.get((after, words))
        if found is None:
            found = self.tokens_of(words) if after is None else self.tokens_of(self.hard[after] + words)[1:]
            if len(words) < 100 and len(self._tails) < 10_000:  # a question is not met again
                self._tails[after, words] = found
        return found


def _touched(marks: Sequence[Span], offsets: Sequence[Span], first: int, stop: int) -> list[int]:
    """Tokens first <= j < stop that touch a marked span, as transformers counts them."""
    return [j for j in range(first, stop) if any(begin < offsets[j][1] and offsets[j][0] < end for begin, end in marks)]
