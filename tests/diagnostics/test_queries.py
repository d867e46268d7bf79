"""Query estimation: a drafter that asks as the target does, constructed angles, and a slow second implementation."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from kvshot_ds.config import KVOnlyConfig
from kvshot_ds.diagnostics.queries import MEASURES, QuerySums, measure_queries, needed, why_not
from kvshot_ds.drafters.build import build_drafter
from kvshot_ds.drafters.state import DraftState, Extras
from kvshot_ds.features.batch import Batch, collate
from kvshot_ds.features.shard import ShardSet
from kvshot_ds.features.spec import FeatureSpec, Store
from kvshot_ds.objectives.alignment import RowPlan, plan_rows, training_start
from kvshot_ds.objectives.objective import Objective, required_features
from kvshot_ds.target import Target
from tests import toys
from tests.decoding.models import FAMILIES, hf_target, prompt
from tests.diagnostics.made import STEPS, made, objective_of
from tests.drafters.slow import turn

ALL = 1000  # more rows than a conversation has
TURNS = [[0] * 5 + [1] * 12, [0] * 3 + [1] * 6 + [0] * 2 + [2] * 7]


def of_target(family: str) -> tuple[Target, Objective, Batch, RowPlan]:
    """A drafter whose two layers are the first two of the target, with its embedding: all it computes is what the target computes."""
    target = hf_target(family, torch.float64)
    drafter = build_drafter(KVOnlyConfig(depth=2, kv={"injection": "per_layer", "layers": (0, 1)}), target.geometry, toys.DRAFT_VOCAB)
    drafter.set_vocab(torch.arange(toys.DRAFT_VOCAB))
    drafter.to(torch.float64)
    for mine, layer in zip(drafter.layers, target.layers, strict=False):
        left = mine.load_state_dict({name.replace("self_attn.", "cross_attn."): w for name, w in layer.state_dict().items()}, strict=False)
        assert not left.unexpected_keys and not left.missing_keys
    drafter.bind(target.model.get_input_embeddings().weight.detach(), target.model.get_output_embeddings().weight.detach())
    spec = FeatureSpec((), (0, 1), "last_hidden", Store.all("fp32"), (0, 1))
    samples = target.features([prompt(len(t), i) for i, t in enumerate(TURNS)], spec, TURNS)
    batch = collate([(f"c{i}", s) for i, s in enumerate(samples)]).to("cpu", torch.float64)
    return target, objective_of(drafter), batch, plan_rows(batch, STEPS)


def means(sums: QuerySums) -> dict[str, torch.Tensor]:
    """By step, [K]."""
    return {name: getattr(sums, name).sum(0) / sums.rows.sum(0) for name in MEASURES}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_targets_own_queries_have_cosine_1_and_no_error(family):
    _, objective, batch, plan = of_target(family)
    found = measure_queries(objective, batch, plan, rows_each=ALL)
    assert [(s.layer, s.targets) for s in found] == [(0, (0,)), (1, (1,))]
    for sums in found:
        assert torch.equal(sums.rows.sum(0), plan.valid.sum(1).double())
        mean = means(sums)
        torch.testing.assert_close(mean["cosine"], torch.ones(STEPS).double(), rtol=0, atol=1e-9)
        for name in MEASURES[1:]:
            assert float(mean[name].abs().max()) < 2e-5, name  # captured keys are fp32


@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_a_position_or_a_rotation_off_by_one_shows(family):
    _, objective, batch, plan = of_target(family)
    swapped = replace(batch, queries_of={0: batch.queries_of[1], 1: batch.queries_of[0]})
    rolled = replace(batch, queries_of={i: q.roll(1, 0) for i, q in batch.queries_of.items()})
    for wrong in (swapped, rolled):
        for sums in measure_queries(objective, wrong, plan, rows_each=ALL):
            mean = means(sums)
            assert float(mean["cosine"].max()) < 0.9 and all(float(mean[name].min()) > 0.01 for name in MEASURES[1:])
    drafter = objective.drafter
    rotations = drafter.rotations
    drafter.rotations = lambda rows, k: rotations(rows, k - 1)
    first = means(measure_queries(objective, batch, plan, rows_each=ALL)[0])
    torch.testing.assert_close(first["cosine"], torch.ones(STEPS).double(), rtol=0, atol=1e-9)  # the same vector, turned to another position
    assert all(float(first[name].min()) > 0.01 for name in MEASURES[1:])


@pytest.mark.parametrize("family", FAMILIES)
def test_over_the_targets_cache_its_own_query_reads_what_its_attention_reads(family):
    """Other queries over memories that hold what the target's cache holds: both comparisons are one, and the truth is transformers' own attention."""
    target, objective, batch, plan = of_target(family)
    with torch.no_grad():
        for layer in objective.drafter.layers:
            layer.cross_attn.q_proj.weight.mul_(0.5)  # half as sharp, with the same direction: only the maps differ
            if layer.cross_attn.q_proj.bias is not None:
                layer.cross_attn.q_proj.bias.mul_(0.5)
            if hasattr(layer.cross_attn.q_norm, "weight"):
                layer.cross_attn.q_norm.weight.mul_(0.5)
    (sums, _) = measure_queries(objective, batch, plan, rows_each=ALL)
    mean = means(sums)
    torch.testing.assert_close(mean["cosine"], torch.ones(STEPS).double(), rtol=0, atol=1e-9)
    torch.testing.assert_close(mean["output_error"], mean["cache_output_error"], rtol=1e-4, atol=0)
    torch.testing.assert_close(mean["map_kl"], mean["cache_map_kl"], rtol=1e-4, atol=0)
    read = []
    attention = target.layers[0].self_attn

    def halved(module, inputs, out):
        return out / 2

    for half in (False, True):
        handles = [attention.o_proj.register_forward_hook(lambda _m, x, _o: read.append(x[0].detach()))]
        handles += [getattr(attention, "q_norm", attention.q_proj).register_forward_hook(halved)] if half else []
        start = 0
        for length in batch.lengths:
            target.forward(batch.tokens[start : start + length][None])
            start += length
        for handle in handles:
            handle.remove()
    true, mine = (torch.cat([r[0] for r in part]) for part in (read[:2], read[2:]))
    want = ((mine - true).norm(dim=1) / true.norm(dim=1)).double()
    for k in range(STEPS):
        at = plan.anchors[plan.valid[k]] + 1 + k
        assert float(mean["output_error"][k]) == pytest.approx(float(want[at].mean()), rel=1e-4)


def reference(objective: Objective, batch: Batch, plan: RowPlan, i: int) -> dict[str, torch.Tensor]:
    """Sums of draft layer i by conversation and step, row by row and head by head, from the drafter's own state."""
    drafter = objective.drafter
    projector, attention = drafter.layers[i].projector, drafter.layers[i].cross_attn
    start, state = training_start(batch, plan), DraftState.empty(drafter.depth, Extras(queries=True))
    block = getattr(drafter, "block_size", 0)
    out = {name: torch.zeros(len(batch.keys), STEPS, dtype=torch.float64) for name in ("rows", *MEASURES)}
    group = attention.heads // attention.kv_heads
    begins = [sum(batch.lengths[:c]) for c in range(len(batch.lengths))]
    with torch.no_grad():
        if block:
            drafter.slots(state, start)
        for k in range(STEPS):
            if not block:
                drafter.begin(state, start) if k == 0 else drafter.forward_step(state, plan.tokens[k], k)
            memory = state.cross[i]
            for row in plan.valid[k].nonzero().flatten().tolist():
                c, t = int(plan.conversation[row]), int(plan.anchors[row])
                begin, position = begins[c], t + 1 + k - begins[c]
                q = state.queries[i][row * block + k if block else row]
                true = torch.cat([batch.queries_of[j][batch.teacher_index[t + 1 + k]] for j in projector.query_layers])
                cached = [torch.cat([kind[j] for j in projector.query_layers], 1)[begin : t + 2 + k] for kind in (batch.keys_of, batch.values_of)]
                seen = [torch.cat((prefix[begin : t + 1], torch.stack(own))) for prefix, own in (
                    (memory.prefix.k, [s.k[row] for s in memory.steps]), (memory.prefix.v, [s.v[row] for s in memory.steps]))]  # fmt: skip
                found = {"rows": 1.0, "cosine": sum(float(a @ b / a.norm() / b.norm()) for a, b in zip(q, true, strict=True)) / len(q)}
                for name, (keys, values) in (("", seen), ("cache_", cached)):
                    outputs, divergence = ([], []), 0.0
                    for a in range(attention.heads):
                        maps = [torch.softmax(keys[:, a // group] @ turn(x[a], position) / drafter.g.head_dim**0.5, 0) for x in (q, true)]
                        for o, p in zip(outputs, maps, strict=True):
                            o.append(p @ values[:, a // group])
                        divergence += float((maps[1] * (maps[1].log() - maps[0].log())).sum()) / attention.heads
                    o, o_true = map(torch.cat, outputs)
                    found |= {f"{name}output_error": float((o - o_true).norm() / o_true.norm()), f"{name}map_kl": divergence}
                for name, value in found.items():
                    out[name][c, k] += value
    return out


@pytest.mark.parametrize("name", ["kv_only-2", "kv_only-per_layer", "kv_only-head_concat", "hybrid-2", "hybrid-cross_only", "kv_block-2", "hybrid_block-2"])
def test_against_a_slow_second_implementation(name):
    objective, batch, plan = made(name)
    found = measure_queries(objective, batch, plan, rows_each=ALL)
    assert len(found) == objective.drafter.depth
    for sums in found:
        want = reference(objective, batch, plan, sums.layer)
        assert float(want["map_kl"].sum(0).min()) > 0.1
        for key, value in want.items():
            torch.testing.assert_close(getattr(sums, key), value, rtol=1e-6, atol=1e-9, msg=f"{key}: {{}}".format)


@pytest.mark.parametrize("angle", [0.0, 0.3, 1.2, math.pi])
def test_queries_turned_by_an_angle_have_its_cosine(angle):
    """A single layer's query follows from its token alone: what stands in the target's place can be made of it."""
    objective, batch, plan = made(KVOnlyConfig(depth=1))
    layer = objective.drafter.layers[0]
    (asked,) = layer.projector.query_layers
    at = (batch.teacher_index >= 0).nonzero().flatten()
    with torch.no_grad():
        a, b = layer.cross_attn.query(layer.input_layernorm(objective.drafter.embed(batch.tokens[at]))).chunk(2, -1)
    turned = torch.cat((a * math.cos(angle) - b * math.sin(angle), b * math.cos(angle) + a * math.sin(angle)), -1)
    (sums,) = measure_queries(objective, replace(batch, queries_of={asked: turned}), plan, rows_each=ALL)
    torch.testing.assert_close(means(sums)["cosine"], torch.full((STEPS,), math.cos(angle), dtype=torch.float64), rtol=0, atol=1e-9)
    assert (float(means(sums)["output_error"].max()) < 1e-9) is (angle == 0)


def test_random_queries_have_no_cosine_on_average():
    objective, batch, plan = made("kv_only-head_concat", [[0] * 3 + [1] * 60] * 3)
    for sums in measure_queries(objective, batch, plan, rows_each=ALL):
        assert float(means(sums)["cosine"].abs().max()) < 0.06  # 171 rows of 12 heads, .35 each: .02 of one deviation
        assert float(means(sums)["output_error"].min()) > 0.3


def test_rows_are_sampled_alike_however_conversations_are_grouped():
    objective, batch, plan = made("hybrid-2", [[0] * 3 + [1] * 30, [0] * 4 + [1] * 3, [0] * 3 + [1] * 25])
    together = measure_queries(objective, batch, plan, rows_each=5)[1]
    assert together.rows[:, 0].tolist() == [5, 2, 5]
    pieces = []
    for i, t in enumerate([[0] * 3 + [1] * 30, [0] * 4 + [1] * 3, [0] * 3 + [1] * 25]):
        one = collate([(f"c{i}", toys.sample(t, objective.drafter.g, i))]).to("cpu", torch.float64)
        pieces.append(measure_queries(objective, one, plan_rows(one, STEPS), rows_each=5)[1])
    apart = QuerySums.joined(pieces)
    for name in ("rows", *MEASURES):
        torch.testing.assert_close(getattr(apart, name), getattr(together, name), rtol=1e-9, atol=1e-12)
    every = measure_queries(objective, batch, plan, rows_each=ALL)[1]
    assert not torch.allclose(means(every)["cosine"], means(together)["cosine"])
    other = measure_queries(objective, batch, plan, rows_each=5, seed=1)[1]
    assert not torch.equal(other.cosine, together.cosine)


def test_nothing_stays_behind():
    objective, batch, plan = made("hybrid-2")
    config, gates = objective.config, [torch.zeros(1), torch.zeros(1)]
    for layer, gate in zip(objective.drafter.layers, gates, strict=True):
        layer.mix.last_gate = gate
    measure_queries(objective, batch, plan)
    assert objective.config is config and all(layer.mix.last_gate is gate for layer, gate in zip(objective.drafter.layers, gates, strict=True))
    assert not any(m._forward_hooks for m in objective.modules()) and all(p.grad is None for p in objective.parameters())


def test_why_queries_cannot_be_compared(tiny_features, recipe):
    manifest = ShardSet.open(tiny_features, "heldout").manifest
    said = {name: why_not(build_drafter(recipe(drafter=name).train.drafter, manifest.geometry, 100), manifest) for name in (
        "kv_only", "hybrid", "kv_block", "hidden_only", "kv_only-none", "kv_only-hidden_to_kv", "kv_only-per_layer")}  # fmt: skip
    assert said["kv_only"] is said["hybrid"] is said["kv_block"] is None
    assert "no cross path" in said["hidden_only"]
    assert "does not read the target's cache" in said["kv_only-none"] and said["kv_only-none"] == said["kv_only-hidden_to_kv"]
    missing = sorted({2, 4} - set(manifest.spec.query_layers))
    assert f"the features lack {', '.join(f'query.{i}' for i in missing)}" in said["kv_only-per_layer"]
    assert "kvshot capture RECIPE" in said["kv_only-per_layer"] and "capture.features.query_layers=[2, 3, 4]" in said["kv_only-per_layer"]
    per_layer = build_drafter(recipe(drafter="kv_only-per_layer").train.drafter, manifest.geometry, 100)
    assert needed(per_layer).query_layers == (2, 4) and required_features(per_layer, recipe().train.objective).query_layers == ()
