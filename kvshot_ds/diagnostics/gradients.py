"""Gradient flow: how much of the loss's gradient reaches each group of parameters, and from how many rows (arXiv 2604.26412 argues that it is sparse)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from kvshot_ds.diagnostics.record import only, sampled
from kvshot_ds.drafters import cost
from kvshot_ds.drafters.base import Drafter
from kvshot_ds.features.batch import Batch
from kvshot_ds.objectives.alignment import RowPlan
from kvshot_ds.objectives.objective import Objective
from kvshot_ds.training.gradients import GROUPS, groups_of

ROWS = 2  # of a conversation, whose gradients are taken one by one


@dataclass(frozen=True)
class GroupGradient:
    """Of one group of parameters, G being the sum of the gradients of the losses of all rows.

    parameters: their number. weight_norm: |weights|. norm: |G|. norm_per_row: |G| / rows, the norm of the gradient of the mean loss, which is also what
    grad_norm/GROUP shows during training. share: of the squares of the whole gradient; cross_kv is a part of cross, the others add up to 1.
    relative: norm_per_row / weight_norm (None for weights that are all 0). effective_rows: rows * (sum_r |g_r|)^2 / (n sum_r |g_r|^2) over the n
    rows whose gradients g_r were taken one by one: as many rows as would give this much if all that give anything gave alike. With n = rows it
    is exact: `rows` if all gradients are of one norm, 1 if a single row has one, 0 if none has.
    """

    parameters: int
    weight_norm: float
    norm: float
    norm_per_row: float
    share: float
    relative: float | None
    effective_rows: float


@dataclass(frozen=True)
class Gradients:
    """rows: supervised rows. loss: mean of a row, its steps weighted as the objective does. sampled: rows taken one by one. groups: those of
    GROUPS that have parameters."""

    rows: int
    loss: float
    sampled: int
    groups: dict[str, GroupGradient]


def measure_gradients(objective: Objective, batches: Iterable[tuple[Batch, RowPlan]], rows_each: int = ROWS, seed: int = 0) -> Gradients:
    """Of the loss of `objective` at the rows of `batches`, which are on the drafter's device, features in its dtype. No weight and no gradient is touched.

    rows_each: rows of each conversation, drawn with `seed`, whose gradients are also taken one by one. Auxiliary losses count as the objective has them.
    """
    with _differentiable(objective.drafter) as parameters:
        total, loss, rows = [torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32)) for p in parameters], 0.0, 0
        alone: list[torch.Tensor] = []
        for batch, plan in batches:
            value, grads = _gradient(objective, parameters, batch, plan)
            loss, rows = loss + value, rows + plan.supervised
            for sum_, grad in zip(total, grads, strict=True):
                if grad is not None:
                    sum_ += grad
            for row in sampled(batch, plan, rows_each, seed).split(1):
                alone.append(_norms(objective.drafter, _gradient(objective, parameters, batch, only(plan, row))[1]))
    weights = _norms(objective.drafter, [p.detach() for p in parameters]).tolist()
    norms = _norms(objective.drafter, total)
    whole = norms[: len(cost.GROUPS)].square().sum()
    effective = _participation(torch.stack(alone)) * rows if alone else torch.zeros_like(norms)
    sizes = dict.fromkeys(GROUPS, 0)
    for groups, p in groups_of(objective.drafter):
        for group in groups:
            sizes[group] += p.numel()
    found = {}
    for i, (group, size) in enumerate(sizes.items()):
        if size:
            norm, each = float(norms[i]), float(norms[i]) / max(rows, 1)
            share = float(norms[i].square() / whole) if whole else 0.0
            found[group] = GroupGradient(size, weights[i], norm, each, share, each / weights[i] if weights[i] else None, float(effective[i]))
    return Gradients(rows, loss / max(rows, 1), len(alone), found)


@contextmanager
def _differentiable(drafter: Drafter) -> Iterator[list[torch.nn.Parameter]]:
    """Within, gradients are taken of all parameters of `drafter`, in the order of `groups_of`: a trained one is loaded without."""
    parameters = [p for _, p in groups_of(drafter)]
    before = [p.requires_grad for p in parameters]
    try:
        with torch.enable_grad():
            for p in parameters:
                p.requires_grad_(True)
            yield parameters
    finally:
        for p, needs in zip(parameters, before, strict=True):
            p.requires_grad_(needs)


def _gradient(objective: Objective, parameters: list[torch.nn.Parameter], batch: Batch, plan: RowPlan) -> tuple[float, tuple[torch.Tensor | None, ...]]:
    """The summed loss of the rows of `plan`, and its gradient by parameter."""
    loss = objective(batch, plan, torch.ones((), device=plan.valid.device)).loss
    return float(loss.detach()), torch.autograd.grad(loss, parameters, allow_unused=True)


def _norms(drafter: Drafter, values: Iterable[torch.Tensor | None]) -> torch.Tensor:
    """Norm by group [len(GROUPS)] fp64, on the host, of one tensor for each parameter."""
    squares = torch.zeros(len(GROUPS), dtype=torch.float64)
    for (groups, _), value in zip(groups_of(drafter), values, strict=True):
        if value is not None:
            square = value.double().square().sum().cpu()
            for group in groups:
                squares[GROUPS.index(group)] += square
    return squares.sqrt()


def _participation(norms: torch.Tensor) -> torch.Tensor:
    """(sum_r |g_r|)^2 / (n sum_r |g_r|^2) of n rows, norms [n, groups]: [groups], 0 where nothing reaches the group."""
    squares = norms.square().sum(0)
    return torch.where(squares > 0, norms.sum(0).square() / (len(norms) * squares.clamp_min(torch.finfo(squares.dtype).tiny)), 0)
