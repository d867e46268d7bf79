"""HTML -> text, for contents that are a rendered page: what a browser's copy of a chat leaves in public data sets.

Code that contains tags is never touched: only balanced, well-known tags from end to end, without anything that only source code has
(a doctype, scripts, forms, event handlers, template marks, tags indented over several lines), count as a page.
"""

from __future__ import annotations

import re
from html.parser import HTMLParser


def _tags(names: str) -> frozenset[str]:
    return frozenset(names.split())


_PARAGRAPHS = _tags("p h1 h2 h3 h4 h5 h6 ul ol table blockquote pre dl")
_LINES = _tags("div li tr dt dd section article header footer main thead tbody tfoot caption figure figcaption html body details summary")
_INLINE = _tags("span a b strong i em u s del ins mark small sub sup code kbd samp var q cite abbr td th label font time")
_VOID = _tags("br hr img wbr")
_UNSEEN = _tags("button svg path line polyline polygon rect circle g")
_KNOWN = _PARAGRAPHS | _LINES | _INLINE | _VOID | _UNSEEN
_TEXTUAL = _tags("p h1 h2 h3 h4 h5 h6 li table pre blockquote br dd")  # a page has one of them
_DEEPEST = 200  # tags within each other; each costs a look at all of them, each list item as many blanks
_HANDLERS = re.compile(r"on[a-z]|v-|ng-|[:@#*\[(]")
_MARKS = re.compile(r"\{\{|\{%|<%|\$\{")
_INDENTED = re.compile(r"\n[ \t]+")
_LANGUAGE = re.compile(r"\b(?:language|lang)-([\w+#.-]+)")


class _NoPage(Exception):
    """Not a rendered page."""


def page_text(content: str) -> str | None:
    """The words of a rendered page, with line breaks, list marks and fenced code blocks; None if `content` is none."""
    if not (content.startswith("<") and content.endswith(">")):
        return None
    page = _Page()
    try:
        page.feed(content)
        page.close()
    except (_NoPage, AssertionError):  # html.parser asserts on some malformed declarations
        return None
    text = "".join(page.out).strip()
    return text if text and not page.stack and page.textual else None


class _Page(HTMLParser):
    """out: the text so far; stack: open tags; breaks: newlines owed before the next words."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.out: list[str] = []
        self.stack: list[str] = []
        self.counters: list[int] = []  # of each open list: items so far, or -1 for bullets
        self.breaks = 0
        self.textual = False
        self.code: list[str] = []
        self.label: list[str] = []
        self.language = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in _KNOWN or any(_HANDLERS.match(name) or _MARKS.search(value or "") for name, value in attrs):
            raise _NoPage
        if not self.stack and tag in _VOID and tag != "br":
            raise _NoPage
        self.textual = self.textual or tag in _TEXTUAL
        if tag not in _VOID:
            self.stack.append(tag)
        if len(self.stack) > _DEEPEST:
            raise _NoPage
        if "pre" in self.stack:
            if tag == "pre":
                self._owe(2)
                self.code, self.label, self.language = [], [], ""
            elif tag == "code" and (found := _LANGUAGE.search(dict(attrs).get("class") or "")):
                self.language = found[1]
            elif tag == "br":
                self.code.append("\n")
        elif tag == "br":
            self.breaks = min(self.breaks + 1, 2)
        elif tag == "hr":
            self._owe(2)
            self._write("---")
            self._owe(2)
        else:
            self._open(tag)

    def _open(self, tag: str) -> None:
        if tag in ("ul", "ol"):
            self._owe(1 if self.counters else 2)
            self.counters.append(0 if tag == "ol" else -1)
        elif tag == "li":
            self._owe(1)
            mark = "- "
            if self.counters and self.counters[-1] >= 0:
                self.counters[-1] += 1
                mark = f"{self.counters[-1]}. "
            self._write("  " * (len(self.counters) - 1) + mark)
        elif tag in ("td", "th"):
            if self.out and not self.breaks:
                self.out.append(" | ")
        elif tag == "code":
            self._write("`")
        elif self.stack[-2:-1] != ["li"] or tag not in ("p", "div"):  # the words of an item stand beside its mark
            self._owe(2 if tag in _PARAGRAPHS else 1 if tag in _LINES else 0)

    def handle_endtag(self, tag: str) -> None:
        if tag in _VOID:
            return
        if not self.stack or self.stack.pop() != tag:
            raise _NoPage
        if tag == "pre":
            code = "".join(self.code or self.label).strip("\n")
            self._write(f"```{self.language}\n{code}\n```")
            self._owe(2)
        elif "pre" in self.stack:
            return
        elif tag in ("ul", "ol"):
            self.counters.pop()
            self._owe(1 if self.counters else 2)
        elif tag == "code":
            self.out.append("`")
        else:
            self._owe(2 if tag in _PARAGRAPHS and "li" not in self.stack else 1 if tag in _LINES or tag in _PARAGRAPHS else 0)

    def handle_data(self, data: str) -> None:
        if not self.stack:
            if data.strip():
                raise _NoPage
        elif _UNSEEN.intersection(self.stack):
            return
        elif "pre" in self.stack:
            # what stands beside the code in its block is a toolbar, unless there is no <code> at all
            (self.code if "code" in self.stack else self.label).append(data)
        elif _INDENTED.search(data) or _MARKS.search(data):
            raise _NoPage
        elif data.strip():
            lead = " " if data[0].isspace() and not self.breaks and self.out and not self.out[-1][-1:].isspace() else ""
            self._write(lead + " ".join(data.split()) + (" " if data[-1].isspace() else ""))
        elif self.out and not self.breaks and not self.out[-1][-1:].isspace():
            self.out.append(" ")

    def handle_decl(self, decl: str) -> None:
        raise _NoPage

    def handle_pi(self, data: str) -> None:
        raise _NoPage

    def unknown_decl(self, data: str) -> None:
        raise _NoPage

    def _owe(self, breaks: int) -> None:
        self.breaks = max(self.breaks, breaks)

    def _write(self, text: str) -> None:
        if self.out and self.breaks:
            self.out[-1] = self.out[-1].rstrip(" ") if not self.out[-1].endswith(("- ", ". ")) else self.out[-1]
            self.out.append("\n" * self.breaks)
        self.breaks = 0
        self.out.append(text)
