"""Boxes: parts of a tensor as offsets and lengths per dimension, and flat ranges cut into them.

A slice is a range of a flattened parameter; a checkpoint speaks of boxes, so that a part cut some other way
(by columns, for tensor parallelism) fits the same words. A range of a row-major tensor is at most 2 n - 1
boxes, each of them contiguous. Knows integers only.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

_MOST_IN_PAIRS = 2048


class Box(NamedTuple):
    """Elements [begin, begin + length) in each dimension. Of a tensor without dimensions: its one element."""

    begin: tuple[int, ...]
    length: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.length)

    def inside(self, shape: Sequence[int]) -> bool:
        return len(self.begin) == len(self.length) == len(shape) and all(
            b >= 0 and n >= 1 and b + n <= size for b, n, size in zip(self.begin, self.length, shape)
        )

    def relative_to(self, other: Box) -> Box:
        """This box in the coordinates of one that contains it."""
        return Box(tuple(a - b for a, b in zip(self.begin, other.begin)), self.length)

    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(b, b + n) for b, n in zip(self.begin, self.length))


def whole(shape: Sequence[int]) -> Box:
    return Box((0,) * len(shape), tuple(shape))


def boxes_of_range(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Elements [start, stop) of the flattened tensor, in order, as few boxes."""
    assert 0 <= start <= stop <= math.prod(shape)
    if start == stop:
        return []
    if not shape or stop - start == math.prod(shape):
        return [whole(shape)]
    inner = math.prod(shape[1:])
    first, last = start // inner, (stop - 1) // inner
    if first == last:
        return _under(first, boxes_of_range(shape[1:], start - first * inner, stop - first * inner))
    found: list[Box] = []
    if start % inner:
        found += _under(first, boxes_of_range(shape[1:], start % inner, inner))
        first += 1
    rows = stop // inner - first
    if rows > 0:
        found.append(Box((first, *(0 for _ in shape[1:])), (rows, *shape[1:])))
    if stop % inner:
        found += _under(last, boxes_of_range(shape[1:], 0, stop % inner))
    return found


def _under(row: int, boxes: Iterable[Box]) -> list[Box]:
    return [Box((row, *box.begin), (1, *box.length)) for box in boxes]


def start_of(shape: Sequence[int], box: Box) -> int:
    """Where the box's first element lies in the flattened tensor."""
    position = 0
    for size, begin in zip(shape, box.begin):
        position = position * size + begin
    return position


def intersection(a: Box, b: Box) -> Box | None:
    begin = tuple(max(x, y) for x, y in zip(a.begin, b.begin))
    end = (min(x + m, y + n) for x, m, y, n in zip(a.begin, a.length, b.begin, b.length))
    length = tuple(e - s for s, e in zip(begin, end))
    return Box(begin, length) if all(n > 0 for n in length) else None


def tile(shape: Sequence[int], boxes: Sequence[Box]) -> bool:
    """Whether the boxes cover every element of the shape exactly once."""
    if not all(box.inside(shape) for box in boxes):
        return False
    if sum(box.numel for box in boxes) != math.prod(shape):
        return False
    # The counts agree, so the boxes cover everything if and only if no two of them meet.
    return _apart(list(boxes), 0, len(shape))


def _apart(boxes: list[Box], dim: int, dims: int) -> bool:
    """Whether no two boxes meet: told apart by one dimension after the other, so that many cost little more than a
    sort. Where no dimension does it all, pairs are looked at; so many that it would take long count as met."""
    if len(boxes) < 2:
        return True
    if dim == dims:
        return len(boxes) <= _MOST_IN_PAIRS and not any(intersection(a, b) for a, b in itertools.combinations(boxes, 2))
    boxes.sort(key=lambda box: box.begin[dim])
    near, end = [boxes[0]], boxes[0].begin[dim] + boxes[0].length[dim]
    for box in boxes[1:]:
        if box.begin[dim] >= end:
            if not _apart(near, dim + 1, dims):
                return False
            near = []
        near.append(box)
        end = max(end, box.begin[dim] + box.length[dim])
    return _apart(near, dim + 1, dims)
