"""`kvshot prep`: conversations or prompts in; answered, tokenised conversations, split into train and held-out, out.

Reads top to bottom: sources -> synthesised prompts -> answers by the target -> tokens -> files. Every record that comes in
is kept, quarantined with a reason, or counted as a duplicate. What the workers write is stored unit by unit, so an
interrupted run continues where it was and ends with the same files as an uninterrupted one.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from data_prep.chat import ChatError, ChatTemplate, Encoded
from data_prep.pool import Pool, same_configuration, sole_user
from data_prep.sources import Conversation, Quarantined, read
from data_prep.writer import Answered, Unit, Writer
from kvshot_ds.config import PrepConfig, Recipe
from kvshot_ds.errors import ConfigError, KvshotError
from kvshot_ds.files import file_sha256, read_json, write_atomic, write_json
from kvshot_ds.provenance import stamp
from kvshot_ds.target import load_geometry, load_tokenizer, tokenizer_digest, weights_digest

_ATTEMPTS = 4  # prompts written for each one wanted, at most, before synthesis stops short


@dataclass(frozen=True)
class SplitSummary:
    """conversations; tokens; supervised: tokens of assistant turns."""

    conversations: int = 0
    tokens: int = 0
    supervised: int = 0


@dataclass(frozen=True)
class PrepSummary:
    """Counts of one preparation. records (read from files) + synthesised = kept + duplicates + quarantined.

    unusable_prompts: written by the target and thrown away before they counted, by reason. cut: conversations cut at
    max_length. generated: tokens the target wrote as answers. seconds: of this run.
    """

    records: int
    synthesised: int
    kept: int
    duplicates: int
    quarantined: int
    unusable_prompts: dict[str, int]
    cut: int
    generated: int
    train: SplitSummary
    heldout: SplitSummary
    seconds: float


@dataclass
class Ledger:
    """What became of every record so far."""

    conversations: dict[str, Conversation] = field(default_factory=dict)
    quarantined: list[Quarantined] = field(default_factory=list)
    duplicates: int = 0

    def add(self, conversation: Conversation) -> bool:
        """False if it is an exact duplicate."""
        fresh = conversation.id not in self.conversations
        if fresh:
            self.conversations[conversation.id] = conversation
        else:
            self.duplicates += 1
        return fresh


def run(recipe: Recipe) -> PrepSummary:
    """Prepares `recipe.prepared_dir` and prints a summary; a complete folder is left as it is, an incomplete one continued.

    Writes train.jsonl and heldout.jsonl (id, messages, tokens [S], turn [S], source), quarantine.jsonl, summary.json (last).
    Raises ConfigError: no source, a file or target that cannot be read, a target without chat template, a folder made with
    another configuration. Raises KvshotError: nothing usable remains, or workers keep dying.
    """
    began = time.perf_counter()
    configuration = _check(recipe)
    template = ChatTemplate(load_tokenizer(recipe.target.path, recipe.target.trust_remote_code))
    folder, options = recipe.prepared_dir, recipe.prep
    with sole_user(folder, "kvshot prep"):
        if not same_configuration(folder, configuration):
            stamp(folder, recipe, configuration=configuration)
        elif (folder / "summary.json").is_file():
            print(f"prep: {folder} is complete already")
            return _report(_load(folder), folder)
        ledger = Ledger()
        records = _read(options, ledger)
        with Pool("prep", options, Writer, recipe.target, options) as pool:
            synthesised, unusable = _synthesise(pool, options, ledger, folder / "parts")
            answered = _answer(pool, options, ledger, folder / "parts") if options.regenerate.enabled else {}
        lines, cut = _encode(template, options, ledger, answered)
        splits = _write(folder, options, lines, ledger)
        summary = PrepSummary(
            records=records,
            synthesised=synthesised,
            kept=len(lines),
            duplicates=ledger.duplicates,
            quarantined=len(ledger.quarantined),
            unusable_prompts=unusable,
            cut=cut,
            generated=sum(len(tokens) for a in answered.values() for tokens in a.answers),
            seconds=round(time.perf_counter() - began, 3),
            **splits,
        )
        write_json(folder / "summary.json", {"status": "complete", **asdict(summary)})
        shutil.rmtree(folder / "parts", ignore_errors=True)
        return _report(summary, folder)


def _check(recipe: Recipe) -> dict[str, Any]:
    """Everything that decides what comes out, by option, found without loading the target. Raises ConfigError on contradictions."""
    options, target = recipe.prep, recipe.target
    if not options.sources and not options.synthesis.count:
        raise ConfigError("nothing to prepare: name a file in prep.sources, or set prep.synthesis.count")
    if target.device == "cuda" and not options.gpus_per_worker and options.regenerate.enabled:
        raise ConfigError("target.device=cuda with prep.gpus_per_worker=0: Ray hides the GPUs from such a worker; set prep.gpus_per_worker=1")
    geometry = load_geometry(target.path, target.trust_remote_code)
    if options.max_length > geometry.max_positions:
        raise ConfigError(f"prep.max_length={options.max_length} is more than the {geometry.max_positions} positions of the target")
    named = {f"prep.{k}": v for k, v in options.model_dump(mode="json", exclude={"sources", "workers", "cpus_per_worker", "gpus_per_worker"}).items()}
    for n, source in enumerate(options.sources):
        named[f"prep.sources[{n}].format"] = source.format
        named[f"prep.sources[{n}].path (content)"] = _file_digest(source.path)
    return {"target": weights_digest(target.path), "tokenizer": tokenizer_digest(target.path), "target.dtype": target.dtype, **named}


def _file_digest(path: Path) -> str:
    try:
        return file_sha256(path.expanduser())
    except OSError as error:
        raise ConfigError(f"prep.sources: {path} cannot be read ({error.strerror}); expected a file of conversations or prompts") from None


def _read(options: PrepConfig, ledger: Ledger) -> int:
    """Reads all sources into the ledger; returns the number of records."""
    records = 0
    for source in options.sources:
        for item in read(source, questions_only=options.regenerate.enabled):
            records += 1
            if isinstance(item, Quarantined):
                ledger.quarantined.append(item)
            else:
                ledger.add(item)
    return records


def _synthesise(pool: Pool, options: PrepConfig, ledger: Ledger, parts: Path) -> tuple[int, dict[str, int]]:
    """Adds up to `synthesis.count` new prompts to the ledger; returns how many, and how many were thrown away by reason.

    Waves of units: what a wave lacks, the next one writes. Which prompts count depends on the order of units, not of workers.
    """
    wanted = options.synthesis.count
    kept, written, index = 0, 0, 0
    unusable = Counter[str]()
    with _bar("prompts", wanted) as bar:
        while kept < wanted and written < _ATTEMPTS * wanted:
            missing = wanted - kept
            counts = [min(options.batch_size, missing - at) for at in range(0, missing, options.batch_size)]
            units = [Unit(index + n, _seed(options.seed, "prompts", index + n), count) for n, count in enumerate(counts)]
            for unit, texts in sorted(_through(pool, parts, "prompts", units), key=lambda done: done[0].index):
                for n, text in enumerate(texts, 1):
                    if text is None or not text:
                        unusable["unfinished" if text is None else "empty"] += 1
                    elif ledger.add(Conversation(({"role": "user", "content": text},), f"synthesis-{unit.index}", n)):
                        kept += 1
                        bar.update()
                    else:
                        ledger.duplicates -= 1
                        unusable["duplicate"] += 1
            index += len(units)
            written += missing
    if kept < wanted:
        print(f"prep: only {kept} of {wanted} prompts after {written} attempts; raise prep.synthesis.temperature or max_new_tokens")
    return kept, dict(unusable)


def _answer(pool: Pool, options: PrepConfig, ledger: Ledger, parts: Path) -> dict[str, Answered]:
    """The target's answers to every conversation, by id. Units hold conversations of like length, the longest first."""
    order = sorted(ledger.conversations.values(), key=lambda c: (-sum(len(m["content"]) for m in c.messages), c.id))
    batches = [order[at : at + options.batch_size] for at in range(0, len(order), options.batch_size)]
    units = [Unit(n, _seed(options.seed, "answers", n), conversations=tuple(batch)) for n, batch in enumerate(batches)]
    found: dict[str, Answered] = {}
    tokens, began = 0, time.perf_counter()
    with _bar("answers", len(order)) as bar:
        for unit, rows in _through(pool, parts, "answers", units):
            answers = [row if isinstance(row, Answered) else Answered(**row) for row in rows]
            found.update((a.id, a) for a in answers)
            tokens += sum(len(t) for a in answers for t in a.answers)
            bar.set_postfix_str(f"{tokens / (time.perf_counter() - began):.0f} tokens/s", refresh=False)
            bar.update(len(unit.conversations))
    return found


