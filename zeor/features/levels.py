"""How much each call of a recomputed unit keeps for its backward: the decision of recompute="auto", in integers alone.

Note [Three levels]
~~~~~~~~~~~~~~~~~~~
A call keeps its inputs alone (AGAIN), the results of its products too (PRODUCTS, see products.py), or all that its
backward reads (ALL). Products take most of a forward's time, and their results a part of the bytes: a byte spent on
them saves more time than a byte spent on the rest. So as many of the last calls as fit keep their products first, and
only then as many of these as fit keep all. Of calls that are alike no other choice saves more, but for what is left
over because calls are whole. Where products take as much as everything (or cannot be kept apart) a call keeps all at
once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import NamedTuple


class Level(Enum):
    AGAIN = "again"
    PRODUCTS = "products"
    ALL = "all"


class Need(NamedTuple):
    """Bytes that one call would keep beside its inputs."""

    whole: int
    products: int

    def at(self, level: Level) -> int:
        return {Level.AGAIN: 0, Level.PRODUCTS: self.products, Level.ALL: self.whole}[level]


class Interval(NamedTuple):
    """From the beginning of one recomputation to the next, every call being computed again."""

    peak_nbytes: int
    to_come: frozenset[int]  # calls whose activations are still needed then, the one that is being computed left out


class Kept(NamedTuple):
    """So many of the last calls of a pass keep at least their products, and so many of the last all."""

    products: int
    whole: int

    def level(self, needs: Sequence[Need], call: int) -> Level:
        behind = len(needs) - call
        if behind <= self.whole:
            return Level.ALL
        if behind > self.products:
            return Level.AGAIN
        return Level.PRODUCTS if needs[call].products < needs[call].whole else Level.ALL

    def by_call(self, needs: Sequence[Need]) -> dict[int, int]:
        """Bytes of the calls that keep some."""
        calls = range(len(needs) - max(self), len(needs))
        return {call: needs[call].at(self.level(needs, call)) for call in calls}

    def nbytes(self, needs: Sequence[Need]) -> int:
        return sum(self.by_call(needs).values())

    def least(self, other: Kept) -> Kept:
        return Kept(min(self.products, other.products), min(self.whole, other.whole))


NOTHING = Kept(0, 0)


def choose(
    needs: Sequence[Need], intervals: Sequence[Interval], limit_nbytes: int, most_nbytes: int | None = None
) -> Kept:  # fmt: skip
    """What calls may keep so that no peak passes the limit, and all of it together not `most_nbytes`."""

    def fits(kept: Kept) -> bool:
        if most_nbytes is not None and kept.nbytes(needs) > most_nbytes:
            return False
        return expected_nbytes(needs, intervals, kept) <= limit_nbytes

    return largest(len(needs), fits)


def expected_nbytes(needs: Sequence[Need], intervals: Sequence[Interval], kept: Kept) -> int:
    """The peak where calls keep so much."""
    nbytes = kept.by_call(needs)
    return max(
        (peak + sum(each for call, each in nbytes.items() if call in to_come) for peak, to_come in intervals), default=0
    )


def largest(count: int, fits: Callable[[Kept], bool]) -> Kept:
    """What fits of so many calls, in the order of Note [Three levels]; `fits` holds of less where it holds of more."""
    products = _most(count, lambda each: fits(Kept(each, 0)))
    return Kept(products, _most(products, lambda each: fits(Kept(products, each))))


def _most(count: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to `count` that fits; 0 where none does."""
    low, high = 0, count
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
