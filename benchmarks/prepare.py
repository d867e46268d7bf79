"""Speed of `kvshot prep` without a target at work: reading, cleaning, tokenising with masks, each by itself, and all of it.

Short conversations are made up from a seed, so there is nothing to download. Cleaning is done by all rules but the languages, against an
evaluation set of 1,000 made-up prompts; storing is part of it. Run from the root of the repository: python -m benchmarks.prepare --target FOLDER
"""

from __future__ import annotations

import json
import os
import random
import tempfile
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import click

from benchmarks.measure import CLOCKS, table

T = TypeVar("T")


def make(path: Path, count: int, words: int, turns: int, seed: int = 0) -> None:
    """Conversations of `turns` messages and `words` English words in all, on average, drawn from data_prep/prompts.txt."""
    import data_prep

    draw = random.Random(seed)
    prompts = (Path(str(data_prep.__file__)).parent / "prompts.txt").read_text(encoding="utf-8").split()
    with open(path, "w", encoding="utf-8") as file:
        for _ in range(count):
            text = draw.choices(prompts, k=draw.randint(max(turns, words // 2), words * 3 // 2))
            cut = sorted(draw.sample(range(1, len(text)), turns - 1))
            said = [" ".join(text[a:b]) for a, b in zip([0, *cut], [*cut, len(text)], strict=True)]
            file.write(json.dumps({"conversations": [{"from": ("human", "gpt")[n % 2], "value": part} for n, part in enumerate(said)]}) + "\n")


def blocks(items: Iterator[T], size: int) -> Iterator[list[T]]:
    while block := list(islice(items, size)):
        yield block


def parts(path: Path, target: Path, folder: Path, processes: int, now: Callable[[], float]) -> list[tuple[str, int, float]]:
    """(part, conversations, seconds) of each part, its processes started before the clock."""
    from data_prep.cleaning import make_cleaner
    from data_prep.parallel import Processes
    from data_prep.sources import read
    from data_prep.spool import Spool
    from data_prep.tokenise import BLOCK, Tokeniser
    from kvshot_ds.config import CleaningConfig, PrepConfig, SourceConfig, TargetConfig

    def timed(part: str, work: Callable[[], Any]) -> Any:
        began = now()
        found = work()
        rows.append((part, count, now() - began))
        return found

    rows: list[tuple[str, int, float]] = []
    with open(path, "rb") as file:
        count = sum(1 for _ in file)
    evaluation = folder / "evaluation.jsonl"
    make(evaluation, 1000, 60, 1, seed=1)
    options = PrepConfig.model_validate({"sources": [{"path": path}], "regenerate": {"enabled": False}})
    conversations = timed("reading", lambda: list(read(SourceConfig(path=path, format="sharegpt"))))
    with Spool(folder / "spool.sqlite") as spool:
        with Processes(make_cleaner(CleaningConfig(evaluation_sets=(evaluation,)), answers=True), processes) as cleaning:
            list(cleaning.map([[c] for c in conversations[: 4 * processes]]))
            with spool.together():
                timed("cleaning", lambda: [spool.add(outcomes, 0, "read") for outcomes in cleaning.map(blocks(iter(conversations), 256))])
        with spool.together():
            timed("near duplicates", lambda: spool.drop_near(0.8, "near"))
            spool.select([None], None)
        count = spool.sizes()[0]
        with Processes(Tokeniser(TargetConfig(path=target), options), processes) as tokenising:
            list(tokenising.map([list(islice(spool.in_order(), 1))] * 4 * processes))
            timed("tokens and masks", lambda: list(map(len, tokenising.map(blocks(spool.in_order(), BLOCK)))))
    return rows


@click.command(help=__doc__)
@click.option("--target", required=True, type=click.Path(path_type=Path, exists=True), help="folder of the target: its tokenizer and chat template are used")
@click.option("--conversations", default=20_000, show_default=True, help="conversations made up")
@click.option("--words", default=60, show_default=True, help="words of a conversation, on average")
@click.option("--turns", default=2, show_default=True, help="messages of a conversation")
@click.option("--processes", default=2, show_default=True, help="processes that clean and tokenise (prep.tokenizer_processes)")
@click.option("--clock", type=click.Choice(sorted(CLOCKS)), default="wall", show_default=True, help="cpu: with --processes 1, for a machine that is shared")
def main(target: Path, conversations: int, words: int, turns: int, processes: int, clock: str) -> None:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if clock == "cpu" and processes > 1:
        raise click.UsageError("--clock cpu counts this process alone: add --processes 1")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "conversations.jsonl"
        make(path, conversations, words, turns)
        rows = parts(path, target, Path(folder), processes, CLOCKS[clock])
        click.echo(
            f"{conversations:,} conversations, {turns} messages, {words} words, {path.stat().st_size / 1e6:.0f} MB; {processes} process(es), {clock} clock"
        )
    rows.append(("all of it", conversations, sum(seconds for _, _, seconds in rows)))
    click.echo(table(("part", "conversations", "s", "conversations/s"), [(name, f"{n:,}", f"{s:.2f}", f"{n / max(s, 1e-9):,.0f}") for name, n, s in rows]))


if __name__ == "__main__":
    main()
