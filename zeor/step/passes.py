"""What the passes of one step share: the agreed orders, the schedule, and which units must stay.

A pass is one walk of the model: a forward (forward.py) or a backward (backward.py). Both look an event up
in the schedule and do its actions on units; this module carries those out and remembers, between passes and
until the step, which units were entered and which are entered more than once.
It knows neither hooks nor gradients.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from zeor.comm.axes import Axes
from zeor.comm.observe import Observer, Record
from zeor.memory.buffers import Ledger
from zeor.plan import Plan
from zeor.step import order as orders
from zeor.step.lane import Lane
from zeor.step.order import NOTHING, Asked, Orders, Walk
from zeor.step.residency import FORWARD_EXIT, Residents
from zeor.step.schedule import Action, Schedule, traits_of
from zeor.step.settling import Settling
from zeor.step.unit import Unit


def inside_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


class Borrowed:
    """Something has put other values in the weights' place for a while (`by`: what)."""

    def __init__(self) -> None:
        self.by: str | None = None

    def refuse(self, what: str) -> None:
        if self.by is not None:
            raise RuntimeError(f"{what} inside {self.by}, where the weights are an average; do it outside.")


class Gathers:
    """Carries out what a walk decides, which knows no tensor: gathers of one engine's units, and the exchange that ends
    a round. See Note [Rounds] in order.py."""

    def __init__(
        self, axes: Axes, units: Sequence[Unit], overlap: bool, under_way: Callable[[], str], settling: Settling
    ):  # fmt: skip
        self._axes, self._units, self._overlap, self._observer = axes, units, overlap, axes.everyone.observer
        self._settling = settling
        self._under_way = under_way  # says what else is waited for, for the label of an exchange
        self._frees = any(unit.frees for unit in units)
        self.paused = False  # all units are here, or none is needed: a pass gathers nothing

    @property
    def frees(self) -> bool:
        """Whether a pass gathers anything."""
        return self._frees and not self.paused

    @contextmanager
    def pausing(self) -> Iterator[None]:
        """Inside, passes gather nothing."""
        before, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = before

    def ahead(self, unit: Unit, walk: Walk | None) -> None:
        """A unit will probably be needed soon."""
        if unit.frees and not unit.present and walk is not None:
            walk.ahead(unit.index)

    def arrive(self, unit: Unit, walk: Walk | None) -> None:
        """The unit's full parameters are there; gathered now if nobody thought of it before."""
        if unit.frees and not unit.present:
            if walk is not None:
                walk.gather(unit.index)
            else:
                self.take_part(unit.index)  # called outside the model's forward: every rank does the same
        observer = self._observer
        record = observer.begin("wait", unit.place) if observer.on else None
        unit.wait()
        if record is not None:
            observer.end(record)

    # ---- a forward's walk

    def forward_walk(self, order: Sequence[int], keep_skipped: bool) -> Walk:
        """What it tells at its end is a fingerprint of this rank's path and its kind; nothing where nothing is
        gathered."""
        return Walk(self, self.freed(order), keep_skipped, told_count=4 if self.frees else 0)

    def end_forward(self, walk: Walk, kind: str, learned: bool, playing: bool) -> bool:
        """Ends a forward: whether ranks are known to have taken different paths through the units. A rank that only
        plays has taken none. `learned`: its order is agreed. See Note [Settled paths] in settling.py."""
        if not self.frees:
            walk.finish()
            return False
        if self._settling.settled and learned:
            walk.pass_by_all()
            self._settling.note_pass(kind)
            return False
        path = hash(tuple(walk.entered)) & 0x7FFFFFFF
        told = [NOTHING, NOTHING] if playing else [path, -path]
        kinds = [number := zlib.crc32(kind.encode()) & 0x7FFFFFFF, -number]
        largest, least, most, fewest = walk.finish([*told, *kinds])
        if most != -fewest:
            axis = self._axes.everyone
            raise RuntimeError(
                f"Rank {axis.rank} of {axis.size} ran a forward of kind {kind!r} while another rank ran "
                "one of another kind (one evaluates and one trains?); where parameters are sliced every rank must take "
                "part: evaluate on every rank, or one rank alone at stages 0 to 2."
            )
        self._settling.note_pass(kind, largest == -least)
        return largest != -least

    def freed(self, order: Sequence[int], kept: Sequence[int | None] = ()) -> list[int]:
        """The units of an order that are freed between uses, less those that every rank keeps from the last pass."""
        return [unit for unit in order if self.frees and self._units[unit].frees and unit not in kept]

    # ---- see Gatherer in order.py

    def take_part(self, unit: int) -> None:
        observer = self._observer
        for lane in self._units[unit].lanes:
            if lane.frees:
                records = self._begin_gather(observer, lane) if observer.on else ()
                lane.start_gather(lane.place.gather)
                for record in records:
                    observer.end(record)
        if not self._overlap:
            self._units[unit].wait()

    @staticmethod
    def _begin_gather(observer: Observer, lane: Lane) -> list[Record]:
        """The last begun first."""
        rest, slice_nbytes = lane.rest, lane.kept.numel * lane.key.compute_dtype.itemsize
        fetched = []
        if lane.is_away:
            fetched = [observer.begin("fetch", lane.place, slice_nbytes, rest.tiers.compute, rest.store.fetches)]
        return [observer.begin("gather", lane.place, lane.full.nbytes), *fetched]

    def drop(self, unit: int) -> None:
        self._units[unit].free()

    def has(self, unit: int) -> bool:
        return self._units[unit].present

    def ask(self, asked: Asked, needs: bool) -> Asked:
        """Nothing is exchanged where nothing can be asked for: no unit is freed, and nothing is told."""
        axis = self._axes.everyone
        if axis.size == 1 or axis.fake or not (asked.told or self.frees):
            return asked
        count = len(self._units)
        numbers = [asked.again, *(i in asked.units for i in range(count)), *asked.told]
        label = f"agreement at the end of a pass{self._under_way()}"
        again, *rest = self._settling.exchange(numbers, label, not (needs and self._settling.settled))
        return Asked(bool(again), [i for i in range(count) if rest[i]], rest[count:])


