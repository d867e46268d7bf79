"""Layer ids at the border with other code bases: the one place that converts between the two conventions.

Convention A (boundaries): indices of Hugging Face's `hidden_states`, where 0 is the embeddings and i the state that enters
layer i. Convention B (outputs): the 0-based layer whose output is meant; all of this project uses it. B = A - 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvshot_ds.errors import ConfigError

IDS = "eagle_aux_hidden_state_layer_ids"


def outputs_from_boundaries(boundaries: Sequence[int]) -> tuple[int, ...]:
    """Convention A -> B. Raises ConfigError on 0: the embeddings are no layer's output."""
    if any(i < 1 for i in boundaries):
        raise ConfigError(f"layer ids {list(boundaries)} of convention A (hidden_states): expected 1 or more each, 0 is the embeddings")
    return tuple(i - 1 for i in boundaries)


def boundaries_from_outputs(outputs: Sequence[int]) -> tuple[int, ...]:
    """Convention B -> A."""
    return tuple(i + 1 for i in outputs)


def checked_ids(value: Any, num_layers: int, where: str) -> tuple[int, ...]:
    """`value` of a foreign config as layer outputs (B) of a target of `num_layers` layers. Raises ConfigError naming `where`."""
    if not isinstance(value, list) or not value or not all(type(i) is int and 0 <= i < num_layers for i in value) or len(set(value)) < len(value):
        raise ConfigError(f"{where}={value!r}: expected a list of different layers of the target, 0 to {num_layers - 1} (by their outputs)")
    return tuple(value)


def eagle3_outputs(config: Mapping[str, Any], num_layers: int, where: str) -> tuple[int, ...] | None:
    """The fused layers (B) that the config of a public EAGLE-3 drafter names; None if it names none, which means the default.

    At top level the ids follow convention A, inside `eagle_config` B; where both stand they must agree. Alone, the nested ids
    are taken only if the first is 1: public checkpoints hold A there as well, and engines tell them apart by that first id
    alone, which settles nothing for any other. Raises ConfigError.
    """
    top, nested = config.get(IDS), (config.get("eagle_config") or {}).get(IDS)
    from_top = None
    if top is not None:
        shifted = [i - 1 if type(i) is int else i for i in top] if isinstance(top, list) else top
        from_top = checked_ids(shifted, num_layers, f"{where}: {IDS}={top!r} (indices of hidden_states), that is layers")
    if nested is None:
        return from_top
    found = checked_ids(nested, num_layers, f"{where}: eagle_config.{IDS}")
    if from_top is None and found[0] != 1:
        raise ConfigError(
            f"{where}: eagle_config.{IDS}={nested} may mean outputs of layers or indices of hidden_states (one more). Add what is meant at top level, "
            f'as indices of hidden_states: "{IDS}": {list(boundaries_from_outputs(found))} or {nested}; for the latter, lower the nested ids by one'
        )
    if from_top is not None and found != from_top:
        raise ConfigError(
            f"{where}: {IDS}={top} (indices of hidden_states) and eagle_config.{IDS}={nested} (outputs of layers) name different layers; "
            f"expected {list(boundaries_from_outputs(found))} with {nested}; ask whoever trained the drafter, and mend the wrong one"
        )
    return found


def eagle3_fields(outputs: Sequence[int]) -> dict[str, Any]:
    """The fields of an EAGLE-3 config that name the fused layers `outputs` (B): A at top level, B nested. Engines read one or the other."""
    return {IDS: list(boundaries_from_outputs(outputs)), "eagle_config": {IDS: list(outputs), "use_aux_hidden_state": True}}


def speculators_fields(outputs: Sequence[int]) -> dict[str, Any]:
    """The field of a speculators config that names the fused layers `outputs` (B), in A."""
    return {IDS: list(boundaries_from_outputs(outputs))}


def dflash_fields(outputs: Sequence[int]) -> dict[str, Any]:
    """The field of `dflash_config` that names the fused layers `outputs` (B), in B."""
    return {"target_layer_ids": list(outputs)}
