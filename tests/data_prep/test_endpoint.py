"""A server that plays vLLM over real HTTP: good answers, every kind of failure, limits, accounts, a kill and its resume."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from data_prep import endpoint
from data_prep.endpoint import EndpointPool, open_pool
from data_prep.pool import Pool
from data_prep.sources import Conversation
from data_prep.writer import Accounts, Answered, units_of
from data_prep.writer import Unit as WorkUnit
from kvshot_ds.config import PrepConfig, TargetConfig
from kvshot_ds.errors import ConfigError, KvshotError

Reply = tuple[int, dict[str, Any] | str, dict[str, str]]
KEY = "sk-very-secret"


def completion(content: str | None, finish: str = "stop", total: int = 20, **more: Any) -> Reply:
    choice = {"index": 0, "finish_reason": finish, "message": {"role": "assistant", "content": content, **more}}
    usage = {"prompt_tokens": 10, "completion_tokens": total - 10, "total_tokens": total}
    return 200, {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": usage}, {}


class Server:
    """reply(question, tries so far) -> what is sent; None: the connection is dropped. Notes bodies, tries and requests in flight."""

    def __init__(self, reply: Callable[[str, int], Reply | None]) -> None:
        self.reply, self.models, self.key = reply, ["m"], ""
        self.bodies: list[dict[str, Any]] = []
        self.tries: Counter[str] = Counter()
        self.flying, self.most, self.lock = 0, 0, threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None:
                pass

            def send(self, status: int, body: dict[str, Any] | str, headers: dict[str, str]) -> None:
                data = (body if isinstance(body, str) else json.dumps(body)).encode()
                self.send_response(status)
                for name, value in {"Content-Type": "application/json", "Content-Length": str(len(data)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data)

            def refused(self) -> bool:
                sent = self.headers.get("Authorization", "")
                if outer.key and sent != f"Bearer {outer.key}":
                    self.send(401, {"error": {"message": f"Incorrect API key provided: {sent}"}}, {})
                    return True
                return False

            def do_GET(self) -> None:
                if not self.refused():
                    self.send(200, {"object": "list", "data": [{"id": m, "object": "model"} for m in outer.models]}, {})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if self.refused():
                    return
                question = body["messages"][-1]["content"] if "messages" in body else str(body["prompt"])
                with outer.lock:
                    outer.bodies.append(body)
                    outer.tries[question] += 1
                    tries = outer.tries[question]
                    outer.flying += 1
                    outer.most = max(outer.most, outer.flying)
                try:
                    answer = outer.reply(question, tries)
                finally:
                    with outer.lock:
                        outer.flying -= 1
                if answer is None:
                    self.close_connection = True
                    self.connection.close()
                else:
                    self.send(*answer)

        class Quiet(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_: Any) -> None:
                pass  # a client that was killed

        self.http = Quiet(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"
        self.thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self.thread.start()


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Server]]:
    monkeypatch.setattr(endpoint, "_FIRST_WAIT", 0.01)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    started: list[Server] = []

    def start(reply: Callable[[str, int], Reply | None] = lambda question, _: completion(f"re {question}")) -> Server:
        started.append(Server(reply))
        return started[-1]

    yield start
    for server in started:
        server.http.shutdown()
        server.http.server_close()
        server.thread.join()


def ask(*questions: str) -> Conversation:
    return Conversation(tuple({"role": "user", "content": q} for q in questions), "q.txt", 1)


def options(server: Server | str, regenerate: dict[str, Any] | None = None, **more: Any) -> PrepConfig:
    url = server if isinstance(server, str) else server.url
    own = dict(regenerate or {})
    asked = {"concurrency": 4, "retries": 2, "timeout": 20, **own.pop("endpoint", {})}
    return PrepConfig.model_validate({"regenerate": {"base_url": url, "endpoint": asked, **own}, **more})


def run(wanted: PrepConfig, *conversations: Conversation, size: int = 3) -> dict[str, Answered]:
    """Answers by their first questions."""
    with EndpointPool(wanted) as pool:
        found = {a.id: a for _, rows in pool.map(units_of(conversations, size)) for a in rows}
    assert set(found) == {c.id for c in conversations}
    return {c.messages[0]["content"] if c.messages else "": found[c.id] for c in conversations}


def test_turns_are_asked_in_the_context_of_earlier_answers_with_every_setting(serve: Callable[..., Server]) -> None:
    server = serve()
    wanted = options(
        server,
        {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "max_new_tokens": 33},
        template={"system": "Be brief.", "thinking": False},
        seed=4,
    )
    conversation = Conversation(ask("a", "b").messages, "q.txt", 1, ({"type": "function", "function": {"name": "f"}},))
    found = run(wanted, conversation)["a"]
    assert (found.answers, found.reason, found.failed) == ([], "", False)
    assert found.texts == [{"role": "assistant", "content": f"re {q}", "finish_reason": "stop"} for q in "ab"]
    first, second = server.bodies
    system = {"role": "system", "content": "Be brief."}
    assert first["messages"] == [system, {"role": "user", "content": "a"}]
    assert second["messages"] == [*first["messages"], {"role": "assistant", "content": "re a"}, {"role": "user", "content": "b"}]
    settings = {"model": "m", "max_tokens": 33, "temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.0}
    assert {name: first[name] for name in settings} == settings
    assert first["chat_template_kwargs"] == {"enable_thinking": False} and first["tools"] == [conversation.tools[0]]
    assert first["seed"] != second["seed"] and all(0 <= body["seed"] < 1 << 31 for body in server.bodies)
    run(wanted, conversation)
    assert server.bodies[2:] == [first, second], "a rerun asks the same, seeds included"
    run(options(server, seed=5), ask("a"))
    plain = server.bodies[-1]
    assert plain["seed"] != first["seed"] and plain["top_k"] == -1 and "chat_template_kwargs" not in plain and "tools" not in plain


def test_what_ends_a_conversation(serve: Callable[..., Server]) -> None:
    replies = {
        "cut": completion("half an", "length"),
        "thinks": completion("yes", reasoning_content=" Hm. "),
        "renamed": completion("yes", reasoning="Hm."),
        "lost in thought": completion(None, "length", reasoning_content="Hm, hm"),
        "mute": completion("  "),
        "calls": completion(None, "tool_calls", tool_calls=[{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]),
        "full": completion("long", total=99),
        "too long": (400, {"error": {"message": "This model's maximum context length is 64 tokens."}}, {}),
    }
    server = serve(lambda question, _: replies.get(question) or completion("ok"))
    found = run(options(server, {"max_new_tokens": 10}, max_length=100), *(ask(q, "next") for q in replies), ask("x", "too long"), Conversation((), "q", 1))
    said = {q: [(t["content"], t.get("reasoning_content"), t["finish_reason"]) for t in a.texts] for q, a in found.items()}
    ok = ("ok", None, "stop")
    assert said == {
        "cut": [("half an", None, "length"), ok],
        "thinks": [("yes", "Hm.", "stop"), ok],
        "renamed": [("yes", "Hm.", "stop"), ok],
        "lost in thought": [("", "Hm, hm", "length")],
        "mute": [],
        "calls": [("", None, "tool_calls"), ok],
        "full": [("long", None, "stop")],
        "too long": [],
        "x": [ok],
        "": [],
    }
    assert found["calls"].texts[0]["tool_calls"][0]["function"]["name"] == "f"
    reasons = {q: a.reason for q, a in found.items() if a.reason}
    assert reasons.pop("too long").startswith("over-long: ")
    assert reasons == {"mute": "the target answers nothing", "": "no question"}
    assert not any(a.failed for a in found.values())
    history = next(b["messages"] for b in server.bodies if len(b["messages"]) > 1 and b["messages"][0]["content"] == "thinks")
    assert history[1] == {"role": "assistant", "content": "yes", "reasoning_content": "Hm."}


def failing(kind: str, last: int) -> Callable[[str, int], Reply | None]:
    """The first `last` tries of "bad" fail in one way."""

    def reply(question: str, tries: int) -> Reply | None:
        if question != "bad" or tries > last:
            return completion("fine")
        if kind == "hang":
            time.sleep(0.6)
        return {
            "429": (429, {"error": {"message": "slow down"}}, {}),
            "408": (408, {}, {}),
            "500": (500, "oops", {}),
            "503": (503, {"error": {"message": "loading"}}, {}),
            "json": (200, '{"choices": [', {}),
            "html": (200, "<html>proxy</html>", {"Content-Type": "text/html"}),
            "shape": (200, {"choices": []}, {}),
            "half": completion("half of \ud83d"),
            "abort": completion("half", "abort"),
            "dropped": None,
            "hang": completion("late"),
        }[kind]

    return reply


KINDS = ("429", "408", "500", "503", "json", "html", "shape", "half", "abort", "dropped", "hang")


@pytest.mark.parametrize("kind", KINDS)
def test_a_failure_that_passes_costs_nothing_and_one_that_stays_costs_one_conversation(serve: Callable[..., Server], kind: str) -> None:
    timeout = {"endpoint": {"timeout": 0.3 if kind == "hang" else 20}}
    server = serve(failing(kind, last=2))
    found = run(options(server, timeout), ask("bad", "next"), ask("good"))
    assert [t["content"] for t in found["bad"].texts] == ["fine", "fine"] and server.tries["bad"] == 3
    server = serve(failing(kind, last=99))
    found = run(options(server, timeout), ask("bad", "next"), ask("good"))
    assert found["bad"].failed and found["bad"].texts == [] and found["bad"].reason.startswith("the server does not answer: ")
    assert "(3 tries)" in found["bad"].reason and "None" not in found["bad"].reason and server.tries["bad"] == 3
    assert not found["good"].failed and found["good"].texts
    sign = {
        "json": "no chat completion",
        "html": "no chat completion",
        "shape": "no choices",
        "half": "surrogates",
        "abort": "'abort'",
        "hang": "0.3 s",
        "dropped": "onnection",
    }
    assert sign.get(kind, f"status {kind}") in found["bad"].reason


def test_other_refusals_of_a_request_are_not_tried_again(serve: Callable[..., Server]) -> None:
    server = serve(lambda question, _: (422, {"error": {"message": "no such option"}}, {}) if question == "bad" else completion("ok"))
    found = run(options(server), ask("bad"), ask("good"))
    assert found["bad"].failed and found["bad"].reason == "the server does not answer: status 422: no such option"
    assert server.tries["bad"] == 1


@pytest.mark.parametrize("header", ["seconds", "date"])
def test_retry_after_is_honoured(serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch, header: str) -> None:
    waited: list[float] = []

    async def sleep(seconds: float) -> None:
        waited.append(seconds)

    monkeypatch.setattr(endpoint.asyncio, "sleep", sleep)
    until = "7.5" if header == "seconds" else formatdate(time.time() + 100, usegmt=True)
    server = serve(lambda _, tries: (429, {}, {"Retry-After": until}) if tries == 1 else (503, {}, {}) if tries == 2 else completion("ok"))
    assert run(options(server), ask("a"))["a"].texts
    asked, plain = (w for w in waited if w > 0)
    assert asked == 7.5 if header == "seconds" else 90 < asked <= 100
    assert 0.01 <= plain <= 0.02, "without the header: doubled, with jitter"
    assert [endpoint._retry_after(v) for v in (None, "soon", "-3")] == [0, 0, 0]


def test_requests_in_flight_reach_the_limit_and_never_pass_it(serve: Callable[..., Server]) -> None:
    together = threading.Barrier(5)  # the first five come at once, or this breaks

    def slowly(question: str, _: int) -> Reply:
        if question in ("0", "1", "2", "3", "4"):
            together.wait(20)
        time.sleep(0.01)
        return completion(question)

    server = serve(slowly)
    found = run(options(server, {"endpoint": {"concurrency": 5}}), *(ask(f"{n}", "b", "c") for n in range(24)), size=4)
    assert all(len(a.texts) == 3 for a in found.values())
    assert server.most == 5 and not together.broken
    taken: list[int] = []

    def units() -> Iterator[WorkUnit]:
        for unit in units_of((ask(f"{n}") for n in range(40)), 4):
            taken.append(unit.index)
            yield unit

    with EndpointPool(options(server, {"endpoint": {"concurrency": 5}})) as pool:
        for done, (_unit, _rows) in enumerate(pool.map(units())):
            assert len(taken) - done <= 4, "units are taken as they are needed"


def test_a_refused_key_ends_the_run_at_once_and_is_never_shown(
    serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    server = serve()
    server.key = "other"
    with pytest.raises(ConfigError, match=r"refuses a request without a key.*OPENAI_API_KEY is not set") as error:
        run(options(server), ask("a"))
    monkeypatch.setenv("MY_KEY", KEY)
    with caplog.at_level("DEBUG"), pytest.raises(ConfigError, match="refuses the key in MY_KEY with status 401") as error:
        run(options(server, {"endpoint": {"api_key_env": "MY_KEY"}}), ask("a"))
    assert KEY not in str(error.value) + caplog.text + "".join(capfd.readouterr())
    server.key = KEY
    assert run(options(server, {"endpoint": {"api_key_env": "MY_KEY"}}), ask("a"))["a"].texts
    echo = serve(lambda _, tries: (500, {"error": {"message": f"key {KEY}"}}, {}))
    found = run(options(echo, {"endpoint": {"api_key_env": "MY_KEY", "retries": 0}}), ask("a"))
    assert "key ***" in found["a"].reason and KEY not in found["a"].reason
    long = serve(lambda _, tries: (500, {"error": {"message": "x" * 295 + KEY}}, {}))
    found = run(options(long, {"endpoint": {"api_key_env": "MY_KEY", "retries": 0}}), ask("a"))
    assert KEY[:4] not in found["a"].reason, "a key is cut out before the text is shortened, or its beginning stays"
    later = serve(lambda _, tries: (403, {}, {}))
    with pytest.raises(ConfigError, match="status 403"):
        run(options(later), ask("a"))


def test_the_model_is_found_or_asked_for(serve: Callable[..., Server]) -> None:
    server = serve()
    server.models = ["b", "a"]
    with pytest.raises(ConfigError, match=r"endpoint\.model: name one of the models .* serves: a, b$"):
        run(options(server), ask("x"))
    with pytest.raises(ConfigError, match=r"endpoint\.model=c: .* serves a, b$"):
        run(options(server, {"endpoint": {"model": "c"}}), ask("x"))
    run(options(server, {"endpoint": {"model": "b"}}), ask("x"))
    assert server.bodies[-1]["model"] == "b"
    server.http.shutdown()
    server.http.server_close()
    with pytest.raises(ConfigError, match=r"does not list the server's models .*is a server running there"):
        run(options(server), ask("x"))
    gone = serve(lambda *_: (404, {"error": {"message": "The model `m` does not exist."}}, {}))
    with pytest.raises(ConfigError, match="does not exist"):
        run(options(gone), ask("x"))


def test_a_server_that_dies_stops_the_run_and_the_next_one_asks_again(serve: Callable[..., Server]) -> None:
    alive = True

    def dying(question: str, _: int) -> Reply:
        return completion("ok") if alive and int(question) < 12 else (500, {}, {})

    server = serve(dying)
    conversations = [ask(str(n)) for n in range(60)]
    kept: dict[int, list[Answered]] = {}
    wanted = options(server, {"endpoint": {"retries": 0}})
    with (
        pytest.raises(KvshotError, match=r"21 requests in a row were given up, the last one: status 500.*run the same command again"),
        EndpointPool(wanted) as pool,
    ):
        for unit, rows in pool.map(units_of(conversations, 3)):
            kept[unit.index] = rows
    # which answers came before the last failure is chance
    assert set(kept) <= {0, 1, 2, 3} and not any(a.failed for rows in kept.values() for a in rows), "none of its failures is handed over"


def test_failures_between_answers_do_not_stop_a_run(serve: Callable[..., Server]) -> None:
    server = serve(lambda question, _: completion("ok") if int(question) % 3 == 0 else (500, {}, {}))
    found = run(options(server, {"endpoint": {"retries": 0, "concurrency": 1}}), *(ask(str(n)) for n in range(60)))
    assert sum(a.failed for a in found.values()) == 40
    all_bad = serve(lambda *_: (500, {}, {}))
    found = run(options(all_bad, {"endpoint": {"retries": 0}}), *(ask(str(n)) for n in range(20)))
    assert all(a.failed for a in found.values()), "at the end they are handed over all the same"


def test_a_run_killed_in_the_middle_continues_and_its_accounts_add_up(serve: Callable[..., Server], tmp_path: Path) -> None:
    server = serve(lambda question, _: (500, {}, {}) if question == "7" else completion(f"re {question}"))
    conversations = [ask(str(n)) for n in range(20)] + [Conversation((), "q", 1)]
    wanted = options(server, {"endpoint": {"retries": 0}})

    def attempt(until: int | None) -> Accounts:
        accounts = Accounts()
        units = []
        for unit in units_of(conversations, 3):
            if (part := tmp_path / f"{unit.index}.json").is_file():
                rows = [Answered(**row) for row in json.loads(part.read_text())]
                accounts.input += len(rows)
                accounts.add(rows, before=True)
            else:
                units.append(unit)
        with EndpointPool(wanted) as pool:
            for done, (unit, rows) in enumerate(pool.map(units)):
                if done == until:
                    break
                (tmp_path / f"{unit.index}.json").write_text(json.dumps([asdict(row) for row in rows]))
                accounts.input += len(rows)
                accounts.add(rows)
        accounts.check()
        return accounts

    assert attempt(until=3).done <= 9 and len(list(tmp_path.iterdir())) == 3
    asked = Counter(server.tries)
    last = attempt(until=None)
    assert (last.input, last.failed, last.before) == (21, 1, 9) and last.done + last.skipped == 20
    stored = [Answered(**row) for path in tmp_path.iterdir() for row in json.loads(path.read_text())]
    total = Accounts(input=21)
    total.add(stored)
    total.check()
    assert (total.done, total.failed, total.skipped) == (19, 1, 1)
    repeated = {q for q in server.tries if server.tries[q] > 1}
    assert len(repeated) <= 12, "only the units in flight are asked again"
    assert sum(asked.values()) < 20


def test_prompts_are_synthesised_by_continuing_tokens(serve: Callable[..., Server]) -> None:
    def reply(prompt: str, tries: int) -> Reply:
        finish = "length" if tries == 2 else "stop"
        return 200, {"id": "1", "object": "text_completion", "choices": [{"index": 0, "text": f" What is {tries}?\n", "finish_reason": finish}]}, {}

    server = serve(reply)
    wanted = options(server, synthesis={"count": 3, "max_new_tokens": 9})
    with EndpointPool(wanted, [5, 6]) as pool:
        ((unit, texts),) = pool.map([WorkUnit(0, 1, count=3)])
    assert unit.count == 3 and sorted(texts, key=str) == [None, "What is 1?", "What is 3?"]
    assert all(b["prompt"] == [5, 6] and b["max_tokens"] == 9 and b["top_p"] == 0.95 for b in server.bodies)
    assert len({b["seed"] for b in server.bodies}) == 3
    chat_only = serve(lambda *_: (400, {}, {}))
    with pytest.raises(KvshotError, match=r"wrote no prompt .*set prep\.synthesis\.count=0"), EndpointPool(options(chat_only), [5]) as pool:
        list(pool.map([WorkUnit(0, 1, count=1)]))


@pytest.mark.parametrize(
    "choice", [{"text": "What", "finish_reason": "abort"}, {"text": None, "finish_reason": "stop"}, {"text": "\ud83d", "finish_reason": "stop"}, None]
)
def test_a_prompt_that_is_no_completion_is_tried_again_and_then_an_error_in_words(serve: Callable[..., Server], choice: dict[str, Any] | None) -> None:
    def reply(prompt: str, tries: int) -> Reply:
        good = {"text": "What?", "finish_reason": "stop"}
        found = choice if tries <= last else good
        return 200, {"id": "1", "object": "text_completion", "choices": [{"index": 0, **found}] if found else []}, {}

    last = 2
    with EndpointPool(options(serve(reply), synthesis={"count": 1}), [5]) as pool:
        assert [texts for _, texts in pool.map([WorkUnit(0, 1, count=1)])] == [["What?"]]
    last = 99
    with pytest.raises(KvshotError, match=r"/completions wrote no prompt .*3 tries"), EndpointPool(options(serve(reply), synthesis={"count": 1}), [5]) as pool:
        list(pool.map([WorkUnit(0, 1, count=1)]))


@pytest.mark.parametrize("url", ["http://[::1", "http://127.0.0.1:99999/v1", "http://", "127.0.0.1:8000/v1", "http://host:x/v1"])
def test_an_address_that_is_none_is_refused_with_the_recipe(url: str) -> None:
    with pytest.raises(ValidationError, match=r"base_url\s+Value error, expected http://HOST:PORT/v1"):
        options(url)
    with pytest.raises(ValidationError, match=r"expected no name and password in it: recipe\.yaml would keep them"):
        options("http://me:secret@127.0.0.1:8000/v1")
    with pytest.raises(ValidationError, match=r"api_key_env\s+String should match"):
        options("http://127.0.0.1:8000/v1", {"endpoint": {"api_key_env": KEY}})


def test_the_options_choose_who_answers(tmp_path: Path) -> None:
    assert isinstance(open_pool(TargetConfig(path=tmp_path), PrepConfig()), Pool)
    pool = open_pool(TargetConfig(path=tmp_path), options("http://127.0.0.1:9/v1"))
    assert isinstance(pool, EndpointPool)
    with pool:
        assert list(pool.map([])) == [], "a server that is not needed is not asked"
