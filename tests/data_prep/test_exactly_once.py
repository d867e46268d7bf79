"""Exactly once: whatever is killed, however full the disk, whoever else writes, the data set ends up the same, byte for byte."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from data_prep import orchestrate
from data_prep.pool import Pool
from kvshot_ds.config import Recipe, dump_recipe
from kvshot_ds.errors import KvshotError
from kvshot_ds.features.manifest import Manifest
from kvshot_ds.features.shard import ShardSet
from kvshot_ds.files import names
from tests.data_prep.captures import ROOT, Driver, data_set, family, in_this_process, recipe, workers_of, write_prepared

KILLS = 21


class Rounds:
    """Runs a driver again and again and kills, in turn, a worker, the driver, a worker, everything, at random moments."""

    def __init__(self, base: Path, wanted: Callable[[Path], Recipe], expected: dict[str, str]) -> None:
        self.base, self.wanted, self.expected = base, wanted, expected
        self.random, self.kills, self.midway, self.folders = random.Random(0), Counter[str](), 0, 0
        self.driver: Driver | None = None
        self.orphans: list[psutil.Process] = []
        self.folder = self.fresh()

    def fresh(self) -> Path:
        self.folders += 1
        return self.base / f"features{self.folders}"

    def done(self) -> int:
        return len(names(self.folder, ".index.json"))

    def start(self) -> None:
        self.driver = Driver(self.wanted(self.folder), self.base / "recipe.yaml")

    def wait_for_a_moment(self) -> bool:
        """Somewhere after the next shard (one time in five: anywhere). False if the run came to its end before."""
        assert self.driver
        before, anywhere = self.done(), self.random.random() < 0.2
        deadline = time.monotonic() + (self.random.uniform(0, 3) if anywhere else 120)
        while self.driver.runs() and self.done() <= before and time.monotonic() < deadline:
            time.sleep(0.01)
        assert anywhere or time.monotonic() < deadline, "no shard in two minutes"
        time.sleep(0 if anywhere else self.random.uniform(0, 0.5))
        return self.driver.runs()

    def kill(self, victim: str) -> None:
        assert self.driver
        if victim == "worker":
            workers = workers_of(self.driver.pid)
            if not workers:
                return
            self.random.choice(workers).kill()
        else:
            self.orphans += family(self.driver.pid)  # they may write on while the next driver starts
            os.kill(self.driver.pid, signal.SIGKILL)
            if victim == "everything":
                self.bury()
            self.driver.wait()
            self.driver = None
        self.kills[victim] += 1
        self.midway += self.done() > 0 and not Manifest.path(self.folder).exists()

    def finish(self) -> None:
        """Lets the folder come to its end, and compares."""
        if self.driver is None:
            self.start()
        assert self.driver
        if self.driver.wait():  # a unit may have lost three workers
            said = self.driver.said()
            assert "lost its worker 3 times" in said or "died before they ran" in said, said
            self.start()
            self.driver.complete()
        self.driver = None
        assert data_set(self.folder) == self.expected

    def bury(self) -> None:
        """Ends what killed drivers have left: all of their Ray."""
        for process in self.orphans:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        _gone, alive = psutil.wait_procs(self.orphans, timeout=60)
        assert not alive, f"left behind: {alive}"
        self.orphans.clear()

    def stop(self) -> None:
        if self.driver and self.driver.runs():
            self.orphans += [*family(self.driver.pid), psutil.Process(self.driver.pid)]
        self.bury()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_twenty_kills_at_random_moments_change_no_byte(tiny_target: Path, tmp_path: Path) -> None:
    prepared = write_prepared(tmp_path / "prepared", 900, 100, longest=300, too_long=70)

    def wanted(folder: Path) -> Recipe:
        return recipe(tiny_target, prepared, folder, workers=2, conversations_per_shard=8, cpus_per_worker=1)

    whole = tmp_path / "whole"
    Driver(wanted(whole), tmp_path / "whole.yaml").complete()
    expected = data_set(whole)
    assert len(names(whole, ".tar")) == 126 and len(expected) == 2 * 126 + 3
    rounds = Rounds(tmp_path, wanted, expected)
    try:
        turn = 0
        while sum(rounds.kills.values()) < KILLS:
            if rounds.driver is None:
                rounds.start()
            if rounds.wait_for_a_moment():
                before = sum(rounds.kills.values())
                rounds.kill(("worker", "driver", "worker", "everything")[turn % 4])
                turn += sum(rounds.kills.values()) - before
            else:  # it came to its end
                rounds.finish()
                rounds.folder = rounds.fresh()
        rounds.finish()
    finally:
        rounds.stop()
    print(f"{dict(rounds.kills)}, {rounds.midway} while shards were being made, {rounds.folders} folder(s)")
    assert set(rounds.kills) == {"worker", "driver", "everything"} and rounds.midway >= KILLS // 2


@pytest.mark.slow
def test_two_runs_into_one_folder_without_a_lock_are_harmless(tiny_target: Path, tmp_path: Path) -> None:
    prepared = write_prepared(tmp_path / "prepared", 200, 20, longest=200)
    whole, folder = recipe(tiny_target, prepared, tmp_path / "whole"), recipe(tiny_target, prepared, tmp_path / "features")
    no_lock = "import contextlib; from data_prep import orchestrate; orchestrate.sole_user = lambda *_: contextlib.nullcontext()"
    runs = [Driver(folder, tmp_path / f"{n}.yaml", no_lock) for n in range(2)]
    for run in runs:
        run.complete()
    Driver(whole, tmp_path / "whole.yaml").complete()
    assert data_set(tmp_path / "features") == data_set(tmp_path / "whole")
    lines = (tmp_path / "features" / "captures.jsonl").read_text().count("\n")
    assert lines > len(names(tmp_path / "whole", ".tar")), "the runs took turns: nothing was written twice, and nothing shown"


def test_a_full_disk_is_one_line_and_a_rerun_with_more_room_completes(
    tiny_target: Path, tmp_path: Path, small_disk: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Pool, "map", in_this_process)
    prepared = write_prepared(tmp_path / "prepared", 60, 6, longest=200)
    orchestrate.run(recipe(tiny_target, prepared, tmp_path / "whole"))
    needed = sum(p.stat().st_size for p in (tmp_path / "whole").iterdir())
    wanted = recipe(tiny_target, prepared, small_disk(f"{needed // 2}") / "features")
    folder = wanted.shards_dir
    assert isinstance(folder, Path)
    for _ in range(2):  # it stays full
        with pytest.raises(KvshotError) as caught:
            orchestrate.run(wanted)
        text = str(caught.value)
        assert re.search(rf"{folder}: no space left \(\d\.\d MB free\); what was finished is kept: make room there", text) and "\n" not in text
        assert not Manifest.path(folder).exists()
    kept = len(names(folder, ".index.json"))
    assert kept > 3
    small_disk(f"{4 * needed}")
    summary = orchestrate.run(wanted)
    assert summary.reused >= kept and data_set(folder) == data_set(tmp_path / "whole")


@pytest.mark.parametrize("step", range(9))
def test_a_power_cut_at_any_write_of_the_driver_is_continued(tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """The run ends at its n-th atomic write or shard; what is there never passes for a complete data set."""
    monkeypatch.setattr(Pool, "map", in_this_process)
    prepared = write_prepared(tmp_path / "prepared", 6, 3)
    whole, folder = tmp_path / "whole", tmp_path / "features"
    orchestrate.run(recipe(tiny_target, prepared, whole))
    real, left = os.replace, [step]

    def replace(*arguments: Any) -> None:
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        real(*arguments)

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(KeyboardInterrupt):
        orchestrate.run(recipe(tiny_target, prepared, folder))
    monkeypatch.setattr(os, "replace", real)
    assert not Manifest.path(folder).exists()
    with pytest.raises(KvshotError, match="run kvshot capture"):
        ShardSet.open(folder, "train")
    orchestrate.run(recipe(tiny_target, prepared, folder))
    assert data_set(folder) == data_set(whole)


LOST_NODE = """
import sys, threading, time
from pathlib import Path
import ray
from ray.cluster_utils import Cluster
from data_prep.orchestrate import run
from kvshot_ds.config import load_recipe

