"""Backward, as the engine sees it: units are gathered again, gradients collected, reduced, and units freed.

Its events come from tensor and parameter hooks (hooks.py); its end is a callback of autograd's. What is
reduced when is the reducer's business (reduces.py).
"""

from __future__ import annotations

import contextlib
import functools
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from zeor.memory.param import take_grad
from zeor.step import events
from zeor.step import order as orders
from zeor.step import schedule as sched
from zeor.step.events import Announcer
from zeor.step.extension import Extension, overriding
from zeor.step.norms import Norms
from zeor.step.order import Walk
from zeor.step.passes import Borrowed, Passes, inside_backward
from zeor.step.reduces import Reducer
from zeor.step.residency import BACKWARD_END, BACKWARD_EXIT
from zeor.step.schedule import Action
from zeor.step.settling import Told
from zeor.step.unit import Slot, Unit


class Backward:
    """`plain`: parameters are the user's own and no module is hooked, so there is no forward to see."""

    def __init__(
        self, passes: Passes, reducer: Reducer, norms: Norms, announcer: Announcer, borrowed: Borrowed, plain: bool
    ):
        self._passes, self._reducer, self._norms, self._announcer = passes, reducer, norms, announcer
        self._borrowed, self._plain = borrowed, plain
        self._coords = passes.axes.tensor_coords  # along mesh dimensions that are not ours
        self.sync = True  # False inside no_sync
        self.accumulates = False  # inside zeor.accumulate: another backward of this step follows
        self.walk: Walk | None = None
        self._end: weakref.ref[Callable[[], None]] | None = None  # the callback autograd holds while a backward runs
        self._sync = True  # the one that runs reduces
        self._ranks = passes.axes.everyone.size  # that computed when gradients were last summed
        self.extend(())
        self._demanded: list[Unit] = []  # by autograd itself, in this backward: see Note [What autograd saves]
        self._left: set[int] = set()  # units that this backward has put away
        self._kind = orders.TRAIN  # of the forward whose schedule it follows
        self._order = orders.BACKWARD  # the kind of its own order
        self._divisor = 1.0  # of the new gradients, beside the number of ranks
        self._spans = False  # it is not one call of autograd's engine

    def extend(self, extensions: Sequence[Extension]) -> None:
        self._checks = overriding(extensions, "check_backward")
        self._says, self._begins = overriding(extensions, "says"), overriding(extensions, "begin_backward")
        self._begun, self._saw = overriding(extensions, "grads_begun"), overriding(extensions, "saw_input")
        self._factors, self._there = overriding(extensions, "factor"), overriding(extensions, "grads_there")
        self._ends, self._abandon = overriding(extensions, "end_backward"), overriding(extensions, "abandon")

    @property
    def running(self) -> bool:
        return self._end is not None and self._end() is not None

    def enter(self, unit: Unit) -> None:
        """The gradient of a unit's output arrived, or its forward is computed again inside backward."""
        self.begin()
        passes, walk = self._passes, self.walk
        assert walk is not None
        if 0 in passes.used and 0 not in walk.entered and not unit.is_root:
            self.enter(passes.units[0])  # the root's output may be this very unit's: the root comes first
        if unit.is_root and 0 in walk.entered:
            return
        walk.entered.append(unit.index)
        actions = passes.schedule_of(self._kind).at(sched.BACKWARD_ENTER, unit.index)
        passes.do(actions or (Action("wait", unit.index),), walk)
        if passes.observer.on:
            passes.observer.enter("backward", unit.place)

    def demand(self, unit: Unit) -> None:
        """Autograd, or a hook, reads a parameter of a unit that is away: see Note [What autograd saves] in saved.py.
        The units demanded before are left, as far as nothing else of them is open; one that is needed again after
        that stays from the next time on."""
        if not inside_backward():
            raise RuntimeError(
                f"A tensor that autograd saved of unit {unit.name!r} was read outside a backward, where ranks do not "
                "gather parameters; read it inside `with zeor.full_params(model):`, or in a backward."
            )
        self.begin()
        if not unit.present:
            if unit.index in self._left:
                self._passes.residents.again.add(unit.index)
            for other in self._demanded:
                self._leave(other)
            self._demanded = [other for other in self._demanded if other.present and other is not unit]
            self._demanded.append(unit)
            self.enter(unit)
        unit.wait()

    def begin(self) -> None:
        """Once per backward, from its first event. The end is queued here too: see hooks.py."""
        if not self.running:
            end = functools.partial(self.end)
            self._start(end)
            torch.autograd.Variable._execution_engine.queue_callback(end)

    @contextlib.contextmanager
    def spanning(self, sync: bool, divisor: float = 1.0, kind: str = orders.TRAIN, order: str = "") -> Iterator[None]:
        """One backward that is several calls of autograd's engine, or none: what a pipeline does with one micro-batch.
        `sync`: what it brings, or what earlier ones have left, is reduced, and divided by `divisor` as well as by the
        number of ranks. `kind`: of the forward it belongs to. `order`: the kind of order its units are gathered in."""
        end = functools.partial(self.end)
        before, self.sync = self.sync, sync
        self._divisor, self._kind, self._order, self._spans = divisor, kind, order or orders.BACKWARD, True
        try:
            self._start(end)
            yield
            self.end()
        finally:
            self._end = None  # where this raised, the next event recovers
            self.sync = before
            self._divisor, self._kind, self._order, self._spans = 1.0, orders.TRAIN, orders.BACKWARD, False

    def reduce(self, divisor: float) -> None:
        """Reduce what earlier backwards have left unreduced, without a backward of autograd's. Nothing is gathered."""
        with self._passes.gathers.pausing(), self.spanning(sync=True, divisor=divisor):
            pass

    def add(self, slot: Slot, grad: Tensor) -> None:
        """What another rank at this place of the mesh has left unreduced of a parameter, beside what is here."""
        with self._passes.gathers.pausing(), self.spanning(sync=False):
            self._take_part(slot, grad)

    def _start(self, end: Callable[[], None]) -> None:
        """A backward runs for as long as `end` lives."""
        self._borrowed.refuse("backward() was called")
        self.recover()
        self._passes.observer.look()
        for check in self._checks:
            check()
        said: dict[str, Any] = {}
        for says in self._says:
            said |= says()
        for begin in self._begins:
            begin(said)
        self._announce(said)
        self._end = weakref.ref(end)
        self._open(self.sync)

    def _announce(self, said: dict[str, Any]) -> None:
        announcer, passes = self._announcer, self._passes
        if announcer.left and passes.forward_walk is not None and passes.gathers.frees:
            raise RuntimeError(
                "A backward ran inside the model's forward in zeor.join after another rank had run out of data, and a "
                "rank that only follows cannot know when; give all ranks equally many batches, or use stage 2."
            )
        event = events.BACKWARD if self.sync else events.BACKWARD_KEPT
        announcer.announce(event, said, self.sync or passes.gathers.frees)

    def _open(self, sync: bool) -> None:
        """The part of the beginning that a rank which only plays has as well."""
        passes, announcer = self._passes, self._announcer
        self._sync = sync
        self._demanded, self._left = [], set()
        left, playing = bool(announcer.left), announcer.playing
        order = passes.gathers.freed(passes.orders[self._order], passes.residents.kept)
        keep_skipped = self._order not in passes.orders.learned and not playing
        announces = left and not playing and (sync or passes.gathers.frees)
        before_ask = functools.partial(announcer.announce, events.AGREEMENT) if announces else None
        told_count = self._reducer.told_count if sync else 0
        self.walk = Walk(passes.gathers, order, keep_skipped, told_count, before_ask)
        # A rank that plays does not keep step with those that compute: nothing may be waited for.
        factor = self._factor() / self._divisor
        self._reducer.begin(passes.orders[orders.REDUCE], passes.diverged or left, factor)
        self._norms.forget_all()
        for unit in passes.units:  # what the user still has is added to, the rest is forgotten
            for lane in unit.lanes:
                if lane.grads is not None:
                    plain = [slot.param.grad is not None for slot in unit.members(lane)] if self._plain else None
                    lane.grads.begin(plain)
        for begun in self._begun:
            begun()

    def _factor(self) -> float:
        """By what new gradients are multiplied as ranks add them up. What no_sync has summed before is brought in line
        where other ranks were there then."""
        for factor in self._factors:
            wanted = factor()
            if wanted is not None:
                return float(wanted)
        if self._passes.plan.reduction != "mean":
            return 1.0
        ranks = self._announcer.active
        if ranks != self._ranks:
            for grads in (lane.grads for unit in self._passes.units for lane in unit.lanes):
                if grads is not None:
                    grads.rescale_unreduced(ranks / self._ranks)
            self._ranks = ranks
        return 1.0 / ranks

    @torch.no_grad()
    def play(self, sync: bool, said: dict[str, Any]) -> None:
        """Every collective of a backward, without computing: see Note [Joining] in join.py."""
        self.recover()
        for begin in self._begins:
            begin(said)
        self._open(sync)
        self._pass_by_all()
        if not (sync or self._passes.gathers.frees):
            self.end()  # there is nothing to agree on

    def _pass_by_all(self) -> None:
        """This rank needs nothing more of this round, and has nothing to reduce but zeros."""
        passes = self._passes
        assert self.walk is not None
        if self._sync and orders.BACKWARD in passes.orders.learned:
            # In the order of those that compute, so that they need not hold many gradients until the end.
            for unit in range(len(passes.units)) if self._plain else passes.orders[orders.BACKWARD]:
                self.walk.pass_by(unit)
                if not passes.units[unit].is_root:
                    self._reducer.pass_by(unit)
        self.walk.pass_by_all()

    @torch.no_grad()
    def play_agreement(self) -> None:
        """Those that compute come to an exchange of a backward that is being played: at its end, or where one of them
        needs another round."""
        assert self.walk is not None
        told = self._told()
        heard = self.walk.agree(self._passes.settling.tells(told) if told is not None else ())
        if heard is not None:
            self._close(*self._hear(told, heard))
        else:
            self.walk.pass_by_all()

    def _told(self) -> Told | None:
        """What this rank tells at the end of a backward that reduces. The last one may still be to be looked at."""
        if not self._sync:
            return None
        late = self._passes.settling.look_back()
        if late is not None:
            self._reducer.hear_late(late)
        return self._reducer.told()

    def _hear(self, told: Told | None, numbers: list[int]) -> tuple[Told | None, bool]:
        """The answer, and whether what differs in it is heard later."""
        if told is None:
            return None, False
        settling = self._passes.settling
        heard = settling.heard(told, numbers, self._reducer.has_all)
        if self._announcer.block is not None:
            settling.unsettle()  # ranks that only follow tell other numbers
        return heard

    @torch.no_grad()
    def collect(self, slot: Slot) -> None:
        """Autograd has accumulated a parameter's gradient: take it."""
        self.begin()
        grad = take_grad(slot.param)
        if grad is not None:
            self.take(slot, grad)

    @torch.no_grad()
    def take(self, slot: Slot, grad: Tensor) -> None:
        """A parameter's new gradient, from whoever computed it inside this backward."""
        grads = slot.lane.grads
        if grads is None:
            return
        if self._plain:
            for saw in self._saw:
                saw(grad)
        grad = grad.detach()
        placed = self._coords or slot.placed is not None
        self._take_part(slot, slot.part_of(grad, self._coords) if placed else grad)

    def _take_part(self, slot: Slot, grad: Tensor) -> None:
        """What this rank adds to a gradient."""
        grads = slot.lane.grads
        assert grads is not None
        complete = grads.collect(slot.index, grad, self.sync)
        self._reducer.new.add(slot)
        unit = slot.unit
        if complete and all(lane.grads is None or lane.grads.complete for lane in unit.lanes):
            unit.endless_calls = 0
            if self.sync:
                self._ready(unit)
            self._leave(unit)

    def _ready(self, unit: Unit) -> None:
        if not unit.is_root:  # the root's gradients may still grow until the end
            plain, used = self._plain, self._passes.used
            self._reducer.ready(unit, lambda index: plain or index in used)

    @torch.no_grad()
    def exit(self, unit: Unit) -> None:
        """The gradients of a call's inputs are there."""
        if self._passes.observer.on:
            self._passes.observer.leave("backward", unit.place)
        if self.sync and any(lane.grads is not None and any(lane.grads.pending) for lane in unit.lanes):
            self._ready(unit)
        self._leave(unit)

    def _leave(self, unit: Unit) -> None:
        """Free it, unless part of the unit's backward is still to come."""
        if unit.present and self._passes.free(unit, BACKWARD_EXIT):
            self._left.add(unit.index)

    @torch.no_grad()
    def end(self) -> None:
        assert self.walk is not None
        if self._passes.observer.on:
            self._passes.observer.close("backward")
        settling, told = self._passes.settling, self._told()
        if settling.settled and (told is None or (not self._reducer.needs_answer() and settling.foretell(told))):
            self.walk.pass_by_all()
            if told is None and self._passes.gathers.frees:
                settling.note_pass(orders.BACKWARD)
            self._close(told, foretold=True)
        else:
            self._close(*self._hear(told, self.walk.finish(() if told is None else settling.tells(told))))

    def _close(self, told: Told | None, foretold: bool = False) -> None:
        """Nobody gathers any more; `told` is the largest of what each rank told, None where nothing is reduced."""
        walk, self.walk = self.walk, None
        self._end = None
        assert walk is not None
        passes, reducer = self._passes, self._reducer
        passes.residents.last = None
        self._demanded = []
        for unit in passes.units:
            unit.open_calls = unit.endless_calls = unit.hooked_calls = 0
            if unit.present:
                passes.free(unit, BACKWARD_END)
        passes.ledger.sweep()
        if told is not None:
            reducer.end(told, foretold)
        else:
            reducer.end_unreduced()
        for there in self._there:
            there()
        self._learn(walk, reduced=told is not None)
        for ended in self._ends if told is not None else ():
            ended()
        if passes.observer.on:
            passes.observer.count()
        if not self._announcer.playing:  # the ranks that compute announce what the user's hooks do
            for slot in reducer.had:
                slot.grad_is_there()

    def _learn(self, walk: Walk, reduced: bool) -> None:
        """The orders that this backward showed: one that reduces, or a pipeline's, unless that gathers nothing."""
        passes, issued = self._passes, self._reducer.issued
        if passes.gathers.paused or not (reduced or self._spans):
            return
        if self._order in passes.orders.learned or not (issued or (self._spans and passes.gathers.frees)):
            passes.extend(self._order, walk.extra)
            return
        found: dict[str, Sequence[int]] = {self._order: walk.entered}
        if issued:
            first = [0] if passes.units[0].is_root else []
            found[orders.REDUCE] = [*(unit for unit in issued if unit not in first), *first]
        passes.learn(found)

    def recover(self) -> None:
        """Before anything new: if the last backward raised, forget it. See Note [After an exception]."""
        if self.walk is None or self.running:
            return
        self._passes.observer.close("backward")
        if self._announcer.block is not None and not self._passes.axes.everyone.stuck:
            # Nobody may wait for this rank: see Note [Joining] in join.py.
            with torch.no_grad():
                self._pass_by_all()
                self.end()
        self.walk = self._end = None
        self._passes.put_back()
        for unit in self._passes.units:
            unit.open_calls = unit.endless_calls = unit.hooked_calls = 0
        self.abandon()
        warnings.warn("zeor: a backward raised an exception, so all gradients were set to None.", stacklevel=2)

    def abandon(self) -> None:
        """All gradients are gone: what there is now cannot be told from what was there."""
        self._reducer.abandon()
        self._norms.forget_all()
        for abandon in self._abandon:
            abandon()
