"""The grid: ranks along axes, and which stretch of a lane each of them holds.

A lane is cut into one fine slice for each rank, whatever is kept where. An axis that a role is cut along divides it;
along another axis every rank holds the same. Two nodes of three ranks, `inside` a node first:

    cut along both      | 0,0 | 0,1 | 1,0 | 1,1 | 2,0 | 2,1 |     (inside, across): one fine slice each
    cut inside alone    |     0     |     1     |     2     |     both nodes hold the same three stretches

So that each stretch is in one piece, the axes that cut come first in `order`. Integers only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

Cut = frozenset[int]  # the axes that something is cut along, by number


class Span(NamedTuple):
    """Elements [begin, end) of a lane."""

    begin: int
    end: int

    @property
    def numel(self) -> int:
        return self.end - self.begin

    def within(self, outer: Span) -> Span:
        """The same elements, counted from the beginning of another span that holds them."""
        assert outer.begin <= self.begin and self.end <= outer.end
        return Span(self.begin - outer.begin, self.end - outer.begin)


class Hop(NamedTuple):
    """One step of a reduce: along this axis, `blocks` times, each over a stretch of its own."""

    axis: int
    blocks: int


@dataclass(frozen=True)
class Grid:
    """sizes: ranks along each axis, innermost first. order: the axes from the coarsest cut to the finest."""

    sizes: tuple[int, ...]
    order: tuple[int, ...]

    @classmethod
    def of(cls, sizes: Sequence[int], cut: Cut) -> Grid:
        """For updates that are cut along these axes."""
        axes = range(len(sizes))
        return cls(tuple(sizes), (*(a for a in axes if a in cut), *(a for a in axes if a not in cut)))

    @cached_property
    def count(self) -> int:
        return math.prod(self.sizes)

    @property
    def every(self) -> Cut:
        return frozenset(self.order)

    def place(self, coords: Sequence[int]) -> int:
        """Which fine slice belongs to the rank with these coordinates (innermost first)."""
        found = 0
        for axis in self.order:
            found = found * self.sizes[axis] + coords[axis]
        return found

    def stretch(self, coords: Sequence[int], cut: Cut) -> range:
        """The fine slices that this rank holds of what is cut along these axes."""
        first, length, coarser = 0, self.count, True
        for axis in self.order:
            if axis in cut:
                assert coarser or self.sizes[axis] == 1, "it does not lie in one piece"
                length //= self.sizes[axis]
                first += coords[axis] * length
            elif self.sizes[axis] > 1:
                coarser = False
        return range(first, first + length)

    def widening(self, cut: Cut, to: Cut) -> list[int]:
        """The axes to gather along, one after another, from what is cut along `cut` to what is cut along `to`."""
        return [axis for axis in reversed(self.order) if axis in cut - to and self.sizes[axis] > 1]

    def hops(self) -> Iterator[Hop]:
        """A reduce of a whole lane to this rank's fine slice: innermost axis first, so that what leaves a node is the
        node's sum. Where an axis is not the coarsest cut that is left, its parts lie in several stretches."""
        left = list(self.order)
        for axis in range(len(self.sizes)):
            blocks = math.prod(self.sizes[each] for each in left[: left.index(axis)])
            left.remove(axis)
            if self.sizes[axis] > 1:
                yield Hop(axis, blocks)
