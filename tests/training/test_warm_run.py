"""Warm start through the trainer: what is reported, and that only the first start of a run needs the source."""

from __future__ import annotations

import shutil

import pytest
import torch

from kvshot_ds.errors import ConfigError, KvshotError
from kvshot_ds.files import read_json
from kvshot_ds.training.launch import run
from tests.training.runs import assert_same, before_each_step, run_and_stop, weights

FEW = {"conversations_per_micro_batch": 4, "checkpoint_every": 2}


@pytest.fixture
def source(recipe):
    r = recipe("source", "hidden_only", max_steps=3, optim={"lr": 5e-3}, **FEW)
    run(r)
    return r


def warm(recipe, source, name="warm", **options):
    return recipe(name, "hybrid", init={"warm_start": source.run_dir, **options.pop("init", {})}, **{"max_steps": 4, **FEW, **options})


def test_it_starts_there_and_says_so_and_a_finished_run_outlives_its_source(recipe, source, monkeypatch, capsys):
    r, first = warm(recipe, source), []
    before_each_step(monkeypatch, lambda s, _m, _n: first.append({k: v.clone() for k, v in s.drafter.state_dict().items()}))
    summary = run(r)
    said, taken = capsys.readouterr().out, summary["warm_start"]["taken"]
    assert f"warm: warm start from {source.run_dir / 'drafter'}: {len(taken)} tensors taken" in said
    assert "keep their start, not in the source: layers.0.cross_attn.*, layers.0.mix.*, layers.0.projector.*" in said
    assert "fc.weight" in taken and "lm_head.weight" in taken and not any("cross_attn" in name for name in taken)
    assert summary["init"]["warm_start"] == str(source.run_dir) and summary == read_json(r.run_dir / "train.json")
    assert_same({name: first[0][name] for name in taken}, {name: weights(source)[name] for name in taken})
    assert not torch.equal(weights(r)["fc.weight"], weights(source)["fc.weight"])

    shutil.rmtree(source.run_dir)
    capsys.readouterr()
    assert run(r) == summary and "already trained" in capsys.readouterr().out
    with pytest.raises(KvshotError, match="no trained drafter here"):
        run(warm(recipe, source, "another"))


def test_a_resumed_run_needs_no_source_and_reports_what_its_first_start_took(recipe, source, capsys):
    whole, broken = warm(recipe, source, "whole"), warm(recipe, source, "broken")
    wanted = run(whole)
    run_and_stop(broken, 3)
    shutil.rmtree(source.run_dir)
    capsys.readouterr()
    summary = run(broken)
    assert "warm start" not in capsys.readouterr().out
    assert summary["resumed_from"] == [{"step": 2, "world_size": 1}] and summary["warm_start"] == wanted["warm_start"]
    assert_same(weights(broken), weights(whole))


def test_another_source_under_the_same_path_is_another_run_only_before_the_first_checkpoint(recipe, source):
    """What was taken is settled by the weights of a checkpoint, and until there is one by the source."""
    early, late = warm(recipe, source, "early"), warm(recipe, source, "late")
    run_and_stop(early, 1)
    run_and_stop(late, 3)
    old = read_json(late.run_dir / "provenance.json")["warm_digest"]
    shutil.rmtree(source.run_dir)
    run(recipe("source", "hidden_only", max_steps=2, seed=7, **FEW))
    assert run(late)["warm_start"]["digest"] == old != run(early)["warm_start"]["digest"]


def test_the_same_source_in_another_place_is_the_same_run_and_another_one_is_not(recipe, source, tmp_path):
    """A path may be spelled in two ways, and a work folder may be moved: what counts is what lies there."""
    r, moved = warm(recipe, source), tmp_path / "moved"
    run_and_stop(r, 3)
    source.run_dir.rename(moved)
    run(recipe("source", "hidden_only", max_steps=2, seed=7, **FEW))
    other = recipe("other", "hidden_only", max_steps=1, **FEW)
    run(other)

    def start_at(place):
        return r.model_copy(update={"train": r.train.model_copy(update={"init": r.train.init.model_copy(update={"warm_start": place})})})

    for place in (other.run_dir, tmp_path / "nowhere", None):
        with pytest.raises(ConfigError, match=r"run of another configuration.*warm_start: there"):
            run(start_at(place))
    assert run(start_at(moved))["resumed_from"] == [{"step": 2, "world_size": 1}]


def test_chosen_tensors_and_a_source_that_gives_nothing(recipe, source, monkeypatch):
    r, first = warm(recipe, source, max_steps=1, init={"tensors": ("layers.*.mlp.*",)}), []
    before_each_step(monkeypatch, lambda s, _m, _n: first.append({k: v.clone() for k, v in s.drafter.state_dict().items()}))
    taken = run(r)["warm_start"]["taken"]
    assert taken == [f"layers.0.mlp.{p}_proj.weight" for p in ("down", "gate", "up")]
    same = {name for name, value in weights(source).items() if torch.equal(first[0][name], value)}
    assert same == {*taken, "d2t", "t2d"}
    with pytest.raises(ConfigError, match=r"init\.tensors: 'lm_haed\.\*' takes nothing"):
        run(warm(recipe, source, "wrong", init={"tensors": ("lm_haed.*",)}))
