"""The `kvshot` command: thin; each command loads a recipe and calls one library function. Heavy imports happen inside."""

from __future__ import annotations

import importlib
import json
import math
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from kvshot_ds import __version__, cli_bench, cli_export
from kvshot_ds.errors import ConfigError, KvshotError, Preempted

if TYPE_CHECKING:
    from kvshot_ds.options import Option

# command -> (module whose run(recipe) does the work, what it does); the recipe section bears the command's name
STAGES = {
    "prep": ("data_prep.prepare", "Conversations or prompts in; answered, tokenised conversations out."),
    "capture": ("data_prep.orchestrate", "Prepared conversations in; feature shards of the target out (Ray)."),
    "train": ("kvshot_ds.training.launch", "Feature shards in; a trained drafter out (DeepSpeed)."),
    "eval": ("kvshot_ds.evaluation", "Held-out step-wise acceptance of a trained drafter."),
    "diagnose": ("kvshot_ds.diagnostics.run", "Query estimation, gradient flow, gate, context use and drift of a trained drafter."),
    "decode": ("kvshot_ds.decoding.run", "Speculative decoding on held-out prompts, checked against the target's own generate."),
    "bench": ("kvshot_ds.bench.run", "Speed of drafters against the target alone, prompt-lookup and assisted generation, in one process."),
    "serve": ("kvshot_ds.serve.run", "An OpenAI-compatible HTTP server over one drafter, with acceptance in every answer, for trying it by hand."),
    "report": ("kvshot_ds.report.build", "One self-contained HTML page of everything measured: of a recipe, or of folders of runs and sweeps."),
}
COMMON = "Options of the recipe as a whole (name, work, target.path, ...): kvshot config options"
RANKS = "For several ranks: deepspeed --num_accelerators N --module kvshot_ds.cli train RECIPE [section.field=value ...]"

FOLDERS = "Of folders: kvshot report RUN_OR_SWEEP [RUN_OR_SWEEP ...] [--out DIR]"
SHOW = "To look at what it made, token by token: kvshot prep show RECIPE [ID | LINE]"


class OrderedGroup(click.Group):
    """Lists its commands in the order of the work, not of the alphabet."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


class StageCommand(click.Command):
    """A command whose help ends with the options of its recipe section, made from the configuration models."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        write_options(formatter, section_options(self.name or ""))
        super().format_epilog(ctx, formatter)


def section_options(section: str) -> list[Option]:
    """Options of the recipe below the dotted name `section` (all of them for ''). Raises ConfigError if there are none."""
    from kvshot_ds.config import Recipe
    from kvshot_ds.options import walk

    table = list(walk(Recipe))
    chosen = [option for option in table if not section or f"{option.name}.".startswith(f"{section}.")]
    if not chosen:
        raise ConfigError(f"no section {section!r}; sections: {', '.join(dict.fromkeys(o.name.partition('.')[0] for o in table if '.' in o.name))}")
    return chosen


def write_options(formatter: click.HelpFormatter, options: list[Option]) -> None:
    """Writes the option table, one heading for each choice that options depend on. Units stand in brackets."""
    for when in dict.fromkeys(sorted((option.when for option in options), key=bool)):
        rows = [(o.name, f"{o.description}  ({o.type}; {'' if o.default == 'required' else 'default '}{o.default})") for o in options if o.when == when]
        with formatter.section(f"Options with {when}" if when else "Recipe options, as section.field=value"):
            formatter.write_dl(rows, col_max=44)


def split_overrides(args: tuple[str, ...]) -> tuple[str, ...]:
    """`a.b=v`, `--a.b=v` and `--a.b v` in any mixture, each as `a.b=v`. Raises ConfigError on an option without a value."""
    out, rest = [], list(args)
    while rest:
        text = rest.pop(0)
        if text.startswith("--") and "=" not in text:
            if not rest:
                raise ConfigError(f"{text}: expected a value after it, as in {text} VALUE or {text.removeprefix('--')}=VALUE")
            text = f"{text}={rest.pop(0)}"
        out.append(text.removeprefix("--"))
    return tuple(out)


