"""What storing features in fewer bytes costs: round-trip errors of fp8 and int8, and loss and gradients under a teacher cut to its k best tokens.

Reads captured features, best stored as fp32 (capture.features.store={hidden: fp32, kv: fp32, query: fp32, teacher: fp32}) with teacher=last_hidden,
and the target's head. Run from the root of the repository: python -m benchmarks.codec --shards DIR --target DIR
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import click
import torch

from benchmarks.measure import table
from kvshot_ds.config import HiddenOnlyConfig, InitConfig, ObjectiveConfig, Storage
from kvshot_ds.drafters.base import Drafter
from kvshot_ds.drafters.build import build_drafter, load_drafter
from kvshot_ds.drafters.initial import choose_vocab, initialise
from kvshot_ds.errors import ConfigError
from kvshot_ds.features.batch import Batch, collate
from kvshot_ds.features.codec import Stored, all_finite, best_logits, decode, encode
from kvshot_ds.features.manifest import load_token_counts
from kvshot_ds.features.shard import ShardSet
from kvshot_ds.features.spec import scale_group
from kvshot_ds.objectives.alignment import plan_rows
from kvshot_ds.objectives.objective import Objective
from kvshot_ds.target import TargetParts, load_parts

STORAGES: tuple[Storage, ...] = ("bf16", "fp8", "int8")
TOGETHER, ROWS = 4, 256  # conversations of one batch; rows whose logits exist at once


def stored_bytes(stored: Stored) -> int:
    return sum(part.numel() * part.element_size() for part in stored if part is not None)


def round_trips(shards: ShardSet, chosen: Sequence[int]) -> list[list[str]]:
    """A line for each kind and storage, over all layers and tokens of the `chosen` samples."""
    spec, g = shards.manifest.spec, shards.manifest.geometry
    rows = []
    for kind in ("hidden", "key", "value", "query"):
        keys = [key for key in spec.keys() if key.startswith(f"{kind}.")]
        for storage in STORAGES if keys else ():
            error = power = inner = other = worst = 0.0
            size = tokens = 0
            for i in chosen:
                for key, x in shards.read(i, keys)[1].items():
                    stored = encode(x, storage, scale_group(key, g))
                    a, b = x.double(), decode(stored, torch.bfloat16).double()  # as the reader hands it on
                    error, power = error + float((a - b).square().sum()), power + float(a.square().sum())
                    inner, other = inner + float((a * b).sum()), other + float(b.square().sum())
                    heads = [y.flatten(1).view(-1, scale_group(key, g)) for y in (a, b)]
                    worst = max(worst, float(((heads[0] - heads[1]).norm(dim=-1) / heads[0].norm(dim=-1).clamp_min(1e-30)).max()) if len(a) else 0.0)
                    size += stored_bytes(stored)
                tokens += shards.samples[i].tokens if kind != "query" else shards.samples[i].rows
            bytes_of = size / tokens / len(keys)
            rows.append([kind, storage, f"{(error / power) ** 0.5:.5f}", f"{inner / (power * other) ** 0.5:.7f}", f"{worst:.4f}", f"{bytes_of:,.0f}"])
    return rows


def speeds() -> list[list[str]]:
    """GB/s of the plain bf16 numbers: encoding bf16, decoding to bf16, telling codes that are no number. One layer's keys of 2,048 tokens of Qwen3-8B."""
    x = torch.randn(2048, 8, 128).bfloat16()

    def rate(call: Callable[[], object]) -> str:
        call()
        begin, runs = time.process_time(), 0
        while (spent := time.process_time() - begin) < 0.2:
            call()
            runs += 1
        return f"{runs * x.nbytes / spent / 1e9:.1f}"

    rows = []
    for storage in ("fp8", "int8"):
        stored = encode(x, storage, 128)
        calls = (lambda s=storage: encode(x, s, 128), lambda s=stored: decode(s, torch.bfloat16), lambda s=stored: all_finite(s.data))
        rows.append([storage, *map(rate, calls)])
    return rows


