"""Options of training: what the drafter starts from, what is optimised, how."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from kvshot_ds.config.base import Section
from kvshot_ds.config.drafters import BlockConfig, DrafterConfig, HiddenOnlyConfig, HybridBlockConfig, HybridConfig, KVSourceConfig


class InitConfig(Section):
    """What the drafter's weights start from. Say in every comparison which was used."""

    layers: Literal["random", "target"] = Field(
        "random",
        description="random: N(0, 0.02), norms 1; target: the target's last layers (a cross path: the attention of the layer whose KV its projector passes), "
        "fc passes the highest fused layer; not for targets with LayerNorms (stablelm)",
    )
    head: Literal["random", "target"] = Field(
        "target",
        description="target: draft head and final norm (of a LayerNorm its weight alone) start from the target's rows; "
        "block-wise drafters keep the target's head frozen",
    )
    warm_start: Path | None = Field(
        None, description="drafter or run folder whose tensors replace those of the same name and shape, after everything above; what was taken is reported"
    )
    tensors: tuple[str, ...] = Field(("*",), description="patterns of the tensor names taken by warm_start, for example layers.*.self_attn.*")

    @model_validator(mode="after")
    def _has_source(self) -> InitConfig:
        if self.tensors != ("*",) and self.warm_start is None:
            raise ValueError("init.tensors chooses what init.warm_start takes; name a drafter in init.warm_start")
        return self


class ObjectiveConfig(Section):
    """What is optimised: the rows, the loss of a row, the weight of a step, and what is added."""

    steps: int = Field(7, ge=1, description="draft steps K: steps of test-time training, or slots of a block")
    drift: Literal["online", "offline"] = Field(
        "online",
        description="online: a step reads what the drafter itself made of the steps before (test-time training, arXiv 2503.01840); offline: what the target "
        "would have given it, so that errors do not accumulate in training (control). Evaluation is always online",
    )
    row_fraction: float = Field(1.0, gt=0, le=1, description="share of supervised rows, in contiguous runs, that is unrolled; all rows still feed the prefix")
    anchors: int = Field(0, ge=0, description="rows drawn at random in each conversation, as block-wise training does; 0: row_fraction decides [rows]")
    loss: Literal["soft_ce", "kl", "hard_ce", "lk_lambda", "lk_alpha"] = Field(
        "soft_ce",
        description="soft_ce, kl: against the teacher, renormalised over the draft vocabulary; hard_ce: against the next token; lk_alpha: -log a, "
        "a = sum min(p, q); lk_lambda: l KL + (1 - l)(1 - a) with l = exp(-lk_eta a) (arXiv 2602.23881)",
    )
    lk_eta: float = Field(3.0, ge=0, description="eta of lk_lambda")
    weights: Literal["geometric", "exponential", "dpace"] = Field(
        "geometric",
        description="weight of step k = 0, 1, ...: geometric step_decay**k; exponential exp(-k/gamma) (DFlash, arXiv 2602.06036); dpace: by the drafter's own "
        "confidence in the steps (arXiv 2605.18810)",
    )
    step_decay: float = Field(0.8, gt=0, le=1, description="factor of geometric weights")
    gamma: float = Field(4.0, gt=0, description="length of exponential weights; DFlash takes 4, 5, 7 for blocks of 8, 10, 16 [steps]")
    dpace_alpha: float = Field(0.5, gt=0, le=1, description="smoothing a of dpace: s = (1 - a) q + a")
    kv_branch_weight: float = Field(
        0.0, ge=0, description="weight of the same loss on the hybrid's KV branch alone (h = o), so that a closed gate cannot starve it"
    )
    kv_gradient_scale: float = Field(1.0, gt=0, description="factor on the gradient of the drafter's own K and V projections (arXiv 2604.26412 tries 50)")
    query_distill_weight: float = Field(
        0.0, ge=0, description="weight of the relative squared error of the cross path's queries to the target's; needs capture.features.query_layers"
    )
    head_chunk: int = Field(1024, ge=1, description="rows that reach the LM head at once [rows]")

    @model_validator(mode="after")
    def _one_choice_of_rows(self) -> ObjectiveConfig:
        if self.anchors and self.row_fraction < 1:
            raise ValueError(f"anchors={self.anchors} and row_fraction={self.row_fraction} both choose rows; leave one at its default")
        if self.anchors and self.drift == "offline":
            raise ValueError("drift=offline takes its later steps from the rows that follow: use row_fraction, whose rows lie together, instead of anchors")
        return self


Momentum = Annotated[float, Field(ge=0, lt=1)]


