"""Real decoding of held-out prompts, and the same drafter teacher-forced on the same texts: the rows that the serving check compares."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from tqdm import tqdm

from kvshot_ds import evaluation
from kvshot_ds.config import EvalConfig
from kvshot_ds.decoding.engine import Engine
from kvshot_ds.decoding.prompts import opening
from kvshot_ds.decoding.rounds import Decoded
from kvshot_ds.errors import ConfigError
from kvshot_ds.features.batch import collate
from kvshot_ds.features.shard import ShardSet
from kvshot_ds.features.spec import DTYPES, Store
from kvshot_ds.metrics import StepCounts
from kvshot_ds.objectives.alignment import plan_rows
from kvshot_ds.objectives.objective import Objective
from kvshot_ds.target import Target


@dataclass(frozen=True)
class Conversation:
    """A held-out conversation that is decoded. tokens, turn [S]; first: tokens before its first answer."""

    key: str
    tokens: tuple[int, ...]
    turn: npt.NDArray[np.int32]
    first: int

    @property
    def prompt(self) -> tuple[int, ...]:
        return self.tokens[: self.first]


@dataclass(frozen=True)
class Measured:
    """Counts [C, K] of the conversations, by the names of `RUNGS` from `retaken` on. rounds: those that have a row; different: of these, the ones that
    accept another number than their row. positions: decoded tokens that the target can be asked about; own: of these, those it would not choose.
    agreeing: decoded tokens before the first that is not the held-out answer's. outputs: what was decoded."""

    counts: dict[str, StepCounts]
    rounds: int
    different: int
    positions: int
    own: int
    agreeing: int
    outputs: tuple[Decoded, ...]


def choose(heldout: ShardSet, options: EvalConfig, max_new_tokens: int, context: int) -> tuple[list[Conversation], list[dict[str, str]]]:
    """The first `eval.serving_prompts` of the evaluated conversations whose prompt fits, and those passed over: {id, reason}.

    Raises ConfigError if there are fewer than two.
    """
    chosen: list[Conversation] = []
    skipped: list[dict[str, str]] = []
    for i in evaluation.measurable(heldout, options.max_conversations):
        if len(chosen) == options.serving_prompts:
            break
        key, tensors = heldout.read(i, ("tokens", "turn"))
        turn = tensors["turn"].numpy()
        first, reason = opening(turn.tolist(), max_new_tokens, context)
        if reason:
            skipped.append({"id": key, "reason": reason})
        else:
            chosen.append(Conversation(key, tuple(tensors["tokens"].tolist()), turn, first))
    if len(chosen) < 2:
        why = f"; passed over: {skipped[0]['id']}, {skipped[0]['reason']}" if skipped else ""
        raise ConfigError(
            f"the serving check needs at least 2 held-out conversations to decode, found {len(chosen)}{why}; lower decode.max_new_tokens, "
            "raise eval.max_conversations, or prepare more held-out conversations"
        )
    return chosen, skipped


@torch.inference_mode()
def measure(
    engine: Engine, objective: Objective, chosen: Sequence[Conversation], max_new_tokens: int, stop: Collection[int], together: int = 1, name: str = ""
) -> Measured:
    """Decodes each conversation's prompt with `engine` (a greedy chain), `together` at once, and teacher-forces the drafter of `objective` (evaluation's, of
    K steps) on the answers given and on those decoded."""
    target, outputs = engine.target, []
    for at in tqdm(range(0, len(chosen), together), desc=f"decode {name}", unit="batch", mininterval=2):
        outputs += engine.decode([c.prompt for c in chosen[at : at + together]], max_new_tokens, stop)
    lines = []
    rounds = different = positions = own = agreeing = 0
    for c, out in tqdm(list(zip(chosen, outputs, strict=True)), desc=f"teacher-force {name}", unit="conversation", mininterval=2):
        given = teacher_forced(objective, target, c.tokens, c.turn, greedy=False)
        turn = np.array([0] * c.first + [1] * len(out.tokens), dtype=np.int32)
        text = teacher_forced(objective, target, (*c.prompt, *out.tokens), turn, greedy=True)
        begun = at_starts(out, text, c.first)
        lines.append([given.sums(), text.sums(), (begun.counted, begun.right), (begun.counted, begun.accepted)])
        rounds, different = rounds + len(begun.differs), different + sum(begun.differs)
        positions, own = positions + text.asked, own + text.own
        pairs = enumerate(zip(out.tokens, c.tokens[c.first :], strict=False))
        agreeing += next((i for i, (a, b) in pairs if a != b), min(len(out.tokens), len(c.tokens) - c.first))
    each = np.array(lines, dtype=np.float64)  # [C, rungs, 2, K]
    unknown = np.full(each[:, 0, 0].shape, np.nan)
    counts = {rung: StepCounts(each[:, i, 0], unknown, each[:, i, 1], unknown) for i, rung in enumerate(("retaken", "text", "starts", "decoded"))}
    return Measured(counts, rounds, different, positions, own, agreeing, tuple(outputs))


