"""Which row sees what: the one place that knows. A row is an anchor t; step k reads token t+1+k and is judged at t+2+k.

Known to a row: target states at positions <= t, tokens <= t+1. Step k: input token t+1+k (teacher-forced), label token
t+2+k, teacher = the target's distribution at position t+1+k. The row counts at step k iff tokens t+1 .. t+2+k lie in one
assistant turn, so the first row of an answer is the last prompt token: serving starts there. Planned on the host.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt
import torch

from kvshot_ds.drafters.attention import KV, Hidden, Span
from kvshot_ds.drafters.state import Keep, Rows, Start
from kvshot_ds.features.batch import Batch


@dataclass(frozen=True)
class RowPlan:
    """Rows of one batch for K steps. N anchors in runs, T positions, M = valid (step, row) pairs.

    anchors [N]: flat positions t. next_tokens [T]: x_{t+1} (a document's last position repeats its own token; no row
    sees it). tokens [K, N]: x_{t+1+k}. valid [K, N] bool. positions [T]: inside the document. picks [M]: flat index
    k*N + row of the valid pairs, ordered by teacher row; teacher_of [M]: their teacher rows; steps_of [M]: their k.
    labels [R]: the token after each teacher row. shifted [K, N], with offline drift only: the row anchored at t + k.
    conversation [N]: index of the row's conversation in the batch. spans_all, spans_rows: keys seen, on the host.
    teacher_bounds: offsets into the M pairs of each teacher row, on the host [R + 1].
    hidden: keys that diagnosis keeps from every position's self path and cross path.
    """

    anchors: torch.Tensor
    next_tokens: torch.Tensor
    tokens: torch.Tensor
    valid: torch.Tensor
    positions: torch.Tensor
    picks: torch.Tensor
    teacher_of: torch.Tensor
    steps_of: torch.Tensor
    labels: torch.Tensor
    conversation: torch.Tensor
    spans_all: tuple[Span, ...]
    spans_rows: tuple[Span, ...]
    teacher_bounds: npt.NDArray[np.int64]
    shifted: torch.Tensor | None = None
    hidden: tuple[Hidden | None, Hidden | None] = (None, None)

    def to(self, device: torch.device | str) -> RowPlan:
        moved = {f.name: getattr(self, f.name).to(device, non_blocking=True) for f in fields(self) if isinstance(getattr(self, f.name), torch.Tensor)}
        return replace(self, **moved)

    @property
    def supervised(self) -> int:
        """Rows supervised at step 0: the loss is normalised by their number."""
        return len(self.anchors)


def supervised_rows(turn: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Anchors t of one conversation whose bonus t+1 and first label t+2 belong to one assistant turn. turn [S] -> [N]."""
    return np.flatnonzero((turn[1:-1] > 0) & (turn[1:-1] == turn[2:]))


def _runs(rows: npt.NDArray[np.int64]) -> list[npt.NDArray[np.int64]]:
    """Ascending positions cut into runs of consecutive ones."""
    return np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1) if len(rows) else []


def _window(runs: list[npt.NDArray[np.int64]], fraction: float, rng: np.random.Generator) -> list[npt.NDArray[np.int64]]:
    """A contiguous piece of each run, `fraction` of it (at least one row), every row about equally likely."""
    out: list[npt.NDArray[np.int64]] = []
    for run in runs:
        size = max(1, round(len(run) * fraction))
        # The window is laid on a circle so that rows at the ends are as likely as those in the middle.
        first = int(rng.integers(len(run)))
        taken = np.sort((first + np.arange(size)) % len(run))
        out.extend(run[piece] for piece in _runs(taken))
    return out


def _chosen(rows: npt.NDArray[np.int64], fraction: float, anchors: int, rng: np.random.Generator) -> list[npt.NDArray[np.int64]]:
    """The rows of one conversation that are unrolled, as runs: `anchors` random ones, or a window of each run."""
    if anchors:
        return _runs(np.sort(rng.choice(rows, min(anchors, len(rows)), replace=False)))
    return _runs(rows) if fraction == 1.0 else _window(_runs(rows), fraction, rng)


