"""The manifest: round trip, refusals by name, and what `require` tells the user to do."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from kvshot_ds.errors import ConfigError, KvshotError
from kvshot_ds.features.manifest import Manifest, ShardIndex, SplitCounts, load_token_counts, require, save_token_counts
from kvshot_ds.features.spec import FeatureSpec
from tests.features.shards import SPEC, make_sample, make_shards


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
    edit(tmp_path, splits=[])
    with pytest.raises(ConfigError, match="not a manifest"):
        Manifest.load(tmp_path)
    edit(tmp_path, format="kvshot-features/2")
    with pytest.raises(ConfigError, match="format 'kvshot-features/2', this version reads 'kvshot-features/1'"):
        Manifest.load(tmp_path)
    for text in ("{", "[]", '"x"'):
        Manifest.path(tmp_path).write_text(text)
        with pytest.raises(KvshotError, match=r"manifest\.json: (not readable|format None)"):
            Manifest.load(tmp_path)


def test_require_names_keys_and_the_capture_that_adds_them(tmp_path: Path) -> None:
    manifest = make_shards(tmp_path)
    require(manifest, SPEC, "d" * 64)
    require(manifest, dataclasses.replace(SPEC, hidden_layers=(), dtype="fp32"), "d" * 64)
    with pytest.raises(ConfigError) as caught:
        require(manifest, FeatureSpec((0, 1), (2, 5), "last_hidden", "bf16"), "d" * 64)
    text = str(caught.value)
    assert "lack hidden.0, key.5, value.5" in text
    assert "'capture.features.hidden_layers=[0, 1, 3]' 'capture.features.kv_layers=[2, 5]' capture.features.teacher=last_hidden" in text


def test_the_command_that_require_prints_is_one_that_works(tmp_path: Path) -> None:
    from kvshot_ds.config import load_recipe

    manifest = dataclasses.replace(make_shards(tmp_path), spec=FeatureSpec((1,), (), "none", "bf16"))
    needed = FeatureSpec((0,), (2,), "last_hidden", "bf16")
    with pytest.raises(ConfigError) as caught:
        require(manifest, needed, "d" * 64)
    recipe = tmp_path / "r.yaml"
    recipe.write_text("{name: r, work: w, target: {path: t}}")
    import shlex

    overrides = shlex.split(str(caught.value).partition("kvshot capture RECIPE ")[2])
    resolved = load_recipe(recipe, tuple(overrides))
    assert FeatureSpec.resolve(resolved.capture.features, 6).missing(needed) == () and resolved.shards == Path("NEW_FOLDER")


def test_require_names_the_other_target(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"captured from another target: toy with weights dddd.*holds weights aaaa"):
        require(make_shards(tmp_path), SPEC, "a" * 64)


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
