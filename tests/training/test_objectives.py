"""Every option of the objective through the real trainer: the loss on the board is the one the formulas give, and each option does what it says."""

from __future__ import annotations

import math

import pytest
import torch

from kvshot_ds.config import ObjectiveConfig
from kvshot_ds.drafters.base import Drafter
from kvshot_ds.drafters.gate import GatedDelta
from kvshot_ds.errors import ConfigError
from kvshot_ds.target import load_parts
from kvshot_ds.training.launch import run
from kvshot_ds.training.loader import MicroBatch
from kvshot_ds.training.trainer import Setup
from tests.training.runs import assert_close, assert_same, before_each_step, board, run_and_stop, weights

K = 3


def row_loss(o: ObjectiveConfig, z: torch.Tensor, p: torch.Tensor, label: int) -> float:
    """The loss of one row: z [V_d] logits, p [V_d] the target's probabilities of the draft vocabulary, label -1 if it is outside."""
    log_q, inside = torch.log_softmax(z, -1), p / p.sum()
    a = float(torch.minimum(p, log_q.exp()).sum())
    ce = -float((inside * log_q).sum())
    kl = ce + float(torch.xlogy(inside, inside).sum())
    part = math.exp(-o.lk_eta * a)
    return {
        "soft_ce": ce,
        "kl": kl,
        "hard_ce": -float(log_q[label]),
        "lk_alpha": -math.log(a),
        "lk_lambda": part * kl + (1 - part) * (1 - a),
    }[o.loss]


def weight(o: ObjectiveConfig, k: int, confidence: list[float]) -> float:
    """Of step k, given the drafter's probability of the label at each of the row's steps."""
    reached = [math.prod((1 - o.dpace_alpha) * q + o.dpace_alpha for q in confidence[: j + 1]) for j in range(len(confidence))]
    return {"geometric": o.step_decay**k, "exponential": math.exp(-k / o.gamma), "dpace": sum(reached[k:])}[o.weights]


@torch.no_grad()
def by_hand(s: Setup, micro_batches: list[MicroBatch]) -> dict[str, float]:
    """What the step about to be made adds up to per supervised row: loss, and the same of the KV branch; row by row in fp64."""
    o, d = s.recipe.train.objective, s.drafter
    head, ids = load_parts(s.recipe.target.path).head.double(), d.draft_ids
    where = {int(token): i for i, token in enumerate(ids)}
    total = {"train/loss": 0.0, "train/loss_kv_branch": 0.0}
    for m in micro_batches:
        batch, plan = m.batch.to("cpu", torch.float32), m.plan
        unrolled = s.objective.unroll(batch, plan)
        for row, anchor in enumerate(plan.anchors.tolist()):
            steps = plan.valid[:, row].nonzero().flatten().tolist()
            labels = [where.get(int(batch.tokens[anchor + 2 + k]), -1) for k in steps]
            logits = d.logits(unrolled.h[:, row]).double()
            branch = None if unrolled.kv_branch is None else d.logits(unrolled.kv_branch[:, row]).double()
            sure = [float(torch.softmax(logits[k], -1)[label]) if label >= 0 else 0.0 for k, label in zip(steps, labels, strict=True)]
            for k, label in zip(steps, labels, strict=True):
                r = int(batch.teacher_index[anchor + 1 + k])
                p = torch.exp(batch.teacher_hidden[r].double() @ head[ids].T - batch.teacher_lse[r].double())
                if (label if o.loss == "hard_ce" else where.get(int(batch.teacher_argmax[r]), -1)) < 0:
                    continue
                total["train/loss"] += weight(o, k, sure) * row_loss(o, logits[k], p, label)
                if branch is not None:
                    total["train/loss_kv_branch"] += o.kv_branch_weight * weight(o, k, sure) * row_loss(o, branch[k], p, label)
    rows = sum(m.plan.supervised for m in micro_batches)
    return {name: value / rows for name, value in total.items()}


