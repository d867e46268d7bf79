"""What `kvshot diagnose` found at the end of training, cell by cell."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvshot_ds.metrics import Interval
from kvshot_ds.report import blocks as b
from kvshot_ds.report.blocks import Block, Cell, Details, Figure, LegendItem, Panel, Row, Table, Text
from kvshot_ds.report.bycell import Measure, Plot, Points, Scope, heading, of_part, parts, plotted, series, y_range
from kvshot_ds.report.cells import Group, of_values
from kvshot_ds.report.course import GROUP_WORDS
from kvshot_ds.report.figures import Chart, Dot, Dots
from kvshot_ds.report.gather import Run

RULE = (
    "Taken of the trained drafters on held-out conversations (kvshot diagnose). Of one seed, intervals are over conversations; of several, they are Student's "
    "over the seeds' values, and with two or three seeds wide. Layers are averaged unless they are told apart."
)
_STEP = "draft step k"
_PARTS = {
    "queries": "query estimation",
    "gradients": "gradients",
    "gate": "gate",
    "context": "context use",
    "position": "accuracy by position",
    "frequency": "accuracy by token frequency",
    "entropy": "accuracy by target entropy",
    "drift": "drift",
}
_MASKS = {"none": "nothing masked", "far": "far positions masked", "near": "near positions masked", "all": "all positions masked"}
Found = Mapping[str, Any]
# Columns of the table of gradients: part of the diagnostics, digits, name of the quantity
_GRADIENTS = (("share", 3, "share"), ("norm_per_row", 5, "norm"), ("relative", 5, "norm"), ("effective_rows", 0, "rows"))
_FEW = 4  # runs whose commands are listed one by one


def diagnosed_blocks(all_scopes: tuple[Scope, ...]) -> list[Block]:
    """Figures of every scope; what was not diagnosed, and what does not apply to a drafter, is said."""
    blocks: list[Block] = []
    for scope in all_scopes:
        blocks += _missing(scope)
        if not any(run.diagnostics for g in scope.groups for run in g.runs):
            continue
        blocks += [] if any(isinstance(block, Text) and block.text == RULE for block in blocks) else [Text(RULE)]
        blocks += plotted(_queries(), scope)
        blocks += _by_layer(scope)
        blocks += _gradients(scope)
        blocks += plotted(_gate(), scope)
        blocks += _gate_layers(scope)
        blocks += _context(scope)
        blocks += _classes(scope)
        blocks += plotted(_drift(), scope)
        blocks += _not_applicable(scope)
    return blocks


def part(run: Run, name: str) -> Found | None:
    """A part of diagnostics.json; None if it is not there or does not apply."""
    found = (run.diagnostics or {}).get("parts", {}).get(name)
    return None if found is None or "why" in found else found


def over_seeds(group: Group, name: str, fetch: Callable[[Found], Mapping[float, Interval]]) -> Points:
    """What `fetch` reads of a part, at the places that all diagnosed seeds have."""
    runs = [run for run in group.runs if part(run, name)]
    columns = [fetch(found) for run in runs if (found := part(run, name))]
    if len(columns) < 2:
        return tuple(sorted(columns[0].items())) if columns else ()
    confidence = (runs[0].diagnostics or {}).get("confidence", 0.95)
    out = []
    for x in sorted(set.intersection(*map(set, columns))):
        values = [v for column in columns if (v := column[x].value) is not None]
        if values:
            out.append((x, of_values(values, confidence)))
    return tuple(out)


def _measure(title: str, label: str, name: str, fetch: Callable[[Found], Mapping[float, Interval]]) -> Measure:
    return Measure(title, label, lambda group: over_seeds(group, name, fetch))


def _read(value: Any) -> Interval:
    """An interval as it is written, or a number alone."""
    return Interval(value["value"], value["low"], value["high"]) if isinstance(value, Mapping) else Interval(value, None, None)


def _steps(key: str) -> Callable[[Found], dict[float, Interval]]:
    """A number of each draft step; of several layers their mean, which has no interval of its own."""

    def fetch(found: Found) -> dict[float, Interval]:
        layers = [layer["steps"] for layer in found["layers"]] if "layers" in found else [found["steps"]]
        out: dict[float, Interval] = {}
        for steps in zip(*layers, strict=True):
            values = [_read(step[key]) for step in steps]
            known = [v.value for v in values if v.value is not None]
            if known:
                out[steps[0]["k"]] = values[0] if len(values) == 1 else Interval(sum(known) / len(known), None, None)
        return out

    return fetch


def _queries() -> Plot:
    named = (("cosine", "cosine with the target's query", "cosine"), ("output_error", "error of the attention output", "error"))
    measures = [_measure(title, label, "queries", _steps(key)) for key, title, label in (*named, ("map_kl", "KL of the attention maps", "KL [nats]"))]
    caption = "Query estimation by draft step: how near the drafter's queries come to those the target would ask with, in the layers it reads."
    return Plot("queries", caption, _STEP, tuple(measures), integer_x=True)


def _by_layer(scope: Scope) -> list[Block]:
    """Cosine of each layer, a panel for each cell with several."""
    panels, rows, deepest = [], [], 0
    lines: list[Points] = []
    drawn: list[tuple[Group, list[tuple[int, Points]]]] = []
    for g in scope.groups:
        count = max((len(found["layers"]) for run in g.runs if (found := part(run, "queries"))), default=0)
        found_lines = [(i, over_seeds(g, "queries", _layer(i))) for i in range(count)]
        if count > 1:
            drawn.append((g, found_lines))
            lines += [points for _, points in found_lines]
            deepest = max(deepest, count)
    for g, found_lines in drawn:
        made = tuple(series(f"layer {i}", i, points) for i, points in found_lines)
        panels.append(Panel(g.name, Chart(_STEP, "cosine", made, f"Cosine of queries of {g.name} by layer.", integer_x=True, y_range=y_range(lines))))
        rows += [Row((heading(g), b.counted(i), b.counted(x), b.measured(v, of="cosine")), style=g.style) for i, points in found_lines for x, v in points]
    if not panels:
        return []
    table = Table("Cosine of the queries by layer", ("cell", "layer", _STEP, "cosine"), tuple(rows))
    legend = tuple(LegendItem(f"layer {i}", i) for i in range(deepest))
    figure = Figure(f"query-layers{scope.ident}", scope.said("Cosine with the target's queries, by layer of the drafter."), tuple(panels), legend, table)
    return [Details(f"Query estimation by layer{_of(scope)}", (figure,))]


def _layer(i: int) -> Callable[[Found], dict[float, Interval]]:
    return lambda found: {step["k"]: _read(step["cosine"]) for step in found["layers"][i]["steps"]}


def _gradients(scope: Scope) -> list[Block]:
    """Norm over weight norm, a panel for each cell, a row for each group of parameters."""
    blocks: list[Block] = []
    shown = [g for g in scope.groups if any(part(run, "gradients") for run in g.runs)]
    keys = list(GROUP_WORDS)

    def of(g: Group, key: str) -> dict[float, Interval]:
        return dict(
            over_seeds(
                g, "gradients", lambda found: {keys.index(k): _read(v.get(key)) for k, v in found["groups"].items() if k in keys and v.get("parameters")}
            )
        )

    everywhere = [tuple(of(g, "relative").items()) for g in shown]
    for n, (title, groups) in enumerate(parts(shown) if shown else []):
        panels, rows = [], []
        for g in groups:
            named = {key: of(g, key) for key in ("parameters", "share", "norm_per_row", "relative", "effective_rows")}
            dots = tuple(Dot(GROUP_WORDS[keys[int(i)]], g.style, v.value, v.low, v.high) for i, v in sorted(named["relative"].items()))
            text = f"Norm of the gradient over that of the weights, by group of parameters, of {g.name}."
            panels.append(Panel(g.name, Dots("gradient / weights", dots, text, x_range=y_range(everywhere, log=True), log=True)))
            for i in sorted(named["share"]):
                cells = [b.measured(named[key].get(i), digits, of) for key, digits, of in _GRADIENTS]
                size = named["parameters"].get(i)
                rows.append(Row((heading(g), Cell(GROUP_WORDS[keys[int(i)]]), b.millions(size.value if size else None), *cells), style=g.style))
        head = ("cell", "parameters of", "count", "share of the squares", "norm for a row", "norm / norm of weights", "rows that give it")
        caption = (
            "Gradients at the end of training, by group of parameters: norm for each row over the norm of the weights, on a logarithmic axis. K and V "
            "projections: of the KV path."
        )
        blocks.append(
            Figure(
                f"gradients{scope.ident}-{n}",
                of_part(scope.said(caption), title, n),
                tuple(panels),
                (),
                Table("Gradients by group", head, tuple(rows), words=2),
            )
        )
    return blocks


def _gate() -> Plot:
    measures = (_measure("mean gate", "mean", "gate", _steps("mean")), _measure("share of gates below 0.05", "share", "gate", _steps("share_below_0.05")))
    return Plot("gate-end", "Gates of the trained drafters by draft step.", _STEP, measures, integer_x=True)


def _gate_layers(scope: Scope) -> list[Block]:
    """Every layer's quantiles, of each run: a table alone."""
    rows, names = [], tuple[str, ...]()
    for g in scope.groups:
        for run in g.runs:
            for layer in (part(run, "gate") or {"layers": ()})["layers"]:
                for step in layer["steps"]:
                    quantiles = step["quantiles"] or {}
                    names = names or tuple(quantiles)
                    values = [b.shown(step["mean"]), *(b.shown(quantiles.get(q)) for q in names), b.shown(step["share_below_0.05"])]
                    seed = Cell("–" if run.seed is None else str(run.seed), value=run.seed)
                    rows.append(Row((heading(g), seed, b.counted(layer["layer"]), b.counted(step["k"]), *values), style=g.style))
    head = ("cell", "seed", "layer", _STEP, "mean", *(f"{float(q):.0%} quantile" for q in names), "share < 0.05")
    return [Details(f"Gates by layer and seed{_of(scope)}", (Table("Gates by layer, draft step and seed", head, tuple(rows)),))] if rows else []


