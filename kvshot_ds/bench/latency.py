"""Measures the latency table: every part of a round by itself, with the engine's own parts, on the device that is asked about.

Tokens are random: a latency depends on shapes. Sizes take turns, repeat by repeat, so that a slow moment of the machine hits them
alike; the host waits for the device before and after each timing. What a round spends outside the two models is taken from rounds of the engine
itself, which report the seconds in either.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from kvshot_ds.bench.latency_table import DrafterLatency, LatencyTable, Point, Surface, Timing, shape_of
from kvshot_ds.config import AnyDrafterConfig, DraftingConfig, LatencyConfig, Recipe
from kvshot_ds.decoding.draft import Draft
from kvshot_ds.decoding.engine import Engine
from kvshot_ds.decoding.state import Sequences
from kvshot_ds.drafters.base import Drafter, StepDrafter
from kvshot_ds.drafters.block import BlockDrafter
from kvshot_ds.drafters.build import build_drafter, drafters_for, load_drafter
from kvshot_ds.drafters.state import DraftState
from kvshot_ds.errors import ConfigError
from kvshot_ds.features.spec import DTYPES, FeatureSpec, Store
from kvshot_ds.geometry import Geometry
from kvshot_ds.provenance import origin
from kvshot_ds.target import Target

STEPS = 6  # draft steps 1 .. 6 of a chain, of which the mean is taken: a later one sees a few more entries
OVERHEAD_TOKENS = 24  # tokens decoded to see what a round spends outside the models
_NOTHING = FeatureSpec((), (), "none", Store.all("bf16"))


@dataclass(frozen=True)
class Measured:
    """A drafter to be measured, bound to the target. name: for people; config, geometry: what it was built from."""

    name: str
    config: AnyDrafterConfig
    geometry: Geometry
    drafter: Drafter

    @property
    def shape(self) -> str:
        return shape_of(self.config.model_dump(mode="json"), len(self.drafter.d2t), self.geometry.to_json())


def run(recipe: Recipe, out: Path) -> LatencyTable:
    """Measures the target and the drafters of `recipe.bench` and writes the table to `out`.

    Where this recipe's own run has no trained drafter yet, one of random weights stands for it. Raises ConfigError as `Target.load` and
    `drafters_for` do, and if a context does not fit the target's.
    """
    options, before = recipe.bench, torch.get_num_threads()
    target = Target.load(recipe.target.model_copy(update={"dtype": options.dtype}))
    torch.set_num_threads(options.threads or before)
    try:
        table = measure(target, subjects(recipe, target), options.latency, recipe.decode.drafting)
    finally:
        torch.set_num_threads(before)
    table.save(out)
    return table


def subjects(recipe: Recipe, target: Target) -> list[Measured]:
    """The drafters of `recipe.bench`, on the target's device in its dtype; without any, one of random weights as the recipe describes it."""
    if not recipe.bench.drafters and not _trained(recipe.run_dir):
        print(f"{recipe.run_dir}: no trained drafter yet; one of random weights is measured, latencies do not depend on them")
        g, config = target.geometry, recipe.train.drafter
        drafter = build_drafter(config, g, min(recipe.train.draft_vocab_size, g.vocab_size))
        drafter.set_vocab(torch.arange(len(drafter.d2t)))
        drafter.reset(0)
        return [Measured(recipe.name, config, g, _bound(drafter.to(target.device, target.dtype).eval().requires_grad_(False), target))]
    folders, _ = drafters_for(recipe.target.path, recipe.bench.drafters, recipe.run_dir, recipe.target.trust_remote_code)
    found = []
    for folder in folders:
        drafter, info = load_drafter(folder, target.device, DTYPES[recipe.bench.dtype])
        found.append(Measured(place_of(folder).name, info.config, info.geometry, _bound(drafter, target)))
    return found


def _trained(run: Path) -> bool:
    return any((place / "config.json").is_file() for place in (run, run / "drafter"))


def place_of(folder: Path) -> Path:
    """Where results of a drafter folder lie: beside it in a run, else in it."""
    return folder.parent if folder.name == "drafter" else folder


def _bound(drafter: Drafter, target: Target) -> Drafter:
    drafter.bind(target.model.get_input_embeddings().weight, target.model.get_output_embeddings().weight)
    return drafter


