"""`zeor.total`: numbers summed over ranks, exactly and alike on every rank."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import zeor


def test_without_a_process_group_values_come_back_as_plain_numbers():
    assert zeor.total(3) == 3
    found = zeor.total(True, 2.5, torch.tensor(7), torch.tensor([0.5]))
    assert found == (1, 2.5, 7, 0.5)
    assert [type(value) for value in found] == [int, float, int, float]


def several():
    rank = dist.get_rank()
    large = 2**53 + rank  # as float64 the ranks' numbers could not be told apart
    parts = [0.1, 0.2, 0.3, -0.6][rank]
    return zeor.total(large, parts, torch.tensor(rank, dtype=torch.int32), torch.tensor(rank == 2), 1 if rank else 0.5)


def test_integers_and_floats_are_summed_exactly_on_every_rank(ranks):
    found = ranks(several, 4)
    assert all(result == found[0] for result in found)
    large, parts, numbers, flags, mixed = found[0]
    assert large == 4 * 2**53 + 6 and isinstance(large, int)
    assert parts == pytest.approx(0.0, abs=1e-16)
    assert (numbers, flags, mixed) == (6, 1, 3.5)


def on_a_part():
    groups = [dist.new_group([0, 2]), dist.new_group([1])]
    mine = groups[dist.get_rank() % 2]
    return zeor.total(dist.get_rank() + 1, mesh=mine), zeor.total(float("inf"), 1)


def test_a_mesh_limits_who_is_counted(ranks):
    assert ranks(on_a_part, 3) == [(4, (float("inf"), 3)), (2, (float("inf"), 3)), (4, (float("inf"), 3))]


def accuracy():
    """An evaluation whose parts differ in size is exact."""
    rank = dist.get_rank()
    right = torch.arange(10)[: 3 + 4 * rank] % 2 == 0
    correct, count = zeor.total(right.sum(), right.numel())
    return correct, count


def test_an_evaluation_over_unequal_parts_is_exact(ranks):
    assert ranks(accuracy, 2) == [(2 + 4, 3 + 7)] * 2


@pytest.mark.parametrize("value", ["3", torch.ones(2), None])
def test_what_is_no_single_number_is_refused(value):
    with pytest.raises(ValueError, match="adds up single numbers; value 1"):
        zeor.total(1, value)


def unequal():
    try:
        zeor.total(*range(1 + dist.get_rank()))
    except ValueError as error:
        return str(error)


def test_different_numbers_of_values_are_refused_on_every_rank(ranks):
    assert ranks(unequal, 2) == ["zeor.total was given different numbers of values on the ranks: [1, 2]."] * 2
