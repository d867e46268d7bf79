"""Everything that can be wrong with a folder of shards, each thing by name: `kvshot data verify`, and what `kvshot data repair` goes by.

Every tar is read once (check.py); what is made from the shards is then compared with what they hold.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from tqdm import tqdm

from kvshot_ds.errors import KvshotError
from kvshot_ds.features.check import CAPTURE_AGAIN, Checked, Fault, check_shard
from kvshot_ds.features.manifest import FORMAT, Manifest, Rejected, ShardIndex, Split, SplitCounts, load_token_counts, shard_name
from kvshot_ds.features.shard import ShardReader
from kvshot_ds.features.spec import FeatureSpec
from kvshot_ds.files import AnyPath, exists, location, names, read_bytes, read_json
from kvshot_ds.geometry import Geometry

KNOWN = ("manifest.json", "provenance.json", "recipe.yaml", "quarantine.jsonl", "captures.jsonl", "token_counts.safetensors")
DERIVE_AGAIN = "kvshot data repair FOLDER writes it again from the shards"
SET_ASIDE = "kvshot data repair FOLDER moves it into damaged/"


@dataclass(frozen=True)
class Verified:
    """faults: in the order of the shards. unreferenced: files that no part of the data set names and that harm nothing. bytes: read from tars.
    damaged: files that repairs moved aside."""

    folder: str
    faults: tuple[Fault, ...]
    unreferenced: tuple[str, ...]
    damaged: int
    shards: int
    samples: int
    bytes: int
    seconds: float

    def lines(self) -> list[str]:
        rate = f"{self.bytes / 1e6:,.1f} MB in {self.seconds:.1f} s ({self.bytes / 1e6 / max(self.seconds, 1e-9):,.1f} MB/s)"
        found = [f"  {fault}" for fault in self.faults]
        bad = len({fault.file for fault in self.faults})
        head = f"{len(found)} fault(s) in {bad} file(s)" if found else "everything is as it was written"
        notes = [f"not part of the data set: {', '.join(self.unreferenced)}"] if self.unreferenced else []
        notes += [f"{self.damaged} file(s) of earlier repairs in damaged/"] if self.damaged else []
        return [f"{self.folder}: {self.shards} shards, {self.samples:,} conversations, {rate}", *notes, head, *found]

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "ok": not self.faults}


def load_index(folder: AnyPath, shard: str) -> tuple[ShardIndex | None, Fault | None]:
    """The index of `shard`, and what is wrong with it: not readable, or not written as an index is, byte for byte."""
    path = ShardIndex.path(folder, shard)
    try:
        found = ShardIndex.load(folder, shard)
        raw = read_bytes(path)
    except (KvshotError, OSError) as error:
        what = "is not there" if not exists(path) else str(error).removeprefix(f"{path}: ").partition("; delete")[0]
        return None, Fault(path.name, "", what, CAPTURE_AGAIN)
    if raw != _canonical(found):
        return found, Fault(path.name, "", "is not written as kvshot writes it: bytes have changed", CAPTURE_AGAIN)
    return found, None


@dataclass
class Survey:
    """What all shards together hold. faults: of shards and indexes, by shard. indexes: those that can be read. labels: of the train split, [V] int64."""

    shards: int
    faults: list[Fault]
    indexes: list[tuple[Split, ShardIndex]]
    labels: torch.Tensor
    bytes: int = 0

    @classmethod
    def of(
        cls,
        folder: AnyPath,
        shards: Sequence[tuple[Split, str]],
        spec: FeatureSpec,
        geometry: Geometry,
        jobs: int,
        seen: Callable[[int], object] = lambda _: None,
    ) -> Survey:
        """Reads `shards`, `jobs` at a time."""
        found = cls(len(shards), [], [], torch.zeros(geometry.vocab_size, dtype=torch.int64))

        def check(shard: str) -> tuple[ShardIndex | None, Checked]:
            index, fault = load_index(folder, shard)
            faults: tuple[Fault, ...] = (fault,) if fault else ()
            if index is None:
                faults += () if exists(folder / shard) else (Fault(shard, "", "is not there", CAPTURE_AGAIN),)
                return None, Checked(faults, 0, torch.zeros_like(found.labels))
            done = check_shard(ShardReader(folder, index, spec, geometry), seen)
            return index, replace(done, faults=(*faults, *done.faults))

        with ThreadPoolExecutor(jobs) as pool:  # hashing and the search for NaN leave the interpreter free
            for (split, _), (index, checked) in zip(shards, pool.map(check, [shard for _, shard in shards]), strict=True):
                found.faults += checked.faults
                found.bytes += checked.bytes
                if split == "train":
                    found.labels += checked.labels
                if index is not None:
                    found.indexes.append((split, index))
        return found

    def derived(self, folder: AnyPath, manifest: Manifest) -> list[Fault]:
        """What is wrong with the files that are made from the shards, as far as the shards can tell."""
        if len(self.indexes) < self.shards:
            return []
        faults = [*_manifest_faults(manifest, self.indexes), *_origin_faults(folder, manifest)]
        faults += _quarantine_faults(folder, [r for _, index in self.indexes for r in index.rejected])
        return faults if self.faults else [*faults, *_count_faults(folder, manifest, self.labels)]


def verify(folder: AnyPath | str, jobs: int, seen: Callable[[int], object] = lambda _: None) -> Verified:
    """Checks all that is in `folder`. Raises ConfigError if there is no readable manifest, which alone says what should be."""
    began = time.perf_counter()
    folder = location(folder)
    manifest = Manifest.load(folder)
    shards = [(split, shard) for split, counts in manifest.splits.items() for shard in counts.shards]
    survey = Survey.of(folder, shards, manifest.spec, manifest.geometry, jobs, seen)
    faults = [*survey.faults, *_same_keys(survey.indexes), *survey.derived(folder, manifest)]
    if made := _made_by(folder):
        again = f"delete it, the index of its shard and manifest.json, and run the same kvshot data {made} again"
        faults = [replace(fault, repair=again if fault.repair in (CAPTURE_AGAIN, DERIVE_AGAIN) else fault.repair) for fault in faults]
    stray, unreferenced = strangers(folder, {shard for _, shard in shards})
    faults += [Fault(name, "", "is no part of this data set, yet named like one", "delete it" if made else SET_ASIDE) for name in stray]
    return Verified(
        folder=str(folder),
        faults=tuple(faults),
        unreferenced=unreferenced,
        damaged=len(names(folder / "damaged", "")),
        shards=len(shards),
        samples=sum(len(index.samples) for _, index in survey.indexes),
        bytes=survey.bytes,
        seconds=time.perf_counter() - began,
    )


def _made_by(folder: AnyPath) -> str:
    """The command that made a folder of others: merge or subset; '' for a capture."""
    try:
        found = read_json(folder / "provenance.json")["configuration"]["command"]
    except (KvshotError, OSError, KeyError, TypeError):
        return ""
    return found if found in ("merge", "subset") else ""


def verify_with_progress(folder: AnyPath | str, jobs: int) -> Verified:
    """`verify` under a bar of the bytes read, on a terminal."""
    folder = location(folder)
    total = sum(counts.bytes for counts in Manifest.load(folder).splits.values())
    with tqdm(total=total, unit="B", unit_scale=True, desc="verify", disable=None) as bar:
        return verify(folder, jobs, bar.update)


def strangers(folder: AnyPath, shards: set[str]) -> tuple[list[str], tuple[str, ...]]:
    """Tars and indexes in `folder` that do not belong to `shards`, and other files that kvshot does not write there."""
    found = names(folder, "")
    expected = shards | {f"{shard.removesuffix('.tar')}.index.json" for shard in shards} | set(KNOWN)
    others = [name for name in found if name not in expected and name != "damaged"]
    stray = [name for name in others if name.endswith((".tar", ".index.json"))]
    return stray, tuple(name for name in others if name not in stray)


def _same_keys(indexes: Sequence[tuple[Split, ShardIndex]]) -> list[Fault]:
    first: dict[str, tuple[Split, str]] = {}
    found = []
    for split, index in indexes:
        for sample in index.samples:
            there, shard = first.setdefault(sample.key, (split, index.shard))
            if shard != index.shard:
                what = f"stands in {shard} too" + ("" if there == split else ": a conversation to train on may not be held out")
                found.append(Fault(index.shard, sample.key, what, "prepare and capture again, or leave it out with kvshot data merge --drop-duplicates"))
        twice = [key for key, count in Counter(sample.key for sample in index.samples).items() if count > 1]
        found += [Fault(index.shard, key, "comes twice in the index", CAPTURE_AGAIN) for key in twice]
    return found


def _manifest_faults(manifest: Manifest, indexes: Sequence[tuple[Split, ShardIndex]]) -> list[Fault]:
    found = []
    for split, counts in manifest.splits.items():
        if counts.shards != tuple(shard_name(split, number) for number in range(len(counts.shards))):
            found.append(Fault("manifest.json", "", f"its {split} shards are not numbered from 0 on: {', '.join(counts.shards[:4])}", DERIVE_AGAIN))
        actual = SplitCounts.of([index for name, index in indexes if name == split])
        if actual != counts:
            differ = [f"{name} {value}, the indexes {asdict(actual)[name]}" for name, value in asdict(counts).items() if asdict(actual)[name] != value]
            found.append(Fault("manifest.json", "", f"says of {split}: {'; '.join(differ)}", DERIVE_AGAIN))
    rejected = sum(len(index.rejected) for _, index in indexes)
    if rejected != manifest.rejected:
        found.append(Fault("manifest.json", "", f"says that {manifest.rejected} conversations were left out, the indexes {rejected}", DERIVE_AGAIN))
    return found


def _origin_faults(folder: AnyPath, manifest: Manifest) -> list[Fault]:
    """What the manifest says of the target and of the features against the capture's own record, provenance.json."""
    path, name = folder / "provenance.json", Manifest.path(folder).name
    if _canonical(manifest) != read_bytes(folder / name):
        return [Fault(name, "", "is not written as kvshot writes it: bytes have changed", DERIVE_AGAIN)]
    try:
        whole = read_json(path)
        record, stated = whole["configuration"], whole.get("manifest", {})
        said = {"target": manifest.target_digest, "tokenizer": manifest.tokenizer_digest, "capture.features": json.loads(json.dumps(asdict(manifest.spec)))}
        differ = [key for key, value in said.items() if key in record and record[key] != value]
        differ += [key for key, value in manifest_facts(manifest.target_name, manifest.geometry).items() if key in stated and stated[key] != value]
    except FileNotFoundError:
        return [Fault(path.name, "", "is not there: nothing says how the features were captured", "copy it from where the features come from")]
    except (KvshotError, OSError, KeyError, TypeError) as error:
        what = str(error).removeprefix(f"{path}: ").partition("; delete")[0]
        return [Fault(path.name, "", f"is not readable ({what})", "copy it from where the features come from")]
    return [Fault(name, "", f"differs from {path.name} in {', '.join(differ)}", DERIVE_AGAIN)] if differ else []


