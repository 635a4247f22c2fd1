"""Boxes: a range becomes a few contiguous boxes in order, and a tiling covers each element once."""

from __future__ import annotations

import itertools
import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from zeor.layout.boxes import Box, boxes_of_range, intersection, start_of, tile, whole

shapes = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@given(shapes, st.data())
def test_a_range_is_its_boxes_end_to_end(shape: tuple[int, ...], data: st.DataObject) -> None:
    numel = math.prod(shape)
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    values = torch.arange(numel).view(shape)
    boxes = boxes_of_range(shape, start, stop)
    found = [values[box.slices()].reshape(-1) for box in boxes]
    assert torch.equal(torch.cat([torch.arange(0), *found]), torch.arange(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
    for box, part in zip(boxes, found, strict=True):
        assert box.inside(shape) and box.numel == part.numel() and start_of(shape, box) == part[0]


@given(shapes.filter(bool), st.data())
def test_cuts_of_a_tensor_tile_it_and_no_other_set_does(shape: tuple[int, ...], data: st.DataObject) -> None:
    numel = math.prod(shape)
    cuts = sorted({0, numel, *data.draw(st.lists(st.integers(0, numel), max_size=3))})
    boxes = [box for a, b in itertools.pairwise(cuts) for box in boxes_of_range(shape, a, b)]
    assert tile(shape, boxes)
    assert not tile(shape, boxes[1:])
    assert not tile(shape, [*boxes, boxes[0]])
    if len(boxes) > 1 and boxes[0].numel == boxes[1].numel:
        assert not tile(shape, [boxes[0], boxes[0], *boxes[2:]])


@given(shapes.filter(bool), st.data())
def test_an_intersection_holds_what_both_hold(shape: tuple[int, ...], data: st.DataObject) -> None:
    def box() -> Box:
        begin = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
        return Box(begin, tuple(data.draw(st.integers(1, n - b)) for n, b in zip(shape, begin)))

    a, b = box(), box()
    marks = torch.zeros(shape, dtype=torch.int)
    marks[a.slices()] += 1
    marks[b.slices()] += 1
    both = intersection(a, b)
    assert (marks == 2).sum() == (both.numel if both else 0)
    if both:
        assert (marks[both.slices()] == 2).all()
        inner = torch.zeros(a.length)
        inner[both.relative_to(a).slices()] = 1
        assert inner.sum() == both.numel


def test_columns_tile_too() -> None:
    assert tile((4, 6), [Box((0, 0), (4, 2)), Box((0, 2), (4, 4))])
    assert not tile((4, 6), [Box((0, 0), (4, 3)), Box((0, 2), (4, 3))])
    assert tile((), [whole(())]) and not tile((), []) and tile((0, 3), [])
