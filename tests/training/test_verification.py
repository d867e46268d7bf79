"""Shards looked at by all ranks together before the first step; damaged and missing ones, there and later; what rank 0 tells the others."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from kvshot_ds.errors import KvshotError
from kvshot_ds.features.shard import ShardSet
from kvshot_ds.files import read_json
from kvshot_ds.training import trainer
from kvshot_ds.training.launch import run
from tests.features.folders import make_folder
from tests.training.looking import ranks
from tests.training.runs import before_each_step, board, run_and_stop


def flip(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 0xFF
    path.write_bytes(raw)


def test_ranks_share_the_shards_and_agree_on_what_is_wrong_with_them(tmp_path):
    """Of 8 shards of two conversations, one is damaged, one missing, one cut short; each is met by another of 3 ranks."""
    folder = tmp_path / "features"
    make_folder(folder, train=[range(n, n + 2) for n in range(0, 16, 2)])
    names = [f"train-{n:06d}.tar" for n in range(8)]
    flip(folder / names[1], ShardSet.open(folder, "train").samples[2].offset + 700)
    (folder / names[3]).unlink()
    (folder / names[5]).write_bytes((folder / names[5]).read_bytes()[:-512])
    found = ranks(folder, tmp_path / "out", 3)
    for one in found:
        kind, text = one["stop True"]
        assert kind == "KvshotError" and text.startswith("3 of 8 shards cannot be used:") and "train.on_bad_data=skip" in text
        assert re.findall(r"(train-\d+\.tar): (sha256|not readable|\d+ bytes, its index)", text) == [
            (names[1], "sha256"), (names[3], "not readable"), (names[5], re.search(r"(\d+ bytes, its index)", text)[1]),
        ]  # fmt: skip
        assert text.count("kvshot data repair") == 3
        assert one["skip True"] == [2, 3, 6, 7, 10, 11]
        assert one["stop False"][1].startswith("2 of 8 shards") and one["skip False"] == [6, 7, 10, 11]  # a look at sizes sees no changed byte
        assert one["told"] == {"rank": 0} and one["error"] == ["ConfigError", "no such target"] and one["afterwards"] == "in step"
    assert [one["stop True"] for one in found] == [found[0]["stop True"]] * 3
    assert [one["fault"] for one in found] == [["ValueError", "17"], *[["KvshotError", "rank 0: ValueError: 17"]] * 2]
    assert [one["read"] for one in found] == [sorted(names[rank::3] * 2) for rank in range(3)]  # each byte once a look, on one rank
    assert [one["calls"] for one in found] == [4 * len(names[rank::3]) for rank in range(3)]
    assert "left out: 6 of 16 conversations, in 3 of 8 shards" in found[0]["printed"] and not any(one["printed"] for one in found[1:])


@pytest.fixture
def spoiled(recipe, tiny_features, tmp_path):
    """spoiled(name, how, train options) -> a recipe over shards of its own, the middle one of which is `damaged` or `gone`, and that shard's path."""

    def make(name, how, **train):
        shards = tmp_path / f"{name}-shards"
        shutil.copytree(tiny_features, shards)
        bad = shards / "train-000001.tar"
        if how == "gone":
            bad.unlink()
        elif how == "damaged":
            flip(bad, bad.stat().st_size // 2)
        return recipe(name, **train).model_copy(update={"shards": shards}), bad

    return make


def keys_of(patch, into):
    before_each_step(patch, lambda _s, micro, _n: into.append([key for m in micro if m.counted for key in m.batch.keys]))


@pytest.mark.parametrize("how", ["damaged", "gone"])
def test_a_bad_shard_stops_the_run_before_its_first_step_or_is_left_out(recipe, spoiled, monkeypatch, capsys, how):
    wanted = {"damaged": r"sha256 .* damaged", "gone": "not readable"}[how]
    with pytest.raises(KvshotError, match=rf"train-000001\.tar: {wanted}.*kvshot data repair \S+ captures it again"):
        run(spoiled("stop", how)[0])
    whole, left = [], []
    with monkeypatch.context() as patch:
        keys_of(patch, whole)
        run(recipe("whole"))
    with monkeypatch.context() as patch:
        keys_of(patch, left)
        r, bad = spoiled("skip", how, on_bad_data="skip", log_every=1)
        run(r)
    bad = {s.key for s in ShardSet.open(r.shards_dir, "train", look=False).readers[1].index.samples}
    assert left == [[key for key in step if key not in bad] for step in whole] and len(bad) == 16
    assert f"left out: 16 of 42 conversations, in 1 of 3 shards: {r.shards_dir}/train-000001.tar" in capsys.readouterr().out
    assert sum(board(r)["data/skipped"]) == 16 and read_json(r.run_dir / "train.json")["skipped_conversations"] == 16


@pytest.mark.parametrize("workers", [0, 1])
def test_a_shard_that_goes_missing_while_training_stops_the_run_or_is_left_out(spoiled, monkeypatch, capsys, workers):
    for name, options in (("stop", {}), ("skip", {"on_bad_data": "skip"})):
        r, bad = spoiled(name, "later", data_workers=workers, epochs=3, log_every=1, **options)
        with monkeypatch.context() as patch:
            before_each_step(patch, lambda _s, _m, n, bad=bad: bad.unlink() if n == 1 else None)
            if name == "skip":
                run(r)
                continue
            with pytest.raises(KvshotError, match=r"train-000001\.tar: sample 'train\d+': not readable \(No such file.*kvshot data repair .*on_bad_data=skip"):
                run(r)
    assert capsys.readouterr().out.count("left out: ") == 1  # its first conversation names it
    skipped = read_json(r.run_dir / "train.json")["skipped_conversations"]
    assert 2 * 16 <= skipped <= 3 * 16 and sum(board(r)["data/skipped"]) == skipped


def test_where_no_shard_can_be_used_nothing_is_trained(spoiled):
    r, bad = spoiled("none", "later", on_bad_data="skip")
    for path in bad.parent.glob("train-*.tar"):
        path.unlink()
    with pytest.raises(KvshotError, match=r"no shard can be used: (.*\n.*train-00000\d\.tar: not readable){3}"):
        run(r)


def test_the_target_is_hashed_once_a_start_and_not_at_all_for_a_complete_run(recipe, monkeypatch):
    plain, hashed = trainer.weights_digest, []
    monkeypatch.setattr(trainer, "weights_digest", lambda folder: hashed.append(folder) or plain(folder))
    run_and_stop(recipe(max_steps=5), 4)
    assert len(hashed) == 1
    run(recipe(max_steps=5))
    assert len(hashed) == 2
    run(recipe(max_steps=5))
    assert len(hashed) == 2


def test_what_was_begun_without_a_shard_goes_on_with_it_once_it_is_repaired(recipe, spoiled, monkeypatch):
    """The order stays: the steps after the repair are those of a run that had it all along."""
    whole, left = [], []
    with monkeypatch.context() as patch:
        keys_of(patch, whole)
        run(recipe("whole", epochs=2))
    r, bad = spoiled("mended", "later", epochs=2, on_bad_data="skip")
    kept = bad.read_bytes()
    bad.unlink()
    run_and_stop(r, 7)
    bad.write_bytes(kept)
    with monkeypatch.context() as patch:
        keys_of(patch, left)
        run(r)
    assert left == whole[6:]  # from the checkpoint after step 6 on
