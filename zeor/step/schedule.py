"""The schedule: what happens at each event of one training step, as data.

An event is a place in the user's loop (a unit is entered or left, in forward or backward; backward ends; the optimizer
steps), the end of a reduce, or the first reader of what a step left under way. For each, the schedule lists actions on
units and lanes. passes.py carries out those that need nothing but the lane; reduces.py and optim/ do the rest. All are
recorded, and a test holds that the record equals the schedule. It is built by playing one step through, so that a
gather already under way is not listed twice. Nothing here touches a tensor. What a rank sends in a step is its gathers,
reduces and publishes here (their bytes: comm/verbs.py), norms, and one small agreement at the end of each pass.

It shows an optimizer that keeps moments and is called unit by unit. offload="auto" places state only after it is built.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from zeor.plan import Plan
from zeor.spec.lane_spec import LaneSpec
from zeor.tiers.rest import LaneRest

FORWARD_ENTER, FORWARD_EXIT = "forward enter", "forward exit"
BACKWARD_ENTER, BACKWARD_EXIT = "backward enter", "backward exit"
BACKWARD_END, STEP = "backward end", "step"
FINISHED_REDUCE = "finished reduce"  # happens inside a backward's events, whose rows show what it lists
FIRST_READER = "first reader"  # as a rule the wait of the next forward

Verb = Literal["fetch", "gather", "wait", "free", "reduce", "finish", "spill", "update", "publish"]
VERBS: tuple[Verb, ...] = get_args(Verb)


@dataclass(frozen=True)
class Action:
    """Of one lane, or of a whole unit (lane None).

    fetch, spill     from the tier where something rests to where it is used, and back
    gather, free     slices -> the full lane, and away with it
    wait             whoever comes next may read it
    reduce, finish   the sum of gradients is begun, and is there
    update, publish  the optimizer's step, and the gather of what it left where compute rests FULL
    """

    verb: Verb
    unit: int
    lane: int | None = None

    def __post_init__(self) -> None:
        if self.verb not in VERBS:
            raise ValueError(f"{self.verb!r} is not an action of a schedule; use one of {list(VERBS)}.")

    def __str__(self) -> str:
        return f"{self.verb}({self.unit})" if self.lane is None else f"{self.verb}({self.unit}, lane {self.lane})"


@dataclass(frozen=True)
class LaneTraits:
    """What the schedule must know of a lane."""

    frees: bool  # compute rests SLICE: gathered for each use
    trains: bool  # gradients are reduced, parameters updated
    publishes: bool  # compute rests FULL and must be gathered after an update
    fetched: bool = False  # compute rests on another tier
    spills: bool = False  # the sum of gradients does
    spreads: bool = False  # that sum rests FULL: it is there only when backward ends
    streams: bool = False  # something of it rests elsewhere: updated before the unit's other lanes
    update: tuple[Verb, ...] = ("update",)  # with what is moved for it


@dataclass(frozen=True)
class Traits:
    """What the schedule must know of a unit."""

    name: str
    lanes: tuple[LaneTraits, ...]

    @property
    def frees(self) -> bool:
        return any(lane.frees for lane in self.lanes)

    @property
    def trains(self) -> bool:
        return any(lane.trains for lane in self.lanes)


def traits_of(name: str, lanes: Sequence[tuple[LaneSpec, LaneRest]]) -> Traits:
    """Of a unit of these lanes."""
    return Traits(name, tuple(_lane_traits(spec, rest) for spec, rest in lanes))


def _lane_traits(spec: LaneSpec, rest: LaneRest) -> LaneTraits:
    fetched = spec.frees and rest.tiers.compute != "device"
    spills = spec.key.trainable and rest.tiers.grads != "device" and not spec.column.grad_buffer
    return LaneTraits(
        spec.frees,
        spec.key.trainable,
        spec.publishes,
        fetched,
        spills,
        spreads=spec.spreads,
        streams=rest.tiers.away,
        update=_update_verbs(spec, rest, fetched, spills),
    )


def _update_verbs(spec: LaneSpec, rest: LaneRest, fetched: bool, spills: bool) -> tuple[Verb, ...]:
    """An update on the host sends gradients down and brings weights up. One on the device brings state and sends it
    back; gradients are only read, and compute beside a master of its own is only written."""
    if rest.wide:
        return ("fetch", "spill", "update", "fetch") if spills else ("spill", "update", "fetch")
    beside = spec.master_itemsize(wide=False)  # 0: compute is the master, 2: one half of it
    state_away = rest.tiers.moments != "device" or (rest.tiers.master != "device" and beside > 0)
    compute_away = fetched and not rest.delayed
    verbs: list[Verb] = ["update"]
    if state_away or spills or (compute_away and beside <= 2):
        verbs.insert(0, "fetch")
    return (*verbs, "spill") if state_away or compute_away else tuple(verbs)


@dataclass
class Schedule:
    """Actions by event. `rows` keeps the order of one step, for reading."""

    units: tuple[Traits, ...]
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    plan: Plan
    rows: list[tuple[str, int, tuple[Action, ...]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._table: dict[tuple[str, int], tuple[Action, ...]] = {}
        _Play(self).run()

    def at(self, event: str, unit: int) -> tuple[Action, ...]:
        """The actions of an event; nothing for an event this step was not expected to have."""
        return self._table.get((event, unit), ())

    def expects(self, event: str, unit: int) -> bool:
        return (event, unit) in self._table

    def add(self, event: str, unit: int, actions: Sequence[Action], shown: bool = True) -> None:
        if shown:
            self.rows.append((event, unit, tuple(actions)))
        self._table[event, unit] = (*self.at(event, unit), *actions)

    @property
    def stays(self) -> int | None:
        """The unit that is not freed after forward: backward starts with it."""
        inner = [unit for unit in self.forward if unit != 0]
        first = next((unit for unit in self.backward if unit != 0), None)
        return inner[-1] if inner and inner[-1] == first else None

    def __str__(self) -> str:
        width = max(len(traits.name) for traits in self.units)
        lines = []
        for event, unit, actions in self.rows:
            name = self.units[unit].name if unit >= 0 else ""
            told = "  ".join(map(self._told, actions))
            lines.append(f"{event:<15} {name:<{width}}  {told}".rstrip())
        return "\n".join(lines)

    def _told(self, action: Action) -> str:
        """With the unit's name, and its lane where it has several."""
        unit = self.units[action.unit]
        several = action.lane is not None and len(unit.lanes) > 1
        return f"{action.verb}({unit.name}, lane {action.lane})" if several else f"{action.verb}({unit.name})"


