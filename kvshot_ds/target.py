"""The frozen target: load it, take exactly the contracted features by hooks, read single weights without building it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast

from kvshot_ds.config import TargetConfig
from kvshot_ds.errors import ConfigError
from kvshot_ds.features.codec import SCALE, best_logits, encode
from kvshot_ds.features.spec import DTYPES, FeatureSpec, scale_group, teacher_rows
from kvshot_ds.files import file_sha256, read_json
from kvshot_ds.geometry import Geometry

# transformers 5.24 renames `past_key_values` (argument and output field) to `cache`; this is the one place that knows.
_CACHE = "cache" if any(f.name == "cache" for f in fields(CausalLMOutputWithPast)) else "past_key_values"
_LOGITS_AT_ONCE = 1 << 25  # elements of one [rows, V] block of logits: 128 MiB in fp32
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


class _KeepLayers(DynamicCache):
    """A cache for one forward from an empty past that keeps the keys and values of `wanted` layers only."""

    def __init__(self, wanted: Iterable[int]) -> None:
        super().__init__()
        self.wanted = frozenset(wanted)
        self.kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if layer_idx in self.wanted:
            self.kept[layer_idx] = (key_states, value_states)
        return key_states, value_states


@dataclass(frozen=True)
class _Forward:
    """What one forward left. hidden: layer -> [B, S, d]. cache: keys and values of the KV layers. queries: layer -> [R, A, D].
    last: with a teacher, the hidden state entering the head at the teacher rows [R, d]; unnormed: the same before the final norm.
    Each tensor lies on the device of its layer."""

    hidden: dict[int, torch.Tensor]
    cache: _KeepLayers
    queries: dict[int, torch.Tensor]
    last: torch.Tensor | None = None
    unnormed: torch.Tensor | None = None


class _LastLayerDone(Exception):
    """Leaves a forward after the last layer whose output is needed."""


class Target:
    """A Hugging Face causal LM, frozen, in eval mode, with its tokenizer and geometry.

    model: the HF model. geometry: its shapes. name: the folder's name. folder, dtype: how it was loaded. device: of its inputs; with
    target.device_map=auto its layers lie on several.
    """

    def __init__(self, model: Any, geometry: Geometry, folder: Path, trust_remote_code: bool = False) -> None:
        self.model = model.eval().requires_grad_(False)
        self.geometry = geometry
        self.folder = folder
        self.name = folder.name
        self.device = _input_device(model)
        self.dtype: torch.dtype = model.dtype
        self._trust_remote_code = trust_remote_code

    @classmethod
    def load(cls, config: TargetConfig) -> Target:
        """Loads the folder `config.path`. Raises ConfigError: no folder, no config.json, an architecture that is not
        supported, weights missing, incomplete or unreadable, no accelerator although one is asked for, layers that fit on no device."""
        from safetensors import SafetensorError
        from transformers import AutoModelForCausalLM

        folder = Path(config.path).resolve()
        geometry = load_geometry(folder, config.trust_remote_code)
        weight_files(folder)
        if config.device == "cuda" and not torch.cuda.is_available():
            raise ConfigError("target.device=cuda: torch sees no CUDA device here; use target.device=auto or cpu")
        device = "cuda" if config.device != "cpu" and torch.cuda.is_available() else "cpu"
        spread = config.device_map == "auto" and device == "cuda"
        loader: Any = AutoModelForCausalLM  # its stub knows one return value only
        try:
            model, info = loader.from_pretrained(
                folder,
                dtype=DTYPES[config.dtype],
                trust_remote_code=config.trust_remote_code,
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
                device_map="auto" if spread else None,
            )
        except (OSError, SafetensorError, ValueError, RuntimeError) as error:
            raise ConfigError(f"target.path={config.path}: the weights do not load: {error}") from None
        absent = sorted(info["missing_keys"]) + sorted(str(key) for key in info["mismatched_keys"])
        if absent:  # transformers would leave these at random values with no more than a warning
            raise ConfigError(f"target.path={config.path}: the weights lack, or hold in another shape, {len(absent)} tensor(s): {', '.join(absent[:5])}")
        return cls(model if spread else model.to(device), geometry, folder, config.trust_remote_code)

    @cached_property
    def digest(self) -> str:
        """`weights_digest` of the folder, computed at first use."""
        return weights_digest(self.folder)

    @cached_property
    def tokenizer(self) -> Any:
        """The folder's tokenizer, loaded at first use. Raises ConfigError if it has none."""
        return load_tokenizer(self.folder, self._trust_remote_code)

    @property
    def layers(self) -> torch.nn.ModuleList:
        return self.model.model.layers

    def new_cache(self) -> DynamicCache:
        """An empty cache for decoding; `cache.layers[l].keys` and `.values` are [B, G, T, D]."""
        return DynamicCache()  # without the config: a window as long as the context would make it drop the oldest position

    @torch.inference_mode()
    def forward(self, tokens: torch.Tensor, cache: Cache | None = None, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        """Logits [B, N, V] of `tokens` [B, N], which follow what `cache` holds (and are appended to it)."""
        return self.model(tokens, attention_mask=attention_mask, use_cache=cache is not None, **{_CACHE: cache}).logits

    def last_hidden(self, tokens: torch.Tensor, cache: Cache, positions: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """States entering the head [B, N, d] of `tokens` [B, N] at `positions` [B, N]. mask [B, 1, N, T] bool: the keys each
        sees of those that `cache` returns; None: causal from an empty cache, everything for one token."""
        return self.model.model(tokens, attention_mask=mask, position_ids=positions, use_cache=True, **{_CACHE: cache}).last_hidden_state

    def head(self, states: torch.Tensor) -> torch.Tensor:
        """Logits [..., V] of the states entering the head [..., d]."""
        return self.model.get_output_embeddings()(states)

    @contextmanager
    def watch(self, layers: Iterable[int]) -> Iterator[dict[int, torch.Tensor]]:
        """While the context is open, every forward of the model leaves the outputs of `layers` in the yielded dict:
        layer -> [B, N, d] on `device`, those of the latest forward. Works under `generate` and with any cache."""
        with _recording({layer: self.layers[layer] for layer in layers}, lambda output: output.to(self.device)) as outputs:
            yield outputs

    @contextmanager
    def _watch_queries(self, layers: Iterable[int], rows: torch.Tensor) -> Iterator[dict[int, torch.Tensor]]:
        """As `watch`, for the un-rotated queries of `layers` at `rows` [R] of the flattened batch: layer -> [R, A, D]."""

        g = self.geometry
        name = "q_proj" if not g.qk_norm else "q_layernorm" if g.layer_norm else "q_norm"

        def chosen(output: torch.Tensor) -> torch.Tensor:  # [B, S, A·D] of a q-projection, [B, S, A, D] of a q-norm, [B, A, S, D] of a q-layernorm
            by_token = output.transpose(1, 2) if name == "q_layernorm" else output
            return by_token.flatten(0, 1)[rows.to(output.device)].view(len(rows), g.heads, g.head_dim)

        with _recording({layer: getattr(self.layers[layer].self_attn, name) for layer in layers}, chosen) as queries:
            yield queries

    @torch.inference_mode()
    def features(
        self, tokens: Sequence[torch.Tensor | Sequence[int]], spec: FeatureSpec, turns: Sequence[npt.NDArray[np.int32] | torch.Tensor | Sequence[int]]
    ) -> list[dict[str, torch.Tensor]]:
        """One forward over a right-padded batch of conversations; per conversation the tensors of spec.py's table as they are stored
        (codec.py), on the CPU.

        tokens, turns: per conversation S token ids and S turn numbers. Padding stands after every real token, so the causal
        mask alone keeps it out of what is returned. The forward ends after the last layer that `spec` needs.
        """
        lengths = [len(t) for t in tokens]
        ids = torch.zeros(len(tokens), max(lengths), dtype=torch.long)
        for row, sequence in enumerate(tokens):
            ids[row, : lengths[row]] = torch.as_tensor(sequence)
        turn = [torch.as_tensor(t, dtype=torch.int32) for t in turns]
        samples = [{"tokens": ids[row, :n].int(), "turn": turn[row]} for row, n in enumerate(lengths)]
        rows = [torch.from_numpy(teacher_rows(t.numpy())) for t in turn]
        counts = [len(r) for r in rows]
        found = self._run(ids.to(self.device), spec, torch.cat([r + row * ids.shape[1] for row, r in enumerate(rows)]))

        def keep(key: str, values: torch.Tensor, parts: Callable[[torch.Tensor], Sequence[torch.Tensor]]) -> None:
            storage = spec.store.of(key)
            stored = (values,) if storage is None else encode(values, storage, scale_group(key, self.geometry))
            for name, tensor in zip((key, f"{key}{SCALE}"), stored, strict=False):
                if tensor is not None:
                    for sample, part in zip(samples, parts(tensor.cpu()), strict=True):
                        sample[name] = part.contiguous()

        def share(key: str, batch: torch.Tensor) -> None:  # [B, S_max, ...]
            keep(key, batch.flatten(0, 1), lambda x: [row[:n] for row, n in zip(x.view(*batch.shape[:2], *x.shape[1:]), lengths, strict=True)])

        def share_rows(key: str, joined: torch.Tensor) -> None:  # [R of all conversations, ...]
            keep(key, joined, lambda x: x.split(counts))

        for layer in spec.hidden_layers:
            share(f"hidden.{layer}", found.hidden.pop(layer))
        for layer in spec.kv_layers:
            keys, values = found.cache.kept.pop(layer)
            share(f"key.{layer}", keys.transpose(1, 2))
            share(f"value.{layer}", values.transpose(1, 2))
        for layer in spec.query_layers:
            share_rows(f"query.{layer}", found.queries.pop(layer))
        for key, tensor in self._teacher(found, spec).items():
            share_rows(key, tensor)
        return samples

    def _run(self, ids: torch.Tensor, spec: FeatureSpec, rows: torch.Tensor) -> _Forward:
        """One forward over `ids` [B, S], no further than `spec` needs; queries and teacher at `rows` [R] of the flattened batch."""
        cache, last = _KeepLayers(spec.kv_layers), self.geometry.num_layers - 1
        unnormed = spec.teacher == "last_hidden_unnormed"
        watched = {layer: self.layers[layer] for layer in (*spec.hidden_layers, *((last,) if unnormed else ()))}
        with _recording(watched) as hidden, self._watch_queries(spec.query_layers, rows) as queries:

            def at_rows(states: torch.Tensor) -> torch.Tensor:
                return states.flatten(0, 1)[rows.to(states.device)]

            if spec.teacher != "none":
                end = at_rows(self.model.model(ids, use_cache=True, **{_CACHE: cache}).last_hidden_state)
                return _Forward(hidden, cache, queries, end, at_rows(hidden[last]) if unnormed else None)
            needed = spec.hidden_layers + spec.kv_layers + spec.query_layers
            if not needed:
                return _Forward(hidden, cache, queries)

            def leave(*_: Any) -> None:
                raise _LastLayerDone

            handle = self.layers[max(needed)].register_forward_hook(leave)
            try:
                self.model.model(ids, use_cache=True, **{_CACHE: cache})
            except _LastLayerDone:
                return _Forward(hidden, cache, queries)
            finally:
                handle.remove()
        raise AssertionError("a forward ran past its last needed layer")

    def _teacher(self, found: _Forward, spec: FeatureSpec) -> dict[str, torch.Tensor]:
        """The teacher's tensors at the R rows of `found`, by key, in the order of spec.py's table. A block of rows at a time reaches
        the head, so that [rows, V] logits never grow with the batch."""
        if found.last is None:
            return {}
        head, k = self.model.get_output_embeddings(), spec.teacher_k
        blocks = [(torch.empty(0, k, dtype=torch.int32), torch.empty(0, k), torch.empty(0, dtype=torch.int32), torch.empty(0))]
        for block in found.last.split(max(1, _LOGITS_AT_ONCE // self.geometry.vocab_size)) if len(found.last) else ():
            logits = head(block).float()
            lse = torch.logsumexp(logits, -1)
            ids, best = best_logits(logits, k)
            blocks.append((ids.int().cpu(), (best - lse[:, None]).cpu(), logits.argmax(-1).int().cpu(), lse.cpu()))
        ids, logp, argmax, lse = (torch.cat(parts) for parts in zip(*blocks, strict=True))
        match spec.teacher:
            case "top_k":
                signal = {"teacher.topk_ids": ids, "teacher.topk_logp": logp}
            case "last_hidden_unnormed":
                assert found.unnormed is not None
                signal = {"teacher.unnormed": found.unnormed}
            case _:
                signal = {"teacher.hidden": found.last}
        return signal | {"teacher.argmax": argmax, "teacher.lse": lse}


def _input_device(model: Any) -> torch.device:
    """Where the model takes its input: the device of its embedding, also if accelerate holds the weights elsewhere until they are used."""
    hook = getattr(model.get_input_embeddings(), "_hf_hook", None)
    device = getattr(hook, "execution_device", None)
    return model.device if device is None else torch.device(device)


@contextmanager
def _recording(
    modules: Mapping[int, torch.nn.Module], keep: Callable[[torch.Tensor], torch.Tensor] = lambda output: output
) -> Iterator[dict[int, torch.Tensor]]:
    """While the context is open, what `keep` makes of the latest output of each module, under the module's number."""
    outputs: dict[int, torch.Tensor] = {}

    def record(number: int) -> Any:
        def hook(_module: Any, _args: Any, output: Any) -> None:
            outputs[number] = keep(output[0] if isinstance(output, tuple) else output)

        return hook

    handles = [module.register_forward_hook(record(number)) for number, module in modules.items()]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


def load_geometry(folder: Path, trust_remote_code: bool = False) -> Geometry:
    """Geometry of the target in `folder`, from its config.json alone. Raises ConfigError as `Target.load` does."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    folder = Path(folder)
    if not folder.is_dir():
        raise ConfigError(f"target.path={folder}: no such folder; expected a Hugging Face model folder (kvshot target NAME DIR makes one)")
    if not (folder / "config.json").is_file():
        raise ConfigError(f"target.path={folder}: no config.json there; expected a Hugging Face model folder")
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError, StrictDataclassError) as error:
        # the ways in which transformers takes fields of a wrong type; the second line of a StrictDataclassError names the field
        why = " ".join(line.strip() for line in str(error).splitlines()[:2])
        raise ConfigError(f"target.path={folder}: config.json does not describe a model that transformers knows: {why}") from None
    try:
        return Geometry.from_hf(config)
    except ConfigError as error:
        raise ConfigError(f"target.path={folder}: {error}") from None


def load_tokenizer(folder: Path, trust_remote_code: bool = False) -> Any:
    """The tokenizer in `folder`. Raises ConfigError if there is none or it does not load."""
    from transformers import AutoTokenizer

    if not any((Path(folder) / name).is_file() for name in _TOKENIZER_FILES[:3]):  # transformers would make an empty one
        raise ConfigError(f"target.path={folder}: no tokenizer there; expected one of {', '.join(_TOKENIZER_FILES[:3])}")
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"target.path={folder}: the tokenizer does not load: {str(error).splitlines()[0]}") from None


def weight_files(folder: Path) -> dict[str, Path]:
    """Tensor name -> safetensors file, of a single or a sharded checkpoint. Raises ConfigError if there is none or one is missing."""
    from safetensors import SafetensorError, safe_open

    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if single.is_file():
        try:
            with safe_open(single, "pt") as file:
                return dict.fromkeys(file.keys(), single)
        except SafetensorError as error:
            raise ConfigError(f"{single}: not readable as safetensors: {error}") from None
    if not index.is_file():
        raise ConfigError(f"target.path={folder}: neither model.safetensors nor model.safetensors.index.json there; convert the weights to safetensors")
    try:
        found = {name: folder / file for name, file in read_json(index)["weight_map"].items()}
    except (KeyError, TypeError, AttributeError):
        raise ConfigError(f"{index}: expected a mapping weight_map of tensor names to files; the download is damaged") from None
    missing = sorted({path.name for path in found.values() if not path.is_file()})
    if missing:
        raise ConfigError(f"target.path={folder}: {index.name} names {', '.join(missing)}, which is not there; the download is incomplete")
    return found


def weights_digest(folder: Path) -> str:
    """sha256 over config.json and the weight files (names and bytes, in order of name): two folders with the same digest are the
    same target. Reads every byte, about 1 s per 1.5 GB. Raises ConfigError as `weight_files` does."""
    return _digest(folder, ["config.json", *sorted({path.name for path in weight_files(folder).values()})])


def tokenizer_digest(folder: Path) -> str:
    """sha256 over the tokenizer's files and the chat template: the same digest means the same tokens for the same text."""
    return _digest(folder, [name for name in _TOKENIZER_FILES if (folder / name).is_file()])


def _digest(folder: Path, names: list[str]) -> str:
    total = hashlib.sha256()
    for name in names:
        total.update(f"{name}\0{file_sha256(folder / name)}\n".encode())
    return total.hexdigest()


@dataclass(frozen=True)
class TargetParts:
    """What a drafter borrows. embedding [V, d], norm_weight [d] (the final norm, without a LayerNorm's bias), head [V, d]; with tied embeddings
    `head` is the very tensor `embedding`. `layer(l)` reads one decoder layer."""

    folder: Path
    embedding: torch.Tensor
    norm_weight: torch.Tensor
    head: torch.Tensor

    def layer(self, layer: int) -> dict[str, torch.Tensor]:
        """`load_layer` on the same device and in the same dtype."""
        return load_layer(self.folder, layer, self.embedding.device, self.embedding.dtype)


def load_parts(folder: Path, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> TargetParts:
    """Embedding, final norm and head, read from the safetensors files without building the model."""
    names = {"embedding": "model.embed_tokens.weight", "norm_weight": "model.norm.weight", "head": "lm_head.weight"}
    folder = Path(folder)
    files = weight_files(folder)
    if "lm_head.weight" not in files or read_json(folder / "config.json").get("tie_word_embeddings", False):
        del names["head"]
    found = _read_tensors(folder, files, names, device, dtype)
    return TargetParts(folder, found["embedding"], found["norm_weight"], found.get("head", found["embedding"]))


def load_layer(folder: Path, layer: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """The weights of decoder layer `layer` (0-based) by their names below it, such as `self_attn.q_proj.weight`.
    Raises ConfigError if the target has no such layer."""
    files = weight_files(Path(folder))
    names = {match[1]: name for name in files if (match := re.fullmatch(rf"model\.layers\.{layer}\.(.+)", name))}
    if not names:
        raise ConfigError(f"target.path={folder}: the weights hold no layer {layer}")
    return _read_tensors(Path(folder), files, names, device, dtype)


def _read_tensors(folder: Path, files: dict[str, Path], names: dict[str, str], device: torch.device | str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Tensors `names[alias]` under their aliases."""
    from safetensors import safe_open

    missing = [name for name in names.values() if name not in files]
    if missing:
        raise ConfigError(f"target.path={folder}: the weights lack {', '.join(missing)}")
    found: dict[str, torch.Tensor] = {}
    for path in sorted({files[name] for name in names.values()}):
        with safe_open(path, "pt") as file:
            found |= {alias: file.get_tensor(name).to(device, dtype) for alias, name in names.items() if files[name] == path}
    return found