def _through(pool: Pool, parts: Path, kind: str, units: Sequence[Unit]) -> Iterator[tuple[Unit, Any]]:
    """(unit, what its worker wrote), in any order: from the parts stored before, then from the workers, stored at once."""
    missing = []
    for unit in units:
        path = parts / f"{kind}-{unit.index:06d}.json"
        if path.is_file():
            yield unit, read_json(path)
        else:
            missing.append(unit)
    for unit, rows in pool.map(missing):
        write_json(parts / f"{kind}-{unit.index:06d}.json", [asdict(row) if isinstance(row, Answered) else row for row in rows])
        yield unit, rows


def _encode(template: ChatTemplate, options: PrepConfig, ledger: Ledger, answered: dict[str, Answered]) -> tuple[list[dict[str, Any]], int]:
    """The lines of the output files, in order of id, and how many of them were cut. The rest goes to quarantine."""
    lines, cut = [], 0
    for id in sorted(ledger.conversations):
        conversation = ledger.conversations[id]
        try:
            messages, whole = _tokens(template, conversation, answered.get(id))
        except ChatError as reason:
            ledger.quarantined.append(conversation.quarantined(str(reason)))
            continue
        short = whole.cut(options.max_length)
        if short is None:
            size, limit = len(whole.tokens), options.max_length
            why = f"over-long: nothing to learn from in the first {limit} of {size} tokens" if size > limit else "no answer of at least two tokens"
            ledger.quarantined.append(conversation.quarantined(why))
            continue
        cut += len(short.tokens) < len(whole.tokens)
        lines.append({"id": id, "messages": messages, "tokens": short.tokens, "turn": short.turn, "source": conversation.source})
    return lines, cut


