"""What a person sees of a run: sums of the steps since the last point, and where the points go."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

import psutil
import torch
import torch.distributed as dist
from tqdm import tqdm

from kvshot_ds import metrics
from kvshot_ds.config import Recipe
from kvshot_ds.drafters.base import Drafter
from kvshot_ds.drafters.gate import GatedDelta
from kvshot_ds.errors import Preempted
from kvshot_ds.metrics import StepCounts
from kvshot_ds.objectives.alignment import RowPlan
from kvshot_ds.objectives.objective import Output
from kvshot_ds.training import gradients, trackers
from kvshot_ds.training.checkpoint import Progress
from kvshot_ds.training.engine import World
from kvshot_ds.training.status import State, StatusFile
from kvshot_ds.training.timing import Part, Stopwatch
from kvshot_ds.training.trackers import Histogram, Tracker

_BINS = 50  # of the gate's histogram


class Meter:
    """Sums over the micro-batches since the last reading, on the device; reduced over ranks when read.

    The last row holds the auxiliary losses: what the KV branch and the query distillation added, in its first two places.
    """

    def __init__(self, steps: int, device: torch.device, watch: Stopwatch | None = None):
        self.sums = torch.zeros(7, max(steps, 2), device=device)
        self.first_bad = torch.full((), torch.inf, device=device)
        self.steps, self.device = steps, device
        self.watch = watch or Stopwatch(device)
        self.looked_at = False  # the coming step ends in a point, which has its gradient's norms
        self.norms: torch.Tensor | None = None
        self.rates: list[float] = []

    def time(self, part: Part) -> AbstractContextManager[None]:
        """Counts what is done in it to a part of the step."""
        return self.watch.part(part)

    def before_update(self, drafter: Drafter, engine: Any) -> None:
        """Between the last backward pass of a step and its update. All ranks call it."""
        if self.looked_at:
            self.norms, self.rates = gradients.group_norms(drafter, self.device), [float(rate) for rate in engine.get_lr()]

    def add(self, out: Output, plan: RowPlan, normaliser: torch.Tensor, counted: bool, step: int) -> None:
        if not counted:
            return
        self.first_bad = torch.minimum(self.first_bad, torch.where(out.loss.detach().isfinite(), torch.inf, float(step)))
        s = out.sums(plan)
        self.sums[:6, : self.steps] += torch.stack((s.den, s.loss, s.top1, s.joint, s.prob, s.weighted))
        self.sums[6, :2] += torch.stack((out.kv_branch, out.query)) * normaliser

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        """[6, K] on the host, summed over ranks: den, loss, top1, joint, prob, weighted; and [2]: KV branch, queries. Starts again from zero."""
        total = self.sums.clone()
        dist.all_reduce(total)
        self.sums.zero_()
        host = total.cpu()
        return host[:6, : self.steps], host[6, :2]

    def first_not_finite(self) -> int | None:
        """The first optimizer step, on any rank, whose loss (the auxiliary ones included) was not finite."""
        first = self.first_bad.clone()
        dist.all_reduce(first, op=dist.ReduceOp.MIN)
        return int(first) if bool(first.isfinite()) else None

    def optimizer(self, norm: float | None) -> dict[str, float]:
        """Learning rates and gradient norms of the step that was looked at; `norm`: DeepSpeed's own, over all parameters before clipping.

        grad_norm/GROUP is per supervised row, as the objective is; grad_norm_relative/GROUP, that over the norm of the group's weights.
        """
        if self.norms is None:
            return {}
        out = {"train/lr": self.rates[0], "train/grad_norm": float(norm or 0.0)}
        if len(set(self.rates)) > 1:  # in the order of optim.parameter_groups
            out |= {f"train/lr/{i}": rate for i, rate in enumerate(self.rates)}
        for group, norm_of, weights in zip(gradients.GROUPS, *self.norms.tolist(), strict=True):
            out |= {f"grad_norm/{group}": norm_of} if norm_of else {}
            out |= {f"grad_norm_relative/{group}": norm_of / weights} if norm_of and weights else {}
        self.norms = None
        return out


def training_scalars(sums: torch.Tensor, extra: torch.Tensor) -> dict[str, float]:
    """Board tags of one reading of the meter. train/loss is the objective per supervised row, without the auxiliary losses beside it.

    What no row reached is left out: all of it, where nothing of these steps could be read (train.on_bad_data=skip).
    """
    den, loss, top1, joint, prob, weighted = sums.double().numpy()
    out = metrics.points(StepCounts(den, top1, joint, prob), "train")
    out |= {f"train/loss_step/{k}": float(loss[k] / rows) for k, rows in enumerate(den) if rows}
    if den[0]:
        out["train/loss"] = float(weighted.sum() / den[0])
        out |= {f"train/loss_{name}": value / float(den[0]) for name, value in zip(("kv_branch", "query"), extra.tolist(), strict=True) if value}
    return out


def memory(device: torch.device) -> dict[str, float]:
    """Of rank 0's process: resident on the host, and the most that tensors took on its GPU so far [GiB]."""
    out = {"memory/host_gib": psutil.Process().memory_info().rss / 2**30}
    return out if device.type != "cuda" else out | {"memory/cuda_peak_gib": torch.cuda.max_memory_allocated(device) / 2**30}


