"""Every family against the second implementation of slow.py, at every row and step."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from kvshot_ds.objectives.alignment import plan_rows, training_start
from tests import toys
from tests.drafters.slow import Slow

STEPS = 4
CASES = [(name, "llama") for name in toys.FAMILIES] + [
    (name, geometry)
    for geometry in ("qwen2", "qwen3")
    for name in ("hidden_only-3", "kv_only-head_concat", "kv_only-hidden_to_kv", "kv_only-mlp", "hybrid-2", "dflash-2", "kv_block-per_layer", "hybrid_block-2")
]


@pytest.mark.parametrize(("name", "family"), CASES)
def test_every_row_and_step(name, family):
    g = toys.geometry(family)
    drafter, batch = toys.drafter(name, g), toys.batch(g).to("cpu", torch.float64)
    config = toys.FAMILIES[name]
    drafter.rotary._inv_freq = {"cpu": 100.0 ** (-torch.arange(0, 8, 2, dtype=torch.float64) / 8)}  # fp32 in use; exact here
    plan = plan_rows(batch, STEPS)
    got = drafter.unroll(training_start(batch, plan), plan.tokens).h
    starts = [0, *torch.tensor(batch.lengths).cumsum(0).tolist()]
    checked = 0
    with torch.no_grad():
        slow = [
            Slow(drafter, config, batch.tokens[lo:hi].tolist(), *({i: x[lo:hi] for i, x in t.items()} for t in (batch.hidden, batch.keys_of, batch.values_of)))
            for lo, hi in pairwise(starts)
        ]
        for row, (anchor, c) in enumerate(zip(plan.anchors.tolist(), plan.conversation.tolist(), strict=True)):
            t = anchor - starts[c]
            wanted = slow[c].block(t, STEPS) if name in toys.BLOCK_FAMILIES else slow[c].steps(t, STEPS)
            for k, want in enumerate(wanted):
                if plan.valid[k, row]:
                    torch.testing.assert_close(got[k][row], want, rtol=1e-9, atol=1e-9)
                    checked += 1
    assert checked == int(plan.valid.sum())
    assert (got[0, 0] - got[1, 0]).abs().max() > 1e-3, "steps so alike that a shift would go unseen"
