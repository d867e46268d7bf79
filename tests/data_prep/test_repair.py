"""Repair: whatever of a captured folder is damaged or gone, afterwards it is the same, byte for byte; what was damaged is kept aside."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
from upath import UPath

from data_prep import orchestrate, repair
from data_prep.capture import Captured, Unit
from data_prep.pool import Pool
from kvshot_ds.config import Recipe
from kvshot_ds.errors import ConfigError
from kvshot_ds.features.verify import verify
from tests.features.folders import contents

Damage = Callable[[Path], object]


@pytest.fixture(autouse=True)
def captured_units(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Units are captured in this process, and listed."""
    shards: list[str] = []

    def loop(pool: Pool, units: Iterable[Unit]) -> Iterator[tuple[Unit, Captured]]:
        worker = pool.worker(*pool.arguments)
        for unit in units:
            shards.append(unit.shard)
            yield unit, worker.work(unit)

    monkeypatch.setattr(Pool, "map", loop)
    return shards


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two splits; one train line, the 5th, is longer than the target's context."""
    folder, rng = tmp_path_factory.mktemp("prepared"), np.random.default_rng(0)
    for split, count in (("train", 8), ("heldout", 3)):
        lines = []
        for number in range(count):
            n = 2100 if (split, number) == ("train", 4) else int(rng.integers(8, 30))
            record = {"id": f"{split}{number}", "messages": [], "tokens": rng.integers(0, 256, n).tolist(), "turn": [0] * 3 + [1] * (n - 3), "source": "test"}
            lines.append(json.dumps(record))
        (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "summary.json").write_text("{}")
    return folder


def recipe_for(target: Path, prepared: Path, shards: Path, **capture: object) -> Recipe:
    options = {"conversations_per_shard": 3, "tokens_per_batch": 256, **capture}
    on = {"path": target, "dtype": "fp32", "device": "cpu"}
    return Recipe.model_validate({"name": "t", "work": shards.parent, "prepared": prepared, "shards": shards, "target": on, "capture": options})


@pytest.fixture(scope="module")
def whole(tiny_target: Path, prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "features"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pool, "map", lambda pool, units: ((unit, pool.worker(*pool.arguments).work(unit)) for unit in units))
        orchestrate.run(recipe_for(tiny_target, prepared, folder))
    return folder


@pytest.fixture
def recipe(tiny_target: Path, prepared: Path, whole: Path, tmp_path: Path) -> Recipe:
    """Of a copy of the captured folder."""
    shutil.copytree(whole, tmp_path / "features")
    return recipe_for(tiny_target, prepared, tmp_path / "features")


def flip(name: str, at: int, bit: int = 1) -> Damage:
    def damage(folder: Path) -> None:
        raw = bytearray((folder / name).read_bytes())
        raw[at] ^= bit
        (folder / name).write_bytes(raw)

    return damage


def cut(name: str, size: int) -> Damage:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:size])


def gone(*names: str) -> Damage:
    return lambda folder: [(folder / name).unlink() for name in names]


def text(name: str, old: str, new: str) -> Damage:
    def damage(folder: Path) -> None:
        before = (folder / name).read_text()
        assert old in before
        (folder / name).write_text(before.replace(old, new, 1))

    return damage


def data_set(folder: Path) -> dict[str, bytes]:
    return {name: raw for name, raw in contents(folder).items() if name not in ("captures.jsonl", "recipe.yaml", "provenance.json")}


