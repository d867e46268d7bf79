"""speculators, the package that serving people load drafters with, reads our exports: no key missing or unknown, and the same logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvshot_ds.config import AnyDrafterConfig, DFlashConfig, HiddenOnlyConfig
from kvshot_ds.drafters.state import DraftState
from kvshot_ds.export.run import export_drafter
from kvshot_ds.objectives.alignment import decoding_start
from tests.decoding.models import prompt
from tests.export import engine_tools
from tests.export.made import VD, V, bound, states, trained

pytestmark = pytest.mark.timeout(900)  # the first run installs the environment, and Python compiles it
S, STEPS = 12, 4
WRONG = ("missing", "unexpected", "mismatched", "absent", "unknown", "nan")
SPECULATORS: dict[str, tuple[str, AnyDrafterConfig, int, dict[str, Any]]] = {
    "llama": ("Llama", HiddenOnlyConfig(), VD, {}),
    "qwen3, three layers, 3.1": ("Qwen3", HiddenOnlyConfig(depth=3, fc_norm=True, norm_output=True, hidden_layers=(4, 0, 2)), VD, {}),
    "all tokens, normed residual": ("Llama", HiddenOnlyConfig(depth=2, norm_before_residual=True), V, {}),
    "biases of q, k, v": ("Qwen2", HiddenOnlyConfig(depth=2), VD, {}),
    "linear rope": ("Llama", HiddenOnlyConfig(), VD, {"rope": {"rope_type": "linear", "factor": 2.0, "rope_theta": 50.0}}),
}
CONVERTED: dict[str, tuple[str, str, AnyDrafterConfig, int]] = {
    "eagle3": ("eagle3", "Llama", HiddenOnlyConfig(), VD),
    "dflash": ("dflash", "Qwen3", DFlashConfig(depth=2, block_size=5, mask_token_id=3, hidden_layers=(1, 2, 4)), V),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, targets: dict[str, Path]) -> dict[str, dict[str, Any]]:
    """What the loader found of every case, from one process: its imports take longest."""
    place, jobs = tmp_path_factory.mktemp("engines"), {}
    for name, (family, config, size, changes) in SPECULATORS.items():
        own = trained(place / name / "own", config, targets[family], size, **changes)
        export_drafter(own, place / name / "out", "speculators", targets[family])
        given = states(S, 1, torch.float32)
        hidden = torch.cat([given[i] for i in sorted(bound(own, targets[family]).hidden_layers)], -1)
        inputs, logits = place / name / "inputs.safetensors", place / name / "logits.safetensors"
        save_file({"tokens": torch.tensor(prompt(S, 2)), "hidden": hidden, "steps": torch.tensor(STEPS)}, inputs)
        jobs[name] = {"do": "load", "folder": str(place / name / "out"), "inputs": str(inputs), "logits": str(logits)}
    for form, (layout, family, config, size) in CONVERTED.items():
        own = trained(place / form / "own", config, targets[family], size)
        export_drafter(own, place / form / "out", layout, targets[family])
        jobs[form] = {"do": form, "folder": str(place / form / "out"), "target": str(targets[family]), "converted": str(place / form / "converted")}
    try:
        answers = engine_tools.run(list(jobs.values()), place)
    except engine_tools.CannotBuildError as error:
        pytest.skip(f"no environment with speculators {engine_tools.VERSION}: {error}")
    return {name: answer | {"folder": str(place / name)} for name, answer in zip(jobs, answers, strict=True)}


@pytest.mark.parametrize("name", SPECULATORS)
def test_no_key_is_missing_or_unknown(name, found):
    told = found[name]
    assert told.get("error") is None, told
    assert told["class"] == "Eagle3DraftModel"
    assert not any(told[key] for key in WRONG), told
    layers = SPECULATORS[name][1].hidden_layers
    assert told["layer_ids"] == [i + 1 for i in ((1, 2, 3) if layers == "eagle3" else sorted(layers))]


@pytest.mark.parametrize("name", SPECULATORS)
def test_it_computes_the_same_logits(name, found, targets):
    """Teacher-forced over the whole sequence, as it trains: row t at step k has seen tokens <= t + 1 + k."""
    place, family = Path(found[name]["folder"]), SPECULATORS[name][0]
    theirs = load_file(place / "logits.safetensors")["logits"]  # [K, S, V_d]
    drafter = bound(place / "own", targets[family], torch.float32)
    given, tokens = states(S, 1, torch.float32), torch.tensor(prompt(S, 2))
    for t in (0, 3, S - STEPS):
        state = DraftState.empty(drafter.depth)
        start = decoding_start(tokens[: t + 1], [0], [t + 1], S, {i: x[: t + 1] for i, x in given.items()}, {})
        h = [drafter.begin(state, start)]
        h += [drafter.forward_step(state, tokens[t + k, None], k) for k in range(1, STEPS)]
        torch.testing.assert_close(drafter.logits(torch.cat(h)), theirs[:, t], rtol=2e-4, atol=2e-4)
    assert theirs.std(0).mean() > 0.02, "steps so alike that a shift would go unseen"


@pytest.mark.parametrize("form", CONVERTED)
def test_its_converters_read_the_other_layouts(form, found):
    told = found[form]
    assert told.get("error") is None, told
    assert not any(told[key] for key in WRONG if key != "absent"), told
    # both layouts leave the target's embedding to the target, DFlash its head too
    assert told["absent"] == ["embed_tokens.weight", *(["lm_head.weight"] if form == "dflash" else [])]
    assert told["layer_ids"] == ([2, 3, 4] if form == "eagle3" else [2, 3, 5])
