"""Feature shards in, a trained drafter out. Reads top to bottom."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from tqdm import tqdm

import ds_configs
from kvshot_ds.config import Recipe, TrainConfig, dump_recipe, load_recipe
from kvshot_ds.drafters.base import Drafter
from kvshot_ds.drafters.build import DrafterInfo, build_drafter, save_drafter
from kvshot_ds.drafters.initial import choose_vocab, initialise
from kvshot_ds.drafters.warm import WarmReport, warm_start
from kvshot_ds.errors import ConfigError, KvshotError, Preempted
from kvshot_ds.features.manifest import load_token_counts, require
from kvshot_ds.features.shard import ShardSet
from kvshot_ds.files import read_json, write_json
from kvshot_ds.objectives.objective import Objective, objective_for, required_features
from kvshot_ds.provenance import digest, stamp
from kvshot_ds.target import load_geometry, load_parts, weights_digest
from kvshot_ds.training import checkpoint
from kvshot_ds.training.checkpoint import Progress
from kvshot_ds.training.control import Control
from kvshot_ds.training.engine import World, connect, make_engine, precision
from kvshot_ds.training.loader import MicroBatch, Schedule, chosen, step_batches
from kvshot_ds.training.watch import Board, Meter, gates, training_scalars

_LOWER = "try a lower train.optim.lr, under another name"


@dataclass(frozen=True)
class Setup:
    """Everything that is settled before the first step. coverage: share of the train labels inside the draft vocabulary.

    warm: what this start took from another drafter; a resumed run takes nothing, its checkpoint holds all weights.
    """

    recipe: Recipe
    world: World
    shards: ShardSet
    schedule: Schedule
    objective: Objective
    engine: Any
    coverage: float
    warm: WarmReport | None

    @property
    def drafter(self) -> Drafter:
        return self.objective.drafter


def train(recipe: Recipe) -> dict[str, Any]:
    """Trains `recipe.train` on this rank, continuing from the newest checkpoint.

    Raises ConfigError if the data or the target do not fit the drafter, KvshotError on a loss that is not finite, Preempted when asked to stop.
    """
    with Control(recipe.train) as control:
        world = connect(recipe.train.threads_per_rank)
        control.join(world)
        setup = prepare(recipe, world)
        progress = checkpoint.load(recipe.run_dir / "checkpoints", setup.engine)
        if world.rank == 0:
            _announce(setup, progress.step)
        progress = run_steps(setup, progress, control)
        with control.during("export"):
            return finish(setup, progress)


def finished(recipe: Recipe) -> dict[str, Any] | None:
    """train.json of a complete run of this very recipe, else None. Raises ConfigError if the folder holds another one."""
    stamped = recipe.run_dir / "provenance.json"
    if not stamped.is_file():
        return None
    summary = recipe.run_dir / "train.json"
    if not summary.is_file() and not checkpoint.exists(recipe.run_dir / "checkpoints"):
        return None  # nothing was trained yet: the folder is free for any configuration
    load_geometry(recipe.target.path, recipe.target.trust_remote_code)  # says what is wrong with the folder, if anything is
    before = read_json(stamped)
    shards, target_digest = ShardSet.open(recipe.shards_dir, "train"), weights_digest(recipe.target.path)
    # The source of a warm start may be gone by now; what was taken from it is not.
    wanted, found = run_digest(recipe, shards, target_digest, before.get("warm_digest", "")), before.get("train_digest")
    if found != wanted:
        changed = (
            "; ".join(_changed(load_recipe(recipe.run_dir / "recipe.yaml"), recipe)) or "the data, the target, the ds_config file, or the version that wrote it"
        )
        raise ConfigError(f"{recipe.run_dir} holds a run of another configuration ({changed}); give this run another name")
    return read_json(summary) if summary.is_file() else None


def _changed(before: Recipe, now: Recipe) -> list[str]:
    """The training options that differ."""

    def flat(value: Any, name: str) -> dict[str, Any]:
        return {k: v for key, inner in value.items() for k, v in flat(inner, f"{name}.{key}").items()} if isinstance(value, dict) else {name: value}

    there, here = (flat(r.train.shaping(), "train") for r in (before, now))
    return [f"{key}: there {there.get(key)}, now {here.get(key)}" for key in {**there, **here} if there.get(key) != here.get(key)]


def run_digest(recipe: Recipe, shards: ShardSet, target_digest: str, warm_digest: str) -> str:
    """Digest of all that shapes the trained weights: options, target, data, and the weights of a warm start."""
    return digest(json.dumps(recipe.train.shaping(), sort_keys=True), target_digest, shards.digest, repr(ds_configs.load(recipe.train.ds_config)), warm_digest)


def prepare(recipe: Recipe, world: World) -> Setup:
    """Checks the data against the drafter, builds drafter, objective and engine."""
    config = recipe.train
    ds_config = ds_configs.load(config.ds_config)
    dtype = precision(ds_config)
    shards = ShardSet.open(recipe.shards_dir, "train")
    geometry = load_geometry(recipe.target.path, recipe.target.trust_remote_code)
    drafter = build_drafter(config.drafter, geometry, config.draft_vocab_size)
    target_digest = weights_digest(recipe.target.path)
    require(shards.manifest, required_features(drafter, config.objective), target_digest)
    if config.verify_shards and world.rank == 0:
        shards.check_bytes()
    sizes = [(s.tokens, s.rows) for s in shards.samples]
    schedule = Schedule(
        sizes, config.conversations_per_step, config.conversations_per_micro_batch, world.size, config.epochs, config.max_steps, config.seed,
        chosen([sample.key for sample in shards.samples], config.max_conversations),
    )  # fmt: skip

    counts = load_token_counts(recipe.shards_dir, geometry.vocab_size)
    parts = load_parts(recipe.target.path, world.device, dtype)
    ids = choose_vocab(counts, config.draft_vocab_size)
    drafter.set_vocab(ids)
    drafter = drafter.to(world.device)  # initialised in fp32, on every rank alike
    initialise(drafter, config.init, parts, config.seed)
    fresh = not checkpoint.exists(recipe.run_dir / "checkpoints")
    warm = warm_start(drafter, config.init.warm_start, config.init.tensors, target_digest) if config.init.warm_start and fresh else None
    drafter.bind(parts.embedding, parts.head)
    equip(drafter.to(dtype), config, ds_config, schedule.steps)
    objective = objective_for(drafter, config.objective, shards.manifest.spec, parts)
    engine = make_engine(objective, config, ds_config, world, schedule.accumulation, schedule.steps)
    if world.rank == 0 and fresh:
        warm_digest = warm.digest if warm else ""
        train_digest = run_digest(recipe, shards, target_digest, warm_digest)
        stamp(recipe.run_dir, recipe, train_digest=train_digest, warm_digest=warm_digest, warm_start=warm.to_json() if warm else None)
    dist.barrier()
    return Setup(recipe, world, shards, schedule, objective, engine, float(counts[ids].sum() / counts.sum().clamp_min(1)), warm)


def equip(drafter: Drafter, config: TrainConfig, ds_config: dict[str, Any], steps: int) -> None:
    """Sets what changes how the drafter is trained and not what it is. Raises ConfigError if it does not fit the run of `steps`."""
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
        if ds_config.get("zero_optimization", {}).get("stage") == 3:
            raise ConfigError("train.compile=true does not work with ZeRO stage 3, which gathers weights between the layer's parts; use stage 0, 1 or 2")
        drafter.compile_layers()


def run_steps(s: Setup, before: Progress, control: Control) -> Progress:
    """The optimizer steps that are left. Returns the progress of the whole run. Raises Preempted, after a checkpoint, when asked to stop."""
    config, world, folder = s.recipe.train, s.world, s.recipe.run_dir
    batches = step_batches(
        s.shards, ("tokens", "turn", *s.shards.manifest.spec.serving(s.objective.required_features())), s.schedule, world.rank, config.objective,
        before.step, config.data_workers, pin=world.device.type == "cuda",
    )  # fmt: skip
    clock = Clock(before, world.device)
    bar = tqdm(total=s.schedule.steps, initial=before.step, unit="step", desc=s.recipe.name, disable=world.rank != 0, mininterval=2)
    with Board(folder / "tensorboard", world.rank, before.step + 1) as board, bar, closing(batches):
        board.text("recipe", dump_recipe(s.recipe))
        meter = Meter(config.objective.steps, world.device)
        recent: dict[int, list[str]] = {}  # conversations of the steps since the last point
        for step in range(before.step + 1, s.schedule.steps + 1):
            with control.during("step"):
                s.drafter.at_step(step - 1)
                micro_batches = clock.waiting(batches)
                optimizer_step(s, micro_batches, meter, step)
            recent[step] = [key for m in micro_batches for key in m.batch.keys]
            clock.count(micro_batches)
            bar.update()
            stop = control.agreed()
            last = step == s.schedule.steps
            due = not last and (bool(stop) or step % config.checkpoint_every == 0)
            if step % config.log_every == 0 or due or last:
                log_point(s, board, bar, meter, clock, step, recent)
                recent.clear()
            if due or last:
                check_weights(s, step)
            if due:
                with control.during("save"):
                    checkpoint.save(folder / "checkpoints", s.engine, clock.progress(step), world.rank, config.keep_checkpoints)
            if stop and not last:
                raise Preempted(f"{s.recipe.name}: stopped after step {step} of {s.schedule.steps} ({stop}); the same command continues from there")
    return clock.progress(s.schedule.steps)


class Clock:
    """Time, tokens and rows of a run, on the host; summed over ranks when read."""

    def __init__(self, before: Progress, device: torch.device):
        self.before, self.device, self.stall = before, device, 0.0
        self.started = self.point = time.monotonic()
        self.seen = torch.zeros(3, dtype=torch.int64)
        self.tokens_at_point = 0

    def waiting(self, batches: Iterator[list[MicroBatch]]) -> list[MicroBatch]:
        """The next step's micro-batches; the time this takes counts as stall."""
        asked = time.monotonic()
        step = next(batches)
        self.stall += time.monotonic() - asked
        return step

    def count(self, micro_batches: list[MicroBatch]) -> None:
        for m in micro_batches:
            tokens = sum(m.batch.lengths)
            self.seen += torch.tensor([tokens, m.plan.supervised, 0] if m.counted else [0, 0, tokens])

    def reduced(self) -> list[int]:
        """[tokens, rows, padding tokens] of this start over all ranks. All ranks call it."""
        total = self.seen.to(self.device, copy=True)
        dist.all_reduce(total)
        return total.tolist()

    def rates(self) -> dict[str, float]:
        """Tokens/s and stall share since the last reading."""
        now, tokens = time.monotonic(), self.reduced()[0]
        elapsed = max(now - self.point, 1e-9)
        out = {"train/tokens_per_s": (tokens - self.tokens_at_point) / elapsed, "train/data_stall_share": self.stall / elapsed}
        self.point, self.stall, self.tokens_at_point = now, 0.0, tokens
        return out

    def progress(self, step: int) -> Progress:
        tokens, rows, padding = self.reduced()
        b = self.before
        seconds = b.seconds + time.monotonic() - self.started
        return Progress(step, seconds, b.tokens + tokens, b.supervised_rows + rows, b.padding + padding, b.resumed_from)


