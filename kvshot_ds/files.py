"""Files, in local folders and behind URLs of object stores: checksums, and atomic writes, after which a file is the old one or the new one.

A local path is a `pathlib.Path`; a URL (s3://bucket/folder, gs://, memory://) is a `upath.UPath`, which joins and prints as a path does. Credentials
and endpoints come from where each store's client looks for them (environment, its own configuration files).
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import mmap
import os
import re
import shutil
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from upath import UPath

from kvshot_ds.errors import ConfigError, KvshotError

AnyPath = Path | UPath

_PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs"}
_ASIDE = re.compile(r"\..+\.([^.]+)\.(\d+)\.[0-9a-f]{8}\.tmp")
_HUGE = 1 << 22  # from here on a buffer is made of huge pages [bytes]
IN_FLIGHT = 64  # exchanges with a store at a time
_SETTLED = 2.0  # a file changed more recently may change again within the same tick of its clock [s]
_read_before: dict[tuple[int, ...], str] = {}  # state of a file -> its sha256
_FORGOTTEN = 3600  # a file being written that nobody has touched for so long belongs to no one [s]


class JsonError(KvshotError, ValueError):
    """A file that this project writes as JSON and that is none."""


def location(text: str | AnyPath) -> AnyPath:
    """`text` as a local path, or as a URL if it has `://` in it (file:// is local). Raises ConfigError: no such store, or its package is missing."""
    if isinstance(text, Path):
        return text
    if str(text).startswith("file://"):
        return Path(str(text).removeprefix("file://"))
    if "://" not in str(text):
        return Path(str(text))
    try:
        found = UPath(text)
    except ValueError as error:
        raise ConfigError(f"{text}: {error}; expected a local folder, or a URL such as s3://bucket/folder, gs://bucket/folder") from None
    filesystem(found)
    return found


def filesystem(url: UPath) -> Any:
    """The fsspec file system of a URL: without cached listings (other processes write too), and one per process. Raises ConfigError as `location`."""
    import fsspec

    options: dict[str, Any] = {"use_listings_cache": False}
    if url.protocol in ("s3", "s3a"):  # as many connections as there are threads that read
        options["config_kwargs"] = {"max_pool_connections": IN_FLIGHT, **fsspec.config.conf.get("s3", {}).get("config_kwargs", {})}
    try:
        return fsspec.filesystem(url.protocol, **{**options, **url.storage_options})
    except ImportError:
        package = _PACKAGES.get(url.protocol, f"the fsspec package of {url.protocol}://")
        raise ConfigError(f"{url}: this needs a package that is not installed: pip install {package}") from None
    except ValueError as error:
        raise ConfigError(f"{url}: {error}; expected a local folder, or a URL such as s3://bucket/folder, gs://bucket/folder") from None


@contextmanager
def storage_errors(path: AnyPath) -> Iterator[None]:
    """Failures of a store's client become an OSError that names `path`: those that are none (no credentials, no connection), and those that name nothing."""
    kinds = [("botocore.exceptions", "BotoCoreError"), ("botocore.exceptions", "ClientError"), ("aiohttp", "ClientError"), ("gcsfs.retry", "HttpError")]
    # of the clients that are loaded (another thread may be loading one just now)
    foreign = tuple(found for module, name in kinds if (found := getattr(sys.modules.get(module), name, None)) is not None)
    try:
        yield
    except (OSError, *foreign) as error:
        if isinstance(error, FileNotFoundError):
            raise FileNotFoundError(errno.ENOENT, "not there", str(path)) from None
        code, why = (error.errno, error.strerror) if isinstance(error, OSError) else (None, None)
        raise OSError(code or errno.EIO, why or str(error) or type(error).__name__, str(path)) from None


def absolute(path: AnyPath) -> AnyPath:
    """As it can be given to a process that works in another folder."""
    return path.resolve() if isinstance(path, Path) else path


def exists(path: AnyPath) -> bool:
    """A file stands there. Raises OSError if the store cannot say."""
    if isinstance(path, Path):
        return path.is_file()
    with storage_errors(path):
        return bool(filesystem(path).isfile(path.path))


def size(path: AnyPath) -> int:
    """Bytes of the file. Raises OSError if there is none."""
    if isinstance(path, Path):
        return path.stat().st_size
    with storage_errors(path):
        return int(filesystem(path).info(path.path)["size"])


def names(folder: AnyPath, suffix: str) -> list[str]:
    """Names of the files in `folder` (not below it) that end in `suffix` and do not begin with a dot, sorted; none if there is no folder."""
    if isinstance(folder, Path):
        found = [entry.name for entry in os.scandir(folder) if entry.is_file()] if folder.is_dir() else []
    else:
        with storage_errors(folder):
            try:
                found = [entry["name"].rstrip("/").rpartition("/")[2] for entry in filesystem(folder).ls(folder.path, detail=True) if entry["type"] == "file"]
            except FileNotFoundError:
                found = []
    return sorted(name for name in found if name.endswith(suffix) and not name.startswith("."))


def remove(path: AnyPath) -> None:
    """Deletes the file, if it is there."""
    if isinstance(path, Path):
        path.unlink(missing_ok=True)
        return
    with storage_errors(path):
        try:
            filesystem(path).rm_file(path.path)
        except FileNotFoundError:
            return


def read_bytes(path: AnyPath) -> bytes:
    """All of the file. Raises OSError."""
    if isinstance(path, Path):
        return path.read_bytes()
    with storage_errors(path):
        data: bytes = filesystem(path).cat_file(path.path)
        return data


class RangeReader(Protocol):
    """A file of which parts are read. read: `size` bytes from `offset`, fewer only at its end. fetch: parts that are read next."""

    def read(self, offset: int, size: int) -> bytearray | memoryview: ...
    def fetch(self, parts: Sequence[tuple[int, int]]) -> None: ...


def buffer(size: int) -> bytearray | mmap.mmap:
    """`size` writable bytes. Large ones in huge pages, where the system has them: touching fresh memory page by page costs more than reading a file into it."""
    if size < _HUGE:
        return bytearray(size)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without them
        pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


class _LocalReader:
    """What was announced lies in one buffer, and parts of it are handed out without a copy."""

    def __init__(self, file: int) -> None:
        self.file = file
        self.spans: list[tuple[int, memoryview]] = []

    def read(self, offset: int, size: int) -> bytearray | memoryview:
        for start, data in self.spans:
            if start <= offset and offset + size <= start + len(data):
                return data[offset - start : offset - start + size]
        view, done = memoryview(buffer(size)), 0
        while done < size:
            got = os.preadv(self.file, [view[done:]], offset + done)
            if not got:
                break
            done += got
        return view[:done]

    def fetch(self, parts: Sequence[tuple[int, int]]) -> None:
        for offset, size in _spans(parts):
            self.spans.append((offset, memoryview(self.read(offset, size))))


class _RemoteReader:
    """Parts that were announced come in one exchange, side by side; others one by one."""

    def __init__(self, url: UPath) -> None:
        self.url, self.fs = url, filesystem(url)
        self.parts: dict[int, bytes] = {}

    def read(self, offset: int, size: int) -> bytearray:
        start = self._held(offset, size)
        if start is not None:
            return bytearray(self.parts[start][offset - start : offset - start + size])
        if not size:
            return bytearray()
        with storage_errors(self.url):
            return bytearray(self.fs.cat_file(self.url.path, start=offset, end=offset + size))

    def fetch(self, parts: Sequence[tuple[int, int]]) -> None:
        spans = _spans([part for part in parts if self._held(*part) is None])
        starts, ends = [offset for offset, _ in spans], [offset + size for offset, size in spans]
        with storage_errors(self.url):
            found = self.fs.cat_ranges([self.url.path] * len(spans), starts, ends, on_error="raise") if spans else []
        self.parts.update(zip(starts, found, strict=True))

    def _held(self, offset: int, size: int) -> int | None:
        """Where the part in which these bytes lie begins, if it has come."""
        return next((start for start, data in self.parts.items() if start <= offset and offset + size <= start + len(data)), None)


def _spans(parts: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """parts: (offset, size) of each. What lies at most 64 KiB apart comes as one."""
    spans: list[tuple[int, int]] = []
    for offset, size in sorted(part for part in parts if part[1]):
        if spans and offset <= sum(spans[-1]) + (1 << 16):
            start, before = spans[-1]
            spans[-1] = start, max(before, offset + size - start)
        else:
            spans.append((offset, size))
    return spans


@contextmanager
def reading(path: AnyPath) -> Iterator[RangeReader]:
    """`path` for reads of parts. Raises OSError if it cannot be opened."""
    if isinstance(path, Path):
        with open(path, "rb", buffering=0) as file:
            yield _LocalReader(file.fileno())
    else:
        yield _RemoteReader(path)


def file_sha256(path: AnyPath) -> str:
    """Hexadecimal sha256 of the bytes of `path`. Raises OSError if it cannot be read.

    A local file that is as it was when this process last read it is not read again.
    """
    if isinstance(path, Path):
        with open(path, "rb") as file:
            state = _state(file.fileno())
            if state not in _read_before:
                found = hashlib.file_digest(file, "sha256").hexdigest()
                if time.time() - state[-1] / 1e9 < _SETTLED or _state(file.fileno()) != state:
                    return found
                _read_before[state] = found
            return _read_before[state]
    with storage_errors(path), filesystem(path).open(path.path, "rb") as remote:
        total = hashlib.sha256()
        while block := remote.read(1 << 22):
            total.update(block)
        return total.hexdigest()


def _state(file: int) -> tuple[int, ...]:
    """Which file it is, and when it was changed last: the clock of the last number cannot be set back as that of the one before it can."""
    found = os.fstat(file)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def aside(path: Path) -> Path:
    """A name beside `path` to write it under; it says who writes: host and process."""
    return path.with_name(f".{path.name}.{_host()}.{os.getpid()}.{uuid.uuid4().hex[:8]}.tmp")


def abandoned(leftover: Path) -> bool:
    """A file under a name of `aside` whose writer is gone: its process on this host, or, on any host, nobody wrote to it for an hour."""
    owner = _ASIDE.fullmatch(leftover.name)
    if not owner:  # another program's
        return False
    try:
        if time.time() - leftover.stat().st_mtime > _FORGOTTEN:
            return True
    except OSError:
        return False
    return owner[1] == _host() and not _alive(int(owner[2]))


def _host() -> str:
    return os.uname().nodename.replace(".", "_")


def _alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@contextmanager
def sole_writer(folder: Path, command: str, patience: float = 0) -> Iterator[None]:
    """Holds the folder's lock, which the system lets go whenever this process ends. patience: for a process that is just ending [s].

    Raises ConfigError naming the holder if another process has it. On network storage where locks do not work, nothing is held.
    """
    folder.mkdir(parents=True, exist_ok=True)
    until, told = time.monotonic() + patience, False
    with open(folder / ".lock", "a+") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                holder = file.read(300).strip()
                held = f" ({holder})" if holder else ""
                if time.monotonic() < until:
                    if not told:
                        print(f"{folder}: another {command} is writing there{held}; waiting up to {patience:.0f} s for its end", flush=True)
                    told = True
                    time.sleep(0.5)
                    continue
                raise ConfigError(f"{folder}: another {command} is writing there{held}; wait for it, or use another folder") from None
            except OSError as error:
                if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                    raise
            break
        with suppress(OSError):  # a full disk: then the holder has no name
            os.truncate(file.fileno(), 0)
            os.write(file.fileno(), f"process {os.getpid()} on {os.uname().nodename}".encode())
        yield


def write_atomic(path: AnyPath, data: bytes | str) -> None:
    """Writes beside `path`, fsyncs, renames over it; to a URL, sends the whole object. Raises OSError (disk full, no permission) leaving the old file."""
    raw = data.encode("utf-8") if isinstance(data, str) else data
    if not isinstance(path, Path):
        with storage_errors(path):
            filesystem(path).pipe_file(path.path, raw)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = aside(path)
    try:
        with open(beside, "wb") as file:
            file.write(raw)
            file.flush()
            os.fsync(file.fileno())
        put(beside, path)
    except OSError as error:  # of a write, which names no file
        raise error if error.errno is None or error.filename else OSError(error.errno, error.strerror, str(path)) from None
    finally:
        beside.unlink(missing_ok=True)


def put(written: Path, path: AnyPath) -> None:
    """Moves `written`, a whole file that has been fsynced, to `path` in one step, for good: a rename in its folder, or an upload. Raises OSError."""
    if isinstance(path, Path):
        os.replace(written, path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        return
    with storage_errors(path):
        filesystem(path).put_file(str(written), path.path)
    if size(path) != written.stat().st_size:
        raise OSError(errno.EIO, "the store holds another number of bytes than were sent", str(path))
    written.unlink()


def append(path: AnyPath, text: str) -> None:
    """Appends to a log. Behind a URL the whole file is sent again, so that two writers may lose each other's lines."""
    if isinstance(path, Path):
        with open(path, "a", encoding="utf-8") as file:
            file.write(text)
    else:
        write_atomic(path, (read_bytes(path) if exists(path) else b"") + text.encode("utf-8"))


def disk_full(error: OSError, folder: Path) -> str:
    """What to say of an error that means that the disk of `folder` is full, with the space that is left; '' for any other."""
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return ""
    free = shutil.disk_usage(folder).free if folder.is_dir() else 0
    return f"{folder}: no space left ({free / 1e6:,.1f} MB free); what was finished is kept: make room there and run the command again"


def write_json(path: AnyPath, value: Any) -> None:
    """`value` as indented JSON, atomically. NaN and infinity are refused (ValueError): they are not JSON."""
    write_atomic(path, json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: AnyPath) -> Any:
    """The JSON value in `path`. Raises OSError if it cannot be read, JsonError if it holds something else."""
    try:
        return json.loads(read_bytes(path).decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise JsonError(f"{path}: not readable as JSON ({error}): damaged; delete it and run the command that wrote it again") from None


def read_object(path: AnyPath) -> dict[str, Any]:
    """The JSON object in `path`. Raises as `read_json`; JsonError also if it is another value."""
    found = read_json(path)
    if not isinstance(found, dict):
        raise JsonError(f"{path}: expected a JSON object, found {type(found).__name__}: damaged; delete it and run the command that wrote it again")
    return found


def glimpse(path: AnyPath) -> dict[str, Any]:
    """The JSON object in `path`; {} where there is none that can be read: a process may be writing it, or an older version wrote it."""
    try:
        return read_object(path)
    except (OSError, JsonError):
        return {}
