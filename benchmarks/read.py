"""Features read back to tensors against the plain sequential read of the same files: `python -m benchmarks.read [--shards DIR]`.

Without --shards, random features of Qwen3-8B's shape are written first, once stored as bf16 and once in 8 bits. Each rate is bytes of the files
over wall time: raw, a read from the first byte to the last in pieces of 4 MiB, by one thread; threads, every
tensor of every sample, checked and decoded, by so many threads; loader, the batches that training gets (in 8 bits, until they are on its device), read
ahead by so many threads. From disk
means that the system was told to forget the files before each pass (posix_fadvise); if it keeps them, the two blocks of figures are alike.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click
import torch

from kvshot_ds.config import ObjectiveConfig
from kvshot_ds.describe import SHAPES
from kvshot_ds.features.codec import CODES, SCALE, encode
from kvshot_ds.features.manifest import Manifest, SplitCounts, shard_name
from kvshot_ds.features.shard import ShardSet, ShardWriter
from kvshot_ds.features.spec import FeatureSpec, Store, eagle3_hidden_layers, eagle3_kv_layers, scale_group, teacher_rows
from kvshot_ds.training.loader import step_batches
from kvshot_ds.training.schedule import Schedule

_PIECE = 1 << 22
_PER_SHARD = 4


def write_features(folder: Path, store: Store, size: int, tokens: int) -> None:
    """About `size` bytes of random features in conversations of `tokens` tokens, the latter two thirds supervised."""
    g = SHAPES["qwen3-8b"]
    spec = FeatureSpec(eagle3_hidden_layers(g.num_layers), eagle3_kv_layers(g.num_layers), "last_hidden", store)
    turn = torch.tensor([0] * (tokens // 3) + [1] * (tokens - tokens // 3), dtype=torch.int32)
    rows = len(teacher_rows(turn.numpy()))
    random = torch.Generator().manual_seed(0)
    sample: dict[str, torch.Tensor] = {}
    for key, shape in spec.shapes(g, tokens, rows).items():
        storage = spec.store.of(key)
        if storage is None:
            sample[key] = torch.zeros(shape, dtype=spec.dtype(key)) if key != "turn" else turn
            continue
        noise = torch.randn(shape, generator=random)
        data, scale = encode(noise, storage, scale_group(key, g)) if storage in CODES else (noise.to(spec.dtype(key)), None)
        sample |= {key: data} if scale is None else {key: data, f"{key}{SCALE}": scale}
    count = max(_PER_SHARD, size // sum(t.numel() * t.itemsize for t in sample.values()))
    indexes = []
    for number, first in enumerate(range(0, count, _PER_SHARD)):
        with ShardWriter(folder, shard_name("train", number)) as writer:
            keys = [f"c-{i:06d}" for i in range(first, min(count, first + _PER_SHARD))]
            for key in keys:
                writer.write(key, sample, {"id": key})
            indexes.append(writer.commit(keys))
    Manifest("random", "0" * 64, "0" * 64, g, spec, {"train": SplitCounts.of(indexes)}, 0).save(folder)


def raw(shards: ShardSet) -> float:
    """Bytes/s of a plain read, as of the two others."""
    buffer, began = bytearray(_PIECE), time.perf_counter()
    for reader in shards.readers:
        with open(str(reader.path), "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return sum(reader.index.bytes for reader in shards.readers) / (time.perf_counter() - began)


def threads(shards: ShardSet, workers: int) -> float:
    """At most two samples a thread are in memory."""
    began, waiting = time.perf_counter(), []
    with ThreadPoolExecutor(workers) as pool:
        for i in range(len(shards)):
            waiting.append(pool.submit(shards.read, i))
            if len(waiting) == 2 * workers:
                waiting.pop(0).result()
        for last in waiting:
            last.result()
    return sum(sample.size for sample in shards.samples) / (time.perf_counter() - began)


def loader(shards: ShardSet, workers: int) -> float:
    """Of the second half of an epoch: the first starts the threads and fills their queues."""
    schedule = Schedule([(s.tokens, s.rows) for s in shards.samples], 1, 1, 1, 1, 0, 0)
    keys, skipped = ("tokens", "turn", *shards.manifest.spec.keys()), schedule.steps // 2
    began = time.perf_counter()
    for step, _ in enumerate(step_batches(shards, keys, schedule, 0, ObjectiveConfig(), 0, workers, pin=False)):
        if step == skipped:
            began = time.perf_counter()
    later = [i for step in range(skipped + 1, schedule.steps) for slot in schedule.step(step).slots[0] for i in slot]
    return sum(shards.samples[i].size for i in later) / (time.perf_counter() - began)


def forget(shards: ShardSet) -> None:
    """Tells the system to drop the files from memory."""
    for reader in shards.readers:
        file = os.open(str(reader.path), os.O_RDONLY)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def rates(shards: ShardSet, ways: Sequence[Callable[[], float]], repeats: int, cold: bool) -> list[tuple[float, float]]:
    """Bytes/s, and CPU seconds a byte over all threads, of each way: medians over `repeats`. They take turns, so that a slow minute hits them alike."""
    size = sum(reader.index.bytes for reader in shards.readers)
    found: list[list[tuple[float, float]]] = [[] for _ in ways]
    for _ in range(repeats):
        for way, seen in zip(ways, found, strict=True):
            if cold:
                forget(shards)
            began = time.process_time()
            rate = way()
            seen.append((rate, (time.process_time() - began) / size))
    return [(statistics.median(rate for rate, _ in seen), statistics.median(cpu for _, cpu in seen)) for seen in found]


def compare(name: str, folder: Path, workers: int, repeats: int) -> None:
    shards = ShardSet.open(folder, "train")
    size = sum(reader.index.bytes for reader in shards.readers)
    click.echo(f"{name}: {len(shards)} conversations, {size / 1e6:,.0f} MB, {size / sum(s.tokens for s in shards.samples):,.0f} bytes a token")
    for cold in (True, False):
        if not cold:
            raw(shards)
        found = rates(shards, (lambda: raw(shards), lambda: threads(shards, workers), lambda: loader(shards, workers)), repeats, cold)
        words = [
            f"{way} {rate / 1e6:,.0f} MB/s ({rate / found[0][0]:.2f}; CPU {cpu * 1e9:.2f} s/GB)"
            for way, (rate, cpu) in zip(("raw", "threads", "loader"), found, strict=True)
        ]
        click.echo(f"  {'from disk' if cold else 'from memory':12} {', '.join(words)}")


@click.command()
@click.option("--shards", type=click.Path(path_type=Path), help="local folder of features, in place of random ones")
@click.option("--size", default=1 << 30, show_default=True, help="of the random features of one way to store them [bytes]")
@click.option("--tokens", default=512, show_default=True, help="of a conversation")
@click.option("--workers", default=2, show_default=True, help="threads that read")
@click.option("--repeats", default=3, show_default=True, help="passes; the median is printed")
@click.option("--folder", type=click.Path(path_type=Path), help="where random features are written, for a disk other than that of temporary files")
def main(shards: Path | None, size: int, tokens: int, workers: int, repeats: int, folder: Path | None) -> None:
    """Read features back to tensors, and the same files plainly."""
    torch.set_num_threads(1)
    if shards:
        compare(str(shards), shards, workers, repeats)
        return
    for name, store in {"bf16": Store.all("bf16"), "fp8": Store("fp8", "fp8", "fp8", "bf16"), "int8": Store("int8", "int8", "int8", "bf16")}.items():
        with tempfile.TemporaryDirectory(dir=folder) as made:
            write_features(Path(made), store, size, tokens)
            compare(name, Path(made), workers, repeats)


if __name__ == "__main__":
    main()
