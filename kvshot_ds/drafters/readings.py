"""What the layer ids of a public checkpoint may mean: settled by the rules of layer_ids.py, or two readings of which only data tells."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvshot_ds.drafters.layer_ids import IDS, checked_ids, eagle3_outputs
from kvshot_ds.errors import ConfigError
from kvshot_ds.features.spec import eagle3_hidden_layers


@dataclass(frozen=True)
class Reading:
    """One reading of the ids that a config holds. layers: the outputs (0-based) that it means."""

    means: str
    layers: tuple[int, ...]


@dataclass(frozen=True)
class Readings:
    """ids: as the config holds them, with their place; "" if it holds none. chosen: the layers by rule, None where the rule settles nothing
    and `doubt` says why (empty layers: the default of the format). possible: the two readings of the ids; empty where there is one only.
    """

    ids: str
    chosen: tuple[int, ...] | None
    possible: tuple[Reading, ...] = ()
    doubt: str = ""


def eagle3_readings(config: Mapping[str, Any], num_layers: int, where: str) -> Readings:
    """Of an EAGLE-3 config, flat. Raises ConfigError if the ids name no layers of the target in any reading.

    Beyond the rules of `eagle3_outputs`: ids at top level, without nested ones, that are exactly the usual outputs (1, L//2-1, L-4) are in
    doubt, since converters have copied nested ids there unchanged.
    """
    top, nested = config.get(IDS), (config.get("eagle_config") or {}).get(IDS)
    ids = ", ".join(f"{place}{IDS}={found}" for place, found in (("", top), ("eagle_config.", nested)) if found is not None)
    possible = _possible(top, nested, num_layers)
    try:
        chosen = eagle3_outputs(config, num_layers, where)
    except ConfigError as error:
        if len(possible) < 2:
            raise
        return Readings(ids, None, possible, str(error))
    if nested is None and top is not None and list(top) == list(eagle3_hidden_layers(num_layers)) and len(possible) == 2:
        doubt = (
            f"{where}: {IDS}={top} at top level should be indices of hidden_states, but these numbers are the usual outputs of layers; say which is meant "
            f'in both places: "eagle_config": {{"{IDS}": {top}}} with {[i + 1 for i in top]} at top level, or {[i - 1 for i in top]} there with {top}'
        )
        return Readings(ids, None, possible, doubt)
    settled = top is not None and nested is not None  # both conventions stand there and agree
    return Readings(ids, () if chosen is None else chosen, () if settled else possible)


def dflash_readings(value: Any, num_layers: int, where: str) -> Readings:
    """Of DFlash's target_layer_ids, outputs by rule. Raises ConfigError."""
    return Readings(f"target_layer_ids={value}", checked_ids(value, num_layers, where), _possible(None, value, num_layers))


def _possible(top: Any, nested: Any, num_layers: int) -> tuple[Reading, ...]:
    """Two readings, or none: with ids in one place what they mean in both conventions, with ids in both places what each means in its own."""
    found: dict[tuple[int, ...], str] = {}
    for value, conventions in ((nested, (0, 1) if top is None else (0,)), (top, (1, 0) if nested is None else (1,))):
        for shift in conventions if isinstance(value, list) and all(type(i) is int for i in value) else ():
            try:
                layers = checked_ids([i - shift for i in value], num_layers, "")
            except ConfigError:  # no layers of the target: the rule says so, if no other reading is possible
                continue
            found.setdefault(layers, "indices of hidden_states" if shift else "outputs of layers")
    return tuple(Reading(means, layers) for layers, means in found.items()) if len(found) == 2 else ()
