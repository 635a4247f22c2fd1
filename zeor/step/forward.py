"""Forward, as the engine sees it: units are entered and left, along the agreed order of their kind of pass."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from zeor.step import events
from zeor.step import order as orders
from zeor.step import schedule as sched
from zeor.step.casts import explain_dtypes
from zeor.step.events import Announcer
from zeor.step.extension import Extension, overriding
from zeor.step.order import Walk
from zeor.step.passes import Passes
from zeor.step.residency import FORWARD_END
from zeor.step.schedule import Action
from zeor.step.unit import Unit


class Forward:
    def __init__(self, passes: Passes, announcer: Announcer, recover_backward: Callable[[], None]):
        self._passes, self._announcer, self._recover_backward = passes, announcer, recover_backward
        self.extend(())
        self._train, self._kind = True, orders.TRAIN
        self._order: list[int] = []

    def extend(self, extensions: Sequence[Extension]) -> None:
        self._meet, self._begins = overriding(extensions, "meets"), overriding(extensions, "begin_forward")
        self._saw = overriding(extensions, "saw_input")

    def saw_input(self, value: Any) -> None:
        """What a training forward of the model is given."""
        for saw in self._saw:
            saw(value)

    @property
    def walk(self) -> Walk | None:
        return self._passes.forward_walk

    @property
    def _schedule(self) -> sched.Schedule:
        return self._passes.schedule_of(self._kind)

    def enter(self, unit: Unit, train: bool, entry: str = "") -> None:
        """`entry`: where the root is entered by a method beside forward, its name."""
        passes = self._passes
        self._announcer.check_here("A forward was called")
        if unit.is_root:
            self._begin(train, entry)
        elif self.walk is None and not passes.residents.open:  # outside the model's forward: every rank does the same
            if unit.frees or self._meets(train, alone=True):
                self._announcer.announce(events.OTHER, f"Unit {unit.name!r}, outside the model's forward,")
            for begin in self._begins:
                begin(train, True)
        passes.residents.open.append(unit)
        walk = self.walk
        if walk is not None:
            if unit.index in walk.entered and not unit.present:
                passes.residents.repeated.add(unit.index)  # from the next step on it stays for the rest of the pass
            walk.entered.append(unit.index)
        passes.used.add(unit.index)
        unit.check_places()
        passes.do(self._schedule.at(sched.FORWARD_ENTER, unit.index) or (Action("wait", unit.index),), walk)
        if passes.observer.on:
            passes.observer.enter("forward", unit.place)

    def _begin(self, train: bool, entry: str) -> None:
        self.recover()
        self._recover_backward()
        self._passes.observer.look()
        if self._passes.observer.on:
            self._passes.observer.count()
        self._announce(train, entry)
        for begin in self._begins:
            begin(train, False)
        self._train, self._kind = train, orders.kind_of(train, entry)
        agreed = self._passes.orders
        self._order = agreed[self._kind]
        keep_skipped = self._kind not in agreed.learned and not self._announcer.playing
        self._passes.forward_walk = self._passes.gathers.forward_walk(self._order, keep_skipped)

    def _meets(self, train: bool, alone: bool) -> bool:
        return any(meets(train, alone) for meets in self._meet)

    def _announce(self, train: bool, entry: str) -> None:
        """An evaluation where nothing is gathered is no event: each rank may run its own."""
        announcer, frees = self._announcer, self._passes.gathers.frees
        meets = frees or self._meets(train, alone=False)
        if entry:
            announcer.announce(events.ENTRY, {"train": train, "entry": entry}, meets)
        elif train or frees:
            announcer.announce(events.TRAIN if train else events.EVAL, meets=meets)

    def play(self, train: bool, entry: str) -> None:
        """Every collective of a forward, without computing: see Note [Joining] in join.py."""
        self._begin(train, entry)
        self._end()

    def exit(self, unit: Unit) -> None:
        passes = self._passes
        if passes.observer.on:
            passes.observer.leave("forward", unit.place)
        if unit in passes.residents.open:
            passes.residents.open.remove(unit)
        if self._schedule.expects(sched.FORWARD_EXIT, unit.index):
            passes.do(self._schedule.at(sched.FORWARD_EXIT, unit.index))
        else:
            passes.free(unit)  # it is in no order yet
        if unit.is_root:
            self._end()
        elif self.walk is None and not passes.residents.open:
            passes.free_lone()

    def _end(self) -> None:
        walk, passes = self.walk, self._passes
        passes.forward_walk = None
        if walk is None:
            return
        learned = self._kind in passes.orders.learned
        passes.diverged |= passes.gathers.end_forward(walk, self._kind, learned, self._announcer.playing)
        if not learned:
            # Where nothing is gathered an evaluation has no order to agree on, and one rank may run it alone.
            if self._train or passes.gathers.frees:
                passes.learn({self._kind: walk.entered})
        else:
            passes.extend(self._kind, walk.extra)
        passes.residents.last = self._schedule.stays if self._train else None
        for unit in passes.units:  # kept, or gathered ahead, in case it was entered
            if unit.present and passes.residents.may_free(unit, FORWARD_END):
                unit.free()
        if not self._train:
            passes.free(passes.units[0])
        passes.ledger.sweep()

    def recover(self) -> None:
        """The model's forward is not running; if it seems so, it raised. See Note [After an exception]."""
        if self.walk is not None:
            explain_dtypes(sys.exc_info()[1], self._passes.plan.precision.compute)
            self._passes.observer.close("forward")
        if self.walk is not None and not self._passes.axes.everyone.stuck:  # else what is under way never arrives
            if self._announcer.block is not None:
                self._end()  # nobody may wait for this rank: see Note [Joining] in join.py
            self._passes.forward_walk = None
            self._passes.put_back()