def _stage(name: str, module: str, text: str) -> click.Command:
    def run(recipe: Path, overrides: tuple[str, ...], on_ray: bool = False, serving_check: bool = False) -> None:
        from kvshot_ds.config import load_recipe

        resolved = load_recipe(recipe, split_overrides(overrides))
        importlib.import_module("kvshot_ds.training.on_ray" if on_ray else "kvshot_ds.decoding.parity" if serving_check else module).run(resolved)

    more = {"train": RANKS, "prep": SHOW, "report": FOLDERS}.get(name)
    kind = PrepCommand if name == "prep" else StageCommand
    command = _with_recipe(kind(name, help=text, callback=_report if name == "report" else run, epilog=f"{COMMON}\n\n{more}" if more else COMMON))
    if name == "train":
        command.params.append(click.Option(["--ray", "on_ray"], is_flag=True, help="let Ray place ray.ranks ranks (kvshot config options ray)"))
    if name == "bench":
        command.callback = cli_bench.bench
        command.params += cli_bench.OPTIONS
    if name == "eval":
        text = "also decode eval.serving_prompts held-out prompts, and fail where real decoding does not accept what the held-out rows promise"
        command.params.append(click.Option(["--serving-check"], is_flag=True, help=text))
    if name == "report":
        command.params.append(
            click.Option(
                ["--out"], type=click.Path(path_type=Path), help="folder of the report; default: WORK/report, of one sweep alone WORK/sweeps/NAME/report"
            )
        )
    return command


def _report(recipe: Path, overrides: tuple[str, ...], out: Path | None) -> None:
    """Of a recipe, or of folders where the first word is one."""
    from kvshot_ds.config import load_recipe

    build = importlib.import_module("kvshot_ds.report.build")
    if not recipe.is_dir():
        build.run(load_recipe(recipe, split_overrides(overrides)), out)
        return
    if others := [word for word in overrides if not Path(word).is_dir()]:
        raise ConfigError(f"kvshot report: {recipe} is a folder, {others[0]} is none; give folders of runs and sweeps alone, or a recipe with its overrides")
    build.run_folders([recipe, *map(Path, overrides)], out)


class PrepCommand(StageCommand):
    """`kvshot prep RECIPE`, and `kvshot prep show RECIPE`, which looks at what the former made."""

    def make_context(self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any) -> click.Context:
        if args[:1] == ["show"]:
            return _prep_show.make_context(f"{info_name} show", args[1:], parent, **extra)
        return super().make_context(info_name, args, parent, **extra)


@click.command("show", context_settings={"ignore_unknown_options": True})
@click.argument("recipe", type=click.Path(path_type=Path))
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[ID | LINE] [section.field=value ...]")
@click.option("--split", type=click.Choice(["train", "heldout"]), default="train", show_default=True, help="prepared file to read")
@click.option("--line", type=click.IntRange(min=1), help="the conversation on this line of it")
@click.option("--id", help="the conversation whose id begins so")
@click.option("--source", help="conversations from this source, as FILE or FILE:LINE")
@click.option("--count", type=click.IntRange(min=1), default=3, show_default=True, help="show at most so many")
def _prep_show(
    recipe: Path, words: tuple[str, ...], split: Literal["train", "heldout"], line: int | None, id: str | None, source: str | None, count: int
) -> None:
    """Print prepared conversations token by token: what is supervised, in which turn, what was cut. Before kvshot prep has run, the first
    records of the recipe's sources are shown instead."""
    from kvshot_ds.config import load_recipe

    overrides = tuple(word for word in words if "=" in word)
    for word in words:
        if word not in overrides:
            # an id has 32 characters, so few digits are a line
            line, id = (int(word), id) if word.isdigit() and len(word) < 9 else (line, word)
    show = importlib.import_module("data_prep.show")
    show.run(load_recipe(recipe, split_overrides(overrides)), show.Selection(split, line, id, source, count))


def _with_recipe(command: click.Command, required: bool = True) -> click.Command:
    recipe = click.Argument(["recipe"], type=click.Path(path_type=Path), required=required)
    command.params += [recipe, click.Argument(["overrides"], nargs=-1, type=click.UNPROCESSED)]
    command.context_settings["ignore_unknown_options"] = True
    return command


@click.group(cls=OrderedGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 140})
@click.version_option(__version__, prog_name="kvshot")
def cli() -> None:
    """Train and measure speculative-decoding drafters that reuse the target's hidden states and KV cache.

    A recipe is a YAML file; every option in it can be overridden as section.field=value.
    """


for _name, (_module, _text) in STAGES.items():
    cli.add_command(_stage(_name, _module, _text))
