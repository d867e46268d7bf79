"""The paper's smaller tables beside ours: the variants of KV-only at depth 2, the comparison on 280,000 conversations, and the course of the gate."""

from __future__ import annotations

from collections.abc import Sequence

from kvshot_ds.config import KVOnlyConfig
from kvshot_ds.report.blocks import Block, Cell, Row, Table, Text, padded, shown, signed
from kvshot_ds.report.cells import Group, mean
from kvshot_ds.report.choice import alike, random_gate
from kvshot_ds.report.paper import Ours, measured_cells, paper_data

_PAPER = "paper, Qwen3-8B"
# The shares of the paper's 71,000 steps at which Figure 4 is read: after "a few thousand", at 20, 30, 45 and 60 thousand
_GATE_AT = {"start": 0.0, "after_few_thousand_steps": 3 / 71, "at_20k": 20 / 71, "at_30k": 30 / 71, "at_45k": 45 / 71, "at_60k_to_71k": 1.0}
# injection, projector, QK-norm, number of KV layers, offline, factor on the gradient -> the paper's name
_VARIANTS = {
    ("linear_rope", "linear", False, "3", False, 1.0): "baseline",
    ("linear_rope", "linear", False, "4", False, 1.0): "4 KV layers",
    ("linear_rope", "mlp", False, "3", False, 1.0): "MLP projector",
    ("linear_rope", "mlp_norm", False, "3", False, 1.0): "MLP projector + LayerNorm",
    ("hidden_to_kv", "linear", False, "3", False, 1.0): "hidden to KV",
    ("linear_rope", "linear", True, "3", False, 1.0): "QK-norm",
    ("linear_rope", "linear", False, "3", True, 1.0): "offline TTT",
    ("linear_rope", "linear", False, "3", True, 50.0): "offline TTT, KV-projection gradient x50",
}
_VARIED = ("drafter.kv.", "objective.drift", "objective.kv_gradient_scale")  # what a variant may differ in from its baseline
_GATE_HEAD = ("start", "after 3k of 71k steps", "20k", "30k", "45k", "60k to 71k")


def beside_blocks(groups: Sequence[Group], target: str) -> list[Block]:
    """The three tables; the paper's numbers stand there also where nothing here is their counterpart."""
    ours = measured_cells(groups)
    return [_ablations(ours, target), *_trees(groups, target), _gates(groups, target)]


def variant(group: Group) -> str | None:
    """The paper's name of a KV-only drafter of depth 2 from scratch; None if it has none such."""
    d = group.drafter
    if d is None or not isinstance(d.config, KVOnlyConfig) or d.depth != 2 or d.warm_start:
        return None
    kv, o = d.config.kv, group.options
    if o.get("objective.kv_branch_weight") or o.get("objective.query_distill_weight"):
        return None
    layers = {"eagle3": "3", "all": "all"}.get(str(kv.layers)) or str(len(kv.layers))
    key = (kv.injection, kv.projector, kv.qk_norm, layers, d.offline, float(o.get("objective.kv_gradient_scale", 1.0)))
    return _VARIANTS.get(key)


def _ablations(ours: list[Ours], target: str) -> Table:
    """The paper's variants, each followed by ours, and what each gains in MAT over its own side's baseline, ours over the one that was trained alike."""
    here = [(cell, name) for cell in ours if (name := variant(cell.group))]
    bases = {cell.group: cell for cell, name in here if name == "baseline"}
    classes = alike([cell.group for cell, _ in here], _VARIED)
    base_of = {group: next((bases[other] for other in found if other in bases), None) for found in classes for group in found}
    rows, paper = [], paper_data()["kv_only_depth2_ablations"]
    for line in paper:
        cells = (*(shown(line[f"alpha{k}"]) for k in (0, 3, 6)), shown(line["mat"], 2), _gain(line["mat"], paper[0]["mat"]))
        rows.append(Row((Cell(line["variant"]), Cell(_PAPER), *cells), "paper"))
        for cell in (cell for cell, name in here if name == line["variant"]):
            at = (shown(cell.alpha[k]) if k < len(cell.alpha) else Cell("–") for k in (0, 3, 6))
            base = base_of[cell.group]
            gain = _gain(cell.mat, base.mat if base else None)
            rows.append(Row((Cell(cell.group.name, cell.label), Cell(f"here, {target}"), *at, shown(cell.mat, 2), gain), "ours", cell.style))
    head = ("variant of KV-only, depth 2", "target", "α₀", "α₃", "α₆", "MAT", "MAT less the baseline's")
    return Table("The paper's variants of KV-only at depth 2 and ours. Nothing is said of differences within the noise of one seed", head, tuple(rows), words=2)


