"""What tests of capture share: prepared conversations, recipes, drivers in processes of their own, and what counts as the data set."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import psutil

from data_prep.capture import Captured, Unit
from data_prep.pool import Pool
from kvshot_ds.config import Recipe, dump_recipe
from kvshot_ds.files import AnyPath, filesystem, names, read_bytes

ROOT = Path(__file__).resolve().parents[2]
# What a run leaves beside the data set: where it came from, how long it took, the lock.
ASIDE = {"recipe.yaml", "provenance.json", "captures.jsonl", ".lock"}


def write_prepared(folder: Path, train: int, heldout: int, seed: int = 0, longest: int = 90, too_long: int | None = None) -> Path:
    """What `kvshot prep` leaves: two splits and summary.json. too_long: number (0-based) of a train line longer than the tiny target's context."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    for split, count in (("train", train), ("heldout", heldout)):
        lines = []
        for number in range(count):
            length = 2100 if split == "train" and number == too_long else int(rng.integers(8, longest))
            turn = [0] * (length // 3) + [1] * (length - length // 3)
            key = hashlib.sha256(f"{split}{number}".encode()).hexdigest()[:32]
            lines.append({"id": key, "messages": [], "tokens": rng.integers(0, 256, length).tolist(), "turn": turn, "source": "test"})
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "summary.json").write_text("{}")
    return folder


def recipe(target: Path, prepared: Path, shards: AnyPath, workers: int = 1, **capture: object) -> Recipe:
    options = {"workers": workers, "conversations_per_shard": 3, "tokens_per_batch": 256, **capture}
    on = {"path": target, "dtype": "fp32", "device": "cpu"}
    return Recipe.model_validate({"name": "t", "work": prepared.parent, "prepared": prepared, "shards": str(shards), "target": on, "capture": options})


def data_set(folder: AnyPath) -> dict[str, str]:
    """sha256 of every file that is part of the data set. Nothing else may lie there."""
    if isinstance(folder, Path):
        there = {path.relative_to(folder).as_posix() for path in folder.rglob("*")}
    else:
        there = {name[len(folder.path.rstrip("/")) + 1 :] for name in filesystem(folder).find(folder.path)}
    assert there >= set(names(folder, ""))
    return {name: hashlib.sha256(read_bytes(folder / name)).hexdigest() for name in sorted(there - ASIDE)}


class Driver:
    """`kvshot capture` as a process that leads a session of its own, with everything that it starts. before: code that runs first."""

    def __init__(self, wanted: Recipe, file: Path, before: str = "") -> None:
        file.write_text(dump_recipe(wanted))
        code = f"{before}\nfrom kvshot_ds.config import load_recipe; from data_prep.orchestrate import run; run(load_recipe({str(file)!r}))"
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        environment.pop("RAY_ADDRESS", None)
        self.log = file.with_suffix(".log")
        with self.log.open("wb") as log:  # no pipe: what a killed driver leaves behind would hold it open
            self.process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=environment, start_new_session=True, stdout=log, stderr=log)
        self.pid = self.process.pid

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def runs(self) -> bool:
        return self.process.poll() is None

    def wait(self) -> int:
        return self.process.wait()

    def complete(self) -> None:
        assert self.wait() == 0, self.said()


def family(pid: int) -> list[psutil.Process]:
    """Descendants of a process."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def workers_of(pid: int) -> list[psutil.Process]:
    """Ray's capture workers among the descendants: idle they bear the class's name, at work that of the shard."""
    found = []
    for process in family(pid):
        try:
            title = " ".join(process.cmdline())
        except psutil.Error:
            continue
        found += [process] if title.startswith("ray::") and ("CaptureWorker" in title or ".tar" in title) else []
    return found


def when(ready: Callable[[], bool], act: Callable[[], None]) -> threading.Thread:
    """Does `act` in the background as soon as `ready` says so."""

    def wait() -> None:
        deadline = time.monotonic() + 120
        while not ready():
            assert time.monotonic() < deadline, "it never came to that"
            time.sleep(0.002)
        act()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


def in_this_process(pool: Pool, units: Iterable[Unit]) -> Iterator[tuple[Unit, Captured]]:
    """In place of Pool.map: where Ray is to take no part."""
    worker = pool.worker(*pool.arguments)
    for unit in units:
        yield unit, worker.work(unit)
