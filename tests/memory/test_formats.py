"""The cast from master to compute, checked against integer arithmetic on the bits in numpy."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zeor.memory import formats
from zeor.memory.formats import BF16_NAN_BITS, cast_into


def cast_bits(master_bits: np.ndarray) -> np.ndarray:
    """The bits (uint16) that cast_into makes of these fp32 bits (uint32)."""
    master = torch.from_numpy(master_bits.view(np.int32).copy()).view(torch.float32)
    compute = torch.full(master.shape, 7.0, dtype=torch.bfloat16)
    cast_into(compute, master)
    assert np.array_equal(master.view(torch.int32).numpy(), master_bits.view(np.int32)), "master was written"
    return compute.view(torch.int16).numpy().view(np.uint16)


def expected_bits(master_bits: np.ndarray) -> np.ndarray:
    """Ties away from zero in 64-bit integers, on the magnitude; the sign is put back afterwards."""
    wide = master_bits.astype(np.int64)
    sign, magnitude = wide >> 31, wide & 0x7FFFFFFF
    rounded = (sign << 15) | ((magnitude + 0x8000) >> 16)
    return np.where(magnitude > 0x7F800000, BF16_NAN_BITS, rounded).astype(np.uint16)


def check(master_bits: np.ndarray) -> None:
    got = cast_bits(master_bits)
    assert np.array_equal(got, expected_bits(master_bits))
    finite = (master_bits & 0x7FFFFFFF) < 0x7F800000
    remainder = master_bits.astype(np.int64) - (got.astype(np.int64) << 16)
    assert remainder[finite].size == 0 or (
        remainder[finite].min() >= -(1 << 15) and remainder[finite].max() < 1 << 15
    )


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


def test_shapes_and_leaves_that_require_grad():
    master = torch.randn(3, 5, requires_grad=True)
    compute = torch.zeros(15, dtype=torch.bfloat16)
    cast_into(compute, master)
    assert torch.allclose(compute.float(), master.detach().reshape(-1), rtol=2**-8)
    with pytest.raises(ValueError, match="15 elements, but master 14"):
        cast_into(compute, torch.zeros(14))