def _context(scope: Scope) -> list[Block]:
    """MAT under each mask, a panel for each cell on one scale; alpha by step in the table."""
    shown = [g for g in scope.groups if any(part(run, "context") for run in g.runs)]
    near = next((found["near"] for g in shown for run in g.runs if (found := part(run, "context"))), None)
    keys = list(_MASKS)

    def mat(g: Group) -> dict[float, Interval]:
        return dict(over_seeds(g, "context", lambda found: {keys.index(m): _read(v["mat"]) for m, v in found["masks"].items() if m in keys}))

    def alpha(g: Group, mask: str) -> Points:
        return over_seeds(g, "context", lambda found: {a["k"]: _read(a) for a in found["masks"].get(mask, {"alpha": ()})["alpha"]})

    steps = max((len(alpha(g, "none")) for g in shown), default=0)
    everywhere = [tuple(mat(g).items()) for g in shown]
    blocks: list[Block] = []
    for n, (title, groups) in enumerate(parts(shown) if shown else []):
        panels, rows = [], []
        for g in groups:
            by_mask = mat(g)
            dots = tuple(Dot(_MASKS[keys[int(i)]], g.style, v.value, v.low, v.high) for i, v in sorted(by_mask.items()))
            whole = by_mask.get(0.0)
            panels.append(
                Panel(g.name, Dots("MAT", dots, f"MAT of {g.name} with prefix positions masked.", whole.value if whole else None, y_range(everywhere)))
            )
            for i, v in sorted(by_mask.items()):
                alphas = b.padded([b.measured(a, of="α") for _, a in alpha(g, keys[int(i)])], steps)
                rows.append(Row((heading(g), Cell(_MASKS[keys[int(i)]]), *alphas, b.measured(v, 2, "MAT")), style=g.style))
        caption = (
            f"Context use: MAT when what the drafter reads of the target is masked at prefix positions. Near: within {near} tokens. Dotted: nothing masked."
        )
        head = ("cell", "masked", *map(b.alpha_name, range(steps)), "MAT")
        blocks.append(
            Figure(
                f"context{scope.ident}-{n}", of_part(scope.said(caption), title, n), tuple(panels), (), Table("αₖ and MAT by mask", head, tuple(rows), words=2)
            )
        )
    return blocks


