"""The tokenising benchmark runs."""

import re
from pathlib import Path

from click.testing import CliRunner

from benchmarks import tokenise


def test_it_prints_its_line(tiny_target: Path) -> None:
    done = CliRunner().invoke(tokenise.main, [str(tiny_target), "--count", "30", "--words", "6", "--repeats", "1"])
    assert done.exit_code == 0, done.output
    assert re.fullmatch(r"[\d,]+ conversations/s, [\d,]+ tokens/s, \d+ us of processor time each\n", done.output)
    assert all(len(m["content"].split()) == 3 for messages, _ in tokenise.conversations(5, 6) for m in messages)
