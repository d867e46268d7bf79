"""Answers from an OpenAI-compatible server of the target (vLLM, SGLang), in place of workers that hold the target themselves."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import queue
import random
import threading
import time
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, Self

from data_prep.pool import Pool
from data_prep.sources import Conversation
from data_prep.writer import Answered, Talk, Unit, Writer
from kvshot_ds.config import PrepConfig, TargetConfig
from kvshot_ds.errors import ConfigError, KvshotError

if TYPE_CHECKING:
    from openai import APIStatusError

MOST_FAILURES = 20  # in a row, without an answer between them, before the command gives up
_FIRST_WAIT = 0.5  # before the second try of a request, doubled with each [s]
_LONGEST_WAIT = 60.0  # between two tries, unless the server asks for more [s]
_RETRIED = frozenset({408, 409, 429})  # and 5xx
_REFUSED = frozenset({401, 403, 404})
_ENDED = frozenset({"stop", "length", "tool_calls"})
_TOO_LONG = ("context length", "context_length", "maximum context", "max_model_len", "longer than the model")


class _Failed(Exception):
    """A request that is given up; the text is the reason."""


class _TooLong(Exception):
    """The server says that the prompt does not fit its context."""


class _BadAnswer(Exception):
    """An answer that is no chat completion."""


def open_pool(target: TargetConfig, options: PrepConfig, open_turn: Sequence[int] = ()) -> Pool | EndpointPool:
    """What answers units: the server at `regenerate.base_url`, or Ray workers. Both give `map(units)` -> (unit, results).

    open_turn: tokens of `ChatTemplate.open_user_turn`, from which a server synthesises prompts.
    """
    return EndpointPool(options, open_turn) if options.regenerate.base_url else Pool("prep", options, Writer, target, options)


class EndpointPool:
    """Asks the server, `endpoint.concurrency` requests at a time. A context, as `data_prep.pool.Pool`."""

    def __init__(self, options: PrepConfig, open_turn: Sequence[int] = ()) -> None:
        self.options, self.open_turn = options, list(open_turn)
        self._server: _Server | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._loop is not None and self._thread is not None:
            self._run(self._stop())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def map(self, units: Iterable[Unit]) -> Iterator[tuple[Unit, Any]]:
        """(unit, result) as they finish: a list of Answered, or of prompts (see `writer.synthesise`).

        A conversation whose request keeps failing is answered with a reason and `failed`. Raises ConfigError: the server
        cannot be reached at the start, refuses the key, or serves no such model. Raises KvshotError after more than
        MOST_FAILURES failures in a row; units with failures among these are not handed over, so a later run asks again.
        """
        rest, in_flight, open_requests = iter(units), 0, 0
        events: queue.Queue[tuple[Unit, Any] | None] = queue.Queue()  # None: one conversation is through
        held: list[tuple[Unit, Any]] = []
        while True:
            while open_requests < self.options.regenerate.endpoint.concurrency and (unit := next(rest, None)) is not None:
                server = self._ready()
                in_flight, open_requests = in_flight + 1, open_requests + (unit.count or len(unit.conversations))
                future = self._start(self._unit(server, unit, events))
                future.add_done_callback(lambda done, unit=unit: events.put((unit, done)))  # type: ignore[misc]
            if not in_flight:
                break
            event = events.get()
            if event is None:
                open_requests -= 1
                continue
            unit, done = event
            in_flight -= 1
            held.append((unit, done.result()))
            if self._server and not self._server.failures:
                yield from held
                held = []
        yield from held

    def _ready(self) -> _Server:
        if self._server is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name="kvshot-endpoint", daemon=True)
            self._thread.start()
            self._server = _Server(self.options)
            self._run(self._server.open())
        return self._server

    def _start(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._start(work).result()

    async def _stop(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._server is not None:
            await self._server.close()

    async def _unit(self, server: _Server, unit: Unit, events: queue.Queue[tuple[Unit, Any] | None]) -> list[Any]:
        async def through(work: Coroutine[Any, Any, Any]) -> Any:
            result = await work
            events.put(None)
            return result

        if unit.count:
            return await asyncio.gather(*(through(server.write_prompt(self.open_turn, f"{unit.seed}/{n}")) for n in range(unit.count)))
        return await asyncio.gather(*(through(server.answer(conversation)) for conversation in unit.conversations))


class _Server:
    """One server: its client, the model asked, and the limit of requests in flight. Lives in one event loop.

    failures: requests given up since the last answer.
    """

    def __init__(self, options: PrepConfig) -> None:
        self.options, self.wanted, self.endpoint = options, options.regenerate, options.regenerate.endpoint
        self.url = self.wanted.base_url
        self.model = self.endpoint.model or ""
        self.failures = 0
        # never logged or written, and cut out of what the server says
        self._key = os.environ.get(self.endpoint.api_key_env, "").strip()
        self._client: Any = None
        self._slots = asyncio.Semaphore(self.endpoint.concurrency)

    async def open(self) -> None:
        """Connects and finds the model. Raises ConfigError: unreachable, key refused, no such model, or several and none named."""
        from openai import AsyncOpenAI

        self._client = AsyncOpenAI(base_url=self.url, api_key=self._key or "none", max_retries=0, timeout=self.endpoint.timeout)
        try:
            listed = await self._try(lambda: self._client.models.list())
            names = sorted(str(model.id) for model in listed.data)
        except (_Failed, AttributeError, TypeError) as why:
            text = f"prep.regenerate.base_url={self.url}: {self.url}/models does not list the server's models ({why})"
            raise ConfigError(f"{text}; is a server running there, and does the address end in /v1?") from None
        if self.model and self.model not in names:
            raise ConfigError(f"prep.regenerate.endpoint.model={self.model}: {self.url} serves {', '.join(names) or 'nothing'}")
        if not self.model and len(names) != 1:
            raise ConfigError(f"prep.regenerate.endpoint.model: name one of the models that {self.url} serves: {', '.join(names) or 'none'}")
        self.model = self.model or names[0]

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()

    async def answer(self, conversation: Conversation) -> Answered:
        """Has every user turn answered, turn by turn, as `writer.answer` does."""
        talk, texts, reason = Talk(conversation, list(self._system(conversation))), list[dict[str, Any]](), "no question"
        while talk.next_question():
            try:
                said, used = await self._reply(talk, _seed(f"{self.options.seed}/{conversation.id}/{talk.turn}"))
            except _TooLong as why:
                reason = f"over-long: {why}"
                break
            except _Failed as why:
                return Answered(conversation.id, reason=f"the server does not answer: {why}", failed=True)
            if not any(said.get(name) for name in ("content", "reasoning_content", "tool_calls")):
                reason = "the target answers nothing"
                break
            texts.append(said)
            if not said["content"] and not said.get("tool_calls"):
                break  # cut while it was still thinking: there is nothing that a next turn could refer to
            if used + 2 > self.options.max_length:
                break  # no later turn fits
            talk.history.append({name: value for name, value in said.items() if name != "finish_reason"})
        return Answered(conversation.id, texts=texts, reason="" if texts else reason)

    async def write_prompt(self, start: Sequence[int], stream: str) -> str | None:
        """A user's turn written by the target (`writer.synthesise`). Raises KvshotError if the server cannot continue tokens."""
        wanted = self.options.synthesis

        async def ask() -> tuple[str, str]:
            done = await self._client.completions.create(
                model=self.model, prompt=list(start), max_tokens=wanted.max_new_tokens, temperature=wanted.temperature,
                top_p=wanted.top_p, seed=_seed(stream), extra_body=self._plain(),
            )  # fmt: skip
            choice = _choice(done)
            if not isinstance(choice.text, str):
                raise _BadAnswer("it has no text")
            choice.text.encode()
            return choice.text, choice.finish_reason

        try:
            text, ended = await self._limited(ask)
        except (_Failed, _TooLong) as why:
            raise KvshotError(f"{self.url}/completions wrote no prompt ({why}); set prep.synthesis.count=0 if the server knows chat alone") from None
        return text.strip() if ended == "stop" else None

    def _system(self, conversation: Conversation) -> Iterator[dict[str, Any]]:
        system = self.options.template.system
        if system is not None and conversation.messages[:1] and conversation.messages[0]["role"] != "system":
            yield {"role": "system", "content": system}

    async def _reply(self, talk: Talk, seed: int) -> tuple[dict[str, Any], int]:
        """The assistant message that answers `talk.history`, and the tokens of context it fills (0: the server does not say)."""
        thinking, extra = self.options.template.thinking, self._plain(self.wanted.top_k, self.wanted.min_p)
        if thinking is not None:
            extra["chat_template_kwargs"] = {"enable_thinking": thinking}
        tools = {"tools": list(talk.conversation.tools)} if talk.conversation.tools else {}
        messages = list(talk.history)

        async def ask() -> Any:
            done = await self._client.chat.completions.create(
                model=self.model, messages=messages, max_tokens=self.wanted.max_new_tokens, temperature=self.wanted.temperature,
                top_p=self.wanted.top_p, seed=seed, extra_body=extra, **tools,
            )  # fmt: skip
            return _message(_choice(done)), getattr(done.usage, "total_tokens", None) or 0

        return await self._limited(ask)

    def _plain(self, top_k: int = 0, min_p: float = 0.0) -> dict[str, Any]:
        """Settings beyond OpenAI's own. All are named, or a server would take them from the model's generation_config.json."""
        return {"top_k": top_k or -1, "min_p": min_p, "repetition_penalty": 1.0}

    async def _limited(self, ask: Any) -> Any:
        """`_try` with one of the slots, keeping count of failures in a row. Raises KvshotError after too many."""
        async with self._slots:
            try:
                found = await self._try(ask)
            except _TooLong:
                self.failures = 0
                raise
            except _Failed as why:
                self.failures += 1
                if self.failures > MOST_FAILURES:
                    raise KvshotError(
                        f"{self.url}: {self.failures} requests in a row were given up, the last one: {why}; "
                        "look after the server, then run the same command again: it keeps the answers there are"
                    ) from None
                raise
            self.failures = 0
            return found

    async def _try(self, ask: Any) -> Any:
        """`ask()`, again after a while if it fails in a way that may pass. Raises _Failed, _TooLong, ConfigError (refused)."""
        from openai import APIConnectionError, APIResponseValidationError, APIStatusError

        for tried in range(self.endpoint.retries + 1):
            wait = min(_LONGEST_WAIT, _FIRST_WAIT * 2**tried) * random.uniform(0.5, 1)
            try:
                async with asyncio.timeout(self.endpoint.timeout):
                    return await ask()
            except APIStatusError as error:
                why = self._status(error)  # raises where another try is in vain
                wait = max(wait, _retry_after(error.response.headers.get("retry-after")))
            except TimeoutError:
                why = f"no answer within {self.endpoint.timeout:g} s"
            except APIConnectionError as error:
                why = self._safe(f"{error} {error.__cause__ or ''}")
            except (APIResponseValidationError, ValueError, _BadAnswer) as error:
                why = self._safe(f"an answer that is no chat completion: {error}")
            if tried < self.endpoint.retries:
                await asyncio.sleep(wait)
        raise _Failed(f"{why} ({self.endpoint.retries + 1} tries)")

    def _status(self, error: APIStatusError) -> str:
        """What a status of 400 and above means. Raises what ends the run or the conversation; a text: try again."""
        code = error.status_code
        if code in (401, 403):  # what the server says may hold the key
            key = f"the key in {self.endpoint.api_key_env}" if self._key else f"a request without a key ({self.endpoint.api_key_env} is not set)"
            raise ConfigError(f"prep.regenerate.base_url={self.url}: the server refuses {key} with status {code}; set prep.regenerate.endpoint.api_key_env")
        body = error.body
        said = self._safe(str((body.get("message") if isinstance(body, dict) else body) or error.message))
        if code in _REFUSED:
            raise ConfigError(f"prep.regenerate.base_url={self.url}: the server says {said}; expected http://HOST:PORT/v1 and a model that is served there")
        if code in _RETRIED or code >= 500:
            return f"status {code}: {said}"
        if any(sign in said.lower() for sign in _TOO_LONG):
            raise _TooLong(said)
        raise _Failed(f"status {code}: {said}")

    def _safe(self, text: str) -> str:
        text = " ".join(text.split())
        return (text.replace(self._key, "***") if self._key else text)[:300]  # in this order, or the beginning of a key stays


