"""LaneSpec: one lane under a plan, described before a byte of it is allocated.

The engine builds lanes from it, the planner sums it, `zeor schedule` prints what follows from it: whatever is decided
here is decided once. Integers and dtypes only; it knows no tensor and no rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Size, nn

from zeor.layout import LaneLayout, lay_out
from zeor.memory.roles import Column, Residency, Sizes, Table, table_of
from zeor.model.discover import UnitSpec
from zeor.plan import Plan
from zeor.spec.keys import LaneKey, lane_key, small_numel
from zeor.spec.places import Places
from zeor.tiers.master import master_itemsize
from zeor.tiers.rest import LaneRest


@dataclass(frozen=True)
class LaneSpec:
    key: LaneKey
    layout: LaneLayout
    table: Table
    sizes: Sizes
    compute_tier: str = "device"

    @property
    def column(self) -> Column:
        """Along the ranks that it is cut over."""
        return self.table.shard

    def cut(self, role: str) -> bool:
        """Whether some rank holds only a part of this role."""
        rests = [getattr(column, role) for column in self.table]
        return any(rest is Residency.SLICE and size > 1 for rest, size in zip(rests, self.sizes))

    @property
    def frees(self) -> bool:
        """Whole only while it is used."""
        return self.cut("compute") or (self.column.compute is Residency.SLICE and self.compute_tier != "device")

    @property
    def updates_whole(self) -> bool:
        """Every rank updates all of it."""
        return self.column.update is Residency.FULL

    @property
    def publishes(self) -> bool:
        """Its update leaves the other ranks' full parameters stale until slices are gathered."""
        return not self.frees and self.key.trainable and self.cut("update")

    @property
    def adopts(self) -> bool:
        """Gradients are kept as autograd made them: see Note [Adopted gradients] in grads.py."""
        return self.sizes.shard == 1 and not self.column.grad_buffer

    def held(self, residency: Residency) -> int:
        """Elements on one rank."""
        return self.layout.slice_numel if residency is Residency.SLICE else self.layout.numel

    @property
    def compute_nbytes(self) -> int:
        return self.held(self.column.compute) * self.key.compute_dtype.itemsize

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
    return LaneSpec(key, lay_out(shapes, sizes.shard), table_of(plan.stage, key.stays_whole), sizes, tier)


def spec_units(
    units: Sequence[UnitSpec], plan: Plan, sizes: Sizes, places: Places
) -> list[list[tuple[LaneSpec, LaneRest]]]:
    """The lanes of each unit as the engine will make them, with the places they are given."""
    small, found = small_numel(plan, sizes.shard), []
    for unit in units:
        by_key: dict[LaneKey, list[nn.Parameter]] = defaultdict(list)
        for _, param, owners in unit.params:
            by_key[lane_key(param, owners, plan.precision, small)].append(param)
        lanes = []
        for key, params in by_key.items():
            rest = places.of_lane(unit.name, key, params)
            lanes.append((lane_spec(key, [param.shape for param in params], plan, sizes, rest), rest))
        found.append(lanes)
    return found
