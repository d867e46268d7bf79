"""Random conversations through every template: the batched way against a slow one that tokenises each turn's renderings whole."""

from __future__ import annotations

from functools import cache
from typing import Any

import jinja2
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data_prep.chat import ChatError, ChatTemplate, Encoded
from data_prep.masks import Rendered, find_turns
from kvshot_ds.config.preparation import TemplateConfig
from tests.data_prep.words import FAMILIES, TOOL, byte_tokenizer, calls, result, says, system, user

NAMES = sorted(set(FAMILIES) - {"vicuna"})
# words that merge with what stands beside them, characters of several tokens, pieces of special tokens, and the tokens themselves
words = st.lists(st.sampled_from(["ok", " okay", "\n", "\n\n", " ", "é", "😀", "<", "<|im_", "|>", "7", "</think>", "[INST", "<|im_end|>", "</s>"]), max_size=5)
text = words.map("".join)
thinking = st.one_of(st.none(), text)


@st.composite
def conversations(draw: st.DrawFn) -> tuple[list[dict[str, Any]], tuple[Any, ...]]:
    messages: list[dict[str, Any]] = [system(draw(text))] if draw(st.booleans()) else []
    tools = draw(st.sampled_from([(), (), (TOOL,)]))
    for _ in range(draw(st.integers(0, 3))):
        messages.append(user(draw(text)))
        if tools and draw(st.booleans()):
            called = calls(content=draw(text))
            messages += [called | ({"reasoning_content": thought} if (thought := draw(thinking)) else {}), result(draw(text))]
        messages.append(says(draw(text), draw(thinking)))
    return messages, tools


@cache
def template(name: str, think: bool | None = None) -> ChatTemplate:
    return ChatTemplate(byte_tokenizer(name), TemplateConfig(thinking=think))


def slow(template: ChatTemplate, messages: list[dict[str, Any]], tools: tuple[Any, ...]) -> Encoded:
    """The rule in tokens: a turn is supervised iff the tokens up to its end are what inference saw when it was the newest."""
    tokenizer = template.tokenizer
    extra = {} if template.options.thinking is None else {"enable_thinking": template.options.thinking}
    source = tokenizer.chat_template.replace("strftime_now is defined", "false").replace("strftime_now('%Y')", "'2024'")  # not today
    hidden = [t.content for t in tokenizer.added_tokens_decoder.values() if t.special]

    def tokens(part: list[dict[str, Any]], prompt: bool) -> list[int]:
        plain = [{**m, "tool_calls": [{"function": {"name": "sum", "arguments": {"a": 1}}}]} if "tool_calls" in m else m for m in part]
        try:
            out = tokenizer.apply_chat_template(plain, tools=list(tools) or None, chat_template=source, add_generation_prompt=prompt, tokenize=False, **extra)
        except (jinja2.TemplateError, TypeError) as error:
            raise ChatError(str(error)) from None
        return tokenizer(out, add_special_tokens=False).input_ids

    if any(special in str(value) for m in messages for value in m.values() for special in hidden):
        raise ChatError("a special token")
    if (any("tool_calls" in m for m in messages) and "tool_calls" not in source) or (tools and "tools" not in source):
        raise ChatError("no tools")
    while messages and messages[-1]["role"] != "assistant":
        messages = messages[:-1]
    if not messages:
        raise ChatError("no assistant turn")
    whole = tokens(messages, False)
    turn, number, left_out = [0] * len(whole), 0, 0
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        number += 1
        prompt, own = tokens(messages[:i], True), tokens(messages[: i + 1], False)
        newest = i == len(messages) - 1
        begins = tokenizer.decode(own).startswith(tokenizer.decode(prompt))
        if not begins and not newest:
            left_out += 1
            continue
        ends = [j for j in range(len(prompt), len(own)) if own[j] == template.end_id]
        stop = ends[0] + 1 if ends else len(own)
        if begins and not tokenizer.decode(whole).startswith(tokenizer.decode(own[:stop])):
            left_out += 1
            continue
        if not begins or own[: len(prompt)] != prompt:
            raise ChatError("not what inference would feed")
        assert whole[:stop] == own[:stop]
        turn[len(prompt) : stop] = [number] * (stop - len(prompt))
    return Encoded(whole, turn, left_out).trimmed()


@pytest.mark.parametrize(("name", "think"), [(name, None) for name in NAMES] + [("qwen3", True), ("qwen3", False)])
@given(batch=st.lists(conversations(), min_size=1, max_size=4))
@settings(max_examples=120, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
def test_batched_as_slow(name: str, think: bool | None, batch: list[Any]) -> None:
    chosen = template(name, think)
    found = chosen.encode_many(batch)
    assert len(found) == len(batch)
    for (messages, tools), encoded in zip(batch, found, strict=True):
        try:
            expected = slow(chosen, messages, tools)
        except ChatError:
            assert isinstance(encoded, ChatError), "refused, but not by the batched way"
            continue
        assert encoded == expected


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "mistral", "marked"])
@given(conversation=conversations())
@settings(max_examples=120, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
def test_supervised_tokens_spell_the_turn(name: str, conversation: Any) -> None:
    """Decoded one token at a time, in bytes: what stands before a turn is its prompt, what is supervised its words and its end."""
    chosen = template(name)
    messages, tools = conversation
    [encoded] = chosen.encode_many([conversation])
    if isinstance(encoded, ChatError):
        return
    places = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    for number in set(encoded.turn) - {0}:
        rows = [j for j, turn in enumerate(encoded.turn) if turn == number]
        message = messages[places[number - 1]]
        assert encoded.tokens[: rows[0]] == chosen.prompt(messages[: places[number - 1]], tools)
        assert rows == list(range(rows[0], rows[-1] + 1))
        assert encoded.tokens[rows[-1]] == chosen.end_id
        said = chosen.tokenizer.decode(encoded.tokens[rows[0] : rows[-1]])
        if name in ("qwen2_5", "mistral", "marked") and "tool_calls" not in message:
            assert said == (" " if name == "mistral" else "") + message["content"]


def test_rewriting_is_told_from_a_template_that_never_fits() -> None:
    def render(part: Any, prompt: bool) -> str:
        return "".join(f"({m['content']}{'' if m is part[-1] else m.get('later', '')})" for m in part) + ("(" if prompt else "")

    def close(own: str, start: int) -> tuple[int, int] | None:
        at = own.find(")", start)
        return (at, at + 1) if at >= 0 else None

    messages = [user("q"), says("a"), user("r"), says("b") | {"later": "!"}, user("s"), says("c")]
    found, left_out = find_turns(messages, render(messages, False), render, close)
    text = Rendered(render(messages, False), found, None, left_out)
    assert [(t.number, text.text[t.start : t.close], text.text[t.close : t.stop]) for t in text.turns] == [(1, "a", ")"), (3, "c", ")")]
    assert left_out == 1
    with pytest.raises(ChatError, match=r"renders message 2 otherwise .* goes on with '<'"):
        find_turns(messages[:2], render(messages[:2], False), lambda part, prompt: render(part, prompt) + "<" * prompt, close)
