"""Files and data sets -> records: JSON values with the place they stand at. Streamed: memory does not grow with the file.

Damage costs what it hits: a line of JSONL, the rest of a JSON list or of a compressed file. It comes out as a record with an error.
"""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvshot_ds.config import SourceConfig
from kvshot_ds.errors import ConfigError, KvshotError

LIMIT = 64 << 20  # longest record [characters]; a longer one is damage, such as a quote that is never closed
_BLOCK = 1 << 18
_PACKED = {".gz": b"\x1f\x8b", ".xz": b"\xfd7zXZ\x00", ".zst": b"\x28\xb5\x2f\xfd", ".bz2": b"BZh"}
_LINES = (".jsonl", ".ndjson")
_JSON = re.compile(r'\{\s*("|$)|\[\s*([{\[]|$)')  # how a file of records begins, unlike "[INST] ..." in one of prompts
# what reading damaged bytes raises: gzip and pyarrow OSError (ArrowInvalid is a ValueError), the others their own
_DAMAGE = (OSError, EOFError, zlib.error, lzma.LZMAError, ValueError, RuntimeError, KeyError, TypeError, AttributeError, MemoryError)


@dataclass(frozen=True)
class Record:
    """One piece of a source. line: 1-based line where it begins, or row of a table; raw: its text, '' in a table; value: its JSON value;
    error: why there is none; entry: its 1-based place in a JSON list, or 0."""

    line: int
    raw: str
    value: Any = None
    error: str | None = None
    entry: int = 0


def _unheard(size: int) -> None:
    """Nobody wants to know."""


def file_size(source: SourceConfig) -> int | None:
    """Bytes of the file, None for a data set. Raises OSError."""
    return None if source.path is None else source.path.expanduser().stat().st_size


def place(source: SourceConfig) -> str:
    """How error texts and quarantined records name the source."""
    return str(source.dataset if source.path is None else source.path.expanduser())


def records(source: SourceConfig, passed: Callable[[int], object] = _unheard) -> Iterator[Record]:
    """Every record of a source, in order. passed: told of the bytes of a file as they are read, all of `file_size` in the end.

    Raises ConfigError at once if it cannot be read at all; KvshotError where a hub breaks off.
    """
    if source.path is None:
        return _dataset(source)
    path = source.path.expanduser()
    try:
        with open(path, "rb") as file:
            magic = file.read(8)
    except OSError as error:
        raise ConfigError(f"prep.sources: {path} cannot be read ({error.strerror}); expected a file of conversations or prompts") from None
    packed = next((suffix for suffix, start in _PACKED.items() if path.suffix.lower() == suffix or (magic.startswith(start) and suffix != ".bz2")), "")
    suffix = (Path(path.stem) if packed == path.suffix.lower() else path).suffix.lower()
    if suffix in (".csv", ".tsv"):
        raise ConfigError(f"prep.sources: {path}: tables of text are not read; expected JSON, JSONL, Parquet, or text with one prompt a line (.txt)")
    if suffix == ".parquet" or magic.startswith(b"PAR1"):
        return _parquet(path, passed)
    first = _first_line(path, packed)
    structured = (
        suffix in (".json", *_LINES) or source.format in ("sharegpt", "ultrachat", "messages") or (source.format == "auto" and _JSON.match(first) is not None)
    )
    if not structured:
        return _lines(path, packed, passed, parse=False)
    if suffix not in _LINES and (first.startswith("[") or first.strip() == "{"):
        return _values(path, packed, passed)
    return _lines(path, packed, passed, parse=True)


class _Counted(io.FileIO):
    """A file that tells what is read of it."""

    def __init__(self, path: Path, passed: Callable[[int], object]) -> None:
        super().__init__(path)
        self.passed = passed

    def readinto(self, buffer: Any) -> int | None:
        size = super().readinto(buffer)
        self.passed(size or 0)
        return size


