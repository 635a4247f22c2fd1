"""The fused kernels of codecs.py: whole numbers in blocks, encoded or decoded in one pass over memory.

Of `memory/` only this module imports Triton, and only codecs.py imports it, where it is used. The bits are those of the
plain operations there, but for which of many NaNs is decoded: the same products in the same order (nothing is
contracted: enable_fp_fusion=False), the butterflies over distances 1, 2, ..., 64, the hash of noise.py in 32 bits, and
a correctly rounded division, as torch has it.

A program works on ROWS blocks, one to a row of its tile. Without a GPU Triton's interpreter runs the same.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

BLOCK = tl.constexpr(128)
ROWS = 16
HUGE_BITS = tl.constexpr(0x7E800000)  # of 2**126
TINY_BITS = tl.constexpr(0x0D800000)  # of 2**-100
MAGNITUDE = tl.constexpr(0x7FFFFFFF)
NAN_BITS = tl.constexpr(0x7FC00000)
ROUNDING = tl.constexpr(12582912.0)  # 1.5 * 2**23: added and taken away, it rounds to even
FIRST, SECOND, STEP = (tl.constexpr(number) for number in (0x7FEB352D, 0x846CA68B, 0x9E3779B1))  # as in noise.py


@triton.jit
def _butterfly(rows, ROWS: tl.constexpr, DISTANCE: tl.constexpr):
    """Each pair at this distance becomes (a + b, a - b)."""
    pairs = tl.reshape(rows, (ROWS, BLOCK // (2 * DISTANCE), 2, DISTANCE))
    a, b = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
    pairs = tl.permute(tl.join(a + b, a - b), (0, 1, 3, 2))
    return tl.reshape(pairs, (ROWS, BLOCK))


@triton.jit
def _rotated(rows, ROWS: tl.constexpr):
    """See Note [Rotated] in codecs.py."""
    rows = _butterfly(rows, ROWS, 1)
    rows = _butterfly(rows, ROWS, 2)
    rows = _butterfly(rows, ROWS, 4)
    rows = _butterfly(rows, ROWS, 8)
    rows = _butterfly(rows, ROWS, 16)
    rows = _butterfly(rows, ROWS, 32)
    return _butterfly(rows, ROWS, 64)


@triton.jit
def _fractions(place, base):
    """The numbers of noise.py in [0, 1), of 16 bits. `base`: of the place 0, as an int32."""
    word = place.to(tl.int32).to(tl.uint32, bitcast=True) * STEP + base.to(tl.uint32, bitcast=True)
    word = (word ^ (word >> 16)) * FIRST
    word = (word ^ (word >> 15)) * SECOND
    word = word ^ (word >> 16)
    return (word & 0xFFFF).to(tl.float32) * 0.0000152587890625


@triton.jit
def _unit_bits(rows, INVERSE_LARGEST: tl.constexpr):
    """Of each row its unit, as the bits of a fp32 number: see Note [Codes in blocks] in codecs.py. Bits of magnitudes
    are ordered as magnitudes are, with inf and NaN above all."""
    most = tl.max(rows.to(tl.int32, bitcast=True) & MAGNITUDE, axis=1)
    unit = (most.to(tl.float32, bitcast=True) * INVERSE_LARGEST).to(tl.int32, bitcast=True)
    unit = (unit + 0xFFFF) & -0x10000
    unit = tl.where(most < TINY_BITS, 0, unit)
    return tl.where(most <= HUGE_BITS, unit, NAN_BITS)


@triton.jit
def _cast(rows, dtype: tl.constexpr):
    """For bf16 written out, to nearest and even, with one NaN: Triton's interpreter cuts it off."""
    if dtype == tl.bfloat16:
        bits = rows.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(rows != rows, 0x7FC0, bits).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return rows.to(dtype)


@triton.jit
def _placed(row, n, blocks):
    """Of blocks counted over all messages: the message of each, its number there, and the places of its elements in the
    message and among all values."""
    message, block = row // blocks, row % blocks
    inside = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    return message, block, inside, message[:, None] * n + inside


