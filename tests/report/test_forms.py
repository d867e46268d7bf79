"""The report as Markdown, SVG and CSV: the same content, unrounded, safe to read, and nothing left of an earlier report."""

from __future__ import annotations

import csv
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from html import unescape

import pytest

from kvshot_ds.errors import ConfigError
from kvshot_ds.files import read_json, write_json
from kvshot_ds.metrics import Interval
from kvshot_ds.report import build, forms
from kvshot_ds.report.blocks import Bullets, Cell, Code, Details, Facts, Figure, LegendItem, Panel, Row, Section, Table, Text, measured
from kvshot_ds.report.figures import Chart, Dot, Dots, Series
from kvshot_ds.report.forms import Names, data, drawing, markdown, points

from .conftest import read, recipe_for
from .swept import STUDY, study

SVG = "{http://www.w3.org/2000/svg}"
TABLE = Table(
    "All of it", ("run", "α₀", "note"), (Row((Cell("a|b"), measured(Interval(1 / 3, 0.25, 0.5)), Cell("–", "of one"))), Row((Cell("c"), Cell("–"), Cell("x"))))
)
CHART = Chart("k <step>", "αₖ", (Series("one $x_0$", 0, (0, 1), (1 / 3, None), (0.25, None), (0.5, None)),), "two points", 0.1, integer_x=True)
DOTS = Dots("MAT", (Dot("first", 1, 0.5, 0.4, 0.6), Dot("second", 2, None)), "two dots")
FIGURE = Figure(
    "alpha",
    "A caption & more",
    (Panel("left", CHART), Panel("right", DOTS, (LegendItem("own", 1),))),
    (LegendItem("one", 0), LegendItem("none", dotted=True)),
    replace(TABLE, caption="Behind it"),
)


def rows(text):
    return list(csv.reader(text.splitlines()))


def test_csv_is_unrounded_with_the_ends_of_intervals():
    assert rows(data(TABLE)) == [
        ["run", "α₀", "α₀ low", "α₀ high", "note", "note (below)"],
        ["a|b", repr(1 / 3), "0.25", "0.5", "–", "of one"],
        ["c", "–", "", "", "x", ""],
    ]
    assert rows(points(FIGURE)) == [
        ["panel", "series", "x", "y", "low", "high"],
        ["left", "one $x_0$", "0", repr(1 / 3), "0.25", "0.5"],
        ["left", "one $x_0$", "1", "", "", ""],
        ["left", "reference", "", "0.1", "", ""],
        ["right", "first", "", "0.5", "0.4", "0.6"],
        ["right", "second", "", "", "", ""],
    ]
    assert rows(data(Table("none", ("a", "b"), ()))) == [["a", "b"]]


def test_a_figure_stands_alone():
    svg = drawing(FIGURE)
    root = ET.fromstring(svg)
    assert root.tag == f"{SVG}svg" and svg == drawing(FIGURE), "the same figure, the same bytes"
    text = " ".join(t.text or "" for t in root.iter(f"{SVG}text"))
    assert all(word in text for word in ("left", "right", "k <step>", "first", "not measured", "own", "one", "none"))
    assert "var(" not in svg and "#ffffff" in svg, "no colour is another page's, and it is drawn on white"
    links = [value for element in root.iter() for name, value in element.attrib.items() if name.endswith("href")]
    assert all(link.startswith("#") for link in links) and "@import" not in svg and "url(http" not in svg
    for name, value in (("width", 800), ("height", 300)):
        assert float(root.attrib[name]) >= value


