"""Feature shards: WebDataset tars written once, whole or not at all, and read back sample by sample at known offsets."""

from __future__ import annotations

import hashlib
import json
import operator
import os
import tempfile
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import torch

from kvshot_ds.errors import ConfigError, KvshotError
from kvshot_ds.features.codec import SCALE, Stored, all_finite, decode, possible, stored_tensors
from kvshot_ds.features.manifest import Manifest, Rejected, Sample, ShardIndex, Split, check_key
from kvshot_ds.features.spec import FeatureSpec, teacher_rows
from kvshot_ds.files import IN_FLIGHT, AnyPath, RangeReader, aside, buffer, exists, file_sha256, location, put, reading, remove, size
from kvshot_ds.geometry import Geometry

_BLOCK = 512  # a tar is made of blocks of this many bytes; headers take one, data is padded to whole ones
_STORED = {"I32": torch.int32, "F32": torch.float32, "BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn, "I8": torch.int8}
_IDS = ("tokens", "teacher.argmax", "teacher.topk_ids")
_LONGEST_HEADER = 1 << 20
_FIRST = 1 << 15  # what is asked of a remote sample at first: most headers, with the tokens behind them, are shorter [bytes]


def written_in(folder: AnyPath, spool: Path | None) -> Path:
    """Where the tars of `folder` are written before they are put in place: there, or for a URL in `spool` or the system's temporary folder."""
    return folder if isinstance(folder, Path) else spool or Path(tempfile.gettempdir()) / f"kvshot-spool-{os.getuid()}"


class _HashedFile:
    """A file that is hashed while it is written, so that the checksum costs no second pass."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.sha256, self.bytes = file, hashlib.sha256(), 0

    def write(self, data: bytes) -> int:
        if self.file.closed:  # a tar that was left early writes its buffer when it is collected
            return 0
        self.sha256.update(data)
        self.bytes += len(data)
        return self.file.write(data)


class ShardWriter:
    """Writes one tar beside its final name, or for a URL in a local folder (`written_in`); `commit` puts it in place and writes its index.
    A context left without commit leaves nothing.

    The bytes depend on the samples and their order alone: times, owners and modes are fixed.
    """

    def __init__(self, folder: AnyPath, shard: str, spool: Path | None = None) -> None:
        from webdataset import TarWriter

        self.folder, self.shard = folder, shard
        self.spool = written_in(folder, spool)
        self.spool.mkdir(parents=True, exist_ok=True)
        self._aside = aside(self.spool / shard)
        self._file = open(self._aside, "wb")  # noqa: SIM115 - closed by commit or __exit__
        self._hashed = _HashedFile(self._file)
        self._tar = TarWriter(self._hashed, user="kvshot", group="kvshot", mtime=0, encoder=False)
        self._samples: dict[str, Sample] = {}

    def write(self, key: str, tensors: dict[str, torch.Tensor], meta: dict[str, Any]) -> None:
        """Appends members `<key>.json` and `<key>.safetensors`. Raises KvshotError on a key that is no plain name or comes twice."""
        from safetensors.torch import save

        check_key(key, self.folder / self.shard)
        if key in self._samples:
            raise KvshotError(f"{self.folder / self.shard}: sample key {key!r} comes twice")
        text, data = json.dumps(meta, ensure_ascii=False, sort_keys=True).encode(), save(tensors)
        start = self._tar.tarstream.offset
        self._tar.write({"__key__": key, "json": text, "safetensors": data})  # the writer sorts members by extension: json first
        offset = start + _BLOCK + -(-len(text) // _BLOCK) * _BLOCK + _BLOCK
        self._samples[key] = Sample(key, offset, len(data), len(tensors["tokens"]), len(teacher_rows(tensors["turn"].numpy())))

    def commit(self, order: Collection[str], rejected: Iterable[Rejected] = ()) -> ShardIndex:
        """Closes and fsyncs the tar, puts it in place, then writes its index, whose samples stand in `order` (the keys)."""
        self._tar.close()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._forget_another()
        put(self._aside, self.folder / self.shard)
        samples = tuple(self._samples[key] for key in order)
        index = ShardIndex(self.shard, self._hashed.bytes, self._hashed.sha256.hexdigest(), samples, tuple(rejected))
        index.save(self.folder)
        return index

    def _forget_another(self) -> None:
        """Removes the index of another tar that is replaced: it would vouch for this one, should this one's never come. One of the same bytes stays:
        a second run may be reading it."""
        path = ShardIndex.path(self.folder, self.shard)
        if not exists(path):
            return
        try:
            same = ShardIndex.load(self.folder, self.shard).sha256 == self._hashed.sha256.hexdigest()
        except (KvshotError, OSError):
            same = False
        if not same:
            remove(path)

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()
        self._aside.unlink(missing_ok=True)


@dataclass(frozen=True)
class ShardReader:
    """One tar and its index. spec, geometry: what its samples must hold. Keeps no open file: safe to pickle and to fork."""

    folder: AnyPath
    index: ShardIndex
    spec: FeatureSpec
    geometry: Geometry

    @property
    def path(self) -> AnyPath:
        return self.folder / self.index.shard

    @property
    def _repair(self) -> str:
        """What to do about a tar that is missing or damaged."""
        return f"kvshot data repair {self.folder} captures it again"

    def check_size(self) -> None:
        """Raises KvshotError if the tar is missing or not as long as its index says."""
        try:
            found = size(self.path)
        except OSError as error:
            raise self._unreadable(error) from None
        if found != self.index.bytes:
            raise KvshotError(f"{self.path}: {found} bytes, its index says {self.index.bytes}: truncated or replaced; {self._repair}")

    def check_bytes(self) -> None:
        """Compares the tar with its checksum. Raises KvshotError if it cannot be read or they differ."""
        self.check_size()
        try:
            found = file_sha256(self.path)
        except OSError as error:
            raise self._unreadable(error) from None
        if found != self.index.sha256:
            raise KvshotError(f"{self.path}: sha256 {found[:16]}, its index says {self.index.sha256[:16]}: damaged; {self._repair}")

    def _unreadable(self, error: OSError) -> KvshotError:
        return KvshotError(f"{self.path}: not readable ({error.strerror or error}); {self._repair}")

    def read(self, number: int, keys: Collection[str] | None = None) -> dict[str, torch.Tensor]:
        """Tensors of sample `number`, by spec.py's table: all of them, or those named (only their bytes are read).

        What is stored in 8 bits comes back as bf16, everything else as it is stored. Raises KvshotError naming shard, key and tensor:
        missing, of another shape or dtype, NaN or infinite, cut off; token ids outside of the vocabulary, turns that are not those of the index;
        the file is not there or cannot be read.
        """
        with self._open(number) as file:
            return self.read_from(file, number, keys)

    def read_packed(self, number: int, keys: Collection[str] | None = None) -> dict[str, torch.Tensor | Stored]:
        """As `read`, but what is stored in 8 bits comes as it is: half the bytes to copy, and decoded where it is used."""
        with self._open(number) as file:
            return self._read(file, number, keys)

    @contextmanager
    def _open(self, number: int) -> Iterator[RangeReader]:
        try:
            with reading(self.path) as file:
                yield file
        except OSError as error:
            raise self._broken(self.index.samples[number], f"not readable ({error.strerror or error})") from None

    def read_from(self, file: RangeReader, number: int, keys: Collection[str] | None = None) -> dict[str, torch.Tensor]:
        """`read` from the tar that is open as `file`."""
        found = self._read(file, number, keys)
        packed = {name: part for name, part in found.items() if isinstance(part, Stored)}
        room = torch.frombuffer(buffer(2 * sum(part.data.numel() for part in packed.values()) + 2), dtype=torch.bfloat16)
        tensors: dict[str, torch.Tensor] = {}
        for name, part in found.items():
            if isinstance(part, Stored):
                mine, room = room[: part.data.numel()], room[part.data.numel() :]
                part = decode(part, self.spec.dtype(name), mine)
            tensors[name] = part
        return tensors

    def _read(self, file: RangeReader, number: int, keys: Collection[str] | None) -> dict[str, torch.Tensor | Stored]:
        sample = self.index.samples[number]
        wanted = self.expected(sample)
        chosen = ("tokens", "turn", *self.spec.keys()) if keys is None else tuple(keys)
        scales = {name: f"{name}{SCALE}" for name in chosen if f"{name}{SCALE}" in wanted}
        tensors: dict[str, torch.Tensor | Stored] = {}
        header, start = self._header(file, sample)
        file.fetch(_parts(header, (*chosen, *scales.values()), start, sample))

        def stored(name: str) -> torch.Tensor:
            return self._tensor(file, sample, name, header.get(name), start, wanted.get(name))

        for name in chosen:
            data = stored(name)
            tensors[name] = data
            if name in scales:
                scale, storage = stored(scales[name]), self.spec.store.of(name)
                if storage is None or not possible(scale, storage):
                    raise self._broken(sample, f"tensor {scales[name]} holds scales that no feature has")
                tensors[name] = Stored(data, scale)
        self._check_whole_numbers(sample, {name: part for name, part in tensors.items() if isinstance(part, torch.Tensor)})
        return tensors

    def _check_whole_numbers(self, sample: Sample, tensors: dict[str, torch.Tensor]) -> None:
        """What NaN tells of other tensors: damaged ids point nowhere, damaged turns give the rows of a batch another conversation's teacher."""
        vocab = self.geometry.vocab_size
        for name in _IDS:
            ids = tensors.get(name)
            if ids is not None and ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= vocab):
                raise self._broken(sample, f"holds token ids outside the vocabulary of {vocab} in {name}")
        if "turn" in tensors:
            turn = tensors["turn"].numpy()
            rows = len(teacher_rows(turn))
            if rows != sample.rows or turn.min() < 0:
                raise self._broken(sample, f"its turns give {rows} teacher rows, its index says {sample.rows}")

    def expected(self, sample: Sample) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """dtype and shape of every stored tensor of `sample`, scales included."""
        return stored_tensors(self.spec, self.geometry, sample.tokens, sample.rows)

    def _broken(self, sample: Sample, what: str) -> KvshotError:
        return KvshotError(f"{self.path}: sample {sample.key!r}: {what}; {self._repair}")

    def _bytes(self, file: RangeReader, sample: Sample, offset: int, size: int) -> bytearray | memoryview:
        found = file.read(offset, size)
        if len(found) < size:
            raise self._broken(sample, f"the file ends at byte {offset + len(found)}, expected {offset + size}")
        return found

    def _header(self, file: RangeReader, sample: Sample) -> tuple[dict[str, Any], int]:
        """The safetensors header of `sample`, and where in the file its data starts."""
        file.fetch([(sample.offset, min(sample.size, _FIRST))])
        length = int.from_bytes(self._bytes(file, sample, sample.offset, 8), "little")
        if length > min(sample.size - 8, _LONGEST_HEADER):
            raise self._broken(sample, "its bytes are no safetensors file")
        try:
            header = json.loads(bytes(self._bytes(file, sample, sample.offset + 8, length)))
        except (ValueError, RecursionError):
            header = None
        if not isinstance(header, dict):
            raise self._broken(sample, "its bytes are no safetensors file")
        return header, sample.offset + 8 + length

    def _tensor(
        self, file: RangeReader, sample: Sample, name: str, entry: dict[str, Any] | None, start: int, wanted: tuple[torch.dtype, tuple[int, ...]] | None
    ) -> torch.Tensor:
        if wanted is None:
            raise ConfigError(f"{self.path}: tensor {name!r} was not captured; the features hold {', '.join(self.spec.keys())}")
        if entry is None:
            raise self._broken(sample, f"tensor {name} is missing")
        dtype, shape = wanted
        try:
            found = (_STORED.get(entry["dtype"]), tuple(entry["shape"]))
            begin, end = map(operator.index, entry["data_offsets"])
        except (KeyError, TypeError, ValueError):
            raise self._broken(sample, f"tensor {name} has no readable entry in the header") from None
        inside = begin >= 0 and start + end <= sample.offset + sample.size
        if found != wanted or not inside or end - begin != dtype.itemsize * torch.Size(shape).numel():
            raise self._broken(sample, f"tensor {name} is {entry['dtype']} {entry['shape']} at bytes {begin} to {end}, expected {dtype} {list(shape)}")
        if end == begin:
            return torch.empty(shape, dtype=dtype)
        tensor = torch.frombuffer(self._bytes(file, sample, start + begin, end - begin), dtype=dtype).view(shape)
        if not all_finite(tensor):
            raise self._broken(sample, f"tensor {name} holds NaN or infinity")
        return tensor


