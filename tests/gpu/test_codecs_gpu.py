"""The fused kernels of codecs against the plain operations, bit by bit.

Without a GPU, Triton's interpreter runs the same:  TRITON_INTERPRET=1 python -m pytest tests/gpu/test_codecs_gpu.py
"""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

from zeor.memory import codecs
from zeor.memory.codecs import BLOCK, BLOCK_FORMATS, FLOATS, HUGE, TINY, Codec
from zeor.memory.noise import Noise, mix

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [] if INTERPRETED else [pytest.mark.gpu]  # the mark skips a test where there is no GPU
WAYS = [(chance, turns) for chance in (False, True) for turns in (False, True)]
CODECS = [Codec(name, *way) for name in BLOCK_FORMATS for way in WAYS] + [Codec("bf16"), Codec("bf16", True)]
EACH = pytest.mark.parametrize("codec", CODECS, ids=str)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NOISE = Noise(mix(11), start=(1 << 33) + 77)


@pytest.fixture
def device() -> torch.device:
    if INTERPRETED:
        pytest.importorskip("triton")
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU, or TRITON_INTERPRET=1")
    return torch.device("cuda:0")


def fused(codec: Codec, values: Tensor, dtype: torch.dtype, begin: int = 0) -> tuple[Tensor, Tensor]:
    """(message, what it decodes to from element `begin` on), by the kernels."""
    from zeor.memory import triton_codecs

    message = torch.full((codec.nbytes(values.numel()),), 99, dtype=torch.uint8, device=values.device)
    base = NOISE.word(0) if codec.chance else None
    triton_codecs.encode(values, *codec._each_apart(message[None]), *codec._fused(values.device), base)
    found = torch.empty(values.numel() - begin, dtype=dtype, device=values.device)
    triton_codecs.decode(found, *codec._each_apart(message[None], begin), *codec._fused(values.device))
    return message, found


def plain(codec: Codec, values: Tensor, dtype: torch.dtype, begin: int = 0) -> tuple[Tensor, Tensor]:
    """The same by plain operations on the host."""
    values = values.cpu()
    message = torch.empty(codec.nbytes(values.numel()), dtype=torch.uint8)
    codec.encode_into(message, values, NOISE)
    found = torch.empty(values.numel() - begin, dtype=dtype)
    codec.decode_into(found, message, begin)
    return message, found


def assert_same(codec: Codec, values: Tensor, dtype: torch.dtype = torch.float32, begin: int = 0) -> None:
    (message, found), (wanted, decoded) = (each(codec, values, dtype, begin) for each in (fused, plain))
    assert torch.equal(message.cpu(), wanted), f"{int((message.cpu() != wanted).sum())} bytes of {len(wanted)} differ"
    found = found.cpu()
    assert torch.equal(found.isnan(), decoded.isnan())
    width = torch.int32 if dtype == torch.float32 else torch.int16
    known = ~decoded.isnan()
    assert torch.equal(found.view(width)[known], decoded.view(width)[known])


