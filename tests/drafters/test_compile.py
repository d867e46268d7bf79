"""torch.compile of the layers' dense parts: the same numbers, and one compilation for all lengths."""

import pytest
import torch

from kvshot_ds.objectives.alignment import plan_rows, training_start
from tests import toys

TURNS = [[0] * 5 + [1] * n for n in (9, 17, 6, 30)]


@pytest.mark.parametrize(("name", "backend"), [("hidden_only-1", "inductor"), ("hybrid-2", "aot_eager"), ("hybrid_block-2", "aot_eager")])
def test_agrees_and_never_recompiles(name, backend):
    g = toys.geometry("qwen3")
    plain, compiled = (toys.drafter(name, g, torch.float32, scale=4.0) for _ in range(2))
    torch._dynamo.reset()
    compiled.compile_layers(backend)
    for number, turn in enumerate(TURNS):
        batch = toys.batch(g, [turn])
        plan = plan_rows(batch, 4)
        found = []
        with torch._dynamo.config.patch(error_on_recompile=number > 0):
            for drafter in (plain, compiled):
                h = drafter.unroll(training_start(batch, plan), plan.tokens).h
                drafter.zero_grad()
                h.square().mean().backward()
                found.append((h, {k: p.grad for k, p in drafter.named_parameters() if p.grad is not None}))
        (h, want), (again, got) = found
        torch.testing.assert_close(again, h, rtol=1e-4, atol=1e-4)
        assert got.keys() == want.keys()
        for key in want:
            torch.testing.assert_close(got[key], want[key], rtol=1e-3, atol=1e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    torch._dynamo.reset()
