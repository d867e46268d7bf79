"""One tar of features, read once from its first byte to its last: hashed, walked as a stranger would, every tensor checked."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from kvshot_ds.errors import KvshotError
from kvshot_ds.features.manifest import KEY, Sample
from kvshot_ds.features.shard import ShardReader
from kvshot_ds.features.spec import teacher_rows
from kvshot_ds.features.walk import Member, TarError, Walk, opened
from kvshot_ds.files import size

_MEMBER = re.compile(r"(?P<key>[^/.]+)\.(?P<kind>json|safetensors)")
_LONGEST_META = 1 << 24  # [bytes]
CAPTURE_AGAIN = "kvshot data repair FOLDER captures this shard again"


@dataclass(frozen=True)
class Fault:
    """file: name in the folder. sample: key, '' where the whole file is meant. what: expected and found. repair: what would mend it."""

    file: str
    sample: str
    what: str
    repair: str

    def __str__(self) -> str:
        return f"{self.file}{f': sample {self.sample!r}' if self.sample else ''}: {self.what}; {self.repair}"


@dataclass(frozen=True)
class Checked:
    """What is wrong with one tar. bytes: read. labels: how often each token is a label x_{j+1} of a teacher row j, [V] int64."""

    faults: tuple[Fault, ...]
    bytes: int
    labels: torch.Tensor


@dataclass
class _Memory:
    """The part of a tar from `offset` on that is in memory, to be read as the tar is."""

    offset: int
    data: bytearray

    def read(self, offset: int, size: int) -> bytearray:
        at = offset - self.offset
        return self.data[at : at + size] if at >= 0 else bytearray()

    def fetch(self, parts: Sequence[tuple[int, int]]) -> None: ...


@dataclass
class _Shard:
    """The check of one tar while it goes on."""

    reader: ShardReader
    faults: list[Fault] = field(default_factory=list)
    met: dict[str, int] = field(default_factory=dict)  # key -> members

    def __post_init__(self) -> None:
        self.places = {sample.key: number for number, sample in enumerate(self.reader.index.samples)}
        self.labels = torch.zeros(self.reader.geometry.vocab_size, dtype=torch.int64)

    def fault(self, what: str, sample: str = "") -> None:
        self.faults.append(Fault(self.reader.index.shard, sample, what, CAPTURE_AGAIN))

    def member(self, walk: Walk, member: Member, before: str) -> str:
        """Checks one member; `before` is the key whose tensors have to follow. Returns the key whose tensors have to follow now."""
        named = _MEMBER.fullmatch(member.name)
        if member.kind or not named or not KEY.fullmatch(named["key"]):
            what = f"{member.kind} (to be a plain file)" if member.kind else "(expected KEY.json or KEY.safetensors)"
            self.fault(f"member {member.name!r} at byte {member.offset - 512} is {what}" if member.kind else f"member {member.name!r} {what}")
            return before
        key, kind = named["key"], named["kind"]
        if self.met.get(key, 0) >= (1 if kind == "json" else 2):
            self.fault(f"its {kind} comes twice, again at byte {member.offset}", key)
            return ""
        self.met[key] = self.met.get(key, 0) + 1
        if before and (before, kind) != (key, "safetensors"):
            self.fault(f"its tensors do not follow its json; {member.name!r} stands there", before)
        if kind == "json":
            self.meta(walk, member, key)
            return key
        if before != key:
            self.fault("no json stands before its tensors", key)
        self.tensors(walk, member, key)
        return ""

    def meta(self, walk: Walk, member: Member, key: str) -> None:
        try:
            value = json.loads(walk.read(member.size)) if member.size <= _LONGEST_META else None
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            self.fault(f"its json of {member.size} bytes is not a mapping", key)

    def tensors(self, walk: Walk, member: Member, key: str) -> None:
        number = self.places.get(key)
        sample = None if number is None else self.reader.index.samples[number]
        if number is None or sample is None:
            self.fault("is not in the index of the shard", key)
        elif (sample.offset, sample.size) != (member.offset, member.size):
            self.fault(f"lies at byte {member.offset} with {member.size} bytes, its index says {sample.offset} with {sample.size}", key)
        else:
            self.read(_Memory(member.offset, walk.read(member.size)), number)

    def read(self, file: _Memory, number: int) -> None:
        sample = self.reader.index.samples[number]
        try:
            tensors = self.reader.read_from(file, number)
        except KvshotError as error:
            self.fault(_short(error, self.reader, sample), sample.key)
            return
        rows = teacher_rows(tensors["turn"].numpy())
        self.labels += torch.bincount(tensors["tokens"][torch.from_numpy(rows) + 1], minlength=len(self.labels))
        if what := self.layout(file, sample):
            self.fault(what, sample.key)

    def layout(self, file: _Memory, sample: Sample) -> str:
        """'' if the tensors, and no others, fill the sample without gaps, as every safetensors reader expects."""
        length = int.from_bytes(file.read(sample.offset, 8), "little")
        header = json.loads(file.read(sample.offset + 8, length))
        others = header.keys() - self.reader.expected(sample).keys() - {"__metadata__"}
        if others:
            return f"holds tensors that the manifest does not name: {', '.join(sorted(others)[:5])}"
        parts = sorted(entry["data_offsets"] for name, entry in header.items() if name != "__metadata__")
        ends = [0, *(end for _, end in parts)]
        if any(begin != end for (begin, _), end in zip(parts, ends[:-1], strict=True)) or ends[-1] != sample.size - 8 - length:
            return "its tensors do not fill its bytes without gaps"
        return ""


def check_shard(reader: ShardReader, seen: Callable[[int], object] = lambda _: None) -> Checked:
    """Reads the tar of `reader` to its end, whatever is wrong on the way. seen: told the bytes of each read."""
    shard, index = _Shard(reader), reader.index
    try:
        length = size(reader.path)
        with opened(reader.path) as stream:
            walk = Walk(stream, length, seen)
            _walk(shard, walk)
            walk.rest()
    except (OSError, TarError) as error:  # TarError: it grew shorter while it was read
        shard.fault(f"cannot be read ({getattr(error, 'strerror', None) or error})" if not isinstance(error, FileNotFoundError) else "is not there")
        return Checked(tuple(shard.faults), 0, shard.labels)
    if length != index.bytes:
        shard.fault(f"has {length} bytes, its index says {index.bytes}")
    elif walk.sha256.hexdigest() != index.sha256:
        shard.fault(f"has sha256 {walk.sha256.hexdigest()[:16]}, its index says {index.sha256[:16]}: bytes have changed")
    return Checked(tuple(shard.faults), length, shard.labels)


def _walk(shard: _Shard, walk: Walk) -> None:
    before = ""
    try:
        for member in walk.members():
            before = shard.member(walk, member, before)
        if before:
            shard.fault("its json has no tensors after it", before)
    except TarError as error:
        shard.fault(str(error))
    for number, sample in enumerate(shard.reader.index.samples):
        if shard.met.get(sample.key, 0) >= 2:
            continue
        try:  # a damaged header hides what follows it, which may be whole
            shard.reader.read(number)
            what = "is whole where its index says, but the tar does not lead there"
        except (KvshotError, OSError) as error:
            what = _short(error, shard.reader, sample)
        shard.fault(what, sample.key)


def _short(error: Exception, reader: ShardReader, sample: Sample) -> str:
    """An error of the reader without the names and the advice that a fault has of its own."""
    text = str(error).removeprefix(f"{reader.path}: ").removeprefix(f"sample {sample.key!r}: ")
    return text.partition("; kvshot data repair")[0]