@pytest.mark.parametrize(
    ("drafter", "objective"),
    [
        ("hidden_only", {"loss": "kl"}),
        ("kv_only", {"loss": "hard_ce", "weights": "exponential", "gamma": 2}),
        ("kv_only-none", {"loss": "lk_alpha"}),
        ("dflash", {"loss": "lk_lambda", "anchors": 3}),
        ("kv_block", {"weights": "exponential"}),
        ("hybrid_block", {"weights": "dpace", "kv_branch_weight": 0.5}),
        ("hybrid-scalar", {"weights": "dpace", "loss": "hard_ce", "dpace_alpha": 0.2, "row_fraction": 0.5}),
        ("hybrid", {"loss": "lk_lambda", "lk_eta": 1, "kv_branch_weight": 0.25}),
        ("eagle31", {"drift": "offline"}),
    ],
)
def test_the_loss_on_the_board_is_that_of_the_formulas(recipe, monkeypatch, drafter, objective):
    r = recipe(drafter=drafter, objective={"steps": K, **objective}, max_steps=2, log_every=1, conversations_per_micro_batch=2, optim={"lr": 5e-3})
    wanted = []
    before_each_step(monkeypatch, lambda s, m, _: wanted.append(by_hand(s, m)))
    run(r)
    logged = board(r)
    assert ("train/loss_kv_branch" in logged) == ("kv_branch_weight" in objective) and "train/loss_query" not in logged
    for step in range(2):
        for name, value in wanted[step].items():
            assert logged.get(name, [0.0, 0.0])[step] == pytest.approx(value, rel=2e-4), (name, step)
    assert wanted[0]["train/loss"] != pytest.approx(wanted[1]["train/loss"], rel=1e-3)


def test_offline_drift_and_anchors_change_what_is_learned(recipe):
    objectives: dict[str, dict[str, object]] = {"plain": {}, "offline": {"drift": "offline"}, "anchors": {"anchors": 2}}
    plain, *others = [
        recipe(name, "hybrid", max_steps=2, conversations_per_micro_batch=4, objective={"steps": K, **objective}) for name, objective in objectives.items()
    ]
    rows = [run(r)["supervised_rows"] for r in (plain, *others)]
    assert rows[0] == rows[1] and rows[2] == 2 * 2 * 4  # steps x anchors x conversations
    for r in others:
        assert not torch.equal(weights(r)["fc.weight"], weights(plain)["fc.weight"])


@pytest.mark.parametrize("drafter", ["kv_only", "hybrid_block"])
def test_gradient_scale_and_query_distillation_reach_the_step(recipe, drafter):
    objectives: dict[str, dict[str, float]] = {
        "plain": {},
        "scaled": {"kv_gradient_scale": 50},
        "queries": {"query_distill_weight": 0.1},
        "twice": {"query_distill_weight": 0.2},
    }
    logged = {}
    for name, objective in objectives.items():
        r = recipe(name, drafter, max_steps=1, conversations_per_micro_batch=4, objective={"steps": K, **objective})
        run(r)
        logged[name] = board(r)
    assert {x["train/loss"][0] for x in logged.values()} == {logged["plain"]["train/loss"][0]}
    assert logged["scaled"]["train/grad_norm"][0] > 1.5 * logged["plain"]["train/grad_norm"][0]
    assert logged["queries"]["train/grad_norm"][0] != logged["plain"]["train/grad_norm"][0]
    assert logged["twice"]["train/loss_query"][0] == pytest.approx(2 * logged["queries"]["train/loss_query"][0], rel=1e-5)
    assert logged["queries"]["train/loss_query"][0] > 0 and "train/loss_query" not in logged["scaled"]


def test_query_distillation_without_captured_queries_is_refused_by_name(recipe):
    with pytest.raises(ConfigError, match=r"features lack query\.4.*capture\.features\.query_layers=\[2, 3, 4\]"):
        run(recipe(drafter={"family": "kv_only", "kv": {"injection": "per_layer", "layers": (2, 4)}}, objective={"steps": K, "query_distill_weight": 1}))


