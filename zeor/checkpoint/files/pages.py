"""Memory that a disk can write into by itself: whole pages at the right place.

A direct read (O_DIRECT) skips the page cache and its copy, and asks that position in the file and address agree
modulo a page. Memory for a range of a file is therefore cut so that its address lies as its bytes lie in the file.
`Scratch` is memory to read a block into before it goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zeor.memory.pages import LARGE_NBYTES, PAGE_NBYTES, mapped

Bytes = np.ndarray[Any, Any]  # of the host


def empty_at(nbytes: int, residue: int) -> Tensor:
    """Bytes whose address is `residue` modulo a page, as far as it matters: small ones lie anywhere."""
    if nbytes >= LARGE_NBYTES:
        try:
            return mapped(nbytes, residue)
        except (OSError, ValueError):
            pass  # the system has given all the mappings it gives; large pages it may refuse without an error
    return torch.empty(nbytes, dtype=torch.uint8)


def fits(parts: Sequence[Bytes], position: int) -> bool:
    """Whether a direct read can fill these, one after the other, from that position."""
    return not position % PAGE_NBYTES and not any((address_of(part) | len(part)) % PAGE_NBYTES for part in parts)


def address_of(part: Bytes) -> int:
    return int(part.__array_interface__["data"][0])


class Scratch:
    """Memory for one block, pinned where blocks travel on to an accelerator; used again once they have arrived."""

    def __init__(self, nbytes: int, pinned: bool) -> None:
        if pinned:  # it begins at a page, and is rounded up to a power of two: no byte more is asked for
            self.bytes = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        else:
            room = empty_at(nbytes + PAGE_NBYTES, 0)
            begin = -room.data_ptr() % PAGE_NBYTES
            self.bytes = room[begin : begin + nbytes]
        self._arrived: Any = None

    def send(self, begin: int, into: Tensor, stream: Any) -> None:
        """A part of it to a device, on a stream of its own."""
        with torch.inference_mode(into.is_inference()), stream:
            into.copy_(self.bytes[begin : begin + into.numel()], non_blocking=True)
        self._arrived = self._arrived or torch.Event(device=into.device)
        self._arrived.record(stream)

    def wait(self) -> None:
        """Until what was sent has arrived -> who reads the next block into it."""
        if self._arrived is not None:
            self._arrived.synchronize()
