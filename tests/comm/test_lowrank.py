"""Reduces as two factors: beside plain PyTorch in one process, over several steps, with what is left on every rank."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.comm.test_verbs import mesh_here
from zeor.comm.axes import Axis
from zeor.comm.feedback import Residual
from zeor.comm.lowrank import LEGS, Factored, Reduce
from zeor.layout import Span, lay_out
from zeor.layout.matrices import Pieces, pieces_of
from zeor.memory.buffers import Ledger
from zeor.memory.lowrank import begun, make_orthonormal
from zeor.memory.noise import Noise

RANK, STEPS = 2, 4
SHAPES = [(40, 24), (24,), (3, 3), (17, 30), (5,)]


def gradient(numel: int, rank: int, step: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(100 * rank + step))


def factored(axis: Axis, pieces: Pieces, numel: int) -> Factored:
    residual = Residual((1, axis.size, numel // axis.size), axis.rank, torch.device("cpu"), whole=True)
    return Factored(RANK, pieces, residual, torch.zeros(pieces.factor_numels(RANK)[1]), Ledger(), Noise(9))


def reference(pieces: Pieces, numel: int, world: int) -> tuple[list[Tensor], Tensor]:
    """By step the sum of all ranks; and what is left of each rank."""
    left, sums, last = torch.zeros(world, numel), [], {}
    for step in range(STEPS):
        x = left + torch.stack([gradient(numel, rank, step) for rank in range(world)])
        total = torch.zeros(numel)
        left = torch.zeros(world, numel)
        for span in pieces.beside:
            total[slice(*span)] = x[:, slice(*span)].sum(0)
        for matrix in pieces.matrices:
            here = slice(matrix.begin, matrix.end)
            each = x[:, here].view(world, matrix.rows, matrix.columns)
            q = begun(last.get(matrix, torch.zeros(matrix.columns, RANK)), Noise(9).beyond(matrix.begin))
            p = (each @ q).sum(0)
            make_orthonormal(p)
            qs = each.transpose(1, 2) @ p
            last[matrix] = qs.sum(0)
            total[here] = (p @ last[matrix].T).view(-1)
            left[:, here] = (each - p @ qs.transpose(1, 2)).reshape(world, -1)
        sums.append(total)
    return sums, left


def check(dtype: torch.dtype, by_legs: bool) -> None:
    axis = mesh_here()
    layout = lay_out(SHAPES, axis.size)
    pieces = pieces_of(layout, [Span(0, layout.numel)], RANK)
    assert len(pieces.matrices) == 2
    wanted, left = reference(pieces, layout.numel, axis.size)
    how, part = factored(axis, pieces, layout.numel), layout.slice_numel
    before = axis.observer.traffic.sent_nbytes.copy()
    for step in range(STEPS):
        into = torch.full((part,), 7.0, dtype=dtype)
        given = gradient(layout.numel, axis.rank, step)
        for begin, end in layout.gaps():
            given[begin:end] = 0.0
        move = Reduce(axis, given, how, 0.5, into.detach, 1).start("reduce")
        for _ in range(LEGS if by_legs else 0):
            move.go_on()
        assert move.wait().data_ptr() == move.wait().data_ptr() == into.data_ptr()
        assert how.ledger.live_nbytes == 0
        mine = wanted[step].view(axis.size, -1)[axis.rank] * 0.5
        for begin, end in layout.gaps():
            mine[max(0, begin - part * axis.rank) : max(0, end - part * axis.rank)] = 0.0
        tolerance = 2e-5 if dtype == torch.float32 else 1e-2
        assert torch.allclose(into.float(), mine, rtol=tolerance, atol=tolerance), step
    inside = torch.zeros(layout.numel, dtype=torch.bool)
    for matrix in pieces.matrices:
        inside[matrix.begin : matrix.end] = True
    assert torch.allclose(how.residual.flat[inside], left[axis.rank][inside], rtol=1e-4, atol=1e-4)
    assert not bool(how.residual.flat[~inside].any())
    padded = sum(-(-numel // axis.size) for numel in pieces.factor_numels(RANK))
    sent = axis.observer.traffic.sent_nbytes - before
    assert sent == {("ranks", "reduce"): STEPS * 2 * 4 * padded * (axis.size - 1)}


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("dtype, by_legs", [(torch.float32, False), (torch.float32, True), (torch.bfloat16, True)])
def test_sums_and_what_is_left(ranks, world, dtype, by_legs):
    ranks(check, world, dtype, by_legs)


def recovers(world_rank: int) -> None:
    """One gradient that is not finite on one rank is seen everywhere, and gone with the next."""
    axis = mesh_here()
    layout = lay_out([(40, 24)], axis.size)
    how = factored(axis, pieces_of(layout, [Span(0, layout.numel)], RANK), layout.numel)
    for step, finite in enumerate((True, False, True, True)):
        given = gradient(layout.numel, axis.rank, step)
        if not finite and axis.rank == world_rank:
            given[5] = float("inf")
        found = Reduce(axis, given, how, 1.0, lambda: torch.empty(layout.slice_numel), 1).start("reduce").wait()
        assert bool(found.isfinite().all()) == finite, step
        assert bool(how.residual.flat.isfinite().all())
    assert float(found.norm()) > 1.0


def test_what_is_not_finite_is_forgotten(ranks):
    ranks(recovers, 2, 1)


def sums_of(power: float) -> list[Tensor]:
    axis = mesh_here()
    layout = lay_out([(40, 24)], axis.size)
    how = factored(axis, pieces_of(layout, [Span(0, layout.numel)], RANK), layout.numel)
    found = []
    for step in range(STEPS):
        given = gradient(layout.numel, axis.rank, step) * power
        into = torch.empty(layout.slice_numel)
        found.append(Reduce(axis, given, how, 1.0, into.detach, 1).start("reduce").wait() / power)
    return found


def test_gradients_whose_squares_are_more_than_fp32_holds_are_sent_alike(ranks):
    for small, large in zip(ranks(sums_of, 2, 1.0), ranks(sums_of, 2, 2.0**80), strict=True):
        assert all(torch.equal(a, b) and bool(a.any()) for a, b in zip(small, large, strict=True))


def means_of_halves() -> None:
    """A sum of all ranks may be more than the dtype holds, its mean is not."""
    axis = mesh_here()
    layout = lay_out([(40, 24), (24,)], axis.size)
    how = factored(axis, pieces_of(layout, [Span(0, layout.numel)], RANK), layout.numel)
    given = torch.full((layout.numel,), 40000.0, dtype=torch.float16)
    for begin, end in layout.gaps():
        given[begin:end] = 0.0
    into = torch.empty(layout.slice_numel, dtype=torch.float16)
    Reduce(axis, given.clone(), how, 1 / axis.size, into.detach, 1).start("reduce").wait()
    mine = given.view(axis.size, -1)[axis.rank]
    assert torch.allclose(into.float(), mine.float(), rtol=2e-3)


def test_a_mean_in_fp16_is_finite_where_gradients_are(ranks):
    ranks(means_of_halves, 2)


def test_zeros_and_what_has_less_rank(ranks):
    """Nothing is left of a matrix of rank one, and after zeros factors begin anew."""

    def check() -> None:
        axis = mesh_here()
        layout = lay_out([(40, 24)], axis.size)
        how = factored(axis, pieces_of(layout, [Span(0, layout.numel)], RANK), layout.numel)
        low = torch.outer(gradient(40, 0, 1), gradient(24, 0, 2)).view(-1)
        for given in (torch.zeros(layout.numel), low * (axis.rank + 1)):
            found = Reduce(axis, given, how, 1.0, lambda: torch.empty(layout.slice_numel), 1).start("reduce").wait()
        wanted = (low * sum(range(1, axis.size + 1))).view(axis.size, -1)[axis.rank]
        assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-5)
        assert float(how.residual.flat.abs().max()) < 1e-4

    ranks(check, 2)
