"""Options of every command but training: target, prep, capture, eval, decode, report."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from kvshot_ds.config.base import Dtype, Layers, Section


class TargetConfig(Section):
    """The frozen model that is to be accelerated."""

    path: Path = Field(description="Hugging Face folder of the target (config.json, safetensors, tokenizer)")
    dtype: Dtype = Field("bf16", description="dtype the target runs in")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="where the target runs; auto takes an accelerator if there is one")
    trust_remote_code: bool = Field(False, description="run code that the target's folder carries")


class SourceConfig(Section):
    """One file of conversations or prompts."""

    path: Path = Field(description="file to read")
    format: Literal["auto", "sharegpt", "messages", "prompts"] = Field(
        "auto",
        description="sharegpt: JSON list or JSONL of {conversations: [{from, value}]}; messages: JSONL of {messages: [{role, content}]}; "
        "prompts: one prompt a line",
    )


class SynthesisConfig(Section):
    """Prompts the target writes itself from an empty user turn (Magpie, arXiv 2406.08464)."""

    count: int = Field(0, ge=0, description="prompts to synthesise")
    max_new_tokens: int = Field(64, ge=1, description="longest prompt [tokens]")
    temperature: float = Field(1.0, gt=0, description="sampling temperature")
    top_p: float = Field(0.95, gt=0, le=1, description="nucleus mass")


class RegenerateConfig(Section):
    """Answers written by the target, so that the drafter learns the target's own distribution."""

    enabled: bool = Field(True, description="replace assistant turns by the target's own answers; prompts without answers need it")
    max_new_tokens: int = Field(160, ge=1, description="longest answer [tokens]")
    temperature: float = Field(0.0, ge=0, description="0 is greedy")
    top_p: float = Field(1.0, gt=0, le=1, description="nucleus mass, when sampling")


class PrepConfig(Section):
    """Conversations or prompts in; cleaned, answered, tokenised conversations with an assistant mask out."""

    sources: tuple[SourceConfig, ...] = Field((), description="files to read, in order")
    synthesis: SynthesisConfig = Field(default_factory=SynthesisConfig, description="prompt synthesis")
    regenerate: RegenerateConfig = Field(default_factory=RegenerateConfig, description="answers by the target")
    max_length: int = Field(2048, ge=8, description="longer conversations are cut here, kept if supervised tokens remain [tokens]")
    heldout_fraction: float = Field(0.1, ge=0, lt=1, description="share of conversations held out, chosen by a stable hash of the conversation")
    batch_size: int = Field(32, ge=1, description="sequences generated together, per worker")
    workers: int = Field(1, ge=1, description="Ray actors generating in parallel, each holding the target")
    cpus_per_worker: float = Field(1, gt=0, description="CPU cores of one worker")
    gpus_per_worker: float = Field(0, ge=0, description="GPUs of one worker")
    seed: int = Field(0, ge=0, lt=1 << 63, description="seed of sampling")

    @model_validator(mode="after")
    def _answers(self) -> PrepConfig:
        if not self.regenerate.enabled and (self.synthesis.count or any(s.format == "prompts" for s in self.sources)):
            raise ValueError("prompts have no answers: regenerate.enabled=false works only with conversations that have them, and synthesis.count=0")
        if self.regenerate.enabled and self.regenerate.max_new_tokens >= self.max_length:
            raise ValueError(f"regenerate.max_new_tokens={self.regenerate.max_new_tokens} leaves no room for a prompt within max_length={self.max_length}")
        return self


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
    teacher: Literal["last_hidden", "none"] = Field(
        "last_hidden", description="teacher signal: the hidden state entering the LM head (after the final norm), arg-max and log-sum-exp of the logits"
    )
    dtype: Dtype = Field("bf16", description="dtype of the stored features")


class CaptureConfig(Section):
    """Prepared conversations in; feature shards out."""

    features: FeatureConfig = Field(default_factory=FeatureConfig, description="what is captured")
    tokens_per_batch: int = Field(4096, ge=1, description="token budget of one forward of the target, padding included [tokens]")
    conversations_per_shard: int = Field(64, ge=1, description="conversations in one tar")
    workers: int = Field(1, ge=1, description="Ray actors, each holding the target")
    cpus_per_worker: float = Field(1, gt=0, description="CPU cores of one worker")
    gpus_per_worker: float = Field(0, ge=0, description="GPUs of one worker")


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


class DecodeConfig(Section):
    """Real speculative decoding on held-out prompts, checked against the target's own generate."""

    drafters: tuple[Path, ...] = Field((), description="run folders or exported drafter folders; empty means this recipe's own run")
    max_prompts: int = Field(20, ge=1, description="held-out prompts decoded")
    max_new_tokens: int = Field(64, ge=1, description="tokens generated for each prompt [tokens]")
    draft_length: int = Field(7, ge=1, description="tokens proposed per round")
    dtype: Dtype = Field("fp32", description="dtype of target and drafter while decoding; the token-for-token check is exact in fp32")


class ReportConfig(Section):
    """One self-contained HTML page of everything measured."""

    title: str = Field("kvshot-ds report", description="heading of the page")
    note: str | None = Field(None, description="what a reader must know of these numbers, shown with them")
    runs: tuple[Path, ...] = Field((), description="run folders shown; empty means every run below work/runs")
