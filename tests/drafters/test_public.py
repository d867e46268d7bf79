"""Public checkpoints read as our drafters: the same numbers as a second implementation, the same bits on disk, decoding without loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from kvshot_ds.config import DraftingConfig
from kvshot_ds.decoding.engine import Engine
from kvshot_ds.drafters.base import Drafter
from kvshot_ds.drafters.build import load_drafter, read_info
from kvshot_ds.drafters.layers import Rotation
from kvshot_ds.drafters.public import import_drafter, read_public
from kvshot_ds.drafters.state import DraftState, Start
from kvshot_ds.geometry import Geometry
from kvshot_ds.objectives.alignment import decoding_start
from kvshot_ds.target import Target, load_geometry, weights_digest
from tests.decoding.models import hf_target, prompt
from tests.drafters.checkpoints import ANGELSLIM, EAGLE, IDS, D, L, Tensors, V, dflash, eagle3, flat, speculators, write
from tests.drafters.dflash_reference import DFlash
from tests.drafters.eagle3_reference import Eagle3


def imported(tmp_path: Path, made: tuple[dict[str, Any], Tensors], target_folder: Path) -> Drafter:
    import_drafter(write(tmp_path / "public", *made), target_folder, tmp_path / "ours")
    drafter, info = load_drafter(tmp_path / "ours", "cpu", torch.float64)
    drafter.bind(*lent())
    assert info.target_digest == weights_digest(target_folder) and info.target_name == "small"
    return drafter


def double(weights: Tensors) -> Tensors:
    return {name: x.double() if x.is_floating_point() else x for name, x in weights.items()}


def lent() -> tuple[torch.Tensor, torch.Tensor]:
    """Embedding and head [V, d] of an imagined target; untied."""
    r = torch.Generator().manual_seed(8)
    return torch.randn(V, D, generator=r, dtype=torch.float64), torch.randn(V, D, generator=r, dtype=torch.float64)


def states(n: int, seed: int) -> dict[int, torch.Tensor]:
    """The target's states of all its layers at n positions, of different sizes."""
    r = torch.Generator().manual_seed(seed)
    return {i: torch.randn(n, D, generator=r, dtype=torch.float64) * (1 + i) for i in range(L)}


def start_of(tokens: torch.Tensor, first: int, hidden: dict[int, torch.Tensor]) -> Start:
    """A round of one sequence."""
    return decoding_start(tokens, [first], [len(tokens)], 40, hidden, {})


ROUNDS = [(9, 5), (3, 6), (1, 4), (6, 5)]  # positions committed, tokens drafted

