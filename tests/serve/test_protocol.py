"""What of OpenAI's requests is taken, and what is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvshot_ds.serve.protocol import ApiError, Wanted, read_request

HELLO = [{"role": "user", "content": "hello"}]


def chat(**fields: Any) -> Wanted:
    return read_request(json.dumps({"messages": HELLO, **fields}).encode(), chat=True)


def plain(**fields: Any) -> Wanted:
    return read_request(json.dumps({"prompt": "hello", **fields}).encode(), chat=False)


def refused(call: Any, **fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        call(**fields)
    assert caught.value.status == 400
    return caught.value


def test_a_chat_as_small_as_it_gets():
    assert chat() == Wanted(None, ({"role": "user", "content": "hello"},), None, None, {}, (), False, False)


def test_every_field_arrives():
    wanted = chat(
        model="m", max_completion_tokens=5, temperature=1, top_p=0.5, top_k=-1, min_p=0.1, seed=7, stop=["a", "b", "a"], stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    assert (wanted.model, wanted.max_tokens, wanted.stop, wanted.stream, wanted.include_usage) == ("m", 5, ("a", "b"), True, True)
    assert wanted.sampling == {"temperature": 1, "top_p": 0.5, "top_k": 0, "min_p": 0.1, "seed": 7}
    assert chat(max_tokens=5, max_completion_tokens=5).max_tokens == 5
    assert chat(stop="x", temperature=None, seed=None).stop == ("x",)


def test_messages_in_all_their_forms():
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    # what the client makes of an answer goes back as it is
    answer = {"role": "assistant", "content": "yes", "refusal": None, "annotations": [], "audio": None, "function_call": None, "tool_calls": None}
    wanted = chat(messages=[{"role": "developer", "content": "d"}, {"role": "user", "name": "n", "content": parts}, answer])
    assert wanted.messages == (
        {"role": "system", "content": "d"}, {"role": "user", "content": "one\ntwo"}, {"role": "assistant", "content": "yes"},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"), ([], "messages"), ("hello", "messages"), (["x"], "messages[0]"), ([*HELLO, {"role": "tool", "content": "x"}], "messages[1].role"),
        ([{"content": "x"}], "messages[0].role"), ([{"role": "user"}], "messages[0].content"), ([{"role": "user", "content": 3}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
        ([{"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}], "messages[0].tool_calls"),
    ],
)  # fmt: skip
def test_messages_that_are_none(messages, param):
    assert refused(chat, messages=messages).param == param


def test_prompts_in_all_their_forms():
    assert [plain(prompt=p).prompt for p in ("a", ["a"], [1, 2], [[1, 2]])] == ["a", "a", (1, 2), (1, 2)]
    for wrong in (None, 3, ["a", "b"], [[1], [2]], [1, "a"], [True], [1.5], {"a": 1}):
        assert refused(plain, prompt=wrong).param == "prompt"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 2), ("presence_penalty", 0.5), ("frequency_penalty", -1), ("repetition_penalty", 1.1), ("logit_bias", {"1": 2}), ("logprobs", True),
        ("top_logprobs", 2), ("tools", [{"type": "function"}]), ("tool_choice", "required"), ("response_format", {"type": "json_object"}),
        ("functions", [{"name": "f"}]), ("modalities", ["text", "audio"]), ("n", True),
    ],
)  # fmt: skip
def test_what_would_change_the_answer_is_refused_by_name(field, value):
    error = refused(chat, **{field: value})
    assert (error.param, error.code) == (field, "unsupported_parameter") and field in error.message


@pytest.mark.parametrize(("field", "value"), [("best_of", 2), ("echo", True), ("suffix", "x"), ("logprobs", 0), ("logprobs", 3)])
def test_what_completions_do_not_have(field, value):
    assert refused(plain, **{field: value}).param == field
    assert refused(plain, max_completion_tokens=3).param == "max_completion_tokens"


def test_values_that_change_nothing_and_fields_that_cannot_are_taken():
    assert chat(
        n=1, presence_penalty=0, frequency_penalty=0.0, logit_bias={}, logprobs=False, top_logprobs=None, tools=[], tool_choice="auto",
        response_format={"type": "text"}, modalities=["text"], user="u", metadata={"a": "b"}, store=True, service_tier="auto",
        parallel_tool_calls=True, prediction={"type": "content", "content": "x"}, whatever=None,
    ) == chat()  # fmt: skip
    assert plain(best_of=1, echo=False, suffix=None, logprobs=None, user="u") == plain()


def test_unknown_fields_are_refused():
    error = refused(chat, ignore_eos=True)
    assert (error.param, error.code) == ("ignore_eos", "unknown_parameter")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", 1.5), ("max_tokens", "5"), ("max_tokens", True), ("temperature", -0.1), ("temperature", 2.1),
        ("temperature", "1"), ("temperature", 1e-40), ("top_p", 0), ("top_p", 1.1), ("top_k", -2), ("min_p", 2), ("seed", -1), ("seed", 1 << 63), ("seed", 1.0),
        ("stream", "yes"), ("stop", ""), ("stop", ["a", ""]), ("stop", [1]), ("stop", ["a"] * 17), ("stop", {}), ("model", 3),
        ("stream_options", {"include_usage": True}),
    ],
)  # fmt: skip
def test_values_out_of_bounds(field, value):
    error = refused(chat, **{field: value})
    assert error.param == field and field in error.message


def test_contradictions():
    assert "contradict" in refused(chat, max_tokens=3, max_completion_tokens=4).message
    assert refused(chat, stream=True, stream_options={"continuous": True}).param == "stream_options.continuous"


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[1]", b'"x"', b"\xff", b'{"temperature": NaN, "messages": []}', b"[" * 100_000, b'{"seed": ' + b"9" * 5000 + b"}"]
)
def test_what_is_no_json_object(body):
    with pytest.raises(ApiError) as caught:
        read_request(body, chat=True)
    assert caught.value.status == 400 and "JSON" in caught.value.message


def test_errors_have_openais_shape():
    assert ApiError(400, "m", "p", "c").body == {"error": {"message": "m", "type": "invalid_request_error", "param": "p", "code": "c"}}
    assert [ApiError(status, "m").body["error"]["type"] for status in (401, 429, 503)] == ["invalid_request_error", "rate_limit_error", "server_error"]
