"""The page: self-contained, complete, true to the JSON files, and honest about what is missing."""

from __future__ import annotations

import re
import shutil

import pytest

from kvshot_ds.errors import KvshotError
from kvshot_ds.files import write_json
from kvshot_ds.report import build
from kvshot_ds.report.sections import ONE_SEED

from .conftest import MANY, RUNS, read, recipe_for, write_run

HOSTILE = "<script>alert(1)</script>\"><img src=x onerror=alert(2)>'&amp;{{ 7*7 }}$x_0$"


def test_page_loads_nothing(work, build_page):
    page = build_page(recipe_for(work))
    assert not {tag for tag, _ in page.tags} & {"script", "img", "iframe", "object", "embed", "base", "form"}
    ids = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    for tag, attrs in page.tags:
        assert "src" not in attrs and "srcset" not in attrs and not any(name.startswith("on") for name in attrs)
        link = attrs.get("href")
        assert link is None or (tag == "link" and link == "data:,") or (link.startswith("#") and link[1:] in ids), f"{tag} {link}"
    text = (work / "report" / "index.html").read_text(encoding="utf-8")
    assert "http:" not in text and "https:" not in text and "@import" not in text and "@font-face" not in text
    assert {target[1:] for target in re.findall(r"url\(([^)]*)\)", text)} <= set(ids)


def test_every_figure_is_text_themed_and_labelled(work, build_page):
    page = build_page(recipe_for(work))
    drawings = [attrs for tag, attrs in page.tags if tag == "svg" and attrs.get("role") == "img"]
    assert len(drawings) == 2 + 2 + 2 + 4 + 4 + 2  # alpha wide and narrow; curves; gates wide and narrow; joint of 4; histograms of 4; paper and here
    assert all(attrs["aria-label"] for attrs in drawings)
    text = (work / "report" / "index.html").read_text(encoding="utf-8")
    assert "#5e00" not in text and "#01020" not in text and "font-family: 'DejaVu" not in text
    assert "prefers-color-scheme: dark" in text and "@media print" in text
    assert page.text.count("The numbers behind this figure") == 5


def test_numbers_equal_those_of_the_json_files(work, build_page):
    page = build_page(recipe_for(work))
    shown = set(page.values)
    for name in RUNS:
        result, decoded = read(work / "runs" / name / "eval.json"), read(work / "runs" / name / "decode.json")
        for rate in result["alpha"]:
            assert (rate["value"], f"{rate['value']:.3f}") in shown
            assert f"{rate['low']:.3f}–{rate['high']:.3f}" in page.text
            assert (rate["den"], f"{rate['den']:,}") in shown
        for rate in (*result["joint"], *result["accept_prob"]):
            assert (rate["value"], f"{rate['value']:.3f}") in shown
        for key in ("mat", "mat_joint"):
            assert (result[key]["value"], f"{result[key]['value']:.2f}") in shown
            assert f"{result[key]['low']:.2f}–{result[key]['high']:.2f}" in page.text
        assert (result["retention"]["value"], f"{result['retention']['value']:.3f}") in shown
        bigram = result["baselines"]["bigram"]
        assert (bigram["value"], f"{bigram['value']:.3f}") in shown
        difference = result["against"][0]["difference"]
        assert (difference, f"{difference:+.3f}".replace("-", "−")) in shown
        assert (decoded["tau"]["value"], "1.68") in shown and "1.51–1.87" in page.text
        assert (15.36, "15.4") in shown and (19.2, "19.2") in shown and (15.36 / 19.2, "0.80×") in shown and (0.4, "40.0%") in shown
        assert (decoded["joint"][0]["value"], "0.465") in shown and (result["joint"][0]["value"], f"{result['joint'][0]['value']:.3f}") in shown
    assert "61 rounds with 0, 29 rounds with 1" in (work / "report" / "index.html").read_text(encoding="utf-8")
    assert "216 conversations, 21,600 tokens" in page.text and "24 conversations, 2,400 tokens" in page.text
    assert (121.5, "2 min 02 s") in shown and (121.5 + 34 + 66, "3 min 42 s") in shown


def test_says_what_a_reader_must_know(work, build_page):
    text = build_page(recipe_for(work, report={"title": "My drafters"})).text
    assert ONE_SEED in text and "This is a small run: 216 training conversations" in text
    assert "draft head and final norm start from the target's head rows" in text
    assert "Some-Target, weights digest 0a1b2c3d0a1b2c3d" in text
    assert "by conversation, 10% held out" in text
    assert "lossless on every prompt tried: all 24 outputs" in text
    assert "Beside the paper (Qwen3-8B, another target)" in text
    assert "6 prompts (1 skipped), 32 new tokens, fp32, cpu" in text and "chain of 7" in text
    assert "2.12.0, 2.13.0 (stages differ)" in text and "kvshot train recipes/b_kv.yaml" in text
    assert text.startswith("My drafters My drafters")


def test_a_lossy_decoding_is_shouted(work, build_page):
    path = work / "runs" / "d_hybrid" / "decode.json"
    lossless = {"against": "generate", "why": "", "identical": 5, "different": 1, "cases": [{"key": "c7", "position": 3}]}
    write_json(path, {**read(path), "lossless": lossless})
    page = build_page(recipe_for(work))
    assert "Decoding is NOT lossless: 1 of 24 outputs differ" in page.text and "'key': 'c7'" in page.text
    assert any(tag == "tr" and attrs.get("class") == "alarm" for tag, attrs in page.tags)


