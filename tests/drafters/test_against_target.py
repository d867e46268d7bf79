"""A draft layer with the target's own weights, query input and cache is the target's layer: positions and rotations against transformers."""

from __future__ import annotations

import copy

import pytest
import torch

from kvshot_ds.config import InitConfig, KVOnlyConfig
from kvshot_ds.drafters.attention import KV, Span
from kvshot_ds.drafters.build import build_drafter
from kvshot_ds.drafters.initial import _copy_hidden_to_kv, initialise
from kvshot_ds.drafters.kv import KVOnlyDrafter
from kvshot_ds.drafters.layers import rotate, unrotate
from kvshot_ds.drafters.state import Memory, Rows, Start
from kvshot_ds.errors import ConfigError
from kvshot_ds.target import Target, load_parts
from tests import toys
from tests.decoding.models import FAMILIES, hf_target, prompt

L, T, STEPS = 3, 17, 4  # the layer, the anchor, draft steps

# fmt: off
ROPES = {
    "default": {"rope_type": "default", "rope_theta": 100.0},
    "linear": {"rope_type": "linear", "rope_theta": 100.0, "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 3.0},
    "llama3": {
        "rope_type": "llama3", "rope_theta": 100.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 24},
}
# fmt: on
TARGETS = [(family, "default") for family in FAMILIES] + [("Llama", rope) for rope in ROPES if rope != "default"] + [("StableLm", rope) for rope in ROPES]


class Truth:
    """What the target computes over one sequence: input and output of layer L [S, d], and its cache."""

    def __init__(self, target: Target):
        tokens, cache = torch.tensor([prompt(T + STEPS + 2, 4)]), target.new_cache()
        with target.watch((L - 1, L)) as outputs:
            target.forward(tokens, cache)
        self.entering, self.leaving = outputs[L - 1][0].clone(), outputs[L][0].clone()
        # the cache up to the anchor, [T + 1, G, D]
        self.keys = {i: layer.keys[0, :, : T + 1].transpose(0, 1).clone() for i, layer in enumerate(cache.layers)}
        self.values = {i: layer.values[0, :, : T + 1].transpose(0, 1).clone() for i, layer in enumerate(cache.layers)}


def drafter_from(target: Target, **kv) -> KVOnlyDrafter:
    """KV-only, depth 1, whose layer holds the weights of the target's layer L, and its norms where they are LayerNorms."""
    drafter = build_drafter(KVOnlyConfig(depth=1, kv=kv), target.geometry, toys.DRAFT_VOCAB)
    assert isinstance(drafter, KVOnlyDrafter)
    drafter.reset(0)
    if target.geometry.layer_norm:
        for norm in ("input_layernorm", "post_attention_layernorm"):
            setattr(drafter.layers[0], norm, copy.deepcopy(getattr(target.layers[L], norm)))
    weights = {name.replace("self_attn.", "cross_attn."): w for name, w in target.layers[L].state_dict().items()}
    left = drafter.layers[0].load_state_dict(weights, strict=False)
    assert not left.unexpected_keys and all(key.startswith("projector.") for key in left.missing_keys)
    return drafter


def start_of(truth: Truth) -> Start:
    """The target's states up to the anchor. hidden: what enters layer L, as the output of the layer before."""
    rows, at = Rows(torch.arange(T + 1), ()), torch.arange(T + 1)
    return Start(at, {L - 1: truth.entering[: T + 1]}, truth.keys, truth.values, rows, rows, at)


@torch.no_grad()
def steps(drafter: KVOnlyDrafter, truth: Truth) -> torch.Tensor:
    """The layer's output at positions T+1 .. T+STEPS, fed with the target's own states there: [STEPS, d]."""
    rows, layer = Rows(torch.tensor([T]), (Span(0, 1, 0, T),)), drafter.layers[0]
    memory = Memory(layer.projector(start_of(truth), drafter.rotary(torch.arange(T + 1))))
    out = []
    for k in range(STEPS):
        step = layer(truth.entering[T + 1 + k][None], None, Memory(), memory, rows, drafter.rotations(rows, k))
        memory = step.cross
        out.append(step.h)
    return torch.cat(out)


@pytest.mark.parametrize(("family", "rope"), TARGETS)
def test_per_layer_is_the_target_layer(family, rope):
    target = hf_target(family, rope_parameters=ROPES[rope])
    truth = Truth(target)
    got = steps(drafter_from(target, injection="per_layer", layers=(L,)), truth)
    torch.testing.assert_close(got, truth.leaving[T + 1 : T + 1 + STEPS], rtol=0, atol=1e-5)
    assert (truth.leaving[T + 1] - truth.leaving[T + 2]).abs().max() > 0.1


@pytest.mark.parametrize("family", [*FAMILIES, "StableLm"])
def test_a_position_off_by_one_would_show(family):
    target = hf_target(family)
    truth = Truth(target)
    drafter = drafter_from(target, injection="per_layer", layers=(L,))
    rotations = drafter.rotations
    drafter.rotations = lambda rows, k: rotations(rows, k - 1)  # type: ignore[method-assign]
    assert (steps(drafter, truth) - truth.leaving[T + 1 : T + 1 + STEPS]).abs().max() > 1e-3


@pytest.mark.parametrize(("family", "rope"), TARGETS)
def test_linear_rope_passing_the_middle_layer_is_per_layer(family, rope):
    target = hf_target(family, rope_parameters=ROPES[rope])
    truth = Truth(target)
    drafter = drafter_from(target, injection="linear_rope", layers=(1, L, 5), projector_init="identity_middle")
    torch.testing.assert_close(steps(drafter, truth), truth.leaving[T + 1 : T + 1 + STEPS], rtol=0, atol=1e-4)
    memory = drafter.layers[0].projector(start_of(truth), drafter.rotary(torch.arange(T + 1)))
    torch.testing.assert_close(memory.k, truth.keys[L], rtol=0, atol=1e-5)
    assert torch.equal(memory.v, truth.values[L])


def test_linear_rope_passes_keys_that_were_normed_by_head():
    """A layer of such a target is none of ours, but its keys pass the projector like any."""
    target = hf_target("StableLm", qk_layernorm=True, use_parallel_residual=True)
    truth, drafter = Truth(target), build_drafter(KVOnlyConfig(depth=1, kv={"layers": (1, L, 5)}), target.geometry, toys.DRAFT_VOCAB)
    assert target.geometry.qk_norm and drafter.layers[0].projector.injection == "linear_rope"
    drafter.reset(0)
    memory = drafter.layers[0].projector(start_of(truth), drafter.rotary(torch.arange(T + 1)))
    torch.testing.assert_close(memory.k, truth.keys[L], rtol=0, atol=1e-5)
    assert torch.equal(memory.v, truth.values[L])


def test_layers_of_a_layer_norm_target_start_no_drafter(tmp_path):
    target = hf_target("StableLm")
    target.model.save_pretrained(tmp_path)
    drafter, parts = build_drafter(KVOnlyConfig(depth=1), target.geometry, toys.DRAFT_VOCAB), load_parts(tmp_path)
    with pytest.raises(ConfigError, match=r"^train\.init\.layers=target: a stablelm target has LayerNorms.*use train\.init\.layers=random$"):
        initialise(drafter, InitConfig(layers="target"), parts, 0)
    drafter.set_vocab(torch.arange(toys.DRAFT_VOCAB))
    initialise(drafter, InitConfig(layers="random", head="target"), parts, 0)
    assert torch.equal(drafter.norm.weight, target.model.model.norm.weight) and torch.equal(drafter.lm_head.weight, parts.head[drafter.draft_ids])


@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_to_kv_with_the_targets_own_projections_is_per_layer(family):
    """The control's memory, started from the target, is the target's cache: the right norm, projection, bias, k-norm and position."""
    target = hf_target(family)
    truth = Truth(target)
    drafter = drafter_from(target, injection="hidden_to_kv", layers=(L - 1,))
    assert drafter.required_features().hidden_layers == (L - 1,) and not drafter.required_features().kv_layers

    class Parts:
        @staticmethod
        def layer(i):
            return target.layers[i].state_dict()

    with torch.no_grad():
        _copy_hidden_to_kv(drafter.layers[0].projector, Parts, last=6)
    memory = drafter.layers[0].projector(start_of(truth), drafter.rotary(torch.arange(T + 1)))
    torch.testing.assert_close(memory.k, truth.keys[L], rtol=0, atol=1e-5)
    torch.testing.assert_close(memory.v, truth.values[L], rtol=0, atol=1e-5)
    torch.testing.assert_close(steps(drafter, truth), truth.leaving[T + 1 : T + 1 + STEPS], rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", ["Llama", "StableLm"])
@pytest.mark.parametrize("rope", ROPES)
def test_unrotate_is_the_exact_inverse(rope, family):
    target = hf_target(family, rope_parameters=ROPES[rope])
    drafter = drafter_from(target, injection="per_layer", layers=(L,))
    x = torch.randn(90, 2, 8, generator=torch.Generator().manual_seed(0))
    r = drafter.rotary(torch.arange(90))
    torch.testing.assert_close(unrotate(rotate(x, r), r), x, rtol=0, atol=2e-6)
    moved = (rotate(x, r) - x)[1:].abs().amax((0, 1))
    turned = 4 if family == "StableLm" else 8
    assert moved[:turned].min() > 0.01 and not moved[turned:].any()
    assert torch.equal(unrotate(x, r)[..., turned:], x[..., turned:])
    # what the projector sees of the cache is the target's key before rotation
    truth = Truth(target)
    raw = target.layers[L].self_attn.k_proj(target.layers[L].input_layernorm(truth.entering[: T + 1])).view(T + 1, 2, 8)
    torch.testing.assert_close(unrotate(truth.keys[L], drafter.rotary(torch.arange(T + 1))), raw, rtol=0, atol=1e-5)
    assert isinstance(drafter.layers[0].projector(start_of(truth), r), KV)
