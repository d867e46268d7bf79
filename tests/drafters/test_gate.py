"""The gate: kinds against the formula, schedules, and gradients."""

import pytest
import torch

from kvshot_ds.config import GateConfig, HybridConfig
from kvshot_ds.drafters.build import build_drafter
from kvshot_ds.drafters.gate import GatedDelta
from kvshot_ds.errors import ConfigError
from tests import toys

KINDS = ("elementwise", "per_head", "scalar", "none")


def gate(**options) -> GatedDelta:
    made = GatedDelta(toys.geometry(), GateConfig(**options)).double()
    for p in made.parameters():
        torch.nn.init.normal_(p, 0, 0.4, generator=torch.Generator().manual_seed(p.numel()))
    return made


def paths(rows=3) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(torch.randn(rows, 24, generator=torch.Generator().manual_seed(s), dtype=torch.float64) for s in (1, 2))


@pytest.mark.parametrize(("kind", "gates", "channels"), [("elementwise", 24, 1), ("per_head", 4, 6), ("scalar", 1, 24)])
def test_kinds(kind, gates, channels):
    """g = sigmoid(W_g [n; o; o - n] + b_g), each gate over its channels; row by row."""
    made, (n, o) = gate(kind=kind), paths()
    h, shown = made(n, o)
    for row in range(len(n)):
        g = torch.sigmoid(made.gate_proj.weight @ torch.cat((n[row], o[row], o[row] - n[row])) + made.gate_proj.bias)
        assert len(g) == gates
        want = n[row] + torch.stack([g[c // channels] for c in range(24)]) * (made.delta_proj.weight @ (o[row] - n[row]))
        torch.testing.assert_close(h[row], want, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(shown[row], g, rtol=1e-12, atol=1e-12)


def test_no_gate():
    made, (n, o) = gate(kind="none"), paths()
    h, shown = made(n, o)
    torch.testing.assert_close(h, n + (o - n) @ made.delta_proj.weight.T)
    assert shown is None


@pytest.mark.parametrize("floor", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("kind", KINDS)
def test_gradcheck(kind, floor):
    made, (n, o) = gate(kind=kind), paths(2)
    made.floor.fill_(floor)
    parameters = list(made.parameters())
    assert torch.autograd.gradcheck(lambda n, o, *_: made(n, o)[0], (n.requires_grad_(), o.requires_grad_(), *parameters))


def test_schedule():
    config = GateConfig(open_steps=2, floor=0.5, floor_steps=5)
    assert [config.floor_at(s) for s in range(9)] == [1, 1, 0.5, 0.4, pytest.approx(0.3), 0.2, pytest.approx(0.1), 0, 0]
    assert config.scheduled_steps == 7
    assert [GateConfig(open_steps=1).floor_at(s) for s in (0, 1)] == [1, 0]


def test_an_open_gate_is_one_and_learns_nothing_while_the_delta_does():
    made, (n, o) = gate(open_steps=1, init="bias:-3"), paths()
    made.reset()
    made.at_step(0)
    h, shown = made(n, o)
    torch.testing.assert_close(h, n + (o - n) @ made.delta_proj.weight.T)
    assert (shown == 1).all()
    h.square().sum().backward()
    assert made.gate_proj.weight.grad.abs().max() == 0 < made.delta_proj.weight.grad.abs().max()
    made.at_step(1)
    assert 0.04 < made(n, o)[1].max() < 0.05


def test_a_floor_keeps_the_gradient_of_a_closed_gate_alive():
    def kv_gradient(**options) -> float:
        made, (n, o) = gate(init="bias:-30", **options), paths()
        made.reset()
        made.at_step(0)
        made(n, o.requires_grad_())[0].sum().backward()
        return float(o.grad.abs().max())

    assert kv_gradient() < 1e-9 < 0.01 < kv_gradient(floor=0.5, floor_steps=10)


def test_the_schedule_is_no_part_of_what_is_saved_and_over_when_the_drafter_is_used():
    drafter = build_drafter(HybridConfig(gate={"open_steps": 3}), toys.geometry(), 24)
    drafter.at_step(0)
    assert drafter.layers[0].mix.floor == 1
    assert not [name for name in drafter.state_dict() if "floor" in name]
    again = build_drafter(HybridConfig(gate={"open_steps": 3}), toys.geometry(), 24)
    again.load_state_dict(drafter.state_dict())
    assert again.layers[0].mix.floor == 0


def test_heads_that_do_not_divide_the_width():
    g = toys.geometry()
    with pytest.raises(ConfigError, match="per_head: a width of 24 cannot be shared by 5 heads"):
        GatedDelta(type(g)(**{**g.to_json(), "heads": 5}), GateConfig(kind="per_head"))
