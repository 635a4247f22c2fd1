"""Gathers and reduces along two axes: what they leave on every rank, in every bit, and what each axis carried.

A reduce's sums are compared with an explicit one in the same order: inside a node in rank order, rounded to the wire's
dtype, then across nodes.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from zeor.comm import along, verbs
from zeor.comm.axes import Axes
from zeor.comm.meshes import make_axes
from zeor.layout import Grid, Span, lay_out
from zeor.memory.buffers import Ledger

SHAPES = ((2, 2), (1, 4), (4, 1))
CUTS = (frozenset(), frozenset({0}), frozenset({1}), frozenset({0, 1}))
DTYPES = (torch.float32, torch.bfloat16, torch.float64)
NUMEL = 40  # of a whole lane, over 4 ranks


def axes_of(shape: tuple[int, int]) -> Axes:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("node", "gpu"))
    return make_axes(mesh, torch.device("cpu"), False, 60.0)


def values(rank: int, dtype: torch.dtype) -> Tensor:
    """Numbers of very different sizes, so that a sum in another order has other bits."""
    source = torch.Generator().manual_seed(rank)
    wide = torch.randn(NUMEL, generator=source, dtype=torch.float64)
    return (wide * 10 ** torch.randint(-3, 4, (NUMEL,), generator=source)).to(dtype)


def summed(parts: list[Tensor], factor: float = 1.0) -> Tensor:
    """In this order, in fp32 at least, rounded once."""
    wide = torch.promote_types(parts[0].dtype, torch.float32)
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = total + part.to(wide)
    return (total * factor).to(parts[0].dtype) if factor != 1.0 else total.to(parts[0].dtype)


def two_hops(axes: Axes, dtype: torch.dtype, factor: float) -> Tensor:
    """The sum of everybody's values as the ranks of the mesh add them: a whole lane."""
    inner, outer = axes.sizes
    at = {coords: rank for rank, coords in enumerate(axes.members)}
    rows = [[values(at[i, a], dtype) for i in range(inner)] for a in range(outer)]
    nodes = [row[0] if inner == 1 else summed(row, factor if outer == 1 else 1.0) for row in rows]
    return nodes[0] if outer == 1 else summed(nodes, factor)


def check_reduces(shape: tuple[int, int]) -> None:
    axes, ledger = axes_of(shape), Ledger()
    for cut in CUTS:
        for dtype in DTYPES:
            grid = Grid.of(axes.sizes, cut)
            span = lay_out([[NUMEL]], dist.get_world_size()).span(grid.stretch(axes.coords, grid.every))
            mine = torch.empty(span.numel, dtype=dtype)
            reduces = along.Reduces(axes, grid, ledger, lambda mine=mine: mine)
            reduces.start(values(dist.get_rank(), dtype), 0.25, "test")
            wanted = two_hops(axes, dtype, 0.25)[span.begin : span.end]
            assert torch.equal(reduces.wait(), wanted), f"{shape} {cut} {dtype}"


@pytest.mark.parametrize("shape", SHAPES)
def test_a_reduce_adds_inside_first_and_then_across(ranks: Callable, shape: tuple[int, int]) -> None:
    ranks(check_reduces, 4, shape)


