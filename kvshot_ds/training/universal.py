"""A checkpoint continued on another number of ranks, by way of DeepSpeed's universal checkpoint."""

from __future__ import annotations

import shutil
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from kvshot_ds.errors import KvshotError

OPTIONS = {"load_universal": True}  # in the section `checkpoint` of the configuration of an engine that loads one


def convert(source: Path, target: Path, beat: Callable[[], None] = lambda: None) -> None:
    """Writes the ZeRO-1, 2 or 3 checkpoint `source` as a universal one to `target`, which may hold what an interrupted conversion left.

    One rank calls it, in its own process: a GPU's context does not survive the converter's worker processes. Takes twice the room of the
    optimizer's state beside it. beat: called as it gets on. Raises KvshotError if it cannot be read or written.
    """
    from deepspeed.checkpoint import ds_to_universal

    shutil.rmtree(target.parent, ignore_errors=True)
    said = _Heard(beat)
    options = Namespace(
        input_folder=str(source), output_folder=str(target), num_extract_workers=1, num_merge_workers=1, keep_temp_folder=False, strict=True,
        inject_missing_state=True,
    )  # fmt: skip
    try:
        target.mkdir(parents=True)
        with redirect_stdout(said), redirect_stderr(said):
            ds_to_universal.main(options)
    except (OSError, RuntimeError, AssertionError, EOFError, LookupError, ValueError, UnpicklingError) as error:
        shutil.rmtree(target.parent, ignore_errors=True)
        raise KvshotError(
            f"{source}: cannot be converted for another number of ranks ({type(error).__name__}: {error}); the checkpoint itself is untouched: make room for "
            f"three times its size, or continue on as many ranks as wrote it"
        ) from None


class _Heard(StringIO):
    """What the converter says: a line for each file that it is through with."""

    def __init__(self, call: Callable[[], None]):
        super().__init__()
        self.call = call

    def write(self, text: str) -> int:
        self.call()
        return len(text)


@contextmanager
def loading(engine: Any) -> Iterator[None]:
    """Within, `engine` loads a universal checkpoint. Mends what DeepSpeed 0.19 does to it:

    ZeRO-3 gives all parameter groups the settings of the first, and all parts of a rank's weights one and the same step counter, which then counts every
    part's update and spoils Adam's bias correction. ZeRO-1 and 2 fail on a rank that holds nothing of a small group.
    """
    groups = engine.basic_optimizer.param_groups
    before = [{name: value for name, value in group.items() if name != "params"} for group in groups]
    absent = _fill_in(engine)
    try:
        yield
    finally:
        for tensors, empty in absent:
            tensors.pop()
            del engine.optimizer.param_names[empty]
    for group, own, lr in zip(groups, before, engine.lr_scheduler.get_last_lr(), strict=True):
        group.update(own)
        group["lr"] = lr
    for state in engine.basic_optimizer.state.values():
        if torch.is_tensor(state.get("step")):
            state["step"] = state["step"].clone()


class _Padding:
    """Where DeepSpeed looks for the part of a tensor that this rank holds: there is none."""

    def get_optim_state_keys(self) -> list[str]:
        return []


def _fill_in(engine: Any) -> list[tuple[list[torch.Tensor], torch.Tensor]]:
    """Adds a tensor without elements to each group of ZeRO-1 and 2 of which this rank holds nothing but padding."""
    added = []
    for tensors in getattr(engine.optimizer, "bit16_groups", []):
        if all(tensor._hp_mapping is None for tensor in tensors):
            empty: Any = torch.empty(0)
            empty._hp_mapping, empty.load_hp_checkpoint_state = _Padding(), lambda *_, **__: None
            tensors.append(empty)
            engine.optimizer.param_names[empty] = ""
            added.append((tensors, empty))
    return added