EAGLE31 = {"fc_norm": True, "norm_output": True}
VARIANTS: dict[str, tuple[dict[str, Any], Tensors]] = {
    "research": eagle3(),
    "layers.0": eagle3("layers.0."),
    "two layers": eagle3("layers.0.", num_hidden_layers=2),
    "no grouping, D = d/A": eagle3(num_attention_heads=4, num_key_value_heads=4, head_dim=8),
    "heads do not divide d": eagle3(num_attention_heads=5, num_key_value_heads=1, head_dim=12),
    "all tokens": eagle3(draft_vocab_size=None),
    "biases": eagle3(attention_bias=True, mlp_bias=True),
    "qk norm": eagle3(model_type="qwen3"),
    "linear rope": eagle3(rope_scaling={"type": "linear", "factor": 4.0}),
    "default rope": eagle3(rope_theta=None),
    "fc norm": eagle3(fc_norm=True),
    "normed output": eagle3(norm_output=True),
    "normed residual": eagle3(norm_before_residual=True),
    "3.1, two layers": eagle3("layers.0.", **EAGLE31, num_hidden_layers=2),
    "other layers": eagle3(**{IDS: [7, 1, 3, 4]}, eagle_config={IDS: [6, 0, 2, 3]}),
    "AngelSlim": eagle3(base=ANGELSLIM),
    "EAGLE repository": eagle3(base=EAGLE),
    "speculators": speculators(),
    "speculators, plain residual": speculators(norm_before_residual=False),
    "speculators, three qwen3 layers": speculators({"model_type": "qwen3", "num_hidden_layers": 3}),
    "speculators, 3.1": speculators({"num_hidden_layers": 2}, **EAGLE31),
    "speculators, all tokens": speculators(draft_vocab_size=V),
    "speculators, no ids": speculators(**{IDS: None}),
    "speculators, ids by their newer name": speculators(**{IDS: None, "aux_hidden_state_layer_ids": [2, 4, 6]}),
}
USUAL = [2, L // 2, L - 3]  # as indices of hidden_states: what all readers take where the config names no layers


def fused(config: dict[str, Any], hidden: dict[int, torch.Tensor]) -> torch.Tensor:
    """What the drafter is given: hidden_states[i] is the output of layer i - 1."""
    ids = config.get(IDS) or config.get("aux_hidden_state_layer_ids") or USUAL
    return torch.cat([hidden[i - 1] for i in ids], -1)


class ExactRotary(torch.nn.Module):
    """The package's tables in fp64 instead of fp32, from what the geometry says: default and linear only."""

    def __init__(self, g: Geometry):
        super().__init__()
        self.speed = g.rope["rope_theta"] ** (-2 * torch.arange(g.head_dim // 2, dtype=torch.float64) / g.head_dim) / g.rope.get("factor", 1.0)

    def forward(self, positions: torch.Tensor) -> Rotation:
        angle = (positions.double()[:, None] * self.speed).repeat(1, 2)[:, None]
        return Rotation(angle.cos(), angle.sin(), 1.0)


def tables(drafter: Drafter, exact: bool) -> float:
    """Chooses the rotary tables; the tolerance that follows. The fp32 ones differ from the reference's by their rounding."""
    if exact:
        drafter.rotary = ExactRotary(drafter.g)
    return 1e-11 if exact else 1e-5


@pytest.mark.parametrize("exact", [True, False], ids=["fp64 tables", "fp32 tables"])
@pytest.mark.parametrize("name", VARIANTS)
def test_eagle3_computes_what_a_second_implementation_does(name, exact, tmp_path, target_folder):
    config, weights = VARIANTS[name]
    drafter = imported(tmp_path, (config, weights), target_folder)
    tolerance = tables(drafter, exact)
    theirs = Eagle3(flat(config), double(weights), lent()[0])
    state, first = DraftState.empty(drafter.depth), 0
    for n, length in ROUNDS:
        tokens, hidden = torch.tensor(prompt(n, first)), states(n, first)
        want, logits = theirs.draft(tokens, fused(config, hidden), length)
        h = [drafter.begin(state, start_of(tokens, first, hidden))]
        h += [drafter.forward_step(state, torch.tensor([want[k - 1]]), k) for k in range(1, length)]
        torch.testing.assert_close(drafter.logits(torch.cat(h)), torch.stack(logits), rtol=tolerance, atol=tolerance)
        assert torch.stack(logits).std(0).mean() > 0.02, "steps so alike that a shift would go unseen"
        first += n


@pytest.mark.parametrize("name", ["research", "3.1, two layers", "all tokens", "speculators, three qwen3 layers"])
def test_eagle3_drafts_the_same_tokens(name, tmp_path, target_folder):
    config, weights = VARIANTS[name]
    drafter, theirs = imported(tmp_path, (config, weights), target_folder), Eagle3(flat(config), double(weights), lent()[0])
    state, first = DraftState.empty(drafter.depth), 0
    for n, length in ROUNDS:
        tokens, hidden = torch.tensor(prompt(n, first)), states(n, first)
        want, _ = theirs.draft(tokens, fused(config, hidden), length)
        assert drafter.draft(state, start_of(tokens, first, hidden), length).tolist() == [want]
        first += n


@pytest.mark.parametrize("exact", [True, False], ids=["fp64 tables", "fp32 tables"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8},
        {"num_hidden_layers": 1, "layer_types": ["full_attention"]},
        {"attention_bias": True},
        {"dflash_config": {"mask_token_id": 0, "target_layer_ids": [6, 0, 3, 2]}, "block_size": 3},
    ],
    ids=["usual", "no grouping, D = d/A", "one layer", "biases", "other layers, short block"],
)
def test_dflash_computes_what_a_second_implementation_does(changes, exact, tmp_path, target_folder):
    config, weights = dflash(**changes)
    drafter = imported(tmp_path, (config, weights), target_folder)
    tolerance = tables(drafter, exact)
    embedding, head = lent()
    own = {"block_size": config["block_size"]} | config["dflash_config"]
    theirs = DFlash(config | {"dflash_config": own}, double(weights), embedding, head)
    state, first = DraftState.empty(drafter.depth), 0
    seen = torch.empty(0, len(own["target_layer_ids"]) * D, dtype=torch.float64)
    for n, _ in ROUNDS:
        tokens, hidden = torch.tensor(prompt(n, first)), states(n, first)
        seen = torch.cat((seen, torch.cat([hidden[i] for i in own["target_layer_ids"]], -1)))
        want = theirs.logits(int(tokens[-1]), seen)
        start = start_of(tokens, first, hidden)
        once = DraftState(list(state.own), list(state.cross))
        torch.testing.assert_close(drafter.logits(drafter.slots(once, start)[1:, 0]), want, rtol=tolerance, atol=tolerance)
        assert drafter.draft(state, start, own["block_size"] - 1).tolist() == [want.argmax(-1).tolist()]
        assert want.std(0).mean() > 0.02, "slots so alike that a shift would go unseen"
        first += n


def perturbed(weights: Tensors, name: str) -> Tensors:
    return weights | {name: weights[name] + 0.3 * torch.randn(weights[name].shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)}


def test_every_tensor_of_the_tests_checkpoints_matters():
    """Else the comparisons above would not notice that one was read wrongly."""
    tokens, hidden = torch.tensor(prompt(9, 0)), states(9, 0)
    config, weights = eagle3("layers.0.", **EAGLE31, num_hidden_layers=2, attention_bias=True, mlp_bias=True, model_type="qwen3")
    states_read = fused(config, hidden)
    weights = double(weights)
    want = torch.stack(Eagle3(config, weights, lent()[0]).draft(tokens, states_read, 2)[1])
    for switch in ("norm_before_residual", "norm_output"):
        got = torch.stack(Eagle3(config | {switch: not config.get(switch)}, weights, lent()[0]).draft(tokens, states_read, 2)[1])
        assert (got - want).abs().max() > 1e-2, switch
    for name in weights.keys() - {"d2t", "t2d"}:
        got = torch.stack(Eagle3(config, perturbed(weights, name), lent()[0]).draft(tokens, states_read, 2)[1])
        # a bias of the keys moves all scores of a query alike, but for the rotation
        assert (got - want).abs().max() > (1e-4 if "k_proj.bias" in name else 1e-2), name
    config, weights = dflash(attention_bias=True)
    states_read = torch.cat([hidden[i] for i in config["dflash_config"]["target_layer_ids"]], -1)
    weights = double(weights)
    want = DFlash(config, weights, *lent()).logits(3, states_read)
    for name in weights:
        assert (DFlash(config, perturbed(weights, name), *lent()).logits(3, states_read) - want).abs().max() > 1e-2, name


def test_dflash_weights_are_taken_name_for_name(tmp_path, target_folder):
    config, weights = dflash()
    public = read_public(write(tmp_path / "p", config, weights), load_geometry(target_folder))
    assert len(weights) == 11 * 3 + 3
    assert public.tensors.keys() == weights.keys() | {"d2t", "t2d"} and all(torch.equal(public.tensors[name], x) for name, x in weights.items())
    assert public.tensors["t2d"].all() and len(public.tensors["t2d"]) == V == public.draft_vocab_size and not public.tensors["d2t"].any()
    assert (public.config.hidden_layers, public.config.mask_token_id, public.config.block_size, public.config.depth) == ((1, 2, 4, 5), 38, 6, 3)


# What is stored


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_weights_keep_their_bits_and_the_folder_its_origin(dtype, tmp_path, target_folder):
    config, weights = eagle3()
    weights = {name: x.to(dtype) if x.is_floating_point() else x for name, x in weights.items()}
    report = import_drafter(write(tmp_path / "eagle3-small", config, weights), target_folder, tmp_path / "ours")
    stored = load_file(tmp_path / "ours" / "model.safetensors")
    assert {name.replace("layers.0.", "midlayer.") for name in stored} == weights.keys()
    for name, x in stored.items():
        original = weights[name.replace("layers.0.", "midlayer.")]
        assert x.dtype == original.dtype and torch.equal(x, original)
    told = read_info(tmp_path / "ours").extra["imported"]
    assert told["source"] == "eagle3-small" and told["format"] == "eagle3" and told["dtype"] == str(dtype).removeprefix("torch.") == report.dtype
    assert told["sha256"].keys() == {"config.json", "model.safetensors"} and all(len(digest) == 64 for digest in told["sha256"].values())
    assert report.parameters == sum(x.numel() for x in weights.values() if x.is_floating_point())
    assert "eagle3 drafter (research layout)" in report.lines()[0] and told["layout"] == "research" and len(report.lines()) == 1 + len(report.notes)


def test_two_dtypes_are_stored_in_one_that_holds_both(tmp_path, target_folder):
    config, weights = eagle3()
    mixed = {name: x.to(torch.bfloat16 if x.ndim == 2 else torch.float16) if x.is_floating_point() else x for name, x in weights.items()}
    assert import_drafter(write(tmp_path / "p", config, mixed), target_folder, tmp_path / "ours").dtype == "float32"
    stored = load_file(tmp_path / "ours" / "model.safetensors")
    assert all(torch.equal(x.double(), mixed[name.replace("layers.0.", "midlayer.")].double()) for name, x in stored.items())


def test_the_geometry_is_the_drafters_own(tmp_path, target_folder):
    target = load_geometry(target_folder)
    config, weights = eagle3(rope_scaling={"rope_type": "linear", "factor": 2.0})
    g = read_public(write(tmp_path / "p", config, weights), target).geometry
    assert (g.heads, g.kv_heads, g.head_dim, g.intermediate_size, g.norm_eps, g.qk_norm) == (6, 3, 10, 56, 1e-5, False)
    assert (g.num_layers, g.hidden_size, g.vocab_size) == (L, D, V)
    assert g.rope["rope_theta"] == 50.0 and g.rope["factor"] == 2.0 and g.rope["rope_type"] == "linear"
    assert (target.heads, target.kv_heads, target.head_dim, target.qk_norm) == (4, 2, 16, True)


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    ],
)
def test_scaled_rotary_embeddings_load(scaling, tmp_path, target_folder):
    drafter = imported(tmp_path, eagle3(rope_scaling=scaling), target_folder)
    kind = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS[scaling["rope_type"]]
    hf = transformers.LlamaConfig(hidden_size=60, num_attention_heads=6, head_dim=10, max_position_embeddings=64, rope_theta=50.0, rope_scaling=dict(scaling))
    frequencies, factor = kind(hf, torch.device("cpu"))
    r = drafter.rotary(torch.tensor([7]))
    torch.testing.assert_close(r.cos[0, 0, :5], (7 * frequencies).cos() * factor)


# With a real target


@pytest.mark.parametrize("made", [eagle3(), speculators({"num_hidden_layers": 2}), dflash()], ids=["eagle3", "speculators", "dflash"])
def test_an_imported_drafter_decodes_without_loss(made, tmp_path, target_folder):
    import_drafter(write(tmp_path / "public", *made), target_folder, tmp_path / "ours")
    target: Target = hf_target("Qwen3", torch.float64)
    drafter, _ = load_drafter(tmp_path / "ours", target.device, torch.float64)
    drafter.bind(target.model.get_input_embeddings().weight, target.model.get_output_embeddings().weight)
    prompts = [prompt(9, 2), prompt(4, 3)]
    alone, drafted = (Engine(target, d, DraftingConfig(length=5)).decode(prompts, 20) for d in (None, drafter))
    assert [d.tokens for d in drafted] == [a.tokens for a in alone] and all(len(a.tokens) == 20 for a in alone)
    assert any(r.drafted for d in drafted for r in d.rounds)