@torch.inference_mode()
def measure(target: Target, drafters: Sequence[Measured], options: LatencyConfig, drafting: DraftingConfig) -> LatencyTable:
    """drafting: the chain, or also the tree, whose rounds show the seconds outside the models. Raises ConfigError if a context does not fit the target's."""
    most = max(max(options.widths), max(options.positions), OVERHEAD_TOKENS)
    if max(options.contexts) + most > target.geometry.max_positions:
        raise ConfigError(
            f"bench.latency.contexts={list(options.contexts)}: with {most} new tokens beyond the target's context of {target.geometry.max_positions}; "
            f"use at most {target.geometry.max_positions - most}"
        )
    return LatencyTable(
        device=device_name(target.device),
        kind=target.device.type,
        threads=torch.get_num_threads(),
        dtype=str(target.dtype).removeprefix("torch."),
        target=target.name,
        geometry=target.geometry.to_json(),
        repeats=options.repeats,
        forward=forwards(target, options),
        alone=overhead(target, None, DraftingConfig(), options),
        drafters=tuple(_drafter(target, one, options, drafting) for one in drafters),
        provenance=origin(options=options.model_dump(mode="json")),
    )


def device_name(device: torch.device) -> str:
    """What people call the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    named = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return named or platform.processor() or platform.machine()


def forwards(target: Target, options: LatencyConfig) -> Surface:
    """The target's forward over each width of new tokens, a chain, at each context."""
    points = []
    for context in sorted(set(options.contexts)):
        batch = Sequences(target, _NOTHING, {}, 1, context + max(options.widths))
        batch.prefill([_tokens(target, context)])
        batch.commit([range(context)], [_tokens(target, context)])
        new = torch.tensor([_tokens(target, max(options.widths))], device=target.device)

        def forward(width: int, batch: Sequences = batch, new: torch.Tensor = new) -> float:
            return seconds(lambda: batch.verify(new[:, 0], Draft.in_line(new[:, 1:width])), target.device)

        points += _points(context, alternating(dict.fromkeys(options.widths, forward), options))
    return Surface(tuple(points))


def _drafter(target: Target, one: Measured, options: LatencyConfig, drafting: DraftingConfig) -> DrafterLatency:
    first: list[Point] = []
    step: list[Point] = []
    for context in sorted(set(options.contexts)):
        bench = _Bench(target, one.drafter, context, max(options.positions), drafting.top_k)
        with target.watch(bench.needs.hidden_layers) as outputs:
            bench.prepare(outputs)
            first += _points(context, alternating(dict.fromkeys(options.positions, bench.first), options))
            if isinstance(one.drafter, StepDrafter):
                step += _points(context, alternating(dict.fromkeys(options.rows, bench.step), options))
    chain = drafting if drafting.strategy == "chain" else DraftingConfig()
    outside = {"chain": overhead(target, one.drafter, chain, options)}
    if drafting.strategy != "chain":
        outside["tree"] = overhead(target, one.drafter, drafting, options)
    parameters = sum(p.numel() for p in one.drafter.parameters())
    block_size = one.drafter.block_size if isinstance(one.drafter, BlockDrafter) else None
    surface = Surface(tuple(step)) if step else None
    return DrafterLatency(one.name, one.config.family, one.shape, parameters, block_size, Surface(tuple(first)), surface, outside)


