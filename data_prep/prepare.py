"""`kvshot prep`: conversations or prompts in; answered, tokenised conversations, split into train and held-out, out.

Reads top to bottom: sources -> cleaning -> spool -> synthesised prompts -> selection -> answers by the target -> tokens -> files.
Every record that comes in is kept, dropped by a rule, quarantined with a reason, or beyond what was asked for, and counted.
All of it streams: neither conversations nor tokens of the whole set are ever in memory. What is finished is stored in
`parts/spool.sqlite`, so an interrupted run continues and ends with the same files as an uninterrupted one.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, TextIO, TypeVar

from tqdm import tqdm

from data_prep.chat import ChatTemplate
from data_prep.cleaning import Cleaner, Dropped, Outcome, make_cleaner
from data_prep.endpoint import open_pool
from data_prep.parallel import Processes
from data_prep.pool import same_configuration, sole_user
from data_prep.readers import file_size
from data_prep.sources import Conversation, Quarantined, read
from data_prep.spool import DUPLICATE, QUARANTINE, Spool, Stored
from data_prep.summary import PrepSummary, SplitSummary, report
from data_prep.tokenise import BLOCK, Line, Tokeniser
from data_prep.writer import Accounts, Answered, Unit, unit_size, units_of
from kvshot_ds.config import PrepConfig, Recipe, SourceConfig
from kvshot_ds.errors import ConfigError, KvshotError
from kvshot_ds.files import aside, file_sha256, put
from kvshot_ds.provenance import stamp
from kvshot_ds.target import load_geometry, load_tokenizer, tokenizer_digest, weights_digest

T = TypeVar("T")
_ATTEMPTS = 4  # prompts written for each one wanted, at most, before synthesis stops short
_CLEANED = 256  # records cleaned at once
_CHARACTERS = 1 << 20  # and at most about so much text
_APART = {"sources", "workers", "cpus_per_worker", "gpus_per_worker", "tokenizer_processes"}  # they do not decide what comes out, or are told otherwise


class Answers(Protocol):
    """What answers units of conversations, or writes units of prompts: Ray workers or a server (`endpoint.open_pool`)."""

    def map(self, units: Iterable[Unit]) -> Iterator[tuple[Unit, Any]]:
        """(unit, list of Answered | list of prompts) as they finish. Takes units when it can begin them."""


def run(recipe: Recipe) -> PrepSummary:
    """Prepares `recipe.prepared_dir` and prints a summary; a complete folder is left as it is, an incomplete one continued.

    Writes train.jsonl and heldout.jsonl (id, messages, tokens [S], turn [S], source; tools where there are any) in order of id,
    quarantine.jsonl, dropped.jsonl, summary.json (last).
    Raises ConfigError: no source, a file or target that cannot be read, a target without chat template, a folder made with
    another configuration. Raises KvshotError: nothing usable remains, or workers keep dying.
    """
    began = time.perf_counter()
    configuration = _check(recipe)
    template = ChatTemplate(load_tokenizer(recipe.target.path, recipe.target.trust_remote_code), recipe.prep.template)
    configuration["template"] = template.digest
    folder, options = recipe.prepared_dir, recipe.prep
    start = template.open_user_turn() if options.synthesis.count else []
    cleaner = make_cleaner(options.cleaning, answers=not options.regenerate.enabled)
    with sole_user(folder, "kvshot prep"):
        if not same_configuration(folder, configuration):
            stamp(folder, recipe, configuration=configuration)
        elif (folder / "summary.json").is_file():
            shutil.rmtree(folder / "parts", ignore_errors=True)  # a kill may have left it
            print(f"prep: {folder} is complete already")
            return report(PrepSummary.load(folder / "summary.json"), folder)
        with Spool(folder / "parts" / "spool.sqlite") as spool:
            _read(options, cleaner, spool)
            with open_pool(recipe.target, options, start) as pool:
                _synthesise(pool, options, cleaner, spool)
                _select(options, spool)
                failed = _answer(pool, options, spool) if options.regenerate.enabled else 0
            counts = _encode(recipe, spool, folder)
            summary = _account(spool, counts, failed, time.perf_counter() - began)
        summary.store(folder / "summary.json")
        shutil.rmtree(folder / "parts", ignore_errors=True)
        return report(summary, folder)


def _check(recipe: Recipe) -> dict[str, Any]:
    """Everything that decides what comes out, by option, found without loading the target. Raises ConfigError on contradictions."""
    options, target = recipe.prep, recipe.target
    if not options.sources and not options.synthesis.count:
        raise ConfigError("nothing to prepare: name a file in prep.sources, or set prep.synthesis.count")
    here = options.regenerate.enabled and not options.regenerate.base_url
    if target.device == "cuda" and not options.gpus_per_worker and here:
        raise ConfigError("target.device=cuda with prep.gpus_per_worker=0: Ray hides the GPUs from such a worker; set prep.gpus_per_worker=1")
    geometry = load_geometry(target.path, target.trust_remote_code)
    if options.max_length > geometry.max_positions:
        raise ConfigError(f"prep.max_length={options.max_length} is more than the {geometry.max_positions} positions of the target")
    named = {f"prep.{k}": v for k, v in options.model_dump(mode="json", exclude=_APART).items()}
    named["prep.template"].pop("jinja")  # its content counts
    server = named["prep.regenerate"].pop("endpoint")
    named["prep.regenerate"]["base_url"] = None if here else f"model {server['model']}"
    named["prep.cleaning"]["evaluation_sets"] = [_file_digest(path, "prep.cleaning.evaluation_sets") for path in options.cleaning.evaluation_sets]
    for n, source in enumerate(options.sources):
        named |= {f"prep.sources[{n}].{part}": value for part, value in _identity(source).items()}
    return {"target": weights_digest(target.path), "tokenizer": tokenizer_digest(target.path), "target.dtype": target.dtype, **named}


def _identity(source: SourceConfig) -> dict[str, Any]:
    """What a source is known by: the content of what lies here, the name and revision of what lies on a hub."""
    same = {"format": source.format} | ({} if source.weight is None else {"weight": source.weight})
    if source.path is not None:
        return {**same, "path (content)": _file_digest(source.path, "prep.sources")}
    named = {"dataset_name": source.dataset_name, "split": source.split, "revision": source.revision}
    folder = Path(str(source.dataset)).expanduser()
    if not folder.is_dir():
        return {**same, "dataset": source.dataset, **named}
    files = sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))
    digests = [(str(path.relative_to(folder)), _file_digest(path, "prep.sources")) for path in files]
    return {**same, "dataset (content)": hashlib.sha256(json.dumps(digests).encode()).hexdigest(), **named}


def _file_digest(path: Path, option: str) -> str:
    try:
        return file_sha256(path.expanduser())
    except OSError as error:
        raise ConfigError(f"{option}: {path} cannot be read ({error.strerror}); expected a file of conversations or prompts") from None


def _read(options: PrepConfig, cleaner: Cleaner, spool: Spool) -> None:
    """Reads and cleans all sources into the spool."""
    with spool.stage("read") as todo:
        if not todo:
            return
        sizes = [file_size(source) for source in options.sources]
        size = None if None in sizes else sum(size or 0 for size in sizes)
        done = 0
        with _bar("reading", size, "B") as bar, Processes[list[Conversation | Quarantined], list[Outcome]](cleaner, options.tokenizer_processes) as processes:
            for n, source in enumerate(options.sources):
                for outcomes in processes.map(_blocks(read(source, bar.update), _CLEANED)):
                    spool.add(outcomes, n, "read", options.cleaning.exact_duplicates)
                    done += len(outcomes)
                    bar.set_postfix_str(f"{done:,} records", refresh=False)


def _synthesise(pool: Answers, options: PrepConfig, cleaner: Cleaner, spool: Spool) -> None:
    """Adds up to `synthesis.count` new prompts to the spool, under the same rules as any other.

    Waves of units: what a wave lacks, the next one writes. Which prompts count depends on the order of units, not of workers.
    """
    wanted = 0 if spool.reached("synthesised") else options.synthesis.count
    written = index = 0
    unusable, fresh = Counter[str](), dict[str, Outcome]()
    with _bar("prompts", wanted) as bar:
        while len(fresh) < wanted and written < _ATTEMPTS * wanted:
            missing = wanted - len(fresh)
            counts = [min(options.batch_size, missing - at) for at in range(0, missing, options.batch_size)]
            units = [Unit(index + n, _seed(options.seed, index + n), count) for n, count in enumerate(counts)]
            for unit, texts in sorted(_prompts(pool, spool, units), key=lambda done: done[0].index):
                for n, text in enumerate(texts, 1):
                    _weigh(text, f"synthesis-{unit.index}", n, cleaner, spool, fresh, unusable)
            index, written = index + len(units), written + missing
            bar.update(len(fresh) - bar.n)
    if len(fresh) < wanted:
        print(f"prep: only {len(fresh)} of {wanted} prompts after {written} attempts; raise prep.synthesis.temperature or max_new_tokens")
    with spool.stage("synthesised") as todo:
        if todo:
            spool.add(fresh.values(), len(options.sources), "synthesised")
            for reason, count in unusable.items():
                spool.count("synthesised", f"unusable {reason}", count)


def _prompts(pool: Answers, spool: Spool, units: list[Unit]) -> Iterator[tuple[Unit, list[str | None]]]:
    """(unit, its prompts), in any order: those stored before, then those written now, stored at once."""
    missing = []
    for unit in units:
        if (stored := spool.unit("prompts", unit.index)) is None:
            missing.append(unit)
        else:
            yield unit, stored
    for unit, texts in pool.map(missing):
        spool.store_unit("prompts", unit.index, texts)
        yield unit, texts


def _weigh(text: str | None, file: str, line: int, cleaner: Cleaner, spool: Spool, fresh: dict[str, Outcome], unusable: Counter[str]) -> None:
    """Takes a prompt into `fresh`, or counts why it is unusable."""
    if not text:
        unusable["unfinished" if text is None else "empty"] += 1
        return
    outcome = cleaner.outcome(Conversation(({"role": "user", "content": text},), file, line))
    if not isinstance(outcome.item, Conversation):
        unusable[outcome.item.rule if isinstance(outcome.item, Dropped) else "refused"] += 1
    elif outcome.item.id in fresh or spool.has(outcome.item.id):
        unusable["duplicate"] += 1
    else:
        fresh[outcome.item.id] = outcome


def _select(options: PrepConfig, spool: Spool) -> None:
    """Leaves out near duplicates, then marks what is kept."""
    with spool.stage("selected") as todo:
        if not todo:
            return
        if options.cleaning.near_duplicates:
            with _bar("near duplicates", sum(spool.sizes())) as bar:
                spool.drop_near(options.cleaning.near_duplicates, "selected", bar.update)
        spool.select([source.weight for source in options.sources], options.max_conversations)
        spool.count("selected", "unit size", unit_size(spool.sizes()[0], options))


def _answer(pool: Answers, options: PrepConfig, spool: Spool) -> int:
    """Has every kept conversation answered; returns how many a server would not answer. Raises KvshotError.

    Units hold conversations of like length, the longest first; which ones does not change when a run is continued.
    """
    kept, _ = spool.sizes()
    done, accounts = spool.done("answers"), Accounts(input=kept)
    tokens, began, refused = 0, time.perf_counter(), ""
    failing: set[int] = set()  # units with conversations that a server would not answer
    with _bar("answers", kept) as bar:

        def missing() -> Iterator[Unit]:
            for unit in units_of(spool.longest_first(), spool.counts("unit size")):
                if unit.index in done:
                    before = [Answered(**row) for row in spool.answers_of(unit.conversations)]
                    accounts.add(before, before=True)
                    failing.update({unit.index} if any(one.failed for one in before) else ())
                    bar.update(len(unit.conversations))
                else:
                    yield unit

        try:
            for unit, answered in pool.map(missing()):
                spool.store_answers(unit.index, [asdict(one) for one in answered])
                accounts.add(answered)
                if failed := [one.reason for one in answered if one.failed]:
                    failing.add(unit.index)
                    refused = failed[-1]
                tokens += sum(len(answer) for one in answered for answer in one.answers)
                bar.set_postfix_str(f"{tokens / (time.perf_counter() - began):.0f} tokens/s", refresh=False)
                bar.update(len(unit.conversations))
            accounts.check()
            if kept and accounts.failed == kept:
                raise KvshotError(f"none of {kept} conversations was answered ({refused}); look after the server, then run the command again")
        except KvshotError:
            spool.forget_units("answers", failing)  # the server was going: some failed for that while others were still answered
            raise
    return accounts.failed


def _encode(recipe: Recipe, spool: Spool, folder: Path) -> Counter[str]:
    """Tokenises what is kept into the split files, in order of id, and lists what is left out. Raises KvshotError if nothing is left."""
    counts = Counter[str]()
    spool.forget("encoded")
    names = ("train", "heldout")
    tokeniser = Tokeniser(recipe.target, recipe.prep)
    with ExitStack() as stack:
        bar = stack.enter_context(_bar("tokens", spool.sizes()[0]))
        processes = stack.enter_context(Processes[list[Stored], list[Line | Quarantined]](tokeniser, recipe.prep.tokenizer_processes))
        files = {name: stack.enter_context(_writing(folder / f"{name}.jsonl")) for name in names}
        for found in processes.map(_blocks(spool.in_order(), BLOCK)):
            with spool.together():
                for line in found:
                    if isinstance(line, Quarantined):
                        spool.leave_out("encoded", line)
                        continue
                    split = names[line.heldout]
                    files[split].write(line.text + "\n")
                    counts.update({split: 1, f"{split} tokens": line.tokens, f"{split} supervised": line.supervised})
                    counts.update({"cut": line.cut, "generated": line.generated, "turns left out": line.turns_left_out})
            bar.update(len(found))
        for name, rows in (("quarantine", spool.quarantined()), ("dropped", spool.dropped())):
            _write(folder / f"{name}.jsonl", rows)
        if not counts["train"]:
            reasons = "".join(f"\n  {count} x {reason}" for reason, count in list(_reasons(spool).items())[:5])
            left_out = sum(spool.rules().values())
            raise KvshotError(
                f"no conversation is left to train on ({counts['heldout']} held out, {left_out} in quarantine.jsonl and dropped.jsonl of {folder}){reasons}"
            )
    return counts


def _account(spool: Spool, counts: Mapping[str, int], failed: int, seconds: float) -> PrepSummary:
    """The summary. Raises KvshotError if a record is missing."""
    rules, reasons = spool.rules(), _reasons(spool)
    splits = {name: SplitSummary(counts[name], counts[f"{name} tokens"], counts[f"{name} supervised"]) for name in ("train", "heldout")}
    found = PrepSummary(
        records=spool.counts("read"),
        synthesised=spool.counts("synthesised"),
        kept=counts["train"] + counts["heldout"],
        duplicates=rules.pop(DUPLICATE, 0),
        quarantined=rules.pop(QUARANTINE, 0),
        dropped=rules,
        beyond=spool.sizes()[1],
        over_long=sum(count for reason, count in reasons.items() if reason.startswith("over-long")),
        failed=failed,
        mended=spool.counts_like("mended "),
        unusable_prompts=spool.counts_like("unusable "),
        cut=counts["cut"],
        turns_left_out=counts["turns left out"],
        generated=counts["generated"],
        seconds=round(seconds, 3),
        reasons=dict(list(reasons.items())[:20]),
        **splits,
    )
    if found.records + found.synthesised != found.kept + found.left_out:
        raise KvshotError(f"the accounts of prep do not add up: {found}; this is a fault of kvshot prep")
    return found


def _reasons(spool: Spool) -> dict[str, int]:
    """Kinds of reasons in quarantine, the most frequent first; numbers and quoted words left out where reasons of a kind differ in them."""
    kinds: dict[str, Counter[str]] = defaultdict(Counter)
    for row in spool.quarantined():
        reason = re.sub(r"^entry \d+: ", "", row["reason"])
        kinds[re.sub(r"(?<!UTF-)\d+", "N", re.sub(r"'[^']*'", "'…'", reason))][reason] += 1
    named = {kind if len(alike) > 1 else next(iter(alike)): alike.total() for kind, alike in kinds.items()}
    return dict(sorted(named.items(), key=lambda item: -item[1]))


def _blocks(items: Iterable[T], most: int) -> Iterator[list[T]]:
    """Up to `most` items each, fewer where they are long: memory holds a few blocks."""
    block, characters = list[T](), 0
    for item in items:
        block.append(item)
        conversation = item.conversation if isinstance(item, Stored) else item
        if isinstance(conversation, Conversation):
            characters += sum(len(m["content"]) for m in conversation.messages)
        if len(block) == most or characters > _CHARACTERS:
            yield block
            block, characters = [], 0
    if block:
        yield block


@contextmanager
def _writing(path: Path) -> Iterator[TextIO]:
    """A text file that takes the place of `path` once it is whole."""
    beside = aside(path)
    try:
        with open(beside, "w", encoding="utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        put(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def _write(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    with _writing(path) as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _seed(seed: int, index: int) -> int:
    """Seed of one unit of prompts: the same whichever worker gets it, whatever was done before."""
    return int(hashlib.sha256(f"{seed}/prompts/{index}".encode()).hexdigest()[:12], 16)


def _bar(what: str, total: int | None, unit: str = "conv") -> Any:
    # a log file gets a line now and then, a terminal a live bar
    often = 0.2 if sys.stderr.isatty() else 15
    return tqdm(total=total, desc=f"prep {what}", unit=unit, unit_scale=unit == "B", dynamic_ncols=True, disable=total == 0, mininterval=often)
