"""One worker: plan, batches, order, quarantine; the features against one conversation at a time."""

from __future__ import annotations

import dataclasses
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from data_prep import capture
from data_prep.capture import CaptureJob, CaptureWorker, Prepared, Unit, batches, capture_unit
from data_prep.orchestrate import cut, make_plan
from kvshot_ds.config import Recipe, TargetConfig
from kvshot_ds.errors import ConfigError, KvshotError
from kvshot_ds.features.shard import ShardReader
from kvshot_ds.features.spec import FeatureSpec, Store
from kvshot_ds.target import Target
from tests.features.shards import assert_whole

SPEC = FeatureSpec((1, 2), (3,), "last_hidden", Store.all("fp32"), (3, 4))


def record(length: int, seed: int) -> dict:
    tokens = np.random.default_rng(seed).integers(0, 256, length).tolist()
    turn = [0] * (length // 2) + [1] * (length - length // 2 - 1) + [0]
    return {"id": f"id{seed}", "messages": [], "tokens": tokens, "turn": turn, "source": "test"}


@pytest.fixture(scope="module")
def target(tiny_target: Path) -> Target:
    return Target.load(TargetConfig(path=tiny_target, dtype="fp32", device="cpu"))


def job_for(target: Target, folder: Path) -> CaptureJob:
    return CaptureJob(TargetConfig(path=target.folder, dtype="fp32", device="cpu"), SPEC, 128, folder, 1)


def unit_of(folder: Path, lines: list[str]) -> Unit:
    (folder / "train.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (unit,), _ = cut("train", folder / "train.jsonl", 100)
    return unit


def test_samples_are_the_features_in_the_order_of_the_file(target: Target, tmp_path: Path) -> None:
    records = [record(length, seed) for seed, length in enumerate((50, 9, 31, 30, 64, 8))]
    unit = unit_of(tmp_path, [json.dumps(r) for r in records])
    index = capture_unit(target, job_for(target, tmp_path / "out"), unit)
    assert [s.key for s in index.samples] == [f"id{seed}" for seed in range(6)] and index.rejected == ()
    reader = ShardReader(tmp_path / "out", index, SPEC, target.geometry)
    assert_whole(reader)
    for number, r in enumerate(records):
        alone = target.features([r["tokens"]], SPEC, [r["turn"]])[0]
        for name, tensor in reader.read(number).items():
            torch.testing.assert_close(tensor, alone[name], rtol=1e-4, atol=1e-4)


def test_batches_are_of_like_length_and_within_the_budget() -> None:
    rng = np.random.default_rng(0)
    lengths = [*rng.integers(1, 100, 40).tolist(), 300]
    conversations = [Prepared(str(i), i, [0] * n, np.zeros(n, dtype=np.int32), {}) for i, n in enumerate(lengths)]
    made = list(batches(conversations, 200))
    assert sorted(c.line for batch in made for c in batch) == list(range(41))
    assert all(len(batch) * max(len(c.tokens) for c in batch) <= 200 for batch in made[:-1])
    assert [len(c.tokens) for c in made[-1]] == [300], "one longer than the budget goes alone"
    padded = sum(len(batch) * max(len(c.tokens) for c in batch) for batch in made)
    assert padded < 1.15 * sum(lengths), "padding is to stay small"
    assert list(batches([], 200)) == []


BAD_LINES = {
    '{"tokens": [1, 2': "Expecting",
    '"text"': "no lists of integers",
    '{"tokens": [1, 2], "turn": "11"}': "no lists of integers",
    '{"tokens": [1, true], "turn": [0, 1]}': "no lists of integers",
    '{"tokens": [], "turn": []}': "0 tokens and 0 turn numbers",
    '{"tokens": [1, 2], "turn": [0]}': "2 tokens and 1 turn numbers",
    '{"tokens": [1, 259], "turn": [0, 0]}': "token id 259 is outside the target's vocabulary of 259",
    '{"tokens": [-1, 5], "turn": [0, 0]}': "token id -1 is outside",
    '{"tokens": [1, 2], "turn": [0, -1]}': "turn numbers out of range",
    r'{"tokens": [1, 2], "turn": [0, 1], "source": "\ud800"}': "its id or source is no text that UTF-8 can hold",
    json.dumps(record(2049, 0)): "2049 tokens, the target's context is 2048",
}


def test_unusable_lines_are_quarantined_with_file_line_and_reason(target: Target, tmp_path: Path) -> None:
    unit = unit_of(tmp_path, [json.dumps(record(12, 1)), *BAD_LINES, json.dumps(record(13, 2))])
    index = capture_unit(target, job_for(target, tmp_path / "out"), unit)
    assert [s.key for s in index.samples] == ["id1", "id2"]
    assert [(r.file, r.line) for r in index.rejected] == [("train.jsonl", line) for line in range(2, len(BAD_LINES) + 2)]
    for found, (line, reason) in zip(index.rejected, BAD_LINES.items(), strict=True):
        assert reason in found.reason and found.record == line[:200]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_conversations_with_features_that_are_not_finite_are_quarantined(tiny_target: Path, tmp_path: Path, bad: float) -> None:
    target = Target.load(TargetConfig(path=tiny_target, dtype="fp32", device="cpu"))
    records = [record(20, seed) for seed in range(4)]
    for r in records:
        r["tokens"] = [t % 200 for t in r["tokens"]]
    records[2]["tokens"][15] = 201
    target.model.get_input_embeddings().weight[201, 0] = bad
    unit = unit_of(tmp_path, [json.dumps(r) for r in records])
    index = capture_unit(target, job_for(target, tmp_path / "out"), unit)
    assert [s.key for s in index.samples] == ["id0", "id1", "id3"]
    (left_out,) = index.rejected
    assert left_out.line == 3 and left_out.reason.startswith("NaN or infinity in hidden.1, hidden.2, key.3") and "id2" in left_out.record
    assert_whole(ShardReader(tmp_path / "out", index, SPEC, target.geometry))


def test_a_key_is_the_id_or_else_the_place(target: Target, tmp_path: Path) -> None:
    ids: list[object] = ["0123456789abcdef" * 2, "with a space", None, 7, "../up", "x" * 65, "a.b", "0123456789abcdef" * 2, "ok_-1"]
    unit = unit_of(tmp_path, [json.dumps({**record(8 + n, n), "id": i}) for n, i in enumerate(ids)])
    index = capture_unit(target, job_for(target, tmp_path / "out"), unit)
    assert [s.key for s in index.samples] == [ids[0], *(f"train-{line:08d}" for line in range(2, 8)), "ok_-1"]
    (left_out,) = index.rejected
    assert left_out.line == 8 and left_out.reason == f"its id {ids[0]} is that of line 1"


def test_a_shard_is_the_same_whatever_was_captured_before_it(target: Target, tmp_path: Path) -> None:
    """A worker keeps nothing from one unit to the next, and two threads that share it do not meet."""
    lines = [json.dumps(record(8 + n, n)) for n in range(24)]
    (tmp_path / "train.jsonl").write_text("\n".join(lines) + "\n")
    units, _ = cut("train", tmp_path / "train.jsonl", 4)
    first, second = (CaptureWorker(job_for(target, tmp_path / name)) for name in ("one", "two"))
    alone = [first.work(unit).index for unit in units]
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(second.work, reversed(units)))
    assert [c.index for c in reversed(together)] == alone and all(c.seconds > 0 for c in together)
    assert {p.name: p.read_bytes() for p in (tmp_path / "one").iterdir()} == {p.name: p.read_bytes() for p in (tmp_path / "two").iterdir()}


def test_at_most_two_batches_are_in_memory(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer sets the pace where it is the slower one."""
    import time
    import weakref

    unit = unit_of(tmp_path, [json.dumps(record(60, n)) for n in range(12)])
    alive: list[weakref.ref] = []
    most = 0
    real, write = target.features, capture._write

    def features(*arguments: object) -> list:
        nonlocal most
        found = real(*arguments)
        alive.append(weakref.ref(found[0]["hidden.1"]))
        most = max(most, sum(ref() is not None for ref in alive))
        return found

    def slow(*arguments: object) -> list:
        time.sleep(0.02)
        return write(*arguments)

    monkeypatch.setattr(target, "features", features)
    monkeypatch.setattr(capture, "_write", slow)
    index = capture_unit(target, job_for(target, tmp_path / "out"), unit)
    assert len(index.samples) == 12 and len(alive) == 6 and most <= 2


def test_units_cut_a_file_at_lines(tmp_path: Path) -> None:
    file = tmp_path / "heldout.jsonl"
    file.write_text("".join(f"{'é' * n}\n" for n in range(7)), encoding="utf-8")
    units, digest = cut("heldout", file, 3)
    assert [(u.shard, u.first_line, u.count) for u in units] == [("heldout-000000.tar", 1, 3), ("heldout-000001.tar", 4, 3), ("heldout-000002.tar", 7, 1)]
    for unit in units:
        with open(file, "rb") as stream:
            stream.seek(unit.offset)
            assert stream.readline().decode().strip() == "é" * (unit.first_line - 1)
    file.write_text("other\n")
    assert cut("heldout", file, 3)[1] != digest
    with pytest.raises(ConfigError, match=r"none\.jsonl: not readable.*run kvshot prep"):
        cut("heldout", tmp_path / "none.jsonl", 3)


def test_worker_says_what_a_user_can_mend(target: Target, tmp_path: Path) -> None:
    unit = unit_of(tmp_path, [json.dumps(record(12, 1))])
    job = job_for(target, tmp_path / "out")
    (tmp_path / "file").write_text("")
    with pytest.raises(KvshotError, match=r"train-000000\.tar \(lines 1 to 1 of .*\): .*file"):
        CaptureWorker(dataclasses.replace(job, folder=tmp_path / "file")).work(unit)
    with pytest.raises(ConfigError, match="no such folder"):
        CaptureWorker(dataclasses.replace(job, target=TargetConfig(path=tmp_path / "gone"))).work(unit)

    def out_of_memory(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate\nmore")

    worker = CaptureWorker(job)
    worker._target = target
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target, "features", out_of_memory)
        with pytest.raises(KvshotError, match=r"out of memory.*lower capture\.tokens_per_batch \(now 128\)"):
            worker.work(unit)
    assert not list((tmp_path / "out").glob("*")), "a unit that failed left a file"


def test_the_configuration_survives_json_and_names_what_changes_the_bytes(tiny_target: Path, tmp_path: Path) -> None:
    (tmp_path / "prepared").mkdir()
    for name in ("train.jsonl", "heldout.jsonl"):
        (tmp_path / "prepared" / name).write_text(json.dumps(record(12, 1)) + "\n")
    (tmp_path / "prepared" / "summary.json").write_text("{}")

    def configuration(**options: object) -> dict:
        target = {"path": tiny_target, "dtype": "fp32", "device": "cpu"}
        return make_plan(Recipe.model_validate({"name": "r", "work": tmp_path, "target": target, "capture": options})).configuration

    plain = configuration()
    assert json.loads(json.dumps(plain)) == plain
    same = ({"workers": 3}, {"spool": tmp_path}, {"cpus_per_worker": 1.5})
    other = ({"tokens_per_batch": 7}, {"conversations_per_shard": 7}, {"features": {"query_layers": [3]}}, {"cpus_per_worker": 2})
    assert all(configuration(**options) == plain for options in same) and all(configuration(**options) != plain for options in other)
