"""Feature shards in, a trained drafter out. Reads top to bottom."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from tqdm import tqdm

import ds_configs
from kvshot_ds.config import Recipe, TrainConfig, load_recipe
from kvshot_ds.drafters.base import Drafter
from kvshot_ds.drafters.build import build_drafter
from kvshot_ds.drafters.cost import cost
from kvshot_ds.drafters.initial import choose_vocab, initialise
from kvshot_ds.drafters.warm import WarmReport, source_digest, warm_start
from kvshot_ds.errors import ConfigError, KvshotError, Preempted
from kvshot_ds.features.manifest import load_token_counts, require
from kvshot_ds.features.shard import ShardSet
from kvshot_ds.files import read_object, sole_writer
from kvshot_ds.objectives.objective import Objective, objective_for, required_features
from kvshot_ds.provenance import digest, stamp
from kvshot_ds.target import load_geometry, load_parts, weights_digest
from kvshot_ds.training import checkpoint, trackers
from kvshot_ds.training.checkpoint import Checkpoints, Progress
from kvshot_ds.training.control import Control
from kvshot_ds.training.ema import Average
from kvshot_ds.training.engine import World, connect, make_engine, precision, release
from kvshot_ds.training.export import export_best, finish
from kvshot_ds.training.heldout import Heldout
from kvshot_ds.training.loader import MicroBatch, step_batches
from kvshot_ds.training.plan import step_flops
from kvshot_ds.training.schedule import Schedule
from kvshot_ds.training.timing import Clock, Workload, peak_flops
from kvshot_ds.training.traffic import bytes_per_step
from kvshot_ds.training.verification import left_out, told_by_first
from kvshot_ds.training.watch import Board, Meter, gate_points, memory, training_scalars

_ENDING = 120.0  # for another start of the run that is just ending, or whose node died: its lock on network storage lives on for a while [s]
_LOWER = "try a lower train.optim.lr, under another name"


@dataclass(frozen=True)
class Setup:
    """Everything that is settled before the first step. coverage: share of the train labels inside the draft vocabulary.
    left_out: numbers of the samples that are not read; None if one that cannot be read is an error.

    warm: what this start took from another drafter; a resumed run takes nothing, its checkpoint holds all weights.
    """

    recipe: Recipe
    world: World
    shards: ShardSet
    left_out: frozenset[int] | None
    schedule: Schedule
    objective: Objective
    engine: Any
    ema: Average | None
    checkpoints: Checkpoints
    train_digest: str
    coverage: float
    warm: WarmReport | None

    @property
    def drafter(self) -> Drafter:
        return self.objective.drafter


def train(recipe: Recipe, control: Control) -> dict[str, Any]:
    """Trains `recipe.train` on this rank, continuing from the newest checkpoint.

    Raises ConfigError if the data or the target do not fit the drafter or another training uses the run folder, KvshotError on a loss that is not
    finite, Preempted when asked to stop.
    """
    world = connect(recipe.train.threads_per_rank, max(30, 2 * recipe.train.hang_minutes))
    control.join(world)
    with ExitStack() as held:

        def alone() -> None:
            told_by_first(world, lambda: held.enter_context(sole_writer(recipe.run_dir, "training", _ENDING)))

        setup = prepare(recipe, world, control.beat, alone)
        progress = setup.checkpoints.load(setup.engine, setup.schedule, setup.ema, setup.train_digest)
        if world.rank == 0:
            _announce(setup, progress.step)
        with control.during("step"):
            progress = run_steps(setup, progress, control)
            with control.during("export"):
                summary = finish(setup, progress)
    release(setup.engine)
    return summary


def finished(recipe: Recipe) -> dict[str, Any] | None:
    """train.json of a complete run of this very recipe, else None. Raises ConfigError if the folder holds another one."""
    stamped = recipe.run_dir / "provenance.json"
    if not stamped.is_file():
        return None
    summary = recipe.run_dir / "train.json"
    if not summary.is_file() and not checkpoint.exists(recipe.run_dir / "checkpoints"):
        return None  # nothing was trained yet: the folder is free for any configuration
    load_geometry(recipe.target.path, recipe.target.trust_remote_code)  # says what is wrong with the folder, if anything is
    before = read_object(stamped)
    shards = ShardSet.open(recipe.shards_dir, "train", look=False)
    wanted, found = run_digest(recipe, shards, _taken(recipe, before.get("warm_digest", ""))), before.get("train_digest")
    if found != wanted:
        changed = (
            "; ".join(_changed(load_recipe(recipe.run_dir / "recipe.yaml"), recipe)) or "the data, the target, the ds_config file, or the version that wrote it"
        )
        raise ConfigError(f"{recipe.run_dir} holds a run of another configuration ({changed}); give this run another name")
    return read_object(summary) if summary.is_file() else None


def _changed(before: Recipe, now: Recipe) -> list[str]:
    """The training options that differ."""
    there, here = (trackers.options(r.train) for r in (before, now))
    return [f"train.{key}: there {there.get(key)}, now {here.get(key)}" for key in {**there, **here} if there.get(key) != here.get(key)]


def _taken(recipe: Recipe, before: str) -> str:
    """Digest of the weights that the warm start takes. before: of those that the run took when it began; its source may be gone by now. Another folder
    than then counts by what lies there, so that one folder may be spelled in two ways."""
    start = recipe.train.init.warm_start
    if start is None or start == load_recipe(recipe.run_dir / "recipe.yaml").train.init.warm_start:
        return before if start else ""
    return source_digest(start)


def run_digest(recipe: Recipe, shards: ShardSet, warm_digest: str) -> str:
    """Digest of all that shapes the trained weights: options, target (that of the features, with which `prepare` compares the folder), data, and what a
    warm start takes, wherever that lies."""
    options, target = recipe.train.shaping(), shards.manifest.target_digest
    if warm_digest:
        options["init"]["warm_start"] = None
    return digest(json.dumps(options, sort_keys=True), target, shards.digest, repr(ds_configs.load(recipe.train.ds_config)), warm_digest)


def prepare(recipe: Recipe, world: World, beat: Callable[[], None] = lambda: None, alone: Callable[[], None] = lambda: None) -> Setup:
    """Checks the data against the drafter, builds drafter, objective and engine. beat: called as it gets on; alone: before the run folder is used."""
    config = recipe.train
    trackers.require(config.trackers)
    ds_config = ds_configs.load(config.ds_config)
    dtype = precision(ds_config)
    shards = ShardSet.open(recipe.shards_dir, "train", look=False)
    geometry = load_geometry(recipe.target.path, recipe.target.trust_remote_code)
    drafter = build_drafter(config.drafter, geometry, config.draft_vocab_size)
    target_digest = told_by_first(world, lambda: weights_digest(recipe.target.path))
    require(shards.manifest, required_features(drafter, config.objective), target_digest)
    schedule = Schedule.of(config, shards, world.size)
    unreadable = left_out(shards, config, world, beat)

    counts = load_token_counts(recipe.shards_dir, geometry.vocab_size)
    parts = load_parts(recipe.target.path, world.device, dtype)
    beat()
    ids = choose_vocab(counts, config.draft_vocab_size)
    drafter.set_vocab(ids)
    drafter = drafter.to(world.device)  # initialised in fp32, on every rank alike
    initialise(drafter, config.init, parts, config.seed)
    alone()
    checkpoints = Checkpoints(recipe, world, beat)
    fresh = checkpoints.found is None
    warm = warm_start(drafter, config.init.warm_start, config.init.tensors, target_digest) if config.init.warm_start and fresh else None
    drafter.bind(parts.embedding, parts.head)
    equip(drafter.to(dtype), config, ds_config, schedule.steps)
    objective = objective_for(drafter, config.objective, shards.manifest.spec, parts)
    if config.shard_frozen:
        objective.share_frozen()
    beat()
    engine = make_engine(objective, config, checkpoints.options(ds_config), schedule.accumulation, schedule.steps)
    beat()
    stamped = recipe.run_dir / "provenance.json"
    before = read_object(stamped) if stamped.is_file() and not fresh else {}
    warm_digest = warm.digest if warm else before.get("warm_digest", "")
    train_digest = run_digest(recipe, shards, warm_digest)
    if world.rank == 0 and not before:
        stamp(recipe.run_dir, recipe, train_digest=train_digest, warm_digest=warm_digest, warm_start=warm.to_json() if warm else None)
    dist.barrier()
    ema = Average(drafter, config.optim.ema_decay, world) if config.optim.ema_decay else None
    coverage = float(counts[ids].sum() / counts.sum().clamp_min(1))
    return Setup(recipe, world, shards, unreadable, schedule, objective, engine, ema, checkpoints, train_digest, coverage, warm)


def equip(drafter: Drafter, config: TrainConfig, ds_config: dict[str, Any], steps: int) -> None:
    """Sets what changes how the drafter is trained and not what it is. Raises ConfigError if it does not fit the run of `steps`."""
    stage = ds_config.get("zero_optimization", {}).get("stage", 0)
    if config.shard_frozen and stage != 3:
        raise ConfigError(f"train.shard_frozen=true needs ZeRO stage 3, train.ds_config={config.ds_config} is stage {stage}; use zero3_fp32 or zero3_bf16")
    drafter.recompute = config.recompute
    gate = getattr(config.drafter, "gate", None)
    if gate is not None and gate.scheduled_steps >= steps:
        raise ConfigError(
            f"train.drafter.gate: its schedule of {gate.scheduled_steps} steps (open_steps + floor_steps) leaves nothing of the run of {steps} to the "
            f"gate itself; the drafter would be used with another gate than it was trained with"
        )
    for layer in drafter.draft_layers:
        if layer.cross_attn is not None:
            layer.cross_attn.kv_gradient_scale = config.objective.kv_gradient_scale
    if config.compile:
        if stage == 3:
            raise ConfigError("train.compile=true does not work with ZeRO stage 3, which gathers weights between the layer's parts; use stage 0, 1 or 2")
        drafter.compile_layers()


def run_steps(s: Setup, before: Progress, control: Control) -> Progress:
    """The optimizer steps that are left. Returns the progress of the whole run. Raises Preempted, after a checkpoint, when asked to stop."""
    config, world = s.recipe.train, s.world
    batches = step_batches(
        s.shards, ("tokens", "turn", *s.shards.manifest.spec.serving(s.objective.required_features())), s.schedule, world.rank, config.objective,
        before.step, config.data_workers, world.device.type == "cuda", s.left_out,
    )  # fmt: skip
    heldout = Heldout(s.recipe, world, s.engine, s.objective, before.step, control.beat) if config.eval_every else None
    bar = tqdm(total=s.schedule.steps, initial=before.step, unit="step", desc=s.recipe.name, disable=world.rank != 0, mininterval=2)
    with Board(s.recipe, world, before, s.schedule.steps) as board, bar, closing(batches), (clock := clock_of(s, before)).watch:
        meter = Meter(config.objective.steps, world.device, clock.watch)
        recent: dict[int, list[str]] = {}  # conversations of the steps since the last point
        if heldout is not None and before.step:
            owed = heldout.owed(before.step, before.step == s.schedule.steps)
            if owed and (why := look(heldout, board, bar, clock, control, before.step)):
                if control.out_of_time:  # as it would be at the next start, and the one after that
                    raise KvshotError(
                        f"{why} is over before the look at the held-out split that step {before.step} owes; raise it or lower train.eval_conversations"
                    )
                raise Preempted(f"{s.recipe.name}: stopped after step {before.step} of {s.schedule.steps} ({why}); the same command continues from there")
            if s.checkpoints.better(before.step):  # measured only now, or killed before that was noted
                export_best(s, before)
                s.checkpoints.found_is_best()
        for step in range(before.step + 1, s.schedule.steps + 1):
            last = step == s.schedule.steps
            measured = heldout is not None and heldout.due(step, last)
            logged = meter.looked_at = last or measured or step % config.log_every == 0 or step % config.checkpoint_every == 0
            control.beat(step)
            s.drafter.at_step(step - 1)
            micro_batches = clock.waiting(batches)
            optimizer_step(s, micro_batches, meter, step)
            recent[step] = [key for m in micro_batches for key in m.batch.keys]
            clock.count(micro_batches)
            bar.update()
            stop = control.agreed()
            if logged or stop:
                log_point(s, board, bar, meter, clock, step, recent)
                recent.clear()
                check_weights(s, step)
            more = not last
            if heldout is not None and measured:
                stop = look(heldout, board, bar, clock, control, step, stop)
                more = more or bool(stop)  # the look that was left
            s.checkpoints.settle()
            best = measured and s.checkpoints.better(step)
            if best or (more and (bool(stop) or step % config.checkpoint_every == 0)):
                with control.during("save"), clock.apart():
                    if best:
                        export_best(s, clock.progress(step))
                    s.checkpoints.save(clock.progress(step), best)
                stop = stop or control.agreed(now=True)  # asked while it was saved: this checkpoint is the one to leave
            if stop or last:
                with control.during("save"):
                    s.checkpoints.settle(wait=True)
            if stop and more:
                raise Preempted(f"{s.recipe.name}: stopped after step {step} of {s.schedule.steps} ({stop}); the same command continues from there")
    return clock.progress(s.schedule.steps)


def optimizer_step(s: Setup, micro_batches: list[MicroBatch], meter: Meter, step: int) -> None:
    """Forward and backward of each micro-batch, then one update, without waiting for the device.

    The loss is normalised by the supervised rows of all ranks and micro-steps, whatever their distribution; DeepSpeed
    divides by ranks and by the micro-steps that it was told of, which is multiplied back here. Steps may differ in their number.
    """
    device, dtype = s.world.device, s.drafter.norm.weight.dtype
    rows = torch.full((1,), float(sum(m.plan.supervised for m in micro_batches if m.counted)), device=device)
    with meter.time("forward"):
        dist.all_reduce(rows)
    normaliser = rows.clamp_min(1) / (s.world.size * s.engine.gradient_accumulation_steps())
    for number, micro in enumerate(micro_batches, 1):
        plan = micro.plan.to(device)
        s.engine.set_gradient_accumulation_boundary(number == len(micro_batches))
        with meter.time("forward"):
            out = s.engine(micro.batch.to(device, dtype), plan, normaliser)
        with meter.time("backward"):
            s.engine.backward(out.loss if micro.counted else out.loss * 0)
        if number == len(micro_batches):
            meter.before_update(s.drafter, s.engine)
        with meter.time("optimizer"):
            s.engine.step()
        meter.add(out, plan, normaliser, micro.counted, step)
    if s.engine.skipped_steps:
        keys = ", ".join(key for m in micro_batches for key in m.batch.keys)
        raise KvshotError(f"the gradient is not finite at step {step} (conversations of this rank: {keys}), and DeepSpeed left the step out; {_LOWER}")
    if s.ema is not None:
        s.ema.update()


def log_point(s: Setup, board: Board, bar: Any, meter: Meter, clock: Clock, step: int, recent: dict[int, list[str]]) -> None:
    """One TensorBoard point and the console's figures. The only place in the loop that waits for the device.

    Raises KvshotError if the loss is not finite.
    """
    scalars = training_scalars(*meter.read()) | clock.rates()
    bad = meter.first_not_finite()
    if bad is not None:
        raise KvshotError(
            f"the loss is not finite at step {bad} (conversations of this step: {', '.join(recent[bad])}); the last good checkpoint stays in "
            f"{s.recipe.run_dir / 'checkpoints'}; {_LOWER}"
        )
    gate, histogram = gate_points(s.drafter)
    scalars |= meter.optimizer(s.engine.get_global_grad_norm()) | gate | memory(s.world.device) | {"train/epoch": step / s.schedule.steps_per_epoch}
    board.scalars(scalars, step)
    board.histogram("gate", histogram, step)
    shown = (("loss {:.3f}", "train/loss"), ("a0 {:.3f}", "train/accept_top1/0"), ("MAT {:.2f}", "train/mat"), ("{:.0f} tok/s", "train/tokens_per_s"))
    bar.set_postfix_str("  ".join(text.format(scalars[tag]) for text, tag in shown if tag in scalars))


def look(heldout: Heldout, board: Board, bar: Any, clock: Clock, control: Control, step: int, stop: str = "") -> str:
    """Measures the held-out split after `step`, unless the run is to stop: then it returns why, and the next start measures. All ranks call it."""
    with control.during("evaluation"), clock.apart():
        found = stop or heldout.look(step, control)
    if isinstance(found, str):
        bar.write(f"{heldout.recipe.name}: the look at the held-out split after step {step} was left ({found})")
        return found
    board.scalars(found, step)
    return ""


def clock_of(s: Setup, before: Progress) -> Clock:
    """The run's clock, which knows what a step costs."""
    config = s.recipe.train
    price, ds_config = cost(config.drafter, s.drafter.g, config.draft_vocab_size), ds_configs.load(config.ds_config)
    trained, frozen = ([getattr(p, "ds_numel", p.numel()) for p in s.objective.parameters() if p.requires_grad is kind] for kind in (True, False))
    return Clock(before, s.world.device, Workload(
        flops=lambda lengths, rows: step_flops(price, config.objective.steps, lengths, rows),
        sent=lambda micro_batches: bytes_per_step(ds_config, trained, s.world.size, micro_batches, frozen),
        peak=peak_flops(config.peak_tflops, s.world.device),
    ))  # fmt: skip


