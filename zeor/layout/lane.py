"""The layout of one lane: parameters side by side in one flat buffer, cut into one slice per rank.

    |<------ slice 0 ------>|<------ slice 1 ------>|<------ slice 2 ------>|
    | qkv.weight ........... | .. | proj.weight ....... | .. | norm | pad    |
                               ^ gap: only between parameters, always zero

A parameter is one contiguous range of its lane; a slice is one contiguous range of the lane; the
part of a parameter inside a slice is a segment. This module knows only integers. Whoever holds a
`LaneLayout` may trust it: `check()` runs at construction.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from zeor.layout.grid import Span

# Padding may cost this part of a lane; past it a cheaper way to cut is taken (Note [How a lane is cut]).
MAX_PADDING = 0.01


@dataclass(frozen=True)
class Segment:
    """The part of one parameter inside one slice: elements [start, start + numel) of the flattened
    parameter lie at [offset, offset + numel) of the slice. Never empty."""

    param: int
    start: int
    numel: int
    offset: int


@dataclass(frozen=True)
class LaneLayout:
    """Where each parameter of one lane lies, and where the lane is cut.

    `offsets[i]` is the first element of parameter i in the lane; slice r is
    [r * slice_numel, (r + 1) * slice_numel). `cut` says at what the cuts fall: "rows" or "elements".
    """

    shapes: tuple[tuple[int, ...], ...]
    world: int
    offsets: tuple[int, ...]
    slice_numel: int
    cut: str
    numels: tuple[int, ...] = field(init=False)
    numel: int = field(init=False)  # elements of the whole lane, gaps and padding included

    def __post_init__(self) -> None:
        object.__setattr__(self, "numels", tuple(math.prod(shape) for shape in self.shapes))
        object.__setattr__(self, "numel", self.world * self.slice_numel)
        self.check()

    @property
    def padding_numel(self) -> int:
        return self.numel - sum(self.numels)

    @cached_property
    def _found(self) -> dict[Span, tuple[Segment, ...]]:
        return {}

    def segments(self, rank: int) -> tuple[Segment, ...]:
        """The segments of one slice, in the order of the lane."""
        return self.segments_in(self.span(range(rank, rank + 1)))

    def whole(self) -> tuple[Segment, ...]:
        """The parameters as segments of the whole lane: what a rank that updates everything holds."""
        return self.segments_in(Span(0, self.numel))

    def span(self, slices: range) -> Span:
        """The elements of some slices side by side."""
        return Span(slices.start * self.slice_numel, slices.stop * self.slice_numel)

    def segments_in(self, span: Span) -> tuple[Segment, ...]:
        """The segments of a stretch of the lane, in its order."""
        if span not in self._found:
            self._found[span] = tuple(self._segments_of(span))
        return self._found[span]

    def _segments_of(self, span: Span) -> Iterator[Segment]:
        for param, (numel, offset) in enumerate(zip(self.numels, self.offsets)):
            low, high = max(span.begin, offset), min(span.end, offset + numel)
            if low < high:
                yield Segment(param, low - offset, high - low, low - span.begin)

    def gaps(self) -> tuple[tuple[int, int], ...]:
        """The half-open ranges of the lane that belong to no parameter."""
        found, position = [], 0
        for numel, offset in zip(self.numels, self.offsets):
            if offset > position:
                found.append((position, offset))
            position = offset + numel
        if position < self.numel:
            found.append((position, self.numel))
        return tuple(found)

    def check(self) -> None:
        """The invariants of a layout, cheap enough to be checked always."""
        assert self.world >= 1 and self.slice_numel >= 0
        assert len(self.offsets) == len(self.shapes)
        position = 0
        for numel, offset in zip(self.numels, self.offsets):
            assert offset >= position, "parameters overlap or are out of order"
            position = offset + numel
        assert position <= self.numel, "the last parameter ends outside the lane"


def lay_out(shapes: Sequence[Sequence[int]], world: int) -> LaneLayout:
    """Place parameters of these shapes, in this order, in a lane cut into `world` equal slices.

    Note [How a lane is cut]
    ~~~~~~~~~~~~~~~~~~~~~~~~
    Two wishes cost padding. Cuts at rows (a row is one run of the last dimension) keep a quantisation
    block or a row-wise statistic on one rank: the slice must then be a multiple of every row length
    that can be cut, and each matrix start at a multiple of its own. Aligned starts keep matrix
    products and vector loads at full speed. The ladder below is walked from the most generous rung to
    the plainest; the first whose padding stays within MAX_PADDING of the lane is taken. Padding of
    less than one element per rank plus what equal slices need can never be avoided, so the last rung
    always holds.
    """
    fixed = tuple(tuple(int(n) for n in shape) for shape in shapes)
    numels: list[int] = [math.prod(shape) for shape in fixed]
    rows = [shape[-1] if len(shape) > 1 and numel else 1 for shape, numel in zip(fixed, numels)]
    allowed = MAX_PADDING * sum(numels)
    for cut, align in (("rows", 64), ("elements", 64), ("elements", 8), ("elements", 1)):
        offsets, end = _place(numels, rows if cut == "rows" else [1] * len(rows), align)
        granule = math.lcm(align, *rows) if cut == "rows" else align
        slice_numel = _round_up(-(-end // world), granule)
        if slice_numel * world - sum(numels) <= allowed or (cut, align) == ("elements", 1):
            return LaneLayout(fixed, world, offsets, slice_numel, cut)
    raise AssertionError("the last rung always holds")


def _place(numels: Sequence[int], rows: Sequence[int], align: int) -> tuple[tuple[int, ...], int]:
    offsets, position = [], 0
    for numel, row in zip(numels, rows):
        position = _round_up(position, math.lcm(align, row))
        offsets.append(position)
        position += numel
    return tuple(offsets), position


def _round_up(value: int, granule: int) -> int:
    return -(-value // granule) * granule
