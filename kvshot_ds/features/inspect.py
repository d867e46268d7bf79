"""What lies in a folder of shards, told from its manifest, indexes and provenance alone: `kvshot data inspect`. Reads no tar."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

from kvshot_ds.errors import KvshotError
from kvshot_ds.features.codec import stored_tensors
from kvshot_ds.features.dataset import Source
from kvshot_ds.features.manifest import Manifest, Sample, Split
from kvshot_ds.files import AnyPath, exists, names, read_json

KINDS = ("hidden", "kv", "query", "teacher")
_BAR = 40  # width of the longest bar [characters]
_BINS = 12


@dataclass(frozen=True)
class SplitFacts:
    """shards, conversations, tokens, rows (supervised teacher rows), bytes of tars; shortest, median and longest conversation [tokens]."""

    shards: int
    conversations: int
    tokens: int
    rows: int
    bytes: int
    lengths: tuple[int, int, int]


@dataclass(frozen=True)
class Inspected:
    """provenance: what stands in provenance.json, {} without one. bytes_of: of tensors by kind, the rest (tokens, headers, padding) under "rest".
    histogram: (from, to, conversations), lengths in tokens, `to` excluded. reasons: of conversations that were left out."""

    folder: str
    provenance: dict[str, Any]
    manifest: Manifest
    splits: dict[Split, SplitFacts]
    bytes_of: dict[str, int]
    histogram: tuple[tuple[int, int, int], ...]
    reasons: dict[str, int]
    damaged: int

    @property
    def tokens(self) -> int:
        return sum(split.tokens for split in self.splits.values())

    def to_json(self) -> dict[str, Any]:
        tokens, rows = self.tokens, sum(split.rows for split in self.splits.values())
        sums = {"tokens": tokens, "supervised_share": rows / max(1, tokens), "bytes_per_token": {k: v / max(1, tokens) for k, v in self.bytes_of.items()}}
        return {**asdict(self), **sums}

    def lines(self) -> list[str]:
        return [str(self.folder), *self._origin(), *self._contents(), "", *self._splits(), "", *self._sizes(), "", *self._lengths(), *self._rejected()]

    def _origin(self) -> list[str]:
        found = self.provenance
        m, g = self.manifest, self.manifest.geometry
        command = found.get("command")
        versions = found.get("versions")
        lines = {
            "command": " ".join(map(str, command)) if isinstance(command, list) else "unknown: no provenance.json",
            "commit": found.get("git_commit") or "unknown",
            "versions": ", ".join(f"{k} {v}" for k, v in versions.items()) if isinstance(versions, dict) else "unknown",
            "target": f"{m.target_name} ({g.family}), weights {m.target_digest[:16]}, tokenizer {m.tokenizer_digest[:16]}",
            "geometry": f"L={g.num_layers} d={g.hidden_size} A={g.heads} G={g.kv_heads} D={g.head_dim} V={g.vocab_size}, context {g.max_positions}",
        }
        inputs = found.get("inputs")
        for number, source in enumerate(inputs if isinstance(inputs, list) else []):
            lines[f"input {number + 1}"] = f"{source.get('folder')}, digest {str(source.get('digest'))[:16]}" if isinstance(source, dict) else "unknown"
        return [f"  {name:9} {value}" for name, value in lines.items()]

    def _contents(self) -> list[str]:
        spec = self.manifest.spec
        teacher = spec.teacher + (f" ({spec.teacher_k} logits)" if spec.teacher_k else "")
        rows = [("hidden", spec.hidden_layers, spec.store.hidden), ("kv", spec.kv_layers, spec.store.kv), ("query", spec.query_layers, spec.store.query)]
        listed = [f"{name} of layers {', '.join(map(str, layers))} as {how}" for name, layers, how in rows if layers]
        return [f"  {'features':9} {'; '.join([*listed, f'teacher {teacher}' + (f' as {spec.store.teacher}' if spec.teacher != 'none' else '')])}"]

    def _splits(self) -> list[str]:
        head = f"  {'split':8} {'shards':>7} {'conversations':>14} {'tokens':>14} {'supervised':>11} {'MB':>12}   shortest, median, longest [tokens]"
        return [head] + [
            f"  {name:8} {s.shards:7,} {s.conversations:14,} {s.tokens:14,} {s.rows / max(1, s.tokens):11.1%} {s.bytes / 1e6:12,.1f}   "
            + ", ".join(map(str, s.lengths))
            for name, s in self.splits.items()
        ]

    def _sizes(self) -> list[str]:
        total = max(1, sum(self.bytes_of.values()))
        tokens = max(1, self.tokens)
        return [f"  {'kind':8} {'MB':>12} {'share':>7} {'bytes/token':>12}"] + [
            f"  {kind:8} {n / 1e6:12,.1f} {n / total:7.1%} {n / tokens:12,.1f}" for kind, n in [*self.bytes_of.items(), ("all", sum(self.bytes_of.values()))]
        ]

    def _lengths(self) -> list[str]:
        most = max((count for _, _, count in self.histogram), default=1)
        return ["  tokens of a conversation"] + [
            f"  {low:7,} to {high - 1:7,} {count:9,} {'#' * -(-count * _BAR // most)}" for low, high, count in self.histogram
        ]

    def _rejected(self) -> list[str]:
        lines = ["", f"  {sum(self.reasons.values()):,} conversations were left out (quarantine.jsonl)"] if self.reasons else []
        lines += [f"  {count:9,} {reason}" for reason, count in self.reasons.items()]
        return lines + ([f"  {self.damaged} damaged file(s), moved aside by repairs, in damaged/"] if self.damaged else [])


def inspect(folder: AnyPath | str) -> Inspected:
    """Raises KvshotError if manifest or an index is missing or not readable."""
    source = Source.open(folder)
    samples = {split: [sample for index in indexes for sample in index.samples] for split, indexes in source.indexes.items()}
    lengths = [sample.tokens for found in samples.values() for sample in found]
    facts = {split: _facts(source, split, found) for split, found in samples.items()}
    reasons = Counter(_kind_of(r.reason) for indexes in source.indexes.values() for index in indexes for r in index.rejected)
    return Inspected(
        folder=str(source.folder),
        provenance=_provenance(source.folder),
        manifest=source.manifest,
        splits=facts,
        bytes_of=_bytes_of(source.manifest, facts),
        histogram=histogram(lengths),
        reasons=dict(reasons.most_common()),
        damaged=len(names(source.folder / "damaged", "")),
    )


def _facts(source: Source, split: Split, samples: Sequence[Sample]) -> SplitFacts:
    lengths = sorted(sample.tokens for sample in samples) or [0]
    indexes = source.indexes[split]
    return SplitFacts(
        shards=len(indexes),
        conversations=len(samples),
        tokens=sum(lengths),
        rows=sum(sample.rows for sample in samples),
        bytes=sum(index.bytes for index in indexes),
        lengths=(lengths[0], lengths[len(lengths) // 2], lengths[-1]),
    )


def _bytes_of(manifest: Manifest, splits: Mapping[Split, SplitFacts]) -> dict[str, int]:
    """Bytes by kind. Every tensor has one row for each token, or for each teacher row, so that the sums tell its size."""
    tokens, rows = sum(s.tokens for s in splits.values()), sum(s.rows for s in splits.values())
    found = dict.fromkeys(KINDS, 0)
    for key, (dtype, shape) in stored_tensors(manifest.spec, manifest.geometry, tokens, rows).items():
        kind = key.split(".")[0]
        kind = "kv" if kind in ("key", "value") else kind
        if kind in found:
            found[kind] += dtype.itemsize * prod(shape)
    return {**found, "rest": sum(s.bytes for s in splits.values()) - sum(found.values())}


def histogram(lengths: Sequence[int]) -> tuple[tuple[int, int, int], ...]:
    """At most 12 bins of equal, round width: (from, to, how many), `to` excluded."""
    if not lengths:
        return ()
    width = next(w for power in range(20) for w in (10**power, 2 * 10**power, 5 * 10**power) if max(lengths) // w - min(lengths) // w < _BINS)
    counts = Counter(length // width for length in lengths)
    return tuple((i * width, (i + 1) * width, counts[i]) for i in range(min(counts), max(counts) + 1))


def _kind_of(reason: str) -> str:
    """A reason without its numbers and names, so that like ones count together."""
    words = ("N" if any(c.isdigit() for c in word) else word for word in reason.split())
    return " ".join(words)[:120]


def _provenance(folder: AnyPath) -> dict[str, Any]:
    path = folder / "provenance.json"
    try:
        found = read_json(path) if exists(path) else {}
    except (KvshotError, OSError):
        return {}
    return found if isinstance(found, dict) else {}
