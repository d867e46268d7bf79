"""The benchmark of preparation runs and accounts for every conversation."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner

from benchmarks import prepare


def test_it_prints_every_part(tiny_target: Path) -> None:
    done = CliRunner().invoke(prepare.main, ["--target", str(tiny_target), "--conversations", "300", "--processes", "1", "--clock", "cpu"])
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert lines[0].startswith("300 conversations, 2 messages, 60 words")
    assert [line.split()[0] for line in lines[2:]] == ["reading", "cleaning", "near", "tokens", "all"]
    assert all(float(line.split()[-1].replace(",", "")) > 0 for line in lines[2:])


def test_cpu_time_is_that_of_one_process(tiny_target: Path) -> None:
    done = CliRunner().invoke(prepare.main, ["--target", str(tiny_target), "--clock", "cpu"])
    assert done.exit_code == 2 and "add --processes 1" in done.output


def test_conversations_are_the_same_every_time(tmp_path: Path) -> None:
    for name in ("a", "b"):
        prepare.make(tmp_path / name, 20, 30, 4)
    lines = (tmp_path / "a").read_text().splitlines()
    assert (tmp_path / "b").read_text().splitlines() == lines and len(set(lines)) == 20
    assert [turn["from"] for turn in json.loads(lines[0])["conversations"]] == ["human", "gpt"] * 2
