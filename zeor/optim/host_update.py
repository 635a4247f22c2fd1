"""The update of a lane on the host: the stock optimizer over memory that rests there.

    device   gradient --widened, scaled--> fp32 ----\\                    /----> fp32 --cast--> compute
    link                                             copy              copy
    host                                               \\--> stock step --/   master, moments: updated in place

The link carries fp32 and the device does the casts, so the host makes no pass over the data but the step itself, which
is torch's fused kernel where the optimizer has one. Chunks overlap: while one is updated the next gradient comes down
and the last weights go up. Runs in the thread that calls it, with threads of its own number beneath; they are given
back afterwards.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zeor.memory.formats import cast_into
from zeor.memory.lines import Line, Mark, current_mark
from zeor.memory.rest import Rest

AHEAD = 4  # chunks whose gradients are on their way down: small ones must not leave the step waiting


MOST_NUMEL = 1 << 23  # elements at a time: enough for every thread, and the last chunk of a parameter is soon there


class HostChunk(NamedTuple):
    """What the step of one chunk needs. `step(gradient)`: the optimizer's own over the host's memory."""

    begin: int
    end: int
    grad: Rest  # elements [grad_begin, ...) of it
    grad_begin: int
    master: Tensor  # on the host
    compute: Tensor  # where forward reads it
    scale: Tensor | float | None
    step: Callable[[Tensor], None]


class _Slot:
    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device):
        pinned = device.type != "cpu"
        self.grad = torch.empty(numel, dtype=dtype, pin_memory=pinned)
        self.down = torch.empty(numel, dtype=dtype, device=device)
        self.up = torch.empty(numel, dtype=dtype, device=device)
        self.arrived, self.cast = Mark(), Mark()


class HostUpdate:
    def __init__(self, device: torch.device, chunk_numel: int, threads: int | None):
        self._device, self.chunk_numel = device, min(chunk_numel, MOST_NUMEL)
        self.threads = threads or default_threads()
        self.widens, self._downs, self._ups = Line(device), Line(device), Line(device)
        self._slots: dict[torch.dtype, list[_Slot]] = {}

    @property
    def nbytes(self) -> int:
        """On the device."""
        return sum(slot.down.nbytes + slot.up.nbytes for slots in self._slots.values() for slot in slots)

    def run(self, chunks: Sequence[HostChunk], ready: Mark) -> Mark:
        """Everything of one lane; the mark after which compute is new. `ready`: gradients are there and nobody reads
        compute any more."""
        ready.hold(self.widens)
        ready.hold(self._ups)
        with use_threads(self.threads):
            for number in range(min(AHEAD, len(chunks))):
                self._send_down(number, chunks[number])
            for number, chunk in enumerate(chunks):
                slot = self._slot(number, chunk.master.dtype)
                slot.arrived.wait()
                chunk.step(slot.grad[: chunk.end - chunk.begin])
                self._send_up(slot, chunk)
                if number + AHEAD < len(chunks):
                    self._send_down(number + AHEAD, chunks[number + AHEAD])
        return self._ups.mark()

    def _slot(self, number: int, dtype: torch.dtype) -> _Slot:
        if dtype not in self._slots:
            self._slots[dtype] = [_Slot(self.chunk_numel, dtype, self._device) for _ in range(AHEAD + 1)]
            for line in (self.widens, self._ups):
                current_mark(self._device).hold(line)  # whoever had this memory -> what is written there
        return self._slots[dtype][number % (AHEAD + 1)]

    def _send_down(self, number: int, chunk: HostChunk) -> None:
        slot, numel = self._slot(number, chunk.master.dtype), chunk.end - chunk.begin
        grad = chunk.grad.tensor[chunk.grad_begin : chunk.grad_begin + numel]
        with self.widens():
            slot.arrived.hold(self.widens)  # the copy out of it, a round ago -> new values
            slot.down[:numel].copy_(grad, non_blocking=True)
            if chunk.scale is not None:
                slot.down[:numel].mul_(chunk.scale)
        self.widens.uses(chunk.grad.tensor)
        self.widens.mark().hold(self._downs)  # widened -> copied
        with self._downs():
            slot.grad[:numel].copy_(slot.down[:numel], non_blocking=True)
            slot.arrived = self._downs.mark()

    def _send_up(self, slot: _Slot, chunk: HostChunk) -> None:
        numel = chunk.end - chunk.begin
        with self._ups():  # in one line: the cast of an earlier chunk in this slot -> this copy
            slot.up[:numel].copy_(chunk.master, non_blocking=True)
            cast_into(chunk.compute, slot.up[:numel])


def default_threads() -> int:
    """This rank's share of the cores the process may use, less one for the loop and its loader where there are many."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    share = cores // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return max(1, share - 1 if share > 4 else share)


@contextlib.contextmanager
def use_threads(count: int) -> Iterator[None]:
    """torch computes with so many threads when called from this one."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def fused_group(group: dict[str, Any]) -> dict[str, Any]:
    """A group's settings with torch's fused kernel, if the optimizer has one."""
    return {**group, "fused": True, "foreach": False} if "fused" in group else dict(group)
