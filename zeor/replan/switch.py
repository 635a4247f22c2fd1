"""A model's objects, from one engine to another: taken off the old one, packed anew, and put back if anything fails.

Everything here changes pointers and makes new memory; the old engine keeps its own, untouched, until the new one is
complete. So undoing needs neither messages nor memory. What is undone is a stack: the last thing done goes first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from zeor.access.sharded import Sharded
from zeor.comm.axes import Axes
from zeor.features import fp8
from zeor.features.build import Builder
from zeor.features.compiling import check_options
from zeor.features.freezing import Freezing
from zeor.features.methods import add_methods, entries_of
from zeor.features.module_buffers import ModuleBuffers
from zeor.features.nonfinite import NonFinite
from zeor.features.recompute import find_wanted
from zeor.memory.param import hand_to
from zeor.model.discover import find_units
from zeor.model.wrapped import unwrapped
from zeor.optim.parts.checks import check_kind, check_moments
from zeor.plan import Plan
from zeor.planner.asked import Asked
from zeor.planner.disk_room import check_disk
from zeor.spec.keys import lane_key, small_numel
from zeor.step.engine import Engine
from zeor.step.hooks import Hooks
from zeor.step.unit import Slot


class Switch:
    """`undo` may be called at any time before `commit`."""

    def __init__(self, model: nn.Module, state: Sharded, plan: Plan, axes: Axes, asked: Asked):
        self._model, self._state, self._plan, self._axes, self._asked = model, state, plan, axes, asked
        self._old, self._old_hooks = state.engine, state.hooks
        self._old_linears = state.engine.find(fp8.Float8Linears)
        self._undo: list[Callable[[], None]] = []
        self._done: list[Callable[[], None]] = []
        self._linears: fp8.Float8Linears | None = None
        self.engine: Engine
        self.averages = sorted(state.averages, key=lambda average: average.number)

    # ---- off the old engine

    def take_off(self) -> None:
        """Parameters are plain ones without memory, and modules as they came."""
        old = self._old
        for unit in old.units:
            if unit.frees:
                unit.free()
            for lane in unit.lanes:
                lane.keep_writes()
        old.forget_gathered()
        self._undo.append(self._put_back)
        self._hook_dicts: dict[Slot, Any] = {}
        self._old_hooks.pause()
        if self._old_linears is not None:
            self._old_linears.mark(False)
        for slot in old.slots:
            slot.unbind(_nothing(slot))
            self._hook_dicts[slot] = slot.param._post_accumulate_grad_hooks
            slot.param._post_accumulate_grad_hooks = slot.after_grad or OrderedDict()

    def _put_back(self) -> None:
        old = self._old
        for slot in old.slots:
            slot.param.__class__ = slot.kind
            hand_to(slot.param, None)
            if slot in self._hook_dicts:
                slot.param._post_accumulate_grad_hooks = self._hook_dicts[slot]
            slot.bind_again()
        for unit in old.units:
            for lane in unit.lanes:
                lane.dress()
                lane.changed()
        if self._old_linears is not None:
            self._old_linears.mark(True)
        self._old_hooks.resume()
        old.observer.live = old.ledger.live

    # ---- onto a new one

    def describe(self) -> None:
        """What can be wrong with the plan itself; nothing is changed but classes of linears."""
        model, plan, size = self._model, self._plan, self._axes.everyone.size
        self.engine = Engine(plan, self._axes)
        find_wanted(model, plan.recompute)
        if plan.compile is not False:
            check_options(plan.compile)
        self._entries = entries_of(model, plan)
        self._units = self._asked.units and [unwrapped(unit) for unit in self._asked.units]
        self._linears = fp8.convert(model, plan, self._units, self._axes.device, size)
        if self._linears is not None:
            self._undo.append(self._linears.undo)
        self._specs = find_units(model, self._units, small_numel(plan, size))
        check_moments(plan, self._old.slots)
        for stepper in self._state.steppers:
            check_kind(stepper.optimizer, self._old.slots, self._axes, self.engine.table)

    def check_room(self) -> None:
        """On the disk, of all ranks together."""
        optimizers = [stepper.optimizer for stepper in self._state.steppers]
        check_disk(self._plan, self._axes, self.engine.places.store, self._old.slots, optimizers)

    def build(self) -> None:
        """Everything at rest, without values yet."""
        builder = Builder(self.engine, goes_on=True)
        self._pack(builder)
        builder.finish(self._model)
        self._carry_over()
        self._hook_up()
        for stepper in self._state.steppers:
            end = stepper.move(self.engine)
            self._undo.append(lambda end=end: end(False))  # type: ignore[misc]  # a default in a lambda
            self._done.append(lambda end=end: end(True))  # type: ignore[misc]
        for average in self.averages:
            self._undo.append(average.move(self.engine))

    def _pack(self, builder: Builder) -> None:
        engine, small = self.engine, small_numel(self._plan, self._axes.everyone.size)
        before = {id(slot.param): slot for slot in self._old.slots}
        sharing = self._axes.over(engine.table.cut("update")).size
        engine.places.expect(sum(param.numel() for spec in self._specs for _, param, _ in spec.params) // sharing)
        empty = self._old.unfilled
        engine.unfilled.buffers = list(empty.buffers)
        for spec in self._specs:
            slots = builder.slots(spec.params)
            engine.unfilled.slots |= dict.fromkeys(s for s in slots if before[id(s.param)] in empty.slots)
            like = {slot: _like(slot, before[id(slot.param)]) for slot in slots}
            key = lambda slot, like=like: lane_key(like[slot], slot.owners, self._plan.precision, small)
            engine.add_unit(spec.name, spec.module, slots, key, like.__getitem__)

    def _carry_over(self) -> None:
        """What features know and nobody else does."""
        old, new = self._old.find(ModuleBuffers), self.engine.find(ModuleBuffers)
        if old is not None and new is not None:
            new.go_on(old)
        self.engine.feature(NonFinite).go_on(self._old.feature(NonFinite))

    def _hook_up(self) -> None:
        engine, linears = self.engine, self._linears
        if linears is not None:
            linears.bind(self._model, engine.slots)
            engine.add_extension(linears)
        hooks = Hooks(engine.passes, engine.forward, engine.backward, engine.extensions, self._entries)
        add_methods(self._model, hooks, self._plan)
        self._undo.append(hooks.remove)
        engine.feature(Freezing).watch(hooks)
        self._hooks = hooks

    # ---- the end

    def commit(self) -> None:
        """The model is the new engine's."""
        state = self._state
        state.engine, state.hooks, state.asked = self.engine, self._hooks, self._asked
        if self._old_linears is not None:
            self._old_linears.end()
        for done in self._done:
            done()
        self._undo.clear()

    def undo(self) -> None:
        """The model is the old engine's, as it was."""
        while self._undo:
            self._undo.pop()()


def _nothing(slot: Slot) -> Tensor:
    """As the parameter was given, but for its values."""
    return torch.empty((), dtype=slot.dtype, device=slot.lane.axes.device).expand(slot.shape)


def _like(slot: Slot, before: Slot) -> Tensor:
    """What decides in which lane it lies. One that was frozen while it trained keeps its lane and its state."""
    trains = before.lane.grads is not None or slot.trains
    return torch.empty(slot.shape, dtype=slot.dtype, device="meta").requires_grad_(trains)
