"""The manifest: round trip, refusals by name, and what `require` tells the user to do."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from kvshot_ds.errors import ConfigError, KvshotError
from kvshot_ds.features.manifest import FORMAT, Manifest, ShardIndex, SplitCounts, load_token_counts, require, save_token_counts, worker_seconds
from kvshot_ds.features.spec import FeatureSpec, Store
from tests.features.shards import GEOMETRY, SPEC, make_sample, make_shards


def test_round_trip_and_counts(tmp_path: Path) -> None:
    made = make_shards(tmp_path)
    assert Manifest.load(tmp_path) == made
    samples = [make_sample(seed) for seed in range(5)]
    train = made.splits["train"]
    assert (train.samples, train.shards) == (5, ("train-000000.tar", "train-000001.tar"))
    assert train.tokens == sum(len(s["tokens"]) for s in samples) and train.rows == sum(len(s["teacher.lse"]) for s in samples)
    assert train.bytes == sum((tmp_path / shard).stat().st_size for shard in train.shards)
    index = ShardIndex.load(tmp_path, "train-000001.tar")
    assert SplitCounts.of([index]).samples == 2


def edit(folder: Path, **values: object) -> None:
    path = Manifest.path(folder)
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_bad_manifests_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"manifest\.json: not there.*run kvshot capture"):
        Manifest.load(tmp_path)
    made = make_shards(tmp_path)
    for bad in ("../train-000000.tar", "/etc/passwd", "train-000000.tar/x", "other-000000.tar"):
        edit(tmp_path, splits={"train": {**dataclasses.asdict(made.splits["train"]), "shards": [bad]}})
        with pytest.raises(ConfigError, match="refused"):
            Manifest.load(tmp_path)
    edit(tmp_path, format="kvshot-features/0")
    with pytest.raises(ConfigError, match=f"format 'kvshot-features/0', this version reads '{FORMAT}'"):
        Manifest.load(tmp_path)
    for text in ("{", "[]", '"x"'):
        Manifest.path(tmp_path).write_text(text)
        with pytest.raises(KvshotError, match=r"manifest\.json: (not readable|format None)"):
            Manifest.load(tmp_path)


MANIFEST_FAULTS = {
    "splits": (lambda m: m | {"splits": []}, r"splits: .*found \[\]"),
    "split": (lambda m: m["splits"].update(train=3), r"splits\.train: .*found 3"),
    "other split": (lambda m: m["splits"].update(test=m["splits"]["train"]), r"splits\.test"),
    "shards": (lambda m: m["splits"]["train"].update(shards="train-000000.tar"), r"splits\.train\.shards: .*found 'train-000000.tar'"),
    "shard": (lambda m: m["splits"]["train"].update(shards=[7]), r"splits\.train\.shards\[0\]: .*string, found 7"),
    "samples": (lambda m: m["splits"]["train"].update(samples="5"), r"splits\.train\.samples: .*integer, found '5'"),
    "geometry": (lambda m: m | {"geometry": None}, r"geometry: .*found None"),
    "head_dim": (lambda m: m["geometry"].update(head_dim=4.5), r"geometry\.head_dim: .*integer.*found 4\.5"),
    "kv_heads": (lambda m: m["geometry"].pop("kv_heads"), r"geometry\.kv_heads: .*required"),
    "rope": (lambda m: m["geometry"].update(rope=[]), r"geometry\.rope: .*found \[\]"),
    "spec": (lambda m: m | {"spec": "all"}, r"spec: .*found 'all'"),
    "hidden_layers": (lambda m: m["spec"].update(hidden_layers=[1, "3"]), r"spec\.hidden_layers\[1\]: .*integer, found '3'"),
    "query_layers": (lambda m: m["spec"].update(query_layers=2), r"spec\.query_layers: .*found 2"),
    "store": (lambda m: m["spec"]["store"].update(kv="fp4"), r"spec\.store\.kv: .*'fp32', 'bf16', 'fp8' or 'int8', found 'fp4'"),
    "teacher": (lambda m: m["spec"].update(teacher=True), r"spec\.teacher: .*found True"),
    "digest": (lambda m: m | {"target_digest": 5}, r"target_digest: .*string, found 5"),
    "rejected": (lambda m: m | {"rejected": "1"}, r"rejected: .*integer, found '1'"),
    "times": (lambda m: m | {"seconds": 1.5}, r"seconds: .*found 1\.5"),
    "unknown": (lambda m: m | {"more": 1}, r"more: .*found 1"),
}


@pytest.mark.parametrize("change, text", MANIFEST_FAULTS.values(), ids=MANIFEST_FAULTS)
def test_a_manifest_of_wrong_types_is_one_line_that_names_the_field(tmp_path: Path, change: Callable[[dict], object], text: str) -> None:
    make_shards(tmp_path)
    path = Manifest.path(tmp_path)
    value = json.loads(path.read_text())
    changed = change(value)
    path.write_text(json.dumps(changed if isinstance(changed, dict) and "format" in changed else value))
    with pytest.raises(ConfigError, match=rf"^{path}: not a manifest of feature shards \({text}") as caught:
        Manifest.load(tmp_path)
    assert "\n" not in str(caught.value)


INDEX_FAULTS = {
    "samples": ({"samples": {}}, r"samples: .*found \{\}"),
    "sample": ({"samples": [None]}, r"samples\[0\]: .*found None"),
    "rejected": ({"rejected": [{"file": "f", "line": "1", "reason": "", "record": ""}]}, r"rejected\[0\]\.line: .*integer, found '1'"),
    "bytes": ({"bytes": "9"}, r"bytes: .*integer, found '9'"),
    "bytes, bool": ({"bytes": True}, r"bytes: .*integer, found True"),
    "sha256": ({"sha256": None}, r"sha256: .*string, found None"),
    "shard": ({"shard": 3}, r"shard: .*string, found 3"),
}


@pytest.mark.parametrize("change, text", INDEX_FAULTS.values(), ids=INDEX_FAULTS)
def test_an_index_of_wrong_types_is_one_line_that_names_the_field(tmp_path: Path, change: dict, text: str) -> None:
    make_shards(tmp_path)
    path = ShardIndex.path(tmp_path, "train-000000.tar")
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(KvshotError, match=rf"^{path}: not the index of a shard \({text}.*run kvshot capture again"):
        ShardIndex.load(tmp_path, "train-000000.tar")


@pytest.mark.parametrize(
    "change", [{"offset": -1}, {"offset": 10**30}, {"size": -5}, {"size": 0}, {"size": 10**6}, {"tokens": 10**18}, {"rows": -1}, {"rows": 99}], ids=str
)
def test_a_sample_outside_its_tar_is_named(tmp_path: Path, change: dict) -> None:
    make_shards(tmp_path)
    path = ShardIndex.path(tmp_path, "train-000000.tar")
    value = json.loads(path.read_text())
    value["samples"][1] |= change
    path.write_text(json.dumps(value))
    with pytest.raises(KvshotError, match=rf"^{path}: samples\[1\]: .*c-0001.* does not lie within a tar of {value['bytes']} bytes"):
        ShardIndex.load(tmp_path, "train-000000.tar")


def test_require_names_keys_and_the_capture_that_adds_them(tmp_path: Path) -> None:
    manifest = make_shards(tmp_path)
    require(manifest, SPEC, "d" * 64)
    require(manifest, dataclasses.replace(SPEC, hidden_layers=(), store=Store.all("fp32")), "d" * 64)
    with pytest.raises(ConfigError) as caught:
        require(manifest, FeatureSpec((0, 1), (2, 5), "last_hidden", Store.all("bf16"), (3,)), "d" * 64)
    text = str(caught.value)
    assert "lack hidden.0, key.5, value.5, query.3" in text
    options = ("hidden_layers=[0, 1, 3]", "kv_layers=[2, 5]", "query_layers=[2, 3, 4]")
    assert " ".join(f"'capture.features.{option}'" for option in options) + " capture.features.teacher=last_hidden" in text
    bare = dataclasses.replace(manifest, spec=dataclasses.replace(SPEC, query_layers=()))
    with pytest.raises(ConfigError, match=r"lack hidden\.0, which") as caught:
        require(bare, FeatureSpec((0,), (), "none", Store.all("bf16")), "d" * 64)
    assert "query_layers" not in str(caught.value)


@pytest.mark.parametrize(
    "needed",
    [
        FeatureSpec((0,), (2,), "last_hidden", Store.all("bf16")),
        FeatureSpec((0,), (), "none", Store.all("bf16")),
        FeatureSpec((), (2,), "none", Store.all("fp32"), (3, 4)),
    ],
    ids=str,
)
def test_the_command_that_require_prints_is_one_that_works(tmp_path: Path, needed: FeatureSpec) -> None:
    from kvshot_ds.config import load_recipe

    manifest = dataclasses.replace(make_shards(tmp_path), spec=FeatureSpec((1,), (), "none", Store.all("bf16")))
    with pytest.raises(ConfigError) as caught:
        require(manifest, needed, "d" * 64)
    recipe = tmp_path / "r.yaml"
    recipe.write_text("{name: r, work: w, target: {path: t}}")
    import shlex

    overrides = shlex.split(str(caught.value).partition("kvshot capture RECIPE ")[2])
    resolved = load_recipe(recipe, tuple(overrides))
    assert FeatureSpec.resolve(resolved.capture.features, GEOMETRY).missing(needed) == () and resolved.shards == Path("NEW_FOLDER")


def test_require_names_the_other_target(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"captured from another target: toy with weights dddd.*holds weights aaaa"):
        require(make_shards(tmp_path), SPEC, "a" * 64)


def test_the_time_of_workers_is_read_from_the_log(tmp_path: Path) -> None:
    assert worker_seconds(tmp_path) is None
    (tmp_path / "captures.jsonl").write_text('{"shard": "a", "seconds": 1.5}\n{"shard": "b", "sec{"shard": "b", "seconds": 3}\n[]\n{"seconds": 2}\n')
    assert worker_seconds(tmp_path) == 3.5


def test_token_counts(tmp_path: Path) -> None:
    counts = torch.tensor([3, 0, 5])
    save_token_counts(tmp_path, counts)
    assert torch.equal(load_token_counts(tmp_path, 3), counts)
    with pytest.raises(KvshotError, match=r"expected counts int64 \[4\]"):
        load_token_counts(tmp_path, 4)
    save_file({"other": counts}, tmp_path / "token_counts.safetensors")
    with pytest.raises(KvshotError, match="found none"):
        load_token_counts(tmp_path, 3)
    (tmp_path / "token_counts.safetensors").write_bytes(b"x")
    with pytest.raises(KvshotError, match="not readable"):
        load_token_counts(tmp_path, 3)
