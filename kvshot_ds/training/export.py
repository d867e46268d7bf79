"""What a run hands out: the drafter's folder, its average, its best, and train.json, written last."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from kvshot_ds.drafters.base import Drafter
from kvshot_ds.drafters.build import DrafterInfo, save_drafter
from kvshot_ds.files import read_object, write_json
from kvshot_ds.training.checkpoint import Progress
from kvshot_ds.training.verification import told_by_first

if TYPE_CHECKING:
    from kvshot_ds.training.trainer import Setup


def finish(s: Setup, progress: Progress) -> dict[str, Any]:
    """Exports the drafter and writes train.json, last."""
    config, folder = s.recipe.train, s.recipe.run_dir
    trainable = sum(getattr(p, "ds_numel", p.numel()) for p in s.drafter.parameters())
    summary = {
        "status": "complete",
        "steps": progress.step,
        "seconds": progress.seconds,
        "tokens": progress.tokens,
        "supervised_rows": progress.supervised_rows,
        "parameters": {"trainable": trainable},
        "draft_vocab_size": config.draft_vocab_size,
        "draft_vocab_coverage": s.coverage,
        "init": config.init.model_dump(mode="json"),
        "warm_start": read_object(folder / "provenance.json").get("warm_start"),  # of the first start
        "padding_share": progress.padding_share,
        "skipped_conversations": progress.skipped_conversations,
        "world_size": s.world.size,
        "resumed_from": [asdict(start) for start in progress.resumed_from],
    }
    info = DrafterInfo(
        config.drafter, s.drafter.g, config.draft_vocab_size, s.shards.manifest.target_name, s.shards.manifest.target_digest, {"training": summary}
    )
    averages = s.ema.whole() if s.ema is not None else {}
    with whole(s.drafter):
        if s.world.rank == 0:
            if averages:
                save_drafter(folder / "drafter_ema", s.drafter, info, s.drafter.norm.weight.dtype, averages)
            save_drafter(folder / "drafter", s.drafter, info, s.drafter.norm.weight.dtype)
            write_json(folder / "train.json", summary)
            print(
                f"{s.recipe.name}: {progress.step} steps, {progress.supervised_rows} supervised rows, {progress.seconds:.0f} s, "
                f"padding {progress.padding_share:.1%}, "
                f"{trainable / 1e6:.1f} M parameters -> {folder / 'drafter'}"
            )
    dist.barrier()
    return summary


def export_best(s: Setup, progress: Progress) -> None:
    """Writes the weights as they are now to drafter_best. All ranks call it. Raises KvshotError, on all of them, if that fails."""
    config, manifest = s.recipe.train, s.shards.manifest
    training = {"status": "best", "steps": progress.step, "seconds": progress.seconds, "keep_best": config.keep_best, "world_size": s.world.size}
    info = DrafterInfo(config.drafter, s.drafter.g, config.draft_vocab_size, manifest.target_name, manifest.target_digest, {"training": training})
    with whole(s.drafter):
        told_by_first(s.world, lambda: save_drafter(s.recipe.run_dir / "drafter_best", s.drafter, info, s.drafter.norm.weight.dtype))


def whole(drafter: Drafter) -> AbstractContextManager[Any]:
    """Under ZeRO-3, parameters gathered for the export; nothing to do otherwise."""
    parameters = list(drafter.parameters())
    if not any(hasattr(p, "ds_id") for p in parameters):
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(parameters)
