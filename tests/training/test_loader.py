"""Reading: the batches of a step, ahead of it, on any number of ranks and threads; what cannot be read; pinned memory."""

from __future__ import annotations

import json
import threading
from collections import Counter
from dataclasses import fields
from itertools import chain

import pytest
import torch

from kvshot_ds.config import ObjectiveConfig
from kvshot_ds.errors import ConfigError, KvshotError
from kvshot_ds.features.batch import Batch
from kvshot_ds.features.codec import Stored
from kvshot_ds.features.shard import ShardSet
from kvshot_ds.features.spec import FeatureSpec, Store
from kvshot_ds.training.loader import step_batches
from kvshot_ds.training.schedule import Schedule
from tests.features.folders import key_of, make_folder

KEYS = ("tokens", "turn")


def schedule(shards, world=1, per_step=4, per_micro=2, epochs=1, **how):
    return Schedule([(x.tokens, x.rows) for x in shards.samples], per_step, per_micro, world, epochs, 0, 3, shard_of=shards.shard_of, **how)


def samples(plan):
    return [i for rank in plan.slots for slot in rank for i in slot]


def read(shards, s, rank=0, first=0, workers=0, left_out=None, steps=None):
    """[step] -> micro-batches."""
    batches = step_batches(shards, KEYS, s, rank, ObjectiveConfig(), first, workers, False, left_out)
    return [step for step, _ in zip(batches, range(steps if steps is not None else s.steps), strict=False)]


def counted(steps):
    return Counter(key for micro_batches in steps for m in micro_batches if m.counted for key in m.batch.keys)


@pytest.fixture
def shards(tmp_path):
    """23 conversations in four shards."""
    make_folder(tmp_path, train=(range(9), range(9, 14), range(14, 15), range(15, 23)))
    return ShardSet.open(tmp_path, "train")


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("how", [{}, {"window": 2}, {"budget": 20}])
def test_each_conversation_once_an_epoch_on_any_ranks_and_threads_also_when_others_go_on(shards, workers, how):
    for world, later, stop in ((1, 3, 4), (2, 1, 7), (3, 4, 1), (4, 2, 11)):
        before, after = schedule(shards, world, epochs=2, **how), schedule(shards, later, epochs=2, **how)
        assert before.steps == after.steps == 12
        after.check(before.state(stop), stop)
        ranks = [read(shards, before, rank, 0, workers, steps=stop) for rank in range(world)]
        ranks += [read(shards, after, rank, stop, workers) for rank in range(later)]
        assert counted(step for rank in ranks for step in rank) == {key_of(seed): 2 for seed in range(23)}
        assert all(len({len(rank[n]) for rank in ranks[:world]}) == 1 for n in range(stop))  # as many forwards on every rank


@pytest.mark.parametrize("first", [0, 3])
@pytest.mark.parametrize("workers", [1, 3])
def test_read_ahead_gives_the_same_batches_in_the_same_order(shards, workers, first):
    s = schedule(shards, epochs=3)
    keys = ("tokens", "turn", *shards.manifest.spec.keys())
    before = threading.active_count()

    def ahead_by(n):
        return list(step_batches(shards, keys, s, 0, ObjectiveConfig(row_fraction=0.5), first, n, pin=False))

    ahead, plain = ahead_by(workers), ahead_by(0)
    assert len(ahead) == len(plain) == s.steps - first and threading.active_count() == before
    for a, b in zip(ahead, plain, strict=True):
        assert [m.batch.keys for m in a] == [m.batch.keys for m in b]
        for x, y in zip(a, b, strict=True):
            assert torch.equal(x.batch.hidden[1], y.batch.hidden[1]) and torch.equal(x.plan.anchors, y.plan.anchors)