class GroupConfig(Section):
    """Parameters that are trained with other settings."""

    tensors: tuple[str, ...] = Field(
        min_length=1, description="patterns of tensor names, for example layers.*.cross_attn.*; the first group that matches counts"
    )
    lr_scale: float = Field(
        1.0, ge=0, description="factor on the learning rate; 0 keeps the tensors as they start (their gradients still count in the norm that is clipped)"
    )
    weight_decay: float | None = Field(None, ge=0, description="decoupled weight decay of these tensors, vectors included; null: as everywhere")


class OptimConfig(Section):
    """AdamW with linear warm-up and a schedule."""

    lr: float = Field(1e-3, gt=0, description="peak learning rate")
    betas: tuple[Momentum, Momentum] = Field((0.9, 0.95), description="decay of the first and second moment")
    weight_decay: float = Field(0.0, ge=0, description="decoupled weight decay of matrices")
    schedule: Literal["cosine", "linear", "wsd", "constant"] = Field(
        "cosine", description="after the warm-up: cosine or linear to final_lr_fraction; wsd: constant, then linear over the last decay_fraction of the steps"
    )
    warmup_fraction: float = Field(0.05, ge=0, lt=1, description="share of the steps that warm up linearly")
    decay_fraction: float = Field(0.2, gt=0, le=1, description="share of the steps that decay, at the end, with schedule=wsd")
    final_lr_fraction: float = Field(0.05, ge=0, le=1, description="learning rate at the end, as a share of the peak")
    clip: float = Field(0.5, gt=0, description="gradient norm clip")
    groups: tuple[GroupConfig, ...] = Field((), description="tensors with another learning rate or weight decay: new ones beside warm-started ones")
    ema_decay: float | None = Field(None, gt=0, lt=1, description="decay of an average of the weights, kept in fp32 and exported as drafter_ema; null: none")

    @model_validator(mode="after")
    def _schedule_fits(self) -> OptimConfig:
        if self.schedule == "wsd" and self.warmup_fraction + self.decay_fraction > 1:
            raise ValueError(f"optim: warmup_fraction={self.warmup_fraction} and decay_fraction={self.decay_fraction} take more than the whole run")
        return self


