"""Layer ids settled by measuring: features made so that it is known which reading is right, by a second implementation of the drafter."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from kvshot_ds import cli, measure_layers
from kvshot_ds.config import EvalConfig
from kvshot_ds.drafters.build import read_info
from kvshot_ds.drafters.public import import_drafter
from kvshot_ds.errors import ConfigError
from kvshot_ds.features.shard import ShardSet
from tests.drafters.checkpoints import IDS, Tensors, dflash, eagle3, flat, speculators, write
from tests.drafters.heldout import features

AMBIGUOUS = {IDS: None, "eagle_config": {IDS: [2, 4, 6]}}  # outputs 2, 4, 6, or indices of hidden_states: outputs 1, 3, 5
OUTPUTS, INDICES = (2, 4, 6), (1, 3, 5)


def measured(tmp_path: Path, target: Path, right: tuple[int, ...] | None, made: tuple[dict[str, Any], Tensors] | None = None, **options: Any):
    made = made or eagle3(**AMBIGUOUS)
    source = write(tmp_path / "public", *made)
    shards = features(tmp_path / "features", target, right, (flat(made[0]), made[1]), **options)
    return measure_layers.run(source, target, tmp_path / "ours", str(shards))


@pytest.mark.parametrize(("right", "means"), [(OUTPUTS, "outputs of layers"), (INDICES, "indices of hidden_states")])
def test_the_reading_that_drafts_what_the_target_says_is_taken(right, means, tmp_path, target_folder):
    report = measured(tmp_path, target_folder, right)
    info = read_info(tmp_path / "ours")
    assert info.config.hidden_layers == right
    told = info.extra["imported"]["measured"]
    alphas = {tuple(r["layers"]): (r["alpha_0"], r["means"]) for r in told["readings"]}
    assert alphas.keys() == {OUTPUTS, INDICES} and alphas[right] == (1.0, means) and min(alphas.values())[0] < 0.5
    assert told["conversations"] == 12 and told["difference"]["low"] * told["difference"]["high"] > 0
    note = report.notes[-1]
    assert "taken by measuring" in note and f"1.000 as {means}" in note and "95% interval" in note and "12 held-out conversations" in note


def test_data_that_show_nothing_settle_nothing_and_both_numbers_are_told(tmp_path, target_folder):
    with pytest.raises(ConfigError, match=r"the data do not tell them apart: step-0 acceptance is 0\.\d+ as outputs of layers .* and 0\.\d+ as indices"):
        measured(tmp_path, target_folder, None)
    assert not (tmp_path / "ours").exists()


def test_a_single_conversation_settles_nothing(tmp_path, target_folder):
    with pytest.raises(ConfigError, match="no interval, over 1 held-out conversations"):
        measured(tmp_path, target_folder, OUTPUTS, count=1)


def test_ids_that_a_rule_settles_are_confirmed_or_contradicted(tmp_path, target_folder):
    by_rule = eagle3(**{IDS: [2, 4, 6]}, eagle_config=None)  # at top level: indices of hidden_states
    assert "as the rule says" in measured(tmp_path / "a", target_folder, INDICES, by_rule).notes[-1]
    with pytest.raises(ConfigError, match=r"means outputs 1, 3, 5 by rule, but the data say otherwise: .* 1\.000 as outputs of layers"):
        measured(tmp_path / "b", target_folder, OUTPUTS, by_rule)
    report = measured(tmp_path / "c", target_folder, None, by_rule)
    assert "taken by rule, which the data neither confirm nor refute" in report.notes[-1]
    assert read_info(tmp_path / "c" / "ours").config.hidden_layers == INDICES
    assert "nothing was measured" in measured(tmp_path / "d", target_folder, None, eagle3()).notes[-1]  # both places, which agree
    assert "not named, so the usual ones are meant" in measured(tmp_path / "e", target_folder, None, speculators(**{IDS: None})).notes[-1]


def test_the_usual_outputs_where_indices_belong_are_settled_too(tmp_path, target_folder):
    measured(tmp_path, target_folder, (1, 2, 3), speculators(**{IDS: [1, 2, 3]}))
    assert read_info(tmp_path / "ours").config.hidden_layers == (1, 2, 3)


def test_places_that_disagree_are_settled_by_what_each_means(tmp_path, target_folder):
    measured(tmp_path, target_folder, OUTPUTS, eagle3(**{IDS: [2, 4, 6]}, eagle_config={IDS: [2, 4, 6]}))
    assert read_info(tmp_path / "ours").config.hidden_layers == OUTPUTS


def test_features_that_lack_a_layer_name_the_capture(tmp_path, target_folder):
    with pytest.raises(ConfigError, match=r"lack hidden\.6, .*kvshot capture RECIPE 'capture\.features\.hidden_layers=\[0, 1, 2, 3, 4, 5, 6\]'"):
        measured(tmp_path, target_folder, OUTPUTS, layers=range(6))


def test_features_of_another_target_and_what_is_no_data(tmp_path, target_folder, tiny_features):
    source = write(tmp_path / "public", *eagle3(**AMBIGUOUS))
    with pytest.raises(ConfigError, match="captured from another target"):
        measure_layers.run(source, target_folder, tmp_path / "ours", str(tiny_features))
    with pytest.raises(ConfigError, match=r"--measure .*: expected a recipe \(\.yaml\) or a folder of feature shards"):
        measure_layers.run(source, target_folder, tmp_path / "ours", str(tmp_path))


def test_dflash_ids_are_measured_too(tmp_path, target_folder):
    shards = features(tmp_path / "features", target_folder, None, eagle3())
    settle = measure_layers.settling(ShardSet.open(shards, "heldout"), target_folder, EvalConfig(max_conversations=5))
    report = import_drafter(write(tmp_path / "p", *dflash()), target_folder, tmp_path / "ours", settle)
    assert "outputs 1, 2, 4, 5" in report.notes[-1] and "over 5 held-out conversations" in report.notes[-1]


def test_from_the_command_line_with_a_recipe(tmp_path, target_folder, monkeypatch, capsys):
    made = eagle3(**AMBIGUOUS)
    embedding = load_file(target_folder / "model.safetensors")["model.embed_tokens.weight"]
    source = write(tmp_path / "public", made[0], made[1] | {"embed_tokens.weight": embedding.clone()})
    features(tmp_path / "work" / "features", target_folder, OUTPUTS, made)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        json.dumps({"name": "x", "work": str(tmp_path / "work"), "target": {"path": str(target_folder), "device": "cpu"}, "eval": {"confidence": 0.9}})
    )
    words = ["kvshot", "drafter", "import", str(source), str(tmp_path / "ours"), "--target", str(target_folder)]
    monkeypatch.setattr(sys, "argv", words)
    assert cli.main() != 0 and "--measure RECIPE" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", [*words, "--measure", str(recipe)])
    assert cli.main() == 0
    out = capsys.readouterr().out
    assert "outputs 2, 4, 6 taken by measuring" in out and "90% interval" in out
