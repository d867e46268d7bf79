"""The trainer against a bare loop, and two ranks against one: `python -m benchmarks.train`.

Bare loop: the same objective over the same batches, read before the clock starts, torch's AdamW with the same groups and learning rates, clipping; no
engine, no logging, no control. Both run in one process, in turn, round by round, and must end in the same weights; the ratio is the median
over rounds. Weak scaling: one and two ranks, in turn, with as many conversations for each rank and one thread each; the efficiency is seconds a step of
one rank over those of two. Neither clock includes start, first steps, checkpoints and export. Features are random, in the shape of SmolLM2
by default, or those of --shards with --target.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import torch
from safetensors.torch import load_file

from benchmarks import ranks
from benchmarks.measure import CLOCKS
from benchmarks.synthetic import write_features, write_target
from kvshot_ds.config import Recipe
from kvshot_ds.describe import SHAPES
from kvshot_ds.drafters.build import build_drafter
from kvshot_ds.drafters.cost import weightless
from kvshot_ds.drafters.initial import choose_vocab, initialise
from kvshot_ds.features.manifest import load_token_counts
from kvshot_ds.features.shard import ShardSet
from kvshot_ds.features.spec import FeatureSpec, Store
from kvshot_ds.objectives.objective import objective_for
from kvshot_ds.target import load_geometry, load_parts
from kvshot_ds.training import launch, trainer
from kvshot_ds.training.loader import step_batches
from kvshot_ds.training.optim import lr_curve, parameter_groups
from kvshot_ds.training.schedule import Schedule

SKIPPED = 2  # first steps, which allocate, trace and import


class Stopwatch:
    """Reads a clock at the start of every optimizer step."""

    def __init__(self, clock: str):
        self.now, self.read = CLOCKS[clock], list[float]()

    def tick(self) -> None:
        self.read.append(self.now())

    @property
    def per_step(self) -> float:
        """Seconds."""
        return (self.read[-1] - self.read[SKIPPED]) / (len(self.read) - 1 - SKIPPED)


def by_trainer(recipe: Recipe, clock: str) -> float:
    """Seconds a step of the trainer itself, on this rank."""
    watch, plain = Stopwatch(clock), trainer.optimizer_step

    def step(*args: Any) -> Any:
        watch.tick()
        return plain(*args)

    trainer.optimizer_step = step
    try:
        launch.run(recipe)
    finally:
        trainer.optimizer_step = plain
    return watch.per_step


def bare(recipe: Recipe, clock: str) -> tuple[float, dict[str, torch.Tensor]]:
    """The same of the bare loop, and the weights it ends in."""
    config, shards = recipe.train, ShardSet.open(recipe.shards_dir, "train")
    g, parts = load_geometry(recipe.target.path), load_parts(recipe.target.path)
    drafter = build_drafter(config.drafter, g, config.draft_vocab_size)
    drafter.set_vocab(choose_vocab(load_token_counts(recipe.shards_dir, g.vocab_size), config.draft_vocab_size))
    initialise(drafter, config.init, parts, config.seed)
    drafter.bind(parts.embedding, parts.head)
    objective = objective_for(drafter, config.objective, shards.manifest.spec, parts)
    schedule = Schedule.of(config, shards, 1)
    keys = ("tokens", "turn", *shards.manifest.spec.serving(objective.required_features()))
    batches = [
        [(m.batch.to("cpu", torch.float32), m.plan) for m in step] for step in step_batches(shards, keys, schedule, 0, config.objective, 0, 0, False, None)
    ]
    optimizer = torch.optim.AdamW(parameter_groups(drafter.named_parameters(), config.optim), lr=config.optim.lr, betas=config.optim.betas)
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_curve(schedule.steps, config.optim))
    watch = Stopwatch(clock)
    for number, step in enumerate(batches):
        watch.tick()
        drafter.at_step(number)
        rows = torch.tensor(float(sum(plan.supervised for _, plan in step)))
        for batch, plan in step:
            objective(batch, plan, rows).loss.backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), config.optim.clip)
        optimizer.step()
        rates.step()
        optimizer.zero_grad(set_to_none=True)
    return watch.per_step, {name: p.detach() for name, p in drafter.named_parameters()}


def against_bare(recipe: Recipe, clock: str, rounds: int) -> dict[str, list[float]]:
    """In the child. Raises RuntimeError if both do not end in the same weights."""
    torch.set_num_threads(1)
    found: dict[str, list[float]] = {"trainer": [], "bare": []}
    for number in range(rounds):
        run = recipe.model_copy(update={"name": f"round{number}"})
        found["trainer"].append(by_trainer(run, clock))
        seconds, weights = bare(run, clock)
        found["bare"].append(seconds)
        trained = load_file(run.run_dir / "drafter" / "model.safetensors")
        for name, value in weights.items():
            if not torch.allclose(trained[name], value, rtol=1e-3, atol=1e-4):
                raise RuntimeError(f"{name} differs by {float((trained[name] - value).abs().max())}: trainer and bare loop must do the same work")
    return found


def child(case: dict[str, Any]) -> dict[str, Any]:
    recipe = Recipe.model_validate(case["recipe"])
    return against_bare(recipe, case["clock"], case["rounds"]) if case["bare"] else {"trainer": [by_trainer(recipe, case["clock"])]}


def prepared(work: Path, drafter: dict[str, Any], train: dict[str, Any], length: int, conversations: int, width: int, heldout: int = 0) -> Recipe:
    """A recipe over synthetic features of SmolLM2's shape, `width` wide, below `work`; with so many held-out conversations too."""
    g = SHAPES["smollm2-135m"]
    g = g if width == g.hidden_size else replace(g, hidden_size=width, heads=2, kv_heads=1, head_dim=width // 2, intermediate_size=2 * width, vocab_size=512)
    target = write_target(work / "target", g)
    recipe = recipe_of(work, work / "features", target, drafter, train)
    needed = weightless(recipe.train.drafter, g, recipe.train.draft_vocab_size).required_features()
    spec = FeatureSpec(needed.hidden_layers, needed.kv_layers, "last_hidden", Store.all("bf16"))
    write_features(work / "features", target, spec, [length] * conversations, 0.7, [length] * heldout)
    return recipe


def recipe_of(work: Path, shards: Path, target: Path, drafter: dict[str, Any], train: dict[str, Any]) -> Recipe:
    options = {"drafter": drafter, "threads_per_rank": 1, "verify_shards": False, "checkpoint_every": 10**6, **train}
    return Recipe.model_validate({"name": "run", "work": work, "shards": shards, "target": {"path": target, "device": "cpu"}, "train": options})


def scaling(recipe: Recipe, per_rank: int, rounds: int, clock: str) -> list[tuple[float, float]]:
    """Seconds a step on one and on two ranks, round by round; of two, those of the slower."""
    found = []
    for number in range(rounds):
        pair = []
        for world in (1, 2):
            made = recipe.model_dump(mode="json") | {"name": f"weak{number}-{world}"}
            made["train"] |= {"conversations_per_step": per_rank * world}
            answers = ranks.run("benchmarks.train", {"recipe": made, "clock": clock, "bare": False}, world)
            pair.append(max(answer["trainer"][0] for answer in answers))
        found.append((pair[0], pair[1]))
    return found


@click.command(help=__doc__)
@click.option("--case", hidden=True)
@click.option("--family", default="hidden_only", show_default=True, help="the drafter's")
@click.option("--ds-config", default="zero2_fp32", show_default=True, help="ZeRO stage; fp32")
@click.option("--steps", default=20, show_default=True, help="optimizer steps on the clock, in each round")
@click.option("--rounds", default=3, show_default=True, help="rounds; medians are printed")
@click.option("--per-rank", default=2, show_default=True, help="conversations of a rank in a step")
@click.option("--length", default=320, show_default=True, help="tokens of a conversation")
@click.option("--draft-vocab", default=4096, show_default=True, help="draft vocabulary")
@click.option("--width", default=576, show_default=True, help="width of the target; another one than SmolLM2's takes 2 heads and 512 tokens")
@click.option("--clock", type=click.Choice(sorted(CLOCKS)), default="wall", show_default=True, help="cpu: for a machine that is shared; not for scaling")
@click.option("--only", type=click.Choice(["bare", "scaling"]), help="one of both comparisons")
@click.option("--shards", type=click.Path(path_type=Path), help="captured features, in place of random ones")
@click.option("--target", type=click.Path(path_type=Path), help="the target they are of")
def main(
    case: str | None, family: str, ds_config: str, steps: int, rounds: int, per_rank: int, length: int, draft_vocab: int, width: int, clock: str,
    only: str | None, shards: Path | None, target: Path | None,
) -> None:  # fmt: skip
    if case is not None:
        print(json.dumps(child(json.loads(case))))
        return
    drafter = {"family": family} | ({"mask_token_id": 3} if family in ("dflash", "kv_block", "hybrid_block") else {})
    total = steps + SKIPPED + 1
    train = {"ds_config": ds_config, "draft_vocab_size": draft_vocab, "conversations_per_step": per_rank, "max_steps": total, "epochs": 1000, "data_workers": 0}
    with tempfile.TemporaryDirectory() as work:
        recipe = recipe_of(Path(work), shards, target, drafter, train) if shards and target else prepared(Path(work), drafter, train, length, 16, width)
        if only != "scaling":
            case_of = {"recipe": recipe.model_dump(mode="json"), "clock": clock, "bare": True, "rounds": rounds}
            (answer,) = ranks.run("benchmarks.train", case_of, 1)
            ratios = [b / t for t, b in zip(answer["trainer"], answer["bare"], strict=True)]
            mine, plain = (statistics.median(answer[name]) for name in ("trainer", "bare"))
            click.echo(f"a step of the trainer {mine:.3f} s, of the bare loop {plain:.3f} s ({clock}); speed against it, by round: {_list(ratios)}")
            click.echo(f"trainer / bare loop: {statistics.median(ratios):.3f}")
        if only != "bare":
            pairs = scaling(recipe, per_rank, rounds, clock)
            click.echo(f"a step of 1 rank {statistics.median(a for a, _ in pairs):.3f} s, of 2 ranks {statistics.median(b for _, b in pairs):.3f} s ({clock})")
            click.echo(f"weak scaling 1 -> 2 ranks: {statistics.median(a / b for a, b in pairs):.3f}, by round: {_list([a / b for a, b in pairs])}")


def _list(values: list[float]) -> str:
    return ", ".join(f"{value:.3f}" for value in values)


if __name__ == "__main__":
    main()
