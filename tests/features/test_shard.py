"""Shards: the same bytes every time, readable by plain WebDataset, and refused by name when anything is wrong."""

from __future__ import annotations

import dataclasses
import json
import pickle
import tarfile
from pathlib import Path

import pytest
import safetensors.torch
import torch
import webdataset

from kvshot_ds.errors import ConfigError, KvshotError
from kvshot_ds.features.manifest import FORMAT, Manifest, ShardIndex
from kvshot_ds.features.shard import ShardReader, ShardSet, ShardWriter, all_finite
from kvshot_ds.features.spec import Store
from tests.features.folders import stored_sample
from tests.features.shards import GEOMETRY, SPEC, assert_whole, make_sample, make_shards, write_shard


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_shards(tmp_path)
    return tmp_path


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a)


def change(path: Path, offset: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(data)


def edit(path: Path, **values: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_every_sample_comes_back_in_index_order(folder: Path) -> None:
    train, heldout = ShardSet.open(folder, "train"), ShardSet.open(folder, "heldout")
    assert (len(train), len(heldout)) == (5, 2)
    for seed, (shards, i) in enumerate([*((train, i) for i in range(5)), *((heldout, i) for i in range(2))]):
        key, tensors = shards.read(i)
        assert key == f"c-{seed:04d}" == shards.samples[i].key and same(tensors, make_sample(seed))
        assert (shards.samples[i].tokens, shards.samples[i].rows) == (len(tensors["tokens"]), len(tensors["teacher.lse"]))
    assert_whole(train)
    assert same(pickle.loads(pickle.dumps(train)).read(3)[1], make_sample(3))  # noqa: S301 - loader processes may be spawned


def test_chosen_keys_only(folder: Path) -> None:
    shards = ShardSet.open(folder, "train")
    assert same(shards.read(4, ("turn", "key.2"))[1], {k: make_sample(4)[k] for k in ("turn", "key.2")})
    with pytest.raises(ConfigError, match=r"'hidden\.5' was not captured; the features hold hidden\.1"):
        shards.read(0, ("hidden.5",))


def test_plain_webdataset_reads_the_tars(folder: Path) -> None:
    def decode(sample: dict) -> tuple[str, dict, dict]:
        return sample["__key__"], safetensors.torch.load(sample["safetensors"]), json.loads(sample["json"])

    dataset = webdataset.WebDataset(str(folder / "train-{000000..000001}.tar"), shardshuffle=False).map(decode)
    found = {key: (tensors, meta) for key, tensors, meta in dataset}
    assert sorted(found) == [f"c-{seed:04d}" for seed in range(5)]
    for seed in range(5):
        tensors, meta = found[f"c-{seed:04d}"]
        assert same(tensors, make_sample(seed)) and meta["id"] == f"ü {seed}"


def test_bytes_depend_on_the_samples_alone(tmp_path: Path) -> None:
    first, second = (write_shard(tmp_path / name, "train-000000.tar", range(3)) for name in "ab")
    assert first == second
    with tarfile.open(tmp_path / "a" / "train-000000.tar") as tar:
        assert {(m.mtime, m.uid, m.gid, m.uname, m.gname, m.mode) for m in tar} == {(0, 0, 0, "kvshot", "kvshot", 0o444)}
    assert write_shard(tmp_path / "c", "train-000000.tar", range(4)).sha256 != first.sha256


def test_a_writer_left_early_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), ShardWriter(tmp_path, "train-000000.tar") as writer:
        writer.write("c", make_sample(0), {})
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("key", ["../up", "a/b", "a.b", "", "x" * 65])
def test_keys_that_are_no_plain_names_are_refused(tmp_path: Path, key: str) -> None:
    with ShardWriter(tmp_path, "train-000000.tar") as writer, pytest.raises(KvshotError, match="not a plain name"):
        writer.write(key, make_sample(0), {})
    write_shard(tmp_path, "train-000001.tar", range(1))
    path = ShardIndex.path(tmp_path, "train-000001.tar")
    edit(path, samples=[{**json.loads(path.read_text())["samples"][0], "key": key}])
    with pytest.raises(KvshotError, match="not a plain name"):
        ShardIndex.load(tmp_path, "train-000001.tar")


def test_a_key_twice_is_refused(tmp_path: Path) -> None:
    with ShardWriter(tmp_path, "train-000000.tar") as writer:
        writer.write("c", make_sample(0), {})
        with pytest.raises(KvshotError, match="'c' comes twice"):
            writer.write("c", make_sample(1), {})


def test_missing_and_truncated_shards_are_named(folder: Path) -> None:
    path = folder / "train-000001.tar"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1000])
    with pytest.raises(KvshotError, match=rf"train-000001\.tar: {len(whole) - 1000} bytes, its index says {len(whole)}"):
        ShardSet.open(folder, "train")
    path.unlink()
    with pytest.raises(KvshotError, match=r"train-000001\.tar: not readable"):
        ShardSet.open(folder, "train")
    ShardIndex.path(folder, "train-000001.tar").unlink()
    with pytest.raises(KvshotError, match=r"train-000001\.index\.json: not there"):
        ShardSet.open(folder, "train")
    ShardSet.open(folder, "heldout")


