"""Which tensors are trained with which settings, and the learning rate of every step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from typing import Any

import torch

from kvshot_ds.config import OptimConfig
from kvshot_ds.errors import ConfigError


def parameter_groups(named: Iterable[tuple[str, torch.nn.Parameter]], config: OptimConfig) -> list[dict[str, Any]]:
    """Groups for torch.optim.AdamW of the trainable tensors among `named`, the drafter's: params, lr, weight_decay; none is empty.

    A tensor belongs to the first of `optim.groups` with a pattern that its name matches, else to the rest. Where a group does not set its
    weight decay, matrices decay and vectors do not. lr_scale=0 gives a learning rate of 0: AdamW then changes nothing, decay included.
    Raises ConfigError for a pattern that no name matches, and for a group whose tensors all belong to groups before it.
    """
    trained = {name: p for name, p in named if p.requires_grad}
    for i, group in enumerate(config.groups):
        if unmatched := [pattern for pattern in group.tensors if not any(fnmatchcase(name, pattern) for name in trained)]:
            raise ConfigError(
                f"train.optim.groups[{i}].tensors: {', '.join(unmatched)} matches no tensor of this drafter; some of its own: {', '.join(list(trained)[:6])}"
            )
    settings = [(1.0, None), *((g.lr_scale, g.weight_decay) for g in config.groups)]  # the rest first: its learning rate is the one that is shown
    members: list[list[torch.nn.Parameter]] = [[] for _ in range(2 * len(settings))]  # matrices and vectors of each
    for name, p in trained.items():
        at = next((i for i, g in enumerate(config.groups, 1) if any(fnmatchcase(name, pattern) for pattern in g.tensors)), 0)
        members[2 * at + (p.ndim < 2)].append(p)
    for i, group in enumerate(config.groups, 1):
        if not members[2 * i] and not members[2 * i + 1]:
            raise ConfigError(f"train.optim.groups[{i - 1}].tensors: what {', '.join(group.tensors)} matches belongs to groups before it; reorder them")
    groups = []
    for i, params in enumerate(members):
        scale, decay = settings[i // 2]
        plain = 0.0 if i % 2 else config.weight_decay
        if params:
            groups.append({"params": params, "lr": config.lr * scale, "weight_decay": plain if decay is None else decay})
    return groups


def lr_curve(steps: int, config: OptimConfig) -> Callable[[int], float]:
    """Factor on the learning rate by optimizer step (0-based) in a run of `steps`.

    Linear warm-up to 1, reached with its last step; then as `optim.schedule` says. What falls, falls as if to `final_lr_fraction` at the
    step after the last one. wsd (arXiv 2404.06395): constant, and the linear fall over the last `decay_fraction` of all steps.
    """
    warmup = max(1, round(steps * config.warmup_fraction))
    begin = max(warmup, steps - max(1, round(steps * config.decay_fraction))) if config.schedule == "wsd" else warmup
    fall = 1 - config.final_lr_fraction

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        if config.schedule == "constant" or step < begin:
            return 1.0
        done = min(1.0, (step - begin) / max(1, steps - begin))
        if config.schedule == "cosine":
            return config.final_lr_fraction + fall * 0.5 * (1 + math.cos(math.pi * done))
        return 1 - fall * done

    return factor
