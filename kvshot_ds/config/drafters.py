"""The families of drafters and what each can be asked for. Impossible combinations are errors here."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from kvshot_ds.config.base import Layers, Section

HiddenLayers = Layers | Literal["eagle3", "last", "all"]
_HIDDEN_LAYERS = "target layers whose outputs are fused (0-based); eagle3 = (1, L//2-1, L-4); last = (L-1,), as multi-token prediction has it; or all"


class HiddenOnlyConfig(Section):
    """EAGLE-3 (arXiv 2503.01840): the drafter reads fused target hidden states, then its own."""

    family: Literal["hidden_only"] = Field("hidden_only", description="hidden-only drafter")
    depth: int = Field(1, ge=1, le=8, description="decoder layers")
    hidden_layers: HiddenLayers = Field("eagle3", description=_HIDDEN_LAYERS)
    fc_norm: bool = Field(False, description="EAGLE-3.1 (arXiv 2605.09992): each fused hidden state has an RMSNorm of its own before fc")
    norm_output: bool = Field(False, description="EAGLE-3.1: the next step receives the hidden state after the final norm, not before it")
    norm_before_residual: bool = Field(False, description="the first layer adds its attention to the normed hidden state, as speculators trains it")


class KVSourceConfig(Section):
    """How the target's KV cache becomes the memory of a draft layer (KVShot, arXiv 2604.26412)."""

    injection: Literal["none", "head_concat", "linear", "linear_rope", "per_layer", "hidden_to_kv"] = Field(
        "linear_rope",
        description="none: no target information (control); head_concat: the KV heads of all layers side by side, each with query heads of its own; "
        "linear: project rotated keys; linear_rope: un-rotate, project, rotate again; per_layer: draft layer i reads the KV of the i-th of `layers`, "
        "unprojected; hidden_to_kv: K and V projected from target hidden states instead of the cache (control)",
    )
    layers: Layers | Literal["eagle3", "all"] = Field(
        "eagle3",
        description="target layers whose KV is read (0-based); eagle3 = (2, L//2, L-3); all; "
        "with hidden_to_kv the layers whose outputs are read, and eagle3 = (1, L//2-1, L-4)",
    )
    projector: Literal["linear", "mlp", "mlp_norm"] = Field(
        "linear",
        description="linear: y = W x; mlp: y = W x + W2 silu(W1 x); mlp_norm: y = W x + W2 silu(W1 RMSNorm(x))",
    )
    projector_init: Literal["random", "identity_middle", "identity_last"] = Field(
        "identity_middle",
        description="start of the projector; identity_middle passes the middle layer through; identity_last: draft layer i of n passes the i-th of the last n; "
        "with hidden_to_kv, which has no identity, only with init.layers=target: the target's own projections of that layer",
    )
    qk_norm: bool = Field(
        False,
        description="RMSNorm per head on the cross path's queries and on the projected keys before they are rotated "
        "(linear_rope, hidden_to_kv; with none, on the drafter's own keys)",
    )

    @property
    def projects(self) -> bool:
        """Whether a trained projector stands between the target and the memory."""
        return self.injection in ("linear", "linear_rope", "hidden_to_kv")

    @model_validator(mode="after")
    def _fits_injection(self) -> KVSourceConfig:
        if self.projector != "linear" and not self.projects:
            raise ValueError(
                f"kv.projector={self.projector} has nothing to project with kv.injection={self.injection}; use linear, linear_rope or hidden_to_kv"
            )
        if self.qk_norm and self.injection not in ("none", "linear_rope", "hidden_to_kv"):
            raise ValueError(f"kv.qk_norm norms keys before they are rotated; kv.injection={self.injection} has rotated ones; use linear_rope or hidden_to_kv")
        return self

    def check_depth(self, depth: int) -> None:
        """Raises ValueError if per_layer does not name one target layer for each of `depth` draft layers."""
        count = 3 if self.layers == "eagle3" else len(self.layers)
        if self.injection == "per_layer" and self.layers != "all" and count != depth:
            raise ValueError(f"kv.injection=per_layer needs one target layer for each draft layer: depth={depth}, but kv.layers={self.layers} names {count}")

    def check_given(self, family: str) -> None:
        """Raises ValueError if there is no target information to read."""
        if self.injection == "none":
            raise ValueError(f"drafter.family={family} needs KV; drafter.kv.injection=none takes it away; use family hidden_only, dflash or kv_only")


def _layer_each(config: Any) -> Any:
    """Of every family that reads the target's KV: one target layer for each draft layer, where that is asked for."""
    config.kv.check_depth(config.depth)
    return config


def _given(config: Any) -> Any:
    """Of every family that is nothing without the target's KV."""
    config.kv.check_given(config.family)
    return config


class KVOnlyConfig(Section):
    """KVShot KV-only: token embeddings in, the target's KV cache read by cross-attention."""

    family: Literal["kv_only"] = Field("kv_only", description="KV-only drafter")
    depth: int = Field(2, ge=1, le=8, description="decoder layers")
    kv: KVSourceConfig = Field(default_factory=KVSourceConfig, description="memory read by the drafter")

    _layers = model_validator(mode="after")(_layer_each)


