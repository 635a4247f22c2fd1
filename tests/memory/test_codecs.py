"""Codecs: stated bytes, stated error bounds, and every kind of hard number, by hypothesis.

What a format gives is compared with the same arithmetic written out in numpy and Python's fractions for single blocks.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zeor.memory.codecs import BLOCK, BLOCK_FORMATS, HOST_CHUNK_NUMEL, HUGE, TINY, Codec
from zeor.memory.noise import Noise, mix

FORMATS = ("bf16", *BLOCK_FORMATS)
CODECS = [Codec(format, chance) for format in FORMATS for chance in (False, True)]
CODECS += [Codec(format, chance, True) for format in BLOCK_FORMATS for chance in (False, True)]
CODECS += [Codec("int2")]
EACH = pytest.mark.parametrize("codec", CODECS, ids=str)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
NUMBERS = st.one_of(
    st.floats(width=32, allow_nan=False, allow_infinity=False),
    st.sampled_from([0.0, -0.0, 1e-45, -1e-40, 1e-30, 2.0**-100, 3e38, -3.4e38, 1.0, -1.0, 2.0**126, 2.0**126.5]),
)


def coded(codec: Codec, values: torch.Tensor, key: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """(message, what it decodes to in fp32)."""
    message = torch.full((codec.nbytes(values.numel()),), 77, dtype=torch.uint8)
    before = values.clone()
    codec.encode_into(message, values, Noise(mix(key)))
    assert torch.equal(values.view(torch.uint8), before.view(torch.uint8)), "values were written"
    found = torch.full((values.numel(),), 99.0)
    codec.decode_into(found, message)
    return message, found


def assert_within(codec: Codec, values: torch.Tensor, found: torch.Tensor) -> None:
    bound = codec.error_bound(values)
    wrong = found.double() - values.double()
    told = bound.isnan() | values.double().isnan()
    assert bool(found[bound.isnan()].isnan().all()), "a block that is not finite turned into numbers"
    same = values.double() == found.double()  # infinities in bf16
    assert bool((told | same | (wrong.abs() <= bound)).all()), (codec, (wrong.abs() / bound).nan_to_num().max())


@pytest.mark.parametrize("numel", [0, 1, 127, 128, 129, 1000])
def test_stated_bytes(numel):
    blocks = math.ceil(numel / 128)
    sizes = {codec.format: codec.nbytes(numel) for codec in CODECS}
    assert sizes == {
        "bf16": 2 * numel, "int8": 130 * blocks, "int4": 66 * blocks, "fp8_e4m3": 130 * blocks,
        "fp8_e5m2": 130 * blocks, "int2": 34 * blocks,
    }  # fmt: skip


@EACH
@given(values=st.lists(NUMBERS, max_size=300), scale=st.sampled_from([1.0, 1e-20, 1e20]), key=st.integers(0, 99))
@settings(max_examples=25, deadline=None)
def test_any_finite_numbers_within_the_bound(codec, values, scale, key):
    given_ = (torch.tensor(values, dtype=torch.float64) * scale).float()
    _, found = coded(codec, given_, key)
    assert_within(codec, given_, found)


@EACH
@given(
    values=st.lists(st.one_of(NUMBERS, st.sampled_from([math.inf, -math.inf, math.nan])), min_size=1, max_size=300)
)
@settings(max_examples=15, deadline=None)
def test_nothing_that_is_not_finite_turns_into_a_number(codec, values):
    given_ = torch.tensor(values, dtype=torch.float64).float()
    _, found = coded(codec, given_)
    assert_within(codec, given_, found)
    if codec.format == "bf16":
        assert torch.equal(found.isnan(), given_.isnan())
        assert torch.equal(found[given_.isinf()], given_[given_.isinf()])
    else:
        for begin in range(0, len(values), BLOCK):
            block = given_[begin : begin + BLOCK]
            if not bool(block.isfinite().all()):
                assert bool(found[begin : begin + BLOCK].isnan().all())


ALL_NUMBERS = st.one_of(
    NUMBERS, st.sampled_from([math.inf, -math.inf, math.nan, 5e-324, 6e-8, 65504.0, -1e-45]), st.just(0.25)
)


@EACH
@given(
    shape=st.lists(st.integers(0, 9), min_size=0, max_size=4),
    dtype=st.sampled_from(DTYPES),
    source=st.lists(ALL_NUMBERS, min_size=1, max_size=20),
    key=st.integers(0, 99),
)
@settings(max_examples=25, deadline=None)
def test_any_shape_of_any_dtype_with_any_numbers(codec, shape, dtype, source, key):
    """Constant, mixed, denormal, infinite: within the bound of what the dtype holds, or NaN where the Note says so."""
    values = torch.tensor(source, dtype=torch.float64).repeat(-(-math.prod(shape) // len(source)))[: math.prod(shape)]
    values = values.view(shape).to(dtype)
    message, found = coded(codec, values.reshape(-1), key)
    assert message.numel() == codec.nbytes(math.prod(shape))
    assert_within(codec, values.reshape(-1), found)
    back = torch.empty_like(values)
    codec.decode_into(back.view(-1), message)
    assert torch.equal(back.view(-1).nan_to_num(nan=7.0), found.to(dtype).nan_to_num(nan=7.0))


@EACH
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_both_ways(codec, dtype):
    values = torch.randn(1000, generator=torch.Generator().manual_seed(3)).to(dtype)
    message, found = coded(codec, values)
    assert_within(codec, values, found)
    back = torch.empty_like(values)
    codec.decode_into(back, message)
    assert torch.equal(back, found.to(dtype))
    assert torch.equal(coded(codec, values.float())[0], message)


@EACH
def test_zero_and_constant_blocks(codec):
    for value in (0.0, 1.0, -3.5, 1e-30):
        _, found = coded(codec, torch.full((300,), value))
        assert_within(codec, torch.full((300,), value), found)
        if value == 0.0:
            assert not bool(found.any())
        elif not codec.chance and not codec.rotates and codec.format not in ("bf16", "int2"):
            assert float((found - value).abs().max()) <= abs(value) * 2.0**-7  # the largest code, times a rounded unit


@pytest.mark.parametrize("format", BLOCK_FORMATS)
def test_edges_of_what_is_a_number(format):
    """By block: just large enough, just too small, just small enough, just too large."""
    edges = [TINY, math.nextafter(TINY, 0.0) * (1 - 1e-6), HUGE, HUGE * (1 + 1e-6)]
    values = torch.zeros(4, BLOCK)
    values[:, 0] = torch.tensor(edges)
    found = coded(Codec(format), values.view(-1))[1].view(4, BLOCK)
    assert found[0, 0] > 0 and not bool(found[1].any())
    assert bool(found[2].isfinite().all()) and bool(found[3].isnan().all())


@pytest.mark.parametrize("format, largest", [("int8", 127), ("int4", 7)])
def test_whole_codes_are_those_of_plain_arithmetic(format, largest):
    values = torch.randn(5, BLOCK, generator=torch.Generator().manual_seed(7))
    found = coded(Codec(format), values.view(-1))[1].view(5, BLOCK)
    for row, block in zip(found, values.numpy().astype(np.float64), strict=True):
        least = np.abs(block).max() / largest
        bits = torch.tensor(least).float().view(torch.int32)
        unit = float(((bits + 0xFFFF) & -0x10000).view(torch.float32))  # the next bf16 number above
        assert least * (1 - 1e-6) <= unit <= least * 1.008
        assert np.array_equal(row.numpy(), (np.round(block / unit) * unit).astype(np.float32))


def test_two_bits_are_the_middle_of_four_cells():
    """Of blocks of any shape, the largest number too: at most a quarter of it is left, and of that a quarter again."""
    blocks = torch.randn(3, BLOCK, generator=torch.Generator().manual_seed(7))
    blocks[1, 1:], blocks[2] = 0.0, -5.0
    left, most = blocks.clone(), blocks.abs().amax(1, keepdim=True)
    for _ in range(6):
        found = coded(Codec("int2"), left.view(-1))[1].view(3, BLOCK)
        for row, block in zip(found, left.numpy().astype(np.float64), strict=True):
            bits = torch.tensor(np.abs(block).max() / 2).float().view(torch.int32)
            unit = float(((bits + 0xFFFF) & -0x10000).view(torch.float32))  # the next bf16 number above
            cell = np.clip(np.floor(block / unit), -2, 1)
            assert np.array_equal(row.numpy(), ((cell + 0.5) * unit).astype(np.float32))
        left, most = left - found, most * (1.008 / 4)
        assert bool((left.abs() <= most + 1e-6).all())


@pytest.mark.parametrize("format", FORMATS)
def test_by_chance_the_mean_is_right(format):
    """Over keys. To nearest it would be off by up to half a unit everywhere."""
    values = torch.randn(BLOCK, generator=torch.Generator().manual_seed(1)) * torch.linspace(0.01, 1, BLOCK)
    codec = Codec(format, True)
    found = torch.stack([coded(codec, values, key)[1].double() for key in range(2000)])
    sigma = found.std(0) / 2000**0.5
    assert float(((found.mean(0) - values).abs() / (sigma + 1e-9)).max()) < 5.0
    assert len({tuple(row.tolist()) for row in found[:50]}) > 40


@EACH
@given(numel=st.integers(1, 700), begin=st.integers(0, 5))
@settings(max_examples=10, deadline=None)
def test_decoding_a_stretch_is_a_stretch_of_decoding_all(codec, numel, begin):
    values = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    message, found = coded(codec, values)
    first = min(begin * BLOCK, (numel - 1) // BLOCK * BLOCK)
    part = torch.empty(numel - first)
    codec.decode_into(part, message, first)
    assert torch.equal(part, found[first:])


@EACH
def test_chunks_change_no_bit(codec, monkeypatch):
    """What is longer than a chunk has the bits of its pieces."""
    values = torch.randn(3 * BLOCK + 17, generator=torch.Generator().manual_seed(2))
    message, found = coded(codec, values)
    monkeypatch.setattr("zeor.memory.codecs.HOST_CHUNK_NUMEL", BLOCK)
    again, found_again = coded(codec, values)
    assert HOST_CHUNK_NUMEL % BLOCK == 0
    assert torch.equal(message, again) and torch.equal(found, found_again)


@pytest.mark.parametrize("format", BLOCK_FORMATS)
def test_rotation_helps_where_one_number_is_large(format):
    """An outlier makes the unit large for all of its block; rotated they share it."""
    values = torch.randn(100 * BLOCK, generator=torch.Generator().manual_seed(4)) * 0.01
    values[::BLOCK] = 1.0
    rest = torch.arange(values.numel()) % BLOCK != 0
    plain, rotated = (coded(Codec(format, False, turns), values)[1] - values for turns in (False, True))
    ratio = float(rotated[rest].norm() / plain[rest].norm())
    if format in ("int8", "int4"):
        assert ratio < 0.5
