"""Words in a row: what makes two conversations near duplicates, and a conversation known to an evaluation set.

n-grams are those of kvshot_ds/words.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from kvshot_ds.words import BASE, Hashes, growing_grams, word_hashes

NEAR_GRAM = 5  # words of an n-gram in near duplicates
SHORT = 5  # words from which a short evaluation prompt is looked for within a message
PERMUTATIONS = 128


def near_grams(texts: Iterable[str]) -> Hashes:
    """The set of word 5-grams of a conversation, ascending; of a shorter one, all its words as one. Empty without words."""
    words = word_hashes("\n".join(texts))
    grown = list(growing_grams(words, NEAR_GRAM))
    return np.unique(grown[-1][1]) if grown else words


def jaccard(a: Hashes, b: Hashes) -> float:
    """Shared over all members of two ascending sets."""
    shared = len(np.intersect1d(a, b, assume_unique=True))
    return shared / max(1, len(a) + len(b) - shared)


def rows_per_band(threshold: float) -> int:
    """Rows of a band of the 128 minima, the most that still bring 95% of the pairs at `threshold` together."""
    return max(r for r in range(1, PERMUTATIONS + 1) if r == 1 or 1 - (1 - threshold**r) ** (PERMUTATIONS // r) >= 0.95)


def band_keys(grams: Hashes, rows: int) -> npt.NDArray[np.int64]:
    """One key for each band of the MinHash of `grams`: sets of high Jaccard similarity share one. [128 // rows]; empty for an empty set."""
    if not len(grams):
        return np.empty(0, np.int64)
    sketch = _blank().copy()
    for at in range(0, len(grams), 256):  # so that 128 times as many numbers stay in the cache
        sketch.update_batch(grams[at : at + 256].tolist())
    bands = PERMUTATIONS // rows
    minima = np.asarray(sketch.hashvalues, np.uint64)[: bands * rows].reshape(bands, rows)
    keys = np.arange(1, bands + 1, dtype=np.uint64)
    for row in range(rows):
        keys = keys * BASE + minima[:, row]
    return keys.view(np.int64)


@lru_cache(maxsize=1)
def _blank() -> Any:
    from datasketch import MinHash

    return MinHash(PERMUTATIONS, seed=1, hashfunc=int, scheme="affine64")


@dataclass(frozen=True)
class EvaluationSets:
    """n-grams of evaluation prompts. grams: by n, hashes in ascending order and the file of each; whole: short prompts, by hash."""

    names: tuple[str, ...] = ()
    grams: Mapping[int, tuple[Hashes, npt.NDArray[np.int64]]] = field(default_factory=dict)
    whole: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def build(cls, files: Mapping[str, Iterable[str]], ngram: int) -> EvaluationSets:
        """files: name -> prompts. A prompt of fewer than `ngram` words is one n-gram of its own length, and below 5 words it must be all of a user turn."""
        found: dict[int, dict[int, int]] = {}
        whole: dict[int, int] = {}
        for n_file, prompts in enumerate(files.values()):
            for prompt in prompts:
                longest = list(growing_grams(word_hashes(prompt), ngram))[-1:]
                for n, grams in longest:
                    into = found.setdefault(n, {}) if n == ngram or n >= SHORT else whole
                    for gram in grams.tolist():
                        into.setdefault(gram, n_file)
        tables = {}
        for n, grams_of in sorted(found.items()):
            keys = np.array(sorted(grams_of), np.uint64)
            tables[n] = (keys, np.array([grams_of[k] for k in keys.tolist()]))
        return cls(tuple(files), tables, whole)

    def hit(self, messages: Sequence[Mapping[str, Any]]) -> str | None:
        """The first file of which a prompt stands in one of the messages."""
        files: list[int] = []
        longest = max(self.grams, default=0)
        for message in messages:
            words = word_hashes(message["content"])
            for n, grams in growing_grams(words, max(longest, SHORT - 1)):
                if n in self.grams:
                    keys, owners = self.grams[n]
                    at = np.searchsorted(keys, grams).clip(max=len(keys) - 1)
                    files += owners[at[keys[at] == grams]].tolist()
                if n == len(words) < SHORT and message["role"] == "user" and int(grams[0]) in self.whole:
                    files.append(self.whole[int(grams[0])])
        return self.names[min(files)] if files else None
