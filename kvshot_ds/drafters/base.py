"""What every drafter is: draft layers over a state, a draft head over a draft vocabulary."""

from __future__ import annotations

import zlib
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from kvshot_ds.drafters.gate import GatedDelta
from kvshot_ds.drafters.layer import DraftLayer, LayerOutput
from kvshot_ds.drafters.layers import RMSNorm, Rotary, Rotation
from kvshot_ds.drafters.projector import KVProjector, KVSource
from kvshot_ds.drafters.state import PLAIN, DraftState, Extras, Memory, Rows, Start
from kvshot_ds.features.spec import FeatureSpec, Store
from kvshot_ds.geometry import Geometry

Choose = Callable[[torch.Tensor, int], torch.Tensor | None]


class Unrolled(NamedTuple):
    """All steps of a training forward. h [K, N, d]; kv_branch [K, N, d]; queries: by layer [K, N, A, D], where asked for.

    queries[k] are those made at position t + 1 + k: of step k, or of slot k of a block (whose proposal k stands one slot further).
    """

    h: torch.Tensor
    kv_branch: torch.Tensor | None = None
    queries: tuple[torch.Tensor, ...] = ()


class Drafter(nn.Module):
    """What all families share: draft layers, a head over a draft vocabulary, the target's embedding on loan.

    A row is anchored at position t: it knows target states at positions <= t and tokens <= t + 1. Draft step k = 0, 1, …
    proposes the token at t + 2 + k from the un-normed hidden state h [N, d]. Training calls `unroll`, decoding `draft` for
    chains; trees go step by step.

    d2t [V_d] int64: draft id i proposes target id i + d2t[i]; t2d [V] bool: the target ids that can be proposed.
    hidden_layers, source: the target's hidden states that are fused, and its KV cache, where the family reads them.
    own_head: the head is trained and saved with the drafter; otherwise the target's rows are lent by `bind`.
    lent: the target's embedding [V, d], then, without an own head, the head's rows [V_d, d]; empty before `bind`.
    recompute: layers are recomputed in the backward pass instead of keeping their activations.
    """

    family: str
    layers: nn.ModuleList
    d2t: torch.Tensor
    t2d: torch.Tensor
    hidden_layers: tuple[int, ...] = ()
    source: KVSource | None = None

    def __init__(self, g: Geometry, depth: int, draft_vocab_size: int, own_head: bool = True):
        super().__init__()
        self.g, self.depth, self.recompute = g, depth, False
        self.rotary = Rotary(g)
        self.norm = RMSNorm(g.hidden_size, g.norm_eps)
        self.lm_head = nn.Linear(g.hidden_size, draft_vocab_size, bias=False) if own_head else None
        self.register_buffer("d2t", torch.zeros(draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(g.vocab_size, dtype=torch.bool))
        self.lent: list[torch.Tensor] = []
        self._copied: tuple[torch.Tensor, torch.Tensor] | None = None

    def required_features(self) -> FeatureSpec:
        """What must have been captured to train this drafter."""
        hidden, kv = set(self.hidden_layers), set()
        if self.source is not None:
            hidden |= set(self.source.hidden_layers)
            kv = set(self.source.kv_layers)
        return FeatureSpec(tuple(sorted(hidden)), tuple(sorted(kv)), "last_hidden", Store.all("bf16"))

    @abstractmethod
    def unroll(self, start: Start, tokens: torch.Tensor, extras: Extras = PLAIN) -> Unrolled:
        """All K draft steps at the selected rows of `start`, teacher-forced: tokens [K, N] = x_{t+1+k}."""

    @abstractmethod
    def draft(self, state: DraftState, start: Start, length: int, choose: Choose | None = None) -> torch.Tensor:
        """A chain of at most `length` proposals at each of the N selected rows of `start`: target ids [N, <= length].

        choose: from the logits [N, V_d] of step k the target ids [N], or None to stop before them; greedy if not given.
        """

    def read_cache(self, state: DraftState, start: Start) -> None:
        """Extends every cross memory by what its projector makes of the target's states at the positions of `start`."""
        projectors = [layer.projector for layer in self.draft_layers]
        at = self.rotary(start.all.positions) if any(projectors) else None
        for i, projector in enumerate(projectors):
            if projector is None or at is None:
                continue
            if projector.injection == "per_layer" and start.cache:  # nothing to project: it is read where it lies
                state.cross[i] = state.cross[i]._replace(prefix=start.cache[projector.layers[0]])
            else:
                state.cross[i] = state.cross[i].extended(projector(start, at))

    def run_layer(
        self,
        i: int,
        state: DraftState,
        x: torch.Tensor,
        rows: Rows,
        rotations: tuple[Rotation, Rotation],
        hidden: torch.Tensor | None = None,
        *,
        to_prefix: bool = False,
        select: torch.Tensor | None = None,
        block: int = 1,
    ) -> torch.Tensor:
        """Layer i on x, its memories taken from `state` and left there: h [N, d]. See `DraftLayer.forward`."""
        layer, last = self.layers[i], i == self.depth - 1
        extras = Extras(state.extras.kv_branch and last, state.extras.queries)

        def call(x: torch.Tensor, hidden: torch.Tensor | None, own: Memory, cross: Memory) -> LayerOutput:
            return layer(x, hidden, own, cross, rows, rotations, extras, to_prefix=to_prefix, select=select, block=block)

        if self.recompute and torch.is_grad_enabled():
            out = checkpoint(call, x, hidden, state.own[i], state.cross[i], use_reentrant=False, preserve_rng_state=False)
        else:
            out = call(x, hidden, state.own[i], state.cross[i])
        state.own[i], state.cross[i] = out.own, out.cross
        if last:
            state.kv_branch = out.kv_branch
        if out.query is not None:
            state.queries = (*state.queries[:i], out.query)
        return out.h

    @property
    def draft_layers(self) -> list[DraftLayer]:
        return [layer for layer in self.layers if isinstance(layer, DraftLayer)]

    @property
    def head_weight(self) -> torch.Tensor:
        """[V_d, d]: the drafter's own head, or the target's rows of the draft vocabulary."""
        return self.lm_head.weight if self.lm_head is not None else self.lent[1]

    def logits(self, h: torch.Tensor) -> torch.Tensor:
        """h [N, d] -> logits over the draft vocabulary [N, V_d]."""
        return F.linear(self.norm(h), self.head_weight)

    def propose(self, h: torch.Tensor) -> torch.Tensor:
        """Greedy proposal: h [N, d] -> target token ids [N]."""
        best = self.logits(h).argmax(-1)
        return best + self.d2t[best]

    def bind(self, embedding: torch.Tensor, head: torch.Tensor) -> None:
        """Lends the target's frozen embedding and head [V, d]; no parameters of the drafter, never saved with it.

        The draft vocabulary must be set before; of the head, a drafter without its own keeps the rows it proposes.
        """
        self.lent = [embedding]
        if self.lm_head is None:
            self.lent.append(head if len(self.d2t) == len(head) else head[self.draft_ids.to(head.device)])

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens [n] -> [n, d] in the drafter's dtype."""
        at, rows = (tokens, self.lent[0]) if self._copied is None else (self._copied[0][tokens], self._copied[1])
        return F.embedding(at, rows).to(self.norm.weight.dtype)

    def embedded_ids(self, tokens: torch.Tensor) -> torch.Tensor:
        """Every id that a forward over `tokens` [n] embeds: these, and what a block puts at its masked slots."""
        return tokens

    @contextmanager
    def copied_embedding(self, tokens: torch.Tensor) -> Iterator[None]:
        """Within, `embed` serves the ids of `tokens` [n] alone, from a copy of their rows: the embedding itself has to be there on entry only."""
        ids = self.embedded_ids(tokens)
        where = torch.zeros(self.g.vocab_size, dtype=torch.int64, device=ids.device)
        where[ids] = torch.arange(len(ids), device=ids.device)
        self._copied = where, self.lent[0][ids]
        try:
            yield
        finally:
            self._copied = None

    def set_vocab(self, draft_ids: torch.Tensor) -> None:
        """Chooses the draft vocabulary: ascending target ids [V_d]."""
        self.d2t.copy_(draft_ids - torch.arange(len(draft_ids)))
        self.t2d.zero_()
        self.t2d[draft_ids] = True

    @property
    def draft_ids(self) -> torch.Tensor:
        """Target ids of the draft vocabulary [V_d], ascending."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def reset(self, seed: int) -> None:
        """Random start: matrices N(0, 0.02), norms 1, biases 0; then the gate's and the projectors' own.

        A matrix is drawn by seed and name: drafters that differ in one part start alike in all others.
        """
        start = (seed ^ seed >> 32) & 0xFFFFFFFF  # torch's CPU generator takes 32 bits of a seed into account
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                with torch.no_grad():
                    module.weight.normal_(0, 0.02, generator=torch.Generator().manual_seed(zlib.crc32(name.encode(), start)))
                    if module.bias is not None:
                        module.bias.zero_()
            elif isinstance(module, RMSNorm):
                nn.init.ones_(module.weight)
        for module in self.modules():
            if isinstance(module, KVProjector | GatedDelta):
                module.reset()

    def compile_layers(self, backend: str = "inductor") -> None:
        """torch.compile of every layer's dense parts, for any number of rows; attention keeps its kernels. For training only."""
        import torch.fx.experimental._config

        # Two sizes that happen to be equal at the first call would be taken for one, and the next length would compile again.
        torch.fx.experimental._config.use_duck_shape = False
        for layer in self.draft_layers:
            layer.compile_parts(backend)

    def at_step(self, step: int) -> None:
        """Tells the gates the optimizer step (0-based) that is about to be made: their schedules follow it."""
        for module in self.modules():
            if isinstance(module, GatedDelta):
                module.at_step(step)


class StepDrafter(Drafter):
    """A drafter that makes one proposal a step: `begin` (step 0) and `forward_step` (k >= 1), the same in training and decoding."""

    @abstractmethod
    def begin(self, state: DraftState, start: Start) -> torch.Tensor:
        """Takes in the target's states at the n positions of `start` and runs step 0 at its selected rows: h [N, d]."""

    def forward_step(self, state: DraftState, tokens: torch.Tensor, k: int) -> torch.Tensor:
        """Step k >= 1 at the rows of the last `begin`. tokens [N]: x_{t+1+k}. Returns h [N, d]."""
        return self.run_layers(state, self.embed(tokens), k)

    def run_layers(self, state: DraftState, x: torch.Tensor, k: int) -> torch.Tensor:
        """All layers at step k of the rows of the last `begin`, on their inputs x [N, d]: h [N, d]."""
        assert state.rows is not None
        rotations = self.rotations(state.rows, k)
        for i in range(self.depth):
            x = self.run_layer(i, state, x, state.rows, rotations, state.hidden)
        state.hidden = self.carried(x)
        return x

    def carried(self, h: torch.Tensor) -> torch.Tensor:
        """What the next step receives of this one: h itself, un-normed."""
        return h

    def rotations(self, rows: Rows, k: int) -> tuple[Rotation, Rotation]:
        """Rotations of the self path and of the cross path at step k of `rows`. The one place that settles positions.

        Self path: EAGLE-3 code bases put the token of t + 1 + k at rotary position t + k; kept, for weight compatibility.
        Cross path: the target's keys carry absolute positions, so a draft entry has its true one, t + 1 + k.
        """
        return self.rotary(rows.positions + k), self.rotary(rows.positions + k + 1)

    def unroll(self, start: Start, tokens: torch.Tensor, extras: Extras = PLAIN) -> Unrolled:
        state = DraftState.empty(self.depth, extras)
        h, branch, queries = [], [], []
        for k in range(len(tokens)):
            h.append(self.begin(state, start) if k == 0 else self.forward_step(state, tokens[k], k))
            if state.kv_branch is not None:
                branch.append(state.kv_branch)
            queries.append(state.queries)
        by_layer = tuple(torch.stack(q) for q in zip(*queries, strict=True))
        return Unrolled(torch.stack(h), torch.stack(branch) if branch else None, by_layer)

    @torch.no_grad()
    def draft(self, state: DraftState, start: Start, length: int, choose: Choose | None = None) -> torch.Tensor:
        tokens: list[torch.Tensor] = []
        h = self.begin(state, start)
        while (found := self.propose(h) if choose is None else choose(self.logits(h), len(tokens))) is not None:
            tokens.append(found)
            if len(tokens) == length:
                break
            h = self.forward_step(state, found, len(tokens))
        return torch.stack(tokens, 1) if tokens else start.select.new_empty(len(h), 0)
