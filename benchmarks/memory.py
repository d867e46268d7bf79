"""What `kvshot plan train --cpu` says a rank takes against what the trainer takes: `python -m benchmarks.memory`.

Synthetic features of SmolLM2's shape, fp32, a few optimizer steps in fresh processes with one thread each. Measured is the growth of the resident
high-water mark over what was resident before: after the imports, and after a run of a toy, which loads whatever is loaded late.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from benchmarks import ranks
from benchmarks.measure import MIB, high_water, resident, table
from benchmarks.synthetic import write_features, write_target
from kvshot_ds.config import Recipe
from kvshot_ds.describe import SHAPES
from kvshot_ds.drafters.cost import weightless
from kvshot_ds.features.spec import FeatureSpec, Store
from kvshot_ds.geometry import Geometry
from kvshot_ds.target import load_geometry
from kvshot_ds.training import launch
from kvshot_ds.training.plan import Hardware, plan

CASES = [
    ("hidden_only", 1, "zero2_fp32", 1), ("hidden_only", 1, "zero3_fp32", 2), ("hybrid", 1, "zero2_fp32", 1), ("hybrid", 1, "zero3_fp32", 2),
    ("hidden_only", 1, "zero0_fp32", 1), ("hybrid", 1, "zero1_fp32", 2), ("kv_only", 2, "zero2_fp32", 2), ("dflash", 5, "zero2_fp32", 1),
]  # fmt: skip
TOY = replace(SHAPES["smollm2-135m"], hidden_size=32, heads=2, kv_heads=1, head_dim=16, intermediate_size=64, vocab_size=256)


def recipe_of(work: Path, target: Path, g: Geometry, options: dict[str, Any], length: int) -> Recipe:
    """A recipe over 16 synthetic conversations of `length` tokens, written below `work`."""
    family = options["drafter"]["family"]
    block = {"mask_token_id": 3} if family == "dflash" else {}
    train = {**options, "drafter": options["drafter"] | block, "init": {"head": "target"}, "log_every": 1, "threads_per_rank": 1, "verify_shards": False}
    recipe = Recipe.model_validate({"name": "memory", "work": work, "shards": work / "features", "target": {"path": target, "device": "cpu"}, "train": train})
    needed = weightless(recipe.train.drafter, g, recipe.train.draft_vocab_size).required_features()
    write_features(work / "features", target, FeatureSpec(needed.hidden_layers, needed.kv_layers, "last_hidden", Store.all("bf16")), [length] * 16, 0.7)
    return recipe


def options_of(family: str, depth: int, ds_config: str, draft_vocab: int) -> dict[str, Any]:
    return {
        "drafter": {"family": family, "depth": depth}, "ds_config": ds_config, "draft_vocab_size": draft_vocab, "conversations_per_step": 4, "max_steps": 2,
        "data_workers": 0,
    }  # fmt: skip


def measure(case: dict[str, Any]) -> dict[str, float]:
    """In a rank: bytes that the trainer adds at its most."""
    launch.run(Recipe.model_validate(case["toy"]))
    before = resident()
    launch.run(Recipe.model_validate(case["recipe"]))
    return {"bytes": high_water() - before}


def compare(family: str, depth: int, ds_config: str, world: int, length: int, draft_vocab: int, g: Geometry) -> tuple[float, list[float]]:
    """Bytes of a rank as planned, and as measured on each rank."""
    with tempfile.TemporaryDirectory() as folder:
        made = []
        for name, geometry, vocab, tokens in (("toy", TOY, 64, 24), ("recipe", g, draft_vocab, length)):
            work = Path(folder) / name
            target = write_target(work / "target", geometry)
            made.append(recipe_of(work, target, load_geometry(target), options_of(family, depth, ds_config, vocab), tokens))
        toy, recipe = made
        planned = plan(recipe, "synthetic", load_geometry(recipe.target.path), None, Hardware(world, 0, 0.3, on_cpu=True)).account.bytes
        case = {"toy": toy.model_dump(mode="json"), "recipe": recipe.model_dump(mode="json"), "give_back": True}
        return planned, [found["bytes"] for found in ranks.run("benchmarks.memory", case, world)]


@click.command(help=__doc__)
@click.option("--case", hidden=True)
@click.option("--length", default=512, show_default=True, help="tokens of a conversation")
@click.option("--draft-vocab", default=8192, show_default=True, help="draft vocabulary")
@click.option("--only", type=int, help="number of one case, from 0")
def main(case: str | None, length: int, draft_vocab: int, only: int | None) -> None:
    if case is not None:
        print(json.dumps(measure(json.loads(case))))
        return
    rows = []
    for family, depth, ds_config, world in CASES if only is None else [CASES[only]]:
        planned, measured = compare(family, depth, ds_config, world, length, draft_vocab, SHAPES["smollm2-135m"])
        most = max(measured)
        rows.append([family, str(depth), ds_config, str(world), f"{planned / MIB:.0f}", f"{most / MIB:.0f}", f"{planned / most:.2f}"])
    click.echo(table(("drafter", "depth", "ds_config", "ranks", "planned MiB", "measured MiB", "ratio"), rows))


if __name__ == "__main__":
    main()