def _classes(scope: Scope) -> list[Block]:
    """alpha at the first and the last step over the classes of each kind, and what the classes are."""
    kinds = {"position": "position in the answer", "frequency": "frequency of the token", "entropy": "entropy of the target"}
    found = {kind: next((p for g in scope.groups for run in g.runs if (p := part(run, kind))), None) for kind in kinds}
    last = max((len(p["classes"][0]["alpha"]) for p in found.values() if p and p["classes"]), default=1) - 1

    def at(k: int) -> Callable[[Found], dict[float, Interval]]:
        return lambda p: {i: _read(c["alpha"][k]) for i, c in enumerate(p["classes"], 1) if k < len(c["alpha"])}

    measures = [_measure(f"{words}: {b.alpha_name(k)}", b.alpha_name(k), kind, at(k)) for k in dict.fromkeys((0, last)) for kind, words in kinds.items()]
    caption = "Step-wise acceptance by class of row, from low to high. The table below says which rows a class holds."
    rows = tuple(
        Row((Cell(kinds[kind], p.get("of", "")), b.counted(i), Cell(_bounds(c)), b.counted(c["rows"])))
        for kind, p in found.items()
        if p
        for i, c in enumerate(p["classes"], 1)
    )
    figures = plotted(Plot("classes", caption, "class", tuple(measures), integer_x=True), scope)
    return [*figures, Details(f"What the classes are{_of(scope)}", (Table("Classes of rows", ("by", "class", "from – to", "rows"), rows),))] if figures else []


