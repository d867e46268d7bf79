"""Nothing in a step reads a value back from the device: on the meta device there is none to read."""

from __future__ import annotations

import pytest
import torch

from kvshot_ds.config import ObjectiveConfig
from kvshot_ds.objectives.alignment import plan_rows
from kvshot_ds.objectives.objective import Objective
from kvshot_ds.training.watch import Meter
from tests import toys

STEPS, META = 2, torch.device("meta")
OBJECTIVES = [
    {"kv_branch_weight": 1.0, "query_distill_weight": 1.0, "weights": "dpace"},
    {"query_distill_weight": 1.0, "weights": "exponential"},
    {"loss": "hard_ce", "weights": "dpace"},
    {"loss": "kl", "drift": "offline"},
    {"loss": "lk_alpha", "anchors": 2},
    {"loss": "lk_lambda", "kv_gradient_scale": 50.0},
]


# All objectives on one family, and on every other what reads most of it. The meta device is slow: small cases only.
BRANCHES, QUERIES, HARD, OFFLINE, ALPHA, LAMBDA = range(len(OBJECTIVES))
CASES = [
    *(("hybrid-1", number) for number in range(len(OBJECTIVES))),
    ("eagle31", OFFLINE),
    ("kv_only-none", HARD),
    ("kv_only-mlp_norm", LAMBDA),
    ("kv_only-head_concat", QUERIES),
    ("kv_only-hidden_to_kv", HARD),
    ("hybrid-per_head", BRANCHES),
    ("hybrid-cross_only", QUERIES),
    ("dflash-2", HARD),
    ("kv_block-per_layer", QUERIES),
    ("hybrid_block-2", BRANCHES),
]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(("name", "number"), CASES)
def test_forward_backward_and_metrics(name, number, recompute):
    config = ObjectiveConfig(steps=STEPS, **OBJECTIVES[number])
    drafter = toys.drafter(name, dtype=torch.float32)
    batch = toys.batch(drafter.g, toys.TURNS[2:])
    plan = plan_rows(batch, STEPS, anchors=config.anchors, offline=config.drift == "offline").to(META)
    drafter.set_vocab(torch.arange(toys.DRAFT_VOCAB))
    embedding = torch.empty(toys.VOCAB, drafter.g.hidden_size, device=META)
    drafter = drafter.to(META)
    drafter.bind(embedding, embedding)
    drafter.recompute = recompute
    for layer in drafter.draft_layers:
        if layer.cross_attn is not None:
            layer.cross_attn.kv_gradient_scale = config.kv_gradient_scale
    drafter.at_step(0)
    one, meter = torch.ones((), device=META), Meter(STEPS, META)
    out = Objective(drafter, config, embedding)(batch.to(META, torch.float32), plan, one)
    out.loss.backward()
    meter.add(out, plan, one, True, 1)
    assert all(p.grad is not None for p in drafter.parameters())  # no weight is left out of the loss either


def test_the_meta_device_shows_what_waits():
    x = torch.ones(3, device=META)
    for wait in (lambda: x.sum().item(), x.tolist, lambda: bool(x.sum()), lambda: x[x > 0], x.nonzero, x.cpu):
        with pytest.raises((RuntimeError, NotImplementedError)):
            wait()
