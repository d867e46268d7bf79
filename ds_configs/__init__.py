"""DeepSpeed configurations that ship with the package: ZeRO stage and precision, and nothing a recipe decides."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

from kvshot_ds.errors import ConfigError

_OWNED = {
    "train_batch_size": "train.conversations_per_step",
    "train_micro_batch_size_per_gpu": "train.conversations_per_micro_batch",
    "gradient_accumulation_steps": "train.conversations_per_step",
    "gradient_clipping": "train.optim.clip",
    "optimizer": "train.optim",
    "scheduler": "train.optim",
}


def names() -> list[str]:
    """Names of the configurations that ship, without `.json`."""
    return sorted(entry.name.removesuffix(".json") for entry in resources.files(__name__).iterdir() if entry.name.endswith(".json"))


def load(name: str) -> dict[str, Any]:
    """The configuration `name`: one of `names()`, or the path of a JSON file.

    Raises ConfigError if there is none, if it is not a JSON object, or if it sets what the recipe decides.
    """
    source = resources.files(__name__) / f"{name}.json" if name in names() else Path(name)
    try:
        config = json.loads(source.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"train.ds_config={name}: neither a file nor one of {', '.join(names())}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"train.ds_config={name}: not readable as JSON: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"train.ds_config={name}: expected a JSON object, found {type(config).__name__}")
    if both := [f"{key} (set {option} instead)" for key, option in _OWNED.items() if key in config]:
        raise ConfigError(f"train.ds_config={name} sets what the recipe decides: {', '.join(both)}")
    return config
