"""The HTTP side and the worker, over a scripted decoder: limits, order, errors, shapes, clients that go away, stopping."""

from __future__ import annotations

import http.client
import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvshot_ds.errors import ConfigError, KvshotError
from kvshot_ds.serve.run import bound, warning
from kvshot_ds.target import load_tokenizer
from tests.serve.serving import Running, Script, running, service_of

CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
TEXT = "über 日本 and so on."


@pytest.fixture(scope="module")
def tokenizer(tiny_target: Path) -> Any:
    return load_tokenizer(tiny_target)


@pytest.fixture
def script(tokenizer: Any) -> Script:
    return Script(tokenizer, TEXT)


def hello(**more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hello"}], **more}


def until(true: Any) -> None:
    """Waits for something that another thread is about to do."""
    for _ in range(6000):
        if true():
            return
        time.sleep(0.01)
    pytest.fail("it did not come about")


def chunks(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def test_a_whole_chat(tokenizer, script):
    with running(service_of(tokenizer, script)) as server:
        status, body = server.ask(CHAT, hello(model="mine"))
    assert status == 200
    (choice,) = body["choices"]
    assert choice == {"index": 0, "message": {"role": "assistant", "content": TEXT, "refusal": None}, "logprobs": None, "finish_reason": "stop"}
    assert body["object"] == "chat.completion" and body["model"] == "mine" and body["id"].startswith("chatcmpl-")
    ((prompt, most, sampling, alone),) = script.asked
    assert tokenizer.decode(prompt) == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert sampling.greedy and not alone and most == 1024
    n = len(script.tokens)
    rounds, last = divmod(n - 1, 3)
    assert last, "the last round is shorter"
    accepted = [2] * rounds + [last - 1]
    details = {"accepted_prediction_tokens": sum(accepted), "rejected_prediction_tokens": 2 * len(accepted) - sum(accepted)}
    assert body["usage"] == {
        "prompt_tokens": len(prompt), "completion_tokens": n, "total_tokens": len(prompt) + n, "completion_tokens_details": details,
    }  # fmt: skip
    found = body["speculation"]
    assert found.pop("total_ms") > 0
    assert found == {
        "rounds": len(accepted), "drafted": 2 * len(accepted), "nodes": 2 * len(accepted), "accepted": sum(accepted),
        "tau": pytest.approx((n - 1) / len(accepted), abs=1e-4), "histogram": [accepted.count(k) for k in range(3)],
        "prefill_ms": 500.0, "draft_ms": 250.0 * len(accepted), "verify_ms": 500.0 * len(accepted), "seed": None,
    }  # fmt: skip


def test_a_streamed_chat_says_the_same_in_whole_characters(tokenizer, script):
    with running(service_of(tokenizer, script)) as server:
        whole = server.ask(CHAT, hello())[1]
        status, text, headers = server.raw(CHAT, hello(stream=True, stream_options={"include_usage": True}))
    assert status == 200 and headers["Content-Type"].startswith("text/event-stream")
    *found, done = chunks(text)
    assert done == "[DONE]" and "\ufffd" not in text
    first, *pieces, end, usage = found
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(c["choices"][0]["delta"]["content"] for c in pieces) == TEXT and len(pieces) > 3
    assert {c["choices"][0]["finish_reason"] for c in pieces} == {None} and {c["usage"] for c in (first, *pieces, end)} == {None}
    assert end["choices"][0] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}
    assert usage["choices"] == [] and usage["usage"] == whole["usage"]
    assert {**end["speculation"], "total_ms": 0} == {**whole["speculation"], "total_ms": 0}
    assert {c["object"] for c in found} == {"chat.completion.chunk"} and len({c["id"] for c in found}) == 1


def test_completions_whole_and_streamed(tokenizer, script):
    with running(service_of(tokenizer, script)) as server:
        whole = server.ask(PLAIN, {"prompt": "ab", "max_tokens": 5, "model": "mine:target"})[1]
        status, text, _ = server.raw(PLAIN, {"prompt": tokenizer("ab").input_ids, "max_tokens": 5, "stream": True})
    assert whole["choices"] == [{"index": 0, "text": TEXT[:4], "logprobs": None, "finish_reason": "length"}] and whole["object"] == "text_completion"
    *found, end, done = chunks(text)
    assert (status, done, end["choices"][0]["finish_reason"]) == (200, "[DONE]", "length")
    assert "".join(c["choices"][0]["text"] for c in found) == TEXT[:4] and "usage" not in end
    assert [a[0] for a in script.asked] == [tokenizer("ab").input_ids] * 2
    assert [a[3] for a in script.asked] == [True, False], "the model's name says whether the drafter helps"


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_cut_exactly_and_end_the_decoding(tokenizer, script, stream):
    with running(service_of(tokenizer, script)) as server:
        status, text, _ = server.raw(CHAT, hello(stop=["本 a", "zzz"], stream=stream))
        until(lambda: script.closed == 1)
    assert status == 200
    if stream:
        *found, end, _ = chunks(text)
        said, reason = "".join(c["choices"][0]["delta"].get("content", "") for c in found), end["choices"][0]["finish_reason"]
        speculation = end["speculation"]
    else:
        body = json.loads(text)
        said, reason, speculation = body["choices"][0]["message"]["content"], body["choices"][0]["finish_reason"], body["speculation"]
        # up to and with the token that completes it, though the round it came in has more
        assert body["usage"]["completion_tokens"] == len("über 日本 a".encode())
    assert (said, reason) == ("über 日", "stop")
    assert script.rounds == 1 + speculation["rounds"] < len(script.tokens) / 3


def test_sampling_of_the_request_above_the_recipes(tokenizer, script):
    with running(service_of(tokenizer, script, {"temperature": 0.5, "top_p": 0.9, "seed": 3})) as server:
        bodies = [server.ask(CHAT, hello(**s))[1] for s in ({}, {}, {"temperature": 1, "top_k": 4, "min_p": 0.1, "seed": 9}, {"temperature": 0, "top_p": 0.5})]
    first, second, own, greedy = (a[2] for a in script.asked)
    assert (first.temperature, first.top_p, own.temperature, own.top_k, own.min_p, own.top_p, own.seed) == (0.5, 0.9, 1, 4, 0.1, 0.9, 9)
    assert first.seed != second.seed, "without a seed, another text each time"
    assert [b["speculation"]["seed"] for b in bodies] == [first.seed, second.seed, 9, None] and greedy.greedy
    with running(service_of(tokenizer, script)) as server:
        status, body = server.ask(CHAT, hello(top_p=0.9))
    assert status == 400 and body["error"]["param"] == "top_p" and "give a temperature" in body["error"]["message"]


def test_limits_on_tokens(tokenizer, script):
    prompt = "x" * 90
    with running(service_of(tokenizer, script, context=100, max_new_tokens=50)) as server:
        status, body = server.ask(PLAIN, {"prompt": prompt, "max_tokens": 11})
        assert (status, body["error"]["code"]) == (400, "context_length_exceeded") and "holds 100" in body["error"]["message"]
        assert server.ask(PLAIN, {"prompt": "x" * 100})[1]["error"]["code"] == "context_length_exceeded"
        status, body = server.ask(PLAIN, {"prompt": "x", "max_tokens": 51})
        assert (status, body["error"]["param"]) == (400, "max_tokens") and "serve.max_new_tokens" in body["error"]["message"]
        for wanted in ({"prompt": prompt, "max_tokens": 10}, {"prompt": prompt}, {"prompt": "x"}, {"prompt": "x", "max_tokens": 50}):
            assert server.ask(PLAIN, wanted)[0] == 200
        assert server.ask(CHAT, hello())[0] == 200
    assert [a[1] for a in script.asked] == [10, 10, 16, 50, 50]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (PLAIN, {"prompt": ""}, "prompt"), (PLAIN, {"prompt": []}, "prompt"), (PLAIN, {"prompt": [259]}, "prompt"), (PLAIN, {"prompt": [-1]}, "prompt"),
        (PLAIN, {"prompt": "\ud800"}, None), (CHAT, hello(n=2), "n"), (CHAT, hello(**{"\ud800": 1}), None),
    ],
)  # fmt: skip
def test_requests_that_cannot_be_answered(tokenizer, script, path, body, param):
    with running(service_of(tokenizer, script)) as server:
        status, answer = server.ask(path, body)
    assert (status, answer["error"]["param"], script.asked) == (400, param, [])


