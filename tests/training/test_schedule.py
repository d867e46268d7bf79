"""The order of conversations: each exactly once per epoch, the same optimizer steps whatever the number of ranks, forwards within their budget."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvshot_ds.errors import ConfigError, KvshotError
from kvshot_ds.training.schedule import Schedule, chosen

SIZES = [(int(n), int(n // 2) if n % 5 else 0) for n in np.random.default_rng(0).integers(10, 60, 53)]
USABLE = {i for i, (_, rows) in enumerate(SIZES) if rows}
SHARDS = np.arange(53) // 6


def schedule(world, per_step=8, per_micro=2, sizes=SIZES, **over):
    most = {"epochs": 3, "max_steps": 0, "seed": 7, "among": None, **over}
    first = [most.pop(name) for name in ("epochs", "max_steps", "seed", "among")]
    return Schedule(sizes, per_step, per_micro, world, *first, **most)


def samples(plan):
    return [i for rank in plan.slots for slot in rank for i in slot]


def tokens(slot, sizes=SIZES):
    return sum(sizes[i][0] for i in slot)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("how", [{}, {"window": 2, "shard_of": SHARDS}, {"budget": 90}])
def test_every_usable_conversation_once_per_epoch(world, how):
    s = schedule(world, **how)
    for epoch in range(3):
        steps = range(epoch * s.steps_per_epoch, (epoch + 1) * s.steps_per_epoch)
        seen = [i for n in steps for i in samples(s.step(n))]
        assert len(seen) == len(set(seen)) and set(seen) == USABLE


@pytest.mark.parametrize("how", [{}, {"window": 2, "shard_of": SHARDS}, {"budget": 90}])
def test_the_same_steps_for_any_world_size_and_another_order_each_epoch(how):
    one, others = schedule(1, **how), [schedule(world, **how) for world in (3, 4, 8)]
    assert all(one.steps == other.steps == 3 * -(-len(USABLE) // 8) for other in others)
    for n in range(one.steps):
        assert all(set(samples(one.step(n))) == set(samples(other.step(n))) for other in others)
    assert samples(one.step(0)) != samples(one.step(one.steps_per_epoch))
    assert samples(one.step(0)) != samples(schedule(1, seed=8, **how).step(0))


@pytest.mark.parametrize(("world", "per_step", "per_micro"), [(1, 8, 2), (2, 8, 1), (4, 8, 2), (3, 12, 2)])
def test_where_the_ranks_divide_a_step_the_plan_is_that_of_the_first_version(world, per_step, per_micro):
    """Runs that were begun with it go on with the same batches."""
    s = schedule(world, per_step, per_micro)
    for number in range(s.steps):
        epoch, at = divmod(number, s.steps_per_epoch)
        order = np.random.default_rng((7, epoch)).permutation(sorted(USABLE))
        mine = sorted(order[at * per_step : (at + 1) * per_step].tolist(), key=lambda i: (-SIZES[i][0], i))
        slots, load = [[] for _ in range(per_step // per_micro)], [0] * (per_step // per_micro)
        for i in mine:
            slot = min((n for n in range(len(slots)) if len(slots[n]) < per_micro), key=lambda n: (load[n], n))
            slots[slot].append(i)
            load[slot] += SIZES[i][0]
        slots = [slots[n] for n in sorted(range(len(slots)), key=lambda n: (-load[n], n))]
        accumulation = len(slots) // world
        assert s.step(number).slots == tuple(tuple(tuple(slots[m * world + rank]) for m in range(accumulation)) for rank in range(world))
        assert s.accumulation == accumulation and s.idle == 0


def test_shape_of_a_step_and_balance_of_ranks():
    s = schedule(2)
    plan = s.step(0)
    assert len(plan.slots) == 2 and all(len(rank) == s.accumulation == 2 for rank in plan.slots)
    weights = [sum(tokens(slot) for slot in rank) for rank in plan.slots]
    assert max(weights) <= 1.25 * min(weights)


@pytest.mark.parametrize(("world", "per_micro", "micro_steps", "idle"), [(3, 1, 3, 1 / 9), (3, 2, 2, 1 / 3), (5, 1, 2, 0.2), (8, 2, 1, 0.5), (7, 1, 2, 3 / 7)])
def test_ranks_that_do_not_divide_a_step_have_as_many_forwards_each(world, per_micro, micro_steps, idle):
    s = schedule(world, per_micro=per_micro)
    assert s.accumulation == micro_steps and s.idle == pytest.approx(idle)
    plan = s.step(0)
    assert all(len(rank) == micro_steps and any(rank) for rank in plan.slots)  # no rank only stands in
    assert all(len(slot) <= per_micro for rank in plan.slots for slot in rank)


def test_more_ranks_than_conversations_and_data_without_rows_are_refused():
    assert schedule(1, max_steps=4).steps == 4
    with pytest.raises(ConfigError, match=r"train\.conversations_per_step=8 gives 9 ranks less than one conversation each: .*at most 8 rank"):
        schedule(9)
    with pytest.raises(ConfigError, match="no supervised rows"):
        schedule(1, sizes=[(10, 0)])


def test_a_smaller_set_lies_within_a_larger_one_and_nothing_else_is_seen():
    keys = [f"{int(n):06x}" for n in np.random.default_rng(1).permutation(53)]
    before = set()
    for most in (1, 7, 20, 53):
        among = chosen(keys, most)
        assert [keys[i] for i in sorted(among, key=lambda i: keys[i])] == sorted(keys)[:most] and before < set(among)
        before = set(among)
        if USABLE & before:
            for how in ({}, {"window": 1, "shard_of": SHARDS}, {"budget": 64}):
                s = schedule(2, among=among, **how)
                seen = [i for n in range(s.steps_per_epoch) for i in samples(s.step(n))]
                assert sorted(seen) == sorted(USABLE & before)
    assert chosen(keys, 0) == list(range(53))
    with pytest.raises(ConfigError, match="max_conversations=54, but the train split holds 53"):
        chosen(keys, 54)


@pytest.mark.parametrize("window", [1, 2, 4, 100])
def test_a_step_reads_the_shards_of_its_window_or_of_two(window):
    s = schedule(1, per_step=4, window=window, shard_of=SHARDS)
    orders = []
    for epoch in range(3):
        shards = SHARDS[s.order(epoch)].tolist()
        first = list(dict.fromkeys(shards))  # shards, in the order in which they are met
        window_of = {shard: n // window for n, shard in enumerate(first)}
        met = [window_of[shard] for shard in shards]
        assert met == sorted(met) and len(first) == len(set(SHARDS[sorted(USABLE)]))  # no shard is gone back to
        for n in range(epoch * s.steps_per_epoch, (epoch + 1) * s.steps_per_epoch):
            windows = {window_of[SHARDS[i]] for i in samples(s.step(n))}
            assert max(windows) - min(windows) <= 1
        orders.append((tuple(first), s.order(epoch).tolist()))
    assert len({first for first, _ in orders}) == 3
    within = [order for order in orders[0][1] if SHARDS[order] == 0]
    assert len(within) > 2 and within != sorted(within)


@settings(max_examples=200, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 400), min_size=1, max_size=60), per_step=st.integers(1, 40), world=st.integers(1, 9), budget=st.integers(1, 500),
    seed=st.integers(0, 9),
)  # fmt: skip
def test_packing(lengths, per_step, world, budget, seed):
    sizes = [(n, 1) for n in lengths]
    if world > per_step:
        return
    s, alone = (schedule(w, per_step, sizes=sizes, budget=budget, seed=seed) for w in (world, 1))
    seen = []
    for number in range(s.steps_per_epoch):
        plan = s.step(number)
        seen += samples(plan)
        assert sorted(samples(plan)) == sorted(samples(alone.step(number)))
        counts = {len(rank) for rank in plan.slots}
        assert len(plan.slots) == world and len(counts) == 1  # as many forwards on every rank
        (count,) = counts
        slots = [slot for rank in plan.slots for slot in rank]
        assert all(tokens(slot, sizes) <= budget or len(slot) == 1 for slot in slots)
        assert 1 <= count <= s.accumulation
        # fewest: no more than first-fit decreasing needs, which two half-full slots would contradict; and never a whole round of stand-ins
        filled = [slot for slot in slots if slot]
        assert len(filled) > (count - 1) * world or _cannot_be_fewer(sizes, samples(plan), budget, (count - 1) * world)
    assert sorted(seen) == list(range(len(lengths)))


def _cannot_be_fewer(sizes, taken, budget, slots):
    """First-fit decreasing, written plainly, needs more than `slots`."""
    room = []
    for length in sorted((sizes[i][0] for i in taken), reverse=True):
        at = next((n for n, free in enumerate(room) if free >= length), None)
        if at is None:
            room.append(max(budget, length))
            at = len(room) - 1
        room[at] -= length
    return len(room) > slots


def test_packed_forwards_are_balanced():
    sizes = [(int(n), 1) for n in np.random.default_rng(3).lognormal(6, 0.6, 64).clip(50, 2000)]
    plan = schedule(4, 64, sizes=sizes, budget=4096).step(0)
    loads = [tokens(slot, sizes) for rank in plan.slots for slot in rank]
    assert min(loads) > 0.9 * max(loads)


def test_threads_that_ask_at_once_get_the_same_plans_and_the_order_is_made_once_an_epoch(monkeypatch):
    plain, made = np.random.default_rng, []
    s = schedule(2, budget=80)
    wanted = [schedule(2, budget=80).step(n) for n in range(s.steps)]
    monkeypatch.setattr(np.random, "default_rng", lambda seed: made.append((seed, threading.get_ident())) or plain(seed))
    assert [s.step(n) for n in range(s.steps)] == wanted and len(made) == 3
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(schedule(2, budget=80).step, range(s.steps))) == wanted


def test_the_state_of_the_loader_is_that_of_any_world_and_names_what_changed():
    s = schedule(2, data="abc", budget=70)
    state = s.state(9)
    assert (state["epoch"], state["step_in_epoch"]) == divmod(9, s.steps_per_epoch)
    for world, how in ((1, {}), (3, {}), (4, {"budget": 200})):
        schedule(world, data="abc", **how).check(state, 9)
    changes = [
        ({"seed": 8}, "seed: there 7, now 8"), ({"data": "other"}, "data: there abc, now other"), ({"per_step": 9}, "conversations_per_step: there 8, now 9"),
        ({"window": 2, "shard_of": SHARDS}, "shuffle_shards: there 0, now 2"), ({"among": range(50)}, "conversations: there"),
    ]  # fmt: skip
    for changed, named in changes:
        with pytest.raises(KvshotError, match=named):
            schedule(2, **{"data": "abc", **changed}).check(state, 9)
    with pytest.raises(KvshotError, match=r"the checkpoint at step 8 stands elsewhere in the data .*step_in_epoch: there"):
        s.check(state, 8)
    with pytest.raises(KvshotError, match="order: there 0000"):
        s.check({**state, "order": "0000"}, 9)  # as if numpy permuted otherwise
