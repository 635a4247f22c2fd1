"""The schedule: what happens at each event of one training step, as data.

An event is a place in the user's loop (a unit is entered or left, in forward or backward; backward
ends; the optimizer steps). For each, the schedule lists actions on units; the engine carries them out
and records them, and a test holds that the record equals the schedule. It is built by playing one step
through, so that a gather already under way is not listed twice. Nothing here touches a tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from zeor.spec.lane_spec import LaneSpec

FORWARD_ENTER, FORWARD_EXIT = "forward enter", "forward exit"
BACKWARD_ENTER, BACKWARD_EXIT = "backward enter", "backward exit"
BACKWARD_END, STEP = "backward end", "step"


@dataclass(frozen=True)
class Action:
    """verb: gather, wait, free, reduce, finish, update, publish."""

    verb: str
    unit: int

    def __str__(self) -> str:
        return f"{self.verb}({self.unit})"


@dataclass(frozen=True)
class Traits:
    """What the schedule must know of a unit."""

    name: str
    frees: bool  # compute rests SLICE: gathered for each use
    trains: bool  # gradients are reduced, parameters updated
    publishes: bool  # compute rests FULL and must be gathered after an update


def traits_of(name: str, lanes: Sequence[LaneSpec]) -> Traits:
    """Of a unit of these lanes."""
    return Traits(
        name,
        frees=any(lane.frees for lane in lanes),
        trains=any(lane.key.trainable for lane in lanes),
        publishes=any(lane.publishes for lane in lanes),
    )


@dataclass
class Schedule:
    """Actions by event. `rows` keeps the order of one step, for reading."""

    units: tuple[Traits, ...]
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    prefetch: int
    overlap: bool = True
    rows: list[tuple[str, int, tuple[Action, ...]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._table: dict[tuple[str, int], tuple[Action, ...]] = {}
        _play(self)

    def at(self, event: str, unit: int) -> tuple[Action, ...]:
        """The actions of an event; nothing for an event this step was not expected to have."""
        return self._table.get((event, unit), ())

    def add(self, event: str, unit: int, actions: Sequence[Action]) -> None:
        self.rows.append((event, unit, tuple(actions)))
        self._table[event, unit] = tuple(actions)

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
            told = "  ".join(f"{a.verb}({self.units[a.unit].name})" for a in actions)
            lines.append(f"{event:<15} {name:<{width}}  {told}".rstrip())
        return "\n".join(lines)


def _play(schedule: Schedule) -> None:
    """One step from the beginning to the end, remembering which units are present."""
    units, present = schedule.units, {i for i, unit in enumerate(schedule.units) if not unit.frees}
    stays = schedule.stays

    def fetch(order: Sequence[int], position: int) -> list[Action]:
        """The unit at `position`, then the ones after it that prefetch allows."""
        actions = []
        for ahead, unit in enumerate(order[position : position + 1 + schedule.prefetch]):
            if unit not in present:
                present.add(unit)
                actions.append(Action("gather", unit))
            if ahead == 0:
                actions.append(Action("wait", unit))
        return actions

    def free(unit: int) -> list[Action]:
        if units[unit].frees:
            present.discard(unit)
            return [Action("free", unit)]
        return []

    under_way: list[int] = []

    def finish() -> list[Action]:
        """The sum under way, if there is one, is waited for."""
        return [Action("finish", under_way.pop())] if under_way else []

    def reduce(unit: int) -> list[Action]:
        """Only one reduce is under way at a time: the one before it is finished first."""
        if not units[unit].trains:
            return []
        actions = [*finish(), Action("reduce", unit)]
        under_way.append(unit)
        return actions if schedule.overlap else [*actions, *finish()]

    # 1. forward: the root is entered first and left last; what it holds stays until backward ends.
    inner = [unit for unit in schedule.forward if unit != 0]
    order = [0, *inner]
    schedule.add(FORWARD_ENTER, 0, fetch(order, 0))
    for position, unit in enumerate(order[1:], start=1):
        schedule.add(FORWARD_ENTER, unit, fetch(order, position))
        schedule.add(FORWARD_EXIT, unit, [] if unit == stays else free(unit))
    schedule.add(FORWARD_EXIT, 0, [])

    # 2. backward: the root's output comes first; a unit is left when the gradients of its inputs are there.
    inner = [unit for unit in schedule.backward if unit != 0]
    order = [0, *inner]
    schedule.add(BACKWARD_ENTER, 0, fetch(order, 0))
    for position, unit in enumerate(order[1:], start=1):
        schedule.add(BACKWARD_ENTER, unit, fetch(order, position))
        schedule.add(BACKWARD_EXIT, unit, [*reduce(unit), *free(unit)])

    # 3. the end: what the root holds, then the last sum is waited for.
    schedule.add(BACKWARD_END, -1, [*free(0), *reduce(0), *finish()])

    # 4. step: in the order of the next forward, so that its first units are published first.
    actions = []
    for unit in [0, *(u for u in schedule.forward if u != 0)]:
        if units[unit].trains:
            actions.append(Action("update", unit))
            if units[unit].publishes:
                actions.append(Action("publish", unit))
    schedule.add(STEP, -1, actions)
