"""An imported drafter is a drafter: measured as a baseline, and the start of another one."""

from __future__ import annotations

import pytest
import torch

from kvshot_ds import evaluation
from kvshot_ds.config import HiddenOnlyConfig, HybridConfig, Recipe
from kvshot_ds.drafters.build import build_drafter, load_drafter, read_tensors
from kvshot_ds.drafters.public import import_drafter
from kvshot_ds.drafters.warm import warm_start
from kvshot_ds.target import load_geometry, weights_digest
from tests.drafters.checkpoints import ANGELSLIM, EAGLE, VD, L, eagle3, flat, speculators, write
from tests.drafters.heldout import features

USUAL = (1, L // 2 - 1, L - 4)  # outputs


@pytest.mark.parametrize(
    ("made", "layers"),
    [
        (eagle3(), (1, 3, 5)),
        (eagle3(base=ANGELSLIM), USUAL),
        (eagle3(base=EAGLE), USUAL),
        (speculators({"num_hidden_layers": 2}), (1, 3, 5)),
        (speculators(norm_before_residual=False), (1, 3, 5)),
    ],
    ids=["research", "AngelSlim", "EAGLE", "speculators", "speculators, plain residual"],
)
def test_evaluation_finds_what_a_second_implementation_promises(made, layers, tmp_path, target_folder):
    """The target of these features always says what the second implementation drafts at step 0."""
    import_drafter(write(tmp_path / "public", *made), target_folder, tmp_path / "ours")
    shards = features(tmp_path / "features", target_folder, layers, (flat(made[0]), made[1]))
    target, options = {"path": target_folder, "device": "cpu"}, {"drafters": [tmp_path / "ours"], "steps": 2}
    (result,) = evaluation.run(Recipe.model_validate({"name": "x", "work": tmp_path, "shards": shards, "target": target, "eval": options}))
    assert result["alpha"][0]["value"] == 1.0 and result["alpha"][0]["den"] > 100 and result["alpha"][1]["value"] < 0.5


def test_an_imported_drafter_starts_others(tmp_path, target_folder):
    import_drafter(
        write(tmp_path / "public", *speculators({"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16})), target_folder, tmp_path / "ours"
    )
    drafter, info = load_drafter(tmp_path / "ours", "cpu", torch.float32)
    theirs, target = read_tensors(tmp_path / "ours"), load_geometry(target_folder)
    same = build_drafter(HiddenOnlyConfig(hidden_layers=(1, 3, 5), norm_before_residual=True), info.geometry, VD)
    hybrid = build_drafter(HybridConfig(hidden_layers=(1, 3, 5)), target, VD)
    for other in (same, hybrid):
        other.reset(0)
        other.set_vocab(drafter.draft_ids)
        report = warm_start(other, tmp_path / "ours", ("*",), weights_digest(target_folder))
        own = other.state_dict()
        assert {"fc.weight", "lm_head.weight", "norm.weight", "layers.0.hidden_norm.weight"} <= set(report.taken)
        assert all(torch.equal(own[name], theirs[name]) for name in report.taken)
        noted = "residual of the first layer normed: the source True, this drafter False" in report.notes
        assert noted == (other is hybrid)
    assert all(torch.equal(x, theirs[name]) for name, x in same.state_dict().items())