@contextmanager
def _open(path: Path, packed: str, passed: Callable[[int], object]) -> Iterator[io.TextIOWrapper]:
    """The text of a file, unpacked as it is read. Bytes that are no UTF-8 become lone surrogates, which no conversation may hold."""
    with io.BufferedReader(_Counted(path, passed), _BLOCK) as raw:
        binary: Any = raw
        if packed == ".zst":
            import pyarrow

            binary = pyarrow.input_stream(raw, compression="zstd")
        elif packed:
            unpack: dict[str, Callable[[Any], Any]] = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}
            binary = unpack[packed](raw)
        with io.TextIOWrapper(binary, encoding="utf-8", errors="surrogateescape", newline="\n") as text:
            yield text


def _first_line(path: Path, packed: str) -> str:
    """Beginning of the first line that is not blank; '' if there is none, or it is damaged."""
    try:
        with _open(path, packed, _unheard) as file:
            return file.read(4096).lstrip("\ufeff \t\r\n").partition("\n")[0]
    except _DAMAGE:
        return ""


def _lines(path: Path, packed: str, passed: Callable[[int], object], parse: bool) -> Iterator[Record]:
    """One record a line, blank lines left out."""
    number = 0
    try:
        with _open(path, packed, passed) as file:
            while line := file.readline(LIMIT):
                number += 1
                if len(line) == LIMIT and line[-1] != "\n":
                    yield Record(number, line, error=f"a line of more than {LIMIT:,} characters; a JSON list is named .json")
                    while (rest := file.readline(_BLOCK)) and rest[-1] != "\n":
                        pass
                elif raw := line.strip().removeprefix("\ufeff"):
                    yield _parsed(number, raw) if parse else Record(number, raw, {"prompt": raw})
    except _DAMAGE as error:
        yield Record(number + 1, "", error=f"the file is cut off or damaged here: {_said(error)}")


def _parsed(line: int, raw: str) -> Record:
    try:
        return Record(line, raw, json.loads(raw))
    except (ValueError, RecursionError) as error:
        return Record(line, raw, error=f"not readable as JSON: {error}")


class _Scanner:
    """JSON values out of a text that is read block by block. line: of the place reached."""

    def __init__(self, file: io.TextIOWrapper) -> None:
        self.file, self.text, self.at, self.line = file, "", 0, 1
        self.whole, self.damage = False, ""
        self._decode = json.JSONDecoder().raw_decode

    def excerpt(self) -> str:
        return self.text[self.at : self.at + 200]

    def pass_over(self, characters: str) -> str:
        """Goes on to the first character that is none of `characters` and returns it, or '' at the end."""
        while True:
            end = self.at
            while end < len(self.text) and self.text[end] in characters:
                end += 1
            self.advance(end)
            if self.at < len(self.text):
                return self.text[self.at]
            if not self._more():
                return ""

    def value(self) -> tuple[Any, str]:
        """The value that begins here and its first characters; goes on to its end. Raises ValueError, RecursionError."""
        while True:
            try:
                value, end = self._decode(self.text, self.at)
                if end < len(self.text) or not self._more():  # a number may go on
                    raw = self.text[self.at : min(end, self.at + 200)]
                    self.advance(end)
                    return value, raw
            except json.JSONDecodeError as error:
                # the text ends within the value, as far as it is read: an error far from its end is none of reading on
                cut = error.msg.startswith("Unterminated string") or error.pos > len(self.text) - 16
                if not cut or len(self.text) - self.at > LIMIT or not self._more():
                    raise

    def advance(self, end: int) -> None:
        self.line += self.text.count("\n", self.at, end)
        self.at = end

    def _more(self) -> bool:
        """Reads on, dropping what is done; as much again as is waiting, so that a long value is not tried too often."""
        if self.whole:
            return False
        try:
            block = self.file.read(max(_BLOCK, len(self.text) - self.at))
        except _DAMAGE as error:
            block, self.damage = "", f": {_said(error)}"
        self.text, self.at = self.text[self.at :] + block, 0
        self.whole = not block
        return not self.whole


