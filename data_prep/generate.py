"""Generation with the target in a batch that stays full: when an answer ends, the next prompt takes its row.

A loop of our own over the target's layers, with keys and values in place: row r of the batch holds the positions 0, 1, ...
of its own text from the left, so rows of any length stand side by side, each with its own position and mask, and a row is
handed on without moving the others. An answer depends on its prompt and its own random stream, on nothing else in the
batch. In fp32 that holds to the token (but for ties in the last digit); in bf16 another batch rounds otherwise, which can turn a close choice.

transformers' own continuous batching wrote the same tokens on CPU at a third of the speed (SmolLM2, fp32, 24 prompts, one
thread: 31 against 94 tokens/s; there it attends over all texts joined), and draws from one random stream for all.

Memory: batch_size x (longest prompt and answer, and up to a quarter more) x 2 · layers · kv heads · head dim · bytes of a number.
"""

from __future__ import annotations

import hashlib
import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.cache_utils import DynamicCache

from data_prep.chat import ChatTemplate
from kvshot_ds.config import TemplateConfig
from kvshot_ds.target import _CACHE, Target

_PREFILL_TOKENS = 8192  # in one forward over new prompts, padding included
_LIKE = 0.75  # shortest over longest prompt of such a forward
_THOUGHT = ("<think>", "</think>")
_COLUMNS = 64  # the store grows by so many positions at least


