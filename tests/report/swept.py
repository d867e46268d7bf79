"""Made-up sweeps for the page: what a sweep leaves, with event files, looks during training and diagnostics that differ by cell and by seed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvshot_ds.files import read_json, write_json
from kvshot_ds.sweep.folder import SweepFolder, Trial, TrialState
from tests.sweep.made import HIDDEN, KV, Cell, make_sweep

K = 7


def _kv(depth: int, level: float) -> Cell:
    return Cell({"family": "kv_only", "depth": depth, "kv": KV}, level, 0.97, {"drafter": f"kv{depth}"})


def _hybrid(name: str, gate: dict[str, Any], level: float) -> Cell:
    drafter = {"family": "hybrid", "hidden_layers": HIDDEN, "kv": KV, "gate": {"kind": "elementwise", **gate}}
    return Cell(drafter, level, 0.92, {"drafter": name})


FAILED = TrialState(
    "failed", 2, 1000.0, 1010.0, {"train": 9.0}, False, "the loss is not finite at step 12", "step 11 loss 9.1\nKvshotError: the loss is not finite"
)
STUDY = (
    Cell({"family": "hidden_only", "hidden_layers": HIDDEN}, 0.46, 0.82, {"drafter": "hidden"}),
    _kv(1, 0.30),
    _kv(2, 0.34),
    _kv(4, 0.37),
    _hybrid("hybrid", {"init": "random"}, 0.44),
    _hybrid("hybrid_closed", {"init": "bias:-2"}, 0.43),
    Cell(**{**_hybrid("hybrid_open", {"init": "bias:2"}, 0.47).__dict__, "states": {2: FAILED}}),
    _hybrid("hybrid_held", {"init": "random", "open_steps": 20}, 0.45),
    Cell({"family": "dflash", "depth": 2, "block_size": 8, "hidden_layers": HIDDEN}, 0.42, 0.8, {"drafter": "dflash"}),
    Cell({"family": "kv_block", "depth": 2, "block_size": 8, "kv": KV}, 0.33, 0.9, {"drafter": "kv_block"}),
)


def study(work: Path, cells: Sequence[Cell] = STUDY, events: bool = True, diagnosed: bool = True, **how: Any) -> SweepFolder:
    """A sweep over variants, one seed of which failed."""
    folder = make_sweep(work, cells, steps=K, name="study", **how)
    for trial in folder.trials():
        place = folder.run_dir(trial)
        if place.is_dir():
            rng = np.random.default_rng([trial.seed, *trial.name.encode()])
            if events:
                write_events(place, trial, rng)
            if diagnosed:
                write_diagnostics(place, trial, rng)
    return folder


def crossed(work: Path, seeds: Sequence[int] = (0, 1, 2)) -> SweepFolder:
    """A sweep over depth and data, without diagnostics and event files."""
    cells = [
        Cell(
            {"family": "kv_only", "depth": depth, "kv": KV},
            0.2 + 0.02 * depth + 0.03 * i,
            0.96,
            {"depth": str(depth), "conversations": str(n)},
            train={"max_conversations": n},
        )
        for depth in (1, 2, 4)
        for i, n in enumerate((1, 2, 4))
    ]
    return make_sweep(work, cells, seeds, name="scale", steps=K, sweep={"match": "steps"})


def write_events(place: Path, trial: Trial, rng: np.random.Generator) -> None:
    from torch.utils.tensorboard import SummaryWriter

    gated = trial.labels["drafter"].startswith("hybrid")
    start = {"hybrid": 0.5, "hybrid_closed": 0.12, "hybrid_open": 0.88, "hybrid_held": 0.9}.get(trial.labels["drafter"], 0.5)
    looks = read_json(place / "heldout.json")
    with SummaryWriter(str(place / "tensorboard")) as writer:
        for step in range(2, 61, 2):
            done = step / 60
            writer.add_scalar("train/loss", 9 - 4 * done**0.5 + rng.normal(0, 0.1), step)
            writer.add_scalar("train/accept_top1/0", 0.4 * done**0.6 + rng.normal(0, 0.01), step)
            for i, group in enumerate(("self", "cross", "cross_kv", "mlp", "head")):
                writer.add_scalar(f"grad_norm/{group}", (0.2 + 0.2 * i) * (1.2 - done) + rng.normal(0, 0.01), step)
                writer.add_scalar(f"grad_norm_relative/{group}", (0.002 + 0.001 * i) * (1.2 - done), step)
            if gated:
                writer.add_scalar("gate/mean", start * (1 - 0.4 * done) + rng.normal(0, 0.005), step)
                writer.add_scalar("gate/share_below_0.05", 0.3 * done * (1 - start), step)
    for step, values in looks.items():
        done = int(step) / 60
        for k in range(K):
            values[f"drift/cosine/{k}"] = 0.9 - 0.05 * k + 0.05 * done
            if gated:
                values |= {f"gate/step_{k}/mean": start * (1 - 0.05 * k), f"gate/step_{k}/share_below_0.05": 0.02 * k}
            if trial.labels["drafter"] not in ("hidden", "dflash"):
                values |= {f"query/cosine/layer_0/{k}": 0.3 + 0.2 * done - 0.02 * k, f"query/output_error/layer_0/{k}": 0.9 - 0.2 * done}
    write_json(place / "heldout.json", looks)


def write_diagnostics(place: Path, trial: Trial, rng: np.random.Generator) -> None:
    """diagnostics.json as `kvshot diagnose` writes it."""
    name, options = trial.labels["drafter"], trial.options["train.drafter"]
    depth, cross, shift = options.get("depth", 1), name not in ("hidden", "dflash"), rng.normal(0, 0.01)
    groups = ["self", "mlp", "head", "norms", *(["cross", "cross_kv"] if cross else []), *(["gate"] if "gate" in options else [])]

    def around(value: float, by: float = 0.01) -> dict[str, float]:
        return {"value": value + shift, "low": value + shift - by, "high": value + shift + by}

    def alpha(level: float) -> list[dict[str, Any]]:
        return [{"k": k, "num": 100, "den": 300, **around(level * 0.9**k)} for k in range(K)]

    def classes(bounds: Sequence[tuple[Any, Any]], slope: float) -> dict[str, Any]:
        return {"classes": [{"from": a, "to": b, "rows": 300, "alpha": alpha(0.3 + slope * i)} for i, (a, b) in enumerate(bounds)], "of": "what it is"}

    def estimated(layer: int, k: int) -> dict[str, Any]:
        return {"k": k, "rows": 300, "cosine": around(0.3 + 0.1 * layer - 0.01 * k), "output_error": around(0.8 - 0.1 * layer), "map_kl": around(1.2 + 0.1 * k)}

    def gated(k: int) -> dict[str, Any]:
        return {
            "k": k,
            "rows": 300,
            "mean": 0.5 - 0.03 * k + shift,
            "quantiles": {q: float(q) * 0.8 for q in ("0.05", "0.5", "0.95")},
            "share_below_0.05": 0.05 + 0.01 * k,
        }

    def layers(step: Callable[[int, int], dict[str, Any]]) -> dict[str, Any]:
        return {"layers": [{"layer": i, "targets": [2], "steps": [step(i, k) for k in range(K)]} for i in range(depth)]}

    masks = {"none": 0.4, "far": 0.36, "near": 0.2, "all": 0.15}
    parts = {
        "queries": layers(estimated) if cross else {"why": "no cross path"},
        "gradients": {
            "rows": 900, "loss": 5.0, "sampled": 48,
            "groups": {g: {"parameters": 4000 * (i + 1), "weight_norm": 9.0, "norm": 30.0, "norm_per_row": 0.03 * (i + 1), "share": 0.1 * (i + 1),
                           "relative": 0.003 * (i + 1) + shift / 100, "effective_rows": 700.0} for i, g in enumerate(groups)},
        },
        "gate": layers(lambda _, k: gated(k)) if "gate" in options else {"why": "no gate"},
        "context": {"near": 32, "masks": {m: {"alpha": alpha(a), "mat": around(1 + a, 0.02)} for m, a in masks.items()}},
        "position": classes(((0, 0), (1, 3), (4, 15), (16, None)), -0.02),
        "frequency": classes(((1, 9), (10, 99), (100, 5000)), 0.1),
        "entropy": classes(((0.01, 0.5), (0.5, 1.25), (1.25, 6.0)), -0.08),
        "drift": {"steps": [{"k": k, "rows": 300, "cosine": around(0.9 - 0.06 * k), "norm_ratio": around(1 + 0.05 * k), "rank": 20.0 - k} for k in range(K)]},
    }  # fmt: skip
    data = {"split": "heldout", "conversations": 24, "rows": 1500}
    write_json(place / "diagnostics.json", {"name": trial.name, "digest": "d" * 16, "data": data, "confidence": 0.95, "parts": parts})
