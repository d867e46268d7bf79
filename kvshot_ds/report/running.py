"""What was run: real decoding with each drafter, and the training behind it."""

from __future__ import annotations

from typing import Any

from kvshot_ds.report import blocks as b
from kvshot_ds.report.blocks import Block, Cell, Code, Details, Figure, LegendItem, Panel, Row, Table, Text
from kvshot_ds.report.decoded import Decoding
from kvshot_ds.report.figures import COLOURS, Chart, Series
from kvshot_ds.report.gather import Run


def decoding_blocks(runs: tuple[Run, ...]) -> list[Block]:
    """Real speculative decoding: lossless or not, tau, speed, accepted tokens; runs without it are named."""
    decoded = [(run, run.decoding) for run in runs if run.decoding]
    gaps: list[Block] = [b.missing(f"decoding with {run.name}", "decode", run.folder) for run in runs if not run.decoding]
    if not decoded:
        return gaps or [b.missing("decoding", "decode")]
    how = Text(
        "Decoding of held-out prompts: the drafter proposes a chain or a tree, the target checks it in one forward. Greedy output is compared token for token "
        "with the target's own generate, sampled output with the target alone and the same noise, where there is such a thing. Speed is this "
        "implementation's on the machine that ran it, over few prompts and without an interval: where the target alone "
        "differs from row to row, so does the machine. A small target on a CPU leaves little to gain; kvshot bench is the tool for speed."
    )
    cases = [Details(f"{run.name}: the outputs that differ", (Code("\n".join(map(str, d.cases))),)) for run, d in decoded if d.different]
    notes = [Text(f"{run.name} was not compared token for token: {d.why}.", "note") for run, d in decoded if d.why]
    return [how, *gaps, *notes, _decoding_table(decoded), *cases, _joint_figure(decoded)]


def _decoding_table(decoded: list[tuple[Run, Decoding]]) -> Table:
    rows = []
    for run, d in decoded:
        drafted, alone = d.tokens_per_second.get("drafted"), d.tokens_per_second.get("alone")
        ratio = drafted / alone if drafted is not None and alone else None
        prompts = f"{d.prompts} prompts" + (f" ({d.skipped} skipped)" if d.skipped else "") + (f", {d.batch} at once" if d.batch > 1 else "")
        setting = (prompts, f"{d.max_new_tokens} new tokens", d.sampled, d.dtype, d.device)
        cells = (
            Cell(run.name, ", ".join(part for part in setting if part)),
            Cell(f"{d.identical} identical", f"{d.different} different", d.identical) if d.against else Cell("by distribution", "no token check"),
            Cell(d.drafted_by, "" if d.nodes is None else f"{d.nodes:.1f} tokens verified a round"),
            Cell(", ".join(map(str, d.histogram)), bars=d.histogram, style=run.style),
            b.measured(d.tau, 2, "τ"),
            b.counted(d.tokens, f"in {b.integer(d.target_forwards)} forwards"),
            b.shown(drafted, 1),
            b.shown(alone, 1),
            Cell("–" if ratio is None else f"{ratio:.2f}×", value=ratio),
            *(_share(d, part) for part in ("draft", "verify", "other")),
        )
        rows.append(Row(cells, "alarm" if d.different else "", run.style))
    head = (
        "drafter", "lossless", "drafted as", "rounds by accepted tokens", "τ", "tokens", "tokens/s drafted", "tokens/s of the target alone", "speed ratio",
        "time in drafter", "in target", "in neither",
    )  # fmt: skip
    return Table("Real decoding", head, tuple(rows), words=4)


def _share(d: Decoding, part: str) -> Cell:
    total, seconds = d.seconds.get("drafted"), d.seconds.get(part)
    share = seconds / total if seconds is not None and total else None
    return Cell(b.percent(share), value=share)