def _bounds(c: Found) -> str:
    low, high = (x if x is None or isinstance(x, int) else f"{x:.2f}" for x in (c["from"], c["to"]))
    return f"{low} and more" if high is None else f"{low} – {high}"


def _drift() -> Plot:
    named = (("cosine", "cosine with the target's state"), ("norm_ratio", "norm over the target's"), ("rank", "effective rank"))
    measures = tuple(_measure(title, title.split(" ")[0], "drift", _steps(key)) for key, title in named)
    return Plot("drift", "Drift of the drafter's own state, by draft step, from the target's at the same position.", _STEP, measures, integer_x=True)


def _of(scope: Scope) -> str:
    return f": sweep {scope.sweep.name}" if scope.sweep else ""


def _missing(scope: Scope) -> list[Block]:
    """Runs without diagnostics: one by one, or, of many, how many and a loop over them."""
    runs = [run for g in scope.groups for run in g.runs if run.diagnostics is None]
    if len(runs) <= _FEW:
        return [b.missing(f"diagnostics of {run.name}", "diagnose", run.folder) for run in runs]
    recipes = " ".join(shlex.quote(str(run.folder / "recipe.yaml")) for run in runs)
    command = f"for recipe in {recipes}; do kvshot diagnose $recipe; done"
    if scope.sweep and len(runs) == sum(len(g.runs) for g in scope.groups):
        command = f"for recipe in {shlex.quote(str(runs[0].folder.parent))}/*/recipe.yaml; do kvshot diagnose $recipe; done"
    return [Text(f"diagnostics of {len(runs)} runs{_of(scope)}", "missing", command)]


def _not_applicable(scope: Scope) -> list[Block]:
    """Which parts do not apply to which cells, and why."""
    why: dict[tuple[str, str], list[str]] = {}
    for g in scope.groups:
        reasons = {(name, str(p["why"])): None for run in g.runs for name, p in ((run.diagnostics or {}).get("parts") or {}).items() if "why" in p}
        for key in reasons:
            why.setdefault(key, []).append(g.name)
    items: Sequence[str] = [f"{_PARTS.get(name, name)}: {reason} ({', '.join(names)})" for (name, reason), names in why.items()]
    return [Details(f"What does not apply to which drafter{_of(scope)}", (b.Bullets(tuple(items)),))] if items else []