def check_bytes(shape: tuple[int, int]) -> None:
    axes = axes_of(shape)
    inner, outer = axes.sizes
    nbytes = NUMEL * 4
    for cut in CUTS:
        axes.everyone.traffic.sent_nbytes.clear()
        reduces = along.Reduces(axes, Grid.of(axes.sizes, cut), Ledger(), lambda: torch.empty(NUMEL // 4))
        reduces.start(values(0, torch.float32), 1.0, "test")
        reduces.wait()
        sent = axes.everyone.traffic.sent_nbytes
        assert sent["gpu", "reduce"] == nbytes * (inner - 1) // inner
        assert sent["node", "reduce"] == nbytes // inner * (outer - 1) // outer
        assert sum(sent.values()) == sent["gpu", "reduce"] + sent["node", "reduce"]


@pytest.mark.parametrize("shape", SHAPES)
def test_what_crosses_nodes_is_a_part_of_the_nodes_sum(ranks: Callable, shape: tuple[int, int]) -> None:
    """Of n bytes over I ranks inside and A nodes: n (I-1)/I inside, then (A-1)/A of n/I across."""
    ranks(check_bytes, 4, shape)


def check_gathers(shape: tuple[int, int]) -> None:
    axes = axes_of(shape)
    layout = lay_out([[NUMEL]], dist.get_world_size())
    for cut in CUTS:
        grid = Grid.of(axes.sizes, cut)
        whole = values(99, torch.float32)
        for to in (each for each in CUTS if each <= cut and (cut == frozenset({0, 1}) or not each)):
            if to == frozenset({1}) and axes.sizes.inside > 1:
                continue  # not in one piece, where the update is cut along both
            legs = along.path(axes, grid, layout, cut, to)
            target = layout.span(grid.stretch(axes.coords, to))
            held = layout.span(grid.stretch(axes.coords, cut))
            flat = torch.full((target.numel,), torch.nan)
            mine = held.within(target)
            flat[mine.begin : mine.end] = whole[held.begin : held.end]
            along.gather_into(axes, legs, flat, "test", target.begin)
            assert torch.equal(flat, whole[target.begin : target.end]), f"{shape} from {cut} to {to}"


@pytest.mark.parametrize("shape", SHAPES)
def test_gathers_along_a_path_fill_what_it_widens_to(ranks: Callable, shape: tuple[int, int]) -> None:
    ranks(check_gathers, 4, shape)


def check_started(shape: tuple[int, int]) -> None:
    axes = axes_of(shape)
    layout, grid = lay_out([[NUMEL]], dist.get_world_size()), Grid.of(axes.sizes, frozenset({0, 1}))
    legs = along.path(axes, grid, layout, grid.every)
    assert len(legs) == sum(size > 1 for size in axes.sizes)
    whole, flat = values(99, torch.float32), torch.full((NUMEL,), torch.nan)
    mine = whole[legs[0].source.begin : legs[0].source.end]
    move = along.start_gather(axes, legs, along.parts_of(axes, legs, flat), mine, "test")
    assert move is not None
    move.wait()
    assert torch.equal(flat, whole)
    assert torch.equal(along.all_of(axes, legs, layout, mine.clone(), "test"), whole)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_gather_under_way_goes_on_with_the_next_axis(ranks: Callable, shape: tuple[int, int]) -> None:
    ranks(check_started, 4, shape)


def check_nothing_to_gather() -> None:
    axes = axes_of((1, 2))
    grid = Grid.of(axes.sizes, frozenset())
    layout = lay_out([[NUMEL]], 2)
    assert along.path(axes, grid, layout, frozenset()) == []
    assert along.start_gather(axes, [], [], torch.empty(0), "test") is None
    whole = values(3, torch.float32)
    found = along.all_of(axes, [], layout, whole, "test")
    assert torch.equal(found, whole) and found.data_ptr() != whole.data_ptr()


def test_what_everybody_holds_is_not_gathered(ranks: Callable) -> None:
    ranks(check_nothing_to_gather, 2)


def check_reduce_in_steps() -> None:
    """advance() begins the second hop once the first is over, and buffers go back to the ledger."""
    axes, ledger = axes_of((2, 2)), Ledger()
    grid = Grid.of(axes.sizes, frozenset({0, 1}))
    mine = torch.empty(NUMEL // 4)
    reduces = along.Reduces(axes, grid, ledger, lambda: mine)
    reduces.start(values(dist.get_rank(), torch.float32), 1.0, "test")
    assert not reduces.on_last_hop
    while not reduces.advance(1.0):
        pass
    assert reduces.on_last_hop
    place = grid.place(axes.coords) * NUMEL // 4
    assert torch.equal(reduces.wait(), two_hops(axes, torch.float32, 1.0)[place : place + NUMEL // 4])
    assert ledger.live_nbytes == 0


def test_a_reduce_goes_on_while_somebody_looks(ranks: Callable) -> None:
    ranks(check_reduce_in_steps, 4)


def test_parts_of_a_tensor_that_begins_later() -> None:
    axes = Axes.of_one(verbs.Axis(0, 2, torch.device("cpu")))
    legs = [along.Leg(0, Span(8, 10), Span(8, 12))]
    (parts,) = along.parts_of(axes, legs, torch.arange(4, dtype=torch.float32), 8)
    assert parts.whole.numel() == 16 and len(parts.rows) == 2
