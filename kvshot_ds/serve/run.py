"""`kvshot serve`: loads target and drafter, listens, and stops in good order."""

from __future__ import annotations

import asyncio
import ipaddress
import signal
import socket
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from aiohttp import web

from kvshot_ds.config import Recipe, SamplingConfig, ServeConfig
from kvshot_ds.decoding.engine import Engine
from kvshot_ds.decoding.prompts import stop_tokens
from kvshot_ds.drafters.base import Drafter
from kvshot_ds.drafters.build import drafters_for, load_drafter
from kvshot_ds.errors import ConfigError
from kvshot_ds.features.spec import DTYPES
from kvshot_ds.serve.prompts import Prompts
from kvshot_ds.serve.service import Service
from kvshot_ds.serve.worker import Worker
from kvshot_ds.target import Target, load_tokenizer

_LAST_WORDS = 5.0  # for what is decoded to reach slow clients, once the decoding is over [s]


def run(recipe: Recipe) -> None:
    """Serves until SIGTERM or Ctrl-C: then no new requests, those under way finish within serve.grace; a second signal ends them at once.

    Raises ConfigError if the address cannot be listened on, the target or the drafter cannot be read, or they do not belong together.
    """
    options = recipe.serve
    named = () if options.drafter is None else (options.drafter,)
    [folder], _ = drafters_for(recipe.target.path, named, recipe.run_dir, recipe.target.trust_remote_code)
    with bound(options.host, options.port) as listener:  # before the weights are read, which may take minutes
        service = load(recipe, folder)
        asyncio.run(_until_signalled(service, listener))


def bound(host: str, port: int) -> socket.socket:
    """A socket bound to that address, not yet listening. Raises ConfigError if it is taken or is none of this machine."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except OSError:
            listener.close()
            raise
        return listener
    except OSError as error:
        advice = "name an address of this machine in serve.host and a free port in serve.port (0 takes any)"
        raise ConfigError(f"serve.host={host} serve.port={port}: cannot listen there: {error.strerror or error}; {advice}") from None


def load(recipe: Recipe, folder: Path) -> Service:
    """Target, drafter and worker of `recipe`; the drafter lies in `folder`. Decodes a few tokens, so that what cannot decode is not served."""
    target = Target.load(recipe.target.model_copy(update={"dtype": recipe.serve.dtype}))
    drafter, _ = load_drafter(folder, target.device, DTYPES[recipe.serve.dtype])
    drafter.bind(target.model.get_input_embeddings().weight, target.model.get_output_embeddings().weight)
    prompts = Prompts(target.tokenizer, recipe.prep.template, target.geometry.vocab_size)
    # a tokenizer of its own: decoding in one thread and encoding in another disturb each other
    decode = partial(load_tokenizer(recipe.target.path, recipe.target.trust_remote_code).decode, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    engine = engines(recipe, target, drafter)
    engine(False, recipe.decode.sampling).decode([[0]], 4)
    worker = Worker(engine, decode, stop_tokens(target), recipe.serve.max_waiting)
    place = folder.resolve().parent if folder.name == "drafter" else folder.resolve()
    return Service(recipe.serve, recipe.decode.sampling, place.name, target.geometry.max_positions, prompts, worker)


def engines(recipe: Recipe, target: Target, drafter: Drafter) -> Callable[[bool, SamplingConfig], Engine]:
    """(the target alone?, sampling) -> what decodes so."""
    return lambda alone, sampling: Engine(target, None if alone else drafter, recipe.decode.drafting, sampling)


async def _until_signalled(service: Service, listener: socket.socket) -> None:
    loop, stop, hurry = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()

    def heard() -> None:
        (hurry if stop.is_set() else stop).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, heard)
    await serve(service, listener, stop, hurry)


async def serve(service: Service, listener: socket.socket, stop: asyncio.Event, hurry: asyncio.Event) -> None:
    """Answers requests on `listener` until `stop`; then takes none, and ends those under way after serve.grace, or at once on `hurry`."""
    runner = web.AppRunner(service.app(), handler_cancellation=True, access_log=None, shutdown_timeout=_LAST_WORDS)
    await runner.setup()
    service.worker.start()
    await web.SockSite(runner, listener).start()
    print("\n".join(welcome(service, listener)), flush=True)
    if text := warning(service.options):
        print(text, file=sys.stderr, flush=True)
    await stop.wait()
    service.stopping = True
    decoding, waiting = service.worker.load
    print(f"kvshot serve: stopping; {decoding + waiting} answer(s) under way have {service.options.grace:g} s; Ctrl-C again stops at once", flush=True)
    service.worker.close()
    through, hurried = asyncio.create_task(asyncio.to_thread(service.worker.join)), asyncio.create_task(hurry.wait())
    await asyncio.wait({through, hurried}, timeout=service.options.grace, return_when=asyncio.FIRST_COMPLETED)
    service.worker.abort()
    await through
    hurried.cancel()
    await runner.cleanup()
    counts = service.worker.counts
    print(f"kvshot serve: stopped; {counts.answered} answered, {counts.abandoned} abandoned, {counts.failed} failed", flush=True)


def warning(options: ServeConfig) -> str:
    """What to say of a server that anybody can use; '' if there is nothing."""
    if options.api_key is not None or options.host == "localhost":
        return ""
    try:
        if ipaddress.ip_address(options.host).is_loopback:
            return ""
    except ValueError:
        pass
    return f"kvshot serve: warning: serve.host={options.host} lets other machines in, and no key is asked for; set serve.api_key"


def welcome(service: Service, listener: socket.socket) -> list[str]:
    """Where the server listens, and how to try it."""
    host, port = listener.getsockname()[:2]
    shown = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    url = f"http://[{shown}]:{port}/v1" if ":" in shown else f"http://{shown}:{port}/v1"
    key = " -H 'Authorization: Bearer KEY'" if service.options.api_key is not None else ""
    path, asked = "chat/completions", '{"messages": [{"role": "user", "content": "What is a cache?"}], "max_tokens": 64}'
    if not service.prompts.chats:
        path, asked = "completions", '{"prompt": "A cache is", "max_tokens": 64}'
    return [
        f"kvshot serve: {url} (models: {service.name}, and the target alone as {service.names[1]}); Ctrl-C stops it",
        f"  curl {url}/{path} -H 'Content-Type: application/json'{key} -d '{asked}'",
    ]
