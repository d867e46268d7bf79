"""A server in a thread, over a decoder that follows a script: what the HTTP side and the worker do, without a model."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from kvshot_ds.config import SamplingConfig, ServeConfig
from kvshot_ds.config.preparation import TemplateConfig
from kvshot_ds.decoding.rounds import Round
from kvshot_ds.serve.prompts import Prompts
from kvshot_ds.serve.run import bound, serve
from kvshot_ds.serve.service import Service
from kvshot_ds.serve.worker import Worker

END = 2  # the tiny target's <|im_end|>


class Script:
    """Decodes the tokens of `text`: the prefill, then rounds of 3, the last of them the target's own. As the engine, it stops at a stop
    token or after max_new_tokens. hold(): from then on each round waits for `go`, which lets one pass."""

    def __init__(self, tokenizer: Any, text: str) -> None:
        self.tokens = [*tokenizer(text).input_ids, END]
        self.asked: list[tuple[list[int], int, SamplingConfig, bool]] = []
        self.rounds = self.closed = 0
        self.fails: Exception | None = None
        self.go: threading.Semaphore | None = None
        self.begun = threading.Semaphore(0)  # one for each round asked for

    def hold(self) -> None:
        self.go = threading.Semaphore(0)

    def free(self) -> None:
        go, self.go = self.go, None
        if go is not None:
            go.release()

    def opened(self, alone: bool, sampling: SamplingConfig) -> Asked:
        return Asked(self, alone, sampling)


class Asked:
    """What `Engine` is to the worker."""

    def __init__(self, script: Script, alone: bool, sampling: SamplingConfig) -> None:
        self.script, self.alone, self.sampling = script, alone, sampling

    def generate(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, stop: Collection[int] = ()) -> Iterator[dict[int, Round]]:
        script = self.script
        script.asked.append((list(prompts[0]), max_new_tokens, self.sampling, self.alone))
        tokens = script.tokens[:max_new_tokens]
        groups = [tokens[:1], *(tokens[at : at + 3] for at in range(1, len(tokens), 3))]
        try:
            for number, group in enumerate(groups):
                script.begun.release()
                if script.go is not None:
                    assert script.go.acquire(timeout=60)
                if script.fails is not None:
                    raise script.fails
                script.rounds += 1
                yield {0: Round(tuple(group), 2 if number else 0, 2 if number else 0, len(group) - 1, 0.25, 0.5)}
        finally:
            script.closed += 1


def service_of(tokenizer: Any, script: Script, sampling: dict[str, Any] | None = None, context: int = 2048, **options: Any) -> Service:
    decode = partial(tokenizer.decode, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    config = ServeConfig(port=0, **options)
    worker = Worker(script.opened, decode, {END}, config.max_waiting)
    return Service(config, SamplingConfig(**(sampling or {})), "mine", context, Prompts(tokenizer, TemplateConfig(), 259), worker)


class Running:
    """A server in a thread. stop(), hurry(): as the first and the second signal; `join` waits for its end."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self._listener = bound("127.0.0.1", 0)
        self._listener.listen()  # whoever comes early waits
        self.port: int = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/v1"
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._thread.start()
        assert self._ready.wait(60)

    async def _run(self) -> None:
        self._loop, self._stop, self._hurry = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
        self._ready.set()
        with self._listener:
            await serve(self.service, self._listener, self._stop, self._hurry)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)

    def hurry(self) -> None:
        self._loop.call_soon_threadsafe(self._hurry.set)

    def join(self) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive()

    def ask(self, path: str, body: Any = None, **headers: str) -> tuple[int, dict[str, Any]]:
        """(status, JSON) of one request: a GET without a body; a text is sent as it is."""
        status, text, _ = self.raw(path, body, **headers)
        return status, json.loads(text)

    def raw(self, path: str, body: Any = None, **headers: str) -> tuple[int, str, dict[str, str]]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
            sent = {"Content-Type": "application/json", **{name.replace("_", "-"): value for name, value in headers.items()}}
            connection.request("GET" if data is None else "POST", path, data, sent)
            response = connection.getresponse()
            return response.status, response.read().decode(), dict(response.headers)
        finally:
            connection.close()


@contextmanager
def running(service: Service) -> Iterator[Running]:
    server = Running(service)
    try:
        yield server
    finally:
        with suppress(RuntimeError):  # its loop is closed: it has ended, as join will see
            server.stop()
            server.hurry()  # the first may have ended a server with nothing under way
        server.join()
