"""Tiny random targets of every family, and a real drafter whose proposals follow a script: accepted as often as wanted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from kvshot_ds.drafters.base import Drafter
from kvshot_ds.drafters.block import BlockDrafter
from kvshot_ds.drafters.state import Start
from kvshot_ds.geometry import Geometry
from kvshot_ds.target import Target
from tests import toys

FAMILIES = ("Llama", "Qwen3", "Qwen2")


def hf_target(family: str, dtype: torch.dtype = torch.float32, **options: Any) -> Target:
    """A random target of 7 layers (so that no layer is read twice) over toys.VOCAB tokens, whose greedy continuations vary."""
    own = {"Qwen3": {"head_dim": 16}, "StableLm": {"partial_rotary_factor": 0.5}}.get(family, {})
    options = {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}} | own | options
    options["rope_parameters"] = dict(options["rope_parameters"])  # transformers writes into what it is given
    config = getattr(transformers, f"{family}Config")(
        hidden_size=32, intermediate_size=48, num_hidden_layers=7, num_attention_heads=4, num_key_value_heads=2, vocab_size=toys.VOCAB,
        max_position_embeddings=96, initializer_range=0.3, bos_token_id=None, eos_token_id=None, pad_token_id=None, **options,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = transformers.AutoModelForCausalLM.from_config(config)
        for name, p in model.named_parameters():
            if p.ndim == 1:  # biases and norms that a mix-up would not leave alone
                p.data += 0.3 * torch.randn_like(p) if "bias" in name or "norm" in name else 0
    return Target(model.to(dtype), Geometry.from_hf(config), Path(family.lower()))


def bound_drafter(name: str, target: Target, scale: float = 8.0) -> Drafter:
    drafter = toys.drafter(name, target.geometry, target.dtype, scale).eval().requires_grad_(False)
    drafter.bind(target.model.get_input_embeddings().weight, target.model.get_output_embeddings().weight)
    return drafter


def prompt(length: int, seed: int) -> list[int]:
    return torch.randint(toys.VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@dataclass
class Seen:
    """One round as the drafter saw it. h: hidden states [1, d] of its steps; proposed: what the script made of them."""

    start: Start
    h: list[torch.Tensor] = field(default_factory=list)
    proposed: list[int] = field(default_factory=list)

    @property
    def anchor(self) -> int:
        return int(self.start.all.positions[-1])


def script(drafter: Drafter, truth: list[int], wrong: Callable[[], bool]) -> list[Seen]:
    """Replaces only the proposals of `drafter`: the true next token of `truth` (prompt and continuation), unless `wrong()`.

    The drafter still computes everything. Returns the log of its rounds.
    """
    log: list[Seen] = []
    entry = "slots" if isinstance(drafter, BlockDrafter) else "begin"
    first = getattr(drafter, entry)

    def logged(state, start):
        log.append(Seen(start))
        return first(state, start)

    def propose(h):
        seen, before = log[-1], len(log[-1].h)
        for one in h.split(1):  # a step, or all steps of a block
            token = truth[seen.anchor + 2 + len(seen.h)]
            seen.h.append(one)
            seen.proposed.append((token + 1) % toys.VOCAB if wrong() else token)
        return torch.tensor(seen.proposed[before:])

    setattr(drafter, entry, logged)
    drafter.propose = propose  # type: ignore[method-assign]
    return log