def _tokens(template: ChatTemplate, conversation: Conversation, answered: Answered | None) -> tuple[list[dict[str, str]], Encoded]:
    """Messages and tokens of one conversation, with the target's answers in their places. Raises ChatError."""
    if answered is None:
        return list(conversation.messages), template.encode(conversation.messages)
    if answered.reason:
        raise ChatError(answered.reason)
    messages: list[dict[str, str]] = []
    turn = 0
    unfinished: set[int] = set()
    for message in conversation.messages:
        messages.append(message)
        if message["role"] != "user":
            continue
        tokens = answered.answers[turn]
        turn += 1
        said = {"role": "assistant", "content": template.text(tokens)}
        if turn == len(answered.answers):
            return [*messages, said], template.encode_answered(messages, tokens, unfinished)
        messages.append(said)
        if tokens[-1] != template.end_id:
            unfinished.add(turn)
    raise AssertionError("more answers than questions")


def _write(folder: Path, options: PrepConfig, lines: list[dict[str, Any]], ledger: Ledger) -> dict[str, SplitSummary]:
    """Writes the split files and the quarantine. Raises KvshotError if there is nothing to train on."""
    quarantined = sorted(ledger.quarantined, key=lambda q: (q.file, q.line))
    write_atomic(folder / "quarantine.jsonl", _jsonl(asdict(q) for q in quarantined))
    splits: dict[str, list[dict[str, Any]]] = {"train": [], "heldout": []}
    for line in lines:
        splits["heldout" if _share(line["id"]) < options.heldout_fraction else "train"].append(line)
    if not splits["train"]:
        reasons = "".join(f"\n  {count} x {reason}" for reason, count in Counter(q.reason for q in quarantined).most_common(5))
        counts = f"{len(splits['heldout'])} held out, {len(quarantined)} in {folder / 'quarantine.jsonl'}"
        raise KvshotError(f"no conversation is left to train on ({counts}){reasons}")
    for name, rows in splits.items():
        write_atomic(folder / f"{name}.jsonl", _jsonl(rows))
    return {name: SplitSummary(len(rows), sum(len(r["tokens"]) for r in rows), sum(t > 0 for r in rows for t in r["turn"])) for name, rows in splits.items()}


def _jsonl(rows: Iterable[dict[str, Any]]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _share(id: str) -> float:
    """A number in [0, 1) that depends on nothing but the id."""
    return int(hashlib.sha256(f"heldout/{id}".encode()).hexdigest()[:12], 16) / 16**12


def _seed(seed: int, kind: str, index: int) -> int:
    """Seed of one unit: the same whichever worker gets it, whatever was done before."""
    return int(hashlib.sha256(f"{seed}/{kind}/{index}".encode()).hexdigest()[:12], 16)


def _bar(what: str, total: int) -> Any:
    # a log file gets a line now and then, a terminal a live bar
    return tqdm(total=total, desc=f"prep {what}", unit="conv", dynamic_ncols=True, disable=total == 0, mininterval=0.2 if sys.stderr.isatty() else 15)


def _load(folder: Path) -> PrepSummary:
    value = read_json(folder / "summary.json")
    del value["status"]
    return PrepSummary(**{**value, "train": SplitSummary(**value["train"]), "heldout": SplitSummary(**value["heldout"])})


def _report(found: PrepSummary, folder: Path) -> PrepSummary:
    """Prints the summary and returns it."""
    thrown = "".join(f", {count} {reason}" for reason, count in found.unusable_prompts.items())
    print(f"prep: {found.records} records read, {found.synthesised} prompts written by the target" + (f" (thrown away:{thrown[1:]})" if thrown else ""))
    print(f"prep: {found.kept} kept, {found.duplicates} duplicates dropped, {found.quarantined} quarantined, {found.cut} cut at max_length")
    for name, split in (("train", found.train), ("heldout", found.heldout)):
        print(f"prep: {name}: {split.conversations} conversations, {split.tokens:,} tokens, {split.supervised:,} of them supervised")
    if not found.heldout.conversations:
        print("prep: nothing is held out, so kvshot eval and decode will have nothing to measure on; prepare more, or raise prep.heldout_fraction")
    if found.quarantined:
        print(f"prep: reasons in {folder / 'quarantine.jsonl'}")
    print(f"prep: {found.generated:,} answer tokens, {found.seconds:.0f} s, in {folder}")
    return found
