"""Capture against a bare forward of the same model over the same batches, in tokens/s.

    python -m benchmarks.capture --target DIR

forward: the decoder layers alone, `model.model(ids, use_cache=False)`, nothing kept. forward + logits: with the LM head over all rows.
forward + rows: with the head over the supervised rows, which the teacher signal needs whoever computes it.
capture: `data_prep.capture`: the same forward with hidden states, keys and values and the teacher at the supervised rows, stored as bf16
in tars that are hashed, flushed to disk and indexed, shard after shard as a Ray worker does it (from two threads).

The contenders take turns and begin in another order every round. With `--clock cpu` the time of all threads counts, so that what a capture does
beside the forward counts in full; by the wall it may hide behind it.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click
import numpy as np
import torch

from benchmarks.measure import CLOCKS, table
from data_prep.capture import CaptureJob, CaptureWorker, Unit, batches, read_unit
from data_prep.orchestrate import cut
from kvshot_ds.config import FeatureConfig, TargetConfig
from kvshot_ds.features.spec import FeatureSpec, teacher_rows
from kvshot_ds.target import Target


def conversations(folder: Path, count: int, longest: int, vocab_size: int) -> Path:
    """Prepared conversations of random tokens: log-normal lengths around a third of `longest`, the first 30% of each a prompt."""
    random = np.random.default_rng(0)
    lengths = np.clip(np.exp(random.normal(np.log(longest / 3), 0.5, count)), 16, longest).astype(int)
    with open(folder / "train.jsonl", "w", encoding="utf-8") as file:
        for number, n in enumerate(lengths):
            prompt = int(0.3 * n)
            line = {"id": f"c{number}", "tokens": random.integers(0, vocab_size, n).tolist(), "turn": [0] * prompt + [1] * (n - prompt)}
            file.write(json.dumps(line) + "\n")
    return folder / "train.jsonl"


def forward(target: Target, units: list[Unit], tokens_per_batch: int, head: str) -> None:
    """The batches that a capture makes of `units`, through the model. head: rows that go through the LM head: none, all, supervised."""
    for unit in units:
        found, _ = read_unit(unit, target.geometry.vocab_size, target.geometry.max_positions)
        for batch in batches(found, tokens_per_batch):
            ids = torch.zeros(len(batch), max(len(c.tokens) for c in batch), dtype=torch.long)
            for row, conversation in enumerate(batch):
                ids[row, : len(conversation.tokens)] = torch.as_tensor(conversation.tokens)
            rows = torch.cat([torch.from_numpy(teacher_rows(c.turn)) + row * ids.shape[1] for row, c in enumerate(batch)]).to(target.device)
            with torch.inference_mode():
                last = target.model.model(ids.to(target.device), use_cache=False).last_hidden_state.flatten(0, 1)
                if head != "none":
                    target.model.get_output_embeddings()(last if head == "all" else last[rows])
            if target.device.type == "cuda":
                torch.cuda.synchronize()


def captures(worker: CaptureWorker, units: list[Unit]) -> int:
    """As an actor with two calls in flight; bytes written."""
    with ThreadPoolExecutor(2) as calls:
        return sum(done.index.bytes for done in calls.map(worker.work, units))


@click.command(help=__doc__)
@click.option("--target", "folder", type=click.Path(path_type=Path), required=True, help="Hugging Face folder of the target")
@click.option("--conversations", "count", default=24, show_default=True, help="conversations a round")
@click.option("--per-shard", default=8, show_default=True, help="conversations in a shard")
@click.option("--longest", default=768, show_default=True, help="tokens of the longest conversation")
@click.option("--tokens-per-batch", default=4096, show_default=True, help="as capture.tokens_per_batch")
@click.option("--dtype", type=click.Choice(["fp32", "bf16"]), default="fp32", show_default=True, help="as target.dtype")
@click.option("--teacher", type=click.Choice(["last_hidden", "none"]), default="last_hidden", show_default=True, help="as capture.features.teacher")
@click.option("--rounds", default=3, show_default=True, help="rounds; medians are printed")
@click.option("--threads", default=1, show_default=True, help="CPU threads of the forward (a second thread writes)")
@click.option("--clock", type=click.Choice(sorted(CLOCKS)), default="wall", show_default=True, help="cpu: of all threads together")
@click.option("--out", type=click.Path(path_type=Path), help="where shards are written and removed again; the system's temporary folder")
def main(
    folder: Path,
    count: int,
    per_shard: int,
    longest: int,
    tokens_per_batch: int,
    dtype: str,
    teacher: str,
    rounds: int,
    threads: int,
    clock: str,
    out: Path | None,
) -> None:
    config = TargetConfig.model_validate({"path": folder, "dtype": dtype})
    torch.set_num_threads(threads)
    target = Target.load(config)
    spec = FeatureSpec.resolve(FeatureConfig.model_validate({"teacher": teacher}), target.geometry)
    with tempfile.TemporaryDirectory(dir=out) as name:
        units, _ = cut("train", conversations(Path(name), count, longest, target.geometry.vocab_size), per_shard)
        worker = CaptureWorker(CaptureJob(config, spec, tokens_per_batch, Path(name) / "features", threads))
        worker._target = target
        written = captures(worker, units[:1])  # warm, as is the forward after it
        contenders: dict[str, Callable[[], object]] = {
            "forward": lambda: forward(target, units, tokens_per_batch, "none"),
            "forward + logits": lambda: forward(target, units, tokens_per_batch, "all"),
            "forward + rows": lambda: forward(target, units, tokens_per_batch, "supervised"),
            "capture": lambda: captures(worker, units),
        }
        seconds: dict[str, list[float]] = {name: [] for name in contenders}
        for turn in range(rounds):
            order = list(contenders)[turn % 4 :] + list(contenders)[: turn % 4]
            for contender in order:
                began = CLOCKS[clock]()
                result = contenders[contender]()
                seconds[contender].append(CLOCKS[clock]() - began)
                written = result if isinstance(result, int) else written
        tokens = sum(len(c.tokens) for unit in units for c in read_unit(unit, target.geometry.vocab_size, target.geometry.max_positions)[0])
    click.echo(f"{target.name} in {dtype} on {target.device}, {threads} thread(s), {count} conversations, {tokens:,} tokens, teacher={teacher}")
    click.echo(f"{', '.join(spec.keys())}: {written / tokens:,.0f} bytes a token; {clock} clock, median of {rounds} rounds")
    speed = {name: tokens / statistics.median(found) for name, found in seconds.items()}
    rows = []
    for contender in contenders:
        shares = [f"{speed[contender] / speed[other]:.3f}" for other in contenders if other != "capture"]
        rows.append((contender, f"{statistics.median(seconds[contender]):.2f}", f"{speed[contender]:,.0f}", *shares))
    click.echo(table(("", "seconds", "tokens/s", "/ forward", "/ + logits", "/ + rows"), rows))


if __name__ == "__main__":
    main()