def measures_the_machine(tag: str) -> bool:
    return tag.startswith(("time/", "memory/")) or tag in ("train/tokens_per_s", "train/samples_per_s", "train/data_stall_share")


@pytest.mark.parametrize("drafter", ["hybrid-scalar", "hybrid_block"])
def test_recomputing_changes_neither_the_weights_nor_the_board(recipe, drafter):
    options = {"max_steps": 2, "log_every": 1, "objective": {"steps": K, "kv_branch_weight": 0.5, "query_distill_weight": 0.1}}
    kept, again = recipe("kept", drafter, **options), recipe("again", drafter, recompute=True, **options)
    run(kept), run(again)
    assert_same(weights(again), weights(kept))
    found, wanted = ({tag: v for tag, v in board(r).items() if not measures_the_machine(tag)} for r in (again, kept))
    assert found == wanted and {"train/loss", "train/grad_norm"} <= found.keys()


@pytest.mark.parametrize("recompute", [False, True])
def test_compiled_parts_train_to_the_same_weights(recipe, monkeypatch, recompute):
    """With the backend that compiles nothing: what inductor makes of the parts is tested beside the drafters."""
    plain_layers = Drafter.compile_layers
    monkeypatch.setattr(Drafter, "compile_layers", lambda self: plain_layers(self, "aot_eager"))
    torch._dynamo.reset()
    options = {"max_steps": 2, "recompute": recompute, "conversations_per_micro_batch": 4}
    plain, compiled = recipe("plain", "hybrid_block", **options), recipe("compiled", "hybrid_block", compile=True, **options)
    run(plain)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    run(compiled)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > before
    torch._dynamo.reset()
    assert_close(weights(compiled), weights(plain))


def test_what_does_not_fit_the_run_is_refused_by_name(recipe):
    with pytest.raises(ConfigError, match=r"compile=true does not work with ZeRO stage 3"):
        run(recipe(compile=True, ds_config="zero3_fp32"))
    gate = {"open_steps": 2, "floor": 0.5, "floor_steps": 3}
    with pytest.raises(ConfigError, match=r"schedule of 5 steps .* leaves nothing of the run of 5"):
        run(recipe(drafter={"family": "hybrid", "gate": gate}, max_steps=5))
    assert run(recipe(drafter={"family": "hybrid", "gate": gate}, max_steps=6))["steps"] == 6


@pytest.mark.parametrize("family", ["hybrid", "hybrid_block"])
def test_the_gate_schedule_goes_on_where_a_stopped_run_left_it(recipe, monkeypatch, family):
    block = {"depth": 2, "block_size": 4} if family == "hybrid_block" else {}
    drafter = {"family": family, "gate": {"open_steps": 2, "floor": 0.5, "floor_steps": 4}, **block}
    # The rows drawn at a step are those that the step would have had without the break.
    objective = {"steps": K, "anchors": 2 if block else 0}
    options = {"max_steps": 8, "checkpoint_every": 3, "log_every": 1, "conversations_per_micro_batch": 4, "objective": objective}
    whole, broken = recipe("whole", drafter, **options), recipe("broken", drafter, **options)
    floors = []

    def note(s, _m, _n):
        floors.append({float(m.floor) for m in s.drafter.modules() if isinstance(m, GatedDelta)})

    before_each_step(monkeypatch, note)
    run(whole)
    run_and_stop(broken, 5)
    assert run(broken)["resumed_from"] == [{"step": 3, "world_size": 1}]
    schedule = [1.0, 1.0, 0.5, 0.375, 0.25, 0.125, 0.0, 0.0]
    assert floors == [{f} for f in (*schedule, *schedule[:5], *schedule[3:])]
    assert_same(weights(broken), weights(whole))
    gate = board(whole)["gate/mean"]
    assert gate[:2] == [1.0, 1.0] and 0.7 < gate[2] < 0.8 and 0.45 < gate[-1] < 0.55  # g' = f + (1 - f) g, g about a half
    # The board of the resumed run says the same; steps 4 and 5, made twice, stand there once.
    assert board(broken)["gate/mean"] == pytest.approx(gate, abs=1e-6)