def _gain(value: float | None, base: float | None) -> Cell:
    gain = value - base if value is not None and base is not None else None
    return Cell(signed(gain, 2), value=gain)


def _trees(groups: Sequence[Group], target: str) -> list[Block]:
    """The paper's accepted tokens of real decoding after 280,000 conversations, beside tokens committed per forward here."""
    data = paper_data()
    tree, rows = data["hf_mat_tree"], []
    for line in data["hf_mat_280k"]:
        rows.append(Row((Cell(f"{line['family'].replace('_', '-')}, {line['variant']}"), Cell(_PAPER), shown(line["hf_mat"], 2), Cell("tree")), "paper"))
        for group in groups:
            d = group.drafter
            if d is None or d.family != line["family"] or ("warm_start" if d.warm_start else "scratch") != line["variant"] or d.controls or d.last_hidden:
                continue
            if tau := mean(run.decoding.tau.value for run in group.runs if run.decoding):
                drafted = " or ".join(sorted({run.decoding.drafted_by for run in group.runs if run.decoding}))
                rows.append(Row((Cell(group.name, group.runs[0].label), Cell(f"here, {target}"), shown(tau, 2), Cell(drafted)), "ours", group.style))
    text = (
        f"The paper's second comparison is of real decoding after training on 280,000 conversations, with a tree of depth {tree['depth']}, top "
        f"{tree['top_k']}, {tree['nodes']} nodes. A chain commits fewer tokens than a tree: where one was decoded here, "
        "only the order within each side can be compared."
    )
    return [
        Text(text),
        Table(
            "Tokens per round of real decoding: the paper's comparison on 280,000 conversations",
            ("drafter", "target", "MAT or τ", "drafted as"),
            tuple(rows),
            words=2,
        ),
    ]


def _gates(groups: Sequence[Group], target: str) -> Table:
    """Mean gates of hybrids at the same shares of their training as the paper's figure 4."""
    means = paper_data()["gate_mean"]
    rows = [Row((Cell("hybrid"), Cell(_PAPER), *padded([shown(means[key], 2) for key in _GATE_AT], len(_GATE_AT))), "paper")]
    for group in groups:
        found = [_course(run.scalars.get("gate/mean", ()), (run.train or {}).get("steps")) for run in group.runs]
        if any(found):
            cells = [shown(mean(values), 2) for values in zip(*(course for course in found if course), strict=True)]
            rows.append(
                Row((Cell(group.name, "random start, as the paper's" if random_gate(group) else ""), Cell(f"here, {target}"), *cells), "ours", group.style)
            )
    return Table(
        "Mean gate over training, figure 4 of the paper, and ours at the same shares of the steps", ("drafter", "target", *_GATE_HEAD), tuple(rows), words=2
    )


def _course(points: Sequence[tuple[float, float]], steps: float | None) -> list[float]:
    """The last value logged by each share of the steps, the first one for what lies before it; [] without points."""
    if not points:
        return []
    end = steps or points[-1][0]
    return [next((value for step, value in reversed(points) if step <= share * end), points[0][1]) for share in _GATE_AT.values()]
