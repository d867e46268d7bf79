"""Capture as a whole: units of work over Ray actors, with progress, retries and resume. `kvshot capture` calls `run`."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from data_prep.capture import CaptureJob, CaptureWorker, Unit
from data_prep.pool import Pool, clear_leftovers, same_configuration, sole_user
from data_prep.progress import Progress
from kvshot_ds.config import CaptureConfig, Recipe
from kvshot_ds.errors import ConfigError, KvshotError
from kvshot_ds.features.manifest import SPLITS, Manifest, ShardIndex, Split, SplitCounts, save_token_counts
from kvshot_ds.features.plan import sample_kinds
from kvshot_ds.features.shard import ShardReader, count_labels
from kvshot_ds.features.spec import FeatureSpec
from kvshot_ds.features.verify import manifest_facts
from kvshot_ds.files import IN_FLIGHT, AnyPath, absolute, disk_full, exists, names, remove, size, write_atomic
from kvshot_ds.geometry import Geometry
from kvshot_ds.provenance import stamp
from kvshot_ds.target import load_geometry, tokenizer_digest, weights_digest


@dataclass(frozen=True)
class CaptureSummary:
    """What lies in the folder after a capture. tokens, rows (supervised teacher rows), bytes (of tars): over all splits. rejected:
    conversations in quarantine.jsonl. reused: shards that were there before. seconds and tokens_per_second: of this run."""

    folder: AnyPath
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

    folder: AnyPath
    geometry: Geometry
    spec: FeatureSpec
    units: tuple[Unit, ...]
    configuration: dict[str, Any]


def run(recipe: Recipe) -> CaptureSummary:
    """Captures the features of every prepared conversation into `recipe.shards_dir` and prints a summary.

    Shards that are there already are kept, so an interrupted capture continues and a complete one returns at once. The data set (tars,
    indexes, manifest, token counts, quarantine) is the same, byte for byte, whatever the number of workers and interruptions.

    Raises ConfigError: nothing prepared, target not usable, layers out of range, folder made with another configuration, more
    workers than the Ray cluster has room for. Raises KvshotError: a unit fails, or loses its worker three times; the disk is full.
    """
    began = time.perf_counter()
    plan = make_plan(recipe)
    try:
        with sole_user(plan.folder, "kvshot capture"):
            return _complete(recipe, plan, began)
    except OSError as error:
        full = disk_full(error, plan.folder) if isinstance(plan.folder, Path) else ""
        raise KvshotError(full or f"{plan.folder}: {error}") from None


def _complete(recipe: Recipe, plan: Plan, began: float) -> CaptureSummary:
    """Captures what is missing, and writes what is derived from the whole."""
    if not same_configuration(plan.folder, plan.configuration) and names(plan.folder, ".tar"):
        raise ConfigError(f"{plan.folder}: holds tars but no provenance.json that says where they come from; set shards to another folder")
    complete = exists(Manifest.path(plan.folder))
    todo = missing(plan)
    if not todo and complete:
        print(f"capture: {plan.folder} is complete already")
        return _summary(plan, len(plan.units), Progress(plan, todo), time.perf_counter() - began)
    if complete:
        remove(Manifest.path(plan.folder))
    name = Path(recipe.target.path).resolve().name
    stamp(plan.folder, recipe, configuration=plan.configuration, manifest=manifest_facts(name, plan.geometry))
    progress = capture_units(recipe, plan, todo)
    clear_leftovers(plan.folder)
    finish(recipe, plan)
    return _summary(plan, len(plan.units) - len(todo), progress, time.perf_counter() - began)


def missing(plan: Plan) -> list[Unit]:
    """The units of `plan` that are not done, in order."""
    with ThreadPoolExecutor(IN_FLIGHT) as pool:  # behind a URL each look is an exchange with the store
        done = pool.map(lambda unit: is_done(plan.folder, unit), plan.units)
        return [unit for unit, there in zip(plan.units, done, strict=True) if not there]


def make_plan(recipe: Recipe) -> Plan:
    """Reads target configuration and prepared files, and cuts each split into units of `conversations_per_shard` lines."""
    geometry = load_geometry(recipe.target.path, recipe.target.trust_remote_code)
    options = recipe.capture
    spec = FeatureSpec.resolve(options.features, geometry)
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
        "capture.features": json.loads(json.dumps(asdict(spec))),  # as it comes back from provenance.json
        "capture.tokens_per_batch": options.tokens_per_batch,
        "capture.conversations_per_shard": options.conversations_per_shard,
        "prepared": digests,
    }
    if not options.gpus_per_worker:  # sums on a CPU round by the number of threads
        configuration["capture.cpus_per_worker (threads)"] = threads(options)
    return Plan(recipe.shards_dir, geometry, spec, tuple(units), configuration)


def threads(options: CaptureConfig) -> int:
    """CPU threads of one worker."""
    return max(1, int(options.cpus_per_worker))


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


def is_done(folder: AnyPath, unit: Unit) -> bool:
    """The unit's index and tar are there and of one size. An index that cannot be read counts as not there.

    The index is written after its tar lies on disk, so size is enough; `kvshot data verify` reads every byte.
    """
    try:
        return size(folder / unit.shard) == ShardIndex.load(folder, unit.shard).bytes
    except (KvshotError, OSError):
        return False


def capture_units(recipe: Recipe, plan: Plan, units: Sequence[Unit]) -> Progress:
    """Captures `units`, some of the plan's, over the recipe's workers; writes their shards, indexes and lines of `captures.jsonl`, nothing else."""
    options = recipe.capture
    progress = Progress(plan, units)
    if not units:
        return progress
    if torch.cuda.is_available() and not options.gpus_per_worker:
        print("capture: a GPU is here, but capture.gpus_per_worker=0: the target runs on the CPU")
    job = CaptureJob(recipe.target, plan.spec, options.tokens_per_batch, absolute(plan.folder), threads(options), options.spool)
    with Pool("capture", options, CaptureWorker, job, depth=2) as pool, progress:
        for unit, captured in pool.map(units):
            progress.add(unit, captured)
    return progress


def finish(recipe: Recipe, plan: Plan) -> None:
    """Writes what is derived from the shards' indexes: quarantine.jsonl, token counts and, last, the manifest. Every unit has to be done."""
    with ThreadPoolExecutor(IN_FLIGHT) as pool:
        loaded = pool.map(lambda unit: ShardIndex.load(plan.folder, unit.shard), plan.units)
        indexes = [(unit.split, index) for unit, index in zip(plan.units, loaded, strict=True)]
    rejected = [asdict(r) for _, index in indexes for r in index.rejected]
    if not any(index.samples for _, index in indexes):
        first = rejected[0]
        raise KvshotError(
            f"{recipe.prepared_dir}: none of {len(rejected)} conversations could be captured; {first['file']} line {first['line']}: {first['reason']}"
        )
    write_atomic(plan.folder / "quarantine.jsonl", "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rejected))
    counts = torch.zeros(plan.geometry.vocab_size, dtype=torch.int64)
    readers = [ShardReader(plan.folder, index, plan.spec, plan.geometry) for split, index in indexes if split == "train"]
    with ThreadPoolExecutor(IN_FLIGHT) as pool:
        for found in pool.map(count_labels, readers):
            counts += found
    save_token_counts(plan.folder, counts)
    Manifest(
        target_name=Path(recipe.target.path).resolve().name,
        target_digest=plan.configuration["target"],
        tokenizer_digest=plan.configuration["tokenizer"],
        geometry=plan.geometry,
        spec=plan.spec,
        splits={split: SplitCounts.of([index for name, index in indexes if name == split]) for split in SPLITS},
        rejected=len(rejected),
    ).save(plan.folder)


def _summary(plan: Plan, reused: int, progress: Progress, seconds: float) -> CaptureSummary:
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
        tokens_per_second=progress.tokens / seconds,
    )
    print(
        f"capture: {found.conversations:,} conversations, {found.tokens:,} tokens, {found.rows:,} supervised rows, {found.bytes / 1e6:,.1f} MB "
        f"({found.bytes / max(1, found.tokens):,.0f} bytes a token) in {found.shards} shards ({reused} were there) in {plan.folder}"
    )
    kinds = sample_kinds(manifest.spec, manifest.geometry, found.tokens, found.rows)
    shares = [f"{kind} {size / max(1, found.tokens):,.0f}" for kind, size in kinds.items() if size and kind != "rest"]
    rest = (found.bytes - sum(size for kind, size in kinds.items() if kind != "rest")) / max(1, found.tokens)
    print(f"capture: bytes a token: {', '.join([*shares, f'tokens, headers and padding {rest:,.0f}'])}")
    if progress.tokens:
        print(
            f"capture: {progress.tokens:,} tokens captured in {seconds:.1f} s ({found.tokens_per_second:,.0f} tokens/s, "
            f"{progress.bytes / 1e6 / seconds:,.1f} MB/s)"
        )
    if found.rejected:
        print(f"capture: {found.rejected} conversations left out, with reasons in {plan.folder / 'quarantine.jsonl'}")
    return found
