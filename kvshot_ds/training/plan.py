"""What training will take, before it is run: steps, FLOPs and hours, memory of a rank by part, bytes sent. From shapes alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import ds_configs
from kvshot_ds.config import Recipe
from kvshot_ds.drafters.cost import Cost, cost, total
from kvshot_ds.errors import ConfigError
from kvshot_ds.features.manifest import Manifest
from kvshot_ds.features.plan import Guess, aligned, conversations
from kvshot_ds.features.shard import ShardSet
from kvshot_ds.features.spec import FeatureSpec
from kvshot_ds.geometry import Geometry
from kvshot_ds.training.account import Account, account
from kvshot_ds.training.schedule import Schedule, chosen
from kvshot_ds.training.traffic import bytes_per_step

_PER_NODE = 8  # ranks of a node, for DeepSpeed's estimates


def step_flops(cost: Cost, steps: int, lengths: Sequence[int], rows: Sequence[int]) -> float:
    """FLOPs of forward and backward over conversations of `lengths` tokens, with `rows` supervised rows each, as cost.py counts them.

    In a document of L tokens the average query sees L/2: attention is linear in the context, so the average is all it takes.
    steps: draft steps K. Rows whose answer ends before their last step count in full, which is a few per thousand too much.
    """
    start, one_more = (total(cost.training(steps, context)) for context in (0, 1))
    unit, position = one_more.unit - start.unit, one_more.position - start.position
    pairs = zip(lengths, rows, strict=True)
    return sum(n * (start.unit + unit * length / 2) + length * (start.position + position * length / 2) for length, n in pairs)


@dataclass(frozen=True)
class Hardware:
    """ranks; of each, its peak [TFLOP/s] and the share of it that is reached (model FLOPs utilisation); on_cpu: the ranks compute on CPUs."""

    ranks: int
    tflops: float
    mfu: float
    on_cpu: bool


@dataclass(frozen=True)
class Plan:
    """A run of `recipe` on `hardware` over conversations of the given (tokens, teacher rows), captured as `spec` says."""

    recipe: Recipe
    name: str
    g: Geometry
    spec: FeatureSpec
    sizes: tuple[tuple[int, int], ...]
    hardware: Hardware

    @cached_property
    def ds_config(self) -> dict[str, Any]:
        return ds_configs.load(self.recipe.train.ds_config)

    @cached_property
    def cost(self) -> Cost:
        return cost(self.recipe.train.drafter, self.g, self.recipe.train.draft_vocab_size)

    @cached_property
    def schedule(self) -> Schedule:
        t = self.recipe.train
        return Schedule(
            self.sizes, t.conversations_per_step, t.conversations_per_micro_batch, self.hardware.ranks, t.epochs, t.max_steps, t.seed,
            budget=t.tokens_per_micro_batch,
        )  # fmt: skip

    @cached_property
    def account(self) -> Account:
        return account(self.recipe.train, self.ds_config, self.g, self.spec, self.sizes, self.hardware.ranks, self.schedule.accumulation, self.hardware.on_cpu)

    @cached_property
    def flops(self) -> float:
        """Of the whole run, over all ranks."""
        o, s = self.recipe.train.objective, self.schedule
        used = [self.sizes[i] for i in s.usable]
        rows = [min(o.anchors, rows) if o.anchors else max(1, round(rows * o.row_fraction)) for _, rows in used]
        epoch = step_flops(self.cost, o.steps, [tokens for tokens, _ in used], rows)
        return epoch * s.steps / s.steps_per_epoch

    @property
    def hours(self) -> float | None:
        """At the stated peak and utilisation; None without a peak."""
        h = self.hardware
        return self.flops / (h.ranks * h.tflops * 1e12 * h.mfu) / 3600 if h.tflops else None

    @property
    def sent(self) -> float:
        """Bytes that a rank sends in an optimizer step."""
        a = self.account
        return bytes_per_step(self.ds_config, a.trainable, self.hardware.ranks, self.schedule.accumulation, a.gathered_frozen)


def plan(recipe: Recipe, name: str, g: Geometry, guess: Guess | None, hardware: Hardware) -> Plan:
    """Over the captured conversations, the prepared ones if nothing is captured, or `guess`. Raises ConfigError if there is none of them."""
    spec, sizes = FeatureSpec.resolve(recipe.capture.features, g), None
    if guess:
        sizes = [(guess.tokens, round(guess.tokens * guess.supervised))] * guess.conversations
        sizes = sizes[: recipe.train.max_conversations or None]
    elif Manifest.path(recipe.shards_dir).is_file():
        shards = ShardSet.open(recipe.shards_dir, "train")
        among = chosen([sample.key for sample in shards.samples], recipe.train.max_conversations)
        spec, sizes = shards.manifest.spec, [(shards.samples[i].tokens, shards.samples[i].rows) for i in among]
    else:
        sizes = conversations(recipe.prepared_dir, "train", g)
        sizes = sizes[: recipe.train.max_conversations or None]
    if not any(rows for _, rows in sizes):
        raise ConfigError("kvshot plan train: no conversation has supervised rows; give --conversations and --tokens-per-conversation")
    return Plan(recipe, name, g, spec, tuple(sizes), hardware)


def lines(p: Plan) -> list[str]:
    """The plan as a person reads it."""
    t, s, h, a = p.recipe.train, p.schedule, p.hardware, p.account
    tokens = sum(tokens for tokens, _ in p.sizes)
    time = f", {p.hours:,.1f} hours at {h.mfu:.0%} of {h.tflops:g} TFLOP/s" if p.hours else "; --peak-tflops gives hours"
    return [
        f"target {p.name}; {t.drafter.family}, depth {t.drafter.depth}, draft vocabulary {t.draft_vocab_size:,}: "
        f"{p.cost.trainable / 1e6:,.1f} M trained parameters; {t.ds_config}, {h.ranks} rank(s)",
        f"{len(p.sizes):,} conversations, {tokens:,} tokens, the longest {max(tokens for tokens, _ in p.sizes):,}; {t.epochs} epoch(s)",
        f"{s.steps:,} optimizer steps of {s.per_step} conversations, at most {s.accumulation} forward(s) of a rank in each",
        f"{p.flops:,.3g} FLOPs in all{time}",
        f"{p.sent / 1e9:,.3f} GB sent by a rank in a step",
        "",
        *_memory(a),
        "",
        *_estimates(p),
    ]


def _memory(a: Account) -> list[str]:
    parts = {part: [sum(sizes)] if a.on_cpu else list(sizes) for part, sizes in a.peak.items() if any(sizes)}
    parts["total"] = [sum(column) for column in zip(*parts.values(), strict=True)]
    where = "while the weights are updated" if a.peak is a.update else f"in the forward and backward pass of {a.tokens:,} tokens"
    return [
        f"memory of a rank at its most, {where} [MiB]; without Python, libraries, CUDA's own and fragmentation",
        *aligned([["", *(["CPU"] if a.on_cpu else ["accelerator", "host"])], *([part, *map(mib, sizes)] for part, sizes in parts.items())]),
    ]


def _estimates(p: Plan) -> list[str]:
    """DeepSpeed's own figures for ZeRO-2 and ZeRO-3, whose weights are always 16 bits wide and which know nothing of activations, features and frozen parts."""
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    a, nodes = p.account, -(-p.hardware.ranks // _PER_NODE)
    each, offload = -(-p.hardware.ranks // nodes), a.zero.offload_optimizer
    if a.zero.stage == 3:
        host, device, _ = estimate_zero3_model_states_mem_needs(sum(a.trainable), max(a.trainable), each, nodes, offload, a.zero.offload_param)
    elif a.zero.stage:
        host, device = estimate_zero2_model_states_mem_needs(sum(a.trainable), each, nodes, offload)
    else:
        return ["DeepSpeed has no estimate for ZeRO-0"]
    return [f"DeepSpeed's own estimate of weights, gradients and optimizer alone: {mib(device)} MiB of a rank, {mib(host)} MiB of a host of {each} rank(s)"]


def mib(n: float) -> str:
    """Bytes as MiB, in whole numbers."""
    return f"{n / (1 << 20):,.0f}"
