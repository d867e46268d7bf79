"""`kvshot export`: folders that appear whole or not at all, the own format, the card, and what a user can get wrong."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

import kvshot_ds
from kvshot_ds.cli import cli
from kvshot_ds.config import DFlashConfig, HiddenOnlyConfig, HybridBlockConfig, HybridConfig, KVBlockConfig, KVOnlyConfig, Recipe, dump_recipe
from kvshot_ds.drafters.build import drafters_for, load_drafter, read_info
from kvshot_ds.errors import ConfigError, KvshotError
from kvshot_ds.export import run as module
from kvshot_ds.export.facts import UNKNOWN, license_of
from kvshot_ds.export.run import export_drafter
from kvshot_ds.target import load_parts
from tests.export.made import VD, bound, proposals, read, trained

EVAL = {
    "name": "h", "digest": "x", "data": {"split": "heldout", "conversations": 29}, "confidence": 0.95,
    "alpha": [
        {"k": 0, "num": 3, "den": 9, "value": 0.3331, "low": 0.301, "high": 0.359},
        {"k": 1, "num": 0, "den": 0, "value": None, "low": None, "high": None},
    ],
    "mat": {"value": 1.4449, "low": 1.39, "high": 1.5}, "mat_joint": {"value": 1.6, "low": 1.5, "high": 1.7},
    "retention": {"value": 0.5, "low": 0.4, "high": 0.6},
}  # fmt: skip


def a_run(folder: Path, target: Path, config=None) -> Path:
    """A run's folder as training leaves it."""
    trained(folder / "drafter", config or HiddenOnlyConfig(), target)
    info = json.loads((folder / "drafter" / "config.json").read_text())
    info["training"] = {"status": "complete", "steps": 120, "supervised_rows": 29270, "tokens": 88123, "init": {"layers": "target"}}
    (folder / "drafter" / "config.json").write_text(json.dumps(info))
    recipe = Recipe.model_validate(
        {
            "name": "hid",
            "work": "work",
            "target": {"path": target},
            "prep": {"sources": [{"path": "/data/mine/chats.json"}]},
            "train": {"objective": {"steps": 5}},
        }
    )
    (folder / "recipe.yaml").write_text(dump_recipe(recipe))
    (folder / "provenance.json").write_text(json.dumps({"command": ["kvshot", "train", "my recipe.yaml"], "git_commit": "abc123", "versions": {"torch": "2"}}))
    (folder / "eval.json").write_text(json.dumps(EVAL))
    return folder


def test_metrics_of_other_weights_are_not_put_on_the_card(tmp_path, tiny_target):
    run = a_run(tmp_path / "run", tiny_target)
    (run / "eval.json").write_text(json.dumps(EVAL | {"weights": "of another training"}))
    with pytest.raises(KvshotError, match=r"eval\.json was measured with other weights than those in .*run kvshot eval again"):
        export_drafter(run, tmp_path / "out", "kvshot")
    assert not (tmp_path / "out").exists()


# The own format


@pytest.mark.parametrize(
    "config",
    [
        HiddenOnlyConfig(hidden_layers="last"),
        KVOnlyConfig(),
        HybridConfig(),
        DFlashConfig(depth=1),
        KVBlockConfig(depth=1),
        HybridBlockConfig(depth=1),
    ],
    ids=lambda config: config.family,
)
def test_one_line_of_python_loads_any_family(config, tmp_path, targets):
    own = trained(tmp_path / "own", config, targets["Qwen3"])
    done = export_drafter(own, tmp_path / "out", "kvshot")
    drafter = kvshot_ds.load_drafter(tmp_path / "out")
    want, _ = load_drafter(own, "cpu", torch.float32)
    assert type(drafter) is type(want) and drafter.family == config.family and not drafter.training
    assert drafter.state_dict().keys() == want.state_dict().keys() and done.tensors == len(want.state_dict())
    assert all(torch.equal(x, want.state_dict()[name]) for name, x in drafter.state_dict().items())
    config_json, _ = read(tmp_path / "out")
    assert (config_json["model_type"], config_json["torch_dtype"]) == ("kvshot", "float32") and config_json["architectures"] == [type(want).__name__]
    assert drafters_for(targets["Qwen3"], [tmp_path / "out"], tmp_path)[0] == [tmp_path / "out"]  # what eval, decode, bench and serve take


