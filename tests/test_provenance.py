"""What stands beside every output."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvshot_ds import provenance
from kvshot_ds.config import load_recipe
from kvshot_ds.files import read_json


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    path = tmp_path / "r.yaml"
    path.write_text("name: a\nwork: w\ntarget: {path: t}\n")
    return path


def test_stamp_writes_the_resolved_recipe_and_where_it_came_from(tmp_path: Path, recipe_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["kvshot", "train", "r.yaml", "train.seed=5"])
    recipe = load_recipe(recipe_file, ("train.seed=5",))
    provenance.stamp(tmp_path / "out", recipe, target="digest")
    assert load_recipe(tmp_path / "out" / "recipe.yaml") == recipe
    written = read_json(tmp_path / "out" / "provenance.json")
    assert set(written) == {"command", "versions", "git_commit", "target"}
    assert (written["command"], written["target"]) == (["kvshot", "train", "r.yaml", "train.seed=5"], "digest")
    assert written["versions"]["python"] == platform.python_version() and written["versions"]["torch"] == torch.__version__


def test_versions_leave_out_what_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "_PACKAGES", ("torch", "no-such-package"))
    assert set(provenance.versions()) == {"python", "torch"}


def test_digest_follows_the_options_and_nothing_else(recipe_file: Path) -> None:
    one, same, other = (load_recipe(recipe_file, o).train for o in ((), ("train.seed=0",), ("train.seed=1",)))
    assert provenance.digest(one, "x") == provenance.digest(same, "x")
    assert len({provenance.digest(*parts) for parts in ((one, "x"), (other, "x"), (one, "y"), (one,), ("x", one))}) == 5


def test_git_commit_names_the_commit_and_its_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "kvshot_ds"
    package.mkdir()
    module = package / "provenance.py"
    module.write_text("1\n")
    monkeypatch.setattr(provenance, "__file__", str(module))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert provenance.git_commit() is None

    def git(*args: str) -> str:
        who = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        return subprocess.run(["git", *who, *args], cwd=tmp_path, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "one")
    head = git("rev-parse", "HEAD")
    assert provenance.git_commit() == head
    (tmp_path / "untracked").write_text("x")
    assert provenance.git_commit() == head
    module.write_text("2\n")
    assert provenance.git_commit() == f"{head}+dirty"
