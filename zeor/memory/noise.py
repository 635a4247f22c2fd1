"""Numbers by place, for rounding by chance: one integer hash of a key and of where an element lies.

No generator and no state: whoever knows the key and the place has the number, so that every device, every cut and every
order of work gives the same bits. Integers only, which wrap alike everywhere.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF
_FIRST, _SECOND, _STEP = 0x7FEB352D, 0x846CA68B, 0x9E3779B1  # of lowbias32, and 2**32 over the golden ratio


def mix(*numbers: int) -> int:
    """A key of 32 bits from whole numbers."""
    key = 0
    for number in numbers:
        while True:
            key = _scramble((key ^ (number & _WORD)) + _STEP)
            number >>= 32
            if number in (0, -1):
                break
    return key


def _scramble(word: int) -> int:
    word &= _WORD
    word = ((word ^ (word >> 16)) * _FIRST) & _WORD
    word = ((word ^ (word >> 15)) * _SECOND) & _WORD
    return word ^ (word >> 16)


class Noise(NamedTuple):
    """Of elements that lie side by side, the first at place `start`."""

    key: int
    start: int = 0

    def beyond(self, count: int) -> Noise:
        """Of those that lie so many elements further on."""
        return Noise(self.key, self.start + count)

    def word(self, place: int) -> int:
        """What is scrambled for the element at this place beyond the first, as an int32."""
        return _signed(self.key + (self.start + place) * _STEP)

    def words(self, count: int, device: torch.device) -> Tensor:
        """An int32 for each element; all bits are by chance."""
        word = torch.arange(count, dtype=torch.int32, device=device)
        word.mul_(_signed(_STEP)).add_(self.word(0))
        for shift, factor in ((16, _FIRST), (15, _SECOND)):
            # The shift of a signed number brings in its sign, which is masked away.
            word.bitwise_xor_((word >> shift).bitwise_and_((1 << (32 - shift)) - 1)).mul_(_signed(factor))
        return word.bitwise_xor_((word >> 16).bitwise_and_(0xFFFF))

    def fractions(self, count: int, device: torch.device) -> Tensor:
        """A number of 16 bits in [0, 1) for each element, in fp32."""
        return self.words(count, device).bitwise_and_(0xFFFF).to(torch.float32).mul_(2.0**-16)


def _signed(word: int) -> int:
    """The same 32 bits as an int32."""
    word &= _WORD
    return word - (1 << 32) if word >> 31 else word