def _values(path: Path, packed: str, passed: Callable[[int], object]) -> Iterator[Record]:
    """The elements of a JSON list, or JSON values one after the other, so that a damaged or cut end costs only what it hits."""
    entry = 0
    with _open(path, packed, passed) as file:
        scan = _Scanner(file)
        listed = scan.pass_over("\ufeff \t\r\n") == "["
        if listed:
            scan.advance(scan.at + 1)
        while True:
            first = scan.pass_over(" \t\r\n,")
            line, rest = scan.line, scan.excerpt()
            if not first:
                if listed or scan.damage:
                    yield Record(line, rest, error=f"the list is not closed: the file is cut off{scan.damage}")
                return
            if listed and first == "]":
                scan.advance(scan.at + 1)
                if scan.pass_over(" \t\r\n"):
                    yield Record(line, rest, error="text after the end of the list; a file of one record a line is named .jsonl")
                elif scan.damage:
                    yield Record(scan.line, "", error=f"the file is cut off or damaged here{scan.damage}")
                return
            try:
                value, raw = scan.value()
            except (ValueError, RecursionError) as error:
                yield Record(line, rest, error=f"not readable as JSON from here to the end of the file: {error}{scan.damage}")
                return
            entry += 1
            yield Record(line, raw, value, entry=entry if listed else 0)


def _parquet(path: Path, passed: Callable[[int], object]) -> Iterator[Record]:
    """The rows of a Parquet file, batch by batch."""
    import pyarrow.parquet

    row = 0
    try:
        with pyarrow.parquet.ParquetFile(path, memory_map=False, pre_buffer=False) as file:
            size, count = path.stat().st_size, file.metadata.num_rows
            for batch in file.iter_batches(batch_size=256):
                passed(size * (row + len(batch)) // count - size * row // count)
                for record in _rows(batch, row):
                    row += 1
                    yield record
    except _DAMAGE as error:
        yield Record(row + 1, "", error=f"not readable as Parquet from here to the end of the file: {_said(error)}")


def _rows(batch: Any, before: int) -> Iterator[Record]:
    """The rows of one record batch; one that cannot be decoded costs itself alone."""
    try:
        values: Sequence[Any] = batch.to_pylist()
    except _DAMAGE:
        values = range(len(batch))
        for i in values:
            try:
                yield Record(before + i + 1, "", batch.slice(i, 1).to_pylist()[0])
            except _DAMAGE as error:
                yield Record(before + i + 1, "", error=f"a row that cannot be decoded: {_said(error)}")
        return
    for i, value in enumerate(values, before + 1):
        yield Record(i, "", value)


def _dataset(source: SourceConfig) -> Iterator[Record]:
    """The rows of a Hugging Face data set: streamed from the hub or a folder, or mapped from one that `save_to_disk` wrote."""
    import datasets

    name = str(source.dataset)
    folder = Path(name).expanduser()
    local = folder.is_dir()
    try:
        if local and any((folder / mark).is_file() for mark in ("state.json", "dataset_dict.json")):
            found = datasets.load_from_disk(str(folder))
            rows: Any = found[source.split] if isinstance(found, datasets.DatasetDict) else found
        else:
            where = str(folder) if local else name
            rows = datasets.load_dataset(where, source.dataset_name, split=source.split, revision=source.revision, streaming=True)
    except _DAMAGE as error:
        which = f"dataset_name {source.dataset_name}, split {source.split}, revision {source.revision}"
        raise ConfigError(f"prep.sources: data set {name} ({which}) cannot be read: {_said(error)}") from None
    return _iterated(name, rows, local)


def _iterated(name: str, rows: Any, local: bool) -> Iterator[Record]:
    number = 0
    try:
        for number, value in enumerate(rows, 1):
            yield Record(number, "", value)
    except _DAMAGE as error:
        if not local:  # a network that fails is not the end of the data
            raise KvshotError(f"prep.sources: data set {name} broke off after row {number} ({_said(error)}); run the command again") from None
        yield Record(number + 1, "", error=f"not readable from here to the end of the data set: {_said(error)}")


def _said(error: BaseException) -> str:
    """One line of an error."""
    return (str(error).splitlines() or [""])[0][:300] or type(error).__name__
