"""Units over Ray actors: order of hand-out, names, deaths, nodes without room; and the rules of a shared folder."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import ray

from data_prep.pool import Pool, clear_leftovers, same_configuration, sole_user
from kvshot_ds.errors import ConfigError, KvshotError
from kvshot_ds.files import aside, location, write_json


@pytest.fixture(scope="module", autouse=True)
def local_ray() -> Iterator[None]:
    ray.init(address="local", num_cpus=2, include_dashboard=False, object_store_memory=1 << 27, logging_level="WARNING", log_to_driver=False)
    yield
    ray.shutdown()


@dataclass(frozen=True)
class Room:
    workers: int
    cpus_per_worker: float = 1
    gpus_per_worker: float = 0


@dataclass(frozen=True)
class Job:
    number: int
    kills: int = 0  # workers that it takes along
    seconds: float = 0

    def __str__(self) -> str:
        return f"job-{self.number}.tar (a job)"


def worker(notes: Path) -> type:
    """A class of workers that note what they do; defined in a function, so that it travels to Ray by value."""

    class Worker:
        def work(self, job: Any) -> tuple[int, str, str, int]:
            with open(notes, "a") as file:
                file.write(f"{job.number} {os.getpid()}\n")
            if notes.read_text().count(f"{job.number} ") <= job.kills:
                os._exit(1)
            time.sleep(job.seconds)
            context = ray.get_runtime_context()
            return job.number, str(context.get_task_name()), str(context.get_actor_name()), os.getpid()

    return Worker


def test_every_unit_once_with_names_that_the_dashboard_shows(tmp_path: Path) -> None:
    with Pool("capture", Room(2), worker(tmp_path / "notes"), depth=2) as pool:
        found = dict(pool.map(Job(n, seconds=0.02) for n in range(12)))
        again = dict(pool.map([Job(99)]))
    assert {job.number: value[0] for job, value in found.items()} == {n: n for n in range(12)}
    assert all(value[1] == f"job-{job.number}.tar" for job, value in found.items())
    names = {value[2] for value in (*found.values(), *again.values())}
    assert all(re.fullmatch(rf"kvshot-capture-{os.getpid()}-\d+", name) for name in names)
    assert len((tmp_path / "notes").read_text().splitlines()) == 13


def test_units_are_taken_from_a_stream_as_they_are_needed(tmp_path: Path) -> None:
    taken: list[int] = []

    def stream() -> Iterator[Job]:
        for number in range(50):
            taken.append(number)
            yield Job(number)

    with Pool("prep", Room(1), worker(tmp_path / "notes")) as pool:
        for done, _ in enumerate(pool.map(stream())):
            assert len(taken) <= done + 3
    assert len(taken) == 50


def test_no_units_no_ray(tmp_path: Path) -> None:
    with Pool("prep", Room(1000), worker(tmp_path / "notes")) as pool:
        assert list(pool.map([])) == []


@pytest.mark.parametrize("depth", [1, 2])
def test_units_of_dead_workers_go_to_others(tmp_path: Path, depth: int, capsys: pytest.CaptureFixture) -> None:
    jobs = [Job(n, kills={1: 1, 4: 2}.get(n, 0)) for n in range(8)]
    with Pool("capture", Room(2), worker(tmp_path / "notes"), depth=depth) as pool:
        assert {value[0] for _, value in pool.map(jobs)} == set(range(8))
    assert "a worker died on job-4.tar (a job); the unit goes to a fresh one" in capsys.readouterr().out + capsys.readouterr().err


def test_the_unit_that_kills_is_the_one_that_is_named(tmp_path: Path) -> None:
    """Its companion on the same worker loses two workers at most: after the first death each has one alone."""
    jobs = [Job(0, seconds=0.3), Job(1, kills=99), Job(2)]
    with (
        Pool("capture", Room(1), worker(tmp_path / "notes"), depth=2) as pool,
        pytest.raises(KvshotError, match=r"job-1\.tar \(a job\): lost its worker 3 times"),
    ):
        list(pool.map(jobs))


def test_a_worker_without_room_is_not_waited_for(tmp_path: Path) -> None:
    """As after the loss of a node: Ray counts two CPUs, one of which is gone for good."""

    @ray.remote(num_cpus=1)
    class Hog:
        pass

    hog = Hog.remote()
    ray.get(hog.__ray_ready__.remote())
    try:
        with Pool("capture", Room(2), worker(tmp_path / "notes"), depth=2) as pool:
            found = [value for _, value in pool.map(Job(n) for n in range(6))]
        assert {value[0] for value in found} == set(range(6)) and len({value[3] for value in found}) == 1
    finally:
        ray.kill(hog)


def test_workers_that_do_not_start_are_an_error(tmp_path: Path) -> None:
    class Dead:
        def __init__(self) -> None:
            os._exit(1)

        def work(self, _job: Any) -> None:
            pass

    with Pool("capture", Room(1), Dead) as pool, pytest.raises(KvshotError, match="capture: 3 workers in a row died before they ran"):
        list(pool.map([Job(0)]))


def test_too_little_room_is_said_before_anything_starts(tmp_path: Path) -> None:
    with Pool("prep", Room(3), worker(tmp_path / "notes")) as pool, pytest.raises(ConfigError, match=r"prep\.workers=3 .* need 3 CPUs, Ray has 2"):
        list(pool.map([Job(0)] * 9))
    with Pool("prep", Room(1, gpus_per_worker=2), worker(tmp_path / "notes")) as pool, pytest.raises(ConfigError, match=r"need 2 GPUs, Ray has 0"):
        list(pool.map([Job(0)]))


def test_one_user_of_a_folder_who_is_named(tmp_path: Path) -> None:
    named = rf"a: another kvshot prep is writing there \(process {os.getpid()} on {os.uname().nodename}\)"
    with sole_user(tmp_path / "a", "kvshot prep"), sole_user(tmp_path / "b", "kvshot prep"):
        second = sole_user(tmp_path / "a", "kvshot prep")
        with pytest.raises(ConfigError, match=named):
            second.__enter__()
    with sole_user(tmp_path / "a", "kvshot prep"):
        assert (tmp_path / "a" / ".lock").read_text().count("process") == 1


def test_where_there_are_no_locks_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def without(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    with sole_user(location("memory://x"), "kvshot capture"):
        pass
    monkeypatch.setattr(fcntl, "flock", without)
    with sole_user(tmp_path / "a", "kvshot capture"):
        pass


def test_leftovers_of_living_processes_stay(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    mine, data = aside(tmp_path / "deep" / "a.tar"), tmp_path / "b.tar"
    dead, foreign = mine.with_name(mine.name.replace(f".{os.getpid()}.", ".4194305.")), tmp_path / ".b.tar.77.tmp"
    for path in (mine, dead, data, foreign):
        path.write_text("")
    os.utime(foreign, (0, 0))
    clear_leftovers(tmp_path)
    assert mine.exists() and data.exists() and not dead.exists()
    assert foreign.exists(), "capture.spool may be a folder that others use too"
    clear_leftovers(location("memory://x"))


def test_configurations_are_compared_by_name(tmp_path: Path) -> None:
    assert not same_configuration(tmp_path, {"a": 1})
    write_json(tmp_path / "provenance.json", {"configuration": {"a": 1, "digest": "f" * 64}})
    assert same_configuration(tmp_path, {"a": 1, "digest": "f" * 64})
    with pytest.raises(ConfigError, match=r"made with another configuration.*\n  digest: there f{12}…, now 0{12}…\n  b: there None, now 2$"):
        same_configuration(tmp_path, {"a": 1, "digest": "0" * 64, "b": 2})
    write_json(tmp_path / "provenance.json", [])
    with pytest.raises(ConfigError, match="not readable as the provenance"):
        same_configuration(tmp_path, {})
