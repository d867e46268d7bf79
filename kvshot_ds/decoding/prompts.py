"""What is decoded on trial, and what the target alone makes of it: held-out prompts, stop tokens, the plain `generate`."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

import torch

from kvshot_ds.config import DecodeConfig
from kvshot_ds.errors import ConfigError, KvshotError
from kvshot_ds.target import Target


@dataclass(frozen=True)
class Prompt:
    """What stands before the first answer of one held-out conversation. id: the conversation's."""

    id: str
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Prepared:
    """One line of what `kvshot prep` writes. tokens, turn [S]; users: the user's turns before the first answer."""

    id: str
    tokens: tuple[int, ...]
    turn: tuple[int, ...]
    users: tuple[str, ...]

    @classmethod
    def read(cls, line: str, place: str) -> Prepared:
        """place: FILE:LINE. Raises KvshotError, naming it, on a line that `kvshot prep` has not written."""
        try:
            record = json.loads(line)
            id, tokens, turn = str(record["id"]), record["tokens"], record["turn"]
            if not all(type(n) is int and n >= 0 for part in (tokens, turn) for n in part):
                raise ValueError("tokens and turn must be lists of numbers")
            before = takewhile(lambda message: message["role"] != "assistant", record.get("messages", []))
            return cls(id, tuple(tokens), tuple(turn), tuple(message["content"] for message in before if message["role"] == "user"))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            found = f"{type(error).__name__}: {error}"
            raise KvshotError(f"{place}: expected a conversation as `kvshot prep` writes it, found {found}; prepare again") from None


def read_prompts(path: Path, options: DecodeConfig, context: int) -> tuple[list[Prompt], list[dict[str, str]]]:
    """The first `max_prompts` usable prompts of `path` in file order, and those passed over before them: {id, reason}.

    Raises ConfigError if the file is missing or holds no usable prompt, KvshotError on a line that `kvshot prep` has not written.
    """
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; run `kvshot prep` first")
    prompts: list[Prompt] = []
    skipped: list[dict[str, str]] = []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if len(prompts) == options.max_prompts:
                break
            there = Prepared.read(line, f"{path}:{number}")
            first, reason = opening(there.turn, options.max_new_tokens, context)
            if reason:
                skipped.append({"id": there.id, "reason": reason})
            else:
                prompts.append(Prompt(there.id, there.tokens[:first]))
    if prompts:
        return prompts, skipped
    if skipped:
        raise ConfigError(f"{path}: none of the {len(skipped)} held-out conversations gives a prompt; the first: {skipped[0]['reason']}")
    raise ConfigError(f"{path}: no held-out conversations; prepare with prep.heldout_fraction > 0")


def opening(turn: Sequence[int], max_new_tokens: int, context: int, section: str = "decode") -> tuple[int, str]:
    """Tokens before the first answer of a conversation with these turns [S], and why it gives no prompt; "" if it does."""
    first = next((i for i, n in enumerate(turn) if n), None)
    if not first:
        return 0, "it has no assistant turn" if first is None else "nothing stands before its first answer"
    if first + max_new_tokens > context:
        return first, f"a prompt of {first} tokens and {section}.max_new_tokens={max_new_tokens} exceed the target's context of {context}"
    return first, ""


def stop_tokens(target: Target) -> frozenset[int]:
    """End tokens of the target's generation_config.json, or its tokenizer's if that names none."""
    found = target.model.generation_config.eos_token_id
    if found is None:
        found = target.tokenizer.eos_token_id
    return frozenset(() if found is None else [found] if isinstance(found, int) else found)


def reference(target: Target, prompt: Sequence[int], max_new_tokens: int, stop: Collection[int]) -> list[int]:
    """The target's own greedy `generate`: new tokens, a stop token included.

    The arg-max of its plain logits: a repetition penalty or the like in its generation_config.json is left out.
    """
    from transformers import GenerationConfig

    model, ids = target.model, torch.tensor([prompt], device=target.device)
    plain = GenerationConfig(max_new_tokens=max_new_tokens, do_sample=False, eos_token_id=sorted(stop) or None, pad_token_id=min(stop, default=0))
    own, model.generation_config = model.generation_config, GenerationConfig()  # its own would fill whatever `plain` leaves open
    try:
        return model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=plain)[0, len(prompt) :].tolist()
    finally:
        model.generation_config = own
