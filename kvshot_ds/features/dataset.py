"""Data sets made of captured ones: several merged into one, or a part of one. Shards that stay as they are are linked or copied, others
are written anew. The manifest comes last: a folder without it is not there yet, and the same command completes it."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from kvshot_ds.errors import ConfigError, KvshotError
from kvshot_ds.features.codec import stored_tensors
from kvshot_ds.features.manifest import SPLITS, Manifest, Sample, ShardIndex, Split, SplitCounts, load_token_counts, save_token_counts, shard_name
from kvshot_ds.features.shard import ShardReader, ShardWriter, count_labels, written_in
from kvshot_ds.features.spec import FeatureSpec
from kvshot_ds.features.verify import manifest_facts, quarantine
from kvshot_ds.features.walk import TarError, Walk, opened
from kvshot_ds.files import AnyPath, aside, exists, filesystem, location, names, put, read_bytes, read_json, size, storage_errors, write_atomic, write_json
from kvshot_ds.provenance import origin
from kvshot_ds.typed import dotted

_BY_LINE = re.compile(r"(train|heldout)-\d{8}")
_SHOWN = 10  # of a list in an error


@dataclass(frozen=True)
class Source:
    """A data set that is read. digest: of manifest and shards."""

    folder: AnyPath
    manifest: Manifest
    indexes: dict[Split, tuple[ShardIndex, ...]]
    digest: str

    @classmethod
    def open(cls, folder: AnyPath | str) -> Source:
        """Raises KvshotError naming what is missing or not readable."""
        folder = location(folder)
        manifest = Manifest.load(folder)
        with ThreadPoolExecutor(16) as pool:  # behind a URL each index is an exchange with the store
            indexes = {split: tuple(pool.map(lambda shard: ShardIndex.load(folder, shard), counts.shards)) for split, counts in manifest.splits.items()}
        total = hashlib.sha256(read_bytes(Manifest.path(folder)))
        total.update("".join(index.sha256 for split in SPLITS for index in indexes.get(split, ())).encode())
        return cls(folder, manifest, indexes, total.hexdigest())

    def reader(self, index: ShardIndex) -> ShardReader:
        return ShardReader(self.folder, index, self.manifest.spec, self.manifest.geometry)


@dataclass(frozen=True)
class Piece:
    """What becomes one shard of the new data set: the samples `keep` (keys) of one shard, in the order of its index."""

    split: Split
    source: Source
    index: ShardIndex
    keep: frozenset[str]

    @property
    def samples(self) -> tuple[Sample, ...]:
        return tuple(sample for sample in self.index.samples if sample.key in self.keep)

    @property
    def whole(self) -> bool:
        return len(self.keep) == len(self.index.samples)


@dataclass(frozen=True)
class FewerFeatures:
    """Layers that are kept of each kind (None: all that there are), and whether the teacher is left out."""

    hidden_layers: tuple[int, ...] | None = None
    kv_layers: tuple[int, ...] | None = None
    query_layers: tuple[int, ...] | None = None
    no_teacher: bool = False

    def of(self, has: FeatureSpec, folder: AnyPath) -> FeatureSpec:
        """Raises ConfigError naming what `has` does not hold."""
        spec = replace(
            has,
            hidden_layers=has.hidden_layers if self.hidden_layers is None else self.hidden_layers,
            kv_layers=has.kv_layers if self.kv_layers is None else self.kv_layers,
            query_layers=has.query_layers if self.query_layers is None else self.query_layers,
            teacher="none" if self.no_teacher else has.teacher,
            teacher_k=0 if self.no_teacher else has.teacher_k,
        )
        missing = [key for key in spec.keys() if key not in has.keys()]
        if missing:
            raise ConfigError(f"{folder}: {', '.join(missing)} were not captured; it holds {', '.join(has.keys())}")
        return spec


@dataclass(frozen=True)
class Made:
    """The new data set. linked: shards taken over as they are; rewritten: the others. left_out: keys of conversations that were not taken."""

    folder: str
    conversations: dict[Split, int]
    linked: int
    rewritten: int
    bytes: int
    left_out: tuple[str, ...] = field(default=(), repr=False)

    def lines(self) -> list[str]:
        counts = ", ".join(f"{count:,} {split}" for split, count in self.conversations.items())
        out = [f"{self.folder}: {counts} conversations, {self.bytes / 1e6:,.1f} MB, {self.linked} shards taken over, {self.rewritten} rewritten"]
        return out + ([f"left out, being there already: {len(self.left_out)}: {_some(self.left_out)}"] if self.left_out else [])


def lowest(keys: Sequence[str], count: int) -> list[int]:
    """Places of the `count` lowest keys, ascending. Keys are hashes: a smaller set lies within a larger one, and each is a random draw."""
    return sorted(sorted(range(len(keys)), key=lambda i: keys[i])[:count])


def merge(folders: Sequence[AnyPath | str], out: AnyPath | str, drop_duplicates: bool = False) -> Made:
    """All shards of `folders`, in that order, as one data set in `out`.

    Raises ConfigError: the folders differ in target, tokenizer, geometry or features (each difference named); a conversation stands in two of
    them (with `drop_duplicates` the later one is left out); one is held out here and trained on there; `out` holds something else.
    """
    sources = [Source.open(folder) for folder in folders]
    if len(sources) < 2:
        raise ConfigError(f"merge: expected at least two folders to join, found {len(sources)}")
    _same_kind(sources)
    _named_by_conversation(sources)
    _no_leak(sources)
    seen: set[tuple[Split, str]] = set()
    pieces, twice = [], []
    for split in SPLITS:
        for source in sources:
            for index in source.indexes.get(split, ()):
                keep = [sample.key for sample in index.samples if (split, sample.key) not in seen]
                twice += [sample.key for sample in index.samples if (split, sample.key) in seen]
                seen.update((split, key) for key in keep)
                pieces.append(Piece(split, source, index, frozenset(keep)))
    if twice and not drop_duplicates:
        raise ConfigError(f"{len(twice)} conversation(s) stand in more than one of the folders: {_some(twice)}; --drop-duplicates leaves the later ones out")
    pieces = [piece for piece in pieces if piece.keep or piece.index.rejected]
    made = _make(location(out), pieces, sources, sources[0].manifest.spec, {"command": "merge", "drop_duplicates": drop_duplicates})
    return replace(made, left_out=tuple(twice))


def subset(folder: AnyPath | str, out: AnyPath | str, conversations: int = 0, features: FewerFeatures = FewerFeatures()) -> Made:
    """The `conversations` lowest of the train split by key (0: all) and the whole held-out split, with fewer features if asked for.

    Raises ConfigError: fewer conversations, or features that were not captured; `out` holds something else.
    """
    source = Source.open(folder)
    keys = [sample.key for index in source.indexes.get("train", ()) for sample in index.samples]
    if conversations > len(keys):
        raise ConfigError(f"{source.folder}: its train split holds {len(keys)} conversations, {conversations} were asked for")
    spec = features.of(source.manifest.spec, source.folder)
    kept = {keys[i] for i in lowest(keys, conversations or len(keys))}
    pieces = []
    for split in SPLITS:
        for index in source.indexes.get(split, ()):
            keep = frozenset(sample.key for sample in index.samples if split != "train" or sample.key in kept)
            if keep:
                pieces.append(Piece(split, source, index, keep))
    return _make(location(out), pieces, [source], spec, {"command": "subset", "conversations": conversations, "spec": asdict(spec)})


def _same_kind(sources: Sequence[Source]) -> None:
    first = sources[0]
    wanted = _kind(first.manifest)
    lines = []
    for other in sources[1:]:
        found = _kind(other.manifest)
        lines += [
            f"  {name}: {first.folder} has {wanted.get(name)}, {other.folder} {found.get(name)}"
            for name in wanted | found
            if wanted.get(name) != found.get(name)
        ]
    if lines:
        raise ConfigError("only features of one target, captured alike, can be merged; these differ\n" + "\n".join(lines))


def _kind(manifest: Manifest) -> dict[str, Any]:
    """Dotted names and values of all that has to be the same."""
    parts = {"target_digest": manifest.target_digest, "tokenizer_digest": manifest.tokenizer_digest}
    return parts | dotted(asdict(manifest.geometry), "geometry") | dotted(asdict(manifest.spec), "spec")


def _keys(source: Source, split: Split) -> set[str]:
    return {sample.key for index in source.indexes.get(split, ()) for sample in index.samples}


def _named_by_conversation(sources: Sequence[Source]) -> None:
    for source in sources:
        by_line = sorted(key for split in SPLITS for key in _keys(source, split) if _BY_LINE.fullmatch(key))
        if by_line:
            raise ConfigError(
                f"{source.folder}: {len(by_line)} samples are named by their line ({by_line[0]}), so that the same conversation cannot be told in another "
                "folder; prepare them again, so that every line has the id of its conversation, and capture again"
            )


def _no_leak(sources: Sequence[Source]) -> None:
    found = [
        f"  {source.folder} holds out {_some(both)}, which {other.folder} trains on"
        for source in sources
        for other in sources
        if (both := sorted(_keys(source, "heldout") & _keys(other, "train")))
    ]
    if found:
        raise ConfigError("what is held out in one folder may not be trained on in another\n" + "\n".join(found))


def _some(keys: Sequence[str]) -> str:
    return ", ".join(keys[:_SHOWN]) + (f" and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else "")


def _make(out: AnyPath, pieces: Sequence[Piece], sources: Sequence[Source], spec: FeatureSpec, how: dict[str, Any]) -> Made:
    """Writes `pieces` into `out`, what is derived from them, and the manifest."""
    complete = _claim(out, sources, how)
    numbers = dict.fromkeys(SPLITS, 0)
    work: list[tuple[Piece, str]] = []
    for piece in pieces:
        work.append((piece, shard_name(piece.split, numbers[piece.split])))
        numbers[piece.split] += 1
    with ThreadPoolExecutor(4) as pool:
        indexes = list(pool.map(lambda item: _write(out, item[0], item[1], spec), work))
    splits = {split: SplitCounts.of([index for (piece, _), index in zip(work, indexes, strict=True) if piece.split == split]) for split in SPLITS}
    if not complete:
        rejected = [r for index in indexes for r in index.rejected]
        write_atomic(out / "quarantine.jsonl", quarantine(rejected))
        save_token_counts(out, _token_counts(pieces, sources))
        replace(sources[0].manifest, spec=spec, splits=splits, rejected=len(rejected)).save(out)
    rewritten = sum(not _as_it_is(piece, spec) for piece in pieces)
    counts = {split: total.samples for split, total in splits.items()}
    return Made(str(out), counts, len(pieces) - rewritten, rewritten, sum(total.bytes for total in splits.values()))


def _claim(out: AnyPath, sources: Sequence[Source], how: dict[str, Any]) -> bool:
    """Whether `out` is complete. Raises ConfigError if it holds something else than the beginning of this very data set."""
    configuration = json.loads(json.dumps({**how, "inputs": [source.digest for source in sources]}))
    path = out / "provenance.json"
    if exists(path):
        before = read_json(path)
        found = before.get("configuration") if isinstance(before, dict) else None
        if found != configuration:
            raise ConfigError(f"{out}: holds another data set ({path.name}: {json.dumps(found)[:300]}); use another folder, or delete it")
        return exists(Manifest.path(out))
    if there := names(out, ""):
        raise ConfigError(f"{out}: holds {_some(there)} and no provenance.json that says where they come from; use another folder")
    inputs = [{"folder": str(source.folder), "digest": source.digest, "provenance": _provenance(source.folder)} for source in sources]
    if isinstance(out, Path):
        out.mkdir(parents=True, exist_ok=True)
    first = sources[0].manifest
    write_json(path, origin(configuration=configuration, manifest=manifest_facts(first.target_name, first.geometry), inputs=inputs))
    return False


def _provenance(folder: AnyPath) -> Any:
    path = folder / "provenance.json"
    return read_json(path) if exists(path) else None


def _as_it_is(piece: Piece, spec: FeatureSpec) -> bool:
    return piece.whole and spec == piece.source.manifest.spec


def _write(out: AnyPath, piece: Piece, shard: str, spec: FeatureSpec) -> ShardIndex:
    """The shard of `piece` in `out`, and its index; kept if it is there."""
    try:
        there = ShardIndex.load(out, shard)
        if size(out / shard) == there.bytes and (there.sha256 == piece.index.sha256 or not _as_it_is(piece, spec)):
            return there
    except (KvshotError, OSError):
        pass  # not written yet, or not to the end
    if not _as_it_is(piece, spec):
        return _rewrite(out, piece, shard, spec)
    piece.source.reader(piece.index).check_size()
    _take_over(piece.source.folder / piece.index.shard, out / shard, out)
    index = replace(piece.index, shard=shard)
    index.save(out)
    return index


def _take_over(path: AnyPath, to: AnyPath, folder: AnyPath) -> None:
    """`to` with the bytes of `path`: a hard link where the file system has them, else a copy."""
    spool = written_in(folder, None)
    spool.mkdir(parents=True, exist_ok=True)
    beside = aside(spool / to.name)
    try:
        if isinstance(path, Path):
            try:
                if not isinstance(to, Path):
                    raise OSError
                os.link(path, beside)
            except OSError:
                shutil.copyfile(path, beside)
        else:
            with storage_errors(path):
                filesystem(path).get_file(path.path, str(beside))
        with open(beside, "rb") as file:
            os.fsync(file.fileno())
        put(beside, to)
    finally:
        beside.unlink(missing_ok=True)


def _rewrite(out: AnyPath, piece: Piece, shard: str, spec: FeatureSpec) -> ShardIndex:
    """The kept samples with the tensors of `spec`, in the order of their tar. Raises KvshotError if the tar is not what its index says."""
    from safetensors.torch import load

    reader = piece.source.reader(piece.index)
    reader.check_size()
    keep = frozenset(stored_tensors(spec, reader.geometry, 1, 0))
    with ShardWriter(out, shard) as writer, opened(reader.path) as stream:
        walk, meta = Walk(stream, piece.index.bytes), b""
        try:
            for member in walk.members():
                key, _, kind = member.name.partition(".")
                if key not in piece.keep or member.kind:
                    continue
                if kind == "json":
                    meta = bytes(walk.read(member.size))
                else:
                    tensors = load(bytes(walk.read(member.size)))
                    writer.write(key, {name: tensor for name, tensor in tensors.items() if name in keep}, json.loads(meta))
            walk.rest()
        except (TarError, ValueError) as error:
            raise KvshotError(f"{reader.path}: not readable as a shard ({error}); kvshot data verify says more") from None
        if walk.sha256.hexdigest() != piece.index.sha256:
            raise KvshotError(f"{reader.path}: its bytes have changed since its index was written; kvshot data verify says more")
        return writer.commit([sample.key for sample in piece.samples], piece.index.rejected)


def _token_counts(pieces: Sequence[Piece], sources: Sequence[Source]) -> torch.Tensor:
    """Counts of the labels of the new train split: those of the sources less what was left out, or of what was kept: whichever is read faster."""
    vocab = sources[0].manifest.geometry.vocab_size
    kept = {(id(piece.source), piece.index.shard): piece.keep for piece in pieces}
    shards = [(source, index, kept.get((id(source), index.shard), frozenset())) for source in sources for index in source.indexes.get("train", ())]
    left_out = [(s, i, [n for n, sample in enumerate(i.samples) if sample.key not in keep]) for s, i, keep in shards]
    chosen = [(s, i, [n for n, sample in enumerate(i.samples) if sample.key in keep]) for s, i, keep in shards]
    if sum(len(n) for _, _, n in left_out) <= sum(len(n) for _, _, n in chosen):
        total = sum((load_token_counts(source.folder, vocab) for source in sources), torch.zeros(vocab, dtype=torch.int64))
        return total - _labels(left_out, vocab)
    return _labels(chosen, vocab)


def _labels(parts: Iterable[tuple[Source, ShardIndex, list[int]]], vocab: int) -> torch.Tensor:
    total = torch.zeros(vocab, dtype=torch.int64)
    with ThreadPoolExecutor(16) as pool:
        for found in pool.map(lambda part: count_labels(part[0].reader(part[1]), part[2]), parts):
            total += found
    return total
