"""Options of sweeps and of diagnostics."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from kvshot_ds.config.base import Section

# Short names of the axes that the paper varies. Any other axis is a dotted option of the recipe.
ALIASES = {
    "family": "train.drafter.family",
    "depth": "train.drafter.depth",
    "injection": "train.drafter.kv.injection",
    "kv_layers": "train.drafter.kv.layers",
    "projector_init": "train.drafter.kv.projector_init",
    "conversations": "train.max_conversations",
    "gate": "train.drafter.gate.init",
    "gate_kind": "train.drafter.gate.kind",
    "gate_floor": "train.drafter.gate.floor",
    "gate_floor_steps": "train.drafter.gate.floor_steps",
    "gate_open_steps": "train.drafter.gate.open_steps",
    "loss": "train.objective.loss",
    "lr": "train.optim.lr",
    "init": "train.init.layers",
    "warm_start": "train.init.warm_start",
    "steps": "train.objective.steps",
}


def _axes(axes: tuple[dict[str, Any], ...]) -> tuple[dict[str, Any], ...]:
    """Shape alone; names and values are judged where the recipe is known (kvshot_ds/sweep/grid.py)."""
    for axis in axes:
        for name, values in axis.items():
            if not isinstance(values, list | dict) or not values:
                raise ValueError(f"axis {name}: expected a list of values, or a mapping from the name of a variant to its options, found {values!r}")
        if len({len(values) for values in axis.values()}) != 1:
            raise ValueError(f"axes {', '.join(axis)} stand in one item, so their values belong together one by one: expected lists of one length")
    return axes


def _seeds(seeds: tuple[int, ...]) -> tuple[int, ...]:
    if not seeds or len(set(seeds)) < len(seeds):
        raise ValueError("expected at least one seed, none twice")
    return seeds


class HalvingConfig(Section):
    """Asynchronous successive halving (ASHA, arXiv 1810.05934). Off by default: an early rank may mislead, and `kvshot sweep table` tells by how much."""

    enabled: bool = Field(False, description="stop trials that are behind at a rung; needs train.eval_every")
    reduction: float = Field(3, gt=1, description="of the trials that reached a rung, one in so many goes on")
    first_rung: float = Field(0.25, gt=0, lt=1, description="first rung, as a share of the steps; each further one is `reduction` times as far")
    metric: Literal["mat", "mat_joint", "accept_top1/0"] = Field("mat", description="held-out value compared at a rung, within the trials of one seed")


class SweepConfig(Section):
    """Many trainings of one recipe: the axes are crossed, the seeds with them."""

    axes: Annotated[tuple[dict[str, Any], ...], AfterValidator(_axes)] = Field(
        (),
        description="items are crossed; of one item, {NAME: [values]}, several names are zipped. NAME: a dotted option, or a short one (family, depth, "
        "injection, kv_layers, projector_init, conversations, gate, gate_kind, gate_floor, gate_floor_steps, gate_open_steps, loss, lr, init, warm_start, "
        "steps), or any word whose values are a mapping from the name of a variant to its options: {drafter: {kv2: {family: kv_only, depth: 2}}}",
    )
    seeds: Annotated[tuple[int, ...], AfterValidator(_seeds)] = Field((0,), description="train.seed of the trials: every cell is trained with each")
    exclude: tuple[dict[str, Any], ...] = Field(
        (), description="cells left out: those that have all the values of an item, {family: hybrid, depth: [2, 4]}; a list means any of it"
    )
    baseline: dict[str, Any] | None = Field(None, description="values that name the cell with which the others are compared; null: the first cell")
    match: Literal["steps", "epochs"] = Field(
        "steps",
        description="steps: all trials make as many optimizer steps as the longest, passing over smaller data more often, so that tokens are equal; "
        "epochs: each makes its train.epochs, and the table says that steps differ",
    )
    controls: Literal["propose", "add", "off"] = Field(
        "propose",
        description="matched controls of warm-started cells (the same from scratch; the source of the warm start trained on): named, added as trials, or not",
    )
    diagnose: bool = Field(False, description="also take diagnostics (kvshot diagnose) of each trained drafter")
    parallel: int = Field(0, ge=0, description="trials at once; 0: as many as the cluster has room for")
    retries: int = Field(1, ge=0, description="a trial that failed starts again from its newest checkpoint, so often")
    keep_checkpoints: bool = Field(False, description="keep the checkpoints of trials that are complete")
    halving: HalvingConfig = Field(default_factory=HalvingConfig, description="early stopping")

    @field_validator("controls", mode="before")
    @classmethod
    def _off(cls, controls: Any) -> Any:
        return "off" if controls is False else controls  # as YAML reads the word

    @model_validator(mode="after")
    def _something_varies(self) -> SweepConfig:
        names = [name for axis in self.axes for name in axis]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"axes given twice: {', '.join(twice)}")
        if {"seed", "seeds", "train.seed"} & set(names):
            raise ValueError("seeds are an axis of their own: name them in sweep.seeds")
        return self


class DiagnoseConfig(Section):
    """What a trained drafter does with what the target gives it, on held-out conversations."""

    drafters: tuple[Path, ...] = Field((), description="run folders or exported drafter folders; empty means this recipe's own run")
    conversations: int = Field(64, ge=0, description="held-out conversations looked at; 0: all")
    near: int = Field(32, ge=1, description="context use: prefix positions this close to the anchor are near, the others far [tokens]")
    bins: int = Field(5, ge=2, description="classes of equally many rows, of token frequency and of target entropy")
    bootstrap: int = Field(1000, ge=100, description="bootstrap resamples over conversations")
    confidence: float = Field(0.95, gt=0.5, lt=1, description="coverage of the intervals")
    seed: int = Field(0, ge=0, lt=1 << 63, description="seed of the bootstrap")
