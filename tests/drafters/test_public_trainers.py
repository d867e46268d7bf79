"""The layouts of the trainers of EAGLE-3: whose a checkpoint is, and what speculators, which nests its configs, means by each key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvshot_ds.drafters.public import Public, read_public
from kvshot_ds.errors import ConfigError
from kvshot_ds.target import load_geometry
from tests.drafters.checkpoints import ANGELSLIM, EAGLE, IDS, VD, D, Tensors, V, dflash, eagle3, speculators, write


def read(tmp_path: Path, made: tuple[dict[str, Any], Tensors], target_folder: Path) -> Public:
    return read_public(write(tmp_path, *made), load_geometry(target_folder))


@pytest.mark.parametrize(
    ("made", "layout"),
    [
        (eagle3(), "research"),
        (eagle3("layers.0.", architectures=["LlamaForCausalLMEagle3"]), "research"),
        (eagle3(base=ANGELSLIM), "AngelSlim"),
        (eagle3(base=ANGELSLIM, architectures=["Eagle3LLamaforCausalLM"]), "AngelSlim"),
        (eagle3(base=EAGLE), "EAGLE"),
        (speculators(), "speculators"),
        (speculators(architectures=["Eagle3DraftModel"]), "speculators"),
        (dflash(), "original"),
    ],
)
def test_whose_layout_it_is(made, layout, tmp_path, target_folder):
    assert read(tmp_path, made, target_folder).layout == layout


def test_the_base_of_angelslims_trainer_is_told(tmp_path, target_folder):
    notes = read(tmp_path, eagle3(base=ANGELSLIM), target_folder).notes
    assert notes[0].startswith("AngelSlim's trainer takes rotary base 10000") and "rope_theta=50 was taken" in notes[0]
    assert not any("AngelSlim" in note for note in read(tmp_path / "b", eagle3(base=ANGELSLIM, rope_theta=10000.0), target_folder).notes)


def test_speculators_as_its_reader_takes_it(tmp_path, target_folder):
    target = load_geometry(target_folder)
    config, weights = speculators({"num_hidden_layers": 2, "model_type": "qwen3"}, norm_output=True, fc_norm=True)
    weights |= {"verifier_lm_head.weight": torch.ones(VD, D), "verifier_norm.weight": torch.ones(D)}
    public = read_public(write(tmp_path, config, weights), target)
    assert (public.config.depth, public.config.norm_before_residual, public.config.norm_output, public.config.fc_norm) == (2, True, True, True)
    assert public.config.hidden_layers == (1, 3, 5) and public.draft_vocab_size == VD and public.geometry.qk_norm
    assert public.left_out.keys() == {"embed_tokens.weight", "verifier_lm_head.weight", "verifier_norm.weight"} and public.embedding is not None
    assert (public.made_for.name, public.made_for.architectures) == ("someone/small", ("Qwen3ForCausalLM",))
    assert public.tensors.keys() == weights.keys() - public.left_out.keys()


def test_a_whole_vocabulary_needs_no_map_in_speculators_either(tmp_path, target_folder):
    config, weights = speculators(draft_vocab_size=V)
    assert not weights.keys() & {"d2t", "t2d"}
    public = read(tmp_path, (config, weights), target_folder)
    assert public.draft_vocab_size == V and public.tensors["t2d"].all()


@pytest.mark.parametrize(
    ("layer", "changes", "message"),
    [
        (None, {"norm_before_residual": None}, "norm_before_residual not given; readers take its absence for true or for false"),
        (None, {"draft_vocab_size": None}, "draft_vocab_size not given"),
        (None, {"speculators_model_type": "dflash"}, "speculators_model_type='dflash': of the speculators layout only eagle3 is read"),
        (None, {"speculators_model_type": "dflash", "architectures": ["DFlashDraftModel"]}, "speculators_model_type='dflash'"),
        (None, {"transformer_layer_config": {}}, "no transformer_layer_config"),
        (None, {"transformer_layer_config": [1]}, r"transformer_layer_config=\[1\]: expected an object"),
        (None, {"speculators_config": {"verifier": "small"}}, "verifier='small': expected an object"),
        (None, {"norm_before_fc": True}, "norm_before_fc=True: one norm over the joined hidden states"),
        (None, {"fc_norm": "yes"}, r"fc_norm=\['yes'\]: expected true or false"),
        (None, {"hidden_size": 64}, "hidden_size=64 and 32 at top level and in transformer_layer_config"),
        (None, {"target_hidden_size": 64}, "target_hidden_size=64, but the target has 32"),
        (None, {"aux_hidden_state_layer_ids": [2, 4, 5]}, r"layer_ids=\[2, 4, 6\] and aux_hidden_state_layer_ids=\[2, 4, 5\]"),
        (None, {IDS: [1, 2, 3]}, "these numbers are the usual outputs of layers"),
        (None, {IDS: [2, 4, 8]}, "0 to 6"),
        ({"vocab_size": 41}, {}, "vocab_size=41, but the target has 40"),
        ({"hidden_size": 64}, {}, "hidden_size=64, but the target has 32"),
        ({"model_type": "gemma"}, {}, "model_type='gemma'; expected llama or qwen3"),
        ({"model_type": None}, {}, "model_type=None; expected llama or qwen3"),
        ({"sliding_window": 16}, {}, "sliding_window=16"),
        ({"layer_types": ["sliding_attention"]}, {}, "layer_types has sliding_attention"),
        ({"kv_lora_rank": 8}, {}, "kv_lora_rank=8"),
        ({"rope_scaling": {"rope_type": "longrope"}}, {}, "longrope|rope_type"),
        ({"num_key_value_heads": None}, {}, "num_key_value_heads not given"),
        ({"num_hidden_layers": 9}, {}, "depth=9"),
    ],
)
def test_speculators_settings_that_are_not_ours(layer, changes, message, tmp_path, target_folder):
    config, weights = speculators()
    inner = {name: value for name, value in (config["transformer_layer_config"] | (layer or {})).items() if value is not None}
    config = {name: value for name, value in (config | {"transformer_layer_config": inner} | changes).items() if value is not None}
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, (config, weights), target_folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("layers.0.hidden_norm.weight"), r"missing layers\.0\.hidden_norm\.weight"),
        (lambda w: w.pop("layers.1.mlp.up_proj.weight"), r"missing layers\.1\.mlp\.up_proj\.weight"),
        (lambda w: w.update({"layers.1.hidden_norm.weight": torch.ones(D)}), r"unexpected layers\.1\.hidden_norm\.weight"),
        (lambda w: w.update({"input_norm.weight": torch.ones(3 * D)}), r"unexpected input_norm\.weight"),
        (
            lambda w: w.update({"layers.1.self_attn.q_proj.weight": torch.ones(60, 2 * D)}),
            r"layers\.1\.self_attn\.q_proj\.weight \(60, 64\) instead of \(60, 32\)",
        ),
        (lambda w: w.pop("d2t"), "missing d2t; draft_vocab_size=24 of 40"),
        (lambda w: w.update({"embed_tokens.weight": torch.ones(V - 1, D)}), r"embed_tokens\.weight is \(39, 32\)"),
    ],
)
def test_speculators_tensors_that_do_not_fit_are_named(change, message, tmp_path, target_folder):
    config, weights = speculators({"num_hidden_layers": 2})
    change(weights)
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, (config, weights), target_folder)
