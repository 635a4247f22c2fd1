"""When gradients are reduced: one unit at a time, in an agreed order, while backward goes on.

A unit whose gradients are all there is ready. Reduces are issued strictly in the agreed order, so a
ready unit waits for the ones before it; one that took no part in this step's forward sends zeros. Only
one reduce is under way at a time, which bounds memory to two gradient buffers and one receive buffer.
The end of backward agrees on what is left and on which parameters anybody had a gradient for.

Note [Patience]
~~~~~~~~~~~~~~~
Waiting for the reduce under way before starting the next bounds memory. But two ranks on different paths
could then wait for each other: one for a reduce that the other will come to only at the end of its backward,
that one for a gather of the first, or for it to end. So where this step's forwards are known to have differed
nothing is waited for until backward ends, and otherwise (a loss may skip a branch on one rank) the host waits
only so long. Both cost memory, never a bit of the result.

Note [Two hops]
~~~~~~~~~~~~~~~
Where ranks stand on two axes a reduce goes inside first, then across. When the next unit is ready the one before it has
been summed inside, as a rule, and begins to travel across, while the unit before that one is finished. So the slow link
has as long as a unit's backward takes, and one more sum of a part of a unit is alive.

Note [Legs]
~~~~~~~~~~~
Reduces of low rank have several legs on one group (comm/lowrank.py), which every rank must begin in one order. How far
a rank comes before it looks at an earlier unit again is its own affair, so no unit is finished before all are issued,
by every rank; then legs follow unit by unit, one kind after the other. What waits meanwhile are factors; the gradients
themselves are in the residual by then, and their buffers are given back.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from zeor.comm.axes import Axes
from zeor.comm.lowrank import LEGS
from zeor.step.extension import COMPARED, NEWS, NOW, Extension, overriding
from zeor.step.grads import State
from zeor.step.settling import OWN, Told
from zeor.step.unit import Slot, Unit

PATIENCE_SECONDS, SHORT_PATIENCE_SECONDS = 20.0, 0.05  # at first, and once it has run out

log = logging.getLogger("zeor")


class Reducer:
    """`put_away(unit)`: its sum is there, and goes where it rests."""

    def __init__(self, axes: Axes, units: list[Unit], overlap: bool, put_away: Callable[[Unit], None]):
        self._axes, self._units, self._overlap = axes, units, overlap
        self._observer, self._put_away = axes.everyone.observer, put_away
        self._hops = sum(size > 1 for size in axes.sizes)
        self._slots = [slot for unit in units for slot in unit.slots]  # frozen ones too: they may train one day
        self._under_way: list[Unit] = []
        self.waits_for_step = False  # a backward has reduced, and no step() has used it
        self.extend(())
        self._unreduced: set[Slot] = set()  # had a gradient inside no_sync, on this rank, and nobody knows yet
        self._patience = self._full_patience = min(PATIENCE_SECONDS, axes.everyone.timeout / 2)
        self.begin([], diverged=False, factor=1.0)

    def extend(self, extensions: Sequence[Extension]) -> None:
        riders = [each for each in extensions if each.told_count]
        riding = [(each, each.told_count) for each in riders]
        self._riders = {how: [(each, count) for each, count in riding if each.riding == how] for how in Told._fields}
        self._ridden = sum(count for _, count in riding)
        self._needs = overriding(extensions, "needs_answer")
        self._when_reduced = overriding(extensions, "unit_reduced")

    def begin(self, order: list[int], diverged: bool, factor: float) -> None:
        """A backward starts. `diverged`: ranks have taken different paths in this step's forwards. `factor`: of the
        sum over ranks."""
        self._factor = factor
        self._waits = False
        lanes = [lane.grads for unit in self._units for lane in unit.lanes if lane.grads is not None]
        self._holds = any(grads.has_legs for grads in lanes)  # see Note [Legs]
        # As all ranks know it now: what they agree on at the end of this backward comes too late for some of them.
        self._training = {grads for grads in lanes if any(grads.trains)}
        self._patience_left = 0.0 if diverged else self._patience
        self._order = [unit for unit in order if any(lane.grads in self._training for lane in self._units[unit].lanes)]
        self._next = 0
        self._ready: set[int] = set()
        self.issued: list[int] = []
        self.new: set[Slot] = set()  # had a gradient in this backward, on this rank
        self.had: list[Slot] = []  # on any rank; known at the end

    def ready(self, unit: Unit, entered: Callable[[int], bool]) -> None:
        """All gradients this backward brings to the unit are there."""
        self._ready.add(unit.index)
        while self._next < len(self._order):
            candidate = self._order[self._next]
            if candidate not in self._ready and entered(candidate):
                break
            self._issue(self._units[candidate])
            self._next += 1

    def pass_by(self, unit: int) -> None:
        """The unit's turn has come on the ranks that compute, and this one only plays: zeros, as far as the order goes
        by units that were passed. Waits a moment for earlier ones, so that they do not pile up."""
        self._ready.add(unit)
        while self._next < len(self._order) and self._order[self._next] in self._ready:
            for earlier in () if self._holds else self._under_way:
                for lane in earlier.lanes:
                    if lane.grads is not None:
                        lane.grads.reduced_within(SHORT_PATIENCE_SECONDS)
            self._issue(self._units[self._order[self._next]])
            self._next += 1

    def _issue(self, unit: Unit, left: bool = False) -> None:
        """`left`: something is left on some rank, in whatever lane."""
        self._finish_earlier(but=1 if self._hops > 1 and not self._waits else 0)
        observer = self._observer
        for lane in unit.lanes:
            if lane.grads is not None and (left or lane.grads in self._training):
                record = observer.begin("reduce", lane.place, lane.grads.full_nbytes) if observer.on else None
                lane.grads.start_reduce(self._factor, lane.place)
                if record is not None:
                    observer.end(record)
        self.issued.append(unit.index)
        self._under_way.append(unit)
        if not self._overlap:
            self._finish_earlier()

    def _finish_earlier(self, but: int = 0) -> None:
        """Finish what is under way, as far as it may be waited for: see Note [Patience]. The last `but` units go on to
        their last hop instead: see Note [Two hops]."""
        for unit in self._under_way if but else ():
            if not self._advances(unit):
                return
        if self._holds:
            return
        while len(self._under_way) > but and (self._waits or self._in_time(self._under_way[0])):
            self._finish(self._under_way[0])

    def _finish_legs(self) -> None:
        """Every rank has issued what it will: see Note [Legs]."""
        self._holds = False
        moves = [lane.grads for unit in self._under_way for lane in unit.lanes if lane.grads is not None]
        for grads in moves:
            grads.next_leg(last_hop=True)
        for _ in range(LEGS):
            for grads in moves:
                grads.next_leg()
        self._finish_earlier()

    def _advances(self, unit: Unit) -> bool:
        lanes = [lane.grads for lane in unit.lanes if lane.grads is not None]
        return all(grads.advance_reduce(self._patience_left) for grads in lanes)

    def _in_time(self, unit: Unit) -> bool:
        moves = [lane.grads for lane in unit.lanes if lane.grads is not None]
        if all(grads.reduced_within(self._patience_left) for grads in moves):
            return True
        if self._patience_left:
            if self._patience == self._full_patience:
                log.warning(
                    "The reduce of unit %r did not complete within %g s on rank %d: ranks take different paths in "
                    "backward, or the link is slow. From now on reduces are not waited for before backward ends, which "
                    "costs memory for gradients.",
                    unit.name, self._full_patience, self._axes.everyone.rank,
                )  # fmt: skip
            self._patience_left, self._patience = 0.0, SHORT_PATIENCE_SECONDS
        return False

    def _finish(self, unit: Unit) -> None:
        observer = self._observer
        for lane in unit.lanes:
            if lane.grads is not None:
                record = observer.begin("finish", lane.place, lane.grads.full_nbytes) if observer.on else None
                lane.grads.finish_reduce(lane.place.spread)
                if record is not None:
                    observer.end(record)
        self._under_way.remove(unit)
        for reduced in self._when_reduced:
            reduced(unit)
        self._put_away(unit)

    @property
    def told_count(self) -> int:
        return 1 + 2 * len(self._units) + len(self._slots) + self._ridden + OWN

    def needs_answer(self) -> bool:
        """Whether this rank cannot go on before it has heard what all told."""
        return any(needs() for needs in self._needs)

    def told(self) -> Told:
        """What ranks must agree on at the end: how far anyone got, what is left (of units that were reduced
        in this backward before, and of units that were not), and who has a gradient."""
        pending = [any(any(lane.grads.pending) for lane in unit.lanes if lane.grads) for unit in self._units]
        late = [left and unit.index in self.issued for left, unit in zip(pending, self._units)]
        fresh = [left and not again for left, again in zip(pending, late)]
        had = [slot in self.new or (slot in self._unreduced and _is_held(slot)) for slot in self._slots]
        now = [self._next, *map(int, (*late, *fresh, *had)), *self._ridden_by(NOW)]
        return Told(now, self._ridden_by(COMPARED), self._ridden_by(NEWS))

    def _reduce_rest(self, reached: int, late: Sequence[int], fresh: Sequence[int]) -> None:
        for position in range(self._next, reached):
            self._issue(self._units[self._order[position]])
        if self._holds:
            self._finish_legs()
        passed = set(self._order[:reached])
        if any(late):
            self._refuse_late(late)
        for unit in self._units:
            if late[unit.index] or (fresh[unit.index] and unit.index not in passed):
                self._issue(unit, left=True)
        self._finish_earlier()

    def _ridden_by(self, how: str) -> list[int]:
        riders = [rider for rider, _ in self._riders[how]]
        return [int(number) for rider in riders for number in (rider.told() if rider.tells is None else rider.tells)]

    def has_all(self, now: Sequence[int]) -> bool:
        """Whether everything that trains has a gradient on some rank, by these numbers."""
        begin = 1 + 2 * len(self._units)
        return all(had or not slot.trains for had, slot in zip(now[begin:], self._slots))

    def end(self, told: Told, foretold: bool) -> None:
        """Backward is over: reduce what is left, wait for everything, say who has a gradient. `told` is the
        largest of what each rank told. `foretold`: nobody has heard it yet, so nothing differs and there is no news."""
        self._waits = self.waits_for_step = True
        self._unreduced = set()
        count = len(self._units)
        begin = 1 + 2 * count
        reached, late, fresh = told.now[0], told.now[1 : 1 + count], told.now[1 + count : begin]
        had = told.now[begin : begin + len(self._slots)]
        if not foretold:
            self._tell(NEWS, told.news)
            self._tell(COMPARED, told.compared)
        self._tell(NOW, told.now[begin + len(self._slots) :])
        self._reduce_rest(reached, late, fresh)
        for unit in self._units:
            for lane in unit.lanes:
                if lane.grads is not None:
                    lane.grads.settle()
        for slot, anyone in zip(self._slots, had):
            if anyone and slot.lane.grads is not None:
                slot.lane.grads.mark_held(slot.index)
                self.had.append(slot)
        self._end_sums()

    def _end_sums(self) -> None:
        """Who has a gradient is known, and every sum is whole: what nobody has goes, and what was still to be gathered
        is put away."""
        for unit in self._units:
            lanes = [lane for lane in unit.lanes if lane.grads is not None]
            for lane in lanes:
                lane.grads.drop_unused()  # type: ignore[union-attr]  # see above
            if any(lane.spec.spreads for lane in lanes):
                self._put_away(unit)

    def _tell(self, how: str, told: Sequence[int]) -> None:
        """Hands each extension its numbers."""
        begin = 0
        for rider, count in self._riders[how]:
            rider.heard(told[begin : begin + count])
            begin += count

    def hear_late(self, told: Told) -> None:
        """What was told at the end of the backward before, and nobody has waited for."""
        self._tell(NEWS, told.news)
        pairs = zip(told.compared[::2], told.compared[1::2])
        if any(most != -least for most, least in pairs):
            self._tell(COMPARED, told.compared)
            for rider, _ in self._riders[COMPARED]:
                rider.end_backward()

    def _refuse_late(self, late: Sequence[int]) -> None:
        """A unit's gradients came again after they were reduced; where they are used up by then that is too late."""
        for unit in self._units:
            states = [lane.grads.state for lane in unit.lanes if lane.grads is not None]
            if late[unit.index] and State.RELEASED in states:
                raise RuntimeError(
                    f"Gradients of unit {unit.name!r} came in two parts in one backward (checkpointing with "
                    "use_reentrant=True over a unit that is used twice?), and release=True has used up the first; use "
                    "use_reentrant=False, or leave release= out."
                )

    def under_way(self) -> str:
        """For the label of what is waited for meanwhile: a rank that is missing is missing here too."""
        return f" (with the reduce of unit {self._under_way[0].name!r} under way)" if self._under_way else ""

    def abandon(self) -> None:
        """Backward raised half-way."""
        self._under_way.clear()
        self._unreduced = set()
        for unit in self._units:
            for lane in unit.lanes:
                if lane.grads is not None:
                    lane.grads.abandon()

    def end_unreduced(self) -> None:
        """The same inside no_sync: nothing travels; this rank's own gradients are there."""
        for slot in self.new:
            assert slot.lane.grads is not None
            slot.lane.grads.mark_held(slot.index)
        self._unreduced |= self.new


def _is_held(slot: Slot) -> bool:
    return slot.lane.grads is not None and slot.lane.grads.has[slot.index]