def optimizer_step(s: Setup, micro_batches: list[MicroBatch], meter: Meter, step: int) -> None:
    """Forward and backward of each micro-batch, then one update, without waiting for the device.

    The loss is normalised by the supervised rows of all ranks and micro-steps, whatever their distribution; DeepSpeed
    divides by ranks and by the micro-steps that it was told of, which is multiplied back here. Steps may differ in their number.
    """
    device, dtype = s.world.device, s.drafter.norm.weight.dtype
    rows = torch.full((1,), float(sum(m.plan.supervised for m in micro_batches if m.counted)), device=device)
    dist.all_reduce(rows)
    normaliser = rows.clamp_min(1) / (s.world.size * s.engine.gradient_accumulation_steps())
    for number, micro in enumerate(micro_batches, 1):
        plan = micro.plan.to(device)
        s.engine.set_gradient_accumulation_boundary(number == len(micro_batches))
        out = s.engine(micro.batch.to(device, dtype), plan, normaliser)
        s.engine.backward(out.loss if micro.counted else out.loss * 0)
        s.engine.step()
        meter.add(out, plan, normaliser, micro.counted, step)


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
    norm = s.engine.get_global_grad_norm()
    scalars |= {"train/lr": float(s.engine.get_lr()[0]), "train/grad_norm": float(norm or 0.0)}
    gate = [g.float().flatten() for g in gates(s.drafter)]
    if gate:
        values = torch.cat(gate)
        scalars |= {"gate/mean": float(values.mean()), "gate/share_below_0.05": float((values < 0.05).float().mean())}
    board.scalars(scalars, step)
    bar.set_postfix_str(
        f"loss {scalars['train/loss']:.3f}  a0 {scalars['train/accept_top1/0']:.3f}  MAT {scalars['train/mat']:.2f}  {scalars['train/tokens_per_s']:.0f} tok/s"
    )


