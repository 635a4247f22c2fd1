"""Where every array of every lane will rest, and how many bytes it takes there, from shapes and the plan alone.

The same units, lane keys, layout and places as the engine's; nothing is allocated. `window` is what passes through the
device while state that rests elsewhere is updated (optim/streaming/windows.py, optim/streaming/host.py).

How allocators round is at the end. torch's caching allocator hands out multiples of 512 bytes. More than 10 MiB come in
segments of whole 2 MiB, of which the rest is cut off only if it is more than 1 MiB. Pinned host memory that torch
allocates comes in powers of two; what zeor maps by itself does not (tiers/host.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from zeor.layout import Segment, Span
from zeor.memory import small
from zeor.memory.roles import STAGES, Sizes, table_of
from zeor.model.discover import UnitSpec
from zeor.optim.streaming.host import AHEAD, batch_numel
from zeor.optim.streaming.moments import moment_itemsize
from zeor.optim.streaming.streaming import LARGE_NUMEL
from zeor.optim.streaming.windows import _ALIGNED, WINDOWS
from zeor.plan import Plan
from zeor.spec.keys import LaneKey
from zeor.spec.lane_spec import LaneSpec, spec_units
from zeor.spec.places import Places
from zeor.tiers.rest import Tiers

_MIB = 1 << 20
_GRAIN, _LARGE, _SEGMENT = 512, 10 * _MIB, 2 * _MIB  # of torch's caching allocator
_EVERY_PART = 64  # up to so many parts that updates are cut into are counted one by one


@dataclass(frozen=True)
class Setting:
    """What is asked for: the plan, and what it runs on."""

    plan: Plan
    sizes: Sizes
    moments: int  # tensors per parameter
    native: bool  # an accelerator, with NCCL
    one_pass: bool  # the kernel knows the optimizer
    chunk: int = 0  # elements streamed at a time
    accumulation: int = 1  # micro-batches of a step
    sums_each: bool = False  # each of them is reduced and added to slices; else they are summed whole, by no_sync
    experts: Sizes | None = None  # of the axes of parameters that are DTensors over experts=

    @property
    def world(self) -> int:
        return math.prod(self.sizes)

    @property
    def grad_buffer(self) -> bool:
        """The buffer of full size that gradients arrive in stays."""
        return STAGES[self.plan.stage].grad_buffer

    @property
    def adopts(self) -> bool:
        """Gradients are kept as autograd made them: see Note [Adopted gradients] in step/grads.py."""
        return self.world == 1 and not self.grad_buffer

    def parts(self, role: str) -> int:
        """Into how many stretches each lane is cut, of this role."""
        return math.prod(self.sizes[axis] for axis in table_of(self.plan.stages).cut(role))

    def with_chunk(self, numel: int) -> Setting:
        """With as many as optim/streaming/streaming.py takes where a rank keeps masters of so many elements."""
        given = None if self.plan.offload is None else self.plan.offload.chunk
        return replace(self, chunk=given or (1 << 25 if numel > LARGE_NUMEL else 1 << 24))

    def by_pass(self, key: LaneKey) -> bool:
        return self.native and self.one_pass and self.plan.kernel == "auto" and key.master_dtype == torch.float32


class Array(NamedTuple):
    """One array at rest. `pieces`: sizes in bytes of the tensors it is made of."""

    role: str
    tier: str
    pieces: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return sum(self.pieces)


@dataclass(frozen=True, kw_only=True)
class PlannedLane(LaneSpec):
    unit: int
    tiers: Tiers
    wide: bool
    setting: Setting

    @property
    def updates(self) -> bool:
        return self.key.trainable and self.key.master_dtype is not None

    @property
    def streamed(self) -> bool:
        plan = self.setting.plan
        return self.updates and (plan.moments != "exact" or plan.delay > 0 or self.tiers.away)

    @property
    def beside_itemsize(self) -> int:
        """Of the master, beside compute."""
        return self.master_itemsize(self.wide)

    @property
    def sums_rest(self) -> bool:
        """Sums of several micro-batches are elsewhere between their backwards: see step/resting.py."""
        setting = self.setting
        rests = self.tiers.grads != "device" and not setting.grad_buffer and not setting.plan.release
        return rests and self.key.trainable and setting.accumulation > 1 and setting.sums_each

    @property
    def parts_of_update(self) -> int:
        return math.prod(self.sizes[axis] for axis in self.table.cut("update"))

    def segments(self, part: int) -> tuple[Segment, ...]:
        """Of one of the stretches that updates are cut into: those axes come first in the grid, so it is one piece. A
        lane of experts has fewer; `part` is then one of those of other lanes, of ranks that are neighbours along
        experts=."""
        numel = self.held("update")
        part //= self.setting.parts("update") // self.parts_of_update
        return self.layout.segments_in(Span(part * numel, (part + 1) * numel))

    # ---- at rest

    def arrays(self, part: int) -> Iterator[Array]:
        key, plan = self.key, self.setting.plan
        yield Array("compute", self.tiers.compute if self.frees else "device", (self.compute_nbytes,))
        if self.image_nbytes:
            pieces = 2 if self.differs else 1
            yield Array("compute", "device", (self.image_nbytes // pieces,) * pieces)
        if plan.delay and self.updates:  # see Note [Delayed] in step/lane.py
            yield Array("lagging", "device", (self.held("update") * key.compute_dtype.itemsize,))
        if self.beside_itemsize:
            tier = self.tiers.master if key.trainable else "device"
            yield Array("master", tier, (self.held("update") * self.beside_itemsize,))
        if key.trainable:
            yield from self._grad()
        if self.residual_nbytes:
            yield Array("residual", "device", (self.residual_nbytes,))
        if self.updates:
            yield from self._moments(part)

    def _grad(self) -> Iterator[Array]:
        itemsize = self.key.reduce_dtype.itemsize
        if self.setting.grad_buffer:
            yield Array("grad", "device", (self.layout.numel * itemsize,))
        elif not self.setting.plan.release:
            yield Array("grad", self.tiers.grads, (self.held("grad") * itemsize,))
            if self.sums_rest and itemsize < 4:  # beside those of a first micro-batch, which keep their memory
                yield Array("grad", self.tiers.grads, (self.held("grad") * 4,))

    def _moments(self, part: int) -> Iterator[Array]:
        count, plan, segments = self.setting.moments, self.setting.plan, self.segments(part)
        assert self.key.master_dtype is not None
        if not segments or not count:
            return
        if not self.streamed:
            pieces = tuple(segment.numel * self.key.master_dtype.itemsize for segment in segments)
            yield Array("moments", "device", pieces * count)
            return
        last = segments[-1]
        codes = (last.offset + last.numel) * int(moment_itemsize(plan.moments, self.key.master_dtype))
        scales = sum(small.scale_count(segment.numel) for segment in segments) * 4
        pieces = (codes, scales) if plan.moments == "int8" else (codes,)
        yield Array("moments", self.tiers.moments, pieces * count)

    # ---- on the way

    def parts(self, numel: int) -> Iterator[tuple[str, int]]:
        """(tier, bytes) of what an update of so many elements reads and writes beside what is on the device."""
        key, plan = self.key, self.setting.plan
        assert key.master_dtype is not None
        found = [(self.tiers.compute if self.frees else "device", key.compute_dtype.itemsize)]
        if self.beside_itemsize:
            found.append((self.tiers.master, self.beside_itemsize))
        itemsize = int(moment_itemsize(plan.moments, key.master_dtype))
        found += [(self.tiers.moments, itemsize)] * self.setting.moments
        if not self.setting.grad_buffer and not plan.release:
            found.append((self.tiers.grads, key.reduce_dtype.itemsize))
        sizes = [(tier, numel * each) for tier, each in found]
        if plan.moments == "int8":
            sizes += [(self.tiers.moments, small.scale_count(numel) * 4)] * self.setting.moments
        for tier, nbytes in sizes:
            if tier != "device":
                yield tier, -(-nbytes // _ALIGNED) * _ALIGNED

    def chunk_numel(self, part: int) -> int:
        """The largest chunk: of one segment, or of several where one launch does for them."""
        setting = self.setting
        merges = setting.by_pass(self.key) and setting.plan.moments != "int8" and not setting.adopts
        longest = run = end = 0
        for segment in self.segments(part):
            run = run + segment.numel if merges and segment.offset == end else segment.numel
            end = segment.offset + segment.numel
            longest = max(longest, run)
        return min(longest, setting.chunk)


class Window(NamedTuple):
    """Bytes that state passes through: on the device, and in pinned host memory before or behind it."""

    device: int = 0
    host: int = 0


def window_of(lanes: Sequence[PlannedLane], part: int) -> Window:
    """The largest chunk's room, as often as there are windows; or what an update on the host takes."""
    away = [lane for lane in lanes if lane.streamed and any(tier != "device" for tier in lane.tiers)]
    device = staged = 0
    for lane in away:
        if not lane.wide:
            parts = list(lane.parts(lane.chunk_numel(part)))
            device = max(device, sum(nbytes for _, nbytes in parts))
            staged = max(staged, sum(nbytes for tier, nbytes in parts if tier == "disk"))
    blocks = [nbytes + _ALIGNED if nbytes else 0 for nbytes in (device, staged)]
    found = Window(WINDOWS * blocks[0], WINDOWS * pinned_nbytes(blocks[1]))
    wide = [lane for lane in away if lane.wide]
    if wide:
        itemsize = max(lane.key.master_dtype.itemsize for lane in wide if lane.key.master_dtype is not None)
        sizes = [(lane.held("update"), len(lane.segments(part))) for lane in wide]
        slot = batch_numel(lanes[0].setting.chunk, sizes) * itemsize
        slots = (AHEAD + 1) * 2 * slot, (AHEAD + 1) * pinned_nbytes(slot)
        found = Window(found.device + slots[0], found.host + slots[1])
    return found