def test_a_template_that_refuses_and_one_that_is_missing(tokenizer, script, tiny_target):
    other = load_tokenizer(tiny_target)
    other.chat_template = "{{ raise_exception('no assistant first') }}"
    with running(service_of(other, script)) as server:
        status, body = server.ask(CHAT, hello())
    assert status == 400 and "no assistant first" in body["error"]["message"]
    other.chat_template = None
    with running(service_of(other, script)) as server:
        status, body = server.ask(CHAT, hello())
    assert status == 400 and "no chat template" in body["error"]["message"]


def test_status_and_shape_of_what_http_refuses(tokenizer, script):
    with running(service_of(tokenizer, script, max_body=2000)) as server:
        answers = {
            404: server.ask("/v2/nothing"),
            405: server.ask(CHAT),
            413: server.ask(CHAT, hello(user="x" * 3000)),
            415: server.ask(CHAT, hello(), Content_Type="text/plain"),
        }
        assert server.ask(CHAT, b"{")[0] == 400
        unknown = server.ask(CHAT, hello(model="gpt-5"))
        assert server.ask("/v1/models/gpt-5")[0] == 404
    for status, (found, body) in answers.items():
        assert found == status and set(body["error"]) == {"message", "type", "param", "code"}
    assert "serve.max_body" in answers[413][1]["error"]["message"]
    assert unknown[0] == 404 and unknown[1]["error"]["code"] == "model_not_found" and "mine or mine:target" in unknown[1]["error"]["message"]


