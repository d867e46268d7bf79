"""The serving check: a right drafter passes, on the very same rows; every deliberate fault of the decoder's side, or of the features, fails it by name."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from kvshot_ds.config import DraftingConfig, EvalConfig, ObjectiveConfig
from kvshot_ds.decoding import state
from kvshot_ds.decoding.acceptance import joint_counts
from kvshot_ds.decoding.engine import Engine
from kvshot_ds.decoding.forced import Conversation, Measured, measure
from kvshot_ds.decoding.parity import DIFFERENCES, RUNGS, beyond, summary
from kvshot_ds.decoding.prompts import reference
from kvshot_ds.drafters.base import Drafter
from kvshot_ds.drafters.build import build_drafter
from kvshot_ds.features.batch import collate
from kvshot_ds.features.spec import Store
from kvshot_ds.metrics import Interval, StepCounts
from kvshot_ds.objectives.alignment import plan_rows
from kvshot_ds.objectives.objective import Objective
from kvshot_ds.target import Target
from tests import toys
from tests.decoding.models import hf_target, prompt

STEPS, SIZE, LENGTH, COUNT = 3, 9, 22, 6
OPTIONS = EvalConfig(bootstrap=300)
NAMES = ("hidden_only-1", "kv_only-1", "hybrid-1", "hybrid_block-2")


@cache
def target() -> Target:
    return hf_target("Llama")


@cache
def conversations() -> tuple[Conversation, ...]:
    """Prompts with the target's own greedy answers."""
    made = []
    for seed in range(COUNT):
        p = prompt(SIZE, seed)
        tokens = (*p, *reference(target(), p, LENGTH, ()))
        made.append(Conversation(f"c{seed}", tokens, np.array([0] * SIZE + [1] * LENGTH, np.int32), SIZE))
    return tuple(made)


def objective(drafter: Drafter) -> Objective:
    steps = min(STEPS, getattr(drafter, "block_size", STEPS + 1) - 1)
    return Objective(drafter, ObjectiveConfig(steps=steps), target().model.get_output_embeddings().weight)


@cache
def trained(name: str) -> Drafter:
    """A drafter that has learned these answers well enough for a fault to cost it something."""
    torch.manual_seed(0)
    drafter = build_drafter(toys.FAMILIES[name], target().geometry, toys.VOCAB)
    drafter.reset(0)
    drafter.set_vocab(torch.arange(toys.VOCAB))
    drafter.bind(target().model.get_input_embeddings().weight, target().model.get_output_embeddings().weight)
    spec = replace(drafter.required_features(), store=Store.all("fp32"))
    samples = target().features([list(c.tokens) for c in conversations()], spec, [c.turn for c in conversations()])
    batch = collate([(c.key, sample) for c, sample in zip(conversations(), samples, strict=True)]).to("cpu", torch.float32)
    run = objective(drafter)
    plan = plan_rows(batch, run.config.steps)
    optimizer = torch.optim.AdamW(drafter.parameters(), 1e-2)
    for _ in range(40):
        optimizer.zero_grad()
        run(batch, plan, torch.tensor(float(plan.supervised))).loss.backward()
        optimizer.step()
    return drafter.eval().requires_grad_(False)


def measured(name: str, served: Drafter | None = None, together: int = 1) -> Measured:
    engine = Engine(target(), served or trained(name), DraftingConfig(length=STEPS))
    return measure(engine, objective(trained(name)), conversations(), LENGTH, (), together)


def verdict(m: Measured, stored: StepCounts | None = None) -> dict:
    """stored: as eval.json would have them; the right ones if not given."""
    counts = m.counts["retaken"] if stored is None else stored
    return summary(counts, counts, m, OPTIONS, "fp32")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("together", [1, 4])
def test_a_right_drafter_passes_row_by_row(name, together):
    m = measured(name, together=together)
    result = verdict(m)
    assert result["passed"] and result["faults"] == []
    assert m.different == 0 and m.own == 0 and m.rounds > 30
    np.testing.assert_array_equal(m.counts["decoded"].joint, m.counts["starts"].joint)
    assert result["differences"]["path"]["value"] == 0 == result["differences"]["features"]["value"]
    assert result["joint_mat"]["decoded"]["value"] > 1.4, "an untrained drafter would show nothing"
    assert m.agreeing == COUNT * LENGTH, "the answers are the target's own"


