"""8-bit storage against the same arithmetic number by number, at the edges of the numbers, and through shards."""

from __future__ import annotations

import math
import struct
from pathlib import Path

import hypothesis.strategies as st
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings

from kvshot_ds.config import Storage
from kvshot_ds.errors import KvshotError
from kvshot_ds.features.codec import CODES, Stored, all_finite, decode, encode, stored_tensors
from kvshot_ds.features.shard import ShardReader, ShardWriter
from kvshot_ds.features.spec import FeatureSpec, Store, scale_group, teacher_rows
from tests.features.shards import GEOMETRY, assert_whole, make_sample

EIGHT: tuple[Storage, ...] = ("fp8", "int8")
LARGEST = {"fp8": 448.0, "int8": 127.0}
FLOATS = st.one_of(
    st.floats(width=32, allow_nan=False, allow_infinity=False),
    st.sampled_from([0.0, -0.0, 1e-45, -1e-45, 2.0**-126, 1e-38, 6e-8, 65504.0, 65520.0, 1e30, 3.3895e38, 3.4028234e38, -3.4028234e38]),
)


def nearest_e4m3(value: float) -> float:
    """The closest number of 4 bits of exponent and 3 of mantissa, of two equally close ones the even one."""
    numbers = [(m / 8 + (e > 0)) * 2.0 ** (max(e, 1) - 7) for e in range(16) for m in range(8)][:-1]  # the last code is NaN
    distance = [abs(abs(value) - x) for x in numbers]
    best = [i for i, d in enumerate(distance) if d == min(distance)]
    return math.copysign(numbers[next((i for i in best if i % 2 == 0), best[0])], value)


def nearest_bf16(value: float) -> float:
    """Rounded to 8 bits of mantissa, ties to even."""
    bits = struct.unpack("<I", struct.pack("<f", value))[0]
    bits += 0x7FFF + (bits >> 16 & 1)
    return struct.unpack("<f", struct.pack("<I", bits & 0xFFFF0000))[0]


def slowly(numbers: list[float], storage: Storage) -> list[float]:
    """One group, by the definition."""
    largest = max(map(abs, numbers))
    scale = nearest_bf16(max(float(torch.tensor(largest) / LARGEST[storage]), 2.0**-126))
    out = []
    for x in numbers:
        step = float(torch.tensor(x) / torch.tensor(scale))  # as fp32 divides
        step = min(max(step, -LARGEST[storage]), LARGEST[storage])
        out.append(scale * (nearest_e4m3(step) if storage == "fp8" else round(step)))
    return out


@pytest.mark.parametrize("storage", EIGHT)
def test_encoding_is_that_of_the_definition(storage: Storage) -> None:
    r = torch.Generator().manual_seed(0)
    x = torch.randn(30, 3, 8, generator=r) * torch.logspace(-6, 6, 30)[:, None, None]
    x[3, 1], x[4, 2, 5] = 0, 1e6  # nothing, and an outlier
    stored = encode(x, storage, 8)
    assert stored.data.dtype == CODES[storage] and stored.data.shape == x.shape
    assert stored.scale is not None and stored.scale.shape == (30, 3) and stored.scale.dtype == torch.bfloat16
    want = torch.tensor([[slowly(group.tolist(), storage) for group in token] for token in x])
    assert torch.equal(decode(stored, torch.float32), want)
    assert torch.equal(stored.data.float() * stored.scale.float()[..., None], want), "a plain reader gets the same"
    assert torch.equal(decode(stored, torch.bfloat16), want.bfloat16())


@pytest.mark.parametrize("storage", EIGHT)
@settings(max_examples=300, deadline=None)
@given(numbers=st.lists(FLOATS, min_size=1, max_size=6))
def test_any_finite_numbers_come_back_finite_and_close(storage: Storage, numbers: list[float]) -> None:
    x = torch.tensor([numbers], dtype=torch.float32)
    stored = encode(x, storage, len(numbers))
    assert all(all_finite(part) for part in stored if part is not None)
    for dtype in (torch.float32, torch.bfloat16):
        back = decode(stored, dtype).double()
        assert torch.isfinite(back).all()
        scale, rounding = float(stored.scale.double()), 2.0**-8 if dtype == torch.bfloat16 else 2.0**-22
        least = 2.0**-134 if dtype == torch.bfloat16 else 2.0**-140  # half the smallest number of bf16
        for one, other in zip(x[0].double().tolist(), back[0].tolist(), strict=True):
            step = scale / 2 if storage == "int8" else max(abs(one) / 16, scale / 1024)
            # at the very end of bf16's range the scale cannot grow: 448 and 127 scales are at most its largest number
            beyond = max(0.0, abs(one) - LARGEST[storage] * scale)
            assert abs(one - other) <= step + beyond + abs(one) * rounding + least, (one, other)
            assert beyond <= 0.01 * abs(one)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("storage", EIGHT)
