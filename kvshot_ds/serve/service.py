"""The HTTP side: routes, limits, whole and streamed answers, errors in OpenAI's shape."""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
import time
import traceback
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from kvshot_ds.config import SamplingConfig, ServeConfig
from kvshot_ds.serve.answers import Shape, model, models
from kvshot_ds.serve.prompts import Prompts, room
from kvshot_ds.serve.protocol import ApiError, Wanted, bad, read_request
from kvshot_ds.serve.worker import Event, Failed, Finished, Job, Piece, Worker, stopping

_SAMPLED = ("top_k", "top_p", "min_p")


@dataclass
class Service:
    """What one server knows. name: of the model with the drafter; the target alone is `name:target`. context: of the target [tokens].
    sampling: what requests leave out. stopping: no new requests are taken."""

    options: ServeConfig
    sampling: SamplingConfig
    name: str
    context: int
    prompts: Prompts
    worker: Worker
    stopping: bool = False
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def names(self) -> tuple[str, str]:
        return self.name, f"{self.name}:target"

    def app(self) -> web.Application:
        app = web.Application(client_max_size=self.options.max_body, middlewares=[_errors])
        app.router.add_get("/health", self.health)
        app.router.add_get("/v1/models", self.list_models)
        app.router.add_get("/v1/models/{name}", self.one_model)
        app.router.add_post("/v1/chat/completions", self.chat)
        app.router.add_post("/v1/completions", self.complete)
        return app

    async def health(self, request: web.Request) -> web.Response:
        """Needs no key. Status 503 once the server is being stopped."""
        (decoding, waiting), counts = self.worker.load, self.worker.counts
        said = {"status": "stopping" if self.stopping else "ok", "decoding": decoding, "waiting": waiting}
        return _json({**said, "answered": counts.answered, "abandoned": counts.abandoned, "failed": counts.failed}, 503 if self.stopping else 200)

    async def list_models(self, request: web.Request) -> web.Response:
        self._admit(request)
        return _json(models(self.names, self.created))

    async def one_model(self, request: web.Request) -> web.Response:
        self._admit(request)
        return _json(model(self._known(request.match_info["name"]), self.created))

    async def chat(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, chat=True)

    async def complete(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, chat=False)

    def _admit(self, request: web.Request) -> None:
        if self.options.api_key is not None:
            scheme, _, key = request.headers.get("Authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not hmac.compare_digest(key.strip().encode("utf-8", "replace"), self.options.api_key.encode()):
                raise ApiError(401, "expected the header Authorization: Bearer KEY with this server's key (serve.api_key)", None, "invalid_api_key")
        if self.stopping:
            raise stopping()

    def _known(self, name: str | None) -> str:
        """The name of the model that is meant; the drafter's where none is given."""
        if name is not None and name not in self.names:
            raise ApiError(404, f"model {name[:80]!r} is not served here; expected {' or '.join(self.names)}", "model", "model_not_found")
        return self.name if name is None else name

    def _sampling(self, wanted: Wanted) -> SamplingConfig:
        """Options of the request, under them those of the recipe's decode.sampling. A request that samples without a seed gets a fresh one."""
        if self.sampling.greedy and "temperature" not in wanted.sampling and (useless := [name for name in _SAMPLED if name in wanted.sampling]):
            raise bad(f"{useless[0]} without temperature: this server's default is temperature 0, which leaves no choice; give a temperature", useless[0])
        seed = {"seed": secrets.randbits(31)}  # which clients of any language can send back
        return SamplingConfig.model_validate({**self.sampling.model_dump(), **seed, **wanted.sampling})

    async def _answer(self, request: web.Request, chat: bool) -> web.StreamResponse:
        """One request, whole. However it ends, its decoding does not outlive it: aiohttp cancels it when the client goes away."""
        self._admit(request)
        limit = asyncio.get_running_loop().time() + self.options.timeout
        if request.content_type != "application/json":  # which also keeps pages of a browser out that nobody let in
            raise ApiError(415, f"expected the header Content-Type: application/json, found {request.content_type}")
        async with asyncio.timeout_at(limit):
            wanted = read_request(await request.read(), chat)
        name, sampling = self._known(wanted.model), self._sampling(wanted)
        prompt = await asyncio.to_thread(self.prompts.tokens, wanted)
        most = room(len(prompt), wanted, self.options.max_new_tokens, self.context)
        events = _Events(limit)
        job = Job(prompt, most, sampling, wanted.stop, name != self.name, events.post)
        self.worker.submit(job)
        try:
            shape = Shape(chat, name, wanted.include_usage)
            return await (self._stream(request, shape, events, sampling) if wanted.stream else self._whole(shape, events, sampling))
        finally:
            self.worker.withdraw(job)

    async def _whole(self, shape: Shape, events: _Events, sampling: SamplingConfig) -> web.Response:
        text = ""
        while isinstance(event := await events.next(), Piece):
            text += event.text
        return _json(shape.whole(text, event.reason, event.statistics.usage(), _speculation(event, sampling)))

    async def _stream(self, request: web.Request, shape: Shape, events: _Events, sampling: SamplingConfig) -> web.StreamResponse:
        """Server-sent events. What fails before the first text has a status of its own; afterwards an event says it, and the stream ends."""
        event = await events.next()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        await response.prepare(request)

        async def send(bodies: Iterable[dict[str, Any]]) -> None:
            for body in bodies:
                await response.write(b"data: " + _bytes(body) + b"\n\n")

        try:
            await send(shape.opening())
            while isinstance(event, Piece):
                await send([shape.piece(event.text)])
                event = await events.next()
            await send(shape.closing(event.reason, event.statistics.usage(), _speculation(event, sampling)))
            await response.write(b"data: [DONE]\n\n")
        except (ApiError, TimeoutError) as error:
            await send([_as_api(error).body])
        await response.write_eof()
        return response


class _Events:
    """Events of one job, from the worker's thread to the loop. limit: the loop's time at which waiting ends."""

    def __init__(self, limit: float) -> None:
        self._loop, self._limit = asyncio.get_running_loop(), limit
        self._queue: asyncio.Queue[Event] = asyncio.Queue()

    def post(self, event: Event) -> None:
        self._loop.call_soon_threadsafe(self._queue.put_nowait, event)

    async def next(self) -> Piece | Finished:
        """Raises ApiError if the job failed, TimeoutError at the limit."""
        async with asyncio.timeout_at(self._limit):
            event = await self._queue.get()
        if isinstance(event, Failed):
            raise event.error
        return event


def _speculation(event: Finished, sampling: SamplingConfig) -> dict[str, Any]:
    return event.statistics.speculation(None if sampling.greedy else sampling.seed, event.seconds)


def _as_api(error: Exception) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, TimeoutError):
        return ApiError(504, "the answer took longer than this server allows, waiting included (serve.timeout)", None, "timeout")
    return ApiError(500, "the request failed; the server's own output says why")


