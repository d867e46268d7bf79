"""What decoding costs beside the two models, a draft step of a hybrid, and the forward that verifies: `python -m benchmarks.decode --target DIR`.

overhead: what a round of the engine spends outside target and drafter, as a share of the round, for one drafter of each family; beside it what
transformers' `generate` spends outside the same target for a token. Weights of drafters are random, so that hardly a draft is accepted.
step: draft step 0 and a later step of a hybrid over those of a hidden-only drafter with --context positions before, in turn; their parameters beside it,
and the seconds of each part of a later step, with the clock around every part (which adds to it).
verify: the engine's forward over its cache, written in place, over one of `DynamicCache`, which grows by copying and is cropped, on the same tokens, in
turn; logits must agree before anything is timed.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import click
import torch

from benchmarks.measure import CLOCKS, table
from kvshot_ds.config import AnyDrafterConfig, DFlashConfig, DraftingConfig, GateConfig, HiddenOnlyConfig, HybridConfig, KVOnlyConfig, TargetConfig
from kvshot_ds.decoding.draft import Draft
from kvshot_ds.decoding.engine import Engine
from kvshot_ds.decoding.prompts import reference
from kvshot_ds.decoding.rounds import Clock
from kvshot_ds.decoding.state import Sequences
from kvshot_ds.drafters import layer as draft_layer
from kvshot_ds.drafters.attention import KV
from kvshot_ds.drafters.base import Drafter, StepDrafter
from kvshot_ds.drafters.build import build_drafter
from kvshot_ds.drafters.state import DraftState
from kvshot_ds.features.spec import FeatureSpec, Store
from kvshot_ds.objectives.alignment import decoding_start
from kvshot_ds.target import Target

HYBRIDS = {  # whose draft step is timed
    "elementwise": HybridConfig(), "per_head": HybridConfig(gate=GateConfig(kind="per_head")), "cross_only": HybridConfig(cross_only=True),
}  # fmt: skip
OVERHEAD_GOAL, STEP_GOAL = 0.08, 1.10
LENGTH, PROMPT, STEPS = 7, 64, 6  # proposals a round; tokens before them; later steps timed in one go
COMMITTED = 3  # positions that step 0 takes in
FAMILIES: tuple[AnyDrafterConfig, ...] = (HiddenOnlyConfig(), KVOnlyConfig(), HybridConfig(), DFlashConfig(depth=2, block_size=LENGTH + 1))


def random_drafter(target: Target, config: AnyDrafterConfig, draft_vocab: int) -> Drafter:
    drafter = build_drafter(config, target.geometry, min(draft_vocab, target.geometry.vocab_size))
    drafter.set_vocab(torch.arange(len(drafter.d2t)))
    drafter.reset(0)
    drafter = drafter.to(target.device, target.dtype).eval().requires_grad_(False)
    drafter.bind(target.model.get_input_embeddings().weight, target.model.get_output_embeddings().weight)
    return drafter


def tokens_of(target: Target, count: int) -> list[int]:
    return torch.randint(target.geometry.vocab_size, (count,), generator=torch.Generator().manual_seed(count)).tolist()


@dataclass(frozen=True)
class Outside:
    """Medians over rounds [s]: whole, in the drafter, in the target, and in neither."""

    whole: float
    draft: float
    verify: float
    other: float

    @property
    def share(self) -> float:
        return self.other / self.whole


def rounds(engine: Engine, prompt: Sequence[int], new: int, clock: str) -> Outside:
    """The prefill and the round that takes in the prompt stand aside, as do rounds that propose less at the end."""
    found, last = [], CLOCKS[clock]()
    for number, (one,) in enumerate(r.values() for r in engine.generate([prompt], new)):
        now = CLOCKS[clock]()
        if number > 1 and one.drafted >= (LENGTH if engine.drafter is not None else 0):
            found.append((now - last, one.draft_seconds, one.verify_seconds, now - last - one.draft_seconds - one.verify_seconds))
        last = now
    return Outside(*(statistics.median(part) for part in zip(*found, strict=True)))


@contextmanager
def marked_by(clock: str) -> Iterator[None]:
    """While open, the engine's own marks on a CPU are of this clock, as ours are."""
    mark = Clock.mark
    Clock.mark = lambda self: CLOCKS[clock]() if self.device.type == "cpu" else mark(self)  # type: ignore[method-assign]
    try:
        yield
    finally:
        Clock.mark = mark  # type: ignore[method-assign]


