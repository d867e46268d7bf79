"""Small objectives over toy batches, in fp64, for the diagnostics that work on one forward."""

from __future__ import annotations

import torch

from kvshot_ds.config import AnyDrafterConfig, ObjectiveConfig
from kvshot_ds.drafters.base import Drafter
from kvshot_ds.features.batch import Batch
from kvshot_ds.objectives.alignment import RowPlan, plan_rows
from kvshot_ds.objectives.objective import Objective
from tests import toys

STEPS = 4


def objective_of(drafter: Drafter) -> Objective:
    """With a random head of the target's size, after which toy teachers are made."""
    head = torch.randn(toys.VOCAB, drafter.g.hidden_size, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    drafter.bind(drafter.lent[0], head)
    return Objective(drafter, ObjectiveConfig(steps=STEPS), head)


def made(name: str | AnyDrafterConfig, turns: list[list[int]] | None = None) -> tuple[Objective, Batch, RowPlan]:
    """The objective of a toy drafter (its name, or its configuration), a batch and all its supervised rows."""
    if not isinstance(name, str):
        toys.FAMILIES["made"], name = name, "made"
    drafter = toys.drafter(name)
    toys.FAMILIES.pop("made", None)
    batch = toys.batch(drafter.g, turns).to("cpu", torch.float64)
    return objective_of(drafter), batch, plan_rows(batch, STEPS)