@dataclass(frozen=True)
class Sampling:
    """temperature 0 is greedy. Applied in this order: temperature, top_k (0: all), top_p, min_p (arXiv 2407.01082)."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0


@dataclass(frozen=True)
class Ask:
    """One prompt. key: whose it is, for the caller. limit: most tokens of its answer. stream: names its random numbers."""

    key: int
    tokens: Sequence[int]
    limit: int
    stream: str = ""


def warped(scores: torch.Tensor, sampling: Sampling, width: int = 512) -> torch.Tensor:
    """scores [B, V] over the temperature, and minus infinity where a token is not to be sampled.

    Equal scores at the cut stay together, so that nothing depends on the order of a sort. transformers sorts the whole
    vocabulary of every row, which on CPU costs as much as a forward; here most rows are decided by their `width` best.
    """
    scores = scores.float() / sampling.temperature
    size = scores.shape[-1]
    kept = min(sampling.top_k or size, size)
    if kept == size and sampling.top_p >= 1 and not sampling.min_p:
        return scores
    best = scores.amax(-1, keepdim=True)
    least = best + math.log(sampling.min_p) if sampling.min_p else torch.full_like(best, float("-inf"))
    if sampling.top_p < 1:
        least = torch.maximum(least, _least_of_nucleus(scores, sampling.top_p, kept, width))
    elif kept < size:
        least = torch.maximum(least, scores.topk(kept).values[:, -1:])
    return scores.masked_fill(scores < least, float("-inf"))


def _least_of_nucleus(scores: torch.Tensor, top_p: float, kept: int, width: int) -> torch.Tensor:
    """Lowest score [B, 1] of the smallest set of tokens with mass >= top_p (arXiv 1904.09751) among the `kept` best."""
    size = scores.shape[-1]
    # a device sorts fast, and to ask it whether `width` was enough would make the host wait
    width = kept if kept < size else width if scores.device.type == "cpu" else size
    while True:
        top = scores.topk(min(width, size)).values  # [B, width], falling
        mass = (top - (top if kept < size else scores).logsumexp(-1, keepdim=True)).exp()
        if kept < size or width >= size or bool((mass.sum(-1) >= top_p).all()):
            break
        width *= 8
    return top.masked_fill(mass.cumsum(-1) - mass >= top_p, float("inf")).amin(-1, keepdim=True)


def pick(scores: torch.Tensor, sampling: Sampling, draws: torch.Tensor | None) -> torch.Tensor:
    """The next token [B] of logits [B, V]. draws: one number in [0, 1) for each row, fp64 [B]; None if greedy.

    The draw is looked up in the cumulative distribution in the order of the vocabulary: a logit that was rounded otherwise
    moves the borders a little, where in a sorted one it could swap two tokens.
    """
    if draws is None:
        return scores.argmax(-1)
    mass = warped(scores, sampling).softmax(-1).cumsum(-1, dtype=torch.float64)
    return torch.searchsorted(mass, (draws * mass[:, -1])[:, None], right=True)[:, 0].clamp(max=scores.shape[-1] - 1)


def draws_of(stream: str, count: int) -> list[float]:
    """The first `count` random numbers of a stream, in [0, 1)."""
    seed = int(hashlib.sha256(stream.encode()).hexdigest()[:15], 16)
    return torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).tolist()


class _Store(DynamicCache):
    """Keys and values of all rows: per layer two tensors [rows, G, width, D]; row r holds its positions from the left.

    A forward either fills fresh rows with whole prompts (`fill`) or adds one position to each of the first rows (`extend`).
    """

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows = rows
        self.store: list[list[torch.Tensor]] = []
        self._first: int | None = None
        self._ends: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}
        self._width = 0

    def fill(self, first: int, width: int) -> None:
        """The next forward is over prompts, right-padded to `width`, for the rows from `first` on."""
        self._first, self._width = first, width
        self._grow()

    def extend(self, lengths: torch.Tensor, width: int) -> None:
        """The next forward writes at position lengths[r] of row r and reads the first `width` positions. lengths [n]."""
        self._first, self._width = None, width
        self._ends = {lengths.device: (torch.arange(len(lengths), device=lengths.device), lengths)}
        self._grow()

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        new = (key_states, value_states)  # [n, G, S, D]
        if layer_idx == len(self.store):  # zeros: what stands beyond a row's end is masked, but nought times NaN is NaN
            self.store.append([t.new_zeros(self.rows, t.shape[1], _round_up(self._width), t.shape[3]) for t in new])
        stored = self.store[layer_idx]
        if self._first is not None:
            for kept, t in zip(stored, new, strict=True):
                kept[self._first : self._first + t.shape[0], :, : t.shape[2]] = t
            return new
        n, device = key_states.shape[0], key_states.device
        if device not in self._ends:  # layers of one target may stand on several devices
            rows, at = next(iter(self._ends.values()))
            self._ends[device] = (rows.to(device, non_blocking=True), at.to(device, non_blocking=True))
        rows, at = self._ends[device]
        for kept, t in zip(stored, new, strict=True):
            kept[rows, :, at] = t[:, :, 0]
        keys, values = (kept[:n, :, : self._width] for kept in stored)
        return keys, values

    def move(self, source: list[int], to: list[int], width: int) -> None:
        """Copies the first `width` positions of rows `source` over those of rows `to`."""
        for layer in self.store:
            for kept in layer:
                for a, b in zip(source, to, strict=True):
                    kept[b, :, :width] = kept[a, :, :width]

    def _grow(self) -> None:
        for layer in self.store:
            for n, kept in enumerate(layer):
                if kept.shape[2] < self._width:
                    wider = _round_up(max(self._width, kept.shape[2] * 5 // 4))  # not too often: it copies everything
                    layer[n] = torch.nn.functional.pad(kept, (0, 0, 0, wider - kept.shape[2]))


def _sent(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """On the device, without waiting for what it is doing."""
    return host.to(device, non_blocking=True)


def _round_up(width: int) -> int:
    return (width // _COLUMNS + 1) * _COLUMNS


@dataclass
class _Row:
    """An answer being written. answer: its tokens so far; draws: the random numbers of its stream."""

    ask: Ask
    draws: list[float]
    answer: list[int] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Positions whose keys and values are stored: the newest token is still to be fed."""
        return len(self.ask.tokens) + len(self.answer) - 1


