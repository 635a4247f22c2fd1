"""What each lane of a plan's wire travels in: codecs by axis, or None where it travels exactly.

Integer parameters, small ones that stay whole, and weights that rest as 8-bit codes already travel as they are; so does
what a format would not shorten. Weights are rounded to nearest, since every gather of one value must give one result;
gradients as the plan says. See comm/wires.py for how, memory/codecs.py for the formats.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from zeor.memory.codecs import BLOCK_FORMATS, Codec
from zeor.memory.roles import Sizes, table_of
from zeor.plan import Plan, Wire
from zeor.spec.keys import LaneKey

ByAxis = tuple[Codec | None, Codec | None]  # (inside, across)


@dataclass(frozen=True)
class LaneWires:
    """gather: of weights. reduce: of gradients to be summed. spread: of sums, to ranks that keep more of them.
    open: weights that travel exactly may yet come to travel as codes."""

    gather: ByAxis = (None, None)
    reduce: ByAxis = (None, None)
    spread: ByAxis = (None, None)
    open: bool = False

    @property
    def any(self) -> bool:
        return any(codec is not None for codecs in (self.gather, self.reduce, self.spread) for codec in codecs)


EXACT = LaneWires()


def differs(codec: Codec) -> bool:
    """Of weights: what travels is the difference to what the receivers hold."""
    return codec.format == "int4"


def lane_wires(key: LaneKey, wire: Wire | None, slice_numel: int) -> LaneWires:
    """Of lanes that are cut into slices of so many elements."""
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
    reduce, spread = (
        [
            _shorter(_of_gradients(name, each, key.reduce_dtype), slice_numel, key.reduce_dtype)
            for name, each in zip(names, (inside, across))
        ]
        for names in ((inside.reduce, across.reduce), (inside.gather, across.gather))
    )
    return LaneWires((weights[0], weights[1]), (reduce[0], reduce[1]), (spread[0], spread[1]), leaves_open)


def _codec(name: str, dtype: torch.dtype) -> Codec | None:
    return None if name == "exact" or (name == "bf16" and dtype == torch.bfloat16) else Codec(name)


def _shorter(codec: Codec | None, numel: int, dtype: torch.dtype) -> Codec | None:
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
    if both and wire.gather == "int4":
        raise ValueError(
            "Wire.gather='int4' sends weights as differences, which is for the first of the axes that they travel "
            f"along, and at stages {plan.stages} they travel across and then inside; give across='int4' with another "
            "gather=, such as 'int8'."
        )
