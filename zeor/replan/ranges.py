"""Who sends which elements to whom: what ranks have of flat tensors, and what they want of them.

Integers only. Every rank is told the same and computes its own part of the answer. A stream is what one rank sends to
one other, in the order of the tensors; `windows` cuts it into pieces that a message of bounded length can hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

ALIGN_NBYTES = 16  # of each piece in a message: the widest element there is


class Range(NamedTuple):
    """Elements [begin, end) of a flattened tensor."""

    begin: int
    end: int

    @property
    def numel(self) -> int:
        return self.end - self.begin


Ranges = Sequence[Range]


class Part(NamedTuple):
    """Elements of one tensor, by its number among those that move together."""

    tensor: int
    begin: int
    end: int


class Placed(NamedTuple):
    """A part, and the bytes where it begins in a message."""

    part: Part
    at: int


def common(some: Ranges, others: Ranges) -> list[Range]:
    """The elements in both; each of the two holds an element once."""
    found = (Range(max(a.begin, b.begin), min(a.end, b.end)) for a in some for b in others)
    return sorted(each for each in found if each.begin < each.end)


def without(some: Ranges, others: Ranges) -> list[Range]:
    """The elements of `some` that are not in `others`."""
    left = list(some)
    for other in others:
        cut = [(Range(a.begin, min(a.end, other.begin)), Range(max(a.begin, other.end), a.end)) for a in left]
        left = [each for pair in cut for each in pair if each.begin < each.end]
    return sorted(left)


def stream(has: Sequence[Ranges], wants: Sequence[Ranges]) -> list[Part]:
    """By tensor what one rank has and another wants: what the first sends to the second."""
    return [Part(n, *each) for n, (a, b) in enumerate(zip(has, wants)) for each in common(a, b)]


def windows(parts: Sequence[Part], itemsizes: Sequence[int], nbytes: int) -> Iterator[list[Placed]]:
    """A stream in pieces, each window of at most so many bytes (a multiple of ALIGN_NBYTES)."""
    window: list[Placed] = []
    at = 0
    for tensor, first, end in parts:
        begin = first
        while begin < end:
            fits = (nbytes - at) // itemsizes[tensor]
            if fits <= 0:
                yield window
                window, at = [], 0
                continue
            last = min(end, begin + fits)
            window.append(Placed(Part(tensor, begin, last), at))
            at += -(-(last - begin) * itemsizes[tensor] // ALIGN_NBYTES) * ALIGN_NBYTES
            begin = last
    if window:
        yield window


def length(window: Sequence[Placed], itemsizes: Sequence[int]) -> int:
    """Bytes of a message that holds a window."""
    if not window:
        return 0
    (tensor, begin, end), at = window[-1]
    return at + -(-(end - begin) * itemsizes[tensor] // ALIGN_NBYTES) * ALIGN_NBYTES
