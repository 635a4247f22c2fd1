"""Matrices: which whole rows of which parameters lie in what a hop of a reduce is given.

The first hop is given the whole lane. A later one is given what the hops before leave on this rank, piece after piece
in the order of the lane; all ranks of its axis have the same pieces. A matrix is whole rows (of everything behind the
first dimension) of one parameter inside one piece; what lies beside matrices is rows that are cut, vectors, and
matrices that their factors would not shorten. Integers only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from zeor.layout.grid import Grid, Span
from zeor.layout.lane import LaneLayout

SHORTENED = 2  # factors are sent only where they have so many times fewer elements than the matrix


class Matrix(NamedTuple):
    """Elements [begin, begin + rows * columns) of what the hop is given, row by row."""

    begin: int
    rows: int
    columns: int

    @property
    def end(self) -> int:
        return self.begin + self.rows * self.columns


class Pieces(NamedTuple):
    """What a hop is given. `beside`: stretches of parameters that lie in no matrix. Gaps of the lane are in neither."""

    matrices: tuple[Matrix, ...]
    beside: tuple[Span, ...]

    def factor_numels(self, rank: int) -> tuple[int, int]:
        """Elements of all P, with what lies beside, and of all Q."""
        rows, columns = (sum(getattr(each, side) for each in self.matrices) for side in ("rows", "columns"))
        return rank * rows + sum(span.numel for span in self.beside), rank * columns


def inputs(grid: Grid, coords: Sequence[int], numel: int) -> list[list[Span]]:
    """By hop: the stretches of the lane that it is given on this rank."""
    found, spans = [], [Span(0, numel)]
    for hop in grid.hops():
        found.append(spans)
        total = sum(span.numel for span in spans)
        part = total // hop.blocks // grid.sizes[hop.axis]
        own = [(block * grid.sizes[hop.axis] + coords[hop.axis]) * part for block in range(hop.blocks)]
        spans = [piece for begin in own for piece in _within(spans, Span(begin, begin + part))]
    return found


def _within(spans: Sequence[Span], wanted: Span) -> list[Span]:
    """Of stretches one after another, those elements, counted from the first."""
    found, at = [], 0
    for span in spans:
        low, high = max(wanted.begin, at), min(wanted.end, at + span.numel)
        if low < high:
            found.append(Span(span.begin + low - at, span.begin + high - at))
        at += span.numel
    return found


def places_of(spans: Sequence[Span], param: Span) -> list[Span]:
    """Where a stretch of the lane lies in what a hop is given."""
    found, at = [], 0
    for span in spans:
        low, high = max(param.begin, span.begin), min(param.end, span.end)
        if low < high:
            found.append(Span(at + low - span.begin, at + high - span.begin))
        at += span.numel
    return found


def pieces_of(layout: LaneLayout, spans: Sequence[Span], rank: int) -> Pieces:
    matrices: list[Matrix] = []
    beside: list[Span] = []
    at = 0
    for span in spans:
        for segment in layout.segments_in(span):
            first, shape = at + segment.offset, layout.shapes[segment.param]
            columns = layout.numels[segment.param] // shape[0] if len(shape) > 1 else 0
            begin = -(-segment.start // columns) if columns else 0
            rows = (segment.start + segment.numel) // columns - begin if columns else 0
            if rows < 1 or SHORTENED * rank * (rows + columns) > rows * columns:
                beside.append(Span(first, first + segment.numel))
                continue
            matrix = Matrix(first + begin * columns - segment.start, rows, columns)
            matrices.append(matrix)
            cut = (Span(first, matrix.begin), Span(matrix.end, first + segment.numel))
            beside += [each for each in cut if each.numel]
        at += span.numel
    return Pieces(tuple(matrices), tuple(beside))
