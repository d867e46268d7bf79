"""Atomic writes: the old file or the new one, never a part."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvshot_ds.files import read_json, write_atomic, write_json


def test_writes_text_bytes_and_json_into_new_folders(tmp_path: Path) -> None:
    write_atomic(tmp_path / "a" / "b" / "text", "ä\n")
    write_atomic(tmp_path / "bytes", b"\x00\xff")
    write_json(tmp_path / "j.json", {"b": [1, 2.5, None], "ä": "ö"})
    assert (tmp_path / "a" / "b" / "text").read_bytes() == "ä\n".encode()
    assert (tmp_path / "bytes").read_bytes() == b"\x00\xff"
    assert read_json(tmp_path / "j.json") == {"b": [1, 2.5, None], "ä": "ö"}


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_failure_leaves_the_old_file_and_nothing_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    path = tmp_path / "f"
    write_atomic(path, "old")

    def fail(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, step, fail)
    with pytest.raises(OSError, match="no space left"):
        write_atomic(path, "new")
    assert path.read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["f"]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), [float("-inf")]])
def test_numbers_that_are_not_json_are_refused(tmp_path: Path, value: object) -> None:
    write_json(tmp_path / "j.json", 1)
    with pytest.raises(ValueError, match="Out of range"):
        write_json(tmp_path / "j.json", value)
    assert read_json(tmp_path / "j.json") == 1


def test_readers_see_only_whole_files(tmp_path: Path) -> None:
    path = tmp_path / "f"
    write_atomic(path, "old" * 1000)
    with path.open() as reader:
        write_atomic(path, "new" * 1000)
        assert reader.read() == "old" * 1000
    assert path.read_text() == "new" * 1000
