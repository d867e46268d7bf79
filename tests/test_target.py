"""The target adapter against what transformers itself returns: bit for bit in fp32, on the same batch."""

from __future__ import annotations

import copy
import dataclasses
import json
import shutil
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from kvshot_ds.config import TargetConfig
from kvshot_ds.errors import ConfigError
from kvshot_ds.features.codec import Stored, best_logits, encode, stored_tensors
from kvshot_ds.features.spec import FeatureSpec, Store, TeacherKind, scale_group, teacher_rows
from kvshot_ds.geometry import Geometry
from kvshot_ds.objectives.objective import rms_norm
from kvshot_ds.target import Target, load_geometry, load_layer, load_parts, load_tokenizer, tokenizer_digest, weights_digest

STABLE = {"use_qkv_bias": True, "qk_layernorm": False, "use_parallel_residual": False, "partial_rotary_factor": 0.5}
OWN = {
    "Llama": {"tie_word_embeddings": True},
    "Qwen2": {},
    "Qwen3": {"head_dim": 24},
    "Mistral": {"head_dim": 24, "sliding_window": None},
    "StableLm": STABLE,
    "StableLm of 12B": {**STABLE, "use_qkv_bias": False, "qk_layernorm": True, "use_parallel_residual": True, "tie_word_embeddings": False},
}
LAYERS = 5
FP32 = Store.all("fp32")
SPEC = FeatureSpec((0, 3), (1, 4), "last_hidden", FP32, (1, 4))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for number, (family, own) in enumerate(OWN.items()):
        config = getattr(transformers, f"{family.split()[0]}Config")(
            hidden_size=48, intermediate_size=64, num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=2, vocab_size=211,
            max_position_embeddings=128, initializer_range=0.3, bos_token_id=1, eos_token_id=2, **{"tie_word_embeddings": False, **own},
        )  # fmt: skip
        torch.manual_seed(number)
        model = transformers.AutoModelForCausalLM.from_config(config)
        for p in model.parameters():
            if p.ndim == 1:  # norms and biases that a mix-up would not leave alone
                p.data += 0.3 * torch.randn_like(p)
        made[family] = tmp_path_factory.mktemp("targets") / family.lower()
        model.save_pretrained(made[family])
    return made