def test_what_is_not_finite_shows_in_the_scale_of_its_group_alone(storage: Storage, bad: float) -> None:
    x = torch.ones(2, 3, 4)
    x[1, 2, 3] = bad
    stored = encode(x, storage, 4)
    assert stored.scale is not None and stored.scale.isnan().nonzero().tolist() == [[1, 2]]
    assert not all_finite(stored.scale)


def test_finite_is_told_of_every_code() -> None:
    for code in range(256):
        one = torch.tensor([0, code, 1], dtype=torch.uint8).view(torch.float8_e4m3fn)
        assert all_finite(one) == (code not in (0x7F, 0xFF)) == bool(torch.isfinite(one.float()).all())
    assert all_finite(torch.empty(0).to(torch.float8_e4m3fn)) and all_finite(torch.tensor([-128, 127], dtype=torch.int8))


def test_every_fp8_code_is_decoded_exactly() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)[None]
    codes = codes[:, torch.isfinite(codes.float())[0]]
    for dtype in (torch.float32, torch.bfloat16):
        found = decode(Stored(codes, torch.ones(1, 1, dtype=torch.bfloat16)), dtype)
        assert found.dtype == dtype and torch.equal(found.float(), codes.float())


@pytest.mark.parametrize("storage", ["fp32", "bf16"])
def test_plain_storage_is_a_cast(storage: Storage) -> None:
    x = torch.randn(4, 2, 3, generator=torch.Generator().manual_seed(1))
    stored = encode(x, storage, 3)
    assert stored.scale is None and torch.equal(stored.data, x.to({"fp32": torch.float32, "bf16": torch.bfloat16}[storage]))
    assert decode(stored, torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize("storage", EIGHT)
def test_no_rows_and_other_dtypes(storage: Storage) -> None:
    empty = encode(torch.empty(0, 4, 8), storage, 8)
    assert empty.data.shape == (0, 4, 8) and empty.scale is not None and empty.scale.shape == (0, 4)
    assert decode(empty, torch.bfloat16).shape == (0, 4, 8)
    x = torch.randn(5, 16, generator=torch.Generator().manual_seed(2))
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        assert torch.equal(decode(encode(x.to(dtype), storage, 8), torch.float32), decode(encode(x.to(dtype).float(), storage, 8), torch.float32))


STORES = (Store("fp8", "int8", "fp8", "fp32"), Store("int8", "fp8", "bf16", "bf16"), Store("fp32", "fp8", "int8", "bf16"))


def encoded(seed: int, spec: FeatureSpec) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """A sample as the target makes it, and what a reader should return of it."""
    stored, wanted = {}, {}
    for key, tensor in make_sample(seed, FeatureSpec(spec.hidden_layers, spec.kv_layers, "last_hidden", Store.all("fp32"), spec.query_layers)).items():
        how = spec.store.of(key)
        one = Stored(tensor) if how is None else encode(tensor, how, scale_group(key, GEOMETRY))
        stored |= {key: one.data} | ({} if one.scale is None else {f"{key}.scale": one.scale})
        wanted[key] = decode(one, spec.dtype(key)) if how else tensor
    return stored, wanted


@pytest.mark.parametrize("store", STORES, ids=str)
def test_shards_bring_back_what_was_encoded(tmp_path: Path, store: Store) -> None:
    spec = FeatureSpec((1, 3), (2,), "last_hidden", store, (2, 4))
    stored, wanted = encoded(3, spec)
    rows = len(teacher_rows(stored["turn"].numpy()))
    assert {k: (v.dtype, tuple(v.shape)) for k, v in stored.items()} == stored_tensors(spec, GEOMETRY, len(stored["tokens"]), rows)
    with ShardWriter(tmp_path, "train-000000.tar") as writer:
        writer.write("c", stored, {})
        reader = ShardReader(tmp_path, writer.commit(["c"]), spec, GEOMETRY)
    found = reader.read(0)
    assert found.keys() == wanted.keys() and all(found[k].dtype == wanted[k].dtype and torch.equal(found[k], wanted[k]) for k in wanted)
    assert {k: v.dtype for k, v in found.items() if k.startswith("value")} == {"value.2": torch.bfloat16}
    some = reader.read(0, ("value.2", "tokens"))
    assert tuple(some) == ("value.2", "tokens") and torch.equal(some["value.2"], wanted["value.2"])
    assert_whole(reader)
    sample = reader.index.samples[0]
    plain = safetensors.torch.load((tmp_path / "train-000000.tar").read_bytes()[sample.offset : sample.offset + sample.size])
    assert torch.equal((plain["key.2"].float() * plain["key.2.scale"].float()[..., None]).bfloat16(), wanted["key.2"])


FAULTS = {
    "NaN code": ("key.2", lambda x: x.view(torch.uint8).view(-1).__setitem__(5, 0x7F), "tensor key.2 holds NaN or infinity"),
    "negative NaN code": ("hidden.1", lambda x: x.view(torch.uint8).view(-1).__setitem__(0, 0xFF), "tensor hidden.1 holds NaN or infinity"),
    "scale": ("value.2.scale", lambda x: x.view(-1).__setitem__(1, math.inf), "tensor value.2.scale holds NaN or infinity"),
    "scale of a hidden state": ("hidden.3.scale", lambda x: x.view(-1).__setitem__(0, math.nan), "tensor hidden.3.scale holds NaN or infinity"),
}


@pytest.mark.parametrize("name, damage, text", FAULTS.values(), ids=FAULTS)
def test_codes_and_scales_that_are_not_finite_are_named(tmp_path: Path, name: str, damage: object, text: str) -> None:
    spec = FeatureSpec((1, 3), (2,), "last_hidden", Store("fp8", "fp8", "fp8", "bf16"))
    stored, _ = encoded(1, spec)
    damage(stored[name])  # type: ignore[operator]
    with ShardWriter(tmp_path, "train-000000.tar") as writer:
        writer.write("c", stored, {})
        reader = ShardReader(tmp_path, writer.commit(["c"]), spec, GEOMETRY)
    with pytest.raises(KvshotError, match=rf"train-000000\.tar: sample 'c': {text}"):
        reader.read(0)


@pytest.mark.parametrize(
    "change", [{"key.2.scale": None}, {"key.2.scale": torch.zeros(6, 3).bfloat16()}, {"key.2": torch.zeros(6, 2, 4)}], ids=["no", "shape", "dtype"]
)
def test_a_scale_that_does_not_fit_is_named(tmp_path: Path, change: dict[str, torch.Tensor | None]) -> None:
    spec = FeatureSpec((1, 3), (2,), "last_hidden", Store("bf16", "int8", "bf16", "bf16"))
    stored = {k: v for k, v in {**encoded(1, spec)[0], **change}.items() if v is not None}
    with ShardWriter(tmp_path, "train-000000.tar") as writer:
        writer.write("c", stored, {})
        reader = ShardReader(tmp_path, writer.commit(["c"]), spec, GEOMETRY)
    with pytest.raises(KvshotError, match=rf"sample 'c': tensor {next(iter(change))} is"):
        reader.read(0)
    assert reader.read(0, ("hidden.1",)).keys() == {"hidden.1"}, "other features need no scale"


def test_only_the_bytes_of_the_chosen_features_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = FeatureSpec((1, 3), (2,), "last_hidden", Store("fp8", "int8", "bf16", "bf16"))
    stored, _ = encoded(1, spec)
    with ShardWriter(tmp_path, "train-000000.tar") as writer:
        writer.write("c", stored, {})
        reader = ShardReader(tmp_path, writer.commit(["c"]), spec, GEOMETRY)
    plain, sizes = ShardReader._bytes, []
    monkeypatch.setattr(ShardReader, "_bytes", lambda self, file, sample, offset, size: sizes.append(size) or plain(self, file, sample, offset, size))
    reader.read(0, ("value.2", "hidden.3"))
    wanted = [stored[name] for name in ("value.2", "value.2.scale", "hidden.3", "hidden.3.scale")]
    assert sizes[0] == 8 and sizes[2:] == [x.numel() * x.element_size() for x in wanted]
