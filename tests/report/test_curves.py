"""The drawing and the tables of a document: true to eval.json, stable, and only between the markers."""

from __future__ import annotations

import itertools
import re
from html.parser import HTMLParser

import numpy as np
import pytest

from kvshot_ds.errors import ConfigError, KvshotError
from kvshot_ds.report import curves, figures
from kvshot_ds.report.curves import END, drawing, filled, main, read_runs, spread

from .conftest import MANY, read, write_run

TEXT = "# Page\n\n<!-- curves -->\nnot measured yet\n<!-- /curves -->\nkept `<!-- curves:NAME -->`\n" + "".join(
    f"<!-- curves:{name} -->\nnot measured yet\n<!-- /curves -->\n" for name in (*MANY, "later")
)


@pytest.fixture
def page(many, monkeypatch):
    monkeypatch.chdir(many)
    (many / "docs").mkdir()
    (many / "docs" / "page.md").write_text(TEXT, encoding="utf-8")
    return many / "docs" / "page.md"


def run(page, *more):
    folders = [str(page.parent.parent / "runs" / name) for name in MANY]
    return main([*folders, "--markdown", "docs/page.md", "--figure", "docs/img/curves.svg", *more])


def between(text, name):
    return text.split(f"<!-- curves{name} -->\n")[1].split(END)[0]


def test_the_numbers_of_every_run_stand_in_its_place(page):
    assert run(page) == 0
    text = page.read_text(encoding="utf-8")
    for name in MANY:
        result, place = read(page.parent.parent / "runs" / name / "eval.json"), between(text, f":{name}")
        cells = place.splitlines()[2].split(" | ")
        expected = [f"{r['value']:.3f}<br>{r['low']:.3f}–{r['high']:.3f}" for r in result["alpha"]]
        expected += [f"{r['value']:.2f}<br>{r['low']:.2f}–{r['high']:.2f}" for r in (result["mat"], result["mat_joint"])]
        assert [*cells[1:-1], cells[-1].removesuffix(" |")] == expected
        rows = result["alpha"]
        assert f"{rows[0]['den']:,} held-out rows at step 0, {rows[6]['den']:,} at step 6; 24 conversations." in place
        assert place.count("\n") == 5 and place.splitlines()[0].startswith(f"| `{name}` | α₀ | α₁ |")
    assert between(text, ":later") == "not measured yet\n" and "kept `<!-- curves:NAME -->`" in text


def test_the_summary_has_all_runs_and_says_what_they_are(page):
    assert run(page, "--made-by", "make families") == 0
    place = between(page.read_text(encoding="utf-8"), "")
    for name in MANY:
        result = read(page.parent.parent / "runs" / name / "eval.json")
        line = next(line for line in place.splitlines() if line.startswith(f"| `{name}` |"))
        for part in (result["alpha"][0], result["alpha"][6]):
            assert f"{part['value']:.3f}<br>{part['low']:.3f}–{part['high']:.3f}" in line
        assert "| 1.23 M |" in line and "| 1.68<br>1.51–1.87 | 4,040 | 0 |" in line and f"`recipes/{name}.yaml`" in line
    assert "Target: Some-Target. Trained on 216 conversations. Measured on 24 held-out conversations" in place
    assert "![αₖ by draft step of each drafter, with intervals](img/curves.svg)" in place
    assert "\nmake families\npython -m kvshot_ds.report.curves runs/hidden_only runs/mtp" in place
    assert place.rstrip().endswith("--markdown docs/page.md --figure docs/img/curves.svg\n```")
    assert str(page.parent.parent) not in place, "no path of this machine"


def test_a_second_time_changes_no_byte(page):
    assert run(page) == 0
    svg = page.parent / "img" / "curves.svg"
    first = page.read_bytes(), svg.read_bytes()
    assert run(page) == 0
    assert first == (page.read_bytes(), svg.read_bytes())


def test_the_drawing_is_static_and_names_every_curve(many):
    svg = drawing(read_runs([many / "runs" / name for name in MANY]))
    HTMLParser().feed(svg)
    assert svg.startswith("<svg ") and svg.endswith("</svg>\n") and len(svg) < 60_000
    outside = re.findall(r"https?://[^\"<\s]+", svg)
    assert set(outside) == {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}, "namespaces alone"
    assert "<script" not in svg and "<image" not in svg and "var(" not in svg and "DejaVu" not in svg
    assert all(f">{name}</text>" in svg for name in (*MANY, "bigram table"))
    assert set(figures.LIGHT.series) <= set(re.findall(r"#[0-9a-f]{6}", svg)), "six families in six colours"