def by_generate(target: Target, prompt: Sequence[int], new: int, clock: str) -> Outside:
    """A token of transformers' `generate`, the first one aside: the mean, for it does not say where a token begins."""
    inside: list[float] = []
    forward = target.model.forward

    def timed(*args: Any, **kwargs: Any) -> Any:
        begun = CLOCKS[clock]()
        out = forward(*args, **kwargs)
        _wait(target.device)
        inside.append(CLOCKS[clock]() - begun)
        return out

    reference(target, prompt, 2, ())
    target.model.forward = timed
    try:
        whole = []
        for count in (1, new):
            inside.clear()
            begun = CLOCKS[clock]()
            reference(target, prompt, count, ())
            whole.append((CLOCKS[clock]() - begun, sum(inside)))
    finally:
        del target.model.forward
    (first, first_inside), (all_, all_inside) = whole
    one, verify = (all_ - first) / (new - 1), (all_inside - first_inside) / (new - 1)
    return Outside(one, 0.0, verify, one - verify)


def overhead(target: Target, draft_vocab: int, new: int, repeats: int, clock: str) -> list[str]:
    prompt = tokens_of(target, PROMPT)
    ways: dict[str, Callable[[], Outside]] = {"transformers generate": lambda: by_generate(target, prompt, new, clock)}
    alone = Engine(target, None, DraftingConfig())
    ways["engine, target alone"] = lambda: rounds(alone, prompt, new, clock)
    for config in FAMILIES:
        engine = Engine(target, random_drafter(target, config, draft_vocab), DraftingConfig(length=LENGTH))
        ways[f"engine, {config.family}"] = lambda engine=engine: rounds(engine, prompt, new + LENGTH, clock)  # type: ignore[misc]
    with marked_by(clock):
        found = in_turn(ways, repeats)
    medians = {
        name: Outside(*(statistics.median(getattr(o, part) for o in each) for part in ("whole", "draft", "verify", "other"))) for name, each in found.items()
    }
    rows = [(name, *(f"{1e3 * s:.2f}" for s in (o.whole, o.draft, o.verify, o.other)), f"{o.share:.1%}") for name, o in medians.items()]
    worst = max(o.share for name, o in medians.items() if name.startswith("engine, ") and o.draft)
    ours, other = medians["engine, target alone"].other, medians["transformers generate"].other
    return [
        table(("way", "ms a round", "draft", "verify", "other", "share"), rows),
        f"outside the target, for a token: engine alone / transformers generate: {ours / other:.2f}",
        f"share of a round outside the two models, at most {worst:.1%}; goal at most {OVERHEAD_GOAL:.0%}: {'met' if worst <= OVERHEAD_GOAL else 'not met'}",
    ]


class Stepping:
    """A drafter with `context` random positions in its memory: step 0 over `COMMITTED` new ones, then later steps, again and again."""

    def __init__(self, target: Target, config: AnyDrafterConfig, draft_vocab: int, context: int):
        g = target.geometry
        self.drafter = drafter = random_drafter(target, config, draft_vocab)
        assert isinstance(drafter, StepDrafter)
        self.step_drafter, self.context, self.room = drafter, context, context + COMMITTED + 1
        random, needs = torch.Generator().manual_seed(0), drafter.required_features()

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=random).to(target.device, target.dtype)

        self.hidden = {layer: normal(self.room, g.hidden_size) for layer in needs.hidden_layers}
        self.cache = {layer: KV(normal(self.room, g.kv_heads, g.head_dim), normal(self.room, g.kv_heads, g.head_dim)) for layer in needs.kv_layers}
        self.tokens = torch.randint(g.vocab_size, (self.room,), generator=random).to(target.device)
        self.memory = DraftState.empty(drafter.depth)
        self.begin(0, context)
        self.h = self.begin(context, COMMITTED)

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.drafter.parameters())

    def begin(self, first: int, count: int) -> torch.Tensor:
        here = slice(first, first + count)
        start = decoding_start(self.tokens[here], [first], [count], self.room, {layer: h[here] for layer, h in self.hidden.items()}, self.cache)
        return self.step_drafter.begin(self.memory, start)

    def first(self) -> None:
        self.h = self.begin(self.context, COMMITTED)
        self.drafter.propose(self.h)

    def later(self) -> None:
        """Steps 1 to STEPS after the last step 0."""
        token = self.drafter.propose(self.h)
        for k in range(1, STEPS + 1):
            token = self.drafter.propose(self.step_drafter.forward_step(self.memory, token, k))


