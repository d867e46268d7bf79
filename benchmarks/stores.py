"""What storing features in 8 bits, or the teacher as its best tokens, costs in held-out acceptance: one drafter trained on each store, all
evaluated on the same held-out features in bf16, as decoding would feed them.

    python -m benchmarks.stores recipes/smollm2_135m/hybrid.yaml [section.field=value ...]

Needs prepared conversations. Captures into WORK/stores/, trains into WORK/runs/; what is there is kept, so a run that was interrupted continues.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from kvshot_ds.config import Recipe, load_recipe
from kvshot_ds.metrics import Interval, alpha_at, bootstrap, mat_of, paired_difference
from kvshot_ds.report.compare import common
from kvshot_ds.report.gather import Conversations, read_run

RANKS = 2
_EIGHT = ("capture.features.store.hidden={0}", "capture.features.store.kv={0}")
STORES: dict[str, tuple[str, ...]] = {
    "bf16": tuple(option.format("bf16") for option in _EIGHT),
    "fp8": tuple(option.format("fp8") for option in _EIGHT),
    "int8": tuple(option.format("int8") for option in _EIGHT),
    "fp8_top64": (*(option.format("fp8") for option in _EIGHT), "capture.features.teacher=top_k", "capture.features.teacher_k=64"),
}


def names_of(recipe: Recipe, store: str) -> tuple[str, str, Path]:
    """Overrides `shards=` and `name=` of one store, and its run folder."""
    name = f"{recipe.name}-{store}"
    return f"shards={recipe.work / 'stores' / store}", f"name={name}", recipe.work / "runs" / name


def run(*command: str) -> None:
    print("$", *command, flush=True)
    subprocess.run(command, check=True)


def conversations(folder: Path) -> Conversations:
    """What `kvshot eval` counted, by conversation."""
    found = read_run(folder).conversations
    assert found is not None
    return found


def shown(interval: Interval, sign: str = "") -> str:
    return f"{interval.value:{sign}.3f} [{interval.low:{sign}.3f}, {interval.high:{sign}.3f}]"


def table(recipe: Recipe) -> list[str]:
    """Markdown: alpha_0 and MAT of each store, and the paired difference of MAT to bf16, with bootstrap intervals over conversations."""
    e = recipe.eval
    lines = ["| store | bytes/token | α_0 | MAT | MAT − that of bf16, paired |", "|---|---|---|---|---|"]
    plain = conversations(names_of(recipe, "bf16")[2])
    for store in STORES:
        shards, _, folder = names_of(recipe, store)
        first, second, _ = common(conversations(folder), plain)
        values = [bootstrap(first, statistic, e.bootstrap, e.confidence, e.seed) for statistic in (alpha_at(0), mat_of)]
        difference = shown(paired_difference(first, second, mat_of, e.bootstrap, e.confidence, e.seed), "+") if store != "bf16" else ""
        lines.append(f"| {store} | {bytes_per_token(Path(shards.removeprefix('shards='))):,.0f} | {shown(values[0])} | {shown(values[1])} | {difference} |")
    return lines


def bytes_per_token(shards: Path) -> float:
    from kvshot_ds.features.manifest import Manifest

    splits = Manifest.load(shards).splits.values()
    return sum(s.bytes for s in splits) / sum(s.tokens for s in splits)


def main(arguments: list[str]) -> None:
    path, given = arguments[0], arguments[1:]
    recipe = load_recipe(Path(path), tuple(given))
    for store, options in STORES.items():
        shards, name, _ = names_of(recipe, store)
        run("kvshot", "capture", path, *given, shards, *options)
        run("deepspeed", "-q", "--num_accelerators", str(RANKS), "--module", "kvshot_ds.cli", "train", path, *given, shards, name)
    folders = ",".join(str(names_of(recipe, store)[2]) for store in STORES)
    run("kvshot", "eval", path, *given, names_of(recipe, "bf16")[0], f"eval.drafters=[{folders}]")
    print("\n".join(table(recipe)))


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: python -m benchmarks.stores RECIPE [section.field=value ...]")
    main(sys.argv[1:])
