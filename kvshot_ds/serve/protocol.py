"""What clients ask for, and how they are told what is wrong: the bodies of OpenAI's API, checked field by field."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvshot_ds.config.serving import Temperature

_STOPS = 16  # stop strings of one request; OpenAI takes 4
_ZERO = (None, 0, 0.0)
# Fields that change the answer in ways this server has not, with the values that change nothing.
_BOTH: dict[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "presence_penalty": _ZERO,
    "frequency_penalty": _ZERO,
    "repetition_penalty": (None, 1, 1.0),
    "logit_bias": (None, {}),
}
_CHAT = _BOTH | {
    "logprobs": (None, False),
    "top_logprobs": (None, 0),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "response_format": (None, {"type": "text"}),
    "modalities": (None, ["text"]),
}
_PLAIN = _BOTH | {"logprobs": (None,), "best_of": (None, 1), "echo": (None, False), "suffix": (None, "")}
# Fields that cannot change the answer.
_HARMLESS = frozenset(
    {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "parallel_tool_calls", "prediction"}
)


class ApiError(Exception):
    """A request that is not answered. status: of HTTP; param: the field that is meant; code: what programs look at."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    @property
    def body(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else "rate_limit_error" if self.status == 429 else "invalid_request_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


class _StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # padding of OpenAI's against observers; this server sends none


class _Body(BaseModel):
    """Fields of both kinds of requests that are numbers, names or switches; everything else is left in `model_extra`."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)
    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    temperature: Temperature | None = Field(None, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=0, lt=1 << 63)
    stream: bool | None = None
    stream_options: _StreamOptions | None = None


@dataclass(frozen=True)
class Wanted:
    """One request. model: its name, or None. messages: of a chat, {"role", "content"} each; prompt: of a completion, its text or its
    tokens. sampling: the options of SamplingConfig that the request names. max_tokens: None leaves it to the server."""

    model: str | None
    messages: tuple[dict[str, str], ...] | None
    prompt: str | tuple[int, ...] | None
    max_tokens: int | None
    sampling: dict[str, Any]
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool

    @property
    def chat(self) -> bool:
        return self.messages is not None


def read_request(body: bytes, chat: bool) -> Wanted:
    """The request in `body`. Raises ApiError 400, which names the field, for anything that this server would not do as it is asked."""
    raw = _object(body)
    try:
        fields = _Body.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        raise bad(f"{name}: {first['msg']} (found {_short(first['input'])})", name) from None
    rest = dict(fields.model_extra or {})
    main = rest.pop("messages" if chat else "prompt", None)
    stop = rest.pop("stop", None)
    _refuse(rest, _CHAT if chat else _PLAIN)
    if fields.stream_options is not None and not fields.stream:
        raise bad("stream_options: only for stream=true", "stream_options")
    options = {name: getattr(fields, name) for name in ("temperature", "top_k", "top_p", "min_p", "seed")}
    sampling = {name: value for name, value in options.items() if value is not None}
    if sampling.get("top_k") == -1:  # how vLLM writes "all"
        sampling["top_k"] = 0
    return Wanted(
        fields.model,
        _messages(main) if chat else None,
        None if chat else _prompt(main),
        _max_tokens(fields, chat),
        sampling,
        _stop(stop),
        bool(fields.stream),
        bool(fields.stream_options and fields.stream_options.include_usage),
    )


def bad(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param, code)


def _object(body: bytes) -> dict[str, Any]:
    def constant(name: str) -> Any:
        raise ValueError(f"{name} is not JSON")

    try:
        raw = json.loads(body.decode("utf-8"), parse_constant=constant)
        json.dumps(raw, ensure_ascii=False).encode()  # half a character, which JSON can quote, is no text
    except (ValueError, RecursionError) as error:
        raise bad(f"the request is not JSON: {str(error) or type(error).__name__}") from None
    if not isinstance(raw, dict):
        raise bad(f"the request must be a JSON object, found {_short(raw)}")
    return raw


def _refuse(rest: Mapping[str, Any], neutral: Mapping[str, tuple[Any, ...]]) -> None:
    """Raises ApiError for a field that this server does not know or does not support, unless it cannot change the answer."""
    for name, value in rest.items():
        if name in _HARMLESS or value is None or any(type(value) is type(n) and value == n for n in neutral.get(name, ())):
            continue
        if name in neutral:
            raise bad(f"{name}={_short(value)} is not supported by this server; leave it out", name, "unsupported_parameter")
        raise bad(f"{name}: this server knows no such field; leave it out", name, "unknown_parameter")


def _max_tokens(fields: _Body, chat: bool) -> int | None:
    given = fields.max_tokens, fields.max_completion_tokens
    if not chat and given[1] is not None:
        raise bad("max_completion_tokens is a field of chats; here it is max_tokens", "max_completion_tokens", "unknown_parameter")
    if None not in given and given[0] != given[1]:
        raise bad(f"max_tokens={given[0]} and max_completion_tokens={given[1]} contradict each other; give one of them", "max_tokens")
    return given[1] if given[0] is None else given[0]


def _stop(value: Any) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts) or len(texts) > _STOPS:
        raise bad(f"stop: expected a text or a list of at most {_STOPS} texts, none empty (found {_short(value)})", "stop")
    return tuple(dict.fromkeys(texts))


def _prompt(value: Any) -> str | tuple[int, ...]:
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        if len(value) > 1:
            raise bad(f"prompt: {len(value)} prompts in one request are not supported; send a request for each", "prompt", "unsupported_parameter")
        [value] = value
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(type(token) is int for token in value):
        return tuple(value)
    raise bad(f"prompt: expected a text or a list of token ids (found {_short(value)})", "prompt")


def _messages(value: Any) -> tuple[dict[str, str], ...]:
    if not isinstance(value, list) or not value:
        raise bad(f"messages: expected a list of at least one message (found {_short(value)})", "messages")
    return tuple(_message(message, f"messages[{number}]") for number, message in enumerate(value))


def _message(message: Any, where: str) -> dict[str, str]:
    """{"role", "content"}. A developer's message is a system prompt; parts of text are joined by line breaks."""
    if not isinstance(message, dict):
        raise bad(f"{where}: expected an object with role and content (found {_short(message)})", where)
    role, content = message.get("role"), message.get("content")
    if role not in ("system", "developer", "user", "assistant"):
        raise bad(f"{where}.role: expected system, developer, user or assistant (found {_short(role)})", f"{where}.role")
    for name, more in message.items():
        if name not in ("role", "content", "name") and more not in (None, [], {}):
            raise bad(f"{where}.{name} is not supported by this server; leave it out", f"{where}.{name}", "unsupported_parameter")
    if isinstance(content, list):
        content = "\n".join(_part(part, f"{where}.content[{number}]") for number, part in enumerate(content))
    if not isinstance(content, str):
        raise bad(f"{where}.content: expected a text or a list of text parts (found {_short(content)})", f"{where}.content")
    return {"role": "system" if role == "developer" else role, "content": content}


def _part(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    text = part.get("text") if kind == "text" else None
    if not isinstance(text, str):
        found = f"a part of type {_short(kind)}" if isinstance(part, dict) else _short(part)
        raise bad(f"{where}: expected {{'type': 'text', 'text': ...}} (found {found}); this server takes text alone", where)
    return text


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