def manifest_facts(target_name: str, geometry: Geometry) -> dict[str, Any]:
    """What the manifest says and no shard can tell, as provenance.json repeats it under "manifest"."""
    return {"target_name": target_name, "geometry": json.loads(json.dumps(asdict(geometry)))}


def _canonical(value: ShardIndex | Manifest) -> bytes:
    """The file as `save` writes it."""
    return (json.dumps({"format": FORMAT, **asdict(value)}, indent=1, ensure_ascii=False) + "\n").encode()


def quarantine(rejected: Sequence[Rejected]) -> bytes:
    """The content of `quarantine.jsonl`."""
    return "".join(json.dumps(asdict(r), ensure_ascii=False) + "\n" for r in rejected).encode()


def _quarantine_faults(folder: AnyPath, rejected: Sequence[Rejected]) -> list[Fault]:
    path = folder / "quarantine.jsonl"
    try:
        found: bytes | None = read_bytes(path)
    except FileNotFoundError:
        found = None
    if found == quarantine(rejected):
        return []
    return [Fault(path.name, "", "is not there" if found is None else "does not list what the indexes say was left out", DERIVE_AGAIN)]


def _count_faults(folder: AnyPath, manifest: Manifest, labels: torch.Tensor) -> list[Fault]:
    try:
        if torch.equal(load_token_counts(folder, manifest.geometry.vocab_size), labels):
            return []
        what = "does not hold the counts of the labels of the train split"
    except KvshotError as error:
        what = str(error).removeprefix(f"{folder / 'token_counts.safetensors'}: ").partition("; delete")[0]
    return [Fault("token_counts.safetensors", "", what, DERIVE_AGAIN)]