@pytest.mark.parametrize("together", [1, 3])
def test_the_rungs_add_up_and_count_by_the_rule_of_decoding(together):
    m = measured("hybrid-1", together=together)
    counts = [joint_counts(out, STEPS) for out in m.outputs]
    assert m.counts["decoded"].joint.tolist() == [right for right, _ in counts]
    assert m.counts["decoded"].den.tolist() == [counted for _, counted in counts] == m.counts["starts"].den.tolist()
    assert m.counts["text"].den.tolist() == [[LENGTH - 1 - k for k in range(STEPS)]] * COUNT
    result = verdict(m)
    mats = [result["joint_mat"][rung]["value"] for rung in RUNGS]
    total = sum(result["differences"][name]["value"] for name in DIFFERENCES)
    assert total == pytest.approx(mats[-1] - mats[0]) and abs(result["differences"]["starts"]["value"]) > 0.02
    rounds = [r for out in m.outputs for r in out.verifications]
    assert result["tau"]["value"] == pytest.approx(sum(len(r.tokens) for r in rounds) / len(rounds))


def other_layers(drafter: Drafter) -> None:
    drafter.hidden_layers = tuple(layer + 1 for layer in drafter.hidden_layers)


def other_kv_layers(drafter: Drafter) -> None:
    assert drafter.source is not None
    drafter.source.layers = tuple(layer + 1 for layer in drafter.source.layers)
    for layer in drafter.draft_layers:
        layer.projector.layers = tuple(i + 1 for i in layer.projector.layers)


def no_norm(drafter: Drafter) -> None:
    for layer in drafter.draft_layers:
        layer.input_layernorm = torch.nn.Identity()


def shifted_steps(drafter: Drafter) -> None:
    plain = drafter.rotations
    drafter.rotations = lambda rows, k: plain(rows, k + (k > 0))  # a shift of all positions alike would change nothing


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("hidden_only-1", other_layers), ("hidden_only-1", no_norm), ("hidden_only-1", shifted_steps),
        ("kv_only-1", other_kv_layers), ("kv_only-1", shifted_steps), ("hybrid-1", other_layers), ("hybrid_block-2", other_layers),
    ],
)  # fmt: skip
def test_a_fault_of_the_decoders_side_fails(name, fault):
    served = copy.deepcopy(trained(name))
    fault(served)
    result = verdict(measured(name, served))
    assert not result["passed"]
    path = result["differences"]["path"]
    assert path["value"] < -OPTIONS.serving_tolerance and path["judged"]
    text = " ".join(result["faults"])
    assert "rounds accept another number of drafts than the same rows teacher-forced" in text and "a layer id off by one" in text
    assert ("real decoding, against the same rounds teacher-forced: joint MAT" in text) or name == "hybrid_block-2", (
        "six conversations leave a block's interval wide"
    )
    assert "held-out rows" not in text, "the features are right"


def test_states_of_the_wrong_positions_fail(monkeypatch):
    """The decoder hands the drafter the hidden states of one position before each: the classical shift of ids against states."""
    plain = state.decoding_start

    def late(tokens, first, counts, room, hidden, cache):
        return plain(tokens, first, counts, room, {layer: torch.roll(h, 1, 0) for layer, h in hidden.items()}, cache)

    monkeypatch.setattr(state, "decoding_start", late)
    result = verdict(measured("hidden_only-1"))
    assert not result["passed"] and result["differences"]["path"]["value"] < -0.1


