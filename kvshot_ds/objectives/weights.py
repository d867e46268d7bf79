"""How much each draft step counts in the loss. Steps are numbered from 0: slot k + 1 of a block is step k."""

from __future__ import annotations

from collections.abc import Callable
from typing import assert_never

import torch

from kvshot_ds.config import ObjectiveConfig


def geometric(steps_of: torch.Tensor, decay: float) -> torch.Tensor:
    """decay^k: [M] int64 -> [M] fp32."""
    return decay ** steps_of.float()


def exponential(steps_of: torch.Tensor, gamma: float) -> torch.Tensor:
    """exp(-k / gamma), slot 1 of a block having k = 0 (DFlash, arXiv 2602.06036): [M] int64 -> [M] fp32."""
    return torch.exp(-steps_of.float() / gamma)


def dpace(q: torch.Tensor, valid: torch.Tensor, alpha: float) -> torch.Tensor:
    """w_k = sum_{m >= k} P_m, P_k = prod_{j <= k} s_j, s = (1 - alpha) q + alpha (D-PACE, arXiv 2605.18810).

    q [K, N]: probability the drafter gives to the label token. valid [K, N] bool: where it is False, q is not read, the
    step neither multiplies nor adds, and its weight is 0. Returns [K, N] in q's dtype, detached.
    """
    s = torch.where(valid, (1 - alpha) * q.detach() + alpha, 1)
    reached = s.cumprod(0) * valid
    return reached.flip(0).cumsum(0).flip(0) * valid


def step_weights(
    config: ObjectiveConfig, steps_of: torch.Tensor, picks: torch.Tensor, valid: torch.Tensor, confidence: Callable[[], torch.Tensor]
) -> torch.Tensor:
    """The weight of each of the M judged (step, row) pairs as config.weights says: [M], at least fp32, detached.

    steps_of [M]: step k of the pair. picks [M]: its flat index k * N + row. valid [K, N] bool: True at the picks.
    confidence() -> [M]: probability of the label token (losses.token_confidence); called for dpace only, as it costs a pass.
    """
    match config.weights:
        case "geometric":
            return geometric(steps_of, config.step_decay)
        case "exponential":
            return exponential(steps_of, config.gamma)
        case "dpace":
            found = confidence().detach()
            q = found.new_zeros(valid.numel()).index_put_((picks,), found).view_as(valid)
            return dpace(q, valid, config.dpace_alpha).view(-1)[picks]
    assert_never(config.weights)
