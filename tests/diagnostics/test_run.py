"""kvshot diagnose: parts joined into one file, written once; the numbers of the evaluation; refusals."""

from __future__ import annotations

import shutil

import pytest

from kvshot_ds import evaluation
from kvshot_ds.diagnostics import run as diagnose
from kvshot_ds.errors import KvshotError
from kvshot_ds.files import read_json
from kvshot_ds.training.launch import run as train

PARTS = ["queries", "gradients", "gate", "context", "position", "frequency", "entropy", "drift"]


def with_options(recipe, **options):
    return recipe.model_copy(update={"diagnose": recipe.diagnose.model_copy(update={"bootstrap": 100, "conversations": 0, **options})})


def test_one_file_holds_all_parts_and_agrees_with_the_evaluation(recipe, capsys):
    r = with_options(recipe("hybrid", "hybrid", max_steps=2), near=4)
    assert not diagnose.diagnosed(r)
    train(r)
    assert not diagnose.diagnosed(r)
    (measured,) = evaluation.run(r)
    (found,) = diagnose.run(r)
    assert found == read_json(r.run_dir / "diagnostics.json") and list(found["parts"]) == PARTS
    assert not [name for name in PARTS if "why" in found["parts"][name]]  # of a hybrid all apply
    assert found["data"] == {"split": "heldout", "conversations": measured["data"]["conversations"], "rows": measured["alpha"][0]["den"]}
    context = found["parts"]["context"]
    for mask, of in context["masks"].items():
        assert [a["den"] for a in of["alpha"]] == [a["den"] for a in measured["alpha"]]
        if mask != "none":
            difference = of["mat"]["value"] - context["masks"]["none"]["mat"]["value"]
            assert context["differences"][mask]["mat"]["value"] == pytest.approx(difference)
    assert [(a["num"], a["den"]) for a in context["masks"]["none"]["alpha"]] == [(a["num"], a["den"]) for a in measured["alpha"]]
    assert context["masks"]["none"]["mat"]["value"] == measured["mat"]["value"]
    for part in ("position", "frequency", "entropy"):
        lines = found["parts"][part]["classes"]
        for k, whole in enumerate(measured["alpha"]):
            assert [sum(c["alpha"][k][n] for c in lines) for n in ("num", "den")] == [whole["num"], whole["den"]], part
        assert sum(c["rows"] for c in lines) == found["data"]["rows"]
    assert [s["k"] for s in found["parts"]["drift"]["steps"]] == [1, 2]
    assert [s["rows"] for s in found["parts"]["gate"]["layers"][0]["steps"]] == [a["den"] for a in measured["alpha"]]

    short = diagnose.summary(found)
    assert short["mat_none"] == measured["mat"]["value"] and short["gate_mean_first"] == found["parts"]["gate"]["layers"][0]["steps"][0]["mean"]
    wanted = {"query_cosine_layer_0_last", "grad_share_cross_kv", "gate_share_below_0.05_last", "mat_far", "drift_cosine_last"}
    assert wanted <= short.keys() and all(type(v) is float for v in short.values())

    text = capsys.readouterr().out
    assert all(f"\n  {name} " in text for name in PARTS)
    assert diagnose.diagnosed(r) and diagnose.run(r) == [found] and "already diagnosed" in capsys.readouterr().out
    assert not diagnose.diagnosed(with_options(r, near=5))
    (few,) = diagnose.run(with_options(r, conversations=3))
    assert few["data"]["conversations"] == 3 and not diagnose.diagnosed(r)


def test_a_part_that_does_not_apply_says_why_and_a_block_is_not_right_beyond_what_it_proposes(recipe, capsys):
    r = with_options(recipe("block", {"family": "dflash", "depth": 1, "block_size": 3, "hidden_layers": [2]}, max_steps=1, objective={"steps": 2}))
    train(r)
    r = r.model_copy(update={"eval": r.eval.model_copy(update={"steps": 4})})
    (found,) = diagnose.run(r)
    assert {name for name in PARTS if "why" in found["parts"][name]} == {"queries", "gate"}
    assert f"- {found['parts']['gate']['why']}" in capsys.readouterr().out
    for of in found["parts"]["context"]["masks"].values():
        assert len(of["alpha"]) == 4 and all(a["num"] == 0 < a["den"] for a in of["alpha"][2:])
    assert "gate_mean_first" not in diagnose.summary(found)


def test_what_cannot_be_diagnosed_is_refused(recipe, tmp_path):
    r = with_options(recipe("hidden", "hidden_only", max_steps=1))
    with pytest.raises(KvshotError, match="no trained drafter here"):
        diagnose.run(r)
    train(r)
    folder = tmp_path / "features"
    shutil.copytree(r.shards_dir, folder)
    tar = folder / "heldout-000000.tar"
    raw = bytearray(tar.read_bytes())
    raw[len(raw) // 2] ^= 1
    tar.write_bytes(raw)
    with pytest.raises(KvshotError, match=r"heldout-000000\.tar: sha256 .* damaged"):
        diagnose.run(r.model_copy(update={"shards": folder}))
    (r.run_dir / "diagnostics.json").write_text("{")
    with pytest.raises(KvshotError, match=r"diagnostics\.json: not readable as JSON"):
        diagnose.run(r)
    assert not diagnose.diagnosed(r)
