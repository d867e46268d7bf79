"""The plan of a run: FLOPs against torch's counter, steps and rows of the data that is there, parts that add up, what the command prints."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch.utils.flop_counter import FlopCounterMode

from kvshot_ds.cli import cli
from kvshot_ds.config import ObjectiveConfig, Recipe, TrainConfig
from kvshot_ds.describe import SHAPES
from kvshot_ds.drafters import layer as layer_module
from kvshot_ds.drafters.cost import cost, total
from kvshot_ds.errors import ConfigError
from kvshot_ds.features.plan import Guess
from kvshot_ds.features.shard import ShardSet
from kvshot_ds.objectives.alignment import plan_rows
from kvshot_ds.objectives.objective import Objective
from kvshot_ds.target import load_geometry
from kvshot_ds.training.account import _largest, _owned
from kvshot_ds.training.plan import Hardware, Plan, lines, plan, step_flops
from tests import toys

G = toys.geometry()
RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.mark.parametrize("name", ["hidden_only-1", "hybrid-2", "kv_only-2", "dflash-2"])
def test_flops_are_those_of_a_real_objective(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrix products by torch's counter, attention by the pairs of query and key that it is asked for: forward, and twice that backward."""
    drafter, lengths, answers, steps = toys.drafter(name, G, torch.float32), (180, 90), (150, 80), 3
    batch = toys.batch(G, [[0] * (n - a) + [1] * a for n, a in zip(lengths, answers, strict=True)])
    rows, pairs, attend = plan_rows(batch, steps), [], layer_module.merged_attention

    def watched(q: torch.Tensor, prefix: Any, own: Any, spans: Any, scale: float, hidden: Any) -> torch.Tensor:
        n, b, heads, width = q.shape
        seen = sum(span.anchor + i - span.start + 1 for span in spans for i in range(span.count)) if prefix is not None else 0
        pairs.append(b * (seen + n * len(own)) * heads * width)
        return attend(q, prefix, own, spans, scale, hidden)

    monkeypatch.setattr(layer_module, "merged_attention", watched)
    with FlopCounterMode(display=False) as counter:
        Objective(drafter, ObjectiveConfig(steps=steps), torch.randn(toys.VOCAB, G.hidden_size))(batch, rows, torch.ones(())).loss.backward()
    products = sum(n for op, n in counter.get_flop_counts()["Global"].items() if op in (torch.ops.aten.mm, torch.ops.aten.addmm))
    of_rows = torch.bincount(rows.conversation).tolist()
    assert step_flops(cost(toys.FAMILIES[name], G, toys.DRAFT_VOCAB), steps, lengths, of_rows) == pytest.approx(products + 3 * 4 * sum(pairs), rel=0.06)


def test_flops_of_one_row_and_many() -> None:
    c = cost(toys.FAMILIES["hybrid-2"], G, toys.DRAFT_VOCAB)
    work = total(c.training(5, 10))
    assert step_flops(c, 5, [20], [7]) == pytest.approx(7 * work.unit + 20 * work.position, rel=1e-12)
    assert step_flops(c, 5, [20, 9], [7, 3]) == pytest.approx(step_flops(c, 5, [20], [7]) + step_flops(c, 5, [9], [3]), rel=1e-12)
    assert step_flops(c, 5, [], []) == 0


def planned(family: str = "hidden_only", ds_config: str = "zero2_bf16", ranks: int = 8, **train: object) -> Plan:
    options = {"drafter": {"family": family}, "ds_config": ds_config, "conversations_per_step": 16, "objective": {"steps": 2}, **train}
    recipe = Recipe.model_validate({"name": "x", "work": "work", "target": {"path": "none"}, "train": options})
    return plan(recipe, "qwen3-8b", SHAPES["qwen3-8b"], Guess(1000, 100, 0.6), Hardware(ranks, 989, 0.3, on_cpu=False))


def test_a_part_of_the_conversations_is_a_part_of_the_guess_too() -> None:
    assert len(planned(max_conversations=30).sizes) == 30 and planned(max_conversations=30).schedule.steps == 2


