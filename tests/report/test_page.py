"""The page in a real browser, and its colours in the eyes of those who see fewer: legible, whole, and loading nothing."""

from __future__ import annotations

import datetime
import itertools
import re
from importlib import resources

import numpy as np
import pytest

from kvshot_ds.report import build, figures
from kvshot_ds.report.blocks import Cell, Code, Details, Facts, Row, Section, Table, Text
from kvshot_ds.report.gather import gather
from kvshot_ds.report.sections import build_sections
from tests.browser import browser, require_browser, until

from .conftest import recipe_for
from .test_forms import FIGURE

# Linear sRGB -> as seen without one kind of cone (Machado, Oliveira and Fernandes 2009, severity 1)
BLINDNESS = {
    "none": np.eye(3),
    "protanopia": np.array([[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]),
    "deuteranopia": np.array([[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]),
    "tritanopia": np.array([[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]),
}
TO_XYZ = np.array([[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]])
WIDTHS = (360, 1440)

# Elements that stick out of the window to the right, unless a box of their own scrolls them
_STICKING_OUT = """
const out = [];
for (const e of document.querySelectorAll('body *')) {
  if (e.closest('.scroll, pre') && !e.matches('.scroll, pre')) continue;
  const box = e.getBoundingClientRect();
  if (box.width && box.right > document.documentElement.clientWidth + 1) out.push(e.tagName + '.' + e.className + ' ' + Math.round(box.right));
}
return [document.documentElement.scrollWidth - document.documentElement.clientWidth, out];
"""
_COLOURS = "const s = getComputedStyle(document.body); return [s.backgroundColor, s.color];"
_SPOIL = """
const box = document.createElement('div');
box.style.cssText = 'width: 3000px; height: 9px';
document.body.append(box);
new Image().src = 'http://127.0.0.1:9/x.png';
console.error('spoilt');
"""
_FOLD = "document.querySelectorAll('details').forEach(details => {{ details.open = {open}; }})"
# What a folded table says of itself, and whether a folded figure is seen
_FOLDED = """
const [table, figure] = document.querySelectorAll('#hard > details');
return [getComputedStyle(table.querySelector('summary'), '::after').content, figure.querySelector('svg[role]').checkVisibility()];
"""


def linear(colour: str) -> np.ndarray:
    """#rrggbb as linear sRGB in 0 .. 1."""
    value = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)


def lab(rgb: np.ndarray) -> np.ndarray:
    """CIE L*a*b* (D65) of linear sRGB."""
    xyz = TO_XYZ @ np.clip(rgb, 0, 1) / np.array([0.95047, 1.0, 1.08883])
    f = np.where(xyz > (6 / 29) ** 3, np.cbrt(xyz), xyz / (3 * (6 / 29) ** 2) + 4 / 29)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def palettes() -> list[dict[str, str]]:
    """The page's own colours by name, as it has them in the light and in the dark."""
    style = (resources.files("kvshot_ds.report") / "page.html.j2").read_text(encoding="utf-8")
    found = [dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", block)) for block in re.findall(r":root \{(.*?)\}", style, flags=re.DOTALL)]
    return [palette for palette in found if "c0" in palette]


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("kind", BLINDNESS)
def test_colours_differ_for_everyone(kind, dark):
    palette = palettes()[dark]
    seen = [lab(BLINDNESS[kind] @ linear(palette[f"c{i}"])) for i in range(figures.COLOURS)]
    distances = {pair: float(np.linalg.norm(seen[pair[0]] - seen[pair[1]])) for pair in itertools.combinations(range(figures.COLOURS), 2)}
    assert min(distances.values()) > 14, distances  # CIE76; a just noticeable difference is about 2.3
    page = lab(BLINDNESS[kind] @ linear(palette["page"]))
    assert min(np.linalg.norm(c - page) for c in seen) > 30


def test_a_drawing_that_stands_alone_has_the_pages_light_colours():
    light = palettes()[0]
    assert tuple(light[f"c{i}"] for i in range(figures.COLOURS)) == figures.LIGHT.series
    assert (light["ink"], light["muted"], light["grid"], light["page"]) == (figures.LIGHT.ink, figures.LIGHT.muted, figures.LIGHT.grid, figures.LIGHT.page)


@pytest.mark.parametrize("dark", [False, True])
def test_text_can_be_read(dark):
    """WCAG 2.1: text has at least 4.5 times the luminance of what lies behind, or the other way round."""
    palette = palettes()[dark]
    light = {name: float(TO_XYZ[1] @ linear(palette[name])) + 0.05 for name in ("ink", "muted", "good", "bad", "page", "box", "ours")}
    for text, behind in itertools.product(("ink", "muted", "good", "bad"), ("page", "box", "ours")):
        assert max(light[text], light[behind]) / min(light[text], light[behind]) > 4.5, f"{text} on {behind}"


def whole(work) -> str:
    """The page of a work folder, and what may be hard on narrow screens and on paper: long words, wide tables, folded figures."""
    recipe, word = recipe_for(work), "kv_only_" * 30
    table = Table(word, tuple(f"column {i}" for i in range(40)), (Row(tuple(Cell(word if i < 2 else "0.123", "0.100–0.200") for i in range(40))),), words=2)
    hard = [
        Text(word),
        Text(word, "missing", f"kvshot eval {word}"),
        table,
        Code(word),
        Facts(((word, word),)),
        Details("a table", (table,)),
        Details("a figure", (FIGURE,)),
    ]
    return build.render("All of it", [*build_sections(gather(recipe), recipe), Section("hard", word, hard)], datetime.datetime.now(datetime.UTC))


def test_the_page_in_a_browser(work, tmp_path):
    """One browser for all of it: starting one is what takes long."""
    require_browser()
    file = tmp_path / "index.html"
    file.write_text(whole(work), encoding="utf-8")
    url = file.as_uri()
    with browser(tmp_path) as page:
        page.seen_as(1440)
        page.requests()
        page.open(url)
        for width, dark, printed in [(w, d, False) for w in WIDTHS for d in (False, True)] + [(794, True, True)]:
            page.seen_as(width, dark, printed)
            name = f"{width} {'dark' if dark else 'light'} {'paper' if printed else 'screen'}"
            (tmp_path / f"{name}.png").write_bytes(page.picture())  # for whoever wants to see it
            if printed:  # what has forty columns has no room on paper
                page.run("document.querySelectorAll('#hard .scroll').forEach(table => table.remove())")
            over, out = page.run(_STICKING_OUT)
            assert over <= 0 and (printed or not out), f"{name}: {over} px too wide; {out}"
            behind, ink = page.run(_COLOURS)
            on_black = dark and not printed
            assert (ink == "rgb(228, 231, 235)") == on_black and (behind == "rgb(20, 23, 27)") == on_black, f"{name}: {ink} on {behind}"
            folded, shown = page.run(_FOLDED)
            assert ("folded" in folded) == printed, f"{name}: {folded}"
            assert shown == printed, f"{name}: a folded figure is seen on paper alone"
            if not printed:
                page.run(_FOLD.format(open="true"))
                over, out = page.run(_STICKING_OUT)
                assert over <= 0 and not out, f"{name}, all unfolded: {over} px too wide; {out}"
                page.run(_FOLD.format(open="false"))
        asked = page.requests()
        assert url in asked and all(address == url or address.startswith("data:") for address in asked), asked
        assert page.complaints() == []
        page.seen_as(1440)
        page.run(_SPOIL)  # what is looked for above would be found
        over, out = page.run(_STICKING_OUT)
        assert over > 0 and out
        until(lambda: any("127.0.0.1:9" in address for address in page.requests()), lambda: "a request was not noticed")
        assert any("spoilt" in text for text in page.complaints())
