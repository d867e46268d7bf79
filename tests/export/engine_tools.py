"""speculators in an environment of its own: it wants an older transformers than this project, which must not see it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

VERSION = "0.9.0"
# speculators asks for torchvision, torchaudio and older data sets too, which its loader does not import
PACKAGES = (f"speculators=={VERSION}", f"hs-connectors=={VERSION}", "transformers==5.19.0", "loguru==0.7.3")


class CannotBuildError(Exception):
    """The environment is not there and cannot be made: the text says why."""


def environment() -> Path:
    """A folder of packages to put before the project's own, made once and kept in the cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvshot-ds"
    python = f"py{sys.version_info.major}{sys.version_info.minor}"
    place = cache / f"speculators-{VERSION}-{python}-torch{torch.__version__.partition('+')[0]}"
    if place.is_dir():
        return place
    cache.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f"{place.name}.", dir=cache))
    try:
        _install(made)
        try:
            made.rename(place)
        except OSError:
            if not place.is_dir():  # else another test run was faster
                raise
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return place


def _install(folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--quiet", "--retries", "1", "--timeout", "30", "--target", str(folder), *PACKAGES]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    except subprocess.TimeoutExpired:
        raise CannotBuildError("pip took longer than 240 s") from None
    if done.returncode:
        raise CannotBuildError(f"pip: {([line for line in done.stderr.splitlines() if line.strip()] or ['no message'])[-1]}")


def run(jobs: list[dict[str, str]], folder: Path) -> list[dict[str, Any]]:
    """What loader.py found, job by job. folder: for its files. Raises CannotBuildError."""
    (folder / "jobs.json").write_text(json.dumps(jobs))
    told = folder / "found.json"
    # -P: the folder of the script, in which the project's tests lie, is none of its packages
    command = [sys.executable, "-P", str(Path(__file__).with_name("loader.py")), str(folder / "jobs.json"), str(told)]
    env = {**os.environ, "PYTHONPATH": str(environment()), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=540, check=False, env=env, cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[dict[str, Any]] = json.loads(told.read_text())
    return found
