"""Speculative decoding, all families and strategies: the drafter proposes, one forward of the target settles it (arXiv 2211.17192)."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence

import torch

from kvshot_ds.config import DraftingConfig, SamplingConfig
from kvshot_ds.decoding import chain, tree
from kvshot_ds.decoding.draft import Draft
from kvshot_ds.decoding.rounds import Clock, Decoded, Round
from kvshot_ds.decoding.sampling import Sampler
from kvshot_ds.decoding.state import Sequences
from kvshot_ds.decoding.verify import Verdict, match, reject
from kvshot_ds.drafters.base import Drafter
from kvshot_ds.drafters.state import DraftState, Start
from kvshot_ds.errors import KvshotError
from kvshot_ds.features.spec import FeatureSpec, Store
from kvshot_ds.target import Target

_NOTHING = FeatureSpec((), (), "none", Store.all("bf16"))


class Engine:
    """Decodes with `target`, helped by `drafter`; without one, the target alone makes a token a round.

    The drafter must be bound to the target's embedding and head (`Drafter.bind`) and lie on its device in its dtype. The
    committed tokens are those of the target: its greedy continuation, or a sample of its distribution, whatever the
    drafter proposes; up to ties within rounding, as a forward over many tokens adds up in another order than one over one.
    """

    def __init__(self, target: Target, drafter: Drafter | None, drafting: DraftingConfig, sampling: SamplingConfig | None = None):
        self.target, self.drafter, self.drafting = target, drafter, drafting
        self.sampling = sampling or SamplingConfig()
        self.sampler = None if self.sampling.greedy else Sampler(self.sampling)
        self.needs = _NOTHING if drafter is None else drafter.required_features()

    @torch.inference_mode()
    def generate(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, stop: Collection[int] = (), sequences: Sequence[int] | None = None
    ) -> Iterator[dict[int, Round]]:
        """Decodes `prompts` together; yields after each forward of the target what it committed, by index of the prompt.

        The first yield is the prefill of all. A sequence ends with a token of `stop` or after `max_new_tokens`; the others go
        on. sequences: numbers that name the sequences to the noise of sampling; their indices if not given. The host waits
        for the device once a round. Raises KvshotError on an empty prompt, or one that does not fit the target's context
        together with `max_new_tokens`.
        """
        self._check(prompts, max_new_tokens)
        clock, longest = Clock(self.target.device), max(map(len, prompts))
        with self.target.watch(self.needs.hidden_layers) as outputs:
            batch = Sequences(self.target, self.needs, outputs, len(prompts), longest + max_new_tokens + self._most_nodes())
            memory = DraftState.empty(self.drafter.depth if self.drafter is not None else 0)
            alive, numbers = list(range(len(prompts))), torch.tensor(sequences or range(len(prompts)), device=self.target.device)
            begun = clock.mark()
            logits = batch.prefill(prompts)
            done = clock.mark()
            own = self._chosen(logits, torch.tensor([[len(p)] for p in prompts], device=logits.device), numbers)[:, 0]
            new = [(token,) for token in own.tolist()]
            seconds = clock.between(begun, done)
            yield {i: Round(tokens, 0, 0, 0, 0.0, seconds) for i, tokens in enumerate(new)}
            room = dict.fromkeys(alive, max_new_tokens - 1)
            kept: list[list[int]] = [list(range(len(p))) for p in prompts]
            following: list[list[int]] = [[*p[1:], *t] for p, t in zip(prompts, new, strict=True)]
            while True:
                going = [b for b, i in enumerate(alive) if room[i] and following[b][-1] not in stop]
                if not going:
                    return
                if len(going) < len(alive):
                    at = torch.tensor(going, device=self.target.device)
                    memory = memory.sequences(at, len(alive))
                    batch.take(going)
                    numbers = numbers[at]
                    alive, kept, following = ([x[b] for b in going] for x in (alive, kept, following))  # type: ignore[assignment]
                start = batch.commit(kept, following)
                begun = clock.mark()
                draft = self._proposed(memory, start, max(room[i] for i in alive) - 1, numbers)
                proposed = clock.mark()
                logits = batch.verify(start.tokens[start.select], draft)
                done = clock.mark()
                kept, following = _settled(draft, self._verdict(draft, logits, start, numbers))
                drafting, verifying = clock.between(begun, proposed), clock.between(proposed, done)
                rounds = {}
                for b, i in enumerate(alive):
                    tokens = cut(following[b][: room[i]], stop)
                    room[i] -= len(tokens)
                    rounds[i] = Round(tokens, draft.levels, draft.tokens.shape[1], min(len(following[b]) - 1, len(tokens)), drafting, verifying)
                    if tokens[-1] in stop:
                        following[b] = list(tokens)
                yield rounds

    def decode(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, stop: Collection[int] = (), sequences: Sequence[int] | None = None
    ) -> list[Decoded]:
        """`generate` to its end, in the order of the prompts."""
        started = time.perf_counter()
        rounds: list[list[Round]] = [[] for _ in prompts]
        for one in self.generate(prompts, max_new_tokens, stop, sequences):
            for i, r in one.items():
                rounds[i].append(r)
        seconds = time.perf_counter() - started
        return [Decoded(tuple(r), seconds) for r in rounds]

    def _check(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
        limit = self.target.geometry.max_positions
        if not prompts:
            raise KvshotError("no prompts to decode: expected at least one")
        for p in prompts:
            if not p or max_new_tokens < 1 or len(p) + max_new_tokens > limit:
                found = f"a prompt of {len(p)} tokens and max_new_tokens={max_new_tokens}"
                raise KvshotError(f"{found}: expected at least 1 of each, and together at most the target's context of {limit}")

    def _most_nodes(self) -> int:
        """Slots that a round may need beyond the tokens that are committed in the end."""
        return 1 + (self.drafting.length if self.drafting.strategy == "chain" else tree.most_nodes(self.drafting))

    def _proposed(self, memory: DraftState, start: Start, length: int, numbers: torch.Tensor) -> Draft:
        if self.drafter is None or not length:
            return Draft.in_line(start.tokens.new_empty(len(start.select), 0))
        if self.drafting.strategy == "chain":
            return chain.propose(self.drafter, memory, start, self.drafting, min(length, self.drafting.length), self.sampler, numbers)
        return tree.propose(self.drafter, memory, start, self.drafting, length)

    def _chosen(self, logits: torch.Tensor, positions: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """The target's tokens [B, n] from logits [B, n, V]; positions [B, n]: where the tokens will stand."""
        return logits.argmax(-1) if self.sampler is None else self.sampler.choose(logits, positions, numbers)

    def _verdict(self, draft: Draft, logits: torch.Tensor, start: Start, numbers: torch.Tensor) -> Verdict:
        positions = start.rows.positions.unsqueeze(1) + 2 + torch.nn.functional.pad(draft.depths, (1, 0))
        if draft.probs is not None and self.sampler is not None and self.drafter is not None:
            return reject(draft, logits, self.drafter.draft_ids, self.sampler, positions, numbers)
        return match(draft, self._chosen(logits, positions, numbers))


def _settled(draft: Draft, verdict: Verdict) -> tuple[list[list[int]], list[list[int]]]:
    """On the host: the inputs of the forward that each sequence keeps, and the token after each. The only wait for the device of a round."""
    if draft.levels:
        along = draft.tokens.gather(1, (verdict.path - 1).clamp_min(0))
        whole = torch.cat((verdict.accepted.unsqueeze(1), verdict.own.unsqueeze(1), verdict.path, along), 1).tolist()
    else:
        whole = [[0, own] for own in verdict.own.tolist()]
    kept, following = [], []
    for accepted, own, *rest in whole:
        kept.append([0, *rest[:accepted]])
        following.append([*rest[draft.levels : draft.levels + accepted], own])
    return kept, following


def cut(tokens: Sequence[int], stop: Collection[int]) -> tuple[int, ...]:
    """`tokens` up to and including the first stop token."""
    return tuple(tokens[: next((i + 1 for i, token in enumerate(tokens) if token in stop), len(tokens))])
