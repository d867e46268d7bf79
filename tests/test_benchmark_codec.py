"""The benchmark of storage runs, and its numbers are those of the definition."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import transformers
from click.testing import CliRunner

from benchmarks import codec
from kvshot_ds.features.batch import collate
from kvshot_ds.features.manifest import save_token_counts
from kvshot_ds.features.shard import ShardSet
from kvshot_ds.features.spec import teacher_rows
from tests.features.shards import GEOMETRY, make_sample, make_shards


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Shards of random features, and a target of their shape."""
    shards, target = tmp_path_factory.mktemp("shards"), tmp_path_factory.mktemp("target")
    make_shards(shards)
    save_token_counts(shards, torch.arange(50))
    own = {k: v for k, v in asdict(GEOMETRY).items() if k in ("hidden_size", "head_dim", "intermediate_size", "vocab_size")}
    config = transformers.Qwen3Config(num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, **own)
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(target)
    return shards, target


def test_it_prints_its_tables(folders: tuple[Path, Path]) -> None:
    shards, target = folders
    done = CliRunner().invoke(codec.main, ["--shards", str(shards), "--target", str(target), "--ks", "5,20", "--draft-vocab", "30", "--steps", "2"])
    assert done.exit_code == 0, done.output
    rows = [line.split() for line in done.output.splitlines()]
    trips = {(row[0], row[1]): [float(x) for x in row[2:]] for row in rows if len(row) == 6 and row[1] in codec.STORAGES}
    assert len(trips) == 12 and trips["key", "bf16"][0] == 0, "these shards hold bf16"
    assert all(0.01 < trips[kind, "fp8"][0] < 0.05 and 0.001 < trips[kind, "int8"][0] < 0.02 for kind in ("hidden", "key", "value", "query"))
    assert trips["key", "fp8"][3] == 2 * 4 + 2 * 2 and trips["hidden", "bf16"][3] == 16
    teachers = [row for row in rows if row[:1] in (["top"], ["last"])]
    assert [" ".join(row[:3]) for row in teachers] == ["last hidden, bf16", "top 5, fp32", "top 5, bf16", "top 20, fp32", "top 20, bf16", "top 20, bf16"]


def test_the_mass_outside_is_what_the_best_tokens_lack(folders: tuple[Path, Path]) -> None:
    shards = ShardSet.open(folders[0], "train")
    batch = collate([shards.read(i) for i in range(3)]).to("cpu", torch.float32)
    head = torch.randn(50, 8, generator=torch.Generator().manual_seed(3))
    logits = batch.teacher_hidden @ head.T
    object.__setattr__(batch, "teacher_lse", logits.logsumexp(-1))
    cut, outside = codec.Cut(7, torch.float32).apply(batch, head)
    for row, left, ids, logp in zip(torch.softmax(logits.double(), -1), outside, cut.topk_ids, cut.topk_logp, strict=True):
        best = sorted(row.tolist(), reverse=True)[:7]
        assert float(left) == pytest.approx(1 - sum(best), abs=1e-6) and logp.exp().tolist() == pytest.approx(best, rel=1e-5)
        assert row[ids].tolist() == pytest.approx(best)
    assert len(outside) == sum(len(teacher_rows(make_sample(i)["turn"].numpy())) for i in range(3))
    assert codec.Cut(64, torch.bfloat16).bytes(4096) == 392 and codec.Cut(None, torch.bfloat16).bytes(4096) == 8200
