"""Public checkpoints: every layout that is read, and every file, setting and tensor that is refused rather than read wrongly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvshot_ds.drafters.build import read_info
from kvshot_ds.drafters.layer_ids import boundaries_from_outputs, outputs_from_boundaries
from kvshot_ds.drafters.public import Public, import_drafter, read_public
from kvshot_ds.errors import ConfigError
from kvshot_ds.target import load_geometry
from tests.drafters.checkpoints import DFLASH, EAGLE3, IDS, D, Tensors, V, dflash, eagle3, write

# Files and layouts


def shards(folder: Path, weights: Tensors) -> None:
    names = sorted(weights)
    parts = {"model-00001-of-00002.safetensors": names[:5], "model-00002-of-00002.safetensors": names[5:]}
    for file, held in parts.items():
        save_file({name: weights[name] for name in held}, folder / file)
    index = {"metadata": {}, "weight_map": {name: file for file, held in parts.items() for name in held}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_shards_and_pickled_tensors_read_as_one_file_does(tmp_path, target_folder):
    config, weights = eagle3()
    target = load_geometry(target_folder)
    whole = read_public(write(tmp_path / "whole", config, weights), target)
    for name, save in (("shards", shards), ("bin", lambda folder, tensors: torch.save(tensors, folder / "pytorch_model.bin"))):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        save(folder, weights)
        other = read_public(folder, target)
        assert other.tensors.keys() == whole.tensors.keys() and all(torch.equal(x, whole.tensors[key]) for key, x in other.tensors.items())
        report = import_drafter(folder, target_folder, tmp_path / f"{name}-ours")
        assert (report.dtype, report.parameters) == ("float32", sum(x.numel() for x in weights.values() if x.is_floating_point()))
    (tmp_path / "shards" / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"names model-00002-of-00002\.safetensors, which is not there"):
        read_public(tmp_path / "shards", target)


class Evil:
    """Runs code when it is unpickled, if anything lets it."""

    def __reduce__(self):
        return exec, ("raise SystemExit('ran')",)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: torch.save({"fc.weight": Evil()}, folder / "pytorch_model.bin"), r"pytorch_model\.bin: the weights do not load"),
        (lambda folder: torch.save([torch.ones(1)], folder / "pytorch_model.bin"), "expected a dictionary of tensors"),
        (lambda folder: (folder / "pytorch_model.bin").write_bytes(b"no"), r"pytorch_model\.bin: the weights do not load"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"no"), r"model\.safetensors: the weights do not load"),
        (lambda folder: (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../x"}}'), "files of this folder"),
        (lambda folder: save_file({"fc.weight": torch.ones(1), "model.fc.weight": torch.ones(1)}, folder / "model.safetensors"), "fc.weight is there twice"),
        (lambda folder: None, r"no weights there; expected model\.safetensors"),
    ],
)
def test_files_that_are_no_weights(make, message, tmp_path, target_folder):
    (tmp_path / "config.json").write_text(json.dumps(EAGLE3))
    make(tmp_path)
    with pytest.raises(ConfigError, match=message):
        read_public(tmp_path, load_geometry(target_folder))


def read(tmp_path: Path, made: tuple[dict[str, Any], Tensors], target_folder: Path) -> Public:
    return read_public(write(tmp_path, *made), load_geometry(target_folder))


def test_a_prefix_and_an_architecture_named_after_the_target(tmp_path, target_folder):
    config, weights = eagle3(architectures=["LlamaForCausalLM"])
    public = read(tmp_path / "bare", (config, weights), target_folder)
    prefixed = read(tmp_path / "prefixed", (config, {name if name == "d2t" else f"model.{name}": x for name, x in weights.items()}), target_folder)
    assert public.tensors.keys() == prefixed.tensors.keys()


def test_t2d_follows_from_d2t(tmp_path, target_folder):
    config, weights = eagle3()
    t2d = weights.pop("t2d")
    public = read(tmp_path, (config, weights | {"d2t": weights["d2t"].int()}), target_folder)
    assert torch.equal(public.tensors["t2d"], t2d) and public.tensors["d2t"].dtype == torch.int64


def test_all_tokens_need_no_map(tmp_path, target_folder):
    public = read(tmp_path, eagle3(draft_vocab_size=None), target_folder)
    assert public.draft_vocab_size == V and public.tensors["t2d"].all() and not public.tensors["d2t"].any()


def test_a_layer_count_copied_from_a_target(tmp_path, target_folder):
    public = read(tmp_path, eagle3(num_hidden_layers=40), target_folder)
    assert public.config.depth == 1 and "num_hidden_layers=40" in public.notes[0]


@pytest.mark.parametrize("own", [True, False])
def test_the_drafters_own_embedding_is_left_out_and_compared(own, tmp_path, target_folder):
    config, weights = eagle3()
    embedding = load_file(target_folder / "model.safetensors")["model.embed_tokens.weight"].clone()
    if own:
        embedding[3:5] += 1
    report = import_drafter(write(tmp_path / "p", config, weights | {"embed_tokens.weight": embedding}), target_folder, tmp_path / "ours")
    assert "embed_tokens.weight" not in load_file(tmp_path / "ours" / "model.safetensors")
    why = report.left_out["embed_tokens.weight"]
    assert why.startswith("2 of 40 rows differ") if own else why.startswith("equal to the target's")
    assert read_info(tmp_path / "ours").extra["imported"]["left_out"] == report.left_out and why in report.lines()[1]


# Layer ids


def test_conventions_are_inverse():
    assert outputs_from_boundaries((2, 14, 25)) == (1, 13, 24) and boundaries_from_outputs((1, 13, 24)) == (2, 14, 25)
    with pytest.raises(ConfigError, match="0 is the embeddings"):
        outputs_from_boundaries((0, 3))


@pytest.mark.parametrize(
    ("top", "nested", "layers"),
    [
        (None, None, "eagle3"),
        ([2, 4, 6], None, (1, 3, 5)),
        (None, [1, 3, 5], (1, 3, 5)),
        ([2, 4, 6], [1, 3, 5], (1, 3, 5)),
        ([7, 1, 3], [6, 0, 2], (6, 0, 2)),
        ([1, 2, 3], [0, 1, 2], (0, 1, 2)),
        ([2, 3, 4], None, (1, 2, 3)),
    ],
)
def test_layer_ids(top, nested, layers, tmp_path, target_folder):
    config, weights = eagle3()
    config = {name: value for name, value in config.items() if name not in (IDS, "eagle_config")}
    config |= ({} if top is None else {IDS: top}) | ({} if nested is None else {"eagle_config": {IDS: nested}})
    assert read(tmp_path, (config, weights), target_folder).config.hidden_layers == layers


@pytest.mark.parametrize(
    ("top", "nested", "message"),
    [
        ([1, 3, 5], [1, 3, 5], r"name different layers; expected \[2, 4, 6\] with \[1, 3, 5\]"),
        (None, [2, 4, 6], r"may mean outputs of layers or indices of hidden_states.* --measure RECIPE"),
        ([1, 2, 3], None, r"these numbers are the usual outputs of layers; .*\[2, 3, 4\] at top level, or \[0, 1, 2\] there.* --measure RECIPE"),
        ([0, 3, 5], None, "0 to 6"),
        ([2, 4, 8], None, "0 to 6"),
        (None, [1, 3, 7], "0 to 6"),
        ([2, 2, 6], None, "different layers"),
        ([2, 4, True], None, "different layers"),
        (None, [2, 4, True], "different layers"),
        ("2,4,6", None, "expected a list"),
    ],
)
def test_layer_ids_that_settle_nothing(top, nested, message, tmp_path, target_folder):
    config, weights = eagle3()
    config = {name: value for name, value in config.items() if name not in (IDS, "eagle_config")}
    config |= ({} if top is None else {IDS: top}) | ({} if nested is None else {"eagle_config": {IDS: nested}})
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, (config, weights), target_folder)


# Refusals


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 64}, "hidden_size=64, but the target has 32"),
        ({"target_hidden_size": 64}, "target_hidden_size=64, but the target has 32"),
        ({"vocab_size": 41}, "vocab_size=41, but the target has 40"),
        ({"sliding_window": 16}, "sliding_window=16: sliding-window attention"),
        ({"layer_types": ["sliding_attention"]}, "layer_types has sliding_attention"),
        ({"kv_lora_rank": 512}, r"kv_lora_rank=512: multi-head latent attention \(MLA\)"),
        ({"norm_before_fc": True}, "norm_before_fc=True"),
        ({"eagle_config": {"norm_before_fc": True}}, r"eagle_config\.norm_before_fc=True"),
        ({"norm_before_residual": 1}, r"norm_before_residual=\[1\]: expected true or false"),
        ({"norm_after_fc": True}, "norm_after_fc=True: a norm that is not known here; known are fc_norm, norm_output, norm_before_residual"),
        ({"eagle_config": {"norm_hidden": True}}, r"eagle_config\.norm_hidden=True: a norm that is not known here"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, r"eagle_config\.use_aux_hidden_state=False"),
        ({"target_layer_ids": [1, 3, 5]}, r"target_layer_ids=\[1, 3, 5\]: which layer ids these are is not known"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"logit_scale": 0.5}, "logit_scale=0.5"),
        ({"is_causal": False}, "is_causal=False"),
        ({"is_neox_style": False}, "interleaved rotary"),
        ({"model_type": "gpt2"}, "model_type='gpt2'; expected llama or qwen3"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "the drafter is not supported: it uses rope_type=longrope|rope_type"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "the target's 96 positions need a drafter of as many"),
        ({"num_key_value_heads": 4}, "no multiple of num_key_value_heads=4"),
        ({"num_key_value_heads": None}, "num_key_value_heads not given"),
        ({"draft_vocab_size": 50}, "draft_vocab_size=50; expected 1 to 40"),
        ({"fc_norm": "yes"}, r"fc_norm=\['yes'\]: expected true or false"),
        ({"fc_norm": True, "eagle_config": {"fc_norm": False}}, "the same at top level and in eagle_config"),
        ({"eagle_config": [1]}, r"eagle_config=\[1\]: expected an object"),
        ({"hidden_act": "wrong"}, "hidden_act|wrong"),
    ],
)
def test_eagle3_settings_that_are_not_ours(changes, message, tmp_path, target_folder):
    config, weights = eagle3()
    config = {name: value for name, value in (config | changes).items() if value is not None}
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, (config, weights), target_folder)


NEUTRAL = {
    "target_hidden_size": D, "target_vocab_size": V, "norm_before_fc": False, "norm_before_residual": False, "is_causal": True,
    "quantization_config": None, "logit_scale": 1.0, "other_norm": False,
    "layer_types": ["full_attention"], "sliding_window": 4096, "use_sliding_window": False, "rope_scaling": None, "attention_bias": None,
}  # fmt: skip


def test_settings_that_change_nothing_are_accepted(tmp_path, target_folder):
    config, weights = eagle3()
    assert read(tmp_path / "eagle3", (config | NEUTRAL, weights), target_folder).config.depth == 1
    config, weights = dflash(block_size=None)
    own = config["dflash_config"] | {"causal": False, "use_swa": False, "output_multiplier": 1.0, "projector_type": "dflash", "other": None}
    neutral = {"is_causal": False, "rope_scaling": None, "draft_vocab_size": V, "dflash_config": own}
    assert read(tmp_path / "dflash", (config | neutral, weights), target_folder).config.block_size == 6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("fc.weight"), r"missing fc\.weight"),
        (lambda w: w.pop("midlayer.self_attn.q_proj.weight"), r"missing midlayer\.self_attn\.q_proj\.weight"),
        (lambda w: w.pop("midlayer.hidden_norm.weight"), r"missing midlayer\.hidden_norm\.weight"),
        (lambda w: w.pop("lm_head.weight"), r"missing lm_head\.weight"),
        (lambda w: w.pop("d2t"), "missing d2t; draft_vocab_size=24 of 40"),
        (lambda w: w.update({"input_norm.weight": torch.ones(3 * D)}), r"unexpected input_norm\.weight"),
        (lambda w: w.update({"midlayer.self_attn.q_norm.weight": torch.ones(10)}), r"unexpected midlayer\.self_attn\.q_norm\.weight"),
        (lambda w: w.update({"midlayer.self_attn.q_proj.bias": torch.ones(60)}), r"unexpected midlayer\.self_attn\.q_proj\.bias"),
        (lambda w: w.update({"fc_norm.0.weight": torch.ones(D)}), r"unexpected fc_norm\.0\.weight"),
        (lambda w: w.update({"mask_hidden": torch.ones(D)}), "unexpected mask_hidden"),
        (lambda w: w.update({"fc.weight": torch.ones(D, 2 * D)}), r"fc\.weight \(32, 64\) instead of \(32, 96\)"),
        (lambda w: w.update({"additional_layers.0.hidden_norm.weight": torch.ones(D)}), r"layout that is not known here \(additional_layers\.0"),
        (lambda w: w.update({"layers.1.mlp.up_proj.weight": torch.ones(D)}), r"layout that is not known here \(layers\.1"),
        (lambda w: w.update({"d2t": w["d2t"].flip(0)}), "d2t names target ids"),
        (lambda w: w.update({"d2t": w["d2t"] + 20}), "d2t names target ids"),
        (lambda w: w.update({"d2t": w["d2t"].float()}), r"d2t is torch\.float32"),
        (lambda w: w.update({"t2d": ~w["t2d"]}), "t2d .* does not mark"),
        (lambda w: w.update({"embed_tokens.weight": torch.ones(V + 1, D)}), r"embed_tokens\.weight is \(41, 32\)"),
        (lambda w: w.update({"fc.weight": w["fc.weight"].to(torch.float8_e4m3fn)}), r"fc\.weight \(torch\.float8_e4m3fn\)"),
    ],
)
def test_eagle3_tensors_that_do_not_fit_are_named(change, message, tmp_path, target_folder):
    config, weights = eagle3()
    change(weights)
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, (config, weights), target_folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["DFlash2DraftModel"]}, "a drafter in a layout that is not known here"),
        ({"model_type": "llama"}, "model_type='llama'; expected qwen3"),
        ({"hidden_size": 64}, "hidden_size=64"),
        ({"num_target_layers": 9}, "num_target_layers=9, but the target has 7"),
        ({"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "layer_types has sliding_attention"),
        ({"sliding_window": 128, "use_sliding_window": None}, "sliding_window=128"),
        ({"is_causal": True}, "causal blocks"),
        ({"rope_theta": None}, "no rope_theta"),
        ({"num_hidden_layers": 9, "layer_types": None}, "depth=9"),
        ({"draft_vocab_size": 24}, "read for EAGLE-3 only"),
        ({"block_size": 8}, "block_size is 6 and 8"),
        ({"dflash_config": {"mask_token_id": 38, "target_layer_ids": [1, 2, 4, 7]}}, r"target_layer_ids=\[1, 2, 4, 7\]"),
        ({"dflash_config": {"mask_token_id": 40, "target_layer_ids": [1, 2, 4, 5]}}, "mask_token_id=40; expected a token of the target, 0 to 39"),
        ({"dflash_config": {"target_layer_ids": [1, 2, 4, 5]}}, "mask_token_id is not given"),
        ({"dflash_config": {"mask_token_id": 38}}, "target_layer_ids is not given"),
        ({"dflash_config": {**DFLASH["dflash_config"], "causal": True}}, r"dflash_config\.causal=True"),
        ({"dflash_config": {**DFLASH["dflash_config"], "final_logit_softcapping": 20.0}}, "capped logits"),
        ({"dflash_config": {**DFLASH["dflash_config"], "selector_rank": 8}}, "dflash_config has {'selector_rank': 8}, which is not known"),
    ],
)
def test_dflash_settings_that_are_not_ours(changes, message, tmp_path, target_folder):
    config, weights = dflash()
    config = {name: value for name, value in (config | changes).items() if value is not None}
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, (config, weights), target_folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("hidden_norm.weight"), r"missing hidden_norm\.weight"),
        (lambda w: w.pop("layers.2.self_attn.k_norm.weight"), r"missing layers\.2\.self_attn\.k_norm\.weight"),
        (lambda w: w.update({"lm_head.weight": torch.ones(V, D)}), r"unexpected lm_head\.weight"),
        (lambda w: w.update({"embed_tokens.weight": torch.ones(V, D)}), r"unexpected embed_tokens\.weight"),
        (lambda w: w.update({"d2t": torch.zeros(V)}), "read for EAGLE-3 only"),
        (lambda w: w.update({"layers.3.mlp.up_proj.weight": torch.ones(1)}), r"unexpected layers\.3\.mlp\.up_proj\.weight"),
        (lambda w: w.update({"fc.weight": torch.ones(D, 3 * D)}), r"fc\.weight \(32, 96\) instead of \(32, 128\)"),
    ],
)
def test_dflash_tensors_that_do_not_fit_are_named(change, message, tmp_path, target_folder):
    config, weights = dflash()
    change(weights)
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, (config, weights), target_folder)


def test_folders_that_are_no_drafter(tmp_path, target_folder):
    target = load_geometry(target_folder)
    with pytest.raises(ConfigError, match=r"no config\.json there"):
        read_public(tmp_path, target)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="expected an object, found list"):
        read_public(tmp_path, target)
    with pytest.raises(ConfigError, match="a layout that is not known here"):
        read_public(target_folder, target)
    folder = write(tmp_path / "p", *eagle3())
    with pytest.raises(ConfigError, match=r"holds a config\.json already"):
        import_drafter(folder, target_folder, folder)
