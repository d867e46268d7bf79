"""Whose a sweep's folder is: it is made once, and taken up again only by the same sweep."""

from __future__ import annotations

from typing import Any

from kvshot_ds.config import Recipe
from kvshot_ds.errors import ConfigError
from kvshot_ds.provenance import stamp
from kvshot_ds.sweep.folder import SweepFolder, Trial
from kvshot_ds.typed import dotted

_FREE = {"seeds", "parallel", "retries", "diagnose", "keep_checkpoints", "baseline", "controls", "halving"}  # of the section sweep


def claim(folder: SweepFolder, recipe: Recipe, trials: tuple[Trial, ...]) -> None:
    """Writes recipe.yaml, provenance.json and trials.json. Raises ConfigError, naming what differs, if the folder is that of another sweep.

    Seeds, controls and what does not shape weights or measurements may differ from one start to the next.
    """
    if folder.is_one(folder.path):
        there, here = _shape(folder.recipe()), _shape(recipe)
        if changed := [f"{key}: there {there.get(key)}, now {here.get(key)}" for key in {**there, **here} if there.get(key) != here.get(key)]:
            raise ConfigError(f"{folder.path} holds another sweep ({'; '.join(changed)}); give this sweep another name")
        before = {(trial.cell, trial.seed): trial.name for trial in folder.trials()}
        other = [trial for trial in trials if before.get((trial.cell, trial.seed), trial.name) != trial.name]
        if other:
            raise ConfigError(
                f"{folder.path} holds a sweep over other data, another target or another DeepSpeed configuration ({other[0].cell}, seed {other[0].seed} was "
                f"{before[other[0].cell, other[0].seed]} and would be {other[0].name}); give this sweep another name"
            )
    stamp(folder.path, recipe)
    folder.write_trials(trials)


def _shape(recipe: Recipe) -> dict[str, Any]:
    """Dotted option -> value, of those that make a sweep another one."""
    train, sweep = recipe.train.shaping(), recipe.sweep.model_dump(mode="json", exclude=_FREE)
    del train["seed"]  # that of each trial counts
    return dotted({"train": train, "sweep": sweep, "eval": recipe.eval.model_dump(mode="json")})
