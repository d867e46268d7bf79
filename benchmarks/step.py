"""A training step of the hidden-only drafter, forward and backward without optimizer: the objective against straightforward.py.

One conversation whose first 30 % are the prompt. SmolLM2's shape by default, fp32, random features; both contenders start
from the same parameters, and their losses must agree to 1e-4 before they are timed. Peak memory is what the step needs above parameters and
features (see measure.py). Run from the root of the repository: python -m benchmarks.step --help
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

import click
import torch

from benchmarks.measure import MIB, Options, asked, available_memory, child_options, contend, measure, ratio, report, table
from benchmarks.straightforward import Conversation, Straightforward
from kvshot_ds.config import HiddenOnlyConfig, ObjectiveConfig
from kvshot_ds.drafters.base import Drafter
from kvshot_ds.drafters.build import build_drafter
from kvshot_ds.features.batch import Batch, collate
from kvshot_ds.features.spec import eagle3_hidden_layers, teacher_rows
from kvshot_ds.geometry import Geometry
from kvshot_ds.objectives.alignment import plan_rows
from kvshot_ds.objectives.objective import Objective

PROMPT, LAYERS = 0.3, 30


@dataclass(frozen=True)
class Shape:
    """S tokens, K steps; the target's width, heads, inner width of its MLP and vocabulary; the draft vocabulary."""

    length: int
    steps: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocab: int
    draft_vocab: int

    def geometry(self) -> Geometry:
        return Geometry(
            family="llama", num_layers=LAYERS, hidden_size=self.width, heads=self.heads, kv_heads=self.kv_heads, head_dim=self.head_dim,
            intermediate_size=self.inner, vocab_size=self.vocab, norm_eps=1e-5, qk_norm=False, qkv_bias=False, o_bias=False, mlp_bias=False,
            hidden_act="silu", max_positions=8192, rope={"rope_type": "default", "rope_theta": 100000.0},
        )  # fmt: skip

    def straightforward_bytes(self) -> int:
        """Rough need of the plain step: logits, targets and two like them for all steps, the teacher's logits, the attention weights."""
        logits = self.steps * self.length * self.draft_vocab
        return 4 * (4 * logits + 2 * self.length * self.vocab + (self.steps + 2) * self.heads * self.length**2)


@dataclass(frozen=True)
class Problem:
    """drafter: the starting parameters; conversation and batch say the same; head [V, d]: the target's."""

    shape: Shape
    drafter: Drafter
    head: torch.Tensor
    embedding: torch.Tensor
    conversation: Conversation
    batch: Batch


def problem(shape: Shape) -> Problem:
    """Random, but the draft vocabulary holds nearly all of the target's mass, as the most frequent tokens do."""
    torch.manual_seed(0)
    g = shape.geometry()
    tokens, answer = torch.randint(g.vocab_size, (shape.length,)), torch.arange(shape.length) >= PROMPT * shape.length
    fused, last = torch.randn(shape.length, 3, g.hidden_size), torch.randn(shape.length, g.hidden_size)
    ids = torch.randperm(g.vocab_size)[: shape.draft_vocab].sort().values
    embedding, head = (0.05 * torch.randn(g.vocab_size, g.hidden_size) for _ in range(2))
    head[ids] *= 3
    drafter = build_drafter(HiddenOnlyConfig(), g, shape.draft_vocab)
    drafter.reset(seed=1)
    drafter.set_vocab(ids)
    drafter.bind(embedding, head)
    rows = torch.from_numpy(teacher_rows(answer.int().numpy()))
    # A few rows at a time: whatever the inputs take while they are made would hide as much of the step's own peak.
    logits = [(z.argmax(-1), z.logsumexp(-1)) for z in (part @ head.T for part in last[rows].split(16))]
    sample = {
        "tokens": tokens.int(),
        "turn": answer.int(),
        **{f"hidden.{layer}": fused[:, i].contiguous() for i, layer in enumerate(eagle3_hidden_layers(LAYERS))},
        "teacher.hidden": last[rows],
        "teacher.argmax": torch.cat([best for best, _ in logits]).int(),
        "teacher.lse": torch.cat([lse for _, lse in logits]),
    }
    return Problem(shape, drafter, head, embedding, Conversation(tokens, answer, fused.flatten(1), last), collate([("c", sample)]))