def test_a_file_cut_after_opening_is_named(folder: Path) -> None:
    shards = ShardSet.open(folder, "train")
    path = folder / "train-000000.tar"
    path.write_bytes(path.read_bytes()[: shards.samples[0].offset + 700])
    with pytest.raises(KvshotError, match=r"train-000000\.tar: sample 'c-0000': the file ends at byte"):
        shards.read(0)


def test_a_changed_byte_fails_the_checksum(folder: Path) -> None:
    shards = ShardSet.open(folder, "train")
    change(folder / "train-000000.tar", shards.samples[1].offset + shards.samples[1].size - 2, b"\x11\x11")
    with pytest.raises(KvshotError, match=r"train-000000\.tar: sha256 .* damaged"):
        shards.check_bytes()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["hidden.1", "value.2", "query.4", "teacher.lse"])
def test_values_that_are_not_finite_name_shard_key_and_tensor(tmp_path: Path, name: str, bad: float) -> None:
    tensors = make_sample(0)
    tensors[name].view(-1)[-1] = bad
    with ShardWriter(tmp_path, "train-000000.tar") as writer:
        writer.write("c", tensors, {})
        index = writer.commit(["c"])
    with pytest.raises(KvshotError, match=rf"train-000000\.tar: sample 'c': tensor {name} holds NaN or infinity"):
        ShardReader(tmp_path, index, SPEC, GEOMETRY).read(0)
    assert ShardReader(tmp_path, index, SPEC, GEOMETRY).read(0, ("tokens",)).keys() == {"tokens"}


def test_shapes_dtypes_and_absence_are_checked(tmp_path: Path) -> None:
    for change_to in ({"hidden.3": torch.zeros(5, 9).bfloat16()}, {"hidden.3": torch.zeros(5, 8)}, {"tokens": torch.zeros(5)}, {"key.2": None}):
        tensors = {k: v for k, v in {**make_sample(0), **change_to}.items() if v is not None}
        with ShardWriter(tmp_path, "train-000000.tar") as writer:
            writer.write("c", tensors, {})
            reader = ShardReader(tmp_path, writer.commit(["c"]), SPEC, GEOMETRY)
        with pytest.raises(KvshotError, match=rf"sample 'c': tensor {next(iter(change_to))} is"):
            reader.read(0)


HEADERS = {
    "length": b"\xff" * 8,
    "text": b"\x10" + b"\0" * 7 + b"not json at all!",
    "list": b"\x02" + b"\0" * 7 + b"[]",
    "entry": b"\x0d" + b"\0" * 7 + b'{"tokens": 1}',
    "deep": (1000).to_bytes(8, "little") + b"[" * 1000,
}


@pytest.mark.parametrize("data", HEADERS.values(), ids=HEADERS)
def test_a_header_that_is_none_is_named(folder: Path, data: bytes) -> None:
    shards = ShardSet.open(folder, "train")
    change(folder / "train-000000.tar", shards.samples[0].offset, data)
    assert len(data) < shards.samples[0].size
    with pytest.raises(KvshotError, match=r"sample 'c-0000': (its bytes are no|tensor tokens has no)"):
        shards.read(0)


@pytest.mark.parametrize("entry", [{"data_offsets": ["a", "b"]}, {"data_offsets": [0.0, 20.0]}, {"data_offsets": 3}, {"dtype": []}, {"shape": 5}], ids=str)
def test_entries_of_wrong_types_are_named(folder: Path, entry: dict) -> None:
    with pytest.raises(KvshotError, match=r"train-000000\.tar: sample 'c-0000': tensor tokens has no readable entry"):
        with_entry(folder, entry).read(0, ("tokens",))


@pytest.mark.parametrize("begin", [-40, 10**4, 10**30])
def test_tensors_outside_their_sample_are_named(folder: Path, begin: int) -> None:
    with pytest.raises(KvshotError, match=rf"sample 'c-0000': tensor tokens is I32 \[5\] at bytes {begin} to {begin + 20}, expected torch.int32 \[5\]"):
        with_entry(folder, {"data_offsets": [begin, begin + 20]}).read(0, ("tokens",))


