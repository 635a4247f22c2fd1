"""LaneSpec: one lane under a plan, described before a byte of it is allocated.

The engine builds lanes from it, the planner sums it, `zeor schedule` prints what follows from it: whatever is decided
here is decided once. Integers and dtypes only; it knows no tensor and no rank.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Size, nn

from zeor.layout import Grid, LaneLayout, Span, lay_out
from zeor.memory.lowrank import LowRank
from zeor.memory.placed import held_shape, is_placed
from zeor.memory.roles import Column, Residency, Sizes, Table, table_of
from zeor.model.discover import UnitSpec
from zeor.plan import Plan
from zeor.spec.keys import LaneKey, kept_apart, lane_key, small_numel
from zeor.spec.places import Places
from zeor.spec.wires import EXACT, LaneWires, Reduced, differs, lane_wires
from zeor.tiers.master import master_itemsize
from zeor.tiers.rest import LaneRest

RESIDUAL = torch.float32  # what of gradients waits to be sent


@dataclass(frozen=True)
class LaneSpec:
    key: LaneKey
    layout: LaneLayout
    table: Table
    sizes: Sizes
    compute_tier: str = "device"
    wires: LaneWires = EXACT

    @cached_property
    def grid(self) -> Grid:
        return Grid.of(self.sizes, self.table.cut("update"))

    @property
    def column(self) -> Column:
        """Along the innermost axis."""
        return self.table.inside

    def cut(self, role: str) -> bool:
        """Whether some rank holds only a part of this role."""
        return any(self.sizes[axis] > 1 for axis in self.table.cut(role))

    def span(self, role: str, coords: Sequence[int]) -> Span:
        """What the rank with these coordinates holds of a role, in elements of the lane; "fine": the least that one
        rank holds of anything."""
        cut = self.grid.every if role == "fine" else self.table.cut(role)
        return self.layout.span(self.grid.stretch(coords, cut))

    def widening(self, role: str, to: str) -> list[int]:
        """The axes to gather along from what is held of one role ("fine": one fine slice) to what is held of another
        ("full": everything)."""
        cut = self.grid.every if role == "fine" else self.table.cut(role)
        return self.grid.widening(cut, frozenset() if to == "full" else self.table.cut(to))

    @property
    def frees(self) -> bool:
        """Whole only while it is used."""
        return self.cut("compute") or (self.column.compute is Residency.SLICE and self.compute_tier != "device")

    @property
    def updates_whole(self) -> bool:
        """Every rank updates all of it."""
        return not self.table.cut("update")

    @property
    def publishes(self) -> bool:
        """Its update leaves what other ranks keep of compute stale, until it is gathered."""
        return self.key.trainable and bool(self.widening("update", "compute"))

    @property
    def parted(self) -> bool:
        """What an update writes is no part of what the others read: they have an image of it that is not exact, or may
        come to have one."""
        axes = self.widening("update", "compute")
        return self.publishes and (self.wires.open or any(self.wires.gather[axis] is not None for axis in axes))

    @property
    def differs(self) -> bool:
        """New values travel as differences to what every rank holds in memory that the user may write to."""
        first, *_ = (*self.widening("update", "compute"), None)
        codec = None if first is None or not self.parted else self.wires.gather[first]
        return codec is not None and differs(codec) and not self.frees

    def codes_nbytes(self, role: str, to: str = "full") -> int:
        """Of the messages of one gather, all ranks' on one rank, along the axes that have a codec."""
        codecs = self.wires.spread if role == "fine" else self.wires.gather
        cut, found = self.grid.every if role == "fine" else self.table.cut(role), 0
        for axis in self.widening(role, to):
            cut = cut - {axis}
            found += self.travels_nbytes(codecs[axis], self.layout.numel // math.prod(self.sizes[each] for each in cut))
        return found

    def travels_nbytes(self, codec: Reduced | None, numel: int) -> int:
        """Of so many elements, in whole fine slices, as codes; 0: they travel as they are."""
        if codec is None or not numel:
            return 0
        if isinstance(codec, LowRank):
            return codec.message_nbytes
        return numel // self.layout.slice_numel * codec.nbytes(self.layout.slice_numel)

    @property
    def image_nbytes(self) -> int:
        """Of a parted lane: what is at rest beside what forward reads, see Note [Parted] in step/lane.py."""
        if not self.parted:
            return 0
        return self.held("update") * self.key.compute_dtype.itemsize * (2 if self.differs else 1)

    @property
    def residual_nbytes(self) -> int:
        """Of what reduces leave out: see comm/feedback.py. And the last factors of low rank."""
        left, found = self.layout.numel, 0
        for hop in self.grid.hops():
            codec, part = self.wires.reduce[hop.axis], left // self.sizes[hop.axis]
            if isinstance(codec, LowRank):
                found += (left + codec.keeps) * RESIDUAL.itemsize
            elif self.wires.keeps[hop.axis]:
                found += (left - part) * RESIDUAL.itemsize
            left = part
        return found

    @property
    def factors_nbytes(self) -> int:
        """Of reduces of low rank while they are under way: both factors, and what comes of one."""
        return sum(codec.message_nbytes for codec in self.wires.reduce if isinstance(codec, LowRank))

    @property
    def spreads(self) -> bool:
        """A reduce leaves less of the sum than a rank keeps: it is gathered after it."""
        return bool(self.widening("fine", "grad"))

    @property
    def adopts(self) -> bool:
        """Gradients are kept as autograd made them: see Note [Adopted gradients] in grads.py. Those of experts are
        divided by the number of all ranks, though none has the same."""
        return self.grid.count == 1 and not self.column.grad_buffer and not self.key.sums and not self.key.experts

    def held(self, role: str) -> int:
        """Elements on one rank, of any."""
        cut = self.table.cut(role)
        return self.layout.numel // math.prod(self.sizes[axis] for axis in cut)

    @property
    def compute_nbytes(self) -> int:
        return self.held("compute") * self.key.compute_dtype.itemsize

    def master_itemsize(self, wide: bool) -> int:
        """Bytes per element beside compute; `wide`: kept as it is, for an update on the host."""
        if self.key.master_dtype is None:
            return 0
        if wide and self.key.trainable:
            return self.key.master_dtype.itemsize
        return master_itemsize(self.key.master_dtype, self.key.compute_dtype)


def lane_spec(key: LaneKey, shapes: Sequence[Size], plan: Plan, sizes: Sizes, rest: LaneRest | None = None) -> LaneSpec:
    """`rest`: where it rests; None: on the device."""
    tier = "device" if rest is None else rest.tiers.compute
    layout, table = lay_out(shapes, math.prod(sizes)), table_of(plan.stages, key.stays_whole)
    wires = lane_wires(key, plan.wire, layout, Grid.of(sizes, table.cut("update")))
    return LaneSpec(key, layout, table, sizes, tier, wires)


def spec_units(
    units: Sequence[UnitSpec], plan: Plan, sizes: Sizes, places: Places, experts: Sizes | None = None
) -> list[list[tuple[LaneSpec, LaneRest]]]:
    """The lanes of each unit as the engine will make them, with the places they are given. `experts`: the ranks along
    the axes of parameters that are DTensors."""
    small, found = small_numel(plan, math.prod(sizes)), []
    for unit in units:
        by_key: dict[LaneKey, list[nn.Parameter]] = defaultdict(list)
        for _, param, owners in unit.params:
            apart = experts is not None and is_placed(param)
            key = lane_key(param, owners, plan.precision, small, experts=apart)
            by_key[kept_apart(key, param, plan)].append(param)
        lanes = []
        for key, params in by_key.items():
            rest = places.of_lane(unit.name, key, params)
            along = experts if key.experts and experts is not None else sizes
            lanes.append((lane_spec(key, [held_shape(param) for param in params], plan, along, rest), rest))
        found.append(lanes)
    return found
