"""The layout of a lane: whatever the shapes and the world, every element lies in one place, and padding is small.

Packing, cutting and putting together are played through with numpy on numbers that say where they belong, so
these tests know nothing of how a layout is computed. The figures of the design page are held at the end.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from zeor.layout import LaneLayout, lay_out

Shapes = list[tuple[int, ...]]

PRIMES = st.sampled_from([2, 3, 5, 7, 31, 127, 257, 1009])
SIZES = st.one_of(st.integers(0, 9), PRIMES, st.sampled_from([64, 100, 256, 768]))
SHAPES = st.lists(
    st.one_of(
        st.just(()),
        st.tuples(SIZES),
        st.tuples(SIZES, SIZES),
        st.tuples(st.integers(0, 5), st.integers(1, 7), SIZES),
    ),
    max_size=12,
)
WORLDS = st.integers(1, 64)
TEN_BLOCKS_ON_FIVE: Shapes = [(12, 12), (12,)] * 10
ODD_SIZES: Shapes = [(), (1,), (3,), (5,), (13,), (2, 3), (0,), (0, 4), (4, 0)]


def numels_of(shapes: Shapes) -> list[int]:
    return [math.prod(shape) for shape in shapes]


def pack(layout: LaneLayout, shapes: Shapes) -> np.ndarray:
    """A lane whose elements are numbered through all parameters; -1 where no parameter is."""
    lane = np.full(layout.numel, -1, dtype=np.int64)
    number = 0
    for offset, numel in zip(layout.offsets, numels_of(shapes), strict=True):
        assert (lane[offset : offset + numel] == -1).all(), "two parameters overlap"
        lane[offset : offset + numel] = np.arange(number, number + numel)
        number += numel
    return lane


def put_together(layout: LaneLayout, slices: list[np.ndarray], shapes: Shapes) -> tuple[list[np.ndarray], np.ndarray]:
    """The parameters made from segments alone, and how often each element was written."""
    flat = [np.full(numel, -1, dtype=np.int64) for numel in numels_of(shapes)]
    writes = [np.zeros(numel, dtype=np.int64) for numel in numels_of(shapes)]
    for rank, part in enumerate(slices):
        for segment in layout.segments(rank):
            target = slice(segment.start, segment.start + segment.numel)
            flat[segment.param][target] = part[segment.offset : segment.offset + segment.numel]
            writes[segment.param][target] += 1
    return flat, np.concatenate([*writes, np.zeros(0, dtype=np.int64)])


@settings(deadline=None, max_examples=200)
@given(SHAPES, WORLDS)
@example(TEN_BLOCKS_ON_FIVE, 5)
@example(ODD_SIZES, 4)
@example([(1,)], 64)
@example([], 3)
def test_segments_hold_every_element_once_and_make_the_parameters_again(shapes: Shapes, world: int) -> None:
    layout = lay_out(shapes, world)
    lane = pack(layout, shapes)
    slices = np.split(lane, world)
    assert all(len(part) == layout.slice_numel for part in slices)
    flat, writes = put_together(layout, slices, shapes)
    assert (writes == 1).all()
    number = 0
    for values in flat:
        assert (values == np.arange(number, number + len(values))).all()
        number += len(values)


@settings(deadline=None, max_examples=200)
@given(SHAPES, WORLDS)
@example(TEN_BLOCKS_ON_FIVE, 5)
@example(ODD_SIZES, 3)
def test_segments_are_never_empty_and_in_the_order_of_the_slice(shapes: Shapes, world: int) -> None:
    layout = lay_out(shapes, world)
    for rank in range(world):
        end = 0
        for segment in layout.segments(rank):
            assert segment.numel > 0
            assert segment.offset >= end
            end = segment.offset + segment.numel
        assert end <= layout.slice_numel
    whole = layout.whole()
    assert [s.param for s in whole] == [i for i, numel in enumerate(numels_of(shapes)) if numel]
    assert all((s.start, s.numel, s.offset) == (0, layout.numels[s.param], layout.offsets[s.param]) for s in whole)


@settings(deadline=None, max_examples=200)
@given(SHAPES, WORLDS)
@example(TEN_BLOCKS_ON_FIVE, 5)
@example(ODD_SIZES, 64)
def test_gaps_lie_only_between_parameters(shapes: Shapes, world: int) -> None:
    layout = lay_out(shapes, world)
    found = np.zeros(layout.numel, dtype=bool)
    for begin, end in layout.gaps():
        assert 0 <= begin < end <= layout.numel
        found[begin:end] = True
    assert (found == (pack(layout, shapes) == -1)).all()
    assert found.sum() == layout.padding_numel


@settings(deadline=None, max_examples=300)
@given(SHAPES, WORLDS)
@example(TEN_BLOCKS_ON_FIVE, 5)
@example(ODD_SIZES, 64)
@example([(1009,)], 64)
def test_padding_is_within_one_percent_or_cannot_be_avoided(shapes: Shapes, world: int) -> None:
    layout = lay_out(shapes, world)
    total = sum(numels_of(shapes))
    least = -(-total // world) * world - total
    assert layout.padding_numel <= 0.01 * total or layout.padding_numel == least


TALL_SHAPES = st.lists(
    st.one_of(st.tuples(st.integers(3000, 9000), st.integers(1, 16)), st.tuples(st.integers(0, 99))),
    min_size=1,
    max_size=6,
)


# Many lanes are cut at elements; those say nothing here.
@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.filter_too_much])
@given(TALL_SHAPES, st.integers(1, 8))
@example([(4096, 64), (64,), (128, 64)], 8)
@example([(768, 100), (2, 768, 100)], 3)
def test_row_cuts_fall_at_rows(shapes: Shapes, world: int) -> None:
    layout = lay_out(shapes, world)
    assume(layout.cut == "rows")
    for rank in range(world):
        for segment in layout.segments(rank):
            shape = shapes[segment.param]
            if len(shape) > 1:
                assert segment.start % shape[-1] == 0 and segment.numel % shape[-1] == 0


def test_row_cuts_are_chosen_where_they_are_cheap() -> None:
    assert lay_out([(4096, 64), (64,), (128, 64)], 8).cut == "rows"
    assert lay_out([(1009, 127), (31,)], 64).cut == "elements"


@settings(deadline=None)
@given(SHAPES, WORLDS)
def test_the_same_inputs_give_the_same_layout(shapes: Shapes, world: int) -> None:
    first, second = lay_out(shapes, world), lay_out(tuple(list(shape) for shape in shapes), world)
    assert first == second
    assert all(first.segments(rank) == second.segments(rank) for rank in range(world))


def test_a_world_of_one_holds_parameters_whole() -> None:
    layout = lay_out([(3, 5), (), (7,)], 1)
    assert [(s.param, s.start, s.numel) for s in layout.segments(0)] == [(0, 0, 15), (1, 0, 1), (2, 0, 7)]


def test_a_world_larger_than_the_parameters_leaves_ranks_empty() -> None:
    layout = lay_out([(3,)], 5)
    assert [len(layout.segments(rank)) for rank in range(5)] == [1, 1, 1, 0, 0]
    assert layout.slice_numel == 1


@pytest.mark.parametrize(
    "offsets, slice_numel, what",
    [((0, 3), 4, "overlap"), ((4, 0), 4, "overlap"), ((0, 6), 4, "ends outside")],
)
def test_a_layout_that_is_wrong_refuses_itself(offsets: tuple[int, ...], slice_numel: int, what: str) -> None:
    with pytest.raises(AssertionError, match=what):
        LaneLayout(((4,), (4,)), 2, offsets, slice_numel, "elements")


# The figures of the design page, for one block of a 7B Llama.

WIDTH, HIDDEN = 4096, 11008
BLOCK_7B: Shapes = [(WIDTH, WIDTH)] * 4 + [(HIDDEN, WIDTH)] * 2 + [(WIDTH, HIDDEN)] + [(WIDTH,)] * 2


def padding_part(layout: LaneLayout) -> float:
    return layout.padding_numel / sum(layout.numels)


def test_a_7b_block_is_cut_at_rows_on_64_ranks_for_a_third_of_a_percent() -> None:
    layout = lay_out(BLOCK_7B, 64)
    assert layout.cut == "rows"
    assert 0.002 < padding_part(layout) < 0.004


def test_a_7b_block_is_cut_at_elements_on_1024_ranks_where_rows_would_cost_three_quarters() -> None:
    layout = lay_out(BLOCK_7B, 1024)
    assert layout.cut == "elements"
    assert padding_part(layout) < 0.001
    row = math.lcm(WIDTH, HIDDEN)
    total = sum(numels_of(BLOCK_7B))
    rows_cost = -(-total // (1024 * row)) * 1024 * row / total - 1
    assert 0.75 < rows_cost < 0.80