@web.middleware
async def _errors(request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> web.StreamResponse:
    """Everything that goes wrong before an answer has begun, in OpenAI's shape."""
    try:
        return await handler(request)
    except (ApiError, TimeoutError) as error:
        return _refused(_as_api(error))
    except web.HTTPRequestEntityTooLarge as error:
        return _refused(ApiError(413, f"the request is too large (serve.max_body): {error.text}"))
    except web.HTTPException as error:
        return _refused(ApiError(error.status, f"{request.method} {request.path}: {error.reason}; expected POST /v1/chat/completions or /v1/completions"))
    except (ConnectionResetError, asyncio.CancelledError):  # the client went away
        raise
    except Exception as error:  # noqa: BLE001 - one request must not end the server
        traceback.print_exc()
        return _refused(_as_api(error))


def _refused(error: ApiError) -> web.Response:
    headers = {429: {"Retry-After": "1"}, 504: {"x-should-retry": "false"}}.get(error.status, {})  # asked again, it would take as long
    return _json(error.body, error.status, headers)


def _json(body: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=_bytes(body), status=status, headers=headers, content_type="application/json")


def _bytes(body: dict[str, Any]) -> bytes:
    return json.dumps(body, ensure_ascii=False).encode("utf-8", "backslashreplace")  # half a character, which an address may hold, stays escaped
