"""Codecs that leave most of what they are given unsent: the largest elements, some by chance, or signs alone.

They are used as `Codec` (codecs.py) is, and make sense only where what was left out is sent some time later
(comm/feedback.py). Each is a function of the values, and RandomK of a key and the elements' places too.

Note [Some of the elements]
~~~~~~~~~~~~~~~~~~~~~~~~~~~
Elements are chosen among SPAN = 65,536 that lie side by side, so that a place is 16 bits; the last span of a message is
shorter. Values travel in bf16, to nearest: what that leaves out is exact in fp32, so it waits with the rest.

    method    message                                               bytes of n elements
    TopK      values of all spans, then their places                4 per chosen one: ceil(fraction x span) of each span
    RandomK   values; the places follow from the key                2 per chosen one: one of every round(1 / fraction)
    Sign      bits of all blocks, then one bf16 scale for each      34 ceil(n / 256)

TopK takes the largest by magnitude; which of several equals it takes is the device's choice, and NaN counts as the
largest. RandomK takes one of each run of neighbours, so that no place is drawn twice and every element has the same
chance. Sign sends the mean magnitude of its block times the element's sign; the mean is added up in pairs, in one order
on every device. What is not finite is never lost on the way: TopK sends it, RandomK turns all values of the span into
NaN, and Sign's scale is not finite then.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

import torch
from torch import Tensor

from zeor.memory.codecs import DEVICE_CHUNK_NUMEL
from zeor.memory.noise import Noise

SPAN = 1 << 16
SIGN_BLOCK = 256
_HALF_SPAN = SPAN // 2
_PLANE = SIGN_BLOCK // 8  # bytes of a block's bits: element i is bit i // 32 of byte i % 32


class _Spans(NamedTuple):
    """Spans of one length, side by side: elements [begin, begin + rows * numel), of which each sends `chosen`, and the
    first of those is number `first` of the message."""

    begin: int
    rows: int
    numel: int
    first: int
    chosen: int

    @property
    def end(self) -> int:
        return self.begin + self.rows * self.numel

    def of(self, flat: Tensor) -> Tensor:
        """The chosen ones of these spans, of all of the message."""
        return flat[self.first : self.first + self.rows * self.chosen].view(self.rows, self.chosen)


@dataclass(frozen=True)
class _Chosen:
    """What TopK and RandomK share."""

    fraction: float

    def chosen(self, numel: int) -> int:
        """How many of a span of so many elements travel."""
        raise NotImplementedError

    def total(self, numel: int) -> int:
        whole, rest = divmod(numel, SPAN)
        return whole * self.chosen(SPAN) + self.chosen(rest)

    def _spans(self, begin: int, numel: int, device: torch.device) -> Iterator[_Spans]:
        """The spans of `numel` elements from `begin` on, which is where a span begins; on a host one by one."""
        assert begin % SPAN == 0
        each, most = self.chosen(SPAN), 1 if device.type == "cpu" else DEVICE_CHUNK_NUMEL // SPAN
        whole, rest = divmod(numel, SPAN)
        first = begin // SPAN
        for number in range(first, first + whole, most):
            yield _Spans(number * SPAN, min(most, first + whole - number), SPAN, number * each, each)
        if rest:
            yield _Spans((first + whole) * SPAN, 1, rest, (first + whole) * each, self.chosen(rest))


@dataclass(frozen=True)
class TopK(_Chosen):
    """See Note [Some of the elements]."""

    def chosen(self, numel: int) -> int:
        return ceil(self.fraction * numel)

    def nbytes(self, numel: int) -> int:
        return 4 * self.total(numel)

    @torch.no_grad()
    def encode_into(self, message: Tensor, values: Tensor, noise: Noise | None = None) -> None:
        sent, places = self._apart(message)
        for spans in self._spans(0, values.numel(), values.device):
            part = values[spans.begin : spans.end].float().view(spans.rows, spans.numel)
            chosen = part.abs().topk(spans.chosen, dim=1, sorted=False).indices
            spans.of(sent).copy_(part.gather(1, chosen))
            spans.of(places).copy_(chosen.sub_(_HALF_SPAN))

    @torch.no_grad()
    def decode_into(self, values: Tensor, message: Tensor, begin: int = 0, noise: Noise | None = None) -> None:
        sent, places = self._apart(message)
        for spans in self._spans(begin, values.numel(), values.device):
            part = values[spans.begin - begin : spans.end - begin].view(spans.rows, spans.numel)
            chosen = spans.of(places).long().add_(_HALF_SPAN)
            part.zero_().scatter_(1, chosen, spans.of(sent).to(part.dtype))

    @staticmethod
    def _apart(message: Tensor) -> tuple[Tensor, Tensor]:
        half = message.numel() // 2
        return message[:half].view(torch.bfloat16), message[half:].view(torch.int16)


@dataclass(frozen=True)
class RandomK(_Chosen):
    """See Note [Some of the elements]. The noise is the same on every rank."""

    @property
    def stride(self) -> int:
        return round(1 / self.fraction)

    def chosen(self, numel: int) -> int:
        return -(-numel // self.stride)

    def nbytes(self, numel: int) -> int:
        return 2 * self.total(numel)

    @torch.no_grad()
    def encode_into(self, message: Tensor, values: Tensor, noise: Noise | None = None) -> None:
        assert noise is not None
        for spans in self._spans(0, values.numel(), values.device):
            part = values[spans.begin : spans.end].float().view(spans.rows, spans.numel)
            total = part.sum(1, keepdim=True)
            found = part.gather(1, self._places(spans, noise, values.device)).add_(total - total)  # 0, or NaN
            spans.of(message.view(torch.bfloat16)).copy_(found)

    @torch.no_grad()
    def decode_into(self, values: Tensor, message: Tensor, begin: int = 0, noise: Noise | None = None) -> None:
        assert noise is not None
        for spans in self._spans(begin, values.numel(), values.device):
            part = values[spans.begin - begin : spans.end - begin].view(spans.rows, spans.numel)
            found = spans.of(message.view(torch.bfloat16)).to(part.dtype)
            part.zero_().scatter_(1, self._places(spans, noise, values.device), found)

    def _places(self, spans: _Spans, noise: Noise, device: torch.device) -> Tensor:
        """In each run of `stride` neighbours one, by the noise of the span's first places."""
        drawn = [noise.beyond(spans.begin + row * spans.numel).words(spans.chosen, device) for row in range(spans.rows)]
        words = torch.stack(drawn).bitwise_and_(0x7FFFFFFF).long()
        places = words % self.stride
        last = spans.numel - (spans.chosen - 1) * self.stride  # of a run that the span's end cuts
        places[:, -1] = words[:, -1] % last
        return places.add_(torch.arange(spans.chosen, device=device).mul_(self.stride))


