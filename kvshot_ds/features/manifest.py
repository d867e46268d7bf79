"""What lies in a folder of feature shards: one index per shard, and the manifest that says the folder is complete."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import torch

from kvshot_ds.errors import ConfigError, KvshotError
from kvshot_ds.features.spec import FeatureSpec
from kvshot_ds.files import AnyPath, exists, location, read_bytes, read_json, write_atomic, write_json
from kvshot_ds.geometry import Geometry
from kvshot_ds.typed import parse

FORMAT = "kvshot-features/2"
Split = Literal["train", "heldout"]
SPLITS: tuple[Split, ...] = get_args(Split)
_SHARD = re.compile(r"(train|heldout)-\d{6}\.tar")
KEY = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True)
class Sample:
    """One conversation in a shard. offset, size: the bytes of its safetensors member in the tar. tokens: S. rows: R, its teacher rows."""

    key: str
    offset: int
    size: int
    tokens: int
    rows: int


@dataclass(frozen=True)
class Rejected:
    """A conversation that was left out. file and line (1-based) say where it stands, record is its beginning (at most 200 characters)."""

    file: str
    line: int
    reason: str
    record: str


@dataclass(frozen=True)
class ShardIndex:
    """`<shard>.index.json`: written after its tar, so that its presence means that the tar is whole.

    shard: file name of the tar. bytes, sha256: of the tar. samples: in the order of the prepared split, whatever their order in the
    tar. rejected: conversations of its slice that are not in it. No time and no version: made again, it is the same file.
    """

    shard: str
    bytes: int
    sha256: str
    samples: tuple[Sample, ...]
    rejected: tuple[Rejected, ...]

    @staticmethod
    def path(folder: AnyPath, shard: str) -> AnyPath:
        return folder / f"{shard.removesuffix('.tar')}.index.json"

    def save(self, folder: AnyPath) -> None:
        write_json(self.path(folder, self.shard), {"format": FORMAT, **asdict(self)})

    @classmethod
    def load(cls, folder: AnyPath, shard: str) -> ShardIndex:
        """The index of tar `shard`. Raises KvshotError naming the field: missing, of another format, of a wrong type, with an
        unsafe key, or with a sample that does not lie within its tar."""
        path = cls.path(folder, shard)
        try:
            found = parse(cls, _versioned(path))
        except ValueError as error:
            raise KvshotError(f"{path}: not the index of a shard ({error}); delete it and run kvshot capture again") from None
        if found.shard != shard:
            raise KvshotError(f"{path}: is the index of {found.shard!r}, expected {shard!r}")
        for number, sample in enumerate(found.samples):
            check_key(sample.key, path)
            if not (0 <= sample.offset < sample.offset + sample.size <= found.bytes and 0 <= sample.rows <= sample.tokens <= sample.size // 8):
                raise KvshotError(
                    f"{path}: samples[{number}]: {sample} does not lie within a tar of {found.bytes} bytes; delete it and run kvshot capture again"
                )
        return found


@dataclass(frozen=True)
class SplitCounts:
    """One split: its tars in order, and totals over them. rows: supervised teacher rows. bytes: of the tars."""

    shards: tuple[str, ...]
    samples: int
    tokens: int
    rows: int
    bytes: int

    @classmethod
    def of(cls, indexes: Sequence[ShardIndex]) -> SplitCounts:
        samples = [sample for index in indexes for sample in index.samples]
        return cls(
            shards=tuple(index.shard for index in indexes),
            samples=len(samples),
            tokens=sum(s.tokens for s in samples),
            rows=sum(s.rows for s in samples),
            bytes=sum(index.bytes for index in indexes),
        )


@dataclass(frozen=True)
class Manifest:
    """`manifest.json`, written last: its presence means that every shard it names is there.

    target_name, target_digest (target.weights_digest), geometry, tokenizer_digest: the model the features come from. spec: what
    was captured. splits: counts. rejected: conversations left out (quarantine.jsonl lists them). Times and versions stand in
    captures.jsonl and provenance.json, which are no part of the data set.
    """

    target_name: str
    target_digest: str
    tokenizer_digest: str
    geometry: Geometry
    spec: FeatureSpec
    splits: dict[Split, SplitCounts]
    rejected: int

    @staticmethod
    def path(folder: AnyPath) -> AnyPath:
        return folder / "manifest.json"

    def save(self, folder: AnyPath) -> None:
        write_json(self.path(folder), {"format": FORMAT, **asdict(self)})

    @classmethod
    def load(cls, folder: AnyPath) -> Manifest:
        """The manifest of `folder`. Raises ConfigError: capture not run or not complete, another format, unsafe shard
        names, or a field (which the text names) that is missing, unknown or of a wrong type."""
        path = cls.path(location(folder))
        if not exists(path):
            raise ConfigError(f"{path}: not there; the features were not captured, or not to the end: run kvshot capture")
        try:
            found = parse(cls, _versioned(path))
        except ValueError as error:
            raise ConfigError(f"{path}: not a manifest of feature shards ({error})") from None
        if (what := _impossible(found)) is not None:
            raise ConfigError(f"{path}: not a manifest of feature shards ({what})")
        for shard in (shard for counts in found.splits.values() for shard in counts.shards):
            if not _SHARD.fullmatch(shard):
                raise ConfigError(f"{path}: shard name {shard!r} is not of the form train-000000.tar; refused")
        return found


def _impossible(found: Manifest) -> str | None:
    """The first value that no capture writes."""
    g, spec = found.geometry, found.spec
    sizes = {name: getattr(g, name) for name in ("num_layers", "hidden_size", "heads", "kv_heads", "head_dim", "vocab_size")}
    layers = {name: getattr(spec, name) for name in ("hidden_layers", "kv_layers", "query_layers")}
    bad = [f"geometry.{name}: {size}" for name, size in sizes.items() if not 0 < size <= 1 << 24]
    bad += [f"spec.{name}: {kept}" for name, kept in layers.items() if list(kept) != sorted({*kept} & {*range(min(g.num_layers, 1 << 16))})]
    bad += [] if (0 < spec.teacher_k <= g.vocab_size if spec.teacher == "top_k" else spec.teacher_k == 0) else [f"spec.teacher_k: {spec.teacher_k}"]
    bad += [f"splits.{split}: {counts}"[:200] for split, counts in found.splits.items() if len({*counts.shards}) < len(counts.shards)]
    return bad[0] if bad else None


def check_key(key: str, where: AnyPath) -> None:
    """Raises KvshotError unless `key` is a plain name: no dots (WebDataset splits there), no slashes, at most 64 characters."""
    if not KEY.fullmatch(key):
        raise KvshotError(f"{where}: sample key {key!r} is not a plain name (letters, digits, _ and -, at most 64); refused")


def shard_name(split: Split, number: int) -> str:
    return f"{split}-{number:06d}.tar"


def require(manifest: Manifest, needed: FeatureSpec, target_digest: str) -> None:
    """Raises ConfigError unless the features come from the target of `target_digest` and hold every key that `needed` names; the
    text then names the missing keys and the capture that would make them."""
    if manifest.target_digest != target_digest:
        raise ConfigError(
            f"the features were captured from another target: {manifest.target_name} with weights {manifest.target_digest[:16]}, but target.path "
            f"holds weights {target_digest[:16]}; set target.path to that target, or capture into another folder (kvshot capture RECIPE shards=NEW_FOLDER)"
        )
    missing = manifest.spec.missing(needed)
    if missing:
        has = manifest.spec
        layers = {name: sorted({*getattr(has, name), *getattr(needed, name)}) for name in ("hidden_layers", "kv_layers", "query_layers")}
        options = [f"'capture.features.{name}={chosen or 'none'}'" for name, chosen in layers.items() if chosen or name != "query_layers"]
        options.append(f"capture.features.teacher={needed.teacher if has.teacher == 'none' else has.teacher}")
        options += [f"capture.features.teacher_k={has.teacher_k}"] if has.teacher_k else []
        options += [f"capture.features.store.{kind}={how}" for kind, how in asdict(has.store).items() if how != "bf16"]
        command = f"kvshot capture RECIPE {' '.join(options)} shards=NEW_FOLDER"
        raise ConfigError(f"the features lack {', '.join(missing)}, which this run reads; capture them: {command}")


def worker_seconds(folder: AnyPath) -> float | None:
    """Time that workers spent on the shards of `folder`, summed over `captures.jsonl` (one line a shard, no part of the data set); None without it."""
    path = folder / "captures.jsonl"
    if not exists(path):
        return None
    total = 0.0
    for line in read_bytes(path).splitlines():
        try:
            total += float(json.loads(line)["seconds"])
        except (ValueError, KeyError, TypeError):  # a line that a crash cut off
            continue
    return round(total, 3)


def save_token_counts(folder: AnyPath, counts: torch.Tensor) -> None:
    """Writes `token_counts.safetensors`: how often each token is a label of the train split, [V] int64."""
    from safetensors.torch import save

    write_atomic(folder / "token_counts.safetensors", save({"counts": counts}))


def load_token_counts(folder: AnyPath, vocab_size: int) -> torch.Tensor:
    """Counts [V] int64 of the labels x_{j+1} at the train split's teacher rows j: what a draft vocabulary is chosen from.
    Raises KvshotError if the file is missing or of another vocabulary."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    path = location(folder) / "token_counts.safetensors"
    try:
        counts = load(read_bytes(path)).get("counts")
    except (OSError, SafetensorError) as error:
        raise KvshotError(f"{path}: not readable ({error}); delete manifest.json there and run kvshot capture again") from None
    if counts is None or counts.dtype != torch.int64 or counts.shape != (vocab_size,):
        raise KvshotError(f"{path}: expected counts int64 [{vocab_size}], found {'none' if counts is None else f'{counts.dtype} {list(counts.shape)}'}")
    return counts


def _versioned(path: AnyPath) -> dict[str, Any]:
    """The JSON mapping in `path` without its format field. Raises KvshotError (ConfigError for another format)."""
    try:
        value = read_json(path)
    except FileNotFoundError:
        raise KvshotError(f"{path}: not there; run kvshot capture again") from None
    except (OSError, ValueError) as error:
        raise KvshotError(f"{path}: not readable as JSON ({error})") from None
    found = value.get("format") if isinstance(value, dict) else None
    if found != FORMAT:
        raise ConfigError(f"{path}: format {found!r}, this version reads {FORMAT!r}; capture again, or use the version that wrote it")
    return {name: part for name, part in value.items() if name != "format"}
