"""Warm start: tensors of a trained drafter as the starting weights of another one, of any family."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import torch

from kvshot_ds.drafters.base import Drafter
from kvshot_ds.drafters.build import DrafterInfo, find_drafter, read_info, read_tensors
from kvshot_ds.drafters.cost import weightless
from kvshot_ds.drafters.projector import KVSource
from kvshot_ds.errors import ConfigError, KvshotError
from kvshot_ds.files import file_sha256

VOCABULARY = ("d2t", "t2d")  # never taken: the draft vocabulary is chosen from the training data
HEAD = "lm_head.weight"  # its rows are those of the draft vocabulary


class ShapeDiffers(NamedTuple):
    """A tensor both have, in another shape."""

    name: str
    source: tuple[int, ...]
    drafter: tuple[int, ...]


class Partial(NamedTuple):
    """A tensor of which `rows` of `of` rows were taken; the other rows keep their start."""

    name: str
    rows: int
    of: int


@dataclass(frozen=True)
class WarmReport:
    """What a warm start did with every tensor that its patterns choose. Names are ascending.

    taken: whole. partial: some rows. shape_differs: not taken. not_in_source: of the drafter, absent from the source.
    not_in_drafter: of the source, unused. not_chosen: tensors both have that no pattern matches. notes: what differs
    between the drafters although the tensors fit. digest: sha256 of the source's weights.
    """

    source: Path
    digest: str
    taken: tuple[str, ...]
    partial: tuple[Partial, ...]
    shape_differs: tuple[ShapeDiffers, ...]
    not_in_source: tuple[str, ...]
    not_in_drafter: tuple[str, ...]
    not_chosen: tuple[str, ...]
    notes: tuple[str, ...]

    def lines(self) -> list[str]:
        """For a person: a heading, then one line for each kind that occurs."""
        out = [f"warm start from {self.source}: {len(self.taken) + len(self.partial)} tensors taken"]
        out += [f"  taken in part: {p.name}, {p.rows:,} of {p.of:,} rows (target ids that both draft vocabularies hold)" for p in self.partial]
        out += [f"  not taken, other shape: {s.name}, there {list(s.source)}, here {list(s.drafter)}" for s in self.shape_differs]
        kinds = {"keep their start, not in the source": self.not_in_source, "unused, not in this drafter": self.not_in_drafter, "not chosen": self.not_chosen}
        out += [f"  {what}: {', '.join(_grouped(names))}" for what, names in kinds.items() if names]
        return out + [f"  note: {note}" for note in self.notes]

    def to_json(self) -> dict[str, Any]:
        return {
            "source": str(self.source),
            "digest": self.digest,
            "taken": list(self.taken),
            "partial": [p._asdict() for p in self.partial],
            "shape_differs": [{"name": s.name, "source": list(s.source), "drafter": list(s.drafter)} for s in self.shape_differs],
            "not_in_source": list(self.not_in_source),
            "not_in_drafter": list(self.not_in_drafter),
            "not_chosen": list(self.not_chosen),
            "notes": list(self.notes),
        }


def source_digest(source: Path) -> str:
    """WarmReport.digest of a warm start from `source`, a run or drafter folder; "" if no drafter is there."""
    try:
        return file_sha256(find_drafter(source) / "model.safetensors")
    except KvshotError:
        return ""


@torch.no_grad()
def warm_start(drafter: Drafter, source: Path, patterns: tuple[str, ...], target_digest: str) -> WarmReport:
    """Replaces `drafter`'s tensors by those of the drafter in `source` (a run or drafter folder) that have their name and shape
    and match one of the `patterns` (fnmatch). The draft vocabulary must be set: rows of the head are matched by target id.

    Raises ConfigError if the source belongs to another target, a pattern chooses no tensor that both have, or nothing is
    taken; KvshotError if there is no readable drafter in `source`.
    """
    folder = find_drafter(Path(source))
    info = read_info(folder)
    _check_target(folder, info, drafter, target_digest)
    theirs = read_tensors(folder)
    ids, source_ids = drafter.draft_ids.cpu(), _draft_ids(folder, theirs)
    own = {k: v for k, v in drafter.state_dict(keep_vars=True).items() if k not in VOCABULARY}
    theirs = {k: v for k, v in theirs.items() if k not in VOCABULARY}
    for pattern in patterns:
        _check_pattern(pattern, folder, own.keys(), theirs.keys())

    def chosen(names: Iterable[str]) -> list[str]:
        return sorted(name for name in names if any(fnmatchcase(name, p) for p in patterns))

    taken, partial, differs = [], [], []
    for name in chosen(own.keys() & theirs.keys()):
        if name == HEAD:
            rows = _take_rows(own[name], ids, theirs[name], source_ids)
            if rows == len(ids):
                taken.append(name)
            else:
                partial.append(Partial(name, rows, len(ids)))
        elif own[name].shape == theirs[name].shape:
            own[name].copy_(theirs[name])
            taken.append(name)
        else:
            differs.append(ShapeDiffers(name, tuple(theirs[name].shape), tuple(own[name].shape)))
    report = WarmReport(
        source=folder,
        digest=file_sha256(folder / "model.safetensors"),
        taken=tuple(taken),
        partial=tuple(partial),
        shape_differs=tuple(differs),
        not_in_source=tuple(chosen(own.keys() - theirs.keys())),
        not_in_drafter=tuple(chosen(theirs.keys() - own.keys())),
        not_chosen=tuple(sorted((own.keys() & theirs.keys()) - set(chosen(own)))),
        notes=_notes(drafter, info),
    )
    if not taken and not any(p.rows for p in partial):
        raise ConfigError("init.warm_start takes nothing; choose another source, or leave it out\n" + "\n".join(report.lines()))
    return report


def _check_target(folder: Path, info: DrafterInfo, drafter: Drafter, target_digest: str) -> None:
    """Raises ConfigError if the source drafter belongs to another target: its weights mean something else there.

    With the same target the geometries may still differ: an imported drafter has heads of its own.
    """
    if info.target_digest == target_digest:
        return
    there, here = info.geometry.to_json(), drafter.g.to_json()
    differ = [f"{k} {there[k]} instead of {here[k]}" for k in here if there[k] != here[k]]
    what = ", ".join([*differ, f"digest {info.target_digest[:12]} instead of {target_digest[:12]}"])
    raise ConfigError(f"init.warm_start={folder} was trained against another target, {info.target_name!r} ({what}); name a drafter of this recipe's target")


def _check_pattern(pattern: str, folder: Path, own: Iterable[str], theirs: Iterable[str]) -> None:
    """Raises ConfigError, naming close names, if `pattern` matches no tensor that both drafters have."""
    here, there = (sorted(name for name in names if fnmatchcase(name, pattern)) for names in (own, theirs))
    if set(here) & set(there):
        return
    if any(fnmatchcase(name, pattern) for name in VOCABULARY):
        why = "the draft vocabulary is never taken, it is chosen from the training data"
    elif there:
        why = f"the source has {', '.join(_grouped(there))}, this drafter does not"
    elif here:
        why = f"this drafter has {', '.join(_grouped(here))}, the source does not"
    else:
        both = sorted(set(own) & set(theirs))
        close = difflib.get_close_matches(pattern, both, n=3, cutoff=0.5) or _grouped(both)
        why = f"no tensor has such a name; close ones: {', '.join(close)}"
    raise ConfigError(f"init.tensors: {pattern!r} takes nothing from {folder}: {why}")


def _take_rows(own: torch.Tensor, ids: torch.Tensor, theirs: torch.Tensor, source_ids: torch.Tensor) -> int:
    """Copies the rows of theirs [V_s, d] to those of own [V_d, d] that propose the same target id. Returns how many."""
    ascending, order = source_ids.sort()
    at = torch.searchsorted(ascending, ids).clamp_max_(len(order) - 1)
    shared = ascending[at] == ids
    own[shared.to(own.device)] = theirs[order[at[shared]]].to(own)
    return int(shared.sum())


def _draft_ids(folder: Path, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """Target ids of the source's draft vocabulary [V_s]."""
    if "d2t" not in tensors or tensors["d2t"].ndim != 1 or (HEAD in tensors and len(tensors[HEAD]) != len(tensors["d2t"])):
        raise KvshotError(f"{folder}/model.safetensors: expected d2t, one entry for each row of {HEAD}; copy the drafter again, or train it again")
    return tensors["d2t"] + torch.arange(len(tensors["d2t"]))


