"""Forward, as the engine sees it: units are entered and left, along the agreed order of their kind of pass."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from zeor.runtime import events
from zeor.runtime import order as orders
from zeor.runtime import schedule as sched
from zeor.runtime.casts import explain_dtypes
from zeor.runtime.order import Walk
from zeor.runtime.passes import Passes
from zeor.runtime.schedule import Action
from zeor.runtime.unit import Unit

if TYPE_CHECKING:
    from zeor.runtime.engine import Engine


class Forward:
    def __init__(self, engine: Engine, passes: Passes):
        self._engine, self._passes = engine, passes
        self.walk: Walk | None = None  # while the root's forward runs
        self._train, self._kind = True, orders.TRAIN
        self._order: list[int] = []

    @property
    def _schedule(self) -> sched.Schedule:
        return self._passes.schedule_of(self._kind)

    def enter(self, unit: Unit, train: bool, entry: str = "") -> None:
        """`entry`: where the root is entered by a method beside forward, its name."""
        self._engine.unfilled.check()
        passes = self._passes
        if unit.is_root:
            self._begin(train, entry)
        elif self.walk is None and not passes.open:  # called outside the model's forward: every rank does the same
            if unit.frees or (train and self._engine.freezing.settles):
                self._engine.announce(events.OTHER, f"Unit {unit.name!r}, outside the model's forward,")
            if train:
                self._engine.freezing.settle()
        passes.open.append(unit)
        walk = self.walk
        if walk is not None:
            if unit.index in walk.entered and not unit.present:
                passes.repeated.add(unit.index)  # from the next step on it stays for the rest of the pass
            walk.entered.append(unit.index)
        passes.used.add(unit.index)
        unit.check_places()
        passes.do(self._schedule.at(sched.FORWARD_ENTER, unit.index) or (Action("wait", unit.index),), walk)

    def _begin(self, train: bool, entry: str) -> None:
        self.recover()
        self._engine.backward.recover()
        self._announce(train, entry)
        if train:
            self._engine.first_batch.compare()
            self._engine.freezing.settle()
        self._train, self._kind = train, orders.kind_of(train, entry)
        agreed = self._passes.orders
        self._order = agreed[self._kind]
        keep_skipped = self._kind not in agreed.learned and not self._engine.playing
        self.walk = self._passes.gathers.forward_walk(self._order, keep_skipped)

    def _announce(self, train: bool, entry: str) -> None:
        """An evaluation where nothing is gathered is no event: each rank may run its own."""
        engine, frees = self._engine, self._passes.gathers.frees
        meets = frees or (train and (engine.freezing.settles or not engine.first_batch.done))
        if entry:
            engine.announce(events.ENTRY, {"train": train, "entry": entry}, meets)
        elif train or frees:
            engine.announce(events.TRAIN if train else events.EVAL, meets=meets)

    def play(self, train: bool, entry: str) -> None:
        """Every collective of a forward, without computing: see Note [Joining] in join.py."""
        self._begin(train, entry)
        self._end()

    def exit(self, unit: Unit) -> None:
        passes = self._passes
        if unit in passes.open:
            passes.open.remove(unit)
        passes.do(self._schedule.at(sched.FORWARD_EXIT, unit.index) or self._unplanned_exit(unit), None)
        if unit.is_root:
            self._end()
        elif self.walk is None and not passes.open:
            passes.stray.end_lone_call()

    def _unplanned_exit(self, unit: Unit) -> tuple[Action, ...]:
        """Of a unit that is in no order yet. The schedule's own list may be empty: a unit that stays."""
        planned = unit.index == 0 or unit.index in self._schedule.forward
        return () if planned else (Action("free", unit.index),)

    def _end(self) -> None:
        walk, self.walk, passes = self.walk, None, self._passes
        if walk is None:
            return
        passes.diverged |= passes.gathers.end_forward(walk, self._kind, self._engine.playing)
        if self._kind not in passes.orders.learned:
            # Where nothing is gathered an evaluation has no order to agree on, and one rank may run it alone.
            if self._train or passes.gathers.frees:
                passes.learn({self._kind: walk.entered})
        else:
            passes.extend(self._kind, walk.extra)
        passes.last = self._schedule.stays if self._train else None
        keep = {0, passes.last} | passes.repeated
        for unit in passes.units:  # kept, or gathered ahead, in case it was entered
            if unit.frees and unit.present and unit.index not in keep:
                unit.free()
        if not self._train:
            passes.free(passes.units[0])
        self._engine.ledger.sweep()

    def recover(self) -> None:
        """The model's forward is not running; if it seems so, it raised. See Note [After an exception]."""
        if self.walk is not None:
            explain_dtypes(sys.exc_info()[1], self._engine.plan.precision.compute)
        if self.walk is not None and not self._engine.mesh.stuck:  # else what is under way never arrives
            if self._engine.joining is not None:
                self._end()  # nobody may wait for this rank: see Note [Joining] in join.py
            self.walk = None
            self._passes.put_back()