def _parts(header: dict[str, Any], keys: Iterable[str], start: int, sample: Sample) -> list[tuple[int, int]]:
    """(offset, size) of each tensor of `keys` whose header entry lies within the sample; the others are errors when they are read."""
    parts = []
    for entry in (header.get(key) for key in keys):
        try:
            begin, end = map(operator.index, entry["data_offsets"])  # type: ignore[index]
        except (KeyError, TypeError, ValueError):
            continue
        if 0 <= begin < end <= sample.offset + sample.size - start:
            parts.append((start + begin, end - begin))
    return parts


def count_labels(reader: ShardReader, numbers: Iterable[int] | None = None) -> torch.Tensor:
    """How often each token is a label x_{j+1} of a teacher row j in the samples `numbers` of one shard (None: in all), [V] int64."""
    counts = torch.zeros(reader.geometry.vocab_size, dtype=torch.int64)
    for number in range(len(reader.index.samples)) if numbers is None else numbers:
        sample = reader.read(number, ("tokens", "turn"))
        counts += torch.bincount(sample["tokens"][torch.from_numpy(teacher_rows(sample["turn"].numpy())) + 1], minlength=len(counts))
    return counts


@dataclass(frozen=True)
class ShardSet:
    """Every sample of one split, by number, in the order of the prepared split. Open with `ShardSet.open`.

    manifest: of the folder. readers: one per tar. samples: their index entries, end to end. Safe to pickle and to fork.
    """

    manifest: Manifest
    readers: tuple[ShardReader, ...]
    samples: tuple[Sample, ...]
    _places: tuple[tuple[int, int], ...]

    @classmethod
    def open(cls, folder: AnyPath, split: Split, look: bool = True) -> ShardSet:
        """Reads manifest and indexes. Raises KvshotError naming what is missing, truncated, of another format or inconsistent.

        look: at the tars too, whether they are there and as long as they should be; False for a caller that does so itself.
        """
        folder = location(folder)
        manifest = Manifest.load(folder)
        if split not in manifest.splits:
            raise ConfigError(f"{Manifest.path(folder)}: no split {split!r}; it holds {', '.join(manifest.splits)}")
        counts = manifest.splits[split]
        with ThreadPoolExecutor(IN_FLIGHT) as pool:  # behind a URL each index is an exchange with the store
            indexes = pool.map(ShardIndex.load, [folder] * len(counts.shards), counts.shards)
            readers = tuple(ShardReader(folder, index, manifest.spec, manifest.geometry) for index in indexes)
            if look:
                list(pool.map(ShardReader.check_size, readers))
        samples = tuple(sample for reader in readers for sample in reader.index.samples)
        if len(samples) != counts.samples:
            raise KvshotError(f"{Manifest.path(folder)}: {counts.samples} {split} samples, the indexes hold {len(samples)}; run kvshot capture again")
        places = tuple((r, number) for r, reader in enumerate(readers) for number in range(len(reader.index.samples)))
        return cls(manifest, readers, samples, places)

    def __len__(self) -> int:
        return len(self.samples)

    @cached_property
    def shard_of(self) -> npt.NDArray[np.int64]:
        """Number of the shard of each sample."""
        return np.array([reader for reader, _ in self._places], dtype=np.int64)

    @property
    def digest(self) -> str:
        """Digest of all shards' checksums: equal means the same features in the same order."""
        return hashlib.sha256("".join(reader.index.sha256 for reader in self.readers).encode()).hexdigest()

    def check_bytes(self) -> None:
        """`ShardReader.check_bytes` of every shard, several at a time."""
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(ShardReader.check_bytes, self.readers))

    def read(self, i: int, keys: Collection[str] | None = None) -> tuple[str, dict[str, torch.Tensor]]:
        """(key, tensors) of sample `i`, as `ShardReader.read`: every tensor, or only those named in `keys`."""
        reader, number = self._places[i]
        return self.samples[i].key, self.readers[reader].read(number, keys)

    def read_packed(self, i: int, keys: Collection[str] | None = None) -> tuple[str, dict[str, torch.Tensor | Stored]]:
        """(key, tensors) of sample `i`, as `ShardReader.read_packed`: what `collate` joins."""
        reader, number = self._places[i]
        return self.samples[i].key, self.readers[reader].read_packed(number, keys)
