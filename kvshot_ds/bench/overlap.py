"""Whether a question stands in what a drafter was trained on: then its acceptance says nothing about other texts.

The rule. A question is found in a conversation if at least half of its runs of 13 words (lower case, no punctuation) stand in that conversation; a question
of fewer words if all of them stand in a row in one message, below 5 words if they are all of a user turn. 13 words in a row are no chance phrase, and they
survive another template, another line break, a question quoted inside a longer one. Half, not one: instructions and code share their
opening lines without being the same question, and a refusal should mean that it is the same. `kvshot prep`, which
loses nothing by being strict, leaves out a conversation at the first shared run (prep.cleaning.evaluation_sets).
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvshot_ds.bench.questions import Question, lines
from kvshot_ds.config import Recipe, load_recipe
from kvshot_ds.errors import ConfigError, KvshotError
from kvshot_ds.words import Hashes, growing_grams, word_hashes

NGRAM = 13
SHORT = 5  # words from which a short question is looked for within a message
SHARE = 0.5


@dataclass(frozen=True)
class Hit:
    """A question in the training data. question: its name; asked: where it stands; line: FILE:LINE of the conversation; share: of its runs of words."""

    question: str
    asked: str
    line: str
    share: float


@dataclass
class Index:
    """Runs of words of many questions. grams: by length n, ascending hashes and the questions [m, 2] that hold each (hash number, question).
    sizes: runs of each question. whole: questions of few words, by hash of all of them."""

    grams: dict[int, tuple[Hashes, npt.NDArray[np.int64]]] = field(default_factory=dict)
    sizes: list[int] = field(default_factory=list)
    whole: dict[int, list[int]] = field(default_factory=dict)

    @classmethod
    def build(cls, questions: Sequence[str]) -> Index:
        index = cls(sizes=[0] * len(questions))
        found: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for number, text in enumerate(questions):
            grown = list(growing_grams(word_hashes(text), NGRAM))
            if not grown:
                continue
            n, grams = grown[-1]
            runs = np.unique(grams).tolist()
            index.sizes[number] = len(runs)
            if n < SHORT:
                index.whole.setdefault(int(runs[0]), []).append(number)
            else:
                found[n] += [(gram, number) for gram in runs]
        for n, pairs in found.items():
            pairs.sort()
            index.grams[n] = (np.array([gram for gram, _ in pairs], np.uint64), np.array([number for _, number in pairs], np.int64))
        return index

    def shares(self, conversation: Iterable[tuple[str, str]]) -> dict[int, float]:
        """Question -> share of its runs that stand in the conversation, of (role, text) each; those without any are left out."""
        seen: dict[int, set[int]] = defaultdict(set)
        longest = max([*self.grams, SHORT - 1])
        for role, text in conversation:
            words = word_hashes(text)
            for n, grams in growing_grams(words, longest):
                if n in self.grams:
                    self._look(n, grams, seen)
                if n == len(words) < SHORT and role == "user":
                    for number in self.whole.get(int(grams[0]), ()):
                        seen[number].add(int(grams[0]))
        return {number: len(runs) / self.sizes[number] for number, runs in sorted(seen.items())}

    def _look(self, n: int, grams: Hashes, seen: dict[int, set[int]]) -> None:
        keys, owners = self.grams[n]
        wanted = np.unique(grams)
        low, high = np.searchsorted(keys, wanted, "left"), np.searchsorted(keys, wanted, "right")
        for at in np.flatnonzero(high > low):
            for number in owners[low[at] : high[at]].tolist():
                seen[number].add(int(wanted[at]))


def find(questions: Sequence[Question], path: Path, tokenizer: Any) -> list[Hit]:
    """The first line of prepared conversations in which each question stands, in the order of questions.

    A conversation kept without its text is read from its tokens. Raises KvshotError on a line that `kvshot prep` has not written.
    """
    index = Index.build(["\n".join(q.asked) or tokenizer.decode(q.tokens, skip_special_tokens=True) for q in questions])
    hits: dict[int, Hit] = {}
    for number, line in lines(path, str(path)):
        try:
            record = json.loads(line)
            spoken = [(m["role"], m["content"]) for m in record["messages"] if m.get("content")]
            spoken = spoken or [("user", tokenizer.decode(record["tokens"], skip_special_tokens=True))]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            found = f"{type(error).__name__}: {error}"
            raise KvshotError(f"{path}:{number}: expected a conversation as `kvshot prep` writes it, found {found}; prepare again") from None
        for question, share in index.shares(spoken).items():
            if share >= SHARE and question not in hits:
                hits[question] = Hit(questions[question].name, questions[question].place, f"{path}:{number}", share)
    return [hits[number] for number in sorted(hits)]


def training_data(recipe: Recipe, folders: Sequence[Path], names: Sequence[str]) -> tuple[dict[str, list[str]], dict[str, str]]:
    """Prepared training file -> drafters trained on it; and drafter -> why its training data cannot be seen.

    A run's folder holds the recipe it was trained with; a drafter without one (imported, exported) was trained on nobody knows what.
    """
    seen: dict[str, list[str]] = defaultdict(list)
    unseen: dict[str, str] = {}
    for folder, name in zip((f.resolve() for f in folders), names, strict=True):
        run = folder.parent if folder.name.startswith("drafter") else folder
        try:
            trained = recipe if run == recipe.run_dir.resolve() else load_recipe(run / "recipe.yaml") if (run / "recipe.yaml").is_file() else None
        except ConfigError as error:
            unseen[name] = f"{run / 'recipe.yaml'} cannot be read: {str(error).splitlines()[0]}"
            continue
        if trained is None:
            unseen[name] = f"{run} holds no recipe.yaml that names it"
            continue
        file = trained.prepared_dir / "train.jsonl"
        if file.is_file():
            seen[str(file)].append(name)
        else:
            unseen[name] = f"{file} is not there"
    return dict(seen), unseen
