"""Planned bytes against those of shards that are really written."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from kvshot_ds.cli import cli
from kvshot_ds.config import Recipe, load_recipe
from kvshot_ds.describe import SHAPES
from kvshot_ds.errors import ConfigError
from kvshot_ds.features.codec import encode, stored_tensors
from kvshot_ds.features.manifest import ShardIndex
from kvshot_ds.features.plan import guessed, prepared, sample_bytes, sample_kinds
from kvshot_ds.features.shard import ShardReader, ShardWriter
from kvshot_ds.features.spec import FeatureSpec, Store, scale_group, teacher_rows
from kvshot_ds.geometry import Geometry
from tests.features.shards import GEOMETRY

QWEN = SHAPES["qwen3-8b"]
KIB = 1024


def random_sample(spec: FeatureSpec, g: Geometry, tokens: int, rows: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Features of one conversation as a capture stores them; the last rows + 1 tokens are its answer."""
    r = torch.Generator().manual_seed(seed)
    turn = torch.zeros(tokens, dtype=torch.int32)
    turn[tokens - rows - 1 :] = 1 if rows else 0
    stored = {"tokens": torch.randint(g.vocab_size, (tokens,), generator=r, dtype=torch.int32), "turn": turn}
    for key, shape in spec.shapes(g, tokens, rows).items():
        if key in stored:
            continue
        how = spec.store.of(key)
        if how is None:
            stored[key] = torch.zeros(shape, dtype=spec.dtype(key))
            continue
        data, scale = encode(torch.randn(shape, generator=r), how, scale_group(key, g))
        stored |= {key: data} | ({} if scale is None else {f"{key}.scale": scale})
    return stored


def written(folder: Path, spec: FeatureSpec, g: Geometry, sizes: list[tuple[int, int]], meta: dict[str, object]) -> ShardIndex:
    with ShardWriter(folder, "train-000000.tar") as writer:
        for i, (tokens, rows) in enumerate(sizes):
            writer.write(f"{i:032x}", random_sample(spec, g, tokens, rows, i), meta)
        return writer.commit([f"{i:032x}" for i in range(len(sizes))])


