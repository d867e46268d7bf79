"""`kvshot export`: thin; the work is done by kvshot_ds/export."""

from __future__ import annotations

import importlib
from pathlib import Path

import click


@click.command("export")
@click.argument("drafter", type=click.Path(path_type=Path), metavar="DRAFTER_OR_RUN")
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--format",
    "form",
    required=True,
    type=click.Choice(["eagle3", "speculators", "dflash", "kvshot"]),
    help="eagle3: research layout (SGLang, vLLM); speculators: vLLM, any depth; dflash: original layout (vLLM, SGLang); kvshot: our own, for every family",
)
@click.option("--target", type=click.Path(path_type=Path), help="Hugging Face folder of the target; default: target.path of the run's recipe")
@click.option("--dtype", type=click.Choice(["bf16", "fp32"]), help="of the weights; default: as the drafter is stored")
@click.option("--target-name", "named", help="what the files call the target, such as org/name; default: the folder as given")
def export(drafter: Path, out: Path, form: str, target: Path | None, dtype: str | None, named: str | None) -> None:
    """Write a trained or imported drafter as the folder OUT for serving engines, or as one that Python loads in a line.

    What a layout cannot hold is an error that names it: docs/export.md has the table.
    """
    found = importlib.import_module("kvshot_ds.export.run").export_drafter(drafter, out, form, target, dtype, named)
    click.echo("\n".join(found.lines()))
