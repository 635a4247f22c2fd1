"""wire="auto": some steps as the run begins, then the wire that hides what travels, chosen once and by all ranks alike.

A step ends with the first step() after a backward that reduced. After WARM_UP of them each rank meters MEASURED steps
(comm/meter.py). Then ranks agree on one step: the length of the slowest rank's, and what the rank that waits least has
waited, since the others wait for that rank too. Where that hides already nothing is done; else links and codecs are
measured, wire_choice.py foresees a step by each wire, and the chosen one is taken. Rank 0 logs one line that says why.

A step in which a model was evaluated, or some rank had run out of data, does not count; where no step of a rank counts
all measure again. A checkpoint holds what was chosen, for runs that are cut alike.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from zeor.comm import small
from zeor.comm.axes import Axes
from zeor.comm.links import Links, measure_along
from zeor.comm.meter import VERBS, Meter
from zeor.comm.stuck import explain
from zeor.features.wire_choice import HIDDEN, Foreseen, Seen, Verbs, candidates, chosen, describe, foresee
from zeor.memory.codecs import Codec
from zeor.memory.coding_speed import Speed, speed_of
from zeor.plan import METHODS, Method, Plan, Wire
from zeor.spec.lane_spec import LaneSpec
from zeor.spec.wires import lane_wires
from zeor.step.events import Announcer
from zeor.step.extension import Extension
from zeor.step.unit import Unit

WARM_UP, MEASURED = 2, 3
_AFTER_RECOMPUTE = 4  # recompute="auto" has changed what a step computes by then
_KEYS: tuple[Verbs, ...] = tuple((axis, verb) for axis in (0, 1) for verb in VERBS)

log = logging.getLogger("zeor")


class AutoWire(Extension):
    """Of one engine. `switch`: to another wire from here on, on every rank. `drain`: nothing is under way any more."""

    def __init__(
        self, plan: Plan, axes: Axes, units: Sequence[Unit], announcer: Announcer,
        *, switch: Callable[[Wire], None], drain: Callable[[], None],
    ):  # fmt: skip
        assert plan.wire is not None
        self._plan, self._axes, self._units, self._announcer = plan, axes, units, announcer
        self._switch, self._drain = switch, drain
        self._observer = axes.everyone.observer
        self.wire = plan.wire  # by which tensors travel now
        self.decided = axes.everyone.size == 1 or axes.everyone.fake
        self._begin()

    def _begin(self) -> None:
        self._steps, self._reduced, self._spoilt = 0, False, False
        self._seen: list[Seen] = []
        self._sent = self._observer.traffic.sent_nbytes.copy()
        self._meter(False)

    def _meter(self, on: bool) -> None:
        self._observer.meter = Meter(self._axes.device) if on else None
        self._observer.look()

    # ---- who decides

    def choose_anew(self, wire: Wire) -> None:
        """From the next step on all is measured again, by this wire. On every rank."""
        self._switch(wire)
        self._plan = dataclasses.replace(self._plan, wire=wire)
        self.wire, self.decided = wire, self._axes.everyone.size == 1 or self._axes.everyone.fake
        self._begin()

    def leave(self, wire: Wire) -> None:
        """The user has chosen this wire. On every rank."""
        self.wire, self.decided = wire, True
        self._begin()

    # ---- a checkpoint

    def saved(self) -> dict[str, Any] | None:
        """What a checkpoint holds of it: nothing before the choice."""
        if not (self.decided and self.wire.auto) or self._axes.everyone.size == 1:
            return None
        return {**self._cut(), "wire": as_plain(self.wire)}

    def _cut(self) -> dict[str, Any]:
        return {"sizes": list(self._axes.sizes), "stages": list(self._plan.stages)}

    def taken(self, saved: Any) -> Wire | None:
        """The wire that a checkpoint holds, where its run was cut as this one is; ValueError or TypeError where it says
        nonsense."""
        if saved is None or not self.wire.auto or self._axes.everyone.size == 1:
            return None
        if not isinstance(saved, Mapping) or not isinstance(saved.get("wire"), Mapping):
            raise ValueError("what it says of wire='auto' is no wire")
        if {name: saved.get(name) for name in ("sizes", "stages")} != self._cut():
            return None
        return from_plain(saved["wire"])

    def go_on(self, wire: Wire) -> None:
        """A checkpoint was loaded that holds this choice. On every rank."""
        self.decided = True
        self._begin()
        self._take(wire)
        self._say(f"{describe(wire)}, as the checkpoint says")

    # ---- steps

    def begin_forward(self, train: bool, alone: bool) -> None:
        self._spoilt |= not train

    def end_backward(self) -> None:
        self._reduced = True

    def abandon(self) -> None:
        self._spoilt = True

    def end_step(self) -> None:
        if self.decided or not self._reduced:
            return
        self._reduced = False
        self._steps += 1
        warm_up = _AFTER_RECOMPUTE if self._plan.recompute == "auto" else WARM_UP
        if self._steps > warm_up:
            self._note()
        ends = self._steps == warm_up + MEASURED
        self._spoilt = False
        self._sent = self._observer.traffic.sent_nbytes.copy()
        self._meter(self._steps >= warm_up and not ends)
        if ends:
            self._decide()

    def _note(self) -> None:
        """One step more was metered."""
        if self._observer.meter is None:  # another plan was tried meanwhile
            return
        found = self._observer.meter.end()
        if not self._spoilt and self._announcer.block is None:
            sent = self._observer.traffic.sent_nbytes - self._sent
            self._seen.append(Seen(found.seconds, found.waited, self._by_number(sent)))

    def _by_number(self, sent: Counter[tuple[str, str]]) -> dict[Verbs, float]:
        names = [axis.name for axis in self._axes.each]
        return {(axis, verb): float(sent[names[axis], verb]) for axis, verb in _KEYS}

    # ---- the choice

    def _decide(self) -> None:
        seen = self._agreed()
        if seen is None:
            return self._begin()
        self.decided = True
        if seen.waited <= HIDDEN * seen.seconds:
            self._say(f"{describe(self.wire)}, as steps of {seen.seconds:.3g} s wait {seen.waited:.2g} s for links")
            return
        self._drain()
        links, wires = self._links(), candidates(self._plan, self._axes.sizes)
        specs = [lane.spec for unit in self._units for lane in unit.lanes]
        found = foresee(wires, specs, seen, links, self._speeds(specs, wires).__getitem__)
        best = chosen(found)
        self._take(best.wire)
        self._say(self._why(best, found, seen, links))

    def _agreed(self) -> Seen | None:
        """The same on every rank; None where no step of some rank counts."""
        mine = min(self._seen, key=lambda each: each.seconds, default=Seen(math.inf, 0.0, dict.fromkeys(_KEYS, 0.0)))
        numbers = [mine.seconds, -mine.waited, *(mine.sent[key] for key in _KEYS)]
        seconds, waited, *sent = self._largest(numbers, "agreement on what a step takes")
        return None if seconds == math.inf else Seen(seconds, -waited, dict(zip(_KEYS, sent)))

    def _links(self) -> Links:
        try:
            links = measure_along(self._axes)
        except RuntimeError as error:
            raise explain(self._axes.everyone, "measuring of links", error) from error
        slowest = self._largest([-link.bandwidth for link in links.links], "agreement on links")
        slow = tuple(dataclasses.replace(link, bandwidth=-rate) for link, rate in zip(links.links, slowest))
        return dataclasses.replace(links, links=slow)

    def _speeds(self, specs: Sequence[LaneSpec], wires: Sequence[Wire]) -> dict[Codec, Speed]:
        """Of the slowest rank, which has as much to do at this moment as any."""
        codecs = codecs_of(specs, wires)
        mine = [-rate for codec in codecs for rate in speed_of(codec, self._axes.device)]
        agreed = [-rate for rate in self._largest(mine, "agreement on the speed of codecs")]
        return {codec: Speed(*agreed[2 * i : 2 * i + 2]) for i, codec in enumerate(codecs)}

    def _largest(self, numbers: Sequence[float], label: str) -> list[float]:
        axis = self._axes.whole
        try:
            found: list[float] = small.largest(axis, torch.tensor(numbers, dtype=torch.float64)).tolist()
        except RuntimeError as error:
            raise explain(axis, label, error) from error
        return found

    def _take(self, wire: Wire) -> None:
        if wire != self.wire:
            self._switch(wire)
            self.wire = wire

    def _why(self, best: Foreseen, found: Sequence[Foreseen], seen: Seen, links: Links) -> str:
        waits = f"waits {best.waited:.2g} s" + (f" and codes {best.coding:.2g} s" if best.coding else "")
        others = ", ".join(str(each) for each in found if each is not best)
        reason = "the least lossy that hides what travels" if best.hides else "the fastest, as nothing hides it"
        return (
            f"{describe(best.wire)}, {reason}: steps of {seen.seconds:.3g} s waited {seen.waited:.3g} s for links "
            f"({links}); foreseen {best.seconds:.3g} s ({waits}); {others}"
        )

    def _say(self, text: str) -> None:
        if self._axes.whole.rank == 0:
            log.info("wire='auto': %s", text)


def as_plain(wire: Wire) -> dict[str, Any]:
    """In values that JSON knows: a method by its name, with what it was given."""
    found = {field.name: getattr(wire, field.name) for field in dataclasses.fields(wire)}
    if isinstance(wire.reduce, Method):
        [name] = [name for name, kind in METHODS.items() if type(wire.reduce) is kind]
        found["reduce"] = {"method": name, **dataclasses.asdict(wire.reduce)}
    return {**found, "across": None if wire.across is None else as_plain(wire.axes[1])}


def from_plain(saved: Mapping[str, Any]) -> Wire:
    """The wire again; ValueError or TypeError where it is none."""
    found = dict(saved)
    if isinstance(found.get("reduce"), Mapping):
        given = dict(found["reduce"])
        name = given.pop("method", None)
        if name not in METHODS:
            raise ValueError(f"it says that gradients travel by the method {name!r}")
        found["reduce"] = METHODS[name](**given)
    if isinstance(found.get("across"), Mapping):
        found["across"] = from_plain(found["across"])
    return Wire.parse(found)


def codecs_of(specs: Sequence[LaneSpec], wires: Sequence[Wire]) -> list[Codec]:
    """All that these wires may use, in one order on every rank."""
    found: dict[Codec, None] = {}
    for wire in wires:
        for spec in specs:
            lane = lane_wires(spec.key, wire, spec.layout, spec.grid)
            every = (each for both in (lane.gather, lane.reduce, lane.spread) for each in both)
            found |= dict.fromkeys(each for each in every if isinstance(each, Codec))
    return list(found)
