"""Moments in small formats: stated error bounds, what encoding keeps, and every kind of hard number."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zeor.memory import small
from zeor.memory.small import BLOCK_NUMEL, FORMATS, TINY_SCALE, decode_into, encode_into, error_bound, storage_of

BOTH = pytest.mark.parametrize("signed", [True, False])
LARGEST = {True: small.SIGNED_LARGEST, False: small.UNSIGNED_LARGEST}
POWER = {True: 4, False: 8}
FLOAT32 = st.floats(width=32, allow_nan=False, allow_infinity=False)


def encoded(values: torch.Tensor, signed: bool, format: str = "int8") -> tuple[torch.Tensor, torch.Tensor | None]:
    dtype, blocks = storage_of(format, values.numel(), signed)
    codes = torch.full((values.numel(),), 99, dtype=dtype)
    scales = torch.full((blocks,), 99.0) if blocks else None
    before = values.clone()
    encode_into(codes, scales, values, signed)
    assert torch.equal(values.view(torch.int32), before.view(torch.int32)), "values were written"
    return codes, scales


def decoded(codes: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    values = torch.full((codes.numel(),), 99.0)
    decode_into(values, codes, scales)
    return values


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def assert_kept(values: torch.Tensor, signed: bool) -> torch.Tensor:
    """Within the bound; and what was decoded encodes to the same codes and scales."""
    codes, scales = encoded(values, signed)
    back = decoded(codes, scales)
    error = (back.double() - values.double()).abs()
    assert bool((error <= error_bound(values, "int8", signed)).all())
    again = encoded(back, signed)
    assert same_bits(again[0], codes) and same_bits(again[1], scales)
    return back


def spread(numel: int, decades: float, signed: bool, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    size = torch.exp(torch.randn(numel, generator=generator) * decades * math.log(10))
    return size * torch.randn(numel, generator=generator) if signed else size


def test_storage_of_each_format():
    assert FORMATS == ("exact", "bf16", "int8")
    assert storage_of("exact", 1000, True) == (torch.float32, 0)
    assert storage_of("bf16", 1000, False) == (torch.bfloat16, 0)
    assert storage_of("int8", 1000, True) == (torch.int8, 4)
    assert storage_of("int8", 1024, False) == (torch.uint8, 4)
    assert [small.scale_count(n) for n in (0, 1, 256, 257)] == [0, 1, 1, 2]
    with pytest.raises(ValueError, match="one of exact, bf16, int8, not 'fp8'"):
        storage_of("fp8", 1, True)


@BOTH
@pytest.mark.parametrize("decades", [0.0, 0.5, 1.0, 2.0, 4.0])
@pytest.mark.parametrize("numel", [1, 2, 255, 256, 257, 5000])
def test_errors_are_within_the_bound_and_decoded_blocks_come_back(numel, decades, signed):
    assert_kept(spread(numel, decades, signed), signed)


@BOTH
@settings(max_examples=150, deadline=None)
@given(values=st.lists(FLOAT32, min_size=1, max_size=300), power=st.integers(-160, 0))
def test_any_finite_block_is_within_the_bound_and_comes_back(signed, values, power):
    tensor = torch.from_numpy((np.array(values) * 2.0**power).astype(np.float32))
    assert_kept(tensor if signed else tensor.abs(), signed)


@BOTH
def test_every_code_of_every_scale_comes_back(signed):
    """All codes that encoding can give, under scales of every exponent that is not tiny and under odd mantissas."""
    first = -LARGEST[True] if signed else small.UNSIGNED_LEAST
    codes = torch.arange(first, LARGEST[signed] + 1)
    codes = torch.cat([codes, torch.zeros(BLOCK_NUMEL - codes.numel(), dtype=codes.dtype)])
    mantissas = torch.tensor([1.0, 1.0 + 2**-23, 1.3333334, 1.7320508, 2.0 - 2**-23])
    scales = (torch.exp2(torch.arange(-90.0, 128.0))[:, None] * mantissas).reshape(-1)
    codes = codes.to(torch.int8 if signed else torch.uint8).repeat(scales.numel())
    values = decoded(codes, scales)
    assert torch.equal(values.view(-1, BLOCK_NUMEL).abs().amax(1), scales), "the largest element is kept exactly"
    again = encoded(values, signed)
    assert torch.equal(again[0], codes) and torch.equal(again[1], scales)


@BOTH
def test_codes_in_closed_form(signed):
    """Against numpy in fp64: signed codes are the nearest, unsigned ones one of the two beside, fair on the average."""
    values = spread(64 * BLOCK_NUMEL, 0.5, signed)
    codes, scales = encoded(values, signed)
    rows = values.view(-1, BLOCK_NUMEL).double().numpy()
    largest = np.abs(rows).max(1, keepdims=True)
    assert np.array_equal(scales.numpy(), largest[:, 0].astype(np.float32))
    exact = LARGEST[signed] * (np.abs(rows) / largest) ** (1 / POWER[signed])
    assert exact[exact > 0].min() > (0 if signed else small.UNSIGNED_LEAST)
    apart = codes.view(-1, BLOCK_NUMEL).double().numpy() - exact * np.sign(rows)
    if signed:
        assert np.abs(apart).max() <= 0.5001 and np.abs(apart).max() > 0.49
    else:
        assert np.abs(apart).max() < 1 and np.abs(apart).max() > 0.95
        assert abs(apart.mean()) < 0.01  # 16,384 of them, each with a deviation of 0.41: 0.0032 is one of the mean


def test_an_average_that_moves_by_a_fraction_of_a_code_is_followed():
    """What Note [dither] is about. The square root of exp_avg_sq stays about that of an exact one; rounded to nearest,
    it would have kept near to where it started, two or three times as large."""
    generator = torch.Generator().manual_seed(0)
    size = torch.exp(torch.randn(4 * BLOCK_NUMEL, generator=generator) * 0.7)
    exact = (size * 3).square()
    kept = exact.clone()
    for _ in range(900):
        square = (size * torch.randn(size.numel(), generator=generator)).square()
        exact.lerp_(square, 0.004)
        kept = decoded(*encoded(kept.lerp(square, 0.004), False))
    ratio = (kept / exact).sqrt()
    assert float(ratio.mean()) == pytest.approx(1.0, abs=0.05)
    assert float(ratio.std()) < 0.15


def test_the_relative_error_that_the_note_states():
    """1.6% of exp_avg, 3.2% of exp_avg_sq and so 1.6% of its square root, at the top of a block."""
    for signed, most in ((True, 0.0163), (False, 0.0325)):
        values = torch.cat([torch.ones(1), torch.linspace(0.9, 1.0, 255)])
        back = decoded(*encoded(values, signed))
        assert float(((back - values) / values).abs().max()) < most


def test_only_zero_becomes_zero_where_zero_would_explode():
    values = torch.tensor([1.0, 1e-12, 1e-30, 1e-45, 0.0, -0.0])
    codes, scales = encoded(values, False)
    assert codes.tolist() == [255, 16, 16, 16, 0, 0]
    assert decoded(codes, scales)[1:4].tolist() == pytest.approx([(16 / 255) ** 8] * 3)


@BOTH
def test_zero_blocks_and_blocks_of_one(signed):
    for values in (torch.zeros(300), -torch.zeros(1), torch.tensor([2.5e-7]), torch.tensor([3.4e38])):
        back = assert_kept(values, signed)
        assert torch.equal(back, values)
    if signed:
        assert decoded(*encoded(torch.tensor([-2.5]), True)).item() == -2.5


@BOTH
def test_blocks_that_reach_into_the_denormals(signed):
    """A signed block below TINY_SCALE is zero; in an unsigned one whatever is not zero becomes the largest."""
    values = torch.tensor([TINY_SCALE / 3, TINY_SCALE / 1e6, 1e-45, 0.0])
    codes, scales = encoded(values, signed)
    assert codes.tolist() == ([0, 0, 0, 0] if signed else [255, 255, 255, 0])
    assert scales.tolist() == ([0.0] if signed else [values[0].item()])
    assert_kept(values, signed)
    assert_kept(torch.full((3,), 1e-45), signed)
    above = torch.tensor([TINY_SCALE, TINY_SCALE / 100])
    torch.testing.assert_close(assert_kept(above, signed), above, rtol=0.09, atol=0.0)


@BOTH
@pytest.mark.parametrize("wrong", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_makes_its_whole_block_nan_and_no_other(signed, wrong):
    values = spread(3 * BLOCK_NUMEL + 5, 1.0, signed)
    values[BLOCK_NUMEL + 3] = wrong
    values[-1] = wrong
    codes, scales = encoded(values, signed)
    bad = torch.zeros(values.numel(), dtype=torch.bool)
    bad[BLOCK_NUMEL : 2 * BLOCK_NUMEL] = True
    bad[3 * BLOCK_NUMEL :] = True
    back = decoded(codes, scales)
    assert torch.equal(back.isnan(), bad) and bool(back[~bad].isfinite().all())
    assert torch.equal(error_bound(values, "int8", signed).isnan(), bad)
    again = encoded(back, signed)
    assert same_bits(again[0], codes) and same_bits(again[1], scales)


def test_a_negative_number_in_an_unsigned_block_is_not_hidden():
    values = torch.ones(2 * BLOCK_NUMEL)
    values[5] = -1e-9
    back = decoded(*encoded(values, False))
    assert bool(back[:BLOCK_NUMEL].isnan().all()) and torch.equal(back[BLOCK_NUMEL:], values[BLOCK_NUMEL:])


@BOTH
@pytest.mark.parametrize("chunk", [BLOCK_NUMEL, 2 * BLOCK_NUMEL])
def test_chunks_and_parts_from_a_block_on_change_no_bit(monkeypatch, signed, chunk):
    values = spread(5 * BLOCK_NUMEL + 17, 1.0, signed)
    codes, scales = encoded(values, signed)
    back = decoded(codes, scales)
    monkeypatch.setattr(small, "HOST_CHUNK_NUMEL", chunk)
    again = encoded(values, signed)
    assert torch.equal(again[0], codes) and torch.equal(again[1], scales)
    assert torch.equal(decoded(codes, scales), back)
    part = encoded(values[2 * BLOCK_NUMEL :].clone(), signed)
    assert torch.equal(part[0], codes[2 * BLOCK_NUMEL :]) and torch.equal(part[1], scales[2:])


@BOTH
@settings(max_examples=100, deadline=None)
@given(values=st.lists(FLOAT32, min_size=1, max_size=50))
def test_bf16_is_torch_s_own_rounding(signed, values):
    tensor = torch.tensor(values).clamp(-3e38, 3e38)
    codes, scales = encoded(tensor, signed, "bf16")
    assert scales is None and torch.equal(codes, tensor.bfloat16())
    back = decoded(codes, None)
    assert bool(((back.double() - tensor.double()).abs() <= error_bound(tensor, "bf16", signed)).all())
    assert torch.equal(encoded(back, signed, "bf16")[0], codes)


def test_exact_is_exact():
    values = spread(1000, 3.0, True)
    assert torch.equal(decoded(*encoded(values, True, "exact")), values)
    assert not error_bound(values, "exact", True).any()


def test_wrong_tensors_are_named():
    values, codes, scales = torch.ones(300), torch.zeros(300, dtype=torch.int8), torch.ones(2)
    for arguments, word in (
        ((codes, scales, values, False), "unsigned ones torch.uint8; signed=False has torch.int8"),
        ((codes, None, values, True), "have 2 fp32 scales, not None"),
        ((codes, scales[:1], values, True), "have 2 fp32 scales, not 1"),
        ((codes.bfloat16(), scales, values, True), "have no fp32 scales, not 2"),
        ((codes[1:], scales, values, True), "299 codes are of as many"),
        ((codes.int(), None, values, True), "not torch.int32"),
        ((codes, scales, values.double(), True), "torch.float64"),
    ):
        with pytest.raises(ValueError, match=word):
            encode_into(*arguments)
    encode_into(codes[:0], scales[:0], values[:0], True)  # nothing to do
