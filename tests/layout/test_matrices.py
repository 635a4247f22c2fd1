"""What hops of a reduce are given, beside a simulated reduce, and that matrices and the rest tile all parameters."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zeor.layout import Grid, lay_out
from zeor.layout.grid import Span
from zeor.layout.matrices import SHORTENED, inputs, pieces_of, places_of

SHAPES = st.lists(
    st.one_of(
        st.tuples(st.integers(1, 90)),
        st.tuples(st.integers(1, 40), st.integers(1, 40)),
        st.tuples(st.integers(1, 9), st.integers(1, 5), st.integers(1, 5)),
    ),
    min_size=1,
    max_size=5,
)
CUTS = st.sampled_from([frozenset(), frozenset({0}), frozenset({1}), frozenset({0, 1})])


def given_by_hop(grid: Grid, coords: tuple[int, ...], numel: int) -> list[torch.Tensor]:
    """Element numbers, cut as along.Reduces cuts them."""
    found, here = [], torch.arange(numel)
    for hop in grid.hops():
        found.append(here)
        here = here.view(hop.blocks, grid.sizes[hop.axis], -1)[:, coords[hop.axis]].reshape(-1)
    return found


@given(shapes=SHAPES, sizes=st.tuples(st.integers(1, 4), st.integers(1, 3)), cut=CUTS, rank=st.integers(1, 3))
@settings(max_examples=80, deadline=None)
def test_hops_and_their_pieces(shapes, sizes, cut, rank):
    layout, grid = lay_out(shapes, sizes[0] * sizes[1]), Grid.of(sizes, cut)
    owner = torch.full((layout.numel,), -1)
    for param, (begin, numel) in enumerate(zip(layout.offsets, layout.numels, strict=True)):
        owner[begin : begin + numel] = param
    for coords in itertools.product(range(sizes[0]), range(sizes[1])):
        wanted = given_by_hop(grid, coords, layout.numel)
        spans_by_hop = inputs(grid, coords, layout.numel)
        for spans, elements in zip(spans_by_hop, wanted, strict=True):
            assert torch.equal(torch.cat([torch.arange(*span) for span in spans]), elements)
            check_pieces(layout, spans, elements, owner, rank)


def check_pieces(layout, spans, elements, owner, rank) -> None:
    pieces, seen = pieces_of(layout, spans, rank), torch.zeros(len(elements))
    for matrix in pieces.matrices:
        seen[matrix.begin : matrix.end] += 1
        here = elements[matrix.begin : matrix.end]
        [param] = owner[here].unique().tolist()
        assert torch.equal(here, torch.arange(int(here[0]), int(here[0]) + len(here)))
        assert (int(here[0]) - layout.offsets[param]) % matrix.columns == 0
        assert matrix.columns == layout.numels[param] // layout.shapes[param][0]
        assert SHORTENED * rank * (matrix.rows + matrix.columns) <= matrix.rows * matrix.columns
    for span in pieces.beside:
        seen[span.begin : span.end] += 1
    assert torch.equal(seen, (owner[elements] >= 0).float())
    for param, (begin, numel) in enumerate(zip(layout.offsets, layout.numels, strict=True)):
        places = places_of(spans, Span(begin, begin + numel))
        found = torch.cat([torch.arange(*place) for place in places]) if places else torch.arange(0)
        assert torch.equal(found, (owner[elements] == param).nonzero().view(-1))


def test_what_is_factored():
    layout = lay_out([(64, 32), (32,), (3, 4)], 1)
    pieces = pieces_of(layout, [Span(0, layout.numel)], 4)
    assert [(m.rows, m.columns) for m in pieces.matrices] == [(64, 32)]
    assert sorted(span.numel for span in pieces.beside) == [12, 32]
    assert pieces.factor_numels(4) == (4 * 64 + 44, 4 * 32)
