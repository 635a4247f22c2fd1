"""Parking: bytes go to the host and come back, under the same tensors; what fails on the way changes nothing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from zeor.memory.buffers import lasting
from zeor.memory.pages import PAGE_NBYTES, give_back
from zeor.tiers import parking as parkings
from zeor.tiers.parking import Parking

CPU = torch.device("cpu")


def tensors() -> list[Tensor]:
    """Of torch's own memory and of pages, small and large, one a view of another's storage."""
    torch.manual_seed(0)
    own, pages = torch.randn(5000), lasting(3 << 20, torch.bfloat16, CPU).normal_()
    return [own, own[100:200].view(10, 10), pages, torch.tensor(7.0), torch.arange(3), torch.empty(0)]


def test_values_go_and_come_back_under_the_same_tensors():
    held, void = tensors(), torch.ones(9000)
    wanted = [tensor.clone() for tensor in held]
    versions = [tensor._version for tensor in held]
    parking = Parking(CPU, held, [void, held[0]])
    every = sum(tensor.nbytes for tensor in (held[0], *held[2:], void))
    assert parking.device_nbytes == every and parking.host_nbytes >= every - void.nbytes
    parking.copy_out()
    assert all(torch.equal(tensor, value) for tensor, value in zip(held, wanted, strict=True))
    parking.free()
    assert parking.device_nbytes == 0
    assert not any(tensor.any() for tensor in (*held, void)), "nothing of it is left"
    parking.allocate()
    parking.copy_in()
    assert parking.device_nbytes == every
    assert all(torch.equal(tensor, value) for tensor, value in zip(held, wanted, strict=True))
    assert [tensor._version for tensor in held] == versions


def test_host_memory_is_used_again_where_it_is_large_enough():
    first = Parking(CPU, [torch.ones(10_000)])
    first.copy_out()
    host = first.take_host()
    smaller, larger = torch.rand(9_000), torch.rand(20_000)
    for tensor, same in ((smaller, True), (larger, False)):
        wanted, parking = tensor.clone(), Parking(CPU, [tensor])
        parking.copy_out(host)
        parking.free()
        parking.allocate()
        parking.copy_in()
        found = parking.take_host()
        assert torch.equal(tensor, wanted)
        assert (found is host) is same


def test_a_host_without_room_changes_nothing(monkeypatch):
    held = torch.rand(5000)
    wanted = held.clone()

    class Full:
        def __init__(self, pin: bool):
            pass

        def take(self, numel: int, dtype: torch.dtype) -> Tensor:
            raise RuntimeError("Not enough host memory")

    monkeypatch.setattr(parkings, "HostArena", Full)
    parking = Parking(CPU, [held])
    with pytest.raises(RuntimeError, match="Not enough host memory"):
        parking.copy_out()
    assert torch.equal(held, wanted) and parking.here


@pytest.mark.parametrize("numel", [0, 1, 100, PAGE_NBYTES, 3 * PAGE_NBYTES + 5])
def test_pages_are_given_back_to_the_byte(numel):
    around = torch.full((numel + 2 * PAGE_NBYTES + 9,), 3, dtype=torch.uint8)
    begin = 7
    give_back(around[begin : begin + numel])
    assert not around[begin : begin + numel].any()
    assert bool((around[:begin] == 3).all()) and bool((around[begin + numel :] == 3).all())
