"""A rank that trains the recipes in the files named and prints, for each, the bytes that its collectives sent in the last optimizer step, and the
elements of its parameters: the collectives are seen as operators, below DeepSpeed and torch.distributed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from kvshot_ds.config import load_recipe
from kvshot_ds.training import trainer
from kvshot_ds.training.launch import run


class Sent(TorchDispatchMode):
    """bytes: of ring algorithms, by the size of the whole tensor of each collective."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            sizes = [x.numel() * x.element_size() for x in _pytree.tree_leaves(args) if isinstance(x, torch.Tensor)]
            name = func._schema.name.removeprefix("c10d::")
            factor = {"allreduce_": 2, "_allgather_base_": 1, "_reduce_scatter_base_": 1, "broadcast_": 1, "barrier": 0}[name]
            self.bytes += factor * max(sizes, default=0) * (dist.get_world_size() - 1) / dist.get_world_size()
        return func(*args, **(kwargs or {}))


def main(files: list[str]) -> None:
    plain, seen = trainer.optimizer_step, {}

    def step(s: trainer.Setup, *rest: Any) -> Any:
        with Sent() as sent:
            done = plain(s, *rest)
        trainable, frozen = ([getattr(p, "ds_numel", p.numel()) for p in s.objective.parameters() if p.requires_grad is kind] for kind in (True, False))
        seen["found"] = {"sent": sent.bytes, "trainable": trainable, "frozen": frozen}
        return done

    trainer.optimizer_step = step
    for file in files:
        run(load_recipe(Path(file), ()))
        print(json.dumps(seen["found"]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
