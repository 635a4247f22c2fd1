"""Formats at rest of a moment: exact (fp32), bf16, and int8 in blocks with one fp32 scale each.

A block is BLOCK_NUMEL elements counted from the start of a segment; the last one may be short. Codes are
companded: the largest magnitude of a block is its scale and is kept exactly, small ones keep a relative
precision over several decades. See Note [companded codes] and Note [what encoding keeps].
The Triton passes (zeor.optim) say the same on their tiles. This file is given flat tensors; it knows
nothing of segments, optimizers or devices.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from zeor.plan import BLOCK_NUMEL

# Note [companded codes]
# With s = max|x| of a block, p the power and L the largest code,
#
#     signed     p = 4, L = 127, int8     code = sign(x) * round(L * (|x|/s)**(1/p)), ties to even
#     unsigned   p = 8, L = 255, uint8    code = round(max(L * (x/s)**(1/p), 16 where x > 0) + dither)
#     decode     (code/L)**p * s, with the code's sign
#
# Unsigned is for what is never negative (exp_avg_sq): it stands below a square root in a denominator, where a zero
# would make the update explode. So nothing but zero becomes zero: what is below s * (16/255)**8 = 2.4e-10 s is
# raised to that. With r = (|x|/s)**(1/p), h = 1/254 signed or 1/255 unsigned (where the dither adds half a code) and
# c = 16/255 (0 for signed), the error is at most
#
#     s * ((r + h)**p - r**p)    or, for r < c, s * (c**p - r**p) if that is more        (`error_bound`)
#
# or about 1.6%/r of a signed x, and 3.2%/r of an unsigned one (1.6%/r of its square root).
# The powers were chosen by the error of Adam's update m/sqrt(v), relative and root mean square, all rounded to nearest:
# smaller ones are a little better in matrices, much worse where the moments of one block spread, as they do in
# embeddings and biases (sqrt(v) log-normal, columns by its standard deviation in decades).
#
#     powers (m, v)   moments of a small GPT   0.5    1      1.5
#     (2, 4)          0.8 - 1.1%               3.6%   45%    83%
#     (4, 4)          1.2 - 1.4%               2.7%   21%    54%
#     (4, 8)          1.2 - 1.4%               2.4%   7.0%   55%
#     (8, 8)          2.1 - 2.2%               2.9%   5.5%   18%
#
# Roots are repeated square roots and powers repeated squares: no table, and the same codes on every device.

# Note [dither]
# With beta2 = 0.999 a step changes exp_avg_sq by about a thousandth, but codes are 3% apart. Rounded to nearest it
# would stand still: it could only grow, by a gradient of several times its size, and never shrink beside the
# largest of its block. So an unsigned code is rounded up or down by chance, the nearer code being the likelier:
# on the average it moves as it should. The chance is a hash of the value's own bits, so that encoding stays a function
# of the values alone: the same on every device and rank, in any chunk, and again after a restart. It stays clear of
# 1/2 by a margin that is more than rounding moves a decoded code (2**-12), for Note [what encoding keeps].
# In 1,000 steps of a small GPT on text with beta2 = 0.999 the loss was within 0.001 of that with exact moments (two
# seeds); without the dither it was 0.008 away.
# exp_avg takes a tenth or so of the gradient every step, which is many codes, and is rounded to nearest.

# Note [what encoding keeps]
# - encode(decode(q)) == q with its scales: code L decodes to s itself (L * fp32(1/L) == 1 for both), all others to
#   less, and any code comes back as c(1 +- 2**-20), which is nearest to c. So a load and a save change no bit.
# - In the normal code book of a block below TINY_SCALE, decoded numbers would reach into the denormals, where they
#   round to each other or to zero. A signed one is stored as zero; in an unsigned one all that is not zero becomes s.
#   The error there is below TINY_SCALE (8e-28).
# - A block with inf or NaN in it (or a negative number in an unsigned one) has scale NaN and decodes to NaN as a
#   whole. Nothing non-finite ever turns into a number.

FORMATS = ("exact", "bf16", "int8")
TINY_SCALE = 2.0**-90

SIGNED_LARGEST, SIGNED_ROOTS = 127, 2  # |x|**(1/4): two square roots
UNSIGNED_LARGEST, UNSIGNED_ROOTS = 255, 3  # x**(1/8): three
UNSIGNED_LEAST = 16  # the smallest code that is not zero
DITHER_MULTIPLIER = 0x9E3779B1 - (1 << 32)  # 2**32 over the golden ratio, as an int32
DITHER_WIDTH = 1 - 2.0**-9  # twice the margin of 2**-10

# The temporaries are a few fp32 chunks, as in formats.py. A multiple of BLOCK_NUMEL.
HOST_CHUNK_NUMEL = 1 << 18
DEVICE_CHUNK_NUMEL = 1 << 22


def scale_count(numel: int) -> int:
    """How many blocks a segment of `numel` elements has."""
    return -(-numel // BLOCK_NUMEL)


def storage_of(format: str, numel: int, signed: bool) -> tuple[torch.dtype, int]:
    """(dtype of the `numel` codes, number of fp32 scales beside them)."""
    if format == "exact":
        return torch.float32, 0
    if format == "bf16":
        return torch.bfloat16, 0
    if format == "int8":
        return (torch.int8 if signed else torch.uint8), scale_count(numel)
    raise ValueError(f"a moment's format is one of {', '.join(FORMATS)}, not {format!r}")


@torch.no_grad()
def encode_into(codes: Tensor, scales: Tensor | None, values: Tensor, signed: bool) -> None:
    """Writes `values` (fp32) into `codes`, whose dtype says the format, and `scales` (None but for int8)."""
    largest, roots = _check(codes, scales, values)
    if scales is None:
        codes.view(-1).copy_(values.view(-1))
        return
    if signed != (codes.dtype == torch.int8):
        raise ValueError(
            f"signed codes are torch.int8 and unsigned ones torch.uint8; signed={signed} has {codes.dtype}"
        )
    for code, scale, value in _blocks(codes, scales, values):
        low, high = torch.aminmax(value, dim=1)
        largest_magnitude = torch.maximum(high, -low) if signed else high.masked_fill_(low < 0, math.nan)
        scale.copy_(largest_magnitude).masked_fill_(~scale.isfinite(), math.nan)
        tiny = scale < TINY_SCALE
        root = _roots_of(value.abs(), roots)
        factor = (largest / _roots_of(scale.clone(), roots)).masked_fill_(tiny, 0.0)
        root.mul_(factor.unsqueeze(1)).nan_to_num_(nan=0.0)  # NaN: all of a block that is not finite
        if signed:
            scale.masked_fill_(tiny, 0.0)
            root.copysign_(value)
        else:
            least = torch.where(tiny, UNSIGNED_LARGEST, torch.where(scale.isnan(), 0, UNSIGNED_LEAST))
            torch.maximum(root, least.unsqueeze(1) * value.sign(), out=root).add_(_dither(value))
        code.copy_(root.round_())


@torch.no_grad()
def decode_into(values: Tensor, codes: Tensor, scales: Tensor | None) -> None:
    """Writes into `values` (fp32) what `codes` and `scales` stand for."""
    largest, roots = _check(codes, scales, values)
    if scales is None:
        values.view(-1).copy_(codes.view(-1))
        return
    for code, scale, value in _blocks(codes, scales, values):
        value.copy_(code).mul_(1 / largest)
        for _ in range(roots):
            value.mul_(value.abs())  # a square that keeps the sign
        value.mul_(scale.unsqueeze(1))


@torch.no_grad()
def error_bound(values: Tensor, format: str, signed: bool) -> Tensor:
    """The largest |decode(encode(x)) - x| there can be for each of a segment's values, fp32 rounding included.

    NaN in blocks that decode to NaN. See Note [companded codes]. bf16 rounds to nearest: half a unit of 8 bits.
    """
    exact = values.detach().reshape(-1).double()
    if format == "exact":
        return torch.zeros_like(exact)
    if format == "bf16":
        return exact.abs() * 2.0**-8 + 2.0**-134  # below 2**-126 the unit no longer shrinks
    dtype, blocks = storage_of(format, exact.numel(), signed)
    codes = torch.empty(exact.numel(), dtype=dtype, device=values.device)
    scales = torch.empty(blocks, device=values.device)
    encode_into(codes, scales, values.detach().reshape(-1).float(), signed)
    largest, roots = _code_book(dtype)
    scale = scales.double().repeat_interleave(BLOCK_NUMEL)[: exact.numel()]
    root = _roots_of(exact.abs() / scale, roots)
    power, distance = 2**roots, (0.5 if signed else 1.0) / largest
    bound: Tensor = (root + distance) ** power - root**power
    if not signed:
        bound = torch.maximum(bound, (UNSIGNED_LEAST / largest) ** power - root**power)
    bound = bound * scale * (1 + 2.0**-20) + exact.abs() * 2.0**-20
    return bound.masked_fill_(exact == 0, 0.0).masked_fill_(scale < TINY_SCALE, TINY_SCALE) + 0.0 * scale


def _roots_of(values: Tensor, roots: int) -> Tensor:
    """In place."""
    for _ in range(roots):
        values.sqrt_()
    return values


def _dither(values: Tensor) -> Tensor:
    """A number between -1/2 and 1/2 for each value, made of its bits. See Note [dither]."""
    bits = values.view(torch.int32) * DITHER_MULTIPLIER  # wraps
    bits.bitwise_right_shift_(9).bitwise_and_(0x7FFFFF).bitwise_or_(0x3F800000)  # the upper bits, as fp32 in [1, 2)
    return bits.view(torch.float32).sub_(1.5).mul_(DITHER_WIDTH)


def _code_book(dtype: torch.dtype) -> tuple[int, int]:
    """(largest code, number of square roots)."""
    return (SIGNED_LARGEST, SIGNED_ROOTS) if dtype == torch.int8 else (UNSIGNED_LARGEST, UNSIGNED_ROOTS)


def _blocks(codes: Tensor, scales: Tensor, values: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """(codes, scales, values) of some whole blocks at a time, as rows; last the short block, if there is one."""
    codes, scales, values = codes.view(-1), scales.view(-1), values.view(-1)
    whole = values.numel() // BLOCK_NUMEL
    step = (HOST_CHUNK_NUMEL if values.device.type == "cpu" else DEVICE_CHUNK_NUMEL) // BLOCK_NUMEL
    for begin in range(0, whole, step):
        end = min(begin + step, whole)
        part = slice(begin * BLOCK_NUMEL, end * BLOCK_NUMEL)
        rows = (end - begin, BLOCK_NUMEL)
        yield codes[part].view(rows), scales[begin:end], values[part].view(rows)
    if whole < scales.numel():
        rest = slice(whole * BLOCK_NUMEL, None)
        yield codes[rest].view(1, -1), scales[whole:], values[rest].view(1, -1)


def _check(codes: Tensor, scales: Tensor | None, values: Tensor) -> tuple[int, int]:
    """The code book of codes that fit their values and scales; idle where there are no scales."""
    if values.dtype != torch.float32 or codes.numel() != values.numel():
        raise ValueError(
            f"{codes.numel()} codes are of as many torch.float32 values, not {values.numel()} {values.dtype}"
        )
    if codes.dtype not in (torch.float32, torch.bfloat16, torch.int8, torch.uint8):
        raise ValueError(f"a moment rests in torch.float32, bfloat16, int8 or uint8, not {codes.dtype}")
    blocks = scale_count(codes.numel()) if codes.dtype in (torch.int8, torch.uint8) else None
    found = None if scales is None else scales.numel()
    if found != blocks or (scales is not None and scales.dtype != torch.float32):
        raise ValueError(f"{codes.numel()} elements of {codes.dtype} have {blocks or 'no'} fp32 scales, not {found}")
    return _code_book(codes.dtype)