SPECS = {
    "everything in bf16": FeatureSpec((1, 3), (0, 2), "last_hidden", Store.all("bf16"), (2, 4)),
    "8 bits": FeatureSpec((1,), (2, 10), "last_hidden_unnormed", Store("fp8", "int8", "fp8", "fp32")),
    "best tokens": FeatureSpec((), (2,), "top_k", Store("bf16", "fp8", "bf16", "bf16"), (), 9),
    "nothing": FeatureSpec((), (), "none", Store.all("fp32")),
}


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("meta", [{"id": "a"}, {"id": "a", "more": "ü" * 400}], ids=["short", "long"])
def test_a_sample_takes_what_is_planned(tmp_path: Path, spec: FeatureSpec, meta: dict[str, object]) -> None:
    sizes = [(5, 3), (1, 0), (700, 0), (131, 129), (12, 11)]
    index = written(tmp_path, spec, GEOMETRY, sizes, meta)
    text = len(json.dumps(meta, ensure_ascii=False).encode())
    planned = [sample_bytes(spec, GEOMETRY, *size, text) for size in sizes]
    starts = sorted(sample.offset for sample in index.samples)
    assert [b - a for a, b in pairwise(starts)] == planned[:-1]
    members = -(-(sum(planned) + 1024) // 10240) * 10240
    assert index.bytes == (tmp_path / "train-000000.tar").stat().st_size == members
    for tokens, rows in sizes:
        kinds = sample_kinds(spec, GEOMETRY, tokens, rows)
        of = {"hidden": "hidden", "key": "kv", "value": "kv", "query": "query", "teacher": "teacher"}
        want = dict.fromkeys(kinds, 0)
        for name, (dtype, shape) in stored_tensors(spec, GEOMETRY, tokens, rows).items():
            want[of.get(name.split(".")[0], "rest")] += dtype.itemsize * torch.Size(shape).numel()
        assert {k: v for k, v in kinds.items() if k != "rest"} == {k: v for k, v in want.items() if k != "rest"} and kinds["rest"] > want["rest"]


EIGHT = Store("fp8", "fp8", "bf16", "bf16")
BUDGETS = {
    "hybrid": (FeatureSpec((1, 17, 32), (2, 18, 33), "top_k", EIGHT, (), 64), 19.0),
    "KV only": (FeatureSpec((), (2, 18, 33), "top_k", EIGHT, (), 64), 6.6),
}


@pytest.mark.parametrize("supervised", [0.6, 1.0])
@pytest.mark.parametrize("spec, most", BUDGETS.values(), ids=BUDGETS)
def test_bytes_of_a_token_of_qwen3_8b(tmp_path: Path, spec: FeatureSpec, most: float, supervised: float) -> None:
    """Random features of the real shape, encoded and written: 3 hidden and 3 KV layers in fp8, the 64 best tokens at supervised rows."""
    sizes = [(n, min(n - 1, round(n * supervised))) for n in (500, 900)]
    index = written(tmp_path, spec, QWEN, sizes, {"id": "x" * 32, "source": "s", "file": "train.jsonl", "line": 1})
    tokens = sum(n for n, _ in sizes)
    assert index.bytes / tokens / KIB <= most
    planned = sum(sample_bytes(spec, QWEN, *size) for size in sizes)
    assert planned <= index.bytes < planned + 1024 + 10240
    back = ShardReader(tmp_path, index, spec, QWEN).read(1)
    assert back["key.18"].dtype == torch.bfloat16 and back["key.18"].shape == (900, 8, 128)
    assert tuple(back["teacher.topk_logp"].shape) == (len(teacher_rows(back["turn"].numpy())), 64)
    # What others keep of a token: three hidden states and the last one in bf16, 32 KiB.
    plain = guessed(FeatureSpec((1, 17, 32), (), "last_hidden", Store.all("bf16")), QWEN, 2, 700, 1.0, 64)
    assert 32.0 <= plain.per_token / KIB < 32.2


def lines_of(count: int, g: Geometry) -> list[str]:
    r = torch.Generator().manual_seed(4)
    out = []
    for i in range(count):
        prompt, answer = (int(x) for x in torch.randint(3, 40, (2,), generator=r))
        tokens = torch.randint(3, g.vocab_size, (prompt + answer,), generator=r).tolist()
        out.append(json.dumps({"id": f"{i:032x}", "messages": [], "tokens": tokens, "turn": [0] * prompt + [1] * answer, "source": "ünï.json"}))
    return out


@pytest.mark.parametrize("teacher", ["last_hidden", "top_k"])
def test_a_real_capture_takes_what_is_planned(tmp_path: Path, tiny_target: Path, teacher: str) -> None:
    from data_prep.capture import CaptureJob, CaptureWorker
    from data_prep.orchestrate import make_plan
    from kvshot_ds.target import load_geometry

    features = {"teacher": teacher, "teacher_k": 20, "query_layers": "eagle3", "store": {"hidden": "fp8", "kv": "int8", "query": "fp8", "teacher": "fp32"}}
    recipe = Recipe.model_validate(
        {
            "name": "r",
            "work": tmp_path,
            "target": {"path": tiny_target, "dtype": "fp32", "device": "cpu"},
            "capture": {"conversations_per_shard": 7, "features": features},
        }
    )
    plan_folder = recipe.prepared_dir
    plan_folder.mkdir(parents=True)
    g = load_geometry(tiny_target)
    broken = ["{}", "not json", json.dumps({"tokens": [5, 6], "turn": [0]})]
    (plan_folder / "train.jsonl").write_text("\n".join([*lines_of(15, g), *broken]) + "\n")
    (plan_folder / "heldout.jsonl").write_text("\n".join(lines_of(4, g)) + "\n")
    (plan_folder / "summary.json").write_text("{}")
    plan = make_plan(recipe)
    worker = CaptureWorker(CaptureJob(recipe.target, plan.spec, 200, tmp_path / "features", 1))
    for unit in plan.units:
        worker.work(unit)
    planned = prepared(plan_folder, plan.spec, g, 7)
    for split, count, left_out in (("train", 15, 3), ("heldout", 4, 0)):
        tars = sorted((tmp_path / "features").glob(f"{split}-*.tar"))
        size = planned[split]
        assert size.bytes == sum(tar.stat().st_size for tar in tars) == sum(size.kinds.values())
        indexes = [ShardIndex.load(tmp_path / "features", tar.name) for tar in tars]
        assert (size.samples, size.left_out) == (sum(len(i.samples) for i in indexes), left_out) == (count, left_out)
        assert size.tokens == sum(s.tokens for i in indexes for s in i.samples) and size.rows == sum(s.rows for i in indexes for s in i.samples)


RECIPE = "recipes/qwen3_8b/base.yaml"
OVERRIDES = ("capture.features.hidden_layers=eagle3", "capture.features.store.hidden=fp8", "capture.features.store.kv=fp8", "capture.features.teacher=top_k")


def test_the_command_prints_what_the_functions_say() -> None:
    asked = ["plan", "capture", RECIPE, "--target-shape", "qwen3-8b", "--conversations", "1000", "--tokens-per-conversation", "800", "--supervised", "0.5"]
    done = CliRunner().invoke(cli, [*asked, *OVERRIDES])
    assert done.exit_code == 0, done.output
    options = load_recipe(Path(RECIPE), OVERRIDES).capture
    size = guessed(FeatureSpec.resolve(options.features, QWEN), QWEN, 1000, 800, 0.5, options.conversations_per_shard)
    assert f"{size.bytes:,} bytes in all" in done.output and f" {size.per_token:,.0f} {size.per_token / KIB:.2f} " in " ".join(done.output.split())
    assert "hidden layers [1, 17, 32] as fp8" in done.output and "teacher top 64 as bf16" in done.output
    assert size.bytes == sum(size.kinds.values()) and size.kinds["hidden"] == 1000 * 800 * 3 * (4096 + 2 * 32)


def test_without_prepared_conversations_it_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train\.jsonl: not readable .* run kvshot prep, or give --conversations"):
        prepared(tmp_path, SPECS["nothing"], GEOMETRY, 4)


def test_conversations_beyond_the_context_are_left_out(tmp_path: Path) -> None:
    for split in ("train", "heldout"):
        (tmp_path / f"{split}.jsonl").write_text("\n".join(json.dumps({"tokens": [1] * n, "turn": [0] * n}) for n in (10, 20, 30)) + "\n")
    size = prepared(tmp_path, SPECS["nothing"], replace(GEOMETRY, max_positions=20), 4)["train"]
    assert (size.samples, size.tokens, size.left_out) == (2, 30, 1)


def test_a_guess_of_any_number_takes_no_time() -> None:
    spec = SPECS["8 bits"]
    few, many = guessed(spec, QWEN, 130, 700, 0.5, 64), guessed(spec, QWEN, 64 * 10**12 + 2, 700, 0.5, 64)
    whole = guessed(spec, QWEN, 64, 700, 0.5, 64)
    assert few.bytes == 2 * whole.bytes + guessed(spec, QWEN, 2, 700, 0.5, 64).bytes and sum(few.kinds.values()) == few.bytes
    assert many.bytes == few.bytes + (10**12 - 2) * whole.bytes and many.tokens == 700 * many.samples and many.samples == 64 * 10**12 + 2
