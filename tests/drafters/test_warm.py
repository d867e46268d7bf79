"""Warm start: what is taken, to the bit; what is not, and why; what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvshot_ds.config import AnyDrafterConfig, DFlashConfig, GateConfig, HiddenOnlyConfig, HybridBlockConfig, HybridConfig, KVOnlyConfig
from kvshot_ds.drafters.base import Drafter
from kvshot_ds.drafters.build import DrafterInfo, build_drafter, save_drafter
from kvshot_ds.drafters.warm import Partial, ShapeDiffers, WarmReport, warm_start
from kvshot_ds.errors import ConfigError, KvshotError
from kvshot_ds.objectives.alignment import plan_rows, training_start
from tests import toys

G, DIGEST, ALL = toys.geometry(), "d" * 64, ("*",)
SELF = {f"layers.0.self_attn.{p}_proj.weight" for p in "qkvo"}
MLP = {f"layers.0.mlp.{p}_proj.weight" for p in ("gate", "up", "down")}
NORMS = {"norm.weight", *(f"layers.0.{n}.weight" for n in ("input_layernorm", "hidden_norm", "post_attention_layernorm"))}


def made(config: AnyDrafterConfig, seed: int, ids: torch.Tensor | None = None, dtype: torch.dtype = torch.float64) -> Drafter:
    """A drafter whose every parameter is random, so that no two of different seeds share a number."""
    ids = torch.arange(toys.DRAFT_VOCAB) if ids is None else ids
    drafter = build_drafter(config, G, len(ids)).to(dtype)
    drafter.reset(seed)
    with torch.no_grad():
        for name, p in drafter.named_parameters():
            if not name.endswith("delta_proj.weight"):  # its start is the point of zero_delta
                p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(seed), dtype=dtype))
    drafter.set_vocab(ids)
    table = torch.randn(toys.VOCAB, G.hidden_size, generator=torch.Generator().manual_seed(9), dtype=dtype)
    drafter.bind(table, table)
    return drafter


def saved(folder: Path, config: AnyDrafterConfig, seed: int = 1, ids: torch.Tensor | None = None, **info: object) -> tuple[Path, dict[str, torch.Tensor]]:
    """A run folder with such a drafter, and its tensors."""
    drafter = made(config, seed, ids)
    known = DrafterInfo(config, G, len(drafter.d2t), "toy", DIGEST, {})
    save_drafter(folder / "drafter", drafter, replace(known, **info), torch.float64)  # type: ignore[arg-type]
    return folder, load_file(folder / "drafter" / "model.safetensors")


def changed(before: dict[str, torch.Tensor], after: Drafter) -> Iterator[str]:
    return (name for name, value in after.state_dict().items() if not torch.equal(value, before[name]))


def copied(drafter: Drafter) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in drafter.state_dict().items()}


def test_hidden_only_to_hybrid_takes_exactly_what_both_have_and_equals_it(tmp_path: Path) -> None:
    """A zero_delta hybrid on a warm-started self path is the hidden-only drafter, bit for bit, through unrolling and head."""
    source, tensors = saved(tmp_path, HiddenOnlyConfig())
    hybrid, twin = made(HybridConfig(gate=GateConfig(init="zero_delta")), 2), made(HiddenOnlyConfig(), 1)
    before = copied(hybrid)
    report = warm_start(hybrid, source, ALL, DIGEST)
    assert set(report.taken) == SELF | MLP | NORMS | {"fc.weight", "lm_head.weight"} == set(changed(before, hybrid))
    assert all(torch.equal(hybrid.state_dict()[name], tensors[name]) for name in report.taken)
    assert not report.partial and not report.shape_differs and not report.not_in_drafter and not report.not_chosen and not report.notes
    assert {name.split(".")[2] for name in report.not_in_source} == {"cross_attn", "projector", "mix"}

    batch = toys.batch(G).to("cpu", torch.float64)
    plan = plan_rows(batch, 4)
    ours, theirs = (d.unroll(training_start(batch, plan), plan.tokens).h for d in (hybrid, twin))
    assert torch.equal(ours, theirs) and torch.equal(hybrid.logits(ours[-1]), twin.logits(theirs[-1]))
    assert not torch.equal(ours, made(HiddenOnlyConfig(), 3).unroll(training_start(batch, plan), plan.tokens).h)


def test_rows_of_the_head_go_by_target_id(tmp_path: Path) -> None:
    source_ids, ids = torch.arange(0, 24), torch.arange(4, 36, 2)
    source, tensors = saved(tmp_path, HiddenOnlyConfig(), ids=source_ids)
    drafter = made(HiddenOnlyConfig(), 2, ids)
    before = copied(drafter)
    report = warm_start(drafter, source, ALL, DIGEST)
    assert report.partial == (Partial("lm_head.weight", 10, 16),) and "lm_head.weight" not in report.taken
    assert "taken in part: lm_head.weight, 10 of 16 rows" in "\n".join(report.lines())
    for row, target_id in enumerate(ids.tolist()):
        wanted = tensors["lm_head.weight"][target_id] if target_id < 24 else before["lm_head.weight"][row]
        assert torch.equal(drafter.lm_head.weight[row], wanted)
    assert torch.equal(drafter.draft_ids, ids) and torch.equal(drafter.t2d, before["t2d"])


def test_a_vocabulary_within_the_sources_takes_the_head_whole(tmp_path: Path) -> None:
    source, tensors = saved(tmp_path, HiddenOnlyConfig(), ids=torch.arange(1, 40, 2))
    drafter = made(HiddenOnlyConfig(), 2, torch.tensor([3, 9, 39]))
    report = warm_start(drafter, source, ("lm_head.weight",), DIGEST)
    assert report.taken == ("lm_head.weight",) and not report.partial
    assert torch.equal(drafter.lm_head.weight, tensors["lm_head.weight"][[1, 4, 19]])


def test_a_source_whose_vocabulary_is_not_ascending(tmp_path: Path) -> None:
    """As an imported drafter may have it."""
    ids = torch.tensor([30, 2, 17, 5])
    source, tensors = saved(tmp_path, HiddenOnlyConfig(), ids=ids.sort().values)
    save_file(tensors | {"d2t": ids - torch.arange(4)}, source / "drafter" / "model.safetensors")
    drafter = made(HiddenOnlyConfig(), 2, torch.tensor([2, 5, 30]))
    assert warm_start(drafter, source, ("lm_head.*",), DIGEST).taken == ("lm_head.weight",)
    assert torch.equal(drafter.lm_head.weight, tensors["lm_head.weight"][[1, 3, 0]])


@pytest.mark.parametrize(
    ("patterns", "wanted"),
    [
        (("layers.*.self_attn.*",), SELF),
        (("layers.*.mlp.*", "norm.*"), MLP | {"norm.weight"}),
        (("*.[qk]_proj.weight", "layers.0.self_attn.q_proj.weight"), {name for name in SELF if ".q_" in name or ".k_" in name}),
    ],
)
def test_patterns_choose(tmp_path: Path, patterns: tuple[str, ...], wanted: set[str]) -> None:
    source, tensors = saved(tmp_path, HiddenOnlyConfig())
    drafter = made(HybridConfig(), 2)
    before = copied(drafter)
    report = warm_start(drafter, source, patterns, DIGEST)
    assert set(report.taken) == wanted == set(changed(before, drafter))
    assert set(report.taken).isdisjoint(report.not_chosen) and set(report.taken) | set(report.not_chosen) == tensors.keys() & before.keys() - {"d2t", "t2d"}


def test_other_shapes_and_unused_tensors_are_listed(tmp_path: Path) -> None:
    source, _ = saved(tmp_path, KVOnlyConfig(depth=2))
    drafter = made(HybridConfig(), 2)
    before = copied(drafter)
    report = warm_start(drafter, source, ALL, DIGEST)
    width, out = G.hidden_size, G.heads * G.head_dim
    assert ShapeDiffers("layers.0.cross_attn.q_proj.weight", (out, width), (out, 2 * width)) in report.shape_differs and len(report.shape_differs) == 3
    assert report.not_in_drafter and all(name.startswith("layers.1.") for name in report.not_in_drafter)
    assert set(report.not_in_source) >= SELF and "layers.0.projector.k_proj.weight" in report.taken
    assert set(report.taken) == set(changed(before, drafter))
    text = "\n".join(report.lines())
    assert f"other shape: layers.0.cross_attn.q_proj.weight, there [{out}, {width}], here [{out}, {2 * width}]" in text
    assert "unused, not in this drafter: layers.1.cross_attn.*, " in text and "layers.0.self_attn.*" in text
    assert json.loads(json.dumps(report.to_json()))["shape_differs"][0]["drafter"] == list(report.shape_differs[0].drafter)


def test_block_wise_drafters_share_layers_and_have_no_head(tmp_path: Path) -> None:
    source, tensors = saved(tmp_path, DFlashConfig(depth=2, block_size=4))
    drafter = made(HybridBlockConfig(depth=2, block_size=6, gate=GateConfig(init="zero_delta")), 2)
    report = warm_start(drafter, source, ALL, DIGEST)
    assert set(report.taken) == tensors.keys() - {"d2t", "t2d"} and "mask_embedding" in report.taken
    batch = toys.batch(G).to("cpu", torch.float64)
    plan = plan_rows(batch, 3)
    same = made(DFlashConfig(depth=2, block_size=6), 1)
    assert torch.equal(*(d.unroll(training_start(batch, plan), plan.tokens).h for d in (drafter, same)))


def test_what_shapes_do_not_tell_is_noted(tmp_path: Path) -> None:
    def notes(name: str, there: AnyDrafterConfig, here: AnyDrafterConfig) -> str:
        return "\n".join(warm_start(made(here, 2), saved(tmp_path / name, there)[0], ALL, DIGEST).lines())

    assert "note: hidden states of layers, in the order of fc: the source (1, 2, 4), this drafter (4, 2, 1)" in notes(
        "a", HiddenOnlyConfig(hidden_layers=(1, 2, 4)), HiddenOnlyConfig(hidden_layers=(4, 2, 1))
    )
    text = notes("b", KVOnlyConfig(kv={"layers": (0, 1, 2)}), KVOnlyConfig(kv={"injection": "linear", "layers": (0, 1, 3)}))
    assert "the source (0, 1, 2), this drafter (0, 1, 3)" in text and "injection: the source linear_rope, this drafter linear" in text
    assert "next step's hidden state normed: the source True, this drafter False" in notes("c", HiddenOnlyConfig(norm_output=True), HiddenOnlyConfig())
    assert "note:" not in notes("d", HiddenOnlyConfig(), HybridConfig())


def test_an_imported_drafter_of_the_same_target_may_have_a_geometry_of_its_own(tmp_path: Path) -> None:
    other = replace(G, rope={"rope_type": "default", "rope_theta": 7.0})
    source, _ = saved(tmp_path, HiddenOnlyConfig(), geometry=other)
    report = warm_start(made(HiddenOnlyConfig(), 2), source, ALL, DIGEST)
    assert len(report.notes) == 1 and report.notes[0].startswith("rope of the source is {'rope_type': 'default', 'rope_theta': 7.0}")


def refused(drafter: Drafter, source: Path, patterns: tuple[str, ...], digest: str = DIGEST) -> str:
    """The text of the refusal; nothing may have been taken before it."""
    before = copied(drafter)
    with pytest.raises(ConfigError) as caught:
        warm_start(drafter, source, patterns, digest)
    assert not list(changed(before, drafter))
    return str(caught.value)


def test_another_target_is_refused(tmp_path: Path) -> None:
    source, _ = saved(tmp_path / "a", HiddenOnlyConfig())
    text = refused(made(HiddenOnlyConfig(), 2), source, ALL, "e" * 64)
    assert f"init.warm_start={source / 'drafter'} was trained against another target, 'toy' (digest dddddddddddd instead of eeeeeeeeeeee)" in text
    source, _ = saved(tmp_path / "b", HiddenOnlyConfig(), geometry=replace(G, heads=8, hidden_size=48), target_digest="f" * 64)
    assert "(hidden_size 48 instead of 24, heads 8 instead of 4, digest ffffffffffff instead of" in refused(made(HiddenOnlyConfig(), 2), source, ALL)


@pytest.mark.parametrize(
    ("patterns", "why"),
    [
        (("norm.*", "layers.*.self_atn.*"), "'layers.*.self_atn.*' takes nothing from .*: no tensor has such a name; close ones: layers.0.self_attn"),
        (("layers.*.cross_attn.*",), "'layers.*.cross_attn.*' takes nothing from .*: this drafter has layers.0.cross_attn.*, the source does not"),
        (("layers.1.mlp.*",), "'layers.1.mlp.*' takes nothing from .*: the source has layers.1.mlp.*, this drafter does not"),
        (("d2t",), "'d2t' takes nothing from .*: the draft vocabulary is never taken"),
        (("xyz",), "no tensor has such a name; close ones: fc.weight, "),
    ],
)
def test_patterns_that_take_nothing(tmp_path: Path, patterns: tuple[str, ...], why: str) -> None:
    source, _ = saved(tmp_path, HiddenOnlyConfig(depth=2))
    text = refused(made(HybridConfig(), 2), source, patterns)
    before, _, after = why.partition(".*:") if " from .*:" in why else ("", "", why)
    assert text.startswith("init.tensors: ") and before in text and after in text


def test_nothing_of_the_same_shape_is_refused_with_the_reasons(tmp_path: Path) -> None:
    source, _ = saved(tmp_path, KVOnlyConfig(depth=1))
    text = refused(made(HybridConfig(), 2), source, ("layers.0.cross_attn.q_proj.*",))
    assert text.startswith("init.warm_start takes nothing") and "other shape: layers.0.cross_attn.q_proj.weight" in text
    source, _ = saved(tmp_path / "b", HiddenOnlyConfig(), ids=torch.arange(5))
    assert "0 of 3 rows" in refused(made(HiddenOnlyConfig(), 2, torch.tensor([10, 20, 30])), source, ("lm_head.*",))


def test_what_is_no_drafter(tmp_path: Path) -> None:
    drafter = made(HiddenOnlyConfig(), 2)
    with pytest.raises(KvshotError, match="no trained drafter here"):
        warm_start(drafter, tmp_path, ALL, DIGEST)
    source, tensors = saved(tmp_path, HiddenOnlyConfig())
    file = source / "drafter" / "model.safetensors"
    save_file({name: value for name, value in tensors.items() if name != "d2t"}, file)
    with pytest.raises(KvshotError, match="expected d2t, one entry for each row of lm_head"):
        warm_start(drafter, source, ALL, DIGEST)
    file.write_bytes(b"no tensors")
    with pytest.raises(KvshotError, match="not readable as safetensors"):
        warm_start(drafter, source, ALL, DIGEST)


def test_the_drafters_dtype_stays(tmp_path: Path) -> None:
    source, tensors = saved(tmp_path, HiddenOnlyConfig())
    drafter = made(HiddenOnlyConfig(), 2, dtype=torch.bfloat16)
    report: WarmReport = warm_start(drafter, source, ALL, DIGEST)
    assert drafter.fc.weight.dtype == torch.bfloat16 and torch.equal(drafter.fc.weight, tensors["fc.weight"].bfloat16())
    assert report.source == source / "drafter" and len(report.digest) == 64 and drafter.fc.weight.requires_grad
