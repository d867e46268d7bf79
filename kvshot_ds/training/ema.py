"""An exponential moving average of the trained weights, shared out over the ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from kvshot_ds.drafters.base import Drafter
from kvshot_ds.errors import KvshotError
from kvshot_ds.training.engine import World


class Average:
    """average <- decay * average + (1 - decay) * weights, after every optimizer step; it starts at the weights before the first. fp32.

    Rank r of w holds elements r * n .. (r + 1) * n of each flattened tensor, n = ceil(numel / w), the last ranks fewer: its share under
    ZeRO-3, and an equal piece of what every rank holds otherwise. The weights are the module's own, in bf16 those that the drafter would
    be exported with: they are on every rank at every stage, while DeepSpeed hands out its fp32 master weights by collectives only.
    """

    def __init__(self, drafter: Drafter, decay: float, world: World):
        """Once the engine is made, because ZeRO-3 shares the weights out then."""
        self.decay, self.world = decay, world
        self.weights = {name: p for name, p in drafter.named_parameters() if p.requires_grad}
        self.pieces = {name: self._mine(p).float().clone() for name, p in self.weights.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Takes in the weights of the step just made, without waiting for the device."""
        for name, p in self.weights.items():
            self.pieces[name].lerp_(self._mine(p).float(), 1 - self.decay)

    def state(self) -> dict[str, torch.Tensor]:
        """This rank's pieces by tensor name, flat, fp32."""
        return self.pieces

    def load(self, ranks: Sequence[Mapping[str, torch.Tensor]]) -> None:
        """Restores from the `state` of every rank that wrote it, in the order of the ranks; their number may be another one than now.

        Raises KvshotError if they are not the pieces of this drafter's tensors.
        """
        for name, p in self.weights.items():
            found = [pieces[name] for pieces in ranks if name in pieces]
            numel = sum(len(piece) for piece in found)
            if len(found) < len(ranks) or numel != _numel(p):
                raise KvshotError(f"the saved average of {name} has {numel} elements in {len(found)} of {len(ranks)} files, expected {_numel(p)} in all")
            self.pieces[name].copy_(torch.cat([piece.flatten() for piece in found])[self._range(p)])

    def whole(self) -> dict[str, torch.Tensor]:
        """The averages in their tensors' shapes, fp32, on the CPU of rank 0; nothing on the others. All ranks call it."""
        out = {}
        for name, p in self.weights.items():
            n = -(-_numel(p) // self.world.size)
            mine = torch.zeros(n, device=self.world.device)
            mine[: len(self.pieces[name])] = self.pieces[name]
            joined = mine.new_empty(n * self.world.size)
            dist.all_gather_into_tensor(joined, mine)
            if self.world.rank == 0:
                out[name] = joined[: _numel(p)].view(getattr(p, "ds_shape", p.shape)).cpu()
        return out

    def _range(self, p: torch.nn.Parameter) -> slice:
        """This rank's elements of the flattened tensor."""
        numel, n = _numel(p), -(-_numel(p) // self.world.size)
        return slice(min(numel, self.world.rank * n), min(numel, (self.world.rank + 1) * n))

    def _mine(self, p: torch.nn.Parameter) -> torch.Tensor:
        """This rank's piece of the weights as they are now, flat."""
        at = self._range(p)
        share = getattr(p, "ds_tensor", None)
        return p.detach().flatten()[at] if share is None else share.detach().flatten()[: at.stop - at.start]


def _numel(p: torch.nn.Parameter) -> int:
    """Elements of the whole tensor, also where ZeRO-3 holds only a share of it."""
    return int(getattr(p, "ds_numel", p.numel()))
