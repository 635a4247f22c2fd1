"""What a lane moves in one step, leg by leg, in elements and bytes: a pure function of its spec.

A leg is one collective along one axis of ranks. What a network makes of it is the planner's business
(planner/network.py), and that of the choice of a wire (features/auto_wire.py); both read the legs here.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from zeor.spec.lane_spec import LaneSpec
from zeor.spec.wires import Reduced


class Leg(NamedTuple):
    """Along an axis of `size` ranks. `numel`, `nbytes`: of what all members of the axis have together, which each of
    them has before a reduce or after a gather; bytes as they travel. A member sends (size - 1) / size of them."""

    axis: int
    size: int
    numel: int
    nbytes: int
    codec: Reduced | None
    sums: bool = False  # a reduce

    @property
    def sent_nbytes(self) -> int:
        """By one member."""
        return self.nbytes // self.size * (self.size - 1)

    @property
    def encoded(self) -> int:
        """Elements, by one member: of a reduce all but its own part, which stays as it is."""
        if self.codec is None:
            return 0
        return self.numel // self.size * (self.size - 1 if self.sums else 1)

    @property
    def decoded(self) -> int:
        """Elements, by one member: of a gather its own part too."""
        if self.codec is None:
            return 0
        return self.encoded if self.sums else self.numel


class Legs(NamedTuple):
    """Of one lane."""

    gather: list[Leg]  # before each use
    reduce: list[Leg]  # of its gradients
    spread: list[Leg]  # of the sum, to ranks that keep more of it than a reduce leaves
    publish: list[Leg]  # of what the update left


def legs_of(spec: LaneSpec) -> Legs:
    trains = spec.key.trainable
    return Legs(
        _gathers(spec, "compute", "full") if spec.frees else [],
        _reduces(spec) if trains else [],
        _gathers(spec, "fine", "grad") if trains else [],
        _gathers(spec, "update", "compute") if spec.publishes else [],
    )


def _gathers(spec: LaneSpec, role: str, to: str) -> list[Leg]:
    sums = role == "fine"
    codecs, dtype = (
        (spec.wires.spread, spec.key.reduce_dtype) if sums else (spec.wires.gather, spec.key.compute_dtype)
    )
    found, cut = [], spec.grid.every if sums else spec.table.cut(role)
    for axis in spec.widening(role, to):
        cut = cut - {axis}
        numel = spec.layout.numel // math.prod(spec.sizes[each] for each in cut)
        nbytes = _nbytes(spec, numel, codecs[axis], dtype.itemsize)
        found.append(Leg(axis, spec.sizes[axis], numel, nbytes, codecs[axis]))
    return found


def _reduces(spec: LaneSpec) -> list[Leg]:
    left, found = spec.layout.numel, []
    for hop in spec.grid.hops():
        size, codec = spec.sizes[hop.axis], spec.wires.reduce[hop.axis]
        nbytes = _nbytes(spec, left, codec, spec.key.reduce_dtype.itemsize)
        found.append(Leg(hop.axis, size, left, nbytes, codec, sums=True))
        left //= size
    return found


def _nbytes(spec: LaneSpec, numel: int, codec: Reduced | None, itemsize: int) -> int:
    return numel * itemsize if codec is None else spec.travels_nbytes(codec, numel)
