"""Held-out evaluation: counts per conversation, the bigram table by brute force, idempotence, refusals."""

from __future__ import annotations

import shutil
from collections import Counter

import numpy as np
import pytest
import torch

from kvshot_ds import evaluation
from kvshot_ds.config import ObjectiveConfig
from kvshot_ds.drafters.build import load_drafter
from kvshot_ds.errors import ConfigError, KvshotError
from kvshot_ds.evaluation import Bigram, measure
from kvshot_ds.features.batch import collate
from kvshot_ds.features.shard import ShardSet
from kvshot_ds.files import read_json
from kvshot_ds.objectives.alignment import plan_rows
from kvshot_ds.objectives.objective import Objective
from kvshot_ds.target import load_parts
from kvshot_ds.training.launch import run as train

STEPS = 3


@pytest.fixture
def trained(recipe):
    r = recipe(drafter="hybrid", max_steps=4)
    train(r)
    return r


def test_bigram_is_the_most_frequent_follower_by_brute_force(tiny_features):
    shards = ShardSet.open(tiny_features, "train")
    table = Bigram.count(shards)
    followers: dict[int, Counter[int]] = {}
    total = 0
    for i in range(len(shards)):
        _, t = shards.read(i)
        tokens, turn = t["tokens"].tolist(), t["turn"].tolist()
        for j in range(len(tokens) - 1):
            if turn[j] and turn[j] == turn[j + 1]:
                followers.setdefault(tokens[j], Counter())[tokens[j + 1]] += 1
                total += 1
    assert table.tokens_counted == total
    for token, counts in followers.items():
        assert counts[int(table.follower[token])] == max(counts.values())
    unseen = next(t for t in range(len(table.follower)) if t not in followers)
    overall = Counter(b for counts in followers.values() for b in counts.elements())
    assert overall[int(table.follower[unseen])] == max(overall.values())


def test_counts_per_conversation_do_not_depend_on_the_batching(trained, tiny_target):
    heldout = ShardSet.open(trained.shards_dir, "heldout")
    drafter, _ = load_drafter(trained.run_dir, "cpu", torch.float32)
    parts = load_parts(tiny_target)
    drafter.bind(parts.embedding, parts.head)
    objective = Objective(drafter, ObjectiveConfig(steps=STEPS), parts.head)
    table = Bigram.count(ShardSet.open(trained.shards_dir, "train"))
    one, many = (measure(objective, STEPS, heldout, table, n, 0, torch.device("cpu")) for n in (1, 4))
    assert one.keys == many.keys == tuple(s.key for s in heldout.samples)
    np.testing.assert_array_equal(one.counts.den, many.counts.den)
    np.testing.assert_array_equal(one.bigram, many.bigram)
    np.testing.assert_allclose(one.counts.prob, many.counts.prob, atol=1e-5)
    for c, sample in enumerate([heldout.read(i) for i in range(len(heldout))]):
        batch = collate([sample])
        plan = plan_rows(batch, STEPS)
        sums = objective(batch.to("cpu", torch.float32), plan, torch.ones(())).sums(plan)
        assert one.counts.den[c].tolist() == sums.den.tolist() and one.counts.top1[c].tolist() == sums.top1.tolist()
        hits = sum(
            int(table.follower[batch.tokens[t + 1]] == batch.teacher_argmax[batch.teacher_index[t + 1]]) for t in plan.anchors.tolist()
        )  # the bonus token's most frequent follower against the target's arg-max after it
        assert one.bigram[c] == hits


def test_results_are_written_once_and_add_up(trained, capsys):
    (first,) = evaluation.run(trained)
    rows = read_json(trained.run_dir / "eval_conversations.json")
    for k in range(STEPS):
        assert first["alpha"][k]["num"] == sum(c[k] for c in rows["top1"]) and first["alpha"][k]["den"] == sum(c[k] for c in rows["den"])
        assert first["alpha"][k]["low"] <= first["alpha"][k]["value"] <= first["alpha"][k]["high"]
    bigram = first["baselines"]["bigram"]
    assert bigram["num"] == sum(rows["bigram"]) and bigram["den"] == first["alpha"][0]["den"]
    assert first["against"][0]["difference"] == pytest.approx(first["alpha"][0]["value"] - bigram["value"])
    capsys.readouterr()
    assert evaluation.run(trained) == [first] and "already evaluated" in capsys.readouterr().out
    (trained.run_dir / "eval_conversations.json").unlink()
    assert not evaluation.evaluated(trained)
    evaluation.run(trained)
    assert evaluation.evaluated(trained) and read_json(trained.run_dir / "eval_conversations.json") == rows
    again = evaluation.run(trained.model_copy(update={"eval": trained.eval.model_copy(update={"max_conversations": 3})}))
    assert again[0]["data"]["conversations"] == 3


