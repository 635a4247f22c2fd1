"""Every byte that training keeps has a role, and a stage is a column of one table, per axis.

Nothing else in zeor knows the word "stage": the engine is handed a `Table` with a column for each axis of ranks, and
asks it where a role rests. The collective that brings a role from one residency to another is a look-up too. The buffer
of full size that gradients arrive in stays where the innermost axis' column says so: what travels across is smaller.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

from zeor.plan import Stages


class Residency(Enum):
    FULL = "full"  # the same values on every rank
    PARTIAL = "partial"  # full size, this rank's own unreduced part; never at rest
    SLICE = "slice"  # this rank's part


@dataclass(frozen=True)
class Column:
    """Where each role rests between two steps.

    compute: what forward reads. grad: the sum, between backward and step. grad_buffer: whether the
    full-size buffer that gradients arrive in stays allocated. update: master and moments, that is,
    the part of the model this rank's optimizer works on.
    """

    compute: Residency
    grad: Residency
    grad_buffer: bool
    update: Residency


STAGES: dict[int, Column] = {
    0: Column(Residency.FULL, Residency.FULL, True, Residency.FULL),
    1: Column(Residency.FULL, Residency.SLICE, True, Residency.SLICE),
    2: Column(Residency.FULL, Residency.SLICE, False, Residency.SLICE),
    3: Column(Residency.SLICE, Residency.SLICE, False, Residency.SLICE),
}


class Sizes(NamedTuple):
    """Ranks along each axis of a lane, innermost first: see Note [Axes] in comm/axes.py."""

    inside: int
    across: int = 1


class Table(NamedTuple):
    """Where each role rests, by axis: a column for each."""

    inside: Column
    across: Column

    def cut(self, role: str) -> frozenset[int]:
        """The axes that a role is cut along, by number; one of them may have a single rank."""
        return frozenset(axis for axis, column in enumerate(self) if getattr(column, role) is Residency.SLICE)


def table_of(stages: Stages, stays_whole: bool = False) -> Table:
    """Of one lane: `stays_whole` where every rank keeps what forward reads."""
    columns = [STAGES[stage] for stage in stages]
    return Table(*(replace(column, compute=Residency.FULL) if stays_whole else column for column in columns))


# How a buffer gets from one residency to another. PARTIAL -> FULL is a reduce and a gather, never an
# all-reduce: the sums of an all-reduce differ in bits from those of a reduce, and the stages must not.
MOVES: dict[tuple[Residency, Residency], tuple[str, ...]] = {
    (Residency.SLICE, Residency.FULL): ("gather",),
    (Residency.PARTIAL, Residency.SLICE): ("reduce",),
    (Residency.PARTIAL, Residency.FULL): ("reduce", "gather"),
    (Residency.FULL, Residency.SLICE): (),
    (Residency.FULL, Residency.FULL): (),
    (Residency.SLICE, Residency.SLICE): (),
}

ROLES = ("compute", "grad", "master", "moments")
