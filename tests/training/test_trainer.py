"""Training with the real engine: it learns, resumes to the same weights, sums over ranks, and refuses what does not fit."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from contextlib import ExitStack

import pytest
import torch

from kvshot_ds.errors import ConfigError, KvshotError, Preempted
from kvshot_ds.features.shard import ShardSet
from kvshot_ds.files import read_json, sole_writer
from kvshot_ds.training import trainer
from kvshot_ds.training.launch import run
from tests.training import forked
from tests.training.runs import assert_close, assert_same, before_each_step, board, launch, weights


@pytest.mark.parametrize("family", ["hidden_only", "kv_only", "hybrid"])
def test_it_learns_and_leaves_everything_it_promises(recipe, family):
    r = recipe(drafter=family, epochs=3, optim={"lr": 5e-3})
    summary = run(r)
    logged = board(r)
    assert logged["train/loss"][-1] < 0.9 * logged["train/loss"][0]
    assert {f"train/accept_top1/{k}" for k in range(3)} | {"train/mat", "train/mat_joint", "train/lr", "train/grad_norm", "train/tokens_per_s"} <= set(logged)
    assert ("gate/mean" in logged) == (family == "hybrid")
    assert summary == read_json(r.run_dir / "train.json")
    assert summary["steps"] == 33 and summary["resumed_from"] == []
    assert {"recipe.yaml", "provenance.json", "drafter"} <= {p.name for p in r.run_dir.iterdir()}
    before = (r.run_dir / "drafter" / "model.safetensors").stat().st_mtime_ns
    assert run(r) == summary  # a second call trains nothing
    assert (r.run_dir / "drafter" / "model.safetensors").stat().st_mtime_ns == before


def test_micro_batches_do_not_change_the_weights(recipe):
    """Token-exact normalisation: 4 forwards of 1 conversation = 1 forward of 4, the last step of the epoch (2 of 4) included."""
    one, four = recipe("one", "hybrid", conversations_per_micro_batch=1), recipe("four", "hybrid", conversations_per_micro_batch=4)
    a, b = run(one), run(four)
    assert a["supervised_rows"] == b["supervised_rows"]
    assert_close(weights(four), weights(one))


def test_two_ranks_equal_one_and_a_killed_run_ends_in_the_same_weights(recipe, tmp_path):
    """Ranks started with plain variables, of which the deepspeed launcher takes up what was killed."""
    alone = recipe("alone", "hybrid")
    run(alone)
    pair, killed = recipe("pair", "hybrid", log_every=1), recipe("killed", "hybrid", log_every=1)
    first = forked.Run(2, run, killed)
    current = killed.run_dir / "checkpoints" / "latest"
    deadline = time.monotonic() + 240
    while not current.is_file():
        assert time.monotonic() < deadline
        time.sleep(0.002)
    first.kill()
    assert not (killed.run_dir / "train.json").exists(), "the run was over before it could be killed"

    forked.train(pair, 2)
    process = launch(killed, tmp_path)
    output = process.communicate(timeout=240)[0]
    assert process.returncode == 0, output
    assert read_json(killed.run_dir / "train.json")["resumed_from"] != []
    assert "continuing after step" in output
    assert_same(weights(killed), weights(pair))
    assert board(killed)["train/loss"] == board(pair)["train/loss"]
    assert_close(weights(alone), weights(pair))
    totals = [{k: read_json(r.run_dir / "train.json")[k] for k in ("tokens", "supervised_rows", "steps")} for r in (alone, pair, killed)]
    assert totals[0] == totals[1] == totals[2]


def test_what_does_not_fit_is_refused_by_name(recipe, tmp_path):
    with pytest.raises(ConfigError, match=r"key\.0.*capture"):
        run(recipe(drafter={"family": "kv_only", "kv": {"layers": (0, 2)}}))
    with pytest.raises(ConfigError, match="larger than the target's vocabulary"):
        run(recipe(draft_vocab_size=10_000))
    with pytest.raises(ConfigError, match="fp16"):
        (tmp_path / "fp16.json").write_text('{"fp16": {"enabled": true}}')
        run(recipe(ds_config=str(tmp_path / "fp16.json")))


def test_a_run_folder_of_another_configuration_is_not_touched(recipe):
    run(recipe(max_steps=1))
    with pytest.raises(ConfigError, match="another configuration"):
        run(recipe(max_steps=2))


def test_two_trainings_in_one_folder_are_refused_and_one_that_ends_is_waited_for(recipe, monkeypatch):
    r = recipe(max_steps=2)
    with sole_writer(r.run_dir, "training"):
        before = sorted(r.run_dir.iterdir())
        monkeypatch.setattr(trainer, "_ENDING", 0)
        with pytest.raises(ConfigError, match=rf"{r.run_dir}: another training is writing there \(process {os.getpid()} on .+\); wait for it"):
            run(r)
        assert sorted(r.run_dir.iterdir()) == before
    monkeypatch.setattr(trainer, "_ENDING", 600)
    with ExitStack() as held:
        held.enter_context(sole_writer(r.run_dir, "training"))
        threading.Timer(1, held.pop_all().close).start()
        assert run(r)["steps"] == 2
    stopped = recipe("stopped", max_minutes=1e-6)
    with pytest.raises(Preempted):
        run(stopped)
    for let_go in (r, stopped):
        with sole_writer(let_go.run_dir, "training"):
            pass


def test_a_run_on_fewer_conversations_sees_no_others_and_keeps_to_them(recipe, capsys):
    keys = [s.key for s in ShardSet.open(recipe().shards_dir, "train").samples]
    seen = set()
    with pytest.MonkeyPatch.context() as patch:
        before_each_step(patch, lambda _s, micro, _n: seen.update(key for m in micro for key in m.batch.keys))
        run(recipe("few", max_conversations=9, epochs=2))
    assert seen == set(sorted(keys)[:9]) and "9 of 9 conversations" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"train\.max_conversations: there 9, now 10"):
        run(recipe("few", max_conversations=10, epochs=2))


def test_features_of_another_target_are_refused(recipe, tmp_path):
    from data_prep.targets import fetch

    other = fetch("tiny", tmp_path / "other")
    config = read_json(other / "config.json")
    (other / "config.json").write_text(json.dumps({**config, "rope_parameters": {**config["rope_parameters"], "rope_theta": 77.0}}))
    r = recipe()
    with pytest.raises(ConfigError, match="target"):
        run(r.model_copy(update={"target": r.target.model_copy(update={"path": other})}))


def test_a_loss_that_is_not_finite_stops_the_run(recipe):
    with pytest.raises(KvshotError, match=r"not finite at step \d+ .*conversations of this (step|rank): train"):
        run(recipe(optim={"lr": 1e30, "clip": 1e30}, log_every=1, checkpoint_every=1000))


def test_the_step_and_the_conversations_of_the_first_bad_loss_are_named_whenever_it_is_looked_at(recipe, monkeypatch):
    from kvshot_ds.training import trainer

    plain, read = trainer.optimizer_step, {}

    def spoiled(s, micro_batches, meter, step):
        read[step] = [key for m in micro_batches for key in m.batch.keys]
        if step == 3:
            for states in micro_batches[0].batch.hidden.values():
                states[:] = float("nan")
        plain(s, micro_batches, meter, step)

    monkeypatch.setattr(trainer, "optimizer_step", spoiled)
    with pytest.raises(KvshotError, match="not finite at step 3") as error:
        run(recipe(log_every=100, checkpoint_every=100, max_steps=6))
    assert f"conversations of this rank: {', '.join(read[3])})" in str(error.value)


def test_weights_that_are_not_finite_are_neither_saved_nor_exported(recipe, monkeypatch):
    from kvshot_ds.training import trainer

    plain = trainer.optimizer_step

    def poisoned(s, micro_batches, meter, step):
        plain(s, micro_batches, meter, step)
        with torch.no_grad():
            s.drafter.norm.weight[0] = float("nan")

    monkeypatch.setattr(trainer, "optimizer_step", poisoned)
    for r in (recipe("last", max_steps=1), recipe("saved", checkpoint_every=1)):
        with pytest.raises(KvshotError, match="weights are not finite after step 1"):
            run(r)
        assert not (r.run_dir / "drafter").exists() and not (r.run_dir / "checkpoints" / "latest").exists()
    monkeypatch.undo()
    again = recipe("last", max_steps=1, seed=5)  # nothing was trained yet: the name is free for another configuration
    assert run(again)["steps"] == 1


def test_a_damaged_shard_is_refused_before_the_first_step(recipe, tiny_features, tmp_path):
    folder = tmp_path / "features"
    shutil.copytree(tiny_features, folder)
    r = recipe()
    r = r.model_copy(update={"shards": folder})
    run(r)
    tar = folder / "train-000001.tar"
    raw = bytearray(tar.read_bytes())
    raw[len(raw) // 2] ^= 1
    tar.write_bytes(raw)
    with pytest.raises(KvshotError, match=r"train-000001\.tar: sha256 .* damaged"):
        run(r.model_copy(update={"name": "second"}))
