"""Feedback: what one hop of a lane's reduces has not sent, kept in fp32 and added to the next gradient.

    x = residual + gradient        in fp32, in the residual's memory
    sent = decode(encode(x))
    residual = x - sent            zero where that is not finite

So residual + sent is the gradient: in every bit where x - sent is a number of fp32, which it is for elements that are
chosen and for codes to nearest, else up to the rounding of that one subtraction. This rank's own part of a hop does not
travel, so codecs leave nothing of it and it has no residual; factors (lowrank.py) are of all parts, and so is theirs.
What is not finite is seen by whoever gets the message, and forgotten here: one such gradient must not stay for ever.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zeor.layout import Span
from zeor.memory.buffers import lasting


class Residual:
    """Of a hop that is given `blocks` stretches, each of `size` parts of `part_numel` elements, one for each rank."""

    def __init__(self, shape: tuple[int, int, int], rank: int, device: torch.device, whole: bool = False):
        """`whole`: of all parts, this rank's too."""
        self._blocks, self._size, self._part = shape
        self._rank, self.whole = rank, whole
        kept = self._size - (not whole)
        self.flat = lasting(self._blocks * kept * self._part, torch.float32, device)
        self._rows = self.flat.view(self._blocks, kept, self._part)

    @property
    def numel(self) -> int:
        """Of all that the hop is given."""
        return self._blocks * self._size * self._part

    def block(self, number: int) -> list[Tensor | None]:
        """Of one block, by rank; None where nothing is kept."""
        rows: list[Tensor | None] = list(self._rows[number])
        if not self.whole:
            rows.insert(self._rank, None)
        return rows

    def copy_to(self, flat: Tensor) -> Tensor:
        """All of it as the hop is given its input, with zeros where nothing is kept."""
        for number, block in enumerate(flat.view(self._blocks, self._size, self._part)):
            for into, row in zip(block, self.block(number)):
                if row is None:
                    into.zero_()
                else:
                    into.copy_(row)
        return flat

    def clear(self) -> None:
        self.flat.zero_()

    def wipe(self, spans: Sequence[Span]) -> None:
        """Forget these elements of the input."""
        for number in range(self._blocks):
            for rank, row in enumerate(self.block(number)):
                begin = (number * self._size + rank) * self._part
                if row is None:
                    continue
                for span in spans:
                    low, high = max(span.begin, begin), min(span.end, begin + self._part)
                    if low < high:
                        row[low - begin : high - begin].zero_()


def forget_nonfinite(flat: Tensor) -> None:
    flat.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
