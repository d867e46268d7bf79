"""Capture as a whole, under real Ray: the same bytes however many workers and whatever is killed on the way."""

from __future__ import annotations

import json
import os
import re
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import ray

from data_prep import orchestrate
from data_prep.orchestrate import CaptureSummary, make_plan, run
from data_prep.pool import Pool, sole_user
from kvshot_ds.errors import ConfigError, KvshotError
from kvshot_ds.features.manifest import Manifest, load_token_counts, worker_seconds
from kvshot_ds.features.shard import ShardSet
from kvshot_ds.files import names
from kvshot_ds.target import weights_digest
from tests.data_prep.captures import ASIDE, Driver, data_set, family, in_this_process, recipe, when, workers_of, write_prepared
from tests.features.shards import assert_whole

TRAIN, HELDOUT = 90, 11
SHARDS = 34


@pytest.fixture(scope="module", autouse=True)
def local_ray() -> Iterator[None]:
    """One Ray for the tests of this file that stay in this process; `run` uses the connection there is."""
    ray.init(address="local", num_cpus=2, include_dashboard=False, object_store_memory=1 << 27, logging_level="WARNING", log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prepared(tmp_path_factory.mktemp("prepared"), TRAIN, HELDOUT, too_long=40)


@pytest.fixture(scope="module")
def whole(tiny_target: Path, prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, CaptureSummary]:
    """An uninterrupted capture by one worker."""
    folder = tmp_path_factory.mktemp("whole") / "features"
    return folder, run(recipe(tiny_target, prepared, folder))


def test_a_capture_is_complete_and_counted(whole: tuple[Path, CaptureSummary], tiny_target: Path, prepared: Path) -> None:
    folder, summary = whole
    assert (summary.shards, summary.reused, summary.conversations, summary.rejected) == (SHARDS, 0, TRAIN + HELDOUT - 1, 1)
    manifest = Manifest.load(folder)
    assert manifest.target_digest == weights_digest(tiny_target) and manifest.target_name == "tiny" and manifest.rejected == 1
    assert manifest.splits["train"].samples == TRAIN - 1 and manifest.splits["heldout"].samples == HELDOUT
    assert {p.name for p in folder.iterdir() if p.suffix != ".tar" and ".index." not in p.name} == {
        "manifest.json", "token_counts.safetensors", "quarantine.jsonl", *ASIDE,
    }  # fmt: skip
    (left_out,) = [json.loads(line) for line in (folder / "quarantine.jsonl").read_text().splitlines()]
    assert (left_out["file"], left_out["line"]) == ("train.jsonl", 41) and "2100 tokens" in left_out["reason"]
    labels: Counter[int] = Counter()
    for number, line in enumerate((prepared / "train.jsonl").read_text().splitlines()):
        record = json.loads(line)
        if number != 40:
            labels.update(record["tokens"][j + 1] for j in range(len(record["turn"]) - 1) if record["turn"][j] == record["turn"][j + 1] == 1)
    counts = load_token_counts(folder, 259)
    assert {i: int(n) for i, n in enumerate(counts) if n} == dict(labels)
    assert summary.rows == sum(split.rows for split in manifest.splits.values()) and manifest.splits["train"].rows == int(counts.sum())
    train = ShardSet.open(folder, "train")
    assert_whole(train)
    ids = [json.loads(line)["id"] for line in (prepared / "train.jsonl").read_text().splitlines()]
    assert [s.key for s in train.samples] == [key for number, key in enumerate(ids) if number != 40]
    log = [json.loads(line) for line in (folder / "captures.jsonl").read_text().splitlines()]
    assert {line["shard"] for line in log} == set(names(folder, ".tar")) and worker_seconds(folder) == pytest.approx(sum(line["seconds"] for line in log))
    assert (sum(line["tokens"] for line in log), sum(line["bytes"] for line in log)) == (summary.tokens, summary.bytes)


def test_a_rerun_says_so_and_touches_nothing(whole: tuple[Path, CaptureSummary], tiny_target: Path, prepared: Path, capsys: pytest.CaptureFixture) -> None:
    folder, summary = whole
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir() if path.name != ".lock"}
    again = run(recipe(tiny_target, prepared, folder, workers=2))
    printed = capsys.readouterr().out
    assert "is complete already" in printed
    g, spec = Manifest.load(folder).geometry, Manifest.load(folder).spec
    hidden, kv = 2 * len(spec.hidden_layers) * g.hidden_size, 2 * 2 * len(spec.kv_layers) * g.kv_heads * g.head_dim
    found = re.search(r"bytes a token: hidden ([\d,]+), kv ([\d,]+), teacher ([\d,]+), tokens, headers and padding ([\d,]+)", printed)
    parts = [int(part.replace(",", "")) for part in found.groups()] if found else []
    assert parts[:2] == [hidden, kv] and sum(parts) == pytest.approx(summary.bytes / summary.tokens, abs=2)
    assert (again.reused, again.tokens, again.bytes) == (SHARDS, summary.tokens, summary.bytes)
    assert before == {path: path.stat().st_mtime_ns for path in folder.iterdir() if path.name != ".lock"}


