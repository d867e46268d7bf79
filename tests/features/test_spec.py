"""The contract's names, layers and teacher rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from kvshot_ds.config import FeatureConfig, StoreConfig
from kvshot_ds.errors import ConfigError
from kvshot_ds.features.spec import (
    FeatureSpec,
    Store,
    TeacherKind,
    eagle3_hidden_layers,
    eagle3_kv_layers,
    resolve_hidden,
    resolve_kv,
    scale_group,
    teacher_rows,
)
from tests.features.shards import GEOMETRY


def test_eagle3_layers_of_published_depths() -> None:
    # L = 36 (Qwen3-8B): boundary indices 2, 18, 33 in the engines' files are outputs 1, 17, 32
    assert eagle3_hidden_layers(36) == (1, 17, 32)
    assert eagle3_kv_layers(36) == (2, 18, 33)
    assert all(kv == hidden + 1 for hidden, kv in zip(eagle3_hidden_layers(30), eagle3_kv_layers(30), strict=True))


def test_dflash_layers_of_published_depths() -> None:
    # arXiv 2602.06036: a draft of 5 layers on a target of 36 fuses outputs 1, 9, 17, 25, 33
    assert resolve_hidden("dflash", 36, "o", 5) == (1, 9, 17, 25, 33)
    assert resolve_hidden("dflash", 36, "o", 1) == (18,) and resolve_hidden("dflash", 2, "o", 1) == (1,)
    for num_layers in range(5, 90):
        for depth in range(2, min(8, num_layers - 3) + 1):
            layers = resolve_hidden("dflash", num_layers, "o", depth)
            even = np.linspace(1, num_layers - 3, depth)
            assert len(set(layers)) == depth and layers == tuple(sorted(layers)) and (layers[0], layers[-1]) == (1, num_layers - 3)
            assert np.abs(np.array(layers) - even).max() <= 0.5


@pytest.mark.parametrize("num_layers, depth", [(6, 4), (4, 2), (3, 2), (7, 5)])
def test_dflash_on_a_shallow_target_names_the_option(num_layers: int, depth: int) -> None:
    with pytest.raises(ConfigError, match=rf"train\.drafter\.hidden_layers=dflash.* target of {num_layers} has fewer than {depth} from 1 to {num_layers - 3}"):
        resolve_hidden("dflash", num_layers, "train.drafter.hidden_layers", depth)


def test_names_of_layers() -> None:
    assert resolve_hidden("last", 7, "o") == (6,) and resolve_hidden("all", 3, "o") == resolve_kv("all", 3, "o") == (0, 1, 2)
    assert resolve_hidden("none", 7, "o") == resolve_kv("none", 7, "o") == ()
    assert resolve_hidden("eagle3", 36, "o") == (1, 17, 32) and resolve_kv("eagle3", 36, "o") == (2, 18, 33)
    assert resolve_hidden((4, 0), 5, "o") == resolve_kv([4, 0], 5, "o") == (4, 0), "the order of a list is its meaning"
    assert resolve_hidden("eagle3", 6, "o") == (1, 2, 2) and resolve_kv("eagle3", 6, "o") == (2, 3, 3), "on a shallow target a layer is read twice"


@pytest.mark.parametrize("resolve", [resolve_hidden, resolve_kv])
def test_layers_that_do_not_exist_name_option_and_range(resolve: Callable[..., object]) -> None:
    for layers, num_layers, bad in (((0, 6, 7), 6, r"\[6, 7\]"), ((-1, 2), 6, r"\[-1\]"), ("eagle3", 2, r"\[")):
        with pytest.raises(
            ConfigError, match=rf"^some\.option=.*: layer\(s\) {bad}.* do not exist in a target of {num_layers} layers \(0 to {num_layers - 1}\)"
        ):
            resolve(layers, num_layers, "some.option")


TEACHERS = {
    "last_hidden": ("teacher.hidden",),
    "last_hidden_unnormed": ("teacher.unnormed",),
    "top_k": ("teacher.topk_ids", "teacher.topk_logp"),
}
BF16 = Store.all("bf16")


@pytest.mark.parametrize("teacher", TEACHERS)
def test_keys_stand_in_the_order_of_the_table(teacher: TeacherKind) -> None:
    spec = FeatureSpec((1, 4), (2,), teacher, BF16, (0, 2), 5)
    keys = ("hidden.1", "hidden.4", "key.2", "value.2", "query.0", "query.2", *TEACHERS[teacher], "teacher.argmax", "teacher.lse")
    assert spec.keys() == keys and tuple(spec.shapes(GEOMETRY, 3, 2)) == ("tokens", "turn", *keys)
    assert FeatureSpec((), (), "none", BF16).keys() == ()


def test_resolve_sorts() -> None:
    store = StoreConfig(hidden="fp8", kv="int8", query="fp32", teacher="fp32")
    config = FeatureConfig(hidden_layers=(4, 1), kv_layers="none", query_layers=(5, 0), teacher="none", store=store)
    assert FeatureSpec.resolve(config, GEOMETRY) == FeatureSpec((1, 4), (), "none", Store("fp8", "int8", "fp32", "fp32"), (0, 5))
    assert FeatureSpec.resolve(FeatureConfig(), GEOMETRY) == FeatureSpec((1, 2), (2, 3), "last_hidden", BF16)
    named = FeatureConfig(hidden_layers="last", kv_layers="all", query_layers="eagle3", teacher="top_k", teacher_k=7)
    assert FeatureSpec.resolve(named, GEOMETRY) == FeatureSpec((5,), tuple(range(6)), "top_k", BF16, (2, 3), 7)


@pytest.mark.parametrize("option", ["hidden_layers", "kv_layers", "query_layers"])
def test_layers_out_of_range_name_the_option(option: str) -> None:
    with pytest.raises(ConfigError, match=rf"capture\.features\.{option}.*\[6\] do not exist in a target of 6 layers"):
        FeatureSpec.resolve(FeatureConfig(**{option: (0, 6)}), GEOMETRY)


def test_a_teacher_that_the_target_cannot_give_is_refused() -> None:
    unnormed = FeatureConfig(teacher="last_hidden_unnormed")
    assert FeatureSpec.resolve(unnormed, GEOMETRY).teacher == "last_hidden_unnormed"
    with pytest.raises(ConfigError, match=r"capture\.features\.teacher=last_hidden_unnormed: .* stablelm .* LayerNorm .* use last_hidden or top_k"):
        FeatureSpec.resolve(unnormed, replace(GEOMETRY, family="stablelm"))
    with pytest.raises(ConfigError, match=r"capture\.features\.teacher_k=51: the target has 50 tokens"):
        FeatureSpec.resolve(FeatureConfig(teacher="top_k", teacher_k=51), GEOMETRY)
    assert FeatureSpec.resolve(FeatureConfig(teacher_k=51), GEOMETRY).teacher_k == 0


def test_missing_ignores_storage_and_names_keys() -> None:
    has = FeatureSpec((1,), (2,), "none", BF16)
    assert has.missing(FeatureSpec((1,), (2,), "none", Store.all("fp32"))) == ()
    assert has.missing(FeatureSpec((1, 3), (), "last_hidden", BF16, (2,))) == ("hidden.3", "query.2", "a teacher")


@pytest.mark.parametrize("teacher", TEACHERS)
def test_any_teacher_serves(teacher: TeacherKind) -> None:
    has, needed = FeatureSpec((1, 2), (2,), teacher, BF16, (1,), 3), FeatureSpec((2,), (), "last_hidden", BF16)
    assert has.missing(needed) == ()
    assert has.serving(needed) == ("hidden.2", *TEACHERS[teacher], "teacher.argmax", "teacher.lse")
    assert has.serving(replace(needed, teacher="none")) == ("hidden.2",)


@pytest.mark.parametrize("width, head_dim, group", [(4096, 128, 128), (576, 64, 64), (1000, 64, 8), (24, 8, 8), (7, 4, 1)])
def test_groups_of_a_hidden_state_divide_it(width: int, head_dim: int, group: int) -> None:
    g = replace(GEOMETRY, hidden_size=width, head_dim=head_dim)
    assert scale_group("hidden.3", g) == group and scale_group("key.3", g) == scale_group("query.0", g) == head_dim


def test_teacher_rows_against_the_definition() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        turn = rng.integers(0, 3, size=rng.integers(1, 30)).astype(np.int32)
        expected = [j for j in range(len(turn) - 1) if turn[j] != 0 and turn[j] == turn[j + 1]]
        assert teacher_rows(turn).tolist() == expected
