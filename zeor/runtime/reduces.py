"""When gradients are reduced: one unit at a time, in an agreed order, while backward goes on.

A unit whose gradients are all there is ready. Reduces are issued strictly in the agreed order, so a
ready unit waits for the ones before it; one that took no part in this step's forward sends zeros. Only
one reduce is under way at a time, which bounds memory to two gradient buffers and one receive buffer.
The end of backward agrees on what is left and on which parameters anybody had a gradient for.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from zeor.comm import verbs
from zeor.comm.mesh import Mesh
from zeor.runtime.unit import Slot, Unit


class Reducer:
    def __init__(self, mesh: Mesh, units: list[Unit], factor: float, overlap: bool, record: Callable):
        self._mesh, self._units, self._factor, self._overlap = mesh, units, factor, overlap
        self._record = record
        self._slots = [slot for unit in units for slot in unit.slots if slot.lane.grads is not None]
        self._under_way: Unit | None = None
        self.begin([])

    def begin(self, order: list[int]) -> None:
        self._order = [unit for unit in order if self._trains(self._units[unit])]
        self._next = 0
        self._ready: set[int] = set()
        self.issued: list[int] = []
        self.new: set[Slot] = set()  # had a gradient in this backward, on this rank

    @staticmethod
    def _trains(unit: Unit) -> bool:
        return any(lane.grads is not None for lane in unit.lanes)

    def ready(self, unit: Unit, entered: Callable[[int], bool]) -> None:
        """All gradients this backward brings to the unit are there."""
        self._ready.add(unit.index)
        while self._next < len(self._order):
            candidate = self._order[self._next]
            if candidate not in self._ready and entered(candidate):
                break
            self._issue(self._units[candidate])
            self._next += 1

    def _issue(self, unit: Unit) -> None:
        if self._under_way is not None:
            self._finish(self._under_way)
        self._record("reduce", unit.index)
        for lane in unit.lanes:
            if lane.grads is not None:
                lane.grads.start_reduce(self._factor, f"reduce of the gradients of unit {unit.name!r}")
        self.issued.append(unit.index)
        self._under_way = unit
        if not self._overlap:
            self._finish(unit)

    def _finish(self, unit: Unit) -> None:
        for lane in unit.lanes:
            if lane.grads is not None:
                lane.grads.finish_reduce(f"unit {unit.name!r}")
        self._under_way = None
        self._record("finish", unit.index)

    def end(self) -> None:
        """Backward is over: reduce what is left, wait for everything, say who has a gradient."""
        pending = [any(any(lane.grads.pending) for lane in unit.lanes if lane.grads) for unit in self._units]
        had = [slot in self.new for slot in self._slots]
        if self._mesh.world > 1 and not self._mesh.fake:
            agreed = torch.tensor([self._next, *pending, *had], dtype=torch.int32)
            values = verbs.agree_max(self._mesh, agreed, "agreement at the end of backward").tolist()
            reached, pending, had = values[0], values[1 : 1 + len(pending)], values[1 + len(pending) :]
        else:
            reached = self._next
        for position in range(self._next, reached):
            unit = self._units[self._order[position]]
            pending[unit.index] = False
            self._issue(unit)
        for unit in self._units:
            if pending[unit.index]:
                self._issue(unit)
        if self._under_way is not None:
            self._finish(self._under_way)
        for slot, anyone in zip(self._slots, had):
            if anyone and slot.lane.grads is not None:
                slot.lane.grads.has[slot.index] = True

    def end_unreduced(self) -> None:
        """The same inside no_sync: nothing travels; this rank's own gradients are there."""
        for slot in self.new:
            assert slot.lane.grads is not None
            slot.lane.grads.has[slot.index] = True