SECOND = {"train-000001"}, {"train-000001.tar", "train-000001.index.json"}
# what is done to the folder, the shards captured again, files moved aside
DAMAGES: dict[str, tuple[Damage, set[str], set[str]]] = {
    "bit in data": (flip("train-000000.tar", 4000), {"train-000000"}, {"train-000000.tar", "train-000000.index.json"}),
    "bit in a tar header": (flip("heldout-000000.tar", 3), {"heldout-000000"}, {"heldout-000000.tar", "heldout-000000.index.json"}),
    "last byte": (flip("train-000002.tar", -1), {"train-000002"}, {"train-000002.tar", "train-000002.index.json"}),
    "cut": (cut("train-000001.tar", 5000), *SECOND),
    "empty": (cut("train-000001.tar", 0), *SECOND),
    "no tar": (gone("train-000001.tar"), {"train-000001"}, {"train-000001.index.json"}),
    "no index": (gone("train-000001.index.json"), {"train-000001"}, {"train-000001.tar"}),
    "neither": (gone("train-000001.tar", "train-000001.index.json"), {"train-000001"}, set()),
    "index cut": (cut("train-000001.index.json", 50), *SECOND),
    "index spaces": (text("train-000001.index.json", "{", "{ "), *SECOND),
    "index reason": (text("train-000001.index.json", "2100 tokens", "2101 tokens"), *SECOND),
    "index key": (text("train-000001.index.json", '"key": "train3"', '"key": "train9"'), *SECOND),
    "manifest": (gone("manifest.json"), set(), set()),
    "manifest cut": (cut("manifest.json", 40), set(), {"manifest.json"}),
    "manifest count": (text("manifest.json", '"samples": 7', '"samples": 8'), set(), {"manifest.json"}),
    "manifest target": (flip("manifest.json", 90), set(), {"manifest.json"}),
    "token counts": (gone("token_counts.safetensors"), set(), set()),
    "token counts bit": (flip("token_counts.safetensors", -3), set(), {"token_counts.safetensors"}),
    "quarantine": (gone("quarantine.jsonl"), set(), set()),
    "stray": (lambda folder: (folder / "train-000077.tar").write_bytes(b"x"), set(), {"train-000077.tar"}),
    "all at once": (
        lambda folder: [part(folder) for part in (flip("train-000000.tar", 9000), cut("heldout-000000.tar", 600), gone("manifest.json", "quarantine.jsonl"))],
        {"train-000000", "heldout-000000"},
        {"train-000000.tar", "train-000000.index.json", "heldout-000000.tar", "heldout-000000.index.json"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("damage, shards, moved", DAMAGES.values(), ids=DAMAGES)
def test_what_is_damaged_is_made_again_and_nothing_else(
    damage: Damage, shards: set[str], moved: set[str], recipe: Recipe, whole: Path, captured_units: list[str]
) -> None:
    folder = recipe.shards_dir
    assert isinstance(folder, Path)
    damage(folder)
    broken = data_set(folder)
    assert broken != data_set(whole)
    done = repair.run(recipe)
    assert data_set(folder) == data_set(whole)
    assert set(captured_units) == {f"{shard}.tar" for shard in shards} == set(done.recaptured) and done.changed == ()
    assert {path.name.rpartition(".")[0] for path in folder.glob("damaged/*")} == moved == set(done.aside)
    assert all((folder / "damaged" / f"{name}.0").read_bytes() == broken[name] for name in moved)
    assert verify(folder, 2).faults == () and verify(folder, 2).damaged == len(moved)
    assert repair.run(recipe).faults == () and len(captured_units) == len(shards)


def test_a_whole_folder_is_not_touched(recipe: Recipe, captured_units: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    folder = recipe.shards_dir
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir() if path.name != ".lock"}
    assert repair.run(recipe).faults == () and captured_units == [] and "nothing is damaged" in capsys.readouterr().out
    assert before == {path: path.stat().st_mtime_ns for path in folder.iterdir() if path.name != ".lock"}


def test_the_same_file_damaged_twice_is_kept_twice(recipe: Recipe) -> None:
    for number in (0, 1):
        cut("train-000000.tar", 512 + number)(recipe.shards_dir)
        repair.run(recipe)
        assert len((recipe.shards_dir / "damaged" / f"train-000000.tar.{number}").read_bytes()) == 512 + number


def test_a_killed_repair_is_completed(recipe: Recipe, whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cut("train-000000.tar", 512)(recipe.shards_dir)
    for where in ("capture_units", "finish"):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(repair, where, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
            repair.run(recipe)
        assert not (recipe.shards_dir / "manifest.json").exists()
    repair.run(recipe)
    assert data_set(recipe.shards_dir) == data_set(whole)


def test_bytes_that_come_out_otherwise_are_named(recipe: Recipe, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """As on another kind of machine: here the first sample has another description."""
    from data_prep import capture

    plain = capture._parse
    monkeypatch.setattr(capture, "_parse", lambda *args: (lambda p: p.meta.update(source="other") or p)(plain(*args)))
    gone("train-000000.tar")(recipe.shards_dir)
    done = repair.run(recipe)
    assert done.changed == ("train-000000.tar",) and "train-000000.tar: not the bytes of before" in capsys.readouterr().out
    assert verify(recipe.shards_dir, 1).faults == ()


def test_another_recipe_or_no_record_is_refused(recipe: Recipe, tiny_target: Path, prepared: Path, captured_units: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"made with another configuration(.|\n)*capture\.conversations_per_shard: there 3, now 4"):
        repair.run(recipe_for(tiny_target, prepared, recipe.shards_dir, conversations_per_shard=4))
    (recipe.shards_dir / "provenance.json").unlink()
    with pytest.raises(ConfigError, match=r"no provenance\.json there"):
        repair.run(recipe)
    assert captured_units == []


def test_behind_a_url(tiny_target: Path, prepared: Path, whole: Path, tmp_path: Path) -> None:
    url = UPath(f"memory://repair-test/{tmp_path.name}")
    options = recipe_for(tiny_target, prepared, tmp_path).model_copy(update={"shards": url})
    for name, raw in contents(whole).items():
        (url / name).write_bytes(raw)
    (url / "train-000001.tar").write_bytes(b"x" * 600)
    done = repair.run(options)
    assert done.recaptured == ("train-000001.tar",) and (url / "damaged" / "train-000001.tar.0").read_bytes() == b"x" * 600
    assert all((url / name).read_bytes() == raw for name, raw in data_set(whole).items()) and verify(url, 2).faults == ()


@pytest.mark.parametrize(("old", "new"), [('"norm_eps": 1e-06', '"norm_eps": 1e-05'), ('"target_name": "', '"target_name": "x'), ('"silu"', '"gelu"')])
def test_what_no_shard_can_tell_of_the_manifest_is_told_by_the_capture(recipe: Recipe, old: str, new: str) -> None:
    path = Path(str(recipe.shards_dir)) / "manifest.json"
    before = path.read_text()
    assert verify(recipe.shards_dir, 1).faults == () and before.count(old) == 1
    path.write_text(before.replace(old, new))
    assert ["manifest.json" in str(f) and "differs from provenance.json" in str(f) for f in verify(recipe.shards_dir, 1).faults] == [True]
    repair.run(recipe)
    assert path.read_text() == before