def test_a_bound_export_proposes_what_the_drafter_did(tmp_path, targets):
    own = trained(tmp_path / "own", HiddenOnlyConfig(), targets["Llama"], dtype=torch.bfloat16)
    export_drafter(own, tmp_path / "out", "kvshot")
    drafter = kvshot_ds.load_drafter(str(tmp_path / "out"), dtype=torch.float64)
    parts = load_parts(targets["Llama"], dtype=torch.float64)
    drafter.bind(parts.embedding, parts.head)
    assert proposals(drafter) == proposals(bound(own, targets["Llama"]))
    assert kvshot_ds.load_drafter(tmp_path / "out").norm.weight.dtype == torch.bfloat16


def test_an_export_of_an_export_knows_what_the_first_knew(tmp_path, targets):
    run = a_run(tmp_path / "run", targets["Llama"])
    export_drafter(run, tmp_path / "a", "kvshot")
    export_drafter(tmp_path / "a", tmp_path / "b", "kvshot", targets["Llama"])
    assert read_info(tmp_path / "b").extra["exported"] == read_info(tmp_path / "a").extra["exported"] | {"target_license": UNKNOWN}
    assert (tmp_path / "b" / "README.md").read_text() == (tmp_path / "a" / "README.md").read_text()


# The card


@pytest.mark.parametrize("form", ["kvshot", "eagle3", "speculators"])
def test_the_card_says_what_is_known(form, tmp_path, targets):
    export_drafter(a_run(tmp_path / "run", targets["Llama"]), tmp_path / "out", form)
    text = (tmp_path / "out" / "README.md").read_text()
    for said in (
        "family `hidden_only`, depth 1", "120 steps, 29,270 supervised rows, 88,123 tokens; start: target", "`kvshot train 'my recipe.yaml'`, commit abc123",
        "mine/chats.json", "answers: the target's own", "On 29 held-out conversations; intervals hold 95%", "| MAT | 1.445 | [1.390, 1.500] |",
        "| α_0 | 0.333 | [0.301, 0.359] |", "| α_1 | – | – |", f"Of the target: {UNKNOWN}",
    ):  # fmt: skip
        assert said in text
    assert "/data/" not in text
    assert ("No serving engine reads it" in text) == (form == "kvshot") and ("vllm serve" in text) == (form != "kvshot")


def test_the_card_does_not_make_up_what_is_not_known(tmp_path, targets):
    export_drafter(trained(tmp_path / "own", KVOnlyConfig(), targets["Llama"]), tmp_path / "out", "kvshot")
    text = (tmp_path / "out" / "README.md").read_text()
    assert "data: unknown" in text and "command: unknown" in text and "Not measured" in text and UNKNOWN in text


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, UNKNOWN),
        ({"LICENSE": "\n\n   Apache License\n Version 2.0"}, "Apache License (LICENSE)"),
        ({"README.md": "---\nlicense: apache-2.0\ntags: [a]\n---\n# x", "LICENSE": "MIT License"}, "apache-2.0"),
        ({"README.md": "---\nlicense: other\nlicense_name: llama3.1\n---\n"}, "llama3.1"),
        ({"README.md": "---\n: [\n---\n", "LICENCE.txt": "MIT License"}, "MIT License (LICENCE.txt)"),
        ({"README.md": "license: mit"}, UNKNOWN),
    ],
)
def test_the_licence_is_the_one_that_the_target_names(files, said, tmp_path):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert license_of(tmp_path) == said


# What the run's recipe gives


def test_the_target_and_the_steps_come_from_the_runs_recipe(tmp_path, targets):
    run = a_run(tmp_path / "run", targets["Llama"])
    export_drafter(run, tmp_path / "out", "speculators", named="org/target")
    said = read(tmp_path / "out")[0]["speculators_config"]
    assert said["verifier"]["name_or_path"] == "org/target" and said["proposal_methods"][0]["speculative_tokens"] == 5


# Whole or not at all


def test_an_existing_folder_is_refused_and_left_alone(tmp_path, targets):
    own = trained(tmp_path / "own", HiddenOnlyConfig(), targets["Llama"])
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="is there already and not an empty folder"):
        export_drafter(own, tmp_path / "full", "kvshot")
    with pytest.raises(ConfigError, match="holds an export or a drafter already"):
        export_drafter(own, own, "kvshot")
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["notes.txt"]
    (tmp_path / "empty").mkdir()
    export_drafter(own, tmp_path / "empty", "kvshot")
    assert sorted(path.name for path in (tmp_path / "empty").iterdir()) == ["README.md", "config.json", "model.safetensors"]


