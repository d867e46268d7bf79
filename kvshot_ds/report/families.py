"""The kinds of drafters as the page shows them: their order, names, one sentence each, and what tells two of a kind apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvshot_ds.config import AnyDrafterConfig, GateConfig, KVSourceConfig, Recipe
from kvshot_ds.report.figures import COLOURS

UNKNOWN = "not recorded"


class Family(NamedTuple):
    """name: as the page writes it. text: what it reads and how it drafts."""

    name: str
    text: str


# In the order of the page, which is the order of colours: each block-wise family stands three places after its counterpart.
FAMILIES = {
    "hidden_only": Family("hidden-only", "reads the target's fused hidden states, then its own, step by step (EAGLE-3, arXiv 2503.01840)"),
    "kv_only": Family("KV-only", "reads token embeddings and, by cross-attention, the target's KV cache, step by step (KVShot, arXiv 2604.26412)"),
    "hybrid": Family("hybrid", "the hidden-only path, to which cross-attention over the target's KV cache adds a gated delta (KVShot, arXiv 2604.26412)"),
    "dflash": Family("DFlash", "proposes a whole block in one forward; the context's keys and values come from fused hidden states (DFlash, arXiv 2602.06036)"),
    "kv_block": Family("KV block", "proposes a whole block in one forward; the context's keys and values come from the target's KV cache"),
    "hybrid_block": Family("hybrid block", "DFlash, to which cross-attention over the target's KV cache adds a gated delta in every layer"),
}
ORDER = tuple(FAMILIES)
COUNTERPARTS = {"dflash": "hidden_only", "kv_block": "kv_only", "hybrid_block": "hybrid"}
NO_TARGET, OWN_KV, CROSS_ONLY, OFFLINE = "no target information", "K and V from hidden states", "KV path alone", "offline"
ANCHORED = "hidden state at step 0 alone"
_CONTROL_TEXTS = {
    NO_TARGET: "control: it is told nothing of the target",
    OWN_KV: "control: keys and values are projected from the target's hidden states, not read from its cache",
    CROSS_ONLY: "control: without the hidden-only self path",
    ANCHORED: "later steps have their token's embedding in the place of a hidden state, so that nothing is handed on",
    OFFLINE: "control: trained on what the target would have given each step, so that errors do not accumulate",
}


@dataclass(frozen=True)
class Drafter:
    """What was trained. init_layers, init_head: what its weights started from, and warm_start, the drafter whose tensors then took their place.
    config: its options, None if they are not on record. offline: trained without drift. parameters: all it holds, a head of its own included."""

    family: str
    depth: int
    injection: str | None
    init_layers: str
    init_head: str
    parameters: int | None = None
    warm_start: str | None = None
    config: AnyDrafterConfig | None = None
    offline: bool = False

    @property
    def family_name(self) -> str:
        return FAMILIES[self.family].name if self.family in FAMILIES else self.family

    @property
    def blockwise(self) -> bool:
        return self.family in COUNTERPARTS

    @property
    def last_hidden(self) -> bool:
        """Reads the last layer's hidden state alone, as multi-token prediction does."""
        return getattr(self.config, "hidden_layers", None) == "last"

    @property
    def controls(self) -> frozenset[str]:
        """In what it is a control of other drafters, or departs from its family; empty for what does neither."""
        found = {
            NO_TARGET: self.injection == "none",
            OWN_KV: self.injection == "hidden_to_kv",
            CROSS_ONLY: bool(getattr(self.config, "cross_only", False)),
            ANCHORED: getattr(self.config, "carry", "own") == "none",
            OFFLINE: self.offline,
        }
        return frozenset(name for name, is_one in found.items() if is_one)

    @property
    def label(self) -> str:
        """What tells it from others: family, depth, and the options that are its own."""
        kv, block = getattr(self.config, "kv", None), getattr(self.config, "block_size", None)
        parts = [f"{self.family_name}, last layer" if self.last_hidden else self.family_name, f"depth {self.depth}"]
        parts += [self.injection] if self.injection else []
        parts += _projector_words(kv) if kv else []
        gate = getattr(self.config, "gate", None)
        parts += [_gate_words(gate)] if gate and CROSS_ONLY not in self.controls else []
        parts += [f"blocks of {block}"] if block else []
        return " · ".join([*parts, *(name for name in (CROSS_ONLY, ANCHORED, OFFLINE) if name in self.controls)])

    @property
    def text(self) -> str:
        """One sentence on what it is, without a full stop."""
        sentence = FAMILIES[self.family].text if self.family in FAMILIES else ""
        extra = ["of the target it reads the last layer's hidden state alone"] if self.last_hidden else []
        return "; ".join(filter(None, [sentence, *extra, *(text for name, text in _CONTROL_TEXTS.items() if name in self.controls)]))


def _projector_words(kv: KVSourceConfig) -> list[str]:
    return ([f"{kv.projector} projector"] if kv.projector != "linear" else []) + (["QK-norm"] if kv.qk_norm else [])


def _gate_words(gate: GateConfig) -> str:
    schedule = [f"held open for {gate.open_steps} steps"] if gate.open_steps else []
    schedule += [f"floor {gate.floor:g} over {gate.floor_steps} steps"] if gate.floor_steps else []
    return ", ".join(["no gate" if gate.kind == "none" else f"gate {gate.kind}", gate.init, *schedule])


def drafter_of(recipe: Recipe) -> Drafter:
    """The drafter that a run's resolved recipe trains, before anything is measured of it."""
    drafter, init = recipe.train.drafter, recipe.train.init
    kv = getattr(drafter, "kv", None)
    injection = None if kv is None else kv.injection
    warm, offline = str(init.warm_start) if init.warm_start else None, recipe.train.objective.drift == "offline"
    return Drafter(drafter.family, drafter.depth, injection, init.layers, init.head, None, warm, drafter, offline)


def styles(drafters: Sequence[Drafter | None]) -> list[int]:
    """The style of each run: its colour is its family's (style modulo the number of colours); runs of one colour differ in dash and marker.
    What has no known family takes its place beside the first."""
    used = [0] * COLOURS
    out = []
    for d in drafters:
        colour = ORDER.index(d.family) % COLOURS if d and d.family in ORDER else 0
        out.append(colour + COLOURS * used[colour])
        used[colour] += 1
    return out


def rank(d: Drafter | None) -> tuple[bool, int, int, bool, int]:
    """Families in the order the page explains them; controls after what they control, and what reads the last layer alone after the others."""
    if d is None:
        return (True, 0, 0, False, 0)
    return (False, ORDER.index(d.family) if d.family in ORDER else len(ORDER), len(d.controls), d.last_hidden, d.depth)