class GateConfig(Section):
    """Gate of the hybrid's delta: h = n + g * W_delta (o - n), g = sigmoid(W_g [n; o; o-n] + b_g)."""

    kind: Literal["elementwise", "per_head", "scalar", "none"] = Field(
        "elementwise", description="one gate for each channel, for each of A groups of d/A channels, for all of them, or none (h = n + W_delta (o - n))"
    )
    init: str = Field("random", description="random | bias:<b> (W_g = 0, b_g = b) | zero_delta (W_delta = 0) | identity_delta (W_delta = identity)")
    open_steps: int = Field(0, ge=0, description="the gate is held open (g = 1) during so many first optimizer steps")
    floor: float = Field(0.0, ge=0, le=1, description="g' = f + (1 - f) g, where f falls linearly from this value to 0 over floor_steps")
    floor_steps: int = Field(0, ge=0, description="optimizer steps, after open_steps, over which the floor falls to 0")

    @property
    def scheduled_steps(self) -> int:
        """Optimizer steps after which the gate is its own."""
        return self.open_steps + self.floor_steps

    def floor_at(self, step: int) -> float:
        """The floor f of g' = f + (1 - f) g at optimizer step `step` (0-based): 1 while held open, then falling, then 0."""
        if step < self.open_steps:
            return 1.0
        return self.floor * max(0.0, 1 - (step - self.open_steps) / self.floor_steps) if self.floor_steps else 0.0

    @model_validator(mode="after")
    def _known(self) -> GateConfig:
        if self.init not in ("random", "zero_delta", "identity_delta") and not re.fullmatch(r"bias:[+-]?\d+(\.\d+)?", self.init):
            raise ValueError(f"gate.init={self.init!r} is none of random, bias:<number>, zero_delta, identity_delta")
        if self.kind == "none" and (self.init.startswith("bias:") or self.scheduled_steps):
            raise ValueError("gate.kind=none has no gate to start, hold open or floor; drop gate.init=bias, open_steps and floor, or choose another kind")
        if (self.floor > 0) != (self.floor_steps > 0):
            raise ValueError(f"gate.floor={self.floor} and gate.floor_steps={self.floor_steps}: a floor needs both")
        return self


class HybridConfig(Section):
    """KVShot hybrid: EAGLE-3 self path plus the target's KV as a gated delta."""

    family: Literal["hybrid"] = Field("hybrid", description="hybrid drafter")
    depth: int = Field(1, ge=1, le=8, description="decoder layers")
    hidden_layers: HiddenLayers = Field("eagle3", description=_HIDDEN_LAYERS)
    fc_norm: bool = Field(False, description="each fused hidden state has an RMSNorm of its own before fc")
    norm_output: bool = Field(False, description="the next step receives the hidden state after the final norm, not before it")
    norm_before_residual: bool = Field(False, description="the first layer adds its attention to the normed hidden state, not to the hidden state itself")
    kv: KVSourceConfig = Field(default_factory=KVSourceConfig, description="memory read by the cross path")
    gate: GateConfig = Field(default_factory=GateConfig, description="the gate")
    cross_only: bool = Field(False, description="leave the self path out: h = o (control)")
    carry: Literal["own", "none"] = Field(
        "own",
        description="what a draft step k >= 1 has in the place of the target's fused hidden state. own: the drafter's own hidden state of the step before, as "
        "EAGLE-3; none: nothing is carried, its token's embedding stands there (the hidden state is an anchor of step 0 alone)",
    )

    _kv_given = model_validator(mode="after")(_given)
    _layers = model_validator(mode="after")(_layer_each)

    @model_validator(mode="after")
    def _something_to_gate(self) -> HybridConfig:
        if self.norm_output and self.carry == "none":
            raise ValueError("norm_output=true norms what a step hands on; with carry=none nothing is handed on")
        if self.cross_only and self.gate != GateConfig():
            raise ValueError("cross_only=true leaves nothing to gate: drop the options of drafter.gate")
        return self


class _BlockConfig(Section):
    """Block-wise drafter: one forward proposes block_size - 1 tokens. Input: the clean anchor token, then mask tokens."""

    depth: int = Field(5, ge=1, le=8, description="decoder layers")
    block_size: int = Field(8, ge=2, description="tokens of a block, the clean first one included; block_size - 1 are proposed")
    mask_token_id: int | None = Field(
        None, ge=0, description="target id whose embedding stands at the masked slots; null: a trained vector of the drafter's own"
    )


class DFlashConfig(_BlockConfig):
    """DFlash (arXiv 2602.06036): keys and values of every layer come from fused target hidden states and from the block itself."""

    family: Literal["dflash"] = Field("dflash", description="block-wise drafter on target hidden states")
    hidden_layers: HiddenLayers | Literal["dflash"] = Field("dflash", description=f"{_HIDDEN_LAYERS}; dflash = as many as draft layers, evenly from 1 to L-3")


class KVBlockConfig(_BlockConfig):
    """Block-wise on the target's KV: the context's keys and values are the target's own (the road map of arXiv 2604.26412)."""

    family: Literal["kv_block"] = Field("kv_block", description="block-wise drafter on the target's KV cache")
    kv: KVSourceConfig = Field(default_factory=KVSourceConfig, description="memory read by every layer")

    _layers = model_validator(mode="after")(_layer_each)


class HybridBlockConfig(_BlockConfig):
    """DFlash injection plus the target's KV as a gated delta in every layer."""

    family: Literal["hybrid_block"] = Field("hybrid_block", description="block-wise drafter on target hidden states, with a gated delta from the KV cache")
    hidden_layers: HiddenLayers | Literal["dflash"] = Field("dflash", description="as for dflash")
    kv: KVSourceConfig = Field(default_factory=KVSourceConfig, description="memory read by the cross path")
    gate: GateConfig = Field(default_factory=GateConfig, description="the gate")

    _kv_given = model_validator(mode="after")(_given)
    _layers = model_validator(mode="after")(_layer_each)


BlockConfig = DFlashConfig | KVBlockConfig | HybridBlockConfig
AnyDrafterConfig = HiddenOnlyConfig | KVOnlyConfig | HybridConfig | DFlashConfig | KVBlockConfig | HybridBlockConfig
DrafterConfig = Annotated[AnyDrafterConfig, Field(discriminator="family")]
