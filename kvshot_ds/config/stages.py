"""Options of every command but preparation and training and decoding: target, capture, eval, report."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from kvshot_ds.config.base import Dtype, Layers, Section, Storage


class TargetConfig(Section):
    """The frozen model that is to be accelerated."""

    path: Path = Field(description="Hugging Face folder of the target (config.json, safetensors, tokenizer)")
    dtype: Dtype = Field("bf16", description="dtype the target runs in")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="where the target runs; auto takes an accelerator if there is one")
    device_map: Literal["none", "auto"] = Field("none", description="auto: spread the layers of one target over all GPUs its worker sees (needs accelerate)")
    trust_remote_code: bool = Field(False, description="run code that the target's folder carries")


class StoreConfig(Section):
    """How features are stored. fp8: e4m3 with one scale per token and head; int8: the same with 255 even steps."""

    hidden: Storage = Field("bf16", description="hidden states, one scale per group of head_dim channels")
    kv: Storage = Field("bf16", description="keys and values")
    query: Storage = Field("bf16", description="queries")
    teacher: Dtype = Field("bf16", description="last hidden state of the teacher, or log-probabilities of its best tokens")


class FeatureConfig(Section):
    """What is captured from the target at every position."""

    hidden_layers: Layers | Literal["eagle3", "last", "all", "none"] = Field(
        "eagle3", description="0-based layers whose outputs are kept; eagle3 = (1, L//2-1, L-4); last = (L-1,)"
    )
    kv_layers: Layers | Literal["eagle3", "all", "none"] = Field(
        "eagle3", description="0-based layers whose KV cache is kept; eagle3 = the layers fed by the hidden ones: (2, L//2, L-3)"
    )
    query_layers: Layers | Literal["eagle3", "all", "none"] = Field(
        "none", description="0-based layers whose queries are kept at the teacher rows, for query distillation and diagnostics; eagle3 = (2, L//2, L-3)"
    )
    teacher: Literal["last_hidden", "last_hidden_unnormed", "top_k", "none"] = Field(
        "last_hidden",
        description="teacher signal at the supervised rows, besides arg-max and log-sum-exp of the logits. last_hidden: the state entering the LM head (after "
        "the final norm); last_hidden_unnormed: the one before that norm; top_k: the best tokens and their log-probabilities",
    )
    teacher_k: int = Field(64, ge=1, description="tokens kept by teacher=top_k")
    store: StoreConfig = Field(default_factory=StoreConfig, description="how each kind of feature is stored")


class CaptureConfig(Section):
    """Prepared conversations in; feature shards out."""

    features: FeatureConfig = Field(default_factory=FeatureConfig, description="what is captured")
    tokens_per_batch: int = Field(4096, ge=1, description="token budget of one forward of the target, padding included [tokens]")
    conversations_per_shard: int = Field(64, ge=1, description="conversations in one tar")
    spool: Path | None = Field(None, description="local folder where a shard is written before it is sent to a shards URL; null: the system's temporary folder")
    workers: int = Field(1, ge=1, description="Ray actors, each holding the target")
    cpus_per_worker: float = Field(1, gt=0, description="CPU cores of one worker")
    gpus_per_worker: float = Field(0, ge=0, description="GPUs of one worker")


class RayConfig(Section):
    """Ranks of one training, placed by Ray."""

    ranks: int = Field(1, ge=1, description="ranks")
    cpus_per_rank: float = Field(1, gt=0, description="CPU cores of one rank")
    gpus_per_rank: float = Field(0, ge=0, description="GPUs of one rank")
    restarts: int = Field(3, ge=0, description="starts again from the newest checkpoint after a worker dies, at most so often")


class EvalConfig(Section):
    """Held-out step-wise acceptance of trained drafters."""

    drafters: tuple[Path, ...] = Field((), description="run folders or exported drafter folders; empty means this recipe's own run")
    steps: int | None = Field(
        None, ge=1, description="draft steps measured; null: train.objective.steps. Beyond what a block-wise drafter proposes, nothing is accepted"
    )
    conversations_per_micro_batch: int = Field(4, ge=1, description="conversations in one forward")
    bootstrap: int = Field(2000, ge=100, description="bootstrap resamples over conversations")
    confidence: float = Field(0.95, gt=0.5, lt=1, description="coverage of the intervals")
    max_conversations: int = Field(0, ge=0, description="evaluate so many held-out conversations; 0 means all")
    seed: int = Field(0, ge=0, lt=1 << 63, description="seed of the bootstrap")
    serving_prompts: int = Field(40, ge=2, description="held-out prompts decoded by kvshot eval --serving-check")
    serving_tolerance: float = Field(
        0.02,
        ge=0,
        description="kvshot eval --serving-check: difference in joint MAT that rounding may make; smaller ones pass, whatever their interval [tokens]",
    )


class ReportConfig(Section):
    """One self-contained HTML page of everything measured."""

    title: str = Field("kvshot-ds report", description="heading of the page")
    note: str | None = Field(None, description="what a reader must know of these numbers, shown with them")
    runs: tuple[Path, ...] = Field((), description="folders of runs and of sweeps shown; empty means every run and every sweep below work")