def test_a_key(tokenizer, script):
    with running(service_of(tokenizer, script, api_key="sécret")) as server:
        asked = [server.ask("/v1/models", Authorization=h) for h in ("", "Bearer wrong", "Basic s")] + [server.ask(CHAT, hello())]
        right = {"Authorization": "Bearer sécret".encode().decode("latin-1")}
        assert server.ask("/v1/models", **right)[0] == server.ask(CHAT, hello(), **right)[0] == 200
        assert server.ask("/health")[0] == 200
    assert {status for status, _ in asked} == {401} and {body["error"]["code"] for _, body in asked} == {"invalid_api_key"}


def test_models_and_health(tokenizer, script):
    with running(service_of(tokenizer, script)) as server:
        listed = server.ask("/v1/models")[1]["data"]
        assert [m["id"] for m in listed] == ["mine", "mine:target"] and server.ask("/v1/models/mine:target")[1] == listed[1]
        assert server.ask("/health") == (200, {"status": "ok", "decoding": 0, "waiting": 0, "answered": 0, "abandoned": 0, "failed": 0})


def test_answers_come_in_the_order_of_requests_and_too_many_are_sent_away(tokenizer, script):
    script.hold()
    with running(service_of(tokenizer, script, max_waiting=2)) as server, ThreadPoolExecutor(3) as pool:
        first = pool.submit(server.ask, PLAIN, {"prompt": "a"})
        assert script.begun.acquire(timeout=60)
        rest = []
        for number, prompt in enumerate("bc", 1):
            rest.append(pool.submit(server.ask, PLAIN, {"prompt": prompt}))
            until(lambda: server.service.worker.load == (1, number))  # noqa: B023
        status, text, headers = server.raw(PLAIN, {"prompt": "d"})
        assert status == 429 and headers["Retry-After"] == "1" and "serve.max_waiting" in json.loads(text)["error"]["message"]
        assert server.ask("/health")[1] | {"waiting": 2, "decoding": 1} == server.ask("/health")[1], "health does not wait in line"
        script.free()
        assert [f.result()[0] for f in (first, *rest)] == [200] * 3
        assert server.ask(PLAIN, {"prompt": "e"})[0] == 200
    assert [tokenizer.decode(a[0]) for a in script.asked] == ["a", "b", "c", "e"]


def test_nobody_waits_where_nobody_may(tokenizer, script):
    script.hold()
    with running(service_of(tokenizer, script, max_waiting=0)) as server, ThreadPoolExecutor(1) as pool:
        first = pool.submit(server.ask, CHAT, hello())
        assert script.begun.acquire(timeout=60)
        assert server.ask(CHAT, hello())[0] == 429
        script.free()
        assert first.result()[0] == 200