def test_threads_that_read_ahead_compute_with_one_thread_and_end_with_the_loop(tmp_path, monkeypatch):
    make_folder(tmp_path, train=(range(20),))
    shards = ShardSet.open(tmp_path, "train")
    seen, plain, before = [], ShardSet.read_packed, torch.get_num_threads()
    monkeypatch.setattr(ShardSet, "read_packed", lambda *args: seen.append((torch.get_num_threads(), threading.current_thread().name)) or plain(*args))
    torch.set_num_threads(3)
    try:
        batches = step_batches(shards, ("tokens", "turn"), Schedule([(9, 3)] * 20, 1, 1, 1, 1, 0, 0), 0, ObjectiveConfig(), 0, 2, pin=False)
        next(batches)
        assert torch.get_num_threads() == 3 and torch.nn.functional.linear(torch.ones(2, 2), torch.ones(2, 2)).sum() == 8
        batches.close()
        assert {n for n, _ in seen} == {1} and all(name.startswith("kvshot-loader") for _, name in seen) and len(seen) < 20
        assert not [t for t in threading.enumerate() if t.name.startswith("kvshot-loader")]
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("how", ["damaged", "gone", "nan"])
def test_what_cannot_be_read_is_named_in_its_step(shards, workers, how):
    s = schedule(shards, per_step=1, per_micro=1)
    spoil(shards, 2, how)
    at = next(n for n in range(23) if samples(s.step(n)) == [2])
    at = min(at, *(n for n in range(23) if samples(s.step(n))[0] < 9)) if how == "gone" else at
    batches = step_batches(shards, (*KEYS, "hidden.1"), s, 0, ObjectiveConfig(), 0, workers, pin=False)
    for _ in range(at):
        next(batches)
    what = {
        "damaged": "'c-0002': its bytes are no safetensors file",
        "gone": r"'c-000\d': not readable \(No such file or directory\)",
        "nan": r"'c-0002': tensor hidden\.1 holds NaN or infinity",
    }[how]
    with pytest.raises(KvshotError, match=rf"^\S*train-000000\.tar: sample ({what}).*; kvshot data repair \S+ captures it again; train\.on_bad_data=skip"):
        next(batches)


def spoil(shards, number, how):
    """Damages sample `number`, or takes its shard away."""
    path = shards.readers[shards.shard_of[number]].path
    if how == "gone":
        path.unlink()
        return
    raw, begin = bytearray(path.read_bytes()), shards.samples[number].offset
    if how == "nan":
        size = int.from_bytes(raw[begin : begin + 8], "little")
        at = begin + 8 + size + json.loads(raw[begin + 8 : begin + 8 + size])["hidden.1"]["data_offsets"][0]
        raw[at : at + 2] = b"\xc0\x7f"  # NaN in bf16
    else:
        raw[begin] ^= 0xFF
    path.write_bytes(raw)


@pytest.mark.parametrize("workers", [0, 2])
def test_what_is_left_out_is_counted_and_changes_nothing_else(shards, workers, capsys):
    """Sample 2 is damaged, the second shard (9..13) goes missing, 20 was found to be bad before the first step."""
    s = schedule(shards, world=2, per_step=4, per_micro=1, epochs=2)
    whole = [read(shards, s, rank) for rank in range(2)]
    spoil(shards, 2, "damaged")
    spoil(shards, 9, "gone")
    left = [read(shards, s, rank, 0, workers, frozenset({20})) for rank in range(2)]
    bad = {key_of(seed) for seed in (2, 9, 10, 11, 12, 13, 20)}
    for rank in range(2):
        for one, other in zip(whole[rank], left[rank], strict=True):
            assert len(one) == len(other) == 2
            for a, b in zip(one, other, strict=True):
                out = a.counted and a.batch.keys[0] in bad
                assert b.counted == (a.counted and not out) and b.skipped == (a.batch.keys if out else ())
                assert b.batch.keys == a.batch.keys if b.counted else not bad & set(b.batch.keys)  # a stand-in can be read
    assert Counter(key for rank in left for step in rank for m in step for key in m.skipped) == dict.fromkeys(bad, 2)
    assert counted(step for rank in left for step in rank) == {key_of(seed): 2 for seed in range(23) if key_of(seed) not in bad}
    told = capsys.readouterr().out
    assert told.count("train-000000.tar: sample 'c-0002'") == 2 and told.count("train-000001.tar") == 2  # once a shard and rank, not once a conversation


@pytest.mark.parametrize("left_out", [None, frozenset()])
def test_a_stand_in_is_the_shortest_conversation_of_its_step(shards, left_out):
    """Its forward counts for nothing: the other ranks should wait for it as little as can be."""
    s = schedule(shards, world=3, per_step=4, per_micro=1)
    plan, ranks = s.step(0), [read(shards, s, rank, steps=1, left_out=left_out)[0] for rank in range(3)]
    shortest = min(shards.samples[i].tokens for i in samples(plan))
    idle = [m for rank in ranks for m in rank if not m.counted]
    assert len(idle) == 2 and {sum(m.batch.lengths) for m in idle} == {shortest}
    assert shortest < shards.samples[samples(plan)[0]].tokens


