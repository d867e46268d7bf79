"""Every option of every command, typed, once. Defaults stand here and nowhere else.

A recipe is one YAML file holding a `Recipe`; `extends: other.yaml` (relative to the file) inherits from another.
Precedence: command-line override (`train.optim.lr=1e-3`) > file > default. Each command reads the whole recipe
and uses its own section; paths left empty follow from `work` and `name`. Relative paths are relative to the current
directory, except that of `extends`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from kvshot_ds.errors import ConfigError
from kvshot_ds.options import explain

Dtype = Literal["fp32", "bf16"]


def _layer_ids(layers: tuple[int, ...]) -> tuple[int, ...]:
    if not layers or min(layers) < 0 or len(set(layers)) < len(layers):
        raise ValueError("expected at least one layer, none negative, none twice")
    return layers


Layers = Annotated[tuple[int, ...], AfterValidator(_layer_ids)]


class Section(BaseModel):
    """Base of all sections: unknown fields are errors, values are finite, and immutable once resolved."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


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

    hidden_layers: Layers | Literal["eagle3", "none"] = Field("eagle3", description="0-based layers whose outputs are kept; eagle3 = (1, L//2-1, L-4)")
    kv_layers: Layers | Literal["eagle3", "none"] = Field(
        "eagle3", description="0-based layers whose KV cache is kept; eagle3 = the layers fed by the hidden ones: (2, L//2, L-3)"
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


class HiddenOnlyConfig(Section):
    """EAGLE-3 (arXiv 2503.01840): the drafter reads fused target hidden states, then its own."""

    family: Literal["hidden_only"] = Field("hidden_only", description="hidden-only drafter")
    depth: int = Field(1, ge=1, le=8, description="decoder layers")
    hidden_layers: Layers | Literal["eagle3"] = Field("eagle3", description="target layers whose outputs are fused (0-based); eagle3 = (1, L//2-1, L-4)")


class KVSourceConfig(Section):
    """How the target's KV cache becomes the memory of a draft layer (KVShot, arXiv 2604.26412)."""

    injection: Literal["none", "linear", "linear_rope", "per_layer"] = Field(
        "linear_rope",
        description="none: no target information (control); linear: project rotated keys; linear_rope: un-rotate, project, rotate again; "
        "per_layer: draft layer i reads the KV of the i-th of `layers`, unprojected",
    )
    layers: Layers | Literal["eagle3"] = Field("eagle3", description="target layers whose KV is read (0-based); eagle3 = (2, L//2, L-3)")
    projector_init: Literal["random", "identity_middle", "identity_last"] = Field(
        "identity_middle",
        description="start of the projector; identity_middle passes the middle layer through; identity_last: draft layer i of n passes the i-th of the last n",
    )

    def check_depth(self, depth: int) -> None:
        """Raises ValueError if per_layer does not name one target layer for each of `depth` draft layers."""
        count = 3 if self.layers == "eagle3" else len(self.layers)
        if self.injection == "per_layer" and count != depth:
            raise ValueError(f"kv.injection=per_layer needs one target layer for each draft layer: depth={depth}, but kv.layers={self.layers} names {count}")


class KVOnlyConfig(Section):
    """KVShot KV-only: token embeddings in, the target's KV cache read by cross-attention."""

    family: Literal["kv_only"] = Field("kv_only", description="KV-only drafter")
    depth: int = Field(2, ge=1, le=8, description="decoder layers")
    kv: KVSourceConfig = Field(default_factory=KVSourceConfig, description="memory read by the drafter")

    @model_validator(mode="after")
    def _layer_each(self) -> KVOnlyConfig:
        self.kv.check_depth(self.depth)
        return self


class GateConfig(Section):
    """Gate of the hybrid's delta: h = n + g * W_delta (o - n), g = sigmoid(W_g [n; o; o-n] + b_g)."""

    init: str = Field("random", description="random | bias:<b> (W_g = 0, b_g = b) | zero_delta (W_delta = 0) | identity_delta (W_delta = identity)")

    @model_validator(mode="after")
    def _known(self) -> GateConfig:
        if self.init not in ("random", "zero_delta", "identity_delta") and not re.fullmatch(r"bias:[+-]?\d+(\.\d+)?", self.init):
            raise ValueError(f"gate.init={self.init!r} is none of random, bias:<number>, zero_delta, identity_delta")
        return self


class HybridConfig(Section):
    """KVShot hybrid: EAGLE-3 self path plus the target's KV as a gated delta."""

    family: Literal["hybrid"] = Field("hybrid", description="hybrid drafter")
    depth: int = Field(1, ge=1, le=8, description="decoder layers")
    hidden_layers: Layers | Literal["eagle3"] = Field("eagle3", description="target layers whose outputs are fused (0-based)")
    kv: KVSourceConfig = Field(default_factory=KVSourceConfig, description="memory read by the cross path")
    gate: GateConfig = Field(default_factory=GateConfig, description="the gate")

    @model_validator(mode="after")
    def _reads_kv(self) -> HybridConfig:
        if self.kv.injection == "none":
            raise ValueError("a hybrid needs KV: drafter.kv.injection=none makes it hidden-only; use drafter.family=hidden_only")
        self.kv.check_depth(self.depth)
        return self


DrafterConfig = Annotated[HiddenOnlyConfig | KVOnlyConfig | HybridConfig, Field(discriminator="family")]


class InitConfig(Section):
    """What the drafter's weights start from. Say in every comparison which was used."""

    layers: Literal["random", "target"] = Field(
        "random",
        description="random: N(0, 0.02), norms 1; target: the target's last layers (a cross path: the attention of the layer whose KV its projector passes), "
        "fc passes the highest fused layer",
    )
    head: Literal["random", "target"] = Field("target", description="target: draft head and final norm start from the target's rows")


class ObjectiveConfig(Section):
    """Test-time training (arXiv 2503.01840): the drafter is unrolled over its own hidden states."""

    steps: int = Field(7, ge=1, description="TTT steps K")
    step_decay: float = Field(0.8, gt=0, le=1, description="weight of step k is step_decay**k")
    row_fraction: float = Field(1.0, gt=0, le=1, description="share of supervised rows, in contiguous runs, that is unrolled; all rows still feed the prefix")
    head_chunk: int = Field(1024, ge=1, description="rows that reach the LM head at once [rows]")


Momentum = Annotated[float, Field(ge=0, lt=1)]


class OptimConfig(Section):
    """AdamW with warm-up and cosine."""

    lr: float = Field(1e-3, gt=0, description="peak learning rate")
    betas: tuple[Momentum, Momentum] = Field((0.9, 0.95), description="decay of the first and second moment")
    weight_decay: float = Field(0.0, ge=0, description="decoupled weight decay of matrices")
    warmup_fraction: float = Field(0.05, ge=0, lt=1, description="share of the steps that warm up linearly")
    final_lr_fraction: float = Field(0.05, ge=0, le=1, description="learning rate at the end, as a share of the peak")
    clip: float = Field(0.5, gt=0, description="gradient norm clip")


class TrainConfig(Section):
    """Feature shards in; a trained drafter out."""

    drafter: DrafterConfig = Field(default_factory=HiddenOnlyConfig, description="the drafter")
    init: InitConfig = Field(default_factory=InitConfig, description="starting weights")
    objective: ObjectiveConfig = Field(default_factory=ObjectiveConfig, description="what is optimised")
    optim: OptimConfig = Field(default_factory=OptimConfig, description="optimizer and schedule")
    draft_vocab_size: int = Field(
        32000, ge=2, description="most frequent supervised tokens the drafter may propose; the target's vocabulary size gives the full vocabulary [tokens]"
    )
    epochs: int = Field(1, ge=1, description="passes over the train split")
    max_steps: int = Field(0, ge=0, description="stop after so many optimizer steps; 0 means all epochs")
    conversations_per_step: int = Field(8, ge=1, description="conversations in one optimizer step over all ranks")
    conversations_per_micro_batch: int = Field(1, ge=1, description="conversations in one forward of one rank")
    ds_config: str = Field("zero2_fp32", description="name of a file in ds_configs/ or a path: ZeRO stage and precision")
    data_workers: int = Field(1, ge=0, description="loader processes of one rank")
    log_every: int = Field(10, ge=1, description="optimizer steps between TensorBoard points")
    checkpoint_every: int = Field(200, ge=1, description="optimizer steps between checkpoints")
    keep_checkpoints: int = Field(2, ge=1, description="newest checkpoints kept")
    threads_per_rank: int = Field(0, ge=0, le=1024, description="CPU threads of one rank; 0 leaves torch's choice")
    seed: int = Field(0, ge=0, lt=1 << 63, description="seed of weights and data order")
    verify_shards: bool = Field(True, description="compare every train shard with its checksum once, before the first step")

    @field_validator("drafter", mode="before")
    @classmethod
    def _default_family(cls, drafter: Any) -> Any:
        return {"family": HiddenOnlyConfig().family, **drafter} if isinstance(drafter, dict) else drafter

    @model_validator(mode="after")
    def _whole_micro_batches(self) -> TrainConfig:
        if self.conversations_per_step % self.conversations_per_micro_batch:
            step, micro = self.conversations_per_step, self.conversations_per_micro_batch
            raise ValueError(f"conversations_per_step={step} is no multiple of conversations_per_micro_batch={micro}")
        return self


class EvalConfig(Section):
    """Held-out step-wise acceptance of trained drafters."""

    drafters: tuple[Path, ...] = Field((), description="run folders or exported drafter folders; empty means this recipe's own run")
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


class Recipe(Section):
    """All options of all commands."""

    name: str = Field(description="names the run; its outputs go to work/runs/<name>", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    work: Path = Field(description="folder of all outputs")
    prepared: Path | None = Field(None, description="prepared conversations; empty means work/prepared")
    shards: Path | None = Field(None, description="feature shards; empty means work/features")
    target: TargetConfig = Field(description="the frozen model")
    prep: PrepConfig = Field(default_factory=PrepConfig, description="kvshot prep")
    capture: CaptureConfig = Field(default_factory=CaptureConfig, description="kvshot capture")
    train: TrainConfig = Field(default_factory=TrainConfig, description="kvshot train")
    eval: EvalConfig = Field(default_factory=EvalConfig, description="kvshot eval")
    decode: DecodeConfig = Field(default_factory=DecodeConfig, description="kvshot decode")
    report: ReportConfig = Field(default_factory=ReportConfig, description="kvshot report")

    @property
    def prepared_dir(self) -> Path:
        return self.prepared or self.work / "prepared"

    @property
    def shards_dir(self) -> Path:
        return self.shards or self.work / "features"

    @property
    def run_dir(self) -> Path:
        return self.work / "runs" / self.name


class _Loader(yaml.SafeLoader):
    """YAML in which a key given twice is an error, not a silent win of the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [str(key.value) for key, _ in node.value]
        if twice := sorted({key for key in keys if keys.count(key) > 1}):
            raise yaml.constructor.ConstructorError(None, None, f"given twice: {', '.join(twice)}", node.start_mark)
        return super().construct_mapping(node, deep)


def _read(path: Path, seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The YAML mapping of `path` with everything it extends merged beneath it."""
    path = path.resolve()
    if path in seen:
        raise ConfigError(f"{path}: extends itself by way of {' -> '.join(str(p) for p in seen)}")
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)  # noqa: S506 - a SafeLoader
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such recipe" + (f" (extended by {seen[-1]})" if seen else "")) from None
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: not readable as YAML: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: expected a mapping of options, found {type(data).__name__}")
    base = data.pop("extends", None)
    if base is None:
        return data
    return merge(_read(path.parent / str(base), (*seen, path)), data)


def merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`over` laid on `base`, mapping by mapping. A mapping whose `family` changes replaces the other one whole."""
    out = dict(base)
    for key, value in over.items():
        old = out.get(key)
        if isinstance(old, dict) and isinstance(value, dict) and old.get("family", value.get("family")) == value.get("family", old.get("family")):
            value = merge(old, value)
        out[key] = value
    return out


def parse_override(text: str) -> dict[str, Any]:
    """`a.b.c=value` as a nested mapping; the value is read as YAML.

    Raises ConfigError if there is no `=` or an empty field name.
    """
    dotted, sign, raw = text.partition("=")
    fields = dotted.strip().removeprefix("--").split(".")
    if not sign or not all(fields):
        raise ConfigError(f"{text!r}: an override is written section.field=value, for example train.optim.lr=5e-4")
    try:
        value: Any = yaml.safe_load(raw)
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{text!r}: the value is not readable: {error}") from None
    for field in reversed(fields):
        value = {field: value}
    return value


def load_recipe(path: Path, overrides: tuple[str, ...] = ()) -> Recipe:
    """The resolved recipe: defaults, under the file (and what it extends), under the overrides.

    Raises ConfigError naming every offending field.
    """
    flags: dict[str, Any] = {}
    for text in overrides:
        flags = merge(flags, parse_override(text))
    try:
        return Recipe.model_validate(merge(_read(Path(path)), flags))
    except ValidationError as error:
        lines = explain(error, Recipe)
        raise ConfigError(f"{path}: {len(lines)} option(s) cannot be used\n" + "\n".join(f"  {line}" for line in lines)) from None


def dump_recipe(recipe: Recipe) -> str:
    """The resolved recipe as YAML that `load_recipe` reads back to an equal one."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