def plan_lanes(units: Sequence[UnitSpec], setting: Setting) -> tuple[list[list[PlannedLane]], Setting]:
    """By unit; and the setting with the chunk's size. With offload="auto" state is on the device: see automatic.py."""
    places = Places(setting.plan, torch.device("cpu"))
    planned = [
        [PlannedLane(**vars(spec), unit=n, tiers=rest.tiers, wide=rest.wide, setting=setting) for spec, rest in lanes]
        for n, lanes in enumerate(spec_units(units, setting.plan, setting.sizes, places, setting.experts))
    ]
    mastered = [lane for lanes in planned for lane in lanes if lane.key.master_dtype is not None]
    setting = setting.with_chunk(sum(lane.held("update") for lane in mastered))
    return [[replace(lane, setting=setting) for lane in lanes] for lanes in planned], setting


def moved(lane: PlannedLane, tier: str) -> PlannedLane:
    """With its state on this tier; a master that is kept whole stays."""
    master = tier if lane.beside_itemsize == 2 else lane.tiers.master
    return replace(lane, tiers=lane.tiers._replace(master=master, moments=tier))


def fullest_part(lanes: Sequence[PlannedLane], count: int) -> int:
    """Of so many parts that updates are cut into, the one whose moments take most; of very many one that has no
    padding, where there is one."""
    parts = range(count) if count <= _EVERY_PART else (0, 1, count // 2, count - 1)

    def held(part: int) -> int:
        return sum(array.nbytes for lane in lanes if lane.updates for array in lane._moments(part))

    return max(parts, key=held)


def rounded_nbytes(arrays: Sequence[Array]) -> int:
    """What arrays on the device take of the allocator."""
    return sum(device_nbytes(piece) for array in arrays for piece in array.pieces)


# ---- how allocators round


def device_nbytes(nbytes: int) -> int:
    """What max_memory_allocated counts for a request, where it gets a segment of its own."""
    rounded = -(-nbytes // _GRAIN) * _GRAIN
    if rounded < _LARGE:
        return rounded
    segment = -(-rounded // _SEGMENT) * _SEGMENT
    return rounded if segment - rounded > _MIB else segment


def reused_nbytes(nbytes: int) -> int:
    """The most it counts where memory is handed out again: a block may be up to 1 MiB larger than what is asked for."""
    rounded = -(-nbytes // _GRAIN) * _GRAIN
    return rounded if rounded < _LARGE else rounded + _MIB


def pinned_nbytes(nbytes: int) -> int:
    """What torch's pinned memory takes for a request."""
    return 1 << (nbytes - 1).bit_length() if nbytes else 0
