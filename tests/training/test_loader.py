"""The order of conversations: each exactly once per epoch, the same optimizer steps whatever the number of ranks."""

import numpy as np
import pytest

from kvshot_ds.errors import ConfigError
from kvshot_ds.training.loader import Schedule

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
