"""The order of conversations: each exactly once per epoch, the same optimizer steps whatever the number of ranks."""

import threading

import numpy as np
import pytest
import torch

from kvshot_ds.config import ObjectiveConfig
from kvshot_ds.errors import ConfigError, KvshotError
from kvshot_ds.features.shard import ShardSet
from kvshot_ds.training.loader import Schedule, chosen, step_batches
from tests.features.folders import make_folder

SIZES = [(int(n), int(n // 2) if n % 5 else 0) for n in np.random.default_rng(0).integers(10, 60, 53)]
USABLE = {i for i, (_, rows) in enumerate(SIZES) if rows}


def schedule(world, per_step=8, per_micro=2, **over):
    return Schedule(SIZES, per_step, per_micro, world, over.get("epochs", 3), over.get("max_steps", 0), over.get("seed", 7))


def samples(plan):
    return [i for rank in plan.slots for slot in rank for i in slot]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_usable_conversation_once_per_epoch(world):
    s = schedule(world)
    for epoch in range(3):
        steps = range(epoch * s.steps_per_epoch, (epoch + 1) * s.steps_per_epoch)
        seen = [i for n in steps for i in samples(s.step(n))]
        assert len(seen) == len(set(seen)) and set(seen) == USABLE


def test_the_same_steps_for_any_world_size_and_another_order_each_epoch():
    one, four = schedule(1), schedule(4)
    assert one.steps == four.steps == 3 * -(-len(USABLE) // 8)
    for n in range(one.steps):
        assert set(samples(one.step(n))) == set(samples(four.step(n)))
    assert samples(one.step(0)) != samples(one.step(one.steps_per_epoch))
    assert samples(one.step(0)) != samples(schedule(1, seed=8).step(0))


def test_shape_of_a_step_and_balance_of_ranks():
    s = schedule(2)
    plan = s.step(0)
    assert len(plan.slots) == 2 and all(len(rank) == s.accumulation == 2 for rank in plan.slots)
    tokens = [sum(SIZES[i][0] for slot in rank for i in slot) for rank in plan.slots]
    assert max(tokens) <= 1.25 * min(tokens)


def test_max_steps_and_uneven_batches():
    assert schedule(1, max_steps=4).steps == 4
    with pytest.raises(ConfigError, match="multiple of"):
        schedule(3)
    with pytest.raises(ConfigError, match="no supervised rows"):
        Schedule([(10, 0)], 1, 1, 1, 1, 0, 0)


def test_a_smaller_set_lies_within_a_larger_one_and_nothing_else_is_seen():
    keys = [f"{int(n):06x}" for n in np.random.default_rng(1).permutation(53)]
    before = set()
    for most in (1, 7, 20, 53):
        among = chosen(keys, most)
        assert [keys[i] for i in sorted(among, key=lambda i: keys[i])] == sorted(keys)[:most] and before < set(among)
        before = set(among)
        if USABLE & before:
            s = Schedule(SIZES, 8, 2, 2, 2, 0, 7, among)
            seen = [i for n in range(s.steps_per_epoch) for i in samples(s.step(n))]
            assert sorted(seen) == sorted(USABLE & before)
    assert chosen(keys, 0) == list(range(53))
    with pytest.raises(ConfigError, match="max_conversations=54, but the train split holds 53"):
        chosen(keys, 54)


@pytest.mark.parametrize("first", [0, 3])
@pytest.mark.parametrize("workers", [1, 3])
def test_read_ahead_gives_the_same_batches_in_the_same_order(tmp_path, workers, first):
    make_folder(tmp_path, train=(range(9), range(9, 14)))
    shards = ShardSet.open(tmp_path, "train")
    s = Schedule([(x.tokens, x.rows) for x in shards.samples], 4, 2, 1, 5, 0, 3)
    keys = ("tokens", "turn", *shards.manifest.spec.keys())
    before = threading.active_count()

    def read(n):
        return list(step_batches(shards, keys, s, 0, ObjectiveConfig(row_fraction=0.5), first, n, pin=False))

    ahead, plain = read(workers), read(0)
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
def test_a_damaged_sample_is_named_in_its_step(tmp_path, workers):
    make_folder(tmp_path, train=(range(6),))
    shards = ShardSet.open(tmp_path, "train")
    tar = tmp_path / "train-000000.tar"
    raw = bytearray(tar.read_bytes())
    raw[shards.samples[2].offset] ^= 0xFF
    tar.write_bytes(raw)
    s = Schedule([(x.tokens, x.rows) for x in shards.samples], 1, 1, 1, 1, 0, 0)
    at = next(n for n in range(6) if samples(s.step(n)) == [2])
    batches = step_batches(shards, ("tokens", "turn"), s, 0, ObjectiveConfig(), 0, workers, pin=False)
    for _ in range(at):
        next(batches)
    with pytest.raises(KvshotError, match=r"^\S*train-000000\.tar: sample 'c-0002': its bytes are no safetensors"):
        next(batches)


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
