"""Counted cost against torch's own counter over real forwards and backwards, and against sums written out by hand."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from kvshot_ds.config import BlockConfig, DFlashConfig, HiddenOnlyConfig, HybridConfig, KVOnlyConfig
from kvshot_ds.drafters import layer as layer_module
from kvshot_ds.drafters.attention import Span
from kvshot_ds.drafters.cost import GROUPS, Cost, cost, parameters, total, weightless
from kvshot_ds.drafters.state import DraftState, Keep, Rows, Start
from tests import toys

G = toys.geometry()
D, FFN, A, KV = G.hidden_size, G.intermediate_size, G.heads * G.head_dim, G.kv_heads * G.head_dim
CONTEXT, LENGTH = 9, 4


@cache
def costed(name: str) -> Cost:
    return cost(toys.FAMILIES[name], G, toys.DRAFT_VOCAB)


def start(positions: int, first: int, rows: int = 1, room: int = 0) -> Start:
    """Positions first .. first + positions - 1 of one document, whose last `rows` are unrolled. room: of a memory that keeps them."""
    at = torch.arange(first, first + positions)
    kv = {i: torch.randn(positions, G.kv_heads, G.head_dim, dtype=torch.float64) for i in range(G.num_layers)}
    spans = (Span(0, positions, 0, first),), (Span(0, rows, 0, first + positions - rows),)
    hidden = {i: torch.randn(positions, D, dtype=torch.float64) for i in range(G.num_layers)}
    select = torch.arange(positions - rows, positions)
    keep = Keep(at, room) if room else None
    return Start(at % toys.VOCAB, hidden, kv, kv, Rows(at, spans[0]), Rows(at[-rows:], spans[1]), select, keep)


def matrix_products(call: Callable[[], Any]) -> int:
    """FLOPs of the matrix products of `call`, by torch's counter. Attention's own products have a batch dimension."""
    with FlopCounterMode(display=False) as counter:
        call()
    return sum(n for op, n in counter.get_flop_counts()["Global"].items() if op in (torch.ops.aten.mm, torch.ops.aten.addmm))


@pytest.mark.parametrize("name", toys.FAMILIES)
def test_training_counts_every_matrix_product_forward_and_backward(name: str) -> None:
    drafter, positions, rows, steps = toys.drafter(name, G), 12, 5, 3
    c = costed(name)

    def forward() -> torch.Tensor:
        return drafter.unroll(start(positions, 0, rows), torch.ones(steps, rows, dtype=torch.int64)).h

    def counted(passes: Callable[[Any], int]) -> int:
        return sum(2 * m.size * passes(m) * (positions * m.given.position + rows * m.given.over(steps)) for m in c.gemms)

    assert matrix_products(forward) == counted(lambda m: 1)
    assert matrix_products(lambda: forward().sum().backward()) == counted(lambda m: m.passes)
    work = c.training(steps, CONTEXT)
    gemms = sum(positions * f.position + rows * f.unit for part, f in work.items() if part not in ("attention", "head", "teacher"))
    assert gemms == counted(lambda m: m.passes)


@pytest.mark.parametrize("name", toys.FAMILIES)
def test_drafting_counts_every_matrix_product_and_every_pair_of_query_and_key(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter, c, new = toys.drafter(name, G), costed(name), 1
    length = c.block or LENGTH
    state = DraftState.empty(drafter.depth)
    drafter.draft(state, start(CONTEXT - new, 0, room=CONTEXT), length)
    pairs, attend = [], layer_module.merged_attention

    def watched(q: torch.Tensor, prefix: Any, steps: Any, spans: Any, scale: float, hidden: Any) -> torch.Tensor:
        n, b, heads, width = q.shape
        seen = sum(span.anchor + i - span.start + 1 for span in spans for i in range(span.count)) if prefix is not None else 0
        pairs.append(b * (seen + n * len(steps)) * heads * width)
        return attend(q, prefix, steps, spans, scale, hidden)

    monkeypatch.setattr(layer_module, "merged_attention", watched)
    counted = matrix_products(lambda: drafter.draft(state, start(new, CONTEXT - new, room=CONTEXT), length))
    work = c.drafting(LENGTH, CONTEXT)
    attention = work.pop("attention")
    assert counted == pytest.approx(sum(length * f.unit + new * f.position for f in work.values()), rel=1e-12)
    assert 4 * sum(pairs) == pytest.approx(length * attention.unit + new * attention.position, rel=1e-12)


def test_hidden_only_by_hand() -> None:
    """EAGLE-3's layer: q, k, v from 2d, o, and an MLP of three matrices; the head over the draft vocabulary."""
    c, steps = costed("hidden_only-1"), 7
    qo, kv, mlp, head = 2 * D * A + A * D, 2 * 2 * D * KV, 3 * D * FFN, D * toys.DRAFT_VOCAB
    fc = 3 * D * D
    assert c.trainable == fc + qo + kv + mlp + head + 4 * D
    assert c.parameters | {"norms": 0} == dict.fromkeys(GROUPS, 0) | {"fusion": fc, "self": qo + kv, "mlp": mlp, "head": head}
    assert c.lent == {"embedding": toys.VOCAB * D}
    pairs = sum(CONTEXT + k for k in range(steps))  # step k: the context, and one entry of each later step
    # A row's q, o, MLP and head at every step, its k and v from step 1 on; fc needs no gradient of its input.
    row = 3 * (2 * steps * (qo + mlp + head) + 2 * (steps - 1) * kv + 4 * A * pairs) + 2 * head
    assert total(c.training(steps, CONTEXT)) == (row, 2 * 2 * fc + 3 * 2 * kv)
    unit = 2 * (qo + mlp + head) + (2 * (steps - 1) * kv + 4 * A * pairs) / steps
    assert total(c.drafting(steps, CONTEXT)) == pytest.approx((unit, 2 * fc + 2 * kv))


