"""Rows of results: what stands in them, and that JSONL and Parquet say the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from kvshot_ds.drafters.cost import cost, total
from kvshot_ds.errors import KvshotError
from kvshot_ds.features.shard import ShardSet
from kvshot_ds.sweep import results
from kvshot_ds.sweep.folder import SweepFolder, Trial, TrialState
from kvshot_ds.training.plan import step_flops
from tests.features.shards import GEOMETRY
from tests.sweep.made import HIDDEN_ONLY, HYBRID, KV_ONLY, SECONDS, make_sweep

FAILED = TrialState("failed", 2, 10.0, 12.0, {"start": 1.0}, False, "out of memory: train.tokens_per_micro_batch", "the end\nof the log")
HALVED = TrialState("halved", 1, 10.0, 40.0, {"start": 1.0, "train": 20.0}, False, "behind at step 20")
WHY = {"why": "does not apply"}
DIAGNOSTICS: dict[str, Any] = {
    "queries": WHY, "gradients": WHY, "gate": WHY, "context": WHY, "drift": WHY,
}  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> SweepFolder:
    """Three cells of two seeds: one trial failed, one was stopped early."""
    cells = (HIDDEN_ONLY, replace(KV_ONLY, states={1: FAILED}), replace(HYBRID, states={0: HALVED}))
    return make_sweep(tmp_path_factory.mktemp("work"), cells, (0, 1), diagnostics={"hidden_only": DIAGNOSTICS})


@pytest.fixture
def rows(made: SweepFolder) -> Callable[[str, int], dict[str, Any]]:
    """rows(family, seed)"""
    return lambda family, seed: next(row for row in results.read(made) if (row["labels"]["family"], row["seed"]) == (family, seed))


def test_a_row_says_what_the_files_say(made: SweepFolder, rows: Callable[[str, int], dict[str, Any]]):
    row = rows("kv_only", 0)
    run = made.path.parents[1] / "trials" / row["name"]
    train, evaluated = (json.loads((run / name).read_text()) for name in ("train.json", "eval.json"))
    assert (row["sweep"], row["cell"], row["state"], row["reason"], row["control"], row["reused"]) == (
        "demo",
        "family=kv_only depth=2",
        "complete",
        "",
        "",
        False,
    )
    assert row["digest"] == json.loads((run / "provenance.json").read_text())["train_digest"]
    assert row["options"]["drafter"]["kv"]["layers"] == [2]
    assert row["options"]["seed"] == 0
    assert {name: row["train"][name] for name in ("steps", "tokens", "supervised_rows", "seconds")} == {
        name: train[name] for name in ("steps", "tokens", "supervised_rows", "seconds")
    }
    assert row["heldout"]["alpha"] == evaluated["alpha"]
    assert row["heldout"]["mat_joint"] == evaluated["mat_joint"]
    assert {"k", "num", "den", "value", "low", "high"} == row["heldout"]["joint"][3].keys()
    assert row["data"]["heldout_conversations"] == 24
    assert row["data"]["shards_digest"] == ShardSet.open(made.recipe().shards_dir, "train").digest
    assert row["provenance"]["git_commit"] == "0123456789abcdef0123456789abcdef01234567"
    assert list(row) == list(results._SECTIONS)


def test_parameters_flops_and_bytes_are_those_of_the_drafter_and_its_data(made: SweepFolder, rows: Callable[[str, int], dict[str, Any]]):
    row, recipe = rows("kv_only", 0), made.recipe()
    shards = ShardSet.open(recipe.shards_dir, "train")
    sizes = [(s.tokens, s.rows) for s in shards.samples]
    config = results._recipe(made, next(t for t in made.trials() if t.name == row["name"]), Path("none")).train.drafter
    known = cost(config, GEOMETRY, 40)
    assert row["drafter"]["parameters"] == known.trainable
    epoch = step_flops(known, 4, [tokens for tokens, _ in sizes], [rows for _, rows in sizes])
    passes = 60 / 3  # steps of 2 of the 5 conversations
    assert row["train"]["flops"] == pytest.approx(epoch * passes)
    assert row["drafter"]["flops"]["train_per_token"] == pytest.approx(epoch * passes / row["train"]["tokens"])
    context = row["drafter"]["flops"]["context"]
    assert context == round(sum(tokens for tokens, _ in sizes) / len(sizes))
    assert row["drafter"]["flops"]["draft_per_step"] == total(known.drafting(4, context)).unit
    # tokens and turn (int32), key and value of layer 2 (2 heads of 4, bf16); teacher: last hidden state of 8 (bf16), arg-max (int32), log-sum-exp (fp32)
    assert row["cost"]["feature_bytes"] == passes * sum(tokens * (4 + 4 + 2 * 2 * 4 * 2) + rows * (8 * 2 + 4 + 4) for tokens, rows in sizes)


def test_cost_is_of_all_that_a_trial_took(rows: Callable[[str, int], dict[str, Any]]):
    seconds = rows("hidden_only", 0)["cost"]["seconds"]
    assert seconds == SECONDS | {"train": 29.5, "eval": 4.0}
    assert rows("hidden_only", 0)["cost"]["device_hours"] == pytest.approx(sum(seconds.values()) / 3600)


def test_a_reused_trial_cost_what_it_cost_where_it_was_trained(made: SweepFolder):
    row = results.row(made, made.trials()[0], TrialState("complete", reused=True))
    assert row["reused"]
    assert row["cost"]["seconds"] == {"train": 29.5, "eval": 4.0}
    assert row["train"]["steps"] == 60


def test_a_failed_trial_has_its_reason_and_no_numbers(rows: Callable[[str, int], dict[str, Any]]):
    row = rows("kv_only", 1)
    assert (row["state"], row["reason"]) == ("failed", FAILED.reason)
    assert row["heldout"] is row["diagnostics"] is row["digest"] is None
    assert row["train"]["steps"] is row["train"]["flops"] is row["cost"]["feature_bytes"] is None
    assert row["options"]["drafter"]["depth"] == 2
    assert row["options"]["seed"] == 1
    assert row["drafter"]["parameters"] == rows("kv_only", 0)["drafter"]["parameters"]
    assert row["cost"]["device_hours"] == pytest.approx(1 / 3600)


def test_a_trial_whose_options_do_not_fit_together_has_a_row(made: SweepFolder):
    row = results.row(made, Trial("x-1-000000000000", {"a": "b"}, 0, {"train.drafter.depth": -1}), FAILED)
    assert row["options"] is row["drafter"] is None
    assert row["reason"] == FAILED.reason


def test_a_complete_trial_whose_recipe_another_version_wrote_has_its_row(made: SweepFolder):
    trial = made.trials()[0]
    before = results.row(made, trial, TrialState("complete"))
    path = made.run_dir(trial) / "recipe.yaml"
    path.write_text(path.read_text() + "an_option_of_then: 1\n")
    assert results.row(made, trial, TrialState("complete")) == before


def test_a_trial_stopped_early_has_the_steps_it_came_to(made: SweepFolder):
    from kvshot_ds.files import write_json

    trial = next(t for t in made.trials() if t.name.startswith("hybrid") and t.seed == 0)
    status = {"state": "stopped", "step": 20, "steps": 60, "ranks": 2, "started": 1.0, "updated": 2.0, "host": "h", "pid": 1, "began": 1.0}
    write_json(made.run_dir(trial) / "status.json", status | {"scalars": {"memory/host_gib": 1.25}})
    row = results.row(made, trial, HALVED)
    assert (row["train"]["steps"], row["train"]["ranks"], row["train"]["tokens"]) == (20, 2, None)
    whole = results.row(made, next(t for t in made.trials() if t.name.startswith("hybrid") and t.seed == 1), TrialState("complete"))
    assert row["train"]["flops"] == pytest.approx(whole["train"]["flops"] / 3)
    assert row["cost"]["device_hours"] == pytest.approx(2 * 21 / 3600)
    assert row["cost"]["memory"]["host_gib"] == 1.25


def test_diagnostics_come_as_their_summary(rows: Callable[[str, int], dict[str, Any]]):
    assert rows("hidden_only", 0)["diagnostics"] == {}
    assert rows("hybrid", 1)["diagnostics"] is None


def test_features_that_are_gone_leave_nulls(tmp_path: Path):
    folder = make_sweep(tmp_path, (HIDDEN_ONLY,), (0,))
    (tmp_path / "features").rename(tmp_path / "gone")
    row = results.row(folder, folder.trials()[0], TrialState("complete"))
    assert row["drafter"]["flops"] is row["train"]["flops"] is row["data"]["shards_digest"] is None
    assert row["heldout"]["mat"]["value"] > 1


def test_parquet_holds_what_jsonl_holds(made: SweepFolder):
    rows, table = results.read(made), parquet.read_table(made.path / results.PARQUET)
    assert table.num_rows == len(rows) == 6
    lines = table.to_pylist()
    for row, line in zip(rows, lines, strict=True):
        found = dict(results.flat(row))
        for name, value in found.items():
            if name not in line:
                assert value is None, name  # a section that other rows have in parts
            elif isinstance(value, list):
                assert json.loads(line[name]) == value, name
            else:
                assert line[name] == value, name
        assert all(value is None for name, value in line.items() if name not in found)


def test_whole_numbers_stay_whole_and_columns_keep_their_order(made: SweepFolder, tmp_path: Path):
    schema = parquet.read_table(made.path / results.PARQUET).schema
    kinds = {name: schema.field(name).type for name in schema.names}
    assert kinds["heldout.alpha.0.num"] == kinds["train.tokens"] == kinds["seed"] == kinds["drafter.parameters"] == pa.int64()
    assert kinds["heldout.accept_prob.0.num"] == kinds["heldout.mat.value"] == kinds["options.optim.lr"] == pa.float64()
    assert kinds["reused"] == pa.bool_()
    other = SweepFolder(tmp_path)
    results.write(other, results.read(made)[::-1])
    assert parquet.read_table(tmp_path / results.PARQUET).schema.names == schema.names
    places = [schema.names.index(name) for name in ("name", "labels.family", "options.seed", "drafter.depth", "heldout.alpha.0.num", "heldout.alpha.3.den")]
    assert places == sorted(places)


def test_a_column_of_mixed_values_is_json_text(tmp_path: Path, made: SweepFolder):
    rows = results.read(made)[:3]
    layers: list[Any] = ["eagle3", [1, 2], 3]
    for row, layer in zip(rows, layers, strict=True):
        row["options"]["x"] = layer
        row["options"]["n"] = layer if layer == 3 else 0.5
    results.write(SweepFolder(tmp_path), rows)
    table = parquet.read_table(tmp_path / results.PARQUET)
    assert [json.loads(text) for text in table["options.x"].to_pylist()] == layers
    assert table["options.n"].to_pylist() == [0.5, 0.5, 3.0]


def test_no_rows(tmp_path: Path):
    folder = SweepFolder(tmp_path)
    assert results.read(folder) == []
    results.write(folder, [])
    assert results.read(folder) == []
    assert parquet.read_table(tmp_path / results.PARQUET).num_rows == 0


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda text: text[: len(text) - 300], r"line 6 is no row of a trial: not readable as JSON"),
        (lambda text: text.replace('"seed"', '"sead"', 1), r"line 1 is no row of a trial: lacks seed"),
        (lambda text: "[]\n" + text, r"line 1 is no row of a trial: lacks sweep, "),
        (lambda text: "\x00" + text, r"line 1 is no row"),
    ],
)
def test_a_damaged_file_is_named_with_its_line(made: SweepFolder, tmp_path: Path, damage: Callable[[str], str], said: str):
    (tmp_path / results.JSONL).write_text(damage((made.path / results.JSONL).read_text()))
    with pytest.raises(KvshotError, match=said) as error:
        results.read(SweepFolder(tmp_path))
    assert str(tmp_path / results.JSONL) in str(error.value)
    assert "kvshot sweep run" in str(error.value)


def test_a_damaged_file_of_a_trial_is_named(tmp_path: Path):
    folder = make_sweep(tmp_path, (HIDDEN_ONLY,), (0,))
    trial = folder.trials()[0]
    for name, text in (("diagnostics.json", '{"parts": []}'), ("eval.json", '{"alpha": []}'), ("train.json", '{"steps": 3}')):
        (folder.run_dir(trial) / name).write_text(text)
        with pytest.raises(KvshotError, match=rf"{trial.name}/{name}: not what this version writes .*delete it and run the sweep again"):
            results.row(folder, trial, TrialState("complete"))
        failed = results.row(folder, trial, TrialState("failed", reason="just that"))  # the sweep goes on without it
        assert failed["reason"] == "just that" and failed["heldout"] is None and failed["options"] and failed["drafter"]["parameters"]
    (folder.run_dir(trial) / "train.json").unlink()
    (folder.run_dir(trial) / "eval.json").write_text("{")
    with pytest.raises(KvshotError, match=r"eval.json: not readable as JSON"):
        results.row(folder, trial, TrialState("complete"))


def test_nothing_is_left_of_a_write_that_fails(made: SweepFolder, tmp_path: Path):
    folder = SweepFolder(tmp_path)
    results.write(folder, results.read(made))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ValueError):
        results.write(folder, [results.read(made)[0] | {"seed": float("nan")}])
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
