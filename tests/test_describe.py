"""Tables of what drafters cost: shapes of known targets, numbers that agree with the counted ones, what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvshot_ds.config import AnyDrafterConfig, DFlashConfig, HybridConfig, Recipe
from kvshot_ds.describe import BLOCK_DEPTHS, DEPTHS, SHAPES, aligned, captured_bytes, describe
from kvshot_ds.drafters.cost import cost, total
from kvshot_ds.drafters.cost import weightless as drafter_of
from kvshot_ds.errors import ConfigError
from kvshot_ds.geometry import Geometry
from kvshot_ds.target import load_geometry

# shape -> (parameters as published with the weights, whether the head is the embedding)
PUBLISHED = {"smollm2-135m": (134_515_008, True), "qwen3-8b": (8_190_735_360, False), "llama3.1-8b": (8_030_261_248, False)}


def recipe(target: Path, **train: object) -> Recipe:
    return Recipe.model_validate({"name": "r", "work": "w", "target": {"path": target}, "train": train, "decode": {"drafting": {"length": 5}}})


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A target's folder without weights."""
    from transformers import LlamaConfig

    config = LlamaConfig(
        hidden_size=64, num_hidden_layers=8, num_attention_heads=4, num_key_value_heads=2, intermediate_size=96, vocab_size=500, max_position_embeddings=256
    )
    config.save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_have_the_published_number_of_parameters(name: str) -> None:
    g = SHAPES[name]
    published, tied = PUBLISHED[name]
    layer = g.hidden_size * g.head_dim * 2 * (g.heads + g.kv_heads) + 3 * g.hidden_size * g.intermediate_size + 2 * g.hidden_size
    assert (layer + 2 * g.head_dim * g.qk_norm) * g.num_layers + g.hidden_size + (2 - tied) * g.vocab_size * g.hidden_size == published
    assert len(g.rotary()[0]) == g.head_dim // 2


def test_shapes_are_what_a_models_own_config_gives() -> None:
    from transformers import LlamaConfig, Qwen3Config

    size = dict(hidden_size=4096, num_attention_heads=32, num_key_value_heads=8, head_dim=128)
    qwen = Qwen3Config(
        **size, num_hidden_layers=36, intermediate_size=12288, vocab_size=151936, max_position_embeddings=40960, rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )  # fmt: skip
    llama = LlamaConfig(
        **size, num_hidden_layers=32, intermediate_size=14336, vocab_size=128256, max_position_embeddings=131072, rms_norm_eps=1e-5,
        rope_parameters={
            "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        },
    )  # fmt: skip
    assert Geometry.from_hf(qwen) == SHAPES["qwen3-8b"] and Geometry.from_hf(llama) == SHAPES["llama3.1-8b"]


def cells(line: str) -> list[str]:
    """An empty cell is shown as -."""
    return ["0" if cell == "-" else cell for cell in line.replace(",", "").split()]


def test_a_recipes_drafter_on_its_own_target(llama: Path) -> None:
    r = recipe(llama, drafter={"family": "hybrid"}, draft_vocab_size=300)
    lines = describe(r, None, False, 100)
    c = cost(HybridConfig(), load_geometry(llama), 300)
    assert f"target {llama}: 8 layers, width 64, 4/2 heads of 16, vocabulary 500" in lines
    assert "draft vocabulary 300; context 100 tokens; 7 training steps; 5 proposals a round" in lines and "hybrid, depth 1" in lines
    first = next(i for i, line in enumerate(lines) if line.startswith("fusion"))
    table = {cells(line)[0]: [float(cell) for cell in cells(line)[1:]] for line in lines[first : lines.index("", first)]}
    assert set(table) == {"fusion", "self", "cross", "projector", "gate", "mlp", "head", "norms", "attention", "teacher", "total"}
    wanted = [c.trainable, *total(c.training(7, 100)), *total(c.drafting(5, 100))]
    assert table["total"] == pytest.approx([n / 1e6 for n in wanted], abs=6e-3)
    assert table["gate"][0] == pytest.approx(c.parameters["gate"] / 1e6, abs=1e-3)
    for column in range(5):
        assert sum(values[column] for name, values in table.items() if name != "total") == pytest.approx(table["total"][column], abs=0.03)
    captured = "384 bytes of hidden states of layers [1, 3, 4], 384 bytes of keys and values of layers [2, 4, 5], 136 more of each answer token for the teacher"
    assert f"captured of each token, in bf16: {captured}" in lines


def test_all_families_at_their_depths() -> None:
    lines = describe(None, "qwen3-8b", True, 2048)
    rows = [line for line in lines if line.split("  ")[0] in {family.model_fields["family"].default for family in AnyDrafterConfig.__args__}]
    found = [tuple(cells(row)[:2]) for row in rows]
    step, block = ("hidden_only", "kv_only", "hybrid"), ("dflash", "kv_block", "hybrid_block")
    assert found == [(f, str(d)) for f in step for d in DEPTHS] + [(f, str(d)) for f in block for d in BLOCK_DEPTHS]
    dflash = cells(next(row for row in rows if row.startswith("dflash") and cells(row)[1] == "5"))
    c = cost(DFlashConfig(), SHAPES["qwen3-8b"], 32000)
    shown = [float(cell) for cell in dflash[-7:]]
    assert shown == pytest.approx([n / 1e6 for n in (c.trainable, *total(c.training(7, 2048)), *total(c.drafting(7, 2048)))] + [5 * 4096 * 2, 0], abs=0.06)
    assert not any("\x1b" in line for line in lines) and len({len(line) for line in rows}) == 1


def test_a_small_target_has_no_larger_draft_vocabulary_and_a_recipe_sets_it(llama: Path) -> None:
    assert "draft vocabulary 32,000;" in describe(None, "smollm2-135m", True, 10)[1]
    assert "draft vocabulary 77;" in describe(recipe(llama, draft_vocab_size=77), None, True, 10)[1]
    assert describe(recipe(llama), "smollm2-135m", False, 10)[0].startswith("target smollm2-135m: 30 layers")


def test_captured_bytes() -> None:
    g = SHAPES["smollm2-135m"]
    assert captured_bytes(drafter_of(HybridConfig(), g, 10).required_features(), g) == (3 * 576 * 2, 3 * 2 * 3 * 64 * 2)


def test_what_cannot_be_described(tmp_path: Path, llama: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone: no such folder; .* describe a known one by --target-shape \(one of smollm2-135m, qwen3-8b, llama3.1-8b\)"):
        describe(recipe(tmp_path / "gone"), None, False, 10)
    with pytest.raises(ConfigError, match="--target-shape gpt: not known; known: smollm2-135m, "):
        describe(None, "gpt", True, 10)
    with pytest.raises(ConfigError, match="no target to take shapes from"):
        describe(None, None, True, 10)
    with pytest.raises(ConfigError, match="nothing to describe: name a recipe, or give --all"):
        describe(None, "qwen3-8b", False, 10)
    with pytest.raises(ConfigError, match="draft_vocab_size=32000 is larger than the target's vocabulary of 500"):
        describe(recipe(llama), None, False, 10)


def test_aligned() -> None:
    assert aligned([["", "b"], ["ccc", "10"], ["d", ""]]) == ["      b", "ccc  10", "d"]
