"""What a person sees of a run: TensorBoard points and one console line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import torch
import torch.distributed as dist

from kvshot_ds import metrics
from kvshot_ds.drafters.base import Drafter
from kvshot_ds.drafters.gate import GatedDelta
from kvshot_ds.objectives.alignment import RowPlan
from kvshot_ds.objectives.objective import Output


class Meter:
    """Sums over the micro-batches since the last reading, on the device; reduced over ranks when read.

    The last row holds the auxiliary losses: what the KV branch and the query distillation added, in its first two places.
    """

    def __init__(self, steps: int, device: torch.device):
        self.sums = torch.zeros(7, max(steps, 2), device=device)
        self.first_bad = torch.full((), torch.inf, device=device)
        self.steps = steps

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


def gates(drafter: Drafter) -> Iterator[torch.Tensor]:
    """Gate values of the last step of the last forward, layer by layer."""
    for module in drafter.modules():
        if isinstance(module, GatedDelta) and module.last_gate is not None:
            yield module.last_gate


class Board:
    """TensorBoard writer of rank 0; a no-op elsewhere."""

    def __init__(self, folder: Path, rank: int, purge_step: int):
        self.writer = None
        if rank == 0:
            from torch.utils.tensorboard import SummaryWriter

            self.writer = SummaryWriter(str(folder), purge_step=purge_step)

    def scalars(self, values: dict[str, float], step: int) -> None:
        if self.writer is not None:
            for tag, value in values.items():
                self.writer.add_scalar(tag, value, step)

    def text(self, tag: str, value: str) -> None:
        if self.writer is not None:
            self.writer.add_text(tag, f"```\n{value}\n```")

    def __enter__(self) -> Board:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.writer is not None:
            self.writer.close()


def training_scalars(sums: torch.Tensor, extra: torch.Tensor) -> dict[str, float]:
    """Board tags of one reading of the meter. train/loss is the objective per supervised row, without the auxiliary losses beside it."""
    den, loss, top1, joint, prob, weighted = sums.double()
    safe = den.clamp_min(1)
    out = {"train/loss": float(weighted.sum() / safe[0])}
    for name, value in zip(("kv_branch", "query"), (extra.double() / safe[0]).tolist(), strict=True):
        if value:
            out[f"train/loss_{name}"] = value
    for k in range(len(den)):
        out[f"train/loss_step/{k}"] = float(loss[k] / safe[k])
        out[f"train/accept_top1/{k}"] = float(top1[k] / safe[k])
        out[f"train/accept_prob/{k}"] = float(prob[k] / safe[k])
        out[f"train/accept_joint/{k}"] = float(joint[k] / safe[k])
    mat, mat_joint = metrics.mat((top1 / safe).tolist()), metrics.mat_joint((joint / safe).tolist())
    out["train/mat"], out["train/mat_joint"] = float(mat or 0), float(mat_joint or 0)
    return out
