"""A published drafter and the target it was made for: what is refused, what is only told, and what an unknown checkpoint is told to be."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvshot_ds.config import HiddenOnlyConfig
from kvshot_ds.drafters.build import DrafterInfo, build_drafter, save_drafter
from kvshot_ds.drafters.public import import_drafter, read_public
from kvshot_ds.errors import ConfigError
from kvshot_ds.target import load_geometry, weights_digest
from tests.drafters.checkpoints import EAGLE3, IDS, D, V, dflash, eagle3, speculators, write

SAME_ROPE = {"rope_theta": 100.0, "max_position_embeddings": 96}  # as the target has it


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (SAME_ROPE, []),
        (SAME_ROPE | {"rope_theta": 50.0}, ["rope_theta=50.0 (the target has 100.0)", "kept, since the drafter attends to its own keys alone"]),
        (SAME_ROPE | {"rope_theta": None}, ["rope_theta=10000.0 (the target has 100.0)"]),
        (
            SAME_ROPE | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            ["factor=2.0 (the target has None)", "rope_type=linear (the target has default)"],
        ),
        (SAME_ROPE | {"max_position_embeddings": 64}, ["max_position_embeddings=64, the target has 96"]),
        (SAME_ROPE | {"max_position_embeddings": 128}, []),
    ],
)
def test_a_rotary_embedding_of_its_own_is_told_and_kept(changes, words, tmp_path, target_folder):
    public = read_public(write(tmp_path, *eagle3(**changes)), load_geometry(target_folder))
    assert all(word in " ".join(public.notes) for word in words) and bool(public.notes) == bool(words)
    assert public.geometry.rope["rope_theta"] == (changes["rope_theta"] or 10000.0)


def test_dflash_tells_of_its_rotary_embedding_too(tmp_path, target_folder):
    notes = read_public(write(tmp_path, *dflash()), load_geometry(target_folder)).notes
    assert len(notes) == 2 and "rope_theta=60.0" in notes[0]


def verifier(**says: object) -> dict[str, object]:
    return {"speculators_config": {"algorithm": "eagle3", "verifier": says}}


def test_the_target_that_a_checkpoint_names(tmp_path, target_folder):
    def notes(name: str, **says: object) -> str:
        return " ".join(import_drafter(write(tmp_path / name / "p", *speculators(**verifier(**says))), target_folder, tmp_path / name / "ours").notes)

    assert "names the target" not in notes("same", name_or_path="someone/Small", architectures=["Qwen3ForCausalLM"])
    assert "it names the target someone/large; that small is that one was checked by shapes alone" in notes("another", name_or_path="someone/large")
    with pytest.raises(ConfigError, match=r"made for a target of architectures \['LlamaForCausalLM'\] \(x/small\), but .* holds \['Qwen3ForCausalLM'\]"):
        notes("kind", name_or_path="x/small", architectures=["LlamaForCausalLM"])
    assert not (tmp_path / "kind" / "ours").exists()


def test_the_digest_that_weights_name_decides(tmp_path, target_folder):
    config, weights = speculators(**verifier(name_or_path="someone/large", architectures=["Qwen3ForCausalLM"]))
    for name, digest in (("right", weights_digest(target_folder)), ("wrong", "0" * 64)):
        folder = write(tmp_path / name, config, weights)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt", "kvshot_target_digest": digest})
    assert "names the target" not in " ".join(import_drafter(tmp_path / "right", target_folder, tmp_path / "ours").notes)
    with pytest.raises(ConfigError, match=r"made for a target of weights 000000000000, but .* holds weights"):
        import_drafter(tmp_path / "wrong", target_folder, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_an_embedding_that_was_trained_is_refused_unless_it_is_the_targets(tmp_path, target_folder):
    config, weights = speculators(embed_requires_grad=True)
    with pytest.raises(ConfigError, match=r"40 of 40 rows of its embed_tokens\.weight differ .* embed_requires_grad=True: a trained embedding of its own"):
        import_drafter(write(tmp_path / "p", config, weights), target_folder, tmp_path / "ours")
    weights["embed_tokens.weight"] = load_file(target_folder / "model.safetensors")["model.embed_tokens.weight"].clone()
    report = import_drafter(write(tmp_path / "q", config, weights), target_folder, tmp_path / "ours")
    assert report.left_out["embed_tokens.weight"].startswith("equal to the target's")


def test_a_drafter_of_ours_needs_no_import(tmp_path, target_folder):
    import_drafter(write(tmp_path / "p", *eagle3()), target_folder, tmp_path / "ours")
    with pytest.raises(ConfigError, match="a drafter folder of kvshot-ds already, for this target"):
        import_drafter(tmp_path / "ours", target_folder, tmp_path / "again")
    other = tmp_path / "other"
    shutil.copytree(target_folder, other)
    config = json.loads((other / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = 200.0
    (other / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"for the target 'small' .*not for the one given .*: other weights or another config"):
        import_drafter(tmp_path / "ours", other, tmp_path / "again")
    trained, g = HiddenOnlyConfig(), load_geometry(target_folder)
    drafter = build_drafter(trained, g, V)
    save_drafter(tmp_path / "trained", drafter, DrafterInfo(trained, g, V, "small", weights_digest(target_folder), {}), torch.float32)
    with pytest.raises(ConfigError, match=r"not for the one given .*: rope .*100\.0.*, the target's .*200\.0.*; name the target"):
        import_drafter(tmp_path / "trained", other, tmp_path / "again")


def told(folder: Path, target_folder: Path) -> str:
    with pytest.raises(ConfigError) as error:
        read_public(folder, load_geometry(target_folder))
    return str(error.value)


def test_an_unknown_layout_lists_what_was_found_and_what_was_expected(tmp_path, target_folder):
    config = {"architectures": ["MedusaModel"], "model_type": "medusa", "medusa_num_heads": 4, "hidden_size": D}
    text = told(write(tmp_path, config, {f"{i}.0.linear.weight": torch.ones(D, D) for i in range(20)}), target_folder)
    assert "found architectures: ['MedusaModel']; model_type: medusa" in text
    assert "found in config.json: architectures, model_type, medusa_num_heads, hidden_size" in text
    assert "found tensors: 0.0.linear.weight [32, 32], 1.0.linear.weight" in text and "and 8 more" in text
    for known in (
        "LlamaForCausalLMEagle3",
        "LlamaForCausalLM]",
        "Eagle3LlamaForCausalLM",
        "Eagle3Speculator",
        "DFlashDraftModel",
        "midlayer.*",
        "dflash_config",
    ):
        assert known in text
    assert text.count("\n  expected, ") == 5


def test_eagle_1_is_told_from_what_is_not_known(tmp_path, target_folder):
    config = {name: EAGLE3[name] for name in ("hidden_size", "vocab_size", "num_hidden_layers")} | {"architectures": ["LlamaForCausalLM"]}
    weights = {"fc.weight": torch.ones(D, 2 * D), "embed_tokens.weight": torch.ones(V, D), "layers.0.mlp.up_proj.weight": torch.ones(56, D)}
    assert "it looks like EAGLE-1 or EAGLE-2" in told(write(tmp_path, config, weights), target_folder)
    assert "EAGLE-1 or" not in told(write(tmp_path / "b", config, weights | {"fc.weight": torch.ones(D, 3 * D)}), target_folder)


def test_an_order_of_layers_that_engines_do_not_keep_is_told(tmp_path, target_folder):
    target = load_geometry(target_folder)
    made = eagle3(**SAME_ROPE, **{IDS: [7, 1, 3]}, eagle_config=None), dflash(dflash_config={"mask_token_id": 0, "target_layer_ids": [6, 0, 2, 3]})
    for name, one in zip("ab", made, strict=True):
        assert "taken in the order given" in read_public(write(tmp_path / name, *one), target).notes[0]
