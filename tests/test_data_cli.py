"""`kvshot data`: what it prints, in words and as JSON, and with which status it ends."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvshot_ds import cli
from kvshot_ds.features.manifest import Manifest
from kvshot_ds.features.shard import ShardSet
from tests.features.folders import make_folder

COMMANDS = ("plan", "inspect", "verify", "repair", "merge", "subset")


def kvshot(monkeypatch: pytest.MonkeyPatch, *args: object) -> int:
    monkeypatch.setattr(sys, "argv", ["kvshot", "data", *map(str, args)])
    return cli.main()


def test_help_needs_no_torch() -> None:
    code = f"""
import sys
from kvshot_ds import cli
for words in ([], *([name] for name in {COMMANDS})):
    sys.argv = ["kvshot", "data", *words, "--help"]
    assert cli.main() == 0
print([name for name in ("torch", "numpy", "ray", "transformers") if name in sys.modules])
"""
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout
    assert printed.splitlines()[-1] == "[]" and all(name in printed for name in COMMANDS)


def test_inspect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    make_folder(tmp_path)
    assert kvshot(monkeypatch, "inspect", tmp_path) == 0
    assert "kv of layers 2 as bf16" in capsys.readouterr().out
    assert kvshot(monkeypatch, "inspect", tmp_path, "--json") == 0
    assert json.loads(capsys.readouterr().out)["splits"]["train"]["conversations"] == 5
    assert kvshot(monkeypatch, "inspect", f"file://{tmp_path}") == 0
    assert kvshot(monkeypatch, "inspect", tmp_path / "none") == 2
    assert "not there" in capsys.readouterr().err


def test_verify_ends_with_1_and_names_what_is_bad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    make_folder(tmp_path)
    assert kvshot(monkeypatch, "verify", tmp_path, "--jobs", 2) == 0
    assert "everything is as it was written" in capsys.readouterr().out
    (tmp_path / "train-000001.tar").unlink()
    assert kvshot(monkeypatch, "verify", tmp_path) == 1
    assert "train-000001.tar: is not there; kvshot data repair FOLDER captures this shard again" in capsys.readouterr().out
    assert kvshot(monkeypatch, "verify", tmp_path, "--json") == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["ok"] and [fault["file"] for fault in found["faults"]] == ["train-000001.tar"]
    (tmp_path / "manifest.json").unlink()
    assert kvshot(monkeypatch, "verify", tmp_path) == 2


def test_merge_and_subset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    make_folder(tmp_path / "a")
    make_folder(tmp_path / "b", train=(range(4, 5), range(10, 12)), heldout=())
    assert kvshot(monkeypatch, "merge", tmp_path / "a", tmp_path / "b", tmp_path / "c") == 2
    assert "stand in more than one of the folders: c-0004" in capsys.readouterr().err
    assert kvshot(monkeypatch, "merge", tmp_path / "a", tmp_path / "b", tmp_path / "c", "--drop-duplicates") == 0
    assert "7 train, 2 heldout conversations" in (out := capsys.readouterr().out) and "left out, being there already: 1: c-0004" in out
    assert kvshot(monkeypatch, "subset", tmp_path / "c", tmp_path / "d", "--conversations", 6, "--hidden-layers", "3", "--query-layers", "none") == 0
    assert len(ShardSet.open(tmp_path / "d", "train")) == 6
    spec = Manifest.load(tmp_path / "d").spec
    assert (spec.hidden_layers, spec.kv_layers, spec.query_layers) == ((3,), (2,), ())
    assert kvshot(monkeypatch, "verify", tmp_path / "d") == 0
    for wrong in ([], ["--hidden-layers", "x"]):
        assert kvshot(monkeypatch, "subset", tmp_path / "c", tmp_path / "e", *wrong) == 2
    assert "expected layer numbers" in capsys.readouterr().err


def test_repair_reads_a_recipe_and_overrides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import data_prep.repair

    seen = []
    monkeypatch.setattr(data_prep.repair, "run", seen.append)
    (tmp_path / "r.yaml").write_text("name: a\nwork: w\ntarget: {path: t}\n")
    assert kvshot(monkeypatch, "repair", tmp_path / "r.yaml", "shards=elsewhere") == 0
    assert seen[0].shards == Path("elsewhere")
    (tmp_path / "features").mkdir()
    (tmp_path / "features" / "recipe.yaml").write_text("name: b\nwork: w\ntarget: {path: t}\n")
    assert kvshot(monkeypatch, "repair", tmp_path / "features") == 0 and seen[1].name == "b", "the recipe that the capture left there"


def test_plan_is_that_of_a_capture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "r.yaml").write_text("name: a\nwork: w\ntarget: {path: t}\n")
    words = [str(tmp_path / "r.yaml"), "--target-shape", "qwen3-8b", "--conversations", "10"]
    assert kvshot(monkeypatch, "plan", *words) == 0
    mine = capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["kvshot", "plan", "capture", *words])
    assert cli.main() == 0 and capsys.readouterr().out == mine and "bytes" in mine
