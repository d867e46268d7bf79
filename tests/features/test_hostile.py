"""What a stranger, or a broken disk, may put in a folder of shards: refused by the name of shard and sample, never a traceback, nothing written."""

from __future__ import annotations

import hashlib
import io
import json
import re
import shutil
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvshot_ds.errors import KvshotError
from kvshot_ds.features.check import Fault, check_shard
from kvshot_ds.features.dataset import merge, subset
from kvshot_ds.features.inspect import inspect
from kvshot_ds.features.manifest import FORMAT, Manifest, ShardIndex
from kvshot_ds.features.shard import ShardReader, ShardSet
from kvshot_ds.features.verify import verify
from kvshot_ds.features.walk import Walk
from tests.features.folders import key_of, make_folder, stored_sample
from tests.features.shards import GEOMETRY, SPEC

TAR = "train-000000.tar"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    make_folder(folder, train=(range(2),), heldout=(range(5, 6),))
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """A copy to be damaged; all around it, nothing may appear."""
    return Path(shutil.copytree(whole, tmp_path / "sandbox" / "features"))


@pytest.fixture(autouse=True)
def nothing_is_written(tmp_path: Path) -> Iterator[None]:
    yield
    assert not [path for path in tmp_path.rglob("*") if "evil" in path.name]
    assert not Path("/tmp/evil").exists()


def bytes_of(info: tarfile.TarInfo, data: bytes = b"") -> bytes:
    info.size = len(data) if info.isreg() else 0
    return info.tobuf(tarfile.USTAR_FORMAT) + data + b"\0" * (-len(data) % 512)


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "", data: bytes = b"") -> bytes:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return bytes_of(info, data)


def write_tar(folder: Path, raw: bytes) -> None:
    """`raw` as the first train shard, and an index that names its checksum: as someone would who wants it to be read."""
    (folder / TAR).write_bytes(raw)
    replace(ShardIndex.load(folder, TAR), bytes=len(raw), sha256=hashlib.sha256(raw).hexdigest()).save(folder)


def found(folder: Path) -> list[Fault]:
    index = ShardIndex.load(folder, TAR)
    return list(check_shard(ShardReader(folder, index, SPEC, GEOMETRY)).faults)