# What may change from one start of a run to the next: the weights it ends in are the same, but for rounding.
OPERATIONAL = frozenset({
    "conversations_per_micro_batch", "tokens_per_micro_batch", "data_workers", "log_every", "checkpoint_every", "keep_checkpoints", "keep_best",
    "checkpoint_writer", "eval_every", "eval_conversations", "diagnose_conversations", "threads_per_rank",
    "verify_shards", "on_bad_data", "max_minutes", "hang_minutes", "peak_tflops",
    "trackers", "shard_frozen", "recompute",
})  # fmt: skip


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
    max_conversations: int = Field(
        0,
        ge=0,
        description="train on the first so many conversations of the train split, 0 means all; they lie in order of a hash (after a merge: those of the "
        "lowest keys), so a smaller set lies within a larger one. The draft vocabulary is chosen from the whole split",
    )
    max_steps: int = Field(0, ge=0, description="stop after so many optimizer steps; 0 means all epochs")
    conversations_per_step: int = Field(8, ge=1, description="conversations in one optimizer step over all ranks")
    conversations_per_micro_batch: int = Field(1, ge=1, description="conversations in one forward of one rank")
    tokens_per_micro_batch: int = Field(
        0, ge=0, description="pack conversations into forwards of at most so many tokens (a longer one goes alone); 0: conversations_per_micro_batch [tokens]"
    )
    shuffle_shards: int = Field(
        0, ge=0, description="0: all conversations are shuffled; n: the shards are, and the conversations within n of them at a time, read one after the other"
    )
    on_bad_data: Literal["stop", "skip"] = Field(
        "stop", description="a shard that is damaged or missing: stop and name it, or leave its conversations out, named and counted"
    )
    ds_config: str = Field("zero2_fp32", description="name of a file in ds_configs/ or a path: ZeRO stage and precision")
    shard_frozen: bool = Field(False, description="with ZeRO-3: share the target's frozen embedding and head over the ranks; less memory, more communication")
    recompute: bool = Field(
        False, description="recompute the layers of a step in the backward pass instead of keeping their activations: less memory, more time"
    )
    compile: bool = Field(False, description="torch.compile of the layers' dense parts; needs a C++ compiler on CPU")
    data_workers: int = Field(1, ge=0, description="threads of one rank that read features ahead; 0: read as they are asked for")
    log_every: int = Field(10, ge=1, description="optimizer steps between TensorBoard points")
    checkpoint_every: int = Field(200, ge=1, description="optimizer steps between checkpoints")
    keep_checkpoints: int = Field(2, ge=1, description="newest checkpoints kept")
    keep_best: Literal["none", "mat", "mat_joint", "alpha_0", "loss"] = Field(
        "none", description="also keep the checkpoint with the best held-out value, and export it as drafter_best; needs eval_every"
    )
    checkpoint_writer: Literal["plain", "async"] = Field("plain", description="async: training goes on while the checkpoint is written")
    eval_every: int = Field(0, ge=0, description="optimizer steps between looks at the held-out split, for TensorBoard and keep_best; 0: none")
    eval_conversations: int = Field(64, ge=0, description="held-out conversations looked at; 0: all")
    diagnose_conversations: int = Field(
        0, ge=0, description="of the held-out conversations, so many also show query estimation, gate and drift by step at each look (eval_every); 0: none"
    )
    max_minutes: float = Field(0, ge=0, description="stop with a checkpoint after so long, as if preempted; 0: no limit [minutes]")
    hang_minutes: float = Field(30, gt=0, description="stop when a rank makes no progress for so long [minutes]")
    peak_tflops: float = Field(0, ge=0, description="peak of one device for MFU; 0: known accelerators by name, none on CPU [TFLOP/s]")
    trackers: tuple[Literal["wandb", "mlflow"], ...] = Field((), description="also send the points to these, if they are installed")
    threads_per_rank: int = Field(0, ge=0, le=1024, description="CPU threads of one rank; 0 leaves torch's choice")
    seed: int = Field(0, ge=0, lt=1 << 63, description="seed of weights and data order")
    verify_shards: bool = Field(True, description="compare every train shard with its checksum at each start; the ranks share the reading")

    @field_validator("drafter", mode="before")
    @classmethod
    def _default_family(cls, drafter: Any) -> Any:
        return {"family": HiddenOnlyConfig().family, **drafter} if isinstance(drafter, dict) else drafter

    @model_validator(mode="after")
    def _objective_fits_drafter(self) -> TrainConfig:
        drafter, objective = self.drafter, self.objective
        kv: KVSourceConfig | None = getattr(drafter, "kv", None)
        if isinstance(drafter, BlockConfig):
            if objective.steps > drafter.block_size - 1:
                raise ValueError(f"objective.steps={objective.steps}: a block of drafter.block_size={drafter.block_size} proposes {drafter.block_size - 1}")
            if objective.drift == "offline":
                raise ValueError(f"objective.drift=offline: {drafter.family} makes all its proposals in one step, nothing drifts; use online")
            if self.init.head == "random":
                raise ValueError(f"init.head=random: {drafter.family} uses the target's frozen head; leave init.head=target")
        if objective.kv_branch_weight and (not isinstance(drafter, HybridConfig | HybridBlockConfig) or getattr(drafter, "cross_only", False)):
            raise ValueError("objective.kv_branch_weight needs a KV branch beside another one: family hybrid (without cross_only) or hybrid_block")
        if objective.kv_gradient_scale != 1 and kv is None:
            raise ValueError(f"objective.kv_gradient_scale: {drafter.family} has no cross path whose K and V projections could be scaled")
        if objective.query_distill_weight and (kv is None or kv.injection in ("none", "hidden_to_kv")):
            raise ValueError("objective.query_distill_weight needs a drafter that queries the target's KV cache: kv_only, hybrid, kv_block or hybrid_block")
        return self

    def shaping(self) -> dict[str, Any]:
        """The options that shape the trained weights: all but OPERATIONAL ones."""
        return self.model_dump(mode="json", exclude=set(OPERATIONAL))

    @model_validator(mode="after")
    def _held_out_is_looked_at(self) -> TrainConfig:
        if self.keep_best != "none" and not self.eval_every:
            raise ValueError(f"keep_best={self.keep_best} compares held-out values: set eval_every too")
        if self.diagnose_conversations and not self.eval_every:
            raise ValueError(f"diagnose_conversations={self.diagnose_conversations} are looked at with the held-out split: set eval_every too")
        return self

    @model_validator(mode="after")
    def _whole_micro_batches(self) -> TrainConfig:
        if self.conversations_per_step % self.conversations_per_micro_batch:
            step, micro = self.conversations_per_step, self.conversations_per_micro_batch
            raise ValueError(f"conversations_per_step={step} is no multiple of conversations_per_micro_batch={micro}")
        return self