def test_a_micro_batch_keeps_what_can_be_read(shards):
    s = schedule(shards, per_step=8, per_micro=8)
    spoil(shards, 2, "damaged")
    (step,) = [step for step in read(shards, s, left_out=frozenset()) if step[0].skipped]
    assert step[0].counted and step[0].skipped == (key_of(2),) and len(step[0].batch.keys) == 7


def test_where_nothing_can_be_read_the_search_for_a_stand_in_ends(shards):
    for path in shards.readers[0].folder.glob("*.tar"):
        path.unlink()
    with pytest.raises(KvshotError, match="none of 100 conversations of step 1 and after it can be read; is the storage there"):
        read(shards, schedule(shards), left_out=frozenset())


def test_a_feature_that_was_not_captured_is_an_error_and_nothing_to_skip(shards):
    batches = step_batches(shards, ("tokens", "turn", "key.5"), schedule(shards), 0, ObjectiveConfig(), 0, 0, False, frozenset())
    with pytest.raises(ConfigError, match=r"'key\.5' was not captured"):
        next(batches)


@pytest.mark.parametrize("workers", [0, 2])
def test_all_tensors_of_a_step_are_pinned_by_threads_on_this_ranks_device(tmp_path, monkeypatch, workers):
    """With a pin_memory that copies and remembers: there is no device to pin for here."""
    pinned, devices = {}, []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda t: pinned.setdefault(id(copy := t.clone()), copy))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 5)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: devices.append((device, threading.current_thread().name)))
    spec = FeatureSpec((1, 3), (2,), "last_hidden", Store("fp8", "int8", "bf16", "bf16"), (2, 4))
    make_folder(tmp_path, train=(range(6),), spec=spec)
    shards = ShardSet.open(tmp_path, "train")
    keys, offline = (*KEYS, *spec.keys()), ObjectiveConfig(drift="offline")
    plain, copied = (list(step_batches(shards, keys, schedule(shards), 0, offline, 0, workers, pin)) for pin in (False, True))

    def tensors(value):
        if isinstance(value, torch.Tensor):
            return [value.view(torch.int8) if value.itemsize == 1 else value], [id(value)]
        parts = value.values() if isinstance(value, dict) else value if isinstance(value, Stored) else ()
        found = [tensors(part) for part in parts]
        return [t for some, _ in found for t in some], [i for _, ids in found for i in ids]

    for a, b in zip(chain(*plain), chain(*copied), strict=True):
        assert b.batch.packed and b.plan.shifted is not None
        for one, other in ((a.batch, b.batch), (a.plan, b.plan)):
            for f in fields(one):
                (mine, _), (theirs, ids) = tensors(getattr(one, f.name)), tensors(getattr(other, f.name))
                assert all(i in pinned for i in ids), f.name
                assert len(mine) == len(theirs) and all(map(torch.equal, mine, theirs)), f.name
        moved = [m.batch.to("cpu", torch.float32) for m in (a, b)]
        assert isinstance(moved[1], Batch) and moved[0].hidden.keys() == moved[1].hidden.keys() == {1, 3}
        assert all(torch.equal(moved[0].hidden[layer], moved[1].hidden[layer]) for layer in (1, 3))
    assert [device for device, _ in devices] == [5] * workers and all(name.startswith("kvshot-loader") for _, name in devices)


def test_a_system_without_threads_is_an_error_and_not_a_wait(tmp_path, monkeypatch):
    make_folder(tmp_path, train=(range(6),))
    shards, start, started = ShardSet.open(tmp_path, "train"), threading.Thread.start, []

    def limited(thread):
        if len(started) == 2:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    batches = step_batches(shards, ("tokens", "turn"), Schedule([(9, 3)] * 6, 1, 1, 1, 1, 0, 0), 0, ObjectiveConfig(), 0, 4, pin=False)
    with pytest.raises(KvshotError, match=r"train\.data_workers=4: .*can't start new thread"):
        next(batches)
    for thread in started:
        thread.join(10)
    assert len(started) == 2 and not any(thread.is_alive() for thread in started)