recipe = load_recipe(Path(sys.argv[1]))
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False, "object_store_memory": 1 << 27})
second = cluster.add_node(num_cpus=1, object_store_memory=1 << 27)
ray.init(address=cluster.address, logging_level="ERROR", log_to_driver=False)

def lose():
    while len(list(recipe.shards_dir.glob("*.index.json"))) < 12 or sum(a["State"] == "ALIVE" for a in actors()) < 2:
        time.sleep(0.02)
    cluster.remove_node(second, allow_graceful=False)
    print("lost a node", flush=True)

def actors():
    from ray._private.state import actors as table
    return table().values()

thread = threading.Thread(target=lose, daemon=True)
thread.start()
run(recipe)
thread.join(1)
ray.shutdown()
cluster.shutdown()
"""


@pytest.mark.slow
def test_a_lost_node_is_done_without(tiny_target: Path, tmp_path: Path) -> None:
    """Two nodes of one CPU; the second goes for good. The worker that stood there finds no room again, and the other does the rest."""
    prepared = write_prepared(tmp_path / "prepared", 500, 50, longest=200)
    whole, wanted = recipe(tiny_target, prepared, tmp_path / "whole"), recipe(tiny_target, prepared, tmp_path / "features", workers=2)
    (tmp_path / "recipe.yaml").write_text(dump_recipe(wanted))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", LOST_NODE, str(tmp_path / "recipe.yaml")]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False, start_new_session=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "lost a node" in done.stdout and "a worker died on" in done.stdout + done.stderr
    Driver(whole, tmp_path / "whole.yaml").complete()
    assert data_set(tmp_path / "features") == data_set(tmp_path / "whole")
