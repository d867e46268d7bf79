"""The most memory that a forward and backward pass holds, found by running it on tensors without contents and counting what lives."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, replace
from typing import Any, TypeVar

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from kvshot_ds.config import TrainConfig
from kvshot_ds.drafters.cost import weightless
from kvshot_ds.features.batch import Batch, collate
from kvshot_ds.features.spec import FeatureSpec
from kvshot_ds.geometry import Geometry
from kvshot_ds.objectives.alignment import RowPlan, plan_rows
from kvshot_ds.objectives.objective import Objective, required_features

T = TypeVar("T", Batch, RowPlan)


class Live(TorchDispatchMode):
    """Bytes of the storages that operations make while it is entered, until they are freed: now, and at the most. What an operation uses inside
    itself is not seen; neither is what was there before."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: dict[int, int] = {}

    def _add(self, storage: torch.UntypedStorage, size: int) -> None:
        key = storage._cdata
        if key not in self._known:
            self._known[key] = size
            self.now += size
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self._free, key)

    def _free(self, key: int) -> None:
        self.now -= self._known.pop(key)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for given in _pytree.tree_leaves((args, kwargs)):
            if isinstance(given, torch.Tensor):
                self._add(given.untyped_storage(), 0)
        made = func(*args, **(kwargs or {}))
        for tensor in _pytree.tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                self._add(tensor.untyped_storage(), tensor.untyped_storage().nbytes())
        return made


class Gradients:
    """What DeepSpeed does with the gradients of a pass as they become ready, as far as it takes memory.

    Stages 2 and 3 copy them into a bucket, reduce it when it is full, and keep this rank's part. Stages 0 and 1 leave them as they are.
    """

    def __init__(self, stage: int, bucket: int, allocated: int, kept: int, world: int):
        """bucket: elements that it takes. allocated: elements that the first gradient allocates for buckets, and the first reduction for
        what is kept (`kept`); 0 where they are there already."""
        self.stage, self.limit, self.allocated, self.to_keep, self.world = stage, bucket, allocated, kept, world
        self.large: list[torch.Tensor] = []
        self.buckets: torch.Tensor | None = None
        self.kept: torch.Tensor | None = None
        self.elements = 0

    def watch(self, module: nn.Module) -> None:
        for parameter in module.parameters():
            if parameter.requires_grad and self.stage >= 2:
                parameter.register_post_accumulate_grad_hook(self._ready)

    def _ready(self, p: torch.Tensor) -> None:
        assert p.grad is not None
        self.buckets = p.new_empty(self.allocated) if self.buckets is None else self.buckets
        if self.elements + p.numel() > self.limit:
            self.reduce()
        if p.numel() > self.limit:  # goes as it is
            self.large.append(p.grad)
        p.grad = None
        self.elements += p.numel()

    def reduce(self) -> None:
        """What several ranks own parts of is joined into one tensor for the collective; stage 3 does so always."""
        if self.buckets is None or not self.elements:
            return
        joined = self.buckets.new_empty(self.elements if self.world > 1 or self.stage == 3 else 0)
        if self.kept is None:
            self.kept = self.buckets.new_empty(self.to_keep)
        del joined
        self.large.clear()
        self.elements = 0

    def done(self) -> None:
        self.reduce()
        self.buckets = None


def shadow(config: TrainConfig, g: Geometry, dtype: torch.dtype, device: str) -> Objective:
    """The objective of `config` without contents: trained in `dtype`, on "meta" or, inside of a FakeTensorMode, on "cpu"."""
    drafter = weightless(config.drafter, g, config.draft_vocab_size)
    for module in drafter.modules():
        for name, value in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(torch.empty(value.shape, dtype=dtype, device=device), value.requires_grad))
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, torch.empty(buffer.shape, dtype=buffer.dtype, device=device))
    drafter.rotary._inv_freq = {device: torch.empty(drafter.rotary._inv_freq["cpu"].shape, device=device)}
    drafter.recompute = config.recompute
    for layer in drafter.draft_layers:
        if layer.cross_attn is not None:
            layer.cross_attn.kv_gradient_scale = config.objective.kv_gradient_scale
    drafter.at_step(0)
    embedding = torch.empty(g.vocab_size, g.hidden_size, dtype=dtype, device=device)
    drafter.bind(embedding, embedding)
    return Objective(drafter, config.objective, embedding, embedding[0])


def micro_batch(config: TrainConfig, g: Geometry, captured: FeatureSpec, conversations: Sequence[tuple[int, int]]) -> tuple[Batch, RowPlan]:
    """Conversations of (tokens, teacher rows), of each the last part an answer; features, as `captured` stores them, on the meta device."""
    needed = required_features(weightless(config.drafter, g, config.draft_vocab_size), config.objective)
    keys = captured.serving(needed)
    samples = []
    for number, (tokens, rows) in enumerate(conversations):
        turn = (torch.arange(tokens) >= tokens - rows - 1).int()
        shapes = captured.shapes(g, tokens, rows)
        features = {key: torch.empty(shapes[key], dtype=captured.dtype(key), device="meta") for key in keys}
        samples.append((str(number), {"tokens": torch.zeros_like(turn), "turn": turn} | features))
    batch, o = collate(samples), config.objective
    return batch, plan_rows(batch, o.steps, o.row_fraction, config.seed, o.anchors, o.drift == "offline")


def _without_contents(value: T, dtype: torch.dtype, device: str) -> T:
    """The tensors of a batch or a plan, as empty ones on `device`; features, but not topk_logp and teacher_lse, in `dtype`."""

    def empty(name: str, x: torch.Tensor) -> torch.Tensor:
        feature = x.is_floating_point() and name not in ("topk_logp", "teacher_lse")
        return torch.empty(x.shape, dtype=dtype if feature else x.dtype, device=device)

    def moved(name: str, x: Any) -> Any:
        return {k: empty(name, v) for k, v in x.items()} if isinstance(x, dict) else empty(name, x) if isinstance(x, torch.Tensor) else x

    return replace(value, **{f.name: moved(f.name, getattr(value, f.name)) for f in fields(value)})


def pass_bytes(config: TrainConfig, g: Geometry, batch: Batch, plan: RowPlan, dtype: torch.dtype, cpu: bool, gradients: Gradients) -> tuple[int, int]:
    """The most bytes that forward and backward of one micro-batch hold beside weights, frozen parts and features: activations, gradients in the
    making, and what `gradients` does with them. And what is left of them when the pass is done.

    On a CPU, with its kernels; for an accelerator, with the portable attention, which takes a little more than a fused kernel.
    """
    device = "cpu" if cpu else "meta"
    mode: AbstractContextManager[Any] = FakeTensorMode() if cpu else nullcontext()
    with mode:
        objective = shadow(config, g, dtype, device)
        given, rows, one = _without_contents(batch, dtype, device), _without_contents(plan, dtype, device), torch.empty((), device=device)
        gradients.watch(objective)
        with Live() as live:
            loss = objective(given, rows, one).loss
            loss.backward()
            del loss
            gradients.done()
            return live.most, live.now
