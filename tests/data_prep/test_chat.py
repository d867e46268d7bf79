"""Golden tokens and turns on small templates, and the properties every accepted conversation has."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from data_prep.chat import ChatError, ChatTemplate, Encoded
from kvshot_ds.config.preparation import TemplateConfig
from kvshot_ds.errors import ConfigError
from kvshot_ds.target import load_tokenizer

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ '<|begin|>' }}{% for m in messages %}{{ '<|start|>' + m['role'] + '<|stop|>\n\n' + m['content'] | trim + '<|eot|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant<|stop|>\n\n' }}{% endif %}"
)
# drops what precedes '#' from every answer but the last, as templates of thinking models do
FORGETFUL = (
    "{% for m in messages %}{% set c = m['content'] if loop.last else m['content'].split('#')[-1] %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + c + '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIALS = ["<|im_start|>", "<|im_end|>", "<|begin|>", "<|start|>", "<|stop|>", "<|eot|>"]
WORDS = ["user", "assistant", "system"]


def tokenizer(template: str | dict[str, str] | None) -> Any:
    """Bytes, plus merges that can straddle a boundary ('\\n\\n', 'ok') and one token for each role."""
    merges: list[tuple[str, str]] = [("Ċ", "Ċ"), ("o", "k")]
    for word in WORDS:
        merges += [(word[:i], word[i]) for i in range(1, len(word))]
    tokens = SPECIALS + sorted(pre_tokenizers.ByteLevel.alphabet()) + list(dict.fromkeys(a + b for a, b in merges))
    backend = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    split = pre_tokenizers.Split(Regex(r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIALS])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", chat_template=template)


def chat(*contents: str, system: str | None = None) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    turns = [{"role": roles[i % 2], "content": c} for i, c in enumerate(contents)]
    return ([{"role": "system", "content": system}] if system else []) + turns


def show(template: ChatTemplate, encoded: Encoded) -> str:
    """Tokens separated by blanks; supervised ones carry their turn."""
    names = template.tokenizer.convert_ids_to_tokens(encoded.tokens)
    return " ".join(f"{name}/{turn}" if turn else name for name, turn in zip(names, encoded.turn, strict=True)).replace("<|", "<").replace("|>", ">")


@pytest.mark.parametrize("source", [CHATML, MARKED])
def test_golden_chatml(source: str) -> None:
    template = ChatTemplate(tokenizer(source))
    assert template.tokenizer.convert_ids_to_tokens(template.end_id) == "<|im_end|>"
    assert show(template, template.encode(chat("a", "ok", "b", "!", system="s"))) == (
        "<im_start> system Ċ s <im_end> Ċ <im_start> user Ċ a <im_end> Ċ <im_start> assistant Ċ ok/1 <im_end>/1 Ċ "
        "<im_start> user Ċ b <im_end> Ċ <im_start> assistant Ċ !/2 <im_end>/2"
    )


def test_golden_llama3() -> None:
    template = ChatTemplate(tokenizer(LLAMA3))
    assert show(template, template.encode(chat("a", " ok ", "b", "x!"))) == (
        "<begin> <start> user <stop> ĊĊ a <eot> <start> assistant <stop> ĊĊ ok/1 <eot>/1 "
        "<start> user <stop> ĊĊ b <eot> <start> assistant <stop> ĊĊ x/2 !/2 <eot>/2"
    )


def test_golden_open_user_turn() -> None:
    for source, expected in ((CHATML, "<im_start> user Ċ"), (LLAMA3, "<begin> <start> user <stop> ĊĊ")):
        template = ChatTemplate(tokenizer(source))
        tokens = template.open_user_turn()
        assert show(template, Encoded(tokens, [0] * len(tokens))) == expected


def test_a_trailing_question_is_left_out() -> None:
    template = ChatTemplate(tokenizer(CHATML))
    assert template.encode(chat("a", "ok", "b")) == template.encode(chat("a", "ok"))


@pytest.mark.parametrize("source", [CHATML, MARKED, LLAMA3])
def test_supervision_starts_with_the_first_generated_token(source: str) -> None:
    template = ChatTemplate(tokenizer(source))
    messages = chat("a", "x#ok", "b", "y#!", "c", "z", system="s")
    encoded = template.encode(messages)
    for n, i in enumerate((2, 4, 6), 1):
        rows = [j for j, turn in enumerate(encoded.turn) if turn == n]
        assert encoded.tokens[: rows[0]] == template.prompt(messages[:i])
        assert rows == list(range(rows[0], rows[-1] + 1)), "a turn is one run"
        assert encoded.tokens[rows[-1]] == template.end_id
        said = template.text([encoded.tokens[j] for j in rows])
        content = messages[i]["content"]
        assert said == content


def test_a_turn_that_the_template_rewrites_later_is_left_out_and_counted() -> None:
    template = ChatTemplate(tokenizer(FORGETFUL))
    messages = chat("a", "x#ok", "b", "!", "c", "y#z")
    assert show(template, template.encode(messages)) == (
        "<im_start> user Ċ a <im_end> Ċ <im_start> assistant Ċ ok <im_end> Ċ <im_start> user Ċ b <im_end> Ċ <im_start> assistant Ċ !/2 <im_end>/2 Ċ "
        "<im_start> user Ċ c <im_end> Ċ <im_start> assistant Ċ y/3 #/3 z/3 <im_end>/3"
    )
    assert template.encode(messages).left_out == 1
    assert template.encode(messages[:4]).left_out == 1
    assert template.encode(messages[:2]).left_out == 0
    answered = template.encode_answered(messages[:-1], template.tokenizer("y#z").input_ids)
    assert (answered.left_out, sorted(set(answered.turn))) == (1, [0, 2, 3])


def test_marks_inside_an_answer_are_obeyed() -> None:
    # only the first two characters are the model's
    source = MARKED.replace(
        "{% generation %}{{ m['content'] }}{% endgeneration %}", "{% generation %}{{ m['content'][:2] }}{% endgeneration %}{{ m['content'][2:] }}"
    )
    template = ChatTemplate(tokenizer(source))
    assert show(template, template.encode(chat("a", "ok#x"))) == "<im_start> user Ċ a <im_end> Ċ <im_start> assistant Ċ ok/1 # x <im_end>/1"
    late = MARKED.replace("{% generation %}", "{{ '>' }}{% generation %}")
    with pytest.raises(ChatError, match="marks of assistant turn 1"):
        ChatTemplate(tokenizer(late)).encode(chat("a", "ok"))


def test_answers_stand_as_the_target_wrote_them() -> None:
    template = ChatTemplate(tokenizer(CHATML))
    o, k = template.tokenizer.convert_tokens_to_ids(["o", "k"])  # not how the tokenizer would write "ok"
    written = template.encode_answered(chat("a"), [o, k, template.end_id])
    assert show(template, written) == "<im_start> user Ċ a <im_end> Ċ <im_start> assistant Ċ o/1 k/1 <im_end>/1"
    assert template.text([o, k, template.end_id]) == "ok"


def test_the_end_of_an_unfinished_answer_is_not_supervised() -> None:
    template = ChatTemplate(tokenizer(CHATML))
    ids = template.tokenizer("!").input_ids
    assert show(template, template.encode_answered(chat("a", "ok", "b"), ids, unfinished={1})) == (
        "<im_start> user Ċ a <im_end> Ċ <im_start> assistant Ċ ok/1 <im_end> Ċ <im_start> user Ċ b <im_end> Ċ <im_start> assistant Ċ !/2"
    )
    assert template.encode_answered(chat("a", "ok", "b"), ids).turn.count(1) == 2


def test_text_drops_half_a_character() -> None:
    template = ChatTemplate(tokenizer(CHATML))
    ids = template.tokenizer("ok 😀").input_ids
    assert template.text(ids) == "ok 😀"
    assert template.text(ids[:-1]) == "ok"


def test_cut() -> None:
    encoded = Encoded(list(range(9)), [0, 0, 1, 1, 0, 0, 2, 2, 2])
    assert encoded.cut(20) == encoded
    assert encoded.cut(8) == Encoded(list(range(8)), [0, 0, 1, 1, 0, 0, 2, 2])
    assert encoded.cut(6) == Encoded(list(range(4)), [0, 0, 1, 1]), "trailing unsupervised tokens go too"
    assert encoded.cut(3) is None, "one supervised token gives no row"
    assert Encoded([5, 6], [1, 2]).cut(9) is None, "two tokens of different turns give no row"


def test_what_cannot_be_split_exactly_is_refused() -> None:
    template = ChatTemplate(tokenizer(CHATML))
    with pytest.raises(ChatError, match="straddles the start of message 2"):
        template.encode(chat("a", "\nok"))
    with pytest.raises(ChatError, match=r"message 1 contains the special token '<\|im_end\|>'"):
        template.encode(chat("a<|im_end|>", "ok"))
    with pytest.raises(ChatError, match="no assistant turn"):
        template.encode(chat("a"))
    thinking = CHATML.replace("assistant\n' }}", "assistant\n<think>' }}")
    with pytest.raises(ChatError, match="renders message 2 otherwise"):
        ChatTemplate(tokenizer(thinking)).encode(chat("a", "ok"))
    strict = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + CHATML
    with pytest.raises(ChatError, match="refuses it: System role not supported"):
        ChatTemplate(tokenizer(strict)).encode(chat("a", "ok", system="s"))


def test_unusable_templates_are_configuration_errors() -> None:
    with pytest.raises(ConfigError, match="has no chat template"):
        ChatTemplate(tokenizer(None))
    plain = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    with pytest.raises(ConfigError, match="no special token"):
        ChatTemplate(tokenizer(plain))
    with pytest.raises(ConfigError, match="does not render a question and an answer"):
        ChatTemplate(tokenizer("{{ raise_exception('no') }}"))
    shouting = CHATML.replace("m['content']", "m['content'] | upper if m['role'] == 'user' else m['content']")
    with pytest.raises(ConfigError, match="prompt synthesis is not possible"):
        ChatTemplate(tokenizer(shouting)).open_user_turn()


def test_a_template_named_in_the_recipe(tmp_path: Path) -> None:
    path = tmp_path / "own.jinja"
    path.write_text(CHATML)
    own = ChatTemplate(tokenizer(LLAMA3), TemplateConfig(jinja=path))
    assert own.encode(chat("a", "ok")) == ChatTemplate(tokenizer(CHATML)).encode(chat("a", "ok"))
    assert own.digest == ChatTemplate(tokenizer(CHATML)).digest != ChatTemplate(tokenizer(LLAMA3)).digest
    assert ChatTemplate(tokenizer(None), TemplateConfig(jinja=path)).end_id == own.end_id
    path.write_text("{% for m in messages %}\n{{ m[ }}{% endfor %}")
    with pytest.raises(ConfigError, match=r"prep\.template\.jinja=.*own\.jinja, line 2: not a valid Jinja template"):
        ChatTemplate(tokenizer(None), TemplateConfig(jinja=path))
    path.write_bytes(b"\xff")
    for unreadable in (path, tmp_path / "absent.jinja", tmp_path):
        with pytest.raises(ConfigError, match=r"prep\.template\.jinja=.*not readable"):
            ChatTemplate(tokenizer(CHATML), TemplateConfig(jinja=unreadable))
    with pytest.raises(ConfigError, match="the tokenizer's chat template, line 1: not a valid Jinja template"):
        ChatTemplate(tokenizer("{% if %}"))


def test_a_tokenizer_without_offsets_is_refused() -> None:
    slow = SimpleNamespace(is_fast=False, name_or_path="x", chat_template=CHATML)
    with pytest.raises(ConfigError, match="the tokenizer of x records no offsets; expected a fast one"):
        ChatTemplate(slow)


def test_templates_run_in_a_sandbox() -> None:
    for code in ("{{ messages.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ range(1000000000) }}"):
        with pytest.raises(ConfigError, match="does not render a question and an answer"):
            ChatTemplate(tokenizer(CHATML + code))


def test_a_template_of_its_own_for_tools() -> None:
    template = ChatTemplate(tokenizer({"default": CHATML, "tool_use": "{{ tools | length }}" + CHATML, "rag": "{{ x"}))
    tool = {"type": "function", "function": {"name": "f"}}
    assert template.encode(chat("a", "ok")) == ChatTemplate(tokenizer(CHATML)).encode(chat("a", "ok"))
    assert show(template, template.encode(chat("a", "ok"), [tool, tool])).startswith("2 <im_start> user")
    with pytest.raises(ConfigError, match="has no chat template"):
        ChatTemplate(tokenizer({"tool_use": CHATML}))


@pytest.mark.parametrize("depth", [450, 900, 5000])
def test_what_is_nested_too_deeply_is_refused(depth: int) -> None:
    template = ChatTemplate(tokenizer(CHATML + "{{ tools | tojson if tools }}{% if messages[0].tool_calls %}{{ messages[0].tool_calls | tojson }}{% endif %}"))
    call = {"type": "function", "function": {"name": "f", "arguments": '{"a": ' * depth + "1" + "}" * depth}}
    deep: Any = 1
    for _ in range(depth):
        deep = {"a": deep}
    called = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    found = template.encode_many([(called, ()), (chat("a", "ok"), [{"parameters": deep}]), (chat("a", "ok"), ())])
    assert isinstance(found[2], Encoded), "one conversation does not take the others with it"
    if depth > 1000:
        assert [str(one) for one in found[:2]] == ["a tool or a tool call is nested too deeply"] * 2


def test_a_date_that_does_not_move() -> None:
    template = ChatTemplate(tokenizer("{{ strftime_now('%d%m%y') }}" + CHATML))
    assert show(template, template.encode(chat("a", "ok"))).startswith("2 6 0 7 2 4 <im_start>")


def test_only_the_last_turn() -> None:
    whole, last = (ChatTemplate(tokenizer(CHATML), TemplateConfig(supervise=which)) for which in ("all", "last"))
    messages = chat("a", "ok", "b", "!")
    answer = whole.tokenizer("!<|im_end|>").input_ids
    for every, only in (
        (whole.encode(messages), last.encode(messages)),
        (whole.encode_answered(messages[:3], answer), last.encode_answered(messages[:3], answer)),
    ):
        assert set(every.turn) == {0, 1, 2}
        assert only == Encoded(every.tokens, [n if n == 2 else 0 for n in every.turn])


def test_a_system_prompt_for_conversations_without_one() -> None:
    template = ChatTemplate(tokenizer(CHATML), TemplateConfig(system="s"))
    assert template.encode(chat("a", "ok")) == template.encode(chat("a", "ok", system="s"))
    assert show(template, template.encode(chat("a", "ok", system="k"))).startswith("<im_start> system Ċ k <im_end>")
    assert template.with_system(chat("a")) == chat("a", system="s")
    with pytest.raises(ConfigError, match=r"prep\.template\.system contains the special token"):
        ChatTemplate(tokenizer(CHATML), TemplateConfig(system="s<|im_end|>"))
    opened = template.open_user_turn()
    assert show(template, Encoded(opened, [0] * len(opened))) == "<im_start> system Ċ s <im_end> Ċ <im_start> user Ċ"


def test_parse_answer() -> None:
    thinking = CHATML.replace("m['content'] +", "m['content'].split('</think>')[-1] +")
    opened = thinking.replace("assistant\n' }}{% endif", "assistant\n<think>\n' }}{% endif")
    for source, text, content, reasoning in (
        (CHATML, "x</think>ok", "x</think>ok", None),
        (thinking, "<think>\nx\n</think>\n\nok", "ok", "x"),
        (thinking, "<think>\n\n</think>\n\nok", "ok", None),
        (thinking, "ok", "ok", None),
        (thinking, "<think>x", "", "x"),
        (opened, "x</think>ok", "ok", "x"),
        (opened, "x", "", "x"),
    ):
        template = ChatTemplate(tokenizer(source))
        said = {"role": "assistant", "content": content} | ({"reasoning_content": reasoning} if reasoning else {})
        assert template.parse_answer([*template.tokenizer(text).input_ids, template.end_id]) == said


def test_many_as_one_by_one() -> None:
    template = ChatTemplate(tokenizer(CHATML))
    talks = [(chat("a", "ok" * n), ()) if n % 7 else (chat("a"), ()) for n in range(1, 1200)]  # more than one batch, some refused
    found = template.encode_many(talks)
    assert [n for n, one in enumerate(found, 1) if isinstance(one, ChatError)] == list(range(7, 1200, 7))
    for n in (1, 2, 511, 512, 513, 1024, 1025, 1199):
        one = found[n - 1]
        assert one == template.encode(*talks[n - 1]) if n % 7 else isinstance(one, ChatError)
    assert template.encode_many([]) == []


def test_tiny_target(tiny_target: Path) -> None:
    template = ChatTemplate(load_tokenizer(tiny_target))
    messages = chat("Hi", "Yes.")
    encoded = template.encode(messages)
    prompt = template.prompt(messages[:1])
    assert encoded.tokens == [*prompt, *template.tokenizer("Yes.").input_ids, template.end_id]
    assert encoded.turn == [0] * len(prompt) + [1] * 5


@pytest.mark.smollm2
def test_smollm2(smollm2_target: Path) -> None:
    template = ChatTemplate(load_tokenizer(smollm2_target))
    encoded = template.encode(chat("What is 2 + 2?", "It is 4.", "Sure?", "Yes, 100%."))
    names = template.tokenizer.convert_ids_to_tokens(encoded.tokens)
    assert template.text(template.open_user_turn()).startswith("system\nYou are a helpful AI assistant")
    assert [n for n, t in zip(names, encoded.turn, strict=True) if t == 1] == ["It", "Ġis", "Ġ", "4", ".", "<|im_end|>"]
    assert [n for n, t in zip(names, encoded.turn, strict=True) if t == 2] == ["Yes", ",", "Ġ", "1", "0", "0", "%.", "<|im_end|>"]
