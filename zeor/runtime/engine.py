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

import functools
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from zeor.comm.meeting import meet
from zeor.comm.mesh import Mesh
from zeor.memory.buffers import Ledger
from zeor.memory.param import classes_of, take_grad
from zeor.memory.roles import STAGES, column_of
from zeor.plan import Plan
from zeor.runtime import edits, events, given
from zeor.runtime import order as orders
from zeor.runtime.backward import Backward
from zeor.runtime.counts import Counts
from zeor.runtime.first_batch import FirstBatch
from zeor.runtime.forward import Forward
from zeor.runtime.freezing import Freezing
from zeor.runtime.handed_out import HandedOut
from zeor.runtime.lane import Lane, LaneKey
from zeor.runtime.lent import Lent
from zeor.runtime.meta import Unfilled
from zeor.runtime.module_buffers import ModuleBuffers
from zeor.runtime.nonfinite import NonFinite
from zeor.runtime.norms import Norms
from zeor.runtime.passes import Passes
from zeor.runtime.places import Places
from zeor.runtime.reduces import Reducer
from zeor.runtime.release import Release
from zeor.runtime.schedule import Action, Schedule
from zeor.runtime.settings import Settings
from zeor.runtime.unit import Slot, Unit

if TYPE_CHECKING:
    from zeor.runtime.join import Join


