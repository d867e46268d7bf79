"""The drafters against a second implementation, written from the papers' formulas: one row at a time, plain loops, weights by name.

Shares no code with the package: its own norm, rotation (by complex numbers), attention, gate and bookkeeping of positions.
"""

from __future__ import annotations

import pytest
import torch

from kvshot_ds.drafters.state import DraftState
from kvshot_ds.objectives.alignment import plan_rows, training_start
from tests import toys

STEPS = 4


def norm(x, weight, eps=1e-5):
    return x / torch.sqrt((x * x).mean() + eps) * weight


def turn(x, position, base=100.0, inverse=False):
    """x [D] rotated to `position`: pairs (i, i + D/2) as complex numbers times exp(i * position * base^(-2i/D))."""
    half = len(x) // 2
    z = torch.complex(x[:half], x[half:])
    angle = (-1 if inverse else 1) * position * base ** (-2 * torch.arange(half, dtype=torch.float64) / len(x))
    z = z * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((z.real, z.imag))


class Slow:
    """One drafter of depth 1 for one conversation: tokens [S], hidden, keys, values by target layer."""

    def __init__(self, drafter, tokens, hidden, keys, values):
        self.w = {k: v.double() for k, v in drafter.state_dict().items()}
        self.g, self.tokens, self.hidden, self.keys, self.values = drafter.g, tokens, hidden, keys, values
        self.embedding = drafter._embedding[0].double()
        self.family = drafter.family
        self.fused_layers, self.kv_layers = getattr(drafter, "hidden_layers", None), getattr(drafter, "kv_layers", None)

    def heads(self, name, u, count):
        return (self.w[f"layers.0.{name}.weight"] @ u).view(count, self.g.head_dim)

    def kv(self, path, u, position):
        k = [turn(h, position) for h in self.heads(f"{path}.k_proj", u, self.g.kv_heads)]
        return k, list(self.heads(f"{path}.v_proj", u, self.g.kv_heads))

    def attend(self, path, u, position, memory):
        out = []
        for a, q in enumerate(self.heads(f"{path}.q_proj", u, self.g.heads)):
            h = a // (self.g.heads // self.g.kv_heads)
            q = turn(q, position)
            scores = torch.stack([q @ k[h] for k, _ in memory]) / self.g.head_dim**0.5
            out.append(torch.softmax(scores, 0) @ torch.stack([v[h] for _, v in memory]))
        return self.w[f"layers.0.{path}.o_proj.weight"] @ torch.cat(out)

    def input(self, token, hidden):
        """Attention input and residual."""
        x = norm(self.embedding[token], self.w["layers.0.input_layernorm.weight"])
        if self.family == "kv_only":
            return x, self.embedding[token]
        return torch.cat((x, norm(hidden, self.w["layers.0.hidden_norm.weight"]))), hidden

    def fused(self, t):
        return self.w["fc.weight"] @ torch.cat([self.hidden[i][t] for i in self.fused_layers])

    def target_memory(self, t):
        """Target KV at position t: keys un-rotated, projected, rotated again (linear_rope)."""
        plain = torch.cat([turn(head, t, inverse=True) for i in self.kv_layers for head in self.keys[i][t]])
        values = torch.cat([self.values[i][t].flatten() for i in self.kv_layers])
        k = (self.w["layers.0.projector.k_proj.weight"] @ plain).view(self.g.kv_heads, -1)
        v = (self.w["layers.0.projector.v_proj.weight"] @ values).view(self.g.kv_heads, -1)
        return [turn(h, t) for h in k], list(v)

    def row(self, t):
        """Outputs h of the K steps of the row anchored at t, while tokens last."""
        own = []  # self path: its step-0 entry of every position up to t (token j + 1 at rotary position j)
        cross = []  # cross path: the target's entries up to t
        if self.family != "kv_only":
            own = [self.kv("self_attn", self.input(self.tokens[j + 1], self.fused(j))[0], j) for j in range(t)]
        if self.family != "hidden_only":
            cross = [self.target_memory(j) for j in range(t + 1)]
        hidden = self.fused(t) if self.family != "kv_only" else None
        outputs = []
        for k in range(STEPS):
            if t + 1 + k >= len(self.tokens):
                break
            u, residual = self.input(self.tokens[t + 1 + k], hidden)
            n = o = None
            if self.family != "kv_only":
                own.append(self.kv("self_attn", u, t + k))
                n = self.attend("self_attn", u, t + k, own)
            if self.family != "hidden_only":
                cross.append(self.kv("cross_attn", u, t + 1 + k))
                o = self.attend("cross_attn", u, t + 1 + k, cross)
            h = residual + self.mixed(n, o)
            x = norm(h, self.w["layers.0.post_attention_layernorm.weight"])
            gate = self.w["layers.0.mlp.gate_proj.weight"] @ x
            hidden = h + self.w["layers.0.mlp.down_proj.weight"] @ (gate * torch.sigmoid(gate) * (self.w["layers.0.mlp.up_proj.weight"] @ x))
            outputs.append(hidden)
        return outputs

    def mixed(self, n, o):
        if n is None or o is None:
            return n if o is None else o
        g = torch.sigmoid(self.w["layers.0.mix.gate_proj.weight"] @ torch.cat((n, o, o - n)) + self.w["layers.0.mix.gate_proj.bias"])
        return n + g * (self.w["layers.0.mix.delta_proj.weight"] @ (o - n))


@pytest.mark.parametrize("name", ["hidden_only-1", "kv_only-1", "hybrid-1"])
def test_every_row_and_step(name):
    g = toys.geometry()
    drafter, batch = toys.drafter(name, g), toys.batch(g).to("cpu", torch.float64)
    if name == "hybrid-1":  # a bias that is not zero, a projector that is not the identity
        with torch.no_grad():
            drafter.layers[0].mix.gate_proj.bias.normal_()
    if name != "hidden_only-1":
        with torch.no_grad():
            for p in drafter.layers[0].projector.parameters():
                p.normal_(0, 0.3)
    plan = plan_rows(batch, STEPS)
    state = DraftState.empty(drafter.depth)
    got = [drafter.begin(state, training_start(batch, plan))]
    got += [drafter.forward_step(state, plan.tokens[k], k) for k in range(1, STEPS)]
    starts = [0, *torch.tensor(batch.lengths).cumsum(0).tolist()]
    checked = 0
    for row, (anchor, c) in enumerate(zip(plan.anchors.tolist(), plan.conversation.tolist(), strict=True)):
        mine = slice(starts[c], starts[c + 1])
        cut = [{i: x[mine] for i, x in tensors.items()} for tensors in (batch.hidden, batch.keys_of, batch.values_of)]
        for k, want in enumerate(Slow(drafter, batch.tokens[mine].tolist(), *cut).row(anchor - starts[c])):
            if plan.valid[k, row]:
                torch.testing.assert_close(got[k][row], want, rtol=1e-6, atol=1e-6)  # rotations are fp32 in the package
                checked += 1
    assert checked == int(plan.valid.sum())
