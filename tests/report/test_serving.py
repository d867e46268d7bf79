"""Training against serving on the page: every number its file's, differences that add up, a failed check shouted, a missing one said."""

from __future__ import annotations

import csv

import pytest

from kvshot_ds.errors import KvshotError
from kvshot_ds.report import build
from kvshot_ds.report.gather import read_run
from kvshot_ds.report.serving import terms

from .conftest import RUNS, read, recipe_for, write_decode, write_run, write_serving_check

MARK = ("retaken", "text", "starts", "decoded")


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "work", "a_hidden", RUNS["a_hidden"])


def lines(work, name):
    with open(work / "report" / "data" / name, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_all_three_numbers_stand_side_by_side(run, build_page):
    work = run.parent.parent
    page = build_page(recipe_for(work))
    check, result, decoded = (read(run / f"{name}.json") for name in ("serving_check", "eval", "decode"))
    shown = set(page.values)
    for value in (*(check["joint_mat"][rung]["value"] for rung in MARK), check["tau"]["value"], result["mat"]["value"], result["mat_joint"]["value"]):
        assert (value, f"{value:.2f}") in shown
    (row,) = lines(work, "serving-from-training-s-number-to-serving-s-tokens-a.csv")
    assert float(row["MAT, held-out"]) == result["mat"]["value"] and float(row["joint MAT, held-out"]) == result["mat_joint"]["value"]
    assert float(row["real decoding"]) == check["joint_mat"]["decoded"]["value"] and float(row["real decoding low"]) == check["joint_mat"]["decoded"]["low"]
    assert float(row["τ of kvshot decode"]) == decoded["tau"]["value"] and float(row["τ of the check"]) == check["tau"]["value"]
    assert row["check"] == "passed" and row["check (below)"] == "0 of 1,234 rounds differ"
    text = (work / "report" / "report.md").read_text(encoding="utf-8")
    assert "## Training against serving" in text and "as if a row's steps were independent" in text and "a round begins where the one before has failed" in text


def test_the_differences_lead_from_mat_to_tau_without_a_gap(run):
    found = {term.reason: term for term in terms(read_run(run))}
    result, decoded = read(run / "eval.json"), read(run / "decode.json")
    assert [name for name, term in found.items() if term.judged] == ["features", "path"]
    total = sum(term.difference.value for term in found.values())
    assert total == pytest.approx(decoded["tau"]["value"] - result["mat"]["value"])
    assert "6 of 7" in found["steps"].note and "75%" in found["text"].note and "a chain of 7" in found["decode"].note


def test_without_a_check_the_rest_is_shown_and_the_command_named(run, build_page):
    (run / "serving_check.json").unlink()
    text = build_page(recipe_for(run.parent.parent)).text
    assert f"Not measured: serving check of a_hidden. Run kvshot eval {run}/recipe.yaml --serving-check" in text
    assert "joint MAT − MAT" in text
    assert [term.reason for term in terms(read_run(run))] == ["joint"]


def test_a_failed_check_is_shouted(run, build_page):
    write_serving_check(run, "a_hidden", passed=False, faults=["real decoding <b>: joint MAT 1.2 against 1.7"], rounds_different=321)
    page = build_page(recipe_for(run.parent.parent))
    assert "served otherwise than it was trained" in page.text and "a_hidden: real decoding <b>: joint MAT 1.2" in page.text
    assert "FAILED 321 of 1,234 rounds differ" in page.text
    assert any(tag == "tr" and attrs.get("class") == "alarm" for tag, attrs in page.tags)


@pytest.mark.parametrize("content", ["{", "[]", '{"name": "x"}'])
def test_a_broken_check_is_named(run, content):
    (run / "serving_check.json").write_text(content)
    with pytest.raises(KvshotError, match=r"serving_check\.json: not what this version writes.*run `kvshot eval --serving-check` again"):
        build.run(recipe_for(run.parent.parent))


def test_trees_and_sampling_say_what_they_are(run, build_page):
    why = "drafts are drawn and settled by rejection"
    nothing = {"against": None, "why": why, "identical": 0, "different": 0, "cases": []}
    write_decode(run, "a_hidden", sampling={"temperature": 0.8, "scheme": "rejection"}, lossless=nothing, batch=4)
    text = build_page(recipe_for(run.parent.parent)).text
    assert f"a_hidden was not compared token for token: {why}" in text and "temperature 0.8" in text and "4 at once" in text and "by distribution" in text
    assert "Decoding is lossless on every prompt" not in text and "NOT lossless" not in text
    write_decode(run, "a_hidden", strategy="paper_tree", levels=8, nodes=60.0)
    text = build_page(recipe_for(run.parent.parent)).text
    assert "the paper's tree of 8" in text and "60.0 tokens verified a round" in text
    assert "real decoding, given that all before were accepted" in text
