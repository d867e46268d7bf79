"""Attention of K steps of test-time training, forward and backward: merged (kvshot_ds/drafters/attention.py) against dense.

Step 0 is causal over S rows; step k adds one key of each later step i <= k at the row itself. Peak memory is what the run
needs above its inputs (see measure.py). Run from the root of the repository: python -m benchmarks.attention --help
"""

from __future__ import annotations

from dataclasses import dataclass

import click
import torch

from benchmarks.dense import causal_mask, dense_attention
from benchmarks.measure import MIB, Options, asked, available_memory, child_options, contend, linear_fit, measure, ratio, report, table
from kvshot_ds.drafters.attention import KV, Span, merged_attention


@dataclass(frozen=True)
class Shape:
    """S rows, K steps, A query heads, G key/value heads of size D; fp32."""

    length: int
    steps: int
    heads: int
    kv_heads: int
    head_dim: int

    def dense_bytes(self) -> int:
        """Rough need of the dense case: the weights of every step are kept, and four more such tensors are alive in the backward."""
        return 4 * self.heads * self.length * (self.length + self.steps) * (self.steps + 4)


def inputs(shape: Shape) -> tuple[list[torch.Tensor], list[KV]]:
    """Queries [S, A, D] and new keys and values [S, G, D] of every step, the same for both contenders."""
    torch.manual_seed(0)

    def make(heads: int) -> torch.Tensor:
        return torch.randn(shape.length, heads, shape.head_dim).requires_grad_()

    return [make(shape.heads) for _ in range(shape.steps)], [KV(make(shape.kv_heads), make(shape.kv_heads)) for _ in range(shape.steps)]


def unroll(merged: bool, queries: list[torch.Tensor], entries: list[KV]) -> torch.Tensor:
    """Outputs of all steps [K, S, A, D]."""
    length, scale = len(queries[0]), queries[0].shape[-1] ** -0.5
    prefix, *own = entries
    if merged:
        spans = [Span(0, length, 0, 0)]
        return torch.stack([merged_attention(q[:, None], prefix, own[:k], spans, scale)[:, 0] for k, q in enumerate(queries)])
    mask = causal_mask(length)
    return torch.stack([dense_attention(q, *prefix, own[:k], mask, scale) for k, q in enumerate(queries)])


def run(merged: bool, queries: list[torch.Tensor], entries: list[KV]) -> float:
    """Forward and backward; a number that depends on every output and every gradient."""
    leaves = [*queries, *(t for kv in entries for t in kv)]
    for t in leaves:
        t.grad = None
    out = unroll(merged, queries, entries)
    loss = out.square().mean()
    loss.backward()
    return float(loss.detach()) + sum(float(t.grad.abs().sum()) for t in leaves if t.grad is not None)


def row(shape: Shape, options: Options) -> tuple[list[str], float]:
    """One line of the table, and the merged attention's peak in MiB."""
    needed = shape.dense_bytes()
    fits = needed < 0.8 * available_memory()
    cases = [{"merged": merged, **vars(shape)} for merged in (True, False)[: 1 + fits]]
    ours, *others = contend("benchmarks.attention", cases, options)
    cells = [f"{shape.length}", f"{ours.seconds:.3f}"]
    for dense in others:
        cells += [f"{dense.seconds:.3f}", ratio(dense.seconds, ours.seconds), f"{ours.peak / MIB:.0f}", f"{dense.peak / MIB:.0f}"]
    if not fits:
        cells += ["-", "-", f"{ours.peak / MIB:.0f}", f"skipped: would need about {needed / MIB:.0f}"]
    return cells, ours.peak / MIB


@click.command(help=__doc__)
@click.option("--lengths", default="512,1024,2048,4096", show_default=True, help="rows S, separated by commas")
@click.option("--steps", default=7, show_default=True, help="steps of test-time training")
@click.option("--heads", default=9, show_default=True, help="query heads")
@click.option("--kv-heads", default=3, show_default=True, help="key/value heads")
@click.option("--head-dim", default=64, show_default=True, help="size of a head")
@child_options
def main(lengths: str, steps: int, heads: int, kv_heads: int, head_dim: int, threads: int, clock: str, repeats: int, case: str | None) -> None:
    if case is not None:
        wanted, mode = asked(case)
        merged, made = wanted.pop("merged"), inputs(Shape(**wanted))
        report(measure(lambda: run(merged, *made), mode))
        return
    options = Options(threads, clock, repeats)
    sizes = [int(n) for n in lengths.split(",")]
    lines = [row(Shape(n, steps, heads, kv_heads, head_dim), options) for n in sizes]
    click.echo(f"{steps} steps, {heads}/{kv_heads} heads x {head_dim}, fp32, forward + backward; {options}")
    click.echo(table(("S", "merged s", "dense s", "dense/merged", "merged MiB", "dense MiB"), [cells for cells, _ in lines]))
    if len(sizes) > 2:
        slope, r2 = linear_fit(sizes, [peak for _, peak in lines])
        click.echo(f"merged memory over S: {slope * 1024:.1f} KiB a row, R^2 = {r2:.4f}")


if __name__ == "__main__":
    main()
