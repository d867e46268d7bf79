"""Starting weights: which tensor of the target goes where."""

import pytest
import torch

from kvshot_ds.config import DFlashConfig, GateConfig, HiddenOnlyConfig, HybridBlockConfig, HybridConfig, InitConfig, KVBlockConfig, KVOnlyConfig
from kvshot_ds.drafters.build import build_drafter
from kvshot_ds.drafters.initial import choose_vocab, initialise
from kvshot_ds.drafters.state import Rows, Start
from kvshot_ds.objectives.alignment import plan_rows, training_start
from kvshot_ds.target import load_geometry, load_parts
from tests import toys


@pytest.fixture(scope="module")
def parts(tiny_target):
    return load_parts(tiny_target)


def made(tiny_target, parts, config, **init):
    g = load_geometry(tiny_target)
    drafter = build_drafter(config, g, 50)
    drafter.set_vocab(torch.arange(50) * 3)
    initialise(drafter, InitConfig(**init), parts, seed=1)
    return drafter


def start_of(**states) -> Start:
    """Target states at five positions, and nothing else."""
    rows = Rows(torch.arange(5), ())
    return Start(**{"tokens": torch.arange(5), "hidden": {}, "keys": {}, "values": {}, "all": rows, "rows": rows, "select": torch.arange(5)} | states)


def test_vocabulary_is_the_most_frequent_tokens_ascending_ties_to_the_smaller_id():
    counts = torch.tensor([5, 0, 9, 5, 1, 5])
    assert choose_vocab(counts, 3).tolist() == [0, 2, 3]
    assert choose_vocab(counts, 6).tolist() == [0, 1, 2, 3, 4, 5]


def test_draft_ids_and_offsets(tiny_target, parts):
    d = made(tiny_target, parts, HiddenOnlyConfig())
    assert d.draft_ids.tolist() == [3 * i for i in range(50)] and torch.equal(d.t2d.nonzero().flatten(), d.draft_ids)
    assert d.propose(torch.randn(4, d.g.hidden_size)).remainder(3).eq(0).all()


def test_head_from_the_target(tiny_target, parts):
    d = made(tiny_target, parts, HiddenOnlyConfig(), head="target")
    assert torch.equal(d.lm_head.weight, parts.head[d.draft_ids]) and torch.equal(d.norm.weight, parts.norm_weight)
    d = made(tiny_target, parts, HiddenOnlyConfig(), head="random")
    assert not torch.equal(d.lm_head.weight, parts.head[d.draft_ids]) and (d.norm.weight == 1).all()


def test_hidden_only_layers_from_the_target(tiny_target, parts):
    d, last = made(tiny_target, parts, HiddenOnlyConfig(hidden_layers=(4, 1, 2)), layers="target"), parts.layer(5)
    width = d.g.hidden_size
    layer = d.layers[0]
    assert torch.equal(layer.self_attn.q_proj.weight[:, width:], last["self_attn.q_proj.weight"])
    assert layer.self_attn.q_proj.weight[:, :width].std().item() == pytest.approx(0.02, rel=0.1)
    assert torch.equal(layer.self_attn.o_proj.weight, last["self_attn.o_proj.weight"]) and torch.equal(layer.mlp.up_proj.weight, last["mlp.up_proj.weight"])
    assert torch.equal(layer.hidden_norm.weight, last["input_layernorm.weight"])
    hidden = {i: torch.randn(3, width) for i in (1, 2, 4)}
    assert torch.equal(d.fc(torch.cat([hidden[i] for i in d.hidden_layers], -1)), hidden[4])  # the highest fused layer passes


@pytest.mark.parametrize(("start", "wanted"), [("identity_middle", (3, 3)), ("identity_last", (3, 4)), ("random", (4, 5))])
def test_cross_attention_comes_from_the_layer_whose_kv_it_reads(tiny_target, parts, start, wanted):
    d = made(tiny_target, parts, KVOnlyConfig(depth=2, kv={"layers": (2, 3, 4), "projector_init": start}), layers="target")
    for layer, source in zip(d.layers, wanted, strict=True):
        assert torch.equal(layer.cross_attn.q_proj.weight, parts.layer(source)["self_attn.q_proj.weight"])
        if start != "random":
            keys, values = ({i: torch.randn(5, d.g.kv_heads, d.g.head_dim) for i in (2, 3, 4)} for _ in range(2))
            memory = layer.projector(start_of(keys=keys, values=values), d.rotary(torch.arange(5)))
            torch.testing.assert_close(memory.k, keys[source], rtol=0, atol=1e-5)
            assert torch.equal(memory.v, values[source])