@pytest.fixture
def without_actors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Units are captured in this process: for tests of what stands around the actors."""
    monkeypatch.setattr(Pool, "map", in_this_process)


def test_two_workers_and_one_killed_give_the_same_bytes(
    whole: tuple[Path, CaptureSummary], tiny_target: Path, prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    folder = tmp_path / "features"
    killed: list[int] = []

    def kill() -> None:
        killed.append(workers_of(os.getpid())[0].pid)
        os.kill(killed[0], signal.SIGKILL)

    thread = when(lambda: len(list(folder.glob("*.index.json"))) >= 3, kill)
    run(recipe(tiny_target, prepared, folder, workers=2))
    thread.join()
    assert killed and "a worker died on" in (said := capsys.readouterr()).out + said.err
    assert data_set(folder) == data_set(whole[0])


def test_a_killed_driver_is_continued_and_leaves_no_process(whole: tuple[Path, CaptureSummary], tiny_target: Path, prepared: Path, tmp_path: Path) -> None:
    folder = tmp_path / "features"
    wanted = recipe(tiny_target, prepared, folder)
    driver = Driver(wanted, tmp_path / "recipe.yaml")
    children: list[psutil.Process] = []

    def kill() -> None:
        children.extend(family(driver.pid))
        os.killpg(driver.pid, signal.SIGKILL)

    when(lambda: len(list(folder.glob("*.index.json"))) >= 5 or not driver.runs(), kill).join()
    assert driver.wait() == -signal.SIGKILL, driver.said()
    assert re.search(
        r"capture: (train|heldout)-\d{6}\.tar: 3 conversations, [\d,]+ tokens; 1 of 34 shards, [\d,]+ tokens/s, [\d.,]+ MB/s, \d+:\d+ left", driver.said()
    )
    _gone, alive = psutil.wait_procs(children, timeout=60)
    assert children and not alive, f"left behind: {alive}"
    there = len(list(folder.glob("*.index.json")))
    assert 5 <= there < SHARDS and not Manifest.path(folder).exists()
    with pytest.raises(ConfigError, match="not there; the features were not captured, or not to the end"):
        ShardSet.open(folder, "train")
    summary = run(wanted)
    assert summary.reused >= there and data_set(folder) == data_set(whole[0])


@pytest.mark.usefixtures("without_actors")
def test_a_lost_or_cut_shard_is_captured_again(whole: tuple[Path, CaptureSummary], tiny_target: Path, prepared: Path) -> None:
    folder, _ = whole
    before = data_set(folder)
    (folder / "train-000002.tar").unlink()
    (folder / "train-000004.index.json").write_text("{")
    with open(folder / "heldout-000001.tar", "r+b") as file:
        file.truncate(1000)
    summary = run(recipe(tiny_target, prepared, folder))
    assert summary.reused == SHARDS - 3 and data_set(folder) == before


def test_another_configuration_is_refused_and_named(whole: tuple[Path, CaptureSummary], tiny_target: Path, prepared: Path, tmp_path: Path) -> None:
    folder, _ = whole
    for capture, named in (
        ({"tokens_per_batch": 300}, r"capture\.tokens_per_batch: there 256, now 300"),
        ({"conversations_per_shard": 4}, r"capture\.conversations_per_shard: there 3, now 4"),
        ({"features": {"hidden_layers": [0]}}, r"capture\.features: there hidden_layers \[1, 2\].*now hidden_layers \[0\]"),
    ):
        with pytest.raises(ConfigError, match=named):
            run(recipe(tiny_target, prepared, folder, **capture))
    other = tmp_path / "prepared"
    other.mkdir()
    for name in ("train.jsonl", "heldout.jsonl", "summary.json"):
        (other / name).write_bytes((prepared / name).read_bytes())
    with open(other / "train.jsonl", "a") as file:
        file.write("{}\n")
    with pytest.raises(ConfigError, match=r"prepared: there train"):
        run(recipe(tiny_target, other, folder))
    (tmp_path / "alien").mkdir()
    (tmp_path / "alien" / "train-000000.tar").write_text("")
    with pytest.raises(ConfigError, match="holds tars but no provenance"):
        run(recipe(tiny_target, prepared, tmp_path / "alien"))


def test_mistakes_are_found_before_any_worker_starts(tiny_target: Path, prepared: Path, tmp_path: Path) -> None:
    out = tmp_path / "features"
    with pytest.raises(ConfigError, match="no such folder"):
        run(recipe(tmp_path / "gone", prepared, out))
    with pytest.raises(ConfigError, match=r"no summary\.json there.*run kvshot prep"):
        run(recipe(tiny_target, tmp_path, out))
    with pytest.raises(ConfigError, match=r"capture\.features\.kv_layers.*do not exist in a target of 6 layers"):
        run(recipe(tiny_target, prepared, out, features={"kv_layers": [6]}))
    (tmp_path / "empty").mkdir()
    for name in ("train.jsonl", "heldout.jsonl", "summary.json"):
        (tmp_path / "empty" / name).write_text("")
    with pytest.raises(ConfigError, match="nothing to capture"):
        run(recipe(tiny_target, tmp_path / "empty", out))
    with pytest.raises(ConfigError, match=r"capture\.workers=3 with capture\.cpus_per_worker=1 need 3 CPUs, Ray has 2"):
        run(recipe(tiny_target, prepared, out, workers=3))
    on_gpu = recipe(tiny_target, prepared, out)
    with pytest.raises(ConfigError, match=r"capture\.gpus_per_worker=0"):
        make_plan(on_gpu.model_copy(update={"target": on_gpu.target.model_copy(update={"device": "cuda"})}))


def test_two_captures_in_one_folder_are_refused(tiny_target: Path, prepared: Path, tmp_path: Path) -> None:
    said = rf"another kvshot capture is writing there \(process {os.getpid()} on .+\); wait for it"
    with sole_user(tmp_path / "features", "kvshot capture"), pytest.raises(ConfigError, match=said):
        run(recipe(tiny_target, prepared, tmp_path / "features"))


def test_a_unit_that_kills_its_worker_ends_the_capture(tiny_target: Path, prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tally = tmp_path / "tally"

    class Deadly:  # defined here so that it travels to the worker by value
        def __init__(self, job: object) -> None:
            pass

        def work(self, unit: object) -> None:
            with open(tally, "a") as file:
                file.write(f"{unit.shard}\n")  # type: ignore[attr-defined]
            os._exit(1)

    monkeypatch.setattr(orchestrate, "CaptureWorker", Deadly)
    with pytest.raises(KvshotError, match=r"train-000000\.tar \(lines 1 to 3 of .*\): lost its worker 3 times"):
        run(recipe(tiny_target, prepared, tmp_path / "features"))
    tried = tally.read_text().splitlines()
    assert tried.count("train-000000.tar") == 3 and len(tried) <= 4, "once it has lost a worker, a unit has the next one alone"


def test_an_error_in_a_worker_reaches_the_user_as_it_is(tiny_target: Path, prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing:
        def __init__(self, job: object) -> None:
            pass

        def work(self, unit: object) -> None:
            from kvshot_ds.errors import KvshotError

            raise KvshotError("no space left")

    monkeypatch.setattr(orchestrate, "CaptureWorker", Failing)
    with pytest.raises(KvshotError) as caught:
        run(recipe(tiny_target, prepared, tmp_path / "features"))
    assert type(caught.value) is KvshotError and str(caught.value) == "no space left"


@pytest.mark.usefixtures("without_actors")
def test_nothing_usable_is_an_error(tiny_target: Path, tmp_path: Path) -> None:
    for name, text in (("train.jsonl", "{}\n"), ("heldout.jsonl", ""), ("summary.json", "{}")):
        (tmp_path / name).write_text(text)
    with pytest.raises(KvshotError, match=r"none of 1 conversations could be captured; train\.jsonl line 1: no lists"):
        run(recipe(tiny_target, tmp_path, tmp_path / "features"))