def check_weights(s: Setup, step: int) -> None:
    """Raises KvshotError if the update of `step` left weights that are not finite, before anything is written from them."""
    mine = [getattr(p, "ds_tensor", p).detach() for p in s.drafter.parameters()]  # under ZeRO-3, this rank's share
    if not bool(torch.stack([w.float().sum().isfinite() for w in mine]).all()):
        raise KvshotError(f"the weights are not finite after step {step}; the last good checkpoint stays in {s.recipe.run_dir / 'checkpoints'}; {_LOWER}")


def _announce(s: Setup, first: int) -> None:
    for note in s.checkpoints.notes:
        print(f"{s.recipe.name}: {note}")
    for line in s.warm.lines() if s.warm else ():
        print(f"{s.recipe.name}: {line}")
    if s.schedule.idle:
        idle = f"{s.schedule.idle:.0%} of their places stay empty"
        print(f"{s.recipe.name}: {s.world.size} rank(s) do not divide a step's {s.schedule.per_step} conversations: {idle}")
    if s.recipe.train.max_steps > s.schedule.steps:
        print(f"{s.recipe.name}: train.epochs={s.recipe.train.epochs} end after {s.schedule.steps} steps, before train.max_steps={s.recipe.train.max_steps}")
    if first:
        print(f"{s.recipe.name}: continuing after step {first} of {s.schedule.steps}")
    print(
        f"{s.recipe.name}: {s.schedule.steps} steps of {s.schedule.per_step} conversations on {s.world.size} rank(s), "
        f"{len(s.schedule.usable)} of {len(s.schedule.among)} conversations have supervised rows, draft vocabulary covers {s.coverage:.1%} of the labels"
    )
