"""The contract's names, layers and teacher rows."""

from __future__ import annotations

import numpy as np
import pytest

from kvshot_ds.config import FeatureConfig
from kvshot_ds.errors import ConfigError
from kvshot_ds.features.spec import FeatureSpec, eagle3_hidden_layers, eagle3_kv_layers, teacher_rows


def test_eagle3_layers_of_published_depths() -> None:
    # L = 36 (Qwen3-8B): boundary indices 2, 18, 33 in the engines' files are outputs 1, 17, 32
    assert eagle3_hidden_layers(36) == (1, 17, 32)
    assert eagle3_kv_layers(36) == (2, 18, 33)
    assert all(kv == hidden + 1 for hidden, kv in zip(eagle3_hidden_layers(30), eagle3_kv_layers(30), strict=True))


def test_keys_stand_in_the_order_of_the_table() -> None:
    spec = FeatureSpec((1, 4), (2,), "last_hidden", "bf16")
    assert spec.keys() == ("hidden.1", "hidden.4", "key.2", "value.2", "teacher.hidden", "teacher.argmax", "teacher.lse")
    assert FeatureSpec((), (), "none", "bf16").keys() == ()


def test_resolve_sorts() -> None:
    spec = FeatureSpec.resolve(FeatureConfig(hidden_layers=(4, 1), kv_layers="none", teacher="none", dtype="fp32"), 6)
    assert spec == FeatureSpec((1, 4), (), "none", "fp32")
    assert FeatureSpec.resolve(FeatureConfig(), 6) == FeatureSpec((1, 2), (2, 3), "last_hidden", "bf16")


@pytest.mark.parametrize("option", ["hidden_layers", "kv_layers"])
def test_layers_out_of_range_name_the_option(option: str) -> None:
    with pytest.raises(ConfigError, match=rf"capture\.features\.{option}.*\[6\] do not exist in a target of 6 layers"):
        FeatureSpec.resolve(FeatureConfig(**{option: (0, 6)}), 6)


def test_missing_ignores_dtype_and_names_keys() -> None:
    has = FeatureSpec((1,), (2,), "none", "bf16")
    assert has.missing(FeatureSpec((1,), (2,), "none", "fp32")) == ()
    assert has.missing(FeatureSpec((1, 3), (), "last_hidden", "bf16")) == ("hidden.3", "teacher.hidden", "teacher.argmax", "teacher.lse")


def test_teacher_rows_against_the_definition() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        turn = rng.integers(0, 3, size=rng.integers(1, 30)).astype(np.int32)
        expected = [j for j in range(len(turn) - 1) if turn[j] != 0 and turn[j] == turn[j + 1]]
        assert teacher_rows(turn).tolist() == expected
