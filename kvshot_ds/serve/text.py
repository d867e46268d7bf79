"""Tokens -> text that can be sent: whole characters only, and nothing that may still become a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence


class Characters:
    """Turns tokens into text as they come; what has been returned never changes.

    decode(tokens) -> text, with U+FFFD for bytes that are no character. A token whose last character is incomplete is
    kept until the rest of it has come. Only the tokens of the last two pieces are decoded again, not the whole answer:
    the earlier piece tells a decoder that looks back (SentencePiece's blanks) what stands before the later one. Of a run of
    byte tokens with a wrong one among them such a decoder makes marks only, which cannot reach what has been returned already.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._tokens: list[int] = []
        self._before = 0  # tokens before this one are known to a decoder that looks back no further than one piece
        self._returned = 0  # the text of the tokens before this one has been returned

    def push(self, token: int) -> str:
        """The text that is complete with this token; '' if none is."""
        self._tokens.append(token)
        return self._new(last=False)

    def flush(self) -> str:
        """The rest, an incomplete character as U+FFFD."""
        return self._new(last=True)

    def _new(self, last: bool) -> str:
        old = self._decode(self._tokens[self._before : self._returned])
        text = self._decode(self._tokens[self._before :])
        if len(text) <= len(old) or (text.endswith("\ufffd") and not last):
            return ""
        self._before, self._returned = self._returned, len(self._tokens)
        return text[len(old) :]


class Stops:
    """Cuts a text, given in pieces, before the stop string that is complete first. The result does not depend on the pieces.

    found: a stop string has come; what follows it is dropped.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = tuple(strings)
        self._held = ""
        self.found = False

    def push(self, piece: str) -> str:
        """The text that can be returned: all but a tail with which a stop string may begin."""
        if self.found:
            return ""
        text = self._held + piece
        ends = [(at + len(s), -len(s), at) for s in self._strings if (at := text.find(s)) >= 0]
        if ends:
            self.found, self._held = True, ""
            return text[: min(ends)[2]]
        keep = max((n for s in self._strings for n in range(1, len(s)) if text.endswith(s[:n])), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """What was held back; the text has ended."""
        rest, self._held = self._held, ""
        return rest


class AnswerText:
    """The text of one answer from its tokens. stopped: a stop string has come."""

    def __init__(self, decode: Callable[[list[int]], str], stops: Sequence[str] = ()) -> None:
        self._characters, self._stops = Characters(decode), Stops(stops)

    @property
    def stopped(self) -> bool:
        return self._stops.found

    def push(self, token: int) -> str:
        return self._stops.push(self._characters.push(token))

    def flush(self) -> str:
        """The rest, once no token follows; '' after a stop string."""
        return self._stops.push(self._characters.flush()) + self._stops.flush()
