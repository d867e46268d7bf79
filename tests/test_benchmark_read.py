"""The benchmark of reading runs on small features and on a folder that is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks import read
from kvshot_ds.features.shard import ShardSet
from kvshot_ds.features.spec import Store
from tests.features.shards import assert_whole


@pytest.mark.parametrize("store", [Store.all("bf16"), Store("fp8", "int8", "fp8", "bf16")], ids=["bf16", "8 bits"])
def test_it_reads_what_it_writes_and_prints_both_rates(tmp_path: Path, store: Store) -> None:
    read.write_features(tmp_path, store, 1, 12)
    assert_whole(ShardSet.open(tmp_path, "train"))
    done = CliRunner().invoke(read.main, ["--shards", str(tmp_path), "--repeats", "1", "--workers", "1"])
    assert done.exit_code == 0, done.output
    assert [line.split()[1] for line in done.output.splitlines()[1:]] == ["disk", "memory"]
    assert all(re.search(r"raw [\d,]+ MB/s \(1\.00; CPU .* threads [\d,]+ MB/s .* loader [\d,]+ MB/s", line) for line in done.output.splitlines()[1:])
