"""The fused kernels of codecs.py: messages encoded, decoded or summed in one pass over memory.

Of `memory/` only this module imports Triton, and only codecs.py imports it, where it is used. The bits are those of the
plain operations there, but for which of many NaNs is decoded: the same products in the same order (nothing is
contracted: enable_fp_fusion=False), the butterflies over distances 1, 2, ..., 64, the hash of noise.py in 32 bits, a
correctly rounded division, as torch has it, and 8-bit floats by arithmetic on the bits of fp32, so that no two
devices cast in their own way. Without a GPU Triton's interpreter runs the same.

Note [A tile]
~~~~~~~~~~~~~
A program works on ROWS blocks of one message, which are four tensors of ROWS rows and 32 columns: a quarter of each
block. There are as many threads as a quarter has runs of four numbers, so Triton gives each thread one run:

    thread          4 numbers side by side: 16 bytes of fp32, which is one load; 4 bytes of codes, which is one store
    8 threads       a quarter of a block: 128 bytes of fp32, a whole line of memory
    the quarters    are in the registers of the same threads

So of the butterflies the distances 1 and 2 lie inside a thread, 4 to 16 between threads of a warp (shuffles), 32 and 64
between quarters; the two halves of a byte of int4 belong to one thread; a block's largest number takes three
shuffles; and nothing goes through shared memory but the scales. Where the pointers or the distances between
messages are not multiples of 16 bytes, accesses are narrower, and the bits the same.

All tiles but the last of a message are full and take a branch without masks: a mask `at < n` would make each access as
narrow as one number. Numbers that are the same for a whole program (which message, where it begins) are computed once
for all its threads, in 64 bits; places inside a tile are small.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = tl.constexpr(128)
QUARTER = tl.constexpr(32)
WARPS = 4
ROWS = 4 * WARPS  # a warp has 32 threads, and 8 of them a quarter: see Note [A tile]
MOST_MESSAGES = 1 << 15  # along one axis of a grid
# The formats by their largest code, as BLOCK_FORMATS of codecs.py has it; bf16 has no blocks.
BF16, INT8, INT4, E4M3, E5M2 = (tl.constexpr(largest) for largest in (0.0, 127.0, 7.0, 448.0, 57344.0))
HUGE_BITS = tl.constexpr(0x7E800000)  # of 2**126
TINY_BITS = tl.constexpr(0x0D800000)  # of 2**-100
MAGNITUDE = tl.constexpr(0x7FFFFFFF)
EXPONENT = tl.constexpr(0x7F800000)
NAN_BITS = tl.constexpr(0x7FC00000)
LEAST_NEGATIVE = tl.constexpr(-0x7F800000)  # of -2**-126; read as whole numbers, only -0.0 and denormals are below
# Added to a small number 1.5 * 2**23 rounds it to even and leaves it in the low bits; 2**23 does where it is >= 0.
ROUNDING, ROUNDING_BITS = tl.constexpr(12582912.0), tl.constexpr(0x4B400000)
WHOLE, WHOLE_BITS = tl.constexpr(8388608.0), tl.constexpr(0x4B000000)
FIRST, SECOND, STEP = (tl.constexpr(number) for number in (0x7FEB352D, 0x846CA68B, 0x9E3779B1))  # as in noise.py
QUARTER_STEP = tl.constexpr((0x9E3779B1 * 32) & 0xFFFFFFFF)


# ---- the Hadamard matrix: see Note [Rotated] in codecs.py


@triton.jit
def _inside_threads(quarter, ROWS: tl.constexpr):
    """The butterflies over distances 1 and 2."""
    even, odd = tl.split(tl.reshape(quarter, (ROWS, QUARTER // 4, 2, 2)))
    first_sum, second_sum = tl.split(even + odd)
    first_difference, second_difference = tl.split(even - odd)
    near = tl.join(first_sum + second_sum, first_sum - second_sum)
    far = tl.join(first_difference + second_difference, first_difference - second_difference)
    return tl.reshape(tl.join(near, far), (ROWS, QUARTER // 4, 4))


@triton.jit
def _between_threads(runs, DISTANCE: tl.constexpr):
    """The butterfly over runs of four at this distance: a + b where the thread has a, a - b where it has b. The product
    with 1 or -1 is exact, so it is one rounded addition."""
    lane = tl.arange(0, QUARTER // 4)[None, :, None]
    sign = tl.where((lane & DISTANCE) == 0, 1.0, -1.0).to(tl.float32)
    other = tl.gather(runs, tl.broadcast_to(lane ^ DISTANCE, runs.shape), 1)
    return tl.fma(runs, tl.broadcast_to(sign, runs.shape), other)


@triton.jit
def _quarter_rotated(quarter, ROWS: tl.constexpr):
    runs = _inside_threads(quarter, ROWS)
    runs = _between_threads(_between_threads(_between_threads(runs, 1), 2), 4)
    return tl.reshape(runs, (ROWS, QUARTER))


@triton.jit
def _rotated(q0, q1, q2, q3, ROWS: tl.constexpr):
    q0, q1 = _quarter_rotated(q0, ROWS), _quarter_rotated(q1, ROWS)
    q2, q3 = _quarter_rotated(q2, ROWS), _quarter_rotated(q3, ROWS)
    q0, q1, q2, q3 = q0 + q1, q0 - q1, q2 + q3, q2 - q3
    return q0 + q2, q1 + q3, q0 - q2, q1 - q3


@triton.jit
def _signed(q0, q1, q2, q3, signs_ptr, ROWS: tl.constexpr):
    # A pointer for each element, though rows have the same signs: so they lie in threads as the elements do.
    at = tl.zeros((ROWS, QUARTER), tl.int32) + tl.arange(0, QUARTER)[None, :]
    q0 = q0 * tl.load(signs_ptr + at)
    q1 = q1 * tl.load(signs_ptr + at + QUARTER)
    q2 = q2 * tl.load(signs_ptr + at + 2 * QUARTER)
    return q0, q1, q2, q3 * tl.load(signs_ptr + at + 3 * QUARTER)


# ---- from numbers to codes


@triton.jit
def _noise(word):
    """The bits by chance of noise.py, of which the lower 16 are used. `word`: what is scrambled."""
    word = (word ^ (word >> 16)) * FIRST
    word = (word ^ (word >> 15)) * SECOND
    return word ^ (word >> 16)


@triton.jit
def _by_chance(number, word):
    """The whole number at or below the sum of this one and a fraction of noise.py. The fraction, 16 bits over 2**16, is
    an exact product, so there is one rounding, as in a sum. `number` is no -0.0."""
    # Triton's floor takes a denormal for zero, which is wrong below zero: such a number becomes the next normal one.
    number = tl.maximum(number.to(tl.int32, bitcast=True), LEAST_NEGATIVE).to(tl.float32, bitcast=True)
    noise = _noise(word).to(tl.uint16).to(tl.float32)
    return tl.floor(tl.fma(noise, tl.full(noise.shape, 0.0000152587890625, tl.float32), number))


@triton.jit
def _unit_bits(q0, q1, q2, q3, INVERSE_LARGEST: tl.constexpr):
    """Of each row its unit, as the bits of a fp32 number: see Note [Codes in blocks] in codecs.py. Bits of magnitudes
    are ordered as magnitudes are, with inf and NaN above all."""
    q0 = tl.maximum(tl.abs(q0), tl.abs(q1), tl.PropagateNan.ALL)
    q2 = tl.maximum(tl.abs(q2), tl.abs(q3), tl.PropagateNan.ALL)
    largest = tl.maximum(q0, q2, tl.PropagateNan.ALL)
    most = tl.max(largest.to(tl.int32, bitcast=True) & MAGNITUDE, axis=1)
    unit = (most.to(tl.float32, bitcast=True) * INVERSE_LARGEST).to(tl.int32, bitcast=True)
    unit = (unit + 0xFFFF) & -0x10000
    unit = tl.where(most < TINY_BITS, 0, unit)
    return tl.where(most <= HUGE_BITS, unit, NAN_BITS)


@triton.jit
def _float8(scaled, word, LARGEST: tl.constexpr, CHANCE: tl.constexpr):
    """Of a number up to LARGEST the byte of an 8-bit float. Between two powers of two the numbers of a format are
    multiples of one distance, below the first power too: so the number is divided by it and made whole, and the
    floats in their order are counted from zero."""
    mantissa: tl.constexpr = 3 if LARGEST == E4M3 else 2
    least: tl.constexpr = 0x3C800000 if LARGEST == E4M3 else 0x38800000  # bits of 2**-6 or 2**-14, the first power
    most: tl.constexpr = 0x7E if LARGEST == E4M3 else 0x7B  # the code of LARGEST
    power = tl.maximum(scaled.to(tl.int32, bitcast=True) & EXPONENT, least)
    inverse = 0x7F000000 - (power - (mantissa << 23))  # of the distance, which is power / 2**mantissa
    multiple = scaled * inverse.to(tl.float32, bitcast=True)
    if CHANCE:
        multiple = _by_chance(multiple, word)
    sign = (multiple.to(tl.int32, bitcast=True) >> 24) & 0x80  # plain rounding keeps that of a zero
    code = (tl.abs(multiple) + WHOLE).to(tl.int32, bitcast=True) - WHOLE_BITS + ((power - least) >> (23 - mantissa))
    if CHANCE:  # just beyond -LARGEST
        code = tl.minimum(code, most)
    return code | sign


@triton.jit
def _code(quarter, inverse, coded, word, LARGEST: tl.constexpr, CHANCE: tl.constexpr):
    """`coded`: blocks that are neither zero nor NaN as a whole; of others `inverse` of the unit is 0."""
    floats: tl.constexpr = LARGEST != INT8 and LARGEST != INT4
    scaled = quarter * inverse
    if CHANCE:  # no -0.0
        scaled = tl.fma(quarter, tl.broadcast_to(inverse, quarter.shape), tl.zeros_like(quarter))
    if floats and not CHANCE:  # zeros have signs
        code = _float8(tl.where(scaled != scaled, 0.0, scaled), word, LARGEST, CHANCE)
    else:
        scaled = tl.where(coded, scaled, 0.0)
        if floats:
            code = _float8(scaled, word, LARGEST, CHANCE)
        elif CHANCE:
            code = _by_chance(scaled, word).to(tl.int32)
            most: tl.constexpr = 127 if LARGEST == INT8 else 7
            code = tl.minimum(tl.maximum(code, -most), most)
        else:
            code = (scaled + ROUNDING).to(tl.int32, bitcast=True) - ROUNDING_BITS
    return code


@triton.jit
def _half(quarter, word, CHANCE: tl.constexpr):
    """The upper half of fp32: see cast_into in formats.py."""
    bits = quarter.to(tl.int32, bitcast=True)
    if CHANCE:
        bits = tl.where((bits & MAGNITUDE) < EXPONENT, bits + (_noise(word) & 0xFFFF).to(tl.int32), bits)
    else:
        bits += 0x8000
    return tl.where(quarter != quarter, 0x7FC0, bits >> 16)


@triton.jit
def _load(ptr, at, left, PARTLY: tl.constexpr):
    if PARTLY:
        found = tl.load(ptr + at, mask=at < left, other=0)
    else:
        found = tl.load(ptr + at)
    return found


@triton.jit
def _store(ptr, at, left, found, PARTLY: tl.constexpr):
    if PARTLY:
        tl.store(ptr + at, found, mask=at < left)
    else:
        tl.store(ptr + at, found)


@triton.jit
def _load_quarters(ptr, left, PARTLY: tl.constexpr, ROWS: tl.constexpr):
    """As they lie, block after block; 0 behind the last."""
    at = tl.arange(0, ROWS)[:, None] * BLOCK + tl.arange(0, QUARTER)[None, :]
    q0, q1 = _load(ptr, at, left, PARTLY), _load(ptr, at + QUARTER, left, PARTLY)
    return q0, q1, _load(ptr, at + 2 * QUARTER, left, PARTLY), _load(ptr, at + 3 * QUARTER, left, PARTLY)


@triton.jit
def _store_quarters(ptr, left, q0, q1, q2, q3, PARTLY: tl.constexpr, ROWS: tl.constexpr):
    dtype: tl.constexpr = ptr.dtype.element_ty
    at = tl.arange(0, ROWS)[:, None] * BLOCK + tl.arange(0, QUARTER)[None, :]
    _store(ptr, at, left, _cast(q0, dtype), PARTLY)
    _store(ptr, at + QUARTER, left, _cast(q1, dtype), PARTLY)
    _store(ptr, at + 2 * QUARTER, left, _cast(q2, dtype), PARTLY)
    _store(ptr, at + 3 * QUARTER, left, _cast(q3, dtype), PARTLY)


@triton.jit
def _cast(numbers, dtype: tl.constexpr):
    """For bf16 written out, to nearest and even, with one NaN: Triton's interpreter cuts it off."""
    if dtype == tl.bfloat16:
        bits = numbers.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        found = tl.where(numbers != numbers, 0x7FC0, bits).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        found = numbers.to(dtype)
    return found