def step(target: Target, draft_vocab: int, context: int, kind: str, repeats: int, clock: str) -> list[str]:
    subjects = {c.family: Stepping(target, c, draft_vocab, context) for c in (HiddenOnlyConfig(), HYBRIDS[kind])}
    first: dict[str, Callable[[], float]] = {}
    later: dict[str, Callable[[], float]] = {}
    for family, one in subjects.items():
        first[family] = lambda one=one: timed(one.first, target.device, clock)  # type: ignore[misc]
        later[family] = lambda one=one: _after_begin(one, target.device, clock)  # type: ignore[misc]
    zero, others = (in_turn(ways, repeats) for ways in (first, later))
    rows = [
        (family, f"{one.parameters / 1e6:.2f}", f"{1e3 * statistics.median(zero[family]):.3f}", f"{1e3 * statistics.median(others[family]):.3f}")
        for family, one in subjects.items()
    ]
    hidden, hybrid = subjects["hidden_only"], subjects["hybrid"]
    ratios = [statistics.median(b / a for a, b in zip(found["hidden_only"], found["hybrid"], strict=True)) for found in (zero, others)]
    parts = {family: in_parts(one, repeats, clock, target.device) for family, one in subjects.items()}
    share = [(name, *(f"{1e3 * parts[family].get(name, 0.0):.3f}" for family in subjects)) for name in dict.fromkeys([*parts["hybrid"], *parts["hidden_only"]])]
    return [
        f"draft vocabulary {len(hidden.drafter.d2t):,}, {context} positions before, hybrid {kind}; {STEPS} later steps in one go",
        table(("drafter", "M parameters", "step 0 [ms]", "a later step [ms]"), rows),
        table(("of a later step [ms]", *subjects), share),
        f"hybrid / hidden-only: parameters {hybrid.parameters / hidden.parameters:.2f}, step 0 {ratios[0]:.2f}, a later step {ratios[1]:.2f}; "
        f"goal at most {STEP_GOAL:.2f}: {'met' if max(ratios) <= STEP_GOAL else 'not met'}",
    ]


def _after_begin(one: Stepping, device: torch.device, clock: str) -> float:
    one.h = one.begin(one.context, COMMITTED)
    return timed(one.later, device, clock) / STEPS


def in_parts(one: Stepping, repeats: int, clock: str, device: torch.device) -> dict[str, float]:
    """Seconds of each part of a later step, medians over repeats. other: all that no part's clock has seen."""
    found = []
    for _ in range(repeats):
        one.h = one.begin(one.context, COMMITTED)
        with watched(one.drafter, clock, device) as parts:
            whole = timed(one.later, device, clock)
        found.append({**parts, "other": whole - sum(parts.values())})
    return {name: statistics.median(f[name] for f in found) / STEPS for name in found[0]}