def ours(p: Problem) -> tuple[torch.nn.Module, Callable[[], torch.Tensor]]:
    """Module with the parameters, and its loss."""
    config = ObjectiveConfig(steps=p.shape.steps)
    objective, plan = Objective(p.drafter, config, p.head), plan_rows(p.batch, config.steps)
    return p.drafter, lambda: objective(p.batch, plan, torch.tensor(float(plan.supervised))).loss


def straightforward(p: Problem) -> tuple[torch.nn.Module, Callable[[], torch.Tensor]]:
    """The same for the plain implementation."""
    plain = Straightforward(p.shape.geometry(), p.embedding, p.head, p.drafter.t2d)
    plain.load_state_dict({name: value for name, value in p.drafter.state_dict().items() if name not in ("d2t", "t2d")})
    return plain, lambda: plain(p.conversation, p.shape.steps, ObjectiveConfig().step_decay)


def step(module: torch.nn.Module, loss_of: Callable[[], torch.Tensor]) -> float:
    """Forward and backward into fresh gradients; the loss."""
    module.zero_grad(set_to_none=True)
    loss = loss_of()
    loss.backward()
    return float(loss.detach())


def row(shape: Shape, options: Options) -> list[str]:
    """One line of the table."""
    needed = shape.straightforward_bytes()
    fits = needed < 0.8 * available_memory()
    cases = [{"ours": which, **asdict(shape)} for which in (True, False)[: 1 + fits]]
    mine, *others = contend("benchmarks.step", cases, options)
    cells = [f"{shape.draft_vocab}", f"{shape.length}", f"{shape.length / mine.seconds:.0f}", f"{mine.peak / MIB:.0f}"]
    for plain in others:
        return [
            *cells,
            f"{shape.length / plain.seconds:.0f}",
            f"{plain.peak / MIB:.0f}",
            ratio(plain.seconds, mine.seconds),
            ratio(mine.peak, plain.peak),
        ]
    return [*cells, "-", f"skipped: would need about {needed / MIB:.0f}", "-", "-"]


@click.command(help=__doc__)
@click.option("--lengths", default="512,1024,2048", show_default=True, help="tokens S of the conversation, separated by commas")
@click.option("--draft-vocabs", default="8192,49152", show_default=True, help="sizes of the draft vocabulary, separated by commas")
@click.option("--steps", default=7, show_default=True, help="steps of test-time training")
@click.option("--width", default=576, show_default=True, help="width d of the target")
@click.option("--heads", default=9, show_default=True, help="query heads")
@click.option("--kv-heads", default=3, show_default=True, help="key/value heads")
@click.option("--head-dim", default=64, show_default=True, help="size of a head")
@click.option("--inner", default=1536, show_default=True, help="inner width of the MLP")
@click.option("--vocab", default=49152, show_default=True, help="vocabulary of the target")
@child_options
def main(
    lengths: str, draft_vocabs: str, steps: int, width: int, heads: int, kv_heads: int, head_dim: int, inner: int, vocab: int,
    threads: int, clock: str, repeats: int, case: str | None,
) -> None:  # fmt: skip
    if case is not None:
        wanted, mode = asked(case)
        contender = ours if wanted.pop("ours") else straightforward
        module, loss = contender(problem(Shape(**wanted)))
        report(measure(lambda: step(module, loss), mode))
        return
    options = Options(threads, clock, repeats)
    sizes = [(int(n), int(v)) for v in draft_vocabs.split(",") for n in lengths.split(",")]
    shapes = [Shape(n, steps, width, heads, kv_heads, head_dim, inner, vocab, v) for n, v in sizes]
    click.echo(f"{steps} steps, target {vocab} tokens, d = {width}, fp32, forward + backward; {options}")
    header = ("draft vocab", "S", "tokens/s", "MiB", "plain tokens/s", "plain MiB", "speed ratio", "memory ratio")
    click.echo(table(header, [row(shape, options) for shape in shapes]))


if __name__ == "__main__":
    main()
