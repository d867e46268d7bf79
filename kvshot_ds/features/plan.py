"""Bytes that a capture will take on disk, before anything is captured: exact sizes of samples and shards from shapes alone."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from math import prod
from pathlib import Path

import numpy as np
import torch

from kvshot_ds.config import Recipe
from kvshot_ds.errors import ConfigError
from kvshot_ds.features.codec import stored_tensors
from kvshot_ds.features.manifest import SPLITS, Split
from kvshot_ds.features.spec import FeatureSpec, teacher_rows
from kvshot_ds.geometry import Geometry

KINDS = ("hidden", "kv", "query", "teacher", "rest")
_KIND_OF = {"hidden": "hidden", "key": "kv", "value": "kv", "query": "query", "teacher": "teacher"}
_BLOCK, _RECORD = 512, 10240  # a tar is made of blocks, and filled up to a whole record
# Names and order of the dtypes as safetensors writes them: tensors of the first come first, of one dtype by name.
_DTYPES = {torch.float32: "F32", torch.int32: "I32", torch.bfloat16: "BF16", torch.float8_e4m3fn: "F8_E4M3", torch.int8: "I8"}
_META = 128  # json beside a sample: id, source, file, line; below one block in any case [bytes]


@dataclass(frozen=True)
class Size:
    """samples, tokens, rows (supervised teacher rows) and the bytes of their tars, in all and by KINDS; rest: tokens, turns, headers, padding.
    left_out: lines of the prepared split that a capture could not take."""

    samples: int
    tokens: int
    rows: int
    bytes: int
    kinds: dict[str, int]
    left_out: int = 0

    @property
    def per_token(self) -> float:
        """Bytes of a token."""
        return self.bytes / max(1, self.tokens)


def sample_bytes(spec: FeatureSpec, g: Geometry, tokens: int, rows: int, meta_bytes: int = _META) -> int:
    """Size of one sample in its tar: two members with their headers, whole blocks. meta_bytes: of its json."""
    return sum(sample_kinds(spec, g, tokens, rows).values()) + _blocks(meta_bytes) - _BLOCK


def sample_kinds(spec: FeatureSpec, g: Geometry, tokens: int, rows: int) -> dict[str, int]:
    """`sample_bytes` by KINDS, with a json of one block."""
    tensors = stored_tensors(spec, g, tokens, rows)
    kinds = dict.fromkeys(KINDS, 0)
    header: dict[str, object] = {}
    end, order = 0, list(_DTYPES)
    for name, (dtype, shape) in sorted(tensors.items(), key=lambda item: (order.index(item[1][0]), item[0])):
        size = dtype.itemsize * prod(shape)
        kinds[_KIND_OF.get(name.split(".")[0], "rest")] += size
        header[name] = {"dtype": _DTYPES[dtype], "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    length = len(json.dumps(header, separators=(",", ":")))
    file = 8 + -(-length // 8) * 8 + end
    kinds["rest"] += 3 * _BLOCK + _blocks(file) - sum(kinds.values())  # two tar headers, the json
    return kinds


def prepared(folder: Path, spec: FeatureSpec, g: Geometry, conversations_per_shard: int) -> dict[str, Size]:
    """By split, what a capture of the prepared conversations in `folder` will take. Reads the files line by line.

    Raises ConfigError if a split is not there or not readable. Only a file's own order of lines, their tokens and turns count.
    """
    return {split: _total(_samples(Path(folder) / f"{split}.jsonl", g), spec, g, conversations_per_shard) for split in SPLITS}


def conversations(folder: Path, split: Split, g: Geometry) -> list[tuple[int, int]]:
    """(tokens, teacher rows) of the prepared conversations of a split that a capture can take. Raises ConfigError as `prepared` does."""
    return [sample[:2] for sample in _samples(Path(folder) / f"{split}.jsonl", g) if sample is not None]


def guessed(spec: FeatureSpec, g: Geometry, conversations: int, tokens: int, supervised: float, conversations_per_shard: int) -> Size:
    """What so many conversations of `tokens` tokens will take, a share `supervised` of which are teacher rows."""
    one = (tokens, round(tokens * supervised), _META)
    shards, left = divmod(conversations, conversations_per_shard)
    whole, last = (_total(repeat(one, count), spec, g, conversations_per_shard) for count in (conversations_per_shard if shards else 0, left))
    kinds = {kind: shards * whole.kinds[kind] + last.kinds[kind] for kind in KINDS}
    return Size(conversations, conversations * tokens, conversations * one[1], shards * whole.bytes + last.bytes, kinds)


@dataclass(frozen=True)
class Guess:
    """What is to be captured, before it is prepared: conversations of so many tokens, a share `supervised` of which the assistant wrote."""

    conversations: int
    tokens: int
    supervised: float


def lines(recipe: Recipe, name: str, g: Geometry, guess: Guess | None) -> list[str]:
    """What capturing with `recipe` from the target `name` of geometry `g` takes on disk, as a table of bytes a token; of the prepared
    conversations, or of `guess`. Raises ConfigError: layers out of range, nothing prepared."""
    options = recipe.capture
    spec, together = FeatureSpec.resolve(options.features, g), options.conversations_per_shard
    if guess:
        sizes = {"guess": guessed(spec, g, guess.conversations, guess.tokens, guess.supervised, together)}
    else:
        sizes = prepared(recipe.prepared_dir, spec, g, together)
    whole = sum(size.bytes for size in sizes.values())
    store = spec.store
    teacher = f"top {spec.teacher_k}" if spec.teacher == "top_k" else spec.teacher
    head = ["", "conversations", "tokens", "supervised", *KINDS, "bytes/token", "KiB/token", "GB"]
    rows = [[split, *_row(size)] for split, size in sizes.items()]
    left_out = sum(size.left_out for size in sizes.values())
    return [
        f"target {name}: hidden layers {list(spec.hidden_layers)} as {store.hidden}, KV layers {list(spec.kv_layers)} as {store.kv}, "
        f"query layers {list(spec.query_layers)} as {store.query}, teacher {teacher} as {store.teacher}",
        "",
        *aligned([head, *rows]),
        "",
        f"{whole:,} bytes in all. By kind, bytes of a token; rest: tokens, turns, headers and padding. Index files and manifest come on top.",
        *([f"{left_out} lines are of no use to a capture, which lists them with reasons in quarantine.jsonl"] if left_out else []),
    ]


def _row(size: Size) -> list[str]:
    by_token = [f"{size.kinds[kind] / max(1, size.tokens):,.0f}" for kind in KINDS]
    totals = [f"{size.samples:,}", f"{size.tokens:,}", f"{size.rows / max(1, size.tokens):.1%}"]
    return [*totals, *by_token, f"{size.per_token:,.0f}", f"{size.per_token / 1024:.2f}", f"{size.bytes / 1e9:,.3f}"]


def _total(samples: Iterator[tuple[int, int, int] | None], spec: FeatureSpec, g: Geometry, per_shard: int) -> Size:
    """samples: (tokens, rows, bytes of the json) of each line, None for one that is of no use; a shard takes so many lines."""
    kinds: Counter[str] = Counter(dict.fromkeys(KINDS, 0))
    known: dict[tuple[int, int], dict[str, int]] = {}
    count = tokens = rows = left_out = line = shard = total = 0
    for line, sample in enumerate(samples, 1):
        if sample is None:
            left_out += 1
        else:
            if sample[:2] not in known:
                known[sample[:2]] = sample_kinds(spec, g, *sample[:2])
            parts = known[sample[:2]]
            more = _blocks(sample[2]) - _BLOCK
            kinds.update(parts)
            kinds["rest"] += more
            shard += sum(parts.values()) + more
            count, tokens, rows = count + 1, tokens + sample[0], rows + sample[1]
        if line % per_shard == 0:
            total, shard = total + _tar(shard), 0
    if line % per_shard:
        total += _tar(shard)
    kinds["rest"] += total - kinds.total()
    return Size(count, tokens, rows, total, dict(kinds), left_out)


def _samples(file: Path, g: Geometry) -> Iterator[tuple[int, int, int] | None]:
    try:
        with open(file, encoding="utf-8", errors="replace") as lines:
            for number, text in enumerate(lines, 1):
                yield _sizes(text, file.name, number, g)
    except OSError as error:
        raise ConfigError(f"{file}: not readable ({error.strerror}); run kvshot prep, or give --conversations and --tokens-per-conversation") from None


def _sizes(text: str, file: str, line: int, g: Geometry) -> tuple[int, int, int] | None:
    try:
        record = json.loads(text)
        tokens, turn = len(record["tokens"]), np.asarray(record["turn"], dtype=np.int32)
        if turn.shape != (tokens,) or not 0 < tokens <= g.max_positions:
            return None
        meta = {"id": record.get("id"), "source": record.get("source"), "file": file, "line": line}
        meta_bytes = len(json.dumps(meta, ensure_ascii=False).encode())
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return None
    return tokens, len(teacher_rows(turn)), meta_bytes


def _blocks(size: int) -> int:
    return -(-size // _BLOCK) * _BLOCK


def _tar(size: int) -> int:
    """A tar with members of `size` bytes: two empty blocks end it."""
    return -(-(size + 2 * _BLOCK) // _RECORD) * _RECORD


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(w) if i else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))).rstrip() for row in rows]
