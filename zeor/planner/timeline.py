"""A step played on clocks: the schedule that the engine follows, with a duration for each of its actions.

Beside each other go on: what is computed, what travels between ranks (along each axis by itself), and what goes from
the host to the device and back. An action starts when whoever issues it comes to it and what it needs is free; a wait
moves the clock of the computation to where the other one is, and what it moves it by is exposed. All else of a move is
hidden. Two steps are played, and the second is what counts: updates and publishes of the first reach into it.

It knows durations and the schedule (step/schedule.py), and neither bytes nor machines: step_time.py makes those.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from zeor.planner.network import Cost
from zeor.step.schedule import (
    BACKWARD_END,
    BACKWARD_ENTER,
    FIRST_READER,
    FORWARD_ENTER,
    FORWARD_EXIT,
    STEP,
    Action,
    Schedule,
)

AGREE, NORM, BRING = "agree", "norm", "bring"
Key = tuple[str, int, int | None]
Arrival = tuple[float, str, str, float]  # when, verb, axis, and what decoding then takes


@dataclass(frozen=True)
class Durations:
    """Seconds. By unit: forward, and backward with what is computed again. By action (verb, unit, lane): what moves
    along which axis, and what an update takes. `finish`: of the host's own sum when a reduce is there."""

    forward: Sequence[float]
    backward: Sequence[float]
    moves: Mapping[Key, Sequence[Cost]]
    updates: Mapping[tuple[int, int | None], float]
    finish: Mapping[tuple[int, int | None], float] = field(default_factory=dict)
    coding: Mapping[Key, tuple[float, float]] = field(default_factory=dict)  # what a move is encoded in, and decoded
    norm: float = 0.0  # of gradients, before the exchange
    exchange: float = 0.0  # of the norm's parts
    agreement: float = 0.0  # at the end of each pass
    agreement_waits: bool = False
    hides: bool = True
    micro_batches: int = 1
    sums_each: bool = False  # every micro-batch is reduced; else only the last one


@dataclass
class Played:
    """Seconds of one step. exposed, busy: by (verb, axis); hidden is the difference."""

    seconds: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    update: float = 0.0
    coding: float = 0.0
    exposed: dict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))
    busy: dict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))


def play(schedule: Schedule, durations: Durations) -> Played:
    """The second of two steps."""
    player = _Player(schedule, durations)
    player.step()
    before = player.now
    player.found = Played()
    player.step()
    player.found.seconds = player.now - before
    return player.found