def test_missing_pieces_are_said_with_their_command(work, build_page):
    runs = work / "runs"
    (runs / "a_hidden" / "decode.json").unlink()
    for name in ("eval.json", "eval_conversations.json"):
        (runs / "b_kv" / name).unlink()
    (runs / "d_hybrid" / "train.json").unlink()
    shutil.rmtree(work / "prepared")
    text = build_page(recipe_for(work)).text
    assert f"Not measured: decoding with a_hidden. Run kvshot decode {runs}/a_hidden/recipe.yaml" in text
    assert f"Not measured: held-out acceptance of b_kv. Run kvshot eval {runs}/b_kv/recipe.yaml" in text
    assert f"training d_hybrid, which is not finished. Run kvshot train {runs}/d_hybrid/recipe.yaml" in text
    assert "how the conversations were prepared. Run kvshot prep RECIPE" in text
    assert "b_kv against bigram table (α₀): no eval.json" in text


def test_an_empty_work_folder_gives_a_page_that_measures_nothing(tmp_path, build_page):
    page = build_page(recipe_for(tmp_path / "nothing"))
    assert "no drafter has been measured yet. Run kvshot eval RECIPE" in page.text
    paper = {v for v, _ in page.values}
    assert len(page.values) == 12 * 9 + 8 * 5 + 4 + 6 and 0.65 in paper  # the paper's tables and nothing else
    assert "some-target" in page.text


def test_one_conversation_has_no_interval(work, build_page):
    folder = work / "runs" / "a_hidden"
    result = read(folder / "eval.json")
    for part in (*result["alpha"], result["mat"], result["mat_joint"], result["retention"], *result["against"]):
        part["low"] = part["high"] = None
    write_json(folder / "eval.json", result)
    text = build_page(recipe_for(work)).text
    assert "no interval" in text and "α₀ against the bigram table: a_hidden not told apart (" in text


def test_hostile_names_stay_text(work, build_page):
    name = HOSTILE.replace("/", "")
    shutil.rmtree(work / "runs")
    write_run(work, name, RUNS["d_hybrid"], target=HOSTILE)
    page = build_page(recipe_for(work, report={"title": HOSTILE}))
    assert not {tag for tag, _ in page.tags} & {"script", "img"}
    assert not any(key.startswith("on") for _, attrs in page.tags for key in attrs)
    assert page.text.count(HOSTILE) >= 3 and name in page.text
    assert any(name in (attrs.get("aria-label") or "") for tag, attrs in page.tags if tag == "svg")


def test_chosen_runs_only_and_in_order(work, build_page):
    page = build_page(recipe_for(work))
    rows = [
        page.text.index(f"{name} {label}") for name, label in (("a_hidden", "hidden-only"), ("b_kv", "KV-only"), ("c_none", "KV-only"), ("d_hybrid", "hybrid"))
    ]
    assert rows == sorted(rows)
    only = build_page(recipe_for(work, report={"runs": [str(work / "runs" / "b_kv")]})).text
    assert "a_hidden (" not in only and "no control among the runs" in only
    assert "Run kvshot train" in only and "name=b_kv-none train.drafter.kv.injection=none" in only


def test_eight_drafters_are_told_apart(many, build_page):
    page = build_page(recipe_for(many))
    html = (many / "report" / "index.html").read_text(encoding="utf-8")
    legend = html.split('id="fig-alpha"')[1].split("</ul>")[0]
    swatches = re.findall(r'<svg class="swatch".*?</svg>', legend, flags=re.DOTALL)
    assert len(swatches) == len(set(swatches)) == len(MANY) + 1  # and the bigram table
    panels = html.split('id="fig-alpha"')[1].split("<details>")[0]
    assert re.findall(r"<h3>(.*?)</h3>", panels) == ["step by step", "block by block"]
    assert "hybrid_block: hybrid block · depth 2 · linear_rope · gate scalar, bias:-1 · blocks of 8" in page.text
    assert "mtp hidden-only, last layer · depth 1. Reads the target's fused hidden states" in page.text
    assert "kv_block against kv_only: α₀" in page.text and "dflash against hidden_only: α₀" in page.text and "by α₀ and joint MAT" in page.text
    assert page.text.count("1.23 M with its own head") == 5 and page.text.count("1.23 M target's head, frozen") == 3
    assert "dflash soft_ce, 7 steps, weights exp(−k/4), 48 rows of each conversation" in page.text
    assert "the head is the target's, frozen" in page.text
    glance = html.split('id="glance"')[1].split("</ul>")[0]
    assert glance.count("<li>") == len(MANY) + 1 + 9 + 1  # each run, the bigram table, each pair, decoding


def test_a_report_is_replaced_whole(work, build_page):
    build_page(recipe_for(work))
    first = (work / "report" / "index.html").read_text(encoding="utf-8")
    summary = build.run(recipe_for(work))
    again = summary.path.read_text(encoding="utf-8")
    made = re.compile(r"Made [^b]* by")
    assert made.sub("", first) == made.sub("", again), "the same results give the same page"
    assert {p.name for p in (work / "report").iterdir()} == {"index.html", "report.md", "files.json", "figures", "data"}
    assert summary.runs == tuple(RUNS) and summary.missing == 6  # looks during training, growth with tokens, diagnostics of each


@pytest.mark.parametrize("content", ["{", '{"name": "x"}', "[]", '{"drafter": 3}'])
def test_a_broken_result_is_named(work, content):
    path = work / "runs" / "b_kv" / "eval.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(KvshotError, match=r"eval\.json: not what this version writes.*delete it and run `kvshot eval` again"):
        build.run(recipe_for(work))


def test_a_missing_run_folder_is_named(work):
    with pytest.raises(KvshotError, match=r"report\.runs: no such run folder: .*nowhere"):
        build.run(recipe_for(work, report={"runs": [str(work / "runs" / "nowhere")]}))
