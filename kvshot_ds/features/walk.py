"""A tar as a stranger finds it: member by member from its first byte, trusting no index. Nothing is ever written to disk.

Python's tarfile takes a damaged header for the end of the archive; here it is an error that says at which byte.
"""

from __future__ import annotations

import hashlib
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from kvshot_ds.files import AnyPath, filesystem, storage_errors

BLOCK = tarfile.BLOCKSIZE  # a tar is made of blocks of this many bytes; headers take one, data is padded to whole ones
_PIECE = 1 << 22  # read at once of what nobody asked for [bytes]
_KINDS = {
    tarfile.LNKTYPE: "a hard link", tarfile.SYMTYPE: "a symbolic link", tarfile.CHRTYPE: "a device", tarfile.BLKTYPE: "a device",
    tarfile.DIRTYPE: "a folder", tarfile.FIFOTYPE: "a pipe", tarfile.XHDTYPE: "an extended header", tarfile.XGLTYPE: "an extended header",
    tarfile.GNUTYPE_LONGNAME: "an extended header", tarfile.GNUTYPE_LONGLINK: "an extended header", tarfile.GNUTYPE_SPARSE: "a sparse file",
}  # fmt: skip


class TarError(Exception):
    """Here the bytes stop being a tar. The text says where."""


@dataclass(frozen=True)
class Member:
    """One member. offset, size: of its data in the tar [bytes]. kind: '' for a plain file, else what it is instead."""

    name: str
    kind: str
    offset: int
    size: int


class Walk:
    """The members of one tar of `length` bytes, in order, each byte read once. sha256: of what was read so far."""

    def __init__(self, stream: IO[bytes], length: int, seen: Callable[[int], object] = lambda _: None) -> None:
        """seen: told how many bytes each read brought."""
        self._stream, self.length, self._seen = stream, length, seen
        self.at, self.sha256 = 0, hashlib.sha256()

    def members(self) -> Iterator[Member]:
        """Raises TarError: a damaged header, a member that does not end within the tar, bytes after the end, no end."""
        while True:
            start = self.at
            block = self.read(BLOCK)
            if not any(block):
                break
            try:
                info = tarfile.TarInfo.frombuf(bytes(block), "utf-8", "surrogateescape")
            except (tarfile.HeaderError, ValueError) as error:
                raise TarError(f"at byte {start} stands no tar header ({error})") from None
            kind = "" if info.type in (tarfile.REGTYPE, tarfile.AREGTYPE) else _KINDS.get(info.type, f"of the unknown type {info.type!r}")
            member = Member(info.name, kind, self.at, info.size)
            end = self.at + -(-info.size // BLOCK) * BLOCK
            if info.size < 0 or end > self.length:
                raise TarError(f"member {info.name!r} at byte {start} has {info.size} bytes, the tar ends after {self.length}")
            yield member
            self._pass(end - self.at)
        tail = self.length - self.at
        if tail < BLOCK:
            raise TarError(f"it has no end: expected two empty blocks, found one at byte {start}")
        self._pass(tail, empty=True)

    def read(self, size: int) -> bytearray:
        """The next bytes of the member just met, or of the tar. Raises TarError if there are fewer."""
        data = bytearray(size)
        view, done = memoryview(data), 0
        while done < size:
            got = self._stream.readinto(view[done:])  # type: ignore[attr-defined]
            if not got:
                raise TarError(f"the file ends at byte {self.at + done}, expected {self.at + size}")
            done += got
        self.at += size
        self.sha256.update(data)
        self._seen(size)
        return data

    def rest(self) -> None:
        """Reads on to the end of the file, for the sha256."""
        self._pass(max(0, self.length - self.at))

    def _pass(self, size: int, empty: bool = False) -> None:
        while size:
            at = self.at
            data = self.read(min(size, _PIECE))
            size -= len(data)
            if empty and any(data):
                raise TarError(f"something stands after its end at byte {at}")


@contextmanager
def opened(path: AnyPath) -> Iterator[IO[bytes]]:
    """`path` for one pass from its beginning. Raises OSError."""
    if isinstance(path, Path):
        with open(path, "rb", buffering=0) as file:
            yield file
    else:
        with storage_errors(path), filesystem(path).open(path.path, "rb", block_size=_PIECE * 2) as remote:
            yield remote
