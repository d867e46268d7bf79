"""What all sections of a recipe share."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict

Dtype = Literal["fp32", "bf16"]
Storage = Literal["fp32", "bf16", "fp8", "int8"]


def _layer_ids(layers: tuple[int, ...]) -> tuple[int, ...]:
    if not layers or min(layers) < 0 or len(set(layers)) < len(layers):
        raise ValueError("expected at least one layer, none negative, none twice")
    return layers


Layers = Annotated[tuple[int, ...], AfterValidator(_layer_ids)]


class Section(BaseModel):
    """Base of all sections: unknown fields are errors, values are finite, and immutable once resolved."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