@dataclass(frozen=True)
class Sign:
    """See Note [Some of the elements]."""

    def nbytes(self, numel: int) -> int:
        return (_PLANE + 2) * -(-numel // SIGN_BLOCK)

    @torch.no_grad()
    def encode_into(self, message: Tensor, values: Tensor, noise: Noise | None = None) -> None:
        bits, scales = self._apart(message)
        for first, last, part in _blocks(values, 0):
            rows = values.new_zeros(last - first, SIGN_BLOCK, dtype=torch.float32)
            rows.view(-1)[: part.numel()].copy_(part)
            positive = (rows >= 0).view(-1, 8, _PLANE).to(torch.uint8)
            packed = positive[:, 0]
            for bit in range(1, 8):
                packed = packed.bitwise_or(positive[:, bit] << bit)
            bits[first:last].copy_(packed)
            scales[first:last].copy_(_means(rows, part.numel()))

    @torch.no_grad()
    def decode_into(self, values: Tensor, message: Tensor, begin: int = 0, noise: Noise | None = None) -> None:
        bits, scales = self._apart(message)
        for first, last, part in _blocks(values, begin):
            rows = torch.empty(last - first, 8, _PLANE, dtype=torch.float32, device=values.device)
            for bit in range(8):
                rows[:, bit].copy_((bits[first:last] >> bit).bitwise_and_(1))
            rows.mul_(2.0).sub_(1.0).mul_(scales[first:last].float().view(-1, 1, 1))
            part.copy_(rows.view(-1)[: part.numel()])

    @staticmethod
    def _apart(message: Tensor) -> tuple[Tensor, Tensor]:
        blocks = message.numel() // (_PLANE + 2)
        edge = blocks * _PLANE
        return message[:edge].view(blocks, _PLANE), message[edge:].view(torch.bfloat16)


def _blocks(values: Tensor, begin: int) -> Iterator[tuple[int, int, Tensor]]:
    """(first block, the one after the last, the elements) of `values`, of which the first is element `begin`."""
    assert begin % SIGN_BLOCK == 0
    size = SPAN if values.device.type == "cpu" else DEVICE_CHUNK_NUMEL
    for at in range(0, values.numel(), size):
        part = values[at : at + size]
        first = (begin + at) // SIGN_BLOCK
        yield first, first + -(-part.numel() // SIGN_BLOCK), part


def _means(rows: Tensor, numel: int) -> Tensor:
    """Of magnitudes, by blocks, of which the last may be filled up with zeros."""
    sums = rows.abs()
    while sums.shape[1] > 1:
        half = sums.shape[1] // 2
        sums = sums[:, :half] + sums[:, half:]
    means = sums[:, 0] * (1 / SIGN_BLOCK)
    if rest := numel % SIGN_BLOCK:
        means[-1] = sums[-1, 0] * (1 / rest)
    return means
