"""Codecs: how floating numbers travel in fewer bytes. bf16, and five formats in blocks with one scale each.

A message is bytes: the codes of all blocks, then the scales of all blocks. Encoding and decoding are functions of the
values and (for rounding by chance) of a key and the elements' places, in one order of plain operations: every device
and every thread makes the same bits. This file is given flat tensors; it knows no rank, no lane and no collective.

Note [Codes in blocks]
~~~~~~~~~~~~~~~~~~~~~~
A block is BLOCK elements; the last one of a message is filled up with zeros. With L the largest code of a format

    unit    max|x| / L, rounded up to a bf16 number, so that nothing exceeds L; it is the block's scale
    code    x / unit, rounded to what the format has; decoded it is code * unit

    format     L      codes                            bytes of n elements    error (nearest; twice as much by chance)
    int8       127    whole numbers                    130 ceil(n / 128)      unit / 2
    int4       7      whole numbers                    66 ceil(n / 128)       unit / 2
    int2       2      -3/2, -1/2, 1/2, 3/2             34 ceil(n / 128)       unit / 2
    fp8_e4m3   448    torch's float8_e4m3fn            130 ceil(n / 128)      |x| / 16, at least unit / 2**10
    fp8_e5m2   57344  torch's float8_e5m2              130 ceil(n / 128)      |x| / 8, at least unit / 2**17
    bf16              the upper half of fp32           2 n                    |x| / 256

where unit <= 1.008 max|x| / L. A block that holds an inf, a NaN or more than 2**126 in magnitude (of a rotated one its
rotated numbers) decodes to NaN as a whole: nothing that is not finite turns into a number. One whose numbers are all
below 2**-100 decodes to zeros. bf16 keeps inf and NaN where they are, and what is larger than all of its numbers
becomes inf. float64 is rounded to fp32 first. `error_bound` says the bound of each element, rounding in fp32 included.

int2 cuts [-max, max] into four cells of one unit and sends the middle of a cell, so nothing is off by more than a
quarter of the largest, not even that one. It has no zero: a zero becomes unit / 2, unless its block is all zeros. So it
is for differences alone (comm/wires.py): what is off is in the next one, and falls by four with each message, whatever
lies in the block. It is never rounded by chance and never rotated.

Note [Rotated]
~~~~~~~~~~~~~~
One large number in a block makes the unit large for all. Multiplied by a Hadamard matrix H the block's numbers are of
one size, and H H = 128: decoding multiplies again. The butterflies run over distances 1, 2, 4, ..., 64, each as (a + b,
a - b), so that all devices round alike. Signs by place (a hash of the place in the block alone) come first, since a
block of equal numbers would otherwise become one large one. The error is at most unit / 2 for int8 and int4, where the
unit is that of the rotated block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor

from zeor.memory.formats import BF16_NAN_BITS, cast_into
from zeor.memory.noise import Noise, mix

BLOCK = 128
HALF, QUARTER = BLOCK // 2, BLOCK // 4
TINY, HUGE = 2.0**-100, 2.0**126
BLOCK_FORMATS = {"int8": 127.0, "int4": 7.0, "fp8_e4m3": 448.0, "fp8_e5m2": 57344.0}
_LARGEST = {**BLOCK_FORMATS, "int2": 2.0}
FLOATS = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
_MANTISSA = {"fp8_e4m3": (3, 2.0**-9), "fp8_e5m2": (2, 2.0**-16)}  # bits of it, and the smallest number
_SCALE_NBYTES = 2

# The temporaries are a few fp32 chunks; on a host they stay in the cache. Multiples of BLOCK.
HOST_CHUNK_NUMEL = 1 << 16
DEVICE_CHUNK_NUMEL = 1 << 22


class Encoding(Protocol):
    """How a flat tensor becomes a message of bytes; a Codec, or one that leaves most of it out (sparse.py)."""

    def nbytes(self, numel: int) -> int: ...

    def encode_into(self, message: Tensor, values: Tensor, noise: Noise | None = None) -> None: ...

    def decode_into(self, values: Tensor, message: Tensor, begin: int = 0, noise: Noise | None = None) -> None: ...


@dataclass(frozen=True)
class Codec:
    """format: a name of the Note, or bf16. chance: round up or down by chance, the nearer one being the likelier, so
    that the mean is right. rotates: see Note [Rotated]."""

    format: str
    chance: bool = False
    rotates: bool = False

    def nbytes(self, numel: int) -> int:
        """Of a message of so many elements."""
        if self.format == "bf16":
            return 2 * numel
        return -(-numel // BLOCK) * (self._code_nbytes + _SCALE_NBYTES)

    @property
    def _code_nbytes(self) -> int:
        return {"int4": HALF, "int2": QUARTER}.get(self.format, BLOCK)

    @torch.no_grad()
    def encode_into(
        self, message: Tensor, values: Tensor, noise: Noise | None = None, held: Tensor | None = None
    ) -> None:
        """Writes `values` (flat, of any floating dtype) into `message` (bytes, `nbytes` of them). `noise`: of their
        places, where the codec rounds by chance. `held`: of a format in blocks, what is taken off them first."""
        assert message.numel() == self.nbytes(values.numel())
        if self._kernels(values) is not None:
            return self.encode_each(message.view(1, -1), values, noise, held)
        if self.format == "bf16":
            return self._encode_bf16(message.view(torch.bfloat16), values, noise)
        codes, scales = self._apart(message)
        for begin, end in _chunks(values):
            part = values[begin:end].float()
            if held is not None:
                part = part - held[begin:end].float()
            if part.numel() % BLOCK:
                part = torch.nn.functional.pad(part, (0, -part.numel() % BLOCK))
            first, last = begin // BLOCK, (begin + part.numel()) // BLOCK
            rows = part.view(-1, BLOCK)
            self._encode_rows(codes[first:last], scales[first:last], rows, noise and noise.beyond(begin))

    def _encode_rows(self, codes: Tensor, scales: Tensor, rows: Tensor, noise: Noise | None) -> None:
        if self.rotates:
            rows = _rotated(rows, _signs(rows.device))
        unit = _units(rows.abs().amax(1), _LARGEST[self.format])
        # Its upper half, which is all there is of it: a cast may make another of the many NaNs.
        scales.view(torch.int16).copy_(unit.view(torch.int32).bitwise_right_shift(16))
        inverse = unit.reciprocal().nan_to_num_(nan=0.0, posinf=0.0)
        scaled = torch.mul(rows, inverse.unsqueeze(1), out=rows.new_empty(rows.shape))
        if scaled.device.type != "cpu" or not bool(unit.isfinite().all()):
            scaled.nan_to_num_(nan=0.0)  # of blocks that are NaN as a whole; a device is not waited for
        largest = _LARGEST[self.format]
        if self.format == "int2":
            scaled.floor_().clamp_(-largest, largest - 1)
        elif self.chance:
            assert noise is not None
            fractions = noise.fractions(scaled.numel(), scaled.device).view(scaled.shape)
            self._round_by_chance(scaled, fractions).clamp_(-largest, largest)
        elif self.format not in FLOATS:
            scaled.round_()
        self._write(codes, scaled)

    def _round_by_chance(self, scaled: Tensor, fractions: Tensor) -> Tensor:
        if self.format not in FLOATS:
            return scaled.add_(fractions).floor_()
        bits, least = _MANTISSA[self.format]
        power = (scaled.view(torch.int32) & 0x7F800000).view(torch.float32)  # the largest power of two below
        distance = power.mul_(2.0**-bits).clamp_(min=least)  # of neighbours
        return scaled.div_(distance).add_(fractions).floor_().mul_(distance)

    def _write(self, codes: Tensor, scaled: Tensor) -> None:
        if self.format in FLOATS:
            codes.view(FLOATS[self.format]).copy_(scaled)
        elif self.format == "int8":
            codes.view(torch.int8).copy_(scaled)
        elif self.format == "int2":  # four in a byte, each 2 more than it is: element i, and above it i + 32, ...
            low, high = (torch.add(*scaled[:, at : at + HALF].split(QUARTER, 1), alpha=4) for at in (0, HALF))
            _as_bytes(codes, low.add_(high, alpha=16).add_(2 + 8 + 32 + 128 - 128))
        else:  # two in a byte, each 8 more than it is: element i of a block, and above it element i + 64
            _as_bytes(codes, torch.add(scaled[:, :HALF], scaled[:, HALF:], alpha=16).add_(8 + 16 * 8 - 128))

    def _encode_bf16(self, codes: Tensor, values: Tensor, noise: Noise | None) -> None:
        for begin, end in _chunks(values):
            part = values[begin:end]
            if part.dtype == torch.bfloat16:
                codes[begin:end].copy_(part)
                continue
            part = part.float()
            if not self.chance:
                cast_into(codes[begin:end], part)
                continue
            assert noise is not None
            bits = part.view(torch.int32)
            moved = (noise.beyond(begin).words(part.numel(), part.device) & 0xFFFF).add_(bits).bitwise_right_shift_(16)
            moved = torch.where(part.isnan(), BF16_NAN_BITS, torch.where(part.isfinite(), moved, bits >> 16))
            codes[begin:end].view(torch.int16).copy_(moved)

    @torch.no_grad()
    def decode_into(self, values: Tensor, message: Tensor, begin: int = 0, noise: Noise | None = None) -> None:
        """What `message` stands for, from element `begin` on (of a block), into `values`, of any floating dtype. Which
        noise was used to encode it makes no difference here."""
        if (kernels := self._kernels(values)) is not None:
            kernels.decode(values, *self._each_apart(message.view(1, -1), begin), *self._fused(values.device))
            return
        if self.format == "bf16":
            values.copy_(message.view(torch.bfloat16)[begin : begin + values.numel()])
            return
        codes, scales = self._apart(message)
        for first, end in _chunks(values):
            part = values[first:end]
            whole = part.dtype == torch.float32 and part.numel() % BLOCK == 0
            count = -(-part.numel() // BLOCK)
            rows = part.view(-1, BLOCK) if whole else part.new_empty(count, BLOCK, dtype=torch.float32)
            at = slice((begin + first) // BLOCK, (begin + first) // BLOCK + rows.shape[0])
            self._decode_rows(rows, codes[at], scales[at])
            if not whole:
                part.copy_(rows.view(-1)[: part.numel()])

    def _decode_rows(self, rows: Tensor, codes: Tensor, scales: Tensor) -> None:
        unit = scales.float().unsqueeze(1)
        if self.format in FLOATS:
            rows.copy_(codes.view(FLOATS[self.format]))
        elif self.format == "int8":
            rows.copy_(codes.view(torch.int8))
        elif self.format == "int2":
            for number, part in enumerate(rows.split(QUARTER, 1)):
                part.copy_((codes >> 2 * number) & 3)
            rows.sub_(1.5)
        else:
            rows[:, :HALF].copy_(codes & 15)
            rows[:, HALF:].copy_(codes >> 4)
            rows.sub_(8)
        if self.rotates:
            torch.mul(_rotated(rows, unit.mul_(1 / BLOCK)), _signs(rows.device), out=rows)
        else:
            rows.mul_(unit)

    # ---- several messages at a time, of as many elements each: a device is given one operation for all

    @torch.no_grad()
    def encode_each(
        self, messages: Tensor, values: Tensor, noise: Noise | None = None, held: Tensor | None = None
    ) -> None:
        """`values`, and what is `held` of them: of one message after the other, as `noise` counts them."""
        if held is not None and values.device.type != "cpu":
            values, held = values.float() - held.float(), None
        if (kernels := self._kernels(values)) is None:
            length = values.numel() // max(1, len(messages))
            for number, message in enumerate(messages):
                at = slice(number * length, (number + 1) * length)
                told = None if held is None else held[at]
                self.encode_into(message, values[at], noise and noise.beyond(at.start), told)
            return
        codes, scales = self._each_apart(messages)
        base = noise.word(0) if noise is not None and self.chance else None
        kernels.encode(values, codes, scales, *self._fused(values.device), base)

    @torch.no_grad()
    def decode_each(self, values: Tensor, messages: Tensor) -> None:
        if (kernels := self._kernels(values)) is None:
            for part, message in zip(values.view(len(messages), -1), messages):
                self.decode_into(part, message)
            return
        kernels.decode(values, *self._each_apart(messages), *self._fused(values.device))

    @torch.no_grad()
    def sum_each(self, into: Tensor, messages: Tensor, own: Tensor, number: int, factor: float) -> bool:
        """The sum in fp32 of what the messages stand for, in their order, with `own` in place of message `number`,
        times `factor`. False, and nothing is done, where that is not one operation."""
        kernels = self._kernels(into)
        if kernels is None or not own.is_contiguous() or own.dtype == torch.float64:
            return False
        kernels.sum_up(into, own, number, *self._each_apart(messages), factor, *self._fused(into.device))
        return True

    def _each_apart(self, messages: Tensor, begin: int = 0) -> tuple[Tensor, Tensor]:
        """Codes and scales of all from element `begin` on, as the kernels take them."""
        if self.format == "bf16":
            halves = messages.view(torch.int16)[:, begin:]
            return halves, halves[:, :0]
        first, each = begin // BLOCK, self._code_nbytes
        edge = messages.shape[1] // (each + _SCALE_NBYTES) * each
        return messages[:, first * each : edge], messages[:, edge:].view(torch.int16)[:, first:]

    def _kernels(self, values: Tensor) -> Any:
        """The fused kernels (triton_codecs.py), where they do what the plain operations here do; else None."""
        if values.device.type != "cuda" or values.dtype == torch.float64 or self.format == "int2":
            return None
        return _triton_codecs(values.device) if values.is_contiguous() else None

    def _fused(self, device: torch.device) -> tuple[float, Tensor | None]:
        return BLOCK_FORMATS.get(self.format, 0.0), _signs(device) if self.rotates and self.format != "bf16" else None

    def _apart(self, message: Tensor) -> tuple[Tensor, Tensor]:
        """Codes as rows of bytes, and scales."""
        blocks = message.numel() // (self._code_nbytes + _SCALE_NBYTES)
        edge = blocks * self._code_nbytes
        return message[:edge].view(blocks, self._code_nbytes), message[edge:].view(torch.bfloat16)

    @torch.no_grad()
    def error_bound(self, values: Tensor) -> Tensor:
        """The largest |decoded - x| there can be for each value, in fp64; NaN where the block decodes to NaN."""
        exact = values.detach().reshape(-1).double()
        rounding = (exact.float().double() - exact).abs()
        if self.format == "bf16":
            error = exact.abs() * 2.0 ** -(7 if self.chance else 8) + 2.0**-133 + rounding
            return torch.where(exact.abs() >= torch.finfo(torch.bfloat16).max, torch.inf, error)
        rows = torch.nn.functional.pad(exact.float(), (0, -exact.numel() % BLOCK)).view(-1, BLOCK)
        size, seen = rows.double().abs().sum(1, keepdim=True) * 2.0**-18, rows
        if self.rotates:
            seen = _rotated(rows, _signs(rows.device))
        seen, rows = seen.double(), rows.double()
        most = seen.abs().amax(1, keepdim=True)
        unit = most * (1 + 2.0**-6.9) / _LARGEST[self.format]
        half = 1.0 if self.chance else 0.5
        if self.format in FLOATS:
            bits, least = _MANTISSA[self.format]
            worst = most.expand_as(seen) if self.rotates else seen.abs()
            error = half * torch.maximum(worst * 2.0**-bits * (1 + 2.0**-6.9), unit * least)
        else:
            error = half * unit.expand_as(rows)
        error = error + most * 2.0**-20 + (size if self.rotates else 0.0)
        error = torch.where(most < TINY, TINY, error)
        error = torch.where(most <= HUGE, error, torch.nan)
        return error.reshape(-1)[: exact.numel()] + rounding


def _as_bytes(codes: Tensor, less: Tensor) -> None:
    """Of whole numbers from -128 to 127 those that are 128 more. A host casts to signed bytes much faster."""
    codes.view(torch.int8).copy_(less)
    codes.bitwise_xor_(128)


def _units(most: Tensor, largest: float) -> Tensor:
    """See Note [Codes in blocks]. By a product: a division by a number is not the same on every device."""
    bits = (most * (1 / largest)).view(torch.int32)
    unit = bits.add(0xFFFF).bitwise_and_(-0x10000).view(torch.float32)
    unit = torch.where(most < TINY, 0.0, unit)
    return torch.where(most <= HUGE, unit, torch.nan)  # NaN is not less either


def _rotated(rows: Tensor, times: Tensor) -> Tensor:
    """Of rows * times; see Note [Rotated]. Meanwhile numbers of one place lie side by side, which a host adds up faster
    than neighbours; so they do in what is returned."""
    count = rows.shape[0]
    here, there = rows.new_empty(2, BLOCK, count).unbind()
    torch.mul(rows, times, out=here.t())
    distance = 1
    while distance < BLOCK:
        pairs, into = (each.view(BLOCK // (2 * distance), 2, distance * count) for each in (here, there))
        torch.add(pairs[:, 0], pairs[:, 1], out=into[:, 0])
        torch.sub(pairs[:, 0], pairs[:, 1], out=into[:, 1])
        here, there, distance = there, here, 2 * distance
    return here.t()


@lru_cache(maxsize=8)
def _triton_codecs(device: torch.device) -> Any:
    """None where Triton cannot be imported, or launches nothing: it builds a launcher with the host's C compiler."""
    try:
        from zeor.memory import triton_codecs

        values, codes = torch.zeros(BLOCK, device=device), torch.zeros(1, BLOCK, dtype=torch.uint8, device=device)
        scales = torch.zeros(1, 1, dtype=torch.int16, device=device)
        triton_codecs.encode(values, codes, scales, 127.0, None)
    except Exception:  # whatever a compiler may throw; plain operations make the same bits
        return None
    return triton_codecs


@lru_cache(maxsize=8)
def _signs(device: torch.device) -> Tensor:
    """Of the elements of a block."""
    words = Noise(mix(BLOCK)).words(BLOCK, torch.device("cpu"))
    return torch.where(words < 0, -1.0, 1.0).to(device)


def _chunks(values: Tensor) -> Iterator[tuple[int, int]]:
    size = HOST_CHUNK_NUMEL if values.device.type == "cpu" else DEVICE_CHUNK_NUMEL
    for begin in range(0, values.numel(), size):
        yield begin, min(begin + size, values.numel())
