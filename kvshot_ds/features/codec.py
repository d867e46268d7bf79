"""How the numbers of a feature are stored: as they are (fp32, bf16), or in 8 bits with one bf16 scale for each token and head; of logits, the best.

fp8: torch's float8_e4m3fn, largest value 448. int8: 255 even steps, -127 to 127. Both hold x / scale, scale = max |x| / largest value
over a group of channels. A plain safetensors reader gets x back as `codes.float() * scale.float()[..., None]`, the channels of a group last.

Why the scale is bf16: measured on SmolLM2, the error of keys and values is within 0.5% of that with fp32 scales, that of hidden states whose
norm lies in one channel within 11%. Powers of two, which one byte holds, cost 7% to 55% in error, and of such hidden states six times. fp16
takes the same two bytes, but under- and overflows where bf16 does not.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import NamedTuple

import torch

from kvshot_ds.config import Storage
from kvshot_ds.features.spec import DTYPES, FeatureSpec, scale_group
from kvshot_ds.geometry import Geometry

SCALE = ".scale"
SCALE_DTYPE = torch.bfloat16
CODES: dict[Storage, torch.dtype] = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
_LARGEST: dict[Storage, float] = {"fp8": 448.0, "int8": 127.0}
# The most a scale may be, so that the largest value times it is finite in bf16. The least is the least normal number.
_MOST: dict[Storage, float] = {"fp8": 145 * 2.0**112, "int8": 2.0**121}
_LEAST = 2.0**-126
_PART = 1 << 17  # numbers looked at at once, so that what is made of them stays in the processor's cache


class Stored(NamedTuple):
    """data: the numbers or their codes, in the shape of the feature. scale: of codes, [n, groups] bf16."""

    data: torch.Tensor
    scale: torch.Tensor | None = None

    def to(self, device: torch.device | str) -> Stored:
        return self._each(lambda t: t.to(device, non_blocking=True))

    def pin_memory(self) -> Stored:
        return self._each(torch.Tensor.pin_memory)

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Stored:
        return Stored(change(self.data), None if self.scale is None else change(self.scale))


def encode(x: torch.Tensor, storage: Storage, group: int) -> Stored:
    """x [n, ..., c] of any floating dtype, on its device. `group` consecutive channels of the last dimension share a scale.

    Not finite in, not finite out: a group that holds NaN or infinity gets the scale NaN. The error of a number is at most half a step:
    of int8 scale / 2, of fp8 1/16 of it, or scale / 1024 where that is more.
    """
    if storage in DTYPES:
        return Stored(x.to(DTYPES[storage]))
    grouped = x.float().reshape(len(x), prod(x.shape[1:]) // group, group)
    largest = torch.maximum(grouped.amax(-1), -grouped.amin(-1))
    # 0 * NaN and 0 * infinity are NaN: the clamp alone would hide the second
    scale = ((largest / _LARGEST[storage]).clamp(_LEAST, _MOST[storage]) + 0 * largest).to(SCALE_DTYPE)
    steps = (grouped / scale.float().unsqueeze(-1)).clamp_(-_LARGEST[storage], _LARGEST[storage])
    if storage == "int8":
        steps = steps.round_().nan_to_num_(0)
    return Stored(steps.to(CODES[storage]).view(x.shape), scale)


def decode(stored: Stored, dtype: torch.dtype, room: torch.Tensor | None = None) -> torch.Tensor:
    """What `encode` was given, in `dtype` (bf16 or fp32) and its shape. Finite scales and codes give finite numbers.

    room: as many bf16 numbers as there are codes, where the result may be put: touching fresh memory costs more than the arithmetic.
    """
    codes, scale = stored
    if scale is None:
        return codes.to(dtype)
    if not codes.numel():
        return codes.new_empty(codes.shape, dtype=dtype)
    values, power = _exact(codes, room)
    if power != 1 and float(scale.max()) * power < torch.finfo(torch.bfloat16).max:
        scale, power = scale * power, 1  # exact, and spares a pass over the values
    grouped = (values if power == 1 else values.mul_(power)).view(*scale.shape, codes.numel() // scale.numel())
    return grouped.to(dtype).mul_(scale.to(dtype).unsqueeze(-1)).view(codes.shape)


def possible(scale: torch.Tensor, storage: Storage) -> bool:
    """Whether `encode` gives such scales. Others, finite ones too, may make of a code what is not finite."""
    return not scale.numel() or (float(scale.min()) >= _LEAST and float(scale.max()) <= _MOST[storage])


def _exact(codes: torch.Tensor, room: torch.Tensor | None) -> tuple[torch.Tensor, float]:
    """int8 codes, or float8_e4m3fn ones without NaN, as bf16, which holds them exactly, and the power of two these are to be multiplied with."""
    if codes.device.type != "cpu":
        return codes.to(torch.bfloat16), 1
    out = torch.empty(codes.shape, dtype=torch.bfloat16) if room is None else room.view(codes.shape)
    if codes.dtype != torch.float8_e4m3fn:
        return out.copy_(codes), 1
    # torch's own cast takes a number at a time on a CPU. Exponent and mantissa moved to where bf16 has them give the number times 2^-120.
    out.view(torch.int16).copy_(codes.view(torch.int8)).bitwise_left_shift_(4).bitwise_and_(-30736)  # 0x87F0: sign, 4 bits of exponent, 3 of mantissa
    return out, 2.0**120


def best_logits(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest of logits [n, V] fp32, best first, of equal ones the smaller id first, on every device alike: ids [n, k] int64, values [n, k].

    An order that `topk` alone does not promise, and equal logits are common in half precision: it is given whole numbers to compare,
    in the order of the logits above, of the ids (backwards) below.
    """
    if not k:
        return logits.new_empty(len(logits), 0, dtype=torch.int64), logits[:, :0]
    last = logits.shape[1] - 1
    bits = (logits + 0.0).view(torch.int32)  # of -0 the sum makes 0
    order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long() << 32
    ids = last - (order + torch.arange(last, -1, -1, device=logits.device)).topk(k).values.bitwise_and(0xFFFFFFFF)
    return ids, logits.gather(1, ids)


def all_finite(tensor: torch.Tensor) -> bool:
    """No NaN and no infinity in `tensor`. Integers always are finite."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    if tensor.dtype == torch.float8_e4m3fn:  # has no infinity, and NaN as 0x7f and 0xff
        return all(int(part.bitwise_and(0x7F).max()) < 0x7F for part in tensor.view(torch.uint8).flatten().split(_PART))
    # the extremes carry NaN along and are found at the speed of memory, 30 times faster than isfinite().all()
    low, high = torch.aminmax(tensor)
    return bool(torch.isfinite(low) & torch.isfinite(high))


def stored_tensors(spec: FeatureSpec, g: Geometry, tokens: int, rows: int) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """dtype and shape of every tensor in the file of a sample of S = `tokens` tokens and R = `rows` teacher rows, scales included."""
    found: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for key, shape in spec.shapes(g, tokens, rows).items():
        storage = spec.store.of(key)
        found[key] = (CODES[storage] if storage in CODES else spec.dtype(key), shape)
        if storage in CODES:
            found[f"{key}{SCALE}"] = (SCALE_DTYPE, (shape[0], prod(shape[1:]) // scale_group(key, g)))
    return found
