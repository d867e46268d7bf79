"""What a trial of a sweep costs beside its training: `python -m benchmarks.sweep`.

The same tiny trainings, which differ in their seed, as trials of `kvshot sweep run`, one at a time and two at a time, and as `kvshot train`
processes one after the other. Overhead: seconds of a trial, or of a process, that went neither into optimizer steps nor into measuring
(`kvshot eval`, which a sweep does by itself); what loads the target's parts and writes the drafter is in it. The first trial of a slot, whose
processes start and import, stands apart. Wall: of the whole command or of all processes, the sweep's with Ray's start and with measuring.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from benchmarks.measure import table
from benchmarks.train import prepared
from kvshot_ds.config import Recipe, dump_recipe
from kvshot_ds.files import read_object
from kvshot_ds.sweep.folder import SweepFolder

GOAL = 5.0  # seconds of overhead a trial
_MEASURING = ("look", "eval", "diagnose")


@dataclass(frozen=True)
class Cost:
    """Of one training. overhead, steps [s]. parts: of TrialState.seconds, where it was a trial."""

    overhead: float
    steps: float
    parts: dict[str, float]


def run(*command: str) -> float:
    """Seconds that `kvshot COMMAND` takes. Raises RuntimeError with its output if it fails."""
    env = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"} | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "RAY_USAGE_STATS_ENABLED": "0"}
    began = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "kvshot_ds.cli", *command], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"kvshot {' '.join(command)} ended with {done.returncode}:\n{done.stdout[-3000:]}")
    return time.perf_counter() - began


def by_sweep(recipe: Recipe, trials: int, parallel: int) -> tuple[float, list[Cost]]:
    """Wall seconds, and the trials in the order in which they began."""
    swept = recipe.model_copy(
        update={
            "name": f"parallel{parallel}",
            "work": recipe.work / f"parallel{parallel}",
            "sweep": recipe.sweep.model_validate({"seeds": list(range(trials)), "parallel": parallel, "controls": "off"}),
        }
    )
    wall = run("sweep", "run", str(written(swept)))
    folder = SweepFolder.of(swept)
    states = folder.progress().trials
    found = []
    for trial in sorted(folder.trials(), key=lambda trial: states[trial.name].started or 0.0):
        state, steps = states[trial.name], read_object(folder.run_dir(trial) / "train.json")["seconds"]
        if state.started is None or state.ended is None:
            raise RuntimeError(f"{trial.name} is {state.state}: {state.reason}")
        measuring = sum(state.seconds.get(part, 0.0) for part in _MEASURING)
        found.append(Cost(state.ended - state.started - steps - measuring, steps, state.seconds))
    return wall, found


def by_processes(recipe: Recipe, trials: int) -> tuple[float, list[Cost]]:
    """The named alternative: a `kvshot train` for each, one after the other."""
    found, whole = [], 0.0
    for seed in range(trials):
        one = recipe.model_copy(update={"name": f"process{seed}", "train": recipe.train.model_copy(update={"seed": seed})})
        wall = run("train", str(written(one)))
        steps = read_object(one.run_dir / "train.json")["seconds"]
        found.append(Cost(wall - steps, steps, {}))
        whole += wall
    return whole, found


def written(recipe: Recipe) -> Path:
    file = recipe.work.parent / f"{recipe.name}.yaml"
    file.write_text(dump_recipe(recipe), encoding="utf-8")
    return file


def row(name: str, wall: float, costs: Sequence[Cost]) -> list[str]:
    overheads = [cost.overhead for cost in costs]
    return [name, str(len(costs)), f"{statistics.median(overheads):.2f}", f"{max(overheads):.2f}", f"{statistics.median(c.steps for c in costs):.2f}",
            f"{wall:.1f}" if wall else ""]  # fmt: skip


@click.command(help=__doc__)
@click.option("--trials", default=6, show_default=True, help="trainings each way")
@click.option("--steps", default=20, show_default=True, help="optimizer steps of each")
@click.option("--width", default=64, show_default=True, help="width of the synthetic target")
@click.option("--length", default=64, show_default=True, help="tokens of a conversation")
def main(trials: int, steps: int, width: int, length: int) -> None:
    train = {"ds_config": "zero2_fp32", "draft_vocab_size": 128, "conversations_per_step": 2, "max_steps": steps, "epochs": 1000, "data_workers": 0}
    with tempfile.TemporaryDirectory() as folder:
        recipe = prepared(Path(folder) / "work", {"family": "hidden_only"}, train, length, 16, width, heldout=4)
        alone, one = by_processes(recipe, trials)
        apart, sweep = by_sweep(recipe, trials, 1)
        both, pair = by_sweep(recipe, trials, 2)
    rows = [
        row("kvshot train, a process each", alone, one),
        row("sweep, one at a time: first of the slot", apart, sweep[:1]),
        row("sweep, one at a time: the others", 0.0, sweep[1:]),
        row("sweep, two at a time: firsts", both, pair[:2]),
        row("sweep, two at a time: the others", 0.0, pair[2:]),
    ]
    click.echo(table(("how", "trials", "overhead [s]", "largest [s]", "steps [s]", "wall [s]"), rows))
    later = statistics.median(cost.overhead for cost in sweep[1:])
    mean = statistics.fmean(cost.overhead for cost in sweep)
    parts = {part: statistics.median(cost.parts.get(part, 0.0) for cost in sweep[1:]) for part in sorted({p for c in sweep for p in c.parts})}
    click.echo(f"of a trial, one at a time, not the first: {', '.join(f'{part} {seconds:.2f} s' for part, seconds in parts.items())}")
    click.echo(f"overhead of a process / of a trial (not the first): {statistics.median(cost.overhead for cost in one) / later:.2f}")
    click.echo(f"wall of the processes / of the sweep, one at a time: {alone / apart:.2f}; two at a time: {alone / both:.2f}")
    click.echo(f"mean overhead of a trial, the first one included: {mean:.2f} s; goal at most {GOAL:g} s: {'met' if mean <= GOAL else 'not met'}")


if __name__ == "__main__":
    main()