def test_head_concat_starts_as_the_average_of_the_layers_whose_heads_it_reads(tiny_target, parts):
    d = made(tiny_target, parts, KVOnlyConfig(depth=1, kv={"layers": (2, 4), "injection": "head_concat"}), layers="target")
    path, sources = d.layers[0].cross_attn, [parts.layer(i) for i in (2, 4)]
    for name in ("q_proj", "k_proj", "v_proj"):
        for half, source in zip(getattr(path, name).weight.chunk(2), sources, strict=True):
            assert torch.equal(half, source[f"self_attn.{name}.weight"])
    for half, source in zip(path.o_proj.weight.chunk(2, 1), sources, strict=True):
        assert torch.equal(half, source["self_attn.o_proj.weight"] / 2)


@pytest.mark.parametrize("config", [DFlashConfig(depth=2, block_size=4), HybridBlockConfig(depth=2, block_size=4), KVBlockConfig(depth=2, block_size=4)])
def test_block_drafters_from_the_target(tiny_target, parts, config):
    d = made(tiny_target, parts, config, layers="target")
    assert d.lm_head is None and torch.equal(d.norm.weight, parts.norm_weight)
    for i, layer in enumerate(d.layers):
        source = parts.layer(4 + i)
        assert torch.equal(layer.mlp.up_proj.weight, source["mlp.up_proj.weight"])
        if layer.self_attn is not None:
            assert torch.equal(layer.self_attn.k_proj.weight, source["self_attn.k_proj.weight"])
    d.bind(parts.embedding, parts.head)
    assert torch.equal(d.head_weight, parts.head[d.draft_ids])
    assert not any(name.startswith("lm_head") for name, _ in d.named_parameters())


@pytest.mark.parametrize("init", ["zero_delta", "bias:-40"])
def test_a_hybrid_that_starts_closed_equals_its_hidden_only_twin(init):
    """zero_delta to the bit; a gate at sigmoid(-40) within rounding."""
    g = toys.geometry()
    twin, batch = toys.drafter("hidden_only-1", g), toys.batch(g).to("cpu", torch.float64)
    toys.FAMILIES["closed"] = HybridConfig(gate=GateConfig(init=init))
    try:
        hybrid = toys.drafter("closed", g, scale=1.0)
    finally:
        del toys.FAMILIES["closed"]
    hybrid.load_state_dict(twin.state_dict() | {k: v for k, v in hybrid.state_dict().items() if k not in twin.state_dict()})
    plan = plan_rows(batch, 3)

    def unroll(d):
        return d.unroll(training_start(batch, plan), plan.tokens).h

    if init == "zero_delta":
        assert torch.equal(unroll(hybrid), unroll(twin))
    else:
        torch.testing.assert_close(unroll(hybrid), unroll(twin), rtol=0, atol=1e-9)


def test_drafters_that_differ_in_one_part_start_alike_in_all_others(tiny_target, parts):
    plain, hybrid = (made(tiny_target, parts, c, head="random").state_dict() for c in (HiddenOnlyConfig(depth=2), HybridConfig(depth=2)))
    shared = plain.keys() & hybrid.keys()
    assert shared == plain.keys() and all(torch.equal(plain[name], hybrid[name]) for name in shared)
    assert not torch.equal(plain["layers.0.mlp.up_proj.weight"], plain["layers.1.mlp.up_proj.weight"])
    drafter = build_drafter(HiddenOnlyConfig(depth=2), load_geometry(tiny_target), 50)
    weights = []
    for seed in (0, 1, 2, 1 << 40):
        drafter.reset(seed)
        weights.append(drafter.layers[0].mlp.up_proj.weight.clone())
    assert not any(torch.equal(a, b) for i, a in enumerate(weights) for b in weights[:i])


def test_gate_starts(tiny_target, parts):
    def mix(init):
        return made(tiny_target, parts, HybridConfig(gate=GateConfig(init=init))).layers[0].mix

    assert (mix("bias:-2").gate_proj.bias == -2).all() and (mix("bias:-2").gate_proj.weight == 0).all()
    assert (mix("zero_delta").delta_proj.weight == 0).all()
    assert torch.equal(mix("identity_delta").delta_proj.weight, torch.eye(64))
    random = mix("random")
    assert 0.45 < random(torch.randn(50, 64), torch.randn(50, 64))[1].mean() < 0.55
