"""Owners: for an optimizer that needs whole matrices, the rank that computes each parameter.

Storage stays cut. Who owns what, and which parameters travel together (a round), is a pure function of shapes and
world: every rank computes the same answer without talking. The owner alone keeps the parameter's state, whole, on
a Parameter of the true shape that has memory only while a step computes it. This module moves nothing; see exchange.py.
Where every rank updates everything (stage 0, a world of one), each is the owner of all and nothing travels: computing
anew costs no message, and the same aligned memory gives the same bits (BLAS rounds by how its arguments lie).

Note [Rounds and owners]
~~~~~~~~~~~~~~~~~~~~~~~~
Units are taken in their order and put together until a round holds enough work for every rank: its cost is at least
the world times its dearest parameter. A unit is enough on a few ranks; on many, one unit's handful of matrices would
leave most ranks idle. A round's parameters go, dearest first, to the rank with the least work so far, all earlier
rounds counted: the whole model is balanced, and so is every beginning of it, which is what a pipeline needs.
A rank receives about one dearest parameter's worth per round whatever the world.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zeor.comm.axes import Axes, Axis
from zeor.layout import Segment, Span
from zeor.memory.roles import Table
from zeor.step.unit import Slot, Unit


def updates_are_cut(axes: Axes, table: Table) -> bool:
    """Whether a rank updates a part of the model only; at stage 0 and in a world of one each updates everything."""
    return axes.over(table.cut("update")).size > 1


def cost(shape: Sequence[int]) -> int:
    """Of one update, in multiply-adds up to a factor: what a product of the matrix with itself takes."""
    if len(shape) < 2:
        return math.prod(shape)
    rows, columns = math.prod(shape[:-1]), shape[-1]
    return rows * columns * min(rows, columns)


def in_rounds(unit_costs: Sequence[Sequence[int]], world: int) -> list[list[int]]:
    """Indices of consecutive units, put together as the Note says; what is left at the end is a round too."""
    rounds: list[list[int]] = []
    held, dearest = 0, 0
    for unit, costs in enumerate(unit_costs):
        if held >= world * dearest:  # the last round has enough; so has nothing at all
            rounds.append([])
            held, dearest = 0, 0
        rounds[-1].append(unit)
        held, dearest = held + sum(costs), max(dearest, *costs)
    return rounds


def assign(costs: Sequence[int], loads: list[int]) -> list[int]:
    """The owner of each parameter of a round; `loads` (work by rank so far) grows by it."""
    owners = [-1] * len(costs)
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        owners[index] = loads.index(min(loads))
        loads[owners[index]] += costs[index]
    return owners


@dataclass(frozen=True)
class Owned:
    """One parameter computed by its owner. `parts`: by rank, the segments that make it up, in the order of its
    elements. `whole` stands for it in the optimizer, on the owner only."""

    slot: Slot
    owner: int
    parts: dict[int, Segment]
    whole: nn.Parameter | None

    @property
    def numel(self) -> int:
        return sum(part.numel for part in self.parts.values())

    def rest(self) -> None:
        """The whole gives its memory up, and keeps its shape."""
        assert self.whole is not None
        self.whole.grad = None
        self.whole.data = _without_memory(self.slot)


def _without_memory(slot: Slot) -> Tensor:
    assert slot.lane.master is not None
    one = torch.zeros((), dtype=slot.lane.master.dtype, device=slot.lane.axes.device)
    return one.expand(slot.shape)


class Owners:
    """The parameters of one optimizer that are computed whole, by the user's parameter, and in rounds."""

    def __init__(self, axes: Axes, table: Table, units: Sequence[Unit]):
        self._units = units
        self.owned: dict[int, Owned] = {}  # by the id of the user's parameter
        self.rounds: list[list[Owned]] = []
        self._axes, self._along, self.cut = axes, table.cut("update"), updates_are_cut(axes, table)
        self.loads = [0] * self.axis.size  # cost by rank: what is balanced

    @property
    def axis(self) -> Axis:
        """The ranks that share the work; where every rank updates everything, this one alone."""
        return self._axes.over(self._along)

    def add(self, params: Iterable[Tensor]) -> None:
        """Give these parameters owners; those without a master or without elements need none."""
        wanted = {id(param) for param in params}
        slots = [slot for unit in self._units for slot in unit.slots if id(slot.param) in wanted]
        slots = [slot for slot in slots if slot.lane.grads is not None and 0 not in slot.shape]
        # Of one dtype each: a round travels as one buffer.
        for dtype in dict.fromkeys(slot.lane.master.dtype for slot in slots):  # type: ignore[union-attr]  # it trains, so it has one
            self._add([slot for slot in slots if slot.lane.master.dtype == dtype])  # type: ignore[union-attr]  # it trains, so it has one

    def _add(self, slots: list[Slot]) -> None:
        world, rank = self.axis.size, self.axis.rank
        units: dict[int, list[Slot]] = {}
        for slot in slots:
            units.setdefault(slot.unit.index, []).append(slot)
        members = list(units.values())
        for indices in in_rounds([[cost(slot.shape) for slot in unit] for unit in members], world):
            together = [slot for index in indices for slot in members[index]]
            owners = assign([cost(slot.shape) for slot in together], self.loads)
            self.rounds.append([])
            for slot, owner in zip(together, owners):
                whole = nn.Parameter(_without_memory(slot)) if owner == rank else None
                owned = Owned(slot, owner, self._parts(slot), whole)
                self.owned[id(slot.param)] = owned
                self.rounds[-1].append(owned)

    def _parts(self, slot: Slot) -> dict[int, Segment]:
        layout, param = slot.lane.layout, slot.index
        if not self.cut:
            return {0: next(part for part in slot.lane.segments if part.param == param)}
        begin, end = layout.offsets[param], layout.offsets[param] + layout.numels[param]
        held = slot.lane.updated.numel
        found = {}
        for number in range(begin // held, -(-end // held)):
            parts = layout.segments_in(Span(number * held, (number + 1) * held))
            found[self._holder(slot, number)] = next(part for part in parts if part.param == param)
        return found

    def _holder(self, slot: Slot, number: int) -> int:
        """The rank of the axis that updates a stretch of a lane."""
        return self._axes.holder(slot.lane.spec.grid, self._along, number)
