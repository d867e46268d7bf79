"""Where an output came from: resolved recipe, command, versions, commit. Stored beside every output."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from kvshot_ds.config import Recipe, Section, dump_recipe
from kvshot_ds.files import AnyPath, write_atomic, write_json

_PACKAGES = ("kvshot-ds", "torch", "deepspeed", "transformers", "datasets", "webdataset", "ray", "safetensors", "tokenizers")


def versions() -> dict[str, str]:
    """Versions of Python and of every package that shapes an output; packages not installed are left out."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def git_commit() -> str | None:
    """Commit of the source tree this package runs from (`+dirty` if changed), or None outside a checkout."""
    root = Path(__file__).resolve().parent

    def git(*args: str) -> str:
        return subprocess.run(["git", "-C", str(root), *args], capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+dirty" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def digest(*parts: Section | str) -> str:
    """Stable digest of configuration sections and strings: equal means the same output would be made again."""
    text = json.dumps([p if isinstance(p, str) else p.model_dump(mode="json") for p in parts], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _command() -> list[str]:
    """The command that made this output; under a launcher, with its number of ranks."""
    program = Path(sys.argv[0])
    arguments = [a for a in sys.argv[1:] if not a.startswith("--local_rank")]
    if program.name not in ("cli.py", "kvshot"):
        return [program.name, *arguments]
    ranks = os.environ.get("WORLD_SIZE", "1")
    return ["kvshot", *arguments] if ranks == "1" else ["deepspeed", "--num_accelerators", ranks, "--module", "kvshot_ds.cli", *arguments]


def origin(**facts: Any) -> dict[str, Any]:
    """Command, versions, commit and `facts`: what is stored beside or inside every output."""
    return {"command": _command(), "versions": versions(), "git_commit": git_commit(), **facts}


def stamp(folder: AnyPath, recipe: Recipe, **facts: Any) -> None:
    """Writes `recipe.yaml` (resolved) and `provenance.json` (`origin`) into `folder`."""
    write_atomic(folder / "recipe.yaml", dump_recipe(recipe))
    write_json(folder / "provenance.json", origin(**facts))
