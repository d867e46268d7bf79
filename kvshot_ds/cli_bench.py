"""`kvshot bench`: measure a recipe's drafters, measure latencies for elsewhere, or predict from those of another accelerator."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

OPTIONS = (
    click.Option(["--json", "as_json"], is_flag=True, help="print JSON"),
    click.Option(["--latency"], type=click.Path(path_type=Path), metavar="TABLE", help="measure latencies alone, and write the table for --simulate elsewhere"),
    click.Option(
        ["--simulate"], type=click.Path(path_type=Path), metavar="TABLE", help="predict for the accelerator of a latency table, as bench.simulate does"
    ),
)


def bench(recipe: Path, overrides: tuple[str, ...], as_json: bool, latency: Path | None, simulate: Path | None) -> None:
    """One of the three, by the options given. Raises ConfigError if both --latency and a table to simulate are given."""
    from kvshot_ds.cli import split_overrides
    from kvshot_ds.config import load_recipe
    from kvshot_ds.errors import ConfigError

    resolved = load_recipe(recipe, split_overrides(overrides))
    if simulate is not None:
        resolved = resolved.model_copy(update={"bench": resolved.bench.model_copy(update={"simulate": simulate})})
    if latency is not None and resolved.bench.simulate is not None:
        raise ConfigError("kvshot bench: --latency measures here, bench.simulate asks for elsewhere; give one of them")
    if latency is not None:
        from kvshot_ds.bench.latency import run, table_text

        table = run(resolved, latency)
        click.echo(json.dumps(asdict(table), indent=1) if as_json else f"{table_text(table)}\n-> {latency}")
    elif resolved.bench.simulate is not None:
        from kvshot_ds.bench import simulate as simulating
        from kvshot_ds.bench.latency_table import LatencyTable

        found = simulating.run(resolved)
        shown = [asdict(one) | {"best": asdict(one.best)} for one in found] if as_json else simulating.text(found, LatencyTable.load(resolved.bench.simulate))
        click.echo(json.dumps(shown, indent=1) if as_json else shown)
    else:
        from kvshot_ds.bench import run as measuring

        measuring.run(resolved, as_json)
