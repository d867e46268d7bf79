"""Public drafters as ours: EAGLE-3 checkpoints in the layouts of their trainers, DFlash checkpoints in the original layout.

Nothing is guessed: a tensor too many or too few, a setting that changes what is computed and that our drafters do not have, and layer ids
that may mean either of two things are errors that name it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from kvshot_ds.drafters.build import FORMAT, DrafterInfo, read_info, save_drafter
from kvshot_ds.drafters.cost import weightless
from kvshot_ds.drafters.foreign import file_digests, named_target, read_weights
from kvshot_ds.drafters.public_config import short
from kvshot_ds.drafters.public_dflash import read_dflash
from kvshot_ds.drafters.public_eagle3 import layout_of, read_eagle3
from kvshot_ds.drafters.public_parts import EMBEDDING, MadeFor, Public
from kvshot_ds.errors import ConfigError
from kvshot_ds.files import read_json
from kvshot_ds.geometry import Geometry
from kvshot_ds.target import load_geometry, load_parts, weights_digest

# Settles what the layer ids of a drafter mean: its two readings -> the drafter with one of them. Raises ConfigError if it cannot.
Settle = Callable[[Public], Public]

_MEASURE = "or have both readings measured on held-out data: --measure RECIPE"
_LAYOUTS = {
    "EAGLE-3, research (SpecForge, ModelOpt)": "architectures [LlamaForCausalLMEagle3]; fc.weight, midlayer.* or layers.*, norm.weight, lm_head.weight, d2t",
    "EAGLE-3, EAGLE repository": "architectures [LlamaForCausalLM]; fc.weight [d, 3d], midlayer.*, norm.weight, lm_head.weight, d2t",
    "EAGLE-3, AngelSlim": "architectures [Eagle3LlamaForCausalLM]; as research, with midlayer.* and embed_tokens.weight",
    "EAGLE-3, speculators": "architectures [Eagle3Speculator], speculators_model_type eagle3, transformer_layer_config; fc.weight, layers.*, embed_tokens",
    "DFlash, original": "architectures [DFlashDraftModel], dflash_config; fc.weight, hidden_norm.weight, layers.*, norm.weight",
}


@dataclass(frozen=True)
class Report:
    """What `import_drafter` did. folder: the drafter folder; parameters: number of weights; dtype: as stored."""

    folder: Path
    format: str
    layout: str
    parameters: int
    dtype: str
    draft_vocab_size: int
    left_out: dict[str, str]
    notes: tuple[str, ...]

    def lines(self) -> list[str]:
        """For the terminal: what was imported, then one line for each thing to know."""
        what = f"{self.format} drafter ({self.layout} layout), {self.parameters / 1e6:.1f} M parameters, {self.dtype}"
        head = f"{what}, draft vocabulary of {self.draft_vocab_size} -> {self.folder}"
        return [head, *(f"left out {name}: {why}" for name, why in self.left_out.items()), *(f"note: {note}" for note in self.notes)]


def read_public(folder: Path, target: Geometry, settle: Settle | None = None) -> Public:
    """The public drafter in `folder` (config.json and safetensors or pytorch_model.bin), made for a target of geometry `target`.

    settle: called where its layer ids have two readings, in doubt or not. Raises ConfigError: not a checkpoint, of an unknown layout, made for
    another target, tensors missing, unexpected or of another shape, settings that our drafters do not have, layer ids in doubt without `settle`.
    """
    folder = Path(folder)
    config = _config(folder)
    weights = read_weights(folder)
    try:
        public = _read(config, weights, target, folder)
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, e['loc']))}={short(e['input'])}: {e['msg']}" for e in error.errors())
        raise ConfigError(f"{folder}/config.json: {problems}") from None
    if settle is not None and public.readings.possible:
        return settle(public)
    if settle is not None:
        why = f"settled by rule ({public.readings.ids})" if public.readings.ids else "not named, so the usual ones are meant"
        return replace(public, notes=(*public.notes, f"the fused layers are {why}: nothing was measured"))
    if public.readings.chosen is None:
        raise ConfigError(f"{public.readings.doubt}; {_MEASURE}")
    return public


def _config(folder: Path) -> dict[str, Any]:
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder}: no config.json there; expected the folder of a public drafter: config.json and its weights")
    config = read_json(folder / "config.json")
    if not isinstance(config, dict):
        raise ConfigError(f"{folder}/config.json: expected an object, found {type(config).__name__}")
    return config


def _read(config: dict[str, Any], weights: dict[str, torch.Tensor], target: Geometry, folder: Path) -> Public:
    names = config.get("architectures") or []
    if "DFlashDraftModel" in names and config.get("speculators_model_type") is None:
        return read_dflash(config, weights, target, folder)
    layout = layout_of(config, weights)
    if layout is None:
        raise ConfigError(_unknown(config, weights, target, f"{folder}/config.json"))
    return read_eagle3(layout, config, weights, target, folder)


def _unknown(config: Mapping[str, Any], weights: Mapping[str, torch.Tensor], target: Geometry, where: str) -> str:
    """What was found and what would have been known, one layout a line."""
    fc = weights.get("fc.weight")
    first = " (it looks like EAGLE-1 or EAGLE-2, which read one hidden state: not among our drafters)"
    hint = first if fc is not None and fc.shape[-1] == 2 * target.hidden_size and "lm_head.weight" not in weights else ""
    lines = [
        f"{where}: a drafter in a layout that is not known here{hint}",
        f"  found architectures: {config.get('architectures')}; model_type: {config.get('model_type')}",
        f"  found in config.json: {_some(config, 40)}",
        f"  found tensors: {_some({f'{name} {list(tensor.shape)}': 0 for name, tensor in sorted(weights.items())}, 12)}",
    ]
    return "\n".join([*lines, *(f"  expected, {layout}: {what}" for layout, what in _LAYOUTS.items())])


def _some(names: Iterable[str], most: int) -> str:
    found = list(names)
    return ", ".join(found[:most]) + (f" and {len(found) - most} more" if len(found) > most else "") or "nothing"


def import_drafter(source: Path, target_folder: Path, out: Path, settle: Settle | None = None) -> Report:
    """Writes the public drafter in `source`, made for the target in `target_folder`, as a drafter folder `out` for eval, decode and warm starts.

    Weights keep their dtype. Raises ConfigError as `read_public` and `load_geometry` do, if the drafter names another target, and if `out`
    holds a config.json already.
    """
    source, target_folder, out = Path(source), Path(target_folder), Path(out)
    if (out / "config.json").exists():
        raise ConfigError(f"{out}: holds a config.json already; name a new folder")
    target, digest = load_geometry(target_folder), weights_digest(target_folder)
    _refuse_ours(source, target, digest)
    public = read_public(source, target, settle)
    made_for = replace(public.made_for, digest=named_target(source))
    public = replace(public, notes=(*public.notes, *_check_made_for(made_for, target_folder, digest, source)))
    if public.embedding is not None:
        public.left_out[EMBEDDING] = _compared(public.embedding, target_folder, public.trained_embedding, source)
    drafter = weightless(public.config, public.geometry, public.draft_vocab_size)
    drafter.load_state_dict(public.tensors, strict=True, assign=True)
    dtype = str(public.dtype).removeprefix("torch.")
    imported = {
        "format": public.format,
        "layout": public.layout,
        "source": source.resolve().name,
        "sha256": file_digests(source),
        "dtype": dtype,
        "layer_ids": public.readings.ids,
        "measured": public.measured,
        "left_out": public.left_out,
        "notes": list(public.notes),
    }
    info = DrafterInfo(public.config, public.geometry, public.draft_vocab_size, target_folder.resolve().name, digest, {"imported": imported})
    save_drafter(out, drafter, info, public.dtype)
    parameters = sum(p.numel() for p in drafter.parameters())
    return Report(out, public.format, public.layout, parameters, dtype, public.draft_vocab_size, public.left_out, public.notes)


def _refuse_ours(source: Path, target: Geometry, digest: str) -> None:
    """Raises ConfigError for a drafter folder of our own, which needs no import; of another target, saying what differs."""
    if not (source / "config.json").is_file() or not str(_config(source).get("format")).startswith(FORMAT.split("/")[0]):
        return
    info = read_info(source)
    if info.target_digest == digest:
        raise ConfigError(f"{source}: a drafter folder of kvshot-ds already, for this target; name it as it is, in eval.drafters or decode.drafters")
    there, here = info.geometry.to_json(), target.to_json()
    shared = ("num_layers", "hidden_size", "vocab_size", *(() if "imported" in info.extra else ("rope",)))  # an imported one has a rope of its own
    differ = [f"{name} {there[name]}, the target's {here[name]}" for name in shared if there[name] != here[name]]
    what = "; ".join(differ) or "other weights or another config.json"
    raise ConfigError(
        f"{source}: a drafter of kvshot-ds for the target {info.target_name!r} (digest {info.target_digest[:12]}), not for the one given "
        f"(digest {digest[:12]}): {what}; name the target it was trained for"
    )


def _check_made_for(made_for: MadeFor, target_folder: Path, digest: str, source: Path) -> tuple[str, ...]:
    """What to note of the target that the checkpoint names. Raises ConfigError if it cannot be the one given."""
    if made_for.digest is not None and made_for.digest != digest:
        raise ConfigError(
            f"{source}: made for a target of weights {made_for.digest[:12]}, but {target_folder} holds weights {digest[:12]}; name the target it was made for"
        )
    own = read_json(target_folder / "config.json").get("architectures")
    if made_for.architectures and own and not set(made_for.architectures) & set(own):
        raise ConfigError(
            f"{source}: made for a target of architectures {list(made_for.architectures)} ({made_for.name}), but {target_folder} holds {own}; "
            "name the target it was made for"
        )
    if made_for.name is None or made_for.digest is not None or Path(made_for.name).name.lower() == target_folder.resolve().name.lower():
        return ()
    return (f"it names the target {made_for.name}; that {target_folder.name} is that one was checked by shapes alone",)


def _compared(own: torch.Tensor, target_folder: Path, trained: bool, source: Path) -> str:
    """Why the checkpoint's embedding [V, d] is left out, after a look at the target's. Raises ConfigError if it was trained and is another."""
    other = int((own != load_parts(target_folder, dtype=own.dtype).embedding).any(-1).sum())
    if not other:
        return "equal to the target's embedding, which is used"
    if trained:
        found = f"{other} of {len(own)} rows of its {EMBEDDING} differ from the target's, and config.json says embed_requires_grad=True"
        raise ConfigError(f"{source}: {found}: a trained embedding of its own is not among our drafters")
    return f"{other} of {len(own)} rows differ from the target's embedding, which is used; an engine that keeps the drafter's own proposes otherwise"
