"""The capture benchmark runs, and its contenders do what they say."""

import re
from pathlib import Path

from click.testing import CliRunner

from benchmarks import capture


def test_it_prints_every_contender_against_every_forward(tiny_target: Path) -> None:
    options = ["--conversations", "6", "--per-shard", "3", "--longest", "40", "--rounds", "1", "--clock", "cpu"]
    done = CliRunner().invoke(capture.main, ["--target", str(tiny_target), *options])
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("tiny in"))
    first, second, _head, *rows = lines[start : start + 7]
    assert re.fullmatch(r"tiny in fp32 on \w+, 1 thread\(s\), 6 conversations, [\d,]+ tokens, teacher=last_hidden", first)
    assert re.search(r"teacher\.lse: [\d,]+ bytes a token; cpu clock, median of 1 rounds", second)
    cells = [re.split(r"  +", row.strip()) for row in rows]
    assert [row[0] for row in cells] == ["forward", "forward + logits", "forward + rows", "capture"]
    for number, row in enumerate(cells[:3]):
        assert row[3 + number] == "1.000", "against itself"
