"""Where the local elements of a DTensor lie in the whole parameter: by torch's own placements."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from tests.parity.divided import new_mesh
from zeor.memory.placed import Placed, local_tensor

ONE = [
    ((6, 4), [Shard(0)]), ((5, 4), [Shard(0)]), ((1, 4), [Shard(0)]), ((4, 7), [Shard(1)]), ((9,), [Shard(0)]),
    ((3, 8, 2), [_StridedShard(1, split_factor=2)]), ((4, 8), [_StridedShard(1, split_factor=2)]),
    ((4, 6), [Replicate()]),
]  # fmt: skip
TWO = [
    ((8, 6), [Shard(0), Shard(1)]), ((8, 6), [Shard(0), Shard(0)]), ((8, 6), [Replicate(), Shard(1)]),
    ((7, 5), [Shard(1), Replicate()]),
]  # fmt: skip


def look(sizes: tuple[int, ...], shape: tuple[int, ...], placements: list[Any]) -> tuple[int, ...]:
    mesh = new_mesh(*sizes, names=("ep", "tp")[-len(sizes) :])
    whole = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
    param = nn.Parameter(distribute_tensor(whole, mesh, placements))
    placed, local = Placed("w", param), local_tensor(param).detach()
    assert torch.equal(placed.cut_out(whole), local) and torch.equal(placed.local_of(param.detach()), local)
    flat = local.reshape(-1)
    for start, stop in itertools.combinations(range(flat.numel() + 1), 2):
        boxes = placed.boxes(start, stop)
        assert torch.equal(torch.cat([whole[box.slices()].reshape(-1) for box in boxes]), flat[start:stop])
    assert torch.equal(placed.wrap(local).full_tensor(), whole)
    return tuple(local.shape)


@pytest.mark.parametrize(("shape", "placements"), ONE, ids=str)
def test_boxes_are_the_local_elements_in_order(ranks: Callable, shape: tuple[int, ...], placements: Any) -> None:
    found = ranks(look, 2, (2,), shape, placements)
    assert len(found) == 2 and sum(map(len, found)) == 2 * len(shape)


@pytest.mark.parametrize(("shape", "placements"), TWO, ids=str)
def test_boxes_over_a_mesh_of_two_dimensions(ranks: Callable, shape: tuple[int, ...], placements: Any) -> None:
    assert len(ranks(look, 4, (2, 2), shape, placements)) == 4


def taken(mine: Any, given: Any) -> tuple[torch.Tensor, tuple[int, ...], torch.Tensor]:
    mesh = new_mesh(2, names=("tp",))
    whole = torch.arange(12.0).view(4, 3)
    param = nn.Parameter(distribute_tensor(torch.zeros(4, 3), mesh, [mine]))
    if given.is_partial():
        grad = DTensor.from_local(whole / 2, mesh, [given], run_check=False)  # parts that add up to it
    else:
        grad = distribute_tensor(whole, mesh, [given])
    local, partial = Placed("w", param).take(grad)
    return local, partial, distribute_tensor(whole, mesh, [mine]).to_local()


@pytest.mark.parametrize("given", [Shard(0), Shard(1), Replicate(), Partial()], ids=str)
@pytest.mark.parametrize("mine", [Shard(0), Shard(1), Replicate()], ids=str)
def test_a_gradient_of_any_placement_becomes_this_ranks_part(ranks: Callable, mine: Any, given: Any) -> None:
    """A partial one of a replicated parameter stays so: it is summed once per step."""
    for local, partial, wanted in ranks(taken, 2, mine, given):
        stays = mine.is_replicate() and given.is_partial()
        assert partial == ((0,) if stays else ())
        assert torch.equal(local * (2 if stays else 1), wanted)


def refused() -> str:
    mesh = new_mesh(2, names=("tp",))
    with pytest.raises(TypeError) as error:
        Placed("w", nn.Parameter(DTensor.from_local(torch.zeros(3), mesh, [Partial()], run_check=False)))
    return str(error.value)


def test_a_partial_parameter_is_refused(ranks: Callable) -> None:
    for text in ranks(refused, 2):
        assert "'w' is a DTensor that is" in text and "mesh dimension 'tp'" in text and "redistribute it" in text
