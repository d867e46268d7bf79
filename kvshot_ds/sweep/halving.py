"""Asynchronous successive halving (ASHA, arXiv 1810.05934) as a rule: given what has been measured so far, whether a trial is to stop.

The paper's trials pause at a rung and are taken up again when they are among the best there. A trial here keeps its processes, so the rule is turned
round: it goes on unless it is known to be behind. Of the n trials that have reached a rung, the floor(n / reduction) best go on, as in the paper; where
that is none (n < reduction), where the paper waits, all do. It is asked again whenever a trial arrives, so that the first ones are not let through for
having come first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvshot_ds.config import Recipe
from kvshot_ds.errors import ConfigError
from kvshot_ds.files import JsonError, read_object
from kvshot_ds.sweep.folder import Trial


@dataclass(frozen=True)
class Halving:
    """rungs: ascending [optimizer steps]. seeds: of each trial. spared: trials that are never stopped."""

    rungs: tuple[int, ...]
    reduction: float
    metric: str
    seeds: Mapping[str, int]
    spared: frozenset[str]

    @classmethod
    def of(cls, recipe: Recipe, trials: Sequence[Trial], baseline: str, steps: int) -> Halving:
        """baseline: name of its cell. steps: optimizer steps of the longest trial; a rung is as many steps for a shorter one.

        Controls, the baseline and sources of warm starts are spared: others are compared with them, or start from them. Raises ConfigError if nothing is
        measured before the end.
        """
        config, every = recipe.sweep.halving, recipe.train.eval_every
        found = rungs(config.first_rung, config.reduction, steps, every) if every else ()
        if not found:
            raise ConfigError(
                f"sweep.halving.enabled=true compares trials where they look at the held-out split, and train.eval_every={every} has no look between "
                f"{config.first_rung:g} of the {steps} steps and the last one; set it to at most {max(1, math.ceil(config.first_rung * steps))}"
            )
        sources = {trial.after for trial in trials}
        spared = frozenset(trial.name for trial in trials if trial.control or trial.cell == baseline or trial.name in sources)
        return cls(found, config.reduction, config.metric, {trial.name: trial.seed for trial in trials}, spared)

    def stop(self, trial: str, reached: Mapping[str, Mapping[int, float]]) -> str | None:
        """Why `trial` is to stop, or None. reached: trial -> step -> held-out metric (the more the better), of all trials, also of ended ones.

        The verdict is that of the newest rung it has reached, among the trials of its seed; of equal ones none stops for the other.
        """
        own = reached.get(trial, {})
        rung = max((step for step in self.rungs if step in own), default=None)
        if trial in self.spared or rung is None:
            return None
        values = [_value(looks[rung]) for name, looks in reached.items() if rung in looks and self.seeds[name] == self.seeds[trial]]
        go_on = math.floor(len(values) / self.reduction)
        ahead = sum(value > _value(own[rung]) for value in values)
        if not go_on or ahead < go_on:
            return None
        return (
            f"behind at step {rung}: held-out {self.metric} {own[rung]:.4g} is number {ahead + 1} of the {len(values)} trials of seed {self.seeds[trial]} "
            f"that have reached it, of which {go_on} go on (sweep.halving)"
        )

    def looks(self, run_dir: Path) -> dict[int, float]:
        """Step -> metric, of a trial's held-out looks so far."""
        try:
            found = read_object(run_dir / "heldout.json")
        except (OSError, JsonError):  # none yet
            return {}
        return {int(step): values[f"heldout/{self.metric}"] for step, values in found.items() if f"heldout/{self.metric}" in values}


def rungs(first: float, reduction: float, steps: int, every: int) -> tuple[int, ...]:
    """first * reduction^i of the steps, each rounded up to the next look, as far as they lie before the last step."""
    found, share = list[int](), first
    while (step := math.ceil(share * steps / every - 1e-9) * every) < steps:
        found.append(step)
        share *= reduction
    return tuple(dict.fromkeys(found))


def _value(metric: float) -> float:
    """One that is no number is behind every other."""
    return metric if math.isfinite(metric) else -math.inf
