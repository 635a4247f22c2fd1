"""The engine: carries out the schedule for one sharded model.

Hooks tell it what the user's loop just did (an event on a unit); it looks the event up in the
schedule and does the actions. It also keeps what a step needs to know: the walk of the current pass,
the reducer, the norms. Optimizers are told apart in optim/; hooks live in hooks.py.

Note [Streams]
~~~~~~~~~~~~~~
Collectives are issued from the compute stream with async_op: the backend's own stream first waits for
what the compute stream has queued (writer of the slice -> gather, writer of the gradient -> reduce), and
`Move.wait()` makes the compute stream wait for it (gather -> forward, reduce -> sum). Buffers are
allocated and freed on the compute stream, after such a wait, so a freed buffer has no reader left.

Note [After an exception]
~~~~~~~~~~~~~~~~~~~~~~~~~
A forward or backward that raised (out of memory, say, and the user goes on with the next batch) leaves units
in their modules and a walk half done. It must have raised on every rank at the same place: then every rank
has issued the same collectives and all that is left is to put things back. A failed forward is seen by a
hook that always runs; a failed backward by the death of its end callback, which autograd drops unrun. The
gradients of a failed backward are gone, and those it would have been added to.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import nn

from zeor.comm.mesh import Mesh
from zeor.memory.buffers import Ledger
from zeor.memory.roles import STAGES
from zeor.plan import Plan
from zeor.runtime import order as orders
from zeor.runtime import schedule as sched
from zeor.runtime.first_batch import FirstBatch
from zeor.runtime.gathers import Gathers
from zeor.runtime.lane import Lane, LaneKey
from zeor.runtime.norms import Norms
from zeor.runtime.order import Orders, Walk
from zeor.runtime.reduces import Reducer
from zeor.runtime.schedule import Action, Schedule, Traits
from zeor.runtime.unit import Slot, Unit


class Engine:
    def __init__(self, plan: Plan, mesh: Mesh, plain: bool = False):
        self.plan, self.mesh = plan, mesh
        self.plain = plain  # drop-in: parameters are the user's plain tensors and no module is hooked
        self.column = STAGES[plan.stage]
        self.ledger = Ledger()
        self.norms = Norms(mesh)
        self.units: list[Unit] = []
        self.slots: list[Slot] = []
        self.sync = True  # False inside no_sync
        self.writing = False  # inside load_state_dict or full_params(write=True)
        self.trace: list[Action] | None = None
        self.first_batch = FirstBatch(mesh)
        self._end: weakref.ref | None = None  # the callback autograd holds while a backward runs
        self._open: list[Unit] = []  # units whose forward is running
        self._forward: Walk | None = None
        self._backward: Walk | None = None
        self._used: set[int] = set()  # units entered since the last step
        self._repeated: set[int] = set()  # units a pass enters more than once
        self._train = True
        self._stay: set[int] = set()  # units that must not be freed before the next step (create_graph)
        self._diverged = False  # ranks have taken different paths in a forward since the last step

    # ---- building

    def add_unit(self, name: str, module: nn.Module | None, slots: Sequence[Slot], key: Callable) -> Unit:
        """Pack parameters into lanes by key. The user's objects are not touched yet."""
        unit = Unit(len(self.units), name, module, slots)
        unit.is_root = unit.index == 0 and not self.plain
        by_key: dict[LaneKey, list[Slot]] = defaultdict(list)
        for slot in slots:
            by_key[key(slot)].append(slot)
        for lane_key, members in by_key.items():
            lane = Lane(lane_key, [slot.user for slot in members], self.column, self.mesh, self.ledger)
            for index, slot in enumerate(members):
                slot.settle(unit, lane, index)
            unit.lanes.append(lane)
        unit.free()  # at once: a model that only fits as slices must not pile up while it is packed
        self.units.append(unit)
        self.slots.extend(slots)
        return unit

    def ready(self) -> None:
        """All units are there: plan the step."""
        self.norms.watch(self.slots)
        self._orders = Orders(self.mesh, len(self.units))
        factor = 1.0 / self.mesh.world if self.plan.reduction == "mean" else 1.0
        self.reducer = Reducer(self.mesh, self.units, factor, self.plan.overlap, self.record)
        self.gathers = Gathers(self.mesh, self.units, self.plan.overlap, self.record, self.reducer.under_way)
        self._plan_step()
        self.ledger.reset_peak()

    def _plan_step(self) -> None:
        traits = tuple(
            Traits(u.name, u.frees, any(lane.grads for lane in u.lanes), u.publishes and self.mesh.world > 1)
            for u in self.units
        )
        overlap = self.plan.overlap
        prefetch = self.plan.prefetch if overlap else 0
        train, backward = self._orders[orders.TRAIN], self._orders[orders.BACKWARD]
        self.schedule = Schedule(traits, tuple(train), tuple(backward), prefetch, overlap)
        evaluation = self._orders[orders.EVAL]
        self._eval_schedule = Schedule(traits, tuple(evaluation), (), prefetch, overlap)

    # ---- actions

    def record(self, verb: str, unit: int) -> None:
        if self.trace is not None:
            self.trace.append(Action(verb, unit))

    def _do(self, actions: Sequence[Action], walk: Walk | None) -> None:
        for action in actions:
            unit = self.units[action.unit]
            if action.verb == "gather":
                self.gathers.ahead(unit, walk)
            elif action.verb == "wait":
                self.gathers.arrive(unit, walk)
            elif action.verb == "swap_in":
                self.record("swap_in", unit.index)
                unit.swap_in()
            elif action.verb == "swap_out":
                self.record("swap_out", unit.index)
                unit.swap_out()
            elif action.verb == "free":
                self._free(unit)

    def _free(self, unit: Unit) -> None:
        if unit.frees and unit.index not in self._stay and unit.index not in self._repeated:
            self.record("free", unit.index)
            unit.free()

    # ---- forward

    def forward_enter(self, unit: Unit, train: bool) -> None:
        if unit.is_root:
            self._begin_forward(train)
        self._open.append(unit)
        walk = self._forward
        if walk is not None:
            if unit.index in walk.entered and not unit.present:
                self._repeated.add(unit.index)  # from the next step on it stays for the rest of the pass
            walk.entered.append(unit.index)
        self._used.add(unit.index)
        plan = self.schedule if self._train else self._eval_schedule
        actions = plan.at(sched.FORWARD_ENTER, unit.index)
        self._do(actions or (Action("wait", unit.index), Action("swap_in", unit.index)), walk)

    def _begin_forward(self, train: bool) -> None:
        self.recover_forward()
        self.recover_backward()
        self._train = train
        kind = orders.TRAIN if train else orders.EVAL
        self._forward = self.gathers.forward_walk(self._orders[kind], kind not in self._orders.learned)

    def forward_exit(self, unit: Unit) -> None:
        if unit in self._open:
            self._open.remove(unit)
        plan = self.schedule if self._train else self._eval_schedule
        actions = plan.at(sched.FORWARD_EXIT, unit.index)
        self._do(actions or (Action("swap_out", unit.index), Action("free", unit.index)), None)
        if unit.is_root:
            self._end_forward()

    def _end_forward(self) -> None:
        walk, self._forward = self._forward, None
        if walk is None:
            return
        self._diverged |= self.gathers.end_forward(walk)
        kind = orders.TRAIN if self._train else orders.EVAL
        if kind not in self._orders.learned:
            self._orders.learn({kind: walk.entered})
            self._plan_step()
        elif self._orders.extend(kind, walk.extra):
            self._plan_step()
        keep = self._stay | self._repeated | ({0, self.schedule.stays} if self._train else {0})
        for unit in self.units:  # kept, or gathered ahead, in case it was entered
            if unit.frees and unit.present and unit.index not in keep:
                unit.free()
        if not self._train:
            self._free(self.units[0])

    # ---- backward

    def backward_enter(self, unit: Unit) -> None:
        """The gradient of a unit's output arrived, or its forward is computed again inside backward."""
        self.begin_backward()
        walk = self._backward
        assert walk is not None
        if 0 in self._used and 0 not in walk.entered and not unit.is_root:
            self.backward_enter(self.units[0])  # the root's output may be this very unit's: the root comes first
        if unit.is_root and 0 in walk.entered:
            return
        walk.entered.append(unit.index)
        actions = self.schedule.at(sched.BACKWARD_ENTER, unit.index)
        self._do(actions or (Action("wait", unit.index), Action("swap_in", unit.index)), walk)

    def begin_backward(self) -> None:
        """Once per backward, from its first event. The end is queued here too: see hooks.py."""
        if self._in_backward:
            return
        self.recover_backward()
        end = functools.partial(self.backward_end)
        self._end = weakref.ref(end)
        torch.autograd.Variable._execution_engine.queue_callback(end)
        order = self.gathers.freed(self._orders[orders.BACKWARD], kept=(0, self.schedule.stays))
        unlearned = orders.BACKWARD not in self._orders.learned
        self._backward = Walk(self.gathers, order, unlearned, self.reducer.told_count if self.sync else 0)
        self.reducer.begin(self._orders[orders.REDUCE], self._diverged)
        self.norms.forget_all()
        for unit in self.units:
            for lane in unit.lanes:
                if lane.grads is not None:
                    lane.grads.begin([slot.user.grad is not None for slot in unit.slots if slot.lane is lane])
        if self.plain:
            for slot in self.slots:
                slot.user.grad = None
        if torch.is_grad_enabled():
            # create_graph: a second backward will read these parameters again.
            self._stay.update(range(len(self.units)))

    @torch.no_grad()
    def collect(self, slot: Slot) -> None:
        """Autograd has accumulated a parameter's gradient: take it."""
        self.begin_backward()
        grad, slot.full.grad = slot.full.grad, None
        grads = slot.lane.grads
        if grad is None or grads is None:
            return
        if self.plain and not self.first_batch.done:
            self.first_batch.note(grad)
        grads.collect(slot.index, grad.detach(), self.sync, f"unit {slot.unit.name!r}")
        self.reducer.new.add(slot)
        unit = slot.unit
        if grads.complete and all(lane.grads is None or lane.grads.complete for lane in unit.lanes):
            unit.endless_calls = 0
            if self.sync:
                self._ready(unit)
            self._leave(unit)

    def _ready(self, unit: Unit) -> None:
        if not unit.is_root:  # the root's gradients may still grow until the end
            self.reducer.ready(unit, lambda index: self.plain or index in self._used)

    @torch.no_grad()
    def backward_exit(self, unit: Unit) -> None:
        """The gradients of a call's inputs are there."""
        if self.sync and any(lane.grads is not None and any(lane.grads.pending) for lane in unit.lanes):
            self._ready(unit)
        self._leave(unit)

    def _leave(self, unit: Unit) -> None:
        """Swap out and free, unless part of the unit's backward is still to come."""
        over = unit.open_calls == 0 and unit.endless_calls == 0 and unit not in self._open
        if not unit.is_root and over and unit.swapped:
            self.record("swap_out", unit.index)
            unit.swap_out()
            self._free(unit)

    @torch.no_grad()
    def backward_end(self) -> None:
        walk, self._backward = self._backward, None
        self._end = None
        assert walk is not None
        told = walk.finish(self.reducer.told() if self.sync else ())
        self._repeated_free()
        for unit in self.units:
            unit.open_calls = unit.endless_calls = unit.hooked_calls = 0
            if unit in self._open:
                continue  # this backward ran inside its forward (a force is the gradient of an energy)
            if unit.swapped or (unit.frees and unit.present):
                self.record("swap_out", unit.index)
                unit.swap_out()
                self._free(unit)
        if not self.sync:
            self.reducer.end_unreduced()
        else:
            self.reducer.end(told)
        if self.plain:
            self._attach_grads()
        if not self.sync:
            return
        if orders.BACKWARD not in self._orders.learned and self.reducer.issued:
            reduced = self.reducer.issued
            if self.units[0].is_root:
                reduced = [*(unit for unit in reduced if unit != 0), 0]
            self._orders.learn({orders.BACKWARD: walk.entered, orders.REDUCE: reduced})
            self._plan_step()
        elif self._orders.extend(orders.BACKWARD, walk.extra):
            self._plan_step()

    def _attach_grads(self) -> None:
        """Plain parameters get their sharded gradients where everybody looks for them."""
        self.first_batch.compare()
        for slot in self.slots:
            if slot.lane.grads is not None and slot.lane.grads.has[slot.index]:
                slot.user.grad = slot.grad_view()

    def heed_plain_grads(self) -> None:
        """Plain parameters do not tell when the user drops or replaces their gradient: look before it is used."""
        for slot in self.slots:
            if slot.user.grad is not slot.get_grad():
                slot.set_grad(slot.user.grad)

    def drop_grads(self) -> None:
        """Every gradient was set to None."""
        for slot in self.slots:
            if slot.lane.grads is not None:
                slot.lane.grads.drop(slot.index)
        self.norms.forget_all()

    def _repeated_free(self) -> None:
        for index in self._repeated - self._stay - {unit.index for unit in self._open}:
            self.units[index].free()

    # ---- after an exception, see the Note at the top

    @property
    def _in_backward(self) -> bool:
        return self._end is not None and self._end() is not None

    def recover_forward(self) -> None:
        """The model's forward is not running; if it seems so, it raised."""
        if self._forward is not None and not self.mesh.stuck:  # else what is under way never arrives
            self._forward = None
            self._put_back()

    def recover_backward(self) -> None:
        """Before anything new: if the last backward raised, forget it."""
        if self._backward is None or self._in_backward:
            return
        self._backward = self._end = None
        self._put_back()
        for unit in self.units:
            unit.open_calls = unit.endless_calls = unit.hooked_calls = 0
        self.reducer.abandon()
        self.norms.forget_all()
        warnings.warn("zeor: a backward raised an exception, so all gradients were set to None.", stacklevel=2)

    def _put_back(self) -> None:
        self._open.clear()
        for unit in self.units:
            unit.swap_out()
            if unit.frees and unit.index not in self._stay:
                unit.free()

    # ---- step

    def step_order(self) -> list[Unit]:
        """Units in the order they are updated: that of the next forward, then what it did not enter."""
        first = [0, *self._orders[orders.TRAIN]]
        return [self.units[i] for i in dict.fromkeys([*first, *range(len(self.units))])]

    def publish(self, unit: Unit) -> None:
        """A unit's master was updated: its compute follows, here at once, elsewhere by a gather."""
        self.record("update", unit.index)
        updated = [slot.full for slot in unit.slots if slot.lane.grads is not None]
        torch.autograd.graph.increment_version(updated)  # a graph made before this step is stale
        if unit.publishes and self.mesh.world > 1:
            self.record("publish", unit.index)
            for number, lane in enumerate(unit.lanes):
                if lane.grads is not None and not lane.frees:
                    lane.start_gather(f"publishing of unit {unit.name!r}, lane {number}")
                    if not self.plan.overlap:
                        lane.wait()

    def end_step(self) -> None:
        self._used.clear()
        self._stay.clear()
        self._diverged = False
        for unit in self.units:
            if unit.frees and not self._in_backward and self._forward is None:
                unit.free()

    def drain(self) -> None:
        """Wait for everything under way."""
        for unit in self.units:
            unit.wait()

    def nbytes(self) -> dict[str, int]:
        """Resident bytes on this rank by role, as allocated now (moments: see optim/)."""
        total: dict[str, int] = defaultdict(int)
        for unit in self.units:
            for lane in unit.lanes:
                for role, nbytes in lane.nbytes().items():
                    total[role] += nbytes
        return dict(total)
