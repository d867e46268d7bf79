"""What drafters would cost on a target, before anything is trained: tables made from shapes alone."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

from kvshot_ds.config import AnyDrafterConfig, Recipe, TrainConfig
from kvshot_ds.drafters.cost import GROUPS, Cost, Flops, cost, total
from kvshot_ds.errors import ConfigError
from kvshot_ds.features.plan import aligned
from kvshot_ds.features.spec import FeatureSpec
from kvshot_ds.geometry import Geometry
from kvshot_ds.target import load_geometry

SHAPES = {
    "smollm2-135m": Geometry(
        family="llama", num_layers=30, hidden_size=576, heads=9, kv_heads=3, head_dim=64, intermediate_size=1536, vocab_size=49152, norm_eps=1e-5,
        qk_norm=False, max_positions=8192, rope={"rope_type": "default", "rope_theta": 1e5}, qkv_bias=False, o_bias=False, mlp_bias=False, hidden_act="silu",
    ),
    "qwen3-8b": Geometry(
        family="qwen3", num_layers=36, hidden_size=4096, heads=32, kv_heads=8, head_dim=128, intermediate_size=12288, vocab_size=151936, norm_eps=1e-6,
        qk_norm=True, max_positions=40960, rope={"rope_type": "default", "rope_theta": 1e6}, qkv_bias=False, o_bias=False, mlp_bias=False, hidden_act="silu",
    ),
    "llama3.1-8b": Geometry(
        family="llama", num_layers=32, hidden_size=4096, heads=32, kv_heads=8, head_dim=128, intermediate_size=14336, vocab_size=128256, norm_eps=1e-5,
        qk_norm=False, max_positions=131072, qkv_bias=False, o_bias=False, mlp_bias=False, hidden_act="silu",
        rope={
            "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        },
    ),
}  # fmt: skip
DEPTHS, BLOCK_DEPTHS = (1, 2, 4), (1, 3, 5)


def describe(recipe: Recipe | None, target_shape: str | None, table: bool, context: int) -> list[str]:
    """Lines about the drafter of `recipe` on its target (or on the known `target_shape`); with `table`, about every family.

    Raises ConfigError if there is no target to take shapes from, or nothing to describe.
    """
    if recipe is None and not table:
        raise ConfigError("nothing to describe: name a recipe, or give --all with --target-shape")
    name, g = target_of(recipe, target_shape)
    train = recipe.train if recipe else TrainConfig(draft_vocab_size=min(TrainConfig().draft_vocab_size, g.vocab_size))
    length = recipe.decode.drafting.length if recipe else train.objective.steps
    heading = [
        f"target {name}: {g.num_layers} layers, width {g.hidden_size}, {g.heads}/{g.kv_heads} heads of {g.head_dim}, vocabulary {g.vocab_size:,}",
        f"draft vocabulary {train.draft_vocab_size:,}; context {context:,} tokens; {train.objective.steps} training steps; {length} proposals a round",
        "",
    ]
    notes = [
        "",
        "training: forward and backward, of a supervised row over all its steps, and of each position of the context (once); teacher: the target's head",
        "drafting: of a proposed token, and of each position committed. A block proposes as many tokens as it has masks",
        "Attention reads the whole context. Norms and other element-wise work are not counted. See kvshot_ds/drafters/cost.py",
    ]
    if table:
        return heading + _all(g, train, length, context) + notes
    c = cost(train.drafter, g, train.draft_vocab_size)
    return heading + _one(train.drafter, c, c.training(train.objective.steps, context), c.drafting(length, context)) + ["", *_captured(c, g)] + notes


def target_of(recipe: Recipe | None, shape: str | None) -> tuple[str, Geometry]:
    """Name and geometry of the recipe's target, or of the known target `shape`. Raises ConfigError if there is none to take shapes from."""
    known = ", ".join(SHAPES)
    if shape is not None:
        if shape not in SHAPES:
            raise ConfigError(f"--target-shape {shape}: not known; known: {known}; any other target: a recipe whose target.path has its config.json")
        return shape, SHAPES[shape]
    if recipe is None:
        raise ConfigError(f"no target to take shapes from: name a recipe, or --target-shape (one of {known})")
    path = Path(recipe.target.path)
    if not path.is_dir():
        raise ConfigError(f"target.path={path}: no such folder; make or download the target, or describe a known one by --target-shape (one of {known})")
    return str(path), load_geometry(path, recipe.target.trust_remote_code)


def captured_bytes(spec: FeatureSpec, g: Geometry) -> tuple[int, int]:
    """Bytes of hidden states and of keys and values that `spec` keeps of one token, in bf16."""
    return 2 * len(spec.hidden_layers) * g.hidden_size, 2 * 2 * len(spec.kv_layers) * g.kv_heads * g.head_dim


def _captured(c: Cost, g: Geometry) -> list[str]:
    kinds = zip(("hidden states", "keys and values"), captured_bytes(c.features, g), (c.features.hidden_layers, c.features.kv_layers), strict=True)
    parts = [f"{size:,} bytes of {what} of layers {list(layers)}" for what, size, layers in kinds if layers]
    parts.append(f"{2 * g.hidden_size + 8:,} more of each answer token for the teacher")
    return [f"captured of each token, in bf16: {', '.join(parts)}"]


def _one(config: AnyDrafterConfig, c: Cost, training: dict[str, Flops], drafting: dict[str, Flops]) -> list[str]:
    """Parameters and FLOPs of one drafter, a line for each part."""
    rows = []
    none = Flops(0, 0)
    for part in (*GROUPS, "attention", "teacher"):
        work = (*training.get(part, none), *drafting.get(part, none))
        if c.parameters.get(part) or any(work):
            rows.append([part, _millions(c.parameters.get(part, 0)), *map(_millions, work)])
    rows.append(["total", _millions(c.trainable), *map(_millions, (*total(training), *total(drafting)))])
    head = ["", "M parameters", "train M/row", "train M/pos", "draft M/tok", "draft M/pos"]
    lent = ", ".join(f"{name} {_millions(size)} M" for name, size in c.lent.items())
    return [
        f"{config.family}, depth {config.depth}",
        "",
        *aligned([head, *rows]),
        "",
        f"M: millions, of parameters or FLOPs. Lent by the target, frozen: {lent}",
    ]


def _all(g: Geometry, train: TrainConfig, length: int, context: int) -> list[str]:
    """Every family at several depths, options at their defaults."""
    head = ["drafter", "depth", *GROUPS, "trained", "train M/row", "train M/pos", "draft M/tok", "draft M/pos", "hidden B", "KV B"]
    rows = []
    for family in get_args(AnyDrafterConfig):
        for depth in BLOCK_DEPTHS if "block_size" in family.model_fields else DEPTHS:
            config = family(depth=depth)
            c = cost(config, g, train.draft_vocab_size)
            work = (*total(c.training(train.objective.steps, context)), *total(c.drafting(length, context)))
            sizes = [c.parameters[group] for group in GROUPS]
            captured = [f"{n:,}" if n else "-" for n in captured_bytes(c.features, g)]
            rows.append([config.family, str(depth), *map(_millions, (*sizes, c.trainable, *work)), *captured])
    return [*aligned([head, *rows]), "", "fusion to trained: M parameters; train, draft: M FLOPs; hidden, KV: bytes captured of each token in bf16"]


def _millions(n: float) -> str:
    return f"{n / 1e6:,.{3 if n < 1e5 else 2 if n < 1e7 else 1}f}" if n else "-"
