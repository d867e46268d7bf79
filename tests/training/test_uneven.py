"""Optimizer steps that the ranks do not divide, and steps of packed forwards, train to the weights of one rank with a conversation in each forward."""

from __future__ import annotations

from kvshot_ds.files import read_json
from kvshot_ds.training.launch import run
from tests.training.runs import assert_close, before_each_step, weights
from tests.training.several import item, start


def test_three_ranks_that_do_not_divide_a_step_and_packed_ones_end_in_the_same_weights(recipe, tmp_path):
    options = {"max_steps": 8, "drafter": "hybrid"}
    alone = recipe("alone", **options)
    run(alone)
    three, packed = recipe("three", **options), recipe("packed", **options, tokens_per_micro_batch=40)
    start([item(three, tmp_path), item(packed, tmp_path)], tmp_path, 3)
    said = (tmp_path / "rank0.3.log").read_text()
    assert said.count("three: 3 rank(s) do not divide a step's 4 conversations: 33% of their places stay empty") == 1 and "packed: 3 rank" not in said
    assert "do not divide" not in (tmp_path / "rank1.3.log").read_text()
    for r in (three, packed):
        assert_close(weights(r), weights(alone))
        found, wanted = (read_json(one.run_dir / "train.json") for one in (r, alone))
        assert all(found[name] == wanted[name] for name in ("steps", "tokens", "supervised_rows")) and found["world_size"] == 3


def test_packed_forwards_keep_to_the_budget_and_steps_differ_in_their_number(recipe, monkeypatch):
    plain, packed = recipe("plain", epochs=2), recipe("packed", epochs=2, tokens_per_micro_batch=34)
    run(plain)
    steps = []
    with monkeypatch.context() as patch:
        before_each_step(patch, lambda _s, micro, _n: steps.append([m.batch.lengths for m in micro]))
        run(packed)
    assert_close(weights(packed), weights(plain))
    assert all(sum(lengths) <= 34 or len(lengths) == 1 for step in steps for lengths in step)
    assert len({len(step) for step in steps}) > 1 and any(len(lengths) > 1 for step in steps for lengths in step)