def left(server: Running, body: dict[str, Any]) -> http.client.HTTPConnection:
    """A request whose answer is not read; the caller closes the connection."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("POST", CHAT, json.dumps(body).encode(), {"Content-Type": "application/json"})
    return connection


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_stops_its_decoding(tokenizer, script, stream):
    script.hold()
    with running(service_of(tokenizer, script)) as server:
        connection = left(server, hello(stream=stream))
        assert script.begun.acquire(timeout=60) and script.go is not None
        for _ in range(2):
            script.go.release()
            assert script.begun.acquire(timeout=60)
        # it is in its third round
        if stream:
            response = connection.getresponse()
            assert response.readline().startswith(b"data: ")
            response.close()
        connection.close()
        until(lambda: (job := server.service.worker.current) is not None and job.withdrawn.is_set())
        script.free()
        until(lambda: script.closed == 1)
        assert script.rounds == 3
        assert server.ask("/health")[1] == {"status": "ok", "decoding": 0, "waiting": 0, "answered": 0, "abandoned": 1, "failed": 0}


def test_a_client_that_goes_away_while_it_waits_leaves_the_line(tokenizer, script):
    script.hold()
    with running(service_of(tokenizer, script)) as server, ThreadPoolExecutor(1) as pool:
        first = pool.submit(server.ask, CHAT, hello())
        assert script.begun.acquire(timeout=60)
        connection = left(server, hello())
        until(lambda: server.service.worker.load == (1, 1))
        connection.close()
        until(lambda: server.service.worker.load == (1, 0))
        script.free()
        assert first.result()[0] == 200 and len(script.asked) == 1 and server.service.worker.counts.abandoned == 1


def test_an_answer_that_takes_too_long(tokenizer, script):
    script.hold()
    with running(service_of(tokenizer, script, timeout=0.3)) as server:
        status, text, headers = server.raw(CHAT, hello())
        assert status == 504 and headers["x-should-retry"] == "false" and json.loads(text)["error"]["code"] == "timeout"
        until(lambda: script.begun.acquire(blocking=False))
        script.free()
        until(lambda: script.closed == 1)
        script.hold()
        assert script.go is not None
        script.go.release()
        script.go.release()
        status, text, _ = server.raw(CHAT, hello(stream=True))
        *_, last = chunks(text)
        assert status == 200 and last["error"]["code"] == "timeout", "once an answer has begun, its last event says it"
        script.free()


@pytest.mark.parametrize(("error", "status"), [(RuntimeError("secret"), 500), (KvshotError("too long for it"), 400)])
def test_a_decoding_that_fails_ends_one_answer_not_the_server(tokenizer, script, error, status, capfd):
    script.fails = error
    with running(service_of(tokenizer, script)) as server:
        found, body = server.ask(CHAT, hello())
        assert found == status and ("too long for it" in body["error"]["message"]) == (status == 400) and "secret" not in body["error"]["message"]
        script.fails = None
        assert server.ask(CHAT, hello())[0] == 200 and server.ask("/health")[1]["failed"] == 1
    assert ("RuntimeError: secret" in capfd.readouterr().err) == (status == 500)


def test_stopping_lets_answers_finish_and_takes_no_more(tokenizer, script, capfd):
    script.hold()
    with running(service_of(tokenizer, script)) as server, ThreadPoolExecutor(2) as pool:
        first = pool.submit(server.raw, CHAT, hello(stream=True))
        assert script.begun.acquire(timeout=60)
        second = pool.submit(server.ask, CHAT, hello())
        until(lambda: server.service.worker.load == (1, 1))
        server.stop()
        until(lambda: server.service.stopping)
        assert server.ask(CHAT, hello())[0] == server.ask("/health")[0] == 503
        script.free()
        assert chunks(first.result()[1])[-1] == "[DONE]" and second.result()[0] == 200
        server.join()
        with pytest.raises(OSError):
            server.ask("/health")
    said = capfd.readouterr().out
    assert "stopping; 2 answer(s) under way" in said and "stopped; 2 answered, 0 abandoned, 0 failed" in said


@pytest.mark.parametrize("hurry", [False, True])
def test_what_does_not_finish_in_time_is_told_so(tokenizer, script, hurry):
    script.hold()
    with running(service_of(tokenizer, script, grace=600 if hurry else 0.2)) as server, ThreadPoolExecutor(2) as pool:
        first = pool.submit(server.raw, CHAT, hello(stream=True))
        assert script.begun.acquire(timeout=60) and script.go is not None
        script.go.release()
        assert script.begun.acquire(timeout=60)
        second = pool.submit(server.ask, CHAT, hello())
        until(lambda: server.service.worker.load == (1, 1))
        server.stop()
        if hurry:
            server.hurry()
        until(lambda: server.service.worker.aborted)
        script.free()  # the round it is in ends
        assert chunks(first.result()[1])[-1]["error"]["code"] == "server_stopping"
        assert second.result()[0] == 503
        server.join()
    assert script.rounds == 2 and script.closed == 1


def test_addresses():
    with bound("127.0.0.1", 0) as taken:
        taken.listen()
        with pytest.raises(ConfigError, match=r"serve\.port=\d+: cannot listen there: .*in use"):
            bound("127.0.0.1", taken.getsockname()[1])
    with pytest.raises(ConfigError, match=r"serve\.host=203\.0\.113\.1 .*cannot listen there"):
        bound("203.0.113.1", 0)


def test_a_server_that_anybody_can_use_is_warned_of(tokenizer, script):
    def said(**options: Any) -> str:
        return warning(service_of(tokenizer, script, **options).options)

    assert said() == said(host="localhost") == said(host="::1") == said(host="0.0.0.0", api_key="k") == ""
    assert "serve.api_key" in said(host="0.0.0.0") and "serve.host=example.org" in said(host="example.org")