def test_a_fault_that_leaves_the_mean_alone_fails_by_its_rounds():
    """A drafter of no worth accepts as rarely with a fault as without: only the rounds themselves tell."""
    m = measured("hidden_only-1")
    wrong = replace(m, different=m.rounds // 10)
    result = verdict(wrong)
    assert result["differences"]["path"]["value"] == 0 and not result["passed"]
    assert f"{wrong.different} of {wrong.rounds} rounds accept another number" in result["faults"][0]
    assert summary(m.counts["retaken"], m.counts["retaken"], wrong, OPTIONS, "bf16")["passed"], "in bf16 ties are common"


def test_a_target_that_verifies_wrongly_fails(monkeypatch):
    plain = state.Sequences.verify

    def verify(self, bonus, draft):
        logits = plain(self, bonus, draft)
        return logits.roll(1, -1) if self.lengths[0] % 3 == 0 else logits

    monkeypatch.setattr(state.Sequences, "verify", verify)
    result = verdict(measured("hidden_only-1"))
    assert any("prefers another token" in fault and "while it verifies" in fault for fault in result["faults"])


def test_features_of_another_layer_fail_as_features():
    m = measured("hidden_only-1")
    drafter = copy.deepcopy(trained("hidden_only-1"))
    other_layers(drafter)
    engine = Engine(target(), trained("hidden_only-1"), DraftingConfig(length=STEPS))
    wrong = measure(engine, objective(drafter), conversations(), LENGTH, ()).counts["retaken"]
    result = verdict(m, wrong)
    assert not result["passed"] and len(result["faults"]) == 1
    assert result["faults"][0].startswith("held-out rows with features taken from the target now, against the stored ones: joint MAT")
    assert "another layer id or norm" in result["faults"][0]
    assert verdict(m)["passed"]


@pytest.mark.parametrize(
    ("difference", "failed"),
    [
        (Interval(-0.3, -0.4, -0.2), True),
        (Interval(0.3, 0.2, 0.4), True),  # better than promised is no less wrong
        (Interval(-0.3, -0.7, 0.1), False),
        (Interval(-0.01, -0.015, -0.005), False),  # below the tolerance
        (Interval(0.0, 0.0, 0.0), False),
        (Interval(None, None, None), False),
    ],
)
def test_the_rule(difference, failed):
    assert beyond(difference, 0.02) is failed


@pytest.fixture
def recipe_of(recipe):
    """A drafter trained for a few steps, over captured shards."""
    from kvshot_ds.training.launch import run as train

    made = recipe(drafter="hidden_only", max_steps=4)
    train(made)
    return made.model_copy(
        update={
            "eval": made.eval.model_copy(update={"serving_prompts": 4, "bootstrap": 100}),
            "decode": made.decode.model_copy(update={"max_new_tokens": 12, "batch": 3}),
        }
    )


def test_the_command_writes_its_check_once_and_exits_with_2_if_it_fails(recipe_of, monkeypatch, capsys, tmp_path):
    from kvshot_ds import cli
    from kvshot_ds.config import dump_recipe
    from kvshot_ds.decoding import parity
    from kvshot_ds.files import read_json

    path = tmp_path / "recipe.yaml"
    path.write_text(dump_recipe(recipe_of))
    monkeypatch.setattr("sys.argv", ["kvshot", "eval", str(path), "--serving-check"])
    assert cli.main() == 0
    result = read_json(recipe_of.run_dir / parity.RESULT)
    evaluated = read_json(recipe_of.run_dir / "eval.json")
    assert result["passed"] and result["conversations"] == 4 and result["batch"] == 3 and result["differences"]["path"]["value"] == 0
    assert result["joint_mat"]["heldout"]["value"] == pytest.approx(evaluated["mat_joint"]["value"])
    assert [r["den"] for r in result["joint"]["same"]] == [r["den"] for r in result["joint"]["retaken"]]
    assert "passed" in capsys.readouterr().out
    assert cli.main() == 0 and "already checked" in capsys.readouterr().out

    plain = parity._faults
    monkeypatch.setattr(parity, "_faults", lambda mats, differences, agree, *a: plain(mats, differences, {**agree, "rounds_different": agree["rounds"]}, *a))
    (recipe_of.run_dir / parity.RESULT).unlink()
    for _ in range(2):  # a failed check stays failed when it is read again
        assert cli.main() == 2
        said = capsys.readouterr()
        assert "FAILED" in said.out and "serving check failed" in said.err and "rounds accept another number" in said.err
    assert not read_json(recipe_of.run_dir / parity.RESULT)["passed"]


def test_too_few_conversations_are_refused(recipe_of):
    from kvshot_ds.decoding import parity
    from kvshot_ds.errors import ConfigError

    few = recipe_of.model_copy(update={"decode": recipe_of.decode.model_copy(update={"max_new_tokens": 2047})})
    with pytest.raises(ConfigError, match=r"at least 2 held-out conversations to decode, found 0; passed over: .*lower decode\.max_new_tokens"):
        parity.run(few)
