"""A rank's part of a run, copied to the host in one go, so that training can change the originals.

    sources, wherever they lie  --copy-->  blocks of host memory, cut by hand  -->  sources that read from there

The blocks are kept from save to save; beside an accelerator they are pinned. Pinned memory is rounded up to a
power of two, hence blocks of that size, and many tensors in each. Knows nothing of files, threads or ranks.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from zeor.checkpoint.files.writer import Source

BLOCK_NBYTES = 1 << 30
_ALIGNED = 64  # bytes: every dtype may begin there

log = logging.getLogger("zeor")


class HostBlocks:
    """Host memory that is reused; one snapshot at a time."""

    def __init__(self, pinned: bool) -> None:
        self.pinned = pinned
        self._blocks: list[Tensor] = []
        self._used: list[int] = []

    @property
    def nbytes(self) -> int:
        return sum(block.numel() for block in self._blocks)

    def missing_nbytes(self, sources: Sequence[Source]) -> int:
        """What a snapshot of these would have to allocate, about."""
        return max(0, sum(map(_room, sources)) - self.nbytes)

    @torch.no_grad()
    def take(self, sources: Sequence[Source]) -> list[Source]:
        """The same sources with the values they have now. What an earlier call returned is overwritten."""
        self._used = [0] * len(self._blocks)
        left_nbytes, copies, on_device = sum(map(_room, sources)), [], False
        for source in sources:
            value = source.read().detach()
            into = self._cut(source, left_nbytes)
            into.copy_(value.reshape(into.shape), non_blocking=True)
            on_device |= value.device.type != "cpu"
            left_nbytes -= _room(source)
            copies.append(dataclasses.replace(source, read=functools.partial(_same, into)))
        if on_device:
            torch.accelerator.current_stream().synchronize()  # the copies -> whoever writes the originals next
        return copies

    def _cut(self, source: Source, left_nbytes: int) -> Tensor:
        room = _room(source)
        for number, block in enumerate(self._blocks):
            if self._used[number] + room <= block.numel():
                break
        else:
            number = len(self._blocks)
            self._blocks.append(self._allocate(max(room, min(left_nbytes, BLOCK_NBYTES))))
            self._used.append(0)
        begin = self._used[number]
        self._used[number] += room
        return self._blocks[number][begin : begin + source.nbytes].view(source.dtype)

    def _allocate(self, nbytes: int) -> Tensor:
        if self.pinned:
            try:
                return torch.empty(1 << (nbytes - 1).bit_length(), dtype=torch.uint8, pin_memory=True)
            except RuntimeError as error:
                text = str(error).splitlines()[0]
                log.warning("zeor: no pinned memory for a checkpoint (%s); plain memory serves, more slowly.", text)
                self.pinned = False
        return torch.empty(nbytes, dtype=torch.uint8)


def _same(value: Tensor) -> Tensor:
    return value


def _room(source: Source) -> int:
    """Bytes a source takes in a block; never none, so that an empty one has a place too."""
    return max(1, -(-source.nbytes // _ALIGNED)) * _ALIGNED
