"""Folders of shards: told, checked, joined, cut; complete by their manifest, the same when made again, refused by name."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import webdataset
from upath import UPath

from kvshot_ds.errors import ConfigError, KvshotError
from kvshot_ds.features import dataset
from kvshot_ds.features.dataset import FewerFeatures, lowest, merge, subset
from kvshot_ds.features.inspect import histogram, inspect
from kvshot_ds.features.manifest import Manifest, ShardIndex, load_token_counts
from kvshot_ds.features.shard import ShardSet
from kvshot_ds.features.spec import FeatureSpec, Store
from kvshot_ds.features.verify import verify
from tests.features.folders import LEFT_OUT, contents, key_of, make_folder, stored_sample
from tests.features.shards import GEOMETRY, SPEC, make_sample

FP8 = replace(SPEC, store=Store("fp8", "int8", "fp8", "bf16"))


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a)


def faults(folder: Path) -> list[str]:
    return [str(fault) for fault in verify(folder, 2).faults]


# inspect


def test_inspect_tells_what_is_there(tmp_path: Path) -> None:
    manifest = make_folder(tmp_path, spec=FP8)
    found = inspect(tmp_path)
    samples = [stored_sample(seed, FP8) for seed in range(7)]
    for kind, prefixes in {"hidden": ("hidden.",), "kv": ("key.", "value."), "query": ("query.",), "teacher": ("teacher.",)}.items():
        wanted = sum(t.numel() * t.itemsize for sample in samples for name, t in sample.items() if name.startswith(prefixes))
        assert found.bytes_of[kind] == wanted > 0
    assert sum(found.bytes_of.values()) == sum(path.stat().st_size for path in tmp_path.glob("*.tar"))
    lengths = sorted(len(sample["tokens"]) for sample in samples[:5])
    train = found.splits["train"]
    assert train.lengths == (lengths[0], lengths[2], lengths[-1]) and train.tokens == sum(lengths)
    assert (train.shards, train.conversations, train.rows) == (2, 5, sum(len(s["teacher.lse"]) for s in samples[:5]))
    assert sum(count for _, _, count in found.histogram) == 7
    text = "\n".join(found.lines())
    assert "hidden of layers 1, 3 as fp8; kv of layers 2 as int8; query of layers 2, 4 as fp8; teacher last_hidden as bf16" in text
    assert "kvshot capture" in text and "1 conversations were left out" in text and "N tokens, the target's context is N" in text
    value = json.loads(json.dumps(found.to_json()))
    assert value["manifest"]["target_digest"] == manifest.target_digest and value["supervised_share"] == pytest.approx(
        sum(len(s["teacher.lse"]) for s in samples) / sum(len(s["tokens"]) for s in samples)
    )


def test_histogram_counts_every_length_once() -> None:
    lengths = [5, 7, 19, 20, 21, 4000]
    bins = histogram(lengths)
    assert len(bins) <= 12 and [sum(low <= n < high for n in lengths) for low, high, _ in bins] == [count for _, _, count in bins]
    assert histogram([]) == () and histogram([3, 3]) == ((3, 4, 2),)


def test_inspect_needs_no_provenance(tmp_path: Path) -> None:
    make_folder(tmp_path)
    for text in (None, "[", "[]", '{"command": 3, "versions": [], "inputs": [1]}'):
        (tmp_path / "provenance.json").write_text(text) if text else (tmp_path / "provenance.json").unlink()
        assert "unknown" in "\n".join(inspect(tmp_path).lines())


# verify


def test_a_whole_folder_has_no_faults(tmp_path: Path) -> None:
    make_folder(tmp_path)
    found = verify(tmp_path, 2)
    assert found.faults == () and (found.shards, found.samples) == (3, 7)
    assert found.bytes == sum(path.stat().st_size for path in tmp_path.glob("*.tar"))
    seen: list[int] = []
    verify(tmp_path, 3, seen.append)
    assert sum(seen) == found.bytes  # each byte is read once


def test_every_bad_file_is_named_not_the_first_alone(tmp_path: Path) -> None:
    make_folder(tmp_path)
    (tmp_path / "train-000000.tar").unlink()
    ShardIndex.path(tmp_path, "train-000001.tar").unlink()
    tar = tmp_path / "heldout-000000.tar"
    raw = bytearray(tar.read_bytes())
    raw[ShardIndex.load(tmp_path, tar.name).samples[0].offset + 20] ^= 4
    tar.write_bytes(raw)
    (tmp_path / "train-000009.tar").write_bytes(b"")
    (tmp_path / "notes.txt").write_text("mine")
    found = verify(tmp_path, 2)
    assert {f.file for f in found.faults} == {"train-000000.tar", "train-000001.index.json", tar.name, "train-000009.tar"}
    assert {f.sample for f in found.faults if f.file == tar.name} == {"", key_of(5)}
    assert found.unreferenced == ("notes.txt",) and all(f.repair for f in found.faults)


def test_what_is_derived_is_checked(tmp_path: Path) -> None:
    make_folder(tmp_path)
    edit(tmp_path / "manifest.json", lambda m: m["splits"]["train"].update(tokens=1) or m.update(rejected=5))
    (tmp_path / "quarantine.jsonl").write_text("")
    (tmp_path / "token_counts.safetensors").unlink()
    found = "\n".join(faults(tmp_path))
    assert "says of train: tokens 1, the indexes" in found and "5 conversations were left out, the indexes 1" in found
    assert "quarantine.jsonl: does not list" in found and "token_counts.safetensors: not readable" in found
    make_folder(tmp_path)
    counts = load_token_counts(tmp_path, GEOMETRY.vocab_size)
    counts[3] += 1
    dataset.save_token_counts(tmp_path, counts)
    assert ["token_counts.safetensors: does not hold the counts" in f for f in faults(tmp_path)] == [True]
    make_folder(tmp_path)
    edit(tmp_path / "manifest.json", lambda m: m.update(target_digest="0" * 64))
    assert ["manifest.json: differs from provenance.json in target" in f for f in faults(tmp_path)] == [True]
    merge_of = make_folder(tmp_path)
    said = {"target_name": "toy", "geometry": asdict(merge_of.geometry)}
    edit(tmp_path / "provenance.json", lambda p: p.update(manifest=said))
    assert faults(tmp_path) == []
    edit(tmp_path / "manifest.json", lambda m: m["geometry"].update(norm_eps=1e-5))
    assert ["manifest.json: differs from provenance.json in geometry" in f for f in faults(tmp_path)] == [True]


def test_a_conversation_held_out_and_trained_on_is_a_fault(tmp_path: Path) -> None:
    make_folder(tmp_path, train=(range(3), range(2, 4)), heldout=(range(1),))
    found = faults(tmp_path)
    assert any("train-000001.tar: sample 'c-0002': stands in train-000000.tar too" in f for f in found)
    assert any("heldout-000000.tar: sample 'c-0000'" in f and "may not be held out" in f for f in found)


# merge


def test_a_merge_holds_all_samples_and_shares_the_bytes(tmp_path: Path) -> None:
    make_folder(tmp_path / "a")
    make_folder(tmp_path / "b", train=(range(10, 12),), heldout=(range(12, 13), range(13, 15)), rejected=())
    made = merge([tmp_path / "a", tmp_path / "b"], tmp_path / "c")
    assert (made.linked, made.rewritten, made.conversations) == (6, 0, {"train": 7, "heldout": 5})
    assert faults(tmp_path / "c") == []
    for split, seeds in {"train": [0, 1, 2, 3, 4, 10, 11], "heldout": [5, 6, 12, 13, 14]}.items():
        shards = ShardSet.open(tmp_path / "c", split)
        assert [s.key for s in shards.samples] == [key_of(seed) for seed in seeds]
        assert all(same(shards.read(i)[1], make_sample(seed)) for i, seed in enumerate(seeds))
    assert (tmp_path / "c" / "train-000002.tar").samefile(tmp_path / "b" / "train-000000.tar")
    assert torch.equal(*(sum(load_token_counts(tmp_path / n, 50) for n in names) for names in ("ab", "c")))
    inputs = json.loads((tmp_path / "c" / "provenance.json").read_text())["inputs"]
    assert [Path(i["folder"]).name for i in inputs] == ["a", "b"] and inputs[0]["provenance"]["command"] == ["kvshot", "capture"]
    assert json.loads((tmp_path / "c" / "quarantine.jsonl").read_text())["reason"] == LEFT_OUT.reason
    assert "input 2" in "\n".join(inspect(tmp_path / "c").lines())


def test_a_merge_again_touches_nothing_and_another_is_refused(tmp_path: Path) -> None:
    make_folder(tmp_path / "a")
    make_folder(tmp_path / "b", train=(range(10, 12),), heldout=())
    merge([tmp_path / "a", tmp_path / "b"], tmp_path / "c")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "c").iterdir()}
    merge([tmp_path / "a", tmp_path / "b"], tmp_path / "c")
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "c").iterdir()}
    with pytest.raises(ConfigError, match="holds another data set"):
        merge([tmp_path / "b", tmp_path / "a"], tmp_path / "c")
    with pytest.raises(ConfigError, match="holds another data set"):
        subset(tmp_path / "a", tmp_path / "b", 1)
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "mine.txt").write_text("")
    with pytest.raises(ConfigError, match=r"holds mine\.txt and no provenance"):
        merge([tmp_path / "a", tmp_path / "b"], tmp_path / "d")


@pytest.mark.parametrize("at", range(4))
def test_a_killed_merge_is_completed_to_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    make_folder(tmp_path / "a", heldout=(range(20, 21),))
    make_folder(tmp_path / "b", train=(range(2, 4), range(4, 6)), heldout=(), rejected=())
    folders = [tmp_path / "a", tmp_path / "b"]
    merge(folders, tmp_path / "whole", drop_duplicates=True)

    class KilledError(Exception):
        pass

    calls = {"n": 0}
    plain = dataset._write

    def write(*args: Any) -> ShardIndex:
        calls["n"] += 1
        if calls["n"] > at:
            raise KilledError
        return plain(*args)

    with monkeypatch.context() as patch, pytest.raises(KilledError):
        patch.setattr(dataset, "_write", write)
        merge(folders, tmp_path / "cut", drop_duplicates=True)
    with pytest.raises(ConfigError, match=r"manifest\.json: not there"):
        Manifest.load(tmp_path / "cut")
    made = merge(folders, tmp_path / "cut", drop_duplicates=True)
    assert made.left_out == (key_of(2), key_of(3), key_of(4)) and made.rewritten == 1
    a, b = contents(tmp_path / "whole"), contents(tmp_path / "cut")
    assert a.keys() == b.keys() and all(a[name] == b[name] for name in a if name != "provenance.json")
    assert faults(tmp_path / "cut") == []
    assert [s.key for s in ShardSet.open(tmp_path / "cut", "train").samples] == [key_of(n) for n in range(6)]


def test_a_damaged_merge_is_mended_as_verify_says(tmp_path: Path) -> None:
    make_folder(tmp_path / "a")
    make_folder(tmp_path / "b", train=(range(4, 5), range(10, 12)), heldout=())
    merge([tmp_path / "a", tmp_path / "b"], tmp_path / "c", drop_duplicates=True)
    before = contents(tmp_path / "c")
    damaged = tmp_path / "c" / "train-000001.tar"
    damaged.unlink()
    assert ["delete it, the index of its shard and manifest.json, and run the same kvshot data merge again" in f for f in faults(tmp_path / "c")] == [True]
    for name in ("train-000001.index.json", "manifest.json"):
        (tmp_path / "c" / name).unlink()
    merge([tmp_path / "a", tmp_path / "b"], tmp_path / "c", drop_duplicates=True)
    assert contents(tmp_path / "c") == before


def test_duplicates_and_leaks_are_named(tmp_path: Path) -> None:
    make_folder(tmp_path / "a")
    make_folder(tmp_path / "b", train=(range(4, 5),), heldout=())
    make_folder(tmp_path / "c", train=(range(6, 7),), heldout=())
    with pytest.raises(ConfigError, match=r"1 conversation\(s\) stand in more than one of the folders: c-0004; --drop-duplicates"):
        merge([tmp_path / "a", tmp_path / "b"], tmp_path / "out")
    for drop in (False, True):
        for order in (("a", "c"), ("c", "a")):
            with pytest.raises(ConfigError, match=r"a holds out c-0006, which .*c trains on"):
                merge([tmp_path / name for name in order], tmp_path / "out", drop)
    assert not (tmp_path / "out").exists()


def test_samples_named_by_line_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.features.folders.key_of", lambda seed: f"train-{seed:08d}")
    make_folder(tmp_path / "a")
    make_folder(tmp_path / "b", train=(range(10, 11),), heldout=())
    with pytest.raises(ConfigError, match=r"samples are named by their line \(train-00000000\)"):
        merge([tmp_path / "a", tmp_path / "b"], tmp_path / "out")


def test_every_difference_is_named(tmp_path: Path) -> None:
    make_folder(tmp_path / "a")
    make_folder(tmp_path / "b", train=(range(10, 11),), heldout=())
    edit(
        tmp_path / "b" / "manifest.json",
        lambda m: m.update(target_digest="1", tokenizer_digest="2") or m["geometry"].update(heads=8) or m["spec"]["store"].update(kv="fp8"),
    )
    with pytest.raises(ConfigError) as error:
        merge([tmp_path / "a", tmp_path / "b"], tmp_path / "out")
    for text in ("target_digest", "tokenizer_digest", "geometry.heads: .*a has 4, .*b 8", "spec.store.kv: .*a has bf16, .*b fp8"):
        assert re.search(text, str(error.value))
    with pytest.raises(ConfigError, match="at least two folders"):
        merge([tmp_path / "a"], tmp_path / "out")


def test_a_damaged_shard_is_not_blessed_by_a_rewrite(tmp_path: Path) -> None:
    make_folder(tmp_path / "a")
    tar = tmp_path / "a" / "train-000000.tar"
    raw = bytearray(tar.read_bytes())
    raw[ShardIndex.load(tar.parent, tar.name).samples[0].offset + 2000] ^= 1
    tar.write_bytes(raw)
    with pytest.raises(KvshotError, match=r"train-000000\.tar: (its bytes have changed|not readable)"):
        subset(tmp_path / "a", tmp_path / "b", 2)


# subset


def test_subsets_are_nested_and_keep_what_is_held_out(tmp_path: Path) -> None:
    make_folder(tmp_path / "a", spec=FP8)
    held = None
    for count, (linked, rewritten) in {1: (1, 1), 3: (2, 0), 4: (2, 1), 5: (3, 0)}.items():
        made = subset(tmp_path / "a", tmp_path / str(count), count)
        assert (made.linked, made.rewritten, made.conversations) == (linked, rewritten, {"train": count, "heldout": 2})
        assert faults(tmp_path / str(count)) == []
        train, whole = ShardSet.open(tmp_path / str(count), "train"), ShardSet.open(tmp_path / "a", "train")
        assert [s.key for s in train.samples] == [key_of(seed) for seed in range(count)]
        assert all(same(train.read(i)[1], whole.read(i)[1]) for i in range(count))
        held = held or (tmp_path / str(count) / "heldout-000000.tar").read_bytes()
        assert (tmp_path / str(count) / "heldout-000000.tar").read_bytes() == held
    with pytest.raises(ConfigError, match="holds 5 conversations, 6 were asked for"):
        subset(tmp_path / "a", tmp_path / "6", 6)


def test_the_lowest_keys_whatever_their_order(tmp_path: Path) -> None:
    assert lowest(["d", "a", "c", "b"], 2) == [1, 3] and lowest(["b", "a"], 5) == [0, 1]
    make_folder(tmp_path / "a", train=(range(3, 5), range(3)))
    subset(tmp_path / "a", tmp_path / "b", 4)
    assert [s.key for s in ShardSet.open(tmp_path / "b", "train").samples] == [key_of(n) for n in (3, 0, 1, 2)]


def test_fewer_layers(tmp_path: Path) -> None:
    make_folder(tmp_path / "a", spec=FP8)
    subset(tmp_path / "a", tmp_path / "b", 4, FewerFeatures(hidden_layers=(3,), query_layers=(), no_teacher=True))
    assert faults(tmp_path / "b") == []
    train = ShardSet.open(tmp_path / "b", "train")
    whole = ShardSet.open(tmp_path / "a", "train").read(1)[1]
    assert same(train.read(1)[1], {name: whole[name] for name in ("tokens", "turn", "hidden.3", "key.2", "value.2")})
    with pytest.raises(ConfigError, match=r"hidden\.4 were not captured; it holds hidden\.1"):
        subset(tmp_path / "a", tmp_path / "c", 1, FewerFeatures(hidden_layers=(4,)))


def test_through_urls(tmp_path: Path) -> None:
    a, out = (UPath(f"memory://dataset-test/{tmp_path.name}/{name}") for name in ("a", "out"))
    make_folder(a)
    make_folder(tmp_path / "b", train=(range(3, 4), range(10, 12)), heldout=(), rejected=())
    merge([a, tmp_path / "b"], out, drop_duplicates=True)
    merge([a, tmp_path / "b"], tmp_path / "local", drop_duplicates=True)
    assert verify(out, 2).faults == () == verify(tmp_path / "local", 2).faults
    for name, raw in contents(tmp_path / "local").items():
        assert name == "provenance.json" or (out / name).read_bytes() == raw
    subset(str(out), tmp_path / "part", 2)
    assert inspect(str(out)).tokens == inspect(tmp_path / "local").tokens and faults(tmp_path / "part") == []


@pytest.mark.parametrize("spec", [SPEC, FP8], ids=["bf16", "8 bits"])
def test_the_documented_lines_read_the_tars(tmp_path: Path, spec: FeatureSpec, capsys: pytest.CaptureFixture[str]) -> None:
    make_folder(tmp_path, spec=spec)
    text = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
    (code,) = [block for block in re.findall(r"^```python\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE) if "def decode(sample)" in block]
    code, changes = re.subn(r'^urls = ".*"$', f'urls = "{tmp_path}/train-{{000000..000001}}.tar"', code, flags=re.MULTILINE)
    names: dict[str, Any] = {}
    exec(code, names)
    assert changes == 1 and [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [key_of(n) for n in (2, 1, 0, 4, 3)]
    found = dict(webdataset.WebDataset(names["urls"], shardshuffle=False).map(names["decode"]))
    train = ShardSet.open(tmp_path, "train")
    for i in range(len(train)):
        key, tensors = train.read(i)
        assert found[key].keys() == tensors.keys()
        assert all(torch.equal(found[key][name].to(tensor.dtype), tensor) for name, tensor in tensors.items())