def test_zero_shares_what_it_says() -> None:
    """Bytes of an element: 2 of weights, 4 of masters, 8 of moments; shared from stage 1 on, weights from stage 3 on; on the host with offload."""
    p = planned().cost.trainable
    for stage, weights, masters in ((0, 2 * p, 4 * p), (1, 2 * p, p / 2), (2, 2 * p, p / 2), (3, p / 4, p / 2)):
        held = planned(ds_config=f"zero{stage}_bf16").account.forward
        assert held["weights"][0] == pytest.approx(weights, rel=1e-6)
        assert held["fp32 masters"][0] == pytest.approx(masters, rel=1e-6)
        assert held["two moments of Adam"][0] == pytest.approx(2 * masters, rel=1e-6)
    for stage in (2, 3):
        held = planned(ds_config=f"zero{stage}_offload_bf16").account.forward
        assert held["fp32 masters"] == (0, pytest.approx(p / 2, rel=1e-6))
        assert held["weights"] == ((2 * p, 0) if stage == 2 else (0, pytest.approx(p / 4, rel=1e-6)))
    assert planned(optim={"ema_decay": 0.999}).account.forward["moving average"] == (pytest.approx(p / 2, rel=1e-6), 0)


def test_frozen_parts_and_sharding_them() -> None:
    g, whole = SHAPES["qwen3-8b"], planned(ds_config="zero3_bf16")
    frozen = 2 * g.hidden_size * (g.vocab_size + 32000)
    part = "frozen embedding and head"
    assert whole.account.forward[part][0] == pytest.approx(frozen, rel=1e-2)
    shared = planned(ds_config="zero3_bf16", shard_frozen=True)
    assert sum(shared.account.gathered_frozen) * 2 == frozen
    assert shared.sent - whole.sent == pytest.approx(frozen * 7 / 8 * shared.schedule.accumulation, rel=1e-6)


def test_hours_and_steps() -> None:
    p = planned(epochs=3)
    assert p.schedule.steps == 3 * 63 and p.schedule.accumulation == 2
    assert p.hours == pytest.approx(p.flops / (8 * 989e12 * 0.3) / 3600)
    assert p.flops == pytest.approx(3 * step_flops(p.cost, 2, [100] * 1000, [60] * 1000))
    assert planned(epochs=3, max_steps=63).flops == pytest.approx(p.flops / 3)
    assert planned(objective={"steps": 2, "anchors": 6}).flops < 0.5 * planned().flops


def test_it_reads_what_is_captured(recipe: Callable[..., Recipe]) -> None:
    made = recipe("run", "hybrid")
    shards = ShardSet.open(made.shards_dir, "train")
    g = load_geometry(made.target.path)
    p = plan(made, "tiny", g, None, Hardware(1, 0, 0.3, on_cpu=True))
    assert p.sizes == tuple((s.tokens, s.rows) for s in shards.samples)
    assert p.account.tokens == max(s.tokens for s in shards.samples)
    assert p.hours is None
    text = "\n".join(lines(p))
    assert f"{len(shards)} conversations" in text and "CPU" in text and "accelerator" not in text
    fewer = plan(recipe("few", "hybrid", max_conversations=5), "tiny", g, None, Hardware(1, 0, 0.3, on_cpu=True))
    assert len(fewer.sizes) == 5


def test_nothing_to_plan_for(recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    made = recipe().model_copy(update={"shards": tmp_path / "nowhere"})
    with pytest.raises(ConfigError, match=r"train\.jsonl.*run kvshot prep, or give --conversations"):
        plan(made, "tiny", load_geometry(made.target.path), None, Hardware(1, 0, 0.3, on_cpu=True))


def test_the_command(tmp_path: Path) -> None:
    arguments = ["plan", "train", str(RECIPES / "qwen3_8b" / "hybrid.yaml"), "--target-shape", "qwen3-8b", "--conversations", "280000", "--ranks", "64"]
    done = CliRunner().invoke(cli, [*arguments, "--peak-tflops", "989", "train.conversations_per_step=128"])
    assert done.exit_code == 0, done.output
    assert "zero2_bf16, 64 rank(s)" in done.output and "280,000 conversations" in done.output
    assert re.search(r"6,564 optimizer steps of 128 conversations, at most 2 forward\(s\)", done.output)
    assert re.search(r"FLOPs in all, [\d.,]+ hours at 30% of 989 TFLOP/s", done.output)
    assert re.search(r"^total +[\d,]+ +[\d,]+$", done.output, re.MULTILINE)
    assert "DeepSpeed's own estimate" in done.output


def test_the_largest_forward_and_what_a_rank_owns() -> None:
    sizes = [(20, 5), (60, 5), (30, 5), (50, 5)]
    assert _largest(TrainConfig(tokens_per_micro_batch=100), sizes) == [(60, 5), (30, 5)]
    assert _largest(TrainConfig(tokens_per_micro_batch=10), sizes) == [(60, 5)]  # one that is longer goes alone
    assert _largest(TrainConfig(conversations_per_micro_batch=2), sizes) == [(60, 5), (50, 5)]
    assert [_owned([10, 10, 10], 2, rank) for rank in range(2)] == [20, 20]  # the one in the middle is kept whole by both
    assert _owned([10, 10, 10], 1, 0) == 30
