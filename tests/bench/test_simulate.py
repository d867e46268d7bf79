"""bench.simulate over files as the other commands write them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvshot_ds.bench import latency, simulate
from kvshot_ds.bench.latency_table import LatencyTable
from kvshot_ds.config import DraftingConfig, Recipe, SamplingConfig
from kvshot_ds.drafters.build import DrafterInfo, build_drafter, save_drafter
from kvshot_ds.errors import ConfigError, KvshotError
from kvshot_ds.files import write_json
from kvshot_ds.target import load_geometry, weights_digest
from tests.bench.test_predict import exact, stepwise, surface, table


@pytest.fixture
def recipe(tiny_target: Path, tmp_path: Path) -> Recipe:
    """A run with a drafter of random weights, and a latency table with one of its shape."""
    g = load_geometry(tiny_target)
    options = {
        "name": "one", "work": tmp_path, "target": {"path": tiny_target, "device": "cpu", "dtype": "fp32"}, "eval": {"bootstrap": 100},
        "train": {"drafter": {"family": "hybrid"}, "draft_vocab_size": 50}, "bench": {"simulate": tmp_path / "table.json"},
    }  # fmt: skip
    made = Recipe.model_validate(options)
    drafter = build_drafter(made.train.drafter, g, 50)
    drafter.set_vocab(torch.arange(50))
    drafter.reset(0)
    info = DrafterInfo(made.train.drafter, g, 50, "tiny", weights_digest(tiny_target), {})
    save_drafter(made.run_dir / "drafter", drafter, info, torch.float32)
    shape = latency.Measured("x", info.config, g, drafter).shape
    replace(table(drafters=(replace(stepwise(), name="random weights", shape=shape),)), geometry=g.to_json()).save(tmp_path / "table.json")
    return made


def evaluated(recipe: Recipe, conversations: bool = True) -> None:
    joint = [[8, 6, 2], [4, 1, 0], [9, 7, 7]]
    den = [[10, 10, 8]] * 3
    steps = [{"k": k, "num": sum(j[k] for j in joint), "den": sum(d[k] for d in den)} for k in range(3)]
    write_json(recipe.run_dir / "eval.json", {"joint": steps})
    if conversations:
        write_json(recipe.run_dir / "eval_conversations.json", {"den": den, "top1": joint, "joint": joint, "prob": joint})


def decoded(recipe: Recipe, temperature: float = 0.0, **drafting: object) -> None:
    options = {"drafting": DraftingConfig(**drafting).model_dump(mode="json"), "sampling": SamplingConfig(temperature=temperature).model_dump(mode="json")}
    write_json(recipe.run_dir / "decode.json", {**options, "joint": [{"k": k, "num": 6 - 2 * k, "den": 10} for k in range(3)]})


def test_chains_of_every_length_from_held_out_acceptance(recipe):
    evaluated(recipe)
    (found,) = simulate.run(recipe)
    assert (found.name, found.source, found.notes) == ("one", "eval.json", ())
    assert [p.shape.levels for p in found.predictions] == [1, 2, 3]
    assert found.predictions[2].tokens.value == pytest.approx(1 + 21 / 30 + 14 / 30 + 9 / 24)
    assert found.best.speedup.value == max(p.speedup.value for p in found.predictions)
    assert found.best.speedup.low < found.best.speedup.value < found.best.speedup.high
    printed = simulate.text([found], LatencyTable.load(recipe.bench.simulate)).splitlines()
    assert "one (hybrid" not in printed[0] and printed[2].startswith("one (hidden_only, 1 parameters), acceptance of eval.json, context 500")
    assert [line.split()[:2] for line in printed[4:]] == [["1", "draft"], ["2", "drafts"], ["3", "drafts"]]
    assert sum(line.endswith("best") for line in printed) == 1


def test_without_conversations_there_is_no_interval(recipe):
    evaluated(recipe, conversations=False)
    (found,) = simulate.run(recipe)
    assert found.predictions[2].tokens.value == pytest.approx(1 + 21 / 30 + 14 / 30 + 9 / 24)
    assert found.best.speedup.low is None


def test_a_tree_is_predicted_from_decoding(recipe):
    evaluated(recipe)
    decoded(recipe, strategy="static_tree", branching=(4, 2, 1))
    chains, tree = simulate.run(recipe)
    assert (chains.source, tree.source) == ("eval.json", "decode.json")
    (one,) = tree.predictions
    assert one.shape.nodes == 20 and one.tokens.value == pytest.approx(1 + 0.6 + 0.4 + 0.2)
    assert "tree of 20, 3 levels" in simulate.text([tree], LatencyTable.load(recipe.bench.simulate))


def test_acceptance_of_samples_is_called_so(recipe):
    evaluated(recipe)
    decoded(recipe, temperature=0.8)
    greedy, sampled = simulate.run(recipe)
    assert not greedy.notes and "samples at temperature 0.8" in " ".join(sampled.notes)


def test_a_table_with_which_a_wider_forward_is_faster_is_doubted(recipe):
    evaluated(recipe)
    (before,) = simulate.run(recipe)
    table = json.loads(recipe.bench.simulate.read_text())
    for point in table["forward"]["points"]:
        point |= dict.fromkeys(("seconds", "low", "high"), 1.0 if point["size"] == 1 else 1e-3)
    recipe.bench.simulate.write_text(json.dumps(table))
    (after,) = simulate.run(recipe)
    assert not before.notes and "impossible" in after.notes[0]


def test_what_the_model_leaves_out_is_said(recipe):
    decoded(recipe, min_confidence=0.3)
    (found,) = simulate.run(recipe)
    assert len(found.predictions) == 3 and "min_confidence" in found.notes[0]
    evaluated(recipe)
    warm = recipe.model_copy(update={"decode": recipe.decode.model_copy(update={"sampling": recipe.decode.sampling.model_copy(update={"temperature": 1.0})})})
    assert "greedy" in simulate.run(warm)[0].notes[0]


def test_a_tree_that_the_table_cannot_price_is_named_beside_the_chains(recipe):
    evaluated(recipe)
    decoded(recipe, strategy="dynamic_tree", length=3, top_k=10, nodes=100)
    (found,) = simulate.run(recipe)
    assert found.source == "eval.json" and "forward of 101 tokens" in found.notes[0]
    (recipe.run_dir / "eval.json").unlink()
    with pytest.raises(KvshotError, match=r"no acceptance to predict from: decode\.json"):
        simulate.run(recipe)


def test_bad_input_says_what_to_do(recipe, tmp_path):
    with pytest.raises(KvshotError, match=r"no acceptance to predict from; run `kvshot eval`"):
        simulate.run(recipe)
    write_json(recipe.run_dir / "eval.json", {"alpha": []})
    with pytest.raises(KvshotError, match=r"eval\.json: expected acceptance as `kvshot eval` writes it, found KeyError: 'joint'"):
        simulate.run(recipe)
    evaluated(recipe)
    with pytest.raises(ConfigError, match=r"bench\.simulate: expected the path"):
        simulate.run(recipe.model_copy(update={"bench": recipe.bench.model_copy(update={"simulate": None})}))
    known = LatencyTable.load(recipe.bench.simulate)
    replace(known, drafters=()).save(tmp_path / "table.json")
    with pytest.raises(KvshotError, match="no drafter of its shape; it has none"):
        simulate.run(recipe)
    replace(known, geometry={**known.geometry, "num_layers": 99}).save(tmp_path / "table.json")
    with pytest.raises(ConfigError, match=r"other shapes .*num_layers 99 instead of"):
        simulate.run(recipe)
    (tmp_path / "table.json").unlink()
    with pytest.raises(KvshotError, match=r"no such latency table; `kvshot bench RECIPE --latency table\.json` writes one"):
        simulate.run(recipe)


def test_a_context_may_be_asked_for(recipe):
    evaluated(recipe)
    near, far = (simulate.run(recipe.model_copy(update={"bench": recipe.bench.model_copy(update={"simulate_context": c})}))[0].best for c in (100, 4000))
    assert near.context == 100 and not near.outside and far.outside
    assert near.alone < far.alone


def test_training_options_do_not_change_a_drafters_shape(recipe):
    g, config = load_geometry(recipe.target.path).to_json(), recipe.train.drafter.model_dump(mode="json")
    shape = simulate.shape_of(config, 50, g)
    other = json.loads(json.dumps(config))
    other["gate"]["init"] = "zero_delta"
    other["kv"]["projector_init"] = "random"
    assert simulate.shape_of(other, 50, g) == shape
    other["kv"]["injection"] = "linear"
    assert simulate.shape_of(other, 50, g) != shape
    assert simulate.shape_of(config, 51, g) != shape


def test_the_toys_of_this_file_are_what_a_table_holds():
    assert table().fault() is None and surface(lambda c, n: 1.0).fault() is None and exact(0).fault() is None