def _joint_figure(decoded: list[tuple[Run, Decoding]]) -> Figure:
    """Joint acceptance by step (of a tree: level) of each run: decoding, and held-out where measured. The table has the conditional ones too."""
    panels, rows = [], []
    steps = max(len(d.joint) for _, d in decoded)
    for run, d in decoded:
        held = tuple(r.interval.value for r in run.evaluation.joint[: len(d.joint)]) if run.evaluation else ()
        named = (("real decoding", tuple(rate.value for rate in d.joint), False), ("held-out rows", held, True))
        colour = run.style % COLOURS  # alone: a dash says what was measured
        series = tuple(Series(name, colour, tuple(range(len(values))), values, dashed=dashed) for name, values, dashed in named if values)
        text = f"Joint acceptance of {run.name} by draft step: {' and '.join(s.label for s in series)}."
        panels.append(Panel(f"{run.name}, {d.sampled}" if d.sampled else run.name, Chart("draft step k", "joint acceptance", series, text, integer_x=True)))
        lines = [(f"{s.label}, {d.sampled}" if d.sampled and s is series[0] else s.label, s.y) for s in series] + [
            ("real decoding, given that all before were accepted", d.conditional)
        ]
        rows += [Row((Cell(run.name), Cell(label), *b.padded([b.shown(v) for v in values], steps)), style=run.style) for label, values in lines]
    legend = (LegendItem("real decoding: share of rounds"), LegendItem("held-out, teacher-forced: share of rows", dashed=True))
    data = Table("Joint and conditional acceptance by draft step", ("drafter", "measured in", *map(str, range(steps))), tuple(rows), words=2)
    caption = (
        "Right at all steps up to k (of a tree: accepted down to level k + 1): real decoding beside the held-out joint acceptance of chains. A round starts "
        "where the last one stopped, so the two need not agree exactly: see Training against serving."
    )
    return Figure("joint", caption, tuple(panels), legend, data)


def training_blocks(runs: tuple[Run, ...]) -> list[Block]:
    """What each training run did."""
    if not runs:
        return [b.missing("training", "train")]
    blocks: list[Block] = [b.missing(f"the rest of training {run.name}, which is not finished", "train", run.folder) for run in runs if not run.train]
    if any(run.train for run in runs):
        blocks.append(training_table(runs))
    return blocks


def objective_words(run: Run) -> str:
    """Loss, weights of the steps, rows and what is added, as the run's recipe has them."""
    if run.recipe is None:
        return "–"
    o = run.recipe.train.objective
    weights = {"geometric": f"weights {o.step_decay:g}ᵏ", "exponential": f"weights exp(−k/{o.gamma:g})", "dpace": "D-PACE weights"}[o.weights]
    rows = f"{o.anchors} rows of each conversation" if o.anchors else "all rows" if o.row_fraction == 1 else f"{o.row_fraction:.0%} of the rows"
    added = [f"KV branch × {o.kv_branch_weight:g}"] if o.kv_branch_weight else []
    added += [f"queries × {o.query_distill_weight:g}"] if o.query_distill_weight else []
    added += [f"KV gradient × {o.kv_gradient_scale:g}"] if o.kv_gradient_scale != 1 else []
    return ", ".join([o.loss, f"{o.steps} steps", weights, rows, *added])


def _resumed(starts: list[Any]) -> str:
    """Where a run was continued, and on how many ranks; older versions wrote the steps alone."""
    each = (f"{start['step']} on {start['world_size']}" if isinstance(start, dict) else str(start) for start in starts)
    return ", ".join(each)


def training_table(runs: tuple[Run, ...]) -> Table:
    """What each finished training did."""
    rows = []
    for run in runs:
        if (t := run.train) is None:
            continue
        counts = [b.counted(t.get(key)) for key in ("steps", "tokens", "supervised_rows", "draft_vocab_size")]
        coverage, resumed = t.get("draft_vocab_coverage"), _resumed(t.get("resumed_from") or [])
        rest = (Cell(b.percent(coverage), value=coverage), b.counted(t.get("world_size")), Cell(b.duration(t.get("seconds")), value=t.get("seconds")))
        cells = (Cell(run.name), Cell(objective_words(run)), b.millions((t.get("parameters") or {}).get("trainable")), *counts, *rest, Cell(resumed or "no"))
        rows.append(Row(cells, style=run.style))
    head = (
        "drafter",
        "objective",
        "trained parameters",
        "steps",
        "tokens",
        "supervised rows",
        "draft vocabulary",
        "it covers",
        "ranks",
        "time",
        "resumed from step",
    )
    return Table("Training runs", head, tuple(rows), words=2)
