"""Bytes per rank by role, from shapes alone: the table of roles and the layout, multiplied out.

Uses the same unit finding, the same lane keys and the same layout as the engine, on a model that may
be on the meta device. What it predicts for resident roles is exact; the transient figure is the bound
of the formula in `transient`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zeor.layout import LaneLayout, lay_out
from zeor.memory.master import master_itemsize
from zeor.memory.roles import STAGES, Column, Residency
from zeor.plan import Plan, Precision, nearest
from zeor.runtime.discover import UnitSpec, find_units
from zeor.runtime.keys import lane_key
from zeor.runtime.lane import LaneKey

# Moments an optimizer keeps per element, by class name; anything else is asked for.
MOMENTS = {
    "SGD": 0, "Adam": 2, "AdamW": 2, "NAdam": 2, "RAdam": 2, "Adamax": 2, "Adagrad": 1, "Adadelta": 2,
    "RMSprop": 1, "ASGD": 1, "Rprop": 2, "Muon": 1,
}  # fmt: skip
_OPTIONS = ("units", "prefetch", "native_reduce")


@dataclass(frozen=True)
class Prediction:
    """Bytes on one rank. `padding` is contained in the roles; `transient` comes on top at the peak."""

    compute: int
    grad: int
    master: int
    moments: int
    padding: int
    transient: int

    @property
    def resident(self) -> int:
        return self.compute + self.grad + self.master + self.moments

    def as_dict(self) -> dict[str, int]:
        return {**vars(self), "resident": self.resident}


@dataclass(frozen=True)
class _Lane:
    key: LaneKey
    layout: LaneLayout


def predict(
    model: nn.Module,
    *,
    world: int = 1,
    stage: int = 3,
    precision: Precision | str | None = None,
    optimizer: str | int = "AdamW",
    **options: Any,
) -> Prediction:
    """What `shard(model, ..., stage=stage)` will hold on each of `world` ranks. Nothing is allocated.

    `optimizer` is a torch.optim name or the number of tensors it keeps per parameter. `options`: units=,
    prefetch=, native_reduce= (True for NCCL; Gloo receives a whole buffer).
    """
    for name in options:
        if name not in _OPTIONS:
            raise TypeError(f"zeor.predict has no option {name!r}{nearest(name, list(_OPTIONS))}.")
    if isinstance(optimizer, str) and optimizer not in MOMENTS:
        raise ValueError(
            f"optimizer={optimizer!r} is not known to the planner{nearest(optimizer, list(MOMENTS))}; give the number "
            "of tensors it keeps per parameter instead, such as optimizer=2."
        )
    moments = MOMENTS[optimizer] if isinstance(optimizer, str) else optimizer
    units = find_units(model, options.get("units"))
    lanes = [_lanes(unit, world, Precision.parse(precision)) for unit in units]
    column = STAGES[Plan(stage=stage).stage]
    flat = [lane for unit in lanes for lane in unit]
    total: dict[str, int] = defaultdict(int)
    for lane in flat:
        for role, nbytes in _resident(lane, column).items():
            total[role] += nbytes
    total["moments"] = moments * _updated_nbytes(flat, column, world)
    native = bool(options.get("native_reduce", False))
    transient_nbytes = transient(lanes, column, world, int(options.get("prefetch", 1)), native)
    return Prediction(
        **{role: total[role] for role in ("compute", "grad", "master", "moments", "padding")},
        transient=transient_nbytes,
    )


def _lanes(unit: UnitSpec, world: int, precision: Precision) -> list[_Lane]:
    by_key: dict[LaneKey, list[torch.Size]] = defaultdict(list)
    for _, param, owners in unit.params:
        by_key[lane_key(param, owners, precision)].append(param.shape)
    return [_Lane(key, lay_out(shapes, world)) for key, shapes in by_key.items()]


def _held(residency: Residency, layout: LaneLayout) -> int:
    return layout.slice_numel if residency is Residency.SLICE else layout.numel


def _resident(lane: _Lane, column: Column) -> dict[str, int]:
    """The row of each role but the moments, for one lane."""
    key, layout = lane.key, lane.layout
    compute = _held(column.compute, layout) * key.compute_dtype.itemsize
    result = {"compute": compute, "padding": layout.padding_numel * key.compute_dtype.itemsize}
    if key.master_dtype is not None:
        result["master"] = _held(column.update, layout) * master_itemsize(key.master_dtype, key.compute_dtype)
    if key.trainable:
        result["grad"] = (layout.numel if column.grad_buffer else layout.slice_numel) * key.reduce_dtype.itemsize
    return result


def _updated_nbytes(lanes: Sequence[_Lane], column: Column, world: int) -> int:
    """Master-sized bytes of the elements one rank updates, padding left out, on the rank that has the most."""
    total, lost = 0, Counter[int]()  # lost: by rank, what gaps take from its slices
    for key, layout in ((lane.key, lane.layout) for lane in lanes):
        if not key.trainable or key.master_dtype is None:
            continue
        itemsize, part = key.master_dtype.itemsize, layout.slice_numel
        if column.update is Residency.FULL:
            total += sum(layout.numels) * itemsize
            continue
        total += part * itemsize
        for begin, end in layout.gaps():
            for rank in range(begin // part, -(-end // part)):
                lost[rank] += (min(end, (rank + 1) * part) - max(begin, rank * part)) * itemsize
    return total - (min(lost.values()) if len(lost) == world else 0)


def transient(lanes: Sequence[list[_Lane]], column: Column, world: int, prefetch: int, native: bool) -> int:
    """The most of backward and step: they do not meet.

    Backward: (1 + prefetch) x compute + 2 x gradient + 1 x receive buffer of the largest units + what the root
    keeps. The root's compute stays from the beginning of forward to the end of backward, and its gradients arrive
    until then. Where compute rests FULL, or the gradient's buffer stays, that term is resident instead.
    Step: the largest unit's master, where it rests split, and its gradient as wide as the master.
    """
    step = max((sum(_fetched_nbytes(lane, column) for lane in unit) for unit in lanes), default=0)
    if world == 1:
        return step
    compute = [sum(x.layout.numel * x.key.compute_dtype.itemsize for x in unit) for unit in lanes]
    grad = [sum(x.layout.numel * x.key.reduce_dtype.itemsize for x in unit if x.key.trainable) for unit in lanes]
    receive = max((g // world if native else g for g in grad), default=0)
    total = receive
    inner = sorted(compute[1:], reverse=True)
    if column.compute is Residency.SLICE:
        total += compute[0] + sum(inner[: 1 + prefetch])
    if not column.grad_buffer:
        total += grad[0] + 2 * max(grad[1:], default=0)
    return max(total, step)


def _fetched_nbytes(lane: _Lane, column: Column) -> int:
    """What one lane's update needs beside what rests: see memory/master.py."""
    key = lane.key
    if not key.trainable or key.master_dtype is None:
        return 0
    fetched = master_itemsize(key.master_dtype, key.compute_dtype) not in (0, key.master_dtype.itemsize)
    widened = key.reduce_dtype != key.master_dtype
    return _held(column.update, lane.layout) * key.master_dtype.itemsize * (fetched + widened)