def test_markdown_holds_every_block():
    sections = [
        Section(
            "all",
            "All of it",
            [
                Text("plain *not bold* <b>"),
                Text("gone", "missing", "kvshot eval x"),
                Text("look", "note"),
                Text("no", "alarm"),
                Bullets(("a", "b")),
                Facts((("name", "value"),)),
                Code("```\nx\n```"),
                TABLE,
                Details("more <i>", (TABLE, Text("inside"))),
                FIGURE,
            ],
        )
    ]
    names = Names(sections)
    text = markdown("My title", sections, "Made today.", names)
    assert text.startswith("# My title\n\nMade today.\n\n- [All of it](#all-of-it)\n\n## All of it\n\n")
    for line in (
        r"plain \*not bold\* &lt;b&gt;",
        "> **Not measured:** gone. Run `kvshot eval x`",
        "> look",
        "> **no**",
        "- a\n- b",
        "- **name**: value",
        "````\n```\nx\n```\n````",
        "**All of it** ([CSV](data/all-all-of-it.csv))",
        "| run | α₀ | note |\n| --- | --: | --: |\n| a\\|b | 0.333<br>0.250–0.500 | –<br>of one |",
        "<details><summary>more &lt;i&gt;</summary>\n\n",
        "![two points two dots](figures/alpha.svg) ([points as CSV](data/fig-alpha.csv))",
    ):
        assert line in text, line
    assert dict(names.files()).keys() == {"figures/alpha.svg", "data/fig-alpha.csv", "data/fig-alpha-table.csv", "data/all-all-of-it.csv"}


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("kv_only _x_", r"kv_only \_x\_"),
        ("# a", r"\# a"),
        ("1. a", r"\1. a"),
        ("$x$ [y](z) `c` ~", r"\$x\$ \[y\](z) \`c\` \~"),
        ("a\nb", "a b"),
        ("−0.1", "−0.1"),
    ],
)
def test_text_is_no_markup(text, written):
    assert forms._text(text) == written


def test_the_forms_beside_the_page(work):
    folder = build.run(recipe_for(work)).path.parent
    listed = set(read_json(folder / "files.json")["files"])
    there = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}
    assert there == listed | {"index.html", "files.json"} and "report.md" in there and "figures/alpha.svg" in there
    text = (folder / "report.md").read_text(encoding="utf-8")
    links = set(re.findall(r"\]\(((?:figures|data)/[^)]+)\)", text))
    assert links == listed - {"report.md"}, "every file is linked, and every link leads to a file"
    html = (folder / "index.html").read_text(encoding="utf-8")
    assert [line[3:] for line in text.splitlines() if line.startswith("## ")] == [unescape(h) for h in re.findall(r"<h2>(.*?)</h2>", html)]
    alpha = read(work / "runs" / "a_hidden" / "eval.json")["alpha"][3]
    lines = rows((folder / "data" / "fig-alpha.csv").read_text(encoding="utf-8"))
    assert ["", "a_hidden", "3", *(repr(alpha[key]) for key in ("value", "low", "high"))] in lines


def test_only_what_a_report_wrote_is_removed(tmp_path):
    folder = tmp_path / "report"
    for name in ("figures/old.svg", "figures/mine.svg", "data/old.csv", "keep.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x")
    write_json(folder / "files.json", {"files": ["figures/old.svg", "data/old.csv", "data/gone.csv", "../report/keep.txt", "figures/../keep.txt", "keep.txt"]})
    build.run(recipe_for(tmp_path))
    left = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}
    assert {"figures/mine.svg", "keep.txt"} <= left and not left & {"figures/old.svg", "data/old.csv"}
    assert "figures/mine.svg" not in read_json(folder / "files.json")["files"]


@pytest.mark.parametrize("content", ["{", "[]", '{"files": 3}', '{"files": [3]}'])
def test_a_list_that_is_none_removes_nothing(tmp_path, content):
    (tmp_path / "files.json").write_text(content)
    assert build._listed(tmp_path / "files.json") == set()


def invoke(*words):
    from kvshot_ds.cli import cli

    return cli.main(["report", *map(str, words)], standalone_mode=False)


def test_folders_of_runs_on_the_command_line(work, tmp_path):
    runs = work / "runs"
    invoke(runs / "b_kv", runs / "a_hidden", "--out", tmp_path / "out")
    text = (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    assert "b_kv" in text and "a_hidden" in text and "d_hybrid" not in text
    with pytest.raises(ConfigError, match=r"is a folder, report\.title=x is none"):
        invoke(runs / "b_kv", "report.title=x")
    (tmp_path / "recipe.yaml").write_text("name: x\ntarget: {path: /models/x}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="b_kv"):
        invoke(tmp_path / "recipe.yaml", runs / "b_kv")


def test_the_report_of_a_sweep_lies_beside_it(tmp_path):
    folder = study(tmp_path, STUDY[:1], seeds=(0,), events=False, diagnosed=False)
    invoke(folder.path)
    assert "hidden-only" in (folder.path / "report" / "report.md").read_text(encoding="utf-8") and not (tmp_path / "report").exists()