STRANGE = {
    "traversal": (member("../evil.json", data=b"{}"), r"'\.\./evil\.json' \(expected KEY\.json or KEY\.safetensors\)"),
    "absolute": (member("/tmp/evil", data=b"x"), r"'/tmp/evil' \(expected"),
    "folder": (member("evil", tarfile.DIRTYPE), "'evil' at byte .* is a folder"),
    "symbolic link": (member("evil.json", tarfile.SYMTYPE, "/etc/passwd"), r"'evil\.json' at byte .* is a symbolic link"),
    "hard link": (member("evil.json", tarfile.LNKTYPE, "c-0000.json"), r"'evil\.json' at byte .* is a hard link"),
    "device": (member("evil.json", tarfile.CHRTYPE), r"'evil\.json' at byte .* is a device"),
    "pipe": (member("evil.json", tarfile.FIFOTYPE), r"'evil\.json' at byte .* is a pipe"),
    "pax": (member("evil", tarfile.XHDTYPE), "is an extended header"),
    "long name": (member("evil", tarfile.GNUTYPE_LONGNAME), "is an extended header"),
    "unknown type": (member("evil.json", b"Z"), r"is of the unknown type b'Z'"),
    "other extension": (member("evil.pickle", data=b"x"), r"'evil\.pickle' \(expected"),
    "two dots": (member("c-0000.evil.json", data=b"{}"), r"\(expected"),
    "long key": (member("e" * 70 + ".json", data=b"{}"), r"\(expected"),
    "json twice": (member("c-0000.json", data=b"{}"), "sample 'c-0000': its json comes twice"),
    "json alone": (member("evil.json", data=b"{}"), "sample 'evil': its json has no tensors|do not follow its json"),
    "tensors alone": (member("evil.safetensors", data=b"x"), "sample 'evil': no json stands before its tensors"),
    "json bomb": (member("evil.json", data=b"[" * 100_000), "sample 'evil': its json of 100000 bytes is not a mapping"),
    "not utf-8": (member("evil.json", data=b"\xff\xfe"), "sample 'evil': its json of 2 bytes is not a mapping"),
}


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("strange, text", STRANGE.values(), ids=STRANGE)
def test_strange_members_are_named_and_never_extracted(folder: Path, strange: bytes, text: str, first: bool) -> None:
    raw = (folder / TAR).read_bytes()
    with tarfile.open(folder / TAR) as tar:
        end = max(m.offset_data + -(-m.size // 512) * 512 for m in tar)
    write_tar(folder, strange + raw if first else raw[:end] + strange + raw[end:])
    assert any(re.search(text, str(fault)) for fault in found(folder)), found(folder)
    assert all(fault.file == TAR for fault in found(folder))
    if first:  # the samples no longer lie where the index says: the reader refuses them by name
        with pytest.raises(KvshotError, match=rf"{TAR}: sample 'c-0000'"):
            ShardSet.open(folder, "train").read(0)


def test_a_sample_twice(folder: Path) -> None:
    raw = (folder / TAR).read_bytes()
    with tarfile.open(folder / TAR) as tar:
        end = max(m.offset_data + -(-m.size // 512) * 512 for m in tar)
    write_tar(folder, raw[:end] + raw)
    said = [str(fault) for fault in found(folder)]
    for key in ("c-0000", "c-0001"):
        assert any(f"sample '{key}': its json comes twice" in text for text in said) and any(f"'{key}': its safetensors comes twice" in text for text in said)


def test_a_tar_within_the_member_of_another_is_data(folder: Path) -> None:
    """A header inside of a sample's bytes is not taken for a member."""
    inner = io.BytesIO()
    with tarfile.open(fileobj=inner, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("evil.json"), io.BytesIO(b""))
    write_tar(folder, member("c-0009.json", data=b"{}") + member("c-0009.safetensors", data=inner.getvalue()) + (folder / TAR).read_bytes())
    assert not any("evil" in str(fault) for fault in found(folder)) and any("'c-0009': is not in the index" in str(fault) for fault in found(folder))


def test_cut_at_every_block_and_between(folder: Path, whole: Path) -> None:
    raw = (whole / TAR).read_bytes()
    reader = ShardReader(folder, ShardIndex.load(folder, TAR), SPEC, GEOMETRY)
    samples = reader.index.samples
    for size in sorted({*range(0, len(raw), 512), *range(1, len(raw), 997), len(raw) - 1}):
        (folder / TAR).write_bytes(raw[:size])
        faults = check_shard(reader).faults
        assert faults and all(fault.file == TAR for fault in faults)
        lost = {sample.key for sample in samples if sample.offset + sample.size > size}
        assert lost <= {fault.sample for fault in faults}, size
        with pytest.raises(KvshotError, match=rf"{TAR}: {size} bytes, its index says {len(raw)}"):
            ShardSet.open(folder, "train")


def test_every_flipped_byte_is_found(folder: Path, whole: Path) -> None:
    raw = (whole / TAR).read_bytes()
    index = ShardIndex.load(folder, TAR)
    reader = ShardReader(folder, index, SPEC, GEOMETRY)
    named = 0
    for at in range(0, len(raw), 7):
        changed = bytearray(raw)
        changed[at] ^= 1 << at % 8
        (folder / TAR).write_bytes(changed)
        faults = check_shard(reader).faults
        assert any("bytes have changed" in fault.what for fault in faults), at
        named += any(fault.sample for fault in faults)
    assert named > len(raw) // 7 // 20  # headers, where they are damaged, and numbers that become infinite


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_changed_bytes_never_escape_as_anything_else(folder: Path, whole: Path, data: st.DataObject) -> None:
    """Bytes changed where it hurts: tar header, json, safetensors header, under an index that agrees with the new checksum."""
    raw = bytearray((whole / TAR).read_bytes())
    sample = ShardIndex.load(whole, TAR).samples[0]
    places = st.one_of(st.integers(0, len(raw) - 1), st.integers(0, 1100), st.integers(sample.offset, sample.offset + 1500))
    for at, value in data.draw(st.lists(st.tuples(places, st.integers(0, 255)), min_size=1, max_size=6)):
        raw[at] = value
    write_tar(folder, bytes(raw))
    found(folder)
    shards = ShardSet.open(folder, "train")
    for number in range(len(shards)):
        try:
            shards.read(number)
        except KvshotError as error:
            assert TAR in str(error) and key_of(number) in str(error)


HEADER_LENGTHS = [0, 1, 2**20 + 1, 2**31, 2**63, 2**64 - 1]


@pytest.mark.parametrize("length", HEADER_LENGTHS)
def test_headers_of_any_length_are_refused(folder: Path, length: int) -> None:
    raw = bytearray((folder / TAR).read_bytes())
    at = ShardIndex.load(folder, TAR).samples[0].offset
    raw[at : at + 8] = length.to_bytes(8, "little")
    write_tar(folder, bytes(raw))
    with pytest.raises(KvshotError, match=rf"{TAR}: sample 'c-0000': its bytes are no safetensors file"):
        ShardSet.open(folder, "train").read(0)
    assert [fault.sample for fault in found(folder)] == [key_of(0)]


def with_samples(folder: Path, tensors: dict[str, Any]) -> None:
    """The first train shard with one sample of the given tensors, and an index that says where it lies."""
    data, index = safetensors.torch.save(tensors), ShardIndex.load(folder, TAR)
    raw = member("c-0000.json", data=b"{}") + member("c-0000.safetensors", data=data) + b"\0" * 1024
    sample = replace(index.samples[0], offset=1536, size=len(data))
    replace(index, bytes=len(raw), sha256=hashlib.sha256(raw).hexdigest(), samples=(sample,)).save(folder)
    (folder / TAR).write_bytes(raw)


def test_tensors_that_do_not_fit_the_manifest_are_named(folder: Path) -> None:
    good = stored_sample(0, SPEC)
    with_samples(folder, good)
    assert found(folder) == []
    turned = {**good, "turn": torch.full_like(good["turn"], -1)}
    for tensors, text in (
        ({**good, "hidden.1": good["hidden.1"][:, :7].clone()}, r"tensor hidden\.1 is BF16 \[5, 7\]"),
        ({**good, "hidden.1": good["hidden.1"].float()}, r"tensor hidden\.1 is F32"),
        ({name: tensor for name, tensor in good.items() if name != "key.2"}, r"tensor key\.2 is missing"),
        ({**good, "evil": good["turn"].clone()}, "holds tensors that the manifest does not name: evil"),
        ({**good, "tokens": good["tokens"] + 100}, "holds token ids outside the vocabulary of 50"),
        ({**good, "tokens": -good["tokens"] - 1}, "holds token ids outside the vocabulary"),
        (turned, "its turns give 0 teacher rows, its index says 1"),
        ({**good, "value.2": good["value.2"] * torch.inf}, r"tensor value\.2 holds NaN or infinity"),
    ):
        with_samples(folder, tensors)
        said = [str(fault) for fault in found(folder)]
        assert any(re.search(f"sample 'c-0000': {text}", one) for one in said), said


@pytest.mark.parametrize(
    "entry", [{"offset": -1}, {"offset": 10**9}, {"size": 10**12}, {"size": 0}, {"offset": 2**63}, {"tokens": 10**9}, {"rows": 10**9}], ids=str
)
def test_index_entries_that_point_outside_are_refused(folder: Path, entry: dict[str, int]) -> None:
    path = ShardIndex.path(folder, TAR)
    value = json.loads(path.read_text())
    value["samples"][0] |= entry
    path.write_text(json.dumps(value))
    for call in (lambda: ShardSet.open(folder, "train"), lambda: inspect(folder)):
        with pytest.raises(KvshotError, match=r"train-000000\.index\.json: samples\[0\]: .* does not lie within a tar"):
            call()
    assert any(fault.file == path.name and "samples[0]" in fault.what for fault in verify(folder, 1).faults)


def test_a_member_longer_than_the_tar_takes_no_memory(folder: Path) -> None:
    info = tarfile.TarInfo("c-0000.safetensors")
    info.size = 2**60
    write_tar(folder, info.tobuf(tarfile.GNU_FORMAT) + b"\0" * 20_480)
    assert any(f"has {2**60} bytes, the tar ends after 20992" in fault.what for fault in found(folder))


def test_what_stands_after_the_end_is_named(folder: Path) -> None:
    write_tar(folder, (folder / TAR).read_bytes() + member("evil.json", data=b"{}"))
    assert any("something stands after its end" in fault.what for fault in found(folder))


def test_another_version_is_refused_by_name(folder: Path) -> None:
    for path in (Manifest.path(folder), ShardIndex.path(folder, TAR)):
        path.write_text(path.read_text().replace(FORMAT, "kvshot-features/9"))
        with pytest.raises(KvshotError, match=rf"{path.name}: format 'kvshot-features/9', this version reads '{FORMAT}'"):
            ShardSet.open(folder, "train")
        Manifest.path(folder).write_text(Manifest.path(folder).read_text().replace("kvshot-features/9", FORMAT))


BOMBS = ["[" * 100_000, '{"format":' * 50_000, '{"format": "' + FORMAT + '", "shards": ' + "[" * 900 + "]" * 900 + "}", "1" * 5000, '"\\ud800"', "\0", "NaN"]


@pytest.mark.parametrize("text", BOMBS, ids=range(len(BOMBS)))
def test_json_bombs_are_one_line(folder: Path, text: str) -> None:
    out = folder / "out"
    for path in (ShardIndex.path(folder, TAR), Manifest.path(folder)):
        path.write_text(text)
        for call in (
            lambda: ShardSet.open(folder, "train"),
            lambda: inspect(folder),
            lambda: merge([folder] * 2, out),
            lambda: subset(folder, out, 1),
        ):
            with pytest.raises(KvshotError, match=path.name) as error:
                call()
            assert len(str(error.value)) < 1000


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.integers(-3, 3) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of every part of a JSON value."""
    yield at
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(inner, (*at, key))


def changed(value: Any, at: tuple[Any, ...], to: Any) -> Any:
    if not at:
        return to
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[at[0]] = changed(value[at[0]], at[1:], to)
    return copy


@pytest.mark.parametrize("path_of", [Manifest.path, lambda folder: ShardIndex.path(folder, TAR)], ids=["manifest", "index"])
def test_random_json_is_an_error_of_the_user(folder: Path, whole: Path, path_of: Callable[[Path], Path]) -> None:
    good = json.loads(path_of(whole).read_text())
    where = sorted(set(places(good)), key=repr)

    def check(at: tuple[Any, ...], to: Any) -> None:
        path_of(folder).write_text(json.dumps(changed(good, at, to)))
        for call in (
            lambda: [shards.read(i) for shards in (ShardSet.open(folder, "train"), ShardSet.open(folder, "heldout")) for i in range(len(shards))],
            lambda: inspect(folder).lines(),
            lambda: verify(folder, 1).lines(),
        ):
            try:
                call()
            except KvshotError as error:
                assert str(error)

    for at in where:
        inner = good
        for part in at:
            inner = inner[part]
        for to in (0, -1, 1 << 40, 1 << 70) if isinstance(inner, int) else ([], [inner], [inner, inner], "") if isinstance(inner, list | str) else ():
            check(at, to)
    settings(max_examples=100, deadline=None)(given(at=st.sampled_from(where), to=JSON)(check))()


def test_the_walk_reads_each_byte_once(whole: Path) -> None:
    raw = (whole / TAR).read_bytes()
    walk = Walk(io.BytesIO(raw), len(raw))
    names = [m.name for m in walk.members()]
    with tarfile.open(whole / TAR) as tar:
        assert names == tar.getnames() and walk.at == len(raw)
    assert asdict(ShardIndex.load(whole, TAR))["sha256"] == walk.sha256.hexdigest()
