"""Answers of the target in a batch that stays full (data_prep/generate.py) against plain `model.generate`, on the same prompts.

The plain way sorts the prompts by length and gives `generate` one batch after the other; each waits for its longest answer.
Both are greedy and take turns in one process; in fp32 they write the same tokens. A full batch gains where answers differ in
length: with --spread each prompt has a limit of its own, between an eighth of --max-new-tokens and all of it, as if the target
ended there (a small target often goes on to any limit). Run from the root of the repository: python -m benchmarks.generate --target DIR
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import click
import torch

from benchmarks.measure import CLOCKS, ratio, table
from data_prep.generate import Ask, Generator, Sampling
from kvshot_ds.config import TargetConfig
from kvshot_ds.target import Target

_PROMPTS = Path(__file__).parents[1] / "data_prep" / "prompts.txt"


def plain(generator: Generator, prompts: list[list[int]], limits: list[int], batch_size: int) -> list[list[int]]:
    """`model.generate` on batches of like length, padded on the left; what is beyond a prompt's limit is cut off."""
    from transformers import GenerationConfig

    target, end = generator.target, generator.template.end_id
    order = sorted(range(len(prompts)), key=lambda n: len(prompts[n]))
    found: dict[int, list[int]] = {}
    for at in range(0, len(order), batch_size):
        rows = order[at : at + batch_size]
        width = len(prompts[rows[-1]])
        tokens = torch.tensor([[end] * (width - len(prompts[n])) + prompts[n] for n in rows], device=target.device)
        mask = torch.tensor([[0] * (width - len(prompts[n])) + [1] * len(prompts[n]) for n in rows], device=target.device)
        longest = max(limits[n] for n in rows)
        config = GenerationConfig(max_new_tokens=longest, do_sample=False, eos_token_id=sorted(generator.stops), pad_token_id=end)
        with torch.inference_mode():
            out = target.model.generate(tokens, attention_mask=mask, generation_config=config)[:, width:].tolist()
        for n, answer in zip(rows, out, strict=True):
            stop = next((i for i, token in enumerate(answer) if token in generator.stops), len(answer))
            found[n] = answer[: stop + (answer[stop : stop + 1] == [end])][: limits[n]]
    return [found[n] for n in range(len(prompts))]


def full(generator: Generator, prompts: list[list[int]], limits: list[int], batch_size: int) -> list[list[int]]:
    found: dict[int, list[int]] = {}
    asks = [Ask(n, prompt, limit) for n, (prompt, limit) in enumerate(zip(prompts, limits, strict=True))]
    generator.write(asks, lambda ask, answer: found.update({ask.key: answer}), Sampling(), batch_size)
    return [found[n] for n in range(len(prompts))]


CONTENDERS: dict[str, Callable[[Generator, list[list[int]], list[int], int], list[list[int]]]] = {"full batch": full, "model.generate": plain}


@click.command(help=__doc__)
@click.option("--target", type=click.Path(path_type=Path, exists=True, file_okay=False), required=True, help="Hugging Face folder of the target")
@click.option("--prompts", default=64, show_default=True, help="lines of data_prep/prompts.txt that are answered, from its start again where it ends")
@click.option("--batch-size", default=32, show_default=True, help="answers written together")
@click.option("--max-new-tokens", default=64, show_default=True, help="longest answer")
@click.option("--spread", is_flag=True, help="a limit for each prompt, between an eighth of --max-new-tokens and all of it")
@click.option("--dtype", type=click.Choice(["fp32", "bf16"]), default="fp32", show_default=True, help="dtype of the target")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True, help="where the target runs")
@click.option("--repeats", default=1, show_default=True, help="turns of each contender; medians are printed")
@click.option("--clock", type=click.Choice(sorted(CLOCKS)), default="wall", show_default=True, help="cpu: of all threads, for a machine that is shared")
@click.option("--threads", default=1, show_default=True, help="CPU threads")
def main(
    target: Path,
    prompts: int,
    batch_size: int,
    max_new_tokens: int,
    spread: bool,
    dtype: Literal["fp32", "bf16"],
    device: Literal["cpu", "cuda"],
    repeats: int,
    clock: str,
    threads: int,
) -> None:
    torch.set_num_threads(threads)
    generator = Generator(Target.load(TargetConfig(path=target, dtype=dtype, device=device)))
    lines = _PROMPTS.read_text(encoding="utf-8").splitlines()
    asked = [generator.template.prompt([{"role": "user", "content": lines[n % len(lines)]}]) for n in range(prompts)]
    numbers = random.Random(0)
    limits = [numbers.randint(max(1, max_new_tokens // 8), max_new_tokens) if spread else max_new_tokens for _ in asked]
    written: dict[str, list[list[int]]] = {}
    seconds: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    for contender in CONTENDERS.values():
        contender(generator, asked[:2], [2, 2], batch_size)  # what happens once is not counted
    for _ in range(repeats):
        for name, contender in CONTENDERS.items():
            begin = CLOCKS[clock]()
            written[name] = contender(generator, asked, limits, batch_size)
            seconds[name].append(CLOCKS[clock]() - begin)
    ours, other = CONTENDERS
    same = sum(a == b for a, b in zip(written[ours], written[other], strict=True))
    medians = {name: statistics.median(taken) for name, taken in seconds.items()}
    count = {name: sum(map(len, answers)) for name, answers in written.items()}
    ended = sum(len(answer) < max_new_tokens for answer in written[ours])
    click.echo(f"{target.name}, {dtype}, {device}: {prompts} prompts, {batch_size} at a time, {ended} answers are shorter than {max_new_tokens} tokens")
    click.echo(f"{threads} thread(s), {clock} clock, median of {repeats}; {same} of {prompts} answers are the same")
    rows = [(name, f"{count[name]}", f"{medians[name]:.1f}", f"{count[name] / medians[name]:.1f}") for name in CONTENDERS]
    click.echo(table(("way", "answer tokens", "s", "tokens/s"), rows))
    click.echo(f"{ours} / {other}: {ratio(count[ours] / medians[ours], count[other] / medians[other])}")


if __name__ == "__main__":
    main()