@dataclass(frozen=True)
class Forced:
    """A text teacher-forced. valid, joint [K, N] bool: rows that count at step k, and those right at all steps <= k. row: anchor -> n. asked: positions of
    the text that the target was asked about; own: of these, those where it prefers another token than the text's."""

    valid: npt.NDArray[np.bool_]
    joint: npt.NDArray[np.bool_]
    row: dict[int, int]
    asked: int
    own: int

    def sums(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Rows that count and right ones, [K] each."""
        return self.valid.sum(1), self.joint.sum(1)


def teacher_forced(objective: Objective, target: Target, tokens: Sequence[int], turn: npt.NDArray[np.int32], greedy: bool) -> Forced:
    """All supervised rows of one conversation through evaluation's own code, with features as capture takes them, in full precision, now.

    greedy: the text is the target's own choice by definition; where its arg-max differs in this forward, the text is what a draft is judged by, as it was
    by the decoder.
    """
    dtype = next(name for name, dtype in DTYPES.items() if dtype == target.dtype)
    spec = replace(objective.required_features(), teacher="last_hidden", store=Store.all(dtype))
    batch = collate([("", target.features([list(tokens)], spec, [turn])[0])])
    plan = plan_rows(batch, objective.config.steps)
    own = int((batch.teacher_argmax != plan.labels).sum()) if greedy else 0
    if not plan.supervised:
        return Forced(plan.valid.numpy(), plan.valid.numpy(), {}, len(plan.labels), own)
    judged = replace(batch, teacher_argmax=plan.labels) if greedy else batch
    out = objective(judged.to(target.device, target.dtype), plan.to(target.device), torch.ones((), device=target.device))
    return Forced(plan.valid.numpy(), out.joint.cpu().numpy(), {t: n for n, t in enumerate(plan.anchors.tolist())}, len(plan.labels), own)


@dataclass(frozen=True)
class AtStarts:
    """Rounds against the rows at which they began, [K] each: counted: rounds that count at step k; right: their rows that are right at all steps <= k;
    accepted: those that accepted more than k drafts. differs: of each round that counts at all, whether the two numbers are not the same."""

    counted: npt.NDArray[np.int64]
    right: npt.NDArray[np.int64]
    accepted: npt.NDArray[np.int64]
    differs: tuple[bool, ...]


def at_starts(out: Decoded, text: Forced, first: int) -> AtStarts:
    """The rounds of `out` against the rows of `text` = prompt of `first` tokens and output.

    A round that follows g generated tokens is anchored at position first + g - 2, before its bonus token. It counts at step k iff it proposed more
    than k tokens and the text holds the one that step k is judged by: the rule of `joint_counts`.
    """
    counted, right, accepted = (np.zeros(len(text.valid), dtype=np.int64) for _ in range(3))
    differs, known = [], len(out.rounds[0].tokens)
    for r in out.verifications:
        n = text.row.get(first + known - 2)
        known += len(r.tokens)
        steps = 0 if n is None else min(r.drafted, int(text.valid[:, n].sum()))
        if not steps:
            continue
        row, kept = text.joint[:steps, n], min(steps, r.accepted)
        counted[:steps] += 1
        right[:steps] += row
        accepted[:kept] += 1
        differs.append(int(row.sum()) != kept)
    return AtStarts(counted, right, accepted, tuple(differs))
