"""What a run shows of the diagnostics while it trains: the numbers of the measures themselves, over all ranks, and no trace in the training."""

from __future__ import annotations

import json
import os
import signal

import pytest
import torch

from kvshot_ds.config import ObjectiveConfig, TrainConfig
from kvshot_ds.diagnostics import drift, gate, queries
from kvshot_ds.drafters.build import load_drafter
from kvshot_ds.errors import Preempted
from kvshot_ds.evaluation import measurable
from kvshot_ds.features.batch import collate
from kvshot_ds.features.shard import ShardSet
from kvshot_ds.objectives.alignment import plan_rows
from kvshot_ds.objectives.objective import objective_for
from kvshot_ds.target import load_parts
from kvshot_ds.training.launch import run
from tests.training.runs import assert_same, board, launch, weights, zero3

STEPS, LOOKED_AT = 3, 5
HYBRID = {"family": "hybrid", "depth": 2, "gate": {"init": "bias:-1", "floor": 0.5, "floor_steps": 2}}
OPTIONS = {"eval_every": 2, "log_every": 1, "max_steps": 3, "optim": {"lr": 1e-2}, "objective": {"steps": STEPS, "row_fraction": 0.5, "loss": "hard_ce"}}


def afterwards(recipe):
    """The tags of the last look, from the exported drafter, a conversation at a time."""
    shards = ShardSet.open(recipe.shards_dir, "heldout")
    drafter, _ = load_drafter(recipe.run_dir / "drafter", "cpu", torch.float32)
    parts = load_parts(recipe.target.path, "cpu", torch.float32)
    drafter.bind(parts.embedding, parts.head)
    objective = objective_for(drafter, ObjectiveConfig(steps=STEPS), shards.manifest.spec, parts)
    wanted = ("tokens", "turn", *shards.manifest.spec.serving(queries.needed(drafter)))
    parts_of: dict[str, list] = {"queries": [], "gate": [], "drift": []}
    for i in measurable(shards, LOOKED_AT):
        batch = collate([shards.read_packed(i, wanted)]).to("cpu", torch.float32)
        plan = plan_rows(batch, STEPS)
        parts_of["queries"].append(queries.measure_queries(objective, batch, plan))
        parts_of["gate"].append(gate.measure_gate(objective, batch, plan))
        parts_of["drift"].append(drift.measure_drift(objective, batch, plan))
    out = {}
    for layers in zip(*parts_of["queries"], strict=True):
        sums = queries.QuerySums.joined(layers)
        for name in ("cosine", "output_error", "map_kl"):
            for k in range(STEPS):
                out[f"query/{name}/layer_{sums.layer}/{k}"] = float(getattr(sums, name)[:, k].sum() / sums.rows[:, k].sum())
    gates = [gate.GateSums.joined(layers) for layers in zip(*parts_of["gate"], strict=True)]
    for k in range(STEPS if gates else 0):
        rows = sum(float(s.rows[:, k].sum()) for s in gates)
        out[f"gate/step_{k}/mean"] = sum(float(s.mean[:, k].sum()) for s in gates) / rows
        out[f"gate/step_{k}/share_below_0.05"] = sum(float(s.below[:, k].sum()) for s in gates) / rows
    if gates:
        histogram = torch.stack([s.histogram.sum(0) for s in gates]).sum(0)
        found = gate.quantiles(histogram, torch.zeros(()), torch.ones(()))
        out |= {f"gate/quantile_{q}": value for q, value in zip(gate.QUANTILES, found.tolist(), strict=True)}
    rows, cosine = (sum(getattr(d, name).sum(0) for d in parts_of["drift"]) for name in ("rows", "cosine"))
    return out | {f"drift/cosine/{k}": float(cosine[i] / rows[i]) for i, k in enumerate(parts_of["drift"][0].steps)}


def shown(found):
    """Of the tags of a look, those of the diagnostics."""
    return {tag: value for tag, value in found.items() if tag.startswith(("query/", "gate/step_", "gate/quantile_", "drift/"))}