def with_entry(folder: Path, entry: dict) -> ShardSet:
    """The train split with the header entry of the first sample's tokens changed; other entries make room for it."""
    shards = ShardSet.open(folder, "train")
    path, start = folder / "train-000000.tar", shards.samples[0].offset
    with open(path, "rb") as file:
        file.seek(start)
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    text = json.dumps({"tokens": {**header["tokens"], **entry}}).encode()
    change(path, start + 8, text.ljust(length))
    return shards


def test_index_and_manifest_must_agree(folder: Path) -> None:
    edit(ShardIndex.path(folder, "train-000000.tar"), samples=[])
    with pytest.raises(KvshotError, match="5 train samples, the indexes hold 2"):
        ShardSet.open(folder, "train")
    edit(ShardIndex.path(folder, "train-000000.tar"), format="kvshot-features/0")
    with pytest.raises(ConfigError, match=f"format 'kvshot-features/0', this version reads '{FORMAT}'"):
        ShardSet.open(folder, "train")


def test_reading_checks_the_rows_of_the_index(folder: Path) -> None:
    path = ShardIndex.path(folder, "heldout-000000.tar")
    value = json.loads(path.read_text())
    value["samples"][0]["rows"] += 1
    path.write_text(json.dumps(value))
    manifest = Manifest.load(folder)
    with pytest.raises(KvshotError, match="expected torch"):
        ShardReader(folder, ShardIndex.load(folder, "heldout-000000.tar"), manifest.spec, manifest.geometry).read(0)


def test_all_finite_on_edges() -> None:
    assert all_finite(torch.empty(0)) and all_finite(torch.tensor([1, 2])) and all_finite(torch.full((3,), 3e38).bfloat16())


def test_a_tar_put_anew_never_stands_under_the_index_of_before(tmp_path, monkeypatch):
    """Same size, other bytes: a crash between tar and index may not leave what counts as whole."""
    before = write_shard(tmp_path, "train-000000.tar", range(1))

    def crash(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as m:
        m.setattr(ShardIndex, "save", crash)
        with pytest.raises(KeyboardInterrupt):
            write_shard(tmp_path, "train-000000.tar", range(1))
        assert ShardIndex.load(tmp_path, "train-000000.tar") == before, "of the same bytes: another run may be reading it"
        with pytest.raises(KeyboardInterrupt):
            write_shard(tmp_path, "train-000000.tar", range(7, 8))
    with pytest.raises(KvshotError, match="not there"):
        ShardIndex.load(tmp_path, "train-000000.tar")
    assert write_shard(tmp_path, "train-000000.tar", range(1)) == before


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("tokens", 50, "holds token ids outside the vocabulary of 50"),
        ("tokens", -1, "holds token ids outside the vocabulary of 50"),
        ("teacher.argmax", 1 << 30, "holds token ids outside the vocabulary of 50"),
        ("turn", 7, "its turns give 0 teacher rows, its index says 1"),  # read so, all conversations after it in a batch would have another's teacher
    ],
)
def test_damaged_whole_numbers_are_named_as_damaged_ones_with_a_fraction_are(tmp_path, name, value, text):
    sample = make_sample(0)
    index = write_shard(tmp_path, "train-000000.tar", range(1))
    damaged = sample[name].clone()
    damaged[0 if name == "teacher.argmax" else 2] = value
    raw = (tmp_path / "train-000000.tar").read_bytes()
    old, new = (safetensors.torch.save({**sample, name: tensor}) for tensor in (sample[name], damaged))
    assert raw.count(old) == 1 and len(old) == len(new)
    (tmp_path / "train-000000.tar").write_bytes(raw.replace(old, new))
    keys = ("tokens", "turn", *SPEC.keys())
    with pytest.raises(KvshotError, match=rf"train-000000\.tar: sample 'c-0000': {text}"):
        ShardReader(tmp_path, index, SPEC, GEOMETRY).read(0, keys)


@pytest.mark.parametrize("value", [2.0**127, -1.0, 0.0])
def test_a_damaged_scale_is_named_before_it_makes_infinity(tmp_path, value):
    spec = dataclasses.replace(SPEC, store=Store("bf16", "fp8", "bf16", "bf16"))
    sample = stored_sample(0, spec)
    sample["key.2.scale"][0, 0] = value
    with ShardWriter(tmp_path, "train-000000.tar") as writer:
        writer.write("a", sample, {})
        reader = ShardReader(tmp_path, writer.commit(["a"]), spec, GEOMETRY)
    with pytest.raises(KvshotError, match=r"sample 'a': tensor key\.2\.scale holds scales that no feature has"):
        reader.read(0)
