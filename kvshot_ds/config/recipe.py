"""A recipe: all sections, from one YAML file, under command-line overrides."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field, PlainSerializer, PlainValidator, ValidationError
from upath import UPath

from kvshot_ds.config.base import Section
from kvshot_ds.config.preparation import PrepConfig
from kvshot_ds.config.serving import BenchConfig, DecodeConfig, ServeConfig
from kvshot_ds.config.stages import CaptureConfig, EvalConfig, RayConfig, ReportConfig, TargetConfig
from kvshot_ds.config.sweep import DiagnoseConfig, SweepConfig
from kvshot_ds.config.training import TrainConfig
from kvshot_ds.errors import ConfigError
from kvshot_ds.files import AnyPath, location
from kvshot_ds.options import explain


def _place(value: Any) -> AnyPath | None:
    if value is not None and not isinstance(value, str | Path | UPath):
        raise ValueError("expected a path or a URL")
    try:
        return None if value is None else location(value)
    except ConfigError as error:
        raise ValueError(str(error)) from None


def _text(place: AnyPath | None) -> str | None:
    return None if place is None else str(place)


class Recipe(Section):
    """All options of all commands."""

    name: str = Field(description="names the run; its outputs go to work/runs/<name>", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    work: Path = Field(description="folder of all outputs")
    prepared: Path | None = Field(None, description="prepared conversations, on storage that every worker sees; empty means work/prepared")
    shards: Annotated[Path | UPath | None, PlainValidator(_place), PlainSerializer(_text, when_used="json")] = Field(
        None, description="feature shards: a folder, or a URL such as s3://bucket/folder (pip install s3fs) or gs://bucket/folder; empty means work/features"
    )
    runs: Path | None = Field(None, description="folder of the run folders; empty means work/runs (a sweep's trials lie in work/trials)")
    target: TargetConfig = Field(description="the frozen model")
    prep: PrepConfig = Field(default_factory=PrepConfig, description="kvshot prep")
    capture: CaptureConfig = Field(default_factory=CaptureConfig, description="kvshot capture")
    train: TrainConfig = Field(default_factory=TrainConfig, description="kvshot train")
    ray: RayConfig = Field(default_factory=RayConfig, description="kvshot train --ray")
    eval: EvalConfig = Field(default_factory=EvalConfig, description="kvshot eval")
    sweep: SweepConfig = Field(default_factory=SweepConfig, description="kvshot sweep run")
    diagnose: DiagnoseConfig = Field(default_factory=DiagnoseConfig, description="kvshot diagnose")
    decode: DecodeConfig = Field(default_factory=DecodeConfig, description="kvshot decode")
    bench: BenchConfig = Field(default_factory=BenchConfig, description="kvshot bench")
    serve: ServeConfig = Field(default_factory=ServeConfig, description="kvshot serve")
    report: ReportConfig = Field(default_factory=ReportConfig, description="kvshot report")

    @property
    def prepared_dir(self) -> Path:
        return self.prepared or self.work / "prepared"

    @property
    def shards_dir(self) -> AnyPath:
        return self.shards or self.work / "features"

    @property
    def run_dir(self) -> Path:
        return (self.runs or self.work / "runs") / self.name


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
    if path.is_dir():
        raise ConfigError(f"{path} is a folder, expected a recipe; a run folder's recipe is {path / 'recipe.yaml'}")
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
