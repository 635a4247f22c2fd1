"""Which wire to take, by arithmetic alone: a measured step, links, speeds of codecs, and the legs of every lane.

Note [The choice of a wire]
~~~~~~~~~~~~~~~~~~~~~~~~~~~
Measured are steps that travel as the run begins: their seconds, how many of these ranks stood still for gathers and
reduces (`waited`), and the bytes that were sent along each axis by each verb.

1. `busy`, that the links carry these bytes, follows from their measured bandwidths. Where ranks waited for longer than
   that, links are slower inside a step than alone, and all of it counts by so much more.
2. Another wire keeps the links busy for less. What it saves is taken off what was waited for, which cannot fall below
   nothing: waited - (busy - its busy). What is encoded and decoded, at its measured speed, is computed besides.
3. From the least lossy to the most (on two axes: all that leave the inner one exact come first) the next one takes the
   place of the one before where that does not hide its communication (HIDDEN of the step) and where the step gets
   shorter by at least WORTH of it. So the first that hides it is taken, and where none does the fastest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from zeor.comm.links import Links
from zeor.memory.codecs import Codec
from zeor.memory.coding_speed import Speed
from zeor.memory.roles import Sizes
from zeor.plan import Plan, Wire
from zeor.spec.lane_spec import LaneSpec
from zeor.spec.travel import Leg, legs_of
from zeor.spec.wires import check_wire, lane_wires

LEVELS = ("exact", "bf16", "int8", "int4")
HIDDEN, WORTH = 0.05, 0.05
Verbs = tuple[int, str]  # an axis by number, and a verb


@dataclass(frozen=True)
class Seen:
    """Of one step. `sent`: bytes of this rank."""

    seconds: float
    waited: float
    sent: Mapping[Verbs, float]


@dataclass(frozen=True)
class Foreseen:
    """A step by another wire, in seconds. `coding` is part of it."""

    wire: Wire
    seconds: float
    waited: float
    coding: float

    @property
    def hides(self) -> bool:
        return self.waited <= HIDDEN * self.seconds

    def __str__(self) -> str:
        return f"{describe(self.wire)} {self.seconds:.3g} s"


def describe(wire: Wire) -> str:
    """In words for a log: weights/gradients, where they differ."""
    told = [each.gather if each.gather == each.reduce else f"{each.gather}/{each.reduce}" for each in wire.axes]
    return told[0] if told[0] == told[1] else f"{told[0]} inside, {told[1]} across"


def candidates(plan: Plan, sizes: Sizes) -> list[Wire]:
    """From the least to the most lossy. int4 is for gradients where weights cannot travel as differences."""
    two = min(sizes) > 1
    levels = range(len(LEVELS))
    pairs = [(inner, outer) for inner in levels for outer in levels if (inner <= outer if two else inner == outer)]
    return [_first_allowed(plan, sizes, LEVELS[inner], LEVELS[outer]) for inner, outer in pairs]


def _first_allowed(plan: Plan, sizes: Sizes, inner: str, outer: str) -> Wire:
    for weights in product(_weights(inner), _weights(outer)):
        wire = _wire(plan, (weights[0], inner), (weights[1], outer))
        try:
            check_wire(replace(plan, wire=wire), sizes)
        except ValueError:
            continue
        return wire
    raise AssertionError("exact and int8 can always travel")


def _weights(level: str) -> Sequence[str]:
    return ("int4", "int8") if level == "int4" else (level,)


def _wire(plan: Plan, inside: tuple[str, str], across: tuple[str, str]) -> Wire:
    """Of (gather, reduce) along each axis."""
    given = plan.wire
    assert given is not None
    each = [
        Wire(
            gather, reduce, rounding=given.rounding, rotate=reduce == "int4",
            feedback=given.feedback and reduce != "exact",
        )
        for gather, reduce in (inside, across)
    ]  # fmt: skip
    return replace(each[0], across=each[1] if each[1] != each[0] else None, auto=True)


@dataclass(frozen=True)
class Load:
    """What one step of all lanes puts on links and codecs, each leg counted once: bytes of this rank by axis and verb,
    and elements that it encodes and decodes by verb and codec."""

    nbytes: Counter[Verbs]
    encoded: Counter[tuple[Verbs, Codec]]
    decoded: Counter[tuple[Verbs, Codec]]

    @staticmethod
    def of(specs: Sequence[LaneSpec]) -> Load:
        nbytes, encoded, decoded = Counter[Verbs](), Counter[tuple[Verbs, Codec]](), Counter[tuple[Verbs, Codec]]()
        for spec in specs:
            for verb, leg in _legs(spec):
                key = leg.axis, verb
                nbytes[key] += leg.sent_nbytes
                if isinstance(leg.codec, Codec):  # a method's own work is not foreseen
                    encoded[key, leg.codec] += leg.encoded
                    decoded[key, leg.codec] += leg.decoded
        return Load(nbytes, encoded, decoded)


def _legs(spec: LaneSpec) -> Iterator[tuple[str, Leg]]:
    """By the verb that zeor.traffic counts them under."""
    for legs in legs_of(spec):
        for leg in legs:
            yield ("reduce" if leg.sums else "gather"), leg


def foresee(
    wires: Sequence[Wire], specs: Sequence[LaneSpec], seen: Seen, links: Links, speed: Callable[[Codec], Speed]
) -> list[Foreseen]:
    """Steps 1 and 2 of the Note; `specs`: of all lanes, as they travelled."""
    before = Load.of(specs)
    busy = _busy(seen.sent, specs[0].sizes, links)
    slower = max(1.0, seen.waited / busy) if busy else 1.0
    found = []
    for wire in wires:
        load = Load.of([replace(spec, wires=lane_wires(spec.key, wire, spec.layout, spec.grid)) for spec in specs])
        times = {key: sent / before.nbytes[key] for key, sent in seen.sent.items() if before.nbytes[key]}
        sent = {key: count * load.nbytes[key] for key, count in times.items()}
        saved = busy - _busy({**seen.sent, **sent}, specs[0].sizes, links)
        waited = max(0.0, seen.waited - slower * saved)
        coding = sum(times.get(key, 0.0) * numel / speed(codec).encode for (key, codec), numel in load.encoded.items())
        coding += sum(times.get(key, 0.0) * numel / speed(codec).decode for (key, codec), numel in load.decoded.items())
        found.append(Foreseen(wire, seen.seconds - seen.waited + waited + coding, waited, coding))
    return found


def _busy(sent: Mapping[Verbs, float], sizes: Sizes, links: Links) -> float:
    """Seconds; across, all ranks of a host share its link."""
    found = 0.0
    for (axis, _), nbytes in sent.items():
        two = len(links.links) > 1
        link, sharing = links.links[axis if two else 0], sizes.inside if two and axis else 1
        found += nbytes * sharing / link.bandwidth
    return found


def chosen(foreseen: Sequence[Foreseen]) -> Foreseen:
    """Step 3 of the Note."""
    best = foreseen[0]
    for each in foreseen[1:]:
        if best.hides:
            break
        if each.seconds <= (1 - WORTH) * best.seconds:
            best = each
    return best
