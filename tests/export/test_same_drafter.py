"""An export computes what the drafter computes: read by second implementations that know the published names alone, and read back by our import."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from kvshot_ds.config import AnyDrafterConfig, DFlashConfig, HiddenOnlyConfig
from kvshot_ds.drafters.public import import_drafter
from kvshot_ds.drafters.state import DraftState
from kvshot_ds.errors import ConfigError
from kvshot_ds.export.obstacles import Format
from kvshot_ds.export.run import export_drafter
from kvshot_ds.target import load_parts
from tests.drafters.dflash_reference import DFlash
from tests.drafters.eagle3_reference import Eagle3
from tests.export.made import VD, D, Tensors, V, bound, proposals, read, rounds, trained

# name -> (format, target, drafter, draft vocabulary, changes of the geometry)
CASES: dict[str, tuple[Format, str, AnyDrafterConfig, int, dict[str, Any]]] = {
    "research": ("eagle3", "Llama", HiddenOnlyConfig(), VD, {}),
    "research, all tokens": ("eagle3", "Llama", HiddenOnlyConfig(hidden_layers=(0, 3, 5)), V, {}),
    "research, other order of layers": ("eagle3", "Llama", HiddenOnlyConfig(hidden_layers=(5, 1, 3)), VD, {}),
    "research, linear rope": ("eagle3", "Llama", HiddenOnlyConfig(), VD, {"rope": {"rope_type": "linear", "factor": 2.0, "rope_theta": 50.0}}),
    "speculators": ("speculators", "Llama", HiddenOnlyConfig(), VD, {}),
    "speculators, three layers, qwen3, 3.1": ("speculators", "Qwen3", HiddenOnlyConfig(depth=3, fc_norm=True, norm_output=True), VD, {}),
    "speculators, other order with norms": ("speculators", "Qwen3", HiddenOnlyConfig(hidden_layers=(4, 0, 2), fc_norm=True), V, {}),
    "speculators, normed residual": ("speculators", "Llama", HiddenOnlyConfig(depth=2, norm_before_residual=True), VD, {}),
    "speculators, biases of q, k, v": ("speculators", "Qwen2", HiddenOnlyConfig(depth=2), VD, {}),
    "speculators, biases everywhere": ("speculators", "Llama", HiddenOnlyConfig(), VD, {"qkv_bias": True, "o_bias": True, "mlp_bias": True}),
    "dflash": ("dflash", "Qwen3", DFlashConfig(depth=2, block_size=5, mask_token_id=3), V, {}),
    "dflash, other order of layers": ("dflash", "Qwen3", DFlashConfig(depth=1, block_size=4, mask_token_id=7, hidden_layers=(5, 2, 4)), V, {}),
}
_IDS = "eagle_aux_hidden_state_layer_ids"


def double(weights: Tensors) -> Tensors:
    return {name: x.double() if x.is_floating_point() else x for name, x in weights.items()}


def made(name: str, tmp_path: Path, targets: dict[str, Path]) -> tuple[Path, Path, Path]:
    """(drafter folder, export, target)"""
    form, family, config, size, changes = CASES[name]
    own = trained(tmp_path / "own", config, targets[family], size, **changes)
    export_drafter(own, tmp_path / "out", form, targets[family])
    return own, tmp_path / "out", targets[family]


@pytest.mark.parametrize("name", [name for name in CASES if "dflash" not in name])
def test_a_second_implementation_reads_the_same_eagle3(name, tmp_path, targets):
    own, out, target = made(name, tmp_path, targets)
    config, weights = read(out)
    config = {**config.get("transformer_layer_config", {}), **config}
    drafter, theirs = bound(own, target), Eagle3(config, double(weights), load_parts(target, dtype=torch.float64).embedding)
    state = DraftState.empty(drafter.depth)
    for start, tokens, hidden, length in rounds():
        # hidden_states[i] is the output of layer i - 1
        want, logits = theirs.draft(tokens, torch.cat([hidden[i - 1] for i in config[_IDS]], -1), length)
        h = [drafter.begin(state, start)]
        h += [drafter.forward_step(state, torch.tensor([want[k - 1]]), k) for k in range(1, length)]
        torch.testing.assert_close(drafter.logits(torch.cat(h)), torch.stack(logits), rtol=1e-5, atol=1e-5)  # our rotary tables are fp32
        assert torch.stack(logits).std(0).mean() > 0.02, "steps so alike that a shift would go unseen"


@pytest.mark.parametrize("name", [name for name in CASES if "dflash" in name])
def test_a_second_implementation_reads_the_same_dflash(name, tmp_path, targets):
    own, out, target = made(name, tmp_path, targets)
    config, weights = read(out)
    parts = load_parts(target, dtype=torch.float64)
    drafter, theirs = bound(own, target), DFlash(config, double(weights), parts.embedding, parts.head)
    state, layers = DraftState.empty(drafter.depth), config["dflash_config"]["target_layer_ids"]
    seen = torch.empty(0, len(layers) * D, dtype=torch.float64)
    for start, tokens, hidden, _ in rounds():
        seen = torch.cat((seen, torch.cat([hidden[i] for i in layers], -1)))
        got = drafter.logits(drafter.slots(state, start)[1:, 0])
        torch.testing.assert_close(got, theirs.logits(int(tokens[-1]), seen), rtol=1e-5, atol=1e-5)
        assert got.std(0).mean() > 0.02


@pytest.mark.parametrize("name", CASES)
def test_our_import_reads_it_back(name, tmp_path, targets):
    own, out, target = made(name, tmp_path, targets)
    import_drafter(out, target, tmp_path / "back")
    (_, before), (_, after) = read(own), read(tmp_path / "back")
    layers = bound(own, target).hidden_layers
    order = sorted(range(len(layers)), key=lambda i: layers[i])
    before["fc.weight"] = torch.cat([before["fc.weight"].chunk(len(layers), -1)[i] for i in order], -1)
    before |= {f"fc_norm.{new}.weight": before[f"fc_norm.{old}.weight"].clone() for new, old in enumerate(order) if "fc_norm.0.weight" in before}
    added = {key for key in after.keys() - before.keys() if key.endswith("o_proj.bias")}
    assert after.keys() - added == before.keys() and not any(after[key].any() for key in added)
    assert all(torch.equal(after[key], before[key]) and after[key].dtype == before[key].dtype for key in before)
    assert proposals(bound(tmp_path / "back", target)) == proposals(bound(own, target))


def test_the_file_names_its_target_so_that_our_import_refuses_another(tmp_path, targets):
    """Of the same shapes: nothing else tells them apart."""
    _, out, target = made("research", tmp_path, targets)
    other = shutil.copytree(target, tmp_path / "other")
    _, tensors = read(other)
    save_file({name: x + 1 for name, x in tensors.items()}, other / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"made for a target of weights [0-9a-f]{12}, but .*other holds weights"):
        import_drafter(out, other, tmp_path / "back")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_weights_keep_their_bits(dtype, tmp_path, targets):
    own = trained(tmp_path / "own", HiddenOnlyConfig(), targets["Llama"], dtype=dtype)
    export_drafter(own, tmp_path / "out", "eagle3", targets["Llama"])
    (_, before), (config, after) = read(own), read(tmp_path / "out")
    assert config["torch_dtype"] == str(dtype).removeprefix("torch.")
    assert all(torch.equal(after[name.replace("layers.0.", "midlayer.")], x) and x.dtype in (dtype, torch.int64, torch.bool) for name, x in before.items())
