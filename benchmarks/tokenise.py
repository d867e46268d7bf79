"""Conversations per second through the chat template, tokens and mask included: ChatTemplate.encode_many in one process.

Random conversations of one question and one answer, half of the words each. Rendering is Python on one core; the tokenizer takes all cores
unless TOKENIZERS_PARALLELISM=false. Run from the root of the repository: python -m benchmarks.tokenise TARGET
"""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import click

from data_prep.chat import ChatError, ChatTemplate
from kvshot_ds.target import load_tokenizer

WORDS = "the of and a to in is you that it he was for on are as with his they I at be this have from or one had by word but not what all were we when your"


def conversations(count: int, words: int, seed: int = 0) -> list[tuple[list[dict[str, Any]], tuple[()]]]:
    rng, known = random.Random(seed), WORDS.split()
    return [([{"role": role, "content": " ".join(rng.choices(known, k=words // 2))} for role in ("user", "assistant")], ()) for _ in range(count)]


@click.command()
@click.argument("target", type=click.Path(path_type=Path))
@click.option("--count", type=click.IntRange(min=1), default=20_000, show_default=True, help="conversations")
@click.option("--words", type=click.IntRange(min=2), default=60, show_default=True, help="words in each")
@click.option("--repeats", type=click.IntRange(min=1), default=3, show_default=True, help="the best of so many is printed")
def main(target: Path, count: int, words: int, repeats: int) -> None:
    """Print conversations and tokens per second, and processor time per conversation, with the tokenizer in the folder TARGET."""
    template, talks = ChatTemplate(load_tokenizer(target)), conversations(count, words)
    runs = []
    for _ in range(repeats):
        began, worked = time.perf_counter(), time.process_time()
        found = template.encode_many(talks)
        runs.append((time.perf_counter() - began, time.process_time() - worked))
    tokens = sum(len(one.tokens) for one in found if not isinstance(one, ChatError))
    wall, work = (min(run[i] for run in runs) for i in (0, 1))
    click.echo(f"{count / wall:,.0f} conversations/s, {tokens / wall:,.0f} tokens/s, {1e6 * work / count:.0f} us of processor time each")


if __name__ == "__main__":
    main()
