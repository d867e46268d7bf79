"""What was read, cleaned and answered so far, on disk: one sqlite file, so that memory does not grow with the data.

Conversations lie in order of id, which is a hash: what is decided in that order (near duplicates, `max_conversations`) depends on
neither the order of the sources nor on chance. A stage is one transaction: after a kill it is there as a whole, or not at all.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import sqlite3
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

from data_prep.cleaning import Dropped, Outcome
from data_prep.overlap import Hashes, jaccard, near_grams
from data_prep.sources import Conversation, Quarantined
from kvshot_ds.errors import KvshotError

_SCHEMA = """
CREATE TABLE IF NOT EXISTS conversations (number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, content TEXT NOT NULL, source INTEGER NOT NULL,
    file TEXT NOT NULL, line INTEGER NOT NULL, size INTEGER NOT NULL, bands BLOB NOT NULL, kept INTEGER NOT NULL DEFAULT 0);
CREATE TABLE IF NOT EXISTS bodies (number INTEGER PRIMARY KEY, body TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS copies (content TEXT PRIMARY KEY, count INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS left_out (stage TEXT NOT NULL, rule TEXT NOT NULL, file TEXT NOT NULL, line INTEGER NOT NULL,
    reason TEXT NOT NULL, record TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS counts (stage TEXT NOT NULL, name TEXT NOT NULL, count INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS units (kind TEXT NOT NULL, number INTEGER NOT NULL, value TEXT NOT NULL, PRIMARY KEY (kind, number));
CREATE TABLE IF NOT EXISTS answers (content TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS stages (name TEXT PRIMARY KEY);
"""
DUPLICATE = "exact_duplicates"
NEAR = "near_duplicates"
QUARANTINE = ""  # the rule of what is quarantined, not dropped
_COMPARED = 64  # conversations with which one is compared, those with the most bands in common
_PAGE = 512


@dataclass(frozen=True)
class Stored:
    """A conversation of the spool. id: that of the output, which tells copies of one conversation apart; answered: what was stored by `store_answers`."""

    id: str
    conversation: Conversation
    answered: dict[str, Any] | None


class Spool:
    """The sqlite file. A context. Only under the lock of the folder."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._db = sqlite3.connect(path, isolation_level=None)

    def __enter__(self) -> Self:
        try:
            self._db.executescript(f"PRAGMA synchronous=NORMAL; PRAGMA cache_size=-65536; PRAGMA temp_store=FILE; {_SCHEMA}")
        except sqlite3.DatabaseError as error:
            self._db.close()
            raise KvshotError(f"{self.path}: damaged ({error}); delete {self.path.parent} and run the command again") from None
        return self

    def __exit__(self, _kind: object = None, error: object = None, _where: object = None) -> None:
        self._db.close()
        if isinstance(error, sqlite3.Error):
            why = f"{self.path}: {error}; if the disk is full, make room, if the file is damaged, delete {self.path.parent}; then run the command again"
            raise KvshotError(why) from error

    def reached(self, stage: str) -> bool:
        return self._one("SELECT 1 FROM stages WHERE name=?", stage) is not None

    @contextmanager
    def stage(self, name: str) -> Iterator[bool]:
        """True inside if the stage is still to be done; what is stored inside is kept if its end is reached, and only then."""
        if self.reached(name):
            yield False
            return
        with self.together():
            yield True
            self._db.execute("INSERT INTO stages VALUES (?)", (name,))

    @contextmanager
    def together(self) -> Iterator[None]:
        """What is stored inside is kept as a whole, or not at all."""
        self._db.execute("BEGIN")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    def count(self, stage: str, name: str, count: int = 1) -> None:
        self._db.execute("INSERT INTO counts VALUES (?, ?, ?)", (stage, name, count))

    def counts(self, name: str) -> int:
        """Sum of what was counted under `name`."""
        return self._one("SELECT coalesce(sum(count), 0) FROM counts WHERE name=?", name)[0]

    def counts_like(self, prefix: str) -> dict[str, int]:
        """The same for every name that begins with `prefix`, by the rest of the name."""
        rows = self._db.execute("SELECT name, sum(count) FROM counts WHERE substr(name, 1, ?)=? GROUP BY name ORDER BY name", (len(prefix), prefix))
        return {name[len(prefix) :]: count for name, count in rows}

    def forget(self, stage: str) -> None:
        """Takes back what a stage that did not come to its end has counted and left out."""
        self._db.execute("DELETE FROM counts WHERE stage=?", (stage,))
        self._db.execute("DELETE FROM left_out WHERE stage=?", (stage,))

    def add(self, outcomes: Iterable[Outcome], source: int, stage: str, unique: bool = True) -> None:
        """Stores what became of records; they are counted under the name of the stage.

        unique: of conversations with the same messages the first stays; otherwise each further one gets an id of its own.
        """
        found = Counter[str]()
        for outcome in outcomes:
            item = outcome.item
            found[stage] += 1
            if isinstance(item, Quarantined):
                self.leave_out(stage, item)
            elif isinstance(item, Dropped):
                self._leave_out(stage, item.rule, item.file, item.line, item.reason, item.record)
            else:
                found.update(f"mended {rule}" for rule in outcome.mended)
                self._insert(item, source, outcome.bands, stage, unique)
        for name, count in found.items():
            self.count(stage, name, count)

    def _insert(self, item: Conversation, source: int, bands: Sequence[int], stage: str, unique: bool) -> None:
        id = item.id
        if before := self._one("SELECT file, line FROM conversations WHERE id=?", id):
            if unique:
                self._leave_out(stage, DUPLICATE, item.file, item.line, f"the same messages as {before[0]}:{before[1]}", item.excerpt())
                return
            count = "INSERT INTO copies VALUES (?, 2) ON CONFLICT DO UPDATE SET count=count+1 RETURNING count"
            copy = self._one(count, id)[0]
            id = hashlib.sha256(f"{item.id}/{copy}".encode()).hexdigest()[:32]
        body = json.dumps([item.messages, item.tools], ensure_ascii=False, separators=(",", ":"))
        row = (id, item.id, source, item.file, item.line, sum(len(m["content"]) for m in item.messages), array("q", bands).tobytes())
        added = self._db.execute("INSERT INTO conversations (id, content, source, file, line, size, bands) VALUES (?, ?, ?, ?, ?, ?, ?)", row)
        self._db.execute("INSERT INTO bodies VALUES (?, ?)", (added.lastrowid, body))

    def has(self, content: str) -> bool:
        return self._one("SELECT 1 FROM conversations WHERE id=?", content) is not None

    def leave_out(self, stage: str, item: Quarantined) -> None:
        self._leave_out(stage, QUARANTINE, item.file, item.line, item.reason, item.record)

    def _leave_out(self, *row: Any) -> None:
        self._db.execute("INSERT INTO left_out VALUES (?, ?, ?, ?, ?, ?)", row)

    def drop_near(self, threshold: float, stage: str, on: Any = None) -> None:
        """Leaves out every conversation with a Jaccard similarity of at least `threshold` to one of lower id that stays.

        Candidates share a band of the MinHash; whether they are alike is then counted exactly. on: called for each conversation.
        """
        columns = "key INTEGER NOT NULL, rank INTEGER NOT NULL, number INTEGER NOT NULL, PRIMARY KEY (key, rank)"
        self._db.execute(f"CREATE TABLE bands ({columns}) WITHOUT ROWID")
        grams = lru_cache(maxsize=4096)(self._grams)
        after, rank = "", 0
        while rows := self._db.execute("SELECT id, number, bands FROM conversations WHERE id > ? ORDER BY id LIMIT ?", (after, _PAGE)).fetchall():
            for id, number, blob in rows:
                after, rank = id, rank + 1
                keys = array("q", blob).tolist()
                other = next((n for n in self._candidates(keys) if jaccard(grams(number), grams(n)) >= threshold), None)
                if other is None:
                    self._db.executemany("INSERT OR IGNORE INTO bands VALUES (?, ?, ?)", [(key, rank, number) for key in keys])
                else:
                    self._drop(number, f"like {self._place(other)}: {jaccard(grams(number), grams(other)):.2f} of their word 5-grams are shared", stage)
                if on is not None:
                    on()
        self._db.execute("DROP TABLE bands")

    def _candidates(self, keys: Sequence[int]) -> list[int]:
        shared = Counter[tuple[int, int]]()
        for key in keys:
            shared.update(self._db.execute("SELECT rank, number FROM bands WHERE key=? ORDER BY rank LIMIT 256", (key,)))
        best = sorted(shared, key=lambda candidate: (-shared[candidate], candidate))
        return [number for _, number in best[:_COMPARED]]

    def _grams(self, number: int) -> Hashes:
        messages, _ = json.loads(self._one("SELECT body FROM bodies WHERE number=?", number)[0])
        return near_grams(m["content"] for m in messages)

    def _place(self, number: int) -> str:
        file, line = self._one("SELECT file, line FROM conversations WHERE number=?", number)
        return f"{file}:{line}"

    def _drop(self, number: int, reason: str, stage: str) -> None:
        file, line, body = self._one("SELECT file, line, body FROM conversations JOIN bodies USING (number) WHERE number=?", number)
        record = Conversation(tuple(json.loads(body)[0]), file, line).excerpt()
        self._leave_out(stage, NEAR, file, line, reason, record)
        self._db.execute("DELETE FROM conversations WHERE number=?", (number,))
        self._db.execute("DELETE FROM bodies WHERE number=?", (number,))

    def select(self, weights: Sequence[float | None], limit: int | None) -> None:
        """Marks what is kept: the lowest ids, `limit` at most; with weights, of each source as many as the mixture asks for."""
        mark = "UPDATE conversations SET kept=1 WHERE number IN (SELECT number FROM conversations {} ORDER BY id LIMIT ?)"
        given = [weight for weight in weights if weight is not None]
        if given:
            available = [self._one("SELECT count(*) FROM conversations WHERE source=?", n)[0] for n in range(len(given))]
            for n, count in enumerate(mixture(given, available, limit)):
                self._db.execute(mark.format("WHERE source=?"), (n, count))
        else:
            self._db.execute(mark.format(""), (-1 if limit is None else limit,))
        self._db.execute("CREATE INDEX IF NOT EXISTS kept_by_size ON conversations (size DESC, id) WHERE kept")
        self._db.execute("CREATE INDEX IF NOT EXISTS kept_by_id ON conversations (id) WHERE kept")

    def sizes(self) -> tuple[int, int]:
        """Conversations kept, and those beyond `max_conversations` or the mixture."""
        kept = self._one("SELECT count(*) FROM conversations WHERE kept")[0]
        return kept, self._one("SELECT count(*) FROM conversations")[0] - kept

    def longest_first(self) -> Iterator[Conversation]:
        """The kept conversations by length, then id."""
        query = "SELECT file, line, body FROM conversations JOIN bodies USING (number) WHERE kept ORDER BY size DESC, conversations.id"
        for file, line, body in self._db.execute(query):
            yield _conversation(file, line, body)

    def in_order(self) -> Iterator[Stored]:
        """The kept conversations by id, with their answers."""
        query = (
            "SELECT c.id, file, line, body, value FROM conversations c JOIN bodies USING (number) LEFT JOIN answers USING (content) WHERE kept ORDER BY c.id"
        )
        for id, file, line, body, value in self._db.execute(query):
            yield Stored(id, _conversation(file, line, body), None if value is None else json.loads(value))

    def unit(self, kind: str, number: int) -> Any | None:
        """What was stored for a unit of work, or None."""
        row = self._one("SELECT value FROM units WHERE kind=? AND number=?", kind, number)
        return None if row is None else json.loads(row[0])

    def store_unit(self, kind: str, number: int, value: Any) -> None:
        self._db.execute("INSERT OR REPLACE INTO units VALUES (?, ?, ?)", (kind, number, json.dumps(value, ensure_ascii=True)))

    def store_answers(self, number: int, rows: Sequence[dict[str, Any]]) -> None:
        """Answers by the id of their conversation, and that this unit is done."""
        with self.together():
            self._db.executemany("INSERT OR REPLACE INTO answers VALUES (?, ?)", [(row["id"], json.dumps(row, ensure_ascii=True)) for row in rows])
            self.store_unit("answers", number, None)

    def forget_units(self, kind: str, numbers: Iterable[int]) -> None:
        """So that they are done again."""
        with self.together():
            self._db.executemany("DELETE FROM units WHERE kind=? AND number=?", [(kind, number) for number in numbers])

    def done(self, kind: str) -> set[int]:
        return {number for (number,) in self._db.execute("SELECT number FROM units WHERE kind=?", (kind,))}

    def answers_of(self, conversations: Iterable[Conversation]) -> list[dict[str, Any]]:
        return [json.loads(self._one("SELECT value FROM answers WHERE content=?", c.id)[0]) for c in conversations]

    def rules(self) -> dict[str, int]:
        """Records left out by rule; `QUARANTINE` for those in quarantine."""
        return dict(self._db.execute("SELECT rule, count(*) FROM left_out GROUP BY rule ORDER BY rule").fetchall())

    def quarantined(self) -> Iterator[dict[str, Any]]:
        """By file and line."""
        for row in self._db.execute("SELECT file, line, reason, record FROM left_out WHERE rule='' ORDER BY file, line, reason"):
            yield dict(zip(("file", "line", "reason", "record"), row, strict=True))

    def dropped(self) -> Iterator[dict[str, Any]]:
        """By file and line."""
        for row in self._db.execute("SELECT file, line, rule, reason, record FROM left_out WHERE rule!='' ORDER BY file, line, rule, reason"):
            yield dict(zip(("file", "line", "rule", "reason", "record"), row, strict=True))

    def _one(self, query: str, *values: Any) -> Any:
        return self._db.execute(query, values).fetchone()


def mixture(weights: Sequence[float], available: Sequence[int], limit: int | None) -> list[int]:
    """How many of each source: the next place goes to the source furthest below its share (Webster's method), until that
    source has no more or there are `limit`. So shares are exact to rounding, and a smaller mixture lies within a larger one."""
    counts = [0] * len(weights)
    queue = [(0.5 / weight, n) for n, weight in enumerate(weights)]
    heapq.heapify(queue)
    while limit is None or sum(counts) < limit:
        _, n = queue[0]
        if counts[n] == available[n]:
            break
        counts[n] += 1
        heapq.heapreplace(queue, ((counts[n] + 0.5) / weights[n], n))
    return counts


def _conversation(file: str, line: int, body: str) -> Conversation:
    messages, tools = json.loads(body)
    return Conversation(tuple(messages), file, line, tuple(tools))
