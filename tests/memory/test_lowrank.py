"""The arithmetic of PowerSGD for one matrix, beside numpy-like references in fp64."""

from __future__ import annotations

import pytest
import torch

from zeor.memory.lowrank import begun, make_orthonormal
from zeor.memory.noise import Noise


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("rows, rank", [(5, 1), (40, 4), (300, 8), (4, 4)])
def test_columns_become_orthonormal_and_span_the_same(rows, rank):
    given = drawn(rows, rank)
    given[:, -1] *= 1e-12
    found = given.clone()
    make_orthonormal(found)
    assert torch.allclose(found.T @ found, torch.eye(rank), atol=1e-6)
    assert torch.allclose(found @ (found.T @ given), given, rtol=1e-4, atol=1e-6)


def test_a_column_that_depends_on_others_becomes_zeros():
    given = drawn(50, 4)
    given[:, 2] = given[:, 0] * 3 - given[:, 1]
    make_orthonormal(given)
    assert torch.allclose(given.T @ given, torch.diag(torch.tensor([1.0, 1, 0, 1])), atol=1e-5)
    zeros = torch.zeros(6, 2)
    make_orthonormal(zeros)
    assert not bool(zeros.any())


def test_what_is_not_finite_stays_so():
    for bad in (float("nan"), float("inf")):
        given = drawn(10, 2)
        given[3, 0] = bad
        make_orthonormal(given)
        assert not bool(given.isfinite().all())


def test_columns_that_say_nothing_begin_anew_by_noise():
    q = drawn(30, 4)
    q[:, 1], q[4, 2] = 0.0, float("nan")
    found = begun(q, Noise(3))
    assert torch.allclose(found.norm(dim=0), torch.ones(4), atol=1e-6)
    assert torch.allclose(found[:, [0, 3]], q[:, [0, 3]] / q[:, [0, 3]].norm(dim=0))
    again, other = begun(q, Noise(3)), begun(q, Noise(4))
    assert torch.equal(found, again)
    assert torch.equal(found[:, [0, 3]], other[:, [0, 3]])
    assert not bool((found[:, [1, 2]] == other[:, [1, 2]]).all())


@pytest.mark.parametrize("power", [70, 120])
def test_values_whose_squares_are_more_than_fp32_holds(power):
    given, wanted = drawn(40, 4) * 2.0**power, drawn(40, 4)
    assert torch.equal(begun(given, Noise(3)), begun(wanted, Noise(3)))
    make_orthonormal(given)
    make_orthonormal(wanted)
    assert torch.equal(given, wanted) and bool(given.any())
