"""Small prepared conversations and drafters of random weights, for everything that `kvshot bench` reads."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from kvshot_ds.config import Recipe
from kvshot_ds.drafters.build import DrafterInfo, build_drafter, save_drafter
from kvshot_ds.target import load_geometry, weights_digest
from tests import toys

WORDS = ("amber", "birch", "cedar", "dune", "ember", "fjord", "grove", "heath", "islet", "jetty", "knoll", "lagoon", "marsh", "nook", "oasis", "plain")


def text(number: int, words: int = 30) -> str:
    """Different for every number, without a run of words in common."""
    return " ".join(f"{WORDS[(number + 3 * i) % len(WORDS)]}{number}x{i}" for i in range(words))


def conversation(number: int, size: int = 12, answer: int = 5, asked: str | None = None) -> dict[str, Any]:
    """As `kvshot prep` writes it; the tokens are not those of the text."""
    tokens = [1, *(40 + (7 * number + 3 * i) % 90 for i in range(size + answer - 1))]
    messages = [{"role": "user", "content": asked or text(number)}, {"role": "assistant", "content": f"answer {number}"}]
    return {"id": f"c{number}", "messages": messages, "tokens": tokens, "turn": [0] * size + [1] * answer, "source": "test"}


def write_lines(path: Path, records: Sequence[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def save_random(folder: Path, target: Path, name: str, digest: str | None = None) -> Path:
    """A drafter folder of the toy `name` for the target in `target`."""
    g = load_geometry(target)
    drafter = build_drafter(toys.FAMILIES[name], g, 64)
    drafter.reset(0)
    drafter.set_vocab(torch.arange(36, 100))
    save_drafter(folder, drafter, DrafterInfo(toys.FAMILIES[name], g, 64, "tiny", digest or weights_digest(target), {}), torch.float32)
    return folder


def recipe(target: Path, work: Path, **bench: Any) -> Recipe:
    """Four held-out prompts, ten other conversations to train on, one hybrid drafter as this recipe's own run."""
    write_lines(work / "prepared/heldout.jsonl", [conversation(i) for i in range(4)])
    write_lines(work / "prepared/train.jsonl", [conversation(i) for i in range(20, 30)])
    save_random(work / "runs/mine/drafter", target, "hybrid-1")
    small = {"max_prompts": 4, "max_new_tokens": 10, "threads": 1, "latency": {"repeats": 1, "warm_up": 0}, **bench}
    return Recipe.model_validate(
        {
            "name": "mine",
            "work": work,
            "target": {"path": target, "dtype": "bf16", "device": "cpu"},
            "decode": {"drafting": {"length": 3}},
            "eval": {"bootstrap": 100},
            "bench": small,
        }
    )
