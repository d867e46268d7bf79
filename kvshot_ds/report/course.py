"""The course of training, cell by cell: curves, the held-out trend against tokens, gates, gradients, and what was diagnosed on the way."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable
from functools import partial

from kvshot_ds.report import blocks as b
from kvshot_ds.report.blocks import Block, Text
from kvshot_ds.report.bycell import RANGE, Measure, Plot, Points, Scope, curve, over, plotted
from kvshot_ds.report.cells import Group
from kvshot_ds.report.gather import Run
from kvshot_ds.sweep.early import LOOKS

_STEP = "optimizer step"
_LOOKS = "looks are taken during training only, and a finished run is not trained again: set train.eval_every for a run of another name"
# Groups of parameters as the page writes them, in its order (training/gradients.GROUPS).
GROUP_WORDS = {
    "fusion": "fusion of hidden states",
    "projector": "projector of the target's KV",
    "cross": "KV path",
    "cross_kv": "K and V projections of the KV path",
    "gate": "gate",
    "self": "self path",
    "mlp": "MLP",
    "head": "head",
    "norms": "norms",
    "other": "other",
}


# Figure, what it shows, and its panels: title, axis, tags of heldout.json that are averaged; K: the draft step.
_DIAGNOSED = (
    (
        "gate-steps",
        "Gates by draft step",
        (("mean gate", "mean gate", "gate/step_K/mean"), ("gates below 0.05", "share", r"gate/step_K/share_below_0\.05")),
    ),
    (
        "query-course",
        "Query estimation",
        (
            ("cosine", "cosine", r"query/cosine/layer_\d+/K"),
            ("error of the output", "error", r"query/output_error/layer_\d+/K"),
            ("KL of the maps", "KL [nats]", r"query/map_kl/layer_\d+/K"),
        ),
    ),
    ("drift-course", "Drift of the drafter's own state", (("cosine with the target's", "cosine", "drift/cosine/K"),)),
)


def course_blocks(all_scopes: tuple[Scope, ...]) -> list[Block]:
    """Figures of every scope; what was not logged is named with the option that logs it."""
    blocks: list[Block] = []
    for scope in all_scopes:
        runs = [run for g in scope.groups for run in g.runs]
        stage, folder = ("sweep run", scope.sweep.folder) if scope.sweep else ("train", None)
        if not any(run.scalars for run in runs):
            blocks.append(b.missing(f"training curves{_of(scope)}: no TensorBoard events were found", stage, folder))
        if not any(run.looks for run in runs):
            blocks.append(_no_looks(scope, runs))
        for plot in (_trend(runs), *_logged(runs), *_looked(runs)):
            blocks += plotted(plot, scope) if plot.measures else []
    return blocks


def _no_looks(scope: Scope, runs: list[Run]) -> Text:
    """That there were no looks, and how to train with some: anew, as what is finished is not trained again."""
    steps = [run.train["steps"] for run in runs if run.train and run.train.get("steps")]
    every = f"train.eval_every={max(1, min(steps, default=100) // 10)}"
    if scope.sweep:
        recipe, work = scope.sweep.recipe, scope.sweep.recipe.work
        where = {"work": f"{work}-looks", "prepared": recipe.prepared_dir, "shards": recipe.shards_dir}
        words = ["kvshot", "sweep", "run", str(scope.sweep.folder / "recipe.yaml"), *(f"{key}={value}" for key, value in where.items()), every]
    elif runs:
        words = ["kvshot", "train", str(runs[0].folder / "recipe.yaml"), f"name={runs[0].name}-looks", every]
    else:
        words = ["kvshot", "train", "RECIPE", every]
    return Text(f"held-out acceptance in the course of training{_of(scope)}: {LOOKS if scope.sweep else _LOOKS}", "missing", shlex.join(words))


def _of(scope: Scope) -> str:
    return f" of sweep {scope.sweep.name}" if scope.sweep else ""


def _trend(runs: list[Run]) -> Plot:
    """Held-out numbers against tokens."""
    last = max((_steps_of(run.looks, r"heldout/accept_top1/(\d+)") for run in runs), default=[])
    measures = [Measure("held-out MAT", "MAT", _looks("heldout/mat"), 2), Measure("held-out joint MAT", "joint MAT", _looks("heldout/mat_joint"), 2)]
    measures += [Measure(f"held-out {b.alpha_name(k)}", b.alpha_name(k), _looks(f"heldout/accept_top1/{k}")) for k in dict.fromkeys(last[:1] + last[-1:])]
    caption = (
        "Held-out acceptance in the course of training, against the tokens trained on (those of the whole run in proportion to its steps), on the "
        f"conversations of train.eval_conversations. {RANGE}"
    )
    return Plot("trend", caption, "tokens", tuple(measures))


def _looks(tag: str) -> Callable[[Group], Points]:
    """A tag of heldout.json against tokens, over the looks that all seeds of a cell have. Unfinished runs are left out: their tokens are not known."""

    def points(group: Group) -> Points:
        done = [run for run in group.runs if run.looks and run.train and run.train.get("steps") and run.train.get("tokens")]
        steps = sorted(set.intersection(*({step for step, values in run.looks.items() if tag in values} for run in done))) if done else []
        tokens = [sum(run.train["tokens"] / run.train["steps"] for run in done if run.train) / len(done) * step for step in steps]
        return tuple((at, over([run.looks[step][tag] for run in done])) for at, step in zip(tokens, steps, strict=True))

    return points


def _logged(runs: list[Run]) -> Iterable[Plot]:
    """From the TensorBoard logs."""
    curves = (("train/loss", "loss", "training loss"), ("train/accept_top1/0", "α₀", "α₀ on training rows"))
    band = f" {RANGE}" if _seeds(runs) else ""
    caption = "Training curves, from the TensorBoard logs. Losses of different objectives have different scales; the table above names each."
    yield Plot("curves", f"{caption}{band}", _STEP, _measures(curves), plain=True)
    gates = (("gate/mean", "mean gate", "mean gate"), ("gate/share_below_0.05", "share of gates < 0.05", "share of gates below 0.05"))
    yield Plot("gates", f"Gates of the hybrids in the course of training, over all layers.{band}", _STEP, _measures(gates), plain=True)
    for name, what, words in (
        ("grad_norm", "Norm of the gradient by group of parameters, for each supervised row, before clipping", "Gradient norms by group"),
        ("grad_norm_relative", "The same over the norm of the group's weights: how much of itself a group is asked to move", "Gradient over weights by group"),
    ):
        found = [key for key in GROUP_WORDS if any(run.scalars.get(f"{name}/{key}") for run in runs)]
        measures = _measures([(f"{name}/{key}", "norm", GROUP_WORDS[key]) for key in found])
        yield Plot(name.replace("_", "-"), f"{what}, on a logarithmic axis.{band}", _STEP, measures, plain=True, folded=words, log_y=True)


def _looked(runs: list[Run]) -> Iterable[Plot]:
    """What train.diagnose_conversations adds to each held-out look: at the first and the last draft step, over all layers."""
    for ident, what, tags in _DIAGNOSED:
        measures = []
        for title, label, tag in tags:
            steps = max((_steps_of(run.looks, tag.replace("K", r"(\d+)")) for run in runs), default=[])
            measures += [Measure(f"{title}, draft step {k}", label, _mean(tag.replace("K", str(k)))) for k in dict.fromkeys(steps[:1] + steps[-1:])]
        words = f"{what} in the course of training"
        yield Plot(ident, f"{words}, on held-out rows, means over layers.", _STEP, tuple(measures), folded=words)


def _mean(pattern: str) -> Callable[[Group], Points]:
    """Mean of the tags of heldout.json that match, against optimizer steps."""

    def points(group: Group) -> Points:
        columns = []
        for run in group.runs:
            matched = {step: [v for tag, v in values.items() if re.fullmatch(pattern, tag)] for step, values in run.looks.items()}
            if any(matched.values()):
                columns.append({step: sum(v) / len(v) for step, v in matched.items() if v})
        steps = sorted(set.intersection(*map(set, columns))) if columns else []
        return tuple((step, over([column[step] for column in columns])) for step in steps)

    return points


def _steps_of(looks: dict[int, dict[str, float]], pattern: str) -> list[int]:
    return sorted({int(found[1]) for values in looks.values() for tag in values if (found := re.fullmatch(pattern, tag))})


def _measures(named: Iterable[tuple[str, str, str]]) -> tuple[Measure, ...]:
    return tuple(Measure(title, label, partial(curve, tag=tag)) for tag, label, title in named)


def _seeds(runs: list[Run]) -> bool:
    return len({run.seed for run in runs}) > 1