class _Play:
    """One step from the beginning to the end, remembering which units are present and which sum is under way."""

    def __init__(self, schedule: Schedule):
        self._schedule, self._units, self._plan = schedule, schedule.units, schedule.plan
        self._present = {i for i, unit in enumerate(self._units) if not unit.frees}
        self._under_way: list[int] = []
        self._ends = False  # backward does
        self._updated: set[int] = set()  # inside backward
        # The root is entered first, in forward and in backward.
        self._forward = [0, *(unit for unit in schedule.forward if unit != 0)]
        self._backward = [0, *(unit for unit in schedule.backward if unit != 0)]

    def run(self) -> None:
        for unit in range(len(self._units)):  # of any unit; release may leave nothing to spill
            self._schedule.add(FINISHED_REDUCE, unit, self._each("spill", unit, lambda lane: lane.spills), shown=False)
        self._play_forward()
        self._play_backward()
        self._play_end()
        self._play_step()
        self._play_readers()

    # ---- one step

    def _play_forward(self) -> None:
        """1. The root is left last; what it holds stays until backward ends."""
        add, stays = self._schedule.add, self._schedule.stays
        add(FORWARD_ENTER, 0, self._enter(self._forward, 0))
        for position, unit in enumerate(self._forward[1:], start=1):
            add(FORWARD_ENTER, unit, self._enter(self._forward, position))
            add(FORWARD_EXIT, unit, [] if unit == stays else self._free(unit))
        add(FORWARD_EXIT, 0, [])

    def _play_backward(self) -> None:
        """2. The root's output comes first; a unit is left when the gradients of its inputs are there."""
        add = self._schedule.add
        add(BACKWARD_ENTER, 0, self._enter(self._backward, 0))
        for position, unit in enumerate(self._backward[1:], start=1):
            add(BACKWARD_ENTER, unit, self._enter(self._backward, position))
            add(BACKWARD_EXIT, unit, [*self._reduce(unit), *self._free(unit)])

    def _play_end(self) -> None:
        """3. What the root holds, the last sum, and with release the updates that had to wait for all of them."""
        self._ends = True
        actions = [*self._free(0), *self._reduce(0), *self._finish()]
        for unit in range(len(self._units)):
            if any(lane.spreads and lane.trains for lane in self._units[unit].lanes):
                actions += self._schedule.at(FINISHED_REDUCE, unit)
        if self._plan.release:
            for unit in sorted(set(self._backward) - self._updated):
                actions += self._update(unit)
        self._schedule.add(BACKWARD_END, -1, actions)

    def _play_step(self) -> None:
        """4. In the order of the next forward, so that its first units are published first. Where updates are streamed
        all of them are queued before the first is waited for to be published."""
        updates = {unit: [] if self._plan.release else self._update(unit) for unit in range(len(self._units))}
        publishes = {unit: self._each("publish", unit, lambda lane: lane.publishes) for unit in updates}
        rounds = [updates, publishes]
        if not self._plan.streams:
            rounds = [{unit: [*updates[unit], *publishes[unit]] for unit in updates}]
        entered = set(self._forward)
        for actions in rounds:
            for unit in [*self._forward, *(updates.keys() - entered)]:
                self._schedule.add(STEP, unit, actions[unit], shown=unit in entered and bool(actions[unit]))

    def _play_readers(self) -> None:
        """5. Whoever reads a lane first that the step left under way."""
        for unit in self._forward:
            left = self._each("wait", unit, self._is_left)
            if left:
                self._schedule.add(FIRST_READER, unit, left)

    # ---- parts of it

    def _each(self, verb: Verb, unit: int, of: Callable[[LaneTraits], bool]) -> list[Action]:
        return [Action(verb, unit, number) for number, lane in enumerate(self._units[unit].lanes) if of(lane)]

    def _enter(self, order: Sequence[int], position: int) -> list[Action]:
        """The unit at `position`, then the ones after it that prefetch allows."""
        prefetch = self._plan.prefetch if self._plan.overlap else 0
        actions = []
        for ahead, unit in enumerate(order[position : position + 1 + prefetch]):
            if unit not in self._present:
                self._present.add(unit)
                actions += self._gather(unit)
            if ahead == 0:
                actions.append(Action("wait", unit))
        return actions

    def _gather(self, unit: int) -> list[Action]:
        actions = []
        for number, lane in enumerate(self._units[unit].lanes):
            verbs: tuple[Verb, ...] = ("fetch", "gather") if lane.fetched else ("gather",) if lane.frees else ()
            actions += [Action(verb, unit, number) for verb in verbs]
        return actions

    def _free(self, unit: int) -> list[Action]:
        if self._units[unit].frees:
            self._present.discard(unit)
        return self._each("free", unit, lambda lane: lane.frees)

    def _reduce(self, unit: int) -> list[Action]:
        """Only one reduce is under way at a time: the one before it is finished first."""
        if not self._units[unit].trains:
            return []
        actions = [*self._finish(), *self._each("reduce", unit, lambda lane: lane.trains)]
        self._under_way.append(unit)
        return actions if self._plan.overlap else [*actions, *self._finish()]

    def _finish(self) -> list[Action]:
        """The sum under way, if there is one, is waited for, and used up or put where it rests."""
        if not self._under_way:
            return []
        unit = self._under_way.pop()
        actions = self._each("finish", unit, lambda lane: lane.trains)
        waits = self._ends or unit == 0 or any(lane.spreads and lane.trains for lane in self._units[unit].lanes)
        if self._plan.release and not waits:
            self._updated.add(unit)
            return [*actions, *self._update(unit)]
        spreads = any(lane.spreads and lane.trains for lane in self._units[unit].lanes)
        return actions if spreads else [*actions, *self._schedule.at(FINISHED_REDUCE, unit)]

    def _update(self, unit: int) -> list[Action]:
        lanes = [(number, lane) for number, lane in enumerate(self._units[unit].lanes) if lane.trains]
        lanes.sort(key=lambda each: not each[1].streams)
        return [Action(verb, unit, number) for number, lane in lanes for verb in lane.update]

    def _is_left(self, lane: LaneTraits) -> bool:
        """Under way, as Lane.under_way says."""
        streamed = len(lane.update) > 1 and not lane.frees and not self._plan.delay
        return lane.trains and (streamed or (lane.publishes and self._plan.overlap))
