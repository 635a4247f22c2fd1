"""Release: gradients are used and freed inside backward, unit by unit.

Note [Release]
~~~~~~~~~~~~~~
With release=True the backward outside no_sync and zeor.accumulate is the one that updates. A unit is updated as soon
as its sum is there, if every parameter of it that trains had a gradient on this rank; else at the end of backward,
when ranks have agreed on which parameters have one. What is done to an element is the same either way, and the same as
in step(), which is left with publishing, counting, and units of which owners compute matrices. An update sends
nothing, so ranks need not agree on when. Some sums are only known at the end of backward (a mean over items, gradients
that reach a slice directly, gradients that rest whole on every rank): those units wait for it.

A clip factor is known only when every gradient is, and by then they are gone: clipping needs the deferred update.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from zeor.features.mean_loss import Counts
from zeor.step.backward import Backward
from zeor.step.extension import Extension
from zeor.step.grads import State
from zeor.step.reduces import Reducer
from zeor.step.unit import Unit


class Release(Extension):
    """Does nothing unless an optimizer gives it an update."""

    def __init__(self, units: Sequence[Unit], reducer: Reducer, backward: Backward, counts: Counts):
        self._units, self._reducer, self._backward, self._counts = units, reducer, backward, counts
        self.updates: list[Callable[[Unit], None]] = []  # one for each optimizer
        self.waits: list[Callable[[Unit], bool]] = []  # whether one needs a unit's gradients in step() itself
        self.done: set[Unit] = set()  # since the last step

    def check_backward(self) -> None:
        if self.done:
            raise RuntimeError(
                "A second backward began before step(), and with release=True the first has updated the weights; run "
                "all but the last inside `with zeor.accumulate(model):`, or leave release= out."
            )

    def unit_reduced(self, unit: Unit) -> None:
        if self._backward.accumulates or not self.updates or self._counts.mean or not self._backward.running:
            return
        if any(waits(unit) for waits in self.waits):
            return
        lanes = [lane for lane in unit.lanes if lane.grads is not None]
        if any(lane.spec.spreads for lane in lanes):
            return
        trained = [slot for slot in unit.slots if slot.lane.grads is not None and slot.lane.grads.trains[slot.index]]
        if not unit.is_root and trained and all(slot in self._reducer.new for slot in trained):
            for slot in trained:
                slot.lane.grads.mark_held(slot.index)  # type: ignore[union-attr]  # one of `trained`
            self._update(unit)

    def end_backward(self) -> None:
        """Who has a gradient is known."""
        if self._backward.accumulates or not self.updates:
            return
        for unit in self._units:
            if unit in self.done or any(waits(unit) for waits in self.waits):
                continue
            if any(lane.grads is not None and any(lane.grads.has) for lane in unit.lanes):
                self._update(unit)

    def abandon(self) -> None:
        """A backward raised half-way: what it updated stays so. Where slices are published other ranks see it with the
        next step: ranks may have come differently far, so nothing can be sent here."""
        self.done.clear()

    def end_step(self) -> None:
        self.done.clear()

    def _update(self, unit: Unit) -> None:
        self.done.add(unit)
        for update in self.updates:
            update(unit)
        for lane in unit.lanes:
            if lane.grads is not None and any(lane.grads.has) and lane.grads.state is not State.UNREDUCED:
                lane.grads.release()