@pytest.mark.parametrize("form", ["eagle3", "speculators", "kvshot"])
def test_an_export_that_fails_leaves_nothing(form, tmp_path, targets, monkeypatch):
    own = trained(tmp_path / "own", HiddenOnlyConfig(), targets["Llama"])

    def full(path, data):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(module, "card", lambda *args: full(tmp_path / "README.md", ""))
    with pytest.raises(OSError, match="No space left"):
        export_drafter(own, tmp_path / "out", form, targets["Llama"])
    assert [path.name for path in tmp_path.iterdir()] == ["own"]


def test_what_a_killed_export_left_is_removed(tmp_path, targets):
    own = trained(tmp_path / "own", HiddenOnlyConfig(), targets["Llama"])
    beside = module.aside(tmp_path / "out")
    left = beside.with_name(beside.name.replace(f".{os.getpid()}.", ".4194303."))  # a process that is not
    other = tmp_path / ".other.host.1.00000000.tmp"
    for folder in (left, other):
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"half")
    export_drafter(own, tmp_path / "out", "kvshot")
    assert not left.exists() and other.exists() and (tmp_path / "out" / "config.json").is_file()


# What a user can get wrong


@pytest.mark.parametrize("form", ["eagle3", "kvshot"])
def test_nan_is_not_exported(form, tmp_path, targets):
    own = trained(tmp_path / "own", HiddenOnlyConfig(), targets["Llama"])
    tensors = load_file(own / "model.safetensors")
    tensors["layers.0.mlp.up_proj.weight"][3, 5] = float("nan")
    save_file(tensors, own / "model.safetensors")
    with pytest.raises(KvshotError, match=r"own: NaN or infinity in (midlayer|layers\.0)\.mlp\.up_proj\.weight"):
        export_drafter(own, tmp_path / "out", form, targets["Llama"])
    assert not (tmp_path / "out").exists()


def test_another_target_is_refused(tmp_path, targets):
    own = trained(tmp_path / "own", HiddenOnlyConfig(), targets["Llama"])
    for form in ("eagle3", "speculators", "kvshot"):
        with pytest.raises(ConfigError, match=r"belongs to the target 'llama' with weights [0-9a-f]{12}; name the folder of that target"):
            export_drafter(own, tmp_path / "out", form, targets["Qwen3"])


def test_a_target_that_nobody_names(tmp_path, targets):
    own = trained(tmp_path / "own", HiddenOnlyConfig(), targets["Llama"])
    with pytest.raises(ConfigError, match=r"describes the target too, and the drafter lies in no run whose recipe names it; give its folder: --target DIR"):
        export_drafter(own, tmp_path / "out", "eagle3")
    run = a_run(tmp_path / "run", targets["Llama"])
    text = (run / "recipe.yaml").read_text().replace(str(targets["Llama"]), "/gone/target")
    (run / "recipe.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"target\.path=/gone/target of its recipe is no folder here; give its folder"):
        export_drafter(run, tmp_path / "out", "eagle3")
    export_drafter(run, tmp_path / "out", "kvshot")


def test_no_drafter_there(tmp_path):
    with pytest.raises(KvshotError, match="no trained drafter here"):
        export_drafter(tmp_path / "nothing", tmp_path / "out", "kvshot")
    with pytest.raises(KvshotError, match="no trained drafter here"):
        kvshot_ds.load_drafter(tmp_path / "nothing")


@pytest.mark.parametrize(("name", "text"), [("recipe.yaml", "a: ["), ("recipe.yaml", "[]"), ("provenance.json", "{"), ("eval.json", "[]")])
def test_damaged_files_of_a_run_are_named(name, text, tmp_path, targets):
    run = a_run(tmp_path / "run", targets["Llama"])
    (run / name).write_text(text)
    with pytest.raises(KvshotError, match=name):
        export_drafter(run, tmp_path / "out", "kvshot", targets["Llama"])


def test_the_command(tmp_path, targets):
    run = a_run(tmp_path / "run", targets["Llama"])
    done = CliRunner().invoke(cli, ["export", str(run), str(tmp_path / "out"), "--format", "eagle3", "--dtype", "bf16"], standalone_mode=False)
    assert done.exception is None and f"eagle3: 15 tensors, 0.0 M parameters, bfloat16 -> {tmp_path / 'out'}" in done.output
    config, tensors = read(tmp_path / "out")
    assert config["draft_vocab_size"] == VD and tensors["fc.weight"].dtype == torch.bfloat16
    refused = CliRunner().invoke(cli, ["export", str(run), str(tmp_path / "out2"), "--format", "dflash"], standalone_mode=False)
    assert isinstance(refused.exception, ConfigError)