class Engine:
    def __init__(self, plan: Plan, mesh: Mesh, plain: bool = False):
        self.plan, self.mesh = plan, mesh
        self.number = _number(mesh)
        self.plain = plain  # drop-in: parameters are the user's plain tensors and no module is hooked
        self.column = STAGES[plan.stage]
        self.ledger = Ledger()
        self.places = Places(plan, mesh)
        self.norms = Norms(mesh)
        self.units: list[Unit] = []
        self.slots: list[Slot] = []
        self.sync = True  # False inside no_sync
        self.borrowed_by: str | None = None  # what has put other values in the weights' place for a while
        self.trace: list[Action] | None = None
        self.first_batch = FirstBatch(mesh)
        # Gradients come reduced, from DDP: see Note [Given gradients] in given.py. None: not looked for yet.
        self.given: bool | None = None if plain and mesh.world > 1 else False
        self.buffers: ModuleBuffers | None = None  # a drop-in knows no module
        self.unfilled = Unfilled()  # what was on the meta device and has no values yet
        self.optimizers: list[Optimizer] = []
        self.settings = Settings(mesh, self.optimizers)
        self.handed_out = HandedOut()
        self.counts = Counts(self)
        self.joining: Join | None = None  # inside zeor.join

    # ---- building

    def add_unit(self, name: str, module: nn.Module | None, slots: Sequence[Slot], key: Callable) -> Unit:
        """Pack parameters into lanes by key, and lay the user's objects over them."""
        unit = Unit(len(self.units), name, module, slots)
        unit.is_root = unit.index == 0 and not self.plain
        by_key: dict[LaneKey, list[Slot]] = defaultdict(list)
        for slot in slots:
            by_key[key(slot)].append(slot)
        for lane_key, members in by_key.items():
            lane = self.make_lane(unit, lane_key, members, [slot.param for slot in members])
            self.lay(lane, members)
            unit.lanes.append(lane)
        unit.free()  # at once: a model that only fits as slices must not pile up while it is packed
        self.units.append(unit)
        self.slots.extend(slots)
        return unit

    def make_lane(self, unit: Unit, key: LaneKey, slots: Sequence[Slot], values: Sequence[Tensor]) -> Lane:
        """A lane of these parameters with rank 0's values."""
        name = f"{unit.index}-{sum(len(unit.lanes) for unit in self.units) + len(unit.lanes)}"
        column = column_of(self.plan.stage, key.stays_whole)
        lane = Lane(key, values, column, self.mesh, self.ledger, self.places.of_lane(name, key, values))
        for index, slot in enumerate(slots):
            slot.settle(unit, lane, index)
        lane.full.asks = functools.partial(_ask, weakref.ref(self), weakref.ref(unit))
        return lane

    def lay(self, lane: Lane, slots: Sequence[Slot]) -> None:
        """The user's parameters over a lane that has their values."""
        for slot in slots:
            take_grad(slot.param)
            if not self.plain:
                slot.bind()
        params, members = [slot.param for slot in slots], list(slots)
        blank = (lambda index: members[index].blank) if any(slot.blank for slot in slots) else None
        lane.adopt(params, [] if self.plain else [classes_of(slot.kind) for slot in slots], blank)

    def ready(self) -> None:
        """All units are there: plan the step."""
        self.norms.watch(self.slots)
        self.reducer = Reducer(self.mesh, self.units, self.plan.overlap, self.record)
        self.passes = Passes(self, self.reducer.under_way)
        self.forward = Forward(self, self.passes)
        self.backward = Backward(self, self.passes, self.reducer)
        self.freezing = Freezing(self)
        self.lent = Lent(self.units)
        self.reducer.riders += [self.freezing, self.settings, self.counts, self.lent]
        self.release = Release(self)
        if self.plan.release:
            self.reducer.finished = self.release.finished
        self.nonfinite = NonFinite(self.mesh, self.norms, self.slots, self.plan.nonfinite)
        self.reducer.riders.append(self.nonfinite)
        self.ledger.reset_peak()

    def watch_buffers(self, model: nn.Module) -> None:
        self.buffers = ModuleBuffers(self.mesh, model, self.plan.buffers)
        self.reducer.riders.append(self.buffers)

    @property
    def schedule(self) -> Schedule:
        return self.passes.schedule

    # ---- joining

    @property
    def playing(self) -> bool:
        """This rank only follows the others: see Note [Joining] in join.py."""
        return self.joining is not None and self.joining.playing

    def announce(self, event: str, detail: Any = None, meets: bool = True) -> None:
        """Before anything that all ranks must do together. `meets`: it has collectives, and ranks have not met for it
        yet; see Note [Meeting] in comm/meeting.py."""
        if self.joining is not None:
            self.joining.announce(self, event, detail)
        elif events.open_joins and self.mesh.world > 1:
            raise RuntimeError(
                f"This model comes to {events.SAID[event]} inside a zeor.join that knows only of other models, so a "
                "rank that is out of data could not follow; name all of them: zeor.join([model, other])."
            )
        elif meets:
            what = detail if event == events.OTHER and isinstance(detail, str) else events.SAID[event]
            meet(self.mesh, what, self.number)

    def announced(self, event: str, detail: Any = None) -> AbstractContextManager[None]:
        """The same for an event that is played as a whole, with all that is inside it."""
        if self.joining is not None:
            return self.joining.event(self, event, detail)
        self.announce(event)
        return nullcontext()

    def record(self, verb: str, unit: int) -> None:
        if self.trace is not None:
            self.trace.append(Action(verb, unit))

    # ---- gradients

    def begin_grads(self) -> None:
        """A backward starts: what the user still has is added to, the rest is forgotten."""
        self.handed_out.heed()
        for unit in self.units:
            for lane in unit.lanes:
                if lane.grads is not None:
                    lane.grads.begin([slot.param.grad is not None for slot in unit.slots if slot.lane is lane])
        if self.plain:
            for slot in self.slots:
                if slot.lane.grads is not None:
                    slot.param.grad = None

    def attach_plain_grads(self) -> None:
        """Plain parameters get their sharded gradients where everybody looks for them."""
        self.first_batch.compare()
        for slot in self.slots:
            if slot.lane.grads is not None and slot.lane.grads.has[slot.index]:
                slot.param.grad = slot.grad_view()

    @property
    def is_given(self) -> bool:
        """Asked when gradients arrive: by then the model is wrapped, if ever."""
        if self.given is None:
            self.given = given.around(slot.param for slot in self.slots)
        return self.given

    def heed_plain_grads(self) -> None:
        """Plain parameters do not tell when the user drops or replaces their gradient: look before it is used."""
        if self.given:
            given.take(self)
            return
        for slot in self.slots:
            if slot.param.grad is not slot.get_grad():
                slot.set_grad(slot.param.grad)

    def drop_grads(self) -> None:
        """Every gradient was set to None."""
        for slot in self.slots:
            if slot.lane.grads is not None:
                slot.lane.grads.drop(slot.index)
                self.edited(slot, edits.DROP)
        self.norms.forget_all()

    def edited(self, slot: Slot, verb: str, args: tuple = (), kwargs: dict[str, Any] | None = None) -> None:
        """The user changed a gradient: ranks that only follow must hear of it."""
        if self.joining is not None and not self.joining.playing:
            self.joining.edits.note(slot, verb, args, kwargs)

    # ---- step

    def step_order(self) -> list[Unit]:
        """Units in the order they are updated: that of the next forward, then what it did not enter."""
        first = [0, *self.passes.orders[orders.TRAIN]]
        return [self.units[i] for i in dict.fromkeys([*first, *range(len(self.units))])]

    def publish(self, unit: Unit) -> None:
        """A unit's master was updated: its compute follows, here at once, elsewhere by a gather."""
        self.record("update", unit.index)
        trained = [(number, lane) for number, lane in enumerate(unit.lanes) if lane.grads is not None]
        publishes = unit.publishes and self.mesh.world > 1
        if publishes:
            self.record("publish", unit.index)
        for number, lane in trained:
            lane.changed()  # a graph made before this step is stale
            if publishes and not lane.frees:
                lane.start_gather(f"publishing of unit {unit.name!r}, lane {number}")
                if not self.plan.overlap:
                    lane.wait()
            lane.leave_under_way()

    def begin_step(self) -> None:
        """Before anything is updated: the user's writes to gradients and parameters are known to both, and who looks at
        parameters is known."""
        self.handed_out.heed()
        for unit in self.units:
            for lane in unit.lanes:
                lane.keep_writes()
                if self.mesh.world > 1 or self.plan.streams:
                    lane.look()

    def end_step(self) -> None:
        if self.given:
            self.drop_grads()  # the parts; the user's own stay
        if self.buffers is not None:
            self.buffers.step()
        self.release.done.clear()
        self.places.store.leaving.let_go()
        self.passes.end_step()
        if not self.backward.running and self.forward.walk is None:
            for unit in self.units:
                if unit.frees:
                    unit.free()
            self.lent.refill()
        self.ledger.sweep()

    def refuse_if_borrowed(self, what: str) -> None:
        if self.borrowed_by is not None:
            raise RuntimeError(f"{what} inside {self.borrowed_by}, where the weights are an average; do it outside.")

    def forget_gathered(self) -> None:
        """Slices were changed beside a step: what is gathered of them is stale."""
        for unit in self.units:
            if unit.frees:
                unit.free()
        self.passes.forget_gathered()
        self.lent.refill()

    def drain(self) -> None:
        """Wait for everything under way."""
        for unit in self.units:
            unit.wait()
            for lane in unit.lanes:
                if lane.master is not None:
                    lane.master.settle()

    def nbytes(self) -> dict[str, int]:
        """Resident bytes on this rank by role, as allocated now (moments: see optim/)."""
        total: dict[str, int] = defaultdict(int)
        for unit in self.units:
            for lane in unit.lanes:
                for role, nbytes in lane.nbytes().items():
                    total[role] += nbytes
        return dict(total)


_made: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # engines over the ranks of a group


def _number(mesh: Mesh) -> int:
    """The same on every rank for the same model: ranks make their engines over a mesh in one order."""
    if mesh.control is None:
        return 0
    _made[mesh.control] = _made.get(mesh.control, 0) + 1
    return _made[mesh.control]


def _ask(engine: weakref.ref[Engine], unit: weakref.ref[Unit]) -> None:
    """Autograd needs a unit; weak, as graphs are not seen by Python's collector."""
    owner, wanted = engine(), unit()
    if owner is None or wanted is None:
        raise RuntimeError("The graph of a sharded model outlived the model, and its parameters are gone.")
    owner.backward.demand(wanted)