@triton.jit(do_not_specialize=["n", "base", "blocks", "messages"])
def _encode_kernel(
    values_ptr, codes_ptr, scales_ptr, signs_ptr, n, blocks, messages, codes_apart, scales_apart, base,
    LARGEST: tl.constexpr, INVERSE_LARGEST: tl.constexpr, CHANCE: tl.constexpr, ROTATES: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    message, block, inside, at = _placed(row, n, blocks)
    there = message < messages
    rows = tl.load(values_ptr + at, mask=there[:, None] & (inside < n), other=0.0).to(tl.float32)
    if ROTATES:
        rows = _rotated(rows * tl.load(signs_ptr + column)[None, :], ROWS)

    bits = _unit_bits(rows, INVERSE_LARGEST)
    tl.store(scales_ptr + message * scales_apart + block, (bits >> 16).to(tl.int16), mask=there)
    coded = (bits > 0) & (bits < NAN_BITS)
    unit = tl.where(coded, bits, 0x3F800000).to(tl.float32, bitcast=True)
    scaled = tl.where(coded[:, None], rows * tl.div_rn(1.0, unit)[:, None], 0.0)
    if CHANCE:
        scaled = tl.floor(scaled + _fractions(at, base))
        scaled = tl.minimum(tl.maximum(scaled, -LARGEST), LARGEST)
    number = (scaled + ROUNDING).to(tl.int32, bitcast=True) - 0x4B400000  # a whole one, or rounded to even here

    codes_ptr += message[:, None] * codes_apart
    if LARGEST == 127.0:
        number = number.to(tl.int8).to(tl.uint8, bitcast=True)
        tl.store(codes_ptr + block[:, None] * BLOCK + column[None, :], number, mask=there[:, None])
    else:  # element i of a block, and above it element i + 64
        low, high = tl.split(tl.permute(tl.reshape(number, (ROWS, 2, BLOCK // 2)), (0, 2, 1)))
        half = block[:, None] * (BLOCK // 2) + tl.arange(0, BLOCK // 2)[None, :]
        tl.store(codes_ptr + half, (low + 16 * high + (8 + 16 * 8)).to(tl.uint8), mask=there[:, None])


@triton.jit
def _decoded(
    codes_ptr, scales_ptr, signs_ptr, block, there,
    LARGEST: tl.constexpr, ROTATES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """These blocks of one message for each row, in fp32."""
    column = tl.arange(0, BLOCK)
    unit = tl.load(scales_ptr + block, mask=there, other=0).to(tl.int32) << 16
    unit = unit.to(tl.float32, bitcast=True)
    if ROTATES:
        unit = unit * 0.0078125
    if LARGEST == 127.0:
        codes = tl.load(codes_ptr + block[:, None] * BLOCK + column[None, :], mask=there[:, None], other=0)
        rows = codes.to(tl.int8, bitcast=True).to(tl.float32)
    else:
        half = block[:, None] * (BLOCK // 2) + tl.arange(0, BLOCK // 2)[None, :]
        codes = tl.load(codes_ptr + half, mask=there[:, None], other=0).to(tl.int32)
        pairs = tl.join((codes & 15) - 8, (codes >> 4) - 8)
        rows = tl.reshape(tl.permute(pairs, (0, 2, 1)), (ROWS, BLOCK)).to(tl.float32)
    rows = rows * unit[:, None]
    if ROTATES:
        rows = _rotated(rows, ROWS) * tl.load(signs_ptr + column)[None, :]
    return rows


@triton.jit(do_not_specialize=["n", "blocks", "messages"])
def _decode_kernel(
    values_ptr, codes_ptr, scales_ptr, signs_ptr, n, blocks, messages, codes_apart, scales_apart,
    LARGEST: tl.constexpr, ROTATES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    message, block, inside, at = _placed(row, n, blocks)
    there = message < messages
    codes_ptr += message[:, None] * codes_apart
    rows = _decoded(codes_ptr, scales_ptr + message * scales_apart, signs_ptr, block, there, LARGEST, ROTATES, ROWS)
    tl.store(values_ptr + at, _cast(rows, values_ptr.dtype.element_ty), mask=there[:, None] & (inside < n))


@triton.jit(do_not_specialize=["n", "blocks", "factor"])
def _sum_kernel(
    into_ptr, own_ptr, codes_ptr, scales_ptr, signs_ptr, n, blocks, codes_apart, scales_apart, factor,
    MESSAGES: tl.constexpr, OWN: tl.constexpr, SCALES: tl.constexpr,
    LARGEST: tl.constexpr, ROTATES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The numbers of message OWN are not its codes but those at own_ptr; added up in the order of messages."""
    block = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    there = block < blocks
    at = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    mine = tl.load(own_ptr + at, mask=at < n, other=0.0).to(tl.float32)
    # Pointers go on from message to message: a number times what lies between two may be more than 32 bits hold.
    if OWN == 0:
        total = mine
    else:
        total = _decoded(codes_ptr, scales_ptr, signs_ptr, block, there, LARGEST, ROTATES, ROWS)
        for _ in range(1, OWN):
            codes_ptr += codes_apart
            scales_ptr += scales_apart
            total += _decoded(codes_ptr, scales_ptr, signs_ptr, block, there, LARGEST, ROTATES, ROWS)
        codes_ptr += codes_apart
        scales_ptr += scales_apart
        total += mine
    for _ in range(OWN + 1, MESSAGES):
        codes_ptr += codes_apart
        scales_ptr += scales_apart
        total += _decoded(codes_ptr, scales_ptr, signs_ptr, block, there, LARGEST, ROTATES, ROWS)
    if SCALES:
        total = total * factor
    tl.store(into_ptr + at, _cast(total, into_ptr.dtype.element_ty), mask=at < n)


def encode(
    values: Tensor, codes: Tensor, scales: Tensor, largest: float, signs: Tensor | None = None, base: int | None = None
) -> None:
    """`codes`: bytes of each block of each message, and `scales`: its 16 bits. Of `values`, which lie one after
    another, each message has equally many. `largest`: code. `signs`: of a rotated one. `base`: what noise.py scrambles
    for the first element, where it is rounded by chance."""
    messages, blocks = scales.shape
    _launch(
        _encode_kernel, messages * blocks, values, codes, scales, signs, values.numel() // max(1, messages), blocks,
        messages, codes.stride(0), scales.stride(0), 0 if base is None else base,
        LARGEST=largest, INVERSE_LARGEST=1 / largest, CHANCE=base is not None, ROTATES=signs is not None,
    )  # fmt: skip


def decode(values: Tensor, codes: Tensor, scales: Tensor, largest: float, signs: Tensor | None = None) -> None:
    """As many elements as `values` has, from the first block of each message on."""
    messages, blocks = scales.shape
    _launch(
        _decode_kernel, messages * blocks, values, codes, scales, signs, values.numel() // max(1, messages), blocks,
        messages, codes.stride(0), scales.stride(0), LARGEST=largest, ROTATES=signs is not None,
    )  # fmt: skip


def sum_up(
    into: Tensor, own: Tensor, number: int, codes: Tensor, scales: Tensor, factor: float, largest: float,
    signs: Tensor | None = None,
) -> None:  # fmt: skip
    """The sum of all messages in their order, in fp32, times `factor`; in place of message `number` stands `own`, which
    may be `into`."""
    messages, blocks = scales.shape
    _launch(
        _sum_kernel, blocks, into, own, codes, scales, signs, into.numel(), blocks, codes.stride(0), scales.stride(0),
        factor, MESSAGES=messages, OWN=number, SCALES=factor != 1.0, LARGEST=largest, ROTATES=signs is not None,
    )  # fmt: skip


def _launch(kernel: Any, blocks: int, *arguments: Any, **constants: Any) -> None:
    if blocks:
        kernel[triton.cdiv(blocks, ROWS),](*arguments, **constants, ROWS=ROWS, num_warps=4, enable_fp_fusion=False)