class Generator:
    """Batched generation with one target. stops: its special tokens, of which none belongs inside an answer."""

    def __init__(self, target: Target, options: TemplateConfig | None = None) -> None:
        self.target = target
        self.template = ChatTemplate(target.tokenizer, options or TemplateConfig())
        # a tokenizer may count its marks of thought among the special tokens
        thought = set(target.tokenizer.convert_tokens_to_ids(list(_THOUGHT)))
        self.stops = self.template.special_ids - thought

    def answers(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, sampling: Sampling | None = None, seed: int = 0, batch_size: int = 32
    ) -> list[list[int]]:
        """The continuation of each prompt, in order; its random stream is that of its place in the list. As `write`."""
        found: dict[int, list[int]] = {}
        asks = [Ask(n, prompt, max_new_tokens, f"{seed}/{n}") for n, prompt in enumerate(prompts)]
        self.write(asks, lambda ask, answer: found.update({ask.key: answer}), sampling or Sampling(), batch_size)
        return [found[n] for n in range(len(prompts))]

    @torch.inference_mode()
    def write(self, asks: Iterable[Ask], done: Callable[[Ask, list[int]], Ask | None], sampling: Sampling, batch_size: int) -> None:
        """Answers all `asks`, at most `batch_size` at a time, the longest waiting prompt first.

        done(ask, answer) is called as each answer ends; what it returns, if anything, is asked next. An answer ends with
        the end-of-turn token if the target wrote it, and without one if it reached its limit or stopped at another special
        token. The host waits for the device once a token, however many rows there are.
        """
        waiting = [(-len(ask.tokens), n, ask) for n, ask in enumerate(asks)]
        heapq.heapify(waiting)
        asked = len(waiting)
        rows: list[_Row] = []
        store = _Store(min(batch_size, asked))
        few = max(1, batch_size // 8)  # a forward for one new prompt alone would hold up all others on a device
        while waiting or rows:
            room = batch_size - len(rows)
            if waiting and (not rows or room >= few):
                group = self._group(waiting, room)
                self._begin(group, rows, store, sampling)
            else:
                self._continue(rows, store, sampling)
            for row in self._leave(rows, store):
                following = done(row.ask, row.answer)
                if following is not None:
                    heapq.heappush(waiting, (-len(following.tokens), asked, following))
                    asked += 1

    def _group(self, waiting: list[tuple[int, int, Ask]], room: int) -> list[Ask]:
        """Takes prompts of like length off the heap, for one forward."""
        longest = -waiting[0][0]
        count = min(room, max(1, _PREFILL_TOKENS // longest))
        group: list[Ask] = []
        while waiting and len(group) < count and -waiting[0][0] >= _LIKE * longest:
            group.append(heapq.heappop(waiting)[2])
        return group

    def _begin(self, group: list[Ask], rows: list[_Row], store: _Store, sampling: Sampling) -> None:
        """Feeds the prompts of `group` and adds their rows with their first tokens."""
        lengths = torch.tensor([len(ask.tokens) for ask in group])
        ids = torch.zeros(len(group), int(lengths.max()), dtype=torch.long)
        for n, ask in enumerate(group):
            ids[n, : len(ask.tokens)] = torch.as_tensor(ask.tokens)
        store.fill(len(rows), ids.shape[1])
        # padding stands after every token that counts, so the causal mask alone keeps it out
        hidden = self.target.model.model(_sent(ids, self.target.device), use_cache=True, **{_CACHE: store}).last_hidden_state
        last = hidden[torch.arange(len(group), device=hidden.device), _sent(lengths - 1, hidden.device)]
        fresh = [_Row(ask, draws_of(ask.stream, ask.limit) if sampling.temperature else []) for ask in group]
        self._append(fresh, last, sampling)
        rows += fresh

    def _continue(self, rows: list[_Row], store: _Store, sampling: Sampling) -> None:
        """Feeds the newest token of every row and appends the next."""
        device, width = self.target.device, max(row.length for row in rows) + 1
        lengths = _sent(torch.tensor([row.length for row in rows]), device)
        tokens = _sent(torch.tensor([[row.answer[-1]] for row in rows]), device)
        mask = torch.arange(width, device=device) <= lengths[:, None]
        store.extend(lengths, width)
        hidden = self.target.model.model(
            tokens, attention_mask=mask[:, None, None], position_ids=lengths[:, None], use_cache=True, **{_CACHE: store}
        ).last_hidden_state  # [n, 1, d]
        self._append(rows, hidden[:, -1], sampling)

    def _append(self, rows: list[_Row], last: torch.Tensor, sampling: Sampling) -> None:
        """Picks the next token of every row from the state entering the head, last [n, d]."""
        logits = self.target.model.get_output_embeddings()(last).float()
        numbers = [row.draws[len(row.answer)] for row in rows] if sampling.temperature else []
        draws = _sent(torch.tensor(numbers, dtype=torch.float64), logits.device) if sampling.temperature else None
        for row, token in zip(rows, pick(logits, sampling, draws).tolist(), strict=True):
            row.answer.append(token)

    def _leave(self, rows: list[_Row], store: _Store) -> list[_Row]:
        """Takes the rows that have ended out; the last ones take their places in the store."""
        stops, end = self.stops, self.template.end_id
        ended = [n for n, row in enumerate(rows) if row.answer[-1] in stops or len(row.answer) >= row.ask.limit]
        if not ended:
            return []
        out, remain = [rows[n] for n in ended], len(rows) - len(ended)
        holes = [n for n in ended if n < remain]
        movers = sorted(set(range(remain, len(rows))) - set(ended))
        store.move(movers, holes, max((rows[n].length for n in movers), default=0))
        for a, b in zip(movers, holes, strict=True):
            rows[b] = rows[a]
        del rows[remain:]
        for row in out:
            if row.answer[-1] in stops and row.answer[-1] != end:
                row.answer.pop()
        return out
