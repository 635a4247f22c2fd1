"""Forward, as the engine sees it: units are entered and left, along the agreed order of their kind of pass."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zeor.runtime import order as orders
from zeor.runtime import schedule as sched
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
        self._train = True

    @property
    def _kind(self) -> str:
        return orders.TRAIN if self._train else orders.EVAL

    @property
    def _schedule(self) -> sched.Schedule:
        return self._passes.schedule if self._train else self._passes.eval_schedule

    def enter(self, unit: Unit, train: bool) -> None:
        passes = self._passes
        if unit.is_root:
            self._begin(train)
        passes.open.append(unit)
        walk = self.walk
        if walk is not None:
            if unit.index in walk.entered and not unit.present:
                passes.repeated.add(unit.index)  # from the next step on it stays for the rest of the pass
            walk.entered.append(unit.index)
        passes.used.add(unit.index)
        actions = self._schedule.at(sched.FORWARD_ENTER, unit.index)
        passes.do(actions or (Action("wait", unit.index), Action("swap_in", unit.index)), walk)

    def _begin(self, train: bool) -> None:
        self.recover()
        self._engine.backward.recover()
        self._train = train
        agreed = self._passes.orders
        self.walk = self._passes.gathers.forward_walk(agreed[self._kind], self._kind not in agreed.learned)

    def exit(self, unit: Unit) -> None:
        passes = self._passes
        if unit in passes.open:
            passes.open.remove(unit)
        actions = self._schedule.at(sched.FORWARD_EXIT, unit.index)
        passes.do(actions or (Action("swap_out", unit.index), Action("free", unit.index)), None)
        if unit.is_root:
            self._end()

    def _end(self) -> None:
        walk, self.walk, passes = self.walk, None, self._passes
        if walk is None:
            return
        passes.diverged |= passes.gathers.end_forward(walk)
        if self._kind not in passes.orders.learned:
            passes.learn({self._kind: walk.entered})
        else:
            passes.extend(self._kind, walk.extra)
        keep = passes.stay | passes.repeated | ({0, passes.schedule.stays} if self._train else {0})
        for unit in passes.units:  # kept, or gathered ahead, in case it was entered
            if unit.frees and unit.present and unit.index not in keep:
                unit.free()
        if not self._train:
            passes.free(passes.units[0])

    def recover(self) -> None:
        """The model's forward is not running; if it seems so, it raised. See Note [After an exception]."""
        if self.walk is not None and not self._engine.mesh.stuck:  # else what is under way never arrives
            self.walk = None
            self._passes.put_back()