@contextmanager
def watched(drafter: Drafter, clock: str, device: torch.device) -> Iterator[Mapping[str, float]]:
    """While open, the seconds inside projections, attention, gate, MLP and head by name."""
    parts: dict[str, float] = defaultdict(float)

    def around(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            _wait(device)
            begun = CLOCKS[clock]()
            out = call(*args, **kwargs)
            _wait(device)
            parts[name] += CLOCKS[clock]() - begun
            return out

        return wrapped

    targets: list[tuple[Any, str, str]] = []
    paths = {}
    for layer in drafter.draft_layers:
        for name, path in (("self", layer.self_attn), ("cross", layer.cross_attn)):
            if path is not None:
                paths[id(path)] = f"{name} attention"
                targets += [(path, "query", f"{name} projections"), (path, "key_value", f"{name} projections"), (path.o_proj, "forward", f"{name} projections")]
        targets += [(layer.mlp, "forward", "mlp"), *([(layer.mix, "forward", "gate")] if layer.mix is not None else [])]
    for owner, attribute, name in [*targets, (drafter, "logits", "head")]:
        setattr(owner, attribute, around(name, getattr(owner, attribute)))
    attend = draft_layer._attend
    draft_layer._attend = lambda path, *rest: around(paths[id(path)], attend)(path, *rest)
    try:
        yield parts
    finally:
        draft_layer._attend = attend
        for owner, attribute, _ in [*targets, (drafter, "logits", "head")]:
            delattr(owner, attribute)


def verify(target: Target, contexts: Sequence[int], widths: Sequence[int], repeats: int, clock: str) -> list[str]:
    rows, nothing = [], FeatureSpec((), (), "none", Store.all("bf16"))
    for context in contexts:
        batch, grown, prompt = Sequences(target, nothing, {}, 1, context + max(widths)), target.new_cache(), tokens_of(target, context)
        batch.prefill([prompt])
        batch.commit([range(context)], [prompt])
        target.forward(torch.tensor([prompt], device=target.device), grown)
        for width in widths:
            new = torch.tensor([tokens_of(target, width)], device=target.device)

            def ours(new: torch.Tensor = new, batch: Sequences = batch) -> torch.Tensor:
                return batch.verify(new[:, 0], Draft.in_line(new[:, 1:]))

            def other(new: torch.Tensor = new, grown: Any = grown, width: int = width) -> torch.Tensor:
                logits = target.forward(new, grown)
                grown.crop(-width)  # what a round that accepts nothing drops, its own token aside
                return logits

            agree(ours(), other())
            ways = {"engine": lambda run=ours: timed(run, target.device, clock), "DynamicCache": lambda run=other: timed(run, target.device, clock)}  # type: ignore[misc]
            found = in_turn(ways, repeats)
            ratio = statistics.median(a / b for a, b in zip(found["engine"], found["DynamicCache"], strict=True))
            rows.append((str(context), str(width), *(f"{1e3 * statistics.median(each):.2f}" for each in found.values()), f"{ratio:.3f}"))
    return [table(("context", "new tokens", "engine [ms]", "DynamicCache + crop [ms]", "engine / DynamicCache"), rows)]


def agree(ours: torch.Tensor, other: torch.Tensor) -> None:
    """Raises RuntimeError if the logits differ by more than rounding does."""
    tolerance = 1e-3 if ours.dtype == torch.float32 else 0.1
    worst, size = float((ours - other).abs().max()), max(1.0, float(other.abs().max()))
    if not worst <= tolerance * size:
        raise RuntimeError(f"the engine's logits differ from those over DynamicCache by {worst}, at most {tolerance * size} is rounding; they are not timed")


def in_turn(ways: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, list[Any]]:
    """Each once to warm up, then all of them in turn, every other time backwards."""
    for way in ways.values():
        way()
    found: dict[str, list[Any]] = {name: [] for name in ways}
    for repeat in range(repeats):
        for name in list(ways)[:: -1 if repeat % 2 else 1]:
            found[name].append(ways[name]())
    return found


def timed(run: Callable[[], Any], device: torch.device, clock: str) -> float:
    _wait(device)
    begun = CLOCKS[clock]()
    run()
    _wait(device)
    return CLOCKS[clock]() - begun


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def numbers(_context: click.Context, _option: click.Parameter, text: str) -> list[int]:
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        raise click.BadParameter(f"expected numbers with commas between, found {text!r}") from None
    if min(found) < 1:
        raise click.BadParameter(f"expected numbers of at least 1, found {text!r}")
    return found


@click.command(help=__doc__)
@click.option("--target", type=click.Path(path_type=Path, exists=True, file_okay=False), required=True, help="Hugging Face folder of the target")
@click.option("--only", type=click.Choice(["overhead", "step", "verify"]), help="one of the three")
@click.option(
    "--draft-vocabs", default="4096,32000", callback=numbers, show_default=True, help="draft vocabularies of the steps; the first is that of the rounds"
)
@click.option("--context", default=2048, show_default=True, help="positions before a draft step")
@click.option(
    "--hybrid", type=click.Choice(list(HYBRIDS)), default="elementwise", show_default=True, help="the hybrid of the steps: by its gate, or without a self path"
)
@click.option("--contexts", default="128,1024", callback=numbers, show_default=True, help="positions before a verifying forward")
@click.option("--widths", default="1,8,61", callback=numbers, show_default=True, help="new tokens of a verifying forward")
@click.option("--new", default=24, show_default=True, help="tokens of each decoding whose rounds are timed")
@click.option("--repeats", default=5, show_default=True, help="turns of each contender; medians are printed")
@click.option("--dtype", type=click.Choice(["fp32", "bf16"]), default="fp32", show_default=True, help="dtype of target and drafters")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True, help="where they run")
@click.option(
    "--clock", type=click.Choice(sorted(CLOCKS)), default="wall", show_default=True, help="of steps and forwards; cpu: of all threads, on a shared machine"
)
@click.option("--threads", default=1, show_default=True, help="CPU threads")
def main(
    target: Path, only: str | None, draft_vocabs: list[int], context: int, hybrid: str, contexts: list[int], widths: list[int], new: int, repeats: int,
    dtype: Literal["fp32", "bf16"], device: Literal["cpu", "cuda"], clock: str, threads: int,
) -> None:  # fmt: skip
    torch.set_num_threads(threads)
    loaded = Target.load(TargetConfig(path=target, dtype=dtype, device=device))
    click.echo(f"{loaded.name}, {dtype}, {device}, {threads} thread(s), {clock} clock, median of {repeats}")
    with torch.inference_mode():
        if only in (None, "overhead"):
            click.echo("\n".join(["", *overhead(loaded, draft_vocabs[0], new, repeats, clock)]))
        if only in (None, "step"):
            for size in dict.fromkeys(min(size, loaded.geometry.vocab_size) for size in draft_vocabs):
                click.echo("\n".join(["", *step(loaded, size, context, hybrid, repeats, clock)]))
        if only in (None, "verify"):
            click.echo("\n".join(["", *verify(loaded, contexts, widths, repeats, clock)]))


if __name__ == "__main__":
    main()
