"""Capture to URLs, against an S3 server: the same bytes as on a local disk, continued after a kill, and read back."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from upath import UPath

from data_prep import orchestrate
from data_prep.pool import Pool
from kvshot_ds.config import dump_recipe, load_recipe
from kvshot_ds.errors import ConfigError, KvshotError
from kvshot_ds.features.manifest import Manifest, load_token_counts
from kvshot_ds.features.shard import ShardSet
from kvshot_ds.files import location, names, read_json, remove, write_atomic
from tests.data_prep.captures import Driver, data_set, family, recipe, when, write_prepared
from tests.data_prep.test_exactly_once import in_this_process
from tests.features.shards import assert_whole
from tests.s3 import bucket

SHARDS = 24


@pytest.fixture(scope="module")
def s3() -> Iterator[UPath]:
    with bucket("kvshot") as url:
        yield url


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prepared(tmp_path_factory.mktemp("prepared"), 60, 10, longest=120, too_long=5)


@pytest.fixture(scope="module")
def whole(tiny_target: Path, prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The capture on a local disk."""
    folder = tmp_path_factory.mktemp("whole") / "features"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pool, "map", in_this_process)
        orchestrate.run(recipe(tiny_target, prepared, folder))
    return folder


@pytest.fixture(params=["s3", "memory"])
def folder(request: pytest.FixtureRequest) -> UPath:
    root = request.getfixturevalue("s3") if request.param == "s3" else location("memory://")
    assert isinstance(root, UPath)
    return root / uuid.uuid4().hex / "features"


def test_a_url_holds_what_a_folder_holds(
    folder: UPath, whole: Path, tiny_target: Path, prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(Pool, "map", in_this_process)
    spool = tmp_path / "spool"
    wanted = recipe(tiny_target, prepared, folder, spool=str(spool))
    summary = orchestrate.run(wanted)
    assert summary.shards == SHARDS and str(summary.folder) == str(folder) and data_set(folder) == data_set(whole)
    assert list(spool.iterdir()) == [], "the spool is left empty"
    assert "is complete already" not in capsys.readouterr().out
    assert orchestrate.run(wanted).reused == SHARDS and "is complete already" in capsys.readouterr().out

    here, there = ShardSet.open(whole, "train"), ShardSet.open(folder, "train")
    assert here.digest == there.digest and len(here) == len(there)
    for i in range(len(here)):
        (key, mine), (other_key, other) = here.read(i), there.read(i)
        assert key == other_key and mine.keys() == other.keys() and all(torch.equal(mine[k], other[k]) for k in mine)
    chosen = pickle.loads(pickle.dumps(there)).read(3, ("key.3", "tokens"))[1]  # noqa: S301 - loader processes get the set this way
    assert chosen.keys() == {"key.3", "tokens"} and torch.equal(chosen["key.3"], here.read(3)[1]["key.3"])
    assert_whole(there)
    there.check_bytes()
    assert torch.equal(load_token_counts(folder, 259), load_token_counts(whole, 259))
    assert read_json(folder / "provenance.json")["configuration"]["capture.conversations_per_shard"] == 3


def test_what_is_missing_or_cut_behind_a_url_is_captured_again(
    folder: UPath, whole: Path, tiny_target: Path, prepared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Pool, "map", in_this_process)
    wanted = recipe(tiny_target, prepared, folder)
    orchestrate.run(wanted)
    remove(folder / "train-000002.tar")
    with pytest.raises(KvshotError, match=r"train-000002\.tar: not readable \(.*\); kvshot data repair .* captures it again"):
        ShardSet.open(folder, "train")
    remove(folder / "train-000003.index.json")
    with pytest.raises(KvshotError, match=r"train-000003\.index\.json: not there; run kvshot capture again"):
        ShardSet.open(folder, "train")
    write_atomic(folder / "heldout-000001.tar", "cut")
    with pytest.raises(KvshotError, match=r"heldout-000001\.tar: 3 bytes, its index says \d+: truncated or replaced"):
        ShardSet.open(folder, "heldout")
    assert orchestrate.run(wanted).reused == SHARDS - 3 and data_set(folder) == data_set(whole)
    with pytest.raises(ConfigError, match=r"made with another configuration.*\n.*tokens_per_batch: there 256, now 300"):
        orchestrate.run(recipe(tiny_target, prepared, folder, tokens_per_batch=300))
    remove(folder / "provenance.json")
    with pytest.raises(ConfigError, match="holds tars but no provenance"):
        orchestrate.run(wanted)


def test_errors_of_the_store_are_one_line(s3: UPath, tiny_target: Path, prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pool, "map", in_this_process)
    with pytest.raises(KvshotError, match=r"s3://gone/features") as caught:
        orchestrate.run(recipe(tiny_target, prepared, location("s3://gone/features")))
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"s3://kvshot/none/manifest\.json: not there"):
        ShardSet.open(s3 / "none", "train")


def test_a_recipe_keeps_its_url(tiny_target: Path, prepared: Path, tmp_path: Path, s3: UPath) -> None:
    wanted = recipe(tiny_target, prepared, s3 / "a" / "b")
    (tmp_path / "recipe.yaml").write_text(dump_recipe(wanted))
    again = load_recipe(tmp_path / "recipe.yaml")
    assert again == wanted and str(again.shards_dir) == "s3://kvshot/a/b" and str(again.shards_dir / "x") == "s3://kvshot/a/b/x"
    assert load_recipe(tmp_path / "recipe.yaml", ("shards=memory://m/x",)).shards == location("memory://m/x")
    with pytest.raises(ConfigError, match=r"shards: nosuch://x: .*expected a local folder, or a URL"):
        load_recipe(tmp_path / "recipe.yaml", ("shards=nosuch://x",))


@pytest.mark.slow
def test_a_killed_capture_to_s3_is_continued(s3: UPath, whole: Path, tiny_target: Path, prepared: Path, tmp_path: Path) -> None:
    folder = s3 / "killed" / "features"
    wanted = recipe(tiny_target, prepared, folder, workers=2, spool=str(tmp_path / "spool"))
    driver = Driver(wanted, tmp_path / "recipe.yaml")
    children: list[psutil.Process] = []

    def kill() -> None:
        children.extend(family(driver.pid))
        os.kill(driver.pid, signal.SIGKILL)
        for process in children:  # Ray's agents would outlive it
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    when(lambda: len(names(folder, ".index.json")) >= 4 or not driver.runs(), kill).join()
    assert driver.wait() == -signal.SIGKILL, driver.said()
    assert not psutil.wait_procs(children, timeout=60)[1]
    there = len(names(folder, ".index.json"))
    assert 4 <= there < SHARDS and not names(folder, "manifest.json")
    Driver(wanted, tmp_path / "recipe.yaml").complete()
    assert data_set(folder) == data_set(whole) and Manifest.load(folder) == Manifest.load(whole)
    assert not list((tmp_path / "spool").iterdir()), "what the killed workers had begun is cleared"