def plan_rows(batch: Batch, steps: int, fraction: float = 1.0, seed: int = 0, anchors: int = 0, offline: bool = False) -> RowPlan:
    """Plans K = `steps` draft steps over the supervised rows of `batch` (on the CPU).

    Or over a `fraction` of them in contiguous runs, or over `anchors` random rows of each conversation, drawn with `seed` and its key.
    offline: a (step, row) pair counts only if the row anchored k positions later is planned too; it stands in for it.
    """
    tokens, turn = batch.tokens.numpy(), batch.turn.numpy()
    starts = np.concatenate(([0], np.cumsum(batch.lengths)))
    spans_all, spans_rows, runs, owners = [], [], [], []
    count = 0
    for c, (lo, hi) in enumerate(pairwise(starts)):
        spans_all.append(Span(int(lo), int(hi - lo), int(lo), int(lo)))
        rng = np.random.default_rng((seed, zlib.crc32(batch.keys[c].encode())))  # the same rows, however conversations are grouped
        for run in _chosen(supervised_rows(turn[lo:hi]) + lo, fraction, anchors, rng):
            spans_rows.append(Span(count, len(run), int(lo), int(run[0])))
            runs.append(run)
            owners.append(np.full(len(run), c))
            count += len(run)
    chosen = np.concatenate(runs) if runs else np.empty(0, np.int64)
    owner = np.concatenate(owners) if owners else np.empty(0, np.int64)
    last = starts[owner + 1] - 1  # last position of each row's document
    ahead = chosen + 1 + np.arange(steps)[:, None]  # [K, N]: position of the step's input token
    label = np.minimum(ahead + 1, last)
    # Tokens t+1 .. t+2+k lie in one turn iff the bonus and the label do: a turn is a contiguous run.
    valid = (ahead + 1 <= last) & (turn[label] == turn[np.minimum(chosen + 1, last)])
    shifted = np.minimum(np.searchsorted(chosen, ahead - 1), max(count - 1, 0)) if offline else None
    if shifted is not None:
        # A row ends with the first step that has no stand-in: what follows could not be called right at all steps.
        valid = np.logical_and.accumulate(valid & (chosen[shifted] == ahead - 1), axis=0)
    teacher_index = batch.teacher_index.numpy()
    teacher = teacher_index[np.minimum(ahead, last)]
    flat = np.flatnonzero(valid)
    order = flat[np.argsort(teacher.reshape(-1)[flat], kind="stable")]
    teacher_of = teacher.reshape(-1)[order]
    following = np.concatenate([np.append(tokens[lo + 1 : hi], tokens[hi - 1]) for lo, hi in pairwise(starts)])
    return RowPlan(
        anchors=torch.from_numpy(chosen),
        next_tokens=torch.from_numpy(following),
        tokens=torch.from_numpy(tokens[np.minimum(ahead, last)]),
        valid=torch.from_numpy(valid),
        positions=torch.from_numpy(np.concatenate([np.arange(n) for n in batch.lengths])),
        picks=torch.from_numpy(order),
        teacher_of=torch.from_numpy(teacher_of),
        steps_of=torch.from_numpy(order // max(count, 1)),
        labels=torch.from_numpy(following[teacher_index >= 0]),
        conversation=torch.from_numpy(owner),
        spans_all=tuple(spans_all),
        spans_rows=tuple(spans_rows),
        teacher_bounds=np.searchsorted(teacher_of, np.arange(len(batch.teacher_argmax) + 1)),
        shifted=None if shifted is None else torch.from_numpy(shifted),
    )


def training_start(batch: Batch, plan: RowPlan) -> Start:
    """The drafter's first step in training: all positions feed the prefix, the planned rows are unrolled."""
    return Start(
        tokens=plan.next_tokens,
        hidden=batch.hidden,
        keys=batch.keys_of,
        values=batch.values_of,
        all=Rows(plan.positions, plan.spans_all, *plan.hidden),
        rows=Rows(plan.positions[plan.anchors], plan.spans_rows, *plan.hidden),
        select=plan.anchors,
    )


def decoding_start(
    tokens: torch.Tensor,
    first: Sequence[int],
    counts: Sequence[int],
    room: int,
    hidden: Mapping[int, torch.Tensor],
    cache: Mapping[int, KV],
) -> Start:
    """The drafter's first step of a decoding round of B sequences: positions first[b] .. first[b] + counts[b] - 1 of sequence b
    are newly committed, the last one drafts.

    tokens [n]: x_{t+1} of those n = sum(counts) positions, sequence by sequence, the bonus token last in each. hidden[l]
    [n, d]: the target's states there. cache[l]: the target's cache [B * room, G, D], in which sequence b has the slots from
    b * room on. Positions before `first` are in the drafter's memory already.
    """
    device, begin = tokens.device, [b * room for b in range(len(first))]
    ends = list(accumulate(counts))
    if len(first) == 1:
        positions = slots = torch.arange(first[0], first[0] + counts[0], device=device)
        new: slice | torch.Tensor = slice(first[0], first[0] + counts[0])
    else:
        positions = torch.cat([torch.arange(f, f + n) for f, n in zip(first, counts, strict=True)]).to(device, non_blocking=True)
        new = slots = torch.cat([torch.arange(b + f, b + f + n) for b, f, n in zip(begin, first, counts, strict=True)]).to(device, non_blocking=True)
    select = torch.tensor([end - 1 for end in ends], device=device)
    at = list(zip(begin, first, counts, ends, strict=True))
    return Start(
        tokens=tokens,
        hidden=hidden,
        keys={layer: kv.k[new] for layer, kv in cache.items()},
        values={layer: kv.v[new] for layer, kv in cache.items()},
        all=Rows(positions, tuple(Span(end - n, n, b, b + f) for b, f, n, end in at)),
        rows=Rows(positions[select], tuple(Span(row, 1, b, b + f + n - 1) for row, (b, f, n, _) in enumerate(at))),
        select=select,
        keep=Keep(slots, len(first) * room),
        cache=cache,
    )
