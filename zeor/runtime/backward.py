"""Backward, as the engine sees it: units are gathered again, gradients collected, reduced, and units freed.

Its events come from tensor and parameter hooks (hooks.py); its end is a callback of autograd's. What is
reduced when is the reducer's business (reduces.py).
"""

from __future__ import annotations

import functools
import warnings
import weakref
from typing import TYPE_CHECKING

import torch

from zeor.runtime import order as orders
from zeor.runtime import schedule as sched
from zeor.runtime.order import Walk
from zeor.runtime.passes import Passes
from zeor.runtime.reduces import Reducer
from zeor.runtime.schedule import Action
from zeor.runtime.unit import Slot, Unit

if TYPE_CHECKING:
    from zeor.runtime.engine import Engine


class Backward:
    def __init__(self, engine: Engine, passes: Passes, reducer: Reducer):
        self._engine, self._passes, self._reducer = engine, passes, reducer
        self._walk: Walk | None = None
        self._end: weakref.ref | None = None  # the callback autograd holds while a backward runs

    @property
    def running(self) -> bool:
        return self._end is not None and self._end() is not None

    def enter(self, unit: Unit) -> None:
        """The gradient of a unit's output arrived, or its forward is computed again inside backward."""
        self.begin()
        passes, walk = self._passes, self._walk
        assert walk is not None
        if 0 in passes.used and 0 not in walk.entered and not unit.is_root:
            self.enter(passes.units[0])  # the root's output may be this very unit's: the root comes first
        if unit.is_root and 0 in walk.entered:
            return
        walk.entered.append(unit.index)
        actions = passes.schedule.at(sched.BACKWARD_ENTER, unit.index)
        passes.do(actions or (Action("wait", unit.index), Action("swap_in", unit.index)), walk)

    def begin(self) -> None:
        """Once per backward, from its first event. The end is queued here too: see hooks.py."""
        if self.running:
            return
        self.recover()
        end = functools.partial(self.end)
        self._end = weakref.ref(end)
        torch.autograd.Variable._execution_engine.queue_callback(end)
        passes, engine = self._passes, self._engine
        order = passes.gathers.freed(passes.orders[orders.BACKWARD], kept=(0, passes.schedule.stays))
        unlearned = orders.BACKWARD not in passes.orders.learned
        self._walk = Walk(passes.gathers, order, unlearned, self._reducer.told_count if engine.sync else 0)
        self._reducer.begin(passes.orders[orders.REDUCE], passes.diverged)
        engine.norms.forget_all()
        engine.begin_grads()
        if torch.is_grad_enabled():
            # create_graph: a second backward will read these parameters again.
            passes.stay.update(range(len(passes.units)))

    @torch.no_grad()
    def collect(self, slot: Slot) -> None:
        """Autograd has accumulated a parameter's gradient: take it."""
        self.begin()
        engine = self._engine
        grad, slot.full.grad = slot.full.grad, None
        grads = slot.lane.grads
        if grad is None or grads is None:
            return
        if engine.plain and not engine.first_batch.done:
            engine.first_batch.note(grad)
        grads.collect(slot.index, grad.detach(), engine.sync, f"unit {slot.unit.name!r}")
        self._reducer.new.add(slot)
        unit = slot.unit
        if grads.complete and all(lane.grads is None or lane.grads.complete for lane in unit.lanes):
            unit.endless_calls = 0
            if engine.sync:
                self._ready(unit)
            self._leave(unit)

    def _ready(self, unit: Unit) -> None:
        if not unit.is_root:  # the root's gradients may still grow until the end
            plain, used = self._engine.plain, self._passes.used
            self._reducer.ready(unit, lambda index: plain or index in used)

    @torch.no_grad()
    def exit(self, unit: Unit) -> None:
        """The gradients of a call's inputs are there."""
        if self._engine.sync and any(lane.grads is not None and any(lane.grads.pending) for lane in unit.lanes):
            self._ready(unit)
        self._leave(unit)

    def _leave(self, unit: Unit) -> None:
        """Swap out and free, unless part of the unit's backward is still to come."""
        over = unit.open_calls == 0 and unit.endless_calls == 0 and unit not in self._passes.open
        if not unit.is_root and over and unit.swapped:
            self._put_away(unit)

    def _put_away(self, unit: Unit) -> None:
        self._passes.record("swap_out", unit.index)
        unit.swap_out()
        self._passes.free(unit)

    @torch.no_grad()
    def end(self) -> None:
        walk, self._walk = self._walk, None
        self._end = None
        assert walk is not None
        passes, reducer, sync = self._passes, self._reducer, self._engine.sync
        told = walk.finish(reducer.told() if sync else ())
        passes.free_repeated()
        for unit in passes.units:
            unit.open_calls = unit.endless_calls = unit.hooked_calls = 0
            if unit in passes.open:
                continue  # this backward ran inside its forward (a force is the gradient of an energy)
            if unit.swapped or (unit.frees and unit.present):
                self._put_away(unit)
        if sync:
            reducer.end(told)
        else:
            reducer.end_unreduced()
        if self._engine.plain:
            self._engine.attach_plain_grads()
        if sync:
            self._learn(walk)

    def _learn(self, walk: Walk) -> None:
        passes, reduced = self._passes, self._reducer.issued
        if orders.BACKWARD not in passes.orders.learned and reduced:
            if passes.units[0].is_root:
                reduced = [*(unit for unit in reduced if unit != 0), 0]
            passes.learn({orders.BACKWARD: walk.entered, orders.REDUCE: reduced})
        else:
            passes.extend(orders.BACKWARD, walk.extra)

    def recover(self) -> None:
        """Before anything new: if the last backward raised, forget it. See Note [After an exception]."""
        if self._walk is None or self.running:
            return
        self._walk = self._end = None
        self._passes.put_back()
        for unit in self._passes.units:
            unit.open_calls = unit.endless_calls = unit.hooked_calls = 0
        self._reducer.abandon()
        self._engine.norms.forget_all()
        warnings.warn("zeor: a backward raised an exception, so all gradients were set to None.", stacklevel=2)