def check_weights(s: Setup, step: int) -> None:
    """Raises KvshotError if the update of `step` left weights that are not finite, before anything is written from them."""
    mine = [getattr(p, "ds_tensor", p).detach() for p in s.drafter.parameters()]  # under ZeRO-3, this rank's share
    if not bool(torch.stack([w.float().sum().isfinite() for w in mine]).all()):
        raise KvshotError(f"the weights are not finite after step {step}; the last good checkpoint stays in {s.recipe.run_dir / 'checkpoints'}; {_LOWER}")


def finish(s: Setup, progress: Progress) -> dict[str, Any]:
    """Exports the drafter and writes train.json, last."""
    config, folder = s.recipe.train, s.recipe.run_dir
    trainable = sum(getattr(p, "ds_numel", p.numel()) for p in s.drafter.parameters())
    summary = {
        "status": "complete",
        "steps": progress.step,
        "seconds": progress.seconds,
        "tokens": progress.tokens,
        "supervised_rows": progress.supervised_rows,
        "parameters": {"trainable": trainable},
        "draft_vocab_size": config.draft_vocab_size,
        "draft_vocab_coverage": s.coverage,
        "init": config.init.model_dump(mode="json"),
        "warm_start": read_json(folder / "provenance.json").get("warm_start"),  # of the first start
        "padding_share": progress.padding_share,
        "world_size": s.world.size,
        "resumed_from": list(progress.resumed_from),
    }
    info = DrafterInfo(
        config.drafter, s.drafter.g, config.draft_vocab_size, s.shards.manifest.target_name, s.shards.manifest.target_digest, {"training": summary}
    )
    with _whole(s.drafter):
        if s.world.rank == 0:
            save_drafter(folder / "drafter", s.drafter, info, s.drafter.norm.weight.dtype)
            write_json(folder / "train.json", summary)
            print(
                f"{s.recipe.name}: {progress.step} steps, {progress.supervised_rows} supervised rows, {progress.seconds:.0f} s, "
                f"padding {progress.padding_share:.1%}, "
                f"{trainable / 1e6:.1f} M parameters -> {folder / 'drafter'}"
            )
    dist.barrier()
    return summary


def _whole(drafter: Drafter) -> AbstractContextManager[Any]:
    """Under ZeRO-3, parameters gathered for the export; nothing to do otherwise."""
    parameters = list(drafter.parameters())
    if not any(hasattr(p, "ds_id") for p in parameters):
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(parameters)


def _announce(s: Setup, first: int) -> None:
    stale = checkpoint.sweep(s.recipe.run_dir / "checkpoints", first)
    if stale:
        print(f"{s.recipe.name}: dropped half-written checkpoint(s) {', '.join(stale)}")
    for line in s.warm.lines() if s.warm else ():
        print(f"{s.recipe.name}: {line}")
    if first:
        print(f"{s.recipe.name}: continuing after step {first} of {s.schedule.steps}")
    print(
        f"{s.recipe.name}: {s.schedule.steps} steps of {s.schedule.per_step} conversations on {s.world.size} rank(s), "
        f"{len(s.schedule.usable)} of {len(s.schedule.among)} conversations have supervised rows, draft vocabulary covers {s.coverage:.1%} of the labels"
    )
