"""A headless Chromium, driven through chromedriver by the W3C WebDriver protocol: no more than the tests of pages need."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

PATIENCE = 120  # [s]

# All text that is rendered, through the shadow roots of custom elements.
_TEXT = """
const out = [];
const walk = (node) => {
  if (node.nodeType === 3) { const t = node.textContent.trim(); if (t) out.push(t); return; }
  if (node.nodeType === 1 && getComputedStyle(node).display === 'none') return;
  if (node.shadowRoot) walk(node.shadowRoot);
  node.childNodes.forEach(walk);
};
walk(document.body);
return out;
"""


def require_browser() -> None:
    """Skips the test where Chromium or its driver is not installed."""
    if missing := [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]:
        pytest.skip(f"{' and '.join(missing)} not installed (Debian: apt-get install chromium chromium-driver): no browser to open the page in")


@contextmanager
def child(command: Sequence[str], address: str, log: Path) -> Iterator[str]:
    """Runs `command`, and gives what group 1 of the pattern `address` finds in its output."""
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
    try:
        yield until(lambda: re.search(address, log.read_text(errors="replace")), lambda: f"{command[0]} said: {log.read_text(errors='replace')}").group(1)
    finally:
        process.terminate()
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:  # chromedriver does not always heed it
            process.kill()
            process.wait()


def until(look: Callable[[], Any], why: Callable[[], str]) -> Any:
    """The first true answer of `look`, asked again and again; fails with `why` after PATIENCE."""
    deadline = time.monotonic() + PATIENCE
    while True:
        if found := look():
            return found
        assert time.monotonic() < deadline, why()
        time.sleep(0.2)


class Page:
    """One window."""

    def __init__(self, port: str, profile: Path):
        self._driver = f"http://127.0.0.1:{port}"
        arguments = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking", "--no-first-run"]
        options = {"args": [*arguments, "--window-size=1600,1400", f"--user-data-dir={profile}"]}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"}}
        made = self._ask("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self._session = f"/session/{made['sessionId']}"

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._driver + path, data, {"Content-Type": "application/json"}, method=method)
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            return json.load(answer)["value"]

    def open(self, url: str) -> None:
        self._ask("POST", f"{self._session}/url", {"url": url})

    def run(self, script: str) -> Any:
        return self._ask("POST", f"{self._session}/execute/sync", {"script": script, "args": []})

    def text(self) -> list[str]:
        """Every piece of text in the page."""
        return list(self.run(_TEXT))

    def tell(self, command: str, **parameters: Any) -> Any:
        """A command of the Chrome DevTools protocol."""
        return self._ask("POST", f"{self._session}/goog/cdp/execute", {"cmd": command, "params": parameters})

    def seen_as(self, width: int, dark: bool = False, printed: bool = False) -> None:
        """As wide as `width` [CSS px], in the reader's colours, on a screen or on paper."""
        self.tell("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600)
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.tell("Emulation.setEmulatedMedia", media="print" if printed else "screen", features=features)

    def complaints(self) -> list[str]:
        """What the console has said since the last call: warnings and errors."""
        return [entry["message"] for entry in self._ask("POST", f"{self._session}/se/log", {"type": "browser"}) if entry["level"] in ("WARNING", "SEVERE")]

    def requests(self) -> list[str]:
        """Addresses that were asked for since the last call."""
        events = [json.loads(entry["message"])["message"] for entry in self._ask("POST", f"{self._session}/se/log", {"type": "performance"})]
        return [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]

    def picture(self) -> bytes:
        """PNG of the window."""
        return base64.b64decode(self._ask("GET", f"{self._session}/screenshot"))

    def close(self) -> None:
        self._ask("DELETE", self._session)


@contextmanager
def browser(folder: Path) -> Iterator[Page]:
    """A window; profile and logs lie in `folder`."""
    with child(["chromedriver", "--port=0"], r"started successfully on port (\d+)", folder / "chromedriver.log") as port:
        page = Page(port, folder / "profile")
        try:
            yield page
        finally:
            page.close()
