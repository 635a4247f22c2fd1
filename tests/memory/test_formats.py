"""The cast from master to compute and the split master, checked against integer arithmetic on the bits in numpy."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zeor.memory import formats
from zeor.memory.formats import BF16_NAN_BITS, cast_and_spoil, cast_into, join_into, split_into


def cast_bits(master_bits: np.ndarray) -> np.ndarray:
    """The bits (uint16) that cast_into makes of these fp32 bits (uint32)."""
    master = torch.from_numpy(master_bits.view(np.int32).copy()).view(torch.float32)
    compute = torch.full(master.shape, 7.0, dtype=torch.bfloat16)
    cast_into(compute, master)
    assert np.array_equal(master.view(torch.int32).numpy(), master_bits.view(np.int32)), "master was written"
    return compute.view(torch.int16).numpy().view(np.uint16)


def spoiling_bits(master_bits: np.ndarray) -> np.ndarray:
    """The same by cast_and_spoil."""
    master = torch.from_numpy(master_bits.view(np.int32).copy()).view(torch.float32)
    compute = torch.full(master.shape, 7.0, dtype=torch.bfloat16)
    cast_and_spoil(compute, master)
    return compute.view(torch.int16).numpy().view(np.uint16)


def expected_bits(master_bits: np.ndarray) -> np.ndarray:
    """Ties away from zero in 64-bit integers, on the magnitude; the sign is put back afterwards."""
    wide = master_bits.astype(np.int64)
    sign, magnitude = wide >> 31, wide & 0x7FFFFFFF
    rounded = (sign << 15) | ((magnitude + 0x8000) >> 16)
    return np.where(magnitude > 0x7F800000, BF16_NAN_BITS, rounded).astype(np.uint16)


def split_bits(master_bits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The bits of compute (uint16) and the remainder (int16) that split_into makes of these fp32 bits."""
    master = torch.from_numpy(master_bits.view(np.int32).copy()).view(torch.float32)
    compute = torch.full(master.shape, 7.0, dtype=torch.bfloat16)
    remainder = torch.full(master.shape, 7, dtype=torch.int16)
    split_into(compute, remainder, master)
    assert np.array_equal(master.view(torch.int32).numpy(), master_bits.view(np.int32)), "master was written"
    return compute.view(torch.int16).numpy().view(np.uint16), remainder.numpy()


def join_bits(compute_bits: np.ndarray, remainder: np.ndarray) -> np.ndarray:
    """The fp32 bits (uint32) that join_into makes of the two halves."""
    compute = torch.from_numpy(compute_bits.view(np.int16).copy()).view(torch.bfloat16)
    master = torch.full(compute.shape, 7.0)
    join_into(master, compute, torch.from_numpy(remainder.copy()))
    return master.view(torch.int32).numpy().view(np.uint32)


def check(master_bits: np.ndarray) -> None:
    """The cast, the split (whose remainder is a plain difference in 64 bits) and the way back."""
    expected = expected_bits(master_bits)
    assert np.array_equal(cast_bits(master_bits), expected)
    assert np.array_equal(spoiling_bits(master_bits), expected)
    compute, remainder = split_bits(master_bits)
    assert np.array_equal(compute, expected)
    finite = (master_bits & 0x7FFFFFFF) < 0x7F800000
    difference = master_bits.astype(np.int64) - (expected.astype(np.int64) << 16)
    assert np.array_equal(remainder.astype(np.int64), np.where(finite, difference, 0))
    joined = join_bits(compute, remainder)
    nan = (master_bits & 0x7FFFFFFF) > 0x7F800000
    assert np.array_equal(joined, np.where(nan, BF16_NAN_BITS << 16, master_bits))


@pytest.mark.parametrize("sign", [0, 1])
@pytest.mark.parametrize("exponent", [0, 1, 64, 126, 127, 128, 200, 253, 254])
def test_every_tie_and_its_neighbours(sign, exponent):
    upper = (sign << 31) | (exponent << 23) | (np.arange(128, dtype=np.int64) << 16)
    lower = np.array([0, 1, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF], dtype=np.int64)
    check((upper[:, None] | lower[None, :]).reshape(-1).astype(np.uint32))


def test_a_tie_goes_away_from_zero_where_torch_goes_to_even():
    tie = torch.tensor([1.0 + 2.0**-8, -1.0 - 2.0**-8])
    compute = torch.empty(2, dtype=torch.bfloat16)
    cast_into(compute, tie)
    assert compute.tolist() == [1.0 + 2.0**-7, -1.0 - 2.0**-7]
    assert tie.to(torch.bfloat16).tolist() == [1.0, -1.0]


