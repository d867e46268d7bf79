"""What a rank sends in an optimizer step, from what DeepSpeed really does with these options (tests count the collectives of runs):

- stage 0 and 1 all-reduce the gradients once, stage 2 in every micro-batch: DeepSpeed joins the slices of all owners in a bucket and all-reduces it,
  twice a reduce-scatter (zero_optimization.use_multi_rank_bucket_allreduce, on by default; without it each slice is reduced to its owner);
- stages 1 and 2 all-gather the new weights once;
- stage 3 all-gathers the weights and reduce-scatters the gradients in every micro-batch. Weights are kept from the forward to the backward pass unless
  more than stage3_max_reuse_distance of them lie in between; small ones (stage3_param_persistence_threshold) are kept for good and gathered after the update.

Of n bytes, a ring of N ranks sends n (N - 1) / N for an all-gather into n or a reduce-scatter of n, and twice that for an all-reduce.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_SMALL = 100  # counts of rows, norms, flags, whether to stop: a few numbers each [bytes]
_SIZES = {"fp32": 4, "fp16": 2, "bf16": 2, "bfp16": 2}
# DeepSpeed's defaults
_PERSISTENT, _REUSE = 100_000, 1_000_000_000


def bytes_per_step(ds_config: dict[str, Any], trainable: Sequence[int], world: int, micro_batches: float, frozen: Sequence[int] = ()) -> float:
    """Bytes that one of `world` ranks sends in an optimizer step of so many micro-batches, from the second step on (ZeRO-3 sends more in the first, whose
    order of parameters it has to learn).

    trainable: elements of each trained parameter. frozen: of each tensor that is shared over the ranks and gathered in every micro-batch
    (train.shard_frozen), in the run's precision.
    """
    if world == 1:
        return 0.0
    zero, item = ds_config.get("zero_optimization", {}), 2 if ds_config.get("bf16", {}).get("enabled") else 4
    stage, total = int(zero.get("stage", 0)), sum(trainable)
    gradients = total * _SIZES.get(ds_config.get("communication_data_type", ""), item)
    sent: float
    match stage:
        case 0:
            sent = 2 * gradients
        case 1:
            sent = 2 * gradients + total * item
        case 2:
            slices = 2 if zero.get("use_multi_rank_bucket_allreduce", True) else 1
            sent = slices * gradients * micro_batches + total * item
        case _:
            least, reach = zero.get("stage3_param_persistence_threshold", _PERSISTENT), zero.get("stage3_max_reuse_distance", _REUSE)
            kept, lent = sum(n for n in trainable if n < least), sum(n for n in frozen if n >= least)
            passes = 1 if 2 * total <= reach else 2
            sent = ((total - kept) * item * passes + lent * item + gradients) * micro_batches + kept * item
    return sent * (world - 1) / world + _SMALL