def test_the_light_colours_are_the_pages():
    from importlib import resources

    css = (resources.files(figures.__package__) / "page.html.j2").read_text(encoding="utf-8").split("prefers-color-scheme")[0]
    found = [re.search(rf"--{name}: (#\w+);", css)[1] for name in ("ink", "muted", "grid", "page", *(f"c{i}" for i in range(6)))]
    assert [figures.LIGHT.ink, figures.LIGHT.muted, figures.LIGHT.grid, figures.LIGHT.page, *figures.LIGHT.series] == found


def test_step_by_step_and_block_wise_stand_apart_on_one_scale(many):
    both = drawing(read_runs([many / "runs" / name for name in ("kv_only", "kv_block")]))
    one = drawing(read_runs([many / "runs" / "kv_only"]))
    assert ">step by step<" in both and ">block by block<" in both and both.count(">draft step k<") == 2
    assert one.count(">draft step k<") == 1 and ">step by step<" not in one
    panels = curves.alpha_panels(curves.evaluated(read_runs([many / "runs" / name for name in MANY])))
    low, high = panels[0].chart.y_range
    assert panels[1].chart.y_range == (low, high)
    values = [v for p in panels for s in p.chart.series for v in (*s.low, *s.high, *s.y)]
    assert low < min(values) and max(values) < high


def test_places_keep_their_distance_and_move_least():
    rng = np.random.default_rng(0)
    for _ in range(10):
        wanted = sorted(rng.uniform(0, 10, size=3))
        got = spread(wanted, 2.0)
        assert all(b - a >= 2.0 - 1e-9 for a, b in itertools.pairwise(got))
        a, b, c = np.meshgrid(*[np.arange(-3, 13, 0.2)] * 3, indexing="ij")
        cost = (a - wanted[0]) ** 2 + (b - wanted[1]) ** 2 + (c - wanted[2]) ** 2
        assert sum((x - w) ** 2 for x, w in zip(got, wanted, strict=True)) <= cost[(b - a >= 2) & (c - b >= 2)].min() + 1e-9
    assert spread([0.0, 5.0], 1.0) == [0.0, 5.0] and spread([1.0, 1.0], 1.0) == [0.5, 1.5] and spread([], 1.0) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nothing", "0 places are marked <!-- curves:a -->"),
        (f"<!-- curves:a -->{END}<!-- curves:a -->{END}", "2 places are marked"),
        ("<!-- curves:a --> open", "is not closed"),
        (f"<!-- curves:a --><!-- curves:b -->{END}", "is not closed"),
    ],
)
def test_a_document_without_its_marker_is_refused(text, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        filled(text, {"a": "x"}, "page.md")


def test_only_the_place_is_written():
    text = f"a <!-- curves:x -->old{END} b <!-- curves -->{END} c"
    assert filled(text, {"x": "1", "": "2"}, "p") == f"a <!-- curves:x -->\n1\n{END} b <!-- curves -->\n2\n{END} c"


def test_nothing_is_written_if_anything_is_wrong(page, capsys):
    (page.parent.parent / "runs" / "dflash" / "eval.json").unlink()
    assert run(page) == 2
    assert "no eval.json in" in capsys.readouterr().err and page.read_text(encoding="utf-8") == TEXT and not (page.parent / "img").exists()
    assert main(["nowhere"]) == 2 and main([]) == 2


def test_runs_that_do_not_belong_together_are_refused(many):
    other = write_run(many / "again", "mtp", MANY["mtp"])
    with pytest.raises(KvshotError, match="two run folders are called mtp"):
        read_runs([many / "runs" / "mtp", other])
    path = many / "runs" / "hybrid" / "eval.json"
    path.write_text(path.read_text(encoding="utf-8").replace("0a1b2c3d", "ffffffff"), encoding="utf-8")
    with pytest.raises(KvshotError, match="different targets"):
        read_runs([many / "runs" / "mtp", many / "runs" / "hybrid"])


def test_a_drafter_without_a_recipe_or_decoding_has_its_place_too(page):
    folder = page.parent.parent / "runs" / "mtp"
    for name in ("recipe.yaml", "train.json", "decode.json", "provenance.json"):
        (folder / name).unlink()
    assert run(page) == 0
    line = next(line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("| `mtp` | 1.2"))
    assert line.endswith("| – | – | – | – |")