class _Bench:
    """A drafter that has taken in `context` positions of a random sequence, and takes in the next few again and again."""

    def __init__(self, target: Target, drafter: Drafter, context: int, most: int, candidates: int):
        self.target, self.drafter, self.context, self.most = target, drafter, context, most
        self.needs, self.candidates = drafter.required_features(), candidates
        self.memory = DraftState.empty(drafter.depth)
        self.new = _tokens(target, most)
        self.proposals = drafter.block_size - 1 if isinstance(drafter, BlockDrafter) else 1

    def prepare(self, outputs: Mapping[int, torch.Tensor]) -> None:
        """outputs: of an open `target.watch`."""
        self.batch = Sequences(self.target, self.needs, outputs, 1, self.context + self.most)
        tokens = _tokens(self.target, self.context)
        self.batch.prefill([tokens])
        self.drafter.draft(self.memory, self.batch.commit([range(self.context)], [tokens]), self.proposals)
        new = torch.tensor([self.new], device=self.target.device)
        self.batch.verify(new[:, 0], Draft.in_line(new[:, 1:]))  # its states serve every repeat: it is committed anew each time

    def first(self, positions: int) -> float:
        """Seconds of step 0, or of a block, that takes in `positions`, with its proposals."""
        self.batch.lengths = [self.context]
        start = self.batch.commit([range(positions)], [self.new[:positions]])
        return seconds(lambda: self.drafter.draft(self.memory, start, self.proposals), self.target.device)

    def step(self, rows: int) -> float:
        """Seconds of a step k >= 1: the mean of a chain's, or one with `rows` nodes of a tree and the candidates after each."""
        drafter = self.drafter
        assert isinstance(drafter, StepDrafter)
        self.batch.lengths = [self.context]
        token = drafter.propose(drafter.begin(self.memory, self.batch.commit([range(1)], [self.new[:1]])))

        def chain() -> None:
            last = token
            for k in range(1, STEPS + 1):
                last = drafter.propose(drafter.forward_step(self.memory, last, k))

        def level() -> None:
            state = self.memory.fork(torch.zeros(rows, dtype=torch.int64, device=token.device), [rows])
            logits = drafter.logits(drafter.forward_step(state, token.expand(rows), 1))
            torch.log_softmax(logits.float(), -1).topk(min(self.candidates, logits.shape[-1]))

        return seconds(chain, token.device) / STEPS if rows == 1 else seconds(level, token.device)


def overhead(target: Target, drafter: Drafter | None, drafting: DraftingConfig, options: LatencyConfig) -> Timing:
    """What a round of the engine spends outside the two models. The first round, which takes in the prompt, stands aside if there are others."""
    engine, found = Engine(target, drafter, drafting), list[float]()
    prompt, first = _tokens(target, min(options.contexts)), list[float]()
    for timed in (False, True, True):
        last = time.perf_counter()
        for number, rounds in enumerate(engine.generate([prompt], OVERHEAD_TOKENS)):
            now, one = time.perf_counter(), rounds[0]
            if timed and number:
                (found if number > 1 else first).append(max(0.0, now - last - one.draft_seconds - one.verify_seconds))
            last = now
    return Timing.of(found or first)


def alternating(jobs: Mapping[int, Callable[[int], float]], options: LatencyConfig) -> dict[int, Timing]:
    """Each job by its size, warmed up and repeated; sizes take turns, every other time backwards."""
    for size, job in jobs.items():
        for _ in range(options.warm_up):
            job(size)
    found: dict[int, list[float]] = {size: [] for size in jobs}
    for repeat in range(options.repeats):
        for size in list(jobs)[:: -1 if repeat % 2 else 1]:
            found[size].append(jobs[size](size))
    return {size: Timing.of(repeats) for size, repeats in found.items()}


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """Of `work`, from an idle device to an idle device."""
    wait(device)
    begun = time.perf_counter()
    work()
    wait(device)
    return time.perf_counter() - begun


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _points(context: int, timings: Mapping[int, Timing]) -> list[Point]:
    return [Point(t.seconds, t.low, t.high, context, size) for size, t in sorted(timings.items())]


def _tokens(target: Target, count: int) -> list[int]:
    return torch.randint(target.geometry.vocab_size, (count,), generator=torch.Generator().manual_seed(count)).tolist()


def table_text(table: LatencyTable) -> str:
    """Milliseconds by size, a line for each part and context."""
    lines = [f"{table.target}, {table.dtype}, on {table.device} ({table.kind}, {table.threads} CPU threads); ms, median of {table.repeats}"]
    parts = [("target forward by new tokens", table.forward)]
    for d in table.drafters:
        parts.append((f"{d.name}: step 0 by positions taken in" if d.step else f"{d.name}: block by positions taken in", d.first))
        if d.step:
            parts.append((f"{d.name}: a later step by rows", d.step))
    for name, surface in parts:
        lines.append(name)
        at = {(p.context, p.size): p.seconds for p in surface.points}
        lines += [f"  context {c:>6}  " + "  ".join(f"{s}: {at[c, s] * 1e3:.2f}" for s in surface.sizes) for c in surface.contexts]
    outside = [("target alone", table.alone)] + [(f"{d.name}, {kind}", t) for d in table.drafters for kind, t in d.overhead.items()]
    return "\n".join([*lines, "outside the models, a round: " + "; ".join(f"{name} {t.seconds * 1e3:.2f}" for name, t in outside)])
