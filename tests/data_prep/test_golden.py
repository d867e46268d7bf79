"""Golden tokens and masks of the chat templates in use, on small templates of their structure (tests/data_prep/templates)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from data_prep.chat import ChatError
from kvshot_ds.errors import ConfigError
from tests.data_prep.words import TOOL, calls, golden, result, says, system, user, word_template


@dataclass(frozen=True)
class Case:
    """expected: tokens separated by blanks, supervised turns in ⟦ ⟧ with their number; ▁ is a blank, ⏎ a line break."""

    family: str
    title: str
    messages: list[dict[str, Any]]
    expected: str
    left_out: int = 0
    tools: tuple[dict[str, Any], ...] = ()
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.family}-{self.title}"


CASES = [
    Case(
        "qwen2_5",
        "single",
        [user("Hi"), says("Yes.")],
        "<|im_start|> system ⏎ You ▁are ▁helpful . <|im_end|> ⏎ <|im_start|> user ⏎ Hi <|im_end|> ⏎ <|im_start|> assistant ⏎ ⟦Yes . <|im_end|>⟧1",
    ),
    Case(
        "qwen2_5",
        "multi",
        [user("Hi"), says("Yes."), user("Why?"), says("So.")],
        "<|im_start|> system ⏎ You ▁are ▁helpful . <|im_end|> ⏎ <|im_start|> user ⏎ Hi <|im_end|> ⏎ <|im_start|> assistant ⏎ ⟦Yes . <|im_end|>⟧1 ⏎ "
        "<|im_start|> user ⏎ Why ? <|im_end|> ⏎ <|im_start|> assistant ⏎ ⟦So . <|im_end|>⟧2",
    ),
    Case(
        "qwen2_5",
        "system",
        [system("Be brief."), user("Hi"), says("Yes.")],
        "<|im_start|> system ⏎ Be ▁brief . <|im_end|> ⏎ <|im_start|> user ⏎ Hi <|im_end|> ⏎ <|im_start|> assistant ⏎ ⟦Yes . <|im_end|>⟧1",
    ),
    Case(
        "smollm2",
        "single",
        [user("Hi"), says("Yes.")],
        "<|im_start|> system ⏎ You ▁are ▁SmolLM . <|im_end|> ⏎ <|im_start|> user ⏎ Hi <|im_end|> ⏎ <|im_start|> assistant ⏎ ⟦Yes . <|im_end|>⟧1",
    ),
    Case(
        "smollm2",
        "multi",
        [user("Hi"), says("Yes."), user("Why?"), says("So.")],
        "<|im_start|> system ⏎ You ▁are ▁SmolLM . <|im_end|> ⏎ <|im_start|> user ⏎ Hi <|im_end|> ⏎ <|im_start|> assistant ⏎ ⟦Yes . <|im_end|>⟧1 ⏎ "
        "<|im_start|> user ⏎ Why ? <|im_end|> ⏎ <|im_start|> assistant ⏎ ⟦So . <|im_end|>⟧2",
    ),
    Case(
        "smollm2",
        "system",
        [system("Be brief."), user("Hi"), says("Yes.")],
        "<|im_start|> system ⏎ Be ▁brief . <|im_end|> ⏎ <|im_start|> user ⏎ Hi <|im_end|> ⏎ <|im_start|> assistant ⏎ ⟦Yes . <|im_end|>⟧1",
    ),
    Case(
        "llama3_1",
        "single",
        [user("Hi"), says("Yes.")],
        "<|begin_of_text|> <|start_header_id|> system <|end_header_id|> ⏎⏎ Today : ▁ 2 6 ▁Jul ▁ 2 0 2 4 ⏎⏎ <|eot_id|> <|start_header_id|> user "
        "<|end_header_id|> ⏎⏎ Hi <|eot_id|> <|start_header_id|> assistant <|end_header_id|> ⏎⏎ ⟦Yes . <|eot_id|>⟧1",
    ),
    Case(
        "llama3_1",
        "multi",
        [user("Hi"), says("Yes."), user("Why?"), says("So.")],
        "<|begin_of_text|> <|start_header_id|> system <|end_header_id|> ⏎⏎ Today : ▁ 2 6 ▁Jul ▁ 2 0 2 4 ⏎⏎ <|eot_id|> <|start_header_id|> user "
        "<|end_header_id|> ⏎⏎ Hi <|eot_id|> <|start_header_id|> assistant <|end_header_id|> ⏎⏎ ⟦Yes . <|eot_id|>⟧1 <|start_header_id|> user "
        "<|end_header_id|> ⏎⏎ Why ? <|eot_id|> <|start_header_id|> assistant <|end_header_id|> ⏎⏎ ⟦So . <|eot_id|>⟧2",
    ),
    Case(
        "llama3_1",
        "system",
        [system("Be brief."), user("Hi"), says("Yes.")],
        "<|begin_of_text|> <|start_header_id|> system <|end_header_id|> ⏎⏎ Today : ▁ 2 6 ▁Jul ▁ 2 0 2 4 ⏎⏎ Be ▁brief . <|eot_id|> "
        "<|start_header_id|> user <|end_header_id|> ⏎⏎ Hi <|eot_id|> <|start_header_id|> assistant <|end_header_id|> ⏎⏎ ⟦Yes . <|eot_id|>⟧1",
    ),
    Case("mistral", "single", [user("Hi"), says("Yes.")], "<s> [INST] ▁Hi [/INST] ⟦▁Yes . </s>⟧1"),
    Case(
        "mistral", "multi", [user("Hi"), says("Yes."), user("Why?"), says("So.")], "<s> [INST] ▁Hi [/INST] ⟦▁Yes . </s>⟧1 [INST] ▁Why ? [/INST] ⟦▁So . </s>⟧2"
    ),
    Case("mistral", "system", [system("Be brief."), user("Hi"), says("Yes.")], "<s> [INST] ▁Be ▁brief . ⏎⏎ Hi [/INST] ⟦▁Yes . </s>⟧1"),
    Case("gemma", "single", [user("Hi"), says("Yes.")], "<bos> <start_of_turn> user ⏎ Hi <end_of_turn> ⏎ <start_of_turn> model ⏎ ⟦Yes . <end_of_turn>⟧1"),
    Case(
        "gemma",
        "multi",
        [user("Hi"), says("Yes."), user("Why?"), says("So.")],
        "<bos> <start_of_turn> user ⏎ Hi <end_of_turn> ⏎ <start_of_turn> model ⏎ ⟦Yes . <end_of_turn>⟧1 ⏎ <start_of_turn> user ⏎ Why ? "
        "<end_of_turn> ⏎ <start_of_turn> model ⏎ ⟦So . <end_of_turn>⟧2",
    ),
    Case("phi3", "single", [user("Hi"), says("Yes.")], "<|user|> Hi <|end|> <|assistant|> ⟦Yes . <|end|>⟧1"),
    Case(
        "phi3",
        "multi",
        [user("Hi"), says("Yes."), user("Why?"), says("So.")],
        "<|user|> Hi <|end|> <|assistant|> ⟦Yes . <|end|>⟧1 <|user|> Why ? <|end|> <|assistant|> ⟦So . <|end|>⟧2",
    ),
    Case(
        "phi3", "system", [system("Be brief."), user("Hi"), says("Yes.")], "<|system|> Be ▁brief . <|end|> <|user|> Hi <|end|> <|assistant|> ⟦Yes . <|end|>⟧1"
    ),
    Case("marked", "single", [user("Hi"), says("Yes.")], "<|im_start|> user ⏎ Hi <|im_end|> ⏎ <|im_start|> assistant ⏎ ⟦Yes . <|im_end|>⟧1"),
    Case(
        "marked",
        "multi",
        [user("Hi"), says("Yes."), user("Why?"), says("So.")],
        "<|im_start|> user ⏎ Hi <|im_end|> ⏎ <|im_start|> assistant ⏎ ⟦Yes . <|im_end|>⟧1 ⏎ <|im_start|> user ⏎ Why ? <|im_end|> ⏎ <|im_start|> "
        "assistant ⏎ ⟦So . <|im_end|>⟧2",
    ),
    Case(
        "marked",
        "system",
        [system("Be brief."), user("Hi"), says("Yes.")],
        "<|im_start|> system ⏎ Be ▁brief . <|im_end|> ⏎ <|im_start|> user ⏎ Hi <|im_end|> ⏎ <|im_start|> assistant ⏎ ⟦Yes . <|im_end|>⟧1",
    ),
    Case(
        "qwen2_5",
        "prompt_of_recipe",
        [user("Hi"), says("Yes.")],
        "<|im_start|> system ⏎ Be ▁brief . <|im_end|> ⏎ <|im_start|> user ⏎ Hi <|im_end|> ⏎ <|im_start|> assistant ⏎ ⟦Yes . <|im_end|>⟧1",
        options=dict(system="Be brief."),
    ),
    Case(
        "qwen2_5",
        "last_only",
        [user("Hi"), says("Yes."), user("Why?"), says("So.")],
        "<|im_start|> system ⏎ You ▁are ▁helpful . <|im_end|> ⏎ <|im_start|> user ⏎ Hi <|im_end|> ⏎ <|im_start|> assistant ⏎ Yes . <|im_end|> ⏎ "
        "<|im_start|> user ⏎ Why ? <|im_end|> ⏎ <|im_start|> assistant ⏎ ⟦So . <|im_end|>⟧2",
        options=dict(supervise="last"),
    ),
    Case(
        "qwen2_5",
        "tools",
        [user("Sum it"), calls(), result("3"), result("4"), says("three")],
        '<|im_start|> system ⏎ You ▁are ▁helpful . ⏎⏎ # ▁Tools ⏎ < tools > ⏎ { " type " : ▁ " function " , ▁ " function " : ▁ { " name " : ▁ " sum '
        '" } } ⏎ < / tools > <|im_end|> ⏎ <|im_start|> user ⏎ Sum ▁it <|im_end|> ⏎ <|im_start|> assistant ⏎ ⟦< tool _ call > ⏎ { " name " : ▁ " sum '
        '" , ▁ " arguments " : ▁ { " a " : ▁ 1 } } ⏎ < / tool _ call > <|im_end|>⟧1 ⏎ <|im_start|> user ⏎ < tool _ response > ⏎ 3 ⏎ < / tool _ '
        "response > ⏎ < tool _ response > ⏎ 4 ⏎ < / tool _ response > <|im_end|> ⏎ <|im_start|> assistant ⏎ ⟦three <|im_end|>⟧2",
        tools=(TOOL,),
    ),
    Case(
        "llama3_1",
        "blanks",
        [user(" Hi "), says(" Yes. ")],
        "<|begin_of_text|> <|start_header_id|> system <|end_header_id|> ⏎⏎ Today : ▁ 2 6 ▁Jul ▁ 2 0 2 4 ⏎⏎ <|eot_id|> <|start_header_id|> user "
        "<|end_header_id|> ⏎⏎ Hi <|eot_id|> <|start_header_id|> assistant <|end_header_id|> ⏎⏎ ⟦Yes . <|eot_id|>⟧1",
    ),
    Case(
        "llama3_1",
        "tools",
        [system("Be brief."), user("Sum it"), calls(), result("3"), says("three")],
        "<|begin_of_text|> <|start_header_id|> system <|end_header_id|> ⏎⏎ Environment : ▁ipython ⏎ Today : ▁ 2 6 ▁Jul ▁ 2 0 2 4 ⏎⏎ Be ▁brief . "
        '<|eot_id|> <|start_header_id|> user <|end_header_id|> ⏎⏎ Functions : ⏎⏎ { " type " : ▁ " function " , ▁ " function " : ▁ { " name " : ▁ " '
        'sum " } } ⏎⏎ Sum ▁it <|eot_id|> <|start_header_id|> assistant <|end_header_id|> ⏎⏎ ⟦{ " name " : ▁ " sum " , ▁ " parameters " : ▁ { " a " '
        ": ▁ 1 } } <|eot_id|>⟧1 <|start_header_id|> ipython <|end_header_id|> ⏎⏎ 3 <|eot_id|> <|start_header_id|> assistant <|end_header_id|> ⏎⏎ "
        "⟦three <|eot_id|>⟧2",
        tools=(TOOL,),
    ),
    Case(
        "llama3_1",
        "closed_by_another_token",
        [user("Sum it"), calls("search"), result("3"), says("three")],
        "<|begin_of_text|> <|start_header_id|> system <|end_header_id|> ⏎⏎ Environment : ▁ipython ⏎ Today : ▁ 2 6 ▁Jul ▁ 2 0 2 4 ⏎⏎ <|eot_id|> "
        '<|start_header_id|> user <|end_header_id|> ⏎⏎ Functions : ⏎⏎ { " type " : ▁ " function " , ▁ " function " : ▁ { " name " : ▁ " sum " } } '
        '⏎⏎ Sum ▁it <|eot_id|> <|start_header_id|> assistant <|end_header_id|> ⏎⏎ ⟦<|python_tag|> search . call ( { " a " : ▁ 1 } ) <|eom_id|>⟧1 '
        "<|start_header_id|> ipython <|end_header_id|> ⏎⏎ 3 <|eot_id|> <|start_header_id|> assistant <|end_header_id|> ⏎⏎ ⟦three <|eot_id|>⟧2",
        tools=(TOOL,),
    ),
    Case(
        "mistral",
        "tools",
        [user("Sum it"), calls(), result("3"), says("three")],
        '<s> [AVAILABLE_TOOLS] ▁ [ { " type " : ▁ " function " , ▁ " function " : ▁ { " name " : ▁ " sum " } } ] [/AVAILABLE_TOOLS] [INST] ▁Sum ▁it '
        '[/INST] ⟦[TOOL_CALLS] ▁ [ { " name " : ▁ " sum " , ▁ " arguments " : ▁ { " a " : ▁ 1 } } ] </s>⟧1 [TOOL_RESULTS] ▁ 3 [/TOOL_RESULTS] '
        "⟦▁three </s>⟧2",
        tools=(TOOL,),
    ),
    Case(
        "mistral",
        "tools_that_move",
        [user("Hi"), says("Yes."), user("Sum it"), calls()],
        '<s> [INST] ▁Hi [/INST] ▁Yes . </s> [AVAILABLE_TOOLS] ▁ [ { " type " : ▁ " function " , ▁ " function " : ▁ { " name " : ▁ " sum " } } ] '
        '[/AVAILABLE_TOOLS] [INST] ▁Sum ▁it [/INST] ⟦[TOOL_CALLS] ▁ [ { " name " : ▁ " sum " , ▁ " arguments " : ▁ { " a " : ▁ 1 } } ] </s>⟧2',
        left_out=1,
        tools=(TOOL,),
    ),
    Case(
        "qwen3",
        "single_without_thinking",
        [user("Hi"), says("Yes.")],
        "<|im_start|> user ⏎ Hi <|im_end|> ⏎ <|im_start|> assistant ⏎ ⟦<think> ⏎⏎ </think> ⏎⏎ Yes . <|im_end|>⟧1",
    ),
    Case(
        "qwen3",
        "thinking",
        [user("Hi"), says("Yes.", "hm")],
        "<|im_start|> user ⏎ Hi <|im_end|> ⏎ <|im_start|> assistant ⏎ ⟦<think> ⏎ hm ⏎ </think> ⏎⏎ Yes . <|im_end|>⟧1",
    ),
    Case(
        "qwen3",
        "thinking_in_content",
        [user("Hi"), says("<think>hm</think>Yes.")],
        "<|im_start|> user ⏎ Hi <|im_end|> ⏎ <|im_start|> assistant ⏎ ⟦<think> ⏎ hm ⏎ </think> ⏎⏎ Yes . <|im_end|>⟧1",
    ),
    Case(
        "qwen3",
        "earlier_thinking_is_dropped",
        [user("Hi"), says("Yes.", "hm"), user("Why?"), says("So.", "well")],
        "<|im_start|> user ⏎ Hi <|im_end|> ⏎ <|im_start|> assistant ⏎ Yes . <|im_end|> ⏎ <|im_start|> user ⏎ Why ? <|im_end|> ⏎ <|im_start|> "
        "assistant ⏎ ⟦<think> ⏎ well ⏎ </think> ⏎⏎ So . <|im_end|>⟧2",
        left_out=1,
        options=dict(thinking=True),
    ),
    Case(
        "qwen3",
        "tools_with_thinking",
        [system("Be brief."), user("Sum it"), calls() | {"reasoning_content": "hm"}, result("3"), says("three", "well")],
        '<|im_start|> system ⏎ Be ▁brief . ⏎⏎ # ▁Tools ⏎ < tools > ⏎ { " type " : ▁ " function " , ▁ " function " : ▁ { " name " : ▁ " sum " } } ⏎ '
        '< / tools > <|im_end|> ⏎ <|im_start|> user ⏎ Sum ▁it <|im_end|> ⏎ <|im_start|> assistant ⏎ ⟦<think> ⏎ hm ⏎ </think> ⏎⏎ <tool_call> ⏎ { " '
        'name " : ▁ " sum " , ▁ " arguments " : ▁ { " a " : ▁ 1 } } ⏎ </tool_call> <|im_end|>⟧1 ⏎ <|im_start|> user ⏎ <tool_response> ⏎ 3 ⏎ '
        "</tool_response> <|im_end|> ⏎ <|im_start|> assistant ⏎ ⟦<think> ⏎ well ⏎ </think> ⏎⏎ three <|im_end|>⟧2",
        tools=(TOOL,),
    ),
    Case(
        "qwen3",
        "tools_without_thinking",
        [user("Sum it"), calls(), result("3"), says("three")],
        '<|im_start|> system ⏎ # ▁Tools ⏎ < tools > ⏎ { " type " : ▁ " function " , ▁ " function " : ▁ { " name " : ▁ " sum " } } ⏎ < / tools > '
        '<|im_end|> ⏎ <|im_start|> user ⏎ Sum ▁it <|im_end|> ⏎ <|im_start|> assistant ⏎ <tool_call> ⏎ { " name " : ▁ " sum " , ▁ " arguments " : ▁ '
        '{ " a " : ▁ 1 } } ⏎ </tool_call> <|im_end|> ⏎ <|im_start|> user ⏎ <tool_response> ⏎ 3 ⏎ </tool_response> <|im_end|> ⏎ <|im_start|> '
        "assistant ⏎ ⟦<think> ⏎⏎ </think> ⏎⏎ three <|im_end|>⟧2",
        left_out=1,
        tools=(TOOL,),
    ),
    Case(
        "qwen3",
        "off",
        [system("Be brief."), user("Hi"), says("Yes.")],
        "<|im_start|> system ⏎ Be ▁brief . <|im_end|> ⏎ <|im_start|> user ⏎ Hi <|im_end|> ⏎ <|im_start|> assistant ⏎ <think> ⏎⏎ </think> ⏎⏎ ⟦Yes . "
        "<|im_end|>⟧1",
        options=dict(thinking=False),
    ),
    Case(
        "qwen3",
        "off_multi",
        [user("Hi"), says("Yes."), user("Why?"), says("So.")],
        "<|im_start|> user ⏎ Hi <|im_end|> ⏎ <|im_start|> assistant ⏎ Yes . <|im_end|> ⏎ <|im_start|> user ⏎ Why ? <|im_end|> ⏎ <|im_start|> "
        "assistant ⏎ <think> ⏎⏎ </think> ⏎⏎ ⟦So . <|im_end|>⟧2",
        left_out=1,
        options=dict(thinking=False),
    ),
    Case(
        "harmony",
        "thinking",
        [user("Hi"), says("Yes.", "hm")],
        "<|start|> system <|message|> Today : ▁ 2 0 2 4 <|end|> <|start|> user <|message|> Hi <|end|> <|start|> assistant ⟦<|channel|> analysis "
        "<|message|> hm <|end|> <|start|> assistant <|channel|> final <|message|> Yes . <|return|>⟧1",
    ),
    Case(
        "harmony",
        "history_is_closed_by_another_token",
        [user("Hi"), says("Yes.", "hm"), user("Why?"), says("So.", "well")],
        "<|start|> system <|message|> Today : ▁ 2 0 2 4 <|end|> <|start|> user <|message|> Hi <|end|> <|start|> assistant <|channel|> final "
        "<|message|> Yes . <|end|> <|start|> user <|message|> Why ? <|end|> <|start|> assistant ⟦<|channel|> analysis <|message|> well <|end|> "
        "<|start|> assistant <|channel|> final <|message|> So . <|return|>⟧2",
        left_out=1,
    ),
    Case(
        "harmony",
        "tools",
        [user("Sum it"), calls(), result("3"), says("three")],
        '<|start|> system <|message|> Today : ▁ 2 0 2 4 <|end|> <|start|> developer <|message|> # ▁Tools ⏎ { " name " : ▁ " sum " } <|end|> '
        '<|start|> user <|message|> Sum ▁it <|end|> <|start|> assistant ⟦▁to = functions . sum <|channel|> commentary ▁json <|message|> { " a " : ▁ '
        '1 } <|call|>⟧1 <|start|> functions ▁to = assistant <|channel|> commentary <|message|> " 3 " <|end|> <|start|> assistant ⟦<|channel|> final '
        "<|message|> three <|return|>⟧2",
        tools=(TOOL,),
    ),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_tokens_and_turns(case: Case) -> None:
    template = word_template(case.family, **case.options)
    encoded = template.encode(case.messages, case.tools)
    assert golden(template, encoded) == case.expected
    assert encoded.left_out == case.left_out


@pytest.mark.parametrize("case", CASES, ids=str)
def test_truncated(case: Case) -> None:
    """A shorter limit gives a prefix of the same tokens and turns, ending in a supervised token, or nothing."""
    encoded = word_template(case.family, **case.options).encode(case.messages, case.tools)
    for limit in range(1, len(encoded.tokens) + 2):
        short = encoded.cut(limit)
        kept = encoded.turn[:limit]
        if short is None:
            assert all(kept.count(turn) < 2 for turn in set(kept) - {0})
        else:
            assert len(short.tokens) <= limit
            assert short.turn[-1] > 0
            assert not any(kept[len(short.turn) :])
            assert (short.tokens, short.turn) == (encoded.tokens[: len(short.tokens)], kept[: len(short.turn)])


def test_truncated_golden() -> None:
    template = word_template("mistral")
    encoded = template.encode([user("Hi"), says("Yes."), user("Why?"), says("So.")])
    assert [golden(template, short) if (short := encoded.cut(n)) else None for n in (5, 6, 9, 12, 13)] == [
        None,
        "<s> [INST] ▁Hi [/INST] ⟦▁Yes .⟧1",
        "<s> [INST] ▁Hi [/INST] ⟦▁Yes . </s>⟧1",
        "<s> [INST] ▁Hi [/INST] ⟦▁Yes . </s>⟧1 [INST] ▁Why ? [/INST] ⟦▁So⟧2",
        "<s> [INST] ▁Hi [/INST] ⟦▁Yes . </s>⟧1 [INST] ▁Why ? [/INST] ⟦▁So .⟧2",
    ]


def test_answers_of_the_target_in_every_turn() -> None:
    """Turn by turn: the earlier answer without its thinking, as inference feeds it; the newest as the target wrote it."""
    template = word_template("qwen3")
    answer = template.tokenizer("<think>\nwell\n</think>\n\nSo.<|im_end|>").input_ids
    encoded = template.encode_answered([user("Hi"), says("Yes.", "hm"), user("Why?")], answer)
    assert golden(template, encoded) == (
        "<|im_start|> user ⏎ Hi <|im_end|> ⏎ <|im_start|> assistant ⏎ Yes . <|im_end|> ⏎ <|im_start|> user ⏎ Why ? <|im_end|> ⏎ <|im_start|> "
        "assistant ⏎ ⟦<think> ⏎ well ⏎ </think> ⏎⏎ So . <|im_end|>⟧2"
    )
    assert encoded.left_out == 1
    assert template.parse_answer(answer) == says("So.", "well")
    assert template.encode([user("Hi"), says("Yes.", "hm"), user("Why?"), template.parse_answer(answer)]) == encoded


def test_a_template_that_hides_thinking_takes_only_the_targets_own_answers() -> None:
    template = word_template("deepseek_r1")
    with pytest.raises(ChatError, match=r"message 2 otherwise than its generation prompt begins it, which goes on with '<think>\\n'"):
        template.encode([user("Hi"), says("Yes.")])
    answer = template.tokenizer("hm\n</think>\n\nYes.<|end|>").input_ids
    said = template.parse_answer(answer)
    assert said == says("Yes.", "hm")
    encoded = template.encode_answered([user("Hi"), said, user("Why?")], answer)
    assert golden(template, encoded) == (
        "<|begin|> <|User|> Hi <|Assistant|> Yes . <|end|> <|User|> Why ? <|Assistant|> <think> ⏎ ⟦hm ⏎ </think> ⏎⏎ Yes . <|end|>⟧2"
    )
    assert encoded.left_out == 1


REFUSED = [
    ("gemma", {}, [system("Be brief."), user("Hi"), says("Yes.")], (), "refuses it: System role not supported"),
    ("gemma", {"system": "Be brief."}, [user("Hi"), says("Yes.")], (), "does not render a question and an answer: .*System role not supported"),
    ("gemma", {}, [user("Hi"), user("Hi"), says("Yes.")], (), "refuses it: roles must alternate"),
    ("gemma", {}, [user("Sum it"), calls()], (), "message 2 calls tools, which the chat template does not show"),
    ("phi3", {}, [user("Hi"), says("Yes.")], (TOOL,), "has tools, which the chat template does not show"),
    ("llama3_1", {}, [user("Sum it"), calls() | {"tool_calls": calls()["tool_calls"] * 2}], (TOOL,), "refuses it: one call at a time"),
    ("qwen3", {"thinking": False}, [user("Hi"), says("Yes.", "hm")], (), "message 2 otherwise than its generation prompt begins it"),
    ("qwen2_5", {}, [user("Hi"), says("\n\nYes.")], (), "a token straddles the start of message 2"),
    ("qwen2_5", {}, [user("Hi"), says("Yes.", "<|im_end|>")], (), r"message 2 contains the special token '<\|im_end\|>'"),
    ("qwen2_5", {}, [user("Hi"), calls(), result("<|im_end|>"), says("Yes.")], (), r"message 3 contains the special token"),
    ("qwen2_5", {}, [user("Hi"), calls(arguments='{"a": ["\\u003c|im_end|>"]}')], (), r"message 2 contains the special token"),
    ("qwen2_5", {}, [user("Hi"), says("Yes.")], ({"type": "<|im_start|>"},), r"a tool contains the special token"),
    ("qwen2_5", {"thinking": False}, [user("Hi"), says("Yes.")], (), "prep.template.thinking is set, but the chat template knows no enable_thinking"),
    ("harmony", {}, [user("Sum it"), calls() | {"reasoning_content": "hm"}, result("3"), says("three")], (TOOL,), "precedes message 4 otherwise once it is"),
    ("vicuna", {}, [user("Hi"), says("Yes.")], (), "closes an assistant turn with no special token"),
]


@pytest.mark.parametrize(("family", "options", "messages", "tools", "reason"), REFUSED)
def test_what_cannot_be_exact_is_refused(family: str, options: dict[str, Any], messages: list[Any], tools: tuple[Any, ...], reason: str) -> None:
    with pytest.raises((ChatError, ConfigError), match=reason):
        word_template(family, **options).encode(messages, tools)