def test_dflash_by_hand() -> None:
    """One forward of B slots, of which B - 1 propose; the frozen head has no gradient of its own."""
    c = cost(DFlashConfig(depth=1, block_size=4), G, toys.DRAFT_VOCAB)
    qo, kv, mlp, head, fc = 2 * D * A, 2 * D * KV, 3 * D * FFN, D * toys.DRAFT_VOCAB, D * D
    assert c.trainable == fc + qo + kv + mlp + 4 * D + D and c.parameters["other"] == D and c.parameters["head"] == 0
    assert c.lent == {"embedding": toys.VOCAB * D, "head": head}
    block = 2 * 4 * (qo + kv + mlp) + 4 * A * 4 * (CONTEXT + 4)
    assert total(c.training(3, CONTEXT)) == (3 * block + 2 * 2 * 3 * head + 2 * head, 2 * 2 * fc + 3 * 2 * kv)
    assert c.training(7, CONTEXT) == c.training(3, CONTEXT)  # three masks, three steps
    assert total(c.drafting(7, CONTEXT)) == pytest.approx((block / 3 + 2 * head, 2 * fc + 2 * kv))


def test_the_context_is_read_by_attention_alone_and_not_at_all_without_target_information() -> None:
    def growth(name: str) -> float:
        c = costed(name)
        short, long = total(c.drafting(LENGTH, 100)), total(c.drafting(LENGTH, 300))
        return (long.unit - short.unit) / 200

    assert growth("kv_only-1") == 4 * A and growth("kv_only-none") == 0 and growth("hybrid-1") == 2 * 4 * A
    assert growth("kv_only-head_concat") == 2 * 3 * 4 * A  # two layers, three copies of the target's heads each


@pytest.mark.parametrize("name", toys.FAMILIES)
def test_groups_hold_every_parameter_once(name: str) -> None:
    drafter = toys.drafter(name, G)
    found = parameters(drafter)
    assert sum(found.values()) == sum(p.numel() for p in drafter.parameters()) == costed(name).trainable
    own_mask = getattr(drafter, "mask_embedding", None) is not None
    assert found["other"] == (D if own_mask else 0)
    assert bool(found["head"]) == (not isinstance(toys.FAMILIES[name], BlockConfig))


def test_projectors_and_gates_are_groups_of_their_own() -> None:
    kv, mlp = costed("kv_only-1").parameters, costed("kv_only-mlp").parameters
    assert kv["projector"] == 2 * 3 * KV * KV and mlp["projector"] == kv["projector"] + 2 * ((3 * KV) ** 2 + 3 * KV * KV)
    assert costed("hybrid-1").parameters["gate"] == 3 * D * D + D + D * D
    for kind, gates in (("scalar", 1), ("per_head", G.heads)):
        assert cost(HybridConfig(gate={"kind": kind}), G, 8).parameters["gate"] == 3 * D * gates + gates + D * D


def test_sizes_of_no_machine_are_costed_without_allocating_them() -> None:
    g = toys.geometry("qwen3")
    huge = type(g)(**g.to_json() | {"hidden_size": 1 << 20, "intermediate_size": 1 << 22, "rope": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6}})
    assert cost(KVOnlyConfig(), huge, 30).parameters["mlp"] == 2 * 3 << 42
    assert next(weightless(HiddenOnlyConfig(), huge, 30).parameters()).device.type == "meta"