class Passes:
    """`under_way` says what else is waited for."""

    def __init__(self, plan: Plan, axes: Axes, units: list[Unit], ledger: Ledger, under_way: Callable[[], str]):
        self.plan, self.axes, self.units, self.ledger = plan, axes, units, ledger
        self.observer = axes.everyone.observer
        self.forward_walk: Walk | None = None  # while the model's forward runs
        self.orders = Orders(self.axes, len(self.units))
        self.settling = Settling(axes, plan.paths, len(units))
        self.gathers = Gathers(self.axes, self.units, self.plan.overlap, under_way, self.settling)
        self.residents = Residents()
        self.lone: list[Unit] = []  # read inside a unit that was called outside the model's forward
        self.used: set[int] = set()  # units entered since the last step
        self.diverged = False  # ranks have taken different paths in a forward since the last step
        self._on_lanes: dict[str, Callable[[Unit, int], None]] = {
            "free": self._free, "spill": self._spill, "publish": self._publish
        }  # fmt: skip
        self.plan_step()

    def plan_step(self) -> None:
        """The schedule of a step along the orders as they are agreed now."""
        traits = tuple(traits_of(unit.name, [(lane.spec, lane.rest) for lane in unit.lanes]) for unit in self.units)

        def plan(kind: str) -> Schedule:
            behind = tuple(self.orders.behind(kind))
            return Schedule(traits, tuple(self.orders[kind]), behind, self.plan)

        self._plan = plan
        self._planned: dict[str, Schedule] = {}
        self.schedule = self.schedule_of(orders.TRAIN)

    def schedule_of(self, kind: str) -> Schedule:
        """Of a step whose forward is of this kind."""
        if kind not in self._planned:
            self._planned[kind] = self._plan(kind)
        return self._planned[kind]

    def learn(self, kinds: dict[str, Sequence[int]]) -> None:
        """Agree on the orders a pass showed, and plan anew."""
        self.orders.learn(kinds)
        self.plan_step()

    def extend(self, kind: str, extra: Sequence[int]) -> None:
        """Units a pass needed beside its order are in it from now on."""
        if self.orders.extend(kind, extra):
            self.plan_step()

    # ---- actions

    def do(self, actions: Sequence[Action], walk: Walk | None = None) -> None:
        """Carry out what the schedule lists. A unit's lanes are gathered together, at the first of their actions."""
        for action in actions:
            unit, on_lane = self.units[action.unit], self._on_lanes.get(action.verb)
            if action.verb == "wait" and action.lane is None:
                self.gathers.arrive(unit, walk)
            elif action.verb in ("fetch", "gather"):
                self.gathers.ahead(unit, walk)
            elif on_lane is not None and action.lane is not None:
                on_lane(unit, action.lane)
            else:
                raise ValueError(f"{action} is not an action that a pass can carry out.")

    def _free(self, unit: Unit, number: int) -> None:
        if self.residents.may_free(unit, FORWARD_EXIT):
            self._let_go(unit, unit.lanes[number])

    def _let_go(self, unit: Unit, lane: Lane) -> None:
        observer = self.observer
        seen = observer.on and unit.index not in self.residents.repeated
        record = observer.begin("free", lane.place, lane.full.nbytes) if seen else None
        lane.free()
        if record is not None:
            observer.end(record)

    def _spill(self, unit: Unit, number: int) -> None:
        lane = unit.lanes[number]
        assert lane.grads is not None
        observer, rest = self.observer, lane.rest
        record = observer.begin("spill", lane.place, 0, rest.tiers.grads, rest.store.spills) if observer.on else None
        lane.grads.put_away()
        if record is not None and lane.grads.resting:
            record.nbytes = lane.spec.held("grad") * lane.grads.dtype.itemsize
            observer.end(record)
        elif record is not None:
            observer.cancel(record)  # release has used it up

    def _publish(self, unit: Unit, number: int) -> None:
        lane = unit.lanes[number]
        observer = self.observer
        record = observer.begin("publish", lane.place, lane.full.nbytes) if observer.on else None
        lane.start_publish(lane.place.publish)
        if record is not None:
            observer.end(record)
        if not self.plan.overlap:
            lane.wait()

    def free(self, unit: Unit, when: int = FORWARD_EXIT) -> bool:
        """Whether it went, or stays: see residency.py."""
        if not self.residents.may_free(unit, when):
            return False
        self._let_go_all(unit)
        return True

    def _let_go_all(self, unit: Unit) -> None:
        for lane in unit.lanes:
            if lane.frees:
                self._let_go(unit, lane)

    def free_lone(self) -> None:
        """A unit called outside the model's forward is left."""
        for unit in self.lone:
            self.free(unit)
        self.lone.clear()

    def put_back(self) -> None:
        """After an exception: nothing is gathered, unless it is held."""
        self.residents.open.clear()
        self.give_back()

    def give_back(self) -> None:
        """No unit stays gathered, for whatever pass comes next, unless it is held."""
        self.residents.last = None
        for unit in self.units if not self.residents.held else ():
            if unit.present and unit.frees:
                self._let_go_all(unit)

    def hold(self, order: Sequence[int]) -> None:
        """Gather every unit, those of `order` first, and keep all of them: rule 7 in residency.py. Nobody waits here;
        whoever enters a unit waits for it."""
        self.give_back()
        self.residents.held = self.gathers.paused = True
        for index in dict.fromkeys([0, *order, *range(len(self.units))]):
            if self.units[index].frees:
                self.gathers.take_part(index)

    def let_go(self) -> None:
        """Nothing is held any more."""
        self.residents.held = self.gathers.paused = False
        self.give_back()
        self.ledger.sweep()

    def forget_gathered(self) -> None:
        """No unit is in place, and no rank may count on one."""
        self.residents.last = None

    def end_step(self) -> None:
        self.used.clear()
        self.residents.last = None
        self.diverged = False
