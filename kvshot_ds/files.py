"""Atomic writes: a file is either the old one or the new one, whatever happens."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


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
    """The JSON value in `path`."""
    return json.loads(path.read_text(encoding="utf-8"))