def test_damaged_or_other_features_are_not_mistaken_for_the_ones_measured(trained, tmp_path):
    evaluation.run(trained)
    folder = tmp_path / "features"
    shutil.copytree(trained.shards_dir, folder)
    other = trained.model_copy(update={"shards": folder})
    tar = folder / "heldout-000000.tar"
    raw = bytearray(tar.read_bytes())
    raw[len(raw) // 2] ^= 1
    tar.write_bytes(raw)
    with pytest.raises(KvshotError, match=r"heldout-000000\.tar: sha256 .* damaged"):
        evaluation.run(other)
    result = trained.run_dir / "eval.json"
    result.write_text("{")
    with pytest.raises(KvshotError, match=r"eval\.json: not readable as JSON"):
        evaluation.run(trained)


def test_what_was_optimised_plays_no_part_and_nothing_is_accepted_beyond_what_a_block_proposes(recipe, capsys):
    r = recipe("block", {"family": "dflash", "depth": 1, "block_size": 4}, max_steps=2, objective={"steps": 2, "anchors": 1, "weights": "dpace"})
    train(r)

    def under(**objective):
        return r.model_copy(update={"train": r.train.model_copy(update={"objective": ObjectiveConfig(**objective)})})

    (first,) = evaluation.run(r)
    heldout = ShardSet.open(r.shards_dir, "heldout")
    plans = [plan_rows(collate([heldout.read(i)]), 2) for i in range(len(heldout))]
    assert [a["den"] for a in first["alpha"]] == torch.stack([p.valid.sum(1) for p in plans]).sum(0).tolist()  # every row, not those drawn in training
    capsys.readouterr()
    assert evaluation.run(under(steps=2, loss="hard_ce", drift="offline")) == [first] and "already evaluated" in capsys.readouterr().out
    (longer,) = evaluation.run(under(steps=3))
    assert longer["alpha"][:2] == first["alpha"] and len(longer["alpha"]) == 3
    options = r.model_copy(update={"eval": r.eval.model_copy(update={"steps": 5})})
    (beyond,) = evaluation.run(options)
    assert beyond["alpha"][:3] == longer["alpha"] and beyond["joint"][:3] == longer["joint"] and beyond["mat_joint"]["value"] == longer["mat_joint"]["value"]
    plans = [plan_rows(collate([heldout.read(i)]), 5) for i in range(len(heldout))]
    assert [a["den"] for a in beyond["alpha"]] == torch.stack([p.valid.sum(1) for p in plans]).sum(0).tolist()
    assert [a["num"] for a in beyond["alpha"][3:]] == [0, 0]


def test_refusals(recipe, trained, tmp_path):
    with pytest.raises(KvshotError, match="no trained drafter here"):
        evaluation.run(recipe("nothing"))
    from data_prep.targets import fetch

    other = fetch("tiny", tmp_path / "other")
    text = (other / "config.json").read_text()
    (other / "config.json").write_text(text.replace("{", '{"kvshot_note": 1,', 1))
    with pytest.raises(ConfigError, match="was trained against the target"):
        evaluation.run(trained.model_copy(update={"target": trained.target.model_copy(update={"path": other})}))
    file = trained.run_dir / "drafter" / "model.safetensors"
    from safetensors.torch import load_file, save_file

    tensors = load_file(file)
    save_file({("extra" if k == "fc.weight" else k): v for k, v in tensors.items()}, file)
    with pytest.raises(KvshotError, match=r"missing \['fc.weight'\], unexpected \['extra'\]"):
        evaluation.run(trained)
