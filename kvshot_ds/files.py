"""Files: checksums, and atomic writes, after which a file is either the old one or the new one, whatever happens."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from kvshot_ds.errors import KvshotError


class JsonError(KvshotError, ValueError):
    """A file that this project writes as JSON and that is none."""


def file_sha256(path: Path) -> str:
    """Hexadecimal sha256 of the bytes of `path`. Raises OSError if it cannot be read."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_atomic(path: Path, data: bytes | str) -> None:
    """Writes beside `path`, fsyncs, renames over it. Raises OSError (disk full, no permission) leaving the old file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(aside, "wb") as file:
            file.write(data.encode("utf-8") if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """`value` as indented JSON, atomically. NaN and infinity are refused (ValueError): they are not JSON."""
    write_atomic(path, json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """The JSON value in `path`. Raises OSError if it cannot be read, JsonError if it holds something else."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise JsonError(f"{path}: not readable as JSON ({error}): damaged; delete it and run the command that wrote it again") from None
