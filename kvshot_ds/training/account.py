"""The memory of one rank, part by part, as trainer and DeepSpeed (0.19) lay it out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvshot_ds.config import TrainConfig
from kvshot_ds.drafters.cost import weightless
from kvshot_ds.errors import ConfigError
from kvshot_ds.features.batch import Batch
from kvshot_ds.features.codec import stored_tensors
from kvshot_ds.features.spec import FeatureSpec
from kvshot_ds.geometry import Geometry
from kvshot_ds.objectives.objective import required_features
from kvshot_ds.training.loader import AHEAD
from kvshot_ds.training.memory import Gradients, micro_batch, pass_bytes

Parts = dict[str, tuple[float, float]]  # part -> bytes where the rank computes, bytes of its host's memory


@dataclass(frozen=True)
class Zero:
    """What of a DeepSpeed configuration decides memory. item: bytes of a weight. kept: bytes of an element of a gradient that is kept between forwards.
    bucket: elements."""

    stage: int
    item: int
    kept: int
    bucket: int
    buckets: int
    offload_optimizer: bool
    offload_param: bool

    @classmethod
    def of(cls, config: dict[str, Any]) -> Zero:
        zero, item = config.get("zero_optimization", {}), 2 if config.get("bf16", {}).get("enabled") else 4
        stage = int(zero.get("stage", 0))
        kept = 4 if config.get("data_types", {}).get("grad_accum_dtype") == "fp32" else item
        optimizer, param = (((zero.get(name) or {}).get("device", "none")) != "none" for name in ("offload_optimizer", "offload_param"))
        double = stage in (1, 2) and bool(zero.get("overlap_comm"))
        return cls(stage, item, kept, int(zero.get("reduce_bucket_size", 500_000_000)), 1 + double, optimizer, param)

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.item == 2 else torch.float32


@dataclass(frozen=True)
class Account:
    """forward: in the pass, at its most; update: in the optimizer's step. trainable: elements of each trained parameter; gathered_frozen: of each frozen
    tensor that is shared over the ranks. tokens: of the largest micro-batch."""

    zero: Zero
    on_cpu: bool
    trainable: tuple[int, ...]
    gathered_frozen: tuple[int, ...]
    tokens: int
    forward: Parts
    update: Parts

    @property
    def peak(self) -> Parts:
        """The larger of both: where the rank computes, or, on a CPU, in all."""

        def size(parts: Parts) -> float:
            return sum(device + host * self.on_cpu for device, host in parts.values())

        return max(self.forward, self.update, key=size)

    @property
    def bytes(self) -> float:
        return sum(device + host * self.on_cpu for device, host in self.peak.values())


def account(
    config: TrainConfig, ds_config: dict[str, Any], g: Geometry, spec: FeatureSpec, sizes: Sequence[tuple[int, int]], world: int, accumulation: int,
    on_cpu: bool,
) -> Account:  # fmt: skip
    """sizes: (tokens, teacher rows) of all conversations. accumulation: the most forwards of a rank in a step."""
    zero = Zero.of(ds_config)
    drafter = weightless(config.drafter, g, config.draft_vocab_size)
    matrices, vectors = ([p.numel() for p in drafter.parameters() if (p.ndim >= 2) == wide] for wide in (True, False))
    trainable = (*matrices, *vectors)
    p, share = sum(trainable), -(-sum(trainable) // world)
    owned = max(sum(_owned(group, world, rank) for group in (matrices, vectors)) for rank in {0, world - 1})
    largest = _largest(config, sizes)
    batch, plan = micro_batch(config, g, spec, largest)
    # A CPU gives memory to a buffer where it is written, an accelerator all of it at once.
    filled = min(zero.bucket, p) if on_cpu else zero.bucket

    allocated = filled * zero.buckets if zero.stage == 2 else 0  # stage 3 made its bucket before
    kept = owned if zero.stage == 2 and not zero.offload_optimizer else 0
    gradients = Gradients(zero.stage, zero.bucket, allocated, kept, world)
    most, left = pass_bytes(config, g, batch, plan, zero.dtype, on_cpu, gradients)
    frozen = _frozen(config, g, spec, drafter.lm_head is not None)
    if config.shard_frozen and zero.stage != 3:
        raise ConfigError(f"train.shard_frozen=true needs ZeRO stage 3, train.ds_config={config.ds_config} is stage {zero.stage}")
    sharded = config.shard_frozen
    held = _held(config, zero, p, share, filled, max(trainable), accumulation)
    # Shared ones are gathered where they are used: the embedding before there are activations, the head when there are most.
    whole = sum(frozen) / world + max(frozen[1], frozen[0] - most / zero.item) if sharded else sum(frozen)
    held["frozen embedding and head"] = (whole * zero.item + 9 * g.vocab_size + 8 * config.draft_vocab_size, 0)
    held |= _features(config, g, spec, batch, zero, sizes, world, on_cpu)
    before = left if accumulation > 1 else 0  # gradients of the forwards before
    gathered: Parts = {"weights gathered by ZeRO-3": (p * zero.item, 0)} if zero.stage == 3 else {}
    forward = held | gathered | {"activations, gradients and buckets of the pass": (most, 0), "gradients of earlier passes of the step": (before, 0)}
    return Account(
        zero, on_cpu, trainable, tuple(frozen) if sharded else (), sum(tokens for tokens, _ in largest),
        forward, held | {"gradients": (left, 0)} | _update(zero, p, share, max(trainable), filled, on_cpu),
    )  # fmt: skip


def _owned(group: Sequence[int], world: int, rank: int) -> int:
    """Elements of the parameters that lie, at least in part, in the share of `rank` of a flat buffer."""
    share, at, found = -(-sum(group) // world), 0, 0
    for n in group:
        if at < (rank + 1) * share and at + n > rank * share:
            found += n
        at += n
    return found


def _largest(config: TrainConfig, sizes: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Conversations of the largest forward there can be: the longest ones."""
    longest = sorted(sizes, reverse=True)
    if not config.tokens_per_micro_batch:
        return longest[: config.conversations_per_micro_batch]
    taken, room = longest[:1], config.tokens_per_micro_batch - longest[0][0]
    for size in longest[1 : config.conversations_per_step]:
        if size[0] <= room:
            taken, room = [*taken, size], room - size[0]
    return taken


