"""Words of a text as 64-bit hashes, and all of its n-grams, so that looking for one text in another is arithmetic on arrays.

A word is lower case and without punctuation; each ideograph is a word.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from functools import lru_cache

import numpy as np
import numpy.typing as npt

Hashes = npt.NDArray[np.uint64]

BASE = np.uint64(0x9E3779B97F4A7C15)
_WORD = re.compile(r"[\u2e80-\u9fff\uf900-\ufaff]|[^\W\u2e80-\u9fff\uf900-\ufaff]+")


@lru_cache(maxsize=1 << 18)
def _hash(word: str) -> int:
    return int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "little")


def word_hashes(text: str) -> Hashes:
    """A hash of each word. [words]"""
    return np.fromiter(map(_hash, _WORD.findall(text.lower())), np.uint64)


def growing_grams(words: Hashes, longest: int) -> Iterator[tuple[int, Hashes]]:
    """(n, hashes of all n words in a row [words - n + 1]) for n = 1 ... longest, as far as there are words."""
    grams = words
    for n in range(1, min(longest, len(words)) + 1):
        if n > 1:
            grams = grams[:-1] * BASE + words[n - 1 :]
        yield n, grams
