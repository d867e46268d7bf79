"""What a layout cannot hold is refused by name, with the formats that can; nothing is written."""

from __future__ import annotations

import re

import pytest

from kvshot_ds.config import DFlashConfig, HiddenOnlyConfig, HybridBlockConfig, HybridConfig, KVBlockConfig, KVOnlyConfig
from kvshot_ds.errors import ConfigError
from kvshot_ds.export.obstacles import obstacles, servable
from kvshot_ds.export.run import export_drafter
from tests.export.made import VD, V, read, trained
from tests.toys import geometry

G, NORMED = geometry(), geometry("qwen3")  # 6 layers
EAGLE3, DFLASH = HiddenOnlyConfig(hidden_layers=(1, 2, 3)), DFlashConfig(depth=2, mask_token_id=3)


def changed(g, **changes):
    return type(g)(**(g.to_json() | changes))


@pytest.mark.parametrize(
    ("form", "config", "layers", "g", "named"),
    [
        ("eagle3", KVOnlyConfig(), (), G, "family kv_only: no engine reads the target's KV cache"),
        ("eagle3", HybridConfig(), (1, 2, 3), G, "family hybrid: no engine reads the target's KV cache"),
        ("speculators", HybridConfig(), (1, 2, 3), G, "family hybrid: no engine"),
        ("speculators", DFLASH, (1, 3), NORMED, "family dflash: the layout holds EAGLE-3 drafters alone"),
        ("dflash", EAGLE3, (1, 2, 3), NORMED, "family hidden_only: the layout holds DFlash drafters alone"),
        ("dflash", KVBlockConfig(mask_token_id=3), (), NORMED, "family kv_block: no engine reads"),
        ("dflash", HybridBlockConfig(mask_token_id=3), (1, 2, 3), NORMED, "family hybrid_block: no engine reads"),
        ("eagle3", EAGLE3.model_copy(update={"depth": 2}), (1, 2, 3), G, "depth=2: the layout has one layer"),
        ("eagle3", EAGLE3.model_copy(update={"fc_norm": True}), (1, 2, 3), G, "fc_norm: the layout has no place"),
        ("eagle3", EAGLE3.model_copy(update={"norm_output": True}), (1, 2, 3), G, "norm_output: engines from before"),
        ("eagle3", EAGLE3.model_copy(update={"norm_before_residual": True}), (1, 2, 3), G, "norm_before_residual: SGLang ignores it"),
        ("eagle3", EAGLE3, (1, 2, 3), NORMED, "norms of queries and keys: the layout has no place"),
        ("eagle3", EAGLE3, (1, 2, 3), geometry("qwen2"), "biases of the attention: SGLang"),
        ("eagle3", EAGLE3, (1, 2, 3), changed(G, mlp_bias=True), "biases of the MLP: SGLang"),
        ("eagle3", EAGLE3, (1, 2, 3), changed(G, heads=5, kv_heads=1), "5 heads on a width of 24"),
        ("speculators", EAGLE3, (1, 2, 3), changed(NORMED, mlp_bias=True), "biases of the MLP beside norms"),
        ("dflash", DFLASH, (1, 3), changed(NORMED, mlp_bias=True), "biases of the MLP"),
        ("dflash", DFLASH, (1, 3), changed(NORMED, qkv_bias=True), "biases of some projections"),
        ("dflash", DFLASH, (1, 3), G, "no norms of queries and keys"),
        ("dflash", DFLASH.model_copy(update={"mask_token_id": None}), (1, 3), NORMED, "mask_token_id=null: the layout has no place"),
        *((form, EAGLE3, (1, 3), G, "fc for three hidden states, not for 2") for form in ("eagle3", "speculators")),
        *((form, EAGLE3, (1, 2, 2), G, "a layer stands there twice") for form in ("eagle3", "speculators")),
        *((form, EAGLE3, (1, 2, 5), G, "of the last layer, 5,") for form in ("eagle3", "speculators")),
        ("dflash", DFLASH, (1, 5), NORMED, "of the last layer, 5,"),
        *((form, EAGLE3, (1, 2, 3), changed(G, hidden_act="gelu"), "hidden_act=gelu") for form in ("eagle3", "speculators")),
        ("dflash", DFLASH, (1, 3), changed(NORMED, hidden_act="gelu"), "hidden_act=gelu"),
        ("speculators", EAGLE3, (1, 2, 3), changed(G, rope=G.rope | {"partial_rotary_factor": 0.5}), "partial_rotary_factor=0.5"),
    ],
)
def test_each_by_itself(form, config, layers, g, named):
    found = obstacles(form, config, layers, g, g.vocab_size)
    assert len(found) == 1 and named in found[0]
    assert obstacles("kvshot", config, layers, g, g.vocab_size) == []


def test_what_fits_is_not_refused():
    assert servable(EAGLE3, (1, 2, 3), G, 24) == ["eagle3", "speculators", "kvshot"]
    assert servable(EAGLE3.model_copy(update={"depth": 8, "fc_norm": True, "norm_output": True}), (1, 2, 3), NORMED, 24) == ["speculators", "kvshot"]
    assert servable(EAGLE3, (1, 2, 3), changed(geometry("qwen2"), mlp_bias=True), 24) == ["speculators", "kvshot"]
    assert servable(DFLASH, (1, 3), NORMED, NORMED.vocab_size) == ["dflash", "kvshot"]
    assert servable(DFLASH, (1, 3), NORMED, 24) == ["kvshot"]
    assert servable(HybridConfig(), (1, 2, 3), G, 24) == ["kvshot"]


def test_all_are_named_at_once_with_what_to_export_instead(tmp_path, targets):
    own = trained(tmp_path / "own", HiddenOnlyConfig(depth=2, fc_norm=True), targets["Qwen3"])
    with pytest.raises(ConfigError) as caught:
        export_drafter(own, tmp_path / "out", "eagle3", targets["Qwen3"])
    text = str(caught.value)
    assert re.search(r"own: not servable in the format eagle3: depth=2: .*; fc_norm: .*; norms of queries and keys: ", text)
    assert text.endswith("Export it with --format speculators or --format kvshot") and not (tmp_path / "out").exists()


def test_a_reduced_vocabulary_is_not_for_dflash(tmp_path, targets):
    own = trained(tmp_path / "own", DFlashConfig(depth=1, mask_token_id=3), targets["Qwen3"], VD)
    with pytest.raises(ConfigError, match=f"draft vocabulary of {VD}: engines propose from all {V} tokens .* --format kvshot$"):
        export_drafter(own, tmp_path / "out", "dflash", targets["Qwen3"])
    export_drafter(own, tmp_path / "out", "kvshot")
    assert read(tmp_path / "out")[0]["draft_vocab_size"] == VD
