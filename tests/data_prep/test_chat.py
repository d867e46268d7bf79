"""Golden tokens and turns on small templates, and the properties every accepted conversation has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from data_prep.chat import ChatError, ChatTemplate, Encoded
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


def tokenizer(template: str | None) -> Any:
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


@pytest.mark.parametrize("source", [CHATML, MARKED, LLAMA3, FORGETFUL])
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
        assert said == (content.split("#")[-1] if source is FORGETFUL and n < 3 else content)


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
