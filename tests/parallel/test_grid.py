"""Pipelines, ZeRO and tensor parallelism on one mesh: one process on the joint batch, in float64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import zeor
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


# ---- all three above one: eight ranks


def at_all_stages(folder: str, schedule: str) -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
    """By stage how far norms and values are from those of one process; and the values, which are equal in bits. The
    last of these runs is saved."""
    wanted, their_norms = reference(2, STEPS)
    found: list[tuple[float, float]] = []
    first: dict[str, Tensor] = {}
    for stage in (1, 2, 3):
        run = Run(Grid(2, 2, 2, stage, schedule))
        norms = run.train(*range(STEPS))
        values = run.values()
        far = max(abs(a - b) for a, b in zip(norms, their_norms, strict=True))
        found.append((far, differs(values, wanted)))
        first = first or values
        assert values.keys() == first.keys() and all(torch.equal(values[name], first[name]) for name in values)
    zeor.save(folder, run.model, run.optimizer, step=STEPS)
    return found, first


def loaded(folder: str, grid: Grid) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What a run on another grid loads, and where it is a step later."""
    run = Run(grid)
    assert zeor.load(folder, run.model, run.optimizer).step == STEPS
    there = run.values()
    run.train(STEPS)
    return there, run.values()


@pytest.mark.whole  # eight processes, some of them at each step of a pipeline
@pytest.mark.parametrize("schedule", ["1f1b", "zero bubble"])
def test_two_stages_two_replicas_and_two_tensor_ranks(ranks: Callable, tmp_path: Path, schedule: str) -> None:
    results = zeor.launch(at_all_stages, str(tmp_path), schedule, ranks=8, threads=1, timeout=300)
    saved: dict[str, Tensor] = {}
    for found, values in results:
        assert max(map(max, found)) < 1e-10, found
        for name, value in values.items():
            assert torch.equal(saved.setdefault(name, value), value), "ranks agree about what they share"
    wanted, _ = reference(2, STEPS + 1)
    assert saved.keys() == wanted.keys()
    there, later = ranks(loaded, 2, str(tmp_path), Grid(1, 2, 1, 2))[0]
    assert all(torch.equal(there[name], saved[name]) for name in there)
    assert differs(later, wanted) < 1e-10
    [(alone, _)] = ranks(loaded, 1, str(tmp_path), Grid(1, 1, 1, 3))
    assert all(torch.equal(alone[name], saved[name]) for name in alone)
