"""What a sweep will take, before anything is trained: trials, steps, FLOPs, device-hours, disk, memory. Starts neither Ray nor a training."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from kvshot_ds.config import Recipe, load_recipe
from kvshot_ds.describe import SHAPES, target_of
from kvshot_ds.drafters.cost import weightless
from kvshot_ds.errors import ConfigError, KvshotError
from kvshot_ds.features.manifest import Manifest
from kvshot_ds.features.plan import Guess, aligned, conversations
from kvshot_ds.files import read_object
from kvshot_ds.sweep.contents import Data, trial_recipe
from kvshot_ds.sweep.folder import SweepFolder, Trial, trials_dir
from kvshot_ds.sweep.grid import Grid, expand
from kvshot_ds.sweep.halving import Halving
from kvshot_ds.training.account import Zero
from kvshot_ds.training.actors import wanted
from kvshot_ds.training.checkpoint import exists
from kvshot_ds.training.plan import Hardware, Plan, mib
from kvshot_ds.training.schedule import chosen

MFU = 0.3  # share of the peak that is reached, where nothing was measured
_POINT = 8_000  # bytes of a TensorBoard point: about 80 values
_FEW = 6  # cells left out that are named
_OTHERS = "Run folders depend on the data and will bear other names"


@dataclass(frozen=True)
class Estimate:
    """One trial. parameters: trained ones. plan: its training, None if the conversations are not known yet. state: trained, begun or "" (not begun)."""

    trial: Trial
    recipe: Recipe
    parameters: int
    plan: Plan | None
    state: str

    @property
    def whole(self) -> bool:
        """Whether its steps are whole passes over the data, so that its tokens are counted and not reckoned from the mean."""
        return self.plan is None or self.plan.schedule.steps % self.plan.schedule.steps_per_epoch == 0

    @property
    def tokens(self) -> float:
        """Of all steps."""
        if self.plan is None:
            return 0
        s = self.plan.schedule
        return sum(self.plan.sizes[i][0] for i in s.usable) * s.steps / s.steps_per_epoch

    @property
    def drafter(self) -> str:
        return f"{self.recipe.train.drafter.family}, depth {self.recipe.train.drafter.depth}"


@dataclass(frozen=True)
class Rate:
    """FLOP/s of a rank. source: where it comes from."""

    flops: float
    source: str


class Rates:
    """What trials of this work folder have reached: by drafter and over all."""

    def __init__(self, recipe: Recipe, data: Data):
        self.peak = recipe.train.peak_tflops
        self.found: dict[str, list[float]] = {}
        for file in sorted(trials_dir(recipe.work).glob("*/train.json")):
            try:
                done, one = read_object(file), load_recipe(file.parent / "recipe.yaml")
                seconds, world = float(done["seconds"]), int(done["world_size"])
                if data.sizes and seconds > 0 and one.ray.ranks == world:
                    self.found.setdefault(one.train.drafter.model_dump_json(), []).append(planned(one, data).flops / seconds / world)
            except (KvshotError, ValueError, KeyError, TypeError):  # a run of another version, or of other data
                continue

    def of(self, recipe: Recipe) -> Rate | None:
        """Of trials with this drafter, else of the other ones, else of the stated peak."""
        if own := self.found.get(recipe.train.drafter.model_dump_json()):
            return Rate(sum(own) / len(own), "what trials of the same drafter have reached here")
        if rates := [rate for others in self.found.values() for rate in others]:
            return Rate(sum(rates) / len(rates), "what trials of other drafters have reached here")
        return Rate(self.peak * 1e12 * MFU, f"{MFU:.0%} of the {self.peak:g} TFLOP/s of train.peak_tflops") if self.peak else None


def dry_run(recipe: Recipe, shape: str | None = None, guess: Guess | None = None) -> list[str]:
    """The trials and their cost as a person reads it. Over the captured features; before there are any, over the prepared conversations or `guess`, with
    the layers that the recipe will capture. shape: a known target in place of target.path.

    Raises ConfigError as `expand` and `run` do, and if there is no target to take shapes from.
    """
    data, note = _data(recipe, shape, guess)
    grid = expand(recipe, data)
    wanted(recipe.ray)
    if recipe.sweep.halving.enabled and grid.steps:
        Halving.of(recipe, grid.trials, grid.baseline, max(grid.steps.values()))
    plans: dict[str, Plan] = {}  # seeds cost alike
    found = [_estimate(recipe, trial, data, plans) for trial in grid.trials]
    return [*_heading(recipe, grid, data, note), "", *_table(found, grid), "", *_totals(recipe, found, data), *_remarks(grid)]


def train_memory(recipe: Recipe) -> str:
    """One line: the memory of a rank of the trial `recipe` at its most, as shapes tell. Raises ConfigError if its features are not there."""
    return _memory(planned(recipe, Data.of(recipe)))


def planned(recipe: Recipe, data: Data) -> Plan:
    """The training of `recipe` on the conversations of `data`."""
    among = chosen(data.keys, recipe.train.max_conversations)
    hardware = Hardware(recipe.ray.ranks, recipe.train.peak_tflops, MFU, on_cpu=not recipe.ray.gpus_per_rank)
    return Plan(recipe, data.manifest.target_name, data.manifest.geometry, data.manifest.spec, tuple(data.sizes[i] for i in among), hardware)


def _data(recipe: Recipe, shape: str | None, guess: Guess | None) -> tuple[Data, str]:
    """What the trials will read, and, where that is no captured set, a note that says so."""
    if guess is None and shape is None and Manifest.path(recipe.shards_dir).is_file():
        return Data.of(recipe), ""
    known = Path(recipe.target.path).name.lower()
    name, g = target_of(recipe, known if shape is None and known in SHAPES and not Path(recipe.target.path).is_dir() else shape)
    if guess:
        sizes = ((guess.tokens, round(guess.tokens * guess.supervised)),) * guess.conversations
        return Data.planned(recipe, name, g, sizes), f"Over {guess.conversations:,} conversations of {guess.tokens:,} tokens, as told. {_OTHERS}"
    try:
        sizes = tuple(conversations(recipe.prepared_dir, "train", g))
        note = "Nothing is captured yet: over the prepared conversations"
    except ConfigError:
        sizes, note = (), "Nothing is prepared yet, so steps, tokens and FLOPs are not known; --conversations and --tokens-per-conversation give them"
    return Data.planned(recipe, name, g, sizes), f"{note}. {_OTHERS}"


def _estimate(recipe: Recipe, trial: Trial, data: Data, plans: dict[str, Plan]) -> Estimate:
    one = trial_recipe(recipe, trial)
    alike = one.train.model_dump_json(exclude={"seed", "init"})
    if data.sizes and alike not in plans:
        plans[alike] = planned(one, data)
    begun = "begun" if exists(one.run_dir / "checkpoints") else ""
    drafter = weightless(one.train.drafter, data.manifest.geometry, one.train.draft_vocab_size)
    parameters = sum(p.numel() for p in drafter.parameters())
    return Estimate(trial, one, parameters, plans.get(alike), "trained" if (one.run_dir / "train.json").is_file() else begun)


def _heading(recipe: Recipe, grid: Grid, data: Data, note: str) -> list[str]:
    cells = len({trial.cell for trial in grid.trials})
    what = f"{len(data.sizes):,} conversations, {sum(tokens for tokens, _ in data.sizes):,} tokens" if data.sizes else "conversations not known yet"
    lines = [
        f"sweep {recipe.name}: {len(grid.trials)} trials: {cells} cells, seeds {', '.join(map(str, recipe.sweep.seeds))}; compared with {grid.baseline}",
        f"target {data.manifest.target_name}; {what}; {SweepFolder.of(recipe).path}",
    ]
    return [*lines, note] if note else lines


def _table(found: Sequence[Estimate], grid: Grid) -> list[str]:
    head = ["cell", "seed", "drafter", "M parameters", "steps", "tokens", "FLOPs", "state", "run folder"]
    rows = []
    for e in found:
        work = [f"{grid.steps[e.trial.name]:,}", f"{'' if e.whole else 'about '}{e.tokens:,.0f}", f"{e.plan.flops:,.3g}"] if e.plan else ["?"] * 3
        rows.append([e.trial.cell, str(e.trial.seed), e.drafter, f"{e.parameters / 1e6:,.2f}", *work, e.state or "-", e.trial.name])
    return aligned([head, *rows])


def _totals(recipe: Recipe, found: Sequence[Estimate], data: Data) -> list[str]:
    left = [e for e in found if e.state != "trained"]
    done = len(found) - len(left)
    lines = [f"{done} {'trial is' if done == 1 else 'trials are'} trained already, {len(left)} {'is' if len(left) == 1 else 'are'} to be trained"]
    plans = [e.plan for e in left if e.plan]
    # An account takes seconds, so only those are asked that can be the largest.
    likely = {id(p): p for p in (max(plans, key=lambda p: p.cost.trainable), max(plans, key=lambda p: p.flops))} if plans else {}
    most = max(likely.values(), key=lambda p: p.account.bytes, default=None)
    room, why = _at_once(recipe, most)
    lines += [why, *_diagnostics(recipe, found)]
    if most is None:
        return lines
    tokens, flops = sum(e.tokens for e in left), sum(p.flops for p in plans)
    lines.append(f"{'' if all(e.whole for e in left) else 'about '}{tokens:,.0f} tokens, about {flops:,.3g} FLOPs to be trained")
    lines += [_hours(recipe, left, data, room), _disk(recipe, plans, len(left), room)]
    return [*lines, f"the trial that takes most memory: {_memory(most)}"]


def _hours(recipe: Recipe, left: Sequence[Estimate], data: Data, room: int) -> str:
    rates, sources = Rates(recipe, data), dict[str, None]()
    hours = 0.0
    for e in left:
        rate = rates.of(e.recipe)
        if rate is None:
            return "device-hours: not known; train.peak_tflops (of one device) gives them, and so does the first trial of this work folder that is complete"
        assert e.plan is not None
        hours += e.plan.flops / rate.flops / 3600
        sources.setdefault(rate.source)
    wall = hours / recipe.ray.ranks / max(1, min(room, len(left)))
    text = f"{hours:,.3g} device-hours of training, reckoned from {' and '.join(sources)}"
    return f"{text}; {wall:,.3g} hours with {min(room, len(left))} trials at once; measuring, starting and saving come on top"


def _diagnostics(recipe: Recipe, found: Sequence[Estimate]) -> list[str]:
    left = sum(not (e.recipe.run_dir / "diagnostics.json").is_file() for e in found)
    if not recipe.sweep.diagnose or not left:
        return []
    many = f"{recipe.diagnose.conversations} held-out conversations" if recipe.diagnose.conversations else "all held-out conversations"
    return [
        f"sweep.diagnose=true looks at {many} with each drafter ({left} to do), which is not in the FLOPs and hours here: "
        "for 16 conversations of SmolLM2 about a minute of one core a drafter (diagnose.conversations bounds it)"
    ]


def _disk(recipe: Recipe, plans: Sequence[Plan], trials: int, room: int) -> str:
    t = recipe.train
    drafters = sum(_drafter_bytes(p) for p in plans)
    each = sorted((checkpoint_bytes(p) * (t.keep_checkpoints + 1 + (t.keep_best != "none")) for p in plans), reverse=True)
    kept = sum(each) if recipe.sweep.keep_checkpoints else sum(each[: max(1, room)])
    logs = sum(_POINT * (p.schedule.steps // t.log_every + 2) for p in plans)
    folder = next(place for place in (recipe.work.absolute(), *recipe.work.absolute().parents) if place.exists())
    free = shutil.disk_usage(folder).free
    short = "; NOT ENOUGH" if free < drafters + kept + logs else ""
    checkpoints = "checkpoints of all" if recipe.sweep.keep_checkpoints else f"checkpoints of {min(room, trials)} at once"
    return (
        f"disk at its most: {mib(drafters + kept + logs)} MiB: drafters {mib(drafters)}, {checkpoints} {mib(kept)}, logs {mib(logs)}; "
        f"free below {folder}: {mib(free)} MiB{short}"
    )


def checkpoint_bytes(p: Plan) -> float:
    """One checkpoint: weights, what Adam knows of each (two moments, and with ZeRO or 16-bit weights a copy in fp32), and an average of the weights."""
    zero = Zero.of(p.ds_config)
    master = 4 if zero.stage or zero.item == 2 else 0
    average = 4 if p.recipe.train.optim.ema_decay else 0
    return p.cost.trainable * (zero.item + 8 + master + average)


def _drafter_bytes(p: Plan) -> float:
    """Exported: the drafter, and the averages and the best one where they are asked for; with the tables of the draft vocabulary."""
    copies = 1 + bool(p.recipe.train.optim.ema_decay) + (p.recipe.train.keep_best != "none")
    return copies * (p.cost.trainable * Zero.of(p.ds_config).item + 8 * p.recipe.train.draft_vocab_size + p.g.vocab_size)


def _at_once(recipe: Recipe, most: Plan | None) -> tuple[int, str]:
    """Trials that run at once on this machine, and the reason in words. The driver asks Ray."""
    r, cores = recipe.ray, len(os.sched_getaffinity(0))
    fits = {f"{cores} cores": int(cores // (r.cpus_per_rank * r.ranks))}
    if r.gpus_per_rank:
        gpus = torch.cuda.device_count()
        fits[f"{gpus} GPUs"] = int(gpus // (r.gpus_per_rank * r.ranks))
    elif most is not None:
        free = psutil.virtual_memory().available
        fits[f"{mib(free)} MiB of free memory"] = int(free // (most.account.bytes * r.ranks))
    if recipe.sweep.parallel:
        fits[f"sweep.parallel={recipe.sweep.parallel}"] = recipe.sweep.parallel
    room = min(fits.values())
    each = f"{r.ranks} rank(s) of {r.cpus_per_rank:g} CPUs" + (f" and {r.gpus_per_rank:g} GPUs" if r.gpus_per_rank else "")
    return max(1, room), f"a trial takes {each}; on this machine alone ({', '.join(fits)}) {room} at once; on a cluster, as many as Ray has room for"


def _remarks(grid: Grid) -> list[str]:
    n, out = len(grid.excluded), []
    if n:
        names = f": {'; '.join(grid.excluded)}" if n <= _FEW else ""
        out.append(f"\n{n} {'cell is' if n == 1 else 'cells are'} left out by sweep.exclude{names}")
    out += [f"\n{line}" for line in grid.merged]
    out += _starts(grid)
    out += ["\nunequal beside what is compared:", *(f"  {line}" for line in grid.unequal)] if grid.unequal else []
    if grid.proposals:
        out += ["\nmatched controls that are missing:"]
        for p in grid.proposals:
            out.append(f"  {p.control} for {p.cell}: {p.reason}")
        if lines := next((p.lines for p in grid.proposals if p.lines), ()):
            out += ["add them all with", *(f"  {line}" for line in lines)]
    return out


def _starts(grid: Grid) -> list[str]:
    """What each warm-started cell starts from, and which cells are the controls."""
    cell = {trial.name: trial.cell for trial in grid.trials}
    starts = {trial.cell: cell[trial.after] for trial in grid.trials if trial.after}
    out = ["\nwarm starts, each from the trial of its own seed:", *(f"  {name} from {source}" for name, source in starts.items())] if starts else []
    added = {trial.cell: trial.control for trial in grid.trials if trial.control}
    controls = [*grid.there, *(f"{control} is the cell {name}" for name, control in added.items())]
    return [*out, "\nmatched controls:", *(f"  {line}" for line in controls)] if controls else out


def _memory(p: Plan) -> str:
    """Total, and the three largest parts."""
    a, where = p.account, "the CPU" if p.hardware.on_cpu else "the accelerator"
    parts = {part: device + host * a.on_cpu for part, (device, host) in a.peak.items()}
    largest = sorted(parts, key=lambda part: -parts[part])[:3]
    shown = ", ".join(f"{part} {mib(parts[part])}" for part in largest)
    drafter = f"{p.recipe.train.drafter.family}, depth {p.recipe.train.drafter.depth}"
    return f"{drafter}: about {mib(a.bytes)} MiB of {where} for each rank ({shown}; Python and libraries come on top)"