def _frozen(config: TrainConfig, g: Geometry, spec: FeatureSpec, own_head: bool) -> list[int]:
    """Elements of the target's embedding, and of the head rows that a drafter without a head proposes from or that make the teacher."""
    head = config.draft_vocab_size * g.hidden_size if not own_head or spec.teacher != "top_k" else 0
    return [g.vocab_size * g.hidden_size, head]


def _held(config: TrainConfig, zero: Zero, p: int, share: int, filled: int, largest: int, accumulation: int) -> Parts:
    """What is there all the time: p trained elements, of which a rank owns `share`; `largest` of one tensor."""

    def at(size: float, host: bool) -> tuple[float, float]:
        return (0, size) if host else (size, 0)

    part = p if zero.stage == 0 else share
    own_masters = zero.item == 2 or zero.stage in (1, 2) or zero.offload_optimizer  # otherwise the weights are the masters
    parts: Parts = {
        "weights": at((share if zero.stage == 3 else p) * zero.item, zero.offload_param),
        "fp32 masters": at(4 * part * own_masters, zero.offload_optimizer),
        "two moments of Adam": at(8 * part, zero.offload_optimizer),
    }
    if zero.offload_optimizer:
        # fp32 gradients of the update, and stage 3 those of the passes; stage 2 the new weights and, on both sides, one gradient on its way
        beside, moved = (share * zero.kept, 0) if zero.stage == 3 else (share * (zero.item + 4 * (accumulation > 1)), largest * zero.item)
        parts["gradients and buffers of the offload"] = (moved, 4 * share + beside + moved)
    elif zero.stage == 3:
        parts["gradients of this rank's share"] = (share * zero.kept, 0)
    if zero.stage == 3:
        parts["DeepSpeed's bucket"] = (filled * zero.item, 0)
    if config.optim.ema_decay:
        parts["moving average"] = (4 * share, 0)
    return parts


def _features(
    config: TrainConfig, g: Geometry, spec: FeatureSpec, batch: Batch, zero: Zero, sizes: Sequence[tuple[int, int]], world: int, on_cpu: bool
) -> Parts:
    """Of the micro-batch at work, and of the steps read ahead, of average size."""
    needed = required_features(weightless(config.drafter, g, config.draft_vocab_size), config.objective)
    keys = spec.serving(needed)

    def stored(tokens: float, rows: float) -> float:
        shapes = stored_tensors(spec, g, 1000, 1000)
        size = {key: dtype.itemsize * torch.Size(shape).numel() / 1000 for key, (dtype, shape) in shapes.items()}
        return sum(n * (rows if key.startswith(("teacher", "query")) else tokens) for key, n in size.items() if key.removesuffix(".scale") in keys)

    tokens, rows = (sum(size[i] for size in sizes) / len(sizes) for i in (0, 1))
    steps = AHEAD * config.data_workers + 2 if config.data_workers else 1  # read, being read, and at work
    ahead = steps * config.conversations_per_step / world * (stored(tokens, rows) + 40 * tokens)
    moved = [*batch.hidden.values(), *batch.keys_of.values(), *batch.values_of.values(), *batch.queries_of.values(), batch.teacher_hidden]
    cast = sum(x.numel() * zero.item for x in moved if not on_cpu or x.dtype != zero.dtype)
    best = batch.topk_ids.numel() * 12 * (not on_cpu)
    return {"features at work": (cast + best, 0), "features read ahead": (0, ahead)}


def _update(zero: Zero, p: int, share: int, largest: int, filled: int, on_cpu: bool) -> Parts:
    """What the optimizer's step takes beside the gradients that are there: a flat copy of this rank's, and Adam's intermediate results."""
    if zero.stage == 0:
        flat, adam = (4 * p if zero.item == 2 else 0), 4 * (2 * largest if on_cpu else p)
    elif zero.offload_optimizer:
        flat, adam = 0, 8 * share * on_cpu  # beside a GPU, DeepSpeed's AdamW for CPUs works in place
    else:
        flat, adam = 4 * share + 2 * share * (zero.item == 2), 4 * share * (2 if on_cpu else 1)
    parts: Parts = {"flat gradients of the update": (flat, 0), "Adam's intermediate results": (0, adam) if zero.offload_optimizer else (adam, 0)}
    if zero.stage == 1:
        parts["DeepSpeed's bucket"] = (filled * zero.item * zero.buckets, 0)
    return parts
