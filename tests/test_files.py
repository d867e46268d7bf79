"""Files in folders and behind URLs: the old file or the new one, never a part; ranges, leftovers, and errors that say what to do."""

from __future__ import annotations

import errno
import hashlib
import os
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from upath import UPath

from kvshot_ds import files
from kvshot_ds.errors import ConfigError
from kvshot_ds.files import (
    AnyPath,
    abandoned,
    append,
    aside,
    disk_full,
    exists,
    file_sha256,
    location,
    names,
    put,
    read_bytes,
    read_json,
    reading,
    remove,
    size,
    write_atomic,
    write_json,
)
from tests.s3 import bucket


@pytest.fixture(scope="module")
def s3() -> Iterator[UPath]:
    with bucket("files") as url:
        yield url


@pytest.fixture(params=["local", "memory", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> AnyPath:
    """A folder of each kind, empty."""
    if request.param == "local":
        return tmp_path / "folder"
    if request.param == "memory":
        return location(f"memory://{uuid.uuid4().hex}")
    return request.getfixturevalue("s3") / uuid.uuid4().hex


def test_everything_works_alike_in_folders_and_behind_urls(place: AnyPath) -> None:
    assert names(place, "") == [] and not exists(place / "a.tar")
    write_atomic(place / "a.tar", "ä\n")
    write_atomic(place / "b" / "c.tar", b"\x00\xff")
    write_json(place / "j.json", {"b": [1, 2.5, None], "ä": "ö"})
    assert read_bytes(place / "a.tar") == "ä\n".encode() and read_bytes(place / "b" / "c.tar") == b"\x00\xff"
    assert read_json(place / "j.json") == {"b": [1, 2.5, None], "ä": "ö"}
    assert (exists(place / "a.tar"), exists(place), size(place / "a.tar")) == (True, False, 3)
    assert names(place, ".tar") == ["a.tar"] and names(place, "") == ["a.tar", "j.json"]
    write_atomic(place / "a.tar", "new")
    assert read_bytes(place / "a.tar") == b"new" and size(place / "a.tar") == 3
    append(place / "log", "one\n")
    append(place / "log", "two\n")
    assert read_bytes(place / "log") == b"one\ntwo\n"
    for _ in range(2):
        remove(place / "a.tar")
    assert not exists(place / "a.tar")
    with pytest.raises(FileNotFoundError):
        size(place / "a.tar")
    with pytest.raises(FileNotFoundError):
        read_json(place / "a.tar")


def test_a_large_file_is_put_in_place_and_read_in_parts(place: AnyPath, tmp_path: Path) -> None:
    data = os.urandom(6 << 20)
    written = tmp_path / "written"
    written.write_bytes(data)
    if isinstance(place, Path):
        place.mkdir()
    put(written, place / "big")
    assert not written.exists() and size(place / "big") == len(data)
    assert file_sha256(place / "big") == hashlib.sha256(data).hexdigest()
    parts = [(100, 50), (0, 7), (5_000_000, 70_000), (5_100_000, 3), (6 << 20, 0), (110, 5)]
    with reading(place / "big") as file:
        assert file.read(3, 4) == data[3:7]
        file.fetch(parts)
        for offset, length in parts:
            assert file.read(offset, length) == data[offset : offset + length]
        assert file.read(5_200_000, 9) == data[5_200_000:5_200_009], "what was not announced is read all the same"
        assert file.read((6 << 20) - 2, 10) == data[-2:], "fewer at the end"


def test_a_forked_process_reads_behind_a_url(s3: UPath) -> None:
    write_atomic(s3 / "fork" / "f", b"0123456789")
    with reading(s3 / "fork" / "f") as file:
        assert file.read(2, 3) == b"234"
    child = os.fork()
    if not child:
        with reading(s3 / "fork" / "f") as file:
            os._exit(0 if file.read(4, 2) == b"45" else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_locations() -> None:
    assert location("a/b") == Path("a/b") and location("file:///a/b") == Path("/a/b") and location(Path("x")) == Path("x")
    url = location("memory://x/y")
    assert isinstance(url, UPath) and str(url / "z") == "memory://x/y/z" and location(url) == url
    with pytest.raises(ConfigError, match=r"xyz://a: .*expected a local folder, or a URL such as s3://bucket/folder"):
        location("xyz://a")


@pytest.mark.parametrize("url, module, package", [("s3://b/x", "s3fs", "s3fs"), ("gs://b/x", "gcsfs", "gcsfs")])
def test_a_package_that_is_missing_is_named(url: str, module: str, package: str) -> None:
    code = f"import sys; sys.modules['{module}'] = None\nfrom kvshot_ds.files import location\nlocation('{url}')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert f"ConfigError: {url}: this needs a package that is not installed: pip install {package}" in done.stderr.replace("kvshot_ds.errors.", "")


def test_errors_of_a_store_name_the_file(s3: UPath, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OSError, match="no-such-bucket"):
        write_atomic(location("s3://no-such-bucket/x"), "data")
    from botocore.exceptions import NoCredentialsError

    def nobody(*_: object, **__: object) -> bytes:
        raise NoCredentialsError

    monkeypatch.setattr(files.filesystem(s3), "cat_file", nobody, raising=False)
    with pytest.raises(OSError, match=r"Unable to locate credentials: 's3://files/x'"):
        read_bytes(s3 / "x")


def test_an_upload_that_lost_bytes_is_an_error(s3: UPath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "w").write_bytes(b"12345")
    monkeypatch.setattr(files, "size", lambda _path: 4)
    with pytest.raises(OSError, match="another number of bytes"):
        put(tmp_path / "w", s3 / "short")
    assert (tmp_path / "w").exists()


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


def test_file_and_folder_are_flushed_to_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[str] = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (flushed.append(str(Path(f"/proc/self/fd/{fd}").readlink())), real(fd)))
    write_atomic(tmp_path / "f", "data")
    assert len(flushed) == 2 and Path(flushed[0]).name.startswith(".f.") and flushed[1] == str(tmp_path)


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


def test_many_writers_of_one_file_do_not_meet(tmp_path: Path) -> None:
    def write(n: int) -> None:
        for _ in range(20):
            write_atomic(tmp_path / "f", str(n) * 1000)

    threads = [threading.Thread(target=write, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set((tmp_path / "f").read_text())) == 1 and [p.name for p in tmp_path.iterdir()] == ["f"]


def test_leftovers_of_the_dead_and_the_forgotten(tmp_path: Path) -> None:
    mine = aside(tmp_path / "a.tar")
    mine.write_text("")
    assert mine.name.startswith(".a.tar.") and not abandoned(mine)
    child = subprocess.Popen([sys.executable, "-c", "from pathlib import Path; from kvshot_ds.files import aside; print(aside(Path('b.tar')))"], stdout=-1)
    name = child.communicate()[0].decode().strip()
    dead, elsewhere = tmp_path / name, tmp_path / name.replace(files._host(), "other-host")
    for path in (dead, elsewhere):
        path.write_text("")
    assert abandoned(dead) and not abandoned(elsewhere), "of another host nothing is known"
    os.utime(elsewhere, (0, 0))
    assert abandoned(elsewhere)
    (tmp_path / ".a.tmp").write_text("")
    os.utime(tmp_path / ".a.tmp", (0, 0))
    assert not abandoned(tmp_path / ".a.tmp"), "not a name of aside: another program's"


def test_a_full_disk_is_told_from_other_errors(tmp_path: Path) -> None:
    text = disk_full(OSError(errno.ENOSPC, "No space left on device"), tmp_path)
    assert str(tmp_path) in text and "MB free" in text and "run the command again" in text and "\n" not in text
    assert disk_full(OSError(errno.EACCES, "denied"), tmp_path) == ""


def test_a_file_is_read_again_for_its_checksum_only_if_it_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, read, real = tmp_path / "shard", [], hashlib.file_digest
    monkeypatch.setattr(hashlib, "file_digest", lambda file, name: read.append(1) or real(file, name))
    path.write_bytes(b"one")
    assert [file_sha256(path), file_sha256(path)] == [hashlib.sha256(b"one").hexdigest()] * 2
    assert len(read) == 2, "too young: it could change without its times telling"
    monkeypatch.setattr("kvshot_ds.files._SETTLED", -1e9)
    assert [file_sha256(path), file_sha256(path)] == [hashlib.sha256(b"one").hexdigest()] * 2
    assert len(read) == 3
    before = path.stat()
    while path.stat().st_ctime_ns == before.st_ctime_ns:
        path.write_bytes(b"two")
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file_sha256(path) == hashlib.sha256(b"two").hexdigest(), "also if its size and its time are as before"
