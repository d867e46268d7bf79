"""Random drafters of small targets, as a training run leaves them, and the rounds in which an export is compared with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from kvshot_ds.config import AnyDrafterConfig
from kvshot_ds.drafters.base import Drafter
from kvshot_ds.drafters.build import DrafterInfo, build_drafter, load_drafter, save_drafter
from kvshot_ds.drafters.state import DraftState, Start
from kvshot_ds.objectives.alignment import decoding_start
from kvshot_ds.target import load_geometry, load_parts, weights_digest
from tests import toys
from tests.decoding.models import hf_target, prompt

D, L, V, VD = 32, 7, toys.VOCAB, 24
ROUNDS = [(9, 4), (3, 5), (1, 3)]  # positions committed, tokens drafted
Tensors = dict[str, torch.Tensor]


def saved_target(folder: Path, family: str, **options: Any) -> Path:
    hf_target(family, **options).model.save_pretrained(folder)
    return folder


def trained(folder: Path, config: AnyDrafterConfig, target: Path, size: int = VD, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """A drafter folder with weights so large that every path matters. changes: of the geometry, in place of the target's."""
    g = load_geometry(target)
    g = type(g)(**(g.to_json() | changes))
    drafter = build_drafter(config, g, size)
    drafter.reset(seed=3)
    with torch.no_grad():
        for name, p in sorted(drafter.named_parameters()):
            p.mul_(8.0 if p.ndim == 2 else 1.0)
            if p.ndim == 1:
                p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(len(name))) * 0.2)
    drafter.set_vocab(torch.randperm(V, generator=torch.Generator().manual_seed(5))[:size].sort().values)
    save_drafter(folder, drafter, DrafterInfo(config, g, size, target.name, weights_digest(target), {}), dtype)
    return folder


def read(folder: Path) -> tuple[dict[str, Any], Tensors]:
    """config.json and the tensors of an export."""
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


def bound(folder: Path, target: Path, dtype: torch.dtype = torch.float64) -> Drafter:
    drafter, _ = load_drafter(folder, "cpu", dtype)
    parts = load_parts(target, dtype=dtype)
    drafter.bind(parts.embedding, parts.head)
    return drafter


def states(n: int, seed: int, dtype: torch.dtype = torch.float64) -> dict[int, torch.Tensor]:
    """The target's states of all its layers at n positions, of different sizes."""
    r = torch.Generator().manual_seed(seed)
    return {i: (torch.randn(n, D, generator=r, dtype=torch.float64) * (1 + i)).to(dtype) for i in range(L)}


def rounds() -> list[tuple[Start, torch.Tensor, dict[int, torch.Tensor], int]]:
    """(start, tokens, states by layer, length) of each round."""
    out, first = [], 0
    for n, length in ROUNDS:
        tokens, hidden = torch.tensor(prompt(n, first)), states(n, first)
        out.append((decoding_start(tokens, [first], [n], 40, hidden, {}), tokens, hidden, length))
        first += n
    return out


def proposals(drafter: Drafter) -> list[list[int]]:
    """What a hidden-only or DFlash drafter proposes, round by round."""
    state = DraftState.empty(drafter.depth)
    return [drafter.draft(state, start, length).tolist()[0] for start, _, _, length in rounds()]