def _choice(done: Any) -> Any:
    """The first choice of a completion. Raises _BadAnswer if there is none, or it ended as none should."""
    choices = getattr(done, "choices", None)
    if not choices:
        raise _BadAnswer("it has no choices")
    reason = getattr(choices[0], "finish_reason", None)
    if reason not in _ENDED:
        raise _BadAnswer(f"finish_reason is {reason!r}")
    return choices[0]


def _message(choice: Any) -> dict[str, Any]:
    """{"role", "content"[, "reasoning_content"][, "tool_calls"], "finish_reason"} of a chat completion's choice.

    Raises _BadAnswer; UnicodeEncodeError (a ValueError) for half a character, which no tokenizer takes.
    """
    message = getattr(choice, "message", None)
    content = getattr(message, "content", None)
    if message is None or not isinstance(content, str | None):
        raise _BadAnswer("it has no message with text")
    said: dict[str, Any] = {"role": "assistant", "content": (content or "").strip()}
    # vLLM renamed the field
    reasoning = getattr(message, "reasoning_content", None) or getattr(message, "reasoning", None)
    if isinstance(reasoning, str) and reasoning.strip():
        said["reasoning_content"] = reasoning.strip()
    if message.tool_calls:
        said["tool_calls"] = [call.model_dump(mode="json", exclude_none=True) for call in message.tool_calls]
    json.dumps(said, ensure_ascii=False).encode()
    return {**said, "finish_reason": choice.finish_reason}


def _retry_after(value: str | None) -> float:
    """Seconds of a Retry-After header, which is a number or a date; 0 without one."""
    if value is None:
        return 0.0
    with suppress(ValueError):
        return max(0.0, float(value))
    with suppress(ValueError, TypeError):
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    return 0.0


def _seed(stream: str) -> int:
    """A seed that servers take (31 bits), the same for the same request in every run."""
    return int(hashlib.sha256(stream.encode()).hexdigest()[:12], 16) & 0x7FFFFFFF
