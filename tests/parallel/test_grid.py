"""Pipelines, ZeRO and tensor parallelism on one mesh: one process on the joint batch, in float64."""

from __future__ import annotations

from collections.abc import Callable

from tests.parallel.grid import Grid, Run, differs, reference

STEPS = 3


def compared(grids: list[Grid]) -> list[float]:
    found = []
    for grid in grids:
        run = Run(grid)
        norms = run.train(*range(STEPS))
        wanted, their_norms = reference(grid.dp, STEPS, grid.tied)
        norm = max(abs(a - b) for a, b in zip(norms, their_norms, strict=True))
        found.append(max(differs(run.values(), wanted), norm))
    return found


GRIDS = [
    Grid(2, 1, 2, 3), Grid(2, 1, 2, 1, "1f1b", tied=False), Grid(2, 1, 2, 2, "zero bubble"),
    Grid(2, 1, 2, 3, "zbv"), Grid(2, 1, 2, 3, "interleaved", keep="action"), Grid(4, 1, 1, 3, "gpipe", 4),
]  # fmt: skip


def test_parameters_and_norms_are_those_of_one_process(ranks: Callable) -> None:
    for found in ranks(compared, 4, GRIDS):
        assert max(found) < 1e-10, dict(zip(map(str, GRIDS), found))
