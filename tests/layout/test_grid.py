"""The grid: whatever the axes, their sizes and what they cut, every rank's stretch is where gathers and reduces put it.

Hops are played through with numpy on every rank at once, so these tests know nothing of how a place is computed.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeor.layout import Cut, Grid, Span

AXES = st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple)
Coords = tuple[int, ...]


@st.composite
def grids(draw: st.DrawFn) -> tuple[Grid, Cut]:
    """A grid, and what an update is cut along there."""
    sizes = draw(AXES)
    cut = frozenset(draw(st.sets(st.integers(0, len(sizes) - 1))))
    return Grid.of(sizes, cut), cut


def ranks(grid: Grid) -> list[Coords]:
    return list(itertools.product(*(range(size) for size in grid.sizes)))


def others(grid: Grid, coords: Coords, axis: int) -> list[Coords]:
    """The ranks that share a group of this axis with one, in their order there."""
    return [(*coords[:axis], place, *coords[axis + 1 :]) for place in range(grid.sizes[axis])]


@given(grids())
def test_every_fine_slice_belongs_to_one_rank(found: tuple[Grid, Cut]) -> None:
    grid, _ = found
    assert sorted(grid.place(coords) for coords in ranks(grid)) == list(range(grid.count))
    for coords in ranks(grid):
        assert list(grid.stretch(coords, grid.every)) == [grid.place(coords)]
        assert list(grid.stretch(coords, frozenset())) == list(range(grid.count))


@given(grids())
def test_what_an_update_is_cut_along_alone_decides_who_holds_what(found: tuple[Grid, Cut]) -> None:
    """Ranks that differ along another axis alone hold the same; those that differ along a cut one share nothing."""
    grid, cut = found
    for one, other in itertools.combinations(ranks(grid), 2):
        mine, its = set(grid.stretch(one, cut)), set(grid.stretch(other, cut))
        shared = mine if all(one[axis] == other[axis] for axis in cut) else set()
        assert mine & its == shared and len(mine) == len(its)


@given(grids())
def test_gathers_along_the_widening_fill_everything(found: tuple[Grid, Cut]) -> None:
    grid, cut = found
    held = {coords: set(grid.stretch(coords, cut)) for coords in ranks(grid)}
    for axis in grid.widening(cut, frozenset()):
        held = {coords: set().union(*(held[other] for other in others(grid, coords, axis))) for coords in held}
    assert all(each == set(range(grid.count)) for each in held.values())


@given(grids())
def test_each_gather_of_a_widening_puts_parts_side_by_side(found: tuple[Grid, Cut]) -> None:
    """A gather writes the parts of an axis' ranks one behind another: that must be where they belong."""
    grid, cut = found
    for coords in ranks(grid):
        left = cut
        for axis in grid.widening(cut, frozenset()):
            parts = [list(grid.stretch(other, left)) for other in others(grid, coords, axis)]
            left = left - {axis}
            assert list(itertools.chain(*parts)) == list(grid.stretch(coords, left))


@given(grids())
def test_hops_leave_each_rank_the_sum_of_its_fine_slice(found: tuple[Grid, Cut]) -> None:
    grid, _ = found
    source = np.random.default_rng(0)
    whole = {coords: source.integers(0, 1000, grid.count) for coords in ranks(grid)}
    wanted = sum(whole.values())
    held = whole
    for hop in grid.hops():
        held = {coords: _reduced(grid, held, coords, hop.axis, hop.blocks) for coords in held}
    for coords, value in held.items():
        assert value.tolist() == [wanted[grid.place(coords)]]


def _reduced(grid: Grid, held: dict[Coords, np.ndarray], coords: Coords, axis: int, blocks: int) -> np.ndarray:
    """What one reduce-scatter along an axis leaves on a rank, block by block."""
    added = sum(held[other] for other in others(grid, coords, axis))
    rows = added.reshape(blocks, grid.sizes[axis], -1)
    return rows[:, coords[axis]].reshape(-1)


def test_the_innermost_axis_is_reduced_first() -> None:
    """So that what crosses nodes is a node's sum, whatever the update is cut along."""
    for cut in (frozenset(), frozenset({0}), frozenset({1}), frozenset({0, 1})):
        assert [hop.axis for hop in Grid.of((3, 2), cut).hops()] == [0, 1]


def test_an_update_cut_across_alone_is_reduced_in_blocks() -> None:
    grid = Grid.of((3, 2), frozenset({1}))
    assert grid.order == (1, 0) and list(grid.hops()) == [(0, 2), (1, 1)]
    assert grid.stretch((2, 1), frozenset({1})) == range(3, 6) and grid.place((2, 1)) == 5


def test_axes_of_one_rank_are_no_hops() -> None:
    assert list(Grid.of((1, 4), frozenset({0})).hops()) == [(1, 1)]
    assert Grid.of((1, 4), frozenset({0})).widening(frozenset({0, 1}), frozenset()) == [1]
    assert list(Grid.of((1, 1), frozenset()).hops()) == []


def test_a_stretch_in_two_pieces_is_refused() -> None:
    with pytest.raises(AssertionError, match="does not lie in one piece"):
        Grid.of((3, 2), frozenset({0})).stretch((0, 0), frozenset({1}))


@given(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9), st.integers(0, 9))
def test_a_span_within_another(first: int, before: int, inner: int, behind: int) -> None:
    outer = Span(first, first + before + inner + behind)
    span = Span(first + before, first + before + inner)
    assert span.within(outer) == Span(before, before + inner) and span.numel == inner
    assert outer.numel == math.fsum((before, inner, behind))
