"""Transfers by a list all ranks know: everything arrives where it belongs, whatever the pattern, and nothing hangs."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

from zeor.comm.axes import control_axis
from zeor.comm.transfers import Transfer, broadcast_bytes, move


def moved(seed: int, world: int) -> list[tuple[int, bool]]:
    """(key, whether it arrived as it was sent) of what came to this rank, in order."""
    draw = random.Random(seed)
    axis = control_axis(None)
    transfers = []
    for key in range(120):
        source, target = draw.sample(range(world), 2)
        transfers.append(Transfer(source, target, draw.choice([1, 1000, 300_000]), key))
    value = lambda each: torch.randint(
        256, (each.nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(each.key)
    )
    came: list[tuple[int, bool]] = []

    def take(each: Transfer, data: Tensor) -> None:
        came.append((each.key, torch.equal(data, value(each))))

    move(axis, transfers, value, take, "a test")
    expected = [each.key for each in transfers if each.target == axis.rank]
    assert [key for key, _ in came] == expected
    return came


def test_every_transfer_arrives_in_the_order_of_the_list(ranks: Any) -> None:
    for seed, world in ((0, 2), (1, 3), (2, 4)):
        came = [each for rank in ranks(moved, world, seed, world) for each in rank]
        assert len(came) == 120 and all(right for _, right in came)


def sent(source: int, data: bytes) -> bytes:
    axis = control_axis(None)
    return broadcast_bytes(axis, data if axis.rank == source else None, source, "a test")


def test_bytes_are_broadcast_from_any_rank(ranks: Any) -> None:
    for source, data in ((0, b""), (2, b"a manifest")):
        assert ranks(sent, 3, source, data) == [data] * 3
