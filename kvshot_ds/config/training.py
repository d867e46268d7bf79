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
    max_conversations: int = Field(
        0,
        ge=0,
        description="train on the first so many conversations of the train split, 0 means all; they lie in order of a hash (after a merge: those of the "
        "lowest keys), so a smaller set lies within a larger one. The draft vocabulary is chosen from the whole split",
    )
    max_steps: int = Field(0, ge=0, description="stop after so many optimizer steps; 0 means all epochs")
    conversations_per_step: int = Field(8, ge=1, description="conversations in one optimizer step over all ranks")
    conversations_per_micro_batch: int = Field(1, ge=1, description="conversations in one forward of one rank")
    ds_config: str = Field("zero2_fp32", description="name of a file in ds_configs/ or a path: ZeRO stage and precision")
    recompute: bool = Field(
        False, description="recompute the layers of a step in the backward pass instead of keeping their activations: less memory, more time"
    )
    compile: bool = Field(False, description="torch.compile of the layers' dense parts; needs a C++ compiler on CPU")
    data_workers: int = Field(1, ge=0, description="threads of one rank that read features ahead; 0: read as they are asked for")
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

    @model_validator(mode="after")
    def _whole_micro_batches(self) -> TrainConfig:
        if self.conversations_per_step % self.conversations_per_micro_batch:
            step, micro = self.conversations_per_step, self.conversations_per_micro_batch
            raise ValueError(f"conversations_per_step={step} is no multiple of conversations_per_micro_batch={micro}")
        return self