def test_all_upper_halves_with_random_lower_halves():
    generator = np.random.default_rng(0)
    upper = np.repeat(np.arange(1 << 16, dtype=np.uint32) << 16, 8)
    check(upper | generator.integers(0, 1 << 16, upper.size, dtype=np.uint32))


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40))
def test_any_bits(bits):
    check(np.array(bits, dtype=np.uint32))


def test_infinities_stay_and_the_largest_finite_rounds_to_infinity():
    got = cast_bits(np.array([0x7F800000, 0xFF800000, 0x7F7FFFFF, 0xFF7F8000, 0x7F7F7FFF], dtype=np.uint32))
    assert [hex(b) for b in got] == ["0x7f80", "0xff80", "0x7f80", "0xff80", "0x7f7f"]


def test_infinity_is_told_from_the_finite_values_that_round_to_it():
    bits = np.array([0x7F800000, 0x7F7FFFFF, 0x7F7F8000, 0xFF800000, 0xFF7FFFFF, 0xFF7F8000], dtype=np.uint32)
    compute, remainder = split_bits(bits)
    assert [hex(b) for b in compute] == ["0x7f80"] * 3 + ["0xff80"] * 3
    assert remainder.tolist() == [0, -1, -0x8000] * 2
    assert np.array_equal(join_bits(compute, remainder), bits)


def test_every_remainder_of_the_halves_that_wrap_most_easily():
    """All 2**16 values around each zero, each infinity's finite side and the smallest normal number."""
    for upper in (0x0000, 0x8000, 0x0080, 0x8080, 0x7F7F, 0xFF7F, 0x7F00, 0xFFFF):
        check((upper << 16) | np.arange(1 << 16, dtype=np.uint32))


def test_every_nan_becomes_the_same_quiet_nan():
    bits = [0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF, 0xFF800001, 0x7FC00000, 0xFFC00000, 0x7F80FFFF, 0x7FBFFFFF]
    got = cast_bits(np.array(bits * 9, dtype=np.uint32))  # 72: a vector body and a scalar tail
    assert set(got.tolist()) == {BF16_NAN_BITS}


def test_zeros_keep_their_sign_and_denormals_are_not_flushed():
    bits = np.array([0, 0x80000000, 1, 0x00008000, 0x80008000, 0x00010000, 0x007FFFFF], dtype=np.uint32)
    assert [hex(b) for b in cast_bits(bits)] == ["0x0", "0x8000", "0x0", "0x1", "0x8001", "0x1", "0x80"]


@pytest.mark.parametrize("numel", [0, 1, 15, 16, 17, 48, 49])
def test_chunks_meet_without_a_gap(numel, monkeypatch):
    monkeypatch.setattr(formats, "HOST_CHUNK_NUMEL", 16)
    check(np.random.default_rng(numel).integers(0, 1 << 32, numel, dtype=np.uint32))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_other_dtypes_are_a_plain_copy(dtype):
    master = torch.tensor([1.0, -0.1, math.inf, 1e-7, 70000.0])
    compute = torch.empty(5, dtype=dtype)
    cast_into(compute, master)
    assert torch.equal(compute, master.to(dtype))


def test_split_and_join_take_shapes_and_leaves_that_require_grad_and_name_what_is_wrong():
    master = torch.randn(3, 5, requires_grad=True)
    compute, remainder = torch.zeros(15, dtype=torch.bfloat16), torch.zeros(15, dtype=torch.int16)
    split_into(compute, remainder, master)
    joined = torch.zeros(3, 5, requires_grad=True)
    join_into(joined, compute, remainder)
    assert torch.equal(joined, master)
    with pytest.raises(ValueError, match="15 elements, remainder 15 and master 14"):
        split_into(compute, remainder, torch.zeros(14))
    with pytest.raises(ValueError, match=r"not torch.float16, torch.int16, torch.float32"):
        join_into(master, compute.half(), remainder)
    with pytest.raises(ValueError, match=r"not torch.bfloat16, torch.int32, torch.float32"):
        join_into(master, compute, remainder.int())


def test_shapes_and_leaves_that_require_grad():
    master = torch.randn(3, 5, requires_grad=True)
    compute = torch.zeros(15, dtype=torch.bfloat16)
    cast_into(compute, master)
    assert torch.allclose(compute.float(), master.detach().reshape(-1), rtol=2**-8)
    with pytest.raises(ValueError, match="15 elements, but master 14"):
        cast_into(compute, torch.zeros(14))
