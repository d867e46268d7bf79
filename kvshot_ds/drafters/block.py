"""Block-wise drafters: one forward proposes B - 1 tokens. DFlash (arXiv 2602.06036), and its counterparts on the target's KV."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from kvshot_ds.config import BlockConfig, KVBlockConfig
from kvshot_ds.drafters.base import Choose, Drafter, Unrolled
from kvshot_ds.drafters.fusion import fuse
from kvshot_ds.drafters.layer import DraftLayer
from kvshot_ds.drafters.layers import RMSNorm
from kvshot_ds.drafters.projector import KVSource
from kvshot_ds.drafters.state import PLAIN, DraftState, Extras, Start
from kvshot_ds.errors import ConfigError
from kvshot_ds.features.spec import resolve_hidden
from kvshot_ds.geometry import Geometry


class BlockDrafter(Drafter):
    """The block of a row anchored at t stands at positions t + 1 … t + B: the clean token x_{t+1}, then B - 1 mask tokens.

    Slot s sees the target's states at positions <= t and every slot of its block, and proposes the token at t + 1 + s;
    slot 0 proposes nothing, slot k + 1 is draft step k. dflash: keys and values of the context come from
    c = RMSNorm(W_fc [h of N layers]) through each layer's own projections. kv_block: they are the target's cache, as the
    projector hands it on. hybrid_block: both, joined by a gate. Embedding and head are the target's, frozen.
    """

    def __init__(self, g: Geometry, config: BlockConfig, draft_vocab_size: int):
        super().__init__(g, config.depth, draft_vocab_size, own_head=False)
        self.family, self.block_size, self.mask_token_id = config.family, config.block_size, config.mask_token_id
        if config.mask_token_id is not None and config.mask_token_id >= g.vocab_size:
            raise ConfigError(f"train.drafter.mask_token_id={config.mask_token_id} is no token of a target with {g.vocab_size}; use null for a trained one")
        self.mask_embedding = nn.Parameter(torch.zeros(g.hidden_size)) if config.mask_token_id is None else None
        if not isinstance(config, KVBlockConfig):
            self.hidden_layers = resolve_hidden(config.hidden_layers, g.num_layers, "train.drafter.hidden_layers", config.depth)
            self.fc = nn.Linear(len(self.hidden_layers) * g.hidden_size, g.hidden_size, bias=False)
            self.hidden_norm = RMSNorm(g.hidden_size, g.norm_eps)
        kv = getattr(config, "kv", None)
        self.source = source = None if kv is None else KVSource(g, kv, config.depth)
        self.layers = nn.ModuleList(
            DraftLayer(
                g,
                self_path=bool(self.hidden_layers),
                cross=kv is not None,
                projector=None if source is None else source.projector(i),
                qk_norm=kv is not None and kv.qk_norm,
                gate=getattr(config, "gate", None),
            )
            for i in range(config.depth)
        )

    def slots(self, state: DraftState, start: Start) -> torch.Tensor:
        """Takes in the target's states at the n positions of `start` and runs the block of each selected row: h [B, N, d]."""
        self._take_in(state, start)
        b, rows = self.block_size, start.rows
        anchors = self.embed(start.tokens[start.select])
        masks = self._mask(anchors).expand(len(anchors), b - 1, -1)
        x = torch.cat((anchors.unsqueeze(1), masks), 1).flatten(0, 1)
        at = self.rotary((rows.positions.unsqueeze(1) + torch.arange(1, b + 1, device=x.device)).flatten())
        for i in range(self.depth):
            x = self.run_layer(i, state, x, rows, (at, at), block=b)
        return x.unflatten(0, (-1, b)).transpose(0, 1)

    def _take_in(self, state: DraftState, start: Start) -> None:
        state.anchor(start)
        self.read_cache(state, start)
        if not self.hidden_layers:
            return
        context, at = self.hidden_norm(fuse(self.fc, None, start, self.hidden_layers)), self.rotary(start.all.positions)
        for i, layer in enumerate(self.draft_layers):
            assert layer.self_attn is not None
            state.own[i] = state.own[i].extended(layer.self_attn.key_value(context, at))

    def _mask(self, anchors: torch.Tensor) -> torch.Tensor:
        """What stands at the masked slots [d] beside the embedded `anchors` [n, d]."""
        if self.mask_embedding is not None:
            return self.mask_embedding
        assert self.mask_token_id is not None
        return self.embed(torch.full((1,), self.mask_token_id, device=anchors.device))[0]

    def embedded_ids(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens if self.mask_token_id is None else F.pad(tokens, (0, 1), value=self.mask_token_id)

    def unroll(self, start: Start, tokens: torch.Tensor, extras: Extras = PLAIN) -> Unrolled:
        """The tokens of steps k >= 1 are not read: a block knows its clean token only. K <= B - 1."""
        steps = len(tokens)
        state = DraftState.empty(self.depth, extras)
        h = self.slots(state, start)[1 : steps + 1]

        def by_slot(x: torch.Tensor) -> torch.Tensor:
            return x.unflatten(0, (-1, self.block_size)).transpose(0, 1)

        branch = None if state.kv_branch is None else by_slot(state.kv_branch)[1 : steps + 1]
        return Unrolled(h, branch, tuple(by_slot(q)[:steps] for q in state.queries))

    @torch.no_grad()
    def draft(self, state: DraftState, start: Start, length: int, choose: Choose | None = None) -> torch.Tensor:
        h = self.slots(state, start)[1 : length + 1]  # [<= length, N, d]
        if choose is None:
            return self.propose(h.flatten(0, 1)).view(h.shape[:2]).T
        tokens = []
        for k, logits in enumerate(self.logits(h)):
            found = choose(logits, k)
            if found is None:
                break
            tokens.append(found)
        return torch.stack(tokens, 1) if tokens else start.select.new_empty(h.shape[1], 0)

    def reset(self, seed: int) -> None:
        super().reset(seed)
        if self.mask_embedding is not None:
            with torch.no_grad():
                self.mask_embedding.normal_(0, 0.02, generator=torch.Generator().manual_seed(seed))
