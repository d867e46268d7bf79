"""What a drafter costs: parameters and FLOPs, found by running a narrow copy of it and counting what each module is given.

Counted are matrix products (2 FLOPs for each multiply-add) and attention; norms, rotations, activations and the gate's
element-wise part are not. Attention costs 4·A·D FLOPs for each pair of a query and a key it sees (scores and weighted
sum), and every query sees the whole context of C positions: in training on documents of C tokens the average is half.
Work that is done twice to save memory (recomputed layers, recomputed scores) counts once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import nn

from kvshot_ds.config import AnyDrafterConfig
from kvshot_ds.drafters.attention import Span
from kvshot_ds.drafters.base import Drafter
from kvshot_ds.drafters.build import build_drafter
from kvshot_ds.drafters.layer import LayerOutput
from kvshot_ds.drafters.layers import Projections, RMSNorm
from kvshot_ds.drafters.state import Rows, Start
from kvshot_ds.features.spec import FeatureSpec
from kvshot_ds.geometry import Geometry

_PARTS = {"fc": "fusion", "self_attn": "self", "cross_attn": "cross", "projector": "projector", "mix": "gate", "mlp": "mlp", "lm_head": "head"}
_PLAIN_ROPE = {"rope_type": "default", "rope_theta": 1e4}  # the frequencies do not matter here, and other kinds need a real device
GROUPS = (*_PARTS.values(), "norms", "other")  # other: the mask embedding of block-wise drafters


class Share(NamedTuple):
    """How many rows something is given: `position` for each position of the context, `row` at a row's first draft step, `step` at each later one."""

    position: int
    row: int
    step: int

    def over(self, steps: int) -> int:
        """Of one row over all `steps`."""
        return self.row + (steps - 1) * self.step


@dataclass(frozen=True)
class Gemm:
    """One matrix of weights `size`, applied to `given` rows. passes: products of a training step (forward, and the gradients that are needed)."""

    group: str
    size: int
    given: Share
    passes: int


@dataclass(frozen=True)
class Attention:
    """One attention of `width` = A·D. queries: as given. keys: seen by one query, with `position` for each position of the context."""

    width: int
    queries: Share
    keys: Share

    def of_position(self, context: int) -> int:
        """Pairs of query and key that one more position of the context makes."""
        return self.queries.position * (self.keys.position * context + self.keys.row)

    def of_row(self, steps: int, context: int) -> int:
        """Pairs of query and key of one row over all steps."""
        first, more = self.keys.position * context + self.keys.row, self.keys.step
        return self.queries.row * first + self.queries.step * sum(first + k * more for k in range(1, steps))


class Flops(NamedTuple):
    """unit: of one supervised row over all its steps (training), or of one proposed token (drafting). position: of each position of the context, once."""

    unit: float
    position: float


@dataclass(frozen=True)
class Cost:
    """parameters: trained ones by group. lent: the target's own, frozen. head_passes: as `Gemm.passes`. block: proposals of one
    forward, 0 if one a step. features: what it needs captured.
    """

    parameters: dict[str, int]
    lent: dict[str, int]
    gemms: tuple[Gemm, ...]
    attentions: tuple[Attention, ...]
    head_size: int
    head_passes: int
    block: int
    features: FeatureSpec

    @property
    def trainable(self) -> int:
        return sum(self.parameters.values())

    def training(self, steps: int, context: int) -> dict[str, Flops]:
        """Forward and backward, by group. teacher: the target's head over the draft vocabulary, once for each row, forward only.

        A row's step is scored once; auxiliary losses are not counted. A block has no more steps than masks.
        """
        steps = min(steps, self.block) if self.block else steps
        out = self._work(steps, context, training=True)
        out["head"] = Flops(2 * self.head_passes * self.head_size * steps, 0)
        out["teacher"] = Flops(2 * self.head_size, 0)
        return out

    def drafting(self, length: int, context: int) -> dict[str, Flops]:
        """Forward of a round, by group: of one of its proposals, and of each position committed before it.

        length: proposals of a round; a block makes as many as it has masks.
        """
        proposals = self.block or length
        out = {group: Flops(f.unit / proposals, f.position) for group, f in self._work(proposals, context, training=False).items()}
        out["head"] = Flops(2 * self.head_size, 0)
        return out

    def _work(self, steps: int, context: int, training: bool) -> dict[str, Flops]:
        unit, position = Counter[str](), Counter[str]()
        for gemm in self.gemms:
            each = 2 * gemm.size * (gemm.passes if training else 1)
            unit[gemm.group] += each * gemm.given.over(steps)
            position[gemm.group] += each * gemm.given.position
        for attention in self.attentions:
            each = 4 * attention.width * (3 if training else 1)
            unit["attention"] += each * attention.of_row(steps, context)
            position["attention"] += each * attention.of_position(context)
        return {group: Flops(unit[group], position[group]) for group in unit}


def total(work: dict[str, Flops]) -> Flops:
    """Sum over groups."""
    return Flops(sum(f.unit for f in work.values()), sum(f.position for f in work.values()))


def parameters(drafter: Drafter) -> dict[str, int]:
    """Trained parameters by group; every group of `GROUPS` is there."""
    out = dict.fromkeys(GROUPS, 0)
    for _, group, value in grouped(drafter):
        out[group] += value.numel()
    return out