def _notes(drafter: Drafter, info: DrafterInfo) -> tuple[str, ...]:
    """What the tensors' shapes do not tell: an imported drafter's own rotary embedding, projections that read other target layers."""
    there, here = info.geometry.to_json(), drafter.g.to_json()
    notes = [f"{k} of the source is {there[k]}, of this drafter {here[k]}" for k in here if there[k] != here[k]]
    source, own = _reads(weightless(info.config, info.geometry, info.draft_vocab_size)), _reads(drafter)
    notes += [f"{what}: the source {value}, this drafter {own[what]}" for what, value in source.items() if what in own and own[what] != value]
    return tuple(notes)


def _reads(drafter: Drafter) -> dict[str, object]:
    """What the inputs of the drafter's projections mean; only what the drafter has."""
    source = getattr(drafter, "source", None)
    out: dict[str, object] = {
        "hidden states of layers, in the order of fc": getattr(drafter, "hidden_layers", ()),
        "next step's hidden state normed": getattr(drafter, "norm_output", None),
        "a step receives the hidden state before it": getattr(drafter, "carries", None),
        "residual of the first layer normed": getattr(drafter, "norm_before_residual", None),
    }
    if isinstance(source, KVSource) and source.layers:
        out |= {"target layers, in the order of the projector": source.layers, "injection": source.config.injection}
    return {what: value for what, value in out.items() if value not in ((), None)}


def _grouped(names: Iterable[str]) -> list[str]:
    """Names with what they share folded: layers.0.mlp.up_proj.weight -> layers.0.mlp.*"""
    return list(dict.fromkeys(f"{'.'.join(name.split('.')[:3])}.*" if name.count(".") > 3 else name for name in names))
