"""Norm of the gradient by group of parameters, as it reaches the optimizer: whole, over all ranks, and not yet clipped; and of the weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from kvshot_ds.drafters import cost
from kvshot_ds.drafters.base import Drafter

GROUPS = (*cost.GROUPS, "cross_kv")  # cross_kv: the cross path's own K and V projections, a part of cross


def groups_of(drafter: Drafter) -> Iterator[tuple[tuple[str, ...], torch.nn.Parameter]]:
    """The groups that each parameter belongs to, and the parameter."""
    for name, group, parameter in cost.grouped(drafter):
        own_kv = group == "cross" and (".k_proj" in name or ".v_proj" in name)
        yield (group, "cross_kv") if own_kv else (group,), parameter


def group_norms(drafter: Drafter, device: torch.device) -> torch.Tensor:
    """Of the gradient and of the weights, [2, len(GROUPS)] on the device: root of the sum of squares by group.

    All ranks call it between the backward pass that ends a step and its update. The objective being normalised by the supervised rows of the step,
    the gradient is that of the mean row. Without cross_kv, its squares add up to that of DeepSpeed's own norm before clipping. Each rank adds
    the pieces that it holds, and one sum of these few numbers goes over the ranks.
    """
    squares = torch.zeros(2, len(GROUPS), device=device)
    for groups, parameter in groups_of(drafter):
        for kind, mine in enumerate((_piece(parameter), _weights(parameter))):
            if mine is not None:
                squares[kind, [GROUPS.index(group) for group in groups]] += mine.detach().float().square().sum()
    dist.all_reduce(squares)
    return squares.sqrt_()


def _weights(parameter: torch.nn.Parameter) -> torch.Tensor | None:
    """What this rank adds of the weights: its partition under ZeRO 3, without the padding of the last one; otherwise rank 0 adds them all."""
    if not hasattr(parameter, "ds_id"):
        return parameter if dist.get_rank() == 0 else None
    mine: Any = parameter.ds_tensor  # type: ignore[attr-defined]
    return mine[: max(0, parameter.ds_numel - dist.get_rank() * mine.numel())]  # type: ignore[attr-defined]


def _piece(parameter: torch.nn.Parameter) -> torch.Tensor | None:
    """What this rank adds of a gradient: its partition under ZeRO 1 to 3; without partitions, rank 0 adds it all."""
    if hasattr(parameter, "ds_id"):  # ZeRO 3
        from deepspeed.utils import safe_get_local_grad

        return safe_get_local_grad(parameter)
    whole = getattr(parameter, "_hp_grad", None)  # DeepSpeed's bf16 optimizer keeps it in fp32, on every rank
    whole = parameter.grad if whole is None else whole
    if whole is not None:
        return whole if dist.get_rank() == 0 else None
    mapping: Any = getattr(parameter, "_hp_mapping", None)  # ZeRO 1 and 2: None where no piece of this parameter is this rank's
    return None if mapping is None else mapping.get_lp_grad_fragment(parameter._index_in_param_group)  # type: ignore[attr-defined]
