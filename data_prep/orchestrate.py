"""Capture as a whole: units of work over Ray actors, with progress, retries and resume. `kvshot capture` calls `run`."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from data_prep.capture import CaptureJob, CaptureWorker, Unit
from data_prep.pool import Pool, clear_leftovers, same_configuration, sole_user
from kvshot_ds.config import Recipe
from kvshot_ds.errors import ConfigError, KvshotError
from kvshot_ds.features.manifest import SPLITS, Manifest, ShardIndex, Split, SplitCounts, save_token_counts
from kvshot_ds.features.shard import ShardReader
from kvshot_ds.features.spec import FeatureSpec, teacher_rows
from kvshot_ds.files import write_atomic
from kvshot_ds.geometry import Geometry
from kvshot_ds.provenance import stamp, versions
from kvshot_ds.target import load_geometry, tokenizer_digest, weights_digest


@dataclass(frozen=True)
class CaptureSummary:
    """What lies in the folder after a capture. tokens, rows (supervised teacher rows), bytes (of tars): over all splits. rejected:
    conversations in quarantine.jsonl. reused: shards that were there before. seconds and tokens_per_second: of this run."""

    folder: Path
    shards: int
    reused: int
    conversations: int
    rejected: int
    tokens: int
    rows: int
    bytes: int
    seconds: float
    tokens_per_second: float


@dataclass(frozen=True)
class Plan:
    """Everything decided before any worker starts. configuration: named values that must be the same for shards to lie together."""

    folder: Path
    geometry: Geometry
    spec: FeatureSpec
    units: tuple[Unit, ...]
    configuration: dict[str, Any]


def run(recipe: Recipe) -> CaptureSummary:
    """Captures the features of every prepared conversation into `recipe.shards_dir` and prints a summary.

    Shards that are there already are kept, so an interrupted capture continues and a complete one returns at once. The shards
    are the same, byte for byte, whatever the number of workers and interruptions.

    Raises ConfigError: nothing prepared, target not usable, layers out of range, folder made with another configuration, more
    workers than the Ray cluster has room for. Raises KvshotError: a unit fails, or loses its worker three times.
    """
    began = time.perf_counter()
    plan = make_plan(recipe)
    with sole_user(plan.folder, "kvshot capture"):
        if not same_configuration(plan.folder, plan.configuration) and any(plan.folder.glob("*.tar")):
            raise ConfigError(f"{plan.folder}: holds tars but no provenance.json that says where they come from; set shards to another folder")
        manifest_path = Manifest.path(plan.folder)
        complete = manifest_path.is_file()
        todo = [unit for unit in plan.units if not is_done(plan.folder, unit, whole=not complete)]
        if not todo and complete:
            print(f"capture: {plan.folder} is complete already")
            return _summary(plan, len(plan.units), 0, time.perf_counter() - began)
        manifest_path.unlink(missing_ok=True)
        stamp(plan.folder, recipe, configuration=plan.configuration)
        captured = _capture(recipe, plan, todo) if todo else 0
        clear_leftovers(plan.folder)
        _finish(recipe, plan)
        return _summary(plan, len(plan.units) - len(todo), captured, time.perf_counter() - began)


def make_plan(recipe: Recipe) -> Plan:
    """Reads target configuration and prepared files, and cuts each split into units of `conversations_per_shard` lines."""
    geometry = load_geometry(recipe.target.path, recipe.target.trust_remote_code)
    options = recipe.capture
    spec = FeatureSpec.resolve(options.features, geometry.num_layers)
    if recipe.target.device == "cuda" and not options.gpus_per_worker:
        raise ConfigError("target.device=cuda with capture.gpus_per_worker=0: Ray hides the GPUs from such a worker; set capture.gpus_per_worker=1")
    prepared = recipe.prepared_dir
    if not (prepared / "summary.json").is_file():
        raise ConfigError(f"{prepared}: no summary.json there: nothing is prepared, or not to the end; run kvshot prep")
    units: list[Unit] = []
    digests: dict[str, str] = {}
    for split in SPLITS:
        found, digests[split] = cut(split, prepared / f"{split}.jsonl", options.conversations_per_shard)
        units += found
    if not units:
        raise ConfigError(f"{prepared}: train.jsonl and heldout.jsonl are empty; nothing to capture")
    configuration = {
        "target": weights_digest(recipe.target.path),
        "tokenizer": tokenizer_digest(recipe.target.path),
        "target.dtype": recipe.target.dtype,
        # without the options that are not used: shards made before an option existed may still lie with new ones
        "capture.features": {name: list(part) if isinstance(part, tuple) else part for name, part in asdict(spec).items() if name != "query_layers" or part},
        "capture.tokens_per_batch": options.tokens_per_batch,
        "capture.conversations_per_shard": options.conversations_per_shard,
        "prepared": digests,
    }
    return Plan(recipe.shards_dir, geometry, spec, tuple(units), configuration)


def cut(split: Split, file: Path, lines: int) -> tuple[list[Unit], str]:
    """Units of `lines` lines each over a JSONL file, and the file's sha256. Raises ConfigError if the file is not readable."""
    units: list[Unit] = []
    digest, offset = hashlib.sha256(), 0
    try:
        with open(file, "rb") as stream:
            for number, raw in enumerate(stream):
                if number % lines == 0:
                    units.append(Unit(split, number // lines, file.resolve(), offset, number + 1, 0))
                units[-1] = Unit(**{**units[-1].__dict__, "count": units[-1].count + 1})
                offset += len(raw)
                digest.update(raw)
    except OSError as error:
        raise ConfigError(f"{file}: not readable ({error.strerror}); run kvshot prep") from None
    return units, digest.hexdigest()


def is_done(folder: Path, unit: Unit, whole: bool) -> bool:
    """The unit's index and tar are there and of one size, and with `whole` of one checksum. An index that cannot be read counts as not there."""
    try:
        index = ShardIndex.load(folder, unit.shard)
        with open(folder / unit.shard, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            return size == index.bytes and (not whole or hashlib.file_digest(file, "sha256").hexdigest() == index.sha256)
    except (KvshotError, OSError):
        return False


def _capture(recipe: Recipe, plan: Plan, todo: Sequence[Unit]) -> int:
    """Captures the units and returns their tokens."""
    options = recipe.capture
    if torch.cuda.is_available() and not options.gpus_per_worker:
        print("capture: a GPU is here, but capture.gpus_per_worker=0: the target runs on the CPU")
    job = CaptureJob(recipe.target, plan.spec, options.tokens_per_batch, plan.folder.resolve(), max(1, int(options.cpus_per_worker)))
    total = sum(unit.count for unit in plan.units)
    began, tokens = time.perf_counter(), 0
    with (
        Pool("capture", options, CaptureWorker, job) as pool,
        tqdm(total=total, initial=total - sum(u.count for u in todo), desc="capture", unit="conv", dynamic_ncols=True) as bar,
    ):
        for unit, index in pool.map(todo):
            tokens += sum(sample.tokens for sample in index.samples)
            bar.set_postfix_str(f"{tokens / (time.perf_counter() - began):.0f} tokens/s", refresh=False)
            bar.update(unit.count)
    return tokens


def _finish(recipe: Recipe, plan: Plan) -> None:
    """Writes what is derived from the shards' indexes: quarantine.jsonl, token counts and, last, the manifest."""
    indexes = [(unit.split, ShardIndex.load(plan.folder, unit.shard)) for unit in plan.units]
    rejected = [asdict(r) for _, index in indexes for r in index.rejected]
    if not any(index.samples for _, index in indexes):
        first = rejected[0]
        raise KvshotError(
            f"{recipe.prepared_dir}: none of {len(rejected)} conversations could be captured; {first['file']} line {first['line']}: {first['reason']}"
        )
    write_atomic(plan.folder / "quarantine.jsonl", "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rejected))
    counts = torch.zeros(plan.geometry.vocab_size, dtype=torch.int64)
    for split, index in indexes:
        if split == "train":
            counts += count_labels(ShardReader(plan.folder, index, plan.spec, plan.geometry))
    save_token_counts(plan.folder, counts)
    Manifest(
        target_name=Path(recipe.target.path).resolve().name,
        target_digest=plan.configuration["target"],
        tokenizer_digest=plan.configuration["tokenizer"],
        geometry=plan.geometry,
        spec=plan.spec,
        splits={split: SplitCounts.of([index for name, index in indexes if name == split]) for split in SPLITS},
        rejected=len(rejected),
        seconds=round(sum(index.seconds for _, index in indexes), 3),
        versions=versions(),
    ).save(plan.folder)


def count_labels(reader: ShardReader) -> torch.Tensor:
    """How often each token is a label x_{j+1} of a teacher row j in one shard, [V] int64."""
    counts = torch.zeros(reader.geometry.vocab_size, dtype=torch.int64)
    for number in range(len(reader.index.samples)):
        sample = reader.read(number, ("tokens", "turn"))
        labels = sample["tokens"][torch.from_numpy(teacher_rows(sample["turn"].numpy())) + 1]
        counts += torch.bincount(labels, minlength=len(counts))
    return counts


def _summary(plan: Plan, reused: int, captured: int, seconds: float) -> CaptureSummary:
    """From the manifest; printed."""
    manifest = Manifest.load(plan.folder)
    splits = manifest.splits.values()
    found = CaptureSummary(
        folder=plan.folder,
        shards=len(plan.units),
        reused=reused,
        conversations=sum(s.samples for s in splits),
        rejected=manifest.rejected,
        tokens=sum(s.tokens for s in splits),
        rows=sum(s.rows for s in splits),
        bytes=sum(s.bytes for s in splits),
        seconds=seconds,
        tokens_per_second=captured / seconds,
    )
    print(
        f"capture: {found.conversations} conversations, {found.tokens:,} tokens, {found.rows:,} supervised rows, {found.bytes / 1e6:,.1f} MB "
        f"in {found.shards} shards ({reused} were there) in {plan.folder}"
    )
    if captured:
        print(f"capture: {captured:,} tokens captured in {seconds:.1f} s ({found.tokens_per_second:,.0f} tokens/s)")
    if found.rejected:
        print(f"capture: {found.rejected} conversations left out, with reasons in {plan.folder / 'quarantine.jsonl'}")
    return found