@pytest.mark.parametrize("drafter", [HYBRID, {"family": "kv_block", "depth": 1, "block_size": STEPS + 1}])
def test_a_look_shows_what_the_exported_drafter_shows_and_leaves_no_trace(recipe, drafter):
    looked, plain = recipe("looked", drafter, diagnose_conversations=LOOKED_AT, **OPTIONS), recipe("plain", drafter, **OPTIONS)
    run(looked)
    run(plain)
    assert_same(weights(looked), weights(plain))
    points = json.loads((looked.run_dir / "heldout.json").read_text())
    want = afterwards(looked)
    assert shown(points["3"]) == pytest.approx(want, rel=1e-4, abs=1e-6)
    assert {tag.split("/")[0] for tag in want} == {"query", "drift"} | ({"gate"} if drafter is HYBRID else set())
    logged, without = board(looked), board(plain)
    assert {tag: logged[tag] for tag in want} == {tag: pytest.approx([points[n][tag] for n in ("2", "3")]) for tag in want}
    # the points of the training itself are those of a run that does not look
    same = [tag for tag in without if tag.startswith(("train/", "gate/", "grad_norm", "heldout/")) and not tag.endswith(("_per_s", "stall_share", "seconds"))]
    assert len(same) > 30 and not shown(without)
    assert {tag: logged[tag] for tag in same} == {tag: without[tag] for tag in same}


@pytest.mark.timeout(900)
def test_two_ranks_with_weights_spread_by_zero_3_show_what_one_rank_does(recipe, tmp_path):
    options = {**OPTIONS, "diagnose_conversations": LOOKED_AT}
    alone, pair = recipe("alone", HYBRID, **options), recipe("pair", HYBRID, ds_config=zero3(tmp_path), **options)
    alone, pair = (r.model_copy(update={"eval": r.eval.model_copy(update={"conversations_per_micro_batch": 2})}) for r in (alone, pair))
    run(alone)
    process = launch(pair, tmp_path)
    output = process.communicate(timeout=600)[0]
    assert process.returncode == 0, output
    one, two = (json.loads((r.run_dir / "heldout.json").read_text())["3"] for r in (alone, pair))
    assert len(shown(one)) == 2 * 3 * STEPS + 2 * STEPS + 5 + STEPS - 1
    for tag, value in shown(one).items():
        assert two[tag] == pytest.approx(value, rel=2e-3, abs=2e-3), tag
    logged = [board(r) for r in (alone, pair)]
    relative = [tag for tag in logged[0] if tag.startswith("grad_norm_relative/")]
    assert len(relative) >= 9 and {tag: logged[1][tag] for tag in relative} == {tag: pytest.approx(logged[0][tag], rel=2e-3) for tag in relative}


@pytest.mark.parametrize(
    ("drafter", "families", "said"),
    [
        ("hidden_only", {"drift"}, ""),
        ("kv_only-none", {"drift"}, ""),
        ("kv_only-per_layer", {"drift"}, "no query estimation during training: the features lack query."),
    ],
)
def test_what_cannot_be_shown_is_left_out_and_said_once(recipe, capsys, drafter, families, said):
    r = recipe(drafter=drafter, diagnose_conversations=2, **OPTIONS | {"max_steps": 2})
    run(r)
    points = json.loads((r.run_dir / "heldout.json").read_text())
    assert {tag.split("/")[0] for tag in shown(points["2"])} == families
    printed = capsys.readouterr().out
    assert printed.count("during training:") == bool(said)
    assert said in printed and (not said or "kvshot capture RECIPE" in printed)


def test_a_stop_during_the_diagnosis_leaves_the_look_for_the_next_start(recipe, monkeypatch):
    """As in the rest of a look: nothing of it is written, and the next start begins with it."""
    r, calls, plain = recipe(drafter="hybrid", diagnose_conversations=9, **OPTIONS), [], queries.measure_queries

    def counted(*args):
        calls.append(1)
        if len(calls) == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        return plain(*args)

    monkeypatch.setattr(queries, "measure_queries", counted)
    with pytest.raises(Preempted, match="after step 2 of 3"):
        run(r)
    assert len(calls) == 2 and not (r.run_dir / "heldout.json").exists()
    run(r)
    points = json.loads((r.run_dir / "heldout.json").read_text())
    assert len(calls) == 2 + 3 * 2 and list(points) == ["2", "3"]  # 9 conversations in 3 groups
    assert all("query/cosine/layer_0/0" in point for point in points.values())


def test_diagnosing_may_change_from_start_to_start():
    assert "diagnose_conversations" not in TrainConfig().shaping()