cli.add_command(cli_export.export)


@cli.group()
def config() -> None:
    """Show a resolved recipe, or the table of all options."""


def _show(recipe: Path, overrides: tuple[str, ...]) -> None:
    """Print the resolved recipe as YAML: defaults, under the file and what it extends, under the overrides."""
    from kvshot_ds.config import dump_recipe, load_recipe

    click.echo(dump_recipe(load_recipe(recipe, split_overrides(overrides))), nl=False)


config.add_command(_with_recipe(click.Command("show", help=_show.__doc__, callback=_show)))


@config.command("options")
@click.argument("section", default="")
def _options(section: str) -> None:
    """Print every option of a section (or of all): dotted name, description with its unit, type, default."""
    formatter = click.HelpFormatter(width=140)
    write_options(formatter, section_options(section))
    click.echo(formatter.getvalue().strip("\n"))


@cli.command()
@click.argument("name", type=click.Choice(["smollm2", "tiny"]))
@click.argument("folder", type=click.Path(path_type=Path))
def target(name: str, folder: Path) -> None:
    """Make a small target as a Hugging Face folder: smollm2 (135M, instruct) or tiny (random Qwen3, for trying things)."""
    click.echo(f"target {name}: {importlib.import_module('data_prep.targets').fetch(name, folder)}")


@cli.group()
def drafter() -> None:
    """Tell what a drafter would cost, or import a published one."""


@click.option("--target-shape", help="a known target in place of target.path: smollm2-135m, qwen3-8b or llama3.1-8b")
@click.option("--all", "table", is_flag=True, help="every family at several depths, all other options at their defaults")
@click.option("--context", type=click.IntRange(min=1), default=2048, show_default=True, help="tokens that the attention reads")
def _describe(recipe: Path | None, overrides: tuple[str, ...], target_shape: str | None, table: bool, context: int) -> None:
    """Print parameters, FLOPs per token and captured bytes of a recipe's drafter, or of all families. Needs no weights."""
    from kvshot_ds.config import load_recipe
    from kvshot_ds.describe import describe

    resolved = load_recipe(recipe, split_overrides(overrides)) if recipe else None
    click.echo("\n".join(describe(resolved, target_shape, table, context)))


drafter.add_command(_with_recipe(click.command("describe")(_describe), required=False))


@drafter.command("import")
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--target", "target_folder", required=True, type=click.Path(path_type=Path), help="Hugging Face folder of the target it was trained for")
@click.option("--measure", help="settle what its layer ids mean on held-out features: a recipe whose capture is done, or a folder or URL of shards")
def _import(source: Path, out: Path, target_folder: Path, measure: str | None) -> None:
    """Turn a published EAGLE-3 or DFlash drafter in the folder SOURCE into a drafter folder OUT that eval, decode and init.warm_start read.

    EAGLE-3 in the layouts of SpecForge, AngelSlim, the EAGLE repository and speculators; DFlash in the original one.
    """
    if measure is None:
        report = importlib.import_module("kvshot_ds.drafters.public").import_drafter(source, target_folder, out)
    else:
        report = importlib.import_module("kvshot_ds.measure_layers").run(source, target_folder, out, measure)
    click.echo("\n".join(report.lines()))


_JSON = click.option("--json", "as_json", is_flag=True, help="print JSON")


@cli.group(cls=OrderedGroup)
def sweep() -> None:
    """Train many drafters that differ in named options, on Ray, and compare them over seeds."""


@click.option("--dry-run", is_flag=True, help="print the trials, what they cost and the disk they take; train nothing")
@click.option("--target-shape", help="with --dry-run, a known target in place of target.path: smollm2-135m, qwen3-8b or llama3.1-8b")
@click.option("--conversations", type=click.IntRange(1, 10_000_000), help="with --dry-run, so many conversations in place of the captured or prepared ones")
@click.option("--tokens-per-conversation", type=click.IntRange(3, 1_000_000), default=1000, show_default=True, help="their length, 60% of it in answers")
def _sweep_run(
    recipe: Path, overrides: tuple[str, ...], dry_run: bool, target_shape: str | None, conversations: int | None, tokens_per_conversation: int
) -> int:
    """Train every trial of the recipe's sweep, as many at once as fit, measure each, and write WORK/sweeps/NAME. The same command goes on where it stopped.

    Exit status 1 if a trial has failed.
    """
    from kvshot_ds.config import load_recipe

    resolved = load_recipe(recipe, split_overrides(overrides))
    if dry_run:
        from kvshot_ds.features.plan import Guess

        guess = Guess(conversations, tokens_per_conversation, 0.6) if conversations else None
        click.echo("\n".join(importlib.import_module("kvshot_ds.sweep.estimate").dry_run(resolved, target_shape, guess)))
        return 0
    failed: int = importlib.import_module("kvshot_ds.sweep.run").run(resolved)
    return 1 if failed else 0


