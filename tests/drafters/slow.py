"""A second implementation of every drafter, written from the papers' formulas: one row at a time, plain loops, weights by name.

Shares no code with the package: its own norm, rotation (by complex numbers), attention, gate and bookkeeping of positions.
"""

from __future__ import annotations

import torch


def norm(x, weight, eps=1e-5):
    return x / torch.sqrt((x * x).mean() + eps) * weight


def turn(x, position, base=100.0, inverse=False):
    """x [D] rotated to `position`: pairs (i, i + D/2) as complex numbers times exp(i * position * base^(-2i/D))."""
    half = len(x) // 2
    z = torch.complex(x[:half], x[half:])
    angle = (-1 if inverse else 1) * position * base ** (-2 * torch.arange(half, dtype=torch.float64) / len(x))
    z = z * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((z.real, z.imag))


def silu(x):
    return x * torch.sigmoid(x)


class Slow:
    """One drafter for one conversation: tokens [S], hidden, keys, values by target layer (each [S, ...])."""

    def __init__(self, drafter, config, tokens, hidden, keys, values):
        self.w = {k: v.double() for k, v in drafter.state_dict().items()}
        self.g, self.config, self.tokens, self.hidden, self.keys, self.values = drafter.g, config, tokens, hidden, keys, values
        self.embedding, self.depth = drafter.lent[0].double(), config.depth
        self.self_path = "layers.0.self_attn.q_proj.weight" in self.w
        self.cross_path = "layers.0.cross_attn.q_proj.weight" in self.w
        self.wide = "layers.0.hidden_norm.weight" in self.w
        self.seen: dict[int, tuple[list, torch.Tensor]] = {}

    # the target's layers, from the words of the configuration

    def fused_layers(self):
        named, L = self.config.hidden_layers, self.g.num_layers
        uniform = [round(1 + i * (L - 4) / (self.depth - 1)) for i in range(self.depth)] if self.depth > 1 else [L // 2]
        return {"eagle3": [1, L // 2 - 1, L - 4], "last": [L - 1], "all": list(range(L)), "dflash": uniform}.get(named, named)

    def memory_layers(self):
        kv, L = self.config.kv, self.g.num_layers
        if kv.injection == "hidden_to_kv" and kv.layers == "eagle3":
            return [1, L // 2 - 1, L - 4]
        return {"eagle3": [2, L // 2, L - 3], "all": list(range(L))}.get(kv.layers, kv.layers)

    # pieces

    def linear(self, name, x):
        y = self.w[f"{name}.weight"] @ x
        return y + self.w[f"{name}.bias"] if f"{name}.bias" in self.w else y

    def maybe_norm(self, name, x):
        return norm(x, self.w[f"{name}.weight"]) if f"{name}.weight" in self.w else x

    def heads(self, path, which, u, position):
        heads = self.linear(f"{path}.{which}_proj", u).view(-1, self.g.head_dim)
        if which == "v":
            return list(heads)
        return [turn(self.maybe_norm(f"{path}.{which}_norm", h), position) for h in heads]

    def kv(self, path, u, position):
        return self.heads(path, "k", u, position), self.heads(path, "v", u, position)

    def attend(self, path, u, position, memory):
        out = []
        queries = self.heads(path, "q", u, position)
        for a, q in enumerate(queries):
            h = a // (self.g.heads // self.g.kv_heads)
            scores = torch.stack([q @ k[h] for k, _ in memory]) / self.g.head_dim**0.5
            out.append(torch.softmax(scores, 0) @ torch.stack([v[h] for _, v in memory]))
        return self.linear(f"{path}.o_proj", torch.cat(out))

    def projected(self, i, which, x):
        p = f"layers.{i}.projector"
        y = self.linear(f"{p}.{which}_proj", x)
        if f"{p}.{which}_mlp.up_proj.weight" in self.w:
            y = y + self.linear(f"{p}.{which}_mlp.down_proj", silu(self.linear(f"{p}.{which}_mlp.up_proj", self.maybe_norm(f"{p}.{which}_mlp.norm", x))))
        return y.view(self.g.kv_heads, self.g.head_dim)

    def target_memory(self, i, j):
        """What draft layer i reads of target position j: keys and values by head."""
        injection, layers = self.config.kv.injection, self.memory_layers()
        if injection == "per_layer":
            return list(self.keys[layers[i]][j]), list(self.values[layers[i]][j])
        if injection == "head_concat":
            return [h for at in layers for h in self.keys[at][j]], [h for at in layers for h in self.values[at][j]]
        if injection == "hidden_to_kv":
            x = torch.cat([norm(self.hidden[at][j], self.w[f"layers.{i}.projector.norms.{n}.weight"]) for n, at in enumerate(layers)])
            k, v = self.projected(i, "k", x), self.projected(i, "v", x)
        else:
            back = injection == "linear_rope"
            k = self.projected(i, "k", torch.cat([turn(h, j, inverse=True) if back else h for at in layers for h in self.keys[at][j]]))
            v = self.projected(i, "v", torch.cat([self.values[at][j].flatten() for at in layers]))
        k = [self.maybe_norm(f"layers.{i}.projector.k_norm", h) for h in k]
        return (list(k) if injection == "linear" else [turn(h, j) for h in k]), list(v)

    def prefix(self, i, t):
        return [self.target_memory(i, j) for j in range(t + 1)] if self.cross_path and self.config.kv.injection != "none" else []

    def mixed(self, i, n, o):
        if n is None or o is None:
            return n if o is None else o
        moved = self.w[f"layers.{i}.mix.delta_proj.weight"] @ (o - n)
        if self.config.gate.kind == "none":
            return n + moved
        g = torch.sigmoid(self.linear(f"layers.{i}.mix.gate_proj", torch.cat((n, o, o - n))))
        return n + g.repeat_interleave(len(n) // len(g)) * moved

    def fed(self, i, h):
        x = norm(h, self.w[f"layers.{i}.post_attention_layernorm.weight"])
        m = f"layers.{i}.mlp"
        return h + self.linear(f"{m}.down_proj", silu(self.linear(f"{m}.gate_proj", x)) * self.linear(f"{m}.up_proj", x))

    def fused(self, t):
        states = [self.hidden[i][t] for i in self.fused_layers()]
        return self.w["fc.weight"] @ torch.cat([self.maybe_norm(f"fc_norm.{n}", h) for n, h in enumerate(states)])

    # test-time training: step by step

    def step(self, token, hidden, at_self, at_cross, own, cross):
        """One step through all layers; own[i], cross[i]: entries visible before it; both are extended. Returns h and each layer's attention input."""
        x, inputs = self.embedding[token], []
        for i in range(self.depth):
            u, residual = norm(x, self.w[f"layers.{i}.input_layernorm.weight"]), x
            if self.wide and i == 0:
                normed = norm(hidden, self.w["layers.0.hidden_norm.weight"])
                u, residual = torch.cat((u, normed)), normed if self.config.norm_before_residual else hidden
            inputs.append(u)
            n = o = None
            if self.self_path:
                own[i].append(self.kv(f"layers.{i}.self_attn", u, at_self))
                n = self.attend(f"layers.{i}.self_attn", u, at_self, own[i])
            if self.cross_path:
                cross[i].append(self.kv(f"layers.{i}.cross_attn", u, at_cross))
                o = self.attend(f"layers.{i}.cross_attn", u, at_cross, cross[i])
            x = self.fed(i, residual + self.mixed(i, n, o))
        return x, inputs

    def first(self, t):
        """Step 0 at position t: its layers' attention inputs, and h. The self path of the steps before it is its prefix."""
        if t not in self.seen:
            own = [[self.kv(f"layers.{i}.self_attn", self.first(j)[0][i], j) for j in range(t)] if self.self_path else [] for i in range(self.depth)]
            hidden = self.fused(t) if self.wide else None
            h, inputs = self.step(self.tokens[t + 1], hidden, t, t + 1, own, [self.prefix(i, t) for i in range(self.depth)])
            self.seen[t] = inputs, h
        return self.seen[t]

    def steps(self, t, count):
        """h of steps 0, 1, … of the row anchored at t, while tokens last."""
        own = [[self.kv(f"layers.{i}.self_attn", self.first(j)[0][i], j) for j in range(t + 1)] if self.self_path else [] for i in range(self.depth)]
        cross = [self.prefix(i, t) for i in range(self.depth)]
        if self.cross_path:
            for i, u in enumerate(self.first(t)[0]):
                cross[i].append(self.kv(f"layers.{i}.cross_attn", u, t + 1))
        outputs = [self.first(t)[1]]
        for k in range(1, min(count, len(self.tokens) - t - 1)):
            hidden = norm(outputs[-1], self.w["norm.weight"]) if getattr(self.config, "norm_output", False) else outputs[-1]
            if getattr(self.config, "carry", "own") == "none":
                hidden = self.embedding[self.tokens[t + 1 + k]]
            outputs.append(self.step(self.tokens[t + 1 + k], hidden, t + k, t + 1 + k, own, cross)[0])
        return outputs

    # blocks: all at once

    def block(self, t, count):
        """h of slots 1 … count of the block after anchor t."""
        size = self.config.block_size
        mask = self.embedding[self.config.mask_token_id] if self.config.mask_token_id is not None else self.w["mask_embedding"]
        xs = [self.embedding[self.tokens[t + 1]], *[mask] * (size - 1)]
        at = [t + 1 + s for s in range(size)]
        context = []
        if self.self_path:
            context = [
                norm(self.w["fc.weight"] @ torch.cat([self.hidden[i][j] for i in self.fused_layers()]), self.w["hidden_norm.weight"]) for j in range(t + 1)
            ]
        for i in range(self.depth):
            us = [norm(x, self.w[f"layers.{i}.input_layernorm.weight"]) for x in xs]
            own = [self.kv(f"layers.{i}.self_attn", c, j) for j, c in enumerate(context)]
            if self.self_path:
                own += [self.kv(f"layers.{i}.self_attn", u, p) for u, p in zip(us, at, strict=True)]
            cross = self.prefix(i, t)
            if self.cross_path:
                cross += [self.kv(f"layers.{i}.cross_attn", u, p) for u, p in zip(us, at, strict=True)]
            out = []
            for x, u, p in zip(xs, us, at, strict=True):
                n = self.attend(f"layers.{i}.self_attn", u, p, own) if self.self_path else None
                o = self.attend(f"layers.{i}.cross_attn", u, p, cross) if self.cross_path else None
                out.append(self.fed(i, x + self.mixed(i, n, o)))
            xs = out
        return xs[1 : count + 1]