@dataclass(frozen=True)
class Cut:
    """How a teacher is stored: its k best tokens (None: the hidden state), the dtype, and whether logits stand for log-probabilities."""

    k: int | None
    dtype: torch.dtype
    logits: bool = False

    def __str__(self) -> str:
        dtype = {torch.float32: "fp32", torch.bfloat16: "bf16"}[self.dtype]
        return f"last hidden, {dtype}" if self.k is None else f"top {self.k}, {dtype}{' logits' if self.logits else ''}"

    def bytes(self, width: int) -> int:
        """Of a supervised row, arg-max and log-sum-exp included."""
        return self.dtype.itemsize * width + 8 if self.k is None else (4 + self.dtype.itemsize) * self.k + 8

    def apply(self, batch: Batch, head: torch.Tensor) -> tuple[Batch, torch.Tensor]:
        """The batch with its teacher stored so, and the mass [R] that is left out."""
        if self.k is None:
            return replace(batch, teacher_hidden=batch.teacher_hidden.to(self.dtype).float()), torch.zeros(len(batch.teacher_lse))
        found = []
        for hidden, lse in zip(batch.teacher_hidden.split(ROWS), batch.teacher_lse[:, None].split(ROWS), strict=True):
            ids, best = best_logits(hidden @ head.T, self.k)
            logp = best.to(self.dtype).float() - lse if self.logits else (best - lse).to(self.dtype).float()
            found.append((ids, logp, 1 - (best - lse).double().exp().sum(-1)))
        ids, logp, outside = (torch.cat(parts) for parts in zip(*found, strict=True))
        return replace(batch, teacher_hidden=torch.empty(0), topk_ids=ids, topk_logp=logp), outside


@dataclass(frozen=True)
class Seen:
    """Over all rows: row_loss [M]; the gradient, flat; outside: mean mass left out."""

    row_loss: torch.Tensor
    gradient: torch.Tensor
    outside: float


def look(objective: Objective, batches: list[Batch], cut: Cut, head: torch.Tensor) -> Seen:
    objective.zero_grad()
    losses, outside = [], []
    for batch in batches:
        stored, left = cut.apply(batch, head)
        plan = plan_rows(stored, objective.config.steps)
        out = objective(stored, plan, torch.ones(()))
        out.loss.backward()
        losses.append(out.row_loss[plan.valid].detach())
        outside.append(left)
    gradient = torch.cat([p.grad.flatten() for p in objective.drafter.parameters() if p.grad is not None])
    return Seen(torch.cat(losses), gradient.clone(), float(torch.cat(outside).mean()))


def teachers(objective: Objective, batches: list[Batch], head: torch.Tensor, ks: Sequence[int]) -> list[list[str]]:
    """A line for each way of storing the teacher, against the teacher as it was captured."""
    whole = look(objective, batches, Cut(None, torch.float32), head)
    cuts = [Cut(None, torch.bfloat16), *(Cut(k, dtype) for k in ks for dtype in (torch.float32, torch.bfloat16)), Cut(ks[-1], torch.bfloat16, logits=True)]
    rows = []
    for cut in cuts:
        seen = look(objective, batches, cut, head)
        off = (seen.row_loss - whole.row_loss).abs().mean()
        bias = (seen.row_loss - whole.row_loss).mean()
        cosine = torch.nn.functional.cosine_similarity(seen.gradient.double(), whole.gradient.double(), dim=0)
        of_row = cut.bytes(head.shape[1])
        rows.append(
            [str(cut), f"{of_row:,}", f"{seen.outside:.5f}", f"{off:.5f}", f"{bias:+.5f}", f"{off / whole.row_loss.mean():.3%}", f"{float(cosine):.6f}"]
        )
    return rows


