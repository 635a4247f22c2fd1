"""What each lane of a plan's wire travels in: codecs by axis, or None where it travels exactly.

Integer parameters, small ones that stay whole, and weights that rest as 8-bit codes already travel as they are; so does
what a format would not shorten. Weights are rounded to nearest, since every gather of one value must give one result;
gradients as the plan says. See comm/wires.py for how, memory/codecs.py for the formats.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch

from zeor.layout import Grid, LaneLayout
from zeor.layout.matrices import inputs, pieces_of
from zeor.memory import sparse
from zeor.memory.codecs import BLOCK_FORMATS, Codec, Encoding
from zeor.memory.lowrank import LowRank
from zeor.memory.roles import Sizes, table_of
from zeor.plan import DIFFERENCES, Plan, PowerSGD, RandomK, Sign, TopK, Wire
from zeor.spec.keys import LaneKey

ByAxis = tuple[Codec | None, Codec | None]  # (inside, across)
Reduced = Encoding | LowRank  # how gradients travel to be summed


@dataclass(frozen=True)
class LaneWires:
    """gather: of weights. reduce: of gradients to be summed. spread: of sums, to ranks that keep more of them. keeps:
    by axis, whether what a reduce leaves out is added to the next. warmup: how many steps it is exact before. open:
    weights that travel exactly may yet come to travel as codes."""

    gather: ByAxis = (None, None)
    reduce: tuple[Reduced | None, Reduced | None] = (None, None)
    spread: ByAxis = (None, None)
    keeps: tuple[bool, bool] = (False, False)
    warmup: tuple[int, int] = (0, 0)
    open: bool = False

    @property
    def any(self) -> bool:
        return any(codec is not None for codecs in (self.gather, self.reduce, self.spread) for codec in codecs)


EXACT = LaneWires()


def differs(codec: Encoding) -> bool:
    """Of weights: what travels is the difference to what the receivers hold."""
    return isinstance(codec, Codec) and codec.format in DIFFERENCES


def lane_wires(key: LaneKey, wire: Wire | None, layout: LaneLayout, grid: Grid) -> LaneWires:
    """Of a lane that is cut so."""
    slice_numel = layout.slice_numel
    if wire is None or key.stays_whole or not key.reduce_dtype.is_floating_point:
        return EXACT
    inside, across = wire.axes
    weights = [
        None if key.coded else _shorter(_codec(each.gather, key.compute_dtype), slice_numel, key.compute_dtype)
        for each in (inside, across)
    ]
    leaves_open = wire.auto and not key.coded and _shorter(Codec("int4"), slice_numel, key.compute_dtype) is not None
    if not key.trainable:
        return LaneWires((weights[0], weights[1]), open=leaves_open)
    spread = [
        _shorter(_of_gradients(each.gather, each, key.reduce_dtype), slice_numel, key.reduce_dtype)
        for each in (inside, across)
    ]
    reduce = [_reduced(each, key.reduce_dtype, layout, grid, axis) for axis, each in enumerate((inside, across))]
    keeps = [codec is not None and each.keeps for codec, each in zip(reduce, (inside, across))]
    return LaneWires(
        (weights[0], weights[1]),
        (reduce[0], reduce[1]),
        (spread[0], spread[1]),
        (keeps[0], keeps[1]),
        (inside.warmup, across.warmup),
        leaves_open,
    )


def _reduced(wire: Wire, dtype: torch.dtype, layout: LaneLayout, grid: Grid, axis: int) -> Reduced | None:
    """None where the lane's gradients travel exactly along this axis, as nothing would make them shorter."""
    if isinstance(wire.reduce, PowerSGD):
        return _low_rank(wire.reduce.rank, layout, grid, axis)
    made: Encoding | None
    if isinstance(wire.reduce, TopK):
        made = sparse.TopK(wire.reduce.fraction)
    elif isinstance(wire.reduce, RandomK):
        made = sparse.RandomK(wire.reduce.fraction)
    elif isinstance(wire.reduce, Sign):
        made = sparse.Sign()
    else:
        made = _of_gradients(wire.reduce, wire, dtype)
    return _shorter(made, layout.slice_numel, dtype)


def _low_rank(rank: int, layout: LaneLayout, grid: Grid, axis: int) -> LowRank | None:
    """Ranks along an axis have the same pieces of the lane, those elsewhere others: the most of any."""
    hop = next((number for number, hop in enumerate(grid.hops()) if hop.axis == axis), None)
    if hop is None:
        return None
    sizes = grid.sizes
    places = [(inside, 0) for inside in range(sizes[0])] if axis else [(0, 0)]
    found = [pieces_of(layout, inputs(grid, place, layout.numel)[hop], rank) for place in places]
    if not any(pieces.matrices for pieces in found):
        return None
    padded = [sum(-(-n // sizes[axis]) * sizes[axis] for n in pieces.factor_numels(rank)) for pieces in found]
    return LowRank(rank, max(padded), max(pieces.factor_numels(rank)[1] for pieces in found))


def _codec(name: str, dtype: torch.dtype) -> Codec | None:
    return None if name == "exact" or (name == "bf16" and dtype == torch.bfloat16) else Codec(name)


Some = TypeVar("Some", bound=Encoding)


def _shorter(codec: Some | None, numel: int, dtype: torch.dtype) -> Some | None:
    """None where a block has so few elements in it that its codes would be longer."""
    return None if codec is None or codec.nbytes(numel) >= numel * dtype.itemsize else codec


def _of_gradients(name: str, wire: Wire, dtype: torch.dtype) -> Codec | None:
    if _codec(name, dtype) is None:
        return None
    return Codec(name, wire.rounding == "stochastic", wire.rotate and name in BLOCK_FORMATS)


def check_wire(plan: Plan, sizes: Sizes) -> None:
    """What a plan alone cannot know: how many axes there are."""
    wire = plan.wire
    if wire is None:
        return
    if wire.across is not None and sizes.across == 1:
        raise ValueError(
            "Wire.across is for what crosses the outer axis of ranks, and there is one axis; give gather= and reduce=, "
            "or make two axes by hierarchy='auto' or a mesh of two dimensions."
        )
    cut = table_of(plan.stages)
    both = cut.cut("update") - cut.cut("compute") >= {0, 1} and min(sizes) > 1
    if both and wire.gather in DIFFERENCES:
        raise ValueError(
            f"Wire.gather={wire.gather!r} sends weights as differences, which is for the first of the axes that they "
            f"travel along, and at stages {plan.stages} they travel across and then inside; give it to across= with "
            "another gather=, such as 'int8'."
        )