@pytest.fixture(scope="module", params=OWN)
def target(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Target:
    return Target.load(TargetConfig(path=folders[request.param], dtype="fp32", device="cpu"))


def conversation(length: int, seed: int) -> tuple[list[int], np.ndarray]:
    turn = np.zeros(length, dtype=np.int32)
    turn[length // 3 : length // 2], turn[length // 2 + 2 : -1] = 1, 2
    return torch.randint(0, 211, (length,), generator=torch.Generator().manual_seed(seed)).tolist(), turn


@pytest.mark.parametrize("lengths", [(40,), (33, 33), (60, 41, 7)], ids=["single", "batched", "padded"])
def test_features_are_what_hf_returns(target: Target, lengths: tuple[int, ...]) -> None:
    tokens, turns = zip(*(conversation(n, seed) for seed, n in enumerate(lengths)), strict=True)
    samples = target.features(tokens, SPEC, turns)
    ids, mask = torch.zeros(len(lengths), max(lengths), dtype=torch.long), torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    for row, sequence in enumerate(tokens):
        ids[row, : len(sequence)], mask[row, : len(sequence)] = torch.tensor(sequence), 1
    with torch.no_grad():
        expected = target.model(ids, attention_mask=mask, output_hidden_states=True, use_cache=True)
    cache = expected["cache" if "cache" in expected else "past_key_values"]
    for row, (n, sample) in enumerate(zip(lengths, samples, strict=True)):
        assert tuple(sample) == ("tokens", "turn", *SPEC.keys())
        assert sample["tokens"].tolist() == tokens[row] and sample["turn"].tolist() == turns[row].tolist()
        for layer in SPEC.hidden_layers:
            assert torch.equal(sample[f"hidden.{layer}"], expected.hidden_states[layer + 1][row, :n])
        for layer in SPEC.kv_layers:
            assert torch.equal(sample[f"key.{layer}"], cache.layers[layer].keys[row, :, :n].transpose(0, 1))
            assert torch.equal(sample[f"value.{layer}"], cache.layers[layer].values[row, :, :n].transpose(0, 1))
        rows = teacher_rows(turns[row])
        assert torch.equal(sample["teacher.hidden"], expected.hidden_states[-1][row, rows])
        assert torch.equal(sample["teacher.argmax"], expected.logits[row, rows].argmax(-1).int())
        torch.testing.assert_close(sample["teacher.lse"], torch.logsumexp(expected.logits[row, rows].double(), -1).float(), rtol=1e-6, atol=1e-5)
        assert all(t.device.type == "cpu" and t.is_contiguous() for t in sample.values())


def attention(sample: dict[str, torch.Tensor], layer: int, rows: np.ndarray, theta: float, part: float) -> torch.Tensor:
    """Attention weights [R, A, S] in float64, from the query of each row, a `part` of it turned to its position, and the cached keys up to it."""
    query, key = sample[f"query.{layer}"].double(), sample[f"key.{layer}"].double()
    heads, width = query.shape[1:]
    weights = torch.zeros(len(rows), heads, len(key), dtype=torch.float64)
    half = round(part * width / 2)
    frequency = theta ** (-torch.arange(half).double() / half)
    for r, position in enumerate(rows.tolist()):
        for head in range(heads):
            one, other, rest = query[r, head].split((half, half, width - 2 * half))
            plane = torch.complex(one, other) * torch.polar(torch.ones(half).double(), position * frequency)
            turned = torch.cat((plane.real, plane.imag, rest))
            scores = key[: position + 1, head // (heads // key.shape[1])] @ turned / width**0.5
            weights[r, head, : position + 1] = scores.softmax(0)
    return weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("lengths", [(40,), (60, 41, 7), (7, 60, 41)], ids=["single", "padded", "in another order"])
def test_queries_and_keys_give_the_attention_that_hf_returns(target: Target, lengths: tuple[int, ...], dtype: torch.dtype) -> None:
    eager = transformers.AutoModelForCausalLM.from_pretrained(target.folder, dtype=dtype, attn_implementation="eager")
    tokens, turns = zip(*(conversation(n, n) for n in lengths), strict=True)
    samples = Target(copy.deepcopy(target.model).to(dtype), target.geometry, target.folder).features(tokens, SPEC, turns)
    for sequence, turn, sample in zip(tokens, turns, samples, strict=True):
        rows = teacher_rows(turn)
        with torch.no_grad():
            expected = eager(torch.tensor([sequence]), output_attentions=True).attentions  # alone, without padding
        for layer in SPEC.query_layers:
            assert sample[f"query.{layer}"].shape == (len(rows), target.geometry.heads, target.geometry.head_dim)
            found = attention(sample, layer, rows, 10_000.0, 0.5 if target.geometry.layer_norm else 1.0)
            torch.testing.assert_close(
                found.float(), expected[layer][0][:, rows].transpose(0, 1).float(), rtol=0, atol=1e-4 if dtype == torch.float32 else 1e-5
            )


@pytest.mark.parametrize("teacher", ["last_hidden", "none"])
def test_queries_are_taken_where_asked_and_disturb_nothing(target: Target, teacher: Literal["last_hidden", "none"]) -> None:
    tokens, turn = conversation(30, 6)
    hooks = [len(module._forward_hooks) for module in target.model.modules()]  # transformers has hooks of its own
    whole = target.features([tokens], SPEC, [turn])[0]
    with target.watch(range(LAYERS)) as ran:
        sample = target.features([tokens], FeatureSpec((0,), (), teacher, Store.all("bf16"), (1,)), [turn])[0]
    assert sorted(ran) == ([0, 1] if teacher == "none" else list(range(LAYERS)))
    assert tuple(sample)[:4] == ("tokens", "turn", "hidden.0", "query.1") and torch.equal(sample["query.1"], whole["query.1"].bfloat16())
    bare = target.features([tokens], dataclasses.replace(SPEC, query_layers=()), [turn])[0]
    assert bare.keys() == whole.keys() - {"query.1", "query.4"} and all(torch.equal(bare[key], whole[key]) for key in bare)
    assert hooks == [len(module._forward_hooks) for module in target.model.modules()], "a hook was left"


def test_padding_leaves_no_trace(target: Target) -> None:
    (short, turn), (long, long_turn) = conversation(12, 1), conversation(50, 2)
    alone, padded = target.features([short], SPEC, [turn])[0], target.features([short, long], SPEC, [turn, long_turn])[0]
    for key in alone:
        torch.testing.assert_close(padded[key], alone[key], rtol=1e-4, atol=1e-4)


def test_teacher_in_blocks_equals_whole(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, turn = conversation(60, 3)
    whole = target.features([tokens], SPEC, [turn])[0]
    monkeypatch.setattr("kvshot_ds.target._LOGITS_AT_ONCE", 5 * 211)
    blocks = target.features([tokens], SPEC, [turn])[0]
    assert torch.equal(whole["teacher.argmax"], blocks["teacher.argmax"])
    torch.testing.assert_close(whole["teacher.lse"], blocks["teacher.lse"])


def test_no_supervised_token_gives_empty_teacher(target: Target) -> None:
    sample = target.features([[3, 4, 5]], SPEC, [[0, 0, 0]])[0]
    assert target.features([[3]], SPEC, [[1]])[0]["hidden.3"].shape == (1, 48)
    assert sample["query.4"].shape == (0, 4, target.geometry.head_dim)
    assert sample["teacher.hidden"].shape == (0, 48) and sample["teacher.argmax"].dtype == torch.int32 and sample["teacher.lse"].shape == (0,)


def test_forward_ends_after_last_needed_layer(target: Target) -> None:
    tokens, turn = conversation(20, 4)
    whole = target.features([tokens], SPEC, [turn])[0]
    with target.watch(range(LAYERS)) as ran:
        sample = target.features([tokens], FeatureSpec((0,), (1,), "none", Store.all("bf16")), [turn])[0]
    assert sorted(ran) == [0, 1]
    assert torch.equal(sample["hidden.0"], whole["hidden.0"].bfloat16()) and torch.equal(sample["key.1"], whole["key.1"].bfloat16())
    assert tuple(sample) == ("tokens", "turn", "hidden.0", "key.1", "value.1")
    assert tuple(target.features([tokens], FeatureSpec((), (), "none", Store.all("fp32")), [turn])[0]) == ("tokens", "turn")


@pytest.mark.parametrize("teacher", ["last_hidden", "last_hidden_unnormed", "top_k", "none"])
def test_only_what_is_contracted_is_computed(target: Target, teacher: TeacherKind, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers run once, none past the last needed one; the head sees the supervised rows and no others, in blocks; nothing keeps all hidden states."""
    tokens, turns = zip(*(conversation(n, n) for n in (40, 25)), strict=True)
    rows = sum(len(teacher_rows(turn)) for turn in turns)
    monkeypatch.setattr("kvshot_ds.target._LOGITS_AT_ONCE", 9 * 211)
    ran: list[int] = []
    heads: list[int] = []
    kept: list[object] = []
    watched = [
        *(layer.register_forward_hook(lambda *_, i=i: ran.append(i)) for i, layer in enumerate(target.layers)),
        target.model.get_output_embeddings().register_forward_hook(lambda _m, args, _o: heads.append(args[0].shape[:-1].numel())),
        target.model.model.register_forward_hook(lambda _m, _a, out: kept.extend([out.hidden_states, out.attentions])),
    ]
    try:
        target.features(tokens, FeatureSpec((0,), (2,), teacher, FP32, (1,), 3), turns)
    finally:
        for hook in watched:
            hook.remove()
    assert ran == list(range(3 if teacher == "none" else LAYERS))
    assert heads == ([] if teacher == "none" else [9] * (rows // 9) + [rows % 9])
    assert kept == ([] if teacher == "none" else [None, None]), "left early, the model returns nothing at all"


def test_the_best_tokens_are_those_of_the_logits(target: Target) -> None:
    tokens, turns = zip(*(conversation(n, n) for n in (40, 25)), strict=True)
    whole = target.features(tokens, SPEC, turns)
    best = target.features(tokens, dataclasses.replace(SPEC, teacher="top_k", teacher_k=7), turns)
    for sample, other in zip(best, whole, strict=True):
        assert [k for k in sample if k.startswith("teacher")] == ["teacher.topk_ids", "teacher.topk_logp", "teacher.argmax", "teacher.lse"]
        assert torch.equal(sample["teacher.argmax"], other["teacher.argmax"]) and torch.equal(sample["teacher.topk_ids"][:, 0], sample["teacher.argmax"])
        logp = torch.log_softmax(target.model.get_output_embeddings()(other["teacher.hidden"]).double(), -1)
        assert sample["teacher.topk_ids"].dtype == torch.int32
        for row, ids, found in zip(logp.tolist(), sample["teacher.topk_ids"].tolist(), sample["teacher.topk_logp"].tolist(), strict=True):
            assert ids == sorted(range(211), key=lambda v: -row[v])[:7]
            assert found == pytest.approx([row[v] for v in ids], abs=1e-5)


@pytest.mark.parametrize("k", [1, 5, 30])
def test_equal_logits_stand_in_the_order_of_their_ids(k: int) -> None:
    r = torch.Generator().manual_seed(k)
    logits = torch.randint(-2, 3, (40, 30), generator=r).float() * torch.tensor([1.0, 1e-30, 1e30, 3e38])[torch.arange(40) % 4, None]
    logits[0] = torch.where(torch.arange(30) % 2 == 0, 0.0, -0.0)
    logits[1, 3:9] = -torch.inf
    ids, values = best_logits(logits, k)
    for row, mine, found in zip(logits.tolist(), ids.tolist(), values.tolist(), strict=True):
        assert mine == sorted(range(30), key=lambda v: (-row[v], v))[:k]
        assert found == [row[v] for v in mine]


def test_the_unnormed_teacher_gives_the_normed_one(target: Target) -> None:
    (tokens, turn), spec = conversation(40, 8), dataclasses.replace(SPEC, hidden_layers=(LAYERS - 1,), teacher="last_hidden_unnormed")
    whole, sample = target.features([tokens], SPEC, [turn])[0], target.features([tokens], spec, [turn])[0]
    assert "teacher.hidden" not in sample and torch.equal(sample["teacher.lse"], whole["teacher.lse"])
    assert torch.equal(sample["teacher.unnormed"], sample[f"hidden.{LAYERS - 1}"][teacher_rows(turn)])
    with torch.no_grad():
        torch.testing.assert_close(target.model.model.norm(sample["teacher.unnormed"]), whole["teacher.hidden"], rtol=0, atol=0)
    if not target.geometry.layer_norm:
        mine = rms_norm(sample["teacher.unnormed"], target.model.model.norm.weight, target.geometry.norm_eps)
        torch.testing.assert_close(mine, whole["teacher.hidden"], rtol=1e-6, atol=1e-6)


def test_features_come_as_they_are_stored(target: Target) -> None:
    tokens, turns = zip(*(conversation(n, n) for n in (40, 25)), strict=True)
    whole = target.features(tokens, SPEC, turns)
    store = Store("fp8", "int8", "fp8", "bf16")
    for plain, sample in zip(whole, target.features(tokens, dataclasses.replace(SPEC, store=store), turns), strict=True):
        for key in SPEC.keys():
            how = store.of(key)
            want = Stored(plain[key]) if how is None else encode(plain[key], how, scale_group(key, target.geometry))
            assert torch.equal(sample[key].view(torch.uint8), want.data.view(torch.uint8)), key
            assert (f"{key}.scale" in sample) == (want.scale is not None) and (want.scale is None or torch.equal(sample[f"{key}.scale"], want.scale))
        assert {k: (v.dtype, tuple(v.shape)) for k, v in sample.items()} == stored_tensors(
            dataclasses.replace(SPEC, store=store), target.geometry, len(sample["tokens"]), len(sample["teacher.lse"])
        )


@pytest.mark.parametrize("teacher", ["last_hidden_unnormed", "top_k", "none"])
def test_a_target_whose_layers_lie_apart_gives_the_same(target: Target, teacher: TeacherKind, tmp_path: Path) -> None:
    """Spread by accelerate, as target.device_map=auto does: some layers on the device, the others brought from disk when they are called."""
    from accelerate import dispatch_model

    spec = FeatureSpec((0, 3), (1, 4), teacher, Store("fp8", "fp32", "fp32", "fp32"), (1, 4), 5)
    tokens, turns = zip(*(conversation(n, n) for n in (40, 25)), strict=True)
    want = target.features(tokens, spec, turns)
    names = ["model.embed_tokens", *(f"model.layers.{i}" for i in range(LAYERS)), "model.norm", "model.rotary_emb", "lm_head"]
    where = {name: "disk" if name in ("model.layers.1", "model.layers.4", "model.norm") else "cpu" for name in names}
    if target.model.config.tie_word_embeddings is False:
        where["lm_head"] = "disk"
    apart = Target(
        dispatch_model(copy.deepcopy(target.model), where, main_device="cpu", offload_dir=tmp_path, force_hooks=True), target.geometry, target.folder
    )
    assert apart.device.type == "cpu" and any(p.device.type == "meta" for p in apart.model.parameters())
    for sample, other in zip(apart.features(tokens, spec, turns), want, strict=True):
        assert sample.keys() == other.keys()
        for key in sample:
            assert torch.equal(sample[key].view(torch.uint8), other[key].view(torch.uint8)), key
    ids = torch.tensor([tokens[0]])
    assert torch.equal(apart.forward(ids), target.forward(ids))


def test_device_map_auto_without_an_accelerator_is_one_device(folders: dict[str, Path]) -> None:
    spread = Target.load(TargetConfig(path=folders["Qwen3"], dtype="fp32", device="cpu", device_map="auto"))
    assert spread.device == torch.device("cpu") and {p.device.type for p in spread.model.parameters()} == {"cpu"}


def test_watch_and_cache_while_decoding(target: Target) -> None:
    tokens, turn = conversation(24, 5)
    whole = target.features([tokens], SPEC, [turn])[0]
    cache = target.new_cache()
    with target.watch(SPEC.hidden_layers) as hidden:
        target.forward(torch.tensor([tokens[:20]]), cache)
        logits = target.forward(torch.tensor([tokens[20:]]), cache)
        assert hidden[3].shape == (1, 4, 48)
    torch.testing.assert_close(hidden[3][0], whole["hidden.3"][20:], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(cache.layers[4].keys[0].transpose(0, 1), whole["key.4"], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits, target.forward(torch.tensor([tokens]))[:, 20:], rtol=1e-4, atol=1e-4)
    before = dict(hidden)
    target.forward(torch.tensor([tokens]))
    assert hidden == before, "a closed watch still records"


@pytest.mark.parametrize("family", ["Mistral", "Qwen2"])
def test_a_window_as_long_as_the_context_leaves_nothing_out(family: str) -> None:
    options = {"sliding_window": 20, "max_position_embeddings": 20} | ({"use_sliding_window": True, "max_window_layers": 1} if family == "Qwen2" else {})
    config = getattr(transformers, f"{family}Config")(
        hidden_size=32, intermediate_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, vocab_size=50, **options
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    windowed = Target(model, Geometry.from_hf(config), Path("windowed"))
    tokens = torch.randint(50, (1, 20), generator=torch.Generator().manual_seed(1))
    whole, cache = windowed.forward(tokens), windowed.new_cache()
    windowed.forward(tokens[:, :12], cache)
    windowed.forward(tokens[:, :8], cache)  # a draft up to the end of the context, then taken back, as decoding does
    cache.crop(-8)
    steps = [windowed.forward(tokens[:, i : i + 1], cache) for i in range(12, 20)]
    torch.testing.assert_close(torch.cat(steps, 1), whole[:, 12:], rtol=1e-4, atol=1e-5)
    sample = windowed.features([tokens[0]], FeatureSpec((), (0, 2), "none", Store.all("fp32")), [[0] * 20])[0]
    for layer in (0, 2):
        torch.testing.assert_close(cache.layers[layer].keys[0].transpose(0, 1), sample[f"key.{layer}"], rtol=1e-4, atol=1e-5)


def test_target_is_frozen(target: Target) -> None:
    assert not target.model.training and not any(p.requires_grad for p in target.model.parameters())
    assert target.name == target.folder.name and target.dtype == torch.float32
    assert (target.geometry.num_layers, target.geometry.hidden_size, target.geometry.vocab_size) == (LAYERS, 48, 211)


@pytest.mark.parametrize("sharded", [False, True])
def test_parts_equal_the_model(target: Target, sharded: bool, tmp_path: Path) -> None:
    folder = target.folder
    if sharded:
        folder = tmp_path / "sharded"
        target.model.save_pretrained(folder, max_shard_size="60KB")
        assert len(list(folder.glob("*.safetensors"))) > 2
    parts = load_parts(folder)
    assert torch.equal(parts.embedding, target.model.get_input_embeddings().weight)
    assert torch.equal(parts.head, target.model.get_output_embeddings().weight)
    assert torch.equal(parts.norm_weight, target.model.model.norm.weight)
    assert (parts.head is parts.embedding) == (target.geometry.family == "llama")
    expected = target.layers[2].state_dict()
    assert parts.layer(2).keys() == expected.keys() and all(torch.equal(parts.layer(2)[name], expected[name]) for name in expected)
    assert load_layer(folder, 2, dtype=torch.bfloat16)["self_attn.q_proj.weight"].dtype == torch.bfloat16
    with pytest.raises(ConfigError, match="no layer 5"):
        load_layer(folder, LAYERS)


def copied(folder: Path, to: Path) -> Path:
    shutil.copytree(folder, to)
    return to


def test_weights_digest_follows_the_bytes(folders: dict[str, Path], tmp_path: Path) -> None:
    twin = copied(folders["Qwen3"], tmp_path / "twin")
    assert weights_digest(twin) == weights_digest(folders["Qwen3"]) != weights_digest(folders["Qwen2"])
    with open(twin / "model.safetensors", "r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)
        file.seek(-1, 2)
        file.write(bytes([last[0] ^ 1]))
    changed = weights_digest(twin)
    assert changed != weights_digest(folders["Qwen3"])
    (twin / "config.json").write_text((twin / "config.json").read_text() + "\n")
    assert weights_digest(twin) != changed


def test_tokenizer_digest_follows_the_template(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    bare = tokenizer_digest(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("x")
    assert tokenizer_digest(tmp_path) != bare


def refused(path: Path, match: str, **options: str) -> None:
    with pytest.raises(ConfigError, match=match):
        Target.load(TargetConfig(path=path, dtype="fp32", **{"device": "cpu", **options}))  # type: ignore[arg-type]


def test_bad_folders_are_refused_by_name(folders: dict[str, Path], tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", "no such folder")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "no config.json")
    other = tmp_path / "gpt2"
    transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=20).save_pretrained(other)
    refused(other, "architecture 'gpt2' is not supported")
    strange = copied(folders["Qwen3"], tmp_path / "strange")
    (strange / "config.json").write_text(json.dumps({"model_type": "not_a_model"}))
    refused(strange, "does not describe a model")
    bare = copied(folders["Qwen3"], tmp_path / "bare")
    (bare / "model.safetensors").rename(bare / "pytorch_model.bin")
    refused(bare, "neither model.safetensors")
    with pytest.raises(ConfigError, match="no tokenizer"):
        load_tokenizer(folders["Qwen3"])
    assert load_geometry(folders["Qwen3"]).qk_norm


def test_bad_weights_are_refused_by_name(folders: dict[str, Path], tmp_path: Path) -> None:
    cut = copied(folders["Qwen3"], tmp_path / "cut")
    (cut / "model.safetensors").write_bytes((cut / "model.safetensors").read_bytes()[:-100])
    refused(cut, "not readable as safetensors")
    partial = copied(folders["Qwen3"], tmp_path / "partial")
    tensors = load_file(partial / "model.safetensors")
    del tensors["model.layers.3.mlp.up_proj.weight"]
    save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
    refused(partial, r"lack.*model\.layers\.3\.mlp\.up_proj\.weight")
    sharded = copied(folders["Qwen3"], tmp_path / "sharded")
    (sharded / "model.safetensors").unlink()
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
    refused(sharded, "names model-1.safetensors, which is not there")
    for text in ("{}", "[]", '{"weight_map": 3}', '{"weight_map": {"a": 3}}'):
        (sharded / "model.safetensors.index.json").write_text(text)
        refused(sharded, r"index\.json: expected a mapping weight_map of tensor names to files")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is there")
def test_cuda_without_a_device_is_refused(folders: dict[str, Path]) -> None:
    refused(folders["Qwen3"], "no CUDA device", device="cuda")