def drafter_for(shards: ShardSet, parts: TargetParts, folder: Path | None, vocab: int) -> Drafter:
    """The drafter in `folder`, or an untrained one of the hidden-only family that starts from the target's layers."""
    if folder is not None:
        drafter = load_drafter(folder, torch.device("cpu"), torch.float32)[0]
    else:
        spec, g = shards.manifest.spec, shards.manifest.geometry
        if not spec.hidden_layers:
            raise ConfigError("these features hold no hidden states; name a trained drafter by --drafter")
        drafter = build_drafter(HiddenOnlyConfig(hidden_layers=spec.hidden_layers[-3:]), g, min(vocab, g.vocab_size))
        counts = load_token_counts(shards.readers[0].folder, g.vocab_size)
        drafter.set_vocab(choose_vocab(counts, min(vocab, g.vocab_size)))
        initialise(drafter, InitConfig(layers="target"), parts, 0)
    drafter.bind(parts.embedding, parts.head)
    return drafter


def _batches(shards: ShardSet, chosen: Sequence[int], keys: Sequence[str]) -> Iterator[Batch]:
    for at in range(0, len(chosen), TOGETHER):
        yield collate([shards.read(i, keys) for i in chosen[at : at + TOGETHER]]).to("cpu", torch.float32)


@click.command()
@click.option("--shards", "folder", required=True, type=click.Path(path_type=Path), help="folder of captured features")
@click.option("--target", "target", required=True, type=click.Path(path_type=Path), help="Hugging Face folder of their target")
@click.option("--drafter", type=click.Path(path_type=Path), help="a drafter folder; without it an untrained one")
@click.option("--conversations", default=32, show_default=True, help="so many of the train split, those with answers")
@click.option("--ks", default="16,64,256", show_default=True, help="numbers of best tokens")
@click.option("--loss", type=click.Choice(["soft_ce", "kl", "lk_alpha", "lk_lambda"]), default="soft_ce", show_default=True)
@click.option("--steps", default=3, show_default=True, help="draft steps of the loss")
@click.option("--draft-vocab", default=4096, show_default=True, help="draft vocabulary of the untrained drafter")
@click.option("--threads", default=1, show_default=True, help="CPU threads")
def main(folder: Path, target: Path, drafter: Path | None, conversations: int, ks: str, loss: str, steps: int, draft_vocab: int, threads: int) -> None:
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    shards, parts = ShardSet.open(folder, "train"), load_parts(target)
    spec = shards.manifest.spec
    chosen = [i for i, sample in enumerate(shards.samples) if sample.rows][:conversations]
    rows = sum(shards.samples[i].rows for i in chosen)
    click.echo(
        f"{shards.manifest.target_name}: {len(chosen)} conversations, {sum(shards.samples[i].tokens for i in chosen):,} tokens, {rows:,} supervised rows"
    )
    click.echo(f"stored as hidden {spec.store.hidden}, KV {spec.store.kv}, query {spec.store.query}, teacher {spec.store.teacher}\n")
    header = ("kind", "storage", "error", "cosine", "worst group", "bytes a token and layer")
    click.echo(table(header, round_trips(shards, chosen)))
    click.echo("error: relative, Frobenius norm, over all layers and tokens; worst group: the largest relative error of one token and head\n")
    click.echo(table(("", "encode GB/s", "decode GB/s", "check GB/s"), speeds()))
    click.echo("of bf16 numbers, CPU time\n")
    if spec.teacher != "last_hidden":
        click.echo(f"teacher={spec.teacher}: what it leaves out can only be measured on teacher=last_hidden")
        return
    used = drafter_for(shards, parts, drafter, draft_vocab)
    objective = Objective(used, ObjectiveConfig(steps=steps, loss=loss), parts.head)  # type: ignore[arg-type]
    batches = list(_batches(shards, chosen, ("tokens", "turn", *spec.serving(objective.required_features()))))
    click.echo(f"{loss} of {steps} steps, draft vocabulary {len(used.d2t):,}, {'trained' if drafter else 'untrained'} {used.family} drafter")
    header = ("teacher", "bytes a row", "mass outside", "|difference|", "difference", "relative", "gradient cosine")
    click.echo(table(header, teachers(objective, batches, parts.head, [int(k) for k in ks.split(",")])))
    click.echo("difference: of a row's loss to that with the teacher as captured, mean over rows; relative: |difference| over the mean loss")


if __name__ == "__main__":
    main()
