"""Tokenizers small enough to read: one token a word, and the special tokens of the template they go with."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from data_prep.chat import ChatTemplate, Encoded
from kvshot_ds.config.preparation import TemplateConfig

FOLDER = Path(__file__).parent / "templates"
WORDS = "Hi Yes No Why So Be brief Sum it hm well sum search a b q One moment three Hello again user assistant tool model system 26 Jul 2024 ?"
TOOL = {"type": "function", "function": {"name": "sum"}}
QWEN = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
PIECE = Regex(r" ?[A-Za-z]+|\d|\n+|[^\sA-Za-z\d]| ")


@dataclass(frozen=True)
class Family:
    """special: special tokens; added: added tokens that are none; rstrip: whether special tokens eat blanks after them."""

    special: tuple[str, ...]
    added: tuple[str, ...] = ()
    bos: str | None = None
    eos: str = "<|im_end|>"
    rstrip: bool = False


FAMILIES = {
    "qwen2_5": Family(QWEN),
    "qwen3": Family(QWEN, ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")),
    "llama3_1": Family(
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>"),
        bos="<|begin_of_text|>",
        eos="<|eot_id|>",
    ),
    "mistral": Family(
        ("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        bos="<s>",
        eos="</s>",
    ),
    "gemma": Family(("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), bos="<bos>", eos="<eos>"),
    "smollm2": Family(QWEN),
    "phi3": Family(("<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<|endoftext|>"), eos="<|endoftext|>", rstrip=True),
    "marked": Family(QWEN),
    "deepseek_r1": Family(("<|begin|>", "<|end|>", "<|User|>", "<|Assistant|>"), ("<think>", "</think>"), bos="<|begin|>", eos="<|end|>"),
    "harmony": Family(("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>", "<|endoftext|>"), eos="<|return|>"),
    "vicuna": Family(("</s>",), eos="</s>"),
}


def word_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """One token a word, a digit, a run of line breaks or any other character; a blank goes with the word after it."""
    source = (FOLDER / f"{name}.jinja").read_text()
    backend = Tokenizer(models.WordLevel(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(PIECE, "isolated")
    texts = [source.replace("\\n", "\n"), WORDS, json.dumps(TOOL), json.dumps({"arguments": list(range(10))})]
    words = {piece.strip(" ") for text in texts for piece, _ in backend.pre_tokenizer.pre_tokenize_str(text)} | {"\n", "\n\n", "\n\n\n"}
    backend.train_from_iterator(sorted(words | {f" {word}" for word in words}), trainers.WordLevelTrainer(special_tokens=["<unk>"], show_progress=False))
    return finish(backend, name, source)


def byte_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """Bytes, with merges trained on a few words, so that tokens end inside words and characters, and line breaks merge."""
    backend = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), vocab_size=330, show_progress=False)
    backend.train_from_iterator(["user assistant model system ok okay\n\nyes? no.\n ...\n\n\n the then 'this' 😀😃 é"] * 3, trainer)
    return finish(backend, name, (FOLDER / f"{name}.jinja").read_text())


def finish(backend: Tokenizer, name: str, source: str) -> PreTrainedTokenizerFast:
    family = FAMILIES[name]
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False, rstrip=family.rstrip) for t in family.special])
    backend.add_tokens([AddedToken(t, special=False, normalized=False) for t in family.added])
    if backend.decoder is None:
        backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=family.bos, eos_token=family.eos, chat_template=source)


def word_template(name: str, **options: Any) -> ChatTemplate:
    return ChatTemplate(word_tokenizer(name), TemplateConfig(**options))


def golden(template: ChatTemplate, encoded: Encoded) -> str:
    """Tokens separated by blanks, supervised turns in ⟦ ⟧; ▁ is a blank, ⏎ a line break inside a token."""
    names = template.tokenizer.convert_ids_to_tokens(encoded.tokens)
    out = []
    for turn, group in groupby(zip(names, encoded.turn, strict=True), key=lambda pair: pair[1]):
        words = " ".join(name.replace(" ", "▁").replace("\n", "⏎") for name, _ in group)
        out.append(f"⟦{words}⟧{turn}" if turn else words)
    return " ".join(out)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def says(text: str, thinking: str | None = None) -> dict[str, Any]:
    return {"role": "assistant", "content": text} | ({"reasoning_content": thinking} if thinking else {})


def calls(name: str = "sum", arguments: str = '{"a": 1}', content: str = "") -> dict[str, Any]:
    return {"role": "assistant", "content": content, "tool_calls": [{"type": "function", "function": {"name": name, "arguments": arguments}}]}


def result(text: str) -> dict[str, Any]:
    return {"role": "tool", "content": text}


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}