def grouped(drafter: Drafter) -> Iterator[tuple[str, str, nn.Parameter]]:
    """Name, group and value of each parameter."""
    for path, module in drafter.named_modules():
        for name, value in module.named_parameters(prefix=path, recurse=False):
            yield name, "norms" if isinstance(module, RMSNorm) else _group(name), value


def _group(name: str) -> str:
    return next((_PARTS[part] for part in name.split(".") if part in _PARTS), "other")


def weightless(config: AnyDrafterConfig, g: Geometry, draft_vocab_size: int) -> Drafter:
    """The drafter that `config` describes, on the meta device: shapes alone. Its rotary frequencies are not the target's."""
    with torch.device("meta"):
        return build_drafter(config, replace(g, rope=_PLAIN_ROPE), draft_vocab_size)


def cost(config: AnyDrafterConfig, g: Geometry, draft_vocab_size: int) -> Cost:
    """The cost of the drafter that `config` describes. Weights are never allocated at its size. Raises ConfigError as `build_drafter` does."""
    drafter = weightless(config, g, draft_vocab_size)
    narrow = _narrow(config, g)
    runs = [_dry_run(narrow, positions, steps) for positions, steps in ((2, 1), (3, 1), (2, 2))]
    gemms, attentions = [], []
    for name, module in drafter.named_modules():
        if isinstance(module, nn.Linear) and name in runs[0].passes:
            gemms.append(Gemm(_group(name), module.weight.numel(), _share(*(seen.rows[name] for seen in runs)), runs[0].passes[name]))
        if isinstance(module, Projections):
            queries, keys = _share(*(seen.rows[f"{name}.q_proj"] for seen in runs)), _share(*(seen.keys[name] for seen in runs))
            attentions.append(Attention(module.q_proj.out_features, queries, keys))
    head, own = draft_vocab_size * g.hidden_size, drafter.lm_head is not None
    lent = {"embedding": g.vocab_size * g.hidden_size} | ({} if own else {"head": head})
    return Cost(
        parameters=parameters(drafter),
        lent=lent,
        gemms=tuple(gemms),
        attentions=tuple(attentions),
        head_size=head,
        head_passes=3 if own else 2,  # frozen rows need no gradient
        block=getattr(drafter, "block_size", 1) - 1,
        features=drafter.required_features(),
    )


def _narrow(config: AnyDrafterConfig, g: Geometry) -> Drafter:
    """The same modules, a few numbers wide, on the CPU: which rows a module is given does not depend on its width."""
    small = replace(g, hidden_size=16, heads=2, kv_heads=1, head_dim=8, intermediate_size=8, rope=_PLAIN_ROPE)
    drafter = build_drafter(config, small, 2)
    lent = torch.zeros(g.vocab_size, small.hidden_size)
    drafter.bind(lent, lent)
    return drafter


def _share(base: int, longer: int, twice: int) -> Share:
    """From the counts of one row over 2 positions and 1 step, over 3 positions and 1 step, over 2 positions and 2 steps."""
    position = longer - base
    return Share(position, base - 2 * position, twice - base)


@dataclass(frozen=True)
class _Seen:
    """What a dry run saw. rows: given to each Linear. passes: its products in training. keys: seen by a query of each attention at the last step."""

    rows: Counter[str]
    passes: dict[str, int]
    keys: dict[str, int]


def _dry_run(drafter: Drafter, positions: int, steps: int) -> _Seen:
    """Unrolls `drafter` for one row, anchored at the last of `positions`."""
    seen = _Seen(Counter(), {}, {})

    def linear(name: str) -> Callable[[nn.Linear, tuple[torch.Tensor], torch.Tensor], None]:
        def hook(module: nn.Linear, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
            seen.rows[name] += output.numel() // module.out_features
            seen.passes[name] = 1 + module.weight.requires_grad + inputs[0].requires_grad

        return hook

    def layer(name: str) -> Callable[[nn.Module, tuple[object, ...], LayerOutput], None]:
        def hook(module: nn.Module, inputs: tuple[object, ...], output: LayerOutput) -> None:
            for path, memory in (("self_attn", output.own), ("cross_attn", output.cross)):
                seen.keys[f"{name}.{path}"] = len(memory.steps) + (len(memory.prefix.k) if memory.prefix is not None else 0)

        return hook

    handles = [m.register_forward_hook(linear(name)) for name, m in drafter.named_modules() if isinstance(m, nn.Linear)]
    handles += [m.register_forward_hook(layer(f"layers.{i}")) for i, m in enumerate(drafter.layers)]
    try:
        with torch.enable_grad():
            drafter.unroll(_start(drafter, positions), torch.zeros(steps, 1, dtype=torch.int64))
    finally:
        for handle in handles:
            handle.remove()
    return seen


def _start(drafter: Drafter, positions: int) -> Start:
    """One row, anchored at the last position."""
    g, spec = drafter.g, drafter.required_features()
    at = torch.arange(positions)
    kv = {i: torch.zeros(positions, g.kv_heads, g.head_dim) for i in spec.kv_layers}
    return Start(
        tokens=at,
        hidden={i: torch.zeros(positions, g.hidden_size) for i in spec.hidden_layers},
        keys=kv,
        values=kv,
        all=Rows(at, (Span(0, positions, 0, 0),)),
        rows=Rows(at[-1:], (Span(0, 1, 0, positions - 1),)),
        select=at[-1:],
    )