class _Player:
    def __init__(self, schedule: Schedule, durations: Durations):
        self._schedule, self._d = schedule, durations
        self.now = 0.0
        self._up = self._down = 0.0  # when each is free again
        self._net: dict[str, float] = defaultdict(float)  # by axis
        self._late: list[int] = []  # units whose sums still travel across: see Note [Two hops] in step/reduces.py
        self._gathered: dict[int, list[Arrival]] = {}  # by unit: when what is there, verb and axis
        self._reduced: dict[tuple[int, int | None], list[Arrival]] = {}
        self._updated: dict[tuple[int, int | None], list[Arrival]] = {}
        self.found = Played()

    def step(self) -> None:
        last = self._d.micro_batches - 1
        for number in range(self._d.micro_batches):
            self._pass(reduces=number == last or self._d.sums_each, ends=number == last, first=number == 0)

    def _pass(self, reduces: bool, ends: bool, first: bool) -> None:
        """One micro-batch, and with the last the step. The next forward waits for updates where it enters a unit."""
        rows = [row for row in self._schedule.rows if row[0] != FIRST_READER and (ends or row[0] != STEP)]
        begun = False
        for event, unit, actions in rows:
            if event == STEP and not begun:
                begun = True
                self._begin_updates()
            for action in actions:
                self._do(action, event, reduces, ends)
            self._go_on(event, unit, first)
        if ends and not begun:
            self._begin_updates()

    def _go_on(self, event: str, unit: int, first: bool) -> None:
        """What is computed after an event's actions. The root's own comes when all units are done."""
        if event == FORWARD_ENTER:
            if first:
                self._read(unit)
            if unit:
                self._compute("forward", self._d.forward[unit])
        elif event == FORWARD_EXIT and unit == 0:
            self._compute("forward", self._d.forward[0])
            self._agree()
        elif event == BACKWARD_ENTER:
            self._compute("backward", self._d.backward[unit])
        elif event == BACKWARD_END:
            self._agree()

    def _begin_updates(self) -> None:
        self._compute("update", self._d.norm)
        self._expose(AGREE if not self._d.norm else NORM, "", self._d.exchange)

    # ---- one action

    def _do(self, action: Action, event: str, reduces: bool, ends: bool) -> None:
        place = action.unit, action.lane
        in_pass = event in (FORWARD_ENTER, BACKWARD_ENTER)
        if action.verb == "gather":
            self._gathered.setdefault(action.unit, []).extend(self._travel("gather", place))
        elif action.verb == "wait":
            self._arrive(self._gathered.pop(action.unit, []))
        elif action.verb == "fetch":
            if in_pass:
                self._bring(place)
        elif action.verb == "reduce" and reduces:
            self._reduced[place] = self._travel("reduce", place)
        elif action.verb == "finish" and reduces:
            self._finish(action.unit, waits=event == BACKWARD_END)
        elif action.verb == "update" and ends:
            self._update(place)
        elif action.verb == "publish" and ends:
            self._publish(place)

    def _finish(self, unit: int, waits: bool) -> None:
        """A unit's sum is due. One that goes along two axes goes on until the next unit's is, or backward ends."""
        if unit not in self._late:
            self._late.append(unit)
        hops = max((len(moves) for moves in self._reduced.values()), default=0)
        for each in self._late if waits or hops < 2 else self._late[:-1]:
            for place in [place for place in self._reduced if place[0] == each]:
                self._arrive(self._reduced.pop(place))
                self._compute("update", self._d.finish.get(place, 0.0))
                self._arrive(self._travel("spread", place))
        self._late = [each for each in self._late if any(place[0] == each for place in self._reduced)]

    def _travel(self, verb: str, place: tuple[int, int | None], after: float = 0.0) -> list[Arrival]:
        """Encoded, and queued on the network, one axis after the other."""
        found: list[Arrival] = []
        encode, decode = self._d.coding.get((verb, *place), (0.0, 0.0))
        if encode and self.now < after:  # there is nothing to encode before
            self.found.exposed[verb, ""] += after - self.now
            self.now = after
        self._compute("coding", encode)
        for cost in self._d.moves.get((verb, *place), ()):
            begin = max(self.now, self._net[cost.axis], after)
            self._net[cost.axis] = after = begin + cost.seconds
            self.found.busy[verb, cost.axis] += cost.seconds
            if not self._d.hides and cost.seconds:  # the cores that compute carry it
                self.found.exposed[verb, cost.axis] += cost.seconds
                self.now = max(self.now, begin) + cost.seconds
            if cost.seconds:  # else it goes on inside another's
                found.append((after, verb, cost.axis, 0.0))
        return [*found[:-1], (*found[-1][:3], decode)] if found else found

    def _bring(self, place: tuple[int, int | None]) -> None:
        """Compute that rests elsewhere, before it is gathered."""
        for cost in self._d.moves.get((BRING, *place), ()):
            self._up = max(self.now, self._up) + cost.seconds
            self.found.busy[BRING, cost.axis] += cost.seconds
            self._gathered.setdefault(place[0], []).append((self._up, BRING, cost.axis, 0.0))

    def _update(self, place: tuple[int, int | None]) -> None:
        """Where state rests elsewhere it is fetched, updated and sent back beside the computation."""
        fetched = self._d.moves.get(("fetch", *place), ())
        seconds = self._d.updates.get(place, 0.0)
        if not fetched:
            self._compute("update", seconds)
            self._updated[place] = []
            return
        ready = self.now
        for cost in fetched:
            self._up = ready = max(self.now, self._up) + cost.seconds
            self.found.busy["fetch", cost.axis] += cost.seconds
        ready += seconds
        for cost in self._d.moves.get(("spill", *place), ()):
            self._down = max(ready, self._down) + cost.seconds
            self.found.busy["spill", cost.axis] += cost.seconds
        self._updated[place] = [(ready, "fetch", fetched[-1].axis, 0.0)]
        # What comes back must be there before it is fetched again, a step later; only a step that is shorter notices.
        self._up = max(self._up, self._down - sum(cost.seconds for cost in fetched))

    def _publish(self, place: tuple[int, int | None]) -> None:
        after = max((when for when, *_ in self._updated.get(place, ())), default=0.0)
        self._updated.setdefault(place, []).extend(self._travel("publish", place, after))

    def _read(self, unit: int) -> None:
        """The first reader of what the last step left under way."""
        for place in [place for place in self._updated if place[0] == unit]:
            self._arrive(self._updated.pop(place))

    # ---- clocks

    def _compute(self, what: str, seconds: float) -> None:
        self.now += seconds
        setattr(self.found, what, getattr(self.found, what) + seconds)

    def _arrive(self, moves: Sequence[Arrival]) -> None:
        for when, verb, axis, decode in moves:
            if when > self.now:
                self.found.exposed[verb, axis] += when - self.now
                self.now = when
            self._compute("coding", decode)

    def _expose(self, verb: str, axis: str, seconds: float) -> None:
        self.now += seconds
        self.found.exposed[verb, axis] += seconds
        self.found.busy[verb, axis] += seconds

    def _agree(self) -> None:
        self.found.busy[AGREE, ""] += self._d.agreement
        if self._d.agreement_waits:
            self.now += self._d.agreement
            self.found.exposed[AGREE, ""] += self._d.agreement
