"""The order of conversations: which of them each optimizer step takes, and which rank reads which. A function of (seed, epoch, step) alone: any number
of ranks and threads sees the same optimizer steps, a resumed run goes on at its step, and every conversation is seen exactly once per epoch."""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import count

import numpy as np
import numpy.typing as npt

from kvshot_ds.config import TrainConfig
from kvshot_ds.errors import ConfigError, KvshotError
from kvshot_ds.features.dataset import lowest
from kvshot_ds.features.shard import ShardSet

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class StepPlan:
    """Which samples each rank reads in each micro-step of one optimizer step: slots[rank][micro] -> sample numbers."""

    slots: tuple[tuple[tuple[int, ...], ...], ...]


def chosen(keys: Sequence[str], most: int) -> list[int]:
    """Numbers of the samples that `train.max_conversations`=most means. Raises ConfigError if there are fewer.

    Those with the lowest keys, as `kvshot data subset` takes them: keys are hashes, and a captured folder lies in their order, a merged one need not.
    """
    if most > len(keys):
        raise ConfigError(f"train.max_conversations={most}, but the train split holds {len(keys)} conversations; 0 takes all of them")
    return lowest(keys, most or len(keys))


class Schedule:
    """The optimizer steps of a run. sizes: (tokens, supervised rows) of the train split. among: numbers of the samples trained on (None: all);
    those without rows are left out.

    budget: tokens of a forward (`train.tokens_per_micro_batch`); 0: per_micro conversations. window: so many shards are mixed at a time
    (`train.shuffle_shards`), 0: all; shard_of: the shard of each sample, needed with it. data: digest of what the sample numbers stand for.
    accumulation: the most micro-steps of an optimizer step, which is what DeepSpeed is configured with; with a budget, steps have fewer.
    idle: share of a full step's places that no conversation fills, because the ranks do not divide it (0 with a budget, where it is not known before).
    """

    def __init__(
        self, sizes: Sequence[tuple[int, int]], per_step: int, per_micro: int, world: int, epochs: int, max_steps: int, seed: int,
        among: Collection[int] | None = None, *, budget: int = 0, window: int = 0, shard_of: Numbers | None = None, data: str = "",
    ):  # fmt: skip
        if world > per_step:
            raise ConfigError(
                f"train.conversations_per_step={per_step} gives {world} ranks less than one conversation each: raise it, or start at most {per_step} rank(s)"
            )
        self.sizes, self.per_step, self.world, self.per_micro, self.seed = sizes, per_step, world, per_micro, seed
        self.budget, self.window, self.shard_of, self.data = budget, window, shard_of, data
        self.among = range(len(sizes)) if among is None else among
        self.usable = np.array([i for i in self.among if sizes[i][1]], dtype=np.int64)
        if not len(self.usable):
            raise ConfigError("the train split holds no supervised rows: nothing to train on")
        self.steps_per_epoch = -(-len(self.usable) // per_step)
        total = self.steps_per_epoch * epochs
        self.steps = min(total, max_steps) if max_steps else total
        self.accumulation = -(-per_step // (world if budget else per_micro * world))
        self.idle = 0.0 if budget else 1 - per_step / (self.accumulation * per_micro * world)
        self.order = lru_cache(maxsize=2)(self._order)  # threads that read ahead stand in two epochs at most

    @classmethod
    def of(cls, config: TrainConfig, shards: ShardSet, world: int) -> Schedule:
        """That of a run on `world` ranks. Raises ConfigError if the options and the data do not fit."""
        keys, sizes = [sample.key for sample in shards.samples], [(sample.tokens, sample.rows) for sample in shards.samples]
        data = hashlib.sha256("\n".join(f"{key} {tokens} {rows}" for key, (tokens, rows) in zip(keys, sizes, strict=True)).encode())
        return cls(
            sizes, config.conversations_per_step, config.conversations_per_micro_batch, world, config.epochs, config.max_steps, config.seed,
            chosen(keys, config.max_conversations), budget=config.tokens_per_micro_batch, window=config.shuffle_shards, shard_of=shards.shard_of,
            data=data.hexdigest()[:16],
        )  # fmt: skip

    def _order(self, epoch: int) -> Numbers:
        """Sample numbers in the order of `epoch`: a permutation of all; with a window, the shards are permuted, and the conversations of so many at a time."""
        random = np.random.default_rng((self.seed, epoch))
        if not self.window:
            return random.permutation(self.usable)
        assert self.shard_of is not None
        shards, shard = np.unique(self.shard_of[self.usable], return_inverse=True)
        window = random.permutation(len(shards))[shard] // self.window
        return self.usable[np.lexsort((random.permutation(len(self.usable)), window))]

    def step(self, number: int) -> StepPlan:
        """Plan of optimizer step `number` (0-based). Conversations are dealt longest first to the lightest slot, so that ranks finish together."""
        epoch, at = divmod(number, self.steps_per_epoch)
        mine = sorted(self.order(epoch)[at * self.per_step : (at + 1) * self.per_step].tolist(), key=lambda i: (-self.sizes[i][0], i))
        slots = self._packed(mine) if self.budget else self._dealt(mine, self.world * self.accumulation, self.per_micro)
        # Slots are sorted by load before they are dealt to the ranks in turn: the ranks of one micro-step weigh about the same.
        slots.sort(key=self._load, reverse=True)
        return StepPlan(tuple(tuple(tuple(slot) for slot in slots[rank :: self.world]) for rank in range(self.world)))

    def _load(self, slot: Sequence[int]) -> int:
        return sum(self.sizes[i][0] for i in slot)

    def _dealt(self, mine: Sequence[int], slots: int, most: int) -> list[list[int]]:
        """`mine`, longest first, each to the lightest of `slots` slots that holds fewer than `most`."""
        found: list[list[int]] = [[] for _ in range(slots)]
        lightest = [(0, s) for s in range(slots)]
        for i in mine:
            load, s = heapq.heappop(lightest)
            found[s].append(i)
            if len(found[s]) < most:
                heapq.heappush(lightest, (load + self.sizes[i][0], s))
        return found

    def _packed(self, mine: Sequence[int]) -> list[list[int]]:
        """`mine` in the fewest slots that hold at most `budget` tokens each, in a multiple of `world`; the last ones are empty.

        A conversation longer than that goes alone. Fewest as far as two rules find it: longest first to the lightest slot, which also balances them, and,
        where that fails, longest first to the first slot with room (first-fit decreasing: at most 11/9 of the fewest + 6/9).
        """
        alone = [[i] for i in mine if self.sizes[i][0] > self.budget]
        others = mine[len(alone) :]
        tight = alone + self._first_fit(others)
        fewest = len(alone) - (-self._load(others) // self.budget)
        for slots in count(self.world * -(-fewest // self.world), self.world):
            even = self._dealt(others, slots - len(alone), len(mine))
            if all(self._load(slot) <= self.budget for slot in even):
                return alone + even
            if len(tight) <= slots:
                return tight + [[] for _ in range(slots - len(tight))]
        raise AssertionError("unreachable: a slot for each conversation always does")

    def _first_fit(self, mine: Sequence[int]) -> list[list[int]]:
        found: list[list[int]] = []
        room: list[int] = []
        for i in mine:
            tokens = self.sizes[i][0]
            s = next((s for s, free in enumerate(room) if free >= tokens), len(room))
            if s == len(room):
                found.append([])
                room.append(self.budget)
            found[s].append(i)
            room[s] -= tokens
        return found

    def state(self, step: int) -> dict[str, int | str]:
        """Where the data stands after `step` optimizer steps, as a checkpoint keeps it: no number of ranks or threads is in it.

        order: digest of the order of the epoch of the next step, so that another version of numpy that permutes otherwise is noticed too.
        """
        epoch, at = divmod(step, self.steps_per_epoch)
        order = hashlib.sha256(self.order(epoch).tobytes()).hexdigest()[:16]
        return {
            "seed": self.seed, "epoch": epoch, "step_in_epoch": at, "conversations_per_step": self.per_step, "shuffle_shards": self.window,
            "conversations": len(self.usable), "data": self.data, "order": order,
        }  # fmt: skip

    def check(self, found: Mapping[str, int | str], step: int) -> None:
        """Raises KvshotError, naming what differs, if `found`, the `state` of a checkpoint after `step` steps, is not that of this schedule."""
        wanted = self.state(step)
        differ = [f"{name}: there {found.get(name)}, now {value}" for name, value in wanted.items() if found.get(name) != value]
        if differ:
            raise KvshotError(
                f"the checkpoint at step {step} stands elsewhere in the data ({'; '.join(differ)}): going on would train on conversations twice and leave "
                f"others out; restore the data, the options and the version that it was written with, or start under another name"
            )