@triton.jit
def _encode_tile(
    values_ptr, codes_ptr, scales_ptr, signs_ptr, left, first,
    LARGEST: tl.constexpr, INVERSE_LARGEST: tl.constexpr, CHANCE: tl.constexpr, ROTATES: tl.constexpr,
    PARTLY: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """`first`: what is scrambled for the first element. `left`: elements there are."""
    q0, q1, q2, q3 = _load_quarters(values_ptr, left, PARTLY, ROWS)
    q0, q1, q2, q3 = q0.to(tl.float32), q1.to(tl.float32), q2.to(tl.float32), q3.to(tl.float32)
    row = tl.arange(0, ROWS)
    inside = row[:, None] * BLOCK + tl.arange(0, QUARTER)[None, :]
    w0 = inside.to(tl.uint32) * STEP + first
    w1 = w0 + QUARTER_STEP
    w2 = w1 + QUARTER_STEP
    w3 = w2 + QUARTER_STEP
    if LARGEST == BF16:
        c0, c1 = _half(q0, w0, CHANCE), _half(q1, w1, CHANCE)
        c2, c3 = _half(q2, w2, CHANCE), _half(q3, w3, CHANCE)
    else:
        if ROTATES:
            q0, q1, q2, q3 = _signed(q0, q1, q2, q3, signs_ptr, ROWS)
            q0, q1, q2, q3 = _rotated(q0, q1, q2, q3, ROWS)
        unit = _unit_bits(q0, q1, q2, q3, INVERSE_LARGEST)
        _store(scales_ptr, row, tl.cdiv(left, BLOCK), (unit >> 16).to(tl.int16), PARTLY)
        coded = (unit > 0) & (unit < NAN_BITS)
        inverse = tl.div_rn(1.0, tl.where(coded, unit, 0x3F800000).to(tl.float32, bitcast=True))
        inverse, coded = tl.where(coded, inverse, 0.0)[:, None], coded[:, None]
        c0 = _code(q0, inverse, coded, w0, LARGEST, CHANCE)
        c1 = _code(q1, inverse, coded, w1, LARGEST, CHANCE)
        c2 = _code(q2, inverse, coded, w2, LARGEST, CHANCE)
        c3 = _code(q3, inverse, coded, w3, LARGEST, CHANCE)
    if LARGEST == BF16:
        _store_quarters(codes_ptr, left, c0, c1, c2, c3, PARTLY, ROWS)
    elif LARGEST == INT4:  # element i of a block, and above it element i + 64
        at = row[:, None] * (BLOCK // 2) + tl.arange(0, QUARTER)[None, :]
        left = tl.cdiv(left, BLOCK) * (BLOCK // 2)
        _store(codes_ptr, at, left, (c0 + 16 * c2 + (8 + 16 * 8)).to(tl.uint8), PARTLY)
        _store(codes_ptr, at + QUARTER, left, (c1 + 16 * c3 + (8 + 16 * 8)).to(tl.uint8), PARTLY)
    else:
        _store_quarters(codes_ptr, tl.cdiv(left, BLOCK) * BLOCK, c0, c1, c2, c3, PARTLY, ROWS)


# ---- from codes to numbers


@triton.jit
def _number(code, LARGEST: tl.constexpr):
    """Of a byte, in fp32; for whole numbers as `_code` made it, for floats as torch has it."""
    if LARGEST == INT8:
        number = code.to(tl.int8, bitcast=True).to(tl.float32)
    elif LARGEST == E5M2:  # the upper half of fp16
        number = (code.to(tl.int16) << 8).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        code = code.to(tl.int32)
        number = (((code & 0x7F) << 20) | ((code & 0x80) << 24)).to(tl.float32, bitcast=True)
        number = number * 1.329227995784916e36  # 2**120: the exponent is that of fp32 but for this
        number = tl.where((code & 0x7F) == 0x7F, float("nan"), number)
    return number


@triton.jit
def _numbers(codes_ptr, left, LARGEST: tl.constexpr, PARTLY: tl.constexpr, ROWS: tl.constexpr):
    if LARGEST == INT4:
        at = tl.arange(0, ROWS)[:, None] * (BLOCK // 2) + tl.arange(0, QUARTER)[None, :]
        left = tl.cdiv(left, BLOCK) * (BLOCK // 2)
        near = _load(codes_ptr, at, left, PARTLY).to(tl.int32)
        far = _load(codes_ptr, at + QUARTER, left, PARTLY).to(tl.int32)
        q0, q1 = ((near & 15) - 8).to(tl.float32), ((far & 15) - 8).to(tl.float32)
        q2, q3 = ((near >> 4) - 8).to(tl.float32), ((far >> 4) - 8).to(tl.float32)
    elif LARGEST == BF16:
        q0, q1, q2, q3 = _load_quarters(codes_ptr, left, PARTLY, ROWS)
        q0 = (q0.to(tl.int32) << 16).to(tl.float32, bitcast=True)
        q1 = (q1.to(tl.int32) << 16).to(tl.float32, bitcast=True)
        q2 = (q2.to(tl.int32) << 16).to(tl.float32, bitcast=True)
        q3 = (q3.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        q0, q1, q2, q3 = _load_quarters(codes_ptr, tl.cdiv(left, BLOCK) * BLOCK, PARTLY, ROWS)
        q0, q1 = _number(q0, LARGEST), _number(q1, LARGEST)
        q2, q3 = _number(q2, LARGEST), _number(q3, LARGEST)
    return q0, q1, q2, q3


@triton.jit
def _decoded(
    codes_ptr, scales_ptr, signs_ptr, left,
    LARGEST: tl.constexpr, ROTATES: tl.constexpr, PARTLY: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """A tile of one message, in fp32."""
    q0, q1, q2, q3 = _numbers(codes_ptr, left, LARGEST, PARTLY, ROWS)
    if LARGEST != BF16:
        scale = _load(scales_ptr, tl.arange(0, ROWS), tl.cdiv(left, BLOCK), PARTLY).to(tl.int32) << 16
        unit = scale.to(tl.float32, bitcast=True)
        if ROTATES:
            unit = unit * 0.0078125
        unit = unit[:, None]
        q0, q1, q2, q3 = q0 * unit, q1 * unit, q2 * unit, q3 * unit
        if ROTATES:
            q0, q1, q2, q3 = _rotated(q0, q1, q2, q3, ROWS)
            q0, q1, q2, q3 = _signed(q0, q1, q2, q3, signs_ptr, ROWS)
    return q0, q1, q2, q3


@triton.jit
def _decode_tile(
    values_ptr, codes_ptr, scales_ptr, signs_ptr, left,
    LARGEST: tl.constexpr, ROTATES: tl.constexpr, PARTLY: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    q0, q1, q2, q3 = _decoded(codes_ptr, scales_ptr, signs_ptr, left, LARGEST, ROTATES, PARTLY, ROWS)
    _store_quarters(values_ptr, left, q0, q1, q2, q3, PARTLY, ROWS)


@triton.jit
def _sum_tile(
    into_ptr, own_ptr, codes_ptr, scales_ptr, signs_ptr, left, codes_apart, scales_apart, factor,
    MESSAGES: tl.constexpr, OWN: tl.constexpr, SCALES: tl.constexpr,
    LARGEST: tl.constexpr, ROTATES: tl.constexpr, PARTLY: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The numbers of message OWN are not its codes but those at own_ptr; added up in the order of messages."""
    m0, m1, m2, m3 = _load_quarters(own_ptr, left, PARTLY, ROWS)
    m0, m1, m2, m3 = m0.to(tl.float32), m1.to(tl.float32), m2.to(tl.float32), m3.to(tl.float32)
    # Pointers go on from message to message: a number times what lies between two may be more than 32 bits hold.
    if OWN == 0:
        t0, t1, t2, t3 = m0, m1, m2, m3
    else:
        t0, t1, t2, t3 = _decoded(codes_ptr, scales_ptr, signs_ptr, left, LARGEST, ROTATES, PARTLY, ROWS)
        for _ in range(1, OWN):
            codes_ptr += codes_apart
            scales_ptr += scales_apart
            q0, q1, q2, q3 = _decoded(codes_ptr, scales_ptr, signs_ptr, left, LARGEST, ROTATES, PARTLY, ROWS)
            t0, t1, t2, t3 = t0 + q0, t1 + q1, t2 + q2, t3 + q3
        codes_ptr += codes_apart
        scales_ptr += scales_apart
        t0, t1, t2, t3 = t0 + m0, t1 + m1, t2 + m2, t3 + m3
    for _ in range(OWN + 1, MESSAGES):
        codes_ptr += codes_apart
        scales_ptr += scales_apart
        q0, q1, q2, q3 = _decoded(codes_ptr, scales_ptr, signs_ptr, left, LARGEST, ROTATES, PARTLY, ROWS)
        t0, t1, t2, t3 = t0 + q0, t1 + q1, t2 + q2, t3 + q3
    if SCALES:
        t0, t1, t2, t3 = t0 * factor, t1 * factor, t2 * factor, t3 * factor
    _store_quarters(into_ptr, left, t0, t1, t2, t3, PARTLY, ROWS)


# ---- kernels


@triton.jit
def _place(n, messages, ROWS: tl.constexpr):
    """(message, its first block here, elements from there on that a tile has): of this program."""
    message = tl.program_id(1) + tl.program_id(2) * tl.num_programs(1)
    block = tl.program_id(0).to(tl.int64) * ROWS
    left = tl.minimum(n - block * BLOCK, ROWS * BLOCK).to(tl.int32)
    return message.to(tl.int64), block, tl.where(message < messages, left, 0)


@triton.jit(do_not_specialize=["n", "messages", "base", "scales_apart"])
def _encode_kernel(
    values_ptr, codes_ptr, scales_ptr, signs_ptr, n, messages, values_apart, codes_apart, scales_apart, base,
    LARGEST: tl.constexpr, INVERSE_LARGEST: tl.constexpr, CHANCE: tl.constexpr, ROTATES: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    message, block, left = _place(n, messages, ROWS)
    place = message * n + block * BLOCK
    first = place.to(tl.int32).to(tl.uint32, bitcast=True) * STEP + base.to(tl.uint32, bitcast=True)
    values_ptr += message * values_apart + block * BLOCK
    codes_ptr += message * codes_apart + block * (BLOCK // 2 if LARGEST == INT4 else BLOCK)
    scales_ptr += message * scales_apart + block
    if left == ROWS * BLOCK:
        _encode_tile(values_ptr, codes_ptr, scales_ptr, signs_ptr, left, first,
                     LARGEST, INVERSE_LARGEST, CHANCE, ROTATES, False, ROWS)  # fmt: skip
    else:
        _encode_tile(values_ptr, codes_ptr, scales_ptr, signs_ptr, left, first,
                     LARGEST, INVERSE_LARGEST, CHANCE, ROTATES, True, ROWS)  # fmt: skip


@triton.jit(do_not_specialize=["n", "messages", "scales_apart"])
def _decode_kernel(
    values_ptr, codes_ptr, scales_ptr, signs_ptr, n, messages, values_apart, codes_apart, scales_apart,
    LARGEST: tl.constexpr, ROTATES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    message, block, left = _place(n, messages, ROWS)
    values_ptr += message * values_apart + block * BLOCK
    codes_ptr += message * codes_apart + block * (BLOCK // 2 if LARGEST == INT4 else BLOCK)
    scales_ptr += message * scales_apart + block
    if left == ROWS * BLOCK:
        _decode_tile(values_ptr, codes_ptr, scales_ptr, signs_ptr, left, LARGEST, ROTATES, False, ROWS)
    else:
        _decode_tile(values_ptr, codes_ptr, scales_ptr, signs_ptr, left, LARGEST, ROTATES, True, ROWS)


@triton.jit(do_not_specialize=["n", "factor", "scales_apart"])
def _sum_kernel(
    into_ptr, own_ptr, codes_ptr, scales_ptr, signs_ptr, n, codes_apart, scales_apart, factor,
    MESSAGES: tl.constexpr, OWN: tl.constexpr, SCALES: tl.constexpr,
    LARGEST: tl.constexpr, ROTATES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    _, block, left = _place(n, 1, ROWS)
    into_ptr += block * BLOCK
    own_ptr += block * BLOCK
    codes_ptr += block * (BLOCK // 2 if LARGEST == INT4 else BLOCK)
    scales_ptr += block
    if left == ROWS * BLOCK:
        _sum_tile(into_ptr, own_ptr, codes_ptr, scales_ptr, signs_ptr, left, codes_apart, scales_apart, factor,
                  MESSAGES, OWN, SCALES, LARGEST, ROTATES, False, ROWS)  # fmt: skip
    else:
        _sum_tile(into_ptr, own_ptr, codes_ptr, scales_ptr, signs_ptr, left, codes_apart, scales_apart, factor,
                  MESSAGES, OWN, SCALES, LARGEST, ROTATES, True, ROWS)  # fmt: skip


# ---- what codecs.py calls. `codes`: of each message the bytes of its blocks, of bf16 its numbers as 16 bits; `scales`:
# the 16 bits of each block, in as many rows, and none of bf16. Both may lie apart from message to message. `largest`:
# code, which says the format. `signs`: of a rotated one.


def encode(
    values: Tensor, codes: Tensor, scales: Tensor, largest: float, signs: Tensor | None = None, base: int | None = None
) -> None:
    """Of `values`, which lie one after another, each message has equally many. `base`: what noise.py scrambles for the
    first element, where it is rounded by chance."""
    messages = len(codes)
    numel = values.numel() // max(1, messages)
    if largest == BF16.value and values.dtype == torch.bfloat16:
        codes.view(torch.bfloat16).copy_(values.view(messages, numel))
        return
    _launch(
        _encode_kernel, numel, messages, values, codes, scales, signs, numel, messages, numel if messages > 1 else 0,
        *_apart(codes, scales), 0 if base is None else base,
        LARGEST=largest, INVERSE_LARGEST=1 / (largest or 1), CHANCE=base is not None, ROTATES=signs is not None,
    )  # fmt: skip


def decode(values: Tensor, codes: Tensor, scales: Tensor, largest: float, signs: Tensor | None = None) -> None:
    """As many elements as `values` has, from the beginning of each message on."""
    messages = len(codes)
    numel = values.numel() // max(1, messages)
    if largest == BF16.value and values.dtype == torch.bfloat16:
        values.view(messages, numel).copy_(codes[:, :numel].view(torch.bfloat16))
        return
    _launch(
        _decode_kernel, numel, messages, values, codes, scales, signs, numel, messages, numel if messages > 1 else 0,
        *_apart(codes, scales), LARGEST=largest, ROTATES=signs is not None,
    )  # fmt: skip


def sum_up(
    into: Tensor, own: Tensor, number: int, codes: Tensor, scales: Tensor, factor: float, largest: float,
    signs: Tensor | None = None,
) -> None:  # fmt: skip
    """The sum of all messages in their order, in fp32, times `factor`; in place of message `number` stands `own`, which
    may be `into`."""
    _launch(
        _sum_kernel, into.numel(), 1, into, own, codes, scales, signs, into.numel(), *_apart(codes, scales), factor,
        MESSAGES=len(codes), OWN=number, SCALES=factor != 1.0, LARGEST=largest, ROTATES=signs is not None,
    )  # fmt: skip


def _apart(codes: Tensor, scales: Tensor) -> tuple[int, int]:
    """From message to message. Of one alone 0: what is no multiple of 16 would make the accesses narrow."""
    return (codes.stride(0), scales.stride(0)) if len(codes) > 1 else (0, 0)


def _launch(kernel: Any, numel: int, messages: int, *arguments: Any, **constants: Any) -> None:
    if numel and messages:
        tiles, across = triton.cdiv(numel, ROWS * BLOCK.value), min(messages, MOST_MESSAGES)
        grid = tiles, across, triton.cdiv(messages, across)
        kernel[grid](*arguments, **constants, ROWS=ROWS, num_warps=WARPS, enable_fp_fusion=False)
