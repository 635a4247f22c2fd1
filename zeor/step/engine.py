"""The engine: carries out the schedule for one sharded model.

It owns the units and what they share (axes, ledger, norms), and gives each part the few objects it needs. Hooks tell
its passes (forward.py, backward.py) what the user's loop just did; they look the event up in the schedule and do the
actions. Features hang on it as extensions (extension.py). Optimizers are told apart in optim/; hooks live in hooks.py.

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

import contextlib
import functools
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zeor.comm.axes import Axes
from zeor.memory.buffers import Ledger
from zeor.memory.param import Coded, classes_of, take_grad
from zeor.memory.roles import table_of
from zeor.plan import Plan
from zeor.spec.keys import LaneKey, kept_apart, lane_key, small_numel
from zeor.spec.lane_spec import lane_spec
from zeor.spec.places import Places
from zeor.step import events
from zeor.step import order as orders
from zeor.step.backward import Backward
from zeor.step.coded import CodedLane, recode
from zeor.step.events import Announcer
from zeor.step.extension import Extension, overriding
from zeor.step.forward import Forward
from zeor.step.grads import State
from zeor.step.handed_out import HandedOut
from zeor.step.handle import Services
from zeor.step.lane import Lane
from zeor.step.lent import Lent
from zeor.step.norms import Norms
from zeor.step.passes import Borrowed, Passes
from zeor.step.reduces import Reducer
from zeor.step.schedule import FINISHED_REDUCE, STEP, Action, Schedule
from zeor.step.stray import StrayReads
from zeor.step.unfilled import Unfilled
from zeor.step.unit import Slot, Unit, gather_values

Feature = TypeVar("Feature", bound=Extension)
_OWN = 3  # extensions that the core itself adds


class Engine:
    def __init__(self, plan: Plan, axes: Axes, plain: bool = False):
        self.plan, self.axes, self.observer = plan, axes, axes.everyone.observer
        self._began = plan  # self.plan may get another wire
        self.plain = plain  # drop-in: parameters are the user's plain tensors and no module is hooked
        self.table = table_of(plan.stages)
        self.ledger = Ledger()
        self.observer.live = self.ledger.live
        self.places = Places(plan, axes.device)
        self.announcer = Announcer(axes, _number(axes))
        self.handed_out = HandedOut()
        self.norms = Norms(axes, self.announcer, self.handed_out)
        self.unfilled = Unfilled()  # what was on the meta device and has no values yet
        self.borrowed = Borrowed()
        self.units: list[Unit] = []
        self.slots: list[Slot] = []
        self.services = Services(
            axes, plain, self.slots, self.announcer, self.norms, self.handed_out, self.unfilled, self.borrowed
        )  # fmt: skip
        self.optimizers: list[Optimizer] = []
        self.extensions: list[Extension] = []
        self._uncoded: dict[Unit, list[Action]] = {}  # updated, and their codes are not made yet; how they publish

    # ---- building

    def add_unit(
        self, name: str, module: nn.Module | None, slots: Sequence[Slot], key: Callable[[Slot], LaneKey],
        value: Callable[[Slot], Tensor] = lambda slot: slot.value,
    ) -> Unit:  # fmt: skip
        """Pack parameters into lanes by key, and lay the user's objects over them. `value`: of a parameter; on the meta
        device where it comes later."""
        unit = Unit(len(self.units), name, module, slots)
        unit.is_root = unit.index == 0 and not self.plain
        by_key: dict[LaneKey, list[Slot]] = defaultdict(list)
        for slot in slots:
            by_key[key(slot)].append(slot)
        for lane_key_, members in by_key.items():
            unit.lanes.append(self._make_lane(unit, lane_key_, members, [value(slot) for slot in members]))
        unit.place_lanes()
        unit.free()  # at once: a model that only fits as slices must not pile up while it is packed
        self.units.append(unit)
        self.slots.extend(slots)
        return unit

    def _make_lane(self, unit: Unit, key: LaneKey, slots: Sequence[Slot], values: Sequence[Tensor]) -> Lane:
        """A lane of these parameters with rank 0's values, and the user's objects over it."""
        name = f"{unit.index}-{sum(len(unit.lanes) for unit in self.units) + len(unit.lanes)}"
        rest = self.places.of_lane(name, key, values)
        axes = self.axes.of(key.experts)
        shapes = [value.shape for value in values]
        spec = lane_spec(key, shapes, self.plan, axes.sizes, rest)
        if self.plan.wire != self._began.wire and lane_spec(key, shapes, self._began, axes.sizes, rest).parted:
            spec = replace(spec, wires=replace(spec.wires, open=True))  # as lanes that are there since then
        lane = (CodedLane if key.coded else Lane)(spec, values, axes, self.ledger, rest)
        for index, slot in enumerate(slots):
            slot.settle(unit, lane, index)
        lane.full.asks = functools.partial(_ask, weakref.ref(self), weakref.ref(unit))
        self._lay(lane, slots)
        return lane

    def _lay(self, lane: Lane, slots: Sequence[Slot]) -> None:
        for slot in slots:
            take_grad(slot.param)
            if not self.plain:
                slot.bind()
        members, without = list(slots), self.unfilled.slots
        blank = (lambda index: members[index] in without) if any(slot in without for slot in slots) else None
        params = [slot.param for slot in slots]
        classes = [(Coded, Coded) if lane.coded else classes_of(slot.kind) for slot in slots]
        lane.adopt(params, [] if self.plain else classes, blank)

    def ready(self) -> None:
        """All units are there: plan the step."""
        self.norms.watch(self.slots)
        self.reducer = Reducer(self.axes, self.units, self.plan.overlap, self._put_away)
        self.passes = Passes(self.plan, self.axes, self.units, self.ledger, self.reducer.under_way)
        self.backward = Backward(
            self.passes, self.reducer, self.norms, self.announcer, self.borrowed, self.plain
        )  # fmt: skip
        self.forward = Forward(self.passes, self.announcer, self.backward.recover)
        self.services.stray = StrayReads(self.passes, self.backward)
        self.lent = Lent(self.units)
        self.ledger.reset_peak()

    def extend(self, extensions: Sequence[Extension]) -> None:
        """These features, in this order, and no others, after what the core adds itself."""
        self.extensions = [self.unfilled, self.handed_out, self.lent, *extensions]  # the first: see _OWN
        for part in (self.forward, self.backward, self.reducer, self.services):
            part.extend(self.extensions)
        self._heeds, self._step_ends = overriding(self.extensions, "heed"), overriding(self.extensions, "end_step")
        self._drains = overriding(self.extensions, "drain")
        self._features = {type(each): each for each in self.extensions}

    def add_extension(self, extension: Extension) -> None:
        self.extend([*self.extensions[_OWN:], extension])

    def remove_extension(self, extension: Extension) -> None:
        self.extend([each for each in self.extensions[_OWN:] if each is not extension])

    def feature(self, kind: type[Feature]) -> Feature:
        """The extension of this class, which the engine is known to have."""
        return self._features[kind]  # type: ignore[return-value]

    def find(self, kind: type[Feature]) -> Feature | None:
        """The extension of this class, if the engine has one."""
        return self._features.get(kind)  # type: ignore[return-value]

    @property
    def schedule(self) -> Schedule:
        return self.passes.schedule

    # ---- what all ranks do together

    def announce(self, event: str, detail: Any = None, meets: bool = True) -> None:
        self.announcer.announce(event, detail, meets)

    def play(self, event: str, detail: Any) -> bool:
        """Take part in what another rank announced, without computing: see Note [Joining] in join.py. False: it is
        nothing that the engine does by itself."""
        if event in (events.TRAIN, events.EVAL):
            self.forward.play(event == events.TRAIN, "")
        elif event == events.ENTRY:
            self.forward.play(detail["train"], detail["entry"])
        elif event == events.AGREEMENT:
            self.backward.play_agreement()
        elif event in (events.BACKWARD, events.BACKWARD_KEPT):
            self.backward.play(event == events.BACKWARD, detail)
        elif event == events.NORM:
            self.norms.compute([self.slots[i] for i in detail["slots"]], detail["ord"], detail.get("scaled", False))
        elif event == events.GRADS:
            self.slots[detail].lane.gather_grads()
        else:
            return False
        return True

    def recover(self) -> None:
        """If the last forward or backward raised, forget it: see Note [After an exception]."""
        self.forward.recover()
        self.backward.recover()

    # ---- gradients

    def heed(self) -> None:
        """Gradients are about to be used: what the user did to them past zeor is looked at."""
        for heed in self._heeds:
            heed()

    def _put_away(self, unit: Unit) -> None:
        """A unit's sum is there, and where it is not used up by now it goes where it rests."""
        self.passes.do(self.schedule.at(FINISHED_REDUCE, unit.index))

    def drop_grads(self) -> None:
        """Every gradient was set to None."""
        for slot in self.slots:
            if slot.lane.grads is not None:
                slot.lane.grads.drop(slot.index)
                self.announcer.edited(slot.held, events.DROP)
        self.norms.forget_all()

    # ---- step

    def step_order(self) -> list[Unit]:
        """Units in the order they are updated: that of the next forward, then what it did not enter."""
        first = [0, *self.passes.orders[orders.TRAIN]]
        return [self.units[i] for i in dict.fromkeys([*first, *range(len(self.units))])]

    def publish(self, unit: Unit) -> None:
        """A unit's master was updated: its compute follows, here at once, elsewhere by a gather."""
        trained = [lane for lane in unit.lanes if lane.grads is not None]
        for lane in trained:
            lane.changed()  # a graph made before this step is stale
        actions = [action for action in self.schedule.at(STEP, unit.index) if action.verb == "publish"]
        late = {number for number, lane in enumerate(unit.lanes) if lane.coded}
        self.passes.do([action for action in actions if action.lane not in late])
        for lane in trained:
            lane.leave_under_way()
        if late:
            self._uncoded[unit] = [action for action in actions if action.lane in late]

    def publish_codes(self) -> None:
        """Every unit of a step was updated: see Note [Codes] in memory/float8.py."""
        waiting, self._uncoded = self._uncoded, {}
        lanes = [lane for unit in waiting for lane in unit.lanes]
        recode(lanes)
        for actions in waiting.values():
            self.passes.do(actions)
        for lane in lanes:
            if lane.coded:
                lane.leave_under_way()

    def check_weights(self, what: str) -> None:
        """RuntimeError where the weights have no values yet, or others stand in their place."""
        self.unfilled.check()
        self.borrowed.refuse(what)

    @contextlib.contextmanager
    def stepping(
        self, lanes: Iterable[Lane], describe: Callable[[], dict[str, Any]], then: Callable[[], None]
    ) -> Iterator[list[Unit]]:
        """Around one step of an optimizer over these lanes, which `describe` tells to ranks that only follow. Yields
        the order in which units are updated; `then` is called when what the step left behind is put in order."""
        self.announcer.check_here("step() was called")
        self.backward.recover()
        if any(lane.grads is not None and lane.grads.state is State.UNREDUCED for lane in lanes):
            raise RuntimeError(
                "step() was called after a backward inside zeor.no_sync whose gradients are not reduced yet; "
                "run the last backward of each accumulation outside no_sync."
            )
        if self.plain:
            self.heed()
        self._begin_step()
        self.axes.everyone.steps += 1
        if self.reducer.waits_for_step:
            self.reducer.waits_for_step = False
            self.axes.everyone.standing.run_steps += 1
        with self.announcer.announced(events.STEP, describe), torch.no_grad():
            yield self.step_order()
            self._end_step()
            then()

    def _begin_step(self) -> None:
        """Before anything is updated: the user's writes to gradients and parameters are known to both, and who looks at
        parameters is known."""
        self.observer.look()
        if self.observer.on:
            self.observer.leave("step")  # one that raised
            self.observer.enter("step")
        self.handed_out.heed()
        for unit in self.units:
            for lane in unit.lanes:
                lane.keep_writes()
                if self.axes.everyone.size > 1 or self.plan.streams:
                    lane.look()

    def _end_step(self) -> None:
        self.publish_codes()
        for end in self._step_ends:
            end()
        if self.places.store.leaving.held:
            self.places.store.leaving.let_go()
        self.passes.end_step()
        if not self.backward.running and self.forward.walk is None:
            for unit in self.units:
                if unit.frees:
                    unit.free()
            self.lent.refill()
        self.ledger.sweep()
        self.observer.step = self.axes.everyone.steps
        self.observer.traffic.end_step()
        if self.observer.on:
            self.observer.close()
            self.observer.count()
            self.observer.look()  # so many steps may be enough

    @contextlib.contextmanager
    def borrowing(self, by: str) -> Iterator[None]:
        """Other values stand in the weights' place, which the caller puts there; every rank comes here together."""
        if self.forward.walk is not None or self.backward.running:
            raise RuntimeError(f"{by} was entered inside a forward or backward of the model; enter it outside.")
        self.announce(events.OTHER, by)
        self.borrowed.by = by
        try:
            yield
        finally:
            self.borrowed.by = None
            self.forget_gathered()

    def forget_gathered(self) -> None:
        """Slices were changed beside a step: what is gathered of them is stale."""
        for unit in self.units:
            if unit.frees:
                unit.free()
        recode([lane for unit in self.units for lane in unit.lanes], publishes=True)
        self.publish_anew("after a change beside a step")
        self.passes.forget_gathered()
        self.lent.refill()

    def publish_anew(self, when: str) -> None:
        """What forward reads becomes a function of the masters alone, where it is an image of them. For every rank."""
        for unit in self.units:
            for lane in unit.lanes:
                if lane.parted:
                    lane.keep_writes()
                    lane.publish_anew(f"{lane.place.publish} {when}")
                    lane.changed()

    def flush_residuals(self, when: str) -> None:
        """What reduces have left out becomes one slice per rank, added to the next sum. For every rank: see
        Note [Residuals] in grad_wires.py."""
        for unit in self.units:
            for lane in unit.lanes:
                if lane.grads is not None and lane.grads.keeps:
                    lane.grads.flush(f"{lane.place.reduce}, of what was left out of earlier ones, {when}")

    def drain(self) -> None:
        """Wait for everything under way."""
        self.announcer.check_here("The weights or the optimizer's state were asked for")
        for unit in self.units:
            unit.wait()
            for lane in unit.lanes:
                if lane.master is not None:
                    lane.master.settle()
        for drain in self._drains:
            drain()

    # ---- parameters that begin to train

    def thaw(self, slots: Sequence[Slot]) -> None:
        """Unfrozen parameters move to trainable lanes: see Note [Freezing and unfreezing] in freezing.py."""
        units = list(dict.fromkeys(slot.unit for slot in slots))
        for unit in units:
            for lane in list(dict.fromkeys(slot.lane for slot in slots if slot.unit is unit)):
                self._divide(unit, lane)
            if unit.frees:
                unit.free()
        if self.passes.residents.last in [unit.index for unit in units]:
            self.passes.residents.last = None
        self.norms.watch(self.slots)
        self.passes.orders.insert(orders.REDUCE, [unit.index for unit in units])
        self.passes.plan_step()

    @torch.no_grad()
    def _divide(self, unit: Unit, lane: Lane) -> None:
        """Put the members of a frozen lane into new lanes: one of those that train now, one of the rest."""
        members = unit.members(lane)
        values, small = gather_values(lane, members), small_numel(self.plan, self.axes.everyone.size)
        lane.retire()
        by_key: dict[LaneKey, list[Slot]] = {}
        for slot in members:
            like = slot.wrap(values[slot]).detach().requires_grad_(slot.trains)  # in the dtype that the user gave it
            precision = self.plan.precision
            key = lane.key
            if slot.trains:
                key = lane_key(like, slot.owners, precision, small, slot.partial, slot.experts)
                key = kept_apart(key, like, self.plan)
            by_key.setdefault(key, []).append(slot)
        made = [
            self._make_lane(unit, key, slots, [values[slot] for slot in slots]) for key, slots in by_key.items()
        ]  # fmt: skip
        place = unit.lanes.index(lane)
        unit.lanes[place : place + 1] = made
        unit.place_lanes()

    def refuse_divided(self, what: str) -> None:
        """RuntimeError where parameters are DTensors, for a verb that would take a part of one for the whole."""
        slot = next((slot for slot in self.slots if slot.placed is not None), None)
        if slot is not None:
            by = "expert" if slot.experts else "tensor"
            raise RuntimeError(f"{what} Parameter {slot.name!r} is a DTensor, cut by {by} parallelism.")

    # ---- bytes

    def nbytes(self) -> dict[str, int]:
        """Resident bytes on this rank by role, as allocated now (moments: see optim/)."""
        total: dict[str, int] = defaultdict(int)
        for unit in self.units:
            for lane in unit.lanes:
                for role, nbytes in lane.nbytes().items():
                    total[role] += nbytes
        return dict(total)


_made: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # engines over the ranks of a group


def _number(axes: Axes) -> int:
    """The same on every rank for the same model: ranks make their engines over a mesh in one order."""
    if axes.everyone.control is None:
        return 0
    _made[axes.everyone.control] = _made.get(axes.everyone.control, 0) + 1
    return _made[axes.everyone.control]


def _ask(engine: weakref.ref[Engine], unit: weakref.ref[Unit]) -> None:
    """Autograd needs a unit; weak, as graphs are not seen by Python's collector."""
    owner, wanted = engine(), unit()
    if owner is None or wanted is None:
        raise RuntimeError("The graph of a sharded model outlived the model, and its parameters are gone.")
    owner.backward.demand(wanted)