def gates(drafter: Drafter) -> Iterator[torch.Tensor]:
    """Gate values of the last step of the last forward, layer by layer."""
    for module in drafter.modules():
        if isinstance(module, GatedDelta) and module.last_gate is not None:
            yield module.last_gate


def gate_points(drafter: Drafter) -> tuple[dict[str, float], Histogram | None]:
    """Statistics of the gates of all ranks' last forward, and of each layer where there are several. All ranks call it."""
    found = [_gate_sums(gate) for gate in gates(drafter)]
    if not found:
        return {}, None
    mine = torch.stack(found)
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    by_rank = torch.stack(every).cpu()
    sums, low, high = by_rank[:, :, 2:].sum(0), by_rank[:, :, 0].amin(0), by_rank[:, :, 1].amax(0)

    def named(name: str, count: float, total: float, _squares: float, below: float, above: float) -> dict[str, float]:
        return {f"{name}/mean": total / count, f"{name}/share_below_0.05": below / count, f"{name}/share_above_0.95": above / count}

    whole = sums.sum(0).tolist()
    out = named("gate", *whole[:5])
    if len(found) > 1:
        for i, one in enumerate(sums.tolist()):
            out |= named(f"gate/layer_{i}", *one[:5])
    return out, Histogram(whole[5:], float(low.min()), float(high.max()), whole[1], whole[2])


def _gate_sums(gate: torch.Tensor) -> torch.Tensor:
    """Least, greatest, count, sum, sum of squares, how many < .05, how many > .95, and a histogram over [0, 1]: [7 + _BINS] fp64 on the device."""
    g = gate.float().flatten()
    low, high = g.aminmax()
    count = torch.full_like(low, g.numel(), dtype=torch.float64)
    sums = [g.sum(dtype=torch.float64), g.square().sum(dtype=torch.float64), (g < 0.05).sum(dtype=torch.float64), (g > 0.95).sum(dtype=torch.float64)]
    return torch.cat((torch.stack([low.double(), high.double(), count, *sums]), torch.histc(g, _BINS, 0, 1).double()))


class Board:
    """Where rank 0's points go; a no-op elsewhere. A tracker that fails is dropped with a message: weights matter more than points.

    (A full disk, the usual reason, ends the run anyway if it lasts until the next checkpoint, which says so itself.)
    """

    def __init__(self, recipe: Recipe, world: World, before: Progress, steps: int):
        """Raises ConfigError if a tracker that was asked for cannot be opened."""
        self.trackers: dict[str, Tracker] = {}
        self.name = recipe.name
        if world.rank:
            return
        folder = recipe.run_dir

        def start(name: str, opened: Callable[[], Tracker]) -> None:
            try:
                self.trackers[name] = opened()
            except OSError as error:
                self._lost(name, error)

        for name in recipe.train.trackers:
            self.trackers[name] = trackers.opened(name, folder, recipe)
        start("TensorBoard", lambda: trackers.TensorBoard(folder / "tensorboard", recipe, before.step + 1))
        start("status.json", lambda: StatusFile(folder, before.step, steps, world.size, tuple(start.step for start in before.resumed_from)))

    def scalars(self, values: dict[str, float], step: int) -> None:
        self._each(lambda tracker: tracker.scalars(values, step))

    def histogram(self, tag: str, values: Histogram | None, step: int) -> None:
        if values is not None:
            self._each(lambda tracker: tracker.histogram(tag, values, step))

    def _each(self, call: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self.trackers.items()):
            try:
                call(tracker)
            except tracker.faults as error:
                del self.trackers[name]
                self._lost(name, error)

    def _lost(self, name: str, error: Exception) -> None:
        tqdm.write(f"{self.name}: {name} takes no more points of this start ({type(error).__name__}: {error}); training goes on without")

    def __enter__(self) -> Board:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        state: State = "complete" if error is None else "stopped" if isinstance(error, Preempted | KeyboardInterrupt) else "failed"
        self._each(lambda tracker: tracker.close(state, "" if error is None else str(error) or type(error).__name__))