def randn(numel: int, device: torch.device, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    size = torch.exp(2 * torch.randn(numel, generator=generator))
    return (torch.randn(numel, generator=generator) * size).to(device)


@EACH
@pytest.mark.parametrize("numel", [1, 127, 128, 129, 16 * BLOCK, 37 * BLOCK + 5])
def test_the_bits_of_plain_operations(device, codec, numel):
    assert_same(codec, randn(numel, device))


@EACH
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_both_ways(device, codec, dtype):
    assert_same(codec, randn(5 * BLOCK + 9, device).to(dtype), dtype)


@EACH
def test_hard_numbers(device, codec):
    """A block each: zeros, constants, denormals, the edges of what is a number, inf, NaN, halves between two codes."""
    rows = torch.zeros(14, BLOCK)
    rows[1], rows[2], rows[3] = 1.0, -3.5, -0.0
    rows[4] = torch.arange(BLOCK) * 1e-45
    rows[5, 0], rows[6, 0], rows[7, 0], rows[8, 0] = TINY, TINY * 0.999, HUGE, HUGE * 1.001
    rows[9, 3], rows[10, 127], rows[11, 5] = float("inf"), float("-inf"), float("nan")
    rows[12] = torch.arange(BLOCK) - 64.5
    rows[12, 0] = 127.0
    rows[13] = torch.where(torch.arange(BLOCK) % 2 == 0, 2.0**100, -(2.0**100))
    rows = torch.cat([rows, (torch.arange(BLOCK) / 128 + 1 + 2.0**-8)[None]])  # halves between two numbers of bf16
    assert_same(codec, rows.view(-1).to(device))


@pytest.mark.parametrize("codec", [codec for codec in CODECS if codec.chance and not codec.rotates], ids=str)
def test_a_denormal_below_zero_is_rounded_down_where_the_noise_is_zero(device, codec):
    numel = 1 << 17
    values = torch.full((numel,), -1e-40)
    values[::BLOCK] = 1.0
    assert int((NOISE.fractions(numel, torch.device("cpu")) == 0).sum()) > 0
    assert_same(codec, values.to(device))


@EACH
def test_from_a_block_on(device, codec):
    assert_same(codec, randn(9 * BLOCK + 3, device), begin=4 * BLOCK)


@EACH
def test_places_wrap_as_they_do_in_plain_operations(device, codec):
    """Rounding by chance goes by place: a message that begins elsewhere is rounded otherwise."""
    values = randn(3 * BLOCK, device)
    first, _ = fused(codec, values, torch.float32)
    again, _ = fused(codec, torch.cat([randn(BLOCK, device, 5), values]), torch.float32)
    codes, moved = codec._each_apart(first[None])[0], codec._each_apart(again[None], BLOCK)[0]
    assert torch.equal(codes, moved) is not codec.chance


@pytest.mark.parametrize("codec", [codec for codec in CODECS if codec.format in FLOATS and not codec.rotates], ids=str)
def test_all_numbers_of_an_8_bit_float_what_lies_between_them_and_zeros_with_signs(device, codec):
    """In blocks whose unit is a power of two, so that halves between two numbers stay halves."""
    numbers = torch.arange(256, dtype=torch.uint8).view(FLOATS[codec.format]).float()
    numbers = numbers[numbers.isfinite()].unique()
    between = (numbers[1:] + numbers[:-1]) / 2
    around = [torch.nextafter(between, torch.full_like(between, to)) for to in (-torch.inf, torch.inf)]
    values = torch.cat([numbers, between, *around, torch.tensor([-0.0, 1e-45, -1e-45])])
    rows = torch.nn.functional.pad(values, (0, -len(values) % (BLOCK - 1))).view(-1, BLOCK - 1)
    rows = torch.cat([torch.full((len(rows), 1), BLOCK_FORMATS[codec.format]), rows], dim=1)
    for factor in (1.0, -(2.0**-60), 2.0**90):
        assert_same(codec, (rows * factor).view(-1).to(device))


@pytest.mark.parametrize("codec", [codec for codec in CODECS if not codec.chance and not codec.rotates], ids=str)
def test_any_byte_decodes_as_plain_operations_decode_it(device, codec):
    from zeor.memory import triton_codecs

    message = torch.arange(codec.nbytes(9 * BLOCK)).mul(37).to(torch.uint8)
    wanted, found = torch.empty(9 * BLOCK), torch.empty(9 * BLOCK, device=device)
    codec.decode_into(wanted, message)
    triton_codecs.decode(found, *codec._each_apart(message.to(device)[None]), *codec._fused(device))
    assert torch.equal(found.cpu().nan_to_num(nan=7.0), wanted.nan_to_num(nan=7.0))


def bits(found: Tensor) -> Tensor:
    return found.cpu().view(torch.int32 if found.dtype == torch.float32 else torch.int16)


@EACH
@pytest.mark.parametrize("numel", [BLOCK, 3 * BLOCK + 5, 19 * BLOCK])
def test_several_messages_at_a_time_are_as_one_by_one(device, codec, numel, monkeypatch):
    """With more of them than one axis of a grid takes."""
    monkeypatch.setattr(kernels(), "MOST_MESSAGES", 2)
    monkeypatch.setattr(Codec, "_kernels", lambda self, values: None)
    values, apart = randn(5 * numel, device), 2 * BLOCK + 6  # bytes between two messages, as other slices' codes are
    row = codec.nbytes(numel)
    wanted = torch.full((5, row + apart), 7, dtype=torch.uint8)
    codec.encode_each(wanted[:, :row], values.cpu(), NOISE)
    decoded = torch.empty(5 * numel)
    codec.decode_each(decoded, wanted[:, :row])
    monkeypatch.setattr(Codec, "_kernels", lambda self, values: kernels())
    messages, found = torch.full_like(wanted, 7, device=device), torch.empty(5 * numel, device=device)
    codec.encode_each(messages[:, :row], values, NOISE)
    codec.decode_each(found, messages[:, :row])
    assert torch.equal(messages.cpu(), wanted) and torch.equal(bits(found), bits(decoded))


@EACH
@pytest.mark.parametrize("number", [0, 1, 4])
@pytest.mark.parametrize("factor", [1.0, 0.2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sum_of_messages_is_that_of_plain_operations_in_their_order(
    device, codec, number, factor, dtype, monkeypatch
):
    numel = 17 * BLOCK + 9
    values, own = randn(5 * numel, device), randn(numel, device, 9).to(dtype)
    messages = torch.empty(5, codec.nbytes(numel), dtype=torch.uint8)
    monkeypatch.setattr(Codec, "_kernels", lambda self, values: None)
    codec.encode_each(messages, values.cpu(), NOISE)
    parts = torch.empty(5, numel)
    codec.decode_each(parts.view(-1), messages)
    assert codec.sum_each(own, messages.to(device), own, number, factor) is False
    parts[number] = own.cpu().float()
    total = parts[0].clone()
    for part in parts[1:]:
        total.add_(part)
    wanted = (total if factor == 1.0 else total * factor).to(dtype)
    monkeypatch.undo()
    monkeypatch.setattr(Codec, "_kernels", lambda self, values: kernels())
    assert codec.sum_each(own, messages.to(device), own, number, factor) is True  # into the place of its own part
    assert torch.equal(bits(own), bits(wanted))


def kernels():
    from zeor.memory import triton_codecs

    return triton_codecs


@pytest.mark.skipif(INTERPRETED, reason="which of them a codec takes is decided on a GPU")
@EACH
def test_codecs_take_the_kernels_on_a_gpu_and_plain_operations_give_the_same_there(device, codec, monkeypatch):
    values = randn(1000 * BLOCK + 50, device)
    assert codec._kernels(values) is not None

    def coded() -> tuple[Tensor, Tensor]:
        message = torch.empty(codec.nbytes(values.numel()), dtype=torch.uint8, device=device)
        codec.encode_into(message, values, NOISE)
        found = torch.empty_like(values)
        codec.decode_into(found, message)
        return message, found

    by_kernels = coded()
    monkeypatch.setattr(codecs, "_triton_codecs", lambda device: None)
    assert codec._kernels(values) is None
    for one, other in zip(by_kernels, coded(), strict=True):
        assert torch.equal(one, other)
