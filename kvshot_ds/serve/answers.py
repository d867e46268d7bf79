"""The bodies of answers, in OpenAI's shapes. What acceptance there was stands in the extension `speculation`."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field
from typing import Any, Literal

Reason = Literal["stop", "length"]


@dataclass(frozen=True)
class Shape:
    """Makes the bodies of one answer, whole or in chunks. chat: a chat's, else a completion's. include_usage: a last chunk tells the
    usage, and the others say null, as OpenAI's do."""

    chat: bool
    model: str
    include_usage: bool = False
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, text: str, reason: Reason, usage: dict[str, Any], speculation: dict[str, Any]) -> dict[str, Any]:
        said = {"message": {"role": "assistant", "content": text, "refusal": None}} if self.chat else {"text": text}
        head = self._head("chat.completion" if self.chat else "text_completion")
        return {**head, "choices": [self._choice(said, reason)], "usage": usage, "speculation": speculation}

    def opening(self) -> list[dict[str, Any]]:
        """Chunks before the first text."""
        return [self._chunk({"delta": {"role": "assistant", "content": ""}})] if self.chat else []

    def piece(self, text: str) -> dict[str, Any]:
        return self._chunk({"delta": {"content": text}} if self.chat else {"text": text})

    def closing(self, reason: Reason, usage: dict[str, Any], speculation: dict[str, Any]) -> list[dict[str, Any]]:
        """Chunks after the last text: why it ends, with `speculation`; then the usage, if it is wanted."""
        end = self._chunk({"delta": {}} if self.chat else {"text": ""}, reason) | {"speculation": speculation}
        return [end, {**self._chunk({}), "choices": [], "usage": usage}] if self.include_usage else [end]

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": f"{'chatcmpl' if self.chat else 'cmpl'}-{self.id}", "object": kind, "created": self.created, "model": self.model}

    def _choice(self, said: dict[str, Any], reason: Reason | None) -> dict[str, Any]:
        return {"index": 0, **said, "logprobs": None, "finish_reason": reason}

    def _chunk(self, said: dict[str, Any], reason: Reason | None = None) -> dict[str, Any]:
        head = self._head("chat.completion.chunk" if self.chat else "text_completion")
        return {**head, "choices": [self._choice(said, reason)], **({"usage": None} if self.include_usage else {})}


def models(names: tuple[str, ...], created: int) -> dict[str, Any]:
    """The list of models."""
    return {"object": "list", "data": [model(name, created) for name in names]}


def model(name: str, created: int) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": created, "owned_by": "kvshot"}