sweep.add_command(_with_recipe(click.command("run")(_sweep_run)))


@sweep.command("status")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--follow", is_flag=True, help="go on showing it until the sweep has ended")
@_JSON
def _sweep_status(folder: Path, follow: bool, as_json: bool) -> None:
    """Show how far the trials of the sweep in FOLDER (WORK/sweeps/NAME) are."""
    importlib.import_module("kvshot_ds.sweep.status").show(folder, follow, as_json)


@sweep.command("table")
@click.argument("folders", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--format", "form", type=click.Choice(["text", "markdown", "csv", "latex"]), default="text", show_default=True)
@click.option(
    "--baseline",
    help="the cell to compare with, as axis=value [axis=value ...], a control with control=continued; default: the recipe's sweep.baseline, or the first cell",
)
@click.option("--early", is_flag=True, help="instead, how far the rank of the trials at each look during training agrees with their last rank")
def _sweep_table(folders: tuple[Path, ...], form: Literal["text", "markdown", "csv", "latex"], baseline: str | None, early: bool) -> None:
    """Compare the cells of the sweeps in FOLDERS: means over seeds with intervals, and differences from the baseline, paired by seed and conversation."""
    table = importlib.import_module("kvshot_ds.sweep.table")
    found = table.early(folders) if early else table.compare(folders, baseline)
    click.echo(table.rendered(found, form))


@cli.group(cls=OrderedGroup)
def data() -> None:
    """Look into folders of feature shards, check and repair them, join them or take a part. FOLDER may be a URL, s3://bucket/folder."""


@data.command("inspect")
@click.argument("folder")
@_JSON
def _inspect(folder: str, as_json: bool) -> None:
    """Tell what FOLDER holds: provenance, target, features, splits, lengths, sizes, and what was left out. Reads no tar."""
    found = importlib.import_module("kvshot_ds.features.inspect").inspect(folder)
    click.echo(json.dumps(found.to_json(), indent=1) if as_json else "\n".join(found.lines()))


@data.command("verify")
@click.argument("folder")
@click.option("--jobs", type=click.IntRange(min=1), default=4, show_default=True, help="shards read at a time")
@_JSON
def _verify(folder: str, jobs: int, as_json: bool) -> int:
    """Read every byte of FOLDER and name every bad file and sample. Exit status 1 if there is any."""
    found = importlib.import_module("kvshot_ds.features.verify").verify_with_progress(folder, jobs)
    click.echo(json.dumps(found.to_json(), indent=1) if as_json else "\n".join(found.lines()))
    return 1 if found.faults else 0


def _repair(recipe: Path, overrides: tuple[str, ...]) -> None:
    """Capture the bad or missing shards of RECIPE again, and only those; damaged files are moved into damaged/, never deleted.

    RECIPE may be the folder of shards itself: then it is the recipe that the capture left there, overrides included.
    """
    from kvshot_ds.config import load_recipe

    recipe = recipe / "recipe.yaml" if recipe.is_dir() else recipe
    importlib.import_module("data_prep.repair").run(load_recipe(recipe, split_overrides(overrides)))


data.add_command(_with_recipe(click.Command("repair", help=_repair.__doc__, callback=_repair)))


@data.command("merge")
@click.argument("folders", nargs=-1, required=True)
@click.argument("out")
@click.option("--drop-duplicates", is_flag=True, help="of a conversation that stands in two folders, leave the later one out")
def _merge(folders: tuple[str, ...], out: str, drop_duplicates: bool) -> None:
    """Join FOLDERS of one target, captured alike, into the new data set OUT; their shards are linked, or copied where that is not possible."""
    made = importlib.import_module("kvshot_ds.features.dataset").merge(folders, out, drop_duplicates)
    click.echo("\n".join(made.lines()))


@data.command("subset")
@click.argument("folder")
@click.argument("out")
@click.option("--conversations", type=click.IntRange(min=1), help="the so many lowest of the train split by key: a smaller set lies within a larger one")
@click.option("--hidden-layers", help="keep hidden states of these layers alone: 1,5 or none")
@click.option("--kv-layers", help="keep keys and values of these layers alone")
@click.option("--query-layers", help="keep queries of these layers alone")
@click.option("--no-teacher", is_flag=True, help="leave the teacher out")
def _subset(
    folder: str, out: str, conversations: int | None, hidden_layers: str | None, kv_layers: str | None, query_layers: str | None, no_teacher: bool
) -> None:
    """Take a part of FOLDER as the new data set OUT: fewer train conversations, fewer layers. What is held out stays whole."""
    layers = {"hidden_layers": hidden_layers, "kv_layers": kv_layers, "query_layers": query_layers}
    chosen = {name: _numbers(name, text) for name, text in layers.items() if text is not None}
    if not (conversations or chosen or no_teacher):
        raise ConfigError("kvshot data subset: nothing to leave out; give --conversations, --hidden-layers, --kv-layers, --query-layers or --no-teacher")
    dataset = importlib.import_module("kvshot_ds.features.dataset")
    made = dataset.subset(folder, out, conversations or 0, dataset.FewerFeatures(no_teacher=no_teacher, **chosen))
    click.echo("\n".join(made.lines()))


def _numbers(option: str, text: str) -> tuple[int, ...]:
    try:
        return () if text == "none" else tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        raise ConfigError(f"--{option.replace('_', '-')}={text}: expected layer numbers such as 1,5, or none") from None


class Finite(click.FloatRange):
    """A range with nan outside, which compares as inside."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


_CONVERSATIONS = click.IntRange(min=1, max=10_000_000)
_TOKENS = 1_000_000  # of the longest conversation that is planned for


@cli.group()
def plan() -> None:
    """Tell what a stage will take before it is run."""


@click.option("--target-shape", help="a known target in place of target.path: smollm2-135m, qwen3-8b or llama3.1-8b")
@click.option("--conversations", type=_CONVERSATIONS, help="of so many conversations, in place of the prepared ones")
@click.option("--tokens-per-conversation", type=click.IntRange(2, _TOKENS), default=1000, show_default=True, help="their length, with --conversations")
@click.option("--supervised", type=Finite(0, 1), default=0.6, show_default=True, help="share of their tokens in answers, with --conversations")
def _plan_capture(
    recipe: Path, overrides: tuple[str, ...], target_shape: str | None, conversations: int | None, tokens_per_conversation: int, supervised: float
) -> None:
    """Print the bytes on disk that kvshot capture RECIPE will take: exactly, for what is prepared, or for so many conversations. Needs no weights."""
    from kvshot_ds.config import load_recipe
    from kvshot_ds.describe import target_of
    from kvshot_ds.features.plan import Guess, lines

    resolved = load_recipe(recipe, split_overrides(overrides))
    name, geometry = target_of(resolved, target_shape)
    guess = Guess(conversations, tokens_per_conversation, supervised) if conversations else None
    click.echo("\n".join(lines(resolved, name, geometry, guess)))


_PLAN_CAPTURE = _with_recipe(click.command("capture")(_plan_capture))
plan.add_command(_PLAN_CAPTURE)
data.add_command(_PLAN_CAPTURE, "plan")


@cli.command()
@click.option("--folder", type=click.Path(path_type=Path), default=Path("work"), show_default=True, help="where features and runs will lie")
@_JSON
def doctor(folder: Path, as_json: bool) -> int:
    """Tell what of this machine works and what does not, with the fix. Exit status 1 if something fails. Once per rank: srun kvshot doctor."""
    return int(importlib.import_module("kvshot_ds.doctor").run(folder, as_json))


@cli.group(cls=OrderedGroup)
def runs() -> None:
    """Tell how training runs stand, from what their folders hold."""


@runs.command("list")
@click.argument("work", type=click.Path(path_type=Path), default=Path("work"))
@_JSON
def _runs_list(work: Path, as_json: bool) -> None:
    """One line for every run at or below WORK (default: work): state, steps, loss, MAT, ranks, times."""
    module = importlib.import_module("kvshot_ds.runs")
    found = module.list_runs(work)
    click.echo(json.dumps([module.to_json(line) for line in found], indent=1) if as_json else "\n".join(module.table(found)))


@runs.command("show")
@click.argument("run", type=click.Path(path_type=Path))
@_JSON
def _runs_show(run: Path, as_json: bool) -> None:
    """Options, progress, last points and checkpoints of the run in folder RUN, and how to watch and continue it."""
    module = importlib.import_module("kvshot_ds.runs")
    found = module.read_page(run)
    click.echo(json.dumps(module.to_json(found), indent=1) if as_json else "\n".join(module.page(found)))


@click.option("--target-shape", help="a known target in place of target.path: smollm2-135m, qwen3-8b or llama3.1-8b")
@click.option("--ranks", type=click.IntRange(min=1), default=1, show_default=True, help="ranks, one a device")
@click.option("--conversations", type=_CONVERSATIONS, help="so many conversations, in place of the captured or prepared ones")
@click.option("--tokens-per-conversation", type=click.IntRange(3, _TOKENS), default=1000, show_default=True, help="their length, with --conversations")
@click.option("--supervised", type=Finite(0, 1), default=0.6, show_default=True, help="share of their tokens in answers, with --conversations")
@click.option("--peak-tflops", type=Finite(min=0), help="peak of one device, for hours; default: train.peak_tflops")
@click.option("--mfu", type=Finite(0, 1, min_open=True), default=0.3, show_default=True, help="share of the peak that is reached")
@click.option("--cpu", "on_cpu", is_flag=True, help="ranks that compute on CPUs; default: where target.device is cpu")
def _plan_train(
    recipe: Path, overrides: tuple[str, ...], target_shape: str | None, ranks: int, conversations: int | None, tokens_per_conversation: int,
    supervised: float, peak_tflops: float | None, mfu: float, on_cpu: bool,
) -> None:  # fmt: skip
    """Print steps, FLOPs, hours, bytes sent and, part by part, the memory of a rank that kvshot train RECIPE will take. Needs no weights."""
    from kvshot_ds.config import load_recipe
    from kvshot_ds.describe import target_of
    from kvshot_ds.features.plan import Guess

    module = importlib.import_module("kvshot_ds.training.plan")
    resolved = load_recipe(recipe, split_overrides(overrides))
    name, geometry = target_of(resolved, target_shape)
    guess = Guess(conversations, tokens_per_conversation, supervised) if conversations else None
    tflops = resolved.train.peak_tflops if peak_tflops is None else peak_tflops
    hardware = module.Hardware(ranks, tflops, mfu, on_cpu or resolved.target.device == "cpu")
    click.echo("\n".join(module.lines(module.plan(resolved, name, geometry, guess, hardware))))


plan.add_command(_with_recipe(click.command("train")(_plan_train)))


def _complain(text: str) -> None:
    if os.environ.get("KVSHOT_DEBUG", "0") not in ("", "0"):
        traceback.print_exc()
    rank, ranks = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    click.echo(f"kvshot{f' [rank {rank} of {ranks}]' if ranks != '1' else ''}: {text}", err=True)


def guarded(call: Callable[[], Any]) -> int:
    """Exit status of `call`: 0; 2 with a text on stderr for what a user can mend; 75 when preempted; 130 when interrupted.

    If KVSHOT_DEBUG is set, a traceback stands before the text. Anything else is a fault of the program and is raised.
    """
    try:
        status = call()
        return status if isinstance(status, int) else 0
    except (KvshotError, OSError) as error:
        if not (isinstance(error, KvshotError) and error.told):
            _complain(str(error) if isinstance(error, KvshotError) else f"{error} (KVSHOT_DEBUG=1 shows where)")
        return Preempted.STATUS if isinstance(error, Preempted) else 2
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        _complain("interrupted; the same command continues where it stopped")
        return 130


def main() -> int:
    """Entry point of the `kvshot` script, and of `python -m kvshot_ds.cli` as a launcher starts it on every rank."""
    args = [a for a in sys.argv[1:] if not a.startswith(("--local_rank=", "--local-rank="))]
    several = os.environ.get("WORLD_SIZE", "1") != "1"
    try:
        status = guarded(lambda: cli.main(args, prog_name="kvshot", standalone_mode=False))
    except Exception:
        if not several:
            raise
        traceback.print_exc()
        status = 1
    if status and several:  # taking the process group down in good order would wait for ranks that are gone or stuck
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


if __name__ == "__main__":
    sys.exit(main())
