"""The engine: carries out the schedule for one sharded model.

It owns the units and what they share (mesh, ledger, norms). Hooks tell its passes (forward.py, backward.py)
what the user's loop just did; they look the event up in the schedule and do the actions. Optimizers are told
apart in optim/; hooks live in hooks.py.

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

from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import nn

from zeor.comm.mesh import Mesh
from zeor.memory.buffers import Ledger
from zeor.memory.roles import STAGES
from zeor.plan import Plan
from zeor.runtime import order as orders
from zeor.runtime.backward import Backward
from zeor.runtime.first_batch import FirstBatch
from zeor.runtime.forward import Forward
from zeor.runtime.lane import Lane, LaneKey
from zeor.runtime.norms import Norms
from zeor.runtime.passes import Passes
from zeor.runtime.reduces import Reducer
from zeor.runtime.schedule import Action, Schedule
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
        factor = 1.0 / self.mesh.world if self.plan.reduction == "mean" else 1.0
        self.reducer = Reducer(self.mesh, self.units, factor, self.plan.overlap, self.record)
        self.passes = Passes(self, self.reducer.under_way)
        self.forward = Forward(self, self.passes)
        self.backward = Backward(self, self.passes, self.reducer)
        self.ledger.reset_peak()

    @property
    def schedule(self) -> Schedule:
        return self.passes.schedule

    def record(self, verb: str, unit: int) -> None:
        if self.trace is not None:
            self.trace.append(Action(verb, unit))

    # ---- gradients

    def begin_grads(self) -> None:
        """A backward starts: what the user still has is added to, the rest is forgotten."""
        for unit in self.units:
            for lane in unit.lanes:
                if lane.grads is not None:
                    lane.grads.begin([slot.user.grad is not None for slot in unit.slots if slot.lane is lane])
        if self.plain:
            for slot in self.slots:
                slot.user.grad = None

    def attach_plain_grads(self) -> None:
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

    # ---- step

    def step_order(self) -> list[Unit]:
        """Units in the order they are updated: that of the next forward, then what it did not enter."""
        first = [0, *self.passes.orders[orders.TRAIN]]
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
        self.passes.end_step()
        for unit in self.units:
            if unit.frees and not self.backward.running and self.forward.walk is None:
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
